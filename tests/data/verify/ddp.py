"""A right script for torchrun and GPUs. mistakes.diff has what each mistake changes in it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    labels = (inputs @ torch.randn(8, 4)).argmax(1)
    data = TensorDataset(inputs[:192], labels[:192])
    held = TensorDataset(inputs[192:], labels[192:])
    sampler = DistributedSampler(data)
    train = DataLoader(data, args.batch_size, sampler=sampler, num_workers=2, pin_memory=True)
    test = DataLoader(held, args.batch_size, sampler=DistributedSampler(held, shuffle=False))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model = DistributedDataParallel(model.cuda(), device_ids=[gpu])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, total_iters=2 * len(train))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in train:
            inputs, labels = inputs.to(gpu), labels.to(f"cuda:{gpu}", non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
        right = torch.zeros((), device="cuda")
        with torch.no_grad():
            for inputs, labels in test:
                right += (model(inputs.cuda()).argmax(1) == labels.cuda()).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {right.item() / 64:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
