"""Cells, which are the means or medians of repeats; their speedups over the baseline; and which
differences are more than chance, by Dunnett's and Tukey's tests.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy
from scipy.optimize import brentq
from scipy.stats import chi2, norm, tukey_hsd
from scipy.stats import t as t_distribution

from common.facts import flops_utilization
from common.strategies import label_of, place_of
from reporting.records import MEANT, Figures, Run, Setting

FALSE_CLAIMS = 0.05  # the largest share of reports that claim a difference if all cells are equal

# What is the same in a cell and its baseline. The batch of times by hand is not known.
FIXED = {"weak": "batch per device", "strong": "global batch", "by_hand": "not known"}
# If one of these is unknown, as of a library that was not imported, it counts as the same.
MAY_BE_UNKNOWN = ("torch", "accelerate", "deepspeed", "transformers", "cores")

Intervals = dict[tuple["Cell", "Cell"], tuple[float, float]]


@dataclass(frozen=True)
class Comparison:
    """A cell against a baseline: the ratio of the mean costs, and its interval by Dunnett's test if
    both have repeats. `sure` is "faster", "slower", or "" if the test cannot tell.
    """

    baseline: "Cell"
    speedup: float
    efficiency: float
    low: float | None
    high: float | None
    sure: str


@dataclass(eq=False)
class Cell:
    """The repeats of a setting, the medians of their figures, and what the report finds. Seconds
    and cost are geometric means, because the tests compare means of logarithms.
    """

    workload: dict[str, Any]
    setting: Setting
    runs: list[Run]
    figures: Figures = field(init=False)
    cost: float = field(init=False)  # seconds of training for each sample; see Run.cost
    middle: Run = field(init=False)  # the run nearest to the cost
    apart: str = ""  # its batch or options, if others have its name and shape
    bases: dict[str, "Cell"] = field(default_factory=dict)  # {a name of FIXED: baseline}
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # with each of the bases
    notes: dict[str, str] = field(default_factory=dict)  # {code: in words}, from grounds.py

    def __post_init__(self) -> None:
        medians: dict[str, Any] = {}
        for figure in fields(Figures):
            known = [getattr(run.figures, figure.name) for run in self.runs]
            values = [value for value in known if value is not None]
            odd = [value for value in values if not math.isfinite(value)]  # a loss
            values = odd[:1] or values
            medians[figure.name] = statistics.median(values) if values else None
        medians["seconds"] = statistics.geometric_mean(self.times)
        self.figures = Figures(**medians)
        self.cost = statistics.geometric_mean(run.cost for run in self.runs)
        self.middle = min(self.runs, key=lambda run: abs(run.cost - self.cost))

    @property
    def times(self) -> list[float]:
        """The seconds of training of each repeat."""
        return [run.figures.seconds for run in self.runs]

    @property
    def logs(self) -> list[float]:
        """The logarithms of each repeat's seconds per sample."""
        return [math.log(run.cost) for run in self.runs]

    @property
    def squares(self) -> float:
        """The sum of squares of the logarithms around their mean."""
        return float(numpy.var(self.logs) * len(self.logs))

    @property
    def devices(self) -> int:
        return self.setting.devices

    @property
    def is_baseline(self) -> bool:
        setting = self.setting
        plain = setting.strategy == "baseline" and not setting.activation_checkpointing
        return plain and setting.devices == 1

    @property
    def comparison(self) -> Comparison | None:
        """Weak scaling if there is a baseline with the same batch per device, or else strong."""
        return next(iter(self.comparisons.values()), None)

    @property
    def name(self) -> str:
        more = ", activation checkpointing" if self.setting.activation_checkpointing else ""
        return label_of(self.setting.strategy) + more

    @property
    def label(self) -> str:
        """A name that no other cell of its workload has."""
        return f"{self.name} on {self.setting.shape}" + (f" ({self.apart})" if self.apart else "")

    @property
    def batch(self) -> str:
        """The batch per device in words."""
        batch, times = self.setting.per_device_batch_size, self.setting.gradient_accumulation_steps
        accumulated = f" x {times}" if times > 1 else ""
        return f"batch {batch}{accumulated}" if batch else ""

    @property
    def step_seconds(self) -> float | None:
        rate, batch = self.figures.samples_per_second, self.setting.global_batch_size
        return batch / rate if rate and batch else None

    @property
    def mfu(self) -> float | None:
        rate = self.figures.tokens_per_second
        if not rate:
            return None
        run = self.workload | {"tokens_per_second": rate, "devices": self.devices}
        return flops_utilization(run)


@dataclass
class Workload:
    """The cells of one workload, its runs whose times do not count, and what the tests found."""

    values: dict[str, Any]
    cells: list[Cell]
    lost: list[Run]
    # {(one, other): the interval of log(cost of one / cost of the other)}
    intervals: Intervals = field(default_factory=dict)

    def margin(self, one: Cell, other: Cell) -> float | None:
        """The fraction by which two cells have to differ. None if they were not tested."""
        if (one, other) not in self.intervals:
            return None
        low, high = self.intervals[one, other]
        return math.expm1((high - low) / 2)


# -------- workloads and cells


def find_differences(workloads: list[dict[str, Any]]) -> list[str]:
    """The names whose values are not the same in all workloads."""
    names = dict.fromkeys(name for values in workloads for name in values)
    return [name for name in names if unlike(name, [values.get(name) for values in workloads])]


def unlike(name: str, values: list[Any]) -> bool:
    """True if these values of a name differ. Cores are alike if there are as many for each device
    or as many on each node: ranks on one CPU divide its cores.
    """
    if name in MAY_BE_UNKNOWN:
        values = [value for value in values if value is not None]
    if name == "cores" and values:
        return not shared_cores(values)
    return any(value != values[0] for value in values)


def shared_cores(values: list[str]) -> str:
    """The common part of texts such as "1 per device, 2 per node"."""
    first, *others = [value.split(", ") for value in values]
    return ", ".join(text for text in first if all(text in other for other in others))


def find_workloads(runs: list[Run]) -> list[Workload]:
    """The workloads of these runs, with compared and named cells. A run with an unknown version
    belongs to each workload that is like it in all else.
    """
    workloads: list[Workload] = []
    timings = [run for run in runs if not run.problem]
    for run in sorted(timings, key=lambda run: sum(v is None for v in run.workload.values())):
        if not any(run in cell.runs for workload in workloads for cell in workload.cells):
            workloads.append(make_workload(dict(run.workload), runs))
    workloads.sort(
        key=lambda one: min(timings.index(run) for cell in one.cells for run in cell.runs)
    )
    tests = [(workload, test) for workload in workloads for test in find_tests(workload)]
    for workload, test in tests:
        workload.intervals |= test(1 - FALSE_CLAIMS / len(tests))
    for workload in workloads:
        for cell in workload.cells:
            for kind, base in cell.bases.items():
                cell.comparisons[kind] = judge(cell, base, workload)
    return workloads


def make_workload(values: dict[str, Any], runs: list[Run]) -> Workload:
    """All runs with these values, and with the same cores as each other."""
    settings: dict[Setting, list[Run]] = {}
    for run in runs:
        if not run.problem and not find_differences([run.workload, values]):
            known = [one["cores"] for one in (values, run.workload) if one.get("cores")]
            values |= {"cores": shared_cores(known)} if known else {}
            settings.setdefault(run.setting, []).append(run)
    cells = [Cell(values, setting, repeats) for setting, repeats in settings.items()]
    cells.sort(key=order_of)
    tell_apart(cells)
    for cell in cells:
        find_bases(cell, cells)
    lost = [
        run
        for run in runs
        if run.problem not in ("", *MEANT) and not find_differences([run.workload, values])
    ]
    return Workload(values, cells, lost)


def order_of(cell: Cell) -> tuple[Any, ...]:
    """Sorts cells by strategy, devices, nodes and batch."""
    setting, place = cell.setting, place_of(cell.setting.strategy)
    sizes = setting.devices, setting.nodes, setting.global_batch_size or 0
    return place, setting.strategy, setting.activation_checkpointing, *sizes


def find_bases(cell: Cell, cells: list[Cell]) -> None:
    """Set a cell's baselines: the fastest of those with the same batch."""
    setting = cell.setting
    batches = {"weak": setting.batch_per_device, "strong": setting.global_batch_size}
    for kind, batch in batches.items() if setting.batch_per_device else [("by_hand", None)]:
        rivals = [
            base for base in cells if base.is_baseline and base.setting.batch_per_device == batch
        ]
        if rivals:
            cell.bases[kind] = min(rivals, key=lambda base: base.cost)


# -------- tests


def find_tests(workload: Workload) -> list[Callable[[float], Intervals]]:
    """The tests of a workload, each a function of the confidence level: Dunnett's for each
    baseline, and Tukey's among the cells on several devices. There is no test if all repeats took
    the same time, as times in whole seconds may: they say nothing about chance.
    """
    repeated = [cell for cell in workload.cells if len(cell.runs) > 1]
    tests: list[Callable[[float], Intervals]] = []
    for base in repeated:
        cells = [cell for cell in repeated if cell is not base and base in cell.bases.values()]
        if cells and any(map(varies, [base, *cells])):
            same = base.setting.batch_per_device
            baselines = [cell for cell in workload.cells if cell.is_baseline]
            rivals = sum(cell.setting.batch_per_device == same for cell in baselines)
            tests.append(functools.partial(dunnett_intervals, base, cells, rivals))
    several = [cell for cell in repeated if cell.devices > 1]
    if len(several) > 1 and any(map(varies, several)):
        tests.append(functools.partial(tukey_intervals, several))
    return tests


def varies(cell: Cell) -> bool:
    """True if its repeats differ."""
    return len(set(cell.logs)) > 1


def dunnett_intervals(base: Cell, cells: list[Cell], rivals: int, level: float) -> Intervals:
    """Cells against a baseline, which is the fastest of `rivals` baselines with one batch."""
    groups = [base, *cells]
    freedom = sum(len(cell.runs) - 1 for cell in groups)
    squares = sum(cell.squares for cell in groups)
    repeats = numpy.array([len(cell.runs) for cell in cells])
    point = dunnett_point(len(base.runs), repeats, freedom, 1 - (1 - level) / rivals)
    found = {}
    for cell in cells:
        gap = statistics.mean(cell.logs) - statistics.mean(base.logs)
        variance = squares / freedom * (1 / len(cell.runs) + 1 / len(base.runs))
        half = point * math.sqrt(variance)
        found[cell, base] = gap - half, gap + half
    return found


def dunnett_point(of_base: int, repeats: Any, freedom: int, level: float) -> float:
    """The critical value of Dunnett's two-sided test: with the probability `level`, the means of
    all cells are at most this many standard errors from the baseline's.
    https://doi.org/10.1080/01621459.1955.10501294, section 3.

    scipy 1.17 draws random numbers for it, and its search may fail: for three cells it finds 295
    instead of 3.3. Here the integrals over the baseline's mean and the standard deviation are sums.
    """
    means, weights = numpy.polynomial.hermite_e.hermegauss(64)
    shares, of_shares = numpy.polynomial.legendre.leggauss(64)
    spreads = numpy.sqrt(chi2.ppf((shares + 1) / 2, freedom) / freedom)
    # Axes: the baseline's mean, the standard deviation, the cell.
    middle = means[:, None, None] * numpy.sqrt(repeats / of_base)
    width = spreads[:, None] * numpy.sqrt(1 + repeats / of_base)

    def excess(point: float) -> float:
        inside = norm.cdf(middle + point * width) - norm.cdf(middle - point * width)
        return float(weights @ inside.prod(axis=2) @ of_shares / weights.sum() / 2 - level)

    bonferroni = t_distribution.isf((1 - level) / 2 / len(repeats), freedom)
    return float(brentq(excess, 0, 2 * bonferroni))  # the sums are not exact


def tukey_intervals(cells: list[Cell], level: float) -> Intervals:
    """All pairs of these cells."""
    low, high = tukey_hsd(*(cell.logs for cell in cells)).confidence_interval(level)
    return {
        (one, other): (float(low[i, j]), float(high[i, j]))
        for i, one in enumerate(cells)
        for j, other in enumerate(cells)
    }


def judge(cell: Cell, base: Cell, workload: Workload) -> Comparison:
    """A cell against a baseline, with the interval of the test."""
    speedup, low, high, sure = base.cost / cell.cost, None, None, ""
    if (cell, base) in workload.intervals:
        ends = workload.intervals[cell, base]
        low, high = (math.exp(-end) for end in reversed(ends))
        sure = "faster" if low > 1 else "slower" if high < 1 else ""
    return Comparison(base, speedup, speedup / cell.devices, low, high, sure)


# -------- names


def tell_apart(cells: list[Cell]) -> None:
    """Set how each cell differs from others with its name and shape."""
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.name, cell.setting.shape), []).append(cell)
    for twins in places.values():
        words_of = [words_on(twin) for twin in twins]
        names = dict.fromkeys(name for words in words_of for name in words)
        differ = [name for name in names if len({words.get(name) for words in words_of}) > 1]
        for twin, words in zip(twins, words_of, strict=True):
            twin.apart = ", ".join(words[name] for name in differ if name in words)


def words_on(cell: Cell) -> dict[str, str]:
    """The batch and the options of a cell in words."""
    words = {"batch": cell.batch}
    options = json.loads(cell.setting.strategy_options or "{}")
    return words | {name: f"{name}: {json.dumps(value)}" for name, value in options.items()}
