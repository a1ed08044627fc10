"""Faults on a real two-node Slurm cluster: whatever breaks, the job ends or continues, and then
ends as if nothing had. `make test-all` runs one, `make test-faults` all, and prints what they cost.
"""

import re
import time

import pytest
import torch
from conftest import ROOT, Result, launch

pytestmark = pytest.mark.slow
SCRIPT, EPOCH = "train_mnist_rnn", 35  # steps
FLAGS = "--dataset digits --per_device_train_batch_size 20 --num_epochs".split()
TABLE = "| fault | strategy | seconds to recover | steps repeated |\n|---|---|---|---|"


class Job:
    """What is submitted, and again after a fault."""

    def __init__(self, cluster, words, env):
        self.cluster, self.on, self.words, self.env = cluster, cluster.on, words, env
        self.submit()

    def submit(self):
        self.id = self.cluster.submit(*self.words, cwd=ROOT, env=self.env)

    def becomes(self, state):
        self.cluster.wait_until(lambda: self.cluster.state(self.id) == state, 300)


def steps_in(notes):
    """Of each step its time, its number, and which process noted it."""
    text = notes.read_text() if notes.exists() else ""
    found = re.findall(r"^(\S+) (\d+) (\S+)\n", text, re.M)
    return [(float(when), int(step), process) for when, step, process in found]


def crash_a_node(job):
    job.cluster.crash("n2")
    job.becomes("PENDING")
    job.cluster.boot("n2")


def cut_the_link(job):
    job.cluster.cut_link()
    job.becomes("PENDING")
    job.cluster.cut_link(False)


def cancel_and_resubmit(job):
    job.on("ctl", "scancel", job.id)
    job.becomes("CANCELLED")
    job.submit()


def signal_the_tasks_only(job):
    """As Slurm does with cgroups: USR1 to a node's task, not to what that started."""
    for node in ("n1", "n2"):
        job.on(node, "pkill", "-USR1", "-f", "^[^ ]*bash sbatch/node.sh")


FAULTS = {
    "kill a worker": lambda job: job.on("n2", "pkill", "-KILL", "-f", "python.* -u tests/spy.py"),
    "crash a node": crash_a_node,
    "cut the link": cut_the_link,
    "cancel and resubmit": cancel_and_resubmit,
    "requeue": lambda job: job.on("ctl", "scontrol", "requeue", job.id),
    # What Slurm does near the time limit, without the wait, where a site's signal is USR2.
    "warn of the time limit": lambda job: job.on("ctl", "scancel", "--batch", "-s", "USR2", job.id),
    "signal the tasks only": signal_the_tasks_only,
    "reach the time limit": lambda job: job.becomes("PENDING"),  # again and again
}
HARD = "kill a worker", "crash a node", "cut the link"  # no time to save
QUICK = "warn of the time limit", "fsdp"
CASES = [(fault, strategy) for fault in FAULTS for strategy in ("ddp", "fsdp", "zero3")]
OTHERS = [pytest.param(*case, marks=pytest.mark.matrix) for case in CASES if case != QUICK]


@pytest.mark.parametrize("fault, strategy", [QUICK, *OTHERS])
def test_a_disturbed_run_ends_like_a_calm_one(cluster, say_row, tmp_path, fault, strategy, request):
    request.addfinalizer(cluster.tidy)
    limited, quick = fault == "reach the time limit", (fault, strategy) == QUICK
    epochs, begun = 5 if quick else 20, 1 if limited else 50
    notes, folder, log = (tmp_path / name for name in ("steps", "run", "log"))
    pause = "0.06" if limited or quick else "0"
    env = {"SPY_SCRIPT": SCRIPT, "SPY_STEPS": str(notes), "SPY_PAUSE": pause}
    words = ["--time=1", "--signal=B:USR1@20"] * limited  # warned after half a minute
    words += [f"--output={log}", "sbatch/2node.sh", f"accelerate_configs/{strategy}.yaml"]
    job = Job(cluster, [*words, "tests/spy.py", *FLAGS, epochs, "--output_dir", folder], env)
    cluster.wait_until(lambda: any(step >= begun for _, step, _ in steps_in(notes)), 300)
    struck = time.time()
    FAULTS[fault](job)
    state, text = cluster.wait(job.id, timeout=600), log.read_text()
    assert state == "COMPLETED", text
    ended, steps = Result(0, text, "", folder), steps_in(notes)
    calm = launch(strategy, f"{SCRIPT}.py", tmp_path / "calm", *FLAGS, epochs)
    pairs = zip(steps, steps[1:], strict=False)
    starts = [(before, after) for before, after in pairs if before[2] != after[2]]
    # slurmctld tells a node a minute later what it could not be told: that the step is to end. The
    # job may be running again by then (by default it is held back for longer), and saves.
    assert len(starts) == 1 or starts and (limited or fault == "cut the link")
    repeated = sum(before[1] - after[1] + 1 for before, after in starts)
    recovery = max(after[0] - before[0] for before, after in starts)
    say_row(TABLE, (fault, strategy, f"{recovery:.0f}", repeated))
    assert ended.record["resumed_from"] and struck < starts[0][1][0] and recovery < 300, ended.out
    assert 0 <= repeated <= EPOCH * (fault in HARD), "more than since the last epoch's checkpoint"
    assert len(calm.losses) == EPOCH * epochs and ended.record["nodes"] == 2
    assert ended.record["loss_history"] == calm.record["loss_history"]
    assert all(torch.equal(calm.weights[name], own) for name, own in ended.weights.items())
