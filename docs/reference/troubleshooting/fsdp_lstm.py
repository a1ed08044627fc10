"""FSDP2 never trains an LSTM on a GPU: cuDNN moves its weights, and FSDP2 fills the old place."""

import sys

import torch
from accelerate.utils import set_seed
from without_gpu import flatten_like_cudnn, make_accelerator

accelerator = make_accelerator()
set_seed(0)
model = torch.nn.LSTM(4, 8, batch_first=True)
if accelerator.device.type == "cpu":
    torch.nn.RNNBase.flatten_parameters = flatten_like_cudnn
if "--fix" in sys.argv:
    model.flatten_parameters = lambda: None
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
losses = []
for _ in range(4):
    loss = model(torch.ones(2, 3, 4, device=accelerator.device))[0].square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
falls = losses == sorted(set(losses), reverse=True)
accelerator.print(f"the loss {'falls' if falls else 'does not change'}")
