"""The ranks drift apart: the loop goes around the wrapper, which averages the gradients."""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
forward = model if "--fix" in sys.argv else accelerator.unwrap_model(model)  # or model.module
x = torch.full((2, 4), accelerator.process_index + 1.0)  # other data on each rank
accelerator.backward(forward(x).sum())
optimizer.step()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())  # a row for each rank
same = torch.equal(weights, weights[:1].expand_as(weights))
accelerator.print(f"after a step the ranks' weights are {'the same' if same else 'different'}")
