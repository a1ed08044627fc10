"""Nothing lost: killed and preempted runs of train_mnist_rnn.py end where undisturbed ones end, bit
for bit.
"""

import json
import math
import os
import re
import shutil
import sys
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import STRATEGIES, launch

import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
# 1,437 training digits in global batches of 64: 22 steps an epoch, 44 in all; checkpoints at 7, 14, 21, 22, 28, 35 ...
FLAGS = "--dataset digits --num_epochs 2 --per_device_train_batch_size 32 --checkpointing_steps 7 --dropout 0.2".split()


def ids_seen(folder, rank):
    """The sample ids of each step that a rank trained on, in order."""
    return [json.loads(line) for line in (folder / f"ids_{rank}.jsonl").read_text().splitlines()]


def spied(strategy, folder, *flags, ok=True, **env):
    """A spied run into `folder`, its notes in `folder` too."""
    folder.mkdir(exist_ok=True)
    return launch(strategy, SCRIPT, folder, *FLAGS, *flags, env={"SPY_DIR": str(folder), **env}, ok=ok)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """strategy -> the Result of a run that nothing happened to."""
    results = {}

    def get(strategy):
        if strategy not in results:
            results[strategy] = spied(strategy, tmp_path_factory.mktemp("undisturbed") / strategy)
        return results[strategy]

    return get


def assert_same_end(result, reference):
    """The same losses of every step, evaluations and final weights, bit for bit."""
    assert result.record["status"] == "completed"
    assert result.record["loss_history"] == reference.record["loss_history"]
    assert result.record["metrics"] == reference.record["metrics"]
    weights = reference.weights
    assert result.weights.keys() == weights.keys()
    for name, weight in result.weights.items():
        assert torch.equal(weight, weights[name]), name


def step_of(path):
    return int(str(path).split("step_")[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_after_sigkill_is_exact(strategy, undisturbed, tmp_path):
    reference = undisturbed(strategy)
    folder = tmp_path / "run"
    killed = spied(strategy, folder, SPY_SIGNAL="SIGKILL 1 31", ok=False)  # in the middle of the second epoch
    assert killed.code != 0
    record = killed.record  # written at the start
    assert (record["status"], record["steps"], record["metrics"]) == ("running", 0, None)
    seen_before = {rank: ids_seen(folder, rank) for rank in (0, 1)}
    for rank in (0, 1):
        (folder / f"ids_{rank}.jsonl").unlink()

    resumed = spied(strategy, folder, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 28
    for rank in (0, 1):
        whole = ids_seen(reference.folder, rank)
        assert len(whole) == 44
        assert seen_before[rank][:31] == whole[:31]
        assert ids_seen(folder, rank) == whole[28:], "the resumed run must see exactly the remaining samples, in order"
    assert_same_end(resumed, reference)


@pytest.mark.parametrize(
    "strategy, signal, rank", [("zero2", "SIGTERM", 1), ("fsdp", "SIGUSR1", 0), ("zero3", "SIGTERM", 0)]
)
def test_preemption_stops_all_ranks_at_one_step_and_resumes_exactly(strategy, signal, rank, undisturbed, tmp_path):
    folder = tmp_path / "run"
    stopped = spied(strategy, folder, SPY_SIGNAL=f"{signal} {rank} 24")
    assert stopped.code == 0
    record = stopped.record
    assert record["status"] == "preempted" and "; --resume goes on" in stopped.out
    # Ranks agree where they meet anyway: here, at the checkpoint of step 28.
    assert record["steps"] == 28 and len(record["loss_history"]) == 28
    assert [len(ids_seen(folder, rank)) for rank in (0, 1)] == [28, 28]

    resumed = spied(strategy, folder, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 28
    assert_same_end(resumed, undisturbed(strategy))


def test_all_ranks_signalled_between_checkpoints(tmp_path):
    """Ranks agree after step 1, after the warm-up's 10, and from there on every SYNC_STEPS = 50."""
    flags = "--dataset digits --num_epochs 2 --per_device_train_batch_size 10".split()
    folder, spying = tmp_path / "run", {"SPY_DIR": str(tmp_path), "SPY_SIGNAL": "SIGTERM all 20"}
    stopped = launch("ddp", SCRIPT, folder, *flags, env=spying)  # 71 steps an epoch
    took = (folder / "run.json").stat().st_mtime - (tmp_path / "ids_0.jsonl").stat().st_mtime
    assert stopped.record["status"] == "preempted" and stopped.record["steps"] == 60
    assert took < 10, f"{took} s from the last step to the record"
    assert launch("ddp", SCRIPT, folder, *flags, "--resume").record["status"] == "completed"


def fake_run(folder, step=0, settings=None):
    """As much of a Run as a checkpoint needs."""
    state = {"step": step, "loss_history": [], "evaluations": [], "best": [0.5, "step_00000001"]}
    args = SimpleNamespace(output_dir=str(folder), resume=True)
    return SimpleNamespace(folder=folder, args=args, settings=settings or {"seed": 0},
                           start_clock=lambda: None, **state)


@pytest.fixture
def save(monkeypatch):
    """Saves the checkpoint of a fake run, of one small file."""
    accelerator = script.Accelerator(cpu=True)
    accelerator.save_state = lambda folder: (folder.mkdir(), (folder / "weights").write_text("ww"))
    return partial(script.save_checkpoint, accelerator, SimpleNamespace(state={}))


def test_kill_at_any_call_of_the_file_system_leaves_whole_checkpoints(
    save, tmp_path, monkeypatch, capsys
):  # fmt: skip
    """A save is broken off before, or in, each of its calls in turn; then a run resumes."""
    calls = [(Path, "rename"), (Path, "replace"), (Path, "write_text"), (Path, "unlink"),
             (Path, "mkdir"), (shutil, "rmtree"), (os, "fsync")]

    def half(name, path, *args):
        if name == "write_text":
            path.write_bytes(args[0].encode()[: len(args[0]) // 2])
        if name == "rmtree":
            (path / "weights").unlink(missing_ok=True)

    for last in range(1, 40):
        folder, count = tmp_path / str(last), [0]
        (folder / "checkpoints").mkdir(parents=True)
        for step in (1, 2, 3):
            save(fake_run(folder, step))

        def counted(name, original, count=count, last=last):
            def call(*args, **options):
                count[0] += 1
                if count[0] == last:
                    patch.undo()
                    half(name, *args)
                    raise KeyboardInterrupt
                return original(*args, **options)

            return call

        with monkeypatch.context() as patch:
            for owner, name in calls:
                patch.setattr(owner, name, counted(name, getattr(owner, name)))
            try:
                save(fake_run(folder, 4))
            except KeyboardInterrupt:
                pass
        for again in (False, True):
            _, path, state = script.open_folder(fake_run(folder))
            assert state["step"] >= 3 + again and path.endswith(f"step_{state['step']:08d}")
            assert (folder / "checkpoints" / "step_00000001").exists(), "the best is kept"
            assert not capsys.readouterr().out, "what has a checkpoint's name is whole"
            save(fake_run(folder, state["step"] + 1))
        if count[0] < last:
            break
    assert 5 < count[0] < last, "not every call was tried"


def test_only_step_and_eight_digits_are_the_scripts_own(save, tmp_path, capsys):
    """A copy that a user made is neither resumed nor pruned."""
    folder = tmp_path / "checkpoints"
    mine = [folder / name for name in ("step_00000001-copy1", "step_9", "step_99999999.old")]
    for path in mine:
        path.mkdir(parents=True)
    assert script.open_folder(fake_run(tmp_path))[1:] == (None, {})
    for step in (1, 2, 3, 4, 5):
        save(fake_run(tmp_path, step))
    assert script.open_folder(fake_run(tmp_path))[1] == str(folder / "step_00000005")
    kept = {folder / f"step_{step:08d}" for step in (1, 4, 5)}
    assert set(folder.iterdir()) == {*mine, *kept} and not capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_is_refused_and_untouched(tmp_path):
    folder = tmp_path / "checkpoints" / "step_00000007"
    folder.mkdir(parents=True)
    text = json.dumps({"settings": {"seed": 0}, "state": {"step": 7}, "files": {}})
    (folder / "checkpoint.json").write_text(f"{text}\n{zlib.crc32(text.encode())}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="^error: .*step_00000007 is an earlier version's: "):
        script.open_folder(fake_run(tmp_path))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_files_are_summed_when_all_ranks_have_written_theirs(tmp_path, monkeypatch):
    """Several may write one file, as that of fp16's scaler."""
    (tmp_path / "checkpoints").mkdir()
    events, partial_folder = [], tmp_path / "checkpoints" / "step_00000001.partial"

    def save_state(folder):
        events.append("save")
        partial_folder.mkdir()
        (partial_folder / "scaler.pt").touch()

    accelerator = SimpleNamespace(
        device="cpu", is_main_process=True, process_index=0, save_state=save_state,
        reduce=lambda value: value, wait_for_everyone=lambda: events.append("wait"))
    monkeypatch.setattr(script, "checksum", lambda path: events.append("sum"))
    script.save_checkpoint(accelerator, SimpleNamespace(state={}), fake_run(tmp_path, 1))
    assert events == ["wait", "save", "wait", "sum", "wait"]


def test_kill_during_a_save_and_a_truncated_checkpoint_cost_only_steps(undisturbed, tmp_path):
    folder = tmp_path / "run"
    killed = spied("ddp", folder, SPY_SAVE="SIGKILL 3", ok=False)  # in the save of step 21
    assert killed.code != 0
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000007", "step_00000014", "step_00000021.partial"]

    newest = folder / "checkpoints" / "step_00000014" / "optimizer.bin"
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = spied("ddp", folder, "--resume")
    assert "skipping the damaged checkpoint" in resumed.out and "step_00000014" in resumed.out
    assert step_of(resumed.record["resumed_from"]) == 7
    assert_same_end(resumed, undisturbed("ddp"))
    assert not list((folder / "checkpoints").glob("*.partial"))
    assert (folder / "checkpoints" / "step_00000014.damaged").exists(), "nothing is lost, not even what is damaged"


def test_old_checkpoints_are_pruned_and_the_best_is_kept(undisturbed):
    result = undisturbed("fsdp")
    checkpoints = result.folder / "checkpoints"
    accuracies = [float(found) for found in re.findall(r"test accuracy (\S+)%", result.out)]
    assert len(accuracies) == 2
    best = accuracies.index(max(accuracies))
    assert (checkpoints / "best").resolve().name == f"step_{22 * (best + 1):08d}"
    kept = {path.name for path in checkpoints.glob("step_*")}  # 22 was the best until the last save
    assert kept == {"step_00000022", "step_00000042", "step_00000044"}


def test_resuming_something_else_is_one_clear_error(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed("ddp").folder, folder, symlinks=True)
    (folder / "run.json").unlink()  # as if it had been killed just before the end

    def refused(strategy, *flags, **options):
        return launch(strategy, SCRIPT, folder, *FLAGS, "--resume", *flags, ok=False, **options).error_line()

    assert "model lstm-64 -> lstm-32" in refused("ddp", "--hidden_size", 32)
    assert "strategy ddp -> fsdp" in refused("fsdp")
    assert "global_batch_size 64 -> 32" in refused("ddp", processes=1)
    assert undisturbed("zero2").record["strategy_options"]["stage"] == 2
    assert undisturbed("fsdp").record["strategy_options"]["reshard_after_forward"] == "true"
    assert undisturbed("ddp").record["strategy_options"] == {}
    shutil.rmtree(folder)
    shutil.copytree(undisturbed("fsdp").folder, folder, symlinks=True)
    line = refused("fsdp", launcher=["--fsdp_reshard_after_forward", "false"])
    assert re.search("'reshard_after_forward': 'true'.* -> .*_after_forward': 'false'", line)


def test_a_completed_run_keeps_its_record_and_its_folder(undisturbed):
    """And is not taken for one with other settings."""
    result = undisturbed("ddp")
    before = (result.folder / "run.json").read_bytes()
    again = launch("ddp", SCRIPT, result.folder, *FLAGS, "--resume")
    assert "holds a completed run already" in again.out
    assert "holds another run" in launch("ddp", SCRIPT, result.folder, *FLAGS, ok=False).error_line()
    others = ["--learning_rate", 0.01, "--dropout", 0.3, "--seed", 1, "--resume"]
    line = launch("ddp", SCRIPT, result.folder, *FLAGS, *others, ok=False).error_line()
    assert "other settings: seed 0 -> 1, dropout 0.2 -> 0.3, learning_rate 0.005 -> 0.01" in line
    assert (result.folder / "run.json").read_bytes() == before


@pytest.mark.parametrize("spy, step", [
    ({"SPY_SIGNAL": "SIGTERM 1 0"}, 1),  # in the first step
    ({"SPY_SIGNAL": "SIGTERM+SIGUSR1+SIGTERM 1 29"}, 35),  # several; the ranks meet at the next checkpoint
    ({"SPY_SAVE": "SIGTERM 2"}, 21),  # while rank 0 saves step 14
    ({"SPY_EVAL": "SIGTERM 1 0"}, 22),  # in the evaluation, before which its checkpoint was saved
    ({"SPY_SIGNAL": "SIGINT all 29"}, 35),  # Ctrl-C, which all processes in a terminal receive
])  # fmt: skip
def test_a_signal_at_any_moment_costs_no_step(spy, step, undisturbed, tmp_path):
    folder = tmp_path / "run"
    stopped = spied("ddp", folder, **spy)
    assert stopped.record["status"] == "preempted" and stopped.record["steps"] == step
    assert stopped.out.count(f"preempted after {step} steps: ") == 1
    assert not stopped.err, "no traceback"
    resumed = spied("ddp", folder, "--resume")
    assert step_of(resumed.record["resumed_from"]) == step
    assert_same_end(resumed, undisturbed("ddp"))


def test_a_run_killed_in_its_evaluation_evaluates_again(undisturbed, tmp_path):
    folder = tmp_path / "run"
    killed = spied("ddp", folder, SPY_EVAL="SIGKILL 1 0", ok=False)
    assert killed.code and "epoch 1/2: " not in killed.out
    resumed = spied("ddp", folder, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 22
    assert "epoch 1/2: " in resumed.out and "epoch 2/2: " in resumed.out
    assert_same_end(resumed, undisturbed("ddp"))


# ------------------------------------------------------------------------------------------------------ other devices


@pytest.fixture(scope="module")
def by_48(tmp_path_factory):
    """A baseline run without dropout that nothing happened to, in global batches of 48."""
    folder = tmp_path_factory.mktemp("by_48")
    return launch("baseline", SCRIPT, folder, *SPREAD, 48, env={"SPY_DIR": str(folder)})


SPREAD = ["--dataset", "digits", "--num_epochs", "2", "--dropout", "0", "--per_device_train_batch_size"]


def ids_of_steps(folder, ranks):
    return [sorted(sum(step, [])) for step in zip(*(ids_seen(folder, rank) for rank in range(ranks)), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [
    ("ddp 2", "ddp 1"), ("ddp 1", "ddp 2"), ("ddp 2", "ddp 3"), ("fsdp 2", "fsdp 1"), ("fsdp 1", "fsdp 2"),
    ("fsdp 2", "fsdp 3"), ("ddp 2", "baseline 1"), ("baseline 1", "ddp 2")])  # fmt: skip
def test_a_run_goes_on_with_other_devices(first, then, by_48, tmp_path):
    """The losses of every step, and the samples, are those of an undisturbed run."""

    def run(words, *flags, **env):
        strategy, processes = words.split()
        more = {} if strategy == "baseline" else {"processes": processes}
        size = 48 // int(processes)
        return launch(strategy, SCRIPT, tmp_path, *SPREAD, size, *flags, env=env | {"SPY_DIR": str(tmp_path)}, **more)

    stopped = run(first, "--checkpointing_steps", 5, SPY_SIGNAL="SIGTERM 0 38")  # in the second epoch
    assert stopped.record["steps"] == 40
    for file in tmp_path.glob("ids_*"):
        file.unlink()
    resumed = run(then, "--resume")
    now = then.split()[1]
    assert step_of(resumed.record["resumed_from"]) == 40
    assert resumed.losses == pytest.approx(by_48.losses, rel=1e-5)
    assert ids_of_steps(tmp_path, int(now)) == ids_of_steps(by_48.folder, 1)[40:]
    for name, weight in by_48.weights.items():
        assert torch.allclose(resumed.weights[name], weight, atol=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_goes_on_with_as_many_processes_only(strategy, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed(strategy).folder, folder, symlinks=True)
    (folder / "run.json").unlink()
    words = [*FLAGS, "--per_device_train_batch_size", 64, "--resume"]
    line = launch(strategy, SCRIPT, folder, *words, processes=1, ok=False).error_line()
    assert f"strategy {strategy} on 2 -> {strategy} on 1" in line


# ----------------------------------------------------------------------------------------------- bad bytes, late disks


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["baseline", "dp", *STRATEGIES])
def test_a_flipped_byte_or_a_missing_file_costs_one_checkpoint(strategy, undisturbed, tmp_path, capsys):
    """In every file of the newest checkpoint in turn."""
    checkpoints = undisturbed(strategy).folder / "checkpoints"
    *_, before, newest = sorted(checkpoints.glob("step_*"))
    written = json.loads((newest / "checkpoint.json").read_text().splitlines()[0])
    names = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
    settings, _, sums = written
    assert set(sums) == names - {"checkpoint.json"} and len(names) >= 5

    def found_after(number, damage):
        folder = tmp_path / str(number)
        for path in (newest, before):
            shutil.copytree(path, folder / "checkpoints" / path.name)
        damage(folder / "checkpoints")
        _, path, state = script.open_folder(fake_run(folder, settings=settings))
        assert step_of(path) == state["step"]
        return Path(path).name

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)

    for number, name in enumerate(sorted(names)):
        assert found_after(number, lambda folder, name=name: flip(folder / newest.name / name)) == before.name
        assert capsys.readouterr().out.count("warning: skipping the damaged checkpoint") == 1
    last = "random_states_1.pkl" if strategy in STRATEGIES else "random_states_0.pkl"
    assert found_after("gone", lambda folder: (folder / newest.name / last).unlink()) == before.name
    assert found_after("whole", lambda folder: None) == newest.name
    with pytest.raises(SystemExit, match="error: no checkpoint in .* is whole: start afresh"):
        found_after("all", lambda folder: [flip(path / last) for path in folder.iterdir()])


def test_all_ranks_fall_back_to_the_checkpoint_before_a_flipped_byte(undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed("zero3").folder, folder, symlinks=True)
    (folder / "run.json").unlink()
    [file] = (folder / "checkpoints" / "step_00000044").rglob("*zero_pp_rank_1_*optim_states.pt")
    content = file.read_bytes()
    file.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    resumed = spied("zero3", folder, "--resume")
    assert resumed.out.count("warning: skipping the damaged checkpoint") == 1
    assert "step_00000044: its files are not as they were saved" in resumed.out
    assert step_of(resumed.record["resumed_from"]) == 42
    assert_same_end(resumed, undisturbed("zero3"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_a_disk_that_shows_late_what_others_wrote(strategy, undisturbed, tmp_path):
    """Each rank sums its own files, so the list of all of them is whole."""
    result = spied(strategy, tmp_path, SPY_LATE="1")
    assert_same_end(result, undisturbed(strategy))
    checkpoint = tmp_path / "checkpoints" / "step_00000044"
    names = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    sums = json.loads((checkpoint / "checkpoint.json").read_text().splitlines()[0])[2]
    assert set(sums) == names - {"checkpoint.json"} and "random_states_1.pkl" in sums


# ------------------------------------------------------------------------------------------------ numbers that are none


def assert_failed(result, *words):
    """One line that says so, and a record, and nothing non-finite in any file."""
    line = result.error_line()
    assert all(word in line for word in words), line
    record = result.record
    assert record["status"] == "failed" and all(math.isfinite(loss) for _, loss in record["loss_history"])
    assert "NaN" not in (result.folder / "run.json").read_text()
    assert not (result.folder / "model.safetensors").exists()


@pytest.mark.parametrize("strategy", ["baseline", "dp", *STRATEGIES])
def test_a_learning_rate_that_is_far_too_high_ends_the_run(strategy, tmp_path):
    result = launch(strategy, SCRIPT, tmp_path, *FLAGS, "--learning_rate", "1e30", ok=False)
    assert_failed(result, "step", "lower --learning_rate", "--resume")
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what, when, words", [
    ("loss", 30, "the training loss of step 31 is nan"),  # seen when the ranks meet, at the next checkpoint
    ("gradient", 34, "weights or Adam's states are not finite after step 35"),  # the loss is finite
])  # fmt: skip
def test_one_bad_number_on_one_rank_ends_all_before_it_is_saved(strategy, what, when, words, undisturbed, tmp_path):
    folder, leaves_out = tmp_path / "run", (strategy, what) == ("zero3", "gradient")
    result = spied(strategy, folder, SPY_NAN=f"{what} 1 {when}", ok=leaves_out)
    if leaves_out:  # DeepSpeed's stage 3 skips a step with such gradients, as a scaler of fp16 does
        assert all(weight.isfinite().all() for weight in result.weights.values())
        return
    assert_failed(result, words)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"best", "step_00000022", "step_00000028"}
    resumed = spied(strategy, folder, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 28
    assert_same_end(resumed, undisturbed(strategy))


def test_an_evaluation_without_a_number_is_no_best_one(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "evaluate", lambda *args: float("nan"))
    flags = ["--dataset", "digits", "--num_epochs", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *flags])
    with pytest.raises(SystemExit, match="error: the evaluation after step 22 gave .*nan"):
        script.main()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "checkpoints" / "best").exists()
