"""Other losses with the same global batch: each rank normalises by its own part of the batch."""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
norm = torch.nn.GroupNorm(1, 4) if "--fix" in sys.argv else torch.nn.BatchNorm1d(4)
x = torch.randn(8, 4)
one_device = norm(x)
mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
several = accelerator.gather(accelerator.prepare(norm)(mine))
same = torch.allclose(several, one_device, atol=1e-6)
accelerator.print(
    f"outputs of {accelerator.num_processes} devices and of one: "
    f"{'the same' if same else 'different'}"
)
