"""dry_run.py: what it counts is what real ranks send and hold; its errors."""

import json
from collections import Counter

import pytest
import torch
from conftest import BASELINE, RUNGS, STRATEGIES, launch, run_forked
from test_bert import TINY

from planning import counting, memory

YAMLS = [*STRATEGIES, *RUNGS, "hsdp"]
FEW = "--per_device_train_batch_size 2 --max_eval_samples 4".split()
SCRIPTS = {
    "mnist": ["train_mnist_rnn.py", "--dataset", "digits", "--per_device_train_batch_size", "8"],
    "bert": ["train_bert_squad.py", *TINY, *FEW],
}
SIZES = ["--parallelism_config_dp_replicate_size", "1"]  # HSDP of two ranks has one replica


def dry_run(*words, folder=None, ok=True):
    """The Result of the tool, in a process that imports nothing, and what it wrote down."""
    result = run_forked(BASELINE, ["dry_run.py", *map(str, words)], folder)
    assert (result.code == 0) == ok, result.out + result.err
    return result


def count(folder, ranks, strategy, script, options=(), first=()):
    """The dry_run.json of one rank among `ranks`."""
    words = [*first, ranks, f"accelerate_configs/{strategy}.yaml", *options, *script]
    dry_run(*words, "--output_dir", folder)
    return json.loads((folder / "dry_run.json").read_text())


CASES = [(name, *case) for name in YAMLS for case in (("bert", 2, "no"), ("mnist", 4, "no"))]
CASES += [("fsdp", "bert", 2, "bf16"), ("hsdp", "bert", 4, "no")]
QUICK = [("fsdp", "bert", 2, "no"), ("zero2", "mnist", 4, "no")]


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
    calls, sizes = Counter(), Counter()
    for kind, group, size in json.loads((tmp_path / "calls_0.json").read_text()):
        calls[kind, group] += 1 / 3
        sizes[kind, group] += size / 3
    counted = {(row["kind"], row["group_size"]): row for row in dry["collectives"]}
    assert {key: row["calls"] for key, row in counted.items()} == pytest.approx(dict(calls))
    assert {key: row["bytes"] for key, row in counted.items()} == pytest.approx(dict(sizes))
    held = json.loads((tmp_path / "bytes_0.json").read_text())
    assert dry["parameters"] == sum(held.pop("sizes")) and dry["held_bytes"] == held
    if script[0] == "train_bert_squad.py" and strategy != "hsdp":
        formula = memory.bytes_of_parts(strategy, dry["parameters"], ranks, precision)
        assert sum(held.values()) == pytest.approx(sum(formula.values()), rel=0.06)
    assert dry["micro_batches"] == 2 and not (tmp_path / "dry" / "run.json").exists()


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
WRONG = {
    "ddp.yaml on one rank sends nothing": (1, YAML, "report.py"),
    "baseline.yaml on one rank sends nothing": (2, "accelerate_configs/baseline.yaml", "report.py"),
    "--nodes 3 does not divide 4 ranks": ("--nodes", 3, 4, YAML, "report.py"),
    "Makefile: accelerate launch cannot start this": (2, "Makefile", "report.py"),
    "the global batch (19998) is larger": (2, YAML, *SCRIPTS["mnist"][:-1], 9999),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line(words):
    assert words in dry_run(*WRONG[words], ok=False).error_line()


def test_a_collective_that_cannot_be_counted_is_an_error():
    group = counting.CountingGroup(0, [0, 1], counting.Tally(1))
    with pytest.raises(RuntimeError, match="No backend type"):
        group.scatter([torch.ones(1)], [[torch.ones(1)] * 2])
