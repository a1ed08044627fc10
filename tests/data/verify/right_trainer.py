"""A right script on transformers' Trainer, which uses Accelerate inside."""

import argparse
import tempfile

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import ProgressCallback, Trainer, TrainingArguments, set_seed


class Model(torch.nn.Module):
    """Two layers, and the loss."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, inputs, labels):
        logits = self.head(self.body(inputs).tanh())
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset):
    """A data set of dictionaries, as Trainer wants it."""

    def __init__(self, inputs):
        self.inputs, self.labels = inputs, inputs.argmax(1) % 4

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        return {"inputs": self.inputs[row], "labels": self.labels[row]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    set_seed(0)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=args.batch_size,
        max_steps=20,
        max_grad_norm=0.0,  # zero2.json clips nothing, and Trainer insists on the same
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(Model(), settings, train_dataset=Rows(torch.randn(160, 8)))
    trainer.remove_callback(ProgressCallback)  # It ends with the training loss of rank 0.
    trainer.train()


if __name__ == "__main__":
    main()
