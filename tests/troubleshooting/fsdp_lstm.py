"""FSDP2 never trains an LSTM on a GPU: cuDNN moves the weights into a buffer of its own, which FSDP2 does not fill."""

import sys

import torch
from accelerate.utils import set_seed
from without_gpu import make_accelerator


def as_on_a_gpu(lstm):
    """What RNNBase.flatten_parameters does to the weights there; on a CPU it does nothing."""
    weights = [weight for weight in lstm._flat_weights if weight.numel()]
    buffer = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, buffer.split([weight.numel() for weight in weights]), strict=True):
        with torch.no_grad():
            weight.set_(part.view(weight.shape))


accelerator = make_accelerator()
set_seed(0)
model = torch.nn.LSTM(4, 8, batch_first=True)
if accelerator.device.type == "cpu":
    torch.nn.RNNBase.flatten_parameters = as_on_a_gpu
if "--fix" in sys.argv:
    model.flatten_parameters = lambda: None
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
x, losses = torch.ones(2, 3, 4, device=accelerator.device), []
for _ in range(4):
    loss = model(x)[0].square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print(f"the loss {'falls' if losses == sorted(set(losses), reverse=True) else 'does not change'}")
