"""The answer that opens a report: what the figures of a workload show, as at most five sentences.

A sentence calls a cell faster or slower than another one only where the tests say so.
"""

from collections.abc import Iterable

from reporting.comparing import Cell, Workload, faults, name_strategy
from reporting.records import Run

MANY = 4  # more names than this in a sentence are counted, and the table has them


def listed(names: Iterable[str]) -> str:
    """a, b and c; or a, b, c and 5 more."""
    names = list(names)
    if len(names) > MANY:
        names = [*names[: MANY - 1], f"{len(names) - MANY + 1} more"]
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def sentences(workload: Workload) -> list[str]:
    found = [
        say_baseline(workload),
        say_fastest(workload),
        say_scaling(workload),
        say_faults(workload),
        say_lost(workload),
    ]
    return [text for text in found if text]


def say_baseline(workload: Workload) -> str:
    """The time that all others are compared with."""
    cells = [cell for cell in workload.cells if cell.is_baseline]
    if not cells:
        checkpointing = any(cell.setting.activation_checkpointing for cell in workload.cells)
        without = ", without --activation_checkpointing" if checkpointing else ""
        return (
            "There is no speedup, as there is no run of accelerate_configs/baseline.yaml of "
            f"this work on one device{without}."
        )
    batches = [f" with {cell.batch}" if len(cells) > 1 else "" for cell in cells]
    texts = [f"{cell.seconds:.2f} s{batch}" for cell, batch in zip(cells, batches, strict=True)]
    return f"The baseline, one device, trains in {listed(texts)}."


def times_as_fast(cells: list[Cell]) -> str:
    """The range of the speedups of cells, such as "1.20 to 1.42 times as fast"."""
    gains = sorted(cell.comparison.speedup for cell in cells if cell.comparison)
    low, high = f"{gains[0]:.2f}", f"{gains[-1]:.2f}"
    return f"{low} times as fast" if low == high else f"{low} to {high} times as fast"


def needed(workload: Workload, one: Cell, other: Cell) -> str:
    """The margin of two cells, in percent."""
    margin = workload.margin(one, other)
    return "unknown" if margin is None else f"{margin:.1%}"


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
    if not any(cell.comparison and cell.comparison.sure == "faster" for cell in cells):
        return (
            "The repeats show no strategy on several devices to be faster than one device; the "
            f"best is {best.label}, {times_as_fast([best])} (the two would have to differ by "
            f"{needed(workload, best, best.comparison.baseline)})."
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
            f"their repeats do not tell them apart ({best.label} and {close[-1].label} would have "
            f"to differ by {needed(workload, best, close[-1])})."
        )
    text = (
        f"The fastest is {best.label}, {times_as_fast([best])} as one device "
        f"(efficiency {best.comparison.efficiency:.0%})"
    )
    if not others:
        return text + "."
    gain = others[0].seconds / best.seconds - 1
    margin = needed(workload, best, others[0])
    return f"{text}, and {gain:.0%} faster than {others[0].label} ({margin} would be enough)."


def say_scaling(workload: Workload) -> str | None:
    """Of the cells on the most devices."""
    most = max(cell.devices for cell in workload.cells)
    cells = [cell for cell in workload.cells if cell.devices == most > 1]
    texts = []
    for sure, one, several in (
        ("faster", "gains from more devices", "gain from more devices"),
        ("slower", "is slower than one device", "are slower than one device"),
    ):
        names = [cell.label for cell in cells if cell.comparison and cell.comparison.sure == sure]
        if names:
            texts.append(f"{listed(names)} {one if len(names) == 1 else several}")
    return "; ".join(texts) + "." if texts else None


def say_faults(workload: Workload) -> str | None:
    """What to measure again: cells without repeats, short runs, late repeats."""
    cells = workload.cells
    once = [cell.label for cell in cells if len(cell.runs) == 1]
    texts = []
    if len(once) == len(cells):
        texts = ["each cell was measured only once, so nothing says which differences are noise"]
    elif once:
        texts = [f"measured only once: {listed(once)}"]
    again = [f"{cell.label} ({faults(cell)})" for cell in cells if faults(cell)]
    if len(again) > MANY:
        texts.append(f"{len(again)} of {len(cells)} cells should be measured again (column 'note')")
    elif again:
        texts.append(f"measure again: {listed(again)}")
    return f"Mind: {'; '.join(texts)}." if texts else None


def say_lost(workload: Workload) -> str | None:
    """Repeats that were started or planned and are no timings, with the reason of each."""
    groups: dict[str, list[Run]] = {}
    for run in workload.lost:
        name = f"{name_strategy(run.setting)} on {run.setting.shape}"
        groups.setdefault(name, []).append(run)
    texts = []
    for name, runs in groups.items():
        reasons = sorted({run.problem.split(":")[0] for run in runs})
        count = f"{len(runs)} x " if len(runs) > 1 else ""
        texts.append(f"{count}{name} ({', '.join(reasons)})")
    return f"Lost: {listed(texts)}." if texts else None
