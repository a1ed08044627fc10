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
WIDE = dict.fromkeys((FLOAT32, torch.float16, torch.bfloat16), FLOAT64)
WIDE |= {torch.complex64: torch.complex128}
CASTS = ("float", "half", "bfloat16")  # methods of tensors and modules
IN_PLACE = re.compile(r"__setitem__|__i(?!n)\w+__|(?!__)\w+_")
# With a dtype, these say how bytes are to be read.
RAW = ("view", "frombuffer", "set_")
# These draw other numbers in float64.
MAKE_RANDOM = ("rand", "randn", "rand_like", "randn_like")
FILL_RANDOM = ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "kaiming_uniform_")


def is_narrow(value):
    """Whether it is a tensor or a dtype of fewer bits."""
    kind = value.dtype if isinstance(value, torch.Tensor) else value
    return isinstance(kind, torch.dtype) and kind in WIDE


def widen(value):
    """A tensor or a dtype of fewer bits with 64. Other values stay as they are."""
    if not is_narrow(value):
        return value
    return WIDE[value] if isinstance(value, torch.dtype) else value.to(WIDE[value.dtype])


def widen_new(value):
    """The same of a tensor that was just made: an optimizer has to be able to update it."""
    if isinstance(value, torch.Tensor) and is_narrow(value):
        return widen(value.detach()).requires_grad_(value.requires_grad)
    return value


class Exact(TorchFunctionMode):
    """float32, float16 and bfloat16 mean float64: as arguments of torch's functions, in tensors
    made from other data, and in tensors that meet a float64 one. Random numbers are drawn in
    float32, and then widened.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            return function(*args, **kwargs)
        if name in CASTS:
            return torch.Tensor.double(*args, **kwargs)
        first = kwargs.get("tensor", (*args, None)[0])
        if name in MAKE_RANDOM and "out" not in kwargs:
            kind = kwargs.get("dtype") or getattr(first, "dtype", FLOAT64)
            if not kind.is_complex:
                return widen_new(function(*args, **kwargs | {"dtype": FLOAT32}))
        if name in FILL_RANDOM and getattr(first, "dtype", None) is FLOAT64:
            return fill(function, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if name not in RAW and any(map(is_narrow, leaves)):
            # Tensors stay as they are, unless they meet a wider one.
            mixed = any(one.dtype in WIDE.values() for one in tensors)
            args, kwargs = alike(name, args, kwargs, mixed)
        found = function(*args, **kwargs)
        return found if tensors else tree_map(widen_new, found)


def fill(function, args, kwargs):
    """Fill a float64 tensor, the first argument or `tensor`, with random numbers of float32."""
    target, *more = args or [kwargs["tensor"]]
    drawn = torch.empty_like(target, dtype=FLOAT32)
    function(drawn, *more, **{name: kwargs[name] for name in kwargs if name != "tensor"})
    with torch.no_grad():
        return target.copy_(drawn)


def alike(name, args, kwargs, mixed):
    """The arguments of a function with wide dtypes and, if tensors are `mixed`, with all of these
    wide, or in the type of the tensor that the function changes.
    """
    changed = kwargs.get("out")
    if changed is None and IN_PLACE.fullmatch(name):
        changed = next(iter(tree_leaves((args, kwargs))), None)
    narrow = changed.dtype if isinstance(changed, torch.Tensor) and is_narrow(changed) else None

    def fit(value):
        if not isinstance(value, torch.Tensor):
            return widen(value)
        if narrow and mixed:
            return value.to(narrow) if value.dtype in WIDE.values() else value
        return widen(value) if mixed else value

    return tree_map(fit, (args, kwargs))


def compute_in_float64():
    """From now on this process computes in float64, and torch.compile does nothing."""
    torch.set_default_dtype(FLOAT64)
    torch.set_default_dtype = lambda *_, **__: None  # transformers sets it
    torch.FloatTensor = torch.HalfTensor = torch.BFloat16Tensor = torch.DoubleTensor
    for name in CASTS:
        setattr(torch.nn.Module, name, torch.nn.Module.double)
    patch(torch, "load", load_as_saved)
    torch._dynamo.config.disable = True
    enter_for_good(Exact())


def load_as_saved(load, *args, **options):
    """Load tensors in the types in which they were saved, and widen them."""
    with torch._C.DisableTorchFunction():
        found = load(*args, **options)
    return tree_map(widen_new, found)


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
