"""What the figures of a workload show, in words."""

from reporting.comparing import SURE, doubts
from reporting.splitting import PARTS, find_alone


def listed(names):
    """a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def sentences(group, parts, lost):
    """What the figures of a workload show, as at most five sentences. `lost` names the cells
    without a result. A sentence is left out if repeats differ by more than it would claim.
    """
    return filter(
        None,
        [
            say_baseline(group),
            say_fastest(group),
            say_scaling(group),
            say_costs(group, parts),
            say_doubts(group, lost),
        ],
    )


def say_baseline(group):
    """The time that all others are compared with."""
    cells = group[(group["fixed"] == "itself") & ~group["activation_checkpointing"]]
    texts, recomputing = [], bool(group["activation_checkpointing"].any())
    if not len(cells):
        return (
            "There is no speedup, as there is no run of accelerate_configs/baseline.yaml of "
            f"this work on one device{', without --activation_checkpointing' * recomputing}."
        )
    for _, cell in cells.iterrows():
        batch = f" with batches of {cell['global_batch_size']:.0f}" * (len(cells) > 1)
        step = f", {cell['step_seconds'] * 1000:.2f} ms a step" * (cell["step_seconds"] > 0)
        texts.append(f"{cell['seconds']:.2f} s{batch}{step}")
    return f"The baseline, one device, trains in {listed(texts)}."


def say_fastest(group):
    """Of the cells on several devices."""
    cells = group[(group["devices"] > 1) & group["speedup"].notna() & (group["repeats"] > 1)]
    if not len(cells):
        return None
    best, *others = (cell for _, cell in cells.sort_values("speedup", ascending=False).iterrows())
    if not best["surely_faster"] and not best["surely_slower"]:
        return (
            "No strategy on several devices is faster than one device by more than repeats "
            f"differ; the best is {best['label']}, {best['speedup']:.2f} times as fast."
        )
    text = (
        f"The fastest is {best['label']}, {best['speedup']:.2f} times as fast as one device "
        f"(efficiency {best['efficiency']:.0%})"
    )
    if not others:
        return text + "."
    close = [cell["label"] for cell in others if cell["speedup_high"] >= best["speedup_low"]]
    if close:
        return (
            f"{listed([best['label'], *close])} are the fastest, about {best['speedup']:.2f} "
            "times one device; their repeats overlap, so they have no order."
        )
    gain = best["speedup"] / others[0]["speedup"] - 1
    return f"{text}, and {gain:.0%} faster than {others[0]['label']}: more than repeats differ."


def say_scaling(group):
    """Of the cells on the most devices."""
    cells = group[group["speedup"].notna() & (group["repeats"] > 1)]
    cells = cells[(cells["devices"] == cells["devices"].max()) & (cells["devices"] > 1)]
    faster, slower = (list(cells["label"][cells[column]]) for column in SURE)
    texts = []
    if faster:
        texts.append(f"{listed(faster)} gain{'s' * (len(faster) == 1)} from more devices")
    if slower:
        verb = "is" if len(slower) == 1 else "are"
        texts.append(f"{listed(slower)} {verb} slower than one device")
    return "; ".join(texts) + "." if texts else None


NAMES_OF_PARTS = {
    "bookkeeping": "the strategy's bookkeeping",
    "waiting": "waiting for the slowest rank",
    "unexplained": "an unexplained rest",
    "start": "the start of the run",
}


def say_costs(group, parts):
    """Of each cell on the most devices the largest part besides computing, if it is more than what
    repeats differ by.
    """
    texts = {}
    for i in parts.index[parts["computing"].notna()]:
        cell = group.loc[i]
        costs = parts.loc[i, PARTS[1:]].dropna()
        if cell["devices"] == group["devices"].max() > 1 and len(costs):
            part, size, step = costs.idxmax(), costs.max(), parts.loc[i, "step"]
            if cell["repeats"] > 1 and size > cell["spread"] * step:
                texts.setdefault(NAMES_OF_PARTS.get(part, part), []).append(
                    f"{cell['label']} ({size * 1000:.1f} of {step * 1000:.1f} ms)"
                )
    costs = [f"{part} for {listed(cells)}" for part, cells in texts.items()]
    return f"The largest cost besides computing: {'; '.join(costs)}." if costs else None


def say_doubts(group, lost):
    """Whether the repeats are too few, the runs too short, or results missing."""
    texts = []
    if (group["repeats"] == 1).all():
        texts = ["each cell was measured only once, so nothing says which differences are noise"]
    elif (group["repeats"] == 1).any():
        texts = [f"measured only once: {listed(group['label'][group['repeats'] == 1])}"]
    marked = [f"{cell['label']} ({doubts(cell)})" for _, cell in group.iterrows() if doubts(cell)]
    texts += [f"not safe to rely on: {listed(marked)}"] if marked else []
    texts += [f"no result of {listed(lost)}"] if lost else []
    return f"Mind: {'; '.join(texts)}." if texts else None


def say_missing(group, checked):
    """What a prediction lacks; `checked` is whether a link was measured."""
    several = group[(group["devices"] > 1) & group["step_seconds"].notna()]
    several = several[several["strategy"] != "dp"]  # of which no formula is known
    alone = [cell["label"] for _, cell in several.iterrows() if find_alone(cell, group) is None]
    if alone:
        return (
            "Missing: a run on one device, with the same strategy and batch per device, of "
            f"{listed(alone)}: it would tell bookkeeping from communication."
        )
    if len(several) and not checked:
        return "Missing: a check.json (sbatch/check.py) to predict communication from."
    return None


def say_prediction(group):
    misses = group["miss"].dropna()
    if not len(misses):
        return None
    worst = misses.abs().idxmax()
    return (
        f"Predicted steps miss the measured ones by at most {abs(misses[worst]):.0%} "
        f"({group['label'][worst]}: too {'long' if misses[worst] > 0 else 'short'})."
    )
