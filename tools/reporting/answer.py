"""The sentences that open a report: the baseline, the fastest cell, what is missing.

A sentence calls a cell faster than another one only if the tests say so. reporting/page.py writes
the table below them.
"""

from common.printing import listed, show_seconds
from common.strategies import label_of
from reporting.comparing import Workload


def sentences(workload: Workload) -> str:
    found = [say_baseline(workload), say_fastest(workload), say_missing(workload)]
    return " ".join(text for text in found if text)


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def say_baseline(workload: Workload) -> str:
    """The times with which all others are compared."""
    cells = [cell for cell in workload.cells if cell.is_baseline]
    if cells:
        times = [
            f"{show_seconds(cell.figures.seconds)} s" + (f" ({cell.apart})" if cell.apart else "")
            for cell in cells
        ]
        return f"The baseline, one device, trains in {listed(times)}."
    checkpointing = any(cell.setting.activation_checkpointing for cell in workload.cells)
    return (
        "There is no speedup: this work has no run of accelerate_configs/baseline.yaml on one "
        f"device{', without --activation_checkpointing' if checkpointing else ''}."
    )


def say_fastest(workload: Workload) -> str:
    """The cell that trains on most samples per second, and the cells that the tests do not tell
    apart from it. Only cells on several devices that have repeats, and that learned.
    """
    cells = [cell for cell in workload.cells if cell.devices > 1 and len(cell.runs) > 1]
    cells = [cell for cell in cells if "loss" not in cell.notes]
    if not cells:
        return ""
    best, *others = sorted(cells, key=lambda cell: cell.cost)
    margin = workload.margin(best, others[0]) if others else 0.0
    comparisons = [one for cell in cells for one in cell.comparisons.values()]
    lead = ""
    if comparisons and not any(one.sure == "faster" for one in comparisons):
        lead = "No strategy that learns is shown to be faster on several devices than on one. "
    word = "best" if lead or margin is None else "fastest"
    text = f"{lead}Of the cells with repeats, the {word} is {best.label}"
    if best.comparison:
        text += f", {best.comparison.speedup:.2f} times as fast as one device"
        text += f" (efficiency {100 * best.comparison.efficiency:.0f} %)"
    if margin is None:
        return f"{text}; no test compares it with the others."
    margins = [(other, workload.margin(best, other) or 0) for other in others]
    close = [other.label for other, far in margins if other.cost / best.cost - 1 <= far]
    if close:
        return f"{text}; its repeats do not tell it apart from {listed(close)}."
    if others:
        gap, enough = percent(others[0].cost / best.cost - 1), percent(margin)
        text += f"; it is {gap} faster than {others[0].label} ({enough} would be enough)"
    return f"{text}."


def say_missing(workload: Workload) -> str:
    """The cells with runs whose times do not count or that never ran, with the reasons."""
    cells = [
        f"{label_of(run.setting.strategy)} on {run.setting.shape} ({run.problem.split(':')[0]})"
        for run in workload.lost
    ]
    return f"Missing: {listed(list(dict.fromkeys(cells)))}." if cells else ""
