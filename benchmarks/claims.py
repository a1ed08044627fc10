"""How often does a report claim a difference, false or true? By simulation.

    python benchmarks/claims.py [--reports 20000]     half a minute

A report has a baseline and eight cells on two devices. Times have a noise of 3 %. *False claims* is
the share of reports of equal cells that call any cell faster or slower than another. *Power* is the
share of reports that call DDP faster than the baseline where it is, by two standard deviations.

The report tells by how many standard errors two cells have to differ. It depends on the number of
repeats alone, so it is taken from one report, and 20,000 others are compared with it here.
"""

import argparse

import numpy as np
import side_by_side  # noqa: F401  It makes reporting importable.

from common.facts import STRATEGIES
from common.printing import markdown_table
from reporting.comparing import find_workloads
from reporting.records import Figures, Run, Setting

NOISE, CELLS = 0.03, 9  # of the logarithms of times; the first cell is the baseline


def standard_errors(logs):
    """Of each report: that of a difference to the baseline, and of one among the other cells."""
    variances, repeats = logs.var(axis=2, ddof=1), logs.shape[2]
    return np.sqrt(np.stack([variances.mean(1), variances[:, 1:].mean(1)]) * 2 / repeats)


def critical_points(logs):
    """By how many standard errors cells have to differ, as a report of these logarithms says: from
    the baseline (Dunnett's test), and from one another (Tukey's test).
    """
    runs = []
    for strategy, values in zip(STRATEGIES, logs, strict=False):
        setting = Setting(strategy, 1, 1 if strategy == "baseline" else 2)
        for value in values:
            figures = Figures(seconds=float(np.exp(value)))
            runs.append(Run("", {"script": "simulated"}, setting, figures=figures))
    [workload] = find_workloads(runs)
    base, one, other, *_ = workload.cells
    margins = [np.log1p(workload.margin(*pair)) for pair in ((one, base), (one, other))]
    return np.array(margins) / standard_errors(logs[None])[:, 0]


def shares_of(random, repeats, reports):
    """The shares of false claims and of true ones."""
    logs = random.normal(0, NOISE, (reports, CELLS, repeats))
    errors, (dunnett, tukey) = standard_errors(logs), critical_points(logs[0])
    means = logs.mean(axis=2)
    base, cells = means[:, :1], means[:, 1:]
    against = np.abs(cells - base).max(axis=1) > dunnett * errors[0]
    among = np.ptp(cells, axis=1) > tukey * errors[1]
    found = base[:, 0] - (means[:, 2] - 2 * NOISE) > dunnett * errors[0]
    return (against | among).mean(), found.mean(), np.expm1(dunnett * np.median(errors[0]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", type=int, default=20_000, help="of each number of repeats")
    args = parser.parse_args()
    rows = [["repeats", "false claims", "power", "DDP has to be faster by"]]
    for repeats in (2, 3, 5, 10):
        shares = shares_of(np.random.default_rng(repeats), repeats, args.reports)
        rows.append([str(repeats), *(f"{share:.1%}" for share in shares)])
    print(markdown_table(rows, "right"))


if __name__ == "__main__":
    main()
