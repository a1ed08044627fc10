"""Turn run records into a lab report: time, speedup and efficiency of each strategy on each node shape, and why.

    python report.py runs/                              # every run.json below runs/
    python report.py --times times.csv                  # measured by hand: strategy,nodes,gpus_per_node,seconds
    python report.py runs/ --predict 64 --check runs/check-ddp-1234/check.json        # more devices, by formula

prints the tables, and writes report.md, report.csv and plots (PNG) into the output directory. It reads nothing but the
records that the training scripts leave, their traces (--profile), the plan of a sweep (sweep.csv) and the link that
sbatch/check.sh measured. The formulas are the first thing in this file; those of memory are in fit.py.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path

import matplotlib
import pandas as pd

from fit import bytes_held, bytes_of_activations, compute_dtype

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot  # noqa: E402  after the choice above

# ---------------------------------------------------------------------------------------------------------- formulas


def speedup(baseline_seconds, seconds):
    """S(p) = T(baseline) / T(p), of the same work; T is the median of the seconds of training."""
    return baseline_seconds / seconds


def efficiency(speedup, devices):
    """S(p) / p: the share of the devices' time that communication, waiting and the rest have left."""
    return speedup / devices


def bytes_sent(strategy, parameters, devices, gloo=False):
    """Bytes that each rank sends in a step, in fp32 and without accumulation; None for what no formula is known of.
    `strategy` is the name of a YAML.

    With ring algorithms each all-gather and each reduce-scatter of P bytes costs a rank (n - 1) / n x P, an all-reduce
    is one of each. DDP, ZeRO-1 and ZeRO-2 need both once. So does FSDP if it keeps what it gathered (fsdp_keep); else
    FSDP and ZeRO-3 gather once more, for the backward pass: section 7 of https://arxiv.org/abs/1910.02054. ZeRO-3
    spares this for the 30 million parameters that the scripts let it hold at a time: the last of the forward pass are
    the first of the backward pass. FSDP gathers a model without layers, as the LSTM, only once, which is left out here.
    gloo has no reduce-scatter: an all-reduce, twice the bytes, takes its place, and in ZeRO-1 and ZeRO-2 a reduce, 1.5
    times. Offloading moves bytes between a device and its host, and sends none more.
    """
    if strategy == "baseline":
        return 0
    strategy = strategy.removesuffix("_offload")
    gathers = {"ddp": 1, "zero1": 1, "zero2": 1, "fsdp_keep": 1, "fsdp": 2,
               "zero3": max(1, 2 - 30e6 / parameters)}.get(strategy)
    scatters = {"zero1": 1.5, "zero2": 1.5, "fsdp_keep": 2, "fsdp": 2, "zero3": 2}.get(strategy, 1) if gloo else 1
    return gathers and (gathers + scatters) * (devices - 1) / devices * 4 * parameters


# Peak FLOP/s of 16-bit products (bf16, fp16) that add up in fp32, and of TF32, which the scripts turn
# on for fp32; without sparsity, from NVIDIA's data sheets. The names are whole, as torch gives them:
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


def step_seconds(alone, sent, bandwidth, latency):
    """Seconds of a step from those of one device, the bytes that a rank sends, and the link: (all overlapped, none).

    Left out: how much really overlaps, that each bucket and layer pays the latency anew, that nodes share switches, and
    that the slowest rank sets the pace.
    """
    link = latency + sent / bandwidth if sent else 0
    return max(alone, link), alone + link


# ----------------------------------------------------------------------------------------------------------- reading

# What has to be the same for two runs to be compared: other data or another device is another experiment.
SAME_WORK = ["script", "model", "dataset", "samples", "eval_samples", "sequence_length", "max_grad_norm",
             "epochs", "steps", "precision", "dynamo", "device_name", "torch"]
CELL = ["strategy", "nodes", "gpus_per_node", "devices", "per_device_batch_size", "gradient_accumulation_steps",
        "global_batch_size", "strategy_options", "activation_checkpointing"]
ARCHITECTURE = ["layers", "hidden_size", "intermediate_size"]  # of a transformer; else not known
FIGURES = ["seconds", "total_seconds", "samples_per_second", "tokens_per_second", "peak_memory_mb",
           "training_memory_mb", "samples_trained"]
NAMES = SAME_WORK + CELL + ARCHITECTURE + FIGURES + ["run", "problem", "parameters", "loss_history", "ranks", "log"]


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


def name_yaml(strategy, options):
    """The YAML of accelerate_configs/ that a record's `strategy` and `strategy_options` are from: "fsdp_keep" is "fsdp"
    that does not reshard. The strategy itself for other options, which `differing_options` tells apart.
    """
    def on_host(name):
        return (options.get(name) or {}).get("device") == "cpu"

    said = {name: str(options.get(name)).lower() for name in ("reshard_after_forward", "offload_params")}
    keeps, offloads = said["reshard_after_forward"] == "false", said["offload_params"] == "true"
    if strategy == "fsdp" and keeps != offloads:
        return "fsdp_keep" if keeps else "fsdp_offload"
    offloaded = on_host("offload_optimizer"), on_host("offload_param")
    if (strategy, *offloaded) in (("zero2", True, False), ("zero3", True, True)):
        return f"{strategy}_offload"
    return strategy


def read_record(path, folder):
    """One run.json as a row with NAMES; `strategy` is the YAML's name. Raises ValueError, KeyError, TypeError or the
    like where it is none.

    The last incomplete batch of an epoch is dropped, so `samples_trained` depends on the global batch a little.
    """
    record = json.loads(path.read_bytes())
    workload = record["workload"]
    row = {name: workload.get(name, record.get(name)) for name in NAMES}
    problem = {"completed": "", "preempted": "stopped before its end", "failed": "broke down"}[record["status"]]
    if not problem and record["resumed_from"]:
        problem = "resumed: not a timing"
    if not problem and record.get("profiled"):
        problem = "profiled: not a timing"
    row |= {
        "run": str(path.parent.relative_to(folder)),
        "problem": problem,
        "dynamo": record.get("dynamo", row["dynamo"]),  # what ran; the workload has what was asked for
        "gpus_per_node": record["devices"] // record["nodes"],
        "seconds": float(record["seconds"]["train"]),
        "total_seconds": float(record["seconds"]["total"]),
        "peak_memory_mb": max(float(rank["peak_memory_mb"] or "nan") for rank in record["ranks"]),
        "training_memory_mb": max(float(rank["peak_memory_mb"] or "nan") - rank.get("memory_before_mb", math.nan)
                                  for rank in record["ranks"]),
        "samples_trained": record["steps"] * record["global_batch_size"],
        "log": find_log(path, record, folder),
        "torch": record["versions"]["torch"],
        "strategy": name_yaml(record["strategy"], record.get("strategy_options") or {}),
        "strategy_options": json.dumps(record.get("strategy_options") or {}, sort_keys=True),
        "activation_checkpointing": bool(record.get("activation_checkpointing")),
    }
    if not (0 < row["seconds"] < math.inf and 0 < row["total_seconds"] < math.inf and row["parameters"] > 0):
        raise ValueError("times and parameters have to be greater than 0")
    for rank in record["ranks"]:
        if {"rank", "host", "real", "user", "sys"} - set(rank):
            raise ValueError(f"a rank has only {', '.join(rank)}")
    return row | {"tokens_per_second": row["tokens_per_second"] or None}


def find_log(path, record, folder):
    """The log of a run: a sweep's RUN.log, or what Slurm calls a job's by default; None if neither is known."""
    log = path.parent.with_name(path.parent.name + ".log")
    job = record.get("slurm_job_id")
    return str(log.relative_to(folder)) if log.exists() else f"slurm-{job}.out" if job else None


def read_runs(folder):
    """All runs below a folder, as rows, and a sentence for each file that is no record. What is planned (sweep.csv)
    but not there is a row with a problem, and the workload of the sweep's other runs.
    Raises FileNotFoundError if there is nothing at all.
    """
    rows, notes, found = [], [], set()
    for path in sorted(folder.rglob("run.json")):
        found.add(path.parent)
        try:
            rows.append(read_record(path, folder))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as reason:
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
                    others = [row for row in rows if Path(row["run"]).parent == Path(run).parent and not row["problem"]]
                    work = {name: others[0][name] for name in SAME_WORK} if others else {}
                    rows.append(cell | work | {"run": run, "problem": f"failed or missing{job}: see {run}.log"})
        except (ValueError, LookupError, TypeError, OSError) as reason:
            notes.append(f"skipped {plan}: no plan of a sweep ({type(reason).__name__}: {reason})")
    if not rows and not notes:
        raise FileNotFoundError(f"no run.json below {folder}: the training scripts leave one in their output directory")
    return rows, notes


def read_times(path):
    """Rows from times that were measured by hand. Raises ValueError with file and line."""
    try:
        table = pd.read_csv(path, dtype=str, skipinitialspace=True, index_col=False)
    except ValueError as reason:
        raise ValueError(f"{path}: {reason}") from None
    missing = {"strategy", "nodes", "gpus_per_node", "seconds"} - set(table.columns)
    if missing:
        raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; the first line has to name strategy,nodes,"
                         "gpus_per_node,seconds")
    if not len(table):
        raise ValueError(f"{path}: there are no times below the first line")
    rows = []
    for line, values in enumerate(table.to_dict("records"), 2):
        try:
            nodes, gpus = int(values["nodes"]), int(values["gpus_per_node"])
            if min(nodes, gpus) < 1:
                raise ValueError("nodes and gpus_per_node have to be 1 or more")
            rows.append({"strategy": values["strategy"].strip().lower(), "nodes": nodes, "gpus_per_node": gpus,
                         "devices": nodes * gpus, "seconds": parse_seconds(values["seconds"]), "problem": "",
                         "script": f"measured by hand, {Path(path).name}", "run": f"line {line}"})
        except (ValueError, AttributeError) as reason:
            raise ValueError(f"{path}, line {line}: {reason}") from None
    return rows


# --------------------------------------------------------------------------------------------------------- comparing


def make_cells(runs):
    """A row for each workload, strategy, shape and batch: the medians of its repeats, speedup and efficiency. `shown`
    is the strategy in words. Speedups are against a baseline that keeps its activations.
    """
    rows = []
    for values, repeats in runs[runs["problem"] == ""].groupby(SAME_WORK + CELL, dropna=False, sort=False):
        median = repeats["seconds"].median()
        middle = repeats.loc[(repeats["seconds"] - median).abs().idxmin()]  # the median run, or one beside it
        row = dict(zip(SAME_WORK + CELL, values, strict=True)) | {name: repeats[name].median() for name in FIGURES}
        row |= {name: middle[name] for name in [*ARCHITECTURE, "run", "parameters", "ranks", "log"]}
        rows.append(row | {"repeats": len(repeats), "fastest": repeats["seconds"].min(),
                           "slowest": repeats["seconds"].max(), "losses": list(repeats["loss_history"])})
    cells = pd.DataFrame(rows, columns=SAME_WORK + CELL + ARCHITECTURE + FIGURES + [
        "repeats", "fastest", "slowest", "run", "parameters", "ranks", "log", "losses"])
    for name in ("fixed", "speedup", "efficiency"):
        cells[name] = pd.Series(dtype=object if name == "fixed" else float)
    cells["activation_checkpointing"] = recomputing = cells["activation_checkpointing"].eq(True)  # not known is no
    for i, cell in cells.iterrows():
        fixed, baseline = find_baseline(cell, cells[~recomputing])
        if fixed:
            gain = speedup(baseline["seconds"], cell["seconds"])
            cells.loc[i, ["fixed", "speedup", "efficiency"]] = fixed, gain, efficiency(gain, cell["devices"])
    cells["shown"] = cells["strategy"]
    for _, alike in cells.groupby([*SAME_WORK, "strategy"], dropna=False):
        cells.loc[alike.index, "shown"] += differing_options(alike["strategy_options"])
    cells.loc[recomputing, "shown"] += ", recomputing"
    cells["mfu"] = [flops_utilization(cell) if isinstance(cell["device_name"], str) else None
                    for _, cell in cells.iterrows()]
    return cells


def differing_options(options):
    """For each of several variants of a strategy, the options in which they differ: " (offload: true)", or ""."""
    variants = [json.loads(text) if isinstance(text, str) else {} for text in options]
    differ = sorted({key for variant in variants for key in variant
                     if any(other.get(key) != variant[key] for other in variants)})
    texts = [", ".join(f"{key}: {json.dumps(variant.get(key))}" for key in differ) for variant in variants]
    return [f" ({text})" if text else "" for text in texts]


def same(cell, cells, names):
    """The cells that have the same values in these columns; what is not known equals what is not known."""
    for name in names:
        cells = cells[cells[name].isna()] if pd.isna(cell[name]) else cells[cells[name] == cell[name]]
    return cells


def find_baseline(cell, cells):
    """What is fixed between a cell and its 1-device baseline, and that baseline; (None, None) if there is none.

    Both have to train on as many samples, give or take 1 %: with a fixed number of steps instead of epochs, or where
    much of an epoch does not fill a global batch, more devices with the same batch each do more or less work.
    """
    base = same(cell, cells[(cells["strategy"] == "baseline") & (cells["devices"] == 1)], SAME_WORK)
    if not pd.isna(cell["samples_trained"]):
        base = base[(base["samples_trained"] / cell["samples_trained"] - 1).abs() <= 0.01]
    per_device = same(cell, base, ["per_device_batch_size", "gradient_accumulation_steps"])
    for fixed, found in (("batch per device", per_device), ("global batch", same(cell, base, ["global_batch_size"]))):
        if len(found):
            if pd.isna(cell["global_batch_size"]):
                fixed = "not known"
            return "itself" if found.index[0] == cell.name else fixed, found.iloc[0]
    return None, None


# ------------------------------------------------------------------------------------------------- where time goes


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


def time_shares(trace):
    """Shares of the traced steps of one rank (traces/profile_RANK.json), which add up to 1: computation alone, together
    with communication, which it hides, communication alone, loading data, and none of them: Python, and idleness.
    Raises ValueError or KeyError for what is no such trace.

    On a GPU only the GPU's own time line counts, as the CPU runs ahead of it: kernels and copies are work, and
    Kineto's gpu_user_annotation tells which of them belong to a step or to loading.
    """
    events = [event for event in json.loads(Path(trace).read_bytes())["traceEvents"] if event.get("ph") == "X"]
    gpu_work = {"kernel", "gpu_memcpy", "gpu_memset"}
    on_gpu = any(event.get("cat") in gpu_work for event in events)
    annotation = "gpu_user_annotation" if on_gpu else "user_annotation"
    spans = {"step": [], "communication": [], "data": [], "compute": []}
    for event in events:
        name, kind = event["name"], event.get("cat")
        key = ("step" if name.startswith("ProfilerStep") and kind == annotation else
               "communication" if name.startswith("gloo:") or kind == "kernel" and "nccl" in name.lower() else
               "data" if name.startswith(LOADING) and kind == annotation else
               "compute" if kind in gpu_work or not on_gpu and kind == "cpu_op" and name.startswith("aten::") else None)
        if key:
            spans[key].append((event["ts"], event["ts"] + event["dur"]))
    if not spans["step"]:
        raise ValueError("no traced steps")
    start, end = min(spans["step"])[0], max(end for _, end in spans["step"])
    clipped = {key: [(max(a, start), min(b, end)) for a, b in value if b > start and a < end]
               for key, value in spans.items()}
    compute = clipped["compute"]
    both, communication = length(clipped["communication"] + compute), length(clipped["communication"])
    hidden = communication + length(compute) - both
    loading = length(clipped["communication"] + clipped["data"])
    busy = length(clipped["communication"] + clipped["data"] + compute)
    parts = {"computation": busy - loading, "both at once": hidden, "communication": communication - hidden,
             "loading data": loading - communication, "neither": end - start - busy}
    return {name: part / (end - start) for name, part in parts.items()}


# ------------------------------------------------------------------------------------------------------------ output

KINDS = """**What is fixed** says against what a speedup is measured. *Batch per device*: each device has as much to do
in a step as the baseline, so the global batch grows with the devices, an epoch has fewer steps, and the run trains
otherwise. *Global batch*: the same steps and, without dropout, the same losses and weights as the baseline; each
device has its part of the batch. *Not known*: measured by hand; you answer for the work being the same. The baseline
is one device; speedup = its time / time, efficiency = speedup / devices. Times are the medians of `seconds.train` over
the repeats. Samples/s leaves out the warm-up. MFU is the share of the GPU's peak FLOP/s that the model's products use,
the warm-up included."""


def table(columns):
    """Markdown of a table; what is not known is blank."""
    frame = pd.DataFrame(columns).astype(object)
    return frame.where(frame.notna(), "").to_markdown(index=False, disable_numparse=True)


def show(values, form):
    return [None if value is None or pd.isna(value) else form.format(value) for value in values]


def shape(cell):
    return f"{cell['nodes']:.0f} x {cell['gpus_per_node']:.0f}"


def name_work(cell):
    """A workload in words."""
    values = {name: cell[name] for name in SAME_WORK if not pd.isna(cell[name]) and cell[name] not in ("no", "")}
    return ", ".join(str(value) if name in ("script", "model", "device_name") else
                     f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in values.items())


def describe_work(group, missing, link, predict):
    """The sections of one workload, as Markdown; `missing` are its runs that are no timings."""
    shapes = [shape(cell) for _, cell in group.iterrows()]
    spread = [f"{low:.2f}-{high:.2f}" for low, high in zip(group["fastest"], group["slowest"], strict=True)]
    yield table({
        "strategy": group["shown"], "nodes x devices": shapes,
        "global batch": show(group["global_batch_size"], "{:.0f}"), "runs": group["repeats"],
        "seconds": show(group["seconds"], "{:.2f}"), "fastest-slowest": spread,
        "total": show(group["total_seconds"], "{:.1f}"), "samples/s": show(group["samples_per_second"], "{:,.1f}"),
        "peak MB": show(group["peak_memory_mb"], "{:,.0f}"), "MFU": show(group["mfu"], "{:.0%}"),
        "fixed": group["fixed"], "speedup": show(group["speedup"], "{:.2f}"),
        "efficiency": show(group["efficiency"], "{:.0%}"), "median run": group["run"], "log": group["log"]})
    timed = {(cell["strategy"], shape(cell)) for _, cell in group.iterrows()}
    lost = sorted({(run["strategy"], shape(run)) for _, run in missing.iterrows()} - timed)
    if lost:
        yield "Nothing to show of: " + ", ".join(f"{strategy} {size}" for strategy, size in lost) + "; see the end."
    keeping = group[~group["activation_checkpointing"]]
    if not ((keeping["strategy"] == "baseline") & (keeping["devices"] == 1)).any():
        yield ("No speedups: there is no 1-device run of accelerate_configs/baseline.yaml of this work"
               f"{', without --activation_checkpointing' * (len(keeping) < len(group))}.")
    elif group["speedup"].isna().any():
        yield ("Blank speedups: no baseline has the same batch per device or the same global batch and trained on as "
               "many samples (1 % more or less). With --max_train_steps it takes the same global batch; with epochs, "
               "numbers of samples that global batches divide.")
    known = group[group["parameters"].notna()]
    if len(known):
        yield describe_formulas(known)
        yield "The median runs and their ranks, as `time` prints them:"
        ranks = [(cell["run"], rank) for _, cell in known.iterrows() for rank in cell["ranks"]]
        yield table([{"run": run, "rank": rank["rank"], "host": rank["host"]}
                     | {name: as_time_prints(rank[name]) for name in ("real", "user", "sys")}
                     | {"peak MB": f"{rank['peak_memory_mb'] or math.nan:,.0f}"} for run, rank in ranks])
    if predict:
        yield from describe_prediction(group, link, predict)


def describe_formulas(known):
    """What each rank of these cells sends and holds by formula, and its measured peak, as Markdown."""
    once = known["gradient_accumulation_steps"] == 1
    sizes = known[ARCHITECTURE].astype(float)
    tokens = (known["per_device_batch_size"] * known["sequence_length"]).astype(float)
    held, kept, sent = [], [], []
    on_cpu = known["device_name"].iloc[0].startswith("CPU")
    for i, cell in known.iterrows():
        strategy, precision = cell["strategy"], cell["precision"]
        size = strategy, cell["parameters"], cell["devices"]
        simple = precision in ("no", "bf16")
        again = strategy.startswith("zero3") and cell["activation_checkpointing"]  # was not counted
        sent.append(bytes_sent(*size, on_cpu) if precision == "no" and not again else None)
        held.append(bytes_held(*size, precision) if simple else None)
        kept.append(bytes_of_activations(tokens[i], *sizes.loc[i], compute_dtype(strategy, precision),
                                         cell["activation_checkpointing"]) if simple else None)
    sent, held, kept = (pd.Series(values, known.index, float) for values in (sent, held, kept))
    # With accumulation these keep whole gradients from the first micro-batch of a step to its last.
    whole = known["strategy"].eq("zero1") | known["strategy"].str.startswith("fsdp")
    sent, held = sent.where(once), held.where(once | ~whole)
    peak = "peak MB, resident set" if on_cpu else "peak MB, allocated by torch"
    return ("What the formulas say of a rank (sent: in fp32, without accumulation, over gloo on a CPU; held: with what "
            "is offloaded to the host). Activations are those of the layers of a transformer, for windows of full "
            "length and without dropout. The last column is the measured peak without what the rank held before it "
            "loaded the model: libraries and data.\n\n" + table({
                "strategy": known["shown"], "devices": known["devices"],
                "parameters": show(known["parameters"], "{:,.0f}"),
                "MB sent a step": show(sent / 1e6, "{:,.2f}"),
                "MB of parameters, gradients, Adam": show(held / 1e6, "{:,.2f}"),
                "MB of activations, at most": show(kept / 1e6, "{:,.2f}"),
                peak + " measured": show(known["peak_memory_mb"], "{:,.0f}"),
                "MB of training alone": show(known["training_memory_mb"], "{:,.0f}")}))


def describe_prediction(group, link, predict):
    """Step time and efficiency at 2, 4, ... devices by formula, beside what was measured; without activation
    checkpointing, which makes one device's step longer.
    """
    group = group[~group["activation_checkpointing"]]
    base = group[(group["strategy"] == "baseline") & (group["devices"] == 1) & group["samples_per_second"].notna()
                 & (group["precision"] == "no") & (group["gradient_accumulation_steps"] == 1)]
    if not len(base):
        yield "No prediction: it needs a baseline in fp32 without accumulation, long enough for a samples_per_second."
        return
    base, rows = base.sort_values("per_device_batch_size").iloc[-1], []
    on_cpu = base["device_name"].startswith("CPU")
    alone = base["global_batch_size"] / base["samples_per_second"]
    batch = same(base, group, ["per_device_batch_size", "gradient_accumulation_steps"])
    sizes = {2**i for i in range(1, int(math.log2(predict)) + 1)} | {predict} | set(batch["devices"]) - {1}
    for strategy in sorted(name for name in set(batch["strategy"]) if bytes_sent(name, 1, 2)):
        for devices in sorted(sizes):
            best, worst = step_seconds(alone, bytes_sent(strategy, base["parameters"], devices, on_cpu), *link)
            seen = batch[(batch["strategy"] == strategy) & (batch["devices"] == devices)]
            steps = (seen["global_batch_size"] / seen["samples_per_second"]).dropna()
            rows.append({"strategy": strategy, "devices": devices,
                         "step in ms, formula": f"{best * 1000:.2f}-{worst * 1000:.2f}",
                         "efficiency, formula": f"{alone / worst:.0%}-{alone / best:.0%}",
                         "step in ms, measured": ", ".join(f"{step * 1000:.2f}" for step in steps),
                         "efficiency, measured": ", ".join(f"{alone / step:.0%}" for step in steps)})
    yield (f"By formula, every device behind a link of {link[0] / 1e9:.3g} GB/s and {link[1] * 1e6:.0f} µs, batch per "
           f"device {base['per_device_batch_size']:.0f}, one device's step {alone * 1000:.2f} ms; from all "
           "communication hidden behind computation to none. Left out: that each bucket or layer pays the "
           "latency anew, that nodes share switches, memory copies, and the slowest rank.")
    yield table(rows)


def describe_traces(folder):
    """The table of time shares of all profiled runs, and a sentence for each trace that cannot be read."""
    rows, notes = [], []
    for trace in sorted(folder.rglob("traces/profile_*.json")):
        try:
            record = json.loads((trace.parent.parent / "run.json").read_bytes())
            strategy = name_yaml(record["strategy"], record.get("strategy_options") or {})
            rows.append({"run": str(trace.parent.parent.relative_to(folder)), "strategy": strategy,
                         "rank": trace.stem.split("_")[1]} | {k: f"{v:.0%}" for k, v in time_shares(trace).items()})
        except (ValueError, LookupError, TypeError, OSError) as reason:
            notes.append(f"skipped {trace}: no trace of a run ({type(reason).__name__}: {reason})")
    return rows, notes


# ------------------------------------------------------------------------------------------------------------- plots

# Told apart without colour too: by marker and line; a variant has the colour of its strategy. A larger marker means
# activation checkpointing. Colours: Okabe and Ito, https://jfly.uni-koeln.de/color/
STYLES = {"baseline": ("#000000", "o", "-"), "dp": ("#999999", "v", ":"), "ddp": ("#0072B2", "s", "--"),
          "zero1": ("#E69F00", "*", (0, (5, 1))),
          "fsdp": ("#D55E00", "^", "-."), "fsdp_keep": ("#D55E00", "<", (0, (7, 2, 1, 2))),
          "fsdp_offload": ("#D55E00", ">", (0, (2, 2))),
          "zero2": ("#009E73", "D", (0, (3, 1, 1, 1))), "zero2_offload": ("#009E73", "h", (0, (3, 1, 1, 1, 1, 1))),
          "zero3": ("#CC79A7", "P", (0, (1, 1))), "zero3_offload": ("#CC79A7", "X", (0, (1, 3)))}


def style_of(cell):
    """Colour, marker, line and marker size, in points, of a cell's strategy."""
    color, marker, line = STYLES.get(cell["strategy"], ("#56B4E9", "x", "-"))
    return color, marker, line, 9 if cell["activation_checkpointing"] else 5


def plot_work(group, folder, suffix):
    """The plots of one workload; returns their file names."""
    panels = [("time", "seconds", "training: median, and fastest to slowest", "seconds"),
              ("speedup", "speedup", "speedup against one device", "T(1) / T(p)"),
              ("efficiency", "efficiency", "efficiency", "speedup / devices"),
              ("throughput", "samples_per_second", "throughput", "samples per second"),
              ("memory", "peak_memory_mb", "peak memory of a rank", "MB")]
    files = []
    for name, column, label, unit in panels:
        if group[column].notna().any():
            figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
            plot_points(axes, group, column)
            axes.set(xlabel="devices", title=label, ylabel=unit)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(group["devices"])), sorted(set(group["devices"])))
            axes.minorticks_off()
            ideal = {"speedup": lambda p: p, "efficiency": lambda p: 1}.get(name)
            if ideal:
                ends = [1, group["devices"].max()]
                axes.plot(ends, [ideal(p) for p in ends], color="0.6", linewidth=1, label="ideal", zorder=0)
            if name == "speedup":  # on two logarithmic axes the ideal is a straight line
                axes.set_yscale("log", base=2)
                axes.yaxis.set_major_formatter("{x:g}")
            else:
                axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
            axes.legend(fontsize=8)
            files.append(save(figure, folder / f"{name}{suffix}.png"))
    curves = [(cell, history) for _, cell in group.iterrows() for history in cell["losses"]
              if isinstance(history, list)]
    if curves:
        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        labels = set()
        for number, (cell, history) in enumerate(curves):
            color, marker, line, size = style_of(cell)
            label = f"{cell['shown']} {shape(cell)}, global batch {cell['global_batch_size']:.0f}"
            steps, losses = zip(*history, strict=True)
            samples = [step * cell["global_batch_size"] for step in steps]
            gap = max(1, len(steps) // 8)
            axes.plot(samples, losses, color=color, linestyle=line, linewidth=1, marker=marker,
                      markersize=size - 1, markevery=(number % gap, gap),
                      markerfacecolor="white" if cell["nodes"] > 1 else color,
                      label=None if label in labels else label)
            labels.add(label)
        axes.set(xlabel="samples trained on", ylabel="training loss of a global batch")
        axes.legend(fontsize=7)
        files.append(save(figure, folder / f"loss{suffix}.png"))
    return files


def plot_points(axes, group, column):
    """A point a cell: filled on one node, half filled if the global batch is fixed, hollow on several nodes. The
    points of one kind and one variant of a strategy are joined.
    """
    for shown, cells in group[group[column].notna()].groupby("shown", sort=False):
        color, marker, line, size = style_of(cells.iloc[0])
        kinds = [cells["nodes"] > 1, cells["fixed"].fillna("")]
        for (many, fixed), points in cells.sort_values("devices").groupby(kinds, sort=False):
            strong = fixed == "global batch"
            label = ", ".join([shown] + ["several nodes"] * many + ["global batch fixed"] * strong)
            line = ":" if strong else line
            x, y = list(points["devices"]), list(points[column])
            start = [1] if column in ("speedup", "efficiency") and 1 not in x else []  # the baseline's, by definition
            axes.plot(start + x, start + y, color=color, marker=marker, linestyle=line, linewidth=1, label=label,
                      markersize=size, markevery=slice(len(start), None), markerfacecoloralt="white",
                      fillstyle="none" if many else "left" if strong else "full")
            if column == "seconds":
                axes.vlines(points["devices"], points["fastest"], points["slowest"], color=color, linewidth=1)


def save(figure, path):
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path.name


# -------------------------------------------------------------------------------------------------------------- main


def parse_args():
    parser = argparse.ArgumentParser(description="Tables and plots of time, speedup and efficiency from run records.")
    parser.error = lambda message: sys.exit(f"error: {message} (--help lists the options)")
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="where the runs are: every run.json below it is read")
    add("--times", type=Path, help="CSV of times measured by hand, as 186.6 or 3m6.6s: strategy,nodes,gpus_per_node,"
        "seconds")
    add("--output_dir", type=Path, default=Path("."), help="where report.md, report.csv and the plots go (default: .)")
    add("--predict", type=int, metavar="N", help="also step times at 2, 4, ... N devices, by formula; needs the link:")
    add("--check", type=Path, help="the check.json that sbatch/check.sh left, or")
    add("--bandwidth", type=float, help="of the link, in GB/s, and")
    add("--latency", type=float, help="in microseconds")
    args = parser.parse_args()
    if not args.folder and not args.times:
        parser.error("a folder of runs is needed, or --times")
    for path in (args.folder, args.times, args.check):
        if path and not path.exists():
            parser.error(f"there is no {path}")
    if args.predict is None and (args.check or args.bandwidth or args.latency):
        parser.error("--check, --bandwidth and --latency describe the link for --predict N")
    if args.predict is not None:
        if args.predict < 2:
            parser.error(f"--predict needs at least 2 devices, got {args.predict}")
        try:
            link = json.loads(args.check.read_bytes()) if args.check else {}
            args.link = (args.bandwidth * 1e9, args.latency / 1e6) if not link else (
                link["bandwidth_bytes_per_second"] * 1.0, link["latency_seconds"] * 1.0)
            if not (args.link[0] > 0 and args.link[1] >= 0):
                raise ValueError
        except (TypeError, ValueError, LookupError, OSError):
            parser.error("--predict needs the link: --check with a check.json of several ranks, or --bandwidth and "
                         "--latency")
    return args


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
    sections = ["# Report", KINDS]
    works = list(cells.groupby(SAME_WORK, dropna=False, sort=False))
    differ = [name for name in SAME_WORK if len({str(values[SAME_WORK.index(name)]) for values, _ in works}) > 1]
    if differ:
        sections.append(f"These are {len(works)} workloads, never compared with each other; they differ in "
                        f"{', '.join(differ)}.")
    others = runs[runs["problem"] != ""]
    for number, (_, group) in enumerate(works, 1):
        link = getattr(args, "link", None)
        sections += [f"## {name_work(group.iloc[0])}",
                     *describe_work(group, same(group.iloc[0], others, SAME_WORK), link, args.predict)]
        files = plot_work(group, args.output_dir, f"-{number}" if len(works) > 1 else "")
        sections += [" ".join(f"![{file}]({file})" for file in files)]
    shares, unread = describe_traces(args.folder) if args.folder else ([], [])
    if shares:
        sections += ["## Where the time of the profiled steps went", table(shares), "The traces open in "
                     "https://ui.perfetto.dev. Communication includes waiting for a slower rank: the rank that "
                     "waits least shows best what the transfer takes. Profiled runs are never used as timings."]
    if len(others) or notes or unread:
        sections += ["## Not in the tables", "\n".join(
            [f"- {run['run']} ({run['strategy']}, {shape(run)}): {run['problem']}" for _, run in others.iterrows()]
            + [f"- {note}" for note in notes + unread])]
    text = "\n\n".join(section for section in sections if section) + "\n"
    print(text)
    (args.output_dir / "report.md").write_text(text, encoding="utf-8")
    cells.drop(columns=["ranks", "losses", "shown"]).to_csv(args.output_dir / "report.csv", index=False)
    print(f"written: {args.output_dir}/report.md, report.csv and the plots")


if __name__ == "__main__":
    main()
