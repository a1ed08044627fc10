"""Memory grows with every batch: a loss in a list keeps its graph, with all activations."""

import sys

import psutil
import torch

model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1))
losses, megabytes = [], []
for _ in range(30):  # an evaluation without torch.no_grad(): no backward pass frees anything
    loss = model(torch.randn(500, 1000)).square().mean()
    losses.append(loss.detach() if "--fix" in sys.argv else loss)
    megabytes.append(psutil.Process().memory_info().rss / 1e6)
grown = (megabytes[29] - megabytes[9]) / 20
print(
    f"each batch leaves {grown:.1f} MB: {'memory grows' if grown > 3 else 'memory stays as it is'}"
)
