"""Count what a script would send and hold as one rank of N, on a machine without N devices.

    python dry_run.py 512 accelerate_configs/fsdp.yaml train_bert_squad.py --output_dir runs/dry
    python dry_run.py --nodes 64 512 accelerate_configs/hsdp.yaml train_bert_squad.py
    python dry_run.py --check check.json --baseline run.json 64 accelerate_configs/ddp.yaml ...

The real script trains three steps as rank 0 of N, on the CPU. The libraries make their collectives,
which are counted and not sent. The tool prints those of a step, and what the rank holds, and writes
both as OUTPUT_DIR/dry_run.json. It saves no model, and the losses of such a run mean nothing.
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

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Before torch comes: the CPU plays a device.
os.environ["DS_ACCELERATOR"] = "cpu"

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderShard  # noqa: E402

from planning.counting import Tally, connect_counting_groups  # noqa: E402
from planning.facts import UNREADABLE  # noqa: E402
from planning.links import link_of, read_link, seconds_of_rows  # noqa: E402
from planning.prediction import scale_by_count, seconds_of_record  # noqa: E402
from planning.steps import (  # noqa: E402
    LaunchError,
    StepWatch,
    bytes_held,
    environment_of,
    peak_memory,
    read_launch,
    resident_memory,
)

# The first step sets up, in the second DDP arranges its buckets, and the third is counted.
STEPS = 3


def stop(problem):
    """End with one line."""
    sys.exit("error: " + " ".join(str(problem).split()).removeprefix("error: "))


class OneLineParser(argparse.ArgumentParser):
    """A parser that ends with one line where an argument is wrong."""

    def error(self, message):
        stop(f"{message} (--help lists the options)")


def parse_args():
    """The tool's own options, N, the YAML, and the rest of the line as it is."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("ranks", type=int, metavar="N", help="ranks, of which one trains: 2 or more")
    add("yaml", type=Path, metavar="YAML", help="the strategy, one of accelerate_configs/")
    add("launch", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its flags")
    add("--nodes", type=int, default=1, metavar="M", help="they are on so many nodes")
    add(
        "--check",
        type=Path,
        action="append",
        help="the link between ranks: a check.json of sbatch/check.py; given twice, one of a "
        "single node and one of several",
    )
    add("--bandwidth", type=float, help="or: of the link, in GB/s, and")
    add("--latency", type=float, help="of a message between two devices, in microseconds")
    add("--baseline", type=Path, help="a run.json of the same work on one device, to predict with")
    args = parser.parse_args()
    check_numbers(args, parser)
    args.links = read_links(args, parser)
    args.alone = read_baseline(args, parser)
    return args


def check_numbers(args, parser):
    """Refuse numbers that mean nothing."""
    if args.ranks < 2:
        parser.error(f"N has to be 2 or more, got {args.ranks}: one rank sends nothing")
    if args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--nodes {args.nodes} does not divide {args.ranks} ranks")
    if not args.yaml.is_file():
        parser.error(f"there is no {args.yaml}")
    if (args.bandwidth is None) != (args.latency is None):
        parser.error("--bandwidth and --latency describe a link together")
    if args.bandwidth is not None and not (args.bandwidth > 0 and args.latency >= 0):
        parser.error("--bandwidth has to be greater than 0, and --latency not negative")


def read_links(args, parser):
    """The links that the options describe."""
    if args.bandwidth is not None:
        return [link_of(args.bandwidth * 1e9, args.latency / 1e6)]
    links = []
    for path in args.check or []:
        try:
            links.append(read_link(path))
        except UNREADABLE as reason:
            parser.error(f"{path} is no check.json of several ranks ({reason!r})")
    return links


def read_baseline(args, parser):
    """What the record of one device says, or None."""
    if not args.baseline:
        return None
    if not args.links:
        parser.error("--baseline needs the link: --check, or --bandwidth and --latency")
    try:
        record = json.loads(args.baseline.read_bytes())
        return {name: record.get(name) for name in SAME_WORK} | seconds_of_record(record)
    except UNREADABLE as reason:
        parser.error(f"{args.baseline} is no record of a run on one device ({reason!r})")


# What the baseline has to have in common with the dry run.
SAME_WORK = ["script", "per_device_batch_size", "gradient_accumulation_steps", "precision"]


def refuse_other_work(args, record):
    """Stop if the baseline is a run of other work than this one, by its own unfinished run.json. A
    script that writes none is compared by its parameters only.
    """
    for name in [*SAME_WORK, "parameters"]:
        ours, theirs = record.get(name), args.alone[name]
        if None not in (ours, theirs) and ours != theirs:
            stop(f"{args.baseline} is of other work: its {name} is {theirs}, and here it is {ours}")


class Counted(BaseException):
    """The steps are done. No script catches it."""


class DryRun(StepWatch):
    """Counts the last of STEPS steps: its collectives, and what this rank holds in it."""

    def __init__(self, tally):
        super().__init__()
        self.tally = tally
        self.between = []  # collectives of the script between steps

    def preparing(self, accelerator, model):
        """Note the model's size, and what the process holds besides it."""
        self.accelerator = accelerator
        weights = list(model.parameters())
        self.parameters = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
        # ZeRO-3 has divided them already.
        shards = [getattr(weight, "ds_tensor", weight) for weight in weights]
        self.before = resident_memory() - sum(shard.nbytes for shard in shards)

    def begin(self):
        if self.done:
            self.between += self.tally.rows()
        self.tally.clear()
        peak_memory()  # forgets the peak until here

    def before_update(self, model, optimizer):
        self.held = bytes_held(model, optimizer)

    def end(self):
        if self.done == STEPS:
            self.collectives = self.tally.rows()
            self.peak = peak_memory() - self.before
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


def save_nothing(accelerator, output_dir=None, **options):
    """Instead of Accelerator.save_state, which would wait for the other ranks' shards. Scripts find
    the folder that they asked for.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)


def repeat_batches():
    """Prepared loaders give their batches again where an epoch has fewer than STEPS steps, so that
    no evaluation comes between.
    """
    once = DataLoaderShard.__iter__

    def again(loader):
        for _ in range(STEPS):
            yield from once(loader)

    DataLoaderShard.__iter__ = again


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
    found = {
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
    if args.links:
        seconds = seconds_of_rows(dry.collectives, args.links)
        found["communication_seconds"] = seconds
        if args.alone:
            hidden, open_ = scale_by_count(args.alone["seconds"], sum(seconds.values()))
            found["predicted"] = {
                "step_seconds": [hidden[0], open_[0]],
                "efficiency": [hidden[1], open_[1]],
            }
    return found


HELD = {
    "parameters": "parameters",
    "gradients": "gradients, reduced",
    "states": "optimizer states",
    "master_copy": "DeepSpeed's copy of the parameters",
    "peak": "all at the peak of the step, activations too",
}


def lines_of(found):
    """What is printed: the collectives of a step, what the rank holds, and seconds."""
    yield (
        f"{found['strategy']}: rank 0 of {found['ranks']:,}, nodes: {found['nodes']:,}, "
        f"{found['parameters']:,} parameters, micro-batches in a step: {found['micro_batches']}\n"
    )
    rows = [["collective", "ranks", "on nodes", "calls", "MB"]]
    for row in found["collectives"]:
        numbers = [f"{row[name]:,}" for name in ("group_size", "nodes", "calls")]
        rows.append([row["kind"], *numbers, f"{row['bytes'] / 1e6:,.3f}"])
    yield from table(rows)
    between = found["collectives_between_steps"]
    yield (
        f"\nNot in it: between these {STEPS} steps, for logging and the like, the script made "
        f"{sum(row['calls'] for row in between)} calls\n"
        f"of {sum(row['bytes'] for row in between):,} bytes in all.\n"
    )
    held = found["held_bytes"] | {"peak": found["peak_bytes"]}
    yield from table(
        [["the rank holds", "MB"]]
        + [[HELD[name], f"{size / 1e6:,.3f}"] for name, size in held.items()]
    )
    if "communication_seconds" in found:
        seconds = found["communication_seconds"]
        yield (
            f"\nThe calls of a step take {seconds['inside']:.4g} s inside nodes and "
            f"{seconds['between']:.4g} s between them."
        )
    if "predicted" in found:
        steps, shares = found["predicted"]["step_seconds"], found["predicted"]["efficiency"]
        yield (
            f"A step takes from {steps[0]:.4g} s (computing hides all calls that it can) to "
            f"{steps[1]:.4g} s (it hides\nnone): an efficiency from {shares[0]:.0%} to "
            f"{shares[1]:.0%}. How much overlaps is not known."
        )


def table(rows):
    """Rows as lines of Markdown. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        first, *others = zip(row, widths, strict=True)
        yield f"| {first[0]:{first[1]}} | {' | '.join(f'{t:>{w}}' for t, w in others)} |"
        if number == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


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
    connect_counting_groups(args.ranks, tally)
    dry = DryRun(tally)
    dry.watch()
    Accelerator.save_state = save_nothing
    repeat_batches()
    script, flags = Path(launched.training_script), launched.training_script_args
    with tempfile.TemporaryDirectory() as own:  # its run.json is of no real run
        own_flags = ["--output_dir", f"{own}/run", "--max_train_steps", "1000"]
        train(script, [*flags, *own_flags], dry)
        own_record = Path(own, "run", "run.json")
        record = json.loads(own_record.read_bytes()) if own_record.exists() else {}
    if args.alone:
        refuse_other_work(args, record | {"parameters": dry.parameters})
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
