"""docs/reference/troubleshooting.md: each script shows its symptom, and with --fix the cure."""

import pytest
from conftest import run_forked

pytestmark = pytest.mark.slow
FOLDER = "docs/reference/troubleshooting"
SHOWN = {  # a script: its YAML, what it prints, and what it prints with --fix
    "alone.py": ("ddp", "process 0 of 1; the launcher started 2", "process 1 of 2; the"),
    "fsdp_lstm.py": ("fsdp", "the loss does not change", "the loss falls"),
    "fsdp_new_head.py": ("fsdp", "1: its part of the head stayed", "1: its part of the head was"),
    "half_checkpoint.py": ("ddp", "PytorchStreamReader failed", "from step_1 resumed"),
    "hang_rank_0.py": ("ddp", "Timed out waiting 5000ms", "mean loss 1.5"),
    "hang_uneven.py": ("ddp", "Timed out waiting 5000ms", "the epoch is over"),
    "lr_times_n.py": ("ddp", "[1.0, 0.5, 0.0, 0.0]", "[1.0, 0.75, 0.5, 0.25]"),
    "uneven_evaluation.py": ("ddp", "12 samples of 10, twice: [0, 1]", "samples of 10, twice: []"),
    "zero3_save.py": ("zero3", "weight: [0]", "weight: [100, 400]"),
    "zero_accumulation.py": ("zero3", "8 optimizer steps", "2 optimizer steps"),
    "zero_clips.py": ("zero3", "moved the weights by 1.0", "moved the weights by 10.0"),
}


def printed(name, yaml, *flags):
    """What all ranks print, with the error that ends them."""
    config = f"{FOLDER if yaml == 'zero3' else 'accelerate_configs'}/{yaml}.yaml"
    result = run_forked(["--config_file", config], [f"{FOLDER}/{name}", *flags])
    return " ".join((result.out + result.err).split())


@pytest.mark.parametrize("name", SHOWN)
def test_symptom_and_fix(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yaml, wrong, fixed = SHOWN[name]
    before, after = printed(name, yaml), printed(name, yaml, "--fix")
    assert wrong in before and wrong not in after
    assert fixed in after and fixed not in before
    assert name != "alone.py" or before.count(wrong) == 2, "each process prints it"
