"""The device has little to do: it waits for a loader that makes each batch only when it is asked
for it.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    """Reading and decoding a sample takes 5 ms."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.tensor(index)


workers = 2 if "--fix" in sys.argv else 0  # processes that make batches while the device computes
batches = iter(DataLoader(Slow(), batch_size=8, num_workers=workers))
next(batches)  # the first batch also waits until the workers have started
loading = computing = 0.0
for _ in range(19):
    start = time.perf_counter()
    next(batches)
    ready = time.perf_counter()
    time.sleep(0.025)  # stands for a training step on a GPU, which takes 25 ms
    loading += ready - start
    computing += time.perf_counter() - ready
share = loading / (loading + computing)
print(f"{share:.0%} of the time is loading: "
      f"{'the device waits' if share > 0.5 else 'the device computes'}")
