"""How often does a report claim a difference, false or true? By simulation.

    python benchmarks/claims.py [--reports 200]     half an hour on one core

A report has a baseline and eight cells on two devices. Times have a noise of 3 %. *False claims* is
the share of reports of equal cells that call any cell faster or slower than another. *Power* is the
share of reports that call DDP faster than the baseline where it is, by two standard deviations.
"""

import argparse
import statistics

import numpy as np
import side_by_side  # noqa: F401  It makes reporting importable.

from planning.facts import STRATEGIES
from planning.printing import markdown_table
from reporting.comparing import find_workloads
from reporting.records import Figures, Run, Setting

NOISE, CELLS = 0.03, 9


def make_report(random, repeats, ddp):
    """The workload of a report of invented times. DDP takes `ddp` times as long as the others."""
    runs = []
    for strategy in list(STRATEGIES)[:CELLS]:
        setting = Setting(strategy, 1, 1 if strategy == "baseline" else 2)
        mean = 100 * (ddp if strategy == "ddp" else 1)
        for seconds in mean * np.exp(random.normal(0, NOISE, repeats)):
            figures = Figures(seconds=float(seconds))
            runs.append(Run("", {"script": "simulated"}, setting, figures=figures))
    return find_workloads(runs)[0]


def claims_anything(workload):
    return any(workload.differ(*pair) for pair in workload.intervals)


def calls_ddp_faster(workload):
    [ddp] = [cell for cell in workload.cells if cell.setting.strategy == "ddp"]
    return ddp.comparison.sure == "faster"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", type=int, default=200, help="of each kind")
    args = parser.parse_args()
    rows = [["repeats", "false claims", "power", "DDP has to be faster by"]]
    for repeats in (2, 3, 5, 10):
        random = np.random.default_rng(repeats)
        equal = [make_report(random, repeats, 1) for _ in range(args.reports)]
        faster = [make_report(random, repeats, np.exp(-2 * NOISE)) for _ in range(args.reports)]
        margins = [
            workload.margin(cell, cell.comparison.baseline)
            for workload in faster
            for cell in workload.cells
            if cell.setting.strategy == "ddp"
        ]
        shares = [
            statistics.mean(map(claims_anything, equal)),
            statistics.mean(map(calls_ddp_faster, faster)),
            statistics.median(margins),
        ]
        rows.append([str(repeats), *(f"{share:.1%}" for share in shares)])
        print(rows[-1], flush=True)
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
