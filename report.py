"""Turn a folder of run records into a report: time, speedup and efficiency of each strategy on each node shape.

    python report.py runs/                              # every run.json below runs/
    python report.py runs/sweep-20261120-101500 --output_dir report

prints the tables and writes report.md and report.csv into the output directory. It reads nothing but the records that
the training scripts leave, and the plan of a sweep (sweep.csv), which says what is missing.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

# What has to be the same for two runs to be comparable: another device, or another model, is another experiment.
SAME_WORK = ["script", "model", "dataset", "samples", "eval_samples", "sequence_length", "epochs", "steps",
             "precision", "dynamo", "device_name"]
CELL = ["strategy", "nodes", "gpus_per_node", "per_device_batch_size", "gradient_accumulation_steps"]


def speedup(baseline_seconds, seconds):
    """S(p) = T(baseline) / T(p), both the median seconds of training of the same work."""
    return baseline_seconds / seconds


def efficiency(speedup, devices):
    """S(p) / p: the share of the devices' time that was not lost to communication, waiting and the rest."""
    return speedup / devices


# ----------------------------------------------------------------------------------------------------------- reading


def read_record(path, folder):
    """One run.json as a flat row. Raises ValueError, KeyError or TypeError where it is no such record."""
    record = json.loads(path.read_text())
    if record["status"] not in ("completed", "preempted"):
        raise ValueError(f"status is {record['status']!r}")
    workload = record["workload"]
    row = {name: workload[name] for name in SAME_WORK if name in workload}
    row |= {name: record[name] for name in ("script", "device_name", "strategy", "nodes", "devices",
                                            "global_batch_size", "samples_per_second")}
    row |= {name: workload[name] for name in ("per_device_batch_size", "gradient_accumulation_steps")}
    return row | {
        "run": str(path.parent.relative_to(folder)),
        "gpus_per_node": record["devices"] // record["nodes"],
        "seconds": record["seconds"]["train"] * 1.0,
        "total_seconds": record["seconds"]["total"] * 1.0,
        "peak_memory_mb": max(rank["peak_memory_mb"] for rank in record["ranks"]),
        # Only whole runs are timings: one that was stopped or resumed has measured a part, and started twice.
        "problem": "stopped before its end" if record["status"] == "preempted" else
                   "resumed, so not a timing" if record["resumed_from"] else "",
    }


def read_runs(folder):
    """All runs below a folder, a row each; those that are planned (sweep.csv) but not there have only a problem.

    Returns the table and a sentence for every file that is no record; raises FileNotFoundError if there is nothing.
    """
    rows, notes, found = [], [], set()
    for path in sorted(folder.rglob("run.json")):
        try:
            rows.append(read_record(path, folder))
            found.add(path.parent)
        except (ValueError, KeyError, TypeError, OSError) as reason:
            notes.append(f"skipped {path}: not a run record ({type(reason).__name__}: {reason})")
    for plan in sorted(folder.rglob("sweep.csv")):
        for planned in pd.read_csv(plan, dtype={"job": str}).to_dict("records"):
            if plan.parent / planned["run"] not in found:
                job = f", job {planned['job']}" if isinstance(planned["job"], str) else ""
                run = str((plan.parent / planned["run"]).relative_to(folder))
                rows.append({name: planned[name] for name in ("strategy", "nodes", "gpus_per_node")}
                            | {"run": run, "problem": f"failed or missing{job}: see {run}.log"})
    if not rows and not notes:
        raise FileNotFoundError(f"no run.json below {folder}: a run of one of the scripts leaves one")
    return pd.DataFrame(rows), notes


# --------------------------------------------------------------------------------------------------------- comparing


def make_cells(runs):
    """A row for each strategy, shape and batch policy: medians over its repeats, speedup and efficiency."""
    whole = runs[runs["problem"] == ""] if "seconds" in runs else runs[:0]
    keys = [name for name in SAME_WORK + CELL + ["devices", "global_batch_size"] if name in whole]
    rows = []
    for values, repeats in whole.groupby(keys, dropna=False, sort=False):
        median = repeats["seconds"].median()
        rows.append(dict(zip(keys, values, strict=True)) | {
            "repeats": len(repeats),
            "seconds": median,
            "fastest": repeats["seconds"].min(),
            "slowest": repeats["seconds"].max(),
            "total_seconds": repeats["total_seconds"].median(),
            "samples_per_second": repeats["samples_per_second"].median(),
            "peak_memory_mb": repeats["peak_memory_mb"].max(),
            "median_run": repeats.loc[(repeats["seconds"] - median).abs().idxmin(), "run"],
        })
    cells = pd.DataFrame(rows)
    if len(cells):
        compared = [compare(cell, cells) for cell in rows]
        cells[["fixed", "speedup", "efficiency"]] = compared
    return cells


def compare(cell, cells):
    """What is fixed between a cell and its 1-device baseline, the batch of a device or the global one; speedup,
    efficiency. All None where the same work has no such baseline.
    """
    base = cells[(cells["strategy"] == "baseline") & (cells["devices"] == 1)]
    for name in SAME_WORK:
        if name in cell:
            base = base[(base[name] == cell[name]) | (base[name].isna() & pd.isna(cell[name]))]
    per_device = base[(base["per_device_batch_size"] == cell["per_device_batch_size"])
                      & (base["gradient_accumulation_steps"] == cell["gradient_accumulation_steps"])]
    same_global = base[base["global_batch_size"] == cell["global_batch_size"]]
    # With a fixed number of steps, more devices have trained on more samples: no speedup unless the global batch is.
    for fixed, found in (("global batch", same_global), ("batch per device", per_device)):
        if len(found) and (fixed == "global batch" or pd.isna(cell.get("steps"))):
            if cell["strategy"] == "baseline":
                fixed = "baseline"
            gain = speedup(found["seconds"].iloc[0], cell["seconds"])
            return fixed, gain, efficiency(gain, cell["devices"])
    return None, None, None


# --------------------------------------------------------------------------------------------------------------- output


def describe(cells, runs, notes):
    """The report as Markdown."""
    lines = ["# Report", ""]
    for values, group in cells.groupby([name for name in SAME_WORK if name in cells], dropna=False, sort=False):
        names = [name for name in SAME_WORK if name in cells]
        work = ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                         for name, value in zip(names, values, strict=True) if not pd.isna(value))
        table = pd.DataFrame({
            "strategy": group["strategy"],
            "nodes x devices": group["nodes"].astype(str) + " x " + group["gpus_per_node"].astype(str),
            "global batch": group["global_batch_size"],
            "runs": group["repeats"],
            "seconds (median)": group["seconds"].map("{:.2f}".format),
            "fastest-slowest": [f"{a:.2f}-{b:.2f}" for a, b in zip(group["fastest"], group["slowest"], strict=True)],
            "total": group["total_seconds"].map("{:.1f}".format),
            "samples/s": group["samples_per_second"].map("{:,.1f}".format, na_action="ignore"),
            "peak MB": group["peak_memory_mb"].map("{:,.0f}".format),
            "fixed": group["fixed"],
            "speedup": group["speedup"].map("{:.2f}".format, na_action="ignore"),
            "efficiency": group["efficiency"].map("{:.0%}".format, na_action="ignore"),
        })
        lines += [f"## {work}", "", table.fillna("").to_markdown(index=False), ""]
        if not (group["strategy"] == "baseline").any():
            lines += ["No baseline of this work, so no speedup: run accelerate_configs/baseline.yaml with the same "
                      "flags.", ""]
    troubled = runs[runs["problem"] != ""]
    lines += [f"- {run.run}: {run.problem}" for run in troubled.itertuples()] + [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Tables of time, speedup and efficiency from a folder of run records.")
    parser.add_argument("folder", type=Path, help="where the runs are; all run.json files below it are read")
    parser.add_argument("--output_dir", type=Path, default=Path("."),
                        help="where report.md and report.csv go (default: .)")
    args = parser.parse_args()
    try:
        runs, notes = read_runs(args.folder)
    except FileNotFoundError as problem:
        sys.exit(f"error: {problem}")
    cells = make_cells(runs)
    text = describe(cells, runs, notes)
    print(text)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / "report.md").write_text(text)
    cells.to_csv(args.output_dir / "report.csv", index=False)


if __name__ == "__main__":
    main()
