"""Watch one rank of an unchanged training script: what it reads, computes and updates in a step, as
a few numbers of each tensor, which verify.py compares with those of other runs.

What is noted of a step:

samples    a checksum of each sample that was read, or its index if draws changed it
indices    the indices of these samples in their data set, if it has them
epoch      how often the loader of these samples was begun
rate       the learning rates of the optimizer's groups
weights    two numbers of each parameter before the update: its norm, and its sum with random signs
inputs     the sum of the squares of what went into models, and the count; both add up over ranks
outputs    the same of what came out of models
loss       what `backward` got, summed over micro-batches, after division by their number
grads      as weights, before gradients are clipped
buffers    as weights: what a checkpoint holds besides them, after the forward pass
grad_norm  what clip_grad_norm_ returned
drawn      see new_record in draws.py
cut        True if Accelerator.gather got a tensor with gradients, which it cuts
own        True if the script has no loader, and draws random numbers for its batches
start      as weights: those that all ranks should share, before --same_start replaces them
"""

import argparse
import collections
import ctypes
import faulthandler
import fcntl
import inspect
import itertools
import json
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
import weakref
import zlib
from pathlib import Path

import numpy
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

from watching import accelerated, exact, torchrun
from watching.differences import CannotTellError
from watching.draws import Draws, add_record, new_record, set_seed, watch_generators
from watching.launching import TOOLS, import_libraries, leave_room_for, link, list_folder
from watching.steps import StepWatch, in_training, name_of, patch, patch_fetch

EXIT = os._exit
END = object()  # of a loader
SIGNS = torch.from_numpy(numpy.random.default_rng(0).integers(0, 2, 1 << 20) * 2.0 - 1)


class Watch(StepWatch):
    """Notes what this rank does in its first `steps` steps, and then ends the process. With
    `kill_after`, it is killed instead, after that many steps and a checkpoint (0: two steps after
    the first one). `exact` computes in float64, `split` divides the batches of loaders by the
    ranks, and `as_is` keeps dropout, mixed precision, random numbers and the order of samples. With
    `start`, a folder, models start with the weights of the first run that was given it. `launched`
    tells that torchrun starts the script, so torch.save makes its checkpoints. The tool `began` at
    this time, in the working directory `home`. `place` has links to its files.

    A batch is what a loader handed out last. It belongs to a step if a gradient is computed before
    the next one comes; otherwise to an evaluation, if a model saw it; otherwise to nothing: the
    script has skipped it.
    """

    def __init__(
        self,
        folder,
        steps,
        exact,
        split,
        seed,
        launched,
        began,
        home,
        place,
        start=None,
        as_is=False,
        kill_after=None,
    ):
        super().__init__()
        self.folder, self.steps, self.exact, self.split = folder, steps, exact, split
        self.seeded = seed is not None  # by the tool, on all ranks alike
        self.launched, self.start = launched, start
        self.began = began, time.time()  # the tool and this rank
        self.home, self.place = home + os.sep, place + os.sep  # see make_place in launching.py
        self.results = str(Path(folder).parent) + os.sep  # of all runs
        self.as_is, self.kill_after = as_is, kill_after
        self.rank, self.process = int(os.environ.get("RANK", 0)), os.getpid()
        self.found = {"steps": [], "evaluations": {}, "batchnorms": [], "unprepared": []}
        self.found |= {"flags": {}}  # of the script, with "batch" in their name
        self.found |= {"torchrun": launched}
        self.found |= {"settings": [0, 0]}  # bytes of stdout and stderr before the first step
        names = ("saved_at", "loaded", "killed", "error", "exited", "traceback")
        self.found |= {"frames": []} | dict.fromkeys(names)
        self.alive = Path(folder, f"{self.rank}.alive")  # touched when there is progress
        self.prepared = []  # models that Accelerator.prepare returned
        self.left = set()  # files of other runs that the script has loaded by torch.load
        self.first_saved = None  # the step of the first checkpoint
        self.optimizers = []  # in the order of their first steps
        self.shares = False  # whether an optimizer updates the models' own weights
        self.worker_seeds = []  # functions that seed workers, which here are none
        self.trained = []  # models that were in training mode at first
        self.noted = None  # the step and the backward pass whose tensors were noted
        self.gathering = 0  # nested calls
        self.reading = None  # (samples, what was drawn) of batches that a loader has fetched
        self.epochs = weakref.WeakKeyDictionary()  # {loader: how often it was begun}
        self.draws = Draws(self)
        self.begin_batch()
        self.begin_notes()

    def begin_notes(self):
        """Begin to note another step."""
        self.now = {"samples": [], "indices": [], "epoch": 0, "loss": None, "grad_norm": None}
        self.now |= {"cut": False, "own": False, "start": {}}
        self.now |= {"drawn": new_record(), "inputs": [0.0, 0], "outputs": [0.0, 0]}
        self.alive.touch()

    def begin_batch(self):
        """Forget the batch, which is noted, or skipped."""
        self.batch = {"samples": {}, "epoch": 0}  # {id of a loader: [(sample, its index)]}
        self.batch |= {"inputs": [0.0, 0], "outputs": [0.0, 0]}
        self.seen_in = None  # "step" or "evaluation", if a model saw it

    # ---- models

    def found_model(self, model):
        """Make a model comparable before its first forward pass in training."""
        if in_training(model):
            self.trained.append(model)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.RNNBase) and not self.as_is:
                module.dropout = 0.0
            if "BatchNorm" in type(module).__name__ and module.training:
                self.found["batchnorms"].append(name_of(name))
            if isinstance(module, FSDPModule) and self.start:
                module.reshard()  # if the script has gathered it
        if self.start:
            self._start_alike(model)

    def _start_alike(self, model):
        """Give a model its weights of the first run. A collective under FSDP."""
        if type(model).__name__ == "DeepSpeedEngine":
            raise CannotTellError("--same_start does not reach the weights that DeepSpeed holds")
        file = Path(self.start, f"start-{len(self.models)}.pt")
        weights = {name_of(name): weight for name, weight in model.named_parameters()}
        if not file.exists():
            exact.save({name: whole(weight) for name, weight in weights.items()}, file)
        for name, value in exact.load(file).items():
            weight = weights[name].data
            value = value.to(weight.device, weight.dtype)
            if isinstance(weight, DTensor):
                value = distribute_tensor(value, weight.device_mesh, weight.placements)
            else:
                self.now["start"][name] = two_numbers(weight)
            weight.copy_(value)

    def called(self, module, args, output):
        if self.reading is not None or not any(True for _ in module.parameters()):
            return  # It is no model.
        gradients = torch.is_grad_enabled()
        if gradients and in_training(module) and module in self.models:
            self.seen_in = "step"
        self.seen_in = self.seen_in or "evaluation"
        if gradients:
            if not (self.epochs or self.batch["samples"]):
                # Without a loader, samples are what the first model of a step gets.
                read = [(one, None) for one in checksums(args)]
                self.batch["samples"]["inputs"] = read
            self._add("inputs", args)
            self._add("outputs", output)

    def _add(self, kind, values):
        for tensor in tree_leaves(values):
            # A scalar, such as a loss, is a mean, which does not add up. Inputs with gradients are
            # outputs of another model.
            known = isinstance(tensor, torch.Tensor) and tensor.ndim
            if not known or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                continue
            if kind == "outputs" or not tensor.requires_grad:
                self.batch[kind][0] += whole(tensor).square().sum().item()
                self.batch[kind][1] += tensor.numel()

    def evaluating(self):
        """Whether an evaluation is going on."""
        return self.seen_in == "evaluation" or not all(map(in_training, self.trained))

    def evaluation(self):
        """The evaluation after the steps so far: the samples read, and how they were gathered."""
        new = {"read": [], "gathered": 0, "collectives": 0, "noise": {}}
        return self.found["evaluations"].setdefault(self.done, new)

    # ---- steps

    def begin(self, model):
        if not self.done:
            for number, stream in enumerate((sys.stdout, sys.stderr)):
                stream.flush()
                self.found["settings"][number] = os.fstat(number + 1).st_size
        if not self.epochs:  # The script has no loader, and what it drew before is its batch.
            self.now["own"] = bool(self.draws.take()["others"])
            self.draws.hand_out([], new_record())

    def before_backward(self, loss):
        """Note the loss, and the batch that it is of."""
        self._note_batch()
        for one in [loss] if isinstance(loss, torch.Tensor) else loss:
            self.now["loss"] = (self.now["loss"] or 0.0) + one.detach().double().mean().item()

    def _note_batch(self):
        for read in self.batch["samples"].values():
            self.now["samples"] += [sample for sample, _ in read]
            self.now["indices"] += [index for _, index in read]
        self.now["epoch"] = self.batch["epoch"] or self.now["epoch"]
        add_record(self.now["drawn"], self.draws.take())
        for kind in ("inputs", "outputs"):
            self.now[kind] = [a + b for a, b in zip(self.now[kind], self.batch[kind], strict=True)]
        self.begin_batch()

    def before_update(self, optimizer):
        """Note gradients and weights, unless they were noted before clipping."""
        self._note_tensors(optimizer)
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self.now["optimizer"] = self.optimizers.index(optimizer)
        self.now["rate"] = [float(group.get("lr") or 0) for group in optimizer.param_groups]

    def end(self):
        """A step is over: end after the last one."""
        self._note_batch()
        self.now["own"] |= not self.epochs and bool(self.now["drawn"]["others"])
        self.found["steps"].append(self.now)
        self.begin_notes()
        kill = self.kill_after is not None and self.first_saved is not None
        if kill and self.done >= (self.kill_after or self.first_saved + 2):
            self.found["killed"] = True
            self.save()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.done >= self.steps:
            self.leave()

    def _note_tensors(self, optimizer=None):
        """Note weights, gradients and buffers, once after each backward pass: those that the
        optimizer updates (without one, and for DeepSpeed's: all). A collective under FSDP and ZeRO.
        """
        if self.noted == (self.done, self.backwards):
            return
        self.noted = self.done, self.backwards
        self.now |= {"weights": {}, "grads": {}, "buffers": {}}
        names, buffers = self._names()
        for name, buffer in buffers:
            self.now["buffers"][name] = two_numbers(buffer)
        groups = optimizer.param_groups if optimizer and not self.engine else []
        updated = {id(weight): weight for group in groups for weight in group["params"]}
        self.shares |= bool(updated.keys() & names.keys())
        if updated and (self.shares or not names):
            outside = [key for key in updated if key not in names]
            for number, key in enumerate(outside, 1):
                names[key] = f"weight {number} outside the models", updated[key]
            names = {key: names[key] for key in names if key in updated}
        elif updated:  # The optimizer has copies of its own.
            names = {key: (name, weight.detach()) for key, (name, weight) in names.items()}
        prepared = {id(weight) for model in self.prepared for weight in model.parameters()}
        for key, (name, weight) in names.items():
            if self.prepared and key not in prepared and name not in self.found["unprepared"]:
                self.found["unprepared"].append(name)
            for kind, value in zip(("weights", "grads"), self._values_of(weight), strict=True):
                self.now[kind][name] = None if value is None else two_numbers(value)

    def _names(self):
        """{id of a weight: (its name, the weight)} of all models, and (name, buffer) of those that
        checkpoints hold. Names do not depend on what wraps a model, or calls a part of it.
        """
        names, buffers, owners = {}, [], 0
        for model in dict.fromkeys([*self.prepared, *self.models]):
            own = {id(one): (name_of(name), one) for name, one in model.named_parameters()}
            own = {key: own[key] for key in own if key not in names}
            if own:
                owners += 1
                prefix = f"model {owners}: " if owners > 1 else ""
                names |= {key: (prefix + name, one) for key, (name, one) in own.items()}
                buffers += [(prefix + name_of(name), one) for name, one in buffers_of(model)]
        return names, buffers

    def _values_of(self, weight):
        """A weight and its gradient, as whole tensors. ZeRO-3 gives no access to frozen weights."""
        if not self.engine or not weight.requires_grad:
            return None if hasattr(weight, "ds_id") else weight, weight.grad
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        return safe_get_full_fp32_param(weight), safe_get_full_grad(weight)

    # ---- what is patched

    def watch(self):
        """Watch, and make runs comparable."""
        super().watch()
        accelerated.adapt(self)
        patch(torch.nn.utils, "clip_grad_norm_", self.clip)
        patch(FullyShardedDataParallel, "__init__", refuse_fsdp1)
        sys.addaudithook(self._audit)
        patch(os, "walk", walk)
        patch(torch, "save", self._save)
        patch(torch, "load", self._load)
        patch(argparse.ArgumentParser, "parse_known_args", self._parse)
        patch_fetch(self._fetch)
        names = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")
        for name in (*names, "gather", "gather_object"):
            patch(torch.distributed, name, self._collect)
        patch(DataLoader, "__init__", self._make_loader)
        patch(DataLoader, "__iter__", self.iterate)
        if not self.as_is:
            self._switch_off_dropout()
        if self.exact:
            exact.compute_in_float64()
        if not self.as_is:
            watch_generators()
            exact.enter_for_good(self.draws)

    def clip(self, clip, *args, **options):
        """In place of clip_grad_norm_: note the gradients before it, and the norm."""
        if self.models and not self.engine:
            self._note_tensors()
        norm = clip(*args, **options)
        if isinstance(norm, torch.Tensor):
            self.now["grad_norm"] = whole(norm).item()
        return norm

    def _collect(self, collective, *args, **options):
        if self.evaluating() and not self.calls:  # FSDP calls some within a model.
            self.evaluation()["collectives"] += 1
        return collective(*args, **options)

    def _parse(self, parse, parser, *args, **options):
        found = parse(parser, *args, **options)
        for action in parser._actions:
            value = getattr(found[0], action.dest, None)
            for flag in action.option_strings[-1:]:
                if "batch" in flag and type(value) is int:
                    self.found["flags"][flag.lstrip("-")] = value
        return found

    def _fetch(self, take, fetcher, indices):
        indices_of = list(indices) if isinstance(indices, (list, tuple)) else [indices]
        known = isinstance(fetcher, fetch._MapDatasetFetcher)  # Others have no indices.
        collate, items = fetcher.collate_fn, []

        def collated(data):
            items[:] = [data]
            if self.as_is:
                return collate(data)
            with self.draws.collating(indices_of if known else []):
                return collate(data)

        fetcher.collate_fn = collated
        batch, record = self.draws.read(take, fetcher, indices, again=not self.as_is)
        fetcher.collate_fn = collate
        samples = indices_of
        if isinstance(items[0], list) and not record["others"]:
            # Two parts of a data set may give different samples the same index.
            samples = [checksum(item) for item in items[0]]
        if self.reading is not None:
            paired = itertools.zip_longest(samples, indices_of if known else [])
            self.reading.append((list(paired), record))
        return batch

    def iterate(self, iterate, loader, here=True):
        """In place of a loader's __iter__: note what it hands out. It has read the batch in this
        process, unless it is not `here`.
        """
        if self.reading is not None:  # one loader reads from another
            yield from iterate(loader)
            return
        source, fetched = iterate(loader), collections.deque()
        self.epochs[loader] = self.epochs.get(loader, 0) + 1
        while True:
            self.reading, self.draws.owners = fetched, []
            batch = next(source, END)
            self.reading = None
            if self.seen_in == "evaluation":
                evaluation = self.evaluation()
                for read in self.batch["samples"].values():
                    evaluation["read"] += [sample for sample, _ in read]
                evaluation["noise"] = self.draws.take()["noise"] | evaluation["noise"]
                self.begin_batch()
            elif not self.seen_in:
                self.batch["samples"].pop(id(loader), None)  # The script has skipped it.
            if batch is END:
                return
            if fetched and here:
                read, record = fetched.popleft()
            else:
                read, record = [(one, None) for one in checksums(batch)], new_record()
            if getattr(loader, "worker_init_fn", None) in self.worker_seeds:
                record["noise"] = {}  # The seeds of workers are not those of this process.
            self.batch["samples"].setdefault(id(loader), []).extend(read)
            self.batch["epoch"] = self.epochs[loader]
            self.draws.hand_out([sample for sample, _ in read], record)
            self.alive.touch()
            yield batch

    def _make_loader(self, make, loader, *args, **options):
        """Make a loader that reads its samples in this process, and with `split` its part of them,
        if the script makes it: accelerate makes another one of it.
        """
        words = inspect.signature(make).bind(loader, *args, **options)
        batch = words.arguments.get("batch_size", 1)
        ours = not sys._getframe(2).f_globals["__name__"].startswith("accelerate")
        if self.split and ours and batch and words.arguments.get("batch_sampler") is None:
            words.arguments["batch_size"] = max(1, batch // int(os.environ.get("WORLD_SIZE", 1)))
        if words.arguments.get("num_workers") and words.arguments.get("worker_init_fn"):
            self.worker_seeds.append(words.arguments["worker_init_fn"])
        words.arguments |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        words.arguments |= {"timeout": 0, "multiprocessing_context": None, "pin_memory": False}
        make(*words.args, **words.kwargs)

    def _switch_off_dropout(self):
        """Each rank would draw its own masks. `found_model` switches off an RNN's dropout."""

        def keep(input, p=0.5, training=True, *_, **__):
            self._note_dropout(p if training else 0)
            return input

        for name in ("", "1d", "2d", "3d"):
            setattr(functional, f"dropout{name}", keep)
        functional.alpha_dropout = functional.feature_alpha_dropout = torch.dropout = keep

        def attend(own, query, key, value, attn_mask=None, dropout_p=0.0, *args, **options):
            self._note_dropout(dropout_p)
            return own(query, key, value, attn_mask, 0.0, *args, **options)

        patch(functional, "scaled_dot_product_attention", attend)

    def _note_dropout(self, rate):
        if rate and not self.in_backward:
            self.draws.note("dropout", {"cpu": self.draws.states["cpu"]})

    # ---- files

    def _audit(self, event, args):
        """Before Python opens, removes or moves a file: keep those of the user as they are."""
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if not writes and event not in ("os.remove", "os.rename"):
            return
        path = Path(path_of(args[0]) or os.sep)
        if writes:
            self._keep_apart(path, not args[2] & os.O_TRUNC)
            return
        self._keep_apart(path.parent)
        if not path.is_symlink():  # They do not follow a link.
            self._refuse_outside(path)
        if event == "os.rename":
            self._refuse_left(path_of(args[1]))

    def _refuse_outside(self, path):
        """Raises CannotTellError if it is a file of the user, which only an absolute path reaches.
        Hidden folders have caches.
        """
        real = os.path.realpath(path)
        hidden = os.sep + "." in real.removeprefix(self.home)
        if not real.startswith(self.home) or hidden or real.startswith(self.results):
            return
        if os.path.isfile(real) and os.path.getmtime(real) < self.began[0]:
            raise CannotTellError(f"it would overwrite {real}: give the script a relative path")

    def _keep_apart(self, path, copy=False):
        """If a file, or a folder that it is in, is a link to one that was there before, put a new
        one in place of the link: a folder of links, and a new file, or a `copy`.
        """
        parts = [*reversed(path.parents), path]
        parts = [part for part in parts if str(part).startswith(self.place)]
        if not any(part.is_symlink() for part in parts):
            self._refuse_outside(path)
            return
        self._refuse_left(str(path))
        with Path(self.folder, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for part in parts:
                new = Path(f"{part}.own")
                if not part.is_symlink():
                    continue  # Another rank may have been faster.
                if part.is_dir():
                    link(list_folder(part.resolve()), new)
                    part.unlink()
                else:
                    shutil.copyfile(part if copy else os.devnull, new)
                os.replace(new, part)

    def _save(self, save, obj, f, *args, **options):
        if path_of(f):
            self._keep_apart(Path(path_of(f)))
        save(obj, f, *args, **options)
        if self.launched and self.done:
            self.note_checkpoint()

    def note_checkpoint(self):
        """The script has saved a checkpoint."""
        self.found["saved_at"] = self.done
        self.first_saved = self.done if self.first_saved is None else self.first_saved

    def _refuse_left(self, path):
        """Raises CannotTellError if the script has loaded this file, and replaces it now: another
        run has left it.
        """
        if path in self.left and not self.as_is:
            raise CannotTellError(
                f"it loads {os.path.basename(path)}, which another run of it has saved: move this "
                "file away, or compare a resumed run by --resume"
            )

    def _load(self, load, f, *args, **options):
        path = path_of(f)
        if path and os.path.exists(path):
            if os.path.islink(path):
                self.left.add(path)
            if self.began[0] < os.path.getmtime(path) < self.began[1]:  # at an absolute path
                self.left.add(path)
                self._refuse_left(path)
        result = load(f, *args, **options)
        if self.launched:
            self.found["loaded"] = self.done == 0  # not the best weights, after training
        return result

    # ---- the end

    def save(self):
        """Write down what was found."""
        Path(self.folder, f"{self.rank}.json").write_text(json.dumps(self.found))

    def leave(self, code=0):
        """End the process, as `os._exit` does. Children of the script leave the notes alone."""
        if os.getpid() == self.process:
            self.save()
        sys.stdout.flush()
        sys.stderr.flush()
        EXIT(code)


def path_of(file):
    """The absolute path of a file, or None if it is a stream."""
    return os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else None


def walk(own, top, topdown=True, onerror=None, followlinks=True):
    """os.walk, which also follows links: see make_place in launching.py."""
    return own(top, topdown, onerror, followlinks)


def refuse_fsdp1(*_, **__):
    raise CannotTellError(
        "it compares FSDP2 only: fully_shard, or fsdp_version: 2 in the YAML, not "
        "FullyShardedDataParallel"
    )


def buffers_of(model):
    """(name, tensor) of the floating-point buffers that a checkpoint holds."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def whole(tensor):
    """The whole tensor that a shard is a part of, dense, in float64, without its history."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def two_numbers(tensor):
    """Norm, and sum with random signs, which differs between tensors of the same norm."""
    flat = whole(tensor).flatten().cpu()
    parts = [part @ SIGNS[: len(part)] for part in flat.split(len(SIGNS))]
    return [flat.norm().item(), sum(parts).item()]


def checksum(item):
    """A number for the values of a sample."""
    found = 0
    for value in tree_leaves(item):
        if isinstance(value, torch.Tensor):
            value = whole(value).cpu().numpy()
        plain = re.sub(r" at 0x\w+", "", repr(value)) if not hasattr(value, "tobytes") else ""
        found = zlib.crc32(plain.encode() or value.tobytes(), found)
    return found


def checksums(batch):
    """A checksum of each sample of a batch, a row in all tensors with as many rows as the first."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
    rows = len(tensors[0]) if tensors else 0
    return [checksum([x[row] for x in tensors if len(x) == rows]) for row in range(rows)]


def watch_script(folder, gpus, options, script):
    """Be the rank that runs the script, and never return."""
    place = Path(folder, f"{os.environ.get('RANK', 0)}.at")
    faulthandler.register(signal.SIGUSR2, place.open("w"))  # for a rank that hangs
    if options["seed"] is None:
        for reseed in (torch.seed, numpy.random.seed, random.seed):  # a fork has its parent's seeds
            reseed()
    else:
        set_seed(options["seed"])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: end with the tool
    if gpus:  # It is no fork of a process that has imported them.
        import_libraries(Path(script).read_text("utf-8"))
    leave_room_for(script)
    sys.dont_write_bytecode = True  # beside links to the script's modules
    watch = Watch(folder, **options)
    os._exit = watch.leave
    try:
        if not gpus and watch.launched:
            accelerated.keep_deepspeed_from_compiling()
        elif not gpus:
            accelerated.connect_over_gloo()
        watch.watch()
        if not gpus and watch.launched:
            torchrun.pretend_gpus()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            watch.found |= {"error": str(end.code), "exited": True}
    except BaseException as problem:
        watch.found |= describe(problem, script)
    watch.leave(1 if watch.found["error"] else 0)


def describe(problem, script):
    """The error of a script, its own frames (those in its folder), and the whole traceback."""
    frames = []
    for at in traceback.extract_tb(problem.__traceback__):
        folders = Path(at.filename).absolute().parents
        libraries = at.filename.startswith("<") or {TOOLS, Path(sys.prefix)} & set(folders)
        if Path(script).parent in folders and not libraries:
            frames.append(f"{Path(at.filename).name}:{at.lineno}: {at.line}")
    where = f" ({':'.join(frames[-1].split(':')[:2])})" if frames else ""
    text = (str(problem).strip().splitlines() or [""])[0]
    return {
        "error": f"{type(problem).__name__}: {text}"[:200] + where,
        "frames": frames,
        "traceback": "".join(traceback.format_exception(problem)),
    }
