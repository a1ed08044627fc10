"""Turn run records into a lab report: the time, speedup and efficiency of each strategy on each
node shape, and which differences are more than chance.

    python tools/report.py runs/                    # every run.json below runs/
    python tools/report.py --times times.csv        # by hand: strategy,nodes,gpus_per_node,seconds

prints the report, and writes it as report.md, with report.csv and pictures (SVG), and as
report.html, one file with the pictures inside. It reads the records that the training scripts
leave (run.json), the plan of a sweep (sweep.csv), and times by hand. reporting/ does the work.
"""

import csv
import signal
from pathlib import Path

from common.printing import OneLineParser, printable, stop
from reporting.comparing import find_workloads
from reporting.grounds import find_notes
from reporting.page import as_html, write_csv, write_page
from reporting.pictures import draw_workload
from reporting.records import read_runs
from reporting.times import read_times


def parse_args():
    parser = OneLineParser(
        description="Tables and plots of time, speedup and efficiency from run records."
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="every run.json below it is read")
    by_hand = "CSV with strategy,nodes,gpus_per_node,seconds; times as 186.6 or 3m6.6s"
    add("--times", type=Path, help=by_hand)
    output = "where to write (default: the folder; with --times alone, the current one)"
    add("--output_dir", type=Path, help=output)
    args = parser.parse_args()
    if not args.folder and not args.times:
        parser.error("name a folder of runs, or use --times")
    args.output_dir = args.output_dir or args.folder or Path(".")
    return args


def write_report(args):
    """Write all files. Returns the report as Markdown, and True if its tables have a run. Raises
    OSError, ValueError or csv.Error.
    """
    runs, notes = read_runs(args.folder) if args.folder else ([], [])
    if args.times:
        by_hand, bad_rows = read_times(args.times)
        runs, notes = runs + by_hand, notes + bad_rows
    args.output_dir.mkdir(parents=True, exist_ok=True)
    workloads = find_workloads(runs)
    pictures = []
    for number, workload in enumerate(workloads, 1):
        find_notes(workload)
        suffix = f"-{number}" if len(workloads) > 1 else ""
        pictures.append(draw_workload(workload, args.output_dir, suffix))
    left_out = [
        f"{run.name} ({run.setting.strategy}, {run.setting.shape}): {run.problem}"
        for run in runs
        if run.problem
    ]
    text = write_page(workloads, pictures, left_out + notes)
    files = [file for of_workload in pictures for file in of_workload.values()]
    (args.output_dir / "report.md").write_text(text, encoding="utf-8")
    write_csv(args.output_dir / "report.csv", workloads)
    page = as_html(text, args.output_dir, files)
    (args.output_dir / "report.html").write_text(page, encoding="utf-8")
    return text, bool(workloads)


def main():
    args = parse_args()
    try:
        text, shows_runs = write_report(args)
    except (OSError, ValueError, OverflowError, csv.Error) as problem:
        stop(problem)
    print(text)
    written = printable(args.output_dir)
    print(f"written: {written}/report.md, report.html, report.csv and the pictures", flush=True)
    if not shows_runs:
        stop(
            "none of the runs completed without an interruption; the list "
            '"Not in the tables" says why'
        )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py runs | head` ends silently
    main()
