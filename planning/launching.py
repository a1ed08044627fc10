"""What `accelerate launch` makes of a YAML and a command line, without launching anything."""

import math
from pathlib import Path

from accelerate.commands import launch as launcher
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from common.strategies import REPLICAS, SHARDS

SIZES_OF_HSDP = [f"parallelism_config_{name}" for name in (REPLICAS, SHARDS)]
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
    replicas, shards = SIZES_OF_HSDP
    if nodes > 1 and not args.nondefault.intersection(SIZES_OF_HSDP):
        by_nodes = [f"--{replicas}={nodes}", f"--{shards}={ranks // nodes}"]
        args = validated(yaml, ranks, [*by_nodes, *words])
    sizes = getattr(args, replicas), getattr(args, shards)
    if math.prod(sizes) != ranks or sizes[1] == 1:
        raise LaunchError(
            f"{yaml} has {sizes[0]} replicas of {sizes[1]} shards for {ranks} ranks: say --nodes M "
            f"before N, for M replicas, or --{replicas} and --{shards}, 2 or more, after the YAML, "
            f"whose product is {ranks}"
        )
    return args


def validated(yaml, ranks, words):
    """The launcher's arguments, those of the YAML among them. Raises LaunchError."""

    def refuse(message):
        raise LaunchError(message)

    parser = launcher.launch_command_parser()
    parser.error = refuse
    options = f"--num_processes {ranks} --main_process_port 0 --config_file".split()
    args = parser.parse_args([*options, str(yaml), *words])
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
