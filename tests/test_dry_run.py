"""dry_run.py: what it counts is what real ranks send and hold; its errors; what it predicts."""

import json
import runpy
import sys
from collections import Counter

import pytest
from conftest import ROOT, RUNGS, STRATEGIES, launch, run, run_forked
from test_bert import TINY

from planning import counting, facts, links, memory, prediction, traffic

YAMLS = [*STRATEGIES, *RUNGS, "hsdp"]
SCRIPTS = {
    "mnist": ["train_mnist_rnn.py", "--dataset", "digits", "--per_device_train_batch_size", "8"],
    "bert": ["train_bert_squad.py", *TINY, "--per_device_train_batch_size", "2"],
}
SIZES = ["--parallelism_config_dp_replicate_size", "1"]  # HSDP of two ranks has one replica


def dry_run(*words, folder=None, ok=True):
    """The Result of the tool, in a process that imports nothing, and what it wrote down."""
    plain = ["--config_file", "accelerate_configs/baseline.yaml"]
    result = run_forked(plain, ["dry_run.py", *map(str, words)], folder, {}, 240)
    assert (result.code == 0) == ok, result.out + result.err
    return result


def count(folder, ranks, strategy, script, options=(), first=()):
    """The dry_run.json of one rank of so many."""
    words = [*first, ranks, f"accelerate_configs/{strategy}.yaml", *options, *script]
    dry_run(*words, "--output_dir", folder)
    return json.loads((folder / "dry_run.json").read_text())


def by_kind(calls):
    """{(kind, ranks of the group): [calls, bytes]} of (kind, ranks, bytes), without single numbers
    and DDP's broadcast of buffers, which the formulas leave out.
    """
    found = {}
    for kind, ranks, size in calls:
        if kind != "broadcast" and size > 8:
            entry = found.setdefault((kind, ranks), [0, 0])
            entry[0] += 1
            entry[1] += size
    return found


def by_formula(strategy, row, devices, *rest):
    """The same, by planning/traffic."""
    steps = traffic.steps_of(strategy, traffic.parts_of(row), devices, *rest)
    calls = traffic.calls_of(steps)
    return by_kind((call.name, call.ranks or devices, call.bytes) for call in calls)


CASES = [(name, script, ranks, "no") for name in YAMLS for script in SCRIPTS for ranks in (2, 4)]
CASES += [("fsdp", "bert", 2, "bf16"), ("zero3", "bert", 2, "bf16")]
QUICK = [("fsdp", "bert", 2, "no"), ("zero2", "mnist", 2, "no")]


@pytest.mark.parametrize(
    "strategy, script, ranks, precision",
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_dry_run_counts_what_real_ranks_send_and_hold(
    strategy, script, ranks, precision, tmp_path
):
    """Over gloo: each call of steps 3 to 5, with group and bytes, and each tensor that is held. And
    the formula says the same.
    """
    script = [*SCRIPTS[script], "--gradient_accumulation_steps", "2"]
    options = ["--mixed_precision", precision]
    options += SIZES if (strategy, ranks) == ("hsdp", 2) else []
    spy = {"SPY_CALLS": str(tmp_path), "SPY_DIR": str(tmp_path), "SPY_BYTES": "1"}
    words = [strategy, script[0], tmp_path / "run", *script[1:], "--max_train_steps", 6]
    record = launch(*words, processes=ranks, env=spy, launcher=options).record
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
    assert dry["micro_batches"] == 2 and not (tmp_path / "dry" / "run.json").exists()

    row = dict.fromkeys([*facts.ARCHITECTURE, "tensors"]) | record | record["workload"]
    expected = by_formula(strategy, row, ranks, 2, precision, record["strategy_options"])
    for (kind, group), (number, size) in expected.items():
        found = counted.pop((kind, group))
        assert found["calls"] - number in more_gathers(strategy)
        assert found["bytes"] == pytest.approx(size, rel=0.01)
    assert all(row["bytes"] <= 8 or row["kind"] == "broadcast" for row in counted.values())


def more_gathers(strategy):
    """ZeRO-3 now and then makes two gathers out of one, which no formula knows (docs/scale.md)."""
    return (0, 1) if strategy.startswith("zero3") else (0,)


def assert_near(counted, expected, strategy):
    """Equal, but for those gathers."""
    assert counted.keys() == expected.keys()
    for key, (calls, size) in expected.items():
        assert counted[key][0] - calls in more_gathers(strategy), key
        assert counted[key][1] == pytest.approx(size), key


GAPS = {("zero3", "parameters"): 1.46 / 0.85, ("zero2", "gradients"): 94 / 0.85}
SCALE = runpy.run_path(str(ROOT / "docs" / "img" / "draw_scale.py"))


@pytest.mark.parametrize(
    "cell", json.loads(SCALE["COUNTS"].read_text()), ids=lambda it: it["strategy"]
)
def test_the_formulas_count_what_dry_runs_of_512_ranks_counted(cell):
    """BERT-base, by docs/img/draw_scale.py --count."""
    expected = by_kind(SCALE["calls_by_formula"](cell["strategy"], cell["devices"]))
    counted = {
        (row["kind"], row["group_size"]): [row["calls"], row["bytes"]]
        for row in cell["collectives"]
        if row["bytes"] > 8 and row["kind"] != "broadcast"
    }
    assert cell["devices"] == 512
    assert_near(counted, expected, cell["strategy"])
    shards, held = {"hsdp": 8}.get(cell["strategy"], 512), cell["held_bytes"]
    formula = memory.bytes_of_parts(cell["strategy"].split(",")[0], cell["parameters"], shards)
    held["states"] += held["master_copy"]
    for part in ("parameters", "gradients", "states"):  # The gaps are those of docs/scale.md.
        more = GAPS.get((cell["strategy"][:5], part), 1.18 if cell["strategy"] == "fsdp" else 1)
        assert held[part] / formula[part] == pytest.approx(more, rel=0.005), part


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
@pytest.mark.slow
def test_the_formulas_count_what_dry_runs_count(strategy, ranks, tmp_path):
    """With the tiny BERT, whose tensors are smaller than 512 ranks."""
    script = [*SCRIPTS["bert"], "--max_seq_length", 48, "--doc_stride", 4]
    script += ["--per_device_train_batch_size", 1]
    options = ["--nodes", ranks // 4] if strategy == "hsdp" else []
    dry = count(tmp_path, ranks, strategy, script, first=options)
    row = {"layers": 2, "hidden_size": 128, "intermediate_size": 256, "positions": 512}
    row |= {"tensors": None, "parameters": dry["parameters"]}
    settings = {"dp_shard_size": 4} if strategy == "hsdp" else SCALE["options_of"](strategy)
    expected = by_formula(strategy, row, ranks, 1, "no", settings)
    counted = by_kind(
        (row["kind"], row["group_size"], row["bytes"] / row["calls"])
        for row in dry["collectives"]
        for _ in range(row["calls"])
    )
    assert_near(counted, expected, strategy)


def test_the_page_has_what_the_script_prints_and_draws(tmp_path):
    done = run([sys.executable, "docs/img/draw_scale.py", tmp_path])
    assert done.out.strip() in (ROOT / "docs" / "scale.md").read_text()
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (ROOT / "docs" / "img" / drawn.name).read_text()


def test_seconds_and_a_step_are_predicted(tmp_path):
    """Two levels with a link each: HSDP's all-gathers go inside a node. What is printed is there
    too, and nothing else is in the folder.
    """
    slow, fast = links.link_of(1e6, 0.5), links.link_of(1e9, 0)
    rows = [
        {"kind": "all_gather", "group_size": 2, "nodes": 1, "calls": 2, "bytes": 2e9},
        {"kind": "all_reduce", "group_size": 2, "nodes": 2, "calls": 4, "bytes": 1e6},
    ]
    seconds = links.seconds_of_rows(rows, [slow, fast | {"nodes": 1}])
    assert seconds == pytest.approx({"inside": 1.0, "between": 4 * 0.5 + 1})
    assert prediction.scale_by_count(2.0, 3.0) == [(3.0, 2 / 3), (5.0, 0.4)]
    record = {"devices": 1, "status": "completed", "steps": 4, "parameters": 375_298}
    record |= {"seconds": {"train": 8.0}, "samples_per_second": None, "global_batch_size": 2}
    (tmp_path / "run.json").write_text(json.dumps(record))
    link = ["--bandwidth", 1, "--latency", 10, "--baseline", tmp_path / "run.json"]
    wrong = dry_run(*link, 2, YAML, *SCRIPTS["mnist"], "--output_dir", tmp_path / "dry", ok=False)
    assert "other work: its parameters is 375298, and here it is 19594" in wrong.error_line()
    dry = count(tmp_path / "dry", 4, "hsdp", SCRIPTS["bert"], first=["--nodes", 2, *link])
    assert {row["nodes"] for row in dry["collectives"]} == {1, 2}
    hidden, shown = dry["predicted"]["step_seconds"]
    both = dry["communication_seconds"]
    assert hidden == 2.0 and shown == pytest.approx(2 + both["inside"] + both["between"])
    assert [path.name for path in (tmp_path / "dry").iterdir()] == ["dry_run.json"]


YAML = "accelerate_configs/ddp.yaml"
WRONG = {
    "N has to be 2 or more, got 1": (1, YAML, "x.py"),
    "invalid int value: 'two'": ("two", YAML, "x.py"),
    "there is no nowhere.yaml": (2, "nowhere.yaml", "x.py"),
    "there is no script x.py": (2, YAML, "x.py"),
    "baseline.yaml is for one process": (2, "accelerate_configs/baseline.yaml", "report.py"),
    "--nodes 3 does not divide 4 ranks": ("--nodes", 3, 4, YAML, "report.py"),
    "whose product is 8": (8, "accelerate_configs/hsdp.yaml", "report.py"),
    "--bandwidth and --latency": ("--latency", 1, 2, YAML, "report.py"),
    "README.md is no check.json": ("--check", "README.md", 2, YAML, "report.py"),
    "Makefile:": (2, "Makefile", "report.py"),
    "after 0 training steps": (2, YAML, "tests/warm_imports.py"),
    "the global batch of 19998": (2, YAML, *SCRIPTS["mnist"][:-1], 9999),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_one_line(words):
    assert words in dry_run(*WRONG[words], ok=False).error_line()


def test_a_collective_that_cannot_be_counted_is_an_error():
    group = counting.CountingGroup(0, [0, 1], counting.Tally(1))
    with pytest.raises(NotImplementedError, match="cannot count the collective scatter"):
        group.scatter([], [])
