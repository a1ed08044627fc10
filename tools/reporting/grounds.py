"""What weakens a report: cells to measure again, cells that did not learn what the baseline
learned, and cells that violate the assumptions of the tests.

Dunnett's and Tukey's tests assume that the repeats of all cells scatter equally and are
independent. Each weakness has a code, which reporting/how-to-read.md explains.
"""

import itertools
import math
import statistics

from scipy.stats import f as f_distribution
from scipy.stats import ttest_ind

from common.losses import DIFFERENT, gap
from common.printing import listed
from reporting.comparing import Cell, Workload, varies
from reporting.records import Run

FEW_STEPS = 30  # fewer are too few to measure
SLOW_STEPS = 0.1  # slow steps may take this share of the training
OUTLIER = 0.25  # a repeat may take this much longer than the median
FALSE_WARNINGS = 0.01  # the share of reports that warn although all cells or hosts are equal
SLOWER = 0.01  # slower hosts are named if they take this much longer


def find_notes(workload: Workload) -> None:
    """Set the notes of each cell, {code: in words}."""
    repeated = [cell for cell in workload.cells if len(cell.runs) > 1]
    equal = len(repeated) > 1 and not any(map(varies, repeated))
    scattered, out_of_turn = find_scattered(repeated), find_out_of_turn(workload)
    slow_hosts = find_slow_hosts(workload)
    for cell in workload.cells:
        steps = cell.figures.steps
        lows = [one.low or 0 for one in cell.comparisons.values()]
        over = max(lows, default=0) / cell.devices
        late = max(cell.times) / statistics.median(cell.times) - 1
        found = {
            "single": "measured once" if len(cell.runs) == 1 else "",
            "equal": "all repeats took the same time" if equal and cell in repeated else "",
            "short": f"{steps:.0f} steps are too few" if steps and steps < FEW_STEPS else "",
            "slow": slow_steps(cell),
            "late": f"a repeat took {late:.0%} longer than the median" if late > OUTLIER else "",
            "spread": "repeats scatter more than the others'" if cell in scattered else "",
            "order": "not measured in turns" if cell in out_of_turn else "",
            "hosts": slow_hosts.get(cell, ""),
            "over": f"efficiency of at least {over:.0%}" if over > 1 else "",
            "loss": wrong_loss(cell),
        }
        cell.notes = {code: words for code, words in found.items() if words}


def slow_steps(cell: Cell) -> str:
    """Slow first steps or a pause: training took longer than its steps at their median pace."""
    steps, step = cell.figures.steps, cell.step_seconds
    if not steps or not step or steps < FEW_STEPS:
        return ""
    share = 1 - step * steps / cell.figures.seconds
    return f"slow steps cost {share:.0%} of the time" if share > SLOW_STEPS else ""


def find_scattered(cells: list[Cell]) -> list[Cell]:
    """The cells whose repeats scatter more than those of the others, by Cochran's C."""
    freedoms = sum(len(cell.runs) - 1 for cell in cells)
    squares = sum(cell.squares for cell in cells)
    if len(cells) < 2 or not squares:
        return []
    return [
        cell
        for cell in cells
        if cell.squares / squares > largest_share(len(cell.runs) - 1, freedoms, len(cells))
    ]


def largest_share(freedom: int, freedoms: int, cells: int) -> float:
    """The critical value of Cochran's C: the share of the sum of squares of all cells that one cell
    may have. `freedom` is its number of repeats - 1, and `freedoms` is the sum of these over all
    cells. The numbers may differ: R. U. E. 't Lam, 2010,
    https://doi.org/10.1016/j.aca.2009.11.032, where it is called G.
    """
    point = f_distribution.isf(FALSE_WARNINGS / cells, freedom, freedoms - freedom)
    return float(1 / (1 + (freedoms / freedom - 1) / point))


def find_out_of_turn(workload: Workload) -> list[Cell]:
    """Cells that were measured before or after all other tested cells, and pairs of compared cells
    of which one was measured before the other. If the machine slowed down in between, the later
    cell looks slower.
    """
    tested = list(dict.fromkeys(cell for pair in workload.intervals for cell in pair))
    alone = [
        cell for cell in tested if all(lie_apart(cell, other) for other in tested if other != cell)
    ]
    pairs = [pair for pair in workload.intervals if lie_apart(*pair)]
    return alone + [cell for pair in pairs for cell in pair if not set(alone) & set(pair)]


def lie_apart(one: Cell, other: Cell) -> bool:
    """True if all runs of one are known to have begun before those of the other."""
    began, since = ([run.began for run in cell.runs if run.began] for cell in (one, other))
    if min(len(began), len(since)) < 2:
        return False
    return max(began) < min(since) or max(since) < min(began)


def find_slow_hosts(workload: Workload) -> dict[Cell, str]:
    """Cells that took longer on one set of hosts than on another one, by t-tests of the logarithms
    with Bonferroni's correction. Each set needs two repeats. The words name the hosts that only one
    of the two sets has.
    """
    pairs = []
    for cell in workload.cells:
        places: dict[frozenset[str], list[float]] = {}
        for run in cell.runs:
            hosts = frozenset(rank.host for rank in run.ranks)
            places.setdefault(hosts, []).append(math.log(run.cost))
        repeated = [place for place in places.items() if len(place[1]) > 1]
        pairs += [(cell, *pair) for pair in itertools.permutations(repeated, 2)]
    found = {}
    for cell, (slow, logs), (fast, others) in pairs:
        longer = math.expm1(statistics.mean(logs) - statistics.mean(others))
        chance = ttest_ind(logs, others, alternative="greater").pvalue
        if longer >= SLOWER and chance < FALSE_WARNINGS / len(pairs):
            names = [listed(sorted(hosts), 1) for hosts in (slow - fast, fast - slow)]
            found[cell] = f"{longer:.0%} longer on {' than on '.join(names)}"
    return found


def wrong_loss(cell: Cell) -> str:
    """A repeat's last loss that is NaN or infinite, that did not fall, or that is far from those of
    all repeats of the baseline with its global batch, seed and learning rate.
    """
    base = cell.bases.get("strong")
    for run in cell.runs:
        first, loss = run.figures.first_loss, run.figures.last_loss
        if loss is not None and not math.isfinite(loss):
            return f"the last loss is {loss}"
        if not run.learned:
            return f"it did not learn: its loss was {first:.4g} and became {run.late_loss:.4g}"
        right = [
            other
            for other in (base.runs if base else [])
            if other is not run and other.seeds == run.seeds and other.learned
        ]
        if right and all(is_far(run, other) for other in right):
            usual = right[0].figures.last_loss
            return f"a last loss is {loss:.4g}, but the baseline's is {usual:.4g}"
    return ""


def is_far(run: Run, base: Run) -> bool:
    """True if the last losses differ by more than a tenth of the baseline's first loss or, if that
    is less, by half of what the baseline gained. Dropout's masks make smaller differences.
    """
    first, last, loss = base.figures.first_loss, base.figures.last_loss, run.figures.last_loss
    if not first or last is None or loss is None:
        return False
    half = (first - last) / first / 2
    return gap(loss, last, first) > min(DIFFERENT, max(half, DIFFERENT / 10))
