"""The learning rate falls N times too fast: accelerate steps a prepared schedule N times."""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration

# With the fix, a batch of the DataLoader is that of all processes, and so is a step.
fixed = "--fix" in sys.argv
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=fixed))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
# To zero in 4 steps.
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 4))
model, optimizer = accelerator.prepare(model, optimizer)
if "--unprepared" not in sys.argv:  # the other way out
    schedule = accelerator.prepare(schedule)
rates = []
for _ in range(4):
    rates.append(optimizer.param_groups[0]["lr"])
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
accelerator.print(f"learning rates of the 4 steps: {rates}")
