"""A script as one rank of many: the environment that the launcher gives it, its training steps,
found by accelerate's own objects, and what it holds then.
"""

import functools
import itertools
import math
import re
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands import launch as launcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

REPLICAS = "parallelism_config_dp_replicate_size"
SHARDS = "parallelism_config_dp_shard_size"
HANDED_OVER = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


class LaunchError(ValueError):
    """The launcher cannot start that, or a YAML has no such shape."""


def read_launch(yaml, ranks, nodes, words):
    """The launcher's arguments for a YAML, `ranks` on `nodes`, and the words that follow the YAML:
    options of `accelerate launch`, a script and its flags. HSDP has its replicas between the nodes,
    if there are several and the words say nothing else. Raises LaunchError.
    """
    args = validated(yaml, ranks, words)
    if not (args.multi_gpu or args.use_fsdp or args.use_deepspeed):
        raise LaunchError(f"{yaml} is for one process, which sends nothing")
    if not Path(args.training_script).is_file():
        raise LaunchError(f"there is no script {args.training_script}")
    if not args.use_parallelism_config:
        return args
    said = {REPLICAS, SHARDS} & args.nondefault
    if nodes > 1 and not said:
        args = validated(
            yaml, ranks, [f"--{REPLICAS}={nodes}", f"--{SHARDS}={ranks // nodes}", *words]
        )
    sizes = getattr(args, REPLICAS), getattr(args, SHARDS)
    if math.prod(sizes) != ranks or sizes[1] == 1:
        raise LaunchError(
            f"{yaml} has {sizes[0]} replicas of {sizes[1]} shards for {ranks} ranks: say --nodes M "
            f"before N, for M replicas, or --{REPLICAS} and --{SHARDS}, 2 or more, after the YAML, "
            f"whose product is {ranks}"
        )
    return args


def validated(yaml, ranks, words):
    """The launcher's arguments, those of the YAML among them. Raises LaunchError."""

    def refuse(message):
        raise LaunchError(message)

    parser = launcher.launch_command_parser()
    parser.error = refuse
    options = [
        "--config_file",
        str(yaml),
        "--num_processes",
        str(ranks),
        "--main_process_port",
        "0",
    ]
    args = parser.parse_args([*options, *words])
    try:
        return launcher._validate_launch_command(args)[0]
    except Exception as problem:  # A YAML can be wrong in many ways, each with its own kind.
        raise LaunchError(f"{yaml}: {problem!r}") from None


def environment_of(args):
    """The variables that rank 0 of such a launch finds. It is alone on its machine, so that the
    script pins it to no part of the cores.
    """
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        env = prepare_deepspeed_cmd_env(args)[1]
    else:
        env = prepare_multi_gpu_env(args)
    handed = {name: value for name, value in env.items() if name.startswith(HANDED_OVER)}
    return handed | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(args.num_processes),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(args.main_process_port),
    }


class StepWatch:
    """Tells when a script is in a training step. A subclass says what happens then.

    A step begins with a forward pass, with gradients, of a model that `Accelerator.prepare`
    returned. It ends when the `step` of an optimizer that it returned is over, after the last
    micro-batch. What a script does between two steps, such as logging, is in no step.
    """

    def __init__(self):
        self.done = 0  # steps
        self.in_step = False

    def preparing(self, accelerator, model):
        """`Accelerator.prepare` is about to prepare a model."""

    def begin(self):
        """A step begins."""

    def before_update(self, model, optimizer):
        """Gradients are reduced, and the optimizer comes next."""

    def end(self):
        """A step is over, and counted in `done`."""

    def watch(self):
        """Watch all that `Accelerator.prepare` returns from now on."""
        watch, prepare = self, Accelerator.prepare

        @functools.wraps(prepare)
        def prepared(accelerator, *parts, **options):
            for part in parts:
                if isinstance(part, torch.nn.Module):
                    watch.preparing(accelerator, part)
            found = prepare(accelerator, *parts, **options)
            whole = found if isinstance(found, (tuple, list)) else (found,)
            models = [part for part in whole if isinstance(part, torch.nn.Module)]
            optimizers = [part for part in whole if isinstance(part, AcceleratedOptimizer)]
            for model in models:
                model.register_forward_pre_hook(watch._forward, prepend=True)
            for optimizer in optimizers:
                watch._follow(accelerator, models[0] if models else None, optimizer)
            return found

        Accelerator.prepare = prepared

    def _forward(self, *_):
        if torch.is_grad_enabled() and not self.in_step:
            self.in_step = True
            self.begin()

    def _follow(self, accelerator, model, optimizer):
        own_step = optimizer.step
        # DeepSpeed's engine steps at the end of the backward pass, and the optimizer not at all.
        engine = model if hasattr(optimizer.optimizer, "loss_scaler") else None
        update = engine.step if engine else None

        def engine_step(*args, **options):
            self.before_update(model, optimizer)
            return update(*args, **options)

        def step(*args, **options):
            last = accelerator.sync_gradients
            if last and not engine:
                self.before_update(model, optimizer)
            result = own_step(*args, **options)
            if last:
                self.done += 1
                self.in_step = False
                self.end()
            return result

        optimizer.step = step
        if engine:
            engine.step = engine_step


def bytes_held(model, optimizer):
    """What this rank holds of parameters, gradients, optimizer states, and of DeepSpeed's copy of
    the parameters in fp32, in bytes, by storage: a view counts once.
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
    """Call `count(group, tensor)` for what DeepSpeed's optimizer holds, of ZeRO-1 to ZeRO-3."""
    for gradient in itertools.chain(*filter(None, optimizer.averaged_gradients.values())):
        count("gradients", gradient)
    # Of ZeRO-1 and ZeRO-2, and of ZeRO-3.
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        for part in getattr(optimizer, name, []):
            count("master_copy", part)
            count("gradients", part.grad)


def resident_memory():
    """Bytes of memory that this process holds now."""
    return psutil.Process().memory_info().rss


def peak_memory():
    """The most bytes that this process held since the last call; where the kernel forbids to
    forget, since its start.
    """
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()) or [0]
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see man 5 proc
    return int(peak) * 1024 or resident_memory()
