"""What a run does when somebody, or the machine, gets in its way: one line, and nothing lost."""

import errno
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ACCELERATE, ROOT, launch, run, run_forked

import train_bert_squad
import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
FLAGS = ["--dataset", "digits", "--num_epochs", "2", "--checkpointing_steps", "5"]
LAUNCHER = [*ACCELERATE, "--main_process_port", "0", "--config_file"]


def record_of(folder):
    return json.loads((folder / "run" / "run.json").read_text())


def end_of(folder):
    """The record of a run in folder/run when it has ended. A preempted run has been saved."""
    deadline = time.monotonic() + 120
    while record_of(folder)["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    record = record_of(folder)
    if record["status"] == "preempted":
        assert (folder / "run" / "checkpoints" / f"step_{record['steps']:08d}").exists()
    return record


def test_a_second_run_in_a_folder_is_refused_until_the_first_one_ends(tmp_path):
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


# -------- signals


@pytest.mark.slow
def test_a_run_under_nohup_goes_on(tmp_path):
    """A launcher of one process leaves SIGHUP ignored, and so does the script."""
    env = {"SPY_SIGNAL": "SIGHUP all 3", "SPY_SCRIPT": Path(SCRIPT).stem}
    words = ["nohup", sys.executable, "tests/spy.py", *FLAGS, "--output_dir", str(tmp_path)]
    done = run(words, tmp_path, env)
    assert done.code == 0 and done.record["status"] == "completed"


LONG = ["tests/spy.py", "--dataset", "digits", "--num_epochs", "500", "--output_dir"]


def begin(command, folder, **env):
    """Start a command that runs a spied script, and wait for its first step."""
    steps = folder / "steps"
    env |= {"SPY_SCRIPT": Path(SCRIPT).stem, "SPY_STEPS": str(steps), "SPY_PAUSE": "0.05"}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env)
    while not steps.exists():
        assert process.poll() is None
        time.sleep(0.2)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, number", [("baseline", "SIGTERM"), ("ddp", "SIGKILL"), ("ddp", "SIGHUP")]
)
def test_ranks_save_and_stop_when_their_launcher_dies(launcher, number, tmp_path):
    words = [*LAUNCHER, f"accelerate_configs/{launcher}.yaml", *LONG, str(tmp_path / "run")]
    launcher = begin(words, tmp_path)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(getattr(signal, number))
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=250)
    assert gone and not alive, "a rank goes on"
    assert end_of(tmp_path)["status"] == "preempted"


@pytest.mark.slow
def test_a_run_goes_on_when_its_shell_ends(tmp_path):
    """Even if a launcher's variable is exported, and somebody removes the lock. The shell waits for
    the first step.
    """
    steps, words = tmp_path / "steps", " ".join([sys.executable, *LONG, str(tmp_path / "run")])
    wait = f"while [ ! -e {steps} ]; do sleep 0.2; done"
    shell = ["sh", "-c", f"{words} --max_train_steps 60 & {wait}"]
    begin(shell, tmp_path, ACCELERATE_MIXED_PRECISION="no").wait()
    assert record_of(tmp_path)["status"] == "running"
    (tmp_path / "run" / ".lock").unlink()
    assert end_of(tmp_path)["status"] == "completed"


# -------- output and disks


@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupt", "hang up"])
def test_a_run_is_saved_when_its_pipe_or_terminal_closes(end, tmp_path):
    """Ctrl-C of `python train... 2>&1 | tee log` ends tee, too."""
    line = f"{sys.executable} {SCRIPT} --dataset digits --num_epochs 999 --logging_steps 40"
    line += f" --output_dir {tmp_path / 'run'}"
    if end == "interrupt":
        line += f" 2>&1 | tee {tmp_path / 'log'}"
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest may run under nohup
        os.chdir(ROOT)
        os.execvp("bash", ["bash", "--norc", "-i"])
    os.write(terminal, line.encode() + b"\n")
    seen = b""
    while b"step 80/" not in seen:
        seen += os.read(terminal, 65536)
    if end == "interrupt":
        os.write(terminal, b"\x03")
    else:
        os.close(terminal)
    assert end_of(tmp_path)["status"] == "preempted"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("output", [">/dev/full 2>&1", ">&- 2>&-"])
def test_a_full_disk_or_a_closed_output_does_not_end_a_run(output, tmp_path):
    words = [sys.executable, SCRIPT, *FLAGS, "--output_dir", str(tmp_path / "run")]
    code = subprocess.run(["sh", "-c", f'"$@" {output}', "sh", *words], cwd=ROOT).returncode
    assert code == 0 and record_of(tmp_path)["status"] == "completed"


def test_on_a_disk_without_locks_a_run_prints_a_warning(tmp_path, monkeypatch, capsys):
    """Such as Lustre without -o flock, and NFS without lockd."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, "what the kernel says")

    monkeypatch.setattr(script.fcntl, "flock", flock)
    accelerator = SimpleNamespace(is_main_process=True)
    monkeypatch.setattr(script.utils, "broadcast_object_list", lambda values: values)
    args = SimpleNamespace(output_dir=tmp_path, resume=False)
    assert script.open_folder(accelerator, args, {}) is None
    warning = f"warning: cannot lock {tmp_path} (what the kernel says): start only one run in it"
    assert capsys.readouterr().out == f"{warning}\n"


# -------- errors, folders


@pytest.mark.slow
def test_a_bug_in_a_copied_script_is_shown_once(tmp_path):
    """On all ranks of a real launch."""
    right = "save_every = args.checkpointing_steps"
    text = (ROOT / SCRIPT).read_text()
    (tmp_path / "mine.py").write_text(text.replace(right, right.removesuffix("s")))
    number = text[: text.index(right)].count("\n") + 1
    words = [*LAUNCHER, "accelerate_configs/ddp.yaml", str(tmp_path / "mine.py"), *FLAGS[:2]]
    done = run([*words, "--output_dir", str(tmp_path / "run")])
    sentence = "AttributeError: 'Namespace' object has no attribute 'checkpointing_step'"
    before_the_summary = done.err.partition("ChildFailedError")[0]
    assert done.code and sentence in before_the_summary
    assert before_the_summary.count(f'mine.py", line {number}, in main') == 1


def test_other_ranks_leave_after_rank_0_has_printed_its_error(monkeypatch):
    """A launcher ends all ranks when the first one fails."""
    naps = []
    monkeypatch.setattr(script.time, "sleep", naps.append)
    for rank, end in (("0", "error: it is wrong"), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left:
            script.abort("it is wrong")
        assert left.value.code == end and bool(naps) == (rank != "0")


def test_the_models_own_folder_is_refused_and_a_tilde_is_expanded(monkeypatch):
    monkeypatch.chdir(ROOT)
    model = ["--model_name_or_path", "tests/data/tiny_bert", "--output_dir"]
    monkeypatch.setattr(sys, "argv", ["script", *model, "tests/data/../data/tiny_bert"])
    with pytest.raises(SystemExit, match="^error: .* is the model's own folder"):
        train_bert_squad.parse_args()
    monkeypatch.setenv("HOME", "/somebody's home")
    monkeypatch.setattr(sys, "argv", ["script", "--output_dir=~/r"])
    assert script.parse_args().output_dir == "/somebody's home/r"


def test_without_output_dir_a_run_gets_a_new_folder_with_the_name_of_the_script(tmp_path):
    words = ["--config_file", f"{ROOT}/accelerate_configs/ddp.yaml"]
    argv = [str(ROOT / SCRIPT), "--dataset", "digits", "--max_train_steps", "1"]
    done = run_forked(words, argv, root=tmp_path)
    assert done.code == 0, done.err
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mnist_rnn-20")
    assert f"results go to runs/{folder.name}" in done.out
    assert json.loads((folder / "run.json").read_text())["strategy"] == "ddp"
