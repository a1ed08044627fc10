"""The answer that opens a report: what the figures of a workload show, as at most five sentences.

A sentence calls a cell faster or slower than another one only where the tests say so.
"""

import json
from collections.abc import Iterable
from typing import Any

from common.strategies import REPLICAS, SHARDS, label_of
from reporting.comparing import Cell, Comparison, Workload, varies
from reporting.grounds import AGAIN, has_other_loss
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
    texts = [f"{cell.seconds:.2f} s" + f" ({cell.apart})" * bool(cell.apart) for cell in cells]
    return f"The baseline, one device, trains in {listed(texts)}."


def times_as_fast(cells: list[Cell]) -> str:
    """The range of the speedups of cells, such as "1.20 to 1.42 times as fast as one device"."""
    gains = sorted(cell.comparison.speedup for cell in cells if cell.comparison)
    low, high = f"{gains[0]:.2f}", f"{gains[-1]:.2f}"
    devices = dict.fromkeys(one_device(cell, cell.comparison) for cell in cells if cell.comparison)
    words = f"times as fast as {' or '.join(devices)}"
    return f"{low} {words}" if low == high else f"{low} to {high} {words}"


def one_device(cell: Cell, comparison: Comparison) -> str:
    """What a comparison is with, in words: with which batch, if there is another comparison."""
    if len(cell.comparisons) < 2:
        return "one device"
    batch = "batch per device" if comparison is cell.weak else "global batch"
    return f"one device with the same {batch}"


def percent(share: float, digits: int) -> str:
    """With these digits behind the point, or with one that is not 0."""
    text = f"{share:.{digits}%}"
    return text if float(text[:-1]) else f"{100 * share:.1g}%"


def in_brackets(workload: Workload, one: Cell, other: Cell, before: str, after: str = "") -> str:
    """The margin of two cells between these words; nothing if there was no test."""
    margin = workload.margin(one, other)
    return "" if margin is None else f" ({before}{percent(margin, 1)}{after})"


def say_fastest(workload: Workload) -> str | None:
    """Of the cells on several devices that have repeats and learn what the baseline learns: those
    that train on most samples in a second, which are shown to be slower than none.
    """
    based = any(cell.is_baseline for cell in workload.cells)
    sound = [cell for cell in workload.cells if cell.devices > 1 and not has_other_loss(cell)]
    cells = [cell for cell in sound if len(cell.runs) > 1 and (cell.comparison or not based)]
    if not cells or (not based and len(cells) == 1):
        return None
    best, *others = sorted(cells, key=lambda cell: cell.cost)
    if others and workload.margin(best, others[0]) is None:
        gain = f", {times_as_fast([best])}" if best.comparison else ""
        return f"No test says which strategy is the fastest; the best is {best.label}{gain}."
    left_out = [cell for cell in sound if cell.cost < best.cost]
    limits = ["with repeats"] if any(len(cell.runs) == 1 for cell in left_out) else []
    if based and any(not cell.comparison for cell in left_out):
        limits.append("with a baseline of their batch")
    among = f"of the cells {' and '.join(limits)}, the" if limits else "the"
    lead = ""
    if others and workload.differ(best, others[0]):
        lead = ", and " if best.comparison else ", "
        lead += f"{percent(others[0].cost / best.cost - 1, 0)} faster than {others[0].label}"
        lead += in_brackets(workload, best, others[0], "", " would be enough")
    comparisons = [one for cell in cells for one in cell.comparisons.values()]
    if best.comparison and not any(one.sure == "faster" for one in comparisons):
        base = best.comparison.baseline
        margin = in_brackets(workload, best, base, "the two would have to differ by ")
        shown = "No test says whether several devices are faster than one"
        if any(one.low for one in comparisons):
            shown = "The repeats show no strategy on several devices to be faster than one device"
        return f"{shown}; {among} best is {best.label}, {times_as_fast([best])}{margin}{lead}."
    close = [
        cell
        for cell in others
        if not any(other.cost < cell.cost and workload.differ(other, cell) for other in cells)
    ]
    among = among[0].upper() + among[1:]
    if close:
        names = listed(cell.label for cell in (best, *close))
        gains = f", {times_as_fast([best, *close])}" if based else ""
        pair = f"{best.label} and {close[-1].label} would have to differ by "
        margin = in_brackets(workload, best, close[-1], pair)
        return f"{among} fastest are {names}{gains}; their repeats do not tell them apart{margin}."
    text = f"{among} fastest is {best.label}"
    if best.comparison:
        text += f", {times_as_fast([best])}"
        text += f" (efficiency {best.comparison.efficiency:.0%})"
    return f"{text}{lead}."


def say_scaling(workload: Workload) -> str | None:
    """Of the cells on the most devices."""
    most = max(cell.devices for cell in workload.cells)
    found: dict[str, list[str]] = {}
    for cell in workload.cells:
        if not cell.devices == most > 1 or has_other_loss(cell):
            continue
        for one in cell.comparisons.values():
            if one.sure:
                found.setdefault(f"{one.sure} than {one_device(cell, one)}", []).append(cell.label)
        if any(is_slower(cell, other, workload) for other in workload.cells):
            found.setdefault("slower than on fewer devices", []).append(cell.label)
    texts = [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} {words}"
        for words, names in sorted(found.items(), key=lambda item: ("fewer" in item[0], item))
    ]
    return "; ".join(texts) + "." if texts else None


def is_slower(cell: Cell, other: Cell, workload: Workload) -> bool:
    """Whether the repeats show it to be slower than the same strategy on fewer devices, with an
    equal batch.
    """
    one, two = cell.setting, other.setting
    batch = one.batch_per_device == two.batch_per_device
    batch = batch or one.global_batch_size == two.global_batch_size
    same = batch and cell.name == other.name and options_of(cell) == options_of(other)
    fewer = other.devices < cell.devices and not has_other_loss(other)
    return same and fewer and cell.cost > other.cost and workload.differ(cell, other)


def options_of(cell: Cell) -> dict[str, Any]:
    """But for HSDP's sizes, which belong to the number of devices."""
    options = json.loads(cell.setting.strategy_options or "{}")
    return {name: value for name, value in options.items() if name not in (REPLICAS, SHARDS)}


# What the answer says before the cells that have a note of the kind.
GROUNDS = {
    "diverged": "a loss that is no number, so never the fastest",
    "loss": "not the baseline's loss, so never the fastest",
    "scatter": "repeats that scatter more than the others', so the tests may claim too much",
    "turns": "not measured in turns, so a machine that slows down looks like a slower strategy",
    "hosts": "repeats that differ by host",
}
DETAILED = ("diverged", "loss", "hosts")  # with what the note says


def say_faults(workload: Workload) -> str | None:
    """What to measure again: cells without repeats, short runs, late repeats. And where the tests
    and the comparisons stand on weak ground.
    """
    cells = workload.cells
    once = [cell.label for cell in cells if len(cell.runs) == 1]
    texts = []
    if len(once) == len(cells):
        texts = ["each cell was measured only once, so nothing says which differences are noise"]
    elif once:
        texts = [f"measured only once: {listed(once)}"]
    for kind, words in GROUNDS.items():
        noted = [cell for cell in cells if kind in cell.notes]
        details = [f" ({cell.notes[kind]})" if kind in DETAILED else "" for cell in noted]
        if noted:
            names = listed(f"{cell.label}{more}" for cell, more in zip(noted, details, strict=True))
            texts.append(f"{words}: {names}")
    repeated = [cell for cell in cells if len(cell.runs) > 1]
    if len(repeated) > 1 and not any(map(varies, repeated)):
        texts.append("repeats are equal to the digit, so no test says which differences are noise")
    again = []
    for cell in cells:
        words = ", ".join(cell.notes[kind] for kind in AGAIN if kind in cell.notes)
        again += [f"{cell.label} ({words})"] if words else []
    if len(again) > MANY:
        texts.append(f"{len(again)} of {len(cells)} cells should be measured again (column 'note')")
    elif again:
        texts.append(f"measure again: {listed(again)}")
    return f"Mind: {'; '.join(texts)}." if texts else None


def say_lost(workload: Workload) -> str | None:
    """Repeats that were started or planned and are no timings, with the reason of each."""
    groups: dict[str, list[Run]] = {}
    for run in workload.lost:
        name = f"{label_of(run.setting.strategy)} on {run.setting.shape}"
        groups.setdefault(name, []).append(run)
    texts = []
    for name, runs in groups.items():
        reasons = sorted({run.problem.split(":")[0] for run in runs})
        count = f"{len(runs)} x " if len(runs) > 1 else ""
        texts.append(f"{count}{name} ({', '.join(reasons)})")
    return f"Lost: {listed(texts)}." if texts else None
