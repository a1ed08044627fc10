"""What weakens a report: what to measure again, and where the assumptions of its tests fail.

Dunnett's and Tukey's tests assume that the cells' repeats scatter equally, and that they are
independent. Speedups assume that a strategy learns what the baseline learns.
"""

import itertools
import math
import statistics
from collections.abc import Iterable

from scipy.stats import f as f_distribution
from scipy.stats import t as t_distribution

from reporting.comparing import Cell, Workload, sum_of_squares
from reporting.records import Run

FEW_STEPS = 30  # fewer are no measurement
SLOW_STEPS = 0.1  # of the training: if they cost more, it is no measurement of steps
OUTLIER = 0.25  # longer than the median: such a repeat should be taken again
FALSE_WARNINGS = 0.01  # of the reports whose cells or hosts are equal, at most
FAR = 0.1  # of the baseline's first loss: a last loss that differs by more is another one
SLOWER = 0.01  # a host, by hosts' means: what is less is not worth a word


def find_notes(workload: Workload) -> None:
    """Set the notes of each cell, {kind: words}. The words of the kinds of AGAIN name what a reader
    should measure again.
    """
    scattered = find_scattered(workload)
    out_of_turn, slow_hosts = find_out_of_turn(workload), find_slow_hosts(workload)
    for cell in workload.cells:
        found = {
            "steps": few_steps(cell),
            "slow": slow_steps(cell),
            "late": late_repeat(cell),
            "scatter": "repeats scatter more than the others'" if cell in scattered else "",
            "turns": "not measured in turns" if cell in out_of_turn else "",
            "hosts": slow_hosts.get(cell, ""),
            "diverged": no_number(cell),
            "loss": wrong_loss(cell),
        }
        cell.notes = {kind: words for kind, words in found.items() if words}


AGAIN = ("steps", "slow", "late")


def has_other_loss(cell: Cell) -> bool:
    """Whether its notes say that it did not learn what the baseline learned."""
    return "loss" in cell.notes or "diverged" in cell.notes


def few_steps(cell: Cell) -> str:
    steps = cell.figures.steps
    return f"{steps:.0f} steps are too few" if steps is not None and steps < FEW_STEPS else ""


def slow_steps(cell: Cell) -> str:
    """Training that took longer than its steps would at their median pace: the first steps, or a
    pause.
    """
    steps, step = cell.figures.steps, cell.step_seconds
    if not steps or not step or steps < FEW_STEPS:
        return ""
    share = 1 - step * steps / cell.seconds
    return f"slow steps cost {share:.0%} of the time" if share > SLOW_STEPS else ""


def late_repeat(cell: Cell) -> str:
    late = cell.slowest / statistics.median(run.seconds for run in cell.runs) - 1
    return f"a repeat took {late:.0%} longer than the median" if late > OUTLIER else ""


def find_scattered(workload: Workload) -> list[Cell]:
    """The cells whose repeats scatter more than those of the other cells, by Cochran's test of the
    largest variance.
    """
    cells = [cell for cell in workload.cells if len(cell.runs) > 1]
    squares, freedoms = sum(cell.squares for cell in cells), sum(cell.freedom for cell in cells)
    if len(cells) < 2 or not squares:
        return []
    return [
        cell
        for cell in cells
        if cell.squares / squares > largest_share(cell.freedom, freedoms, len(cells))
    ]


def largest_share(freedom: int, freedoms: int, cells: int) -> float:
    """The critical value of Cochran's C: what a cell with `freedom` = repeats - 1 may have of the
    sum of squares of all cells, which have `freedoms` together. For numbers of repeats that differ:
    R. U. E. 't Lam, 2010, https://doi.org/10.1016/j.aca.2009.11.032, where it is called G.
    """
    point = f_distribution.isf(FALSE_WARNINGS / cells, freedom, freedoms - freedom)
    return float(1 / (1 + (freedoms / freedom - 1) / point))


def find_out_of_turn(workload: Workload) -> list[Cell]:
    """The cells of which all repeats began before or after all others that were tested, and pairs
    of compared cells of which one was measured before the other. A machine that becomes slower then
    makes a difference that repeats cannot tell from another one.
    """
    tested = list(dict.fromkeys(cell for pair in workload.intervals for cell in pair))
    alone = [
        cell
        for cell in tested
        if lie_apart(
            cell.runs, [run for other in tested if other is not cell for run in other.runs]
        )
    ]
    pairs = [pair for pair in workload.intervals if lie_apart(pair[0].runs, pair[1].runs)]
    return alone + [cell for pair in pairs for cell in pair if not set(alone) & set(pair)]


def lie_apart(some: list[Run], others: list[Run]) -> bool:
    """As far as it is known when they began."""
    began, since = ([run.began for run in runs if run.began] for runs in (some, others))
    if min(len(began), len(since)) < 2:
        return False
    return max(began) < min(since) or max(since) < min(began)


def find_slow_hosts(workload: Workload) -> dict[Cell, str]:
    """Of cells that have two repeats or more on each of several sets of hosts: on which of the sets
    they took longer than on another one, by t-tests of the logarithms with Bonferroni's correction.
    Their spread is that of all repeats of a cell on the same hosts. Names the hosts that only one
    of the two sets has.
    """
    places: dict[Cell, dict[frozenset[str], list[float]]] = {}
    for cell in workload.cells:
        for run in cell.runs:
            hosts = frozenset(rank.host for rank in run.ranks)
            places.setdefault(cell, {}).setdefault(hosts, []).append(math.log(run.cost))
    groups = [logs for sets in places.values() for logs in sets.values()]
    freedom = sum(len(logs) - 1 for logs in groups)
    squares = sum(map(sum_of_squares, groups))
    pairs = [
        (cell, slow, fast)
        for cell, sets in places.items()
        for slow, fast in itertools.permutations(sets, 2)
        if len(sets[slow]) > 1 and len(sets[fast]) > 1
    ]
    found: dict[Cell, list[tuple[float, str]]] = {}
    for cell, slow, fast in pairs:
        one, other = places[cell][slow], places[cell][fast]
        error = math.sqrt(squares / freedom * (1 / len(one) + 1 / len(other)))
        gap = statistics.mean(one) - statistics.mean(other)
        far = error * float(t_distribution.isf(FALSE_WARNINGS / len(pairs), freedom))
        if gap > far > 0 and math.expm1(gap) >= SLOWER:
            names = f"{name_hosts(slow - fast)} than on {name_hosts(fast - slow)}"
            found.setdefault(cell, []).append((gap, f"{math.expm1(gap):.0%} longer on {names}"))
    return {cell: max(words)[1] for cell, words in found.items()}


def name_hosts(hosts: frozenset[str]) -> str:
    first, *others = sorted(hosts) or ["fewer hosts"]
    return first + (f" and {len(others)} more" if others else "")


def no_number(cell: Cell) -> str:
    loss = cell.figures.last_loss
    return "" if loss is None or math.isfinite(loss) else f"the last loss is {loss}"


def wrong_loss(cell: Cell) -> str:
    """With the baseline's global batch, seed and learning rate: a repeat's last loss that is far
    from the baseline's, by more than a tenth of the loss with which that began, or by half of what
    it gained if that is less. Dropout's masks make smaller differences.
    """
    base = cell.strong.baseline.runs if cell.strong else []
    found = []
    for run in cell.runs:
        right = [other.figures for other in base if other.seeds == run.seeds]
        first = median_of(figures.first_loss for figures in right)
        last = median_of(figures.last_loss for figures in right)
        loss = run.figures.last_loss
        if loss is None or first is None or last is None:
            continue
        far = min(FAR * first, max((first - last) / 2, FAR * first / 10))
        if abs(loss - last) > far:
            found.append((abs(loss - last), f"a last loss is {loss:.4g}, not {last:.4g}"))
    return max(found)[1] if found and not no_number(cell) else ""


def median_of(losses: Iterable[float | None]) -> float | None:
    """Of the losses that are numbers."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return statistics.median(known) if known else None
