"""Two devices are no faster than one: a step computes little, and most of it is communication."""

import sys
import time

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(1000, 1000))  # 4 MB of gradients to send
x = torch.randn(1500 if "--fix" in sys.argv else 1, 1000)  # the batch of each device


def fastest_step():
    """Seconds of a forward and a backward pass: the least of 5, as other programs only add."""
    seconds = []
    for _ in range(5):
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        accelerator.backward(model(x).mean())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


with_all_reduce = fastest_step()
with model.no_sync():  # the same step, but the ranks keep their gradients to themselves
    share = max(0, 1 - fastest_step() / with_all_reduce)
accelerator.print(f"{share:.0%} of a step is communication: "
                  f"{'more' if share > 0.5 else 'less'} than computing")
