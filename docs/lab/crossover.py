"""At what batch size does a second device pay off?

    accelerate launch --config_file accelerate_configs/ddp.yaml docs/lab/crossover.py

compares two CPU processes with one, for growing batches of one model. It measures each batch in
several turns, so that another program slows down all columns alike. A turn has three parts:

1. Rank 0 alone makes steps with the whole batch.
2. Both ranks make steps with half of it each, and send nothing.
3. Both do the same, and add up their gradients in each step: one all-reduce, as under DDP.

A row shows the median time of a step in each part. The message is the difference of parts 3 and 2.
It contains the wait for the slower rank. The range behind the speedup is that of single turns.
"""

import argparse
import ctypes
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import environment  # noqa: F401  It tells who forgot to activate .venv.
import torch
import torch.distributed as dist
from torch import nn

from common.facts import cpu_quota

COMMAND = "accelerate launch --config_file accelerate_configs/ddp.yaml docs/lab/crossover.py"
HEAD = "| global batch | one device | half of it | + message | = two devices | speedup |"


class Row(NamedTuple):
    """What was measured for a batch: milliseconds per step, rounded as they are printed."""

    batch: int
    one: float
    half: float
    two: float
    speedups: list[float]  # of each turn

    @property
    def message(self):
        return round(self.two - self.half, 2)

    @property
    def speedup(self):
        return self.one / self.two


class RowLSTM(nn.Module):
    """The LSTM of train_mnist_rnn.py, for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.lstm(images)[0][:, -1])


class Training:
    """A model and its optimizer. Only times count here, so the ranks' weights may drift apart."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = RowLSTM()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.005)

    def step(self, images, labels, sends):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()
        if sends:
            gradients = [weight.grad.flatten() for weight in self.model.parameters()]
            dist.all_reduce(torch.cat(gradients))
        self.optimizer.step()

    def seconds_per_step(self, batch, steps, sends=False, alone=False):
        """The mean time of a step on the slower rank; `alone`: on rank 0. All ranks call this."""
        images, labels = torch.randn(batch, 8, 8), torch.randint(0, 10, (batch,))
        dist.barrier()
        began = time.perf_counter()
        if not alone or dist.get_rank() == 0:
            for _ in range(steps):
                self.step(images, labels, sends)
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item() / steps


def compare(training, batch, turns, seconds):
    """The row of this global batch."""
    steps = max(3, int(seconds / training.seconds_per_step(batch, 3)))
    one, half, two = [], [], []
    for _ in range(turns):
        one.append(training.seconds_per_step(batch, steps, alone=True))
        half.append(training.seconds_per_step(batch // 2, steps))
        two.append(training.seconds_per_step(batch // 2, steps, sends=True))
    milliseconds = [round(1000 * statistics.median(times), 2) for times in (one, half, two)]
    return Row(batch, *milliseconds, [a / b for a, b in zip(one, two, strict=True)])


def describe(row):
    """A row as a line of a Markdown table. A message cannot take less than no time."""
    message = f"{row.message:.2f} ms" if row.message >= 0 else "?"
    low, high = min(row.speedups), max(row.speedups)
    turns = f" (from {low:.2f} to {high:.2f})" if row.speedups[1:] else ""
    return (
        f"| {row.batch:,} | {row.one:.2f} ms | {row.half:.2f} ms | {message} | {row.two:.2f} ms | "
        f"{row.speedup:.2f}{turns} |"
    )


def conclude(rows, quota=None):
    """What the table says about two devices, after a warning if other programs disturbed it, or if
    this container's quota is less than two cores.
    """
    small, large = rows[0], rows[-1]
    found = ""
    disturbed = find_disturbances(rows)
    if quota and quota < 2:
        found = (
            f"This container may use {quota:g} core(s) (/sys/fs/cgroup/cpu.max), and two devices "
        )
        found += "need two.\nTo try again does not help: ask for a larger quota.\n"
    elif disturbed:
        found += "\n- ".join(["Other programs disturbed this:", *disturbed])
        found += f"\nSo try again:\n    source .venv/bin/activate\n    {COMMAND}\n"
    found += f"With a batch of {small.batch:,}, two devices are {small.speedup:.2f} times as fast "
    if len(rows) == 1:
        return f"{found}as one."
    found += f"as one, and with {large.batch:,} {large.speedup:.2f} times."
    losing = [row.batch for row in rows if row.speedup <= 1]
    paying = [row.batch for row in rows if row.batch > max(losing, default=0)]
    verdict = f"does not pay off up to {large.batch:,} images"
    if paying:
        verdict = f"pays off from {min(paying):,} images up"
    found += f"\nHere a second device {verdict}. Why?"
    unsure = [f"{row.batch:,}" for row in rows if min(row.speedups) <= 1 < max(row.speedups)]
    if unsure:
        found += f"\nThe turns disagree at {', '.join(unsure)} images: some gained, some lost."
    return found


def find_disturbances(rows):
    """What cannot be, unless something else used the machine: a list of phrases."""
    overhead = min(row.one for row in rows)  # of any step: Python, and the start of operations
    usual = statistics.median(row.message for row in rows)
    found = []
    for row in rows:
        if row.message < 0:
            found.append(f"{row.batch:,}: a step was faster with a message than without")
        elif row.message > 3 * usual > 0:
            found.append(f"{row.batch:,}: the message took over 3 times as long as the others")
        if row.half > 0.9 * row.one + overhead / 2:
            found.append(f"{row.batch:,}: half of the batch took nearly as long as all of it")
    if rows[-1].speedup < rows[0].speedup:
        found.append(f"{rows[-1].batch:,}: two devices gained less than with {rows[0].batch:,}")
    return found


def draw(rows, file):
    """For each batch, a bar of one device beside one of two: computing, and the message on it."""
    import matplotlib.pyplot as plt  # only here: the ranks that measure need no pictures

    plt.rcParams |= {"svg.hashsalt": "", "font.size": 12}
    places = range(len(rows))
    left, right = [place - 0.2 for place in places], [place + 0.2 for place in places]
    half = [row.half for row in rows]
    message = [max(0, row.message) for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.bar(left, [row.one for row in rows], 0.38, color="grey", label="one device")
    axes.bar(right, half, 0.38, color="tab:blue", label="two devices: half of the batch each")
    axes.bar(right, message, 0.38, half, color="tab:red", label="two devices: message and wait")
    axes.set_xticks(places, [f"{row.batch:,}" for row in rows])
    axes.set(xlabel="global batch", ylabel="ms of a step", title="One device, and two")
    axes.legend()
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[16, 64, 256, 1024, 4096], help="global ones")
    add("--turns", type=int, default=9, help="of each batch (default: %(default)s)")
    add("--seconds", type=float, default=0.06, help="of a turn's part (default: %(default)s)")
    add("--picture", default="runs/crossover.svg", help="the file to draw (default: %(default)s)")
    args = parser.parse_args()
    odd = [batch for batch in args.batches if batch < 2 or batch % 2]
    if odd:
        sys.exit(f"error: two devices cannot share a batch of {odd[0]} equally")
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("error: this compares two processes: start it as its --help shows")
    # glibc gives large freed blocks back to the system, and each step would fetch them anew. These
    # are M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h. Other C libraries have no mallopt.
    libc = ctypes.CDLL(None)
    for option in (-3, -1):
        if hasattr(libc, "mallopt"):
            libc.mallopt(option, 1 << 30)
    torch.set_num_threads(1)  # each rank has one core
    dist.init_process_group("gloo")
    training, rows = Training(), []
    say = print if dist.get_rank() == 0 else lambda *words, **options: None
    size = sum(weight.nbytes for weight in training.model.parameters())
    say(f"\n{HEAD}\n|---:|---:|---:|---:|---:|---|", flush=True)
    for batch in sorted({*args.batches}):
        rows.append(compare(training, batch, args.turns, args.seconds))
        say(describe(rows[-1]), flush=True)
    say(f"\nEach step on two devices sends one message of {size:,} bytes, whatever the batch.")
    say("Its time contains the wait for the slower device.")
    say(conclude(rows, cpu_quota()))
    if dist.get_rank() == 0:
        draw(rows, args.picture)
        say(f"A picture of the table: {args.picture}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
