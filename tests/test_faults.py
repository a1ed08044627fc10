"""Faults on a real two-node Slurm cluster: whatever breaks, the job ends or continues, and then ends as if nothing had.

`make test-all` runs a part, `make test-faults` all; that prints the table of docs/cluster.md.
"""

import time
from collections import namedtuple

import pytest
import torch
from conftest import ROOT, Result

pytestmark = pytest.mark.slow
FLAGS = ["--dataset", "digits", "--num_epochs", "40", "--per_device_train_batch_size", "20"]  # 35 steps an epoch
STEPS, TIMEOUT = 1400, 15
Step = namedtuple("Step", "time number process")
TABLE = "| fault | strategy | outcome | seconds to recover | steps repeated | equal |\n|---|---|---|---|---|---|"


class Job:
    """The run of a strategy on two nodes, and what rank 0 noted of each step."""

    def __init__(self, cluster, strategy, folder, options=(), pause=0):
        self.cluster, self.folder, self.notes, self.pause = cluster, folder, folder.with_suffix(".steps"), pause
        self.words = [*options, f"--output={folder}.log", "sbatch/2node.sh", f"accelerate_configs/{strategy}.yaml",
                      "tests/spy.py", *FLAGS, "--collective_timeout", TIMEOUT, "--output_dir", folder]
        self.submit()

    def submit(self):
        env = {"SPY_SCRIPT": "train_mnist_rnn", "SPY_STEPS": str(self.notes), "SPY_PAUSE": str(self.pause),
               "OMP_NUM_THREADS": "1"}
        self.id = self.cluster.submit(*self.words, cwd=ROOT, env=env)

    def steps(self):
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        notes = [line.split() for line in lines]
        return [Step(float(note[0]), int(note[1]), note[2]) for note in notes if len(note) == 3]

    def wait_for_step(self, number):
        self.cluster.wait_until(lambda: self.steps() and self.steps()[-1].number >= number, 60)

    def wait_for_state(self, *states, timeout=60):
        self.cluster.wait_until(lambda: self.cluster.state(self.id) in states, timeout)

    def result(self):
        """Wait until the job is done, and return what it leaves."""
        state, log = self.cluster.wait(self.id, timeout=600), self.folder.with_suffix(".log").read_text()
        assert state == "COMPLETED", log
        return Result(0, log, "", self.folder)


def kill_a_worker(job):
    job.cluster.on("n2", "pkill", "-KILL", "-f", "python.* -u tests/spy.py")


def crash_a_node(job):
    job.cluster.crash("n2")
    job.wait_for_state("PENDING")
    job.cluster.boot("n2")


def cut_the_link(job):
    job.cluster.cut_link()
    job.wait_for_state("PENDING", timeout=90)
    job.cluster.cut_link(False)


def cancel_and_resubmit(job):
    job.cluster.on("ctl", "scancel", job.id)
    job.wait_for_state("CANCELLED")
    job.submit()


def requeue(job):
    job.cluster.on("ctl", "scontrol", "requeue", job.id)


def signal_the_tasks_only(job):
    """USR1 as Slurm delivers it where it tracks processes by cgroups: to a node's task, not to what that started."""
    for node in ("n1", "n2"):
        job.cluster.on(node, "pkill", "-USR1", "-f", "^[^ ]*bash -c trap")


def reach_the_time_limit(job):
    """With the job's options below, Slurm warns it after half a minute, in each of several such slots."""
    job.wait_for_state("PENDING")


def warn_of_the_time_limit(job):
    """What Slurm does then, without the wait."""
    job.cluster.on("ctl", "scancel", "--batch", "--signal=USR1", job.id)


TIME_LIMIT = {"options": ["--time=1", "--signal=B:USR1@20"], "pause": 0.03}
FAULTS = [kill_a_worker, crash_a_node, cut_the_link, cancel_and_resubmit, requeue, warn_of_the_time_limit,
          signal_the_tasks_only, reach_the_time_limit]
QUICK = [("kill_a_worker", "ddp"), ("kill_a_worker", "fsdp"), ("crash_a_node", "fsdp"), ("requeue", "ddp"),
         ("warn_of_the_time_limit", "fsdp"), ("signal_the_tasks_only", "ddp")]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The same run with nothing happening to it."""
    results = {}

    def get(strategy):
        if strategy not in results:
            results[strategy] = Job(cluster, strategy, tmp_path_factory.mktemp("calm") / strategy).result()
            assert results[strategy].record["nodes"] == 2 and len(results[strategy].losses) == STEPS
        return results[strategy]

    return get


@pytest.fixture(autouse=True)
def whole_again(cluster):
    yield
    cluster.tidy()


@pytest.mark.parametrize("fault, strategy", [
    pytest.param(fault, strategy, marks=[] if (fault.__name__, strategy) in QUICK else pytest.mark.matrix)
    for fault in FAULTS for strategy in ("ddp", "fsdp", "zero3")])
def test_a_disturbed_run_ends_like_an_undisturbed_one(
    cluster, undisturbed, record_property, tmp_path, fault, strategy
):
    job = Job(cluster, strategy, tmp_path / "run", **(TIME_LIMIT if fault is reach_the_time_limit else {}))
    job.wait_for_step(1 if fault is reach_the_time_limit else 200)
    struck = time.time()
    fault(job)
    ended, calm = job.result(), undisturbed(strategy)

    steps = job.steps()
    starts = [i for i in range(1, len(steps)) if steps[i].process != steps[i - 1].process]
    # What a node could not be told, slurmctld tells it again after a minute: that the step is to end. With the default
    # hold of two minutes that is over when the job starts again; here it may stop the next attempt, which saves.
    assert len(starts) == 1 or starts and fault in (reach_the_time_limit, cut_the_link)
    repeated = sum(steps[i - 1].number - steps[i].number + 1 for i in starts)
    recovery = max(steps[i].time - steps[i - 1].time for i in starts)
    assert ended.record["resumed_from"] and struck < steps[starts[0]].time and recovery < 100, ended.out
    if fault in (kill_a_worker, crash_a_node, cut_the_link):
        assert 0 <= repeated <= 35, "more than since the last epoch's checkpoint"
    else:  # there was time to save
        assert repeated == 0, ended.out
    if fault in (warn_of_the_time_limit, signal_the_tasks_only):  # ranks and launchers went in good order
        assert "srun's exit code 0\nnot completed, but saved" in ended.out, ended.out
    losses = ended.record["loss_history"] == calm.record["loss_history"]
    weights = all(torch.equal(calm.weights[name], weight) for name, weight in ended.weights.items())
    equal = "losses and weights" if losses and weights else "NO"
    outcome = f"continued from step {steps[starts[0]].number - 1}"
    record_property(TABLE, (fault.__name__.replace("_", " "), strategy, outcome, f"{recovery:.0f}", repeated, equal))
    assert losses and weights
