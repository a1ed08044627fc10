"""train_mnist_rnn.py with eyes, and accidents on order: tests launch it in place of the script.

SPY_DIR     every rank notes the sample ids of each micro-batch it trains on in SPY_DIR/ids_RANK.jsonl
SPY_SIGNAL  "SIGKILL 1 30": rank 1 gets the signal when it is about to train on its micro-batch number 30 (from 0);
            "SIGTERM all 30": every rank does
SPY_SAVE    "SIGKILL 2": rank 0 gets the signal in the middle of the second checkpoint, before it is complete
SPY_FLATTEN do to the LSTM's weights what cuDNN does on a GPU: move them into one buffer
SPY_PLAIN   use accelerate as it comes, to meet the trap that on a CPU each process trains alone
"""

import json
import os
import signal
from pathlib import Path

import accelerate
import conftest  # noqa: F401  puts the project's root on the path
import torch

import train_mnist_rnn as script

RANK = int(os.environ.get("RANK", 0))


def hit(order):
    """Send this process the signal named at the start of an order such as "SIGKILL 1 30"."""
    os.kill(os.getpid(), getattr(signal, order.split()[0]))


def spy_on_batches():
    seen, original = [0], script.Images.batch
    order = os.environ.get("SPY_SIGNAL", "")
    ids_file = Path(os.environ["SPY_DIR"]) / f"ids_{RANK}.jsonl"

    def batch(self, ids):
        if torch.is_grad_enabled():  # training, not evaluation
            if order and order.split()[1:] in ([str(RANK), str(seen[0])], ["all", str(seen[0])]):
                hit(order)
            seen[0] += 1
            with open(ids_file, "a") as file:
                file.write(json.dumps(ids.tolist()) + "\n")
        return original(self, ids)

    script.Images.batch = batch


def spy_on_saves():
    saves, original = [0], script.write_atomically
    order = os.environ["SPY_SAVE"]

    def write_atomically(path, text):
        saves[0] += path.name == "checkpoint.json"
        if path.name == "checkpoint.json" and order.split()[1] == str(saves[0]):
            hit(order)
        original(path, text)

    script.write_atomically = write_atomically


def flatten_like_cudnn(lstm):
    """What RNNBase.flatten_parameters makes of the weights on a GPU."""
    weights = [weight for weight in lstm._flat_weights if weight.numel()]
    buffer = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, buffer.split([weight.numel() for weight in weights]), strict=True):
        with torch.no_grad():
            weight.set_(part.view(weight.shape))


def spy_on_weights():
    original = script.RowLSTM.__init__

    def init(self, *args):
        original(self, *args)  # on the CPU, where nothing is flattened; on its way to the GPU it is, and in forward
        torch.nn.RNNBase.flatten_parameters = flatten_like_cudnn

    script.RowLSTM.__init__ = init


if __name__ == "__main__":
    if "SPY_FLATTEN" in os.environ:
        spy_on_weights()
    if "SPY_DIR" in os.environ:
        spy_on_batches()
    if "SPY_SAVE" in os.environ:
        spy_on_saves()
    if "SPY_PLAIN" in os.environ:
        script.Accelerator = lambda **options: accelerate.Accelerator()
    script.main()
    os._exit(0)  # as the script does
