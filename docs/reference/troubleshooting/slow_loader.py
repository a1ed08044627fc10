"""The device waits for a loader that makes each batch only when it is asked for it."""

import sys
import time

from torch.utils.data import DataLoader


class Slow:
    """Reading and decoding a sample takes 20 ms."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.02)
        return index


workers = 2 if "--fix" in sys.argv else 0  # processes that make batches while the device computes
batches = iter(DataLoader(Slow(), batch_size=2, num_workers=workers))
next(batches)  # the first batch also waits until the workers have started
start, loading = time.perf_counter(), 0.0
for _ in range(19):
    asked = time.perf_counter()
    next(batches)
    loading += time.perf_counter() - asked
    time.sleep(0.025)  # stands for a training step on a GPU, which takes 25 ms
share = loading / (time.perf_counter() - start)
print(f"{share:.0%} of the time is loading: "
      f"{'the device waits' if share > 0.5 else 'the device computes'}")
