"""Medians of repeats, what they are against the baseline (speedup and efficiency), and which
differences the repeats carry.
"""

import functools
import json
import math
import statistics
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from scipy.stats import studentized_range

from planning.facts import flops_utilization
from reporting.runs import PROFILED, Figures, Rank, Run, Setting, Work


def speedup(baseline_seconds: float, seconds: float) -> float:
    """S(p) = T(baseline) / T(p). T is the time of the same work."""
    return baseline_seconds / seconds


def efficiency(speedup: float, devices: int) -> float:
    """S(p) / p: the share of the devices' time that communication and waiting have left."""
    return speedup / devices


WARMUP_STEPS = 10  # of the training scripts: samples_per_second leaves them out
STEADY_STEPS = 30  # so many are enough for a rate
SPREAD = 0.1  # between repeats, of their median: more is marked
START = 0.1  # of the training: a longer start is marked
BUSY = 0.8  # of a core: a rank that got less is marked
FALSE_CLAIMS = 0.05  # of the workloads with cells that are equally fast, at most

# How the report names a YAML, in the order of its tables.
STRATEGIES = {
    "baseline": "baseline",
    "dp": "DP",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "fsdp_keep": "FSDP keep",
    "fsdp_offload": "FSDP offload",
    "hsdp": "HSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero2_offload": "ZeRO-2 offload",
    "zero3": "ZeRO-3",
    "zero3_offload": "ZeRO-3 offload",
}
# A record of HSDP has these numbers of devices; they follow from the shape, and make no variant.
SIZES_OF_HSDP = ("dp_replicate_size", "dp_shard_size")


@dataclass(frozen=True)
class Comparison:
    """A cell against a baseline. The speedup is that of the seconds of training, between `low` and
    `high` as repeats differ; `steady` is that of the steady steps, where both have enough.
    """

    baseline: "Cell"
    speedup: float
    low: float
    high: float
    efficiency: float
    steady: float | None
    verdict: str  # "faster" or "slower" than the baseline, or "" if the repeats do not say


@dataclass
class Prediction:
    """Seconds of a step by formula, the ends of its interval, and the miss as a fraction."""

    seconds: float
    low: float
    high: float
    miss: float


@dataclass(eq=False)
class Cell:
    """The repeats of a setting: the medians of their figures, and what the report finds."""

    work: Work
    setting: Setting
    figures: Figures
    median: Run  # or one beside it
    runs: list[Run]
    variant: str = ""  # options in which it differs from others of its strategy
    number: int = 0  # of the variant, if there are several
    apart: str = ""  # from others of its name and shape: batch, cores or shards
    weak: Comparison | None = None  # with a baseline of the same batch per device
    strong: Comparison | None = None  # with a baseline of the same global batch
    by_hand: Comparison | None = None  # of times that were measured by hand
    prediction: Prediction | None = None

    @property
    def seconds(self) -> float:
        assert self.figures.seconds is not None
        return self.figures.seconds

    @property
    def devices(self) -> int:
        return self.setting.devices

    @property
    def ranks(self) -> list[Rank]:
        return self.median.ranks

    @property
    def is_baseline(self) -> bool:
        setting = self.setting
        plain = setting.strategy == "baseline" and not setting.activation_checkpointing
        return plain and setting.devices == 1

    @property
    def comparison(self) -> Comparison | None:
        """The one that comes first: weak scaling, else strong scaling, else times by hand."""
        return self.weak or self.strong or self.by_hand

    @property
    def fixed(self) -> str | None:
        """What `comparison` holds fixed."""
        if self.comparison and self.comparison.baseline is self:
            return "itself"
        if self.weak:
            return "batch per device"
        return "global batch" if self.strong else "not known" if self.by_hand else None

    @property
    def shown(self) -> str:
        """The name of the YAML, and what makes this a variant of it."""
        number = f" #{self.number}" if self.number else ""
        again = ", recomputing" if self.setting.activation_checkpointing else ""
        return f"{self.setting.strategy}{number}{self.variant}{again}"

    @property
    def short(self) -> str:
        """A name for people, with a number for a variant."""
        name = STRATEGIES.get(self.setting.strategy, self.setting.strategy)
        number = f" #{self.number}" if self.number else ""
        again = ", recomputing" if self.setting.activation_checkpointing else ""
        return f"{name}{number}{again}"

    @property
    def label(self) -> str:
        """A name that no other cell of its work has."""
        return f"{self.short} on {self.setting.shape}" + (f" ({self.apart})" if self.apart else "")

    @property
    def batch(self) -> str:
        """The batch per device in words."""
        setting = self.setting
        times = setting.gradient_accumulation_steps
        accumulated = f" x {times}" if times and times > 1 else ""
        return f"batch {setting.per_device_batch_size}{accumulated}"

    @property
    def step_seconds(self) -> float | None:
        """Of a steady step."""
        rate, batch = self.figures.samples_per_second, self.setting.global_batch_size
        return batch / rate if rate and batch else None

    @property
    def steady_steps(self) -> float | None:
        steps = self.figures.trained_steps
        if steps is None or self.step_seconds is None:
            return None
        return steps - min(steps // 2, WARMUP_STEPS)

    @property
    def fastest(self) -> float:
        return min(run.seconds for run in self.runs)

    @property
    def slowest(self) -> float:
        return max(run.seconds for run in self.runs)

    @property
    def spread(self) -> float:
        """How much repeats differ, of their median."""
        return (self.slowest - self.fastest) / self.seconds

    @property
    def mfu(self) -> float | None:
        return flops_utilization(self.row())

    def row(self) -> dict[str, Any]:
        """All that formulas need of a record, as columns."""
        row = asdict(self.work) | asdict(self.setting) | {"devices": self.devices}
        return row | asdict(self.figures) | asdict(self.median.model)


@dataclass
class Noise:
    """How much the times of equal runs differ in one workload: the variance of the logarithms of
    their seconds, the `critical` point of Tukey's test, and the most repeats of a cell.
    """

    variance: float
    critical: float
    repeats: int

    def margin(self, *cells: Cell) -> float:
        """By how much two cells have to differ, as a fraction: for equal ones, the largest of all
        pairs' differences is larger in FALSE_CLAIMS of the workloads (Tukey's honest significant
        difference, on logarithms). Without cells: what it is at least, with the most repeats. A
        cell that varies more than the rest counts with its own variance.
        """
        counts = [len(cell.runs) for cell in cells] or [self.repeats]
        own = [statistics.variance(logs(cell)) for cell in cells]
        mean = statistics.fmean(1 / count for count in counts)
        return math.exp(self.critical * math.sqrt(max([self.variance, *own]) * mean)) - 1


@dataclass
class Workload:
    """The cells of one work, those that have no result, and how far the repeats carry."""

    work: Work
    cells: list[Cell]
    noise: Noise | None = None
    lost: list[Run] = field(default_factory=list)  # of cells that have no result

    def differ(self, one: Cell, other: Cell) -> bool:
        """Whether two cells differ by more than chance: all runs of one are faster than all runs of
        the other, and their means differ by more than the margin.
        """
        if self.noise is None or min(len(one.runs), len(other.runs)) < 2:
            return False
        if one.fastest <= other.slowest and other.fastest <= one.slowest:
            return False
        ratio = abs(statistics.fmean(logs(one)) - statistics.fmean(logs(other)))
        return math.exp(ratio) - 1 > self.noise.margin(one, other)


def logs(cell: Cell) -> list[float]:
    return [math.log(run.seconds) for run in cell.runs]


def measure_noise(cells: list[Cell]) -> Noise | None:
    """What the repeats of these cells say of chance; None if no cell has repeats."""
    repeated = [cell for cell in cells if len(cell.runs) > 1]
    if not repeated:
        return None
    freedom = sum(len(cell.runs) - 1 for cell in repeated)
    squares = sum(statistics.variance(logs(cell)) * (len(cell.runs) - 1) for cell in repeated)
    critical = critical_point(max(2, len(repeated)), freedom)
    return Noise(squares / freedom, critical, max(len(cell.runs) for cell in repeated))


@functools.cache
def critical_point(cells: int, freedom: int) -> float:
    """Of the range of the means of so many cells, in standard errors."""
    return float(studentized_range.ppf(1 - FALSE_CLAIMS, cells, freedom))


def make_cell(work: Work, setting: Setting, runs: list[Run]) -> Cell:
    """The medians of repeats."""
    medians = {}
    for figure in fields(Figures):
        known = [getattr(run.figures, figure.name) for run in runs]
        values = [value for value in known if value is not None]
        medians[figure.name] = statistics.median(values) if values else None
    figures = Figures(**medians)
    middle = min(runs, key=lambda run: abs(run.seconds - (figures.seconds or 0)))
    return Cell(work, setting, figures, middle, runs)


def find_workloads(runs: list[Run]) -> list[Workload]:
    """The workloads of these runs, each with its cells, compared and named."""
    groups: dict[Work, dict[Setting, list[Run]]] = {}
    for run in runs:
        if not run.problem:
            groups.setdefault(run.work, {}).setdefault(run.setting, []).append(run)
    found = []
    for work, settings in groups.items():
        cells = [make_cell(work, setting, repeats) for setting, repeats in settings.items()]
        cells.sort(key=order_of)
        places = {(cell.setting.strategy, cell.setting.shape) for cell in cells}
        lost = [
            run
            for run in runs
            if run.problem not in ("", PROFILED)
            and run.work == work
            and (run.setting.strategy, run.setting.shape) not in places
        ]
        found.append(Workload(work, cells, measure_noise(cells), lost))
        name_variants(cells)
        for cell in cells:
            compare(cell, found[-1])
    return found


def order_of(cell: Cell) -> tuple[int, str, bool, int, int, int]:
    """Where a cell stands in tables: by strategy, devices, nodes and batch."""
    setting = cell.setting
    names = list(STRATEGIES)
    place = names.index(setting.strategy) if setting.strategy in names else len(names)
    batch = setting.global_batch_size or 0
    again = setting.activation_checkpointing
    return place, setting.strategy, again, setting.devices, setting.nodes, batch


def compare(cell: Cell, workload: Workload) -> None:
    """Set a cell's comparisons: the fastest baseline of equal work counts. Both have to train on as
    many samples, give or take 1 %.
    """
    batch, samples = cell.setting.batch_per_device, cell.figures.samples_trained
    bases = [
        base
        for base in workload.cells
        if base.is_baseline and alike(base.figures.samples_trained, samples)
    ]
    if batch is None:
        hand = [base for base in bases if base.setting.batch_per_device is None]
        cell.by_hand = compare_with(cell, hand, workload)
        return
    weak = [base for base in bases if base.setting.batch_per_device == batch]
    strong = [base for base in bases if base.setting.batch_per_device == in_all(cell)]
    cell.weak = compare_with(cell, weak, workload)
    cell.strong = compare_with(cell, strong, workload)


def in_all(cell: Cell) -> int | None:
    return cell.setting.global_batch_size


def alike(one: float | None, other: float | None) -> bool:
    """Whether two numbers of samples are equal, to within 1 %; what is not known equals itself."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= 0.01 * other


def compare_with(cell: Cell, baselines: list[Cell], workload: Workload) -> Comparison | None:
    if not baselines:
        return None
    base = min(baselines, key=lambda baseline: baseline.seconds)
    gain = speedup(base.seconds, cell.seconds)
    verdict = ""
    if workload.differ(cell, base):
        verdict = "faster" if cell.seconds < base.seconds else "slower"
    steady = None
    rates = (cell.figures.samples_per_second, base.figures.samples_per_second)
    enough = min(cell.steady_steps or 0, base.steady_steps or 0) >= STEADY_STEPS
    if enough and rates[0] and rates[1]:
        steady = rates[0] / rates[1]
    return Comparison(
        baseline=base,
        speedup=gain,
        low=speedup(base.seconds, cell.slowest),
        high=speedup(base.seconds, cell.fastest),
        efficiency=efficiency(gain, cell.devices),
        steady=steady,
        verdict=verdict,
    )


def name_variants(cells: list[Cell]) -> None:
    """Set in what each cell differs from others of its strategy, and whether its batch does."""
    for strategy in {cell.setting.strategy for cell in cells}:
        same = [cell for cell in cells if cell.setting.strategy == strategy]
        for cell, text in zip(same, differing_options(same), strict=True):
            cell.variant = text
        texts = sorted({cell.variant for cell in same})
        for cell in same:
            cell.number = texts.index(cell.variant) + 1 if len(texts) > 1 else 0
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.short, cell.setting.shape), []).append(cell)
    for twins in places.values():
        texts_of = [(twin.batch, cores_in_words(twin), shards_in_words(twin)) for twin in twins]
        differing = [len(set(column)) > 1 for column in zip(*texts_of, strict=True)]
        for twin, words in zip(twins, texts_of, strict=True):
            known = [word for word, differs in zip(words, differing, strict=True) if differs]
            twin.apart = ", ".join(word for word in known if word)


def cores_in_words(cell: Cell) -> str:
    return f"{cell.setting.cores:g} cores a rank" if cell.setting.cores else ""


def shards_in_words(cell: Cell) -> str:
    """How many replicas HSDP has, and how many shards each of them."""
    options = json.loads(cell.setting.strategy_options or "{}")
    sizes = [options.get(size) for size in SIZES_OF_HSDP]
    return "{} replicas of {} shards".format(*sizes) if all(sizes) else ""


def differing_options(cells: list[Cell]) -> list[str]:
    """For each of several variants of a strategy, the options in which they differ, such as
    " (offload: true)", or "".
    """
    variants = [json.loads(cell.setting.strategy_options or "{}") for cell in cells]
    for variant in variants:
        for size in SIZES_OF_HSDP:
            variant.pop(size, None)
    differ = sorted(
        {
            key
            for variant in variants
            for key in variant
            if any(other.get(key) != variant[key] for other in variants)
        }
    )
    texts = [
        ", ".join(f"{key}: {json.dumps(variant.get(key))}" for key in differ)
        for variant in variants
    ]
    return [f" ({text})" if text else "" for text in texts]


def doubts(cell: Cell) -> str:
    """What is not enough about a cell's measurement, in a few words, or ""."""
    found = []
    steady, step = cell.steady_steps, cell.step_seconds
    if steady is not None and steady < STEADY_STEPS:
        found.append(f"{steady:.0f} steady steps")
    elif step and cell.figures.trained_steps:
        start = 1 - step * cell.figures.trained_steps / cell.seconds
        if start > START:
            found.append(f"the start took {start:.0%}")
    if cell.spread > SPREAD:
        found.append(f"repeats differ by {cell.spread:.0%}")
    busy = [run.figures.busy_share for run in cell.runs if run.figures.busy_share is not None]
    if busy and min(busy) < BUSY:
        found.append(f"a rank computed {min(busy):.0%} of the time")
    devices = sorted({name for run in cell.runs for name in run.device_names})
    if len(devices) > 1:
        found.append(f"ranks on different devices: {', '.join(devices)}")
    return ", ".join([*found, *doubts_of_cores(cell)])


def doubts_of_cores(cell: Cell) -> list[str]:
    """Whether the ranks have fewer cores than threads, or, beside GPUs, than the baseline."""
    cores, threads = cell.setting.cores, cell.work.threads
    if cores is None:
        return []
    if threads and cores < threads:
        return [f"{cores:g} cores for {threads} threads"]
    base = cell.comparison.baseline.setting.cores if cell.comparison else None
    if not cell.work.on_cpu and base and cores < base:
        return [f"{cores:g} cores a rank, the baseline {base:g}"]
    return []
