"""A real `accelerate launch` of each YAML; the ranks that other tests fork train as those do."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import warm
from conftest import ACCELERATE, ROOT, STRATEGIES, environment, launch, run

SCRIPT = "train_mnist_rnn.py"
ALL = ["baseline", "dp", *STRATEGIES]
FLAGS = ["--dataset", "digits", "--max_train_steps", "12"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """strategy -> the Result of a real launch. Two at once, as one imports while the other waits."""
    folder = tmp_path_factory.mktemp("launched")
    with ThreadPoolExecutor(2) as pool:
        jobs = {name: pool.submit(launch, name, SCRIPT, folder / name, *FLAGS, real=True) for name in ALL}
    return {name: job.result() for name, job in jobs.items()}


@pytest.mark.parametrize("strategy", ALL)
def test_launched_and_forked_ranks_train_alike(strategy, launched, tmp_path):
    real, forked = launched[strategy].record, launch(strategy, SCRIPT, tmp_path, *FLAGS).record
    assert real["strategy"] == forked["strategy"] == strategy
    for name in "processes devices global_batch_size loss_history metrics status workload".split():
        assert real[name] == forked[name], name
    assert len(real["loss_history"]) == 12 and len(real["ranks"]) == (1 if strategy in ("baseline", "dp") else 2)


@pytest.mark.parametrize("strategy, launcher", [
    ("baseline", []), ("ddp", ["--mixed_precision", "bf16"])])
def test_the_launchers_debug_makes_no_dp(strategy, launcher, tmp_path):
    launcher = ["--debug", *launcher]
    record = launch(strategy, SCRIPT, tmp_path, *FLAGS, launcher=launcher).record
    assert (record["strategy"], record["status"]) == (strategy, "completed")
    assert record["workload"]["precision"] == (launcher[2:] or ["no"])[0]


def test_a_copy_of_script_yaml_and_json_runs_from_any_folder(tmp_path):
    for name in ("copy/accelerate_configs", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    files = [SCRIPT, "accelerate_configs/zero2.yaml", "accelerate_configs/zero2.json"]
    for file in files:
        shutil.copy(ROOT / file, tmp_path / "copy" / file)
    script, config, _ = (str(tmp_path / "copy" / file) for file in files)
    words = ["--config_file", config, "--main_process_port", "0", script, "--output_dir", "run"]
    command = ["env", "-C", str(tmp_path / "elsewhere"), *ACCELERATE, *words, *FLAGS]
    result = run(command, tmp_path / "elsewhere/run")
    assert result.code == 0, result.err
    assert (result.record["strategy"], result.record["steps"]) == ("zero2", 12)


# Where the launcher put a rank, and what accelerate sets for a moment while it looks for a GPU.
OWN_BUSINESS = ("TORCH", "GROUP_", "ROLE_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "PYTORCH_NVML")


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "zero3"])
def test_forked_ranks_get_the_launchers_environment(strategy, tmp_path):
    script = tmp_path / "show.py"
    script.write_text(f"""import json, os, pathlib
file = pathlib.Path({str(tmp_path)!r}, os.environ.get("RANK", "0") + ".json")
file.write_text(json.dumps(dict(os.environ)))
""")
    words = ["--config_file", f"accelerate_configs/{strategy}.yaml", "--main_process_port", "0"]
    assert run([*ACCELERATE, *words, str(script)]).code == 0
    launched = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    number, forked = warm.what_the_launcher_starts([*words, str(script)], environment(None))
    assert len(launched) == (number or 1)
    for name, value in launched[0].items():
        assert name.startswith(OWN_BUSINESS) or forked.get(name) == value, name
