"""A real `accelerate launch` of each YAML; and the ranks that other tests fork train as the launched ones do."""

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
    same = ("processes", "devices", "global_batch_size", "precision", "loss_history", "metrics", "status", "workload")
    for name in same:
        assert real[name] == forked[name], name
    assert len(real["loss_history"]) == 12 and len(real["ranks"]) == (1 if strategy in ("baseline", "dp") else 2)


def test_deepspeed_and_dynamo_is_one_line(tmp_path):
    """accelerate would drop the flag silently."""
    launcher = ["--dynamo_backend", "eager"]
    result = launch("zero3", SCRIPT, tmp_path / "run", *FLAGS, launcher=launcher, ok=False, real=True)
    assert "does not hand on --dynamo_backend" in result.error_line() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("with_json", [True, False])
def test_a_copy_of_script_yaml_and_json_runs_from_any_folder(with_json, tmp_path):
    """And without the JSON that the YAML names, it says so in one line."""
    for name in ("copy/accelerate_configs", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    files = [SCRIPT, "accelerate_configs/zero2.yaml"] + ["accelerate_configs/zero2.json"] * with_json
    for file in files:
        shutil.copy(ROOT / file, tmp_path / "copy" / file)
    script, config, *_ = (str(tmp_path / "copy" / file) for file in files)
    words = ["--config_file", config, "--main_process_port", "0", script, "--output_dir", "run"]
    flags = ["--dataset", "digits", "--max_train_steps", "2"]
    result = run(["env", "-C", str(tmp_path / "elsewhere"), *ACCELERATE, *words, *flags], tmp_path / "elsewhere/run")
    if with_json:
        assert result.code == 0, result.err
        assert (result.record["strategy"], result.record["steps"]) == ("zero2", 2)
    else:
        assert "copy/accelerate_configs/zero2.json, which is not there: copy it with the YAML" in result.error_line()


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
