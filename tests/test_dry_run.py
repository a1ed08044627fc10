"""dry_run.py: what it counts is what real ranks send and hold; its errors; what it predicts."""

import json
from collections import Counter

import pytest
from conftest import RUNGS, STRATEGIES, launch, run_forked
from test_bert import TINY

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


QUICK = [("fsdp", "bert", 2), ("zero2", "mnist", 2)]
CASES = [(name, script, ranks) for name in YAMLS for script in SCRIPTS for ranks in (2, 4)]


@pytest.mark.parametrize(
    "strategy, script, ranks",
    [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES],
)
def test_a_dry_run_counts_what_real_ranks_send_and_hold(strategy, script, ranks, tmp_path):
    """Over gloo. Every call of steps 3 to 5, with group and bytes; and each tensor that is held."""
    script = [*SCRIPTS[script], "--gradient_accumulation_steps", "2"]
    options = SIZES if (strategy, ranks) == ("hsdp", 2) else []
    spy = {"SPY_CALLS": str(tmp_path), "SPY_DIR": str(tmp_path), "SPY_BYTES": "1"}
    launch(
        strategy,
        script[0],
        tmp_path / "run",
        *script[1:],
        "--max_train_steps",
        6,
        processes=ranks,
        env=spy,
        launcher=options,
    )
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
