"""Other losses than on one device: the batch size of a DataLoader is that of each device."""

import sys
from functools import partial

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
devices = accelerator.num_processes
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def train(batch_size, prepare=lambda *parts: parts, mean=torch.clone):
    """The losses of an epoch's steps; `mean` is that over the devices."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(model, optimizer, DataLoader(data, batch_size))
    losses = []
    for x in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach()).item())
    return torch.tensor(losses)


one_device = train(8)
batch_size = 8 // devices if "--fix" in sys.argv else 8
several = train(batch_size, accelerator.prepare, partial(accelerator.reduce, reduction="mean"))
same = len(several) == len(one_device) and torch.allclose(several, one_device)
accelerator.print(f"one device: {len(one_device)} steps; {devices} devices: {len(several)} steps, "
                  f"{'the same' if same else 'other'} losses")
