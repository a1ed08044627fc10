"""ZeRO does not accumulate as the script says: a line of the YAML overrides it."""

import os
import sys

import torch
from without_gpu import make_accelerator

# What a line gradient_accumulation_steps: 1 of the YAML puts into the environment.
if "--fix" not in sys.argv:
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
accelerator = make_accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(8):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"8 micro-batches, 4 a step asked for: {model.global_steps} optimizer steps")
