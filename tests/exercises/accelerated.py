"""A right solution of exercise 9, part 2: docs/lab/single.py with Accelerate."""

import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

SEED = 0
EPOCHS = 5
BATCH_SIZE = 64  # of all ranks together


def load_data():
    """1,536 samples to train on, which are 24 batches of 64, and 261 to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)  # 64 pixels each, from 0 to 1
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


def evaluate(model, loader, device):
    """The share of the samples that the model names correctly."""
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            answers = model(images.to(device)).argmax(dim=1)
            right += (answers == labels.to(device)).sum().item()
    return right / len(loader.dataset)


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train_data, test_data = load_data()
    order = torch.Generator()
    sampler = RandomSampler(train_data, generator=order)
    batch_size = BATCH_SIZE // accelerator.num_processes
    train_loader = DataLoader(train_data, batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, BATCH_SIZE)  # not prepared: each rank evaluates all of it

    torch.manual_seed(SEED)  # the same first weights in each run
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

    for epoch in range(EPOCHS):
        order.manual_seed(SEED + epoch)  # another order in each epoch, the same in each run
        total = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        loss = accelerator.reduce(total, "mean").item() / len(train_loader)
        accuracy = evaluate(model, test_loader, accelerator.device)
        accelerator.print(f"epoch {epoch}: training loss {loss:.6f}, test accuracy {accuracy:.2%}")
    accelerator.save(accelerator.get_state_dict(model), sys.argv[1])
    accelerator.end_training()


if __name__ == "__main__":
    main()
