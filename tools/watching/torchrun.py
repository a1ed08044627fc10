"""Let a script that was written for GPUs train on CPU processes: "cuda" in any form is the CPU, and
NCCL is gloo. Only the script is told so. torch and other libraries see that there is no GPU: so
autocast and GradScaler, for example, switch themselves off.
"""

import collections
import functools
import inspect
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from watching.differences import CannotTellError
from watching.exact import compile_nothing, enter_for_good
from watching.steps import patch

CPU = torch.device("cpu")
LIBRARIES = str(Path(torch.__file__).parents[1])
BYTES = 16 << 30  # of each pretended GPU
IS_CUDA = torch.Tensor.is_cuda.__get__


def on_cpu(value):
    """The same argument of a call, but a GPU is the CPU."""
    named = isinstance(value, (str, torch.device)) and str(value).startswith(("cuda", "cpu:"))
    # Backends are named "cpu:gloo,cuda:nccl".
    return CPU if named and "," not in str(value) else value


def library_asks():
    """Whether a library, not the script, has called the function that calls this one."""
    return sys._getframe(2).f_code.co_filename.startswith(LIBRARIES)


class OnCPU(TorchFunctionMode):
    """Puts on the CPU what a script would put on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function == IS_CUDA and not library_asks():
            return True
        if function is torch.device:
            first = kwargs.get("type", kwargs.get("device", (*args, None)[0]))
            if isinstance(first, int) or on_cpu(first) is CPU:
                return CPU
        elif name == "pin_memory":  # a method of a tensor
            return args[0]
        elif name == "to" and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], CPU, *args[2:])
        if isinstance(kwargs.get("device"), int):
            kwargs = kwargs | {"device": CPU}
        if name == "cuda":
            found = args[0]
        else:
            args = tuple(map(on_cpu, args))
            kwargs = {key: on_cpu(value) for key, value in kwargs.items() if key != "pin_memory"}
            found = function(*args, **kwargs)
        if name in ("cuda", "cpu", "to") and found is args[0] and not library_asks():
            # On another device, it would be a copy.
            return found if found.requires_grad else found.clone()
        return found


class Idle:
    """Stands for a stream, an event or a device: all that it is asked to do is done at once."""

    def __init__(self, *args, **options):
        self.record()

    def record(self, *_):
        """Note the time, as an event does."""
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        """The milliseconds until another event."""
        return 1000 * (end.seconds - self.seconds)

    def query(self):
        """Whether all is done."""
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


class Handle:
    """The handle of a collective, and its future, which gloo lacks."""

    def __init__(self, work):
        self.work = work

    def __getattr__(self, name):
        return getattr(self.work, name)

    def get_future(self):
        return self


def with_future(own, *args, **options):
    """What a collective returns, with a future, if it does not wait."""
    work = own(*args, **options)
    return Handle(work) if work else None


class CPUGenerator(torch.Generator):
    """A random generator for the CPU, whatever the script asks for."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, device=on_cpu(device))


def answers_of(module):
    """{a function of torch.cuda or torch.accelerator: what the script gets from it}. Those that are
    not named here do nothing.
    """
    devices, index = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    # torch's own examples insist on two accelerators.
    devices = max(devices, 2) if module is torch.accelerator else devices
    properties = SimpleNamespace(name="CPU", total_memory=BYTES, major=8, minor=0)
    properties.multi_processor_count = 1
    known = {"is_available": True, "is_bf16_supported": True, "device_count": devices}
    known |= dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), index)
    known |= dict.fromkeys(("mem_get_info", "get_memory_info"), (BYTES, BYTES))
    known |= {"current_accelerator": CPU, "get_device_name": "CPU"}
    known |= {"get_device_capability": (8, 0), "get_device_properties": properties}
    known |= {"memory_stats": collections.defaultdict(lambda: 1), "memory_summary": ""}
    answers = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        value = known.get(name, 1 if "memory_" in name else None)
        if name[0] != "_" and function.__module__.startswith("torch"):
            answers[name] = lambda *_, answer=value, **__: answer
    answers |= dict.fromkeys(("stream", "current_stream", "default_stream", "device"), Idle)
    answers |= {"device_index": Idle, "get_rng_state": lambda *_: torch.get_rng_state()}
    answers |= {"set_rng_state": lambda state, *_: torch.set_rng_state(state)}
    answers |= {"get_rng_state_all": lambda: [torch.get_rng_state()]}
    answers |= {"set_rng_state_all": lambda states: torch.set_rng_state(states[0])}
    return {name: answer for name, answer in answers.items() if hasattr(module, name)}


def tell_script(module, name, answer):
    """From now on `module.name(...)` is `answer(...)`, unless a library asks."""
    true = getattr(module, name)

    def asked(*args, **options):
        return (true if library_asks() else answer)(*args, **options)

    setattr(module, name, asked)


def pretend_gpus():
    """From now on, a script that puts its model and data on a GPU of this rank trains on the CPU.
    torch.compile does nothing.
    """
    for module in (torch.cuda, torch.accelerator):
        for name, answer in answers_of(module).items():
            tell_script(module, name, answer)
    torch.cuda.Event = torch.cuda.Stream = Idle
    torch.Generator = CPUGenerator
    compile_nothing()
    enter_for_good(OnCPU())
    adapt_modules()
    connect_over_gloo()


def adapt_modules():
    """Keep modules and checkpoints on the CPU. What cannot be pretended raises CannotTellError."""

    def to(own, module, *args, **options):
        args = [CPU if isinstance(one, int) else on_cpu(one) for one in args]
        return own(module, *args, **options | dict.fromkeys({"device"} & {*options}, CPU))

    def make_ddp(own, wrapper, module, device_ids=None, output_device=None, *args, **options):
        own(wrapper, module, None, None, *args, **options)

    def load(own, f, map_location=None, *args, **options):
        return own(f, CPU, *args, **options)

    def spawn(own, *args, **options):
        raise CannotTellError(
            "torch.multiprocessing.spawn starts the ranks itself: let torchrun start them"
        )

    patch(torch.nn.Module, "to", to)
    patch(torch.nn.Module, "cuda", lambda own, module, *_: module.to(CPU))
    patch(torch.nn.Module, "to_empty", lambda own, module, **more: own(module, device=CPU))
    patch(torch.nn.parallel.DistributedDataParallel, "__init__", make_ddp)
    patch(torch, "load", load)
    patch(torch.random, "fork_rng", lambda own, devices=(), **more: own([], **more))
    for name in ("spawn", "start_processes"):
        patch(torch.multiprocessing, name, spawn)


def connect_over_gloo():
    """Connect the ranks by gloo, as torchrun's environment says, whatever the script asks for."""

    def connect(own, *args, **options):
        words = inspect.signature(own).bind(*args, **options).arguments
        kept = {"timeout": words["timeout"]} if words.get("timeout") else {}
        own("gloo", **kept)

    def make_group(own, *args, **options):
        words = inspect.signature(own).bind(*args, **options)
        words.arguments |= {"backend": None, "device_id": None, "pg_options": None}
        return own(*words.args, **words.kwargs)

    def make_mesh(own, device, *args, **options):
        return own("cpu", *args, **options)

    patch(dist, "init_process_group", connect)
    patch(dist, "new_group", make_group)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        tell_script(dist, name, functools.partial(with_future, getattr(dist, name)))
    patch(dist, "barrier", lambda own, *args, device_ids=None, **more: own(*args, **more))
    patch(dist.device_mesh, "init_device_mesh", make_mesh)
    dist.init_device_mesh = dist.device_mesh.init_device_mesh
