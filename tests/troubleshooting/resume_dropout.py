"""A resumed run has other losses: nobody saved the random state, so dropout draws other masks."""

import copy
import sys

import torch


def start():
    """What a script does at its start, be it the first one or a resumption."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))


def train(model):
    """The losses of three steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []  # it has no state
    for _ in range(3):
        loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


model = start()
train(model)
checkpoint = {"model": copy.deepcopy(model.state_dict()), "random": torch.get_rng_state()}
undisturbed = train(model)
model = start()  # in a new process
model.load_state_dict(checkpoint["model"])
if "--fix" in sys.argv:  # on a GPU also torch.cuda.get_rng_state_all and set_rng_state_all
    torch.set_rng_state(checkpoint["random"])
same = train(model) == undisturbed
print(f"after the resumption the losses are {'the same' if same else 'different'}")
