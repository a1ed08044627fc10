"""Run a script in float64. Then ranks that do the same as one process have the same numbers to 10
digits or more, and a difference is never rounding: no ReLU near 0 comes out on the other side.
"""

import contextlib
import inspect
import json
import re
import sys
from pathlib import Path

import torch
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from watching.steps import patch

FLOAT32, FLOAT64 = torch.float32, torch.float64  # initialize changes torch's names
WIDE = dict.fromkeys((FLOAT32, torch.float16, torch.bfloat16), FLOAT64)
WIDE |= {torch.complex64: torch.complex128}
CASTS = ("float", "half", "bfloat16")  # methods of tensors and modules
IN_PLACE = re.compile(r"__setitem__|__i(?!n)\w+__|(?!__)\w+_")
# With a dtype, these say how bytes are to be read.
RAW = ("view", "frombuffer", "set_")
# These draw other numbers in float64.
MAKE_RANDOM = ("rand", "randn", "rand_like", "randn_like")
FILL_RANDOM = ("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "kaiming_uniform_")
MODES = []  # that were entered for good
load, save = torch.load, torch.save  # as they are


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
    compile_nothing()
    widen_models()
    enter_for_good(Exact())


def compile_nothing():
    """From now on torch.compile returns what it is given."""

    def compile_it(model=None, **_):
        if isinstance(model, torch.nn.Module):
            object.__setattr__(model, "_orig_mod", model)  # not as a layer
        return model if model is not None else lambda function: function

    torch.compile = compile_it
    torch._dynamo.config.disable = True  # for what libraries have compiled


def load_as_saved(load, *args, **options):
    """Load tensors in the types in which they were saved, and widen them."""
    with torch._C.DisableTorchFunction():
        found = load(*args, **options)
    return tree_map(widen_new, found)


def enter_for_good(mode):
    """Enter a mode, in backward passes, too: torch leaves it for them, and custom functions and
    activation checkpointing compute there in Python. The last one sees a call first.
    """

    def run(run_backward, *args, **options):
        with contextlib.ExitStack() as entered:
            for one in MODES:
                entered.enter_context(one)
            return run_backward(*args, **options)

    if not MODES:
        patch(torch.autograd, "_engine_run_backward", run)
    MODES.append(mode)
    mode.__enter__()


def widen_models():
    """From now on models get float64 weights that a library has loaded in another type: when they
    are moved to a device, and when they are prepared for many ranks.
    """

    def move(to, model, *args, **options):
        return to(model, *args, **options).double()

    def make_ddp(make, wrapper, module, *args, **options):
        make(wrapper, module.double(), *args, **options)

    def shard(fully_shard, module, *args, mp_policy=None, **options):
        for part in module if isinstance(module, (list, tuple)) else [module]:
            if not isinstance(part, fsdp.FSDPModule):
                part.double()
        return fully_shard(module, *args, **options)

    def make_scaler(make, scaler, *args, **options):
        make(scaler, *args, **options)
        scaler._enabled = False  # Otherwise it takes float32 only.

    def initialize(make_engine, *args, **options):
        words = inspect.signature(make_engine).bind(*args, **options).arguments
        words["model"].double()
        words["config"] = exact_config(words)
        torch.float = torch.float32 = FLOAT64  # The code of DeepSpeed checks for these names.
        return make_engine(**words)

    patch(torch.nn.Module, "to", move)
    patch(DistributedDataParallel, "__init__", make_ddp)
    patch(fsdp, "fully_shard", shard)
    patch(torch.amp.GradScaler, "__init__", make_scaler)
    if "deepspeed" in sys.modules:
        patch(sys.modules["deepspeed"], "initialize", initialize)


def exact_config(words):
    """DeepSpeed's settings, which `deepspeed.initialize` gets in `words`, for float64."""
    config = words.pop("config", None) or words.pop("config_params", None)
    if not config:  # It is the name of a file among the script's flags.
        config, words["args"].deepspeed_config = words["args"].deepspeed_config, None
    config = json.loads(Path(config).read_text()) if isinstance(config, str) else dict(config)
    optimizer = config.get("optimizer", {})
    if "Adam" in optimizer.get("type", ""):  # DeepSpeed's own has only narrow types.
        settings = optimizer.get("params", {}) | {"torch_adam": True}
        config["optimizer"] = optimizer | {"params": settings}
    return config | {"fp16": {"enabled": False}, "bf16": {"enabled": False}}
