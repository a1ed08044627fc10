"""A right solution of exercise 9, part 4: docs/lab/single.py with Accelerate.

Write your own first. When the checker finds nothing wrong in it, compare the two.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

sys.path.append("docs/lab")  # from the project's root
from single import BATCH_SIZE, EPOCHS, SEED, evaluate, load_data  # noqa: E402  as they are


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train_data, test_data = load_data()
    order = torch.Generator()
    sampler = RandomSampler(train_data, generator=order)
    batch_size = BATCH_SIZE // accelerator.num_processes  # BATCH_SIZE is that of all ranks
    train_loader = DataLoader(train_data, batch_size, sampler=sampler)
    test_loader = DataLoader(test_data, BATCH_SIZE)  # not prepared: each rank evaluates all of it

    torch.manual_seed(SEED)  # the same first weights in each run
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

    for epoch in range(EPOCHS):
        order.manual_seed(SEED + epoch)  # a new order in each epoch, the same in each run
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
