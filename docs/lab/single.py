"""Trains a small network on scikit-learn's digits, on one device. Exercise 9 turns it into DDP.

python docs/lab/single.py weights.pt
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

SEED = 0
EPOCHS = 5
BATCH_SIZE = 64


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_data, test_data = load_data()
    order = torch.Generator()
    sampler = RandomSampler(train_data, generator=order)
    train_loader = DataLoader(train_data, BATCH_SIZE, sampler=sampler)
    test_loader = DataLoader(test_data, BATCH_SIZE)

    torch.manual_seed(SEED)  # the same first weights in each run
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        order.manual_seed(SEED + epoch)  # a new order in each epoch, the same in each run
        total = 0.0
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        loss, accuracy = total / len(train_loader), evaluate(model, test_loader, device)
        print(f"epoch {epoch}: training loss {loss:.6f}, test accuracy {accuracy:.2%}")
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
