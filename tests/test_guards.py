"""What a run does when somebody, or the machine, gets in its way: one line, and nothing lost."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import warm
from conftest import ACCELERATE, ROOT, environment, launch, namespaces

import train_bert_squad
import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
FLAGS = ["--dataset", "digits", "--num_epochs", "2", "--checkpointing_steps", "5"]


def test_a_second_run_in_a_folder_is_one_line_and_a_dead_ones_lock_is_gone(tmp_path):
    holder = open(tmp_path / ".lock", "w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    for more in ([], ["--resume"]):
        refused = launch("ddp", SCRIPT, tmp_path, *FLAGS, *more, ok=False)
        assert f"another run is writing into {tmp_path}: wait" in refused.error_line()
    holder.close()  # as the kernel does when a process dies
    assert launch("ddp", SCRIPT, tmp_path, *FLAGS).record["status"] == "completed"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    (tmp_path / "new").touch()
    everybody_else = (tmp_path / "new").stat().st_mode
    assert len(files) > 10 and all(file.stat().st_mode == everybody_else for file in files)


@pytest.mark.parametrize("flag, strategy", [("1", "fsdp"), ("True", "fsdp"), ("off", "ddp")])
def test_a_strategy_in_the_environment_may_be_spelled_in_other_ways(flag, strategy, tmp_path):
    env = {"ACCELERATE_USE_FSDP": flag, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    run = launch("ddp", SCRIPT, tmp_path, *FLAGS[:2], "--max_train_steps", 1, env=env)
    assert run.record["strategy"] == strategy
    assert launch("ddp", SCRIPT, tmp_path / "2", env={"ACCELERATE_USE_FSDP": "2"}, ok=False).code


@pytest.mark.slow
def test_a_run_under_nohup_goes_on(tmp_path):
    """A launcher of one process leaves SIGHUP ignored, and so does the script."""
    env = {"SPY_SIGNAL": "SIGHUP all 3"}
    command = [sys.executable, "tests/spy.py", *FLAGS, "--output_dir", str(tmp_path)]
    env |= {"SPY_SCRIPT": Path(SCRIPT).stem}
    subprocess.run(["nohup", *command], cwd=ROOT, env=environment(env), check=True, timeout=120)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, number", [("baseline", "SIGTERM"), ("ddp", "SIGKILL"), ("ddp", "SIGHUP")]
)
def test_a_rank_whose_launcher_died_saves_and_stops(strategy, number, tmp_path):
    steps = tmp_path / "steps"
    words = ["--config_file", f"accelerate_configs/{strategy}.yaml", "--main_process_port", "0"]
    flags = ["--dataset", "digits", "--num_epochs", "500", "--output_dir", str(tmp_path / "run")]
    env = {"SPY_SCRIPT": Path(SCRIPT).stem, "SPY_STEPS": str(steps), "SPY_PAUSE": "0.05"}
    launcher = subprocess.Popen(
        [*ACCELERATE, *words, "tests/spy.py", *flags], cwd=ROOT, env=environment(env)
    )
    while not steps.exists():
        assert launcher.poll() is None
        time.sleep(0.2)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(getattr(signal, number))
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=250)
    assert gone and not alive, "a rank goes on"
    ended = json.loads((tmp_path / "run" / "run.json").read_text())
    assert ended["status"] == "preempted"
    assert (tmp_path / "run" / "checkpoints" / f"step_{ended['steps']:08d}").exists()


@pytest.mark.slow
def test_a_full_disk_and_a_read_only_one_are_one_line_and_the_run_goes_on(tmp_path):
    """A disk of its own, which has room for a checkpoint and for the best model, but not for the
    final one beside them; then nothing may be written; then all is well.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = [*FLAGS[:2], "--hidden_size", "256", "--num_epochs", "1"]  # 1.1 MB of weights
    command = f"'{sys.executable}' {SCRIPT} {' '.join(flags)} --output_dir {disk}/run"
    words = namespaces(f"mount -t tmpfs -o size=5000k none {disk}")
    steps = [
        f"{command} 2>{tmp_path}/full",
        f"mount -o remount,size=99m,ro {disk}",
        f"{command} --resume 2>{tmp_path}/locked",
        f"mount -o remount,rw {disk}",
        f"{command} --resume && cp {disk}/run/run.json {tmp_path}/run.json",
    ]
    done = subprocess.run(
        [*words, "sh", "-c", "\n".join(steps)],
        cwd=ROOT,
        env=environment({}),
        capture_output=True,
        text=True,
    )
    for name in ("full", "locked"):
        [line] = (tmp_path / name).read_text().splitlines()
        assert line.startswith("error: ") and ("space" in line or "Read-only" in line), line
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "completed", done.stdout


@pytest.mark.parametrize("module", [script, train_bert_squad])
def test_errors_that_a_user_can_mend_are_one_line_and_others_keep_their_traceback(
    module, monkeypatch, own_signals
):
    def end(problem):
        def main(args):
            raise problem

        monkeypatch.setattr(module, "main", main)
        monkeypatch.setattr(sys, "argv", ["script"])
        module.cli()

    for problem in (
        RuntimeError("error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail] PytorchStreamWriter failed writing file"),
        MemoryError(),
        FileNotFoundError(2, "No such file or directory", "/x/y"),
        OSError(122, "Disk quota exceeded"),
        ValueError("environment variable MASTER_ADDR expected, but not set"),  # under mpirun
        UnicodeEncodeError("latin-1", "\u03a9", 0, 1, "ordinal not in range(256)"),
    ):
        with pytest.raises(SystemExit, match="^error: .*--resume.*fsdp.yaml"):
            end(problem)
    with pytest.raises(RuntimeError, match="a bug"):
        end(RuntimeError("a bug"))
    with pytest.raises(SystemExit) as line:
        end(OSError("x" * 10_000))
    assert len(str(line.value)) == 500


def test_folders_that_cannot_be_meant_and_a_tilde(monkeypatch):
    monkeypatch.chdir(ROOT)
    model = ["--model_name_or_path", "tests/data/tiny_bert", "--output_dir"]
    for module, flags, sentence in (
        (script, ["--resume"], "name it by --output_dir"),
        (train_bert_squad, ["--resume"], "name it by --output_dir"),
        (train_bert_squad, [*model, "tests/data/../data/tiny_bert"], "is the model's own folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["script", *flags])
        with pytest.raises(SystemExit, match="^error: .*" + sentence):
            module.parse_args()
    monkeypatch.setenv("HOME", "/somebody's home")
    monkeypatch.setattr(sys, "argv", ["script", "--output_dir=~/r"])
    assert script.parse_args().output_dir == "/somebody's home/r"


def test_without_a_folder_a_run_gets_a_new_one_which_is_named_after_the_script(tmp_path):
    words = ["--config_file", f"{ROOT}/accelerate_configs/ddp.yaml"]
    argv = [str(ROOT / SCRIPT), "--dataset", "digits", "--max_train_steps", "1"]
    out, err = tmp_path / "out", tmp_path / "err"
    out.touch(), err.touch()
    code = warm.run_ranks(words, argv, environment({}), tmp_path, str(out), str(err), 240)
    assert code == 0, err.read_text()
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mnist_rnn-20")
    assert f"results go to runs/{folder.name}" in out.read_text()
    assert json.loads((folder / "run.json").read_text())["strategy"] == "ddp"
