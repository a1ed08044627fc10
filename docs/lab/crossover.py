"""From which batch does a second device pay? One model, one message in each step, growing batches.

    accelerate launch --config_file accelerate_configs/ddp.yaml docs/lab/crossover.py

compares two CPU processes with one. For each batch it takes turns, so that another program that
uses the machine slows down all columns alike:

1. Rank 0 alone makes steps with the whole batch.
2. Both ranks make steps with half of it each, and send nothing.
3. Both do the same, and add up their gradients in each step: one all-reduce, as under DDP.
"""

import argparse
import ctypes
import statistics
import time

import environment  # noqa: F401  It tells who forgot to activate .venv.
import torch
import torch.distributed as dist
from torch import nn

HEAD = "| global batch | one device | half of it | + message | = two devices | speedup |"


class RowLSTM(nn.Module):
    """The LSTM of train_mnist_rnn.py, for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.lstm(images)[0][:, -1])


class Training:
    """A model and its optimizer. Only times count here, so the ranks may come to have other
    weights. All ranks have to call `seconds_per_step` together.
    """

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
        """The mean time of steps with a batch on each rank; `alone`: on rank 0 only."""
        images, labels = torch.randn(batch, 8, 8), torch.randint(0, 10, (batch,))
        dist.barrier()
        began = time.perf_counter()
        if not alone or dist.get_rank() == 0:
            for _ in range(steps):
                self.step(images, labels, sends)
        return (time.perf_counter() - began) / steps


def compare(training, batch, turns, seconds):
    """A row for this global batch: (batch, ms on one device, ms with half of the batch, ms of the
    message, ms on two devices, the speedups of the turns).
    """
    share = batch // dist.get_world_size()
    first = training.seconds_per_step(batch, 3)
    steps = torch.tensor(max(1, int(seconds / first)))
    dist.broadcast(steps, 0)  # all ranks take as many
    one, half, two = [], [], []
    for _ in range(turns):
        one.append(training.seconds_per_step(batch, int(steps), alone=True))
        half.append(training.seconds_per_step(share, int(steps)))
        two.append(training.seconds_per_step(share, int(steps), sends=True))
    message = [b - a for a, b in zip(half, two, strict=True)]
    milliseconds = [1000 * statistics.median(times) for times in (one, half, message, two)]
    return batch, *milliseconds, sorted(a / b for a, b in zip(one, two, strict=True))


def describe(row):
    """A row as a line of a Markdown table. The speedup's range leaves out the extreme turns."""
    batch, one, half, message, two, speedups = row
    low, high = (speedups[1], speedups[-2]) if len(speedups) > 2 else (speedups[0], speedups[-1])
    return (
        f"| {batch:,} | {one:.2f} ms | {half:.2f} ms | {message:.2f} ms | {two:.2f} ms | "
        f"{statistics.median(speedups):.2f} (from {low:.2f} to {high:.2f}) |"
    )


def conclude(rows):
    """What the table says, in two lines."""
    speedups = {row[0]: statistics.median(row[-1]) for row in rows}
    small, large = min(speedups), max(speedups)
    found = (
        f"With a batch of {small:,}, two devices are {speedups[small]:.2f} times as fast as one, "
        f"and with {large:,} {speedups[large]:.2f} times."
    )
    if speedups[large] <= speedups[small]:
        return (
            f"{found}\nA larger batch has to gain more: other programs disturbed this. Try again."
        )
    losing = [batch for batch, speedup in speedups.items() if speedup <= 1]
    paying = [batch for batch in speedups if batch > max(losing, default=0)]
    where = f"pays from {min(paying):,} images on" if paying else f"does not pay up to {large:,}"
    return f"{found}\nHere a second device {where}. Why?"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[16, 64, 256, 1024, 4096], help="global ones")
    add("--turns", type=int, default=9, help="of each batch (default: %(default)s)")
    add("--seconds", type=float, default=0.06, help="of a turn's part (default: %(default)s)")
    args = parser.parse_args()
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
    for batch in sorted(args.batches):
        rows.append(compare(training, batch, args.turns, args.seconds))
        say(describe(rows[-1]), flush=True)
    say(f"\nEach step on two devices sends one message of {size:,} bytes, whatever the batch.")
    say(conclude(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
