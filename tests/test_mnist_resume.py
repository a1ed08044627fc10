"""Resumed runs of train_mnist_rnn.py end exactly as runs that nothing happened to."""

import json
import os
import re
import shutil
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from conftest import launch, spied

import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
# 1,437 training digits in global batches of 64: 22 steps an epoch, 44 in all; checkpoints at 7, 14,
# 21, 22, 28, 35, 42 and 44; logs at these, and at 4, 8, 12, ...
FLAGS = """--dataset digits --num_epochs 2 --per_device_train_batch_size 32 --logging_steps 4
    --checkpointing_steps 7 --dropout 0.2""".split()
SLOW = pytest.mark.slow


def slow(*params):
    return [pytest.param(*param.split(), marks=SLOW) for param in params]


def ids_seen(folder, rank):
    """The sample ids of each micro-batch that a rank trained on, in order."""
    return [json.loads(line) for line in (folder / f"ids_{rank}.jsonl").read_text().splitlines()]


def samples_of_steps(folder, ranks, batch):
    """The sample ids of each step, in order: [steps, batch]."""
    seen = torch.tensor([ids_seen(folder, rank) for rank in range(ranks)])
    return seen.transpose(0, 1).reshape(-1, batch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """strategy -> the Result of a run that nothing happened to."""
    make = tmp_path_factory.mktemp
    return cache(lambda strategy: spied(strategy, SCRIPT, make(strategy), *FLAGS))


def killed_at_its_end(result, folder):
    """A copy of a run, as if it had been killed just before its end."""
    shutil.copytree(result.folder, folder, symlinks=True)
    (folder / "run.json").unlink()
    return folder


def assert_near(result, reference, rel, atol, rtol=1e-3, leave_out="(?!)"):
    """The same losses and weights (the final and the best), except for rounding."""
    assert result.losses == pytest.approx(reference.losses, rel=rel)
    names = [name for name in reference.weights if not re.search(leave_out, name)]
    for mine, others in ((result.weights, reference.weights), (result.best, reference.best)):
        assert mine.keys() == others.keys()
        for name in names:
            torch.testing.assert_close(mine[name], others[name], rtol=rtol, atol=atol, msg=name)


def assert_same_end(result, reference):
    """The same losses, evaluations and weights (the final and the best), bit for bit."""
    assert result.record["status"] == "completed"
    assert result.record["loss_history"] == reference.record["loss_history"]
    assert result.record["metrics"] == reference.record["metrics"]
    assert_near(result, reference, rel=0, atol=0, rtol=0)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.canary
@pytest.mark.parametrize(
    "strategy, spy, step",
    [
        ("ddp", {"SPY_SIGNAL": "SIGKILL 1 33"}, 28),
        ("zero3", {"SPY_SIGNAL": "SIGKILL 1 33"}, 28),
        ("ddp", {"SPY_EVAL": "SIGKILL 1 0"}, 22),  # in the evaluation, which is repeated
        pytest.param("fsdp", {"SPY_SIGNAL": "SIGKILL 1 33"}, 28, marks=SLOW),
    ],
)
def test_resume_after_sigkill_is_exact(strategy, spy, step, undisturbed, tmp_path):
    """TensorBoard's curve does not go back to the step of the checkpoint."""
    reference, flags = undisturbed(strategy), [*FLAGS, "--with_tracking"]
    killed = spied(strategy, SCRIPT, tmp_path, *flags, ok=False, **spy)
    assert killed.code != 0 and ("epoch 1/2: " in killed.out) == (step > 22)
    record = killed.record  # written at the start
    assert (record["status"], record["steps"], record["metrics"]) == ("running", 0, None)
    for file in tmp_path.glob("ids_*"):
        file.unlink()
    resumed = spied(strategy, SCRIPT, tmp_path, *flags, "--resume")
    assert resumed.record["resumed_from"].endswith(f"step_{step:08d}")
    steps = [event.step for event in resumed.events("loss")]
    assert steps == [4, 7, 8, 12, 14, 16, 20, 21, 22, 24, 28, 32, 35, 36, 40, 42, 44]
    whole = samples_of_steps(reference.folder, 2, 64)
    assert torch.equal(samples_of_steps(tmp_path, 2, 64), whole[step:])
    assert_same_end(resumed, reference)


@pytest.mark.parametrize(
    "strategy, spy, step",
    [
        ("ddp", {"SPY_SIGNAL": "SIGTERM+SIGUSR1+SIGTERM 1 0"}, 1),  # several in the first step
        ("ddp", {"SPY_SIGNAL": "SIGINT all 29"}, 32),  # Ctrl-C: all processes in a terminal get it
        ("ddp", {"SPY_EVAL": "SIGTERM 1 1"}, 22),  # in the evaluation
        pytest.param("zero3", {"SPY_SAVE": "SIGTERM 2"}, 16, marks=SLOW),  # while 0 saves step 14
    ],
)
def test_a_signal_at_any_moment_costs_no_step(strategy, spy, step, undisturbed, tmp_path):
    """The run stops after its first step, at the next log, or within an evaluation, which has
    several batches here.
    """
    small = ["--per_device_eval_batch_size", 50]
    stopped = spied(strategy, SCRIPT, tmp_path, *FLAGS, *small, **spy)
    record = stopped.record
    assert record["status"] == "preempted" and not (tmp_path / "model.safetensors").exists()
    assert record["steps"] == len(record["loss_history"]) == step
    assert (record["metrics"] is None) == (step <= 22), "an evaluation was cut short"
    assert [len(ids_seen(tmp_path, rank)) for rank in (0, 1)] == [step, step]
    assert stopped.out.count(f"preempted at step {step}: ") == 1 and "Traceback" not in stopped.err
    resumed = spied(strategy, SCRIPT, tmp_path, *FLAGS, "--resume")
    assert resumed.record["resumed_from"].endswith(f"step_{step:08d}")
    assert_same_end(resumed, undisturbed(strategy))


def test_where_steps_are_slow_ranks_listen_within_20_seconds(monkeypatch):
    """All ranks at the same step: the slowest rank's pace decides, with what its GPU has to do."""
    clock = [99.4]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: clock.append(100.0))
    monkeypatch.setattr(script.time, "perf_counter", lambda: clock[-1])
    accelerator = SimpleNamespace(gradient_accumulation_steps=2)
    for other_ranks, step in ((0.1, 53), (1.0, 13), (2.5, 7), (60.0, 4)):
        others = [(False, other_ranks)]
        monkeypatch.setattr(script.utils, "gather_object", lambda own, others=others: own + others)
        heard = script.listen(accelerator, [], [0.0] * 6, 99.4, 3)  # 0.2 s for each of 3 steps
        assert heard == (False, step)
        assert script.listen(accelerator, [True], [0.0] * 6, 99.4, 3)[0] is True


@SLOW
def test_a_signal_is_heard_long_before_the_next_log(undisturbed, tmp_path):
    """A step takes 6 seconds, so ranks listen after each."""
    spy = {"SPY_SIGNAL": "SIGTERM 1 1", "SPY_STEPS": str(tmp_path / "steps"), "SPY_PAUSE": "6"}
    words = [*FLAGS, "--logging_steps", 1000, "--checkpointing_steps", 1000]
    stopped = spied("ddp", SCRIPT, tmp_path, *words, **spy)
    record = stopped.record
    assert (record["status"], record["steps"], len(stopped.losses)) == ("preempted", 2, 2)
    assert_same_end(spied("ddp", SCRIPT, tmp_path, *words, "--resume"), undisturbed("ddp"))


# -------- checkpoints


def test_a_checkpoint_has_its_name_when_it_is_complete(undisturbed, tmp_path):
    """Rank 0 is killed while it saves: that is no checkpoint. A user's own folders stay."""
    folder, own = tmp_path / "checkpoints", ["step_00000099-copy", "step_9", "step_notes"]
    killed = spied("zero3", SCRIPT, tmp_path, *FLAGS, SPY_SAVE="SIGKILL 3", ok=False)  # at step 21
    names = ["step_00000007", "step_00000014"]
    assert killed.code and checkpoints(tmp_path) == ["partial", *names]
    assert list((folder / "partial").rglob("*optim_states.pt")), "it was in the middle"
    (folder / "partial" / "stray").touch()
    for name in own:
        (folder / name).mkdir()
    shutil.rmtree(folder / names[1])  # as a user does whose newest checkpoint is damaged
    stopped = spied("zero3", SCRIPT, tmp_path, *FLAGS, "--resume", SPY_SIGNAL="SIGTERM 0 0")
    assert stopped.record["resumed_from"].endswith("step_00000007")
    assert stopped.record["steps"] == 8
    assert checkpoints(tmp_path) == sorted([names[0], "step_00000008", *own])
    assert not list(folder.rglob("stray"))
    resumed = spied("zero3", SCRIPT, tmp_path, *FLAGS, "--resume")
    assert checkpoints(tmp_path) == sorted(["step_00000042", "step_00000044", *own])
    assert_same_end(resumed, undisturbed("zero3"))


@pytest.mark.parametrize(
    "name", ["random_states_1.pkl", *slow("optimizer.bin", "pytorch_model.bin", "scheduler.bin")]
)
def test_a_foreign_file_in_a_checkpoint_ends_the_run_and_runs_no_code(name, undisturbed, tmp_path):
    """Without the script, accelerate would ignore random states that it cannot read."""

    class Payload:
        def __reduce__(self):  # pickle makes this folder when it loads the file
            return os.mkdir, (str(tmp_path / "code_ran"),)

    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "run")
    file = folder / "checkpoints" / "step_00000044" / name
    assert file.exists()
    torch.save(Payload(), file)
    assert launch("ddp", SCRIPT, folder, *FLAGS, "--resume", ok=False).code
    assert not (tmp_path / "code_ran").exists()


# -------- other settings, other devices


def test_a_missing_record_is_no_reason_to_start_afresh(undisturbed, tmp_path):
    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "run")
    refused = launch("ddp", SCRIPT, folder, *FLAGS, ok=False)
    assert "holds another run: add --resume" in refused.error_line()
    env = {"FSDP_VERSION": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}  # of another strategy
    again = launch("ddp", SCRIPT, folder, *FLAGS, "--resume", env=env)
    assert again.record["resumed_from"].endswith("step_00000044")
    assert again.record["began"] == undisturbed("ddp").record["began"], "the run's, not the job's"
    assert_same_end(again, undisturbed("ddp"))


def test_other_settings_are_refused(undisturbed, tmp_path):
    """The line names the first difference. Nothing in the folder changes."""
    keep = ["--fsdp_reshard_after_forward", "false"]
    resharding = "option reshard_after_forward: true -> false"
    for was, now, flags, options, change in (
        ("ddp", "ddp", ["--hidden_size", 32, "--dropout", 0.1], {}, "dropout: 0.2 -> 0.1"),
        ("ddp", "fsdp", [], {}, "strategy: ddp -> fsdp"),
        ("ddp", "ddp", [], {"processes": 1}, "global_batch_size: 64 -> 32"),
        ("fsdp", "fsdp", [], {"launcher": keep}, resharding),
    ):
        folder = undisturbed(was).folder
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        words = [now, SCRIPT, folder, *FLAGS, "--resume", *flags]
        line = launch(*words, ok=False, **options).error_line()
        assert line == f"error: cannot resume with another {change}"
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lost", ["run.json", "checkpoints"])
def test_the_record_and_the_checkpoints_both_know_the_settings(lost, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed("ddp").folder, folder, ignore=shutil.ignore_patterns(lost))
    words = [*FLAGS, "--resume", "--learning_rate", 0.01]
    line = launch("ddp", SCRIPT, folder, *words, ok=False).error_line()
    assert "cannot resume with another learning_rate: 0.005 -> 0.01" in line


def test_lost_checkpoints_are_a_warning(undisturbed, tmp_path):
    """--resume starts again, and says so."""
    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    (folder / "run.json").write_text(json.dumps(undisturbed("ddp").record | {"status": "failed"}))
    again = launch("ddp", SCRIPT, folder, *FLAGS, "--resume")
    line = f"warning: {folder} had 44 steps, but has no checkpoint: starting at step 0"
    assert again.out.splitlines().count(line) == 1
    assert_same_end(again, undisturbed("ddp"))


def test_a_completed_run_stays_as_it_is(undisturbed):
    folder = undisturbed("ddp").folder
    before = (folder / "run.json").read_bytes()
    assert "is a completed run already" in launch("ddp", SCRIPT, folder, *FLAGS, "--resume").out
    assert (folder / "run.json").read_bytes() == before


SPREAD = """--dataset digits --num_epochs 2 --dropout 0 --checkpointing_steps 5
    --per_device_train_batch_size""".split()


@pytest.fixture(scope="module")
def by_48(tmp_path_factory):
    """A baseline run in global batches of 48, without dropout, that nothing happened to."""
    return spied("baseline", SCRIPT, tmp_path_factory.mktemp("by_48"), *SPREAD, 48)


@pytest.mark.parametrize(
    "strategy, before, after",  # ranks, and micro-batches in a step
    [
        ("baseline", (1, 3), (1, 2)),
        pytest.param("ddp", (2, 1), (3, 1), marks=SLOW),
        pytest.param("fsdp", (2, 1), (1, 3), marks=SLOW),
    ],
)
def test_a_run_goes_on_with_other_devices(strategy, before, after, by_48, tmp_path):
    """Or with other micro-batches. Losses and samples are those of an undisturbed run."""

    def run(processes, micro_batches, *flags, **env):
        words = [*SPREAD, 48 // processes // micro_batches, *flags]
        words += ["--gradient_accumulation_steps", micro_batches]
        return spied(strategy, SCRIPT, tmp_path, *words, processes=processes, **env)

    stopped = run(*before, SPY_SIGNAL=f"SIGTERM 0 {38 * before[1]}")  # in the second epoch
    assert stopped.record["steps"] == 40
    for file in tmp_path.glob("ids_*"):
        file.unlink()
    resumed = run(*after, "--resume")
    assert resumed.record["resumed_from"].endswith("step_00000040")
    assert_near(resumed, by_48, rel=1e-5, atol=1e-3)
    whole = samples_of_steps(by_48.folder, 1, 48)
    assert torch.equal(samples_of_steps(tmp_path, after[0], 48), whole[40:])


# -------- losses that are not finite, and the best model


@pytest.mark.parametrize("strategy", ["ddp", *slow("zero3")])
def test_a_nan_loss_ends_all_ranks_before_it_is_saved(strategy, undisturbed, tmp_path):
    """Rank 1 has it in step 34. All ranks see it at the next log, at step 35, which also saves."""
    failed = spied(strategy, SCRIPT, tmp_path, *FLAGS, SPY_NAN="1 33", ok=False)
    assert failed.error_line().startswith("error: the loss of step 34 is not finite")
    assert failed.record["status"] == "failed" and len(failed.losses) == 33
    assert "NaN" not in (tmp_path / "run.json").read_text()
    assert not (tmp_path / "model.safetensors").exists()
    assert checkpoints(tmp_path) == ["step_00000022", "step_00000028"]
    assert_same_end(spied(strategy, SCRIPT, tmp_path, *FLAGS, "--resume"), undisturbed(strategy))


def test_best_is_the_model_of_the_epoch_that_scored_best(tmp_path):
    """The run is killed in its last evaluation, and resumed."""
    flags = "--dataset digits --num_epochs 3 --per_device_train_batch_size 700".split()
    spy = {"SPY_SCORES": "0.5 0.9", "SPY_EVAL": "SIGKILL 0 2"}
    assert spied("baseline", SCRIPT, tmp_path, *flags, ok=False, **spy).code
    resumed = spied("baseline", SCRIPT, tmp_path, *flags, "--resume", SPY_SCORES="0.7")
    assert resumed.record["metrics"]["accuracy"] == pytest.approx(0.7)
    second, third = (torch.load(path) for path in sorted(tmp_path.glob("checkpoints/*/*model.bin")))
    for name, weight in resumed.best.items():
        assert torch.equal(weight, second[name])
    assert not torch.equal(resumed.best["head.weight"], third["head.weight"])
