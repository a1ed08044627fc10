"""Does an Accelerate script train the same on many devices? If not, what differs first?

    python verify.py my_script.py --its --flags
    python verify.py --yaml ddp --yaml my.yaml --ranks 4 --steps 20 my_script.py
    python verify.py --batch_flag per_device_train_batch_size=64 train_mnist_rnn.py --dataset digits
    python verify.py --split my_script.py
    python verify.py --resume="--resume" --kill_after 12 train_mnist_rnn.py \\
        --checkpointing_steps 10 --output_dir runs/v

The unchanged script runs on one process, once more on one with first weights that differ by as much
as rounding (the control), and under each YAML on several. The tool compares the samples, learning
rates, losses, gradients and weights of each step, what is evaluated, and what is printed. A
difference counts if it is 30 times the control's. The global batch has to be the same: see
--batch_flag and --split. Dropout is off, and the order of samples has a seed.

With --resume each YAML is compared with itself instead: a run that nothing disturbs, and one that
is killed and goes on. Dropout is on.

The runs have the folders OUTPUT_DIR/verify/..., if the script has --output_dir (default: runs), and
verify.json is there, too. They use GPUs if there are as many as ranks, else CPU processes.
Exit code: 0 the same, 1 something differs, 2 it could not tell.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import yaml

from common.printing import OneLineParser, markdown_table, one_line

ROOT = Path(__file__).resolve().parent
GRACE = 5  # seconds that the others get when a rank has failed
STRATEGIES = ["ddp", "fsdp", "zero2", "zero3"]
COMPARED = {"weights": "first weights", "samples": "samples", "rate": "learning rate"}
COMPARED |= {"loss": "loss", "grads": "gradients"}


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
    add("--steps", type=int, default=60, help="training steps at most (default: %(default)s)")
    shown = "the script's flag for the batch of a device, and the global batch; the ranks divide it"
    add("--batch_flag", metavar="NAME=SIZE", default="", help=shown)
    shown = "divide the batch that is written into the script, by Accelerate's split_batches"
    add("--split", action="store_true", help=shown)
    shown = "with these flags the script resumes: compare a run that is killed, and goes on"
    add("--resume", metavar="FLAGS", help=shown)
    shown = "kill after N steps (default: two after the first checkpoint)"
    add("--kill_after", type=int, default=0, metavar="N", help=shown)
    shown = "a run hangs if no rank does anything for so many seconds (default: %(default)s)"
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
    args.yamls = {}
    for name in args.yaml or STRATEGIES:
        file = Path(name if name.endswith((".yaml", ".yml")) else f"accelerate_configs/{name}.yaml")
        places = [place for place in (file, ROOT / file) if place.is_file()]
        args.yamls[file.stem] = places[0] if places else parser.error(f"there is no {file}")
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--output_dir")
    args.output_dir = own.parse_known_args(args.flags)[0].output_dir
    args.folder = Path(args.output_dir or "runs") / "verify"
    return args


# -------- running


class RunFailedError(Exception):
    """Ranks failed, or hang. The text says where; `trace` is the rank's traceback, or empty."""

    def __init__(self, problem, trace=""):
        super().__init__(problem)
        self.trace = trace


def import_libraries(ranks):
    """Import what all ranks need. Returns whether they have a GPU each."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # The ranks share the cores.
    import torch

    gpus = torch.cuda.device_count() >= ranks
    if not gpus:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        import planning.libraries  # noqa: F401
    return gpus


def words_of(args, path, ranks, more, own):
    """The words of `accelerate launch`, and the script and its flags; `own` is its folder."""
    words = ["--config_file", str(path), "--main_process_port", "0", "--num_processes", str(ranks)]
    config = yaml.safe_load(path.read_text("utf-8")) or {}
    file = config.get("deepspeed_config", {}).get("deepspeed_config_file")
    if file and not Path(file).is_file() and (ROOT / file).is_file():
        words += ["--deepspeed_config_file", str(ROOT / file)]
    argv = [str(args.script), *args.flags, *more]
    if args.batch_name:
        argv += [f"--{args.batch_name}", str(args.batch // ranks)]
    if args.output_dir:
        argv = [word.replace(args.output_dir, own) for word in argv]
    elif "--output_dir" in args.script.read_text("utf-8"):
        argv += ["--output_dir", own]
    return words, argv


def run(args, gpus, label, path, ranks, more=(), own=None, **options):
    """What each rank found (see planning/watching.py), in a list. Raises RunFailedError."""
    from planning.forking import become, make_worlds, what_the_launcher_starts
    from planning.watching import watch_script

    folder = args.folder / label
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words, argv = words_of(args, path, ranks, more, own or str(folder / "out"))
    try:
        number, env = what_the_launcher_starts([*words, *argv], dict(os.environ))
    except Exception as problem:  # A YAML can be wrong in many ways, each with its own kind.
        raise RunFailedError(f"accelerate launch cannot start it: {problem!r}") from None
    worlds, _store = make_worlds(number)
    options = {"steps": args.steps, "split": args.split} | options
    watched = functools.partial(watch_script, str(folder), gpus, options)
    # A process that has imported a GPU's libraries cannot be forked.
    context = multiprocessing.get_context("spawn" if gpus else "fork")
    processes = []
    for rank, world in enumerate(worlds):
        ends = str(folder / f"{rank}.out"), str(folder / f"{rank}.err")
        what = (env | world, os.getcwd(), argv, *ends, watched)
        processes.append(context.Process(target=become, args=what))
        processes[-1].start()
    hung = wait_for(processes, folder, args.patience, gpus)
    for rank in hung:
        os.kill(processes[rank].pid, signal.SIGUSR2)  # It writes down where it is.
    time.sleep(0.5 * bool(hung))
    for process in processes:
        process.kill()
        process.join()
    found = [read_rank(folder, rank) for rank in range(len(worlds))]
    check_ranks(found, {rank: where_it_is(folder, rank, args.script) for rank in hung}, args)
    return found


def wait_for(processes, folder, patience, gpus):
    """Wait until all end. Returns the ranks that hang: those that run when nothing goes on."""
    before, since, failed = None, time.monotonic(), None
    while running := [rank for rank, process in enumerate(processes) if process.is_alive()]:
        wait([processes[rank].sentinel for rank in running], timeout=0.5)
        now = time.monotonic()
        if any(process.exitcode for process in processes):
            failed = failed or now
            if now - failed > GRACE:
                return []
        life = [file.stat().st_mtime_ns for file in folder.glob("*.alive")]
        for rank in [] if gpus else running:  # On a GPU a rank that waits computes.
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(processes[rank].pid).cpu_times()
                life.append((used.user + used.system) // 2)
        if life != before:
            before, since = life, now
        elif now - since > patience:
            return running
    return []


def read_rank(folder, rank):
    """What a rank wrote down, with what it printed."""
    file = folder / f"{rank}.json"
    found = json.loads(file.read_text()) if file.exists() else {"error": "ended", "traceback": ""}
    found["out"], said = (
        (folder / f"{rank}.{end}").read_text(errors="replace").strip() for end in ("out", "err")
    )
    # Where a library in C++ ended it, or argparse, its last line says what is wrong.
    if found["error"] and not found["traceback"] and said:
        found |= {"error": said.splitlines()[-1], "traceback": said}
    return found


def where_it_is(folder, rank, script):
    """The line of the script in which the rank's main thread is."""
    stack = (folder / f"{rank}.at").read_text().split("Current thread")[-1]
    lines = re.findall(rf'File ".*{re.escape(script.name)}", line (\d+)', stack)
    return f"{script.name}:{lines[0]}" if lines else "a library"


def check_ranks(found, hung, args):
    """Raises RunFailedError if ranks failed, hang ({rank: where}), or train each for itself."""
    if hung:
        lines = [f"rank {n} {hung.get(n) or 'has ended'}" for n in range(len(found))]
        raise RunFailedError(f"nothing goes on for {args.patience} s: {', '.join(lines)}")
    failed = [(f"rank {n}: {one['error']}", one) for n, one in enumerate(found) if one["error"]]
    # A rank that lost another one comes last.
    failed.sort(key=lambda one: any(word in one[0] for word in ("onnection", "peer", "gloo")))
    if failed:
        raise RunFailedError(failed[0][0], failed[0][1]["traceback"])
    counted = found[0]["processes"]
    if counted not in (None, len(found)):
        alone = f"its Accelerator counts {counted} process, and {len(found)} were started"
        raise RunFailedError(f"{alone}: each trains alone")


# -------- what is found


def compare_runs(base, control, many, ranks):
    """A column of the table, {row: cell}, and lines, of which the first tells the cause."""
    from planning import comparing, wording

    one, other = comparing.merge(base), comparing.merge(many)
    limits = comparing.limits_of(one, comparing.merge(control))
    found, first, worst = comparing.compare(one, other, limits)
    lines = wording.tell(found, ranks, base[0]["norms"])
    if found and wording.draws(found[0]):
        lines[0] = f"cannot tell: {lines[0]}"
    if len(other) != len(one):
        more = len(other) > len(one)
        why = "is the loader prepared?" if more else "is the data divided twice?"
        lines.append(f"{len(other)} steps of training instead of {len(one)}: {why}")
    cells = cells_of(first, worst)
    twin, last = (comparing.weights_apart(base[0]["last"], run[0]["last"]) for run in (control, many))
    apart, allowed = max(last.values(), default=0), comparing.TIMES * max(twin.values(), default=0)
    alike = apart <= max(comparing.LEAST, allowed)
    cells["weights after the last step"] = f"same, {apart:.0e}" if alike else f"{apart:.0e} apart"
    printed, numbers = comparing.compare_printed(base[0], control[0], many[0])
    evaluated, rows = comparing.compare_evaluations(base, many, numbers and not printed)
    cells["evaluated samples"] = f"same, {rows}" if rows else "none"
    if evaluated:
        cells["evaluated samples"] = f"step {evaluated[0]}"
        lines.append(wording.tell_evaluation(*evaluated))
    cells["printed numbers"] = f"same, {numbers}" if numbers else "none"
    if printed:
        cells["printed numbers"] = "differ"
        lines.append(f"prints {printed[0]!r} instead of {printed[1]!r}")
    return cells, lines


def cells_of(first, worst):
    """{row: cell}: the step of the first difference, or `same` with the largest one."""
    numbers = {kind: f", {worst[kind]:.0e}" for kind in COMPARED if kind in worst}
    return {
        row: f"step {first[kind]}" if kind in first else f"same{numbers.get(kind, '')}"
        for kind, row in COMPARED.items()
    }


def compare_resumed(launch, label, path, ranks, args):
    """The same of a run that was killed and resumed, beside one that nothing disturbed."""
    from planning import comparing, wording

    out = str(args.folder / f"{label}-killed" / "out")
    whole = launch(f"{label}-whole", path, ranks, as_is=True)
    kill = {"as_is": True, "kill_after": args.kill_after}
    killed = launch(f"{label}-killed", path, ranks, own=out, **kill)
    at = killed[0].get("saved_at")
    if not at or not killed[0]["killed"]:
        why = "ended before it was killed" if at else "called Accelerator.save_state in no step"
        raise comparing.CannotTellError(f"the script {why}, so there is nothing to resume")
    more = args.resume.split()
    left = args.steps - at
    resumed = launch(f"{label}-resumed", path, ranks, more, out, as_is=True, steps=left)
    one, other = comparing.merge(whole), comparing.merge(resumed)
    limits = [dict.fromkeys(comparing.KINDS, comparing.LEAST)] * max(len(one) - at, 0)
    found, first, worst = comparing.compare(one, other, limits)
    lines = wording.tell(found, ranks, [], resumed=True)
    if not resumed[0]["loaded"]:
        lines.insert(0, "it did not resume: Accelerator.load_state was not called")
    if len(other) != len(one) - at:
        lines.append(f"{len(other)} steps after step {at} instead of {len(one) - at}")
    cells = {f"{row} after the kill": cell for row, cell in cells_of(first, worst).items()}
    cells["weights after the kill"] = cells.pop("first weights after the kill")
    return cells, lines


def verify(args, gpus):
    """Run and compare. Yields the column of each YAML, and what is said of it. Raises
    RunFailedError or CannotTellError if one process says nothing.
    """
    from planning.comparing import CannotTellError, check_repeats

    baseline = ROOT / "accelerate_configs" / "baseline.yaml"

    def launch(*words, **options):
        print(f"running {words[0]}", file=sys.stderr, flush=True)
        return run(args, gpus, *words, **options)

    yamls = args.yamls
    if args.resume is None:
        base = launch("baseline", baseline, 1)
        control = launch("control", baseline, 1, moved=True)
        check_repeats(base, control)
    else:
        yamls = {"baseline": baseline} | yamls
    for label, path in yamls.items():
        ranks, trace, cells = 1 if label == "baseline" else args.ranks, "", {}
        try:
            if args.resume is None:
                many = launch(label, path, ranks)
                cells, lines = compare_runs(base, control, many, ranks)
            else:
                cells, lines = compare_resumed(launch, label, path, ranks, args)
        except RunFailedError as problem:
            lines, trace = [f"fails: {problem}"], problem.trace
        except CannotTellError as problem:
            lines = [f"cannot tell: {problem}"]
        verdict = "cannot tell" if "".join(lines[:1]).startswith("cannot tell") else "differs"
        verdict = verdict if lines else "the same"
        yield label, {"verdict": verdict, "cells": cells, "lines": lines, "trace": trace}


def main():
    """Verify, print, and write verify.json."""
    args = parse_args()
    gpus = import_libraries(args.ranks)
    from planning.comparing import CannotTellError

    try:
        found = dict(verify(args, gpus))
    except (RunFailedError, CannotTellError) as problem:
        print(getattr(problem, "trace", ""), file=sys.stderr)
        cannot_tell(f"{args.script.name} on one process: {problem}")
    rows = max((one["cells"] for one in found.values()), key=len)
    table = [["", *found]]
    table += [[row, *(one["cells"].get(row, "-") for one in found.values())] for row in rows]
    print(markdown_table(table), end="\n\n")
    for label, one in found.items():
        print(f"{label}: {one['verdict'].upper() if one['lines'] else one['verdict']}")
        print("".join(f"  {line}\n" for line in one["lines"]), end="")
        print(one["trace"], end="")
    file = args.folder / "verify.json"
    file.write_text(json.dumps({"argv": sys.argv[1:], "yamls": found}, indent=1) + "\n")
    print(f"written: {file}")
    verdicts = {one["verdict"] for one in found.values()}
    sys.exit(1 if "differs" in verdicts else 2 * ("cannot tell" in verdicts))


if __name__ == "__main__":
    main()
