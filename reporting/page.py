"""The report as Markdown: the answer first, then the details."""

import itertools
import math

import pandas as pd

from planning.links import bytes_sent, find_link
from planning.prediction import computing_seconds, interval, predict
from reporting.comparing import doubts, same
from reporting.records import SAME_WORK
from reporting.sentences import say_missing, say_prediction, sentences
from reporting.splitting import PARTS, find_alone

COLUMNS = {"dp": "DP", "ddp": "DDP", "fsdp": "FSDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}

KINDS = """Speedup = time of the baseline, one device, / time; efficiency = speedup / devices. The
column *fixed* says against which baseline. *Batch per device*: each device has as much to do in a
step as the baseline, so the global batch grows, an epoch has fewer steps, and the losses differ.
*Global batch*: the steps are the same, and without dropout the losses and weights too. *Not known*:
the times were measured by hand, and you answer for the work being the same.

The column *of* says which time. *Steady steps*: the time per sample of all steps but the first 10,
where both cells have at least 30 such steps. *Training*: `seconds`, all of training. `total` also
has the start, evaluations and saving. All figures are medians over the repeats. *Note* marks a cell
that you should not rely on: it has fewer than 30 steady steps, or its repeats differ by more than
10 %. MFU is the share of the GPU's peak FLOP/s that the model's matrix products use."""


def table(columns):
    """Markdown of a table; what is not known is blank."""
    frame = pd.DataFrame(columns).astype(object)
    return frame.where(frame.notna(), "").to_markdown(index=False, disable_numparse=True)


def show(values, form):
    return [None if pd.isna(value) else form.format(value) for value in values]


def as_time_prints(seconds):
    """118.544 as 1m58.544s."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 60000}m{milliseconds % 60000 / 1000:.3f}s"


def title(cell, cells):
    """A workload in a few words: model, data, and in what others with the same two differ."""
    alike = same(cell, cells, ["model", "dataset"])
    known = [cell[name] for name in ("model", "dataset") if not pd.isna(cell[name])]
    return ", ".join([" on ".join(known) or cell["script"], *in_words(cell, differing(alike))])


def differing(cells):
    """The names of what must be the same, in which the workloads of these cells differ."""
    return [name for name in SAME_WORK if cells[name].nunique(dropna=False) > 1]


def in_words(cell, names):
    """What a cell has of these names, as texts such as "threads 1"."""
    return [
        f"{name} {cell[name]:g}" if isinstance(cell[name], float) else f"{name} {cell[name]}"
        for name in names
        if not pd.isna(cell[name])
    ]


def first_page(group, parts, lost, files):
    """What is to be known first of a workload: sentences, one small table, and two pictures. `lost`
    are the cells without a result, as (strategy, shape).
    """
    names = [f"{strategy} on {size}" for strategy, size in lost]
    yield " ".join(sentences(group, parts, names))
    if small := small_table(group, dict.fromkeys(lost, "no result")):
        yield small
        gains = ", speedup and efficiency" if group["speedup"].notna().any() else ""
        kinds = [
            kind for kind in ("batch per device", "global batch") if kind in set(group["fixed"])
        ]
        fixed = f", with the {' or '.join(kinds)} of the baseline" if kinds else ""
        yield f"Time of training{gains}{fixed}."
    yield pictures_of(files, ("time", "speedup"))


def small_table(group, cells):
    """Rows are shapes, columns strategies; `cells` are texts that are known already. Of cells with
    several batches, the one with the most repeats. None if only baselines are known.
    """
    plain = group[group["strategy"].isin(COLUMNS) & ~group["activation_checkpointing"]]
    order = plain["fixed"].map({"batch per device": 0, "global batch": 1}).fillna(2)
    plain = plain.assign(order=order).sort_values(["repeats", "order"], ascending=[False, True])
    for _, cell in plain.iterrows():
        text = f"{cell['seconds']:.1f} s"
        if not pd.isna(cell["speedup"]):
            text += f", {cell['speedup']:.2f}×, {100 * cell['efficiency']:.0f} %"
        cells.setdefault((cell["strategy"], cell["shape"]), text)
    shapes = sorted(
        {size for name, size in cells if name in COLUMNS},
        key=lambda size: (math.prod(map(int, size.split(" x "))), size),
    )
    used = [name for name in COLUMNS if any(strategy == name for strategy, _ in cells)]
    rows = [
        {"nodes x devices": size} | {COLUMNS[name]: cells.get((name, size)) for name in used}
        for size in shapes
    ]
    return table(rows) if used else None


def pictures_of(files, names):
    """Markdown of those pictures that were drawn; `files` maps names to files."""
    return " ".join(f"![{files[name]}]({files[name]})" for name in names if name in files)


def details(group, parts, held, links, predict_to, files):
    """All that is known of one workload, as sections of Markdown."""
    work = [name for name in SAME_WORK if group[name].iloc[0] not in ("no", "")]
    yield f"All runs have in common: {', '.join(in_words(group.iloc[0], work))}."
    yield " ".join(filter(None, [say_prediction(group), say_missing(group, bool(links))]))
    spread = [f"{cell['fastest']:.2f}-{cell['slowest']:.2f}" for _, cell in group.iterrows()]
    yield table(
        {
            "strategy": group["shown"],
            "nodes x devices": group["shape"],
            "global batch": show(group["global_batch_size"], "{:.0f}"),
            "runs": group["repeats"],
            "step in ms": show(group["step_seconds"] * 1000, "{:.2f}"),
            "samples/s": show(group["samples_per_second"], "{:,.1f}"),
            "seconds": show(group["seconds"], "{:.2f}"),
            "fastest-slowest": spread,
            "total": show(group["total_seconds"], "{:.1f}"),
            "peak MB": show(group["peak_memory_mb"], "{:,.0f}"),
            "MFU": show(group["mfu"], "{:.0%}"),
            "fixed": group["fixed"],
            "of": group["basis"],
            "speedup": show(group["speedup"], "{:.2f}"),
            "efficiency": show(group["efficiency"], "{:.0%}"),
            "note": [doubts(cell) or None for _, cell in group.iterrows()],
            "median run": group["run"],
            "log": group["log"],
        }
    )
    if 0 < group["speedup"].count() < len(group):
        yield (
            "Blank speedups: no baseline has the same batch per device or the same global batch "
            "and trained on as many samples (1 % more or less). With --max_train_steps it takes "
            "the same global batch; with epochs, numbers of samples that global batches divide."
        )
    known = group[group["parameters"].notna()]
    if len(parts):
        yield describe_parts(group, parts)
    yield from describe_predictions(group, links, predict_to)
    if len(known):
        yield describe_formulas(known, held)
        yield "The median runs and their ranks, as `time` prints them:"
        ranks = [(cell["run"], rank) for _, cell in known.iterrows() for rank in cell["ranks"]]
        yield table(
            [
                {"run": run, "rank": rank["rank"], "host": rank["host"]}
                | {name: as_time_prints(rank[name]) for name in ("real", "user", "sys")}
                | {"peak MB": show([rank["peak_memory_mb"]], "{:,.0f}")[0]}
                for run, rank in ranks
            ]
        )
    yield pictures_of(files, [name for name in files if name not in ("time", "speedup")])


def describe_parts(group, parts):
    """Where the time of a step went, as Markdown."""
    cells = group.loc[parts.index]
    return (
        "Where the time of a step went, in ms. The parts add up to the mean step, all steps of "
        "training. *Computing* is the baseline's steady step without its loading, *bookkeeping* "
        "what the same strategy takes longer on one device. *Communication* is what profiled runs "
        "of the cell measured. Without one it is *predicted*: what the formula adds for several "
        "devices. *Waiting* is how much longer the slowest rank computes than the mean rank, by "
        "the profiled run or by the ranks' CPU time. *Start* is what the first "
        "steps took longer, shared out over all steps. What is left is *unexplained*; below zero, "
        "the other parts are too large.\n\n"
        + table(
            {
                "strategy": cells["shown"],
                "nodes x devices": cells["shape"],
                "step": show(parts["step"] * 1000, "{:.2f}"),
            }
            | {
                name: show(parts[name] * 1000, "{:.2f}")
                for name in PARTS
                if parts[name].notna().any()
            }
        )
    )


def describe_predictions(group, links, predict_to):
    """Predicted steps beside the measured ones, and, up to `predict_to` devices, further ones with
    their intervals, as Markdown.
    """
    known = group[group["miss"].notna()]
    if len(known):
        alone = [computing_seconds(cell, find_alone(cell, group)) for _, cell in known.iterrows()]
        yield (
            "Predicted from the same strategy's step on one device and the measured link "
            "(planning/prediction.py). A miss above zero means that the prediction is too "
            "long. At least nine of ten measured steps should lie in the interval:"
        )
        yield table(
            {
                "strategy": known["shown"],
                "nodes x devices": known["shape"],
                "step in ms, one device": show([seconds * 1000 for seconds in alone], "{:.2f}"),
                "predicted": show(known["predicted_step_seconds"] * 1000, "{:.2f}"),
                "from": show(known["predicted_from_seconds"] * 1000, "{:.2f}"),
                "to": show(known["predicted_to_seconds"] * 1000, "{:.2f}"),
                "measured": show(known["step_seconds"] * 1000, "{:.2f}"),
                "miss": show(known["miss"], "{:+.0%}"),
            }
        )
    if predict_to:
        yield from describe_more_devices(group, links, predict_to)


def describe_more_devices(group, links, predict_to):
    """Predicted steps and efficiencies at 2, 4, ... `predict_to` devices, with their intervals,
    as Markdown.
    """
    alone = group[(group["devices"] == 1) & group["step_seconds"].notna()]
    alone, rows = alone[alone["strategy"] != "baseline"], []
    if not len(alone):
        yield (
            "No prediction: it starts from a run of each strategy on one device "
            "(--num_processes 1), long enough for a samples_per_second."
        )
        return
    counts = {2**i for i in range(1, int(math.log2(predict_to)) + 1)} | {predict_to}
    for (_, cell), devices in itertools.product(alone.iterrows(), sorted(counts)):
        link, base = find_link(cell, links), find_alone(cell, group, baseline=True)
        ring, tree = (
            link and predict(cell["step_seconds"], cell, devices, link, tree)
            for tree in (False, True)
        )
        if ring is None:  # no link of this kind of device, or no formula
            continue
        low, high = interval(min(tree, ring), max(tree, ring), cell, devices, link)
        row = {
            "strategy": cell["shown"],
            "devices": devices,
            "step in ms, predicted": f"{ring * 1000:.2f}",
            "from-to": f"{low * 1000:.2f}-{high * 1000:.2f}",
        }
        if base is not None:
            best, worst = (base["step_seconds"] / seconds for seconds in (low, high))
            row |= {
                "efficiency, predicted": f"{base['step_seconds'] / ring:.0%}",
                "efficiency, from-to": f"{worst:.0%}-{min(1, best):.0%}",
            }
        rows.append(row)
    if not rows:
        yield "No prediction: no check.json is of devices like these, or no formula is known."
        return
    link = find_link(alone.iloc[0], links)
    yield (
        "More devices, by formula: the batch per device as on one, every device behind the link "
        f"that {link['processes']} processes on {link['nodes']} node(s) measured. The interval "
        "is that of the table above, and grows by as much with each doubling beyond what was "
        "checked. Its low end sends through a tree, its high "
        "end round a ring. Not modelled: links that nodes share, slower ranks, and the topology "
        "inside a node."
    )
    yield table(rows)


def describe_formulas(known, held):
    """What each rank of these cells sends and holds by formula, and its measured peak, as
    Markdown.
    """
    on_cpu = known["device_name"].iloc[0].startswith("CPU")
    simple = (
        (known["precision"] == "no")
        & (known["gradient_accumulation_steps"] == 1)
        & ~(known["strategy"].str.startswith("zero3") & known["activation_checkpointing"])
    )  # uncounted
    sent = [
        bytes_sent(cell["strategy"], cell["parameters"], cell["devices"], on_cpu)
        for _, cell in known.iterrows()
    ]
    sent, kept = pd.Series(sent, known.index, float).where(simple), held["activations"]
    held = held.drop(columns="activations").sum(axis=1, skipna=False)
    return (
        "What the formulas say of a rank. Bytes sent are those in fp32 without accumulation, "
        "and over gloo on a CPU. Bytes held include what is offloaded to the host. Activations "
        "are those of the layers of a transformer, for windows of full length and without "
        "dropout. The last column is the measured peak without what the rank held before it "
        "loaded the model: libraries and data.\n\n"
        + table(
            {
                "strategy": known["shown"],
                "devices": known["devices"],
                "parameters": show(known["parameters"], "{:,.0f}"),
                "MB sent per step": show(sent / 1e6, "{:,.2f}"),
                "MB of parameters, gradients, Adam": show(held / 1e6, "{:,.2f}"),
                "MB of activations, at most": show(kept / 1e6, "{:,.2f}"),
                "MB of training alone": show(known["training_memory_mb"], "{:,.0f}"),
            }
        )
    )


def describe_traces(traces):
    """The time shares of profiled runs, as Markdown."""
    return table(
        [
            {name: row[name] for name in ("run", "strategy", "rank")}
            | {name: f"{share:.0%}" for name, share in row["shares"].items()}
            for row in traces
        ]
    )
