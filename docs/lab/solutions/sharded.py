"""A right solution of exercise 9, part 3: each rank updates its part of the weights (ZeRO-1).

Write your own first. When the checker finds nothing wrong in it, compare the two.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append("docs/lab")  # from the project's root
from single import BATCH_SIZE, EPOCHS, SEED, evaluate, load_data  # noqa: E402  as they are


def make_flat(model, world_size):
    """One vector with all weights, and zeros at its end, so that each rank's part is as long. The
    weights of the model become views of it: what is written into it is in the model.
    """
    weights = list(model.parameters())
    total = sum(weight.numel() for weight in weights)
    flat = torch.zeros(-(-total // world_size) * world_size, device=weights[0].device)
    start = 0
    for weight in weights:
        end = start + weight.numel()
        flat[start:end] = weight.detach().flatten()
        weight.data = flat[start:end].view_as(weight)
        start = end
    return flat


def main():
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # before NCCL, or all ranks of a node would use GPU 0
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, seed=SEED)  # each rank's part of the order
    train_loader = DataLoader(train_data, BATCH_SIZE // world_size, sampler=sampler)
    test_loader = DataLoader(test_data, BATCH_SIZE)

    torch.manual_seed(SEED)  # the same first weights in each run
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    weights = make_flat(model, world_size)
    own = weights.chunk(world_size)[rank].clone()  # the part that this rank updates
    optimizer = torch.optim.SGD([own], lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # it shuffles with seed + epoch
        total = torch.zeros((), device=device)
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            model.zero_grad()
            loss.backward()
            gradients = torch.zeros_like(weights)
            filled = torch.cat([weight.grad.flatten() for weight in model.parameters()])
            gradients[: len(filled)] = filled
            own.grad = torch.empty_like(own)
            dist.reduce_scatter_tensor(own.grad, gradients)  # this rank's part of the sum
            own.grad /= world_size
            optimizer.step()
            dist.all_gather_into_tensor(weights, own)  # all parts, into the model
            total += loss.detach()
        dist.all_reduce(total)  # all ranks call it, and each has the sum then
        loss = total.item() / len(train_loader) / world_size
        if rank == 0:
            accuracy = evaluate(model, test_loader, device)  # no communication: one rank will do
            print(f"epoch {epoch}: training loss {loss:.6f}, test accuracy {accuracy:.2%}")
    if rank == 0:
        torch.save(model.state_dict(), sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
