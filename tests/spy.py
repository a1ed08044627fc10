"""A script with eyes, and accidents on order: tests launch it in place of the script.

SPY_SCRIPT  the script's name without .py
SPY_DIR     every rank notes in SPY_DIR/ids_RANK.jsonl the samples of each micro-batch it trains on
SPY_SIGNAL  "SIGKILL 1 30": rank 1 gets the signal before its micro-batch number 30 (from 0);
            "SIGTERM all 30": every rank; "SIGTERM+SIGUSR1 1 30": two signals, one after the other;
            "HANG 1 30": it sleeps there for two minutes
SPY_EVAL    the same at an evaluation batch; more than two others are an error
SPY_SAVE    "SIGKILL 2": rank 0 gets the signal in the second checkpoint, before it is complete
SPY_NAN     "loss 1 30": rank 1's loss is NaN on its micro-batch number 30; or "gradient 1 30"
SPY_TOKENS  tokenising writes this file, and then takes two minutes
SPY_MEMORY  an evaluation holds so many MB besides
SPY_SHAPES  torch.compile gives up after so many shapes, and not after 8
SPY_LATE    a disk that shows each rank, in a checkpoint that is being written, its own files only
SPY_FLATTEN the LSTM's weights move into one buffer, as cuDNN moves them on a GPU
SPY_LIMIT   so many MB for each rank from before the model is made; of a GPU, so many in all
SPY_BYTES   notes in SPY_DIR/bytes_RANK.json what a rank holds after its third backward pass
SPY_WIRE    notes in SPY_WIRE/wire_RANK.json what the node had sent when steps 2 and 12 ended
SPY_CALLS   notes in SPY_CALLS/calls_RANK.json the collectives of steps 3 to 12, with their bytes
SPY_STEPS   rank 0 appends to this file the time and number of each step, and its own start,
SPY_PAUSE   and pauses for so many seconds after each
SPY_SYNC    whatever waits for the GPU is an error, but where the ranks meet
SPY_UNSET   memory that nobody has set holds NaN
SPY_PLAIN   accelerate comes as it is: on a CPU each process trains alone
"""

import collections
import ctypes
import functools
import importlib
import itertools
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ORDERS = {name[4:]: value for name, value in os.environ.items() if name.startswith("SPY_")}
script = importlib.import_module(ORDERS["SCRIPT"])
RANK = int(os.environ.get("RANK", 0))
DATA = "Images" if hasattr(script, "Images") else "Features"
COUNTS = collections.Counter()  # of micro-batches, evaluated batches, checkpoints, steps, syncs
FETCHED = collections.deque()
STARTED = time.time()  # tells this process from the one of an earlier job


def instead(name, *orders, owner=script):
    """Decorator: where any of these is ordered, the function stands in the place of `owner.name`.
    Its first argument is the original.
    """

    def replace(function):
        if ORDERS.keys().isdisjoint(orders):
            return
        *path, last = name.split(".")
        place = functools.reduce(getattr, path, owner)
        original = getattr(place, last)

        @functools.wraps(original)  # the code of `tokenize` is part of the cache's key
        def replaced(*args, **options):
            return function(original, *args, **options)

        setattr(place, last, replaced)

    return replace


def obey(order, count):
    """Send this process the signals of an order such as "SIGKILL 1 30", if it is time."""
    signals, *when = ORDERS.get(order, "none").split()
    if when not in ([str(count)], [str(RANK), str(count)], ["all", str(count)]):
        return
    if signals == "HANG":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher need not wait
        time.sleep(120)
    else:
        with FunctionalTensorMode():  # as in torch.compile: a handler may make no tensor
            for name in signals.split("+"):
                os.kill(os.getpid(), getattr(signal, name))


def spoil(loss, what):
    now = [what, str(RANK), str(COUNTS["trained"])]
    return loss * (float("nan") if ORDERS.get("NAN", "").split() == now else 1)


def note(order, name, what):
    (Path(ORDERS[order]) / f"{name}_{RANK}.json").write_text(json.dumps(what))


@instead(f"{DATA}.__getitems__", "DIR")
def fetch(original, self, ids):
    if torch.is_grad_enabled():  # training, not evaluation
        FETCHED.append(ids)  # which is one batch ahead of what is trained on
    return original(self, ids)


@instead("Accelerator.backward", "DIR", "NAN")
def backward(original, self, loss):
    obey("SIGNAL", COUNTS["trained"])
    if "DIR" in ORDERS:
        with open(Path(ORDERS["DIR"]) / f"ids_{RANK}.jsonl", "a") as file:
            file.write(json.dumps(FETCHED.popleft()) + "\n")
    original(self, spoil(loss, "gradient"))
    COUNTS["trained"] += 1


@instead("F.cross_entropy", "NAN")
def cross_entropy(original, *args, **options):
    return spoil(original(*args, **options), "loss")


@instead("StopSignal.agreed", "EVAL")
def agreed(original, self, accelerator):
    if not torch.is_grad_enabled():  # in an evaluation
        obey("EVAL", COUNTS["evaluated"])
        COUNTS["evaluated"] += 1
        assert COUNTS["evaluated"] <= int(ORDERS["EVAL"].split()[2]) + 3, "the evaluation goes on"
    return original(self, accelerator)


@instead("write_whole", "SAVE")
def write_whole(original, path, text):
    if path.name == "checkpoint.json":
        COUNTS["saved"] += 1
        obey("SAVE", COUNTS["saved"])
    return original(path, text)


@instead("tokenize", "TOKENS")
def tokenize(original, *args, **options):
    Path(ORDERS["TOKENS"]).touch()
    time.sleep(120)
    return original(*args, **options)


@instead("evaluate", "MEMORY")
def evaluate(original, *args):
    besides = torch.ones(int(ORDERS["MEMORY"]) * 250_000)
    return original(*args) if besides.all() else None


@instead("Path.rglob", "LATE")
def rglob(original, self, pattern):
    others = re.compile(rf"(^__|rank_|states_){1 - RANK}(_|\.)")
    return (path for path in original(self, pattern) if not others.search(path.name))


@instead("RowLSTM.__init__", "FLATTEN")
def init(original, self, *args):
    sys.path.append(str(ROOT / "docs" / "reference" / "troubleshooting"))
    from without_gpu import flatten_like_cudnn

    original(self, *args)  # where nothing is flattened; on its way to a GPU it is, and then
    torch.nn.RNNBase.flatten_parameters = flatten_like_cudnn


@instead("load_model", "LIMIT")
def load_model(original, *args):
    more = int(ORDERS["LIMIT"]) * 10**6
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(more / whole)
    else:
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: the system gets back what is freed
        held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
        most = int(held) * 1024 + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return original(*args)


@instead("PartialState", "PLAIN")
def plain(original, *_, **__):
    return original()


class Calls(TorchDispatchMode):
    """Notes all that goes to a process group, whoever calls: Python, DDP's reducer, or FSDP."""

    calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            name = function.name().removeprefix("c10d::")
            # Of what is gathered or scattered, the whole; of several tensors, their sum.
            size = max(sizes, default=0) if "_base" in name else sum(sizes)
            self.calls.append([name, size])
        return function(*args, **(kwargs or {}))


CALLS, SENT = Calls(), []


@instead("Run.sync", "SYNC")
def sync(original, run, *args):
    COUNTS["syncs"] += 1
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
    original(run, *args)


@instead("Run.after_batch", "WIRE", "CALLS", "STEPS", "SYNC")
def after_batch(original, run, *args):
    before, syncs = run.progress.step, COUNTS["syncs"]
    original(run, *args)
    step = run.progress.step
    if step == before:
        return  # The step has more micro-batches.
    if "WIRE" in ORDERS and step in (2, 12):
        [line] = [line for line in open("/proc/net/dev") if "eth0:" in line]
        SENT.append(int(line.split()[9]))
        note("WIRE", "wire", SENT)
    if "CALLS" in ORDERS and step == 2:
        CALLS.__enter__()
    if "CALLS" in ORDERS and step == 12:
        CALLS.__exit__(None, None, None)
        note("CALLS", "calls", CALLS.calls)
    if "STEPS" in ORDERS and RANK == 0:
        with open(ORDERS["STEPS"], "a") as file:
            file.write(f"{time.time():.2f} {step} {STARTED}\n")
        time.sleep(float(ORDERS.get("PAUSE", 0)))
    if "SYNC" in ORDERS and torch.cuda.is_available() and COUNTS["syncs"] == syncs:
        torch.cuda.set_sync_debug_mode("error")


@instead("Accelerator.prepare", "BYTES")
def prepare(original, self, *parts):
    if len(parts) == 1:
        return original(self, *parts)  # the loader for evaluation
    sizes = [parameter.numel() for parameter in parts[0].parameters()]
    prepared = model, optimizer, *_ = original(self, *parts)
    # Where gradients are reduced and not yet gone: before DeepSpeed's step, or zero_grad.
    zero = self.distributed_type == script.utils.DistributedType.DEEPSPEED

    @instead("step" if zero else "zero_grad", "BYTES", owner=model if zero else optimizer)
    def counted(original, *args, **options):
        COUNTS["steps"] += self.sync_gradients
        if COUNTS["steps"] == 3 and self.sync_gradients:
            note("DIR", "bytes", bytes_held(model, optimizer) | {"sizes": sizes})
        return original(*args, **options)

    return prepared


def bytes_held(model, optimizer):
    """What this rank holds of parameters, gradients and optimizer states, in bytes, by storage: a
    view counts once.
    """
    groups = {name: {} for name in ("parameters", "gradients", "states", "master_copy")}

    def count(group, tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        # Not the counters of steps, and nothing that is offloaded.
        if tensor is not None and tensor.numel() > 1 and tensor.device.type != "meta":
            groups[group][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    inner = optimizer.optimizer
    for parameter in model.parameters():
        count("parameters", parameter)
        count("parameters", getattr(parameter, "ds_tensor", None))
        count("gradients", parameter.grad)
    if hasattr(inner, "averaged_gradients"):  # DeepSpeed's own optimizer, around the script's
        count_zeros_parts(inner, count)
        inner = inner.optimizer
    for value in itertools.chain(*(state.values() for state in inner.state.values())):
        count("states", value)
    held = {name: sum(group.values()) for name, group in groups.items()}
    # DDP's buckets are seen in the gradients that are views of them, or else lie beside these.
    lone = len(groups["gradients"]) == sum(1 for _ in model.parameters())
    if lone and hasattr(model, "reducer"):
        held["gradients"] *= 2
    return held


def count_zeros_parts(optimizer, count):
    for gradient in itertools.chain(*filter(None, optimizer.averaged_gradients.values())):
        count("gradients", gradient)
    # Of ZeRO-2, and of ZeRO-3.
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        for part in getattr(optimizer, name, []):
            count("master_copy", part)
            count("gradients", part.grad)


if __name__ == "__main__":
    torch.use_deterministic_algorithms("UNSET" in ORDERS, warn_only=True)  # so torch.empty is NaN
    if "SHAPES" in ORDERS:
        importlib.import_module("torch._dynamo").config.recompile_limit = int(ORDERS["SHAPES"])
    script.cli()
