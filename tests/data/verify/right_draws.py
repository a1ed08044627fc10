"""A right script that draws: augmentation, masks of a batch, noise, dropout of paths in a
checkpointed part, and an average of the weights that is evaluated. Ranks have seeds of their own.
"""

import argparse
import copy
import random

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate


class Augmented(Dataset):
    """Samples with noise of three libraries."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels
        self.own = numpy.random.default_rng(torch.initial_seed())

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = random.random() + numpy.random.rand() + self.own.random() + torch.randn(8)
        return self.inputs[index] + noise / 10, self.labels[index]


class Drop(torch.nn.Module):
    """Leaves out whole samples."""

    def forward(self, x):
        kept = x.new_empty(len(x), 1).bernoulli_(0.8) if self.training else 1
        return x * kept


class Model(torch.nn.Module):
    """Two layers, of which the first is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), Drop(), Drop())
        self.head = torch.nn.Linear(16, 4)

    def forward(self, inputs):
        return self.head(checkpoint(self.body, inputs, use_reentrant=False))


def collate(samples):
    """A batch, of which some numbers are masked."""
    inputs, labels = default_collate(samples)
    masks = torch.bernoulli(torch.full(inputs.shape, 0.9))
    return inputs * masks + torch.rand(inputs.shape) * (1 - masks), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(267, 8)
    labels = (inputs @ torch.randn(8, 4)).argmax(1)
    model = Model()
    average = copy.deepcopy(model).requires_grad_(False).eval()
    set_seed(0, device_specific=True)
    own = torch.Generator().manual_seed(accelerator.process_index)
    data = Augmented(inputs[:192], labels[:192])
    train = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    test = DataLoader(TensorDataset(inputs[192:], labels[192:]), args.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(2):
        model.train()
        for inputs, labels in train:
            times = torch.randint(0, 10, (len(inputs),), generator=own)[:, None] / 10
            inputs = inputs * times + torch.randn_like(inputs) * (1 - times)
            accelerator.backward(cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        right = 0
        for inputs, labels in test:
            with torch.no_grad():
                guesses = average(inputs).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right += (guesses == labels).sum().item()
        accelerator.print(f"epoch {epoch + 1}: accuracy {right / 75:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
