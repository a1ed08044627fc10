"""Turn run records into a lab report: the time, speedup and efficiency of each strategy on each
node shape, and why.

    python report.py runs/                    # every run.json below runs/
    python report.py --times times.csv        # by hand: strategy,nodes,gpus_per_node,seconds
    python report.py runs/ --predict 64 --check runs/check-ddp-1234/check.json    # more devices

prints the tables, and writes report.md, report.csv and plots (PNG) into the output directory. It
reads nothing but the records that the training scripts leave, their traces (--profile), the plan of
a sweep (sweep.csv), and the links that sbatch/check.py measured (check.json). The formulas are the
first thing in this file; those of memory are in fit.py, those of a step's time in predict.py.
"""

import argparse
import contextlib
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pandas as pd

from explain import (
    PARTS,
    SAME_WORK,
    STEADY_STEPS,
    computing_seconds,
    doubts,
    find_alone,
    find_link,
    predict_cells,
    same,
    sentences,
    shape,
    split_step,
)
from fit import bytes_held, bytes_of_activations, bytes_of_parts, compute_dtype, name_yaml
from pictures import plot_work
from predict import link_of, predict

# ----------------------------------------------------------------------------------------- formulas


def speedup(baseline_seconds, seconds):
    """S(p) = T(baseline) / T(p). T is the time of the same work: what steady steps take per sample,
    or the seconds of training.
    """
    return baseline_seconds / seconds


def efficiency(speedup, devices):
    """S(p) / p: the share of the devices' time that communication and waiting have left."""
    return speedup / devices


def bytes_sent(strategy, parameters, devices, gloo=False):
    """Bytes that each rank sends in a step, in fp32 and without accumulation; None if no formula is
    known. `strategy` is the name of a YAML.

    With ring algorithms, an all-gather or a reduce-scatter of P bytes costs a rank (n - 1) / n x P.
    An all-reduce is one of each. DDP, ZeRO-1, ZeRO-2 and fsdp_keep need both once. FSDP and ZeRO-3
    gather once more, for the backward pass: section 7 of https://arxiv.org/abs/1910.02054. ZeRO-3
    spares this for the 30 million parameters that it may hold at a time, as the last of the forward
    pass are the first of the backward pass. FSDP gathers a model without layers, such as the LSTM,
    only once; this is left out here. gloo has no reduce-scatter: an all-reduce takes its place,
    with twice the bytes, and in ZeRO-1 and ZeRO-2 a reduce, with 1.5 times. Offload sends nothing
    more.
    """
    if strategy == "baseline":
        return 0
    strategy = strategy.removesuffix("_offload")
    gathers = {"ddp": 1, "zero1": 1, "zero2": 1, "fsdp_keep": 1, "fsdp": 2,
               "zero3": max(1, 2 - 30e6 / parameters)}.get(strategy)
    scatters = {"zero1": 1.5, "zero2": 1.5, "fsdp_keep": 2, "fsdp": 2, "zero3": 2}
    scatters = scatters.get(strategy, 1) if gloo else 1
    return gathers and (gathers + scatters) * (devices - 1) / devices * 4 * parameters


# Peak FLOP/s of 16-bit products (bf16, fp16) that add up in fp32, and of TF32, which the scripts
# turn on for fp32; without sparsity, from NVIDIA's data sheets. Names are whole, as in torch:
# an H100 PCIe or NVL is slower than the H100 of a DGX.
# https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
# https://www.nvidia.com/en-us/data-center/h100/ h200/ and l40s/; for the RTX 4090 appendix A of
# https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
PEAK = {
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494e12),  # SXM
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA H100 NVL": (835e12, 417e12),
    "NVIDIA H200": (989e12, 494e12),  # SXM
    "NVIDIA H200 NVL": (835e12, 417e12),
    "NVIDIA L40S": (362e12, 183e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12),
}


def flops_utilization(row):
    """MFU: of the devices' peak, 6 FLOPs a token and parameter of the layers, without embeddings:
    https://arxiv.org/abs/2001.08361, section 2.1. Products of queries and keys are not counted.
    None for a device whose peak is not known, and for a model that is no transformer.
    """
    peaks, precision = PEAK.get(row["device_name"]), row["precision"]
    peak = peaks and {"bf16": peaks[0], "fp16": peaks[0], "no": peaks[1]}.get(precision)
    if not peak or not row["tokens_per_second"] or pd.isna(row["layers"]):
        return None
    hidden = row["hidden_size"]
    parameters = row["layers"] * (4 * hidden * hidden + 2 * hidden * row["intermediate_size"])
    return 6 * parameters * row["tokens_per_second"] / (peak * row["devices"])


# ------------------------------------------------------------------------------------------ reading

WARMUP_STEPS = 10  # of the training scripts: samples_per_second leaves them out
CELL = ["strategy", "nodes", "gpus_per_node", "devices", "per_device_batch_size",
        "gradient_accumulation_steps", "global_batch_size", "strategy_options",
        "activation_checkpointing"]
ARCHITECTURE = ["layers", "hidden_size", "intermediate_size"]  # of a transformer; else not known
FIGURES = ["seconds", "total_seconds", "samples_per_second", "tokens_per_second", "peak_memory_mb",
           "training_memory_mb", "samples_trained", "trained_steps", "loading_seconds",
           "waiting_seconds", "padded_tokens"]
NAMES = [*SAME_WORK, *CELL, *ARCHITECTURE, *FIGURES,
         "run", "problem", "parameters", "loss_history", "ranks", "log"]


def parse_seconds(text):
    """Seconds from "186.6", "3m6.619s" or "1h2m3s". Raises ValueError."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+(?:\.\d*)?)s?", str(text).strip())
    parts = match.groups() if match else (0, 0, 0)
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts, (3600, 60, 1), strict=True))
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time such as 186.6 or 3m6.619s")
    return seconds


def as_time_prints(seconds):
    """118.544 as 1m58.544s."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 60000}m{milliseconds % 60000 / 1000:.3f}s"


def read_record(path, folder):
    """One run.json as a row with NAMES; `strategy` is the YAML's name. Raises ValueError, KeyError,
    TypeError or the like if it is no run.json.

    The last incomplete batch of an epoch is dropped, so `samples_trained` depends a little on the
    global batch.
    """
    record = json.loads(path.read_bytes())
    workload = record["workload"]
    row = {name: workload.get(name, record.get(name)) for name in NAMES}
    problem = {"completed": "", "preempted": "stopped before its end", "failed": "broke down",
               "running": "died, or is still running"}[record["status"]]
    if (log := find_log(path, record, folder)) and record["status"] == "running":
        problem += f": see {log}"
    if not problem and record["resumed_from"]:
        problem = "resumed: not a timing"
    if not problem and record.get("profiled"):
        problem = "profiled: not a timing"
    row |= {
        "run": str(path.parent.relative_to(folder)),
        "problem": problem,
        "dynamo": record.get("dynamo", row["dynamo"]),  # what ran, not what was asked for
        "gpus_per_node": record["devices"] // record["nodes"],
        "seconds": float(record["seconds"]["train"]),
        "total_seconds": float(record["seconds"]["total"]),
        "peak_memory_mb": max(float(rank["peak_memory_mb"] or "nan") for rank in record["ranks"]),
        "training_memory_mb": max(
            float(rank["peak_memory_mb"] or "nan") - rank.get("memory_before_mb", math.nan)
            for rank in record["ranks"]),
        "samples_trained": record["steps"] * record["global_batch_size"],
        "trained_steps": record["steps"],
        "loading_seconds": record["seconds"].get("loading", math.nan) / max(1, record["steps"]),
        "waiting_seconds": find_waiting(record),
        "padded_tokens": find_padded_tokens(record),
        "log": log,
        "torch": record["versions"]["torch"],
        "strategy": name_yaml(record["strategy"], record.get("strategy_options") or {}),
        "samples_per_second": record.get("samples_per_second") or None,
        "strategy_options": json.dumps(record.get("strategy_options") or {}, sort_keys=True),
        "activation_checkpointing": bool(record.get("activation_checkpointing")),
    }
    if not problem and not (0 < row["seconds"] < math.inf and 0 < row["total_seconds"] < math.inf
                            and row["parameters"] > 0):
        raise ValueError("times and parameters have to be greater than 0")
    for rank in record["ranks"]:
        if {"rank", "host", "real", "user", "sys"} - set(rank):
            raise ValueError(f"a rank has only {', '.join(rank)}")
    return row | {"tokens_per_second": row["tokens_per_second"] or None}


def find_waiting(record):
    """Seconds per step that a rank waits for the slowest one, on average: the most that a rank
    computes less the mean. The CPU seconds of a thread tell it, where the CPU is what computes.
    """
    computed = [rank.get("train_cpu", math.nan) for rank in record["ranks"]]
    if not record["device_name"].startswith("CPU"):
        return math.nan
    return (max(computed) - sum(computed) / len(computed)) / max(1, record["steps"])


def find_padded_tokens(record):
    """Tokens per device and step, padding included, the mean over the ranks: a larger global batch
    is padded more. NaN for what has no tokens.
    """
    if not record.get("tokens") or record.get("padding_share") is None or not record["steps"]:
        return math.nan
    return record["tokens"] / (1 - record["padding_share"]) / record["steps"] / record["devices"]


def find_log(path, record, folder):
    """The log of a run: a sweep's RUN.log, or Slurm's default name; None if neither is known."""
    log = path.parent.with_name(path.parent.name + ".log")
    job = record.get("slurm_job_id")
    return str(log.relative_to(folder)) if log.exists() else f"slurm-{job}.out" if job else None


def read_runs(folder):
    """All runs below a folder, as rows, and a sentence for each file that is no record. A run that
    was planned (sweep.csv) but is not there is a row with a problem, and has the workload of the
    sweep's other runs. Raises FileNotFoundError if there is nothing at all.
    """
    rows, notes, found = [], [], set()
    for path in sorted(folder.rglob("run.json")):
        found.add(path.parent)
        try:
            rows.append(read_record(path, folder))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
                OSError) as reason:
            notes.append(f"skipped {path}: no run record ({type(reason).__name__}: {reason})")
    for plan in sorted(folder.rglob("sweep.csv")):
        try:
            for planned in pd.read_csv(plan, dtype={"job": str}).to_dict("records"):
                path = plan.parent / planned["run"]
                if path not in found:
                    job = f", job {planned['job']}" if isinstance(planned["job"], str) else ""
                    run = str(path.relative_to(folder))
                    cell = {"strategy": planned["strategy"]} | {
                        name: int(planned[name]) for name in ("nodes", "gpus_per_node")}
                    others = [row for row in rows if not row["problem"]
                              and Path(row["run"]).parent == Path(run).parent]
                    work = {name: others[0][name] for name in SAME_WORK} if others else {}
                    rows.append(cell | work | {
                        "run": run, "problem": f"failed or missing{job}: see {run}.log"})
        except (ValueError, LookupError, TypeError, OSError) as reason:
            notes.append(f"skipped {plan}: no plan of a sweep ({type(reason).__name__}: {reason})")
    if not rows and not notes:
        raise FileNotFoundError(f"no run.json below {folder}: the training scripts leave one in "
                                "their output directory")
    return rows, notes


def read_times(path):
    """Rows from times that were measured by hand. Raises ValueError with file and line."""
    try:
        table = pd.read_csv(path, dtype=str, skipinitialspace=True, index_col=False)
    except ValueError as reason:
        raise ValueError(f"{path}: {reason}") from None
    missing = {"strategy", "nodes", "gpus_per_node", "seconds"} - set(table.columns)
    if missing:
        raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; the first line has to "
                         "name strategy,nodes,gpus_per_node,seconds")
    if not len(table):
        raise ValueError(f"{path}: there are no times below the first line")
    rows = []
    for line, values in enumerate(table.to_dict("records"), 2):
        try:
            nodes, gpus = int(values["nodes"]), int(values["gpus_per_node"])
            if min(nodes, gpus) < 1:
                raise ValueError("nodes and gpus_per_node have to be 1 or more")
            rows.append({
                "strategy": values["strategy"].strip().lower(), "nodes": nodes,
                "gpus_per_node": gpus, "devices": nodes * gpus,
                "seconds": parse_seconds(values["seconds"]), "problem": "",
                "script": f"measured by hand, {Path(path).name}", "run": f"line {line}"})
        except (ValueError, AttributeError) as reason:
            raise ValueError(f"{path}, line {line}: {reason}") from None
    return rows


# ---------------------------------------------------------------------------------------- comparing


SURE = ["surely_faster", "surely_slower"]  # than one device, whichever repeats are compared


def make_cells(runs):
    """A row for each workload, strategy, shape and batch: the medians of its repeats, speedup and
    efficiency. `shown` is the strategy in words. Speedups are against a baseline that keeps its
    activations.
    """
    rows, timings = [], runs[runs["problem"] == ""]
    for values, repeats in timings.groupby(SAME_WORK + CELL, dropna=False, sort=False):
        median = repeats["seconds"].median()
        middle = repeats.loc[(repeats["seconds"] - median).abs().idxmin()]  # or one beside it
        row = dict(zip(SAME_WORK + CELL, values, strict=True))
        row |= {name: repeats[name].median() for name in FIGURES}
        row |= {name: middle[name] for name in [*ARCHITECTURE, "run", "parameters", "ranks", "log"]}
        rows.append(row | {
            "repeats": len(repeats), "fastest": repeats["seconds"].min(),
            "slowest": repeats["seconds"].max(), "losses": list(repeats["loss_history"]),
            "lowest_rate": repeats["samples_per_second"].min(),
            "highest_rate": repeats["samples_per_second"].max()})
    cells = pd.DataFrame(rows, columns=SAME_WORK + CELL + ARCHITECTURE + FIGURES + [
        "repeats", "fastest", "slowest", "lowest_rate", "highest_rate", "run", "parameters",
        "ranks", "log", "losses"])  # fmt: skip
    cells["step_seconds"] = (cells["global_batch_size"] / cells["samples_per_second"]).astype(float)
    warm = (cells["trained_steps"] // 2).clip(upper=WARMUP_STEPS)
    cells["steady_steps"] = (cells["trained_steps"] - warm).where(cells["step_seconds"].notna())
    steady = cells["steady_steps"] >= STEADY_STEPS
    width = (cells["highest_rate"] - cells["lowest_rate"]) / cells["samples_per_second"]
    other = (cells["slowest"] - cells["fastest"]) / cells["seconds"]
    cells["spread"] = width.where(steady, other).astype(float)
    for name in ("fixed", "basis", "speedup", "efficiency", "speedup_low", "speedup_high"):
        cells[name] = pd.Series(dtype=object if name in ("fixed", "basis") else float)
    recomputing = cells["activation_checkpointing"].eq(True)  # not known is no
    cells["activation_checkpointing"] = recomputing
    cells[SURE] = False
    for i, cell in cells.iterrows():
        fixed, baseline = find_baseline(cell, cells[~recomputing])
        if fixed:
            if min(cell["steady_steps"], baseline["steady_steps"]) >= STEADY_STEPS:
                rates = cell[["samples_per_second", "lowest_rate", "highest_rate"]]
                basis, *times = "steady steps", *(1 / rates)
                base, *ends = 1 / baseline[["samples_per_second", "highest_rate", "lowest_rate"]]
            else:
                basis, *times = "training", *cell[["seconds", "slowest", "fastest"]]
                base, *ends = baseline[["seconds", "fastest", "slowest"]]
            gain, low, high = (speedup(base, seconds) for seconds in times)
            found = {"fixed": fixed, "basis": basis, "speedup": gain, "speedup_low": low,
                     "speedup_high": high, "efficiency": efficiency(gain, cell["devices"])}
            cells.loc[i, list(found)] = list(found.values())
            cells.loc[i, SURE] = [times[1] < ends[0], times[2] > ends[1]]
    cells["shown"] = cells["strategy"]
    for _, alike in cells.groupby([*SAME_WORK, "strategy"], dropna=False):
        cells.loc[alike.index, "shown"] += differing_options(alike["strategy_options"])
    cells.loc[recomputing, "shown"] += ", recomputing"
    for _, twins in cells.groupby([*SAME_WORK, "shown", "nodes", "gpus_per_node"], dropna=False):
        if len(twins) > 1:  # of one shape, with other batches
            cells.loc[twins.index, "shown"] += [
                f", batch {twin['per_device_batch_size']:.0f} x "
                f"{twin['gradient_accumulation_steps']:.0f}" for _, twin in twins.iterrows()]
    cells["mfu"] = [flops_utilization(cell) if isinstance(cell["device_name"], str) else None
                    for _, cell in cells.iterrows()]
    return cells


def differing_options(options):
    """For each of several variants of a strategy, the options in which they differ, such as
    " (offload: true)", or "".
    """
    variants = [json.loads(text) if isinstance(text, str) else {} for text in options]
    differ = sorted({key for variant in variants for key in variant
                     if any(other.get(key) != variant[key] for other in variants)})
    texts = [", ".join(f"{key}: {json.dumps(variant.get(key))}" for key in differ)
             for variant in variants]
    return [f" ({text})" if text else "" for text in texts]


def find_baseline(cell, cells):
    """What is fixed between a cell and its 1-device baseline, and that baseline; (None, None) if
    there is none.

    Both have to train on as many samples, give or take 1 %. With a fixed number of steps instead of
    epochs, or where much of an epoch does not fill a global batch, more devices with the same batch
    each do more or less work.
    """
    base = same(cell, cells[(cells["strategy"] == "baseline") & (cells["devices"] == 1)], SAME_WORK)
    if not pd.isna(cell["samples_trained"]):
        base = base[(base["samples_trained"] / cell["samples_trained"] - 1).abs() <= 0.01]
    per_device = same(cell, base, ["per_device_batch_size", "gradient_accumulation_steps"])
    in_all = same(cell, base, ["global_batch_size"])
    for fixed, found in (("batch per device", per_device), ("global batch", in_all)):
        if len(found):
            if pd.isna(cell["global_batch_size"]):
                fixed = "not known"
            return "itself" if found.index[0] == cell.name else fixed, found.iloc[0]
    return None, None


# ---------------------------------------------------------------------------------- where time goes


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
    return [event for event in json.loads(Path(trace).read_bytes())["traceEvents"]
            if event.get("ph") == "X"]


def time_shares(trace):
    """`shares_of` a trace of one rank. Raises ValueError or KeyError if it is no such trace."""
    return shares_of(read_events(trace))


def shares_of(events):
    """Shares of the traced steps among these events, which add up to 1: computation alone,
    computation that hides communication, communication alone, loading data, and none of them:
    Python, and idleness.

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
    clipped = {key: [(max(a, start), min(b, end)) for a, b in value if b > start and a < end]
               for key, value in spans.items()}
    compute = clipped["compute"]
    communication = length(clipped["communication"])
    hidden = communication + length(compute) - length(clipped["communication"] + compute)
    loading = length(clipped["communication"] + clipped["data"])
    busy = length(clipped["communication"] + clipped["data"] + compute)
    parts = {"computation": busy - loading, "both at once": hidden,
             "communication": communication - hidden, "loading data": loading - communication,
             "neither": end - start - busy}
    return {name: part / (end - start) for name, part in parts.items()}


# ------------------------------------------------------------------------------------------- output

KINDS = """**What is fixed** says against what a speedup is measured. *Batch per device*: each
device has as much to do in a step as the baseline. So the global batch grows with the devices, an
epoch has fewer steps, and the losses differ from the baseline's. *Global batch*: the steps are the
same, and without dropout the losses and weights are those of the baseline. Each device has its part
of the batch. *Not known*: the times were measured by hand, and you answer for the work being the
same. The baseline is one device. Speedup = its time / time, and efficiency = speedup / devices.

**Which time.** The column *of* says it. *Steady steps* is the time per sample of all steps but the
first 10, in which memory and connections are set up. It is used where both cells have at least 30
steady steps. *Training* is `seconds`, all of training. It is used for short runs and for times
measured by hand. `total` also has the start, evaluations and saving. All figures are medians over
the repeats. *Note* marks a cell that you should not rely on: it has fewer than 30 steady steps, or
its repeats differ by more than 10 %. MFU is the share of the GPU's peak FLOP/s that the model's
matrix products use, the warm-up included."""


def table(columns):
    """Markdown of a table; what is not known is blank."""
    frame = pd.DataFrame(columns).astype(object)
    return frame.where(frame.notna(), "").to_markdown(index=False, disable_numparse=True)


def show(values, form):
    return [None if value is None or pd.isna(value) else form.format(value) for value in values]


def shapes_of(cells):
    return [shape(cell) for _, cell in cells.iterrows()]


def name_work(cell):
    """A workload in words."""
    values = {name: cell[name] for name in SAME_WORK
              if not pd.isna(cell[name]) and cell[name] not in ("no", "")}
    return ", ".join(str(value) if name in ("script", "model", "device_name") else
                     f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in values.items())


def describe_work(group, parts, held, missing, links, predict_to):
    """The sections of one workload, as Markdown; `missing` are its runs that are no timings."""
    timed = {(cell["strategy"], shape(cell)) for _, cell in group.iterrows()}
    lost = sorted({(run["strategy"], shape(run)) for _, run in missing.iterrows()} - timed)
    shown = sentences(group, parts, [f"{strategy} {size}" for strategy, size in lost], bool(links))
    if shown:
        yield "**What this shows.** " + " ".join(shown)
    shapes = [shape(cell) for _, cell in group.iterrows()]
    spread = [f"{cell['fastest']:.2f}-{cell['slowest']:.2f}" for _, cell in group.iterrows()]
    yield table({
        "strategy": group["shown"], "nodes x devices": shapes,
        "global batch": show(group["global_batch_size"], "{:.0f}"), "runs": group["repeats"],
        "step in ms": show(group["step_seconds"] * 1000, "{:.2f}"),
        "samples/s": show(group["samples_per_second"], "{:,.1f}"),
        "seconds": show(group["seconds"], "{:.2f}"), "fastest-slowest": spread,
        "total": show(group["total_seconds"], "{:.1f}"),
        "peak MB": show(group["peak_memory_mb"], "{:,.0f}"), "MFU": show(group["mfu"], "{:.0%}"),
        "fixed": group["fixed"], "of": group["basis"],
        "speedup": show(group["speedup"], "{:.2f}"),
        "efficiency": show(group["efficiency"], "{:.0%}"),
        "note": [doubts(cell) or None for _, cell in group.iterrows()],
        "median run": group["run"], "log": group["log"]})
    if lost:
        names = ", ".join(f"{strategy} {size}" for strategy, size in lost)
        yield f"Nothing to show of: {names}; see the end."
    keeping = group[~group["activation_checkpointing"]]
    if not ((keeping["strategy"] == "baseline") & (keeping["devices"] == 1)).any():
        yield ("No speedups: there is no 1-device run of accelerate_configs/baseline.yaml of this "
               f"work{', without --activation_checkpointing' * (len(keeping) < len(group))}.")
    elif group["speedup"].isna().any():
        yield ("Blank speedups: no baseline has the same batch per device or the same global batch "
               "and trained on as many samples (1 % more or less). With --max_train_steps it takes "
               "the same global batch; with epochs, numbers of samples that global batches divide.")
    known = group[group["parameters"].notna()]
    if len(parts):
        yield describe_parts(group, parts)
    yield from describe_predictions(group, links, predict_to)
    if len(known):
        yield describe_formulas(known, held)
        yield "The median runs and their ranks, as `time` prints them:"
        ranks = [(cell["run"], rank) for _, cell in known.iterrows() for rank in cell["ranks"]]
        yield table([{"run": run, "rank": rank["rank"], "host": rank["host"]}
                     | {name: as_time_prints(rank[name]) for name in ("real", "user", "sys")}
                     | {"peak MB": f"{rank['peak_memory_mb'] or math.nan:,.0f}"}
                     for run, rank in ranks])


def describe_parts(group, parts):
    """Where the time of a step went, as Markdown."""
    cells = group.loc[parts.index]
    return (
        "Where the time of a step went, in ms. The parts add up to the mean step, all steps of "
        "training. *Computing* is the baseline's steady step without its loading, *bookkeeping* "
        "what the same strategy takes longer on one device. *Communication* is what the prediction "
        "adds for several devices, and *waiting* is how much longer the slowest rank computes than "
        "the mean rank; profiled runs of the same cell measure both. *Start* is what the first "
        "steps took longer, shared out over all steps. What is left is *unexplained*; below zero, "
        "the other parts are too large.\n\n" + table({
            "strategy": cells["shown"], "nodes x devices": shapes_of(cells),
            "step": show(parts["step"] * 1000, "{:.2f}")}
            | {name: show(parts[name] * 1000, "{:.2f}") for name in PARTS}))


def describe_predictions(group, links, predict_to):
    """Predicted steps beside the measured ones, and, up to `predict_to` devices, further ones with
    their intervals, as Markdown.
    """
    known = group[group["predicted_step_seconds"].notna() & group["step_seconds"].notna()]
    misses = known["predicted_step_seconds"] / known["step_seconds"] - 1
    if len(known):
        alone = [computing_seconds(cell, find_alone(cell, group)) for _, cell in known.iterrows()]
        yield ("Predicted from the same strategy's step on one device and the measured link "
               "(predict.py); a miss above zero means that the prediction is too long:")
        yield table({
            "strategy": known["shown"], "nodes x devices": shapes_of(known),
            "step in ms, one device": show([seconds * 1000 for seconds in alone], "{:.2f}"),
            "predicted": show(known["predicted_step_seconds"] * 1000, "{:.2f}"),
            "measured": show(known["step_seconds"] * 1000, "{:.2f}"),
            "miss": show(misses, "{:+.0%}")})
    if predict_to:
        miss = max(misses.abs().max() if len(known) else 0, 0.1)
        yield from describe_more_devices(group, links, predict_to, miss)


def describe_more_devices(group, links, predict_to, miss):
    """Predicted steps and efficiencies at 2, 4, ... `predict_to` devices, with intervals that begin
    at a relative `miss`, as Markdown.
    """
    alone = group[(group["devices"] == 1) & group["step_seconds"].notna()]
    alone, rows = alone[alone["strategy"] != "baseline"], []
    if not len(alone):
        yield ("No prediction: it starts from a run of each strategy on one device "
               "(--num_processes 1), long enough for a samples_per_second.")
        return
    counts = {2**i for i in range(1, int(math.log2(predict_to)) + 1)} | {predict_to}
    for (_, cell), devices in itertools.product(alone.iterrows(), sorted(counts)):
        link, base = find_link(cell, links), find_alone(cell, group, baseline=True)
        ring, tree = (link and predict(cell["step_seconds"], cell, devices, link, tree)
                      for tree in (False, True))
        if ring is None:  # no link of this kind of device, or no formula
            continue
        grown = (1 + miss) ** max(1, 1 + math.log2(devices / link["processes"]))
        low, high = min(tree, ring) / grown, max(tree, ring) * grown
        row = {"strategy": cell["shown"], "devices": devices,
               "step in ms, predicted": f"{ring * 1000:.2f}",
               "from-to": f"{low * 1000:.2f}-{high * 1000:.2f}",
               "efficiency, predicted": None, "efficiency, from-to": None}
        if base is not None:
            best, worst = (base["step_seconds"] / seconds for seconds in (low, high))
            row |= {"efficiency, predicted": f"{base['step_seconds'] / ring:.0%}",
                    "efficiency, from-to": f"{worst:.0%}-{min(1, best):.0%}"}
        rows.append(row)
    if not rows:
        yield "No prediction: no check.json is of devices like these, or no formula is known."
        return
    link = find_link(alone.iloc[0], links)
    yield ("More devices, by formula: the batch per device as on one, every device behind the link "
           f"that {link['processes']} processes on {link['nodes']} node(s) measured. The interval "
           f"begins at {miss:.0%}, the largest miss above but at least 10 %, and grows by as much "
           "with each doubling beyond what was checked. Its low end sends through a tree, its high "
           "end round a ring. Not modelled: links that nodes share, slower ranks, and the topology "
           "inside a node.")
    yield table(rows)


HELD = ["parameters", "gradients", "states", "host"]  # what fit.py calls the parts of memory


def hold_by_formula(known):
    """Bytes of parameters, gradients, states and activations of a rank of each cell by formula, as
    a DataFrame; NaN where there is no formula.
    """
    rows = {}
    for i, cell in known.iterrows():
        strategy, precision = cell["strategy"], cell["precision"]
        row = dict.fromkeys([*HELD, "activations"], math.nan)
        if precision in ("no", "bf16") and bytes_held(strategy, 1, 1) is not None:
            row |= bytes_of_parts(strategy, cell["parameters"], int(cell["devices"]), precision)
            tokens = float(cell["per_device_batch_size"] * cell["sequence_length"])
            kept = bytes_of_activations(
                tokens, *cell[ARCHITECTURE].astype(float), compute_dtype(strategy, precision),
                cell["activation_checkpointing"])
            row["activations"] = math.nan if kept is None else kept
        # With accumulation these keep whole gradients from the first micro-batch to the last.
        keeps = strategy == "zero1" or strategy.startswith("fsdp")
        if keeps and cell["gradient_accumulation_steps"] > 1:
            row |= dict.fromkeys(HELD, math.nan)
        rows[i] = row
    return pd.DataFrame.from_dict(rows, "index", float, columns=[*HELD, "activations"])


def describe_formulas(known, held):
    """What each rank of these cells sends and holds by formula, and its measured peak, as
    Markdown.
    """
    sent = []
    on_cpu = known["device_name"].iloc[0].startswith("CPU")
    for _, cell in known.iterrows():
        simple = cell["precision"] == "no" and cell["gradient_accumulation_steps"] == 1
        if cell["strategy"].startswith("zero3") and cell["activation_checkpointing"]:
            simple = False  # was not counted
        size = cell["strategy"], cell["parameters"], cell["devices"], on_cpu
        sent.append(bytes_sent(*size) if simple else None)
    sent, kept = pd.Series(sent, known.index, float), held["activations"]
    held = held.drop(columns="activations").sum(axis=1, skipna=False)
    peak = "peak MB, resident set" if on_cpu else "peak MB, allocated by torch"
    return ("What the formulas say of a rank. Bytes sent are those in fp32 without accumulation, "
            "and over gloo on a CPU. Bytes held include what is offloaded to the host. Activations "
            "are those of the layers of a transformer, for windows of full length and without "
            "dropout. The last column is the measured peak without what the rank held before it "
            "loaded the model: libraries and data.\n\n" + table({
                "strategy": known["shown"], "devices": known["devices"],
                "parameters": show(known["parameters"], "{:,.0f}"),
                "MB sent per step": show(sent / 1e6, "{:,.2f}"),
                "MB of parameters, gradients, Adam": show(held / 1e6, "{:,.2f}"),
                "MB of activations, at most": show(kept / 1e6, "{:,.2f}"),
                peak + " measured": show(known["peak_memory_mb"], "{:,.0f}"),
                "MB of training alone": show(known["training_memory_mb"], "{:,.0f}")}))


def read_traces(folder):
    """A row for each rank of each profiled run, with its time shares, and a sentence for each trace
    that cannot be read.
    """
    rows, notes = [], []
    for trace in sorted(folder.rglob("traces/profile_*.json")):
        try:
            path = trace.parent.parent / "run.json"
            row = read_record(path, folder)
            rows.append(row | {"rank": trace.stem.split("_")[1], "shares": time_shares(trace)})
        except (ValueError, LookupError, TypeError, OSError) as reason:
            notes.append(f"skipped {trace}: no trace of a run ({type(reason).__name__}: {reason})")
    return rows, notes


def describe_traces(traces):
    """The time shares of profiled runs, as Markdown."""
    return table([{name: row[name] for name in ("run", "strategy", "rank")}
                  | {name: f"{share:.0%}" for name, share in row["shares"].items()}
                  for row in traces])


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


# --------------------------------------------------------------------------------------------- main


def parse_args():
    parser = argparse.ArgumentParser(
        description="Tables and plots of time, speedup and efficiency from run records.")
    parser.error = lambda message: sys.exit(f"error: {message} (--help lists the options)")
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="where the runs are: every run.json below it is read")
    add("--times", type=Path, help="CSV of times measured by hand, as 186.6 or 3m6.6s: "
        "strategy,nodes,gpus_per_node,seconds")
    add("--output_dir", type=Path, default=Path("."),
        help="where report.md, report.csv and the plots go (default: .)")
    add("--predict", type=int, metavar="N",
        help="also step times at 2, 4, ... N devices, by formula")
    add("--check", type=Path, help="the link to predict with: a check.json of sbatch/check.py "
        "(without: those that lie below the folder), or")
    add("--bandwidth", type=float, help="of the link, in GB/s, and")
    add("--latency", type=float, help="of a message between two devices, in microseconds")
    args = parser.parse_args()
    if not args.folder and not args.times:
        parser.error("a folder of runs is needed, or --times")
    for path in (args.folder, args.times, args.check):
        if path and not path.exists():
            parser.error(f"there is no {path}")
    if args.predict is not None and args.predict < 2:
        parser.error(f"--predict needs at least 2 devices, got {args.predict}")
    if (args.bandwidth is None) != (args.latency is None):
        parser.error("--bandwidth and --latency describe a link together")
    if args.bandwidth is not None and not (args.bandwidth > 0 and args.latency >= 0):
        parser.error("--bandwidth has to be greater than 0, and --latency not negative")
    try:
        args.links = read_links(args)
    except (TypeError, ValueError, LookupError, AttributeError, OSError) as reason:
        parser.error(f"{args.check} is no check.json of several ranks ({type(reason).__name__}: "
                     f"{reason})")
    if args.predict and not args.links:
        parser.error("--predict needs the link: --check with a check.json of several ranks "
                     "(sbatch/check.py leaves it), or --bandwidth and --latency")
    return args


def read_link(path):
    """A check.json. Raises ValueError, LookupError, TypeError or AttributeError if it has no
    measured link.
    """
    link = json.loads(path.read_bytes())
    lines = link["collectives"].values()
    for line in [*lines, *(line["in_a_row"] for line in lines)]:
        if not (line["bandwidth_bytes_per_second"] > 0 and line["latency_seconds"] >= 0):
            raise ValueError("a bandwidth is not greater than 0, or a latency negative")
    return {"nodes": int(link["nodes"]), "processes": int(link["processes"]),
            "backend": link["backend"], "collectives": link["collectives"],
            "busy": float(link["busy"])}


def read_links(args):
    """The links to predict with: the given one, or all that lie below the folder of runs."""
    if args.check:
        return [read_link(args.check)]
    if args.bandwidth is not None:
        return [link_of(args.bandwidth * 1e9, args.latency / 1e6)]
    return find_links(args.folder) if args.folder else []


def find_links(folder):
    """The links of all check.json below a folder, the median of those of one shape. A check of one
    rank has none, and neither has one of an older version.
    """
    shapes = {}
    for path in sorted(folder.rglob("check.json")):
        with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError, OSError):
            link = read_link(path)
            key = link["nodes"], link["processes"], link["backend"]
            shapes.setdefault(key, []).append(link)
    return [median_link(repeats) for repeats in shapes.values()]


def median_link(links):
    """A link with the median latency and bandwidth of repeated checks of one shape."""
    def median(lines):
        keys = ("latency_seconds", "bandwidth_bytes_per_second")
        return {key: statistics.median(line[key] for line in lines) for key in keys}

    found = {}
    for name in links[0]["collectives"]:
        lines = [link["collectives"][name] for link in links]
        found[name] = median(lines) | {"in_a_row": median([line["in_a_row"] for line in lines])}
    return links[0] | {
        "collectives": found,
        "busy": statistics.median(link["busy"] for link in links)}


def main():
    args = parse_args()
    try:
        rows, notes = read_runs(args.folder) if args.folder else ([], [])
        rows += read_times(args.times) if args.times else []
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {problem}")
    runs = pd.DataFrame(rows, columns=NAMES)
    cells = make_cells(runs)
    traces, unread = read_traces(args.folder) if args.folder else ([], [])
    sections = ["# Report", KINDS]
    works = list(cells.groupby(SAME_WORK, dropna=False, sort=False))
    differ = [name for i, name in enumerate(SAME_WORK)
              if len({str(values[i]) for values, _ in works}) > 1]
    if differ:
        sections.append(f"These are {len(works)} workloads, never compared with each other; they "
                        f"differ in {', '.join(differ)}.")
    others = runs[runs["problem"] != ""]
    for number, (_, group) in enumerate(works, 1):
        group = group.assign(predicted_step_seconds=predict_cells(group, args.links))
        cells.loc[group.index, "predicted_step_seconds"] = group["predicted_step_seconds"]
        parts = split_step(group, find_shares(traces, group))
        held = hold_by_formula(group[group["parameters"].notna()])
        sections += [f"## {name_work(group.iloc[0])}", *describe_work(
            group, parts, held, same(group.iloc[0], others, SAME_WORK), args.links, args.predict)]
        suffix = f"-{number}" if len(works) > 1 else ""
        files = plot_work(group, parts, held, args.output_dir, suffix)
        sections += [" ".join(f"![{file}]({file})" for file in files)]
    if traces:
        sections += [
            "## Where the time of the profiled steps went", describe_traces(traces),
            "The traces open in https://ui.perfetto.dev. Communication includes waiting for a "
            "slower rank: the rank that waits least shows best what the transfer takes. Profiled "
            "runs are never used as timings."]
    if len(others) or notes or unread:
        sections += ["## Not in the tables", "\n".join(
            [f"- {run['run']} ({run['strategy']}, {shape(run)}): {run['problem']}"
             for _, run in others.iterrows()]
            + [f"- {note}" for note in notes + unread])]
    text = "\n\n".join(section for section in sections if section) + "\n"
    print(text)
    (args.output_dir / "report.md").write_text(text, encoding="utf-8")
    inner = ["ranks", "losses", "shown", "speedup_low", "speedup_high", *SURE]
    cells.drop(columns=inner).to_csv(args.output_dir / "report.csv", index=False)
    print(f"written: {args.output_dir}/report.md, report.csv and the plots")


if __name__ == "__main__":
    main()
