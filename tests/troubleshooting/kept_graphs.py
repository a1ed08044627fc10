"""Memory grows with every batch: a loss in a list keeps the graph that made it, with all
activations.
"""

import sys

import psutil
import torch


def megabytes():
    return psutil.Process().memory_info().rss / 1e6


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 1))
losses = []
for batch in range(30):  # an evaluation without torch.no_grad(): no backward pass frees anything
    loss = model(torch.randn(500, 1000)).square().mean()
    losses.append(loss.detach() if "--fix" in sys.argv else loss)
    if batch == 9:
        before = megabytes()
grown = (megabytes() - before) / 20
print(f"each batch leaves {grown:.1f} MB: "
      f"{'memory grows' if grown > 3 else 'memory stays as it is'}")
