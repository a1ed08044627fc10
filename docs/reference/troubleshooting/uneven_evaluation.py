"""Evaluation counts some samples twice: so that all ranks have as many batches, accelerate adds."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2))  # 5 batches, for 2 ranks
gather = accelerator.gather_for_metrics if "--fix" in sys.argv else accelerator.gather
seen, count = [], 0
for batch in loader:
    seen += gather(batch).tolist()
    lengths = accelerator.gather_for_metrics(torch.tensor([len(batch)]))  # not a row per sample
    count += lengths.sum().item()
twice = sorted({i for i in seen if seen.count(i) > 1})
accelerator.print(f"{len(seen)} samples of 10, twice: {twice}")
accelerator.print(f"counted batch by batch: {count}")
