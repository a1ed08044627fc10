"""Where the time of a step went, and what a report shows in words. report.py prints it."""

import math

import pandas as pd

from predict import predict

# What has to be the same for two runs to be compared: with other data or on another device, it is
# another experiment.
SAME_WORK = ["script", "model", "dataset", "samples", "eval_samples", "sequence_length",
             "max_grad_norm", "epochs", "steps", "precision", "dynamo", "device_name", "torch"]
STEADY_STEPS = 30  # so many are enough for a rate
SPREAD = 0.1  # between repeats, of their median: more is marked


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


# -------------------------------------------------------------------------- the parts of a step

PARTS = ["computing", "bookkeeping", "communication", "waiting", "loading", "start", "unexplained"]


def find_link(cell, links):
    """The check.json to predict a cell's steps with: that of its shape, else the one of the most
    processes on the most nodes. None if there is none.
    """
    gloo = str(cell["device_name"]).startswith("CPU")
    links = [link for link in links if link["backend"] in (None, "gloo" if gloo else "nccl")]
    fits = [link for link in links
            if (link["nodes"], link["processes"]) == (cell["nodes"], cell["devices"])]
    return max(fits or links, key=lambda link: (link["nodes"], link["processes"]), default=None)


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


def computing_seconds(cell, one):
    """Seconds of a step of a cell on one device, `one`, if it had as many tokens, padding included,
    as a device of `cell` has on average.
    """
    longer = cell["padded_tokens"] / one["padded_tokens"]
    return one["step_seconds"] * (1 if pd.isna(longer) else longer)


def predict_cells(group, links):
    """Seconds of a step by formula for each cell on several devices of which the same strategy was
    measured on one, as a Series; NaN for the others.
    """
    found = {}
    for i, cell in group[group["devices"] > 1].iterrows():
        link, alone = find_link(cell, links), find_alone(cell, group)
        if link and alone is not None:
            found[i] = predict(computing_seconds(cell, alone), cell, int(cell["devices"]), link)
    return pd.Series(found, group.index, float)


def split_step(group, shares):
    """Where the mean step of each cell went, in seconds, as a DataFrame with the columns PARTS,
    which add up to `step`, the seconds of training per step. A part that is not known is NaN, and
    its time is in `unexplained`. `shares` is what report.py's `find_shares` returns.
    """
    rows = {}
    for i, cell in group[group["step_seconds"].notna() & (group["trained_steps"] > 0)].iterrows():
        row = dict.fromkeys(PARTS, math.nan) | {"step": cell["seconds"] / cell["trained_steps"]}
        row["start"] = row["step"] - cell["step_seconds"]
        if cell["device_name"].startswith("CPU"):  # a GPU computes while the CPU loads
            row["loading"] = cell["loading_seconds"]
        base = find_alone(cell, group, baseline=True)
        alone = find_alone(cell, group)
        if base is not None:
            row["computing"] = computing_seconds(cell, base)
            if not pd.isna(row["loading"]) and not pd.isna(base["loading_seconds"]):
                row["computing"] -= base["loading_seconds"]
            if alone is not None:
                row["bookkeeping"] = computing_seconds(cell, alone) - computing_seconds(cell, base)
        if cell["devices"] > 1:
            row["waiting"] = cell["waiting_seconds"]
            if alone is not None:
                predicted = cell["predicted_step_seconds"]
                row["communication"] = predicted - computing_seconds(cell, alone)
            if traced := shares.get(i):  # the rank that waits least shows what the transfer takes
                row["communication"] = min(traced) * cell["step_seconds"]
                row["waiting"] = (sum(traced) / len(traced) - min(traced)) * cell["step_seconds"]
        row["unexplained"] = row["step"] - pd.Series(row)[PARTS].sum()  # without what is not known
        if base is not None and base["run"] == cell["run"]:
            row["bookkeeping"], row["unexplained"] = math.nan, math.nan
        rows[i] = row
    return pd.DataFrame.from_dict(rows, "index", columns=["step", *PARTS]).astype(float)


# -------------------------------------------------------------------------------- what this shows


def name_cell(cell):
    return f"{cell['shown']} on {shape(cell)}"


def listed(names):
    """a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def sentences(group, parts, lost, checked):
    """What the figures of a workload show, as a list of sentences. A sentence is left out if
    repeats differ by more than it would claim. `lost` names what was planned and is not there;
    `checked` is whether a link was measured.
    """
    texts = (say_fastest(group), say_scaling(group), say_costs(group, parts),
             say_prediction(group), say_doubts(group), say_missing(group, lost, checked))
    return [text for text in texts if text]


def say_fastest(group):
    """Of the cells on several devices."""
    cells = group[(group["devices"] > 1) & group["speedup"].notna() & (group["repeats"] > 1)]
    if not len(cells):
        return None
    best, *others = (cell for _, cell in cells.sort_values("speedup", ascending=False).iterrows())
    if not best["surely_faster"] and not best["surely_slower"]:
        return ("No strategy on several devices is faster than one device by more than repeats "
                f"differ; the best is {name_cell(best)}, {best['speedup']:.2f} times as fast.")
    text = (f"The fastest is {name_cell(best)}, {best['speedup']:.2f} times as fast as one device "
            f"(efficiency {best['efficiency']:.0%})")
    if not others:
        return text + "."
    close = [cell for cell in others if cell["speedup_high"] >= best["speedup_low"]]
    if close:
        return (f"{listed([name_cell(cell) for cell in [best, *close]])} are the fastest, about "
                f"{best['speedup']:.2f} times one device; their repeats overlap, so they have no "
                "order.")
    gain = best["speedup"] / others[0]["speedup"] - 1
    return f"{text}, and {gain:.0%} faster than {name_cell(others[0])}: more than repeats differ."


def say_scaling(group):
    """Of the cells on the most devices."""
    cells = group[group["speedup"].notna() & (group["repeats"] > 1)]
    cells = cells[(cells["devices"] == cells["devices"].max()) & (cells["devices"] > 1)]
    faster = [name_cell(cell) for _, cell in cells[cells["surely_faster"]].iterrows()]
    slower = [name_cell(cell) for _, cell in cells[cells["surely_slower"]].iterrows()]
    texts = []
    if faster:
        texts.append(f"{listed(faster)} gain{'s' * (len(faster) == 1)} from more devices")
    if slower:
        verb = "is" if len(slower) == 1 else "are"
        texts.append(f"{listed(slower)} {verb} slower than one device")
    return "; ".join(texts) + "." if texts else None


NAMES_OF_PARTS = {
    "bookkeeping": "the strategy's bookkeeping", "waiting": "waiting for the slowest rank",
    "unexplained": "an unexplained rest", "start": "the start of the run"}


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
                    f"{name_cell(cell)} ({size * 1000:.1f} of {step * 1000:.1f} ms)")
    costs = [f"{part} for {listed(cells)}" for part, cells in texts.items()]
    return f"The largest cost besides computing: {'; '.join(costs)}." if costs else None


def say_prediction(group):
    known = group[group["predicted_step_seconds"].notna() & group["step_seconds"].notna()]
    if not len(known):
        return None
    misses = known["predicted_step_seconds"] / known["step_seconds"] - 1
    worst = misses.abs().idxmax()
    return (f"Predicted steps miss the measured ones by at most {abs(misses[worst]):.0%} "
            f"({name_cell(known.loc[worst])}: too {'long' if misses[worst] > 0 else 'short'}).")


def doubts(cell):
    """What is not enough about a cell's measurement, in a few words, or ""."""
    found = []
    if cell["steady_steps"] < STEADY_STEPS:
        found.append(f"{cell['steady_steps']:.0f} steady steps")
    if cell["spread"] > SPREAD:
        found.append(f"repeats differ by {cell['spread']:.0%}")
    return ", ".join(found)


def say_doubts(group):
    """Whether the repeats are too few or the runs too short."""
    if (group["repeats"] == 1).all():
        return "Each cell was measured only once, so nothing says which differences are noise."
    single = [name_cell(cell) for _, cell in group[group["repeats"] == 1].iterrows()]
    texts = [f"Measured only once: {listed(single)}."] if single else []
    marked = [f"{name_cell(cell)} ({doubts(cell)})" for _, cell in group.iterrows() if doubts(cell)]
    texts += [f"Not safe to rely on: {listed(marked)}."] if marked else []
    return " ".join(texts)


def say_missing(group, lost, checked):
    """What the sweep planned and did not measure, and what a prediction lacks."""
    texts = [f"no result of {listed(lost)}"] if lost else []
    several = group[(group["devices"] > 1) & group["step_seconds"].notna()]
    several = several[several["strategy"] != "dp"]  # of which no formula is known
    alone = [name_cell(cell) for _, cell in several.iterrows() if find_alone(cell, group) is None]
    if alone:
        texts.append("a run on one device, with the same strategy and batch per device, of "
                     f"{listed(alone)}: it would tell bookkeeping from communication")
    elif len(several) and not checked:
        texts.append("a check.json (sbatch/check.py) to predict communication from")
    return f"Missing: {'; '.join(texts)}." if texts else None
