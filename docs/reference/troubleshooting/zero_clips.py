"""ZeRO moves the weights less than DDP: it clips gradients to a norm of 1, and nobody asked."""

import sys

import torch
from without_gpu import make_accelerator

accelerator = make_accelerator()
if "--fix" in sys.argv:
    accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
model = torch.nn.Linear(4, 1, bias=False)
before = model.weight.detach().clone()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
# The gradient is 5 for each of 4 weights: a norm of 10.
accelerator.backward(model(torch.full((2, 4), 5.0)).mean())
optimizer.step()
weights = accelerator.get_state_dict(model)  # on all ranks, whatever rank 0 does with it
if accelerator.is_main_process:
    print(f"a gradient of norm 10 moved the weights by {(weights['weight'] - before).norm():.1f}")
