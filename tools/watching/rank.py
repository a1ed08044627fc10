"""Watch one rank of an unchanged Accelerate script: what it reads, computes and updates in a step,
as a few numbers of each tensor, which verify.py compares with those of other runs.

What is noted of a step:

samples  a checksum of each sample that was read, or its index if reading draws random numbers
rate     the learning rates of the optimizer's groups
weights  two numbers of each parameter before the update: its norm, and its sum with random signs
inputs   the sum of all numbers that went into the model, and their count; these add up over ranks
outputs  the same of what came out of the model
losses   what `Accelerator.backward` got, one for each micro-batch
grads    as weights, before gradients are clipped
norm     what clip_grad_norm_ returned
draws    True if random numbers were drawn while samples were read, or from then to the update
"""

import collections
import ctypes
import faulthandler
import functools
import inspect
import itertools
import json
import os
import random
import runpy
import signal
import sys
import traceback
import zlib
from pathlib import Path

import numpy
import torch
from accelerate import Accelerator, PartialState, utils
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

from watching.launching import leave_room_for
from watching.steps import StepWatch, patch

# How much rounding changes a weight, by precision. The control's first weights differ by this.
MOVED = {"no": 1e-7, "bf16": 2**-9, "fp16": 2**-12, "fp8": 2**-9}
EXIT = os._exit


class Watch(StepWatch):
    """Notes what this rank does in its first `steps` steps, and then ends the process. With
    `kill_after`, it is killed instead, after that many steps and a checkpoint (0: two steps after
    the first one). `moved` makes it the control. `as_is` keeps dropout and the order of
    samples.

    `batch` is what a loader handed out last. It belongs to a step if a gradient is computed before
    the next batch comes, and otherwise to an evaluation.
    """

    def __init__(self, folder, steps, split=False, moved=False, as_is=False, kill_after=None):
        super().__init__()
        self.folder, self.steps, self.split = folder, steps, split
        self.moved, self.as_is, self.kill_after = moved, as_is, kill_after
        self.rank = int(os.environ.get("RANK", 0))
        self.found = {"steps": [], "evaluations": {}, "norms": []}
        names = ("precision", "saved_at", "loaded", "killed", "error", "traceback")
        self.found |= dict.fromkeys(names)
        self.alive = Path(folder, f"{self.rank}.alive")  # touched when there is progress
        self.models, self.gathering = [], 0
        self.fetched = None  # the samples of batches that the reading loader has fetched
        self.dice = None  # the state of the random generators when a batch was handed out
        self.begin_batch()
        self.begin_notes()

    def begin_notes(self):
        """Begin to note another step."""
        self.now = {"samples": [], "losses": [], "norm": None, "draws": False}
        self.now |= {"inputs": [0.0, 0], "outputs": [0.0, 0]}
        self.alive.touch()

    def begin_batch(self):
        """Forget the batch, which is noted. "of" is what it belongs to."""
        self.batch = {"samples": [], "of": None, "inputs": [0.0, 0], "outputs": [0.0, 0]}

    # ---- models and updates

    def preparing(self, accelerator, model):
        """Watch the model's inputs and outputs, and make it comparable."""
        self.accelerator = accelerator
        self.zero = accelerator.distributed_type == utils.DistributedType.DEEPSPEED
        self.found["precision"] = precision = accelerator.mixed_precision
        if model in self.models:
            return
        self.models.append(model)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.RNNBase) and not self.as_is:
                module.dropout = 0.0
            if "BatchNorm" in type(module).__name__:
                self.found["norms"].append(name)
        dice = torch.Generator().manual_seed(1)
        for weight in model.parameters() if self.moved else ():
            by = MOVED[precision] * torch.randn(weight.shape, generator=dice)
            weight.data.mul_(1 + by.to(weight))
        model.register_forward_pre_hook(self._entering, with_kwargs=True)
        model.register_forward_hook(self._leaving)

    def _entering(self, model, args, kwargs):
        training = torch.is_grad_enabled()
        if training or not self.batch["of"]:
            self.batch["of"] = "step" if training and model.training else "evaluation"
        if training:
            self._add("inputs", [args, kwargs])

    def _leaving(self, model, args, output):
        if torch.is_grad_enabled():
            self._add("outputs", output)

    def _add(self, kind, values):
        for tensor in tree_leaves(values):
            # A scalar, such as a loss, is a mean, which does not add up.
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                self.batch[kind][0] += full(tensor.detach()).double().abs().sum().item()
                self.batch[kind][1] += tensor.numel()

    def _note_batch(self):
        self.now["samples"] += self.batch["samples"]
        for kind in ("inputs", "outputs"):
            self.now[kind] = [a + b for a, b in zip(self.now[kind], self.batch[kind], strict=True)]
        self.begin_batch()

    def evaluation(self):
        """The evaluation after the steps so far: the samples read, and how they were gathered."""
        new = {"read": [], "gathered": 0, "collectives": 0}
        return self.found["evaluations"].setdefault(self.done, new)

    def _note_tensors(self, model=None, optimizer=None):
        """Note weights and gradients, once for each step: those that the optimizer updates
        (DeepSpeed's: of its model; without an optimizer: all). A collective under FSDP and ZeRO.
        """
        if "grads" in self.now:
            return
        self.now["draws"] |= self.dice not in (None, random_state())
        self.now |= {"weights": {}, "grads": {}}
        own = None
        if optimizer:
            groups = [group["params"] for group in optimizer.param_groups]
            own = set(map(id, model.parameters() if self.zero else itertools.chain(*groups)))
        for number, each in enumerate(self.models, 1):
            for name, weight in each.named_parameters():
                if own and id(weight) not in own:
                    continue
                name = name.replace("_checkpoint_wrapped_module.", "")
                name = name.removeprefix("module.")  # of DataParallel
                name = f"model {number}: {name}" if len(self.models) > 1 else name
                if self.zero and weight.requires_grad:
                    values = safe_get_full_fp32_param(weight), safe_get_full_grad(weight)
                else:  # ZeRO-3 does not tell a frozen weight.
                    values = None if hasattr(weight, "ds_id") else weight, weight.grad
                for kind, value in zip(("weights", "grads"), values, strict=True):
                    self.now[kind][name] = None if value is None else two_numbers(name, value)

    def before_update(self, model, optimizer):
        """Note gradients and weights, unless they were noted before clipping."""
        self._note_tensors(model, optimizer)
        self.now["rate"] = [group["lr"] for group in optimizer.param_groups]

    def end(self):
        """A step is over: end after the last one."""
        self._note_batch()  # if the script called no Accelerator.backward
        self.found["steps"].append(self.now)
        self.begin_notes()
        saved = self.found["saved_at"]
        kill = self.kill_after is not None and saved is not None
        if kill and self.done >= (self.kill_after or saved + 2):
            self.found["killed"] = True
            self.save()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.done >= self.steps:
            self.leave()

    def save(self):
        """Write down what was found."""
        Path(self.folder, f"{self.rank}.json").write_text(json.dumps(self.found))

    def leave(self, code=0):
        """End the process, as `os._exit` does."""
        self.save()
        sys.stdout.flush()
        sys.stderr.flush()
        EXIT(code)

    # ---- what is patched

    def watch(self):
        """Patch the Accelerator, the loaders, and dropout."""
        super().watch()
        for name in ("save_state", "load_state", "backward"):
            patch(Accelerator, name, getattr(self, f"_{name}"))
        for name in ("gather_for_metrics", "gather", "reduce"):
            patch(Accelerator, name, self._collect)
        for owner in (Accelerator, torch.nn.utils):
            patch(owner, "clip_grad_norm_", self._clip_grad_norm_)
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            patch(kind, "fetch", self._fetch)
        patch(DataLoader, "__init__", without_workers)
        for kind in (DataLoaderShard, DataLoaderDispatcher, DataLoader):
            patch(kind, "__iter__", self._batches)
        if not self.as_is:
            switch_off_dropout()
            patch(Accelerator, "__init__", functools.partial(with_seeded_order, self.split))

    def _save_state(self, save, *args, **options):
        result = save(*args, **options)
        self.found["saved_at"] = self.done
        return result

    def _load_state(self, load, *args, **options):
        result = load(*args, **options)
        self.found["loaded"] = self.done == 0  # not the best weights, after training
        return result

    def _backward(self, backward, accelerator, loss, **options):
        self._note_batch()
        self.now["losses"].append(loss.detach().double().mean().item())
        return backward(accelerator, loss, **options)

    def _collect(self, collect, accelerator, data, *args, **options):
        self.gathering += 1  # gather_for_metrics calls gather
        found = collect(accelerator, data, *args, **options)
        self.gathering -= 1
        if any(not model.training for model in self.models) and not self.gathering:
            evaluation = self.evaluation()
            evaluation["collectives"] += 1
            rows = [
                len(all_rows)
                for own, all_rows in zip(tree_leaves(data), tree_leaves(found), strict=False)
                if isinstance(own, torch.Tensor) and own.ndim
            ]
            if rows and collect.__name__ != "reduce":
                evaluation["gathered"] += rows[0]
        return found

    def _clip_grad_norm_(self, clip, *args, **options):
        last = self.models and self.accelerator.sync_gradients
        if last and not self.zero:
            self._note_tensors()
        norm = clip(*args, **options)
        if last and isinstance(norm, torch.Tensor):
            self.now["norm"] = full(norm).item()
        return norm

    def _fetch(self, take, fetcher, indices):
        samples = list(indices) if isinstance(indices, (list, tuple)) else [indices]
        before, collate, items = random_state(), fetcher.collate_fn, []

        def seen(data):
            items.append(data)
            return collate(data)

        fetcher.collate_fn = seen
        batch = take(fetcher, indices)
        fetcher.collate_fn = collate
        drawn = before != random_state()
        self.now["draws"] |= drawn
        mapped = isinstance(fetcher, fetch._MapDatasetFetcher)
        if isinstance(items[0], list) and not (drawn and mapped):
            # Two parts of a data set may give different samples the same index.
            samples = [checksum(item) for item in items[0]]
        if self.fetched is not None:
            self.fetched.append(samples)
        return batch

    def _batches(self, iterate, loader):
        if self.fetched is not None:  # one loader reads from another
            yield from iterate(loader)
            return
        source, fetched = iterate(loader), collections.deque()
        while True:
            self.fetched = fetched
            batch = next(source, None)
            self.fetched = None
            if self.batch["of"] == "evaluation":
                self.evaluation()["read"] += self.batch["samples"]
                self.begin_batch()
            if batch is None:
                return
            # With a dispatcher, rank 0 reads for all.
            known = fetched and not isinstance(loader, DataLoaderDispatcher)
            self.batch["samples"] += fetched.popleft() if known else checksums(batch)
            self.dice = random_state()
            self.alive.touch()
            yield batch


def without_workers(make, *args, **options):
    """Make a loader that reads its samples in this process."""
    words = inspect.signature(make).bind(*args, **options)
    words.arguments |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    words.arguments |= {"timeout": 0, "multiprocessing_context": None}
    make(*words.args, **words.kwargs)


def with_seeded_order(split, make, accelerator, *args, **options):
    """Make an Accelerator with seeded samplers. Otherwise the number of ranks changes the order."""
    config = options.get("dataloader_config") or utils.DataLoaderConfiguration()
    if not config.use_seedable_sampler:
        config.use_seedable_sampler, config.data_seed = True, 0
    config.split_batches = config.split_batches or split
    make(accelerator, *args, **options | {"dataloader_config": config})


def switch_off_dropout():
    """Each rank would draw its own masks. `preparing` switches off an RNN's dropout."""
    for name in ("", "1d", "2d", "3d"):
        setattr(functional, f"dropout{name}", lambda input, *args, **options: input)
    functional.alpha_dropout = functional.feature_alpha_dropout = functional.dropout
    torch.dropout = functional.dropout

    def attend(own, query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
        return own(query, key, value, attn_mask, 0.0, *args, **options)

    patch(functional, "scaled_dot_product_attention", attend)


def full(tensor):
    """The whole tensor that a shard is a part of."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@functools.cache
def signs_of(name, size):
    """Random signs, the same ones for each tensor with this name."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 2, [size], generator=dice).double() * 2 - 1


def two_numbers(name, tensor):
    """Norm, and sum with random signs, which differs between tensors of the same norm."""
    flat = full(tensor.detach()).double().flatten().cpu()
    return [flat.norm().item(), (flat @ signs_of(name, len(flat))).item()]


def random_state():
    """A checksum of the states of the random generators of Python, numpy and torch on the CPU."""
    python, arrays = random.getstate(), numpy.random.get_state()[1:3]
    return zlib.crc32(torch.get_rng_state().numpy().tobytes() + repr((python, arrays)).encode())


def checksum(item):
    """A number for the values of a sample."""
    found = 0
    for value in tree_leaves(item):
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().float().numpy()
        raw = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
        found = zlib.crc32(raw, found)
    return found


def checksums(batch):
    """A checksum of each sample of a batch, a row in all tensors with as many rows as the first."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
    rows = len(tensors[0]) if tensors else 0
    return [checksum([x[row] for x in tensors if len(x) == rows]) for row in range(rows)]


def connect_over_gloo():
    """Connect ranks without a GPU. Scripts that were written for GPUs do not do it."""
    fsdp = utils.parse_flag_from_env("ACCELERATE_USE_FSDP")
    zero = utils.parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if zero:
        import deepspeed.ops

        # DeepSpeed 0.19.8 would spend 20 seconds compiling it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not (fsdp or zero):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    state = PartialState(cpu=not (fsdp or zero), backend="gloo" if fsdp or zero else None)
    if fsdp:  # accelerate 1.15 shards on CPUs only under this type
        state.distributed_type = utils.DistributedType.MULTI_GPU
    # transformers' Trainer would reset these, and find no GPU.
    AcceleratorState._reset_state = staticmethod(
        lambda reset_partial_state=False: AcceleratorState._shared_state.clear()
    )


def watch_script(folder, gpus, options, script):
    """Be the rank that runs the script, and never return."""
    place = Path(folder, f"{os.environ.get('RANK', 0)}.at")
    faulthandler.register(signal.SIGUSR2, place.open("w"))  # for a rank that hangs
    for reseed in (torch.seed, numpy.random.seed, random.seed):  # a fork has its parent's seeds
        reseed()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: end with the tool
    leave_room_for(script)
    watch = Watch(folder, **options)
    os._exit = watch.leave
    try:
        if not gpus:
            connect_over_gloo()
        watch.watch()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            watch.found["error"] = str(end.code)
    except BaseException as problem:
        trace = problem.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != script:  # from the script on
            trace = trace.tb_next
        lines = [at.lineno for at in traceback.extract_tb(trace) if at.filename == script]
        where = f" ({Path(script).name}:{lines[-1]})" if lines else ""
        text = (str(problem).strip().splitlines() or [""])[0]
        watch.found["error"] = f"{type(problem).__name__}: {text}"[:200] + where
        trace = trace or problem.__traceback__
        watch.found["traceback"] = "".join(traceback.format_exception(None, problem, trace))
    watch.leave(1 if watch.found["error"] else 0)
