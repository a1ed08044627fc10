"""Run a script in float64. Then ranks that do the same as one process have the same numbers to 10
digits or more, and a difference is never rounding: no ReLU near 0 comes out on the other side.
"""

import os
import re

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from watching.steps import patch

FLOAT32, FLOAT64 = torch.float32, torch.float64  # widen_model changes what torch's names mean
FEWER_BITS = (FLOAT32, torch.float16, torch.bfloat16)
CASTS = ("float", "half", "bfloat16")  # methods of tensors and modules
IN_PLACE = re.compile(r"__setitem__|__i(?!n)\w+__|(?!__)\w+_")
# With a dtype, these say how bytes are to be read.
RAW = ("view", "frombuffer", "set_")
# These draw other numbers in float64.
MAKE_RANDOM = ("rand", "randn", "rand_like", "randn_like")
FILL_RANDOM = ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "kaiming_uniform_")


def has_type(value, *types):
    """Whether it is a tensor of one of these types."""
    return isinstance(value, torch.Tensor) and value.dtype in types


def widen(value):
    """A tensor in float64, and a dtype of fewer bits as float64. Other values stay as they are."""
    if isinstance(value, torch.dtype):
        return FLOAT64 if value in FEWER_BITS else value
    return value.to(FLOAT64) if has_type(value, *FEWER_BITS) else value


class Exact(TorchFunctionMode):
    """float32, float16 and bfloat16 mean float64: as arguments of torch's functions, in tensors
    made from other data, and in tensors that meet a float64 one. What is drawn is float32's.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            return function(*args, **kwargs)
        if name in CASTS:
            return torch.Tensor.double(*args, **kwargs)
        if name in MAKE_RANDOM:
            return widen(function(*args, **kwargs | {"dtype": FLOAT32}))
        if name in FILL_RANDOM and has_type(kwargs.get("tensor", *args[:1]), FLOAT64):
            return fill(function, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        if name not in RAW and any(leaf in FEWER_BITS for leaf in leaves if is_dtype(leaf)):
            args, kwargs = tree_map(
                lambda leaf: widen(leaf) if is_dtype(leaf) else leaf, (args, kwargs)
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(has_type(one, *FEWER_BITS) for one in tensors):
            if any(has_type(one, FLOAT64) for one in tensors):
                args, kwargs = alike(name, args, kwargs)
        found = function(*args, **kwargs)
        return found if tensors else tree_map(widen, found)


def is_dtype(value):
    return isinstance(value, torch.dtype)


def fill(function, args, kwargs):
    """Fill a float64 tensor, the first argument or `tensor`, with random numbers of float32."""
    target, *more = args or [kwargs["tensor"]]
    drawn = torch.empty_like(target, dtype=FLOAT32)
    function(drawn, *more, **{name: kwargs[name] for name in kwargs if name != "tensor"})
    with torch.no_grad():
        return target.copy_(drawn)


def alike(name, args, kwargs):
    """The arguments of a function in float64, or in the type of the tensor that it changes."""
    if not IN_PLACE.fullmatch(name):
        return tree_map(widen, (args, kwargs))
    own = args[0].dtype
    if own not in FEWER_BITS:
        return args, kwargs
    return tree_map(lambda one: one.to(own) if has_type(one, FLOAT64) else one, (args, kwargs))


def compute_in_float64():
    """From now on this process computes in float64, and torch.compile does nothing."""
    torch.set_default_dtype(FLOAT64)
    torch.set_default_dtype = lambda kind: None  # transformers sets it
    for name in CASTS:
        setattr(torch.nn.Module, name, torch.nn.Module.double)
    patch(torch, "load", load_as_saved)
    torch._dynamo.config.disable = True
    enter_for_good(Exact())


def load_as_saved(load, *args, **options):
    """Load tensors in the types in which they were saved."""
    with torch._C.DisableTorchFunction():
        return load(*args, **options)


def enter_for_good(mode):
    """Enter a mode, in backward passes, too: torch leaves it for them, and custom functions and
    activation checkpointing compute there in Python.
    """

    def run(run_backward, *args, **options):
        with mode:
            return run_backward(*args, **options)

    patch(torch.autograd, "_engine_run_backward", run)
    mode.__enter__()


def widen_model(model):
    """Bring a model to float64 that a library has loaded in another type."""
    model.double()
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        torch.float = torch.float32 = FLOAT64  # The code of DeepSpeed checks for these names.
