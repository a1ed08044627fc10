"""Other losses than on one device: the batch size of a DataLoader is that of each device,
so the global one grew.
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def losses(model, optimizer, loader, reduce=torch.Tensor.detach, backward=torch.Tensor.backward):
    """Of an epoch, one of each step; on several devices the mean over them."""
    history = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        history.append(reduce(loss.detach()).item())
    return torch.tensor(history)


def start():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


accelerator = Accelerator(cpu=True)
data = TensorDataset(*torch.randn(2, 64, 4, generator=torch.Generator().manual_seed(0)))
one_device = losses(*start(), DataLoader(data, batch_size=8))
batch_size = 8 // accelerator.num_processes if "--fix" in sys.argv else 8
prepared = accelerator.prepare(*start(), DataLoader(data, batch_size=batch_size))
several = losses(*prepared, lambda loss: accelerator.reduce(loss, "mean"), accelerator.backward)
same = len(several) == len(one_device) and torch.allclose(several, one_device)
accelerator.print(f"one device: {len(one_device)} steps; {accelerator.num_processes} devices: "
                  f"{len(several)} steps, {'the same' if same else 'other'} losses")
