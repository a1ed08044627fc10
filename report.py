"""Turn run records into a lab report: the time, speedup and efficiency of each strategy on each
node shape, and why.

    python report.py runs/                    # every run.json below runs/
    python report.py --times times.csv        # by hand: strategy,nodes,gpus_per_node,seconds
    python report.py runs/ --predict 64 --check runs/check-ddp-1234/check.json    # more devices

prints the report, and writes it as report.md, with report.csv and pictures (PNG). It reads nothing
but the records that the training scripts leave, their traces (--profile), the plan of a sweep
(sweep.csv), and the links that sbatch/check.py measured (check.json). reporting/ does the work.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from planning.facts import UNREADABLE
from planning.links import find_links, link_of, read_link
from planning.memory import hold_by_formula
from reporting.comparing import SURE, make_cells, same, shape
from reporting.page import KINDS, describe_traces, details, differing, first_page, title
from reporting.pictures import plot_work
from reporting.records import NAMES, PROFILED, SAME_WORK, read_runs, read_times, unpack
from reporting.splitting import PREDICTED, find_shares, predict_cells, read_traces, split_step


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
        help="where report.md, report.csv and the pictures go (default: "
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
        "(without: those that lie below the folder), or",
    )
    add("--bandwidth", type=float, help="of the link, in GB/s, and")
    add("--latency", type=float, help="of a message between two devices, in microseconds")
    args = parser.parse_args()
    if not args.folder and not args.times:
        parser.error("a folder of runs is needed, or --times")
    for path in (args.folder, args.times, args.check):
        if path and not path.exists():
            parser.error(f"there is no {path}")
    if args.predict is not None and args.predict < 2:
        parser.error(f"--predict needs at least 2 devices, got {args.predict}")
    if (args.bandwidth is None) != (args.latency is None):
        parser.error("--bandwidth and --latency describe a link together")
    if args.bandwidth is not None and not (args.bandwidth > 0 and args.latency >= 0):
        parser.error("--bandwidth has to be greater than 0, and --latency not negative")
    if not args.output_dir:
        folder = args.folder or Path(".")
        args.output_dir = folder if folder.is_dir() else folder.parent
    try:
        args.folder = args.folder and unpack(args.folder)
    except ValueError as problem:
        parser.error(problem)
    try:
        if args.check:
            args.links = [read_link(args.check)]
        elif args.bandwidth is not None:
            args.links = [link_of(args.bandwidth * 1e9, args.latency / 1e6)]
        else:  # all that lie below the folder of runs
            args.links = find_links(args.folder) if args.folder else []
    except UNREADABLE as reason:
        parser.error(
            f"{args.check} is no check.json of several ranks ({type(reason).__name__}: {reason})"
        )
    if args.predict and not args.links:
        parser.error(
            "--predict needs the link: --check with a check.json of several ranks "
            "(sbatch/check.py leaves it), or --bandwidth and --latency"
        )
    return args


def write_report(args):
    """Write all files, and return the report as Markdown. Raises OSError or ValueError."""
    rows, notes = read_runs(args.folder) if args.folder else ([], [])
    rows += read_times(args.times) if args.times else []
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs = pd.DataFrame(rows, columns=NAMES)
    cells, others = make_cells(runs), runs[runs["problem"] != ""]
    traces, unread = read_traces(args.folder) if args.folder else ([], [])
    works = list(cells.groupby(SAME_WORK, dropna=False, sort=False))
    first, more = ["# Report"], ["# Details"]
    if len(works) > 1:
        first.append(
            f"These are {len(works)} workloads, never compared with each other; they "
            f"differ in {', '.join(differing(cells))}."
        )
    for number, (_, group) in enumerate(works, 1):
        predicted = predict_cells(group, args.links)
        cells.loc[group.index, PREDICTED] = predicted[PREDICTED]
        group = group.join(predicted)
        parts = split_step(group, find_shares(traces, group))
        held = hold_by_formula(group[group["parameters"].notna()])
        suffix = f"-{number}" if len(works) > 1 else ""
        files = plot_work(group, parts, held, args.output_dir, suffix)
        failed = same(group.iloc[0], others[others["problem"] != PROFILED], SAME_WORK)
        lost = sorted(
            {(run["strategy"], shape(run)) for _, run in failed.iterrows()}
            - set(zip(group["strategy"], group["shape"], strict=True))
        )
        heading = f"## {title(group.iloc[0], cells)}"
        first += [heading, *first_page(group, parts, lost, files)]
        more += [heading, *details(group, parts, held, args.links, args.predict, files)]
    if traces:
        more += [
            "## Where the time of the profiled steps went",
            describe_traces(traces),
            "The traces open in https://ui.perfetto.dev. Communication includes waiting for a "
            "slower rank: the rank that waits least shows best what the transfer takes. Profiled "
            "runs are never used as timings.",
        ]
    if len(others) or notes or unread:
        more += [
            "## Not in the tables",
            "\n".join(
                [
                    f"- {run['run']} ({run['strategy']}, {shape(run)}): {run['problem']}"
                    for _, run in others.iterrows()
                ]
                + [f"- {note}" for note in notes + unread]
            ),
        ]
    text = "\n\n".join(filter(None, [*first, *more, "## How to read the tables", KINDS])) + "\n"
    (args.output_dir / "report.md").write_text(text, encoding="utf-8")
    inner = [
        "ranks",
        "tensors",
        "losses",
        "shown",
        "shape",
        "label",
        "speedup_low",
        "speedup_high",
        *SURE,
    ]
    cells.drop(columns=inner).to_csv(args.output_dir / "report.csv", index=False)
    return text


def main():
    args = parse_args()
    try:
        print(write_report(args))
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {problem}")
    print(f"written: {args.output_dir}/report.md, report.csv and the pictures")


if __name__ == "__main__":
    main()
