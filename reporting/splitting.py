"""Where the time of a step went, and, from the traces of --profile, what a rank did in it."""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planning.facts import UNREADABLE
from planning.links import find_inside, find_link, find_links
from planning.prediction import computing_seconds, interval, predict
from reporting.comparing import Cell, Prediction
from reporting.records import explain, find_files, read_record
from reporting.runs import Run, Work

# Communication is measured where a run of the cell was profiled, and else predicted.
PARTS = [
    "computing",
    "bookkeeping",
    "communication",
    "predicted communication",
    "waiting",
    "loading",
    "start",
    "unexplained",
]

# The columns of report.csv that a prediction has.
PREDICTED = ["predicted_step_seconds", "predicted_from_seconds", "predicted_to_seconds"]

Spans = Sequence[tuple[float, float]]  # (start, end) of each


@dataclass
class Trace:
    """What a rank did in the profiled steps of a run, as shares of the time."""

    run: Run
    rank: str
    shares: dict[str, float]


def find_alone(cell: Cell, cells: list[Cell], baseline: bool = False) -> Cell | None:
    """The cell of the same strategy, or the baseline, with the same micro-batches on one device;
    None if there is none.
    """
    own = cell.setting
    for other in cells:
        setting = other.setting
        same = other.is_baseline if baseline else alike(own, setting)
        batches = (setting.per_device_batch_size, setting.gradient_accumulation_steps)
        if (
            same
            and other.devices == 1
            and other.step_seconds
            and batches == (own.per_device_batch_size, own.gradient_accumulation_steps)
        ):
            return other
    return None


def alike(one: Any, other: Any) -> bool:
    """Whether two settings are the same variant of a strategy. On one device HSDP is FSDP."""
    return (
        one.activation_checkpointing == other.activation_checkpointing
        and one.strategy.replace("hsdp", "fsdp") == other.strategy.replace("hsdp", "fsdp")
        and options_without_sizes(one) == options_without_sizes(other)
    )


def options_without_sizes(setting: Any) -> dict[str, Any]:
    """The options of a strategy, without how many replicas and shards HSDP has."""
    options: dict[str, Any] = json.loads(setting.strategy_options or "{}")
    return {name: value for name, value in options.items() if not name.endswith("_size")}


def seconds_alone(cell: Cell, one: Cell | None) -> float | None:
    """Seconds of a step of a cell on one device, `one`, if it had as many tokens, padding included,
    as a device of `cell` has on average.
    """
    if one is None or one.step_seconds is None:
        return None
    if cell.figures.padded_tokens is None or one.figures.padded_tokens is None:
        return one.step_seconds
    longer: float = computing_seconds(cell.row(), one.row() | {"step_seconds": one.step_seconds})
    return longer


def links_near(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The links that were measured nearest to a run: below its own folder, else below the one
    around it, and so on up to `folder`. So the links of two sweeps are never averaged.
    """
    place = folder / run.name
    for here in (place, *place.parents):
        links = links_below(here)
        if links or here == folder:
            return links
    return []


@functools.cache
def links_below(folder: Path) -> list[dict[str, Any]]:
    links: list[dict[str, Any]] = find_links(folder) if folder.is_dir() else []
    return links


def predict_cell(cell: Cell, cells: list[Cell], links: list[dict[str, Any]]) -> Prediction | None:
    """The step of a cell on several devices by formula; None if the same strategy was not measured
    on one device, or no link, or no formula is known.
    """
    one, link = find_alone(cell, cells), find_link(cell.row(), links)
    alone = seconds_alone(cell, one)
    if cell.devices == 1 or one is None or alone is None or not link or not cell.step_seconds:
        return None
    inside = find_inside(cell.row(), links)
    step = predict(alone, cell.row(), cell.devices, link, inside=inside)
    if step is None:
        return None
    low, high = interval(step, step, one.row(), cell.devices, link)
    return Prediction(step, low, high, step / cell.step_seconds - 1)


@dataclass
class Split:
    """Where the mean step of a cell went, in seconds: the parts that are known add up to `step`,
    the seconds of training per step.
    """

    cell: Cell
    step: float
    parts: dict[str, float]

    @property
    def costs(self) -> dict[str, float]:
        """What is not computing."""
        return {name: size for name, size in self.parts.items() if name != "computing"}


def split_step(
    cell: Cell, cells: list[Cell], traced: list[float], predicted: float | None
) -> Split | None:
    """Where the step of a cell went, or None if its step is not known. A part that is not known is
    left out, and its time is in `unexplained`. `traced` is each rank's share of communication that
    computing does not hide, in a profiled run of the cell; `predicted` is its step by formula.
    """
    steady, steps = cell.step_seconds, cell.figures.trained_steps
    if not steady or not steps:
        return None
    step = cell.seconds / steps
    known: dict[str, float | None] = {"start": step - steady}
    if cell.work.on_cpu:  # a GPU computes while the CPU loads
        known["loading"] = cell.figures.loading_seconds
    base, alone = (
        find_alone(cell, cells, baseline=True),
        seconds_alone(cell, find_alone(cell, cells)),
    )
    computing = seconds_alone(cell, base)
    if base is not None and computing is not None:
        known["bookkeeping"] = None if alone is None or base is cell else alone - computing
        both = known.get("loading") is not None and base.figures.loading_seconds is not None
        known["computing"] = computing - (base.figures.loading_seconds or 0 if both else 0)
    if cell.devices > 1:
        known |= find_communication(cell, steady, traced, predicted, alone)
    parts = {name: known[name] for name in PARTS if known.get(name) is not None}
    found = {name: size for name, size in parts.items() if size is not None}
    if base is not cell:
        found["unexplained"] = step - sum(found.values())
    return Split(cell, step, found)


def find_communication(
    cell: Cell, steady: float, traced: list[float], predicted: float | None, alone: float | None
) -> dict[str, float | None]:
    """The parts of a step that other ranks make longer."""
    if traced:  # the rank that waits least shows what the transfer takes
        return {
            "communication": min(traced) * steady,
            "waiting": (sum(traced) / len(traced) - min(traced)) * steady,
        }
    known = predicted is not None and alone is not None
    return {
        "predicted communication": predicted - alone if known else None,  # type: ignore[operator]
        "waiting": cell.figures.waiting_seconds,
    }


def covered(spans: Spans) -> list[tuple[float, float]]:
    """Disjoint spans, in order, that cover the same as these."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - start for start, end in covered(spans))


LOADING = "enumerate(DataLoader)"  # how torch names the spans in which a DataLoader makes a batch


def read_events(trace: Path) -> list[dict[str, Any]]:
    """The events of a trace of one rank (traces/profile_RANK.json) that last."""
    return [
        event
        for event in json.loads(Path(trace).read_bytes())["traceEvents"]
        if event.get("ph") == "X"
    ]


def shares_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """Shares of the traced steps among these events, which add up to 1: computation alone,
    computation that hides communication, communication alone, loading data, and none of them:
    Python, and idleness. Raises ValueError or KeyError if there are none.

    On a GPU only the GPU's own time line counts, as the CPU runs ahead of it: kernels and copies
    are work, and Kineto's gpu_user_annotation tells which of them belong to a step or to loading.
    """
    gpu_work = {"kernel", "gpu_memcpy", "gpu_memset"}
    on_gpu = any(event.get("cat") in gpu_work for event in events)
    annotation = "gpu_user_annotation" if on_gpu else "user_annotation"
    spans: dict[str, list[tuple[float, float]]]
    spans = {"step": [], "communication": [], "data": [], "compute": []}
    for event in events:
        name, kind = event["name"], event.get("cat")
        span = (event["ts"], event["ts"] + event["dur"])
        if kind == annotation and name.startswith("ProfilerStep"):
            spans["step"].append(span)
        elif name.startswith("gloo:") or kind == "kernel" and "nccl" in name.lower():
            spans["communication"].append(span)
        elif kind == annotation and name.startswith(LOADING):
            spans["data"].append(span)
        elif kind in gpu_work or not on_gpu and kind == "cpu_op" and name.startswith("aten::"):
            spans["compute"].append(span)
    if not spans["step"]:
        raise ValueError("no traced steps")
    start, end = min(spans["step"])[0], max(end for _, end in spans["step"])
    clipped = {
        key: [(max(a, start), min(b, end)) for a, b in value if b > start and a < end]
        for key, value in spans.items()
    }
    calls, compute = clipped["communication"], clipped["compute"]
    communication, loading = length(calls), length(calls + clipped["data"])
    hidden = communication + length(compute) - length(calls + compute)
    busy = length(calls + clipped["data"] + compute)
    parts = {
        "computation": busy - loading,
        "both at once": hidden,
        "communication": communication - hidden,
        "loading data": loading - communication,
        "neither": end - start - busy,
    }
    return {name: part / (end - start) for name, part in parts.items()}


def read_traces(folder: Path) -> tuple[list[Trace], list[str]]:
    """A Trace for each rank of each profiled run, and a sentence for each file that is none."""
    traces, notes = [], []
    names = sorted(
        path
        for record in find_files(folder, "run.json")
        for path in (record.parent / "traces").glob("profile_*.json")
    )
    for path in names:
        try:
            run = read_record(path.parent.parent / "run.json", folder)
            rank = path.stem.split("_")[1]
            traces.append(Trace(run, rank, shares_of(read_events(path))))
        except UNREADABLE as problem:
            name = os.path.relpath(path, folder)
            notes.append(f"skipped {name}: no trace of a run ({explain(problem)})")
    return traces, notes


def shares_traced(cell: Cell, traces: list[Trace]) -> list[float]:
    """Each rank's share of communication that computing does not hide, of one profiled run of a
    cell, however long it was and on however much data. Empty if there is none.
    """
    fits = [
        trace
        for trace in traces
        if trace.run.setting == cell.setting and same_kind(trace.run.work, cell.work)
    ]
    last = max((trace.run.name for trace in fits), default="")
    return [trace.shares["communication"] for trace in fits if trace.run.name == last]


def same_kind(one: Work, other: Work) -> bool:
    """Whether two workloads are the same but for their length."""
    sizes = ("samples", "eval_samples", "epochs", "steps")
    return all(
        getattr(one, name) == getattr(other, name)
        for name in one.__dataclass_fields__
        if name not in sizes
    )
