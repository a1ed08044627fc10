"""What runs left behind: run.json, the plan of a sweep, and times measured by hand, as rows."""

import atexit
import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import pandas as pd

from planning.facts import ARCHITECTURE, UNREADABLE, name_yaml

# What has to be the same for two runs to be compared: with other data or on another device, it is
# another experiment.
SAME_WORK = [
    "script",
    "model",
    "dataset",
    "samples",
    "eval_samples",
    "sequence_length",
    "max_grad_norm",
    "epochs",
    "steps",
    "precision",
    "compute_dtype",
    "dynamo",
    "device_name",
    "threads",
    "torch",
]
CELL = [
    "strategy",
    "nodes",
    "gpus_per_node",
    "devices",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "strategy_options",
    "activation_checkpointing",
]
FIGURES = [
    "seconds",
    "total_seconds",
    "samples_per_second",
    "tokens_per_second",
    "peak_memory_mb",
    "training_memory_mb",
    "samples_trained",
    "trained_steps",
    "loading_seconds",
    "waiting_seconds",
    "padded_tokens",
    "busy_share",
]
NAMES = [
    *SAME_WORK,
    *CELL,
    *ARCHITECTURE,
    *FIGURES,
    "run",
    "problem",
    "parameters",
    "tensors",
    "loss_history",
    "ranks",
    "log",
]
PROFILED = "profiled: not a timing"


def parse_seconds(text):
    """Seconds from "186.6", "3m6.619s" or "1h2m3s". Raises ValueError."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+(?:\.\d*)?)s?", str(text).strip())
    parts = match.groups() if match else (0, 0, 0)
    seconds = sum(float(part or 0) * unit for part, unit in zip(parts, (3600, 60, 1), strict=True))
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time such as 186.6 or 3m6.619s")
    return seconds


def read_record(path, folder):
    """One run.json as a row with NAMES; `strategy` is the YAML's name. Raises an error of
    UNREADABLE if it is no run.json.
    """
    record = json.loads(path.read_bytes())
    ranks, steps, on_cpu = record["ranks"], record["steps"], record["device_name"].startswith("CPU")
    row = {name: record["workload"].get(name, record.get(name)) for name in NAMES}
    waiting, busy = share_of_cpu(record) if on_cpu else (math.nan, math.nan)
    problem = {
        "completed": "",
        "preempted": "stopped before its end",
        "failed": "broke down",
        "running": "died, or is still running",
    }[record["status"]]
    if (log := find_log(path, record, folder)) and record["status"] == "running":
        problem += f": see {log}"
    if not problem and record["resumed_from"]:
        problem = "resumed: not a timing"
    if not problem and record.get("profiled"):
        problem = PROFILED
    row |= {
        "run": str(path.parent.relative_to(folder)),
        "problem": problem,
        # What the model computed in, where that is not the launcher's mixed_precision.
        "compute_dtype": row["compute_dtype"] or row["precision"],
        # With a GPU, threads only feed it, and DP's one process has those of all its GPUs.
        "threads": row["threads"] if on_cpu else None,
        "gpus_per_node": record["devices"] // record["nodes"],
        "seconds": float(record["seconds"]["train"]),
        "total_seconds": float(record["seconds"]["total"]),
        "peak_memory_mb": max(float(rank["peak_memory_mb"] or "nan") for rank in ranks),
        "training_memory_mb": max(
            float(rank["peak_memory_mb"] or "nan") - rank.get("memory_before_mb", math.nan)
            for rank in ranks
        ),
        "samples_trained": steps * record["global_batch_size"],
        "trained_steps": steps,
        "loading_seconds": record["seconds"].get("loading", math.nan) / max(1, steps),
        "waiting_seconds": waiting,
        "busy_share": busy,
        "padded_tokens": find_padded_tokens(record),
        "log": log,
        "torch": record["versions"]["torch"],
        "strategy": name_yaml(record["strategy"], record.get("strategy_options") or {}),
        "samples_per_second": record.get("samples_per_second") or None,
        "strategy_options": json.dumps(record.get("strategy_options") or {}, sort_keys=True),
        "activation_checkpointing": bool(record.get("activation_checkpointing")),
    }
    row["loss_history"] = add_seconds(row, record)
    if not problem and not (
        0 < row["seconds"] < math.inf
        and 0 < row["total_seconds"] < math.inf
        and row["parameters"] > 0
    ):
        raise ValueError("times and parameters have to be greater than 0")
    for rank in ranks:
        if {"rank", "host", "real", "user", "sys"} - set(rank):
            raise ValueError(f"a rank has only {', '.join(rank)}")
    return row | {"tokens_per_second": row["tokens_per_second"] or None}


def add_seconds(row, record):
    """The losses as [step, loss, seconds of training until then]: steady steps are equally long."""
    rate, seconds = row["samples_per_second"], row["seconds"]
    each = record["global_batch_size"] / rate if rate else seconds / max(1, record["steps"])
    return [
        [step, loss, max(0.0, seconds - (record["steps"] - step) * each)]
        for step, loss in record["loss_history"]
    ]


def share_of_cpu(record):
    """Seconds per step that a rank waits for the slowest one, on average: the most that a rank
    computes less the mean. And CPU seconds per second of training, of the rank with the fewest: 1
    if nothing else took the cores and no rank waited.
    """
    computed = [rank.get("train_cpu", math.nan) for rank in record["ranks"]]
    waiting = (max(computed) - sum(computed) / len(computed)) / max(1, record["steps"])
    return waiting, min(computed) / (record["seconds"]["train"] or math.nan)


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
        except UNREADABLE as reason:
            notes.append(
                f"skipped {path.relative_to(folder)}: no run record "
                f"({type(reason).__name__}: {reason})"
            )
    for plan in sorted(folder.rglob("sweep.csv")):
        try:
            for planned in pd.read_csv(plan, dtype={"job": str}).to_dict("records"):
                path = plan.parent / planned["run"]
                if path in found:
                    continue
                job = f", job {planned['job']}" if isinstance(planned["job"], str) else ""
                run = str(path.relative_to(folder))
                others = [
                    row
                    for row in rows
                    if not row["problem"] and Path(row["run"]).parent == Path(run).parent
                ]
                rows.append(
                    {name: others[0][name] for name in SAME_WORK if others}
                    | {
                        "strategy": planned["strategy"],
                        "nodes": int(planned["nodes"]),
                        "gpus_per_node": int(planned["gpus_per_node"]),
                        "run": run,
                        "problem": f"failed or missing{job}: see {run}.log",
                    }
                )
        except UNREADABLE as reason:
            notes.append(
                f"skipped {plan.relative_to(folder)}: no plan of a sweep "
                f"({type(reason).__name__}: {reason})"
            )
    if not rows and not notes:
        raise FileNotFoundError(
            f"no run.json below {folder}: the training scripts leave one in their output directory"
        )
    return rows, notes


def read_times(path):
    """Rows from times that were measured by hand. Raises ValueError with file and line."""
    try:
        table = pd.read_csv(path, dtype=str, skipinitialspace=True, index_col=False)
    except ValueError as reason:
        raise ValueError(f"{path}: {reason}") from None
    missing = {"strategy", "nodes", "gpus_per_node", "seconds"} - set(table.columns)
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(sorted(missing))}; the first line has to "
            "name strategy,nodes,gpus_per_node,seconds"
        )
    if not len(table):
        raise ValueError(f"{path}: there are no times below the first line")
    rows = []
    for line, values in enumerate(table.to_dict("records"), 2):
        try:
            nodes, gpus = int(values["nodes"]), int(values["gpus_per_node"])
            if min(nodes, gpus) < 1:
                raise ValueError("nodes and gpus_per_node have to be 1 or more")
            rows.append(
                {
                    "strategy": values["strategy"].strip().lower(),
                    "nodes": nodes,
                    "gpus_per_node": gpus,
                    "devices": nodes * gpus,
                    "seconds": parse_seconds(values["seconds"]),
                    "problem": "",
                    "script": f"measured by hand, {Path(path).name}",
                    "run": f"line {line}",
                }
            )
        except (ValueError, AttributeError) as reason:
            raise ValueError(f"{path}, line {line}: {reason}") from None
    return rows


def unpack(path):
    """A folder of runs as it is; a compressed one (such as .tar.xz) unpacked into a fresh folder.
    Raises ValueError.
    """
    if path.is_dir():
        return path
    folder = tempfile.mkdtemp(prefix="report-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        shutil.unpack_archive(path, folder)
    except Exception as problem:  # each kind of archive has its own
        raise ValueError(f"{path} is neither a folder nor a compressed one: {problem}") from None
    return Path(folder)
