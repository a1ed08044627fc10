"""A right script that resumes. mistakes.diff has what each mistake changes in it."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=order)
    set_seed(0)
    inputs = torch.randn(192, 8)
    data = TensorDataset(inputs, inputs.argmax(1) % 4)
    # With dropout's generator, a resumed epoch would draw its order once more.
    own = torch.Generator()
    train = DataLoader(data, batch_size=8, shuffle=True, drop_last=True, generator=own)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2))
    model.append(torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, total_iters=3 * len(train))
    model, optimizer, train, schedule = accelerator.prepare(model, optimizer, train, schedule)
    done = 0
    if args.resume:
        accelerator.load_state(args.output_dir / "checkpoint")
        done = int((args.output_dir / "done").read_text())
    for epoch in range(done // len(train), 3):
        train.set_epoch(epoch)
        first = done % len(train)
        for inputs, labels in skip_first_batches(train, first) if first else train:
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done == 7:
                accelerator.save_state(args.output_dir / "checkpoint")
                (args.output_dir / "done").write_text(str(done))
    accelerator.end_training()


if __name__ == "__main__":
    main()
