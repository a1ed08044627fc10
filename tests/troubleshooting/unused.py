"""RuntimeError: Expected to have finished reduction: DDP waits for gradients of parameters
that no loss uses.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


handler = DistributedDataParallelKwargs(find_unused_parameters="--fix" in sys.argv)
accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
model = accelerator.prepare(TwoHeads())
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.print(f"step {step} done")
