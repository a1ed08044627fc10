"""Compare two runs: how far do their losses differ, and what in their records explains it?

python tools/compare.py runs/lab/baseline runs/lab/ddp
"""

import json
import math
from pathlib import Path

from common import UNREADABLE
from common.losses import ROUNDING, gap
from common.printing import OneLineParser, stop

# What a record says of the work, beside its `workload`: {name: in words}.
WORK = {
    "global_batch_size": "global batch",
    "script": "script",
    "version": "version of the script",
    "device_name": "device",
}
# What it says of how the work is divided and computed.
DIVISION = {
    "strategy": "strategy",
    "processes": "processes",
    "devices": "devices",
    "nodes": "nodes",
    "per_device_batch_size": "batch per device",
    "gradient_accumulation_steps": "accumulation",
    "resumed_from": "resumed from",
    "threads": "threads",
    "activation_checkpointing": "activation checkpointing",
}
# The time of these runs cannot be compared, although they are completed.
SLOWED = {"resumed_from": "was resumed", "profiled": "was profiled"}
# Training does not use these values of a workload.
EVALUATION = ("eval samples", "eval questions", "max answer length")
SCHEDULE = "the learning rate of a step depends on the number of all steps"
WHY = {
    "global batch": "a step takes the mean over other samples",
    "seed": "other first weights, and another order of the samples",
    "precision": "no means fp32; others have fewer digits",
    "device": "devices round differently, and GPUs draw other random numbers",
    "num epochs": SCHEDULE,
    "max train steps": SCHEDULE,
}
MASKS = "with dropout, each device drops activations of its own"
WITH_DROPOUT = {
    "processes": MASKS,
    "devices": MASKS,
    "batch per device": MASKS,
    "accumulation": MASKS,
    "resumed from": "with dropout, if it went on with another number of devices",
}


def read(folder):
    """The record of the run in this folder, and {step: loss}."""
    file = folder / "run.json"
    if not file.is_file():
        stop(f"there is no {file}: has this run begun?")
    try:
        record = json.loads(file.read_text())
        losses = {int(step): float(loss) for step, loss in record["loss_history"]}
        record["status"], record["steps"] = str(record["status"]), int(record["steps"])
        record["seconds"]["train"] = float(record["seconds"]["train"])
        for name in ("workload", "versions", "strategy_options"):
            record[name] = dict(record.get(name) or {})
    except UNREADABLE as problem:
        stop(f"{file} is not a record of a run: {type(problem).__name__}: {problem}")
    return record, losses


def warn(name, record, losses):
    """Print what is unusual about a run. Returns whether its time can be compared."""
    completed = record["status"] == "completed"
    words = [] if completed else [f"has the status {record['status']}"]
    words += [said for field, said in SLOWED.items() if record.get(field)]
    if words:
        end = "" if completed else f", and its losses end at step {record['steps']}"
        print(f"{name} {' and '.join(words)}: its time cannot be compared{end}.")
    bad = [step for step, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        more = f" and {len(bad) - 1} more" if bad[1:] else ""
        print(f"{name} has no finite loss at step {bad[0]}{more}: nothing can be compared there.")
    return not words


def pace(one, two, second):
    """In words: how long the second run took, compared with the first one."""
    each = [record["seconds"]["train"] / (record["steps"] or math.nan) for record in (one, two)]
    ratio = each[1] / (each[0] or math.nan)
    if not 0 < ratio < math.inf:
        return "; the records do not tell how long a step took"
    what = f"{second} trained" if one["steps"] == two["steps"] else f"a step of {second} took"
    return f"; {what} {ratio:.2f} times as long"


def both(one, other):
    """{name: both values} of what two dictionaries say differently."""
    pairs = {name: (one.get(name), other.get(name)) for name in one | other}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def differences(one, two):
    """What differs between two records, {in words: both values}: of the work, and how it is divided
    and computed.
    """
    values = both(one, two)
    work = {words: values[name] for name, words in WORK.items() if name in values}
    for name, pair in both(one["workload"], two["workload"]).items():
        work[name.replace("_", " ")] = pair
    for library, pair in both(one["versions"], two["versions"]).items():
        if None not in pair:  # null: the run did not import it
            work[f"version of {library}"] = pair
    division = {words: values[name] for name, words in DIVISION.items() if name in values}
    division |= {words: work.pop(words) for words in EVALUATION if words in work}
    if "strategy" not in values:
        for name, pair in both(one["strategy_options"], two["strategy_options"]).items():
            division[f"the strategy's {name}"] = pair
    return work, division


def explain(one, two):
    """Lines on what differs: what can explain other losses, and what cannot."""
    work, division = differences(one, two)
    workloads = [one["workload"], two["workload"]]
    dropout = any(workload.get("dropout") for workload in workloads)
    lower = {workload.get("precision") for workload in workloads} - {"no", None}
    can, cannot = [], []
    for words, (value, other) in (work | division).items():
        line, why = f"{words}: {value} and {other}", WHY.get(words)
        if dropout and words in WITH_DROPOUT:
            why = WITH_DROPOUT[words]
        elif lower and words in division:
            why = f"{max(lower)} has few digits, so another order of adding shows"
        if words in division and not why:
            cannot.append(line)
        else:
            can.append(f"{line} ({why})" if why else line)
    return can, cannot


def main():
    parser = OneLineParser(description="How far do the losses of two runs differ, and why?")
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="an output directory")
    folders = parser.parse_args().runs
    (one, losses), (two, others) = map(read, folders)
    first, second = [folder.resolve().name for folder in folders]
    timings = [warn(first, one, losses), warn(second, two, others)]
    gaps = {
        step: gap(loss, others[step], abs(loss))
        for step, loss in losses.items()
        if math.isfinite(loss) and math.isfinite(others.get(step, math.nan))
    }
    if not gaps:
        stop(f"{first} and {second} have no finite loss of the same step")
    print(
        f"{first} and {second}: {one['steps']} and {two['steps']} steps, losses differ by at most "
        f"{max(gaps.values()):.1e} of their value{pace(one, two, second) if all(timings) else ''}"
    )
    can, cannot = explain(one, two)
    if can:
        print("These differences can explain other losses:", *can, sep="\n  ")
    if cannot:
        print("These cannot, if the global batch is the same:", *cannot, sep="\n  ")
    step = next((step for step, share in gaps.items() if share > ROUNDING), None)
    if step is None:
        print(f"No loss differs by more than {ROUNDING} of its value: the rest is rounding.")
        return
    print(
        f"Step {step} is the first whose losses differ by more than {ROUNDING} of their value: "
        f"{losses[step]:.6g} and {others[step]:.6g}."
    )
    if not can:
        print(
            "Nothing in the records explains this. If the losses drift apart slowly, it is "
            "rounding that grows. Otherwise look for what no record has: other code, other data, "
            "variables of the shell."
        )


if __name__ == "__main__":
    main()
