"""Accuracy and speed of train_mnist_rnn.py, side by side with what a user would write instead.

    python benchmarks/mnist.py [--data_dir data] [--repeats 5]     about 13 minutes on two CPU cores

Every comparison alternates A and B within one call and reports the median of the ratios, as
machines are shared and noisy. Each process has one thread, as OMP_NUM_THREADS=1 makes it.
"""

import os
import statistics
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor

import side_by_side as sides
import torch
import torch.nn.functional as F
from torchvision import datasets, transforms

STEPS = 937  # an epoch of MNIST at batch 64


def train_by_hand(batches):
    """Seconds of an epoch of the script's model and optimizer in a bare loop over `batches`."""
    import train_mnist_rnn as script

    torch.manual_seed(0)
    model = script.RowLSTM(28, 64, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, STEPS, cycle_momentum=False)
    clock, losses = time.perf_counter(), []
    for step, (rows, labels) in enumerate(batches, 1):
        loss = F.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % 50 == 0:
            torch.stack(losses).tolist()
            losses = []
    assert step == STEPS
    return time.perf_counter() - clock


def loader_epoch(data_dir):
    """As PyTorch's mnist_rnn example has it: torchvision's transforms, sample by sample."""
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    mnist = datasets.MNIST(data_dir, train=True, download=True, transform=steps)
    loader = torch.utils.data.DataLoader(mnist, batch_size=64, shuffle=True, drop_last=True)
    return train_by_hand((images.squeeze(1), labels) for images, labels in loader)


def bare_epoch(data_dir):
    """Tensors in memory and an order of their own, without accelerate and a DataLoader."""
    mnist = datasets.MNIST(data_dir, train=True, download=True)
    pixels = mnist.data.float()
    images = (pixels - pixels.mean()) / pixels.std()
    order = torch.randperm(len(images))[: 64 * STEPS].split(64)
    return train_by_hand((images[ids], mnist.targets[ids]) for ids in order)


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data", help="as in train_mnist_rnn.py")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of each comparison")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # as the bare loops
    data, repeats = args.data_dir, range(args.repeats)

    def script(strategy, *flags):
        return sides.record(strategy, "train_mnist_rnn.py", "--data_dir", data, *flags)

    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores\n")
    print("| what | median | from to | target |\n|---|---|---|---|")
    runs = [script("baseline", "--seed", seed) for seed in range(3)]
    accuracies = [100 * run["metrics"]["accuracy"] for run in runs]
    name = f"test accuracy with the defaults, seeds 0 to 2 (mean {statistics.mean(accuracies):.2f})"
    sides.row(name, accuracies, "%", "mean >= 98.5 %")

    epoch = ["--max_train_steps", STEPS]
    ours, loader, bare = [], [], []
    for _ in repeats:
        loader.append(sides.alone(loader_epoch, data))
        ours.append(script("baseline", *epoch)["seconds"]["train"])
        bare.append(sides.alone(bare_epoch, data))
    sides.row("an epoch of the script, batch 64, one process", ours, "s")
    ratios = [b / a for a, b in zip(ours, loader, strict=True)]
    sides.row("DataLoader loop / script", ratios, "times")
    sides.row("script / bare loop", [a / b for a, b in zip(ours, bare, strict=True)], "times")

    for batch in (256, 64):
        flags = ["--per_device_train_batch_size", batch, "--max_train_steps", 90_000 // batch]
        ddp, apart = [], []
        for _ in repeats:
            one = script("baseline", *flags)["samples_per_second"]
            ddp.append(script("ddp", *flags)["samples_per_second"] / one)
            with ThreadPoolExecutor() as pool:  # what the cores give to two that do not talk
                pair = list(pool.map(lambda flags: script("baseline", *flags), [flags, flags]))
            apart.append(sum(run["samples_per_second"] for run in pair) / one)
        sides.row(f"samples/s of two DDP processes / one, batch {batch} a device", ddp, "times")
        sides.row("... of two processes at once, each on its own", apart, "times")


if __name__ == "__main__":
    main()
