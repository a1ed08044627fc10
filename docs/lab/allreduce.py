"""See an all-reduce: two ranks with two samples each, and the gradient of one weight.

torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 docs/lab/allreduce.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
samples = torch.tensor([1.0, 2.0, 3.0, 4.0])
mine = samples[rank::world_size]  # every rank takes its own

weight = torch.tensor(1.0, requires_grad=True)
loss = ((weight * mine) ** 2).mean()  # so the gradient is 2 x the mean of samples ** 2
loss.backward()
own = weight.grad.item()
dist.all_reduce(weight.grad)  # each rank calls it, and each has the sum then
total = weight.grad.item()
weight.grad /= world_size

line = f"rank {rank} has {mine.tolist()}: gradient {own}, the sum {total}, the mean {weight.grad}"
print(f"{line}\n", end="")  # in one piece, as both ranks write here
dist.destroy_process_group()
