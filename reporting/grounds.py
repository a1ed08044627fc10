"""What weakens a report: what to measure again, and where the assumptions of its tests fail.

Dunnett's and Tukey's tests assume that the cells' repeats scatter equally, and that they are
independent. Speedups assume that a strategy learns what the baseline learns.
"""

import math
import statistics

from scipy.stats import f as f_distribution

from reporting.comparing import Cell, Workload
from reporting.records import Run

FEW_STEPS = 30  # fewer are no measurement
START = 0.1  # of the training: a longer start is no measurement of steps
OUTLIER = 0.25  # longer than the median: such a repeat should be taken again
FALSE_WARNINGS = 0.01  # of the reports whose cells scatter equally, at most
FAR = 0.1  # of the baseline's first loss: a last loss that differs by more is another one


def find_notes(workload: Workload) -> None:
    """Set the notes of each cell, {kind: words}. The words of the kinds of AGAIN name what a reader
    should measure again.
    """
    scattered = find_scattered(workload)
    for cell in workload.cells:
        found = {
            "steps": few_steps(cell),
            "start": long_start(cell),
            "late": late_repeat(cell),
            "scatter": "repeats scatter more than the others'" if cell in scattered else "",
            "turns": "not measured in turns" if is_out_of_turn(cell, workload) else "",
            "hosts": slower_host(cell),
            "loss": wrong_loss(cell),
        }
        cell.notes = {kind: words for kind, words in found.items() if words}


AGAIN = ("steps", "start", "late")


def few_steps(cell: Cell) -> str:
    steps = cell.figures.steps
    return f"{steps:.0f} steps are too few" if steps is not None and steps < FEW_STEPS else ""


def long_start(cell: Cell) -> str:
    """Training that took longer than its steps would at the pace that they had later."""
    steps, step = cell.figures.steps, cell.step_seconds
    if not steps or not step or steps < FEW_STEPS:
        return ""
    start = 1 - step * steps / cell.seconds
    return f"the start took {start:.0%} of the time" if start > START else ""


def late_repeat(cell: Cell) -> str:
    late = cell.slowest / cell.seconds - 1
    return f"a repeat took {late:.0%} longer than the median" if late > OUTLIER else ""


def find_scattered(workload: Workload) -> list[Cell]:
    """The cells whose repeats scatter more than those of the other cells, by Cochran's test of the
    largest variance.
    """
    cells = [cell for cell in workload.cells if len(cell.runs) > 1]
    squares = [statistics.variance(cell.logs) * (len(cell.runs) - 1) for cell in cells]
    total = sum(squares)
    freedoms = [len(cell.runs) - 1 for cell in cells]
    if len(cells) < 2 or not total:
        return []
    return [
        cell
        for cell, square, freedom in zip(cells, squares, freedoms, strict=True)
        if square / total > largest_share(freedom, sum(freedoms), len(cells))
    ]


def largest_share(freedom: int, freedoms: int, cells: int) -> float:
    """The critical value of Cochran's C: what a cell with `freedom` = repeats - 1 may have of the
    sum of squares of all cells, which have `freedoms` together. For numbers of repeats that differ:
    R. U. E. 't Lam, 2010, https://doi.org/10.1016/j.aca.2009.11.032, where it is called G.
    """
    point = f_distribution.isf(FALSE_WARNINGS / cells, freedom, freedoms - freedom)
    return float(1 / (1 + (freedoms / freedom - 1) / point))


def is_out_of_turn(cell: Cell, workload: Workload) -> bool:
    """Whether all repeats of a cell began before or after all of its baseline's, or of all others'.
    A machine that becomes slower then makes a difference that repeats cannot tell from another one.
    """
    bases = [base for base in cell.baselines if base is not cell and len(base.runs) > 1]
    others = [run for other in workload.cells if other is not cell for run in other.runs]
    groups = [others] if len(others) > 1 else []
    groups += [base.runs for base in bases]
    return len(cell.runs) > 1 and any(lies_apart(cell.runs, group) for group in groups)


def lies_apart(some: list[Run], others: list[Run]) -> bool:
    began, since = ([run.began for run in runs if run.began] for runs in (some, others))
    if len(began) < len(some) or len(since) < len(others):
        return False  # not known
    return max(began) < min(since) or max(since) < min(began)


def slower_host(cell: Cell) -> str:
    """Of repeats on several hosts: whether all on one took longer than all on another one."""
    times: dict[str, list[float]] = {}
    for run in cell.runs:
        hosts = sorted({rank.host for rank in run.ranks})
        times.setdefault("+".join(hosts), []).append(run.cost)
    if len(times) < 2:
        return ""
    middle = {host: statistics.median(costs) for host, costs in times.items()}
    slow, fast = max(times, key=middle.__getitem__), min(times, key=middle.__getitem__)
    if min(times[slow]) <= max(times[fast]):
        return ""
    return f"{middle[slow] / middle[fast] - 1:.0%} longer on {slow} than on {fast}"


def wrong_loss(cell: Cell) -> str:
    """A last loss that is no number, or, with the baseline's global batch, far from the baseline's:
    by more than a tenth of the loss with which that began. Other seeds and dropout's masks differ
    by less.
    """
    loss = cell.figures.last_loss
    if loss is None:
        return ""
    if not math.isfinite(loss):
        return f"the last loss is {loss}"
    base = cell.strong.baseline.figures if cell.strong else None
    if base is None or base.last_loss is None or base.first_loss is None:
        return ""
    if not abs(loss - base.last_loss) > FAR * abs(base.first_loss):
        return ""
    return f"the last loss is {loss:.4g}, the baseline's {base.last_loss:.4g}"
