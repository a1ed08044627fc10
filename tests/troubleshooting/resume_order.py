"""A resumed run sees samples of the first epoch again: save_state does not keep how many epochs
there were.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader

fixed = "--fix" in sys.argv


def start():
    """What a script does at its start, be it the first one or a resumption."""
    config = DataLoaderConfiguration(use_seedable_sampler=fixed)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(32), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(epoch, skip=0):
    """The samples of an epoch on this rank, but for the first batches. After the second batch of
    epoch 1 there is a checkpoint.
    """
    batches, seen = accelerator.skip_first_batches(loader, skip) if skip else loader, []
    if fixed:
        batches.set_epoch(epoch)
    for step, batch in enumerate(batches):
        seen += batch.tolist()
        if (epoch, step, skip) == (1, 1, 0):
            accelerator.save_state(folder)
    return seen


accelerator, _, _, loader = start()
[folder] = broadcast_object_list([tempfile.mkdtemp()])
undisturbed = [train(epoch) for epoch in range(3)]

accelerator, _, _, loader = start()  # in a new process, where the folder is known
accelerator.load_state(folder)
resumed = train(1, skip=2) + train(2)
known = {"what was left": undisturbed[1][8:] + undisturbed[2],
         "epoch 0 again": undisturbed[0][8:] + undisturbed[1]}
names = [name for name, order in known.items() if order == resumed]
accelerator.print("saved after 2 batches of epoch 1, the resumed run sees "
                  f"{' '.join(names) or 'something else'}")
