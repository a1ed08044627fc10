"""A script with eyes, and accidents on order: tests launch it in place of the script.

SPY_SCRIPT  the script's name without .py
SPY_DIR     every rank notes the sample ids of each micro-batch it trains on in
            SPY_DIR/ids_RANK.jsonl
SPY_SIGNAL  "SIGKILL 1 30": rank 1 gets the signal when it is about to train on its micro-batch
            number 30 (from 0); "SIGTERM all 30": every rank does; "SIGTERM+SIGUSR1 1 30": two, one
            after the other; "HANG 1 30": it sleeps there for two minutes
SPY_EVAL    "SIGTERM 1 2": rank 1 gets the signal at its evaluation batch number 2; more than two
            others are an error
SPY_TOKENS  tokenising writes this file, and then takes two minutes
SPY_MEMORY  an evaluation holds so many MB besides
SPY_SHAPES  torch.compile gives up after so many shapes, and not after 8
SPY_NAN     "loss 1 30": rank 1's loss is NaN on its micro-batch number 30; "gradient 1 30": only
            its gradients are
SPY_SAVE    "SIGKILL 2": rank 0 gets the signal in the middle of the second checkpoint, before it is
            complete
SPY_LATE    a disk that shows each rank, in a checkpoint that is being written, its own files only
SPY_FLATTEN do to the LSTM's weights what cuDNN does on a GPU: move them into one buffer
SPY_BYTES   every rank notes in SPY_DIR/bytes_RANK.json, after its third step's backward pass, the
            bytes that it holds
SPY_LIMIT   from before the model is made, each rank may have so many MB more than it has then; a
            GPU has so many
SPY_WIRE    every rank notes in SPY_WIRE/wire_RANK.json the bytes that its node has sent when its
            steps 2 and 12 end
SPY_CALLS   every rank notes in SPY_CALLS/calls_RANK.json the collectives of its steps 3 to 12, with
            their bytes
SPY_STEPS   rank 0 appends to this file the time and number of every step that it has done, and its
            own start,
SPY_PAUSE   and pauses for so many seconds after each
SPY_SYNC    whatever waits for the GPU is an error, but where the ranks meet
SPY_PLAIN   use accelerate as it comes, to meet the trap that on a CPU each process trains alone
"""

import collections
import ctypes
import functools
import importlib
import json
import os
import re
import resource
import signal
import sys
import textwrap
import time
from pathlib import Path

import accelerate
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from troubleshooting.without_gpu import flatten_like_cudnn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
script = importlib.import_module(os.environ["SPY_SCRIPT"])
RANK = int(os.environ.get("RANK", 0))


def hit(order):
    """Send this process the signals named at the start of an order such as "SIGKILL 1 30"."""
    if order.startswith("HANG"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher need not wait
        return time.sleep(120)
    for name in order.split()[0].split("+"):
        os.kill(os.getpid(), getattr(signal, name))


def spy_on_batches():
    data = script.Images if hasattr(script, "Images") else script.Features
    fetch, backward = data.__getitems__, script.Accelerator.backward
    fetched, trained = collections.deque(), [0]
    order = os.environ.get("SPY_SIGNAL", "")
    ids_file = Path(os.environ["SPY_DIR"]) / f"ids_{RANK}.jsonl"

    def noting(self, ids):
        if torch.is_grad_enabled():  # training, not evaluation
            fetched.append(ids)  # which is one batch ahead of what is trained on
        return fetch(self, ids)

    def training(self, loss):
        if order and order.split()[1:] in ([str(RANK), str(trained[0])], ["all", str(trained[0])]):
            hit(order)
        trained[0] += 1
        with open(ids_file, "a") as file:
            file.write(json.dumps(fetched.popleft()) + "\n")
        backward(self, loss)

    data.__getitems__, script.Accelerator.backward = noting, training


def spy_on_evaluation():
    order, evaluated = os.environ["SPY_EVAL"].split(), [0]
    original = script.Accelerator.check_trigger

    def check_trigger(self):
        if not torch.is_grad_enabled():  # in an evaluation
            if order[1:] == [str(RANK), str(evaluated[0])]:
                hit(order[0])
            evaluated[0] += 1
            assert evaluated[0] <= int(order[2]) + 3, "the evaluation goes on"
        return original(self)

    script.Accelerator.check_trigger = check_trigger


def spy_on_tokens():
    original = script.tokenize

    @functools.wraps(original)  # whose code is part of the cache's key
    def tokenize(*args, **options):
        Path(os.environ["SPY_TOKENS"]).touch()
        time.sleep(120)
        return original(*args, **options)

    script.tokenize = tokenize


def spy_on_memory():
    name = "evaluate_epoch" if hasattr(script, "evaluate_epoch") else "evaluate"
    original = getattr(script, name)

    def evaluate(*args):
        besides = torch.ones(int(os.environ["SPY_MEMORY"]) * 250_000)
        return original(*args) if besides.all() else None

    setattr(script, name, evaluate)


def spy_on_shapes():
    import torch._dynamo

    torch._dynamo.config.recompile_limit = int(os.environ["SPY_SHAPES"])


def spy_on_numbers():
    """Make one rank's numbers bad."""
    what, *when = os.environ["SPY_NAN"].split()
    backward, cross_entropy, trained = script.Accelerator.backward, script.F.cross_entropy, [0]

    def bad(loss):
        return loss * (float("nan") if when == [str(RANK), str(trained[0])] else 1)

    def counting(self, loss):
        backward(self, bad(loss) if what == "gradient" else loss)
        trained[0] += 1

    script.Accelerator.backward = counting
    if what == "loss":
        script.F.cross_entropy = lambda *args, **options: bad(cross_entropy(*args, **options))


def spy_on_saves():
    saves, original = [0], Path.write_text
    order = os.environ["SPY_SAVE"]

    def write_text(self, *args, **options):
        saves[0] += self.name == "checkpoint.json"
        if self.name == "checkpoint.json" and order.split()[1] == str(saves[0]):
            hit(order)
        return original(self, *args, **options)

    Path.write_text = write_text


def spy_on_the_disk():
    original, others = Path.rglob, re.compile(rf"(^__|rank_|states_){1 - RANK}(_|\.)")

    def without_others(self, pattern):
        return (path for path in original(self, pattern) if not others.search(path.name))

    Path.rglob = without_others


def spy_on_weights():
    original = script.RowLSTM.__init__

    def init(self, *args):
        original(self, *args)  # where nothing is flattened; on its way to a GPU it is, and then
        torch.nn.RNNBase.flatten_parameters = flatten_like_cudnn

    script.RowLSTM.__init__ = init


def bytes_held(model, optimizer):
    """What this rank holds of parameters, gradients and optimizer states, in bytes, by storage: a
    view counts once.
    """
    groups = {name: {} for name in ("parameters", "gradients", "states", "master_copy")}

    def note(group, tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if tensor.numel() > 1 and tensor.device.type != "meta":  # not the counters of steps
            groups[group][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    inner = optimizer.optimizer
    for parameter in model.parameters():
        note("parameters", parameter)
        if hasattr(parameter, "ds_tensor"):
            note("parameters", parameter.ds_tensor)
        if parameter.grad is not None:
            note("gradients", parameter.grad)
    if hasattr(inner, "averaged_gradients"):  # DeepSpeed's own optimizer, around the script's
        for part in inner.averaged_gradients.values():
            for gradient in part or ():  # nothing where they are offloaded
                note("gradients", gradient)
        # Of ZeRO-2, and of ZeRO-3.
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            for part in getattr(inner, name, []):
                note("master_copy", part)
                if part.grad is not None:
                    note("gradients", part.grad)
        inner = inner.optimizer
    for state in inner.state.values():
        for value in state.values():
            note("states", value)
    return {name: sum(group.values()) for name, group in groups.items()}


def spy_on_bytes():
    original, calls = script.Accelerator.prepare, [0]

    def prepare(self, *parts):
        if len(parts) == 1:
            return original(self, *parts)  # the loader for evaluation
        sizes = [parameter.numel() for parameter in parts[0].parameters()]
        prepared = model, optimizer, *_ = original(self, *parts)
        # Where gradients are reduced and not yet gone: before DeepSpeed's step, or zero_grad.
        zero = self.distributed_type == script.utils.DistributedType.DEEPSPEED
        owner, name = (model, "step") if zero else (optimizer, "zero_grad")
        function = getattr(owner, name)

        def counted(*args, **options):
            calls[0] += self.sync_gradients
            if calls[0] == 3 and self.sync_gradients:
                file = Path(os.environ["SPY_DIR"]) / f"bytes_{RANK}.json"
                file.write_text(json.dumps(bytes_held(model, optimizer) | {"sizes": sizes}))
            return function(*args, **options)

        setattr(owner, name, counted)
        return prepared

    script.Accelerator.prepare = prepare


def spy_on_limit():
    original, libc = script.load_model, ctypes.CDLL(None)

    def load_model(*args):
        if torch.cuda.is_available():
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(int(os.environ["SPY_LIMIT"]) * 10**6 / whole)
            return original(*args)
        libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back to the system
        held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]
        limit = int(held) * 1024 + int(os.environ["SPY_LIMIT"]) * 10**6
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return original(*args)

    script.load_model = load_model


def spy_on_the_wire():
    original, sent = script.Run.end_step, []

    def end_step(self):
        if self.step + 1 in (2, 12):
            lines = Path("/proc/net/dev").read_text().splitlines()
            [line] = [line for line in lines if "eth0:" in line]
            sent.append(int(line.split()[9]))
            (Path(os.environ["SPY_WIRE"]) / f"wire_{RANK}.json").write_text(json.dumps(sent))
        return original(self)

    script.Run.end_step = end_step


class Calls(TorchDispatchMode):
    """Notes all that goes to a process group, whoever calls: Python, DDP's reducer, or FSDP."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            name = function.name().removeprefix("c10d::")
            # Of what is gathered or scattered, the whole; of several tensors, their sum.
            size = max(sizes, default=0) if "_base" in name else sum(sizes)
            self.calls.append([name, size])
        return function(*args, **(kwargs or {}))


def spy_on_calls():
    original, spy = script.Run.end_step, Calls()

    def end_step(self):
        if self.step + 1 == 2:
            spy.__enter__()
        if self.step + 1 == 12:
            spy.__exit__(None, None, None)
            (Path(os.environ["SPY_CALLS"]) / f"calls_{RANK}.json").write_text(json.dumps(spy.calls))
        return original(self)

    script.Run.end_step = end_step


def spy_on_steps():
    original, file = script.Run.end_step, open(os.environ["SPY_STEPS"], "a", buffering=1)
    started = time.time()  # tells this process from the one of an earlier job

    def end_step(self):
        meeting = original(self)
        file.write(f"{time.time():.2f} {self.step} {started}\n")
        time.sleep(float(os.environ.get("SPY_PAUSE", 0)))
        return meeting

    script.Run.end_step = end_step


def spy_on_syncs():
    original = script.Run.end_step

    def end_step(self):
        meeting = original(self)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default" if meeting else "error")
        return meeting

    script.Run.end_step = end_step


def spy_on_plain_accelerate():
    script.PartialState = lambda *args, **options: accelerate.PartialState()


SPIES = {"SPY_FLATTEN": spy_on_weights, "SPY_DIR": spy_on_batches, "SPY_BYTES": spy_on_bytes,
         "SPY_LATE": spy_on_the_disk, "SPY_EVAL": spy_on_evaluation, "SPY_TOKENS": spy_on_tokens,
         "SPY_MEMORY": spy_on_memory, "SPY_SHAPES": spy_on_shapes, "SPY_NAN": spy_on_numbers,
         "SPY_SAVE": spy_on_saves, "SPY_STEPS": spy_on_steps,
         "SPY_LIMIT": spy_on_limit, "SPY_WIRE": spy_on_the_wire,
         "SPY_CALLS": spy_on_calls, "SPY_SYNC": spy_on_syncs,
         "SPY_PLAIN": spy_on_plain_accelerate}  # fmt: skip

if __name__ == "__main__":
    for name, spy in SPIES.items():
        if name in os.environ and (RANK == 0 or name != "SPY_STEPS"):
            spy()
    text = Path(script.__file__).read_text()  # it ends as the script does
    block = text[text.index('if __name__ == "__main__":') :].split("\n", 1)[1]
    exec(compile(textwrap.dedent(block), script.__file__, "exec"), vars(script))
