"""dry_run.py: what it counts is what real ranks send and hold; its errors; what it predicts."""

import json
from collections import Counter

import pytest
from conftest import RUNGS, STRATEGIES, launch, run_forked
from test_bert import TINY

from planning import facts, traffic

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


def count(folder, ranks, strategy, script, *flags, options=()):
    """The dry_run.json of one rank of so many."""
    words = [ranks, f"accelerate_configs/{strategy}.yaml", *options, *script, *flags]
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
        assert found["calls"] == number and found["bytes"] == pytest.approx(size, rel=0.01)
    assert all(row["bytes"] <= 8 or row["kind"] == "broadcast" for row in counted.values())
