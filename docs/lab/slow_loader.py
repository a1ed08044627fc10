"""A device that waits for its data loader (exercise 1 of the lab).

    python docs/lab/slow_loader.py --num_workers 2

prints the share of the time in which the device waits, draws that time, and writes a trace of it.
"""

import argparse
import os
import time

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    """Reading a sample takes 15 ms, as if it came from a slow disk."""

    def __len__(self):
        return 4 * 13

    def __getitem__(self, index):
        time.sleep(0.015)
        return torch.ones(256)


def train_step(weights):
    """Computes for 40 ms, however fast the machine is."""
    end = time.perf_counter() + 0.040
    while time.perf_counter() < end:
        weights = torch.tanh(weights @ weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_workers", type=int, default=0, help="processes that make batches")
    workers, weights = parser.parse_args().num_workers, torch.eye(256)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler is silent
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        batches = iter(DataLoader(Slow(), batch_size=4, num_workers=workers))
        next(batches)  # the workers have started
        start, waited, drawn = time.perf_counter(), 0.0, ""
        for _ in range(12):
            asked = time.perf_counter()
            next(batches)
            got = time.perf_counter()
            waited += got - asked
            train_step(weights)
            for sign, end in ((".", got), ("#", time.perf_counter())):
                drawn += sign * (round((end - start) / 0.020) - len(drawn))  # 20 ms a character
        share = waited / (time.perf_counter() - start)
    trace = f"runs/lab/slow_loader_{workers}.json"
    os.makedirs("runs/lab", exist_ok=True)
    profiler.export_chrome_trace(trace)
    print(f"{workers} workers: the device waits for {share:.0%} of the time\n{drawn}\n{trace}")


if __name__ == "__main__":
    main()
