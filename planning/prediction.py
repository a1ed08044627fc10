"""How long does a step take on several devices? By formula, from two measurements.

    step on n devices =   the step of the same strategy on ONE device
                        + latency + bytes / bandwidth of each collective of the step
                        - what the computing hides of them

The first is a run with `--num_processes 1`: it holds the strategy's own bookkeeping. The second is
what sbatch/check.py measures and fits. report.py prints the prediction beside what was measured.
Which collectives a step has follows from strategy and model. docs/report.md derives them, and says
what is not modelled; tests/test_dry_run.py counts them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from planning.links import find_link, seconds_of
from planning.traffic import parts_of, steps_of


def step_seconds(alone, steps, seconds, overlap, busy=0.0):
    """Seconds of a step of which computing takes `alone`, and each call `seconds(call, in_a_row)`:
    whether nothing was computed since the call before it.

    With `overlap`, one call at a time runs beside the computing: a stage's calls start with the
    stage before it, and the calls after a stage beside the next ones. While a call runs, it takes
    the share `busy` of its time from the computing: on a CPU, the same cores do both.
    """
    clock = link = 0.0  # when the computing, and the calls so far, are over
    in_a_row = True  # the step before ended with a call; the optimizer and the loader are short

    def send(call, earliest):
        nonlocal clock, link, in_a_row
        time = seconds(call, in_a_row and not overlap)
        link, in_a_row = max(link, earliest) + time, True
        clock += busy * time if overlap else 0

    for step in steps:
        begun = clock
        for stage in step.stages:
            for call in stage.before:
                send(call, begun if overlap else clock)
            clock = begun = max(clock, link) if stage.before or not overlap else clock
            clock += stage.share * alone / len(steps)
            in_a_row = in_a_row and not stage.share
            for call in stage.after:
                send(call, clock)
            clock = clock if overlap else max(clock, link)
        clock = max(clock, link)
        for call in step.end:
            send(call, clock)
            clock = max(clock, link)
    return clock


def computing_seconds(cell, one):
    """Seconds of a step of a cell on one device, `one`, if it had as many tokens, padding included,
    as a device of `cell` has on average.
    """
    longer = cell["padded_tokens"] / one["padded_tokens"]
    return one["step_seconds"] * (1 if pd.isna(longer) else longer)


def predict(alone, row, devices, link, tree=False, inside=None):
    """Predicted seconds of a step, or None if no formula is known. `alone`: those of the same
    strategy on one device. `row`: what a record says of the run. `link`: a check.json. `inside`:
    that of a single node, over which HSDP gathers and scatters.

    On a GPU, DDP, FSDP and what DeepSpeed calls overlap_comm hide calls behind the computing. On a
    CPU only DDP does: the others wait for each call.
    """
    options = row["strategy_options"]
    options = json.loads(options) if isinstance(options, str) else {}
    steps = steps_of(
        row["strategy"],
        parts_of(row),
        devices,
        int(row["gradient_accumulation_steps"]),
        row["precision"],
        options,
    )
    if steps is None:
        return None
    on_cpu = str(row["device_name"]).startswith("CPU")
    by_default = not row["strategy"].startswith(("zero1", "zero2"))  # of ZeRO, DeepSpeed's own
    overlap = row["strategy"] == "ddp" if on_cpu else options.get("overlap_comm", by_default)

    def seconds_of_call(call, in_a_row):
        own = inside if inside and call.name != "all_reduce" else link
        return seconds_of(call, in_a_row, own, devices, tree)

    return step_seconds(
        alone,
        steps,
        seconds_of_call,
        overlap,
        link["busy"],
    )


# How far a step is from its prediction, as a factor less 1: below and above it on a quiet machine,
# and what other programs add, for each share of its core that a process did not get. From sweeps of
# both scripts on two cores (docs/results/report-cpu/README.md).
BELOW, ABOVE = 0.17, 0.35
BELOW_BUSY, ABOVE_BUSY = 0.3, 0.85


def interval(low, high, alone, devices, link):
    """The ends between which a step should lie that is predicted to take `low` to `high` seconds.
    Where other programs ran, `alone`, the cell on one device, or a rank of the check of the `link`
    did not get a whole core.
    """
    share = min(link["core_share"], 1 if pd.isna(alone["busy_share"]) else alone["busy_share"])
    lost = min(0.45, max(0, 1 - share))
    power = 1 + max(0, math.log2(devices / link["processes"]))
    return (
        low / (1 + BELOW + BELOW_BUSY * lost) ** power,
        high * (1 + ABOVE + ABOVE_BUSY * lost) ** power,
    )


def seconds_of_record(record):
    """Of a record of one device: the seconds of its steady steps, and the model's parameters.
    Raises an error of UNREADABLE.
    """
    if record["devices"] != 1 or record["status"] != "completed":
        raise ValueError(f"{record['status']} on {record['devices']} devices")
    seconds = record["seconds"]["train"] / record["steps"]
    if record["samples_per_second"]:  # without the steps of the warm-up
        seconds = record["global_batch_size"] / record["samples_per_second"]
    return {"seconds": float(seconds), "parameters": int(record["parameters"])}


def scale_by_count(alone, communication):
    """What a step that takes `alone` seconds on one device takes with so many seconds of counted
    communication, as (seconds, efficiency) twice: all of it hidden behind the computing, or none.
    Efficiency is that of the same batch for each device.
    """
    return [(step, alone / step) for step in (max(alone, communication), alone + communication)]


@dataclass(frozen=True)
class Growth:
    """A predicted step, in seconds: through a ring, and the two ends of its interval."""

    devices: int
    seconds: float
    low: float
    high: float


def predict_growth(
    row: Mapping[str, Any], alone: float, links: list[dict[str, Any]], most: int
) -> list[Growth]:
    """The predicted steps on 2, 4, ... `most` devices. `row` is what a record says of the run on
    one device, `alone` its step in seconds, and `links` are check.json files. Empty if there is no
    link of this kind of device, or no formula.
    """
    link = find_link(row, links)
    found = []
    counts = {2**power for power in range(1, int(math.log2(most)) + 1)} | {most}
    for devices in sorted(counts) if link else []:
        ring, tree = (predict(alone, row, devices, link, by_tree) for by_tree in (False, True))
        if ring is not None:
            low, high = interval(min(tree, ring), max(tree, ring), row, devices, link)
            found.append(Growth(devices, ring, low, high))
    return found
