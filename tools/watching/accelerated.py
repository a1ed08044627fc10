"""What rank.py has to know of Accelerate: how to connect ranks without a GPU, and to make them read
samples in the same order; loaders that read ahead; what is gathered, saved and loaded.
"""

import functools
import inspect
import os
import sys

import torch
from accelerate import Accelerator, PartialState, utils
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState
from torch.utils._pytree import tree_leaves

from watching.differences import CannotTellError
from watching.steps import patch


def keep_deepspeed_from_compiling():
    """Call this before ranks are connected without a GPU. DeepSpeed 0.19.8 would compile an
    all-reduce of its own, and write it into the user's home.
    """
    if "deepspeed" in sys.modules or "ACCELERATE_USE_DEEPSPEED" in os.environ:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def connect_over_gloo():
    """Connect ranks without a GPU. Scripts that were written for GPUs do not do it."""
    keep_deepspeed_from_compiling()
    fsdp = utils.parse_flag_from_env("ACCELERATE_USE_FSDP")
    zero = utils.parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    if not (fsdp or zero):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    state = PartialState(cpu=not (fsdp or zero), backend="gloo" if fsdp or zero else None)
    if fsdp:  # accelerate 1.15 shards on CPUs only under this type
        state.distributed_type = utils.DistributedType.MULTI_GPU
    # transformers' Trainer would reset these, and find no GPU.
    AcceleratorState._reset_state = staticmethod(
        lambda reset_partial_state=False: AcceleratorState._shared_state.clear()
    )


def adapt(watch):
    """Let a Watch see what a script does by Accelerate."""

    def prepare(own, accelerator, *parts, **options):
        for part in parts:
            if isinstance(part, torch.nn.Module) and watch.exact:
                part.double()  # before Accelerate notes where the optimizer's weights are
        found = own(accelerator, *parts, **options)
        whole = found if isinstance(found, (tuple, list)) else (found,)
        watch.prepared += [part for part in whole if isinstance(part, torch.nn.Module)]
        return found

    def save_state(save, *args, **options):
        result = save(*args, **options)
        watch.note_checkpoint()
        return result

    def load_state(load, *args, **options):
        result = load(*args, **options)
        watch.found["loaded"] = watch.done == 0  # not the best weights, after training
        return result

    for method in (save_state, load_state):
        patch(Accelerator, method.__name__, method)
    for name in ("prepare", "prepare_model"):
        patch(Accelerator, name, prepare)
    for name in ("gather_for_metrics", "gather", "reduce"):
        patch(Accelerator, name, functools.partial(collect, watch))
    patch(Accelerator, "clip_grad_norm_", watch.clip)
    patch(DataLoaderShard, "__iter__", watch.iterate)
    patch(DataLoaderDispatcher, "__iter__", functools.partial(watch.iterate, here=False))
    if watch.launched:
        patch(Accelerator, "__init__", refuse)
    elif not watch.as_is:
        patch(Accelerator, "__init__", functools.partial(make_accelerator, watch.exact))


def refuse(*_, **__):
    """In place of making an Accelerator, if torchrun should start the script."""
    raise CannotTellError("it uses Accelerate, perhaps in another module: add --yaml ddp here")


def collect(watch, own, accelerator, data, *args, **options):
    """In place of `Accelerator.gather` and others: note what they are given, and make of it."""
    watch.gathering += 1  # gather_for_metrics calls gather
    found = own(accelerator, data, *args, **options)
    watch.gathering -= 1
    tensors = [one for one in tree_leaves(data) if isinstance(one, torch.Tensor)]
    watch.now["cut"] |= torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if watch.evaluating() and not watch.gathering:
        rows = [
            len(all_rows)
            for one, all_rows in zip(tree_leaves(data), tree_leaves(found), strict=False)
            if isinstance(one, torch.Tensor) and one.ndim
        ]
        if rows and own.__name__ != "reduce":
            watch.evaluation()["gathered"] += rows[0]
    return found


def make_accelerator(exactly, make, accelerator, *args, **options):
    """Make an Accelerator with seeded samplers, as the number of ranks would change their order;
    and without mixed precision, if it has to compute exactly.
    """
    words = inspect.signature(make).bind(accelerator, *args, **options)
    config = words.arguments.get("dataloader_config") or utils.DataLoaderConfiguration()
    if not config.use_seedable_sampler:
        config.use_seedable_sampler, config.data_seed = True, 0
    words.arguments["dataloader_config"] = config
    if exactly:
        words.arguments["mixed_precision"] = "no"
    make(*words.args, **words.kwargs)
