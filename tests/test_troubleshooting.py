"""docs/reference/troubleshooting.py shows each symptom, and with --fix the cure."""

import pytest
from conftest import run_forked

pytestmark = pytest.mark.slow
ZERO3 = "--use_deepspeed --zero_stage 3 --zero3_save_16bit_model true --num_processes 2".split()
SHOWN = {  # a symptom: its strategy, what it prints, and what it prints with --fix
    "alone": ("ddp", "process 0 of 1; the launcher started 2", "process 1 of 2; the"),
    "fsdp_lstm": ("fsdp", "the loss does not change", "the loss falls"),
    "fsdp_new_head": ("fsdp", "1: its part of the head stayed", "1: its part of the head was"),
    "half_checkpoint": ("ddp", "PytorchStreamReader failed", "from step_1 resumed"),
    "hang_rank_0": ("ddp", "Timed out waiting 5000ms", "mean loss 1.5"),
    "hang_uneven": ("ddp", "Timed out waiting 5000ms", "the epoch is over"),
    "lr_times_n": ("ddp", "[1.0, 0.5, 0.0, 0.0]", "[1.0, 0.75, 0.5, 0.25]"),
    "uneven_evaluation": ("ddp", "12 samples of 10, twice: [0, 1]", "samples of 10, twice: []"),
    "zero3_save": ("zero3", "weight: [0]", "weight: [100, 400]"),
    "zero_accumulation": ("zero3", "8 optimizer steps", "2 optimizer steps"),
    "zero_clips": ("zero3", "moved the weights by 1.0", "moved the weights by 10.0"),
}


def printed(name, strategy, *flags):
    """What all ranks print, with the error that ends them."""
    yaml = ["--config_file", f"accelerate_configs/{strategy}.yaml"]
    words = ZERO3 if strategy == "zero3" else yaml
    result = run_forked(words, ["docs/reference/troubleshooting.py", name, *flags])
    return " ".join((result.out + result.err).split())


@pytest.mark.parametrize("name", SHOWN)
def test_symptom_and_fix(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    strategy, wrong, fixed = SHOWN[name]
    before, after = printed(name, strategy), printed(name, strategy, "--fix")
    assert wrong in before and wrong not in after
    assert fixed in after and fixed not in before
    assert name != "alone" or before.count(wrong) == 2, "each process prints it"
