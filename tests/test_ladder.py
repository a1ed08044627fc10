"""The other YAMLs, with BERT: clipping, and HSDP. test_pages.py has the page of the ladder."""

import json
import shutil

import pytest
from conftest import launch
from test_bert import NO_GRADIENT, SCRIPT, STEPS, flags, predictions
from torch.testing import assert_close

CLIPPED = ["--max_grad_norm", 1.0, "--checkpointing_steps", 5]
HSDP_SIZES = ("dp_replicate_size", "dp_shard_size")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    return launch("baseline", SCRIPT, folder, *flags(16), *CLIPPED)


@pytest.mark.parametrize("name", ["zero1", "fsdp_keep", "zero3_offload", "hsdp"])
def test_clipping_is_the_same_under_every_strategy(name, baseline, tmp_path):
    """The first three accumulate and checkpoint activations besides."""
    more = flags(4) if name == "hsdp" else [*flags(4, 2), "--activation_checkpointing"]
    result = launch(name, SCRIPT, tmp_path, *more, *CLIPPED)
    assert result.losses == pytest.approx(baseline.losses, rel=1e-5) and len(result.losses) == STEPS
    for weight in baseline.weights:
        if not NO_GRADIENT.search(weight):
            assert_close(result.weights[weight], baseline.weights[weight], rtol=1e-3, atol=1e-4)
    assert predictions(result) == predictions(baseline)


def test_hsdp_resumes_on_the_same_sizes_only(tmp_path):
    """Four ranks as 2 x 2. The record tells it from FSDP."""
    folder = tmp_path / "run"
    stopped = launch("hsdp", SCRIPT, folder, *flags(4), *CLIPPED)
    sizes = {name: stopped.record["strategy_options"][name] for name in HSDP_SIZES}
    assert stopped.record["strategy"] == "hsdp" and set(sizes.values()) == {"2"}
    (folder / "run.json").write_text(json.dumps(stopped.record | {"status": "running"}))
    shutil.rmtree(sorted((folder / "checkpoints").glob("step_*"))[-1])
    one = ["--parallelism_config_dp_replicate_size", "1"]
    words = ["hsdp", SCRIPT, folder, *CLIPPED, "--resume"]
    line = launch(*words, *flags(8), processes=2, launcher=one, ok=False).error_line()
    assert "cannot resume with another strategy_options: " in line
    resumed = launch(*words, *flags(4))
    assert resumed.record["resumed_from"] and (folder / "best").is_dir()
    assert resumed.record["loss_history"] == stopped.record["loss_history"]
