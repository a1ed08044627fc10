"""Count what a script would send and hold as one of N ranks, on a machine without N devices.

    python tools/dry_run.py 512 accelerate_configs/fsdp.yaml train_bert_squad.py
    python tools/dry_run.py --nodes 64 512 accelerate_configs/hsdp.yaml train_bert_squad.py

The real script trains three steps as rank 0 of N, on the CPU. The tool counts the libraries'
collectives instead of sending them. It prints those of a step, and what the rank holds before the
update, and writes both to OUTPUT_DIR/dry_run.json. It saves no model, and the losses mean nothing.
Put options of `accelerate launch`, such as --mixed_precision bf16, between the YAML and SCRIPT.
SCRIPT is any that uses Accelerate and trains from a DataLoader that it prepares. If it knows the
flags --output_dir and --max_train_steps, the tool sets them.
"""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

from common.printing import OneLineParser, markdown_table, stop, value_of
from common.strategies import words_for

# Before torch is imported: the CPU is the device.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
# Otherwise torch's profiler warns that there is no GPU, and about tensors older than itself.
os.environ |= {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}

import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.commands.launch import launch_command_parser  # noqa: E402
from accelerate.data_loader import DataLoaderShard  # noqa: E402
from accelerate.state import AcceleratorState, is_initialized  # noqa: E402
from torch.autograd.profiler import record_function  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from memory import held  # noqa: E402
from watching.accelerated import connect_over_gloo  # noqa: E402
from watching.collectives import Tally, connect_to_nobody  # noqa: E402
from watching.launching import leave_room_for, what_the_launcher_starts  # noqa: E402
from watching.steps import StepWatch  # noqa: E402

# The first step sets up, the second rearranges DDP's buckets, and the third is counted.
STEPS = 3


def parse_args():
    """The tool's own options, N, the YAML, and the rest of the line as it is."""
    parser = OneLineParser(
        usage="%(prog)s [--nodes M] N YAML [OPTION ...] SCRIPT [FLAG ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("ranks", type=int, metavar="N", help="the number of ranks; one of them trains")
    add("yaml", metavar="YAML", help="the strategy, one of accelerate_configs/")
    add("launch", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its flags")
    nodes = "nodes of these ranks; HSDP has a replica on each"
    add("--nodes", type=int, default=1, metavar="M", help=nodes)
    args = parser.parse_args()
    if args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--nodes {args.nodes} does not divide {args.ranks} ranks")
    return args


def become_rank_0(args):
    """Give this process the environment of rank 0 of the launch. Returns the script and its flags.
    HSDP has a replica on each of several nodes, unless the user's options say otherwise.
    """
    words = ["--num_processes", str(args.ranks), "--main_process_port", "0"]
    if args.nodes > 1:
        words += ["--parallelism_config_dp_replicate_size", str(args.nodes)]
        words += ["--parallelism_config_dp_shard_size", str(args.ranks // args.nodes)]
    words += args.launch
    try:
        words = words_for(Path(args.yaml)) + words
        number, environment = what_the_launcher_starts(words, dict(os.environ))
    except Exception as problem:  # A YAML can be wrong in many ways, each with its own exception.
        stop(f"{args.yaml}: accelerate launch cannot start this: {problem!r}")
    if args.ranks < 2 or not number:
        stop(f"{args.yaml} on one rank sends nothing")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number)}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    # Alone on its machine, so the script does not pin it to a part of the cores.
    os.environ |= environment | rank | {"LOCAL_WORLD_SIZE": "1"}
    launched = launch_command_parser().parse_args(words)
    script = Path(launched.training_script)
    if not script.is_file():
        stop(f"there is no script {script}")
    return script, launched.training_script_args


def own_flags(script, folder):
    """Flags that keep the script's files in `folder`, and let it make enough steps, if it knows
    them.
    """
    text = script.read_text(encoding="utf-8", errors="replace")
    flags = {"--output_dir": f"{folder}/run", "--max_train_steps": "1000"}
    known = [name for name in flags if re.search(f"""["']{name}["']""", text)]
    return [word for name in known for word in (name, flags[name])]


class Counted(BaseException):
    """The steps are done. No script catches this as an error, or as its own end."""


class DryRun(StepWatch):
    """Counts the last of STEPS steps: its collectives, and what this rank holds in it.

    The peak of the step is what the rank holds before the update, plus what torch's allocator had
    beyond that at its fullest moment. So it includes neither the libraries' code nor the data set.
    """

    def __init__(self, tally):
        super().__init__()
        self.tally = tally
        self.records = False  # allocations
        self.peak = None

    def begin(self, model):
        self.model, self.before = model, self.backwards
        # DDP needs the tally's answers in each step. Under ZeRO-3 on thousands of ranks, a step has
        # millions of operators, and the tally would delay each of them.
        reducer = any(isinstance(part, DistributedDataParallel) for part in model.modules())
        if self.done == (0 if reducer else STEPS - 1):
            self.tally.__enter__()
        if self.done == STEPS - 1:
            self.tally.found.clear()
            with contextlib.suppress(RuntimeError):  # The script may use a profiler itself.
                held.record_allocations()
                self.records = True

    def before_update(self, optimizer):
        self.micro_batches = self.backwards - self.before
        self.held = held.count_held(self.model, optimizer)
        with record_function(held.REDUCED):
            pass

    def end(self):
        if self.done == STEPS:
            self.tally.__exit__(None, None, None)
            if self.records:
                self.peak = sum(self.held.values()) + held.most_allocated()
            raise Counted


def save_nothing(accelerator, output_dir=None, **options):
    """In place of `Accelerator.save_state`, which would wait for the other ranks' shards. The
    script may look for the folder.
    """
    if output_dir:
        Path(output_dir).mkdir(parents=True, exist_ok=True)


def repeat_batches(loader, once=DataLoaderShard.__iter__):
    """In place of a prepared loader's __iter__: its batches, STEPS times. Then a data set of one
    batch is enough for all steps, and no evaluation comes between them.
    """
    for _ in range(STEPS):
        yield from once(loader)


def train(script, flags, dry):
    """Run the script as a program until `dry` has counted. If it ends before, or does not use
    Accelerate, stop.
    """
    only = "this counts only scripts that use Accelerate"

    def refuse(*_, **__):
        stop(f"{script} calls init_process_group: {only}")

    dist.init_process_group = refuse  # Accelerate is connected already.
    leave_room_for(script)
    sys.argv = [str(script), *flags]
    os._exit = sys.exit  # Scripts end like this on a CPU, but the tool has to go on.
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(script), run_name="__main__")
    except Counted:
        if not is_initialized():
            stop(f"{script} makes no Accelerator: {only}")
        return
    except SystemExit as end:
        if isinstance(end.code, str):
            stop(end.code)
        if end.code:
            raise  # argparse has said why
    stop(
        f"{script} ended after {dry.done} of {STEPS} training steps: a step needs a backward pass "
        "and an optimizer's step"
    )


HELD = {
    "parameters": "parameters",
    "gradients": "gradients, reduced",
    "states": "optimizer states",
    "master_copy": "DeepSpeed's copy of the parameters",
    "peak": "all these and activations, at the step's peak",
}


def lines_of(found):
    """What is printed: the collectives of a step, and what the rank holds."""
    yield (
        f"{found['yaml']}: rank 0 of {found['ranks']:,}, nodes: {found['nodes']:,}, "
        f"{found['parameters']:,} parameters, micro-batches in a step: {found['micro_batches']}\n"
    )
    rows = [["collective", "ranks", "on nodes", "calls", "MB"]]
    for row in found["collectives"]:
        numbers = [f"{row[name]:,}" for name in ("group_size", "nodes", "calls")]
        rows.append([row["kind"], *numbers, f"{row['bytes'] / 1e6:,.3f}"])
    yield markdown_table(rows, "right") + "\n"
    parts = found["held_bytes"]
    if found["peak_bytes"] is not None:
        parts = parts | {"peak": found["peak_bytes"]}
    rows = [[HELD[name], f"{size / 1e6:,.3f}"] for name, size in parts.items()]
    yield markdown_table([["the rank holds", "MB"], *rows], "right")


def main():
    """One dry run."""
    args = parse_args()
    argv = sys.argv[1:]
    script, flags = become_rank_0(args)
    connect_to_nobody(args.ranks)
    dry = DryRun(Tally(args.ranks // args.nodes))
    dry.watch()
    Accelerator.save_state, DataLoaderShard.__iter__ = save_nothing, repeat_batches
    connect_over_gloo()  # or a script that was written for GPUs would train alone
    with tempfile.TemporaryDirectory() as own:  # for run.json, which is not of a real run
        train(script, [*flags, *own_flags(script, own)], dry)
    weights = list(dry.model.parameters())
    found = {
        "ranks": args.ranks,
        "nodes": args.nodes,
        "yaml": Path(args.yaml).stem,
        "script": script.name,
        "argv": argv,
        "micro_batches": dry.micro_batches,
        "precision": AcceleratorState().mixed_precision,
        "parameters": sum(getattr(part, "ds_numel", part.numel()) for part in weights),
        "collectives": dry.tally.rows(),
        "held_bytes": dry.held,
        "peak_bytes": dry.peak,
    }
    folder = f"runs/dry_run-{found['yaml']}-{args.ranks}"
    folder = Path(value_of("--output_dir", flags, folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dry_run.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines_of(found)))
    print(f"\nwritten: {folder}/dry_run.json")


if __name__ == "__main__":
    leave = os._exit
    main()
    sys.stdout.flush()
    leave(0)  # An orderly end takes 1.5 s longer: Python takes down all that the script imported.
