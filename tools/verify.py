"""Does a training script do the same on many devices? If not, what differs first?

    python tools/verify.py my_script.py --its --flags
    python tools/verify.py --batch_flag per_device_train_batch_size=64 train_mnist_rnn.py \\
        --dataset digits
    python tools/verify.py --split --yaml fsdp --yaml my.yaml --ranks 4 --steps 20 my_script.py
    python tools/verify.py --torchrun my_ddp.py --batch_size={64}
    python tools/verify.py --resume="--resume" --kill_after 12 train_mnist_rnn.py \\
        --checkpointing_steps 10 --output_dir runs/v

The unchanged script runs on one process, then on several: an Accelerate script under each YAML, any
other as torchrun starts it (DistributedDataParallel, fully_shard, DeepSpeed, all-reduce by hand).
The tool compares the samples, learning rates, losses, gradients and weights of each step, what is
evaluated, and what is printed after the first step. All runs compute in float64, so a difference
above 1e-9 is a mistake, or meant. Dropout, mixed precision and torch.compile are off, the order of
samples is seeded, and random numbers depend on the sample, not on the rank. The global batch has to
be the same: see --batch_flag and --split. Or put it in braces in any of the script's flags, as in
--batch_size={64} or ds_{64}.json: the ranks divide this number.

With --resume, a strategy is compared with itself instead: an undisturbed run with one that is
killed and resumed. Both run as they are, and a difference above 2e-5 counts.

Results and verify.json go to OUTPUT_DIR/verify/ if you pass --output_dir to the script, otherwise
to runs/verify/. The runs use GPUs if there is one for each rank, otherwise CPU processes: then a
script for torchrun is told that it has GPUs, and "cuda" is the CPU. Each run has a working
directory of its own, with links to the files in yours.
Exit code: 0 if all train the same; 1 if a run differs, fails or prints other numbers; 2 if the tool
cannot tell.
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from common.printing import OneLineParser, markdown_table, one_line, value_of
from common.strategies import ROOT, words_for

# Before torch is imported: the ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Otherwise Hydra hides where a script fails.

import torch  # noqa: E402
import yaml  # noqa: E402

from watching import differences, wording  # noqa: E402
from watching.differences import CannotTellError, NotComparableError  # noqa: E402
from watching.launching import (  # noqa: E402
    import_libraries,
    make_place,
    remove_links,
    run_ranks,
)

BASELINE = ROOT / "accelerate_configs" / "baseline.yaml"
# Around a number that the ranks divide: the whole flag, or after a sign.
BRACES = re.compile(r"(?<![^=_:,./ -])\{([1-9]\d*)\}")
ACCELERATE = re.compile(r"^\s*(?:from|import) accelerate\b", re.MULTILINE)
TORCH = re.compile(
    r"^\s*(?:from|import) (?:torch\.distributed|torch\.nn\.parallel|deepspeed)\b", re.M
)
# In the errors of a script that a machine without a GPU cannot run.
NEEDS_GPU = r"^(?!FileNotFound).*(cuda|nvidia|nccl|triton|flash.?att|fp8|float8|transformer.?engine"
NEEDS_GPU += r"|active drivers|with GPU modules|to be on GPU)"
ROWS = {kind: differences.NAMES[kind] for kind in ("samples", "rate", "loss", "grads", "weights")}


def cannot_tell(problem):
    """End the program with one line, and the exit code for this."""
    print(f"error: {one_line(problem)}", file=sys.stderr)
    sys.exit(2)


def find_yaml(name):
    """The file of a YAML's name or path."""
    file = Path(name if name.endswith((".yaml", ".yml")) else f"accelerate_configs/{name}.yaml")
    places = [place for place in (file, ROOT / file) if place.is_file()]
    if not places:
        raise argparse.ArgumentTypeError(f"there is no {file}")
    try:
        read_yaml(places[0])["distributed_type"]
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as problem:
        raise argparse.ArgumentTypeError(f"{file} is not accelerate's: {problem!r}") from None
    return places[0]


def text_of(script):
    """The text of a script."""
    return script.read_text("utf-8", errors="replace")


def read_yaml(file):
    """The content of a YAML."""
    return yaml.safe_load(file.read_text("utf-8"))


def parse_args():
    """The tool's options, the script and its flags."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = cannot_tell
    add = parser.add_argument
    shown = "a strategy: a file, or a name in accelerate_configs/ (default: ddp)"
    add("--yaml", action="append", type=find_yaml, metavar="YAML", help=shown)
    shown = "start the script as torchrun does, without a YAML (by itself, if it imports neither "
    shown += "accelerate nor a Trainer)"
    add("--torchrun", action="store_true", help=shown)
    add("--ranks", type=int, default=2, help="ranks of each strategy (default: %(default)s)")
    add("--steps", type=int, default=60, help="compare at most N steps (default: %(default)s)")
    shown = "the script's flag for the batch of a device, and the global batch to divide by ranks"
    add("--batch_flag", metavar="NAME=SIZE", default="", help=shown)
    shown = "divide the batch size that the script gives to each DataLoader by the ranks"
    add("--split", action="store_true", help=shown)
    shown = "seed each rank before the script starts, if it seeds nothing itself"
    add("--seed", type=int, metavar="N", help=shown)
    shown = "give all runs the first weights of one process, if each world size draws others"
    add("--same_start", action="store_true", help=shown)
    shown = "the flags that make the script resume: compare a killed and resumed run"
    add("--resume", metavar="FLAGS", help=shown)
    shown = "kill after N steps and a checkpoint (default: two steps after the first one)"
    add("--kill_after", type=int, default=0, metavar="N", help=shown)
    shown = "seconds without progress after which a run counts as hung (default: %(default)s)"
    add("--patience", type=int, default=45, metavar="SECONDS", help=shown)
    add("script", type=Path, metavar="SCRIPT", help="the script")
    add("flags", nargs=argparse.REMAINDER, metavar="...", help="its flags")
    args = parser.parse_args()
    args.batch_name, _, size = args.batch_flag.lstrip("-").partition("=")
    args.batch = int(size) if size.isdecimal() else 0
    if args.ranks < 1 or args.steps < 2:
        parser.error("--ranks must be 1 or more, and --steps 2 or more")
    if args.batch_flag and (not args.batch or args.batch % args.ranks):
        parser.error(f"--batch_flag {args.batch_flag}: SIZE has to be a multiple of {args.ranks}")
    if not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    if args.torchrun and args.yaml:
        parser.error("--torchrun takes no --yaml: the script itself says how it trains")
    args.divided = [args.batch, *map(int, BRACES.findall(" ".join(args.flags)))]
    for number in args.divided:
        if number % args.ranks:
            parser.error(f"{{{number}}}: the number has to be a multiple of {args.ranks}")
    if not (args.torchrun or args.yaml or uses_accelerate(text_of(args.script))):
        args.torchrun = True
        print(f"{args.script.name} does not import accelerate: --torchrun", file=sys.stderr)
    files = args.yaml or [find_yaml("ddp")]
    args.yamls = {"torchrun": None} if args.torchrun else {file.stem: file for file in files}
    if not args.torchrun and len(args.yamls) < len(files):
        parser.error("two YAMLs have the same name")
    args.output_dir = value_of("--output_dir", args.flags)
    args.folder = Path(args.output_dir or "runs") / "verify"
    args.began = time.time()
    return args


def uses_accelerate(text):
    """Whether a script uses Accelerate, itself or by a Trainer that is not its own."""
    if ACCELERATE.search(text):
        return True
    return re.search(r"Trainer\b", text) and ("transformers" in text or not TORCH.search(text))


# -------- running


class RunFailedError(Exception):
    """Ranks failed, or hang. The text says where; `found` is what the rank wrote down that failed
    first. `in_float64` tells that its precision may be the reason.
    """

    def __init__(self, text, found, in_float64=False):
        super().__init__(text)
        self.found, self.in_float64 = found, in_float64


def words_of(args, file, ranks):
    """The words of `accelerate launch`, or for torchrun the number of ranks."""
    if args.torchrun:
        return ranks
    words = [*words_for(file), "--main_process_port", "0", "--num_processes", str(ranks)]
    words += ["--num_machines", "1"]
    return words if args.resume is not None else [*words, "--mixed_precision", "no"]


def flags_of(args, ranks, more, own):
    """The script's flags for this number of ranks. `own` becomes its --output_dir."""
    flags = [BRACES.sub(lambda found: str(int(found[1]) // ranks), word) for word in args.flags]
    flags += more
    if args.batch_name:
        flags += [f"--{args.batch_name}", str(args.batch // ranks)]
    if args.output_dir:  # also as the beginning of a path, as in --resume_from DIR/step_10
        path = rf"(^|=){re.escape(args.output_dir.rstrip('/'))}(?=/|$)"
        flags = [re.sub(path, lambda found: found[1] + own, word) for word in flags]
    elif re.search("""["']--output_dir["']""", text_of(args.script)):
        flags += ["--output_dir", own]
    return flags


def run(args, gpus, label, file, more=(), own=None, exact=False, **options):
    """What each rank found (see tools/watching/rank.py), in a list. Raises RunFailedError."""
    from watching.rank import watch_script  # after main has hidden the GPUs

    print(f"running {label}", file=sys.stderr, flush=True)
    alone = file is not None and read_yaml(file).get("distributed_type") == "NO"
    ranks = 1 if alone else args.ranks
    folder = (args.folder / label).absolute()
    if folder.exists() and not (folder / "0.alive").exists():
        raise CannotTellError(f"{folder} is not from this tool: use another --output_dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "0.alive").touch()
    own = own or folder
    place, script = make_place(own / "files", args.script)
    argv = [str(script), *flags_of(args, ranks, more, str(own / "out"))]
    usual = {"steps": args.steps, "split": args.split, "seed": args.seed, "exact": exact}
    usual |= {"launched": args.torchrun, "began": args.began, "place": str(own / "files")}
    usual |= {"home": str(Path.cwd())}
    if args.same_start and args.resume is None:  # A resumed run starts from its checkpoint.
        usual["start"] = str(args.folder.absolute() / "baseline")
    options = usual | options
    target = functools.partial(watch_script, str(folder), gpus, options)
    try:
        words = words_of(args, file, ranks)
        number, hung = run_ranks(words, argv, place, folder, target, args.patience, gpus)
    except Exception as problem:  # A YAML can be wrong in many ways, each with its own exception.
        how = "torchrun" if args.torchrun else "accelerate launch"
        raise CannotTellError(f"{how} cannot start it: {problem!r}") from None
    finally:
        script.unlink(missing_ok=True)
        remove_links(own / "files")
    found = [read_rank(folder, rank) for rank in range(number)]
    if any(one["killed"] for one in found):  # Other ranks may have lost their connection to it.
        return found
    if hung:
        where = {rank: where_it_is(folder, rank, args.script) for rank in hung}
        lines = [f"rank {rank} {where.get(rank, 'has ended')}" for rank in range(number)]
        raise RunFailedError(f"no progress for {args.patience} s: {', '.join(lines)}", found[0])
    failed = [(f"rank {n}: {one['error']}", one) for n, one in enumerate(found) if one["error"]]
    # Ranks that lost their connection to another one come last.
    failed.sort(key=lambda one: any(word in one[0] for word in ("onnection", "peer", "gloo")))
    if failed:
        text, first = failed[0]
        if "CannotTellError: " in text:
            raise CannotTellError(text.partition("CannotTellError: ")[2])
        if not gpus and re.search(NEEDS_GPU, first["error"].partition(" (")[0], re.IGNORECASE):
            raise CannotTellError(f"it needs a GPU: {text}")
        if "Invariant encountered" in text:
            text += ": name the model's layers in the YAML (fsdp_transformer_layer_cls_to_wrap)"
        raise RunFailedError(text, first, exact and not first["exited"])
    return found


def read_rank(folder, rank):
    """What a rank wrote down, with what it printed."""
    file = folder / f"{rank}.json"
    ended = {"error": "ended", "exited": False, "frames": [], "traceback": None}
    ended |= {"killed": None, "settings": [0, 0]}
    found = json.loads(file.read_text()) if file.exists() else ended
    ends = [folder / f"{rank}.{end}" for end in ("out", "err")]
    texts = [end.read_bytes() if end.exists() else b"" for end in ends]
    # Many scripts log to stderr. What they print before the first step are their settings.
    later = [text[start:] for text, start in zip(texts, found["settings"], strict=True)]
    found["out"] = b"\n".join(later).decode(errors="replace")
    said = texts[1].decode(errors="replace").strip()
    # If argparse or a C++ library ended it, its last line says what is wrong.
    if found["error"] and not found["traceback"] and said:
        found |= {"error": said.splitlines()[-1], "traceback": said}
    return found


def where_it_is(folder, rank, script):
    """The line of the script that the rank's main thread has reached."""
    stack = (folder / f"{rank}.at").read_text().split("Current thread")[-1]
    lines = re.findall(rf'File ".*{re.escape(script.name)}", line (\d+)', stack)
    return f"is in {script.name}:{lines[0]}" if lines else "is in a library"


# -------- what is found


def cells_of(rows, since, largest):
    """{row: cell}: the step of the first difference, or "same" with the largest distance."""
    cells = {}
    for kind, row in rows.items():
        distance = f", {largest[kind]:.0e}" if kind in largest else ""
        cells[row] = f"step {since[kind]}" if kind in since else f"same{distance}"
    return cells


def compare_runs(args, alone, label, many, exact):
    """A column of the table: {"cells": {row: cell}, "lines": [what differs, the cause first],
    "remarks": [more], "verdict"}. `alone` runs one process, once more if something differs.
    """
    base = alone(exact)
    one, other = differences.merge(base), differences.merge(many)
    differences.check_batch(one, other, base[0]["flags"], args.split)
    limit = differences.EXACT if exact else differences.ROUGH
    found, since, largest = differences.compare(one, other, limit)
    lines = wording.tell(found)
    if len(other) != len(one):
        lines.append(f"{len(other)} steps of training instead of {len(one)}")
    cells = cells_of({"first weights": "first weights"} | ROWS, since, largest)
    if "grads" not in largest:  # The optimizer has tensors of its own, or reduces them itself.
        cells["gradients"] = "none"
    printed, numbers = None, 0
    if exact:  # Otherwise a metric jumps where one logit overtakes another.
        printed, numbers = differences.compare_printed(base, base, many, args.divided, args.split)
    if lines or printed:
        again = alone(exact, again=True)
        if exact:
            printed, numbers = differences.compare_printed(
                base, again, many, args.divided, args.split
            )
    drawn = differences.find_remarks(other, many)
    remarks = wording.tell_remarks(found, since, drawn, args.torchrun)
    certain = len(other) != len(one) or not all(difference.uncertain for difference in found)
    evaluated, rows = differences.compare_evaluations(base, many)
    cells["evaluated samples"] = f"same, {rows}" if rows else "none"
    if evaluated:
        # What is gathered does not matter if the same is printed.
        matters = evaluated[1] == "missing" or (exact and (printed or not numbers))
        (lines if matters else remarks).append(wording.tell_evaluation(*evaluated))
        if matters:
            certain, cells["evaluated samples"] = True, f"step {evaluated[0]}"
    cells["printed numbers"] = "differ" if printed else f"same, {numbers}" if numbers else "none"
    verdict = "the same" if not lines else "differs" if certain else "cannot tell"
    if printed:
        verdict = "trains the same, but prints other numbers" if verdict == "the same" else verdict
        lines.append(f"prints {printed[0]!r} instead of {printed[1]!r}")
    return {"cells": cells, "lines": lines, "remarks": remarks, "verdict": verdict}


def compare_resumed(launch, label, file, args):
    """The same of a run that is killed and resumed, compared with an undisturbed one."""
    whole = launch(f"{label}-whole", file, as_is=True)
    own = (args.folder / f"{label}-killed").absolute()
    killed = launch(own.name, file, own=own, as_is=True, kill_after=args.kill_after)
    at = killed[0]["saved_at"]
    if not at or not killed[0]["killed"]:
        how = "torch.save" if args.torchrun else "Accelerator.save_state"
        none = f"did not call {how} in {len(killed[0]['steps'])} steps"
        why = "ended before it was killed" if at else none
        raise CannotTellError(f"the script {why}, so there is nothing to resume")
    more, left = args.resume.split(), args.steps - at
    resumed = launch(f"{label}-resumed", file, more, own, as_is=True, steps=left)
    one, other = differences.merge(whole), differences.merge(resumed)
    # Every bit should be the same, but rounding is allowed.
    found, since, largest = differences.compare(one, other, differences.ROUNDED, at)
    lines = wording.tell(found, resumed=True)
    if not resumed[0]["loaded"]:
        how = "torch.load" if args.torchrun else "Accelerator.load_state"
        lines.insert(0, f"it did not resume: {how} was not called")
    if len(other) != len(one) - at:
        lines.append(f"{len(other)} steps after step {at} instead of {len(one) - at}")
    rows = {kind: f"{row} after the kill" for kind, row in ROWS.items()}
    verdict = "differs" if lines else "the same"
    cells = cells_of(rows, since, largest)
    return {"cells": cells, "lines": lines, "remarks": [], "verdict": verdict}


def verify(args, launch):
    """Run and compare: {YAML: column}, or only {"one process": column} if it fails there. Raises
    NotComparableError.
    """

    @functools.cache
    def alone(exact, again=False):
        label = ("again" if again else "baseline") + ("" if exact else "-own")
        found = launch(label, BASELINE, exact=exact)
        differences.check_trains(found)
        if again:
            differences.check_repeats(alone(exact), found)
        return found

    def compare(label, file, exact):
        if args.resume is not None:
            return compare_resumed(launch, label, file, args)
        many = launch(label if exact else f"{label}-own", file, exact=exact)
        return compare_runs(args, alone, label, many, exact)

    columns, why = {}, None
    if args.resume is None:
        try:
            _, why = in_float64_or_not(alone)
        except RunFailedError as problem:
            if problem.found["exited"]:  # It does not know its flags, or misses a file.
                raise NotComparableError(f"one process ends with {problem}") from None
            column = column_of(problem)
            # A script for GPUs may notice that there is none.
            return {"one process": column | ({"verdict": "cannot tell"} if args.pretends else {})}
    yamls = args.yamls if args.resume is None else {"baseline": BASELINE} | args.yamls
    for label, file in yamls.items():
        run_both = functools.partial(compare, label, file)
        try:
            column, reason = (run_both(False), why) if why else in_float64_or_not(run_both)
            if reason:
                column["remarks"].append(wording.tell_rough(reason))
        except RunFailedError as problem:
            column = column_of(problem)
        except NotComparableError:
            raise
        except CannotTellError as problem:
            column = {"cells": {}, "lines": [str(problem)], "remarks": [], "verdict": "cannot tell"}
        columns[label] = column
    return columns


def in_float64_or_not(run_both):
    """(run_both(True), None); or if that fails in float64, (run_both(False), the error)."""
    try:
        return run_both(True), None
    except RunFailedError as problem:
        if not problem.in_float64:
            raise
        return run_both(False), problem


def column_of(problem):
    """The column for a run that failed."""
    column = {"cells": {}, "lines": [f"fails: {problem}"], "remarks": [], "verdict": "fails"}
    return column | {name: problem.found[name] for name in ("frames", "traceback")}


def main():
    """Verify, print, and write verify.json."""
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # The ranks end, too.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    gpus = torch.cuda.device_count() >= args.ranks
    args.pretends = args.torchrun and not gpus
    if not gpus:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        files = args.script, *(file for file in args.yamls.values() if file)
        text = "\n".join(map(text_of, files))
        if args.torchrun:  # It may import DeepSpeed within a function.
            text = re.sub(r"^\s+", "", text, flags=re.MULTILINE)
        import_libraries(text)  # for the forks
    launch = functools.partial(run, args, gpus)
    try:
        columns = verify(args, launch)
    except CannotTellError as problem:
        cannot_tell(f"{args.script.name}: {problem}")
    print(f"{args.script.name} on {'GPUs' if gpus else 'CPU processes'}")
    how = "off, and the order of samples is seeded" if args.resume is None else "on"
    print(f"Dropout is {how}.\n")
    rows = max((column["cells"] for column in columns.values()), key=len)
    cells = [[row, *(one["cells"].get(row, "-") for one in columns.values())] for row in rows]
    if cells:
        print(markdown_table([["", *columns], *cells]), end="\n\n")
    for label, column in columns.items():
        print(f"{label}: {column['verdict']}")
        for line in [*column["lines"], *(f"remark: {line}" for line in column["remarks"])]:
            print(f"  {line}")
        for frame in column.get("frames", ()):
            print(f"    {frame}")
    file = args.folder / "verify.json"
    file.write_text(json.dumps({"argv": sys.argv[1:], "yamls": columns}, indent=1) + "\n")
    print(f"written: {file}")
    verdicts = {column["verdict"] for column in columns.values()}
    if verdicts - {"the same", "cannot tell"}:
        sys.exit(1)
    sys.exit(2 if "cannot tell" in verdicts else 0)


if __name__ == "__main__":
    main()
