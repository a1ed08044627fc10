"""Does it fit? The memory of a device while BERT trains under each YAML, by formula, before a run.
Given the record of a run, it says what used the memory, and what to try next.

    python tools/fit.py 40GB
    python tools/fit.py 80GB --model bert-large --num_processes 8 --mixed_precision bf16
    python tools/fit.py 16GB --per_device_train_batch_size 16 --activation_checkpointing
    python tools/fit.py RUN/run.json

The first three print a row for each YAML in accelerate_configs/: what each device holds in a step
of train_bert_squad.py, what the host holds, and the largest micro-batch that fits. The formulas are
in tools/memory/formulas.py. tests/test_fit.py checks them against counted tensors, on a CPU.

Left out: the CUDA context and the libraries' workspaces (about 1 GB: a row that leaves less is
"tight"), what the allocator rounds up, what attention keeps for itself, what DP needs to add up
gradients, and the second copy of the gradients that accumulation needs.
docs/lab/12-ladder.md has counted totals.
"""

import argparse
import json
import math
import re
import signal
from pathlib import Path

from common import UNREADABLE
from common.printing import OneLineParser, markdown_table, stop
from common.strategies import STRATEGIES, name_yaml
from memory.formulas import SIZES, count_parameters, held_by_run, largest_batch, memory_of, rungs_of

CUDA = 1e9  # bytes: its context, and the libraries' workspaces
POWERS = [2**exponent for exponent in range(11)]  # numbers of devices, up to 1,024
MODELS = {
    "bert-base": dict(zip(SIZES, (12, 768, 3072, 30522, 512, 2), strict=True)),
    "bert-large": dict(zip(SIZES, (24, 1024, 4096, 30522, 512, 2), strict=True)),
}
NOTES = """
MB: 10^6 bytes on each device; host: in the CPU's memory, for each device. Each part is at its
largest. total: the peak of a step. The backward pass frees activations while it makes gradients,
so the total is less than the sum of the parts. DDP and ZeRO-3 hold all gradients from the start.
tight: the total fits, but leaves less than the 1 GB that CUDA itself needs on a GPU.
fits from N: the smallest number of devices on which "fits" says yes, with this micro-batch on each:
a power of two up to 1,024 (HSDP: in each node; N counts all). never: more do not help.
batch: the largest micro-batch whose total fits, tight or not.
AC: activation checkpointing, which --activation_checkpointing turns on."""


def read_model(name):
    """The SIZES of a model in MODELS, or of the BERT whose config.json is given, or its folder."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["model_type"] != "bert":
            raise ValueError(f"its model_type is {config['model_type']!r}")
        return {size: int(config.get(size, MODELS["bert-base"][size])) for size in SIZES}
    except UNREADABLE as problem:
        stop(
            f"--model {name} is not bert-base, bert-large, or a folder with the config.json of a "
            f"BERT: {problem}"
        )


def memory_or_record(text):
    """Bytes from "40GB", "40 GiB" or "16000MB" (GB is 10^9 bytes, GiB 2^30), or a record's path."""
    if text.endswith(".json"):
        return Path(text)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])(i?)B", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 40GB or 80GiB")
    return float(match[1]) * (1024 if match[3] else 1000) ** (" MGT".index(match[2].upper()) + 1)


def explain_run(run):
    """What the formulas say about a record, line by line."""
    work = run["workload"]
    rank = max(run["ranks"], key=lambda rank: (rank["peak_memory_mb"], rank["memory_before_mb"]))
    run = run | {
        "yaml": name_yaml(run["strategy"], run["strategy_options"]),
        "rank": rank,
        "dtype": "no" if work["precision"] == "no" else "bf16",  # fp16 is as large
        "on_cpu": run["device_name"].startswith("CPU"),
    }
    parts, host, activations, saved = held_by_run(run)
    yield (
        "{yaml} on {devices} x {device_name}: {parameters:,} parameters, micro-batch "
        "{per_device_batch_size} x {}, mixed_precision {}".format(
            work["sequence_length"], work["precision"], **run
        )
    )
    peak = rank["peak_memory_mb"]
    if peak:
        yield f"MB that rank {rank['rank']} held at its peak:\n"
    else:
        yield f"The run wrote down no peak. MB that a step on rank {rank['rank']} needs at most:\n"
    for name, size in (parts | {"total": sum(parts.values())}).items():
        yield f"{name.replace('states', 'optimizer states'):24} {size / 1e6:>9,.0f}"
    measured = "The total, and libraries and data," if peak else "Libraries and data"
    yield f"\n{measured} are measured; the rest is by formula."
    if not work.get("layers"):
        yield "There is no formula for this model's activations, so a smaller batch is not listed."
    if host:
        yield f"The host holds another {host / 1e6:,.0f} MB for each device."
    yield "\nTry next, in this order (docs/lab/12-ladder.md); in MB, what each saves at most:\n"
    rungs = rungs_of(run, activations, saved)
    yield from (f"{size / 1e6:>9,.0f}  {text}" for text, size in rungs)
    if not rungs:
        smaller = "model" if work.get("layers") else "batch or model"
        yield f"a smaller {smaller}, or a device with more memory"
    if run["status"] in ("failed", "running"):  # A killed run stays "running".
        yield "\nIf the run died in an evaluation: a smaller --per_device_eval_batch_size."


def parse_args():
    """The command line. Anything wrong with it ends the program with one line."""
    parser = OneLineParser(
        description="Does BERT fit? The memory of each YAML in accelerate_configs/, by formula."
    )
    add = parser.add_argument
    memory = "memory of one device: 40GB (10^9 bytes) or 80GiB (2^30); or a run's run.json"
    add("memory", type=memory_or_record, help=memory)
    model = "bert-base, bert-large, or a folder with the config.json of a BERT"
    add("--model", "--model_name_or_path", default="bert-base", help=model)
    windows = "windows in a micro-batch of each device (default: %(default)s)"
    add("--per_device_train_batch_size", type=int, default=4, help=windows)
    add("--max_seq_length", type=int, default=384, help="tokens in a window (default: %(default)s)")
    add("--num_processes", type=int, default=2, help="devices on all nodes (default: %(default)s)")
    nodes = "nodes: HSDP shards the model inside a node (default: %(default)s)"
    add("--num_machines", type=int, default=1, help=nodes)
    launcher = "as in `accelerate launch` (default: %(default)s)"
    add("--mixed_precision", choices=["no", "bf16"], default="no", help=launcher)
    checkpointing = "keep only the inputs of the layers, and compute the layers again"
    add("--activation_checkpointing", action="store_true", help=checkpointing)
    masks = "above 0, the masks of dropout are kept, too (default: %(default)s)"
    add("--dropout", type=float, default=0.1, help=masks)
    args = parser.parse_args()
    for name in ("per_device_train_batch_size", "max_seq_length", "num_processes", "num_machines"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more, not {getattr(args, name)}")
    if args.num_processes % args.num_machines:
        parser.error(f"--num_machines {args.num_machines} does not divide {args.num_processes}")
    args.sizes = read_model(args.model)
    longest = args.sizes["max_position_embeddings"]
    if args.max_seq_length > longest:
        parser.error(f"--max_seq_length {args.max_seq_length}: the model's limit is {longest}")
    return args


def make_rows(args):
    """The table's rows, as text: the names of the columns, then one row for each YAML."""
    parts = ["parameters", "gradients", "states", "buffers", "activations", "total", "host"]
    fits = ["fits", "fits from N", "batch without AC", "batch with AC"]
    yield ["MB", "params", "grads", *parts[2:], *fits]
    for strategy, known in STRATEGIES.items():
        if known.family == "dp" and args.mixed_precision == "bf16":  # the scripts refuse it
            yield [strategy, *[""] * len(parts), *["-"] * len(fits)]
            continue
        replicas = args.num_machines if known.family == "hsdp" else 1
        held = memory_on(args, strategy, args.num_processes // replicas)
        left = args.memory - held["total"]
        enough = (
            shards * replicas
            for shards in POWERS
            if args.memory - memory_on(args, strategy, shards)["total"] >= CUDA
        )
        rest = args.max_seq_length, args.num_processes // replicas, args.mixed_precision
        batches = (
            largest_batch(args.memory, strategy, args.sizes, *rest, again, args.dropout > 0)
            for again in (False, True)
        )
        yield [
            strategy,
            *(f"{math.ceil(held[name] / 1e6):,}" for name in parts),
            "no" if left < 0 else "tight" if left < CUDA else "yes",
            next(map("{:,}".format, enough), "never"),
            *map(str, batches),
        ]


def memory_on(args, strategy, shards):
    """What `memory_of` says about a step with this many shards and the flags of the command."""
    batch, length = args.per_device_train_batch_size, args.max_seq_length
    rest = args.mixed_precision, args.activation_checkpointing, args.dropout > 0
    return memory_of(strategy, args.sizes, batch, length, shards, *rest)


def main():
    args = parse_args()
    if isinstance(args.memory, Path):
        try:
            lines = list(explain_run(json.loads(args.memory.read_bytes())))
        except UNREADABLE as problem:
            stop(f"{args.memory} is not a run's record ({type(problem).__name__}: {problem})")
        return print("\n".join(lines))
    checkpointing = ", --activation_checkpointing" if args.activation_checkpointing else ""
    print(
        f"{args.model}, {count_parameters(args.sizes)[0]:,} parameters, {args.num_processes} x "
        f"{args.memory / 1e6:,.0f} MB, micro-batch {args.per_device_train_batch_size} x "
        f"{args.max_seq_length} tokens,\nmixed_precision {args.mixed_precision}, dropout "
        f"{args.dropout:g}{checkpointing}\n"
    )
    print(markdown_table(list(make_rows(args)), "right"))
    print(NOTES)
    if args.mixed_precision == "bf16":
        print("dp: the scripts refuse it in bf16.")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fit.py 40GB | head` ends without a traceback.
    main()
