"""What the figures of a workload show, in words."""

from collections.abc import Iterable

from reporting.comparing import STRATEGIES, Cell, Workload, doubts
from reporting.splitting import Split, find_alone

MANY = 4  # more names than this in a sentence are counted, and the table has them


def listed(names: Iterable[str]) -> str:
    """a, b and c; or a, b, c and 5 more."""
    names = list(names)
    if len(names) > MANY:
        names = [*names[: MANY - 1], f"{len(names) - MANY + 1} more"]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def sentences(workload: Workload, splits: list[Split]) -> list[str]:
    """What the figures of a workload show, as at most five sentences. A sentence calls a cell
    faster or slower than another one only where `Workload.differ` says so.
    """
    found = [
        say_baseline(workload),
        say_fastest(workload),
        say_scaling(workload),
        say_costs(workload, splits),
        say_doubts(workload),
    ]
    return [text for text in found if text]


def say_baseline(workload: Workload) -> str:
    """The time that all others are compared with."""
    cells = [cell for cell in workload.cells if cell.is_baseline]
    if not cells:
        again = any(cell.setting.activation_checkpointing for cell in workload.cells)
        return (
            "There is no speedup, as there is no run of accelerate_configs/baseline.yaml of "
            f"this work on one device{', without --activation_checkpointing' if again else ''}."
        )
    batches = [f" with {cell.batch}" if len(cells) > 1 else "" for cell in cells]
    texts = [f"{cell.seconds:.2f} s{batch}" for cell, batch in zip(cells, batches, strict=True)]
    return f"The baseline, one device, trains in {listed(texts)}."


def times_as_fast(cells: list[Cell]) -> str:
    """The range of the speedups of cells, such as "1.20 to 1.42 times as fast"."""
    gains = sorted(cell.comparison.speedup for cell in cells if cell.comparison)
    low, high = f"{gains[0]:.2f}", f"{gains[-1]:.2f}"
    return f"{low} times as fast" if low == high else f"{low} to {high} times as fast"


def say_fastest(workload: Workload) -> str | None:
    """Of the cells on several devices that have repeats: those with the shortest training, which
    are shown to be slower than none.
    """
    cells = [
        cell
        for cell in workload.cells
        if cell.devices > 1 and cell.comparison and len(cell.runs) > 1
    ]
    if not cells:
        return None
    best, *others = sorted(cells, key=lambda cell: cell.seconds)
    assert best.comparison
    if not any(cell.comparison and cell.comparison.verdict == "faster" for cell in cells):
        return (
            "The repeats show no strategy on several devices to be faster than one device; the "
            f"best is {best.label}, {times_as_fast([best])}."
        )
    close = [
        cell
        for cell in others
        if not any(other.seconds < cell.seconds and workload.differ(other, cell) for other in cells)
    ]
    if close:
        names = [cell.label for cell in (best, *close)]
        return (
            f"{listed(names)} are the fastest, {times_as_fast([best, *close])} as one device; "
            "their repeats do not tell them apart."
        )
    text = (
        f"The fastest is {best.label}, {times_as_fast([best])} as one device "
        f"(efficiency {best.comparison.efficiency:.0%})"
    )
    if not others:
        return text + "."
    gain = others[0].seconds / best.seconds - 1
    return f"{text}, and {gain:.0%} faster than {others[0].label}."


def say_scaling(workload: Workload) -> str | None:
    """Of the cells on the most devices."""
    most = max(cell.devices for cell in workload.cells)
    cells = [cell for cell in workload.cells if cell.devices == most > 1 and cell.comparison]
    texts = []
    for verdict, one, several in (
        ("faster", "gains from more devices", "gain from more devices"),
        ("slower", "is slower than one device", "are slower than one device"),
    ):
        names = [
            cell.label for cell in cells if cell.comparison and cell.comparison.verdict == verdict
        ]
        if names:
            texts.append(f"{listed(names)} {one if len(names) == 1 else several}")
    return "; ".join(texts) + "." if texts else None


NAMES_OF_PARTS = {
    "bookkeeping": "the strategy's bookkeeping",
    "waiting": "waiting for the slowest rank",
    "unexplained": "an unexplained rest",
    "start": "the start of the run",
}


def say_costs(workload: Workload, splits: list[Split]) -> str | None:
    """Of each cell on the most devices the largest part besides computing, if it is more than what
    two cells have to differ by.
    """
    most = max(cell.devices for cell in workload.cells)
    texts: dict[str, list[str]] = {}
    for split in splits:
        cell, costs = split.cell, split.costs
        if cell.devices < most or most == 1 or "computing" not in split.parts or not costs:
            continue
        part = max(costs, key=lambda name: costs[name])
        noise = workload.noise
        if len(cell.runs) > 1 and noise and costs[part] > noise.margin(cell) * split.step:
            texts.setdefault(NAMES_OF_PARTS.get(part, part), []).append(
                f"{cell.label} ({costs[part] * 1000:.1f} of {split.step * 1000:.1f} ms)"
            )
    found = [f"{part} for {listed(cells)}" for part, cells in texts.items()]
    return f"The largest cost besides computing: {'; '.join(found)}." if found else None


def say_doubts(workload: Workload) -> str | None:
    """Whether the repeats are too few, the runs too short, or results missing."""
    cells = workload.cells
    once = [cell.label for cell in cells if len(cell.runs) == 1]
    texts = []
    if len(once) == len(cells):
        texts = ["each cell was measured only once, so nothing says which differences are noise"]
    elif once:
        texts = [f"measured only once: {listed(once)}"]
    marked = [f"{cell.label} ({doubts(cell)})" for cell in cells if doubts(cell)]
    if len(marked) > MANY:
        texts.append(f"{len(marked)} of {len(cells)} cells are not safe to rely on (column *note*)")
    elif marked:
        texts.append(f"not safe to rely on: {listed(marked)}")
    lost = sorted({name_lost(run.setting.strategy, run.setting.shape) for run in workload.lost})
    texts += [f"no result of {listed(lost)}"] if lost else []
    return f"Mind: {'; '.join(texts)}." if texts else None


def name_lost(strategy: str, shape: str) -> str:
    return f"{STRATEGIES.get(strategy, strategy)} on {shape}"


def say_margin(workload: Workload) -> str | None:
    """From which difference on the report calls one cell faster than another."""
    noise = workload.noise
    if noise is None:
        return None
    counts = sorted({len(cell.runs) for cell in workload.cells if len(cell.runs) > 1})
    repeats = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"The cells have {repeats} repeats. Two of them have to differ by at least "
        f"{noise.margin():.1%} before this report calls one faster (Tukey's test over all cells; "
        "of cells that are equally fast, it calls some different in 5 % of the reports)."
    )


def say_missing(workload: Workload, checked: bool) -> str | None:
    """What a prediction lacks; `checked` is whether a link was measured."""
    several = [
        cell
        for cell in workload.cells
        if cell.devices > 1 and cell.step_seconds and cell.setting.strategy != "dp"
    ]  # no formula is known of DP
    alone = [cell.label for cell in several if find_alone(cell, workload.cells) is None]
    if alone:
        return (
            "Missing: a run on one device, with the same strategy and batch per device, of "
            f"{listed(alone)}: it would tell bookkeeping from communication."
        )
    if several and not checked:
        return "Missing: a check.json (sbatch/check.py) to predict communication from."
    return None


def say_prediction(workload: Workload) -> str | None:
    known = [(abs(cell.prediction.miss), cell) for cell in workload.cells if cell.prediction]
    if not known:
        return None
    worst, cell = max(known, key=lambda one: one[0])
    assert cell.prediction
    return (
        f"Predicted steps miss the measured ones by at most {worst:.0%} "
        f"({cell.label}: too {'long' if cell.prediction.miss > 0 else 'short'})."
    )
