"""Faults on a real two-node Slurm cluster: whatever breaks, the job ends or continues, and then
ends as if nothing had. `make test-all` runs two, `make test-faults` all; that prints the table of
docs/cluster.md.
"""

import time

import pytest
import torch
from conftest import ROOT, Result

pytestmark = pytest.mark.slow
FLAGS = "--dataset digits --num_epochs 40 --per_device_train_batch_size 20".split()
EPOCH, STEPS, TIMEOUT = 35, 1400, 15
TIME_LIMIT = "--time=1", "--signal=B:USR1@20"
TABLE = ("| fault | strategy | outcome | seconds to recover | steps repeated | equal |\n"
         "|---|---|---|---|---|---|")


class Job:
    """The run of a strategy on two nodes, and what rank 0 noted of each step."""

    def __init__(self, cluster, strategy, folder, limit=()):
        self.on, self.cluster, self.folder = cluster.on, cluster, folder
        self.notes = folder.with_suffix(".steps")
        self.env = {"SPY_SCRIPT": "train_mnist_rnn", "SPY_STEPS": str(self.notes),
                    "SPY_PAUSE": "0.03" if limit else "0", "OMP_NUM_THREADS": "1"}
        self.words = [*limit, f"--output={folder}.log", "sbatch/2node.sh",
                      f"accelerate_configs/{strategy}.yaml", "tests/spy.py", *FLAGS,
                      "--collective_timeout", TIMEOUT, "--output_dir", folder]
        self.submit()

    def submit(self):
        self.id = self.cluster.submit(*self.words, cwd=ROOT, env=self.env)

    def steps(self):
        """Of each step its time, its number, and which process noted it."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        notes = [line.split() for line in lines]
        return [(float(note[0]), int(note[1]), note[2]) for note in notes if len(note) == 3]

    def wait_for_step(self, number):
        self.cluster.wait_until(lambda: self.steps() and self.steps()[-1][1] >= number, 60)

    def wait_for_state(self, state):
        self.cluster.wait_until(lambda: self.cluster.state(self.id) == state, 90)

    def result(self):
        """Wait until the job is done, and return what it leaves."""
        state = self.cluster.wait(self.id, timeout=600)
        log = self.folder.with_suffix(".log").read_text()
        assert state == "COMPLETED", log
        return Result(0, log, "", self.folder)


def crash_a_node(job):
    job.cluster.crash("n2")
    job.wait_for_state("PENDING")
    job.cluster.boot("n2")


def cut_the_link(job):
    job.cluster.cut_link()
    job.wait_for_state("PENDING")
    job.cluster.cut_link(False)


def cancel_and_resubmit(job):
    job.on("ctl", "scancel", job.id)
    job.wait_for_state("CANCELLED")
    job.submit()


def signal_the_tasks_only(job):
    """USR1 as Slurm delivers it where it tracks processes by cgroups: to a node's task, not to what
    that started.
    """
    for node in ("n1", "n2"):
        job.on(node, "pkill", "-USR1", "-f", "^[^ ]*bash -c trap")


FAULTS = {
    "kill a worker": lambda job: job.on("n2", "pkill", "-KILL", "-f", "python.* -u tests/spy.py"),
    "crash a node": crash_a_node,
    "cut the link": cut_the_link,
    "cancel and resubmit": cancel_and_resubmit,
    "requeue": lambda job: job.on("ctl", "scontrol", "requeue", job.id),
    # What Slurm does near the time limit, without the wait.
    "warn of the time limit": lambda job: job.on("ctl", "scancel", "--batch", "-s", "USR1", job.id),
    "signal the tasks only": signal_the_tasks_only,
    # With TIME_LIMIT, Slurm warns it after half a minute, in each of several such slots.
    "reach the time limit": lambda job: job.wait_for_state("PENDING"),
}
HARD = "kill a worker", "crash a node", "cut the link"  # no time to save
QUICK = ("crash a node", "fsdp"), ("warn of the time limit", "fsdp")
CASES = [(fault, strategy) for fault in FAULTS for strategy in ("ddp", "fsdp", "zero3")]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """strategy -> the same run with nothing happening to it."""
    results = {}

    def get(strategy):
        if strategy not in results:
            result = Job(cluster, strategy, tmp_path_factory.mktemp("calm") / strategy).result()
            assert result.record["nodes"] == 2 and len(result.losses) == STEPS
            results[strategy] = result
        return results[strategy]

    return get


@pytest.mark.parametrize("fault, strategy", [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix) for case in CASES])
def test_a_disturbed_run_ends_like_an_undisturbed_one(
        cluster, undisturbed, record_property, tmp_path, fault, strategy, request):
    request.addfinalizer(cluster.tidy)
    limit = fault == "reach the time limit"
    job = Job(cluster, strategy, tmp_path / "run", TIME_LIMIT if limit else ())
    job.wait_for_step(1 if limit else 200)
    struck = time.time()
    FAULTS[fault](job)
    ended, calm = job.result(), undisturbed(strategy)

    steps = job.steps()
    starts = [(before, after) for before, after in zip(steps, steps[1:], strict=False)
              if before[2] != after[2]]
    # What a node could not be told, slurmctld tells it again after a minute: that the step is to
    # end. With the default hold of two minutes that is over when the job starts again; here it may
    # stop the next attempt, which saves.
    assert len(starts) == 1 or starts and (limit or fault == "cut the link")
    repeated = sum(before[1] - after[1] + 1 for before, after in starts)
    recovery = max(after[0] - before[0] for before, after in starts)
    _, (went_on, step, _) = starts[0]
    assert ended.record["resumed_from"] and struck < went_on and recovery < 100, ended.out
    assert 0 <= repeated <= EPOCH * (fault in HARD), "more than since the last epoch's checkpoint"
    if fault in ("warn of the time limit", "signal the tasks only"):  # all went in good order
        assert "srun's exit code 0\nnot completed, but saved" in ended.out, ended.out
    losses = ended.record["loss_history"] == calm.record["loss_history"]
    weights = all(torch.equal(calm.weights[name], own) for name, own in ended.weights.items())
    equal = "losses and weights" if losses and weights else "NO"
    outcome = f"continued from step {step - 1}"
    record_property(TABLE, (fault, strategy, outcome, f"{recovery:.0f}", repeated, equal))
    assert losses and weights
