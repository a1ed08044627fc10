"""Nothing lost: killed and preempted runs of train_mnist_rnn.py end where undisturbed ones end, bit
for bit.
"""

import json
import math
import re
import shutil
from functools import cache

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
    """The sample ids of each step that a rank trained on, in order."""
    return [json.loads(line) for line in (folder / f"ids_{rank}.jsonl").read_text().splitlines()]


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


def assert_near(result, reference, rel, atol, leave_out="(?!)"):
    """The same losses of every step, and weights of the last epoch and of the best, but for
    rounding.
    """
    assert result.losses == pytest.approx(reference.losses, rel=rel)
    names = [name for name in reference.weights if not re.search(leave_out, name)]
    for mine, others in ((result.weights, reference.weights), (result.best, reference.best)):
        assert mine.keys() == others.keys()
        for name in names:
            torch.testing.assert_close(mine[name], others[name], rtol=1e-3, atol=atol, msg=name)


def assert_same_end(result, reference):
    """The same losses of every step, evaluations, and final and best weights, bit for bit."""
    assert result.record["status"] == "completed"
    assert result.record["loss_history"] == reference.record["loss_history"]
    assert result.record["metrics"] == reference.record["metrics"]
    for mine, others in ((result.weights, reference.weights), (result.best, reference.best)):
        assert mine.keys() == others.keys()
        for name, weight in mine.items():
            assert torch.equal(weight, others[name]), name


def step_of(path):
    return int(str(path).split("step_")[1])


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.canary
@pytest.mark.parametrize(
    "strategy, order, seen, step",
    [
        ("ddp", "SPY_SIGNAL", 31, 28),
        ("zero3", "SPY_SIGNAL", 31, 28),
        ("ddp", "SPY_EVAL", 22, 22),  # in the evaluation, which is repeated
        pytest.param("fsdp", "SPY_SIGNAL", 31, 28, marks=SLOW),
    ],
)
def test_resume_after_sigkill_is_exact(strategy, order, seen, step, undisturbed, tmp_path):
    reference = undisturbed(strategy)
    when = 31 if order == "SPY_SIGNAL" else 0
    killed = spied(strategy, SCRIPT, tmp_path, *FLAGS, ok=False, **{order: f"SIGKILL 1 {when}"})
    assert killed.code != 0 and ("epoch 1/2: " in killed.out) == (when > 22)
    record = killed.record  # written at the start
    assert (record["status"], record["steps"], record["metrics"]) == ("running", 0, None)
    seen_before = {rank: ids_seen(tmp_path, rank) for rank in (0, 1)}
    for rank in (0, 1):
        (tmp_path / f"ids_{rank}.jsonl").unlink()

    resumed = spied(strategy, SCRIPT, tmp_path, *FLAGS, "--resume")
    assert step_of(resumed.record["resumed_from"]) == step
    assert f"resuming from {resumed.record['resumed_from']}" in resumed.out
    for rank in (0, 1):
        whole = ids_seen(reference.folder, rank)
        assert len(whole) == 44 and seen_before[rank][:seen] == whole[:seen]
        assert ids_seen(tmp_path, rank) == whole[step:], "not the remaining samples in their order"
    assert_same_end(resumed, reference)


@pytest.mark.parametrize(
    "strategy, spy, step",
    [
        ("ddp", {"SPY_SIGNAL": "SIGTERM+SIGUSR1+SIGTERM 1 0"}, 4),  # several in the first step
        ("ddp", {"SPY_SIGNAL": "SIGINT all 29"}, 32),  # Ctrl-C: all processes in a terminal get it
        ("ddp", {"SPY_EVAL": "SIGTERM 1 1"}, 22),  # in the evaluation
        pytest.param("zero3", {"SPY_SAVE": "SIGTERM 2"}, 16, marks=SLOW),  # while 0 saves step 14
        pytest.param("fsdp", {"SPY_EVAL": "SIGHUP 0 0"}, 22, marks=SLOW),
    ],
)
def test_a_signal_at_any_moment_costs_no_step(strategy, spy, step, undisturbed, tmp_path):
    """It is heard at the next log, or within an evaluation, here of several batches."""
    small = ["--per_device_eval_batch_size", 50]
    stopped = spied(strategy, SCRIPT, tmp_path, *FLAGS, *small, **spy)
    record = stopped.record
    assert record["status"] == "preempted" and not (tmp_path / "model.safetensors").exists()
    assert record["steps"] == len(record["loss_history"]) == step
    assert (record["metrics"] is None) == (step <= 22), "an evaluation was cut short"
    assert [len(ids_seen(tmp_path, rank)) for rank in (0, 1)] == [step, step]
    assert stopped.out.count(f"preempted at step {step}: ") == 1 and "Traceback" not in stopped.err
    resumed = spied(strategy, SCRIPT, tmp_path, *FLAGS, "--resume")
    assert step_of(resumed.record["resumed_from"]) == step
    assert_same_end(resumed, undisturbed(strategy))


def test_a_resumed_curve_does_not_go_back(tmp_path):
    """The run is killed after it has logged step 32, and goes on from step 28."""
    words = [*FLAGS, "--with_tracking"]
    assert spied("baseline", SCRIPT, tmp_path, *words, ok=False, SPY_SIGNAL="SIGKILL 0 66").code
    logged = spied("baseline", SCRIPT, tmp_path, *words, "--resume").events("loss")
    assert [event.step for event in logged] == sorted({event.step for event in logged})


# -------- checkpoints


def test_a_checkpoint_has_its_name_when_it_is_complete(undisturbed, tmp_path):
    """A rank is killed in the middle of a save. What that save left is in no checkpoint, and what a
    user made stays.
    """
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
    assert step_of(stopped.record["resumed_from"]) == 7 and stopped.record["steps"] == 8
    assert checkpoints(tmp_path) == sorted([names[0], "step_00000008", *own])
    assert not list(folder.rglob("stray"))
    resumed = spied("zero3", SCRIPT, tmp_path, *FLAGS, "--resume")
    assert checkpoints(tmp_path) == sorted(["step_00000042", "step_00000044", *own])
    assert_same_end(resumed, undisturbed("zero3"))


def newest(folder):
    return max((folder / "checkpoints").glob(script.CHECKPOINT))


FILES = ["optimizer.bin", "progress.json", "pytorch_model.bin", "random_states_0.pkl"]
FILES += ["random_states_1.pkl", "scheduler.bin"]  # of DDP; a baseline has all but one


@pytest.mark.parametrize("rank, damage", [(0, "half"), (1, "gone"), (1, "of another kind")])
def test_no_run_goes_on_without_its_random_states(rank, damage, undisturbed, tmp_path):
    """accelerate alone would go on: with dropout it would be another run."""
    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "run")
    shutil.rmtree(newest(folder))  # after its last step, no random number is drawn
    assert sorted(file.name for file in newest(folder).iterdir()) == FILES
    file = newest(folder) / f"random_states_{rank}.pkl"
    if damage == "gone":
        file.unlink()
    elif damage == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        torch.save({}, file)
    line = launch("ddp", SCRIPT, folder, *FLAGS, "--resume", ok=False).error_line()
    assert line.startswith(f"error: {file} is missing or damaged ")
    assert line.endswith(f": remove {newest(folder)}, and --resume takes the one before")


@SLOW
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_end_a_run_and_no_file_runs_code(name, undisturbed, tmp_path):
    class Spell:
        def __reduce__(self):  # what pickle makes of a file when it is loaded
            return open, (str(tmp_path / "sign"), "w")

    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "run")
    torch.save(Spell(), newest(folder) / name)
    assert launch("ddp", SCRIPT, folder, *FLAGS, "--resume", ok=False).code
    assert not (tmp_path / "sign").exists()


# -------- other settings, other devices


def test_a_missing_record_is_no_reason_to_start_afresh(undisturbed, tmp_path):
    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "run")
    refused = launch("ddp", SCRIPT, folder, *FLAGS, ok=False)
    assert "holds another run: add --resume" in refused.error_line()
    env = {"FSDP_VERSION": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}  # of another strategy
    again = launch("ddp", SCRIPT, folder, *FLAGS, "--resume", env=env)
    assert step_of(again.record["resumed_from"]) == 44
    assert again.record["began"] == undisturbed("ddp").record["began"], "the run's, not the job's"
    assert_same_end(again, undisturbed("ddp"))


def test_other_settings_are_refused_and_a_completed_run_stays(undisturbed, tmp_path):
    """Only the first difference is named."""
    assert undisturbed("fsdp").record["strategy_options"]["reshard_after_forward"] == "true"
    keep = ["--fsdp_reshard_after_forward", "false"]
    resharding = "strategy option, reshard_after_forward: true -> false"
    one = ["--per_device_train_batch_size", 64]
    for was, now, flags, options, change in (
        ("ddp", "ddp", ["--hidden_size", 32, "--dropout", 0.1], {}, "dropout: 0.2 -> 0.1"),
        ("ddp", "fsdp", [], {}, "strategy: ddp -> fsdp"),
        ("ddp", "baseline", one, {}, "strategy: ddp -> baseline"),
        ("ddp", "ddp", [], {"processes": 1}, "global_batch_size: 64 -> 32"),
        ("fsdp", "fsdp", [], {"launcher": keep}, resharding),
    ):
        folder = undisturbed(was).folder
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        words = [now, SCRIPT, folder, *FLAGS, "--resume", *flags]
        line = launch(*words, ok=False, **options).error_line()
        assert line == f"error: cannot resume with another {change}"
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    # Also without its record: the checkpoint knows its settings.
    folder = killed_at_its_end(undisturbed("ddp"), tmp_path / "cut")
    faster = [*FLAGS, "--resume", "--learning_rate", 0.01]
    line = launch("ddp", SCRIPT, folder, *faster, ok=False).error_line()
    assert "cannot resume with another learning_rate: 0.005 -> 0.01" in line

    # A checkpoint of 0.6.0 had its settings, also the version, in one flat "run".
    run = json.loads((newest(folder) / "progress.json").read_text())["run"]
    old = {"run": {"version": "0.6.0", "strategy": "ddp"} | run["workload"], "processes": 2}
    (newest(folder) / "progress.json").write_text(json.dumps(old))
    line = launch("ddp", SCRIPT, folder, *FLAGS, "--resume", ok=False).error_line()
    assert line == f"error: cannot resume with another version: 0.6.0 -> {script.VERSION}"

    folder = killed_at_its_end(undisturbed("zero3"), tmp_path / "run")
    words = [*FLAGS, "--resume", *one]
    refused = launch("zero3", SCRIPT, folder, *words, processes=1, ok=False)
    assert refused.code and "a DP world size of 2 but the current world size is 1" in refused.err

    folder = undisturbed("ddp").folder
    before = (folder / "run.json").read_bytes()
    assert "is a completed run already" in launch("ddp", SCRIPT, folder, *FLAGS, "--resume").out
    assert (folder / "run.json").read_bytes() == before
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    line = launch("ddp", SCRIPT, tmp_path / "bare", *faster, ok=False).error_line()
    assert "cannot resume with another learning_rate: 0.005 -> 0.01" in line


SPREAD = """--dataset digits --num_epochs 2 --dropout 0 --checkpointing_steps 5
    --per_device_train_batch_size""".split()


@pytest.fixture(scope="module")
def by_48(tmp_path_factory):
    """A baseline run without dropout that nothing happened to, in global batches of 48."""
    return spied("baseline", SCRIPT, tmp_path_factory.mktemp("by_48"), *SPREAD, 48)


def samples_of_steps(folder, ranks):
    """The samples of each step, in order of their numbers: [steps, 48]."""
    seen = torch.tensor([ids_seen(folder, rank) for rank in range(ranks)])
    return seen.transpose(0, 1).reshape(-1, 48).sort().values


@pytest.mark.parametrize(
    "strategy, before, after",  # ranks, and micro-batches in a step
    [
        ("baseline", (1, 3), (1, 2)),
        pytest.param("ddp", (2, 1), (3, 1), marks=SLOW),
        pytest.param("fsdp", (2, 1), (1, 3), marks=SLOW),
    ],
)
def test_a_run_goes_on_with_other_devices(strategy, before, after, by_48, tmp_path):
    """Or other micro-batches. Losses and samples of every step are those of an undisturbed run."""

    def run(processes, micro_batches, *flags, **env):
        words = [*SPREAD, 48 // processes // micro_batches, *flags]
        words += ["--gradient_accumulation_steps", micro_batches]
        return spied(strategy, SCRIPT, tmp_path, *words, processes=processes, **env)

    stopped = run(*before, SPY_SIGNAL=f"SIGTERM 0 {38 * before[1]}")  # in the second epoch
    assert stopped.record["steps"] == 40
    # Another number of ranks needs no random states of the old ones.
    unused = [*newest(tmp_path).glob("random_states_*")] * (before[0] != after[0])
    for file in [*tmp_path.glob("ids_*"), *unused]:
        file.unlink()
    resumed = run(*after, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 40
    assert_near(resumed, by_48, rel=1e-5, atol=1e-3)
    whole = samples_of_steps(by_48.folder, 1)
    assert torch.equal(samples_of_steps(tmp_path, after[0]), whole[40:])


# -------- numbers that are none


@pytest.mark.parametrize("strategy", ["ddp", *slow("zero3")])
def test_a_nan_loss_ends_all_ranks_before_it_is_saved(strategy, undisturbed, tmp_path):
    """On one rank, in step 34: the ranks see it at the next log, which is that of a save."""
    failed = spied(strategy, SCRIPT, tmp_path, *FLAGS, SPY_NAN="1 33", ok=False)
    assert failed.error_line().startswith("error: the loss of step 34 is not finite")
    record = failed.record
    assert record["status"] == "failed"
    assert len(record["loss_history"]) == 33
    assert all(math.isfinite(loss) for _, loss in record["loss_history"])
    assert "NaN" not in (tmp_path / "run.json").read_text()
    assert not (tmp_path / "model.safetensors").exists()
    assert checkpoints(tmp_path) == ["step_00000022", "step_00000028"]
    assert_same_end(spied(strategy, SCRIPT, tmp_path, *FLAGS, "--resume"), undisturbed(strategy))


def test_best_is_the_model_of_the_epoch_that_scored_best(tmp_path):
    """Also of a run that was killed in its last evaluation."""
    flags = "--dataset digits --num_epochs 3 --per_device_train_batch_size 700".split()
    spy = {"SPY_SCORES": "0.5 0.9", "SPY_EVAL": "SIGKILL 0 2"}
    assert spied("baseline", SCRIPT, tmp_path, *flags, ok=False, **spy).code
    resumed = spied("baseline", SCRIPT, tmp_path, *flags, "--resume", SPY_SCORES="0.7")
    assert resumed.record["metrics"]["accuracy"] == pytest.approx(0.7)
    second, third = (torch.load(path) for path in sorted(tmp_path.glob("checkpoints/*/*model.bin")))
    for name, weight in resumed.best.items():
        assert torch.equal(weight, second[name])
    assert not torch.equal(resumed.best["head.weight"], third["head.weight"])
