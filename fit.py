"""Does it fit? What a device holds while BERT trains under each YAML, by formula, before any run.
And of a run that did not fit, or of any other: `python fit.py RUN/run.json` says what held how much
on a rank, and what to try next.

    python fit.py 40GB
    python fit.py 80GB --model bert-large --num_processes 8 --mixed_precision bf16
    python fit.py 16GB --per_device_train_batch_size 16 --activation_checkpointing

print one row for every YAML in accelerate_configs/: what lies on each device in a step of
train_bert_squad.py, what lies on the host, and the largest micro-batch that fits. The formulas
are in planning/memory.py. tests/test_fit.py counts what they say, on a CPU.

Left out: the CUDA context and the libraries' workspaces (about 1 GB: what leaves less is "tight"),
what the allocator rounds up, what attention keeps for itself, and what DP needs to add up
gradients. The step is one without accumulation, which keeps whole gradients besides. Under
ZeRO-1 and 2 gradients are those of rank 0 before the update, when it keeps whole tensors.
docs/lab/12-ladder.md has counted totals.
"""

import json
import math
import re
import signal
from pathlib import Path

from common.facts import UNREADABLE
from common.printing import OneLineParser, markdown_table, stop
from common.strategies import STRATEGIES, name_yaml
from planning.memory import (
    SIZES,
    count_parameters,
    largest_batch,
    measured_and_by_formula,
    memory_of,
    next_rungs,
)

CUDA = 1e9  # bytes: its context, and the libraries' workspaces
MODELS = {
    "bert-base": dict(zip(SIZES, (12, 768, 3072, 30522, 512, 2), strict=True)),
    "bert-large": dict(zip(SIZES, (24, 1024, 4096, 30522, 512, 2), strict=True)),
}


def read_model(name, changes=None):
    """The SIZES of a BERT: of a name in MODELS, a config.json, or a folder with one; and with
    `changes` to it, as "key=value,key=value". Raises ValueError.
    """
    model = dict(MODELS[name]) if name in MODELS else read_config(name)
    for change in changes.split(",") if changes else []:
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", change)
        if not match or match[1] not in [*SIZES, "num_attention_heads"]:
            raise ValueError(
                f"--config_overrides {changes}: {change!r} is none of "
                f"{'=N, '.join(SIZES)}=N and num_attention_heads=N"
            )
        model |= {match[1]: int(match[2])} if match[1] in SIZES else {}  # heads change no size
    return model


def read_config(name):
    """The SIZES in a config.json, or in a folder with one. Raises ValueError."""
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config["model_type"] != "bert":
            raise ValueError(f"it is of type {config['model_type']!r}, not 'bert'")
        model = {size: config.get(size, MODELS["bert-base"][size]) for size in SIZES}
        for size, value in model.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{size} is {value!r}")
    except OSError as problem:
        raise ValueError(
            f"cannot read the model {name}: {problem.strerror}; give bert-base, "
            "bert-large, or a folder with a config.json"
        ) from None
    except (ValueError, LookupError, TypeError) as problem:
        raise ValueError(f"{path} is not the config of a BERT: {problem}") from None
    return model


def read_memory(text):
    """Bytes from "40GB", "40 GiB" or "16000MB": GB is 10^9 bytes, GiB 2^30. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])(i?)B", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(f"{text!r} is no memory such as 40GB or 80GiB")
    return float(match[1]) * (1024 if match[3] else 1000) ** (" MGT".index(match[2].upper()) + 1)


def explain_run(run):
    """What the formulas say of a record, as lines. Raises an error of UNREADABLE if it is none."""
    work = run["workload"]
    rank = max(run["ranks"], key=lambda rank: (rank["peak_memory_mb"], rank["memory_before_mb"]))
    run = run | {
        "yaml": name_yaml(run["strategy"], run["strategy_options"]),
        "rank": rank,
        "dtype": "no" if work["precision"] == "no" else "bf16",  # fp16 is as large
        "on_cpu": run["device_name"].startswith("CPU"),
    }
    if run["yaml"] not in STRATEGIES:
        stop(f"no YAML of accelerate_configs/ is the strategy of this run, {run['yaml']}")
    parts, host, activations, saved = measured_and_by_formula(run)
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
        if run.get("resumed_from"):
            yield "A run measures its peak before its first evaluation, and --resume forgets it. To"
            yield "measure it, start a short run: a new --output_dir, and --max_train_steps 10.\n"
        yield f"The run wrote down no peak. MB that a step on rank {rank['rank']} needs at most:\n"
    for name, size in (parts | {"total": sum(parts.values())}).items():
        yield f"{name.replace('states', 'optimizer states'):24} {size / 1e6:>9,.0f}"
    measured = "The total, and libraries and data," if peak else "Libraries and data"
    yield f"\n{measured} are measured; the rest is by formula."
    if not work.get("layers"):
        yield "What a smaller batch saves is not known: the formulas know BERT's activations only."
    if host:
        yield f"Besides, the host holds {host / 1e6:,.0f} MB for each device."
    yield "\nTry next, in this order (docs/lab/12-ladder.md); in MB, what each saves at most:\n"
    rungs = next_rungs(run, activations, saved)
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
    add("memory", help="of one device, as 40GB (10^9 bytes) or 80GiB (2^30); or a run's run.json")
    model = "bert-base, bert-large, or a folder with the config.json of a BERT"
    add("--model", "--model_name_or_path", default="bert-base", help=model)
    changes = "change the model's config: hidden_size=768,num_hidden_layers=6"
    add("--config_overrides", metavar="KEY=VALUE,...", help=changes)
    windows = "windows in a micro-batch of each device (default: %(default)s)"
    add("--per_device_train_batch_size", type=int, default=4, help=windows)
    add("--max_seq_length", type=int, default=384, help="tokens in a window (default: %(default)s)")
    add("--num_processes", type=int, default=2, help="devices on all nodes (default: %(default)s)")
    nodes = "nodes: HSDP divides a model within one (default: %(default)s)"
    add("--num_machines", type=int, default=1, help=nodes)
    launcher = "as in `accelerate launch` (default: %(default)s)"
    add("--mixed_precision", choices=["no", "bf16"], default="no", help=launcher)
    checkpointing = "compute the layers again in the backward pass, and keep only their inputs"
    add("--activation_checkpointing", action="store_true", help=checkpointing)
    masks = "more than 0: masks are kept (default: %(default)s)"
    add("--dropout", type=float, default=0.1, help=masks)
    args = parser.parse_args()
    for name in ("per_device_train_batch_size", "max_seq_length", "num_processes", "num_machines"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} has to be 1 or more, got {getattr(args, name)}")
    if args.num_processes % args.num_machines:
        parser.error(f"--num_machines {args.num_machines} does not divide {args.num_processes}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout has to be at least 0 and below 1, got {args.dropout}")
    if args.memory.endswith(".json") or Path(args.memory).is_file():
        return args
    try:
        args.memory = read_memory(args.memory)
        args.sizes = read_model(args.model, args.config_overrides)
        longest = args.sizes["max_position_embeddings"]
        if args.max_seq_length > longest:
            raise ValueError(
                f"--max_seq_length is {args.max_seq_length}, the model's longest input {longest}"
            )
    except ValueError as problem:
        stop(problem)
    return args


def make_rows(args):
    """The table's rows, as text: the names of the columns, then one row for each YAML."""
    parts = ["parameters", "gradients", "states", "buffers", "activations", "total", "host"]
    yield ["MB", "params", "grads", *parts[2:], "fits", "batch without AC", "batch with AC"]
    for strategy, known in STRATEGIES.items():
        if known.family == "dp" and args.mixed_precision == "bf16":  # the scripts refuse it
            yield [strategy, *[""] * len(parts), "-", "-", "-"]
            continue
        shards = args.num_processes // (args.num_machines if known.family == "hsdp" else 1)
        rest = args.max_seq_length, shards, args.mixed_precision
        held = memory_of(
            strategy,
            args.sizes,
            args.per_device_train_batch_size,
            *rest,
            args.activation_checkpointing,
            args.dropout > 0,
        )
        left = args.memory - held["total"]
        batches = [
            largest_batch(args.memory, strategy, args.sizes, *rest, checkpointing, args.dropout > 0)
            for checkpointing in (False, True)
        ]
        yield [
            strategy,
            *(f"{math.ceil(held[name] / 1e6):,}" for name in parts),
            "no" if left < 0 else "tight" if left < CUDA else "yes",
            *map(str, batches),
        ]


def main():
    args = parse_args()
    if isinstance(args.memory, str):  # a record's path
        try:
            lines = list(explain_run(json.loads(Path(args.memory).read_bytes())))
        except UNREADABLE as problem:
            stop(f"{args.memory} is no record of a run ({type(problem).__name__}: {problem})")
        return print("\n".join(lines))
    checkpointing = ", --activation_checkpointing" if args.activation_checkpointing else ""
    print(
        f"{args.model}, {count_parameters(args.sizes)[0]:,} parameters, {args.num_processes} x "
        f"{args.memory / 1e6:,.0f} MB, micro-batch {args.per_device_train_batch_size} x "
        f"{args.max_seq_length} tokens,\nmixed_precision {args.mixed_precision}, dropout "
        f"{args.dropout:g}{checkpointing}\n"
    )
    print(markdown_table(list(make_rows(args)), "right"))
    print(
        "\nMB: 10^6 bytes on each device; host: in the CPU's memory, for each device. Each part "
        "is at its\nlargest. total: the peak of a step. The backward pass frees activations "
        "while it makes gradients,\nso the total is less than the sum of the parts. DDP and "
        "ZeRO-3 hold all gradients from the start.\ntight: the total fits, but leaves less than "
        "the 1 GB that CUDA itself needs on a GPU.\nbatch: the largest micro-batch whose total "
        "fits, tight or not.\nAC: activation checkpointing, which --activation_checkpointing turns "
        "on."
    )
    if args.mixed_precision == "bf16":
        print("dp: the scripts refuse it in bf16.")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fit.py 40GB | head` ends without a traceback.
    main()
