"""A resumed run sees samples of the first epoch again: save_state does not count the epochs."""

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
    loader = DataLoader(torch.arange(32), batch_size=4, shuffle=True)
    return accelerator, accelerator.prepare(loader)


def train(epoch, skip=0):
    """The samples of an epoch on this rank, but for the first batches. There is a checkpoint after
    the second batch of epoch 1.
    """
    batches, seen = accelerator.skip_first_batches(loader, skip) if skip else loader, []
    if fixed:
        batches.set_epoch(epoch)
    for step, batch in enumerate(batches):
        seen += batch.tolist()
        if (epoch, step, skip) == (1, 1, 0):
            accelerator.save_state(folder)
    return seen


accelerator, loader = start()
[folder] = broadcast_object_list([tempfile.mkdtemp()])
first, second, third = [train(epoch) for epoch in range(3)]
accelerator, loader = start()  # in a new process, where the folder is known
accelerator.load_state(folder)
resumed = train(1, skip=2) + train(2)
saw = ("what was left" if resumed == second[8:] + third else
       "epoch 0 again" if resumed == first[8:] + second else "something else")
accelerator.print(f"saved after 2 batches of epoch 1, the resumed run sees {saw}")
