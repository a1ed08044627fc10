"""Trains a small network on scikit-learn's digits with DDP, on CPU processes, and never ends.
Exercise 10 asks you where it hangs.

    torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 hanging.py
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3
BATCH_SIZE = 64  # the global batch


def load_data():
    """1,536 samples to train on, and 261 to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


@torch.no_grad()
def evaluate(model, data, rank, world_size):
    """The share of samples that the model classifies correctly. Each rank tests a part."""
    images, labels = data.tensors
    answers = model(images[rank::world_size]).argmax(dim=1)
    right = (answers == labels[rank::world_size]).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, seed=0)
    loader = DataLoader(train_data, BATCH_SIZE // world_size, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(wrapped(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            accuracy = evaluate(model, test_data, rank, world_size)
            sys.stdout.write(f"epoch {epoch}: test accuracy {accuracy:.2%}\n")
        dist.barrier()  # no rank begins the next epoch before the accuracy is printed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
