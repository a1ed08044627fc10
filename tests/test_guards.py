"""What a run does when somebody, or the machine, gets in its way: one line, and nothing lost."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ACCELERATE, ROOT, environment, launch, namespaces

import train_bert_squad
import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
FLAGS = ["--dataset", "digits", "--num_epochs", "2", "--checkpointing_steps", "5"]
TINY = "--model_name_or_path tests/data/tiny_bert --from_scratch --max_train_samples 20".split()
QUESTIONS = ["--train_file", "tests/data/squad_v1.json"]
QUESTIONS += ["--validation_file", "tests/data/squad_v1.json"]


def test_a_second_run_in_a_folder_is_one_line_and_a_dead_ones_lock_is_gone(tmp_path):
    holder = open(tmp_path / ".lock", "w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    refused = launch("ddp", SCRIPT, tmp_path, *FLAGS, ok=False)
    assert f"another run is writing into {tmp_path}: wait" in refused.error_line()
    holder.close()  # as the kernel does when a process dies
    assert launch("ddp", SCRIPT, tmp_path, *FLAGS).record["status"] == "completed"


def test_a_completed_run_without_checkpoints_is_no_other_run(tmp_path):
    """Its record tells what it was."""
    done = launch("baseline", SCRIPT, tmp_path, *FLAGS)
    for path in sorted((tmp_path / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    before = (tmp_path / "run.json").read_bytes()
    again = launch("baseline", SCRIPT, tmp_path, *FLAGS, ok=False)
    assert "holds another run: add --resume" in again.error_line()
    assert (
        "completed run already"
        in launch(
            "ddp", SCRIPT, tmp_path, *FLAGS, "--resume", "--per_device_train_batch_size", 32
        ).out
    )
    for name, flags in ((SCRIPT, [*FLAGS, "--seed", 1]), ("train_bert_squad.py", TINY + QUESTIONS)):
        line = launch("baseline", name, tmp_path, *flags, "--resume", ok=False).error_line()
        assert "cannot resume a run with other settings: " in line
    assert (tmp_path / "run.json").read_bytes() == before and done.record["version"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy, number", [("baseline", "SIGTERM"), ("ddp", "SIGKILL")])
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
    launcher.send_signal(getattr(signal, number))
    launcher.wait()
    record = tmp_path / "run" / "run.json"
    until = time.monotonic() + 120
    while json.loads(record.read_text())["status"] == "running":
        assert time.monotonic() < until, "the rank goes on"
        time.sleep(0.5)
    ended = json.loads(record.read_text())
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


@pytest.mark.parametrize(
    "problem, sentence",
    [
        (RuntimeError("error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of memory: lower"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out of memory: lower"),
        (MemoryError(), "out of memory: lower"),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), "'/x/y': mend that"),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file"), "mend that"),
        (RuntimeError("a bug"), None),
        (OSError(122, "Disk quota exceeded"), "mend that"),
        (ConnectionResetError(104, "Connection reset by peer"), None),
    ],
)
def test_errors_that_a_user_can_mend_are_one_line(problem, sentence):
    if sentence is None:
        return script.abort_if_known(problem, "runs/x")
    with pytest.raises(SystemExit, match="^error: .*" + sentence):
        script.abort_if_known(problem, "runs/x")


@pytest.mark.parametrize(
    "module, flags, sentence",
    [
        (script, ["--resume"], "name it by --output_dir"),
        (train_bert_squad, ["--resume"], "name it by --output_dir"),
        (
            train_bert_squad,
            [
                "--model_name_or_path",
                "tests/data/tiny_bert",
                "--output_dir",
                "tests/data/../data/tiny_bert",
            ],
            "is the model's own folder",
        ),
    ],
)
def test_folders_that_cannot_be_meant(module, flags, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    with pytest.raises(SystemExit, match="^error: .*" + sentence):
        module.parse_args()


def test_a_tilde_is_expanded_once_and_a_new_folder_is_named_after_the_script(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody's home")
    monkeypatch.setattr(sys, "argv", ["script", "--output_dir=~/r"])
    assert script.parse_args().output_dir == "/somebody's home/r"
    monkeypatch.setattr(sys, "argv", ["script"])
    assert script.parse_args().output_dir.startswith("runs/mnist_rnn-20")
    assert train_bert_squad.parse_args().output_dir.startswith("runs/bert_squad-20")


def test_zero_refuses_a_path_from_which_deepspeed_cannot_resume(tmp_path):
    line = launch("zero2", SCRIPT, tmp_path / "r[1]", *FLAGS, ok=False).error_line()
    assert "DeepSpeed resumes from no path with [, * or ? in it" in line
    assert not (tmp_path / "r[1]").exists()


@pytest.mark.slow
def test_compilation_under_deepspeed_is_refused():
    """accelerate drops the launcher's flag. So it is read from the parent, here a shell."""
    words = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable]
    words += ["import train_mnist_rnn as s; s.refuse_wrong_yaml('zero', s.parse_args())"]
    for flags, code in ((["--dynamo_backend", "eager"], 1), ([], 0)):
        done = subprocess.run([*words, *flags], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == code and ("drops --dynamo_backend" in done.stderr) == code


def test_an_evaluation_batch_holds_no_copies():
    args = train_bert_squad.argparse.Namespace(
        output_dir="x",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_train_steps=1,
        num_epochs=1,
        per_device_eval_batch_size=1000,
    )
    accelerator = SimpleNamespace(num_processes=2)
    run = script.Run(accelerator, "ddp", args, {"samples": 100, "eval_samples": 361})
    assert run.eval_batch_size == 362 and os.getppid() == run.stop_signal.parent


def test_an_answer_needs_no_more_memory_than_its_window(monkeypatch):
    asked_for = []

    def best_spans(logits, first, last, longest):
        asked_for.append(longest)
        return torch.zeros(3, 1)

    monkeypatch.setattr(train_bert_squad, "best_spans", best_spans)
    monkeypatch.setattr(train_bert_squad, "span_logits", lambda *_: torch.zeros(1, 6, 2))
    zero = torch.zeros(1, dtype=torch.long)
    spans = dict.fromkeys(("ids", "start", "end", "first", "last"), zero)
    args = SimpleNamespace(max_answer_length=10**9)
    run = SimpleNamespace(until_stopped=iter, stopped=False, args=args)
    accelerator = SimpleNamespace(gather_for_metrics=lambda rows: rows)
    train_bert_squad.find_answers(accelerator, torch.nn.Identity(), [({}, spans)], run)
    assert asked_for == [6]
