"""Where the time of a step went, and, from the traces of --profile, what a rank did in it."""

import json
import math
from pathlib import Path

import pandas as pd

from planning.facts import UNREADABLE
from planning.links import find_link
from planning.prediction import computing_seconds, interval, predict
from reporting.comparing import same
from reporting.records import CELL, SAME_WORK, read_record

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


def find_alone(cell, cells, baseline=False):
    """The cell of the same strategy, or the baseline, with the same batch per device on one device;
    None if there is none.
    """
    names = [*SAME_WORK, "per_device_batch_size", "gradient_accumulation_steps"]
    cells = cells[(cells["devices"] == 1) & cells["step_seconds"].notna()]
    if baseline:
        cells = cells[(cells["strategy"] == "baseline") & ~cells["activation_checkpointing"]]
    else:
        names += ["strategy", "strategy_options", "activation_checkpointing"]
    found = same(cell, cells, names)
    return found.iloc[0] if len(found) else None


PREDICTED = ["predicted_step_seconds", "predicted_from_seconds", "predicted_to_seconds"]


def predict_cells(group, links):
    """PREDICTED, by formula, and the `miss` of what was measured, as a DataFrame; for each cell on
    several devices of which the same strategy was measured on one.
    """
    found = {}
    for i, cell in group[group["devices"] > 1].iterrows():
        link, alone = find_link(cell, links), find_alone(cell, group)
        if link and alone is not None:
            devices = int(cell["devices"])
            step = predict(computing_seconds(cell, alone), cell, devices, link)
            found[i] = [step, *interval(step, step, alone, devices, link)] if step else [None] * 3
    found = pd.DataFrame.from_dict(found, "index", float, PREDICTED).reindex(group.index)
    return found.assign(miss=found["predicted_step_seconds"] / group["step_seconds"] - 1)


def split_step(group, shares):
    """Where the mean step of each cell went, in seconds, as a DataFrame with the columns PARTS,
    which add up to `step`, the seconds of training per step. A part that is not known is NaN, and
    its time is in `unexplained`. `shares` is what `find_shares` returns.
    """
    rows = {}
    for i, cell in group[group["step_seconds"].notna() & (group["trained_steps"] > 0)].iterrows():
        row = dict.fromkeys(PARTS, math.nan) | {"step": cell["seconds"] / cell["trained_steps"]}
        row["start"] = row["step"] - cell["step_seconds"]
        if cell["device_name"].startswith("CPU"):  # a GPU computes while the CPU loads
            row["loading"] = cell["loading_seconds"]
        base, alone = find_alone(cell, group, baseline=True), find_alone(cell, group)
        same_strategy = math.nan if alone is None else computing_seconds(cell, alone)
        if base is not None:
            row["computing"] = computing_seconds(cell, base)
            row["bookkeeping"] = same_strategy - row["computing"]
            if not pd.isna(row["loading"]) and not pd.isna(base["loading_seconds"]):
                row["computing"] -= base["loading_seconds"]
        if cell["devices"] > 1:
            row["waiting"] = cell["waiting_seconds"]
            row["predicted communication"] = cell["predicted_step_seconds"] - same_strategy
            if traced := shares.get(i):  # the rank that waits least shows what the transfer takes
                row["predicted communication"] = math.nan
                row["communication"] = min(traced) * cell["step_seconds"]
                row["waiting"] = (sum(traced) / len(traced) - min(traced)) * cell["step_seconds"]
        row["unexplained"] = row["step"] - pd.Series(row)[PARTS].sum()  # without what is not known
        if base is not None and base["run"] == cell["run"]:
            row["bookkeeping"], row["unexplained"] = math.nan, math.nan
        rows[i] = row
    return pd.DataFrame.from_dict(rows, "index", columns=["step", *PARTS]).astype(float)


def covered(spans):
    """Disjoint spans, in order, that cover the same as these (start, end)."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def length(spans):
    return sum(end - start for start, end in covered(spans))


LOADING = "enumerate(DataLoader)"  # how torch names the spans in which a DataLoader makes a batch


def read_events(trace):
    """The events of a trace of one rank (traces/profile_RANK.json) that last."""
    return [
        event
        for event in json.loads(Path(trace).read_bytes())["traceEvents"]
        if event.get("ph") == "X"
    ]


def shares_of(events):
    """Shares of the traced steps among these events, which add up to 1: computation alone,
    computation that hides communication, communication alone, loading data, and none of them:
    Python, and idleness. Raises ValueError or KeyError if there are none.

    On a GPU only the GPU's own time line counts, as the CPU runs ahead of it: kernels and copies
    are work, and Kineto's gpu_user_annotation tells which of them belong to a step or to loading.
    """
    gpu_work = {"kernel", "gpu_memcpy", "gpu_memset"}
    on_gpu = any(event.get("cat") in gpu_work for event in events)
    annotation = "gpu_user_annotation" if on_gpu else "user_annotation"
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


def read_traces(folder):
    """A row for each rank of each profiled run, with its time shares, and a sentence for each trace
    that cannot be read.
    """
    rows, notes = [], []
    for trace in sorted(folder.rglob("traces/profile_*.json")):
        try:
            rows.append(
                read_record(trace.parent.parent / "run.json", folder)
                | {"rank": trace.stem.split("_")[1], "shares": shares_of(read_events(trace))}
            )
        except UNREADABLE as reason:
            notes.append(
                f"skipped {trace.relative_to(folder)}: no trace of a run "
                f"({type(reason).__name__}: {reason})"
            )
    return rows, notes


def find_shares(traces, group):
    """{index of a cell: [each rank's share of communication that computing does not hide]} of the
    cells of which one run was profiled, however long it was and on however much data.
    """
    sizes = ("samples", "eval_samples", "epochs", "steps")
    work = [name for name in SAME_WORK if name not in sizes]
    names, traced, found = [*work, *CELL], pd.DataFrame(traces), {}
    for i, cell in group.iterrows() if len(traced) else []:
        fits = same(cell, traced, names)
        shares = [row["communication"] for row in fits[fits["run"] == fits["run"].max()]["shares"]]
        if shares:
            found[i] = shares
    return found
