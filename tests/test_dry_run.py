"""dry_run.py: what it counts is what real ranks send and hold; its errors."""

import json

import pytest
import torch
import torch.distributed as dist
from conftest import BASELINE, ROOT, RUNGS, STRATEGIES, launch, run_forked
from test_bert import TINY
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed import distributed_c10d

from memory import formulas
from watching import collectives

YAMLS = [*STRATEGIES, *RUNGS, "hsdp"]
FEW = "--per_device_train_batch_size 2 --max_eval_samples 4".split()
SCRIPTS = {
    "mnist": ["train_mnist_rnn.py", "--dataset", "digits", "--per_device_train_batch_size", "8"],
    "bert": ["train_bert_squad.py", *TINY, *FEW],
}
OURS = ["--batch_flag", "per_device_train_batch_size=16"]
SIZES = ["--parallelism_config_dp_replicate_size", "1"]  # HSDP of two ranks has one replica


def dry_run(*words, folder=None, ok=True):
    """The Result of the tool, in a process that imports nothing, and what it wrote down."""
    result = run_forked(BASELINE, ["tools/dry_run.py", *map(str, words)], folder)
    assert (result.code == 0) == ok, result.out + result.err
    return result


def count(folder, ranks, strategy, script, options=(), first=()):
    """The dry_run.json of one rank among `ranks`."""
    words = [*first, ranks, f"accelerate_configs/{strategy}.yaml", *options, *script]
    dry_run(*words, "--output_dir", folder)
    return json.loads((folder / "dry_run.json").read_text())


CASES = [(name, "bert", 2, "no") for name in YAMLS]
CASES += [(name, "mnist", 4, "no") for name in (*STRATEGIES, "hsdp")]
CASES += [("fsdp", "bert", 2, "bf16"), ("hsdp", "bert", 4, "no")]
QUICK = [("fsdp", "bert", 2, "no")]


@pytest.mark.parametrize(
    "strategy, script, ranks, precision",
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_dry_run_counts_what_real_ranks_send_and_hold(
    strategy, script, ranks, precision, tmp_path
):
    """Over gloo: each call of steps 3 to 5, with group and bytes, and each tensor that is held."""
    script = [*SCRIPTS[script], "--gradient_accumulation_steps", "2"]
    options = ["--mixed_precision", precision]
    options += SIZES if (strategy, ranks) == ("hsdp", 2) else []
    spy = {"SPY_CALLS": str(tmp_path), "SPY_DIR": str(tmp_path), "SPY_BYTES": "1"}
    words = [strategy, script[0], tmp_path / "run", *script[1:], "--max_train_steps", 5]
    launch(*words, processes=ranks, env=spy, launcher=options)
    dry = count(tmp_path / "dry", ranks, strategy, script, options=options)
    steps = [
        row | {name: row[name] / 3 for name in ("calls", "bytes")}
        for row in json.loads((tmp_path / "calls_0.json").read_text())
    ]
    assert [row | {"nodes": row["group_size"]} for row in dry["collectives"]] == steps
    held = json.loads((tmp_path / "bytes_0.json").read_text())
    assert dry["parameters"] == sum(held.pop("sizes")) and dry["held_bytes"] == held
    if script[0] == "train_bert_squad.py" and strategy != "hsdp":
        formula = formulas.bytes_of_parts(strategy, dry["parameters"], ranks, precision)
        assert sum(held.values()) == pytest.approx(sum(formula.values()), rel=0.06)
    assert dry["micro_batches"] == 2 and not (tmp_path / "dry" / "run.json").exists()


@pytest.mark.parametrize("tool", ["dry_run", pytest.param("verify", marks=pytest.mark.slow)])
def test_a_script_in_another_folder_gets_its_own_modules(tool, tmp_path):
    """Also those with the names of folders in tools/. The YAML of ZeRO finds its JSON, and nothing
    is compiled.
    """
    for name in ("common", "memory", "watching"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    imports = "import common, memory, watching\nassert common.OWN and memory.OWN and watching.OWN\n"
    text = (ROOT / SCRIPTS["mnist"][0]).read_text()
    (tmp_path / "mine.py").write_text(
        text.replace("import argparse\n", f"import argparse\n{imports}")
    )
    yaml = f"{ROOT}/accelerate_configs/zero2.yaml"
    words = {"dry_run": ["2", yaml], "verify": ["--steps", "3", *OURS, "--yaml", yaml]}[tool]
    argv = [f"{ROOT}/tools/{tool}.py", *words, "mine.py", "--dataset", "digits"]
    config, env = f"{ROOT}/{BASELINE[1]}", {"TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
    done = run_forked(["--config_file", config], argv, env=env, root=tmp_path, alone=True)
    assert done.code == 0 and (tmp_path / "runs").is_dir(), done.out + done.err
    assert not (tmp_path / "compiled").exists()


def test_a_script_that_knows_nothing_of_this_project_is_one_of_many_ranks(tmp_path, monkeypatch):
    """Accelerate alone would make it the only rank. It does not know --max_train_steps."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "mine.py"
    text = (ROOT / "tests" / "data" / "verify" / "right.py").read_text()
    script.write_text(text)
    yaml = f"{ROOT}/accelerate_configs/ddp.yaml"
    argv = [f"{ROOT}/tools/dry_run.py", "8", yaml, "mine.py"]
    done = run_forked(["--config_file", f"{ROOT}/{BASELINE[1]}"], argv, root=tmp_path)
    assert done.code == 0, done.out + done.err
    dry = json.loads((tmp_path / "runs" / "dry_run-ddp-8" / "dry_run.json").read_text())
    [row] = [row for row in dry["collectives"] if row["kind"] == "all_reduce"]
    assert (row["group_size"], row["calls"], row["bytes"]) == (8, 1, 4 * dry["parameters"])


def test_hsdp_counts_inside_nodes_and_between_them(tmp_path):
    """A replica on each of four nodes, not two as in the YAML. The folder holds only the record."""
    dry = count(tmp_path / "dry", 8, "hsdp", SCRIPTS["bert"], first=["--nodes", 4])
    levels = {(row["kind"], row["nodes"]) for row in dry["collectives"]}
    assert levels >= {("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 4)}
    assert ("all_gather", 4) not in levels
    assert [path.name for path in (tmp_path / "dry").iterdir()] == ["dry_run.json"]


def test_the_peak_is_what_tensors_need_and_grows_with_the_batch(tmp_path):
    """A tiny LSTM. Each of 8 rows of an image keeps gates and states: 6 x 64 numbers at least."""
    peaks = {}
    for batch in (1, 8, 256):
        dry = count(tmp_path / str(batch), 2, "ddp", [*SCRIPTS["mnist"][:-1], batch])
        peaks[batch] = dry["peak_bytes"] - sum(dry["held_bytes"].values())
    image, least = (peaks[256] - peaks[8]) / 248, 8 * 6 * 64 * 4
    assert 0 < peaks[1] < peaks[8] < 10e6 and least < image < 10 * least
    assert peaks[8] - peaks[1] == pytest.approx(7 * image, rel=0.2)


YAML = "accelerate_configs/ddp.yaml"
LSTM = SCRIPTS["mnist"][0]
WRONG = {
    "ddp.yaml on one rank sends nothing": (1, YAML, LSTM),
    "baseline.yaml on one rank sends nothing": (2, BASELINE[1], LSTM),
    "--nodes 3 does not divide 4 ranks": ("--nodes", 3, 4, YAML, LSTM),
    "Makefile: accelerate launch cannot start this": (2, "Makefile", LSTM),
    "ddp.py calls init_process_group: this": (2, YAML, "tests/data/verify/ddp.py"),
    "single.py makes no Accelerator: this counts": (2, YAML, "docs/lab/single.py"),
    "the global batch (19998) is larger": (2, YAML, *SCRIPTS["mnist"][:-1], 9999),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line(words):
    assert words in dry_run(*WRONG[words], ok=False).error_line()


def test_each_collective_counts_with_the_bytes_of_its_whole_tensor(monkeypatch):
    """On rank 0 of 4, on two nodes. One that the tool does not know counts under torch's name."""
    monkeypatch.setattr(dist, "init_process_group", dist.init_process_group)
    monkeypatch.setattr(distributed_c10d, "init_process_group", distributed_c10d.init_process_group)
    collectives.connect_to_nobody(4)
    dist.init_process_group()
    try:
        pair = dist.new_group([0, 1])
        part, whole = torch.ones(3), torch.ones(12)
        with collectives.Tally(per_node=2) as tally:
            dist.all_reduce(part)
            dist.all_reduce(part, group=pair)
            dist.all_gather([torch.ones(3) for _ in range(4)], part)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.broadcast(part, 0)
            dist.reduce(part, 0)
            dist.barrier()
            dist.all_to_all_single(whole, whole.clone())
            functional_collectives.all_reduce(part, "sum", pair).sum()
    finally:
        dist.destroy_process_group()
    assert tally.found == {
        ("all_reduce", 4, 2): [1, 12],
        ("all_reduce", 2, 1): [2, 24],
        ("all_gather", 4, 2): [2, 96],
        ("reduce_scatter", 4, 2): [1, 48],
        ("broadcast", 4, 2): [1, 12],
        ("reduce", 4, 2): [1, 12],
        ("barrier", 4, 2): [1, 0],
        ("alltoall_base", 4, 2): [1, 48],
    }
