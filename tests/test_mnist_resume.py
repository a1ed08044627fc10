"""Nothing lost: killed and preempted runs of train_mnist_rnn.py end where undisturbed ones end, bit
for bit.
"""

import contextlib
import gc
import json
import math
import os
import re
import shutil
import sys
import zlib
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import RUNGS, STRATEGIES, launch
from safetensors.torch import load_file

import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
# 1,437 training digits in global batches of 64: 22 steps an epoch, 44 in all; checkpoints at 7, 14,
# 21, 22, 28, 35, 42 and 44.
FLAGS = """--dataset digits --num_epochs 2 --per_device_train_batch_size 32
    --checkpointing_steps 7 --dropout 0.2""".split()
SLOW = pytest.mark.slow


def slow(*params):
    return [pytest.param(*param.split(), marks=SLOW) for param in params]


def ids_seen(folder, rank):
    """The sample ids of each step that a rank trained on, in order."""
    return [json.loads(line) for line in (folder / f"ids_{rank}.jsonl").read_text().splitlines()]


def spied(strategy, folder, *flags, ok=True, **env):
    """A spied run into `folder`, its notes in `folder` too."""
    folder.mkdir(exist_ok=True)
    env["SPY_DIR"] = str(folder)
    return launch(strategy, SCRIPT, folder, *FLAGS, *flags, env=env, ok=ok)


def main_with(monkeypatch, *flags):
    """Run the script's `main` in this process."""
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, flags)])
    script.main(script.parse_args())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """strategy -> the Result of a run that nothing happened to."""
    return cache(lambda strategy: spied(strategy, tmp_path_factory.mktemp(strategy)))


def killed_at_its_end(result, folder):
    """A copy of a run, as if it had been killed just before its end."""
    shutil.copytree(result.folder, folder, symlinks=True)
    (folder / "run.json").unlink()
    return folder


def assert_near(result, reference, rel, atol, leave_out="(?!)"):
    """The same losses of every step, and weights of the last epoch and of the best, but for
    rounding; prints how near.
    """
    assert result.losses == pytest.approx(reference.losses, rel=rel)
    names = [name for name in reference.weights if not re.search(leave_out, name)]
    for mine, others in ((result.weights, reference.weights), (result.best, reference.best)):
        assert mine.keys() == others.keys()
        for name in names:
            torch.testing.assert_close(mine[name], others[name], rtol=1e-3, atol=atol, msg=name)
    record, weights = result.record, [result.weights[n] - reference.weights[n] for n in names]
    loss = max(abs(a / b - 1) for a, b in zip(result.losses, reference.losses, strict=True))
    weight = max(difference.abs().max().item() for difference in weights)
    work = f"{record['strategy']}, accumulation {record['gradient_accumulation_steps']}"
    print(f"{work}: relative loss {loss:.1e}, absolute weights {weight:.1e}")


def assert_same_end(result, reference):
    """The same losses of every step, evaluations, and final and best weights, bit for bit."""
    assert result.record["status"] == "completed"
    assert result.record["loss_history"] == reference.record["loss_history"]
    assert result.record["metrics"] == reference.record["metrics"]
    for mine, others in ((result.weights, reference.weights), (result.best, reference.best)):
        assert mine.keys() == others.keys()
        for name, weight in mine.items():
            assert torch.equal(weight, others[name]), name
    assert not list(result.folder.glob("best.*")), "what a kill left is gone"


def step_of(path):
    return int(str(path).split("step_")[1])


@pytest.mark.parametrize("strategy", ["ddp", "zero3", *slow("fsdp", "zero2", *RUNGS)])
def test_resume_after_sigkill_is_exact(strategy, undisturbed, tmp_path):
    reference = undisturbed(strategy)
    killed = spied(strategy, tmp_path, SPY_SIGNAL="SIGKILL 1 31", ok=False)  # in epoch 2
    assert killed.code != 0
    record = killed.record  # written at the start
    assert (record["status"], record["steps"], record["metrics"]) == ("running", 0, None)
    seen_before = {rank: ids_seen(tmp_path, rank) for rank in (0, 1)}
    for rank in (0, 1):
        (tmp_path / f"ids_{rank}.jsonl").unlink()

    resumed = spied(strategy, tmp_path, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 28
    for rank in (0, 1):
        whole = ids_seen(reference.folder, rank)
        assert len(whole) == 44 and seen_before[rank][:31] == whole[:31]
        assert ids_seen(tmp_path, rank) == whole[28:], "not the remaining samples in their order"
    assert_same_end(resumed, reference)


@pytest.mark.parametrize(
    "strategy, spy, step",
    [
        ("ddp", {"SPY_SIGNAL": "SIGTERM+SIGUSR1+SIGTERM 1 0"}, 1),  # several in the first step
        # Ctrl-C, which all processes in a terminal receive; the ranks meet at the next checkpoint
        ("ddp", {"SPY_SIGNAL": "SIGINT all 29"}, 35),
        pytest.param("zero2", {"SPY_SIGNAL": "SIGUSR1 0 24"}, 28, marks=SLOW),
        pytest.param("zero3", {"SPY_SAVE": "SIGTERM 2"}, 21, marks=SLOW),  # while 0 saves step 14
        pytest.param("fsdp", {"SPY_EVAL": "SIGTERM 1 0"}, 22, marks=SLOW),  # in the evaluation
    ],
)
def test_a_signal_at_any_moment_costs_no_step(strategy, spy, step, undisturbed, tmp_path):
    stopped = spied(strategy, tmp_path, **spy)
    record = stopped.record
    assert record["status"] == "preempted"
    assert record["steps"] == len(record["loss_history"]) == step
    assert [len(ids_seen(tmp_path, rank)) for rank in (0, 1)] == [step, step]
    assert stopped.out.count(f"preempted at step {step}: ") == 1
    assert "; --resume goes on" in stopped.out and "Traceback" not in stopped.err
    resumed = spied(strategy, tmp_path, "--resume")
    assert step_of(resumed.record["resumed_from"]) == step
    assert_same_end(resumed, undisturbed(strategy))


def test_all_ranks_signalled_between_checkpoints(tmp_path):
    """Ranks agree after step 1, after the warm-up's 10, and from there on every SYNC_STEPS = 50."""
    flags = "--dataset digits --num_epochs 2 --per_device_train_batch_size 10".split()
    env = {"SPY_DIR": str(tmp_path), "SPY_SIGNAL": "SIGTERM all 20"}
    record = launch("ddp", SCRIPT, tmp_path / "run", *flags, env=env).record  # 71 steps an epoch
    assert (record["status"], record["steps"]) == ("preempted", 60)


def test_a_run_killed_in_its_evaluation_evaluates_again(undisturbed, tmp_path):
    killed = spied("ddp", tmp_path, SPY_EVAL="SIGKILL 1 0", ok=False)
    assert killed.code and "epoch 1/2: " not in killed.out
    resumed = spied("ddp", tmp_path, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 22
    assert "epoch 1/2: " in resumed.out and "epoch 2/2: " in resumed.out
    assert_same_end(resumed, undisturbed("ddp"))


# -------- checkpoints


def fake_run(folder, step=0, settings=None):
    """As much of a Run as a checkpoint needs."""
    progress = script.Progress(step)
    args = SimpleNamespace(resume=True)
    settings = settings or {"seed": 0}
    return SimpleNamespace(folder=folder, args=args, settings=settings, progress=progress)


@pytest.fixture
def save():
    """Saves the checkpoint of a fake run, of one small file."""
    accelerator = script.Accelerator(cpu=True)
    accelerator.save_state = lambda folder: (folder.mkdir(), (folder / "weights").write_text("ww"))

    def save(run):
        run.accelerator = accelerator
        script.save_checkpoint(run)

    save.accelerator = accelerator
    return save


def breaking(last, calls, name, original):
    """The function `original`, which notes its calls, and breaks off in call number `last`."""

    def call(*args, **options):
        calls.append(name)
        if len(calls) < last:
            return original(*args, **options)
        if name == "write_text":
            args[0].write_bytes(args[1].encode()[: len(args[1]) // 2])
        if name == "rmtree" and (args[0] / "weights").exists():
            os.remove(args[0] / "weights")
        raise KeyboardInterrupt

    return call


CALLS = [(Path, name) for name in ("rename", "replace", "write_text", "unlink", "mkdir")]
CALLS += [(shutil, "rmtree"), (os, "fsync")]


def test_kill_at_any_call_of_the_file_system_leaves_whole_checkpoints(save, tmp_path, capsys):
    """A save is broken off before, or in, each of its calls in turn; then a run resumes."""
    for last in range(1, 40):
        folder, calls = tmp_path / str(last), []
        (folder / "checkpoints").mkdir(parents=True)
        for step in (1, 2, 3):
            save(fake_run(folder, step))
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for owner, name in CALLS:
                patch.setattr(owner, name, breaking(last, calls, name, getattr(owner, name)))
            save(fake_run(folder, 4))
        for again in (False, True):
            _, path, progress = script.open_folder(fake_run(folder))
            assert progress["step"] >= 3 + again and path.endswith(f"step_{progress['step']:08d}")
            assert not capsys.readouterr().out, "what has a checkpoint's name is whole"
            save(fake_run(folder, progress["step"] + 1))
        if len(calls) < last:
            break
    assert 5 < len(calls) < last, "not every call was tried"


def write_best(folder, text):
    with script.replacing(folder) as new:
        (new / "config").write_text(text)
        (new / "weights").write_text(text)


def test_kill_at_any_call_of_the_file_system_leaves_a_whole_best_model(tmp_path):
    """That of before or the new one: in best/, or else in best.old/. Then the run goes on; also
    where an earlier kill had left best.old/ alone.
    """
    for name, last in product(("best", "best.old"), range(1, 12)):
        folder, calls = tmp_path / f"{name}-{last}" / "best", []
        folder.parent.mkdir()
        write_best(folder, "before")
        folder.rename(folder.with_name(name))
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for owner, call in CALLS:
                patch.setattr(owner, call, breaking(last, calls, call, getattr(owner, call)))
            write_best(folder, "new model")
        [place, *_] = filter(Path.exists, (folder, folder.with_suffix(".old")))
        left = {path.name: path.read_text() for path in place.iterdir()}
        assert left in [dict.fromkeys(left, text) for text in ("before", "new model")], calls
        assert len(left) == 2, calls
        write_best(folder, "next")
        assert [path.name for path in folder.parent.iterdir()] == ["best"]
    assert 5 < len(calls) < last, "not every call was tried"


def test_only_step_and_eight_digits_are_the_scripts_own(save, tmp_path, capsys):
    """A copy that a user made is neither resumed nor pruned. The two newest stay."""
    folder = tmp_path / "checkpoints"
    mine = [folder / name for name in ("step_00000001-copy1", "step_9", "step_99999999.old")]
    for path in mine:
        path.mkdir(parents=True)
    (folder / "step_00000009.partial").mkdir()  # of a run that was killed
    assert script.open_folder(fake_run(tmp_path))[1:] == (None, {})
    for step in (1, 2, 3, 4, 5):
        save(fake_run(tmp_path, step))
    assert script.open_folder(fake_run(tmp_path))[1] == str(folder / "step_00000005")
    kept = {folder / f"step_{step:08d}" for step in (4, 5)}
    assert set(folder.iterdir()) == {*mine, *kept} and not capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [{"settings": {}, "state": {"step": 7}, "files": {}}, [{}, {"step": 7}, {}]]
)
def test_a_checkpoint_of_an_earlier_version_is_refused_and_untouched(content, tmp_path):
    folder = tmp_path / "checkpoints" / "step_00000007"
    folder.mkdir(parents=True)
    text = json.dumps(content)
    (folder / "checkpoint.json").write_text(f"{text}\n{zlib.crc32(text.encode())}")
    (tmp_path / ".lock").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="^error: .*step_00000007 is an earlier version's: "):
        script.open_folder(fake_run(tmp_path))
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_files_are_summed_when_all_ranks_have_written_theirs(save, tmp_path, monkeypatch):
    """Several may write one file, as that of fp16's scaler."""
    events, accelerator = [], save.accelerator
    (tmp_path / "checkpoints").mkdir()
    write = accelerator.save_state
    accelerator.save_state = lambda folder: (events.append("save"), write(folder))
    monkeypatch.setattr(accelerator, "wait_for_everyone", lambda: events.append("wait"))
    monkeypatch.setattr(script, "checksum", lambda path: events.append("sum"))
    save(fake_run(tmp_path, 1))
    assert events == ["save", "wait", "sum", "wait"]


def test_kill_during_a_save_and_a_truncated_checkpoint_cost_only_steps(undisturbed, tmp_path):
    """All ranks fall back to the checkpoint before those, with one warning."""
    killed = spied("zero3", tmp_path, SPY_SAVE="SIGKILL 3", ok=False)  # in the save of step 21
    checkpoints = tmp_path / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert killed.code and names == ["step_00000007", "step_00000014", "step_00000021.partial"]

    [file] = (checkpoints / "step_00000014").rglob("*zero_pp_rank_1_*optim_states.pt")
    file.write_bytes(file.read_bytes()[:-100])
    (tmp_path / "run.json").write_text("")  # the power was lost, too
    (checkpoints / "step_00000014.damaged" / "before").mkdir(parents=True)  # it was damaged before
    resumed = spied("zero3", tmp_path, "--resume")
    assert resumed.out.count("warning: skipping the damaged checkpoint") == 1
    assert "step_00000014: its files have changed" in resumed.out
    assert step_of(resumed.record["resumed_from"]) == 7
    assert_same_end(resumed, undisturbed("zero3"))
    assert not list(checkpoints.glob("*.partial"))
    assert (checkpoints / "step_00000014.damaged").exists(), "nothing is lost"


@pytest.mark.parametrize("strategy", ["ddp", *slow("baseline", "fsdp", "zero2", "zero3")])
def test_a_flipped_byte_or_a_missing_file_costs_one_checkpoint(
    strategy, undisturbed, tmp_path, capsys
):
    """Every file of the newest checkpoint in turn, also where it was damaged once before."""
    checkpoints = undisturbed(strategy).folder / "checkpoints"
    *_, before, newest = sorted(checkpoints.glob("step_*"))
    written = json.loads((newest / "checkpoint.json").read_text().splitlines()[0])
    names = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
    settings, sums = written["settings"], written["files"]
    assert written["version"] == script.VERSION
    assert set(sums) == names - {"checkpoint.json"} and len(names) >= 5

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)

    for i, (name, damage) in enumerate(product(sorted(names), (flip, Path.unlink))):
        folder = tmp_path / str(i)
        for path in (newest, before):
            shutil.copytree(path, folder / "checkpoints" / path.name)
        shutil.copytree(before, (folder / "checkpoints" / newest.name).with_suffix(".damaged"))
        damage(folder / "checkpoints" / newest.name / name)
        _, path, progress = script.open_folder(fake_run(folder, settings=settings))
        assert Path(path).name == before.name and step_of(path) == progress["step"]
        assert capsys.readouterr().out.count("warning: skipping the damaged checkpoint") == 1
    flip(folder / "checkpoints" / before.name / name)
    with pytest.raises(SystemExit, match="error: no checkpoint in .* is whole: start afresh"):
        script.open_folder(fake_run(folder, settings=settings))


@pytest.mark.parametrize("strategy", ["ddp", *slow("fsdp", "zero3")])
def test_a_disk_that_shows_late_what_others_wrote(strategy, undisturbed, tmp_path):
    """Each rank sums its own files, so the list of all of them is whole."""
    result = spied(strategy, tmp_path, SPY_LATE="1")
    assert_same_end(result, undisturbed(strategy))
    checkpoint = tmp_path / "checkpoints" / "step_00000044"
    names = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    sums = json.loads((checkpoint / "checkpoint.json").read_text().splitlines()[0])["files"]
    assert set(sums) == names - {"checkpoint.json"} and "random_states_1.pkl" in sums


# -------- other settings, other devices


def test_resuming_something_else_is_one_clear_error(undisturbed, tmp_path):
    assert undisturbed("fsdp").record["strategy_options"]["reshard_after_forward"] == "true"
    keep = ["--fsdp_reshard_after_forward", "false"]
    for was, now, flags, options, change in (
        ("ddp", "ddp", ["--hidden_size", 32], {}, "model lstm-64 -> lstm-32"),
        ("ddp", "fsdp", [], {}, "strategy ddp -> fsdp"),
        ("ddp", "ddp", [], {"processes": 1}, "global_batch_size 64 -> 32"),
        ("fsdp", "fsdp", [], {"launcher": keep}, "_after_forward': 'true'.* -> .*: 'false'"),
    ):
        folder = killed_at_its_end(undisturbed(was), tmp_path / change[:9])
        result = launch(now, SCRIPT, folder, *FLAGS, "--resume", *flags, ok=False, **options)
        assert re.search(change, result.error_line())


def test_a_completed_run_keeps_its_record_and_its_folder(undisturbed):
    """And is not taken for one with other settings."""
    folder = undisturbed("ddp").folder
    before = (folder / "run.json").read_bytes()
    again = launch("ddp", SCRIPT, folder, *FLAGS, "--resume")
    assert "is a completed run already" in again.out
    assert "holds another run" in launch("ddp", SCRIPT, folder, *FLAGS, ok=False).error_line()
    others = ["--learning_rate", 0.01, "--dropout", 0.3, "--seed", 1, "--resume"]
    line = launch("ddp", SCRIPT, folder, *FLAGS, *others, ok=False).error_line()
    assert "other settings: seed 0 -> 1, dropout 0.2 -> 0.3, learning_rate 0.005 -> 0.01" in line
    assert (folder / "run.json").read_bytes() == before


SPREAD = """--dataset digits --num_epochs 2 --dropout 0 --checkpointing_steps 5
    --per_device_train_batch_size""".split()


@pytest.fixture(scope="module")
def by_48(tmp_path_factory):
    """A baseline run without dropout that nothing happened to, in global batches of 48."""
    folder = tmp_path_factory.mktemp("by_48")
    return launch("baseline", SCRIPT, folder, *SPREAD, 48, env={"SPY_DIR": str(folder)})


def ids_of_steps(folder, ranks):
    steps = zip(*(ids_seen(folder, rank) for rank in range(ranks)), strict=True)
    return [sorted(sum(step, [])) for step in steps]


PAIRS = """ddp 2 -> ddp 3, fsdp 1 -> fsdp 2, fsdp 2 -> fsdp 1, ddp 2 -> baseline 1,
    baseline 1 -> ddp 2"""


@SLOW
@pytest.mark.parametrize("first, then", re.findall(r"(\w+ \d) -> (\w+ \d)", PAIRS))
def test_a_run_goes_on_with_other_devices(first, then, by_48, tmp_path):
    """The losses of every step, and the samples, are those of an undisturbed run."""

    def run(words, *flags, **env):
        strategy, processes = words.split()
        more = {} if strategy == "baseline" else {"processes": processes}
        env["SPY_DIR"], batch = str(tmp_path), 48 // int(processes)
        return launch(strategy, SCRIPT, tmp_path, *SPREAD, batch, *flags, env=env, **more)

    stopped = run(first, SPY_SIGNAL="SIGTERM 0 38")  # in the second epoch
    assert stopped.record["steps"] == 40
    for file in tmp_path.glob("ids_*"):
        file.unlink()
    resumed = run(then, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 40
    assert_near(resumed, by_48, rel=1e-5, atol=1e-3)
    assert ids_of_steps(tmp_path, int(then.split()[1])) == ids_of_steps(by_48.folder, 1)[40:]


@SLOW
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_goes_on_with_as_many_processes_only(strategy, undisturbed, tmp_path):
    folder = killed_at_its_end(undisturbed(strategy), tmp_path / "run")
    words = [*FLAGS, "--per_device_train_batch_size", 64, "--resume"]
    line = launch(strategy, SCRIPT, folder, *words, processes=1, ok=False).error_line()
    assert f"strategy {strategy} on 2 -> {strategy} on 1" in line


# -------- numbers that are none


def assert_failed(result, *words):
    """One line that says so, and a record, and nothing non-finite in any file."""
    line = result.error_line()
    assert all(word in line for word in words), line
    record = result.record
    assert record["status"] == "failed"
    assert all(math.isfinite(loss) for _, loss in record["loss_history"])
    assert "NaN" not in (result.folder / "run.json").read_text()
    assert not (result.folder / "model.safetensors").exists()


@pytest.mark.parametrize("strategy", ["baseline", *slow(*STRATEGIES)])
def test_a_learning_rate_that_is_far_too_high_ends_the_run(strategy, tmp_path):
    result = launch(strategy, SCRIPT, tmp_path, *FLAGS, "--learning_rate", "1e30", ok=False)
    assert_failed(result, "step", "lower --learning_rate", "--resume")
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("strategy", ["ddp", *slow("fsdp", "zero2", "zero3")])
def test_one_bad_number_on_one_rank_ends_all_before_it_is_saved(strategy, undisturbed, tmp_path):
    """First a loss, which is seen when the ranks meet, at the next checkpoint. Then, with a finite
    loss, gradients in the step before a checkpoint.
    """
    failed = spied(strategy, tmp_path, SPY_NAN="loss 1 30", ok=False)
    assert_failed(failed, "the training loss of step 31 is nan")
    gradients = {"SPY_NAN": "gradient 1 6"}  # of step 35
    if strategy == "zero3":  # it skips a step with such gradients, as a scaler of fp16 does
        resumed = spied(strategy, tmp_path, "--resume", **gradients)
        assert all(weight.isfinite().all() for weight in resumed.weights.values())
        return
    again = spied(strategy, tmp_path, "--resume", ok=False, **gradients)
    assert_failed(again, "weights or Adam's states are not finite after step 35")
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000022", "step_00000028"}
    resumed = spied(strategy, tmp_path, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 28
    assert_same_end(resumed, undisturbed(strategy))


def test_best_is_the_model_of_the_epoch_that_scored_best(tmp_path, monkeypatch):
    """Also where links are forbidden, and of a run that broke down in its last evaluation."""
    seen, scores = [], iter((0.5, 0.9, None, 0.7))

    def evaluate(accelerator, model, loader, run):
        seen.append({name: weight.clone() for name, weight in model.state_dict().items()})
        return next(scores) or sys.exit("broken")

    def forbidden(*args, **options):
        raise PermissionError("links are forbidden")

    monkeypatch.setattr(script, "evaluate", evaluate)
    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, forbidden)
    flags = "--dataset digits --num_epochs 3 --per_device_train_batch_size 700 --output_dir".split()
    for more in ([], ["--resume"]):
        with contextlib.suppress(SystemExit):
            main_with(monkeypatch, *flags, tmp_path, *more)
        gc.collect()  # the lock of a run that broke down
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "completed"
    best = load_file(tmp_path / "best" / "model.safetensors")
    same = [all(torch.equal(weight, one[name]) for name, weight in best.items()) for one in seen]
    assert same == [False, True, False, False]


def test_an_evaluation_without_a_number_is_no_best_one(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "evaluate", lambda *args: float("nan"))
    flags = ["--dataset", "digits", "--num_epochs", 1, "--output_dir", tmp_path]
    with pytest.raises(SystemExit, match="error: the evaluation after step 22 gave .*nan"):
        main_with(monkeypatch, *flags)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "best").exists()
