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


def test_a_second_run_in_a_folder_is_one_line_and_a_dead_ones_lock_is_gone(tmp_path):
    holder = open(tmp_path / ".lock", "w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    for more in ([], ["--resume"]):
        refused = launch("ddp", SCRIPT, tmp_path, *FLAGS, *more, ok=False)
        assert f"another run is writing into {tmp_path}: wait" in refused.error_line()
    holder.close()  # as the kernel does when a process dies
    (tmp_path / ".lock").unlink()  # as a cleaner of old files does
    assert launch("ddp", SCRIPT, tmp_path, *FLAGS).record["status"] == "completed"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    (tmp_path / "new").touch()
    everybody_else = (tmp_path / "new").stat().st_mode
    assert len(files) > 10 and all(file.stat().st_mode == everybody_else for file in files)


@pytest.mark.slow
def test_a_run_under_nohup_goes_on(tmp_path):
    """A launcher of one process leaves SIGHUP ignored, and so does the script."""
    env = {"SPY_SIGNAL": "SIGHUP all 3", "SPY_SCRIPT": Path(SCRIPT).stem}
    words = ["nohup", sys.executable, "tests/spy.py", *FLAGS, "--output_dir", str(tmp_path)]
    done = run(words, tmp_path, env)
    assert done.code == 0 and done.record["status"] == "completed"


LAUNCHER = [*ACCELERATE, "--main_process_port", "0", "--config_file"]
DDP = [*LAUNCHER, "accelerate_configs/ddp.yaml"]
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


def record_of(folder):
    return json.loads((folder / "run" / "run.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, number", [("baseline", "SIGTERM"), ("ddp", "SIGKILL"), ("ddp", "SIGHUP")]
)
def test_a_rank_whose_launcher_died_saves_and_stops(launcher, number, tmp_path):
    words = [*LAUNCHER, f"accelerate_configs/{launcher}.yaml", *LONG, str(tmp_path / "run")]
    launcher = begin(words, tmp_path)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(getattr(signal, number))
    launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=250)
    assert gone and not alive, "a rank goes on"
    ended = record_of(tmp_path)
    assert ended["status"] == "preempted"
    assert (tmp_path / "run" / "checkpoints" / f"step_{ended['steps']:08d}").exists()


@pytest.mark.slow
def test_a_run_goes_on_when_its_shell_ends(tmp_path):
    """Also where a launcher's variable is exported, and somebody cleans up the lock. The shell
    waits for the first step.
    """
    steps, words = tmp_path / "steps", " ".join([sys.executable, *LONG, str(tmp_path / "run")])
    wait = f"while [ ! -e {steps} ]; do sleep 0.2; done"
    shell = ["sh", "-c", f"{words} --max_train_steps 60 & {wait}"]
    begin(shell, tmp_path, ACCELERATE_MIXED_PRECISION="no").wait()
    assert record_of(tmp_path)["status"] == "running"
    (tmp_path / "run" / ".lock").unlink()
    deadline = time.monotonic() + 120
    while record_of(tmp_path)["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert record_of(tmp_path)["status"] == "completed"


# -------- nobody reads the output


@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupt", "hang up"])
def test_a_run_whose_output_nobody_reads_any_more_saves(end, tmp_path):
    """Ctrl-C of `python train... 2>&1 | tee log`, which ends tee, too; a closed terminal."""
    line = f"{sys.executable} {SCRIPT} --dataset digits --num_epochs 999 --logging_steps 40"
    line += f" --output_dir {tmp_path / 'run'}"
    if end == "interrupt":
        line += f" 2>&1 | tee {tmp_path / 'log'}"
    child, terminal = pty.fork()
    if not child:
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
    deadline = time.monotonic() + 120
    while record_of(tmp_path)["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    ended = record_of(tmp_path)
    assert ended["status"] == "preempted"
    assert (tmp_path / "run" / "checkpoints" / f"step_{ended['steps']:08d}").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("output", [">/dev/full 2>&1", ">&- 2>&-"])
def test_a_log_that_cannot_be_written_ends_no_run(output, tmp_path):
    """Its disk is full, or it is closed."""
    words = [sys.executable, SCRIPT, *FLAGS, "--output_dir", str(tmp_path / "run")]
    code = subprocess.run(["sh", "-c", f'"$@" {output}', "sh", *words], cwd=ROOT).returncode
    assert code == 0 and record_of(tmp_path)["status"] == "completed"


# -------- disks


@pytest.mark.slow
def test_a_folder_whose_modes_cannot_be_changed(tmp_path):
    """As on some network disks."""
    code = "import os\ndef refuse(*_, **__): raise PermissionError(1, 'Operation not permitted')\n"
    code += "os.chmod = os.fchmod = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    words = [sys.executable, SCRIPT, *FLAGS, "--output_dir", str(tmp_path / "run")]
    done = run(words, tmp_path / "run", env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 0 and done.record["status"] == "completed", done.err


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_warned_of_and_the_run_goes_on(
    number, tmp_path, monkeypatch, capsys
):
    """As Lustre without -o flock, and NFS without lockd."""

    def flock(file, operation):
        raise OSError(number, "what the kernel says")

    monkeypatch.setattr(script.fcntl, "flock", flock)
    accelerator = SimpleNamespace(is_main_process=True)
    monkeypatch.setattr(script.utils, "broadcast_object_list", lambda values: values)
    args = SimpleNamespace(output_dir=tmp_path, resume=False)
    assert script.open_folder(accelerator, args, {}) is None
    warning = f"warning: cannot lock {tmp_path} (what the kernel says): start no second run"
    assert capsys.readouterr().out.startswith(warning)


# -------- errors


@pytest.mark.slow
def test_a_slip_shows_its_line_once(tmp_path):
    """A student's own, in a copy of the script, on all ranks of a real launch."""
    slip = "save_every = args.checkpointing_steps"
    text = (ROOT / SCRIPT).read_text()
    assert text.count(slip) == 1
    (tmp_path / "mine.py").write_text(text.replace(slip, slip.removesuffix("s")))
    number = text[: text.index(slip)].count("\n") + 1
    done = run([*DDP, str(tmp_path / "mine.py"), *FLAGS[:2], "--output_dir", str(tmp_path / "run")])
    sentence = "AttributeError: 'Namespace' object has no attribute 'checkpointing_step'"
    before_the_summary = done.err.partition("ChildFailedError")[0]
    assert done.code and sentence in before_the_summary
    assert before_the_summary.count(f'mine.py", line {number}, in main') == 1


def test_folders_that_cannot_be_meant_and_a_tilde(monkeypatch):
    monkeypatch.chdir(ROOT)
    model = ["--model_name_or_path", "tests/data/tiny_bert", "--output_dir"]
    monkeypatch.setattr(sys, "argv", ["script", *model, "tests/data/../data/tiny_bert"])
    with pytest.raises(SystemExit, match="^error: .* is the model's own folder"):
        train_bert_squad.parse_args()
    monkeypatch.setenv("HOME", "/somebody's home")
    monkeypatch.setattr(sys, "argv", ["script", "--output_dir=~/r"])
    assert script.parse_args().output_dir == "/somebody's home/r"


def test_without_a_folder_a_run_gets_a_new_one_which_is_named_after_the_script(tmp_path):
    words = ["--config_file", f"{ROOT}/accelerate_configs/ddp.yaml"]
    argv = [str(ROOT / SCRIPT), "--dataset", "digits", "--max_train_steps", "1"]
    done = run_forked(words, argv, root=tmp_path)
    assert done.code == 0, done.err
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mnist_rnn-20")
    assert f"results go to runs/{folder.name}" in done.out
    assert json.loads((folder / "run.json").read_text())["strategy"] == "ddp"


BOTH = "dropout=0.1 seed=0 gradient_accumulation_steps=None max_grad_norm=None max_train_steps=None"
DEFAULTS = {
    script: """dataset=mnist hidden_size=64 num_epochs=5 learning_rate=0.005 weight_decay=0.01
        per_device_train_batch_size=64 per_device_eval_batch_size=1000 logging_steps=50""",
    train_bert_squad: """max_train_samples=10000 max_eval_samples=500 max_seq_length=384
        doc_stride=128 max_answer_length=30 num_epochs=4 learning_rate=3e-05 weight_decay=0.0
        per_device_train_batch_size=4 per_device_eval_batch_size=32 num_warmup_steps=0
        logging_steps=10""",
}


@pytest.mark.parametrize("module", DEFAULTS)
def test_the_defaults_are_those_of_the_published_results(module, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module.__name__])
    found = {f"{name}={value}" for name, value in vars(module.parse_args()).items()}
    assert {*DEFAULTS[module].split(), *BOTH.split(), "resume=False"} <= found
