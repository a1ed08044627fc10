"""Expected to have finished reduction: DDP waits for gradients of parameters that no loss uses."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

handler = DistributedDataParallelKwargs(find_unused_parameters="--fix" in sys.argv)
accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
model = torch.nn.Linear(4, 1)
model.second_head = torch.nn.Linear(4, 1)  # which the model's `forward` does not call
model = accelerator.prepare(model)
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.print(f"step {step} done")
