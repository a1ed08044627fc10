"""A right script with common habits: attention, a frozen teacher, workers that may time out, an
evaluation in mid-epoch without no_grad, scalars that are gathered, sums that are reduced.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    print(args)
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(256, 4, 8)
    data = TensorDataset(inputs, inputs[:, 0].argmax(1) % 4)
    train = DataLoader(data, args.batch_size, shuffle=True, num_workers=2, timeout=60)
    test = DataLoader(TensorDataset(*data[:64]), args.batch_size)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(32, 4))
    teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 4)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for step, (inputs, labels) in enumerate(train):
        with torch.no_grad():
            wanted = teacher.to(accelerator.device)(inputs)
        outputs = model(inputs)
        accelerator.backward(cross_entropy(outputs, labels) + mse_loss(outputs, wanted))
        optimizer.step()
        optimizer.zero_grad()
        if step == 7:
            model.eval()
            right, losses = torch.zeros((), device=accelerator.device), []
            for inputs, labels in test:
                outputs = model(inputs).detach()
                right += (outputs.argmax(1) == labels).sum()
                losses.append(accelerator.gather(cross_entropy(outputs, labels)).mean())
            if accelerator.num_processes > 1:
                torch.distributed.all_reduce(right)
            right = right.item() / 64
            accelerator.print(f"accuracy {right:.4f}, loss {torch.stack(losses).mean():.5f}")
            model.train()
    accelerator.end_training()


if __name__ == "__main__":
    main()
