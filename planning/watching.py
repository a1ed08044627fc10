"""Watch one rank of an unchanged Accelerate script: what it reads, computes and updates in a step,
as a few numbers of each tensor, which verify.py compares with those of other runs.

What a step holds, in the order of causes:

samples  a checksum of each sample that was read for it, or its index if it is drawn at random
rate     the learning rates of the optimizer's groups
weights  of each parameter two numbers before the update: its norm, and its sum with random signs
inputs   the sum of all numbers that the model was given, and how many they were: such sums add up
outputs  over ranks and micro-batches. outputs: the same of what the model returned
losses   what `Accelerator.backward` got, one of each micro-batch
grads    as weights, before gradients are clipped
norm     what clip_grad_norm_ returned
draws    whether random numbers were drawn while a sample was read, or between that and the update
"""

import collections
import ctypes
import faulthandler
import functools
import inspect
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

from planning.patches import StepWatch, patch

# By how much rounding changes a weight, by precision: the control's first weights differ so much.
MOVED = {"no": 1e-7, "bf16": 2**-9, "fp16": 2**-12}
EXIT = os._exit
ROOT = Path(__file__).resolve().parent.parent


class Watch(StepWatch):
    """What this rank does in its first `steps` steps. Then the process ends. Or it is killed after
    `kill_after` steps (0: after the second that follows a checkpoint). `moved` makes it the
    control. `as_is` leaves dropout and the order of samples alone.

    A batch that a loader hands out is in `batch`. It belongs to a step if a gradient is computed
    before the next batch comes, and else to an evaluation.
    """

    def __init__(self, folder, steps, split=False, moved=False, as_is=False, kill_after=None):
        super().__init__()
        self.folder, self.steps, self.split = folder, steps, split
        self.moved, self.as_is, self.kill_after = moved, as_is, kill_after
        self.rank = int(os.environ.get("RANK", 0))
        self.found = {"steps": [], "evaluations": [], "norms": [], "first": {}, "last": {}}
        names = ("processes", "precision", "saved_at", "loaded", "killed", "error", "traceback")
        self.found |= dict.fromkeys(names)
        self.models, self.iterating, self.gathering = [], 0, 0
        self.fetched = None  # what the loader that reads now has fetched: the samples of batches
        self.dice = None  # of the random generators, when a batch was handed out
        self.begin_batch()
        self.clear()

    def clear(self):
        """Begin to note another step."""
        self.now = {"samples": [], "losses": [], "norm": None, "draws": False}
        self.now |= {"inputs": [0.0, 0], "outputs": [0.0, 0]}
        self.live()

    def begin_batch(self):
        """Forget the batch, which is noted. `of` is what a model made of it last."""
        self.batch = {"samples": [], "of": None, "inputs": [0.0, 0], "outputs": [0.0, 0]}

    def live(self):
        """A sign of life for the process that waits for this one."""
        Path(self.folder, f"{self.rank}.alive").touch()

    # ---- models and updates

    def preparing(self, accelerator, model):
        """Watch what goes into the model and comes out, and make it fit to be compared."""
        self.accelerator = accelerator
        precision = accelerator.mixed_precision
        self.found |= {"processes": accelerator.num_processes, "precision": precision}
        if model in self.models:
            return
        self.models.append(model)
        # Those of each rank, before DDP and ZeRO give all ranks those of rank 0.
        self.found["first"] = self.numbers(lambda each: None if hasattr(each, "ds_id") else each)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.RNNBase) and not self.as_is:
                module.dropout = 0.0
            if "BatchNorm" in type(module).__name__:
                self.found["norms"].append(name)
        dice = torch.Generator().manual_seed(1)
        for weight in model.parameters() if self.moved else ():
            by = MOVED.get(precision, MOVED["bf16"]) * torch.randn(weight.shape, generator=dice)
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
        """The one that comes after the steps so far: samples read, and what is made of them."""
        known = self.found["evaluations"]
        if not known or known[-1]["after"] != self.done:
            known.append({"after": self.done, "read": [], "gathered": 0, "collectives": 0})
        return known[-1]

    def zero(self):
        """Whether DeepSpeed trains."""
        return self.accelerator.distributed_type == utils.DistributedType.DEEPSPEED

    def numbers(self, value_of, model=None, optimizer=None):
        """{name: two numbers of a parameter's value, or None}, of what the optimizer updates
        (DeepSpeed's: of its model; without both: of all). A collective under FSDP and ZeRO.
        """
        groups = optimizer.param_groups if optimizer else []
        own = (
            model.parameters() if model and self.zero() else sum((g["params"] for g in groups), [])
        )
        own, found = set(map(id, own)), {}
        for number, each in enumerate(self.models):
            for name, weight in each.named_parameters():
                if not own or id(weight) in own:
                    name = name.replace("_checkpoint_wrapped_module.", "")
                    name = name.removeprefix("module.")  # of DataParallel
                    name = f"model {number + 1}: {name}" if len(self.models) > 1 else name
                    value = value_of(weight)
                    found[name] = None if value is None else two_numbers(name, value)
        return found

    def weight_of(self, weight):
        """The whole parameter. ZeRO-3 does not tell a frozen one."""
        if self.zero() and weight.requires_grad:
            return safe_get_full_fp32_param(weight)
        return None if hasattr(weight, "ds_id") else weight

    def gradient_of(self, weight):
        """The whole gradient, or None."""
        return safe_get_full_grad(weight) if self.zero() and weight.requires_grad else weight.grad

    def _note_tensors(self, *owners):
        if "grads" not in self.now:
            self.now["draws"] |= self.dice not in (None, random_state())
            self.now["grads"] = self.numbers(self.gradient_of, *owners)
            self.now["weights"] = self.numbers(self.weight_of, *owners)

    def before_update(self, model, optimizer):
        """Note gradients and weights, if they were not noted before clipping."""
        self._note_tensors(model, optimizer)
        self.now["rate"] = [group["lr"] for group in optimizer.param_groups]

    def end(self):
        """A step is over: end after the last one."""
        self._note_batch()  # if the script called no Accelerator.backward
        self.found["steps"].append(self.now)
        # After each step: the script does not say which is its last, and may disconnect then.
        self.found["last"] = self.numbers(self.weight_of)
        self.clear()
        saved = self.found["saved_at"]
        if self.kill_after is not None and saved is not None:
            if self.done >= (self.kill_after or saved + 2):
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
        if last and not self.zero():
            self._note_tensors()
        norm = clip(*args, **options)
        if last and isinstance(norm, torch.Tensor):
            self.now["norm"] = full(norm).item()
        return norm

    def _fetch(self, take, fetcher, indices):
        numbers = list(indices) if isinstance(indices, (list, tuple)) else [indices]
        mapped = isinstance(fetcher, fetch._MapDatasetFetcher)
        before, collate, items = random_state(), fetcher.collate_fn, []

        def seen(data):
            items.append(data)
            return collate(data)

        fetcher.collate_fn = seen
        try:
            batch = take(fetcher, indices)
        finally:
            fetcher.collate_fn = collate
        if before != random_state():
            self.now["draws"] = True
        if isinstance(items[0], list) and (before == random_state() or not mapped):
            # Two parts of a data set may give other samples the same index.
            numbers = [checksum(item) for item in items[0]]
        if self.fetched is not None:
            self.fetched.append(numbers)
        return batch

    def _batches(self, iterate, loader):
        if self.iterating:  # one loader reads from another
            yield from iterate(loader)
            return
        source, numbers = iterate(loader), collections.deque()
        while True:
            self.iterating, self.fetched = self.iterating + 1, numbers
            try:
                batch = next(source, None)
            finally:
                self.iterating, self.fetched = self.iterating - 1, None
            if self.batch["of"] == "evaluation":
                self.evaluation()["read"] += self.batch["samples"]
                self.begin_batch()
            if batch is None:
                return
            # With a dispatcher, rank 0 reads for all.
            known = numbers and not isinstance(loader, DataLoaderDispatcher)
            self.batch["samples"] += numbers.popleft() if known else checksums(batch)
            self.dice = random_state()
            self.live()
            yield batch


def without_workers(make, *args, **options):
    """A loader whose samples this process reads itself."""
    words = inspect.signature(make).bind(*args, **options)
    words.arguments |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    words.arguments |= {"timeout": 0, "multiprocessing_context": None}
    make(*words.args, **words.kwargs)


def with_seeded_order(split, make, accelerator, *args, **options):
    """An Accelerator whose samplers have a seed: else several processes have another order."""
    config = options.get("dataloader_config") or utils.DataLoaderConfiguration()
    if not config.use_seedable_sampler:
        config.use_seedable_sampler, config.data_seed = True, 0
    config.split_batches = config.split_batches or split
    make(accelerator, *args, **options | {"dataloader_config": config})


def switch_off_dropout():
    """Each rank would draw others. What an RNN does is its own argument, see `preparing`."""
    for name in ("", "1d", "2d", "3d"):
        setattr(functional, f"dropout{name}", lambda input, *args, **options: input)
    functional.alpha_dropout = functional.feature_alpha_dropout = functional.dropout
    torch.dropout = functional.dropout

    def attend(own, query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
        return own(query, key, value, attn_mask, 0.0, *args, **options)

    patch(functional, "scaled_dot_product_attention", attend)


def full(tensor):
    """The whole tensor of a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@functools.cache
def signs_of(name, size):
    """Random signs, the same ones for each tensor of a name."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 2, [size], generator=dice).double() * 2 - 1


def two_numbers(name, tensor):
    """Norm and sum with random signs: that tells tensors apart which have the same norm."""
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
    """One of each sample of a batch: of its row in all tensors with as many rows as the first."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
    rows = len(tensors[0]) if tensors else 0
    return [checksum([x[row] for x in tensors if len(x) == rows]) for row in range(rows)]


def connect_over_gloo():
    """Connect ranks without a GPU, which a script that was written for GPUs does not do."""
    fsdp = utils.parse_flag_from_env("ACCELERATE_USE_FSDP")
    zero = utils.parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if zero:
        import deepspeed.ops

        # DeepSpeed 0.19.8 would compile it for 20 seconds.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not (fsdp or zero):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    state = PartialState(cpu=not (fsdp or zero), backend="gloo" if fsdp or zero else None)
    if fsdp:  # accelerate 1.15 shards on CPUs only under this type
        state.distributed_type = utils.DistributedType.MULTI_GPU
    # transformers' Trainer would forget who is connected, and find no GPU.
    AcceleratorState._reset_state = staticmethod(
        lambda reset_partial_state=False: AcceleratorState._shared_state.clear()
    )


def watch_script(folder, gpus, options, script):
    """Be the rank that runs the script, and never return."""
    place = Path(folder, f"{os.environ.get('RANK', 0)}.at")
    faulthandler.register(signal.SIGUSR2, place.open("w"))  # the tool asks where a rank hangs
    for reseed in (torch.seed, numpy.random.seed, random.seed):  # a fork has its parent's
        reseed()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: end with the tool
    for name in list(sys.modules):  # the script may have modules of these names
        if name.partition(".")[0] in ("common", "planning"):
            del sys.modules[name]
    sys.path[1:] = [path for path in sys.path[1:] if Path(path).resolve() != ROOT]
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
