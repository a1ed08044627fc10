"""Turn run records into a lab report: the time, speedup and efficiency of each strategy on each
node shape, and why.

    python report.py runs/                    # every run.json below runs/
    python report.py --times times.csv        # by hand: strategy,nodes,gpus_per_node,seconds
    python report.py runs/ --predict 64 --check runs/check-ddp-1234/check.json    # more devices

prints the report, and writes it as report.md, with report.csv and pictures (SVG), and as
report.html, one file with the pictures inside. It reads nothing but the records that the training
scripts leave, their traces (--profile), the plan of a sweep (sweep.csv), and the links that
sbatch/check.py measured (check.json). reporting/ does the work.
"""

import argparse
import os
import sys
from pathlib import Path

from planning.facts import UNREADABLE
from planning.links import link_of, read_link
from reporting.comparing import find_workloads
from reporting.formulas import hold_cells
from reporting.page import (
    KINDS,
    as_html,
    describe_traces,
    details,
    differing,
    first_page,
    title,
)
from reporting.pictures import plot_work
from reporting.records import find_files, read_runs, unpack
from reporting.splitting import links_near, predict_cell, read_traces, shares_traced, split_step
from reporting.tables import write_csv
from reporting.times import read_times


def parse_args():
    parser = argparse.ArgumentParser(
        description="Tables and plots of time, speedup and efficiency from run records."
    )
    parser.error = lambda message: sys.exit(f"error: {message} (--help lists the options)")
    add = parser.add_argument
    add(
        "folder",
        type=Path,
        nargs="?",
        help="where the runs are: every run.json below it is read; "
        "or such a folder compressed, as RUNS.tar.xz",
    )
    add(
        "--times",
        type=Path,
        help="CSV of times measured by hand, as 186.6 or 3m6.6s: "
        "strategy,nodes,gpus_per_node,seconds",
    )
    add(
        "--output_dir",
        type=Path,
        help="where report.md, report.html, report.csv and the pictures go (default: "
        "the folder; beside a compressed one; with --times alone, the current folder)",
    )
    add(
        "--predict",
        type=int,
        metavar="N",
        help="also step times at 2, 4, ... N devices, by formula",
    )
    add(
        "--check",
        type=Path,
        help="the link to predict with: a check.json of sbatch/check.py "
        "(without: those that lie nearest to each run), or",
    )
    add("--bandwidth", type=float, help="of the link, in GB/s, and")
    add("--latency", type=float, help="of a message between two devices, in microseconds")
    args = parser.parse_args()
    check_args(args, parser.error)
    complete_args(args, parser.error)
    return args


def complete_args(args, refuse):
    """Unpack the folder, read the link, and set where the report goes; call `refuse` with what is
    wrong.
    """
    if not args.output_dir:
        folder = args.folder or Path(".")
        args.output_dir = folder if folder.is_dir() else folder.parent
    try:
        args.folder = args.folder and unpack(args.folder)
    except ValueError as problem:
        refuse(problem)
    args.links = read_links(args, refuse)
    measured = args.folder and find_files(args.folder, "check.json")
    if args.predict and not (args.links or measured):
        refuse(
            "--predict needs the link: --check with a check.json of several ranks "
            "(sbatch/check.py leaves it), or --bandwidth and --latency"
        )


def check_args(args, refuse):
    """Call `refuse` with what is wrong with the arguments, if anything is."""
    if not args.folder and not args.times:
        refuse("a folder of runs is needed, or --times")
    for path in (args.folder, args.times, args.check):
        if path and not path.exists():
            refuse(f"there is no {path}")
    if args.predict is not None and args.predict < 2:
        refuse(f"--predict needs at least 2 devices, got {args.predict}")
    if (args.bandwidth is None) != (args.latency is None):
        refuse("--bandwidth and --latency describe a link together")
    if args.bandwidth is not None and not (args.bandwidth > 0 and args.latency >= 0):
        refuse("--bandwidth has to be greater than 0, and --latency not negative")


def read_links(args, refuse):
    """The link that was named, in a list; None for those that were measured near each run."""
    if args.bandwidth is not None and not args.check:
        return [link_of(args.bandwidth * 1e9, args.latency / 1e6)]
    try:
        return [read_link(args.check)] if args.check else None
    except UNREADABLE as reason:
        refuse(
            f"{args.check} is no check.json of several ranks ({type(reason).__name__}: {reason})"
        )


def write_report(args):
    """Write all files, and return the report as Markdown, and whether a run is in its tables.
    Raises OSError or ValueError.
    """
    runs, notes = read_runs(args.folder) if args.folder else ([], [])
    if args.times:
        by_hand, bad_rows = read_times(args.times)
        runs, notes = runs + by_hand, notes + bad_rows
    args.output_dir.mkdir(parents=True, exist_ok=True)
    traces, unread = read_traces(args.folder) if args.folder else ([], [])
    workloads = find_workloads(runs)
    works = [workload.work for workload in workloads]
    first, more = ["# Report"], ["# Details"]
    if len(works) > 1:
        first.append(
            f"These are {len(works)} workloads, never compared with each other; they "
            f"differ in {', '.join(differing(works))}."
        )
    for number, workload in enumerate(workloads, 1):
        suffix = f"-{number}" if len(works) > 1 else ""
        heading = f"## {title(workload.work, works)}"
        front, back = describe_workload(workload, traces, args, suffix)
        first += [heading, *front]
        more += [heading, *back]
    if traces:
        more += [
            "## Where the time of the profiled steps went",
            describe_traces(traces),
            "The traces open in https://ui.perfetto.dev. Communication includes waiting for a "
            "slower rank: the rank that waits least shows best what the transfer takes. Profiled "
            "runs are never used as timings.",
        ]
    left_out = [
        f"{run.name} ({run.setting.strategy}, {run.setting.shape}): {run.problem}"
        for run in runs
        if run.problem
    ] + [*notes, *unread]
    if left_out:
        more += ["## Not in the tables", "\n".join(f"- {line}" for line in left_out)]
    blocks = [*first, *more, "## How to read the tables", KINDS]
    text = "\n\n".join(block for block in blocks if block) + "\n"
    cells = [cell for workload in workloads for cell in workload.cells]
    (args.output_dir / "report.md").write_text(text, encoding="utf-8")
    (args.output_dir / "report.html").write_text(as_html(text, args.output_dir), encoding="utf-8")
    write_csv(args.output_dir / "report.csv", cells)
    return text, bool(cells or traces)


def describe_workload(workload, traces, args, suffix):
    """The first page and the details of one workload, as two lists of Markdown; its pictures are
    drawn, their names with this suffix.
    """
    cells = workload.cells
    links = {}
    for cell in cells:
        links[cell] = args.links
        if args.links is None:
            links[cell] = links_near(cell.median, args.folder) if args.folder else []
        cell.prediction = predict_cell(cell, cells, links[cell])
    found = [
        split_step(
            cell,
            cells,
            shares_traced(cell, traces),
            cell.prediction.seconds if cell.prediction else None,
        )
        for cell in cells
    ]
    splits = [split for split in found if split]
    held = hold_cells(cells)
    files = plot_work(workload, splits, held, args.output_dir, suffix)
    back = details(workload, splits, held, links, args.predict, files)
    return list(first_page(workload, splits, files)), list(back)


def main():
    args = parse_args()
    try:
        text, shows_runs = write_report(args)
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {problem}")
    try:
        print(text)
        print(f"written: {args.output_dir}/report.md, report.html, report.csv and the pictures")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not shows_runs:
        sys.exit(
            "error: none of the runs completed without an interruption; the list "
            '"Not in the tables" says why'
        )


if __name__ == "__main__":
    main()
