"""What a run does when somebody, or the machine, gets in its way: one line, and nothing lost."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ACCELERATE, BASELINE, ROOT, launch, namespaces, run, run_forked

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
    """Also where a launcher's variable is exported. The shell waits for the first step."""
    steps, words = tmp_path / "steps", " ".join([sys.executable, *LONG, str(tmp_path / "run")])
    wait = f"while [ ! -e {steps} ]; do sleep 0.2; done"
    shell = ["sh", "-c", f"{words} --max_train_steps 60 & {wait}"]
    begin(shell, tmp_path, ACCELERATE_MIXED_PRECISION="no").wait()
    assert record_of(tmp_path)["status"] == "running"
    deadline = time.monotonic() + 120
    while record_of(tmp_path)["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert record_of(tmp_path)["status"] == "completed"


# -------- disks


def use_up(disk):
    """In namespaces of its own. The disk has room for a checkpoint and for the best model, but not
    for the final one beside them; then nothing may be written; then all is well. On a smaller disk,
    a checkpoint has no room: torch does not say why, but the disk does.
    """

    def mount(*words):
        subprocess.run(["mount", *words, disk], check=True)

    def train(*more, ok=False):
        words = [*FLAGS[:2], "--hidden_size", 256, "--num_epochs", 1, *more]  # 1.1 MB of weights
        return launch("baseline", SCRIPT, Path(disk, "run"), *words, ok=ok)

    mount("-t", "tmpfs", "-o", "size=5000k", "none")
    full = train()
    mount("-o", "remount,size=99m,ro")
    locked = train("--resume")
    mount("-o", "remount,rw")
    assert train("--resume", ok=True).record["status"] == "completed"
    mount("-t", "tmpfs", "-o", "size=3000k", "none")
    fuller = train("--checkpointing_steps", 5)
    for result in (full, fuller):
        assert result.error_line().endswith("(the disk is full: free space, then --resume)")
        assert result.err.splitlines()[-1] == result.error_line()
    assert locked.err.splitlines() == [locked.error_line()], "of a folder that was given"
    assert "Read-only" in locked.error_line()


@pytest.mark.slow
def test_a_full_disk_and_a_read_only_one_end_with_one_line_and_the_run_goes_on(tmp_path):
    words = [*namespaces("true"), sys.executable, "-c"]
    code = f"import test_guards; test_guards.use_up({str(tmp_path)!r})"
    done = run([*words, code], env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.code == 0, done.err


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_warned_of_and_the_run_goes_on(
    number, tmp_path, monkeypatch, capsys
):
    """As Lustre without -o flock, and NFS without lockd."""

    def flock(file, operation):
        raise OSError(number, "what the kernel says")

    monkeypatch.setattr(script.fcntl, "flock", flock)
    script.lock_folder(tmp_path)
    warning = f"warning: {tmp_path} cannot be locked (what the kernel says): start no second run"
    assert capsys.readouterr().out.startswith(warning)


# -------- errors


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_slip_shows_its_line_once_and_ends_with_one_line(launched, tmp_path):
    """A student's own, in a copy of the script: under a launcher, too, and on all ranks."""
    slip = "save_every = args.checkpointing_steps"
    text = (ROOT / SCRIPT).read_text()
    assert text.count(slip) == 1
    (tmp_path / "mine.py").write_text(text.replace(slip, slip.removesuffix("s")))
    number = text[: text.index(slip)].count("\n") + 1
    words = [str(tmp_path / "mine.py"), *FLAGS[:2], "--output_dir", str(tmp_path / "run")]
    done = run([*DDP, *words]) if launched else run_forked(BASELINE, words)
    sentence = "AttributeError: 'Namespace' object has no attribute 'checkpointing_step'"
    assert done.error_line().startswith(f"error: {sentence}")
    assert done.err.count(f'mine.py", line {number}, in train') == 1


def test_what_the_script_does_not_expect_shows_its_traceback_and_ends_with_one_line(
    monkeypatch, capsys
):
    def end(problem, before=None):
        """What is printed to stderr, and the last line."""

        def main(args):
            raise problem from before

        monkeypatch.setattr(script, "main", main)
        monkeypatch.setattr(sys, "argv", ["script", "--output_dir", "/nowhere/run"])
        with pytest.raises(SystemExit) as line:
            script.cli()
        text = str(line.value)
        assert text.startswith("error: ") and "\n" not in text and len(text) <= 500
        return capsys.readouterr().err, text

    printed, line = end(KeyError("a bug"))
    assert "in main" in printed and line == "error: KeyError: 'a bug'"
    printed, line = end(ValueError("x" * 10_000))
    assert printed.count("Traceback") == 1 and len(line) < 500
    # Advice where it is right, and nowhere else.
    for problem in (MemoryError("m"), torch.OutOfMemoryError("m")):
        printed, line = end(problem)
        assert "Traceback" in printed and "--per_device_train_batch_size" in line
    printed, line = end(RuntimeError("unexpected pos 5 vs 4"), OSError(errno.ENOSPC, "No space"))
    assert "Traceback" in printed and line.endswith("free space, then --resume)")
    assert "RuntimeError: unexpected pos 5 vs 4, after OSError: [Errno 28] No space" in line
    # An OSError about a path that was given needs no traceback. Another one does.
    printed, line = end(PermissionError(13, "Permission denied", "/nowhere/run/run.json"))
    assert not printed and line.endswith("Permission denied: '/nowhere/run/run.json'")
    for name in ("/elsewhere/x", "/nowhere/run2/x", "mnist_extra.csv", "tensorboard.log", ""):
        printed, line = end(FileNotFoundError(2, "No such file", name))
        assert "Traceback" in printed and line.endswith(repr(name))
    printed, line = end(KeyboardInterrupt())
    assert "Traceback" in printed and line == "error: KeyboardInterrupt"
    # The launcher may print the traceback, but not if its own disk is full.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "Traceback" in end(KeyError("a bug"))[0]


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
    done = run_forked(words, argv, root=tmp_path)
    assert done.code == 0, done.err
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mnist_rnn-20")
    assert f"results go to runs/{folder.name}" in done.out
    assert json.loads((folder / "run.json").read_text())["strategy"] == "ddp"


BOTH = "dropout=0.1 seed=0 gradient_accumulation_steps=1 max_grad_norm=None max_train_steps=None"
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
