"""Count what a script would send and hold as one rank of N, on a machine without N devices.

    python dry_run.py 512 accelerate_configs/fsdp.yaml train_bert_squad.py --output_dir runs/dry
    python dry_run.py --nodes 64 512 accelerate_configs/hsdp.yaml train_bert_squad.py

The real script trains three steps as rank 0 of N, on the CPU. The libraries make their collectives,
which are counted and not sent. The tool prints those of a step, and what the rank holds before the
update, and writes both as OUTPUT_DIR/dry_run.json. It saves no model, and the losses mean nothing.
Options of `accelerate launch`, such as --mixed_precision bf16, stand between the YAML and SCRIPT.
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from common.printing import OneLineParser, markdown_table, stop

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Before torch comes: the CPU plays a device.
os.environ["DS_ACCELERATOR"] = "cpu"
# Or torch's profiler complains of a GPU that is not there, and of tensors that were there before.
os.environ |= {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}

from torch.autograd.profiler import profile, record_function  # noqa: E402

from planning import patches  # noqa: E402
from planning.counting import UPDATE, Tally, count_held, most_allocated  # noqa: E402
from planning.launching import LaunchError, environment_of, read_launch  # noqa: E402

# The first step sets up, in the second DDP arranges its buckets, and the third is counted.
STEPS = 3


def parse_args():
    """The tool's own options, N, the YAML, and the rest of the line as it is."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("ranks", type=int, metavar="N", help="ranks, of which one trains: 2 or more")
    add("yaml", type=Path, metavar="YAML", help="the strategy, one of accelerate_configs/")
    add("launch", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its flags")
    add("--nodes", type=int, default=1, metavar="M", help="the nodes that have these ranks")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"N has to be 2 or more, got {args.ranks}: one rank sends nothing")
    if args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--nodes {args.nodes} does not divide {args.ranks} ranks")
    if not args.yaml.is_file():
        parser.error(f"there is no {args.yaml}")
    return args


class Counted(BaseException):
    """The steps are done. No script takes it for an error, or for its own end."""


class DryRun(patches.StepWatch):
    """Counts the last of STEPS steps: its collectives, and what this rank holds in it.

    The peak of the step is what the rank holds before the update, and by how much torch's allocator
    had more at its fullest moment. So neither code of libraries nor the data set is a part of it.
    """

    def __init__(self, tally):
        super().__init__()
        self.tally = tally
        self.between = []  # collectives of the script between steps
        self.profiler = self.peak = None

    def preparing(self, accelerator, model):
        """Note the model's size."""
        self.accelerator = accelerator
        weights = list(model.parameters())
        self.parameters = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)

    def begin(self):
        if self.done:
            self.between += self.tally.rows()
        self.tally.clear()
        if self.done == STEPS - 1:
            with contextlib.suppress(RuntimeError):  # The script may profile itself.
                self.profiler = profile(profile_memory=True).__enter__()

    def before_update(self, model, optimizer):
        self.held = count_held(model, optimizer)
        with record_function(UPDATE):
            pass

    def end(self):
        if self.done == STEPS:
            self.collectives = self.tally.rows()
            if self.profiler:
                self.profiler.__exit__(None, None, None)
                events = self.profiler.kineto_results.events()
                self.peak = sum(self.held.values()) + most_allocated(events)
            raise Counted
        self.tally.clear()

    def strategy(self):
        """As the scripts call it."""
        state = self.accelerator.state
        kind = state.distributed_type
        if kind == "DEEPSPEED":
            return f"zero{state.deepspeed_plugin.zero_stage}"
        if kind == "FSDP":
            return "hsdp" if self.accelerator.parallelism_config else "fsdp"
        return "ddp"


def train(script, flags, dry):
    """Run the script as its own program until `dry` has counted. Stops with one line if it ends
    before that.
    """
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *flags]
    os._exit = sys.exit  # Scripts end so on a CPU; here something comes after them.
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(script), run_name="__main__")
    except Counted:
        return
    except NotImplementedError as problem:
        stop(f"{script}: {problem}")
    except SystemExit as end:
        if isinstance(end.code, str):
            stop(end.code)
    stop(
        f"{script} ended after {dry.done} training steps, and {STEPS} are needed: a step is a "
        "forward pass of a model, and a step of an optimizer, that Accelerator.prepare returned"
    )


def describe(args, script, dry):
    """What dry_run.json says."""
    return {
        "ranks": args.ranks,
        "nodes": args.nodes,
        "strategy": dry.strategy(),
        "yaml": args.yaml.name,
        "script": script.name,
        "micro_batches": dry.accelerator.gradient_accumulation_steps,
        "precision": dry.accelerator.mixed_precision,
        "parameters": dry.parameters,
        "collectives": dry.collectives,
        "collectives_between_steps": dry.between,
        "held_bytes": dry.held,
        "peak_bytes": dry.peak,
    }


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
        f"{found['strategy']}: rank 0 of {found['ranks']:,}, nodes: {found['nodes']:,}, "
        f"{found['parameters']:,} parameters, micro-batches in a step: {found['micro_batches']}\n"
    )
    rows = [["collective", "ranks", "on nodes", "calls", "MB"]]
    for row in found["collectives"]:
        numbers = [f"{row[name]:,}" for name in ("group_size", "nodes", "calls")]
        rows.append([row["kind"], *numbers, f"{row['bytes'] / 1e6:,.3f}"])
    yield markdown_table(rows, "right")
    between = found["collectives_between_steps"]
    yield (
        f"\nNot in it: between these {STEPS} steps, for logging and the like, the script made "
        f"{sum(row['calls'] for row in between)} calls\n"
        f"of {sum(row['bytes'] for row in between):,} bytes in all.\n"
    )
    held = found["held_bytes"]
    if found["peak_bytes"] is not None:
        held = held | {"peak": found["peak_bytes"]}
    rows = [[HELD[name], f"{size / 1e6:,.3f}"] for name, size in held.items()]
    yield markdown_table([["the rank holds", "MB"], *rows], "right")


def folder_of(flags, args):
    """Where dry_run.json goes: the script's --output_dir, or one that is named by N and YAML."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir", default=f"runs/dry_run-{args.yaml.stem}-{args.ranks}")
    return Path(parser.parse_known_args(flags)[0].output_dir)


def main():
    """One dry run."""
    args = parse_args()
    argv = sys.argv[1:]
    try:
        launched = read_launch(args.yaml, args.ranks, args.nodes, args.launch)
    except LaunchError as problem:
        stop(problem)
    os.environ |= environment_of(launched)
    tally = Tally(args.ranks // args.nodes)
    patches.connect_counting_groups(args.ranks, tally)
    dry = DryRun(tally)
    dry.watch()
    patches.save_nothing()
    patches.repeat_batches(STEPS)
    script, flags = Path(launched.training_script), launched.training_script_args
    with tempfile.TemporaryDirectory() as own:  # its run.json is of no real run
        train(script, [*flags, "--output_dir", f"{own}/run", "--max_train_steps", "1000"], dry)
    found = describe(args, script, dry) | {"argv": argv}
    folder = folder_of(flags, args)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "dry_run.json").write_text(json.dumps(found, indent=1) + "\n")
    except OSError as problem:
        stop(problem)
    print("\n".join(lines_of(found)))
    print(f"\nwritten: {folder}/dry_run.json")


if __name__ == "__main__":
    leave = os._exit
    main()
    sys.stdout.flush()
    leave(0)  # Groups in Python do not survive an orderly end of torch 2.15.
