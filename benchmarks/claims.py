"""How often does a report claim a difference, false or true? By simulation.

    python benchmarks/claims.py [--reports 20000]     a minute

A report has a baseline and eight cells on two devices. *False claims* is the share of reports of
equal cells that call any cell faster or slower than another. *Power* is the share of reports that
call DDP faster than the baseline where it is, by two standard deviations. *Noted* is the share of
reports whose answer says that an assumption of the tests fails: equal spreads, runs in turns.

The report tells by how many standard errors two cells have to differ. It depends on the numbers of
repeats alone, so it is taken from one report, and 20,000 others are compared with it here.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import datetime, timedelta, timezone

import side_by_side  # noqa: F401  It makes tools/ importable.
import numpy as np

from common.printing import markdown_table
from common.strategies import STRATEGIES
from reporting.comparing import find_workloads
from reporting.grounds import find_notes, largest_share
from reporting.records import Figures, Run, Setting

NOISE, CELLS = 0.03, 9  # of the logarithms of times; the first cell is the baseline
DRIFT = 0.005  # of each run against the run before it, where a machine becomes slower
EVEN = [NOISE] * CELLS
LIKE_DRIFT = [0.01] * CELLS

# Of the cells in their order: repeats, spreads, and whether each run is slower than the one before.
WORLDS = {
    "equal spreads": ([3] * CELLS, EVEN),
    "one cell scatters ten times as much": ([3] * CELLS, [0.01] * 8 + [0.1]),
    "the same, 5 repeats": ([5] * CELLS, [0.01] * 8 + [0.1]),
    "the baseline scatters ten times as much": ([3] * CELLS, [0.1] + [0.01] * 8),
    "spreads of 1 to 9 %, 5 repeats": ([5] * CELLS, [0.01 * (1 + cell) for cell in range(CELLS)]),
    "2 repeats beside 10, which scatter a tenth as much": ([10] + [2] * 8, [0.01] + [0.1] * 8),
    "10 repeats beside 2, which scatter ten times as much": ([2] + [10] * 8, [0.1] + [0.01] * 8),
    "each run 0.5 % slower than the one before, in turns": ([3] * CELLS, LIKE_DRIFT, "turns"),
    "the same, one cell after the other": ([3] * CELLS, LIKE_DRIFT, "cells"),
}


def places_of(repeats, order):
    """The place of each run of each cell in the order of measuring, in turns by default."""
    runs = [(cell, turn) for cell, number in enumerate(repeats) for turn in range(number)]
    runs.sort(key=lambda run: run if order == "cells" else run[::-1])
    return [[runs.index((cell, turn)) for turn in range(n)] for cell, n in enumerate(repeats)]


def draw(random, repeats, spreads, order, reports):
    """The logarithms of times of many reports: of each cell an array (reports, repeats)."""
    drift = DRIFT if order else 0
    return [
        random.normal(0, spread, (reports, len(places))) + drift * np.array(places)
        for spread, places in zip(spreads, places_of(repeats, order), strict=True)
    ]


def squares_of(logs):
    """The sum of squares of each cell's repeats around their mean: an array (reports, cells)."""
    return np.stack([cell.var(axis=1) * cell.shape[1] for cell in logs], axis=1)


def standard_errors(logs, one, other):
    """Of each report: that of a difference of two cells. The baseline is in a test with all cells;
    without it, two cells are in a test with those on two devices.
    """
    cells = logs if one == 0 else logs[1:]
    repeats = [cell.shape[1] for cell in logs]
    freedoms = sum(cell.shape[1] - 1 for cell in cells)
    pooled = squares_of(cells).sum(axis=1) / freedoms
    return np.sqrt(pooled * (1 / repeats[one] + 1 / repeats[other]))


def report_of(logs, order):
    """The workload of a report of these logarithms, an array of each cell."""
    places, start = places_of([len(cell) for cell in logs], order), datetime.now(timezone.utc)
    runs = []
    for number, (strategy, values) in enumerate(zip(STRATEGIES, logs, strict=False)):
        setting = Setting(strategy, 1, 1 if strategy == "baseline" else 2)
        for value, place in zip(values, places[number], strict=True):
            figures = Figures(seconds=float(np.exp(value)))
            began = start + timedelta(minutes=place)
            runs.append(Run("", {"script": "simulated"}, setting, figures=figures, began=began))
    [workload] = find_workloads(runs)
    find_notes(workload)
    return workload


def shares_of(random, reports, repeats, spreads, order=""):
    """Shares of reports: those with false claims, those with a note, those with false claims and no
    note, and those that find DDP faster; and by how much DDP has to be faster in a median report.
    """
    logs = draw(random, repeats, spreads, order, reports)
    workload = report_of([cell[0] for cell in logs], order)
    cells = workload.cells
    means = [cell.mean(axis=1) for cell in logs]
    false = np.zeros(reports, bool)
    for one in range(CELLS):
        for other in range(one + 1, CELLS):
            margin = np.log1p(workload.margin(cells[other], cells[one]))
            errors = standard_errors(logs, one, other)
            needed = margin / errors[0] * errors  # as the first report is that of `workload`
            false |= abs(means[one] - means[other]) > needed
            if (one, other) == (0, 2):
                found, by = means[0] - (means[2] - 2 * NOISE) > needed, np.median(needed)
    squares, freedoms = squares_of(logs), [number - 1 for number in repeats]
    limits = [largest_share(freedom, sum(freedoms), CELLS) for freedom in freedoms]
    noted = (squares > squares.sum(axis=1, keepdims=True) * limits).any(axis=1)
    noted |= any("order" in cell.notes for cell in cells)
    return [share.mean() for share in (false, noted, false & ~noted, found)] + [np.expm1(by)]


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=20_000, help="of each line of the tables")
    args = parser.parse_args()
    rows = [["repeats", "false claims", "power", "DDP has to be faster by"]]
    for repeats in (2, 3, 5, 10):
        random = np.random.default_rng(repeats)
        shares = shares_of(random, args.reports, [repeats] * CELLS, EVEN)
        rows.append([str(repeats), *(f"{shares[which]:.1%}" for which in (0, 3, 4))])
    print(markdown_table(rows, "right"), end="\n\n")
    rows = [["cells that are equally fast", "false claims", "noted", "false and not noted"]]
    for name, world in WORLDS.items():
        shares = shares_of(np.random.default_rng(1), args.reports, *world)
        rows.append([name, *(f"{share:.1%}" for share in shares[:3])])
    print(markdown_table(rows, "right"))


if __name__ == "__main__":
    main()
