"""Medians of repeats, and what they are against the baseline: speedup, efficiency, MFU."""

import json

import pandas as pd

from planning.facts import ARCHITECTURE
from reporting.records import CELL, FIGURES, SAME_WORK


def speedup(baseline_seconds, seconds):
    """S(p) = T(baseline) / T(p). T is the time of the same work: what steady steps take per sample,
    or the seconds of training.
    """
    return baseline_seconds / seconds


def efficiency(speedup, devices):
    """S(p) / p: the share of the devices' time that communication and waiting have left."""
    return speedup / devices


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


WARMUP_STEPS = 10  # of the training scripts: samples_per_second leaves them out
STEADY_STEPS = 30  # so many are enough for a rate
SPREAD = 0.1  # between repeats, of their median: more is marked
OF_MEDIAN_RUN = [*ARCHITECTURE, "run", "parameters", "tensors", "ranks", "log"]
SURE = ["surely_faster", "surely_slower"]  # than one device, whichever repeats are compared


def same(cell, cells, names):
    """The cells that have the same values in these columns; what is not known equals what is not
    known.
    """
    for name in names:
        unknown = pd.isna(cell[name])
        cells = cells[cells[name].isna() if unknown else cells[name] == cell[name]]
    return cells


def shape(cell):
    return f"{cell['nodes']:.0f} x {cell['gpus_per_node']:.0f}"


def doubts(cell):
    """What is not enough about a cell's measurement, in a few words, or ""."""
    few = f"{cell['steady_steps']:.0f} steady steps" * (cell["steady_steps"] < STEADY_STEPS)
    wide = f"repeats differ by {cell['spread']:.0%}" * (cell["spread"] > SPREAD)
    return ", ".join(filter(None, [few, wide]))


def make_cells(runs):
    """A row for each workload, strategy, shape and batch: the medians of its repeats, speedup and
    efficiency. `shown` is the strategy in words, and `label` names the cell.
    """
    rows, timings = [], runs[runs["problem"] == ""]
    for values, repeats in timings.groupby(SAME_WORK + CELL, dropna=False, sort=False):
        median = repeats["seconds"].median()
        middle = repeats.loc[(repeats["seconds"] - median).abs().idxmin()]  # or one beside it
        row = dict(zip(SAME_WORK + CELL, values, strict=True))
        row |= {name: repeats[name].median() for name in FIGURES}
        row |= {name: middle[name] for name in OF_MEDIAN_RUN}
        rows.append(
            row
            | {
                "repeats": len(repeats),
                "fastest": repeats["seconds"].min(),
                "slowest": repeats["seconds"].max(),
                "losses": list(repeats["loss_history"]),
                "lowest_rate": repeats["samples_per_second"].min(),
                "highest_rate": repeats["samples_per_second"].max(),
            }
        )
    cells = pd.DataFrame(
        rows,
        columns=[
            *SAME_WORK,
            *CELL,
            *FIGURES,
            *OF_MEDIAN_RUN,
            "repeats",
            "fastest",
            "slowest",
            "lowest_rate",
            "highest_rate",
            "losses",
        ],
    )
    cells["step_seconds"] = (cells["global_batch_size"] / cells["samples_per_second"]).astype(float)
    warm = (cells["trained_steps"] // 2).clip(upper=WARMUP_STEPS)
    cells["steady_steps"] = (cells["trained_steps"] - warm).where(cells["step_seconds"].notna())
    steady = cells["steady_steps"] >= STEADY_STEPS
    width = (cells["highest_rate"] - cells["lowest_rate"]) / cells["samples_per_second"]
    other = (cells["slowest"] - cells["fastest"]) / cells["seconds"]
    cells["spread"] = width.where(steady, other).astype(float)
    cells["activation_checkpointing"] = cells["activation_checkpointing"].eq(True)  # or not known
    add_speedups(cells)
    cells["shown"] = name_variants(cells)
    cells["shape"] = [shape(cell) for _, cell in cells.iterrows()]
    cells["label"] = cells["shown"] + " on " + cells["shape"]
    cells["mfu"] = [flops_utilization(cell) for _, cell in cells.iterrows()]
    return cells


def add_speedups(cells):
    """Speedup and efficiency of each cell, against a baseline that keeps its activations."""
    for name in ("fixed", "basis", "speedup", "efficiency", "speedup_low", "speedup_high"):
        cells[name] = pd.Series(dtype=object if name in ("fixed", "basis") else float)
    cells[SURE] = False
    for i, cell in cells.iterrows():
        fixed, baseline = find_baseline(cell, cells[~cells["activation_checkpointing"]])
        if not fixed:
            continue
        if min(cell["steady_steps"], baseline["steady_steps"]) >= STEADY_STEPS:
            rates = cell[["samples_per_second", "lowest_rate", "highest_rate"]]
            basis, *times = "steady steps", *(1 / rates)
            base, *ends = 1 / baseline[["samples_per_second", "highest_rate", "lowest_rate"]]
        else:
            basis, *times = "training", *cell[["seconds", "slowest", "fastest"]]
            base, *ends = baseline[["seconds", "fastest", "slowest"]]
        gain, low, high = (speedup(base, seconds) for seconds in times)
        found = {
            "fixed": fixed,
            "basis": basis,
            "speedup": gain,
            "speedup_low": low,
            "speedup_high": high,
            "efficiency": efficiency(gain, cell["devices"]),
        }
        cells.loc[i, list(found)] = list(found.values())
        cells.loc[i, SURE] = [times[1] < ends[0], times[2] > ends[1]]


def name_variants(cells):
    """The strategy of each cell, and in what it differs from others of the same strategy."""
    shown = cells["strategy"].copy()
    for _, alike in cells.groupby([*SAME_WORK, "strategy"], dropna=False):
        shown[alike.index] += differing_options(alike["strategy_options"])
    shown[cells["activation_checkpointing"]] += ", recomputing"
    places = [*SAME_WORK, "shown", "nodes", "gpus_per_node"]
    for _, twins in cells.assign(shown=shown).groupby(places, dropna=False):
        if len(twins) > 1:  # of one shape, with other batches
            shown[twins.index] += [
                f", batch {twin['per_device_batch_size']:.0f} x "
                f"{twin['gradient_accumulation_steps']:.0f}"
                for _, twin in twins.iterrows()
            ]
    return shown


def differing_options(options):
    """For each of several variants of a strategy, the options in which they differ, such as
    " (offload: true)", or "".
    """
    variants = [json.loads(text) if isinstance(text, str) else {} for text in options]
    differ = sorted(
        {
            key
            for variant in variants
            for key in variant
            if any(other.get(key) != variant[key] for other in variants)
        }
    )
    texts = [
        ", ".join(f"{key}: {json.dumps(variant.get(key))}" for key in differ)
        for variant in variants
    ]
    return [f" ({text})" if text else "" for text in texts]


def find_baseline(cell, cells):
    """What is fixed between a cell and its 1-device baseline, and that baseline; (None, None) if
    there is none. Both have to train on as many samples, give or take 1 %.
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
