"""Does an Accelerate script train the same on many devices? If not, what differs first?

    python verify.py my_script.py --its --flags
    python verify.py --yaml ddp --yaml my.yaml --ranks 4 --steps 20 my_script.py
    python verify.py --batch_flag per_device_train_batch_size=64 train_mnist_rnn.py --dataset digits
    python verify.py --split my_script.py
    python verify.py --resume="--resume" --kill_after 12 train_mnist_rnn.py \\
        --checkpointing_steps 10 --output_dir runs/v

The unchanged script runs on one process, once more on one with first weights changed by a rounding
error (the control), and under each YAML on several. The tool compares the samples, learning rates,
losses, gradients and weights of each step, what is evaluated, and what is printed. A difference
counts if it is 30 times the control's, and more than 2e-5. The global batch has to be the same: see
--batch_flag and --split. Dropout is off, and the order of samples has a seed.

With --resume each YAML is compared with itself instead: a run that nothing disturbs, and one that
is killed and resumed. Dropout is on, and a difference above 2e-5 counts.

Results and verify.json go to OUTPUT_DIR/verify/ if you pass --output_dir to the script, else to
runs/verify/. The runs use GPUs if there is one for each rank, else CPU processes.
Exit code: 0 the same; 1 a run differs, fails or prints other numbers; else 2, it cannot tell.
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from common.printing import OneLineParser, markdown_table, one_line

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch comes: the ranks share the cores.

import yaml  # noqa: E402

from planning import comparing, wording  # noqa: E402
from planning.comparing import CannotTellError  # noqa: E402
from planning.forking import run_ranks  # noqa: E402

ROOT = Path(__file__).resolve().parent
BASELINE = ROOT / "accelerate_configs" / "baseline.yaml"
STRATEGIES = ["ddp", "fsdp", "zero2", "zero3"]
ROWS = {"first": "first weights", "samples": "samples", "rate": "learning rate"}
ROWS |= {"loss": "loss", "grads": "gradients"}
RESUMED = {"samples": "samples", "rate": "learning rate", "loss": "loss", "grads": "gradients"}
RESUMED |= {"weights": "weights"}


class Parser(OneLineParser):
    """Its errors end with the code that says: it could not tell."""

    def error(self, message):
        """Called by argparse."""
        cannot_tell(f"{message} (--help lists the options)")


def cannot_tell(problem):
    """End the program with one line."""
    print(f"error: {one_line(problem)}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    """The tool's options, the script and its flags."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    shown = f"a file, or a name in accelerate_configs/ (default: {' '.join(STRATEGIES)})"
    add("--yaml", action="append", metavar="YAML", help=f"a strategy: {shown}")
    add("--ranks", type=int, default=2, help="ranks of each strategy (default: %(default)s)")
    add(
        "--steps", type=int, default=60, help="compare at most so many steps (default: %(default)s)"
    )
    shown = (
        "the script's flag for the batch of a device, and the global batch, which the ranks divide"
    )
    add("--batch_flag", metavar="NAME=SIZE", default="", help=shown)
    shown = "the batch size is fixed in the script: let Accelerate divide it (split_batches)"
    add("--split", action="store_true", help=shown)
    shown = "the flags that make the script resume: compare a killed and resumed run"
    add("--resume", metavar="FLAGS", help=shown)
    shown = "kill after N steps and a checkpoint (default: two steps after the first one)"
    add("--kill_after", type=int, default=0, metavar="N", help=shown)
    shown = "a run counts as hung after so many seconds without progress (default: %(default)s)"
    add("--patience", type=int, default=45, metavar="SECONDS", help=shown)
    add("script", type=Path, metavar="SCRIPT", help="the script")
    add("flags", nargs=argparse.REMAINDER, metavar="...", help="its flags")
    args = parser.parse_args()
    args.batch_name, _, size = args.batch_flag.lstrip("-").partition("=")
    args.batch = int(size) if size.isdecimal() else 0
    if args.ranks < 1 or args.steps < 2:
        parser.error("--ranks has to be 1 or more, and --steps 2 or more")
    if args.batch_flag and (not args.batch or args.batch % args.ranks):
        parser.error(f"--batch_flag {args.batch_flag}: SIZE has to be a multiple of {args.ranks}")
    if not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    files = [find_yaml(parser, name) for name in args.yaml or STRATEGIES]
    precisions = {str(read_yaml(file).get("mixed_precision") or "no") for file in files}
    if len(precisions) > 1:  # The baseline has that of the YAMLs.
        parser.error(
            f"the YAMLs have other precisions ({', '.join(precisions)}): verify each alone"
        )
    args.yamls, [args.precision] = {file.stem: file for file in files}, precisions
    if len(args.yamls) < len(files) or "control" in args.yamls:
        parser.error("the YAMLs need names of their own")
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--output_dir")
    args.output_dir = own.parse_known_args(args.flags)[0].output_dir
    args.folder = Path(args.output_dir or "runs") / "verify"
    return args


def find_yaml(parser, name):
    """The file of a name or path."""
    file = Path(name if name.endswith((".yaml", ".yml")) else f"accelerate_configs/{name}.yaml")
    places = [place for place in (file, ROOT / file) if place.is_file()]
    if not places:
        parser.error(f"there is no {file}")
    try:
        read_yaml(places[0])["distributed_type"]
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as problem:
        parser.error(f"{file} is no YAML of accelerate launch: {problem!r}")
    return places[0]


def read_yaml(file):
    """What a YAML says."""
    return yaml.safe_load(file.read_text("utf-8"))


# -------- running


class RunFailedError(Exception):
    """Ranks failed, or hang. The text says where; `trace` is the rank's traceback, or empty."""

    def __init__(self, problem, trace=""):
        super().__init__(problem)
        self.trace = trace


def import_libraries(ranks):
    """Import what all ranks need. Returns whether they have a GPU each."""
    import torch

    gpus = torch.cuda.device_count() >= ranks
    if not gpus:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        import planning.libraries  # noqa: F401
    return gpus


def words_of(args, file, ranks, more, own):
    """The words of `accelerate launch`, and the script and its flags; `own` is its folder."""
    words = ["--config_file", str(file), "--main_process_port", "0", "--num_processes", str(ranks)]
    words += ["--num_machines", "1", "--mixed_precision", args.precision]
    deepspeed = (read_yaml(file).get("deepspeed_config") or {}).get("deepspeed_config_file")
    if deepspeed and not Path(deepspeed).is_file() and (ROOT / deepspeed).is_file():
        words += ["--deepspeed_config_file", str(ROOT / deepspeed)]
    flags = [*args.flags, *more]
    if args.batch_name:
        flags += [f"--{args.batch_name}", str(args.batch // ranks)]
    if args.output_dir:
        path = rf"(^|=){re.escape(args.output_dir.rstrip('/'))}(?=/|$)"
        flags = [re.sub(path, lambda found: found[1] + own, word) for word in flags]
    elif re.search("""["']--output_dir["']""", args.script.read_text("utf-8")):
        flags += ["--output_dir", own]
    return words, [str(args.script), *flags]


def run(args, gpus, label, file, more=(), own=None, **options):
    """What each rank found (see planning/watching.py), in a list. Raises RunFailedError."""
    from planning.watching import watch_script

    print(f"running {label}", file=sys.stderr, flush=True)
    ranks = 1 if read_yaml(file)["distributed_type"] == "NO" else args.ranks
    folder = args.folder / label
    if folder.exists() and not (folder / "0.alive").exists():
        raise CannotTellError(f"{folder} is not of this tool: name another --output_dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words, argv = words_of(args, file, ranks, more, own or str(folder / "out"))
    options = {"steps": args.steps, "split": args.split} | options
    target = functools.partial(watch_script, str(folder), gpus, options)
    try:
        number, hung = run_ranks(words, argv, folder, target, args.patience, gpus)
    except Exception as problem:  # A YAML can be wrong in many ways, each with its own kind.
        raise CannotTellError(f"accelerate launch cannot start it: {problem!r}") from None
    found = [read_rank(folder, rank) for rank in range(number)]
    if hung:
        where = {rank: where_it_is(folder, rank, args.script) for rank in hung}
        lines = [f"rank {rank} {where.get(rank, 'has ended')}" for rank in range(number)]
        raise RunFailedError(f"nothing goes on for {args.patience} s: {', '.join(lines)}")
    failed = [(f"rank {n}: {one['error']}", one) for n, one in enumerate(found) if one["error"]]
    # A rank that lost another one comes last.
    failed.sort(key=lambda one: any(word in one[0] for word in ("onnection", "peer", "gloo")))
    if failed:
        raise RunFailedError(failed[0][0], failed[0][1]["traceback"])
    counted = found[0]["processes"]
    if counted is None:
        raise CannotTellError("it has no model that Accelerator.prepare returned")
    if counted != number:
        alone = f"its Accelerator counts {counted} process, and {number} were started"
        raise RunFailedError(f"{alone}: each trains alone")
    return found


def read_rank(folder, rank):
    """What a rank wrote down, with what it printed."""
    file = folder / f"{rank}.json"
    found = json.loads(file.read_text()) if file.exists() else {"error": "ended", "traceback": ""}
    ends = [folder / f"{rank}.{end}" for end in ("out", "err")]
    out, said = (end.read_text(errors="replace").strip() if end.exists() else "" for end in ends)
    found["out"] = f"{out}\n{said}"  # Many scripts log to stderr.
    # Where a library in C++ ended it, or argparse, its last line says what is wrong.
    if found["error"] and not found["traceback"] and said:
        found |= {"error": said.splitlines()[-1], "traceback": said}
    return found


def where_it_is(folder, rank, script):
    """The line of the script in which the rank's main thread is."""
    stack = (folder / f"{rank}.at").read_text().split("Current thread")[-1]
    lines = re.findall(rf'File ".*{re.escape(script.name)}", line (\d+)', stack)
    return f"is in {script.name}:{lines[0]}" if lines else "is in a library"


# -------- what is found


def compare_runs(base, control, many, batch):
    """A column of the table: {"cells": {row: cell}, "lines": [what differs, the cause first],
    "verdict"}.
    """
    one, other = comparing.merge(base), comparing.merge(many)
    comparing.check_batch(one, other)
    precision = base[0]["precision"]
    limits = comparing.limits_of(one, comparing.merge(control), precision)
    found, first, worst = comparing.compare(one, other, limits, comparing.least_of(precision))
    lines = wording.tell(found)
    if len(other) != len(one):
        why = "is the loader prepared" if len(other) > len(one) else "is the data divided twice"
        lines.append(f"{len(other)} steps of training instead of {len(one)}: {why}?")
    cells = cells_of(ROWS, first, worst)
    apart, alike = comparing.compare_last(base, control, many)
    cells["weights after the last step"] = f"{'same, ' if alike else 'differ, '}{apart:.0e}"
    printed, numbers = None, 0
    if precision == "no":  # In bf16 a metric jumps where a logit passes another.
        printed, numbers = comparing.compare_printed(base, control, many, batch)
    evaluated, rows = comparing.compare_evaluations(base, many, numbers and not printed)
    cells["evaluated samples"] = f"same, {rows}" if rows else "none"
    if evaluated:
        cells["evaluated samples"] = f"step {evaluated[0]}"
        lines.append(wording.tell_evaluation(*evaluated))
    cells["printed numbers"] = "differ" if printed else f"same, {numbers}" if numbers else "none"
    verdict = "cannot tell" if wording.hidden(found) else "differs" if lines else "the same"
    if printed:
        verdict = "trains the same, and prints other numbers" if verdict == "the same" else verdict
        lines.append(f"prints {printed[0]!r} instead of {printed[1]!r}")
    lines += wording.note_seeds(comparing.first_apart(many))
    return {"cells": cells, "lines": lines, "verdict": verdict}


def cells_of(rows, first, worst):
    """{row: cell}: the step of the first difference, or `same` with the largest one."""
    largest = {kind: f", {worst[kind]:.0e}" if kind in worst else "" for kind in rows}
    return {
        row: f"step {first[kind]}" if kind in first else f"same{largest[kind]}"
        for kind, row in rows.items()
    }


def compare_resumed(launch, label, file, args):
    """The same of a run that is killed and resumes, beside one that nothing disturbs."""
    whole = launch(f"{label}-whole", file, as_is=True)
    out = str(args.folder / f"{label}-killed" / "out")
    killed = launch(f"{label}-killed", file, own=out, as_is=True, kill_after=args.kill_after)
    at = killed[0]["saved_at"]
    if not at or not killed[0]["killed"]:
        none = f"called Accelerator.save_state in none of {len(killed[0]['steps'])} steps"
        why = "ended before it was killed" if at else none
        raise CannotTellError(f"the script {why}, so there is nothing to resume")
    more, left = args.resume.split(), args.steps - at
    resumed = launch(f"{label}-resumed", file, more, out, as_is=True, steps=left)
    one, other = comparing.merge(whole), comparing.merge(resumed)
    limits = [{}] * len(other)  # bits are expected, and rounding is allowed
    found, first, worst = comparing.compare(one, other, limits, comparing.LEAST["no"], at)
    lines = wording.tell(found, resumed=True)
    if not resumed[0]["loaded"]:
        lines.insert(0, "it did not resume: Accelerator.load_state was not called")
    if len(other) != len(one) - at:
        lines.append(f"{len(other)} steps after step {at} instead of {len(one) - at}")
    cells = cells_of({kind: f"{row} after the kill" for kind, row in RESUMED.items()}, first, worst)
    return {"cells": cells, "lines": lines, "verdict": "differs" if lines else "the same"}


def verify(args, launch):
    """Run and compare: {YAML: column}. Raises RunFailedError or CannotTellError if one process says
    nothing.
    """
    columns, yamls = {}, args.yamls
    if args.resume is None:
        base = launch("baseline", BASELINE)
        control = launch("control", BASELINE, moved=True)
        comparing.check_repeats(base, control)
    else:
        yamls = {"baseline": BASELINE} | yamls
    for label, file in yamls.items():
        failed = {"cells": {}, "trace": ""}
        try:
            if args.resume is None:
                columns[label] = compare_runs(base, control, launch(label, file), args.batch)
            else:
                columns[label] = compare_resumed(launch, label, file, args)
        except RunFailedError as problem:
            failed |= {"lines": [f"fails: {problem}"], "trace": problem.trace or ""}
            columns[label] = failed | {"verdict": "differs"}
        except CannotTellError as problem:
            columns[label] = failed | {"lines": [str(problem)], "verdict": "cannot tell"}
    return columns


def main():
    """Verify, print, and write verify.json."""
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # The ranks end, too.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    gpus = import_libraries(args.ranks)
    launch = functools.partial(run, args, gpus)
    try:
        columns = verify(args, launch)
    except (RunFailedError, CannotTellError) as problem:
        print(getattr(problem, "trace", ""), file=sys.stderr)
        cannot_tell(f"{args.script.name} on one process: {problem}")
    where = f"{'GPUs' if gpus else 'CPU processes'}, mixed_precision: {args.precision}"
    print(f"{args.script.name} on {where}")
    off = "off, and the order of samples is seeded"
    print(f"Dropout is {off if args.resume is None else 'on'}.\n")
    rows = max((column["cells"] for column in columns.values()), key=len)
    cells = [[row, *(one["cells"].get(row, "-") for one in columns.values())] for row in rows]
    print(markdown_table([["", *columns], *cells]), end="\n\n")
    for label, column in columns.items():
        print(f"{label}: {column['verdict']}")
        print("".join(f"  {line}\n" for line in column["lines"]) + column.get("trace", ""), end="")
    file = args.folder / "verify.json"
    file.write_text(json.dumps({"argv": sys.argv[1:], "yamls": columns}, indent=1) + "\n")
    print(f"written: {file}")
    verdicts = {column["verdict"] for column in columns.values()}
    sys.exit(1 if verdicts - {"the same", "cannot tell"} else 2 * ("cannot tell" in verdicts))


if __name__ == "__main__":
    main()
