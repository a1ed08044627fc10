"""Trains on one device, but not the same on two, by four mistakes: exercise 15 asks for them."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    inputs = torch.randn(267, 8)
    labels = (inputs @ torch.randn(8, 4)).argmax(1)
    data = TensorDataset(inputs[:192], labels[:192])
    own = range(accelerator.process_index, 192, accelerator.num_processes)
    train = DataLoader(Subset(data, own), args.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(inputs[192:], labels[192:]), args.batch_size)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, total_iters=24)
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    for epoch in range(2):
        model.train()
        for inputs, labels in train:
            losses = cross_entropy(model(inputs), labels, reduction="none")
            counts = inputs[:, 0] > -0.5
            loss = (losses * counts).sum() / counts.sum()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for inputs, labels in test:
            with torch.no_grad():
                guesses = model(inputs).argmax(1)
            guesses, labels = accelerator.gather((guesses, labels))
            right += (guesses == labels).sum().item()
        accelerator.print(f"epoch {epoch + 1}: accuracy {right / 75:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
