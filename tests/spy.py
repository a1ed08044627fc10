"""Tests launch this instead of a script. It notes what the script does, and causes the accidents
that a test asks for. It hooks into accelerate and torch, because the script may change.

SPY_SCRIPT  the script's name without .py
SPY_DIR     every rank notes in SPY_DIR/ids_RANK.jsonl the samples of each micro-batch it trains on,
            and fails if it has lost a setting that only a GPU would notice
SPY_SIGNAL  "SIGKILL 1 30": rank 1 gets the signal before its micro-batch 30 (counted from 0);
            "SIGTERM all 30": every rank; "SIGTERM+SIGUSR1 1 30": two signals, one after the other
SPY_EVAL    the same when an evaluation batch is read
SPY_SAVE    "SIGKILL 2": rank 0 gets the signal in the second checkpoint, before it is complete
SPY_NAN     "1 30": rank 1's loss is NaN on its micro-batch 30
SPY_MEMORY  to prepare the loaders, and to evaluate, needs this many MB more
SPY_DRIVER  "1": torch sees a GPU on rank 1, and cannot use it
SPY_READS   notes in SPY_READS/reads_RANK.json what reads a tensor's values within steps
SPY_SCORES  "0.5 0.9": the accuracies that the LSTM's evaluations find, each in one batch
SPY_SHAPES  torch.compile gives up after this number of shapes, instead of 8
SPY_BYTES   notes in SPY_DIR/bytes_RANK.json what a rank holds after the backward passes of step 3
SPY_WIRE    notes in SPY_WIRE/wire_RANK.json what the node had sent when steps 2 and 12 ended
SPY_CALLS   notes in SPY_CALLS/calls_RANK.json the collectives within steps 3 to 5, with their bytes
SPY_LAYERS  notes in SPY_LAYERS/layers_RANK.json how often BERT's layers attend in training
SPY_STEPS   rank 0 appends to this file the time and number of each step, and its own start,
SPY_PAUSE   and pauses for this many seconds after each
"""

import collections
import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import accelerate.accelerator
import accelerate.data_loader
import torch
from accelerate import Accelerator
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from memory.held import count_held as bytes_held  # noqa: E402
from watching.collectives import Tally  # noqa: E402
from watching.steps import StepWatch, patch_fetch  # noqa: E402

ORDERS = {name[4:]: value for name, value in os.environ.items() if name.startswith("SPY_")}
script = importlib.import_module(ORDERS["SCRIPT"])
RANK = int(os.environ.get("RANK", 0))
COUNTS = collections.Counter()  # of micro-batches, evaluated batches, checkpoints
FETCHED = collections.deque()
SENT = []  # bytes of this node, after steps 2 and 12
STARTED = time.time()  # tells this process from the one of an earlier job


def instead(owner, name, *orders):
    """Decorator: if a test gives any of these orders, the function replaces `owner.name`, which it
    gets as its first argument.
    """

    def replace(function):
        if not ORDERS.keys().isdisjoint(orders):
            original = getattr(owner, name)
            setattr(owner, name, lambda *args, **options: function(original, *args, **options))

    return replace


def obey(order, count):
    """Send this process the signals of an order such as "SIGKILL 1 30", if it is time."""
    signals, *when = ORDERS.get(order, "none").split()
    if when in ([str(count)], [str(RANK), str(count)], ["all", str(count)]):
        with FunctionalTensorMode():  # as in torch.compile: a handler may make no tensor
            for name in signals.split("+"):
                os.kill(os.getpid(), getattr(signal, name))


def note(order, name, what):
    (Path(ORDERS[order]) / f"{name}_{RANK}.json").write_text(json.dumps(what))


@instead(accelerate.data_loader, "send_to_device", "DIR")
def send_to_device(original, batch, device, non_blocking=False):
    """Copy a batch to the device. The script must not wait for the copy."""
    assert non_blocking, "it would wait for each copy to a GPU"
    return original(batch, device, non_blocking=True)


@instead(torch.optim.AdamW, "__init__", "DIR")
def make_adamw(original, self, *args, **options):
    assert options["fused"], "it would start several kernels for each parameter"
    original(self, *args, **options)


@instead(DistributedDataParallel, "__init__", "DIR")
def make_ddp(original, self, *args, **options):
    assert options["gradient_as_bucket_view"], "it would hold the gradients twice"
    original(self, *args, **options)


@instead(torch.distributed, "init_process_group", "DIR")
def connect(original, *args, **options):
    assert options["timeout"].total_seconds() >= 1800, "it would not wait for a long download"
    original(*args, **options)


def fetch(original, self, ids):
    reads.within_step = False
    if torch.is_grad_enabled():  # training, not evaluation
        FETCHED.append(ids)  # which is one batch ahead of what is trained on
    else:
        obey("EVAL", COUNTS["evaluated"])
        COUNTS["evaluated"] += 1
    return original(self, ids)


if not ORDERS.keys().isdisjoint(("DIR", "EVAL", "READS")):
    patch_fetch(fetch)


@instead(Accelerator, "backward", "DIR", "SIGNAL", "NAN")
def backward(original, self, loss, **options):
    obey("SIGNAL", COUNTS["trained"])
    if "DIR" in ORDERS:
        with open(Path(ORDERS["DIR"]) / f"ids_{RANK}.jsonl", "a") as file:
            file.write(json.dumps(FETCHED.popleft()) + "\n")
    if ORDERS.get("NAN", "").split() == [str(RANK), str(COUNTS["trained"])]:
        loss.data.fill_(float("nan"))
    original(self, loss, **options)
    COUNTS["trained"] += 1


@instead(accelerate.accelerator, "save_accelerator_state", "SAVE")
def save_accelerator_state(original, *args, **options):
    """The end of `save_state`: accelerate's files are on disk, and the script's own are not."""
    folder = original(*args, **options)
    COUNTS["saved"] += 1
    if RANK == 0:
        obey("SAVE", COUNTS["saved"])
    return folder


@instead(script, "make_loaders", "MEMORY")
def make_loaders(original, *args):
    besides = torch.ones(int(ORDERS["MEMORY"]) * 250_000)
    return original(*args) if besides.all() else None


@instead(Accelerator, "gather_for_metrics", "MEMORY", "SCORES")
def gather_for_metrics(original, self, *args, **options):
    besides = torch.ones(int(ORDERS.get("MEMORY", 0)) * 250_000)
    found = original(self, *args, **options)
    if "SCORES" in ORDERS:
        score = float(ORDERS["SCORES"].split()[COUNTS["gathered"]])
        found = torch.full_like(found, score, dtype=torch.float64)
        COUNTS["gathered"] += 1
    return found if besides.all() else None


@instead(LRScheduler, "step", "WIRE", "STEPS")
def step(original, self, *args):
    original(self, *args)
    number = self.last_epoch
    if "WIRE" in ORDERS and number in (2, 12):
        [line] = [line for line in open("/proc/net/dev") if "eth0:" in line]
        SENT.append(int(line.split()[9]))
        note("WIRE", "wire", SENT)
    if "STEPS" in ORDERS and RANK == 0 and number:  # 0 is when it is made
        with open(ORDERS["STEPS"], "a") as file:
            file.write(f"{time.time():.2f} {number} {STARTED}\n")
        time.sleep(float(ORDERS.get("PAUSE", 0)))


@instead(torch.nn.functional, "scaled_dot_product_attention", "LAYERS")
def attention(original, *args, **options):
    COUNTS["layers"] += torch.is_grad_enabled()
    note("LAYERS", "layers", COUNTS["layers"])
    return original(*args, **options)


class Reads(TorchDispatchMode):
    """Notes what reads a tensor's values within steps: on a GPU, it would wait for all kernels."""

    NAMES = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}

    def __init__(self):
        super().__init__()
        self.within_step, self.seen = False, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").split(".")[0]
        if name in self.NAMES:
            self.read(name)
        return function(*args, **(kwargs or {}))

    def read(self, name):
        if self.within_step:
            lines = [frame for frame in traceback.extract_stack() if "train_" in frame.filename]
            self.seen.append(f"{name} in {lines[-1].line}")


reads = Reads()


@instead(torch.Tensor, "cpu", "READS")  # on a CPU, torch dispatches nothing for these two
def cpu(original, self, *args, **options):
    reads.read("cpu")
    return original(self, *args, **options)


@instead(torch.Tensor, "tolist", "READS")
def tolist(original, self):
    reads.read("tolist")
    return original(self)


@instead(Accelerator, "accumulate", "READS")
def accumulate(original, *args):
    reads.within_step = True
    return original(*args)


@instead(script, "log_step", "READS")
def log_step(original, *args):
    reads.within_step = False
    COUNTS["logged"] += 1
    note("READS", "reads", {"logs": COUNTS["logged"], "reads": reads.seen})
    return original(*args)


if ORDERS.get("DRIVER") == str(RANK):
    torch.cuda.device_count = lambda: 1
if "SHAPES" in ORDERS:
    importlib.import_module("torch._dynamo").config.recompile_limit = int(ORDERS["SHAPES"])


class Watch(StepWatch):
    """Notes what a rank holds and calls in steps."""

    tally = Tally(per_node=1)

    def begin(self, model):
        if "CALLS" in ORDERS and 2 <= self.done < 5:
            self.tally.__enter__()

    def before_update(self, optimizer):
        if "BYTES" in ORDERS and self.done == 2:
            [model] = self.models
            sizes = [getattr(part, "ds_numel", part.numel()) for part in model.parameters()]
            note("DIR", "bytes", bytes_held(model, optimizer) | {"sizes": sizes})

    def end(self):
        if "CALLS" in ORDERS and 2 < self.done <= 5:
            self.tally.__exit__(None, None, None)
            note("CALLS", "calls", self.tally.rows())


if not ORDERS.keys().isdisjoint(("CALLS", "BYTES")):
    Watch().watch()
if __name__ == "__main__":
    with reads if "READS" in ORDERS else contextlib.nullcontext():
        script.cli()
