"""A hang at the end of an epoch: one rank has a batch more, and waits for the others' gradients."""

import datetime
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader

# Not the default of minutes, so that the hang ends while one looks on.
timeout = datetime.timedelta(seconds=5)
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])
model, data = accelerator.prepare(torch.nn.Linear(4, 1)), torch.ones(9, 4)
if "--fix" in sys.argv:  # all of the data: `prepare` shares them out, as many batches to each rank
    loader = accelerator.prepare(DataLoader(data))
else:  # a share of one's own: 5 batches here, 4 there
    loader = DataLoader(data[accelerator.process_index :: accelerator.num_processes])
for step, x in enumerate(loader):
    accelerator.backward(model(x).sum())
    print(f"rank {accelerator.process_index}: step {step} done", flush=True)
accelerator.wait_for_everyone()
accelerator.print("the epoch is over")
