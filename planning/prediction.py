"""How long does a step take on several devices? By formula, from two measurements.

    step on n devices =   the step of the same strategy on ONE device
                        + latency + bytes / bandwidth of each collective of the step
                        - what the computing hides of them

The first is a run with `--num_processes 1`: it holds the strategy's own bookkeeping. The second is
what sbatch/check.py measures and fits. report.py prints the prediction beside what was measured.
Which collectives a step has follows from strategy and model. docs/report.md derives them, and says
what is not modelled; tests/test_predict.py counts them.
"""

import json
import math
from collections import namedtuple

import pandas as pd

from planning.facts import ARCHITECTURE
from planning.links import Call, seconds_of

# The sizes of a model's tensors, in parameters and in the order of the model: the word embeddings;
# position and type embeddings and their norm, or all of a model without layers; a list for each
# layer; and the head.
Parts = namedtuple("Parts", "words others layers head")
# A part of a step: calls that it waits for, its share of the computing, and calls that can start
# when it is over.
Stage = namedtuple("Stage", "before share after")
# The stages of a micro-batch, and the calls after the last one.
Step = namedtuple("Step", "stages end")


def parts_of(row):
    """The Parts of a model, from what a record says of it: `tensors`, the sizes of all its tensors,
    or a BERT's sizes (ARCHITECTURE). A model that is not known is one tensor.
    """
    if isinstance(row["tensors"], list):
        return Parts([], row["tensors"], [], [])
    if any(pd.isna(row[name]) for name in ARCHITECTURE):
        return Parts([], [row["parameters"]], [], [])
    layers, h, i, positions = (int(row[name]) for name in ARCHITECTURE)
    attention = [h * h, h] * 4 + [h, h]  # query, key, value, output; weights and bias of the norm
    layer = [*attention, h * i, i, i * h, h, h, h]
    others, head = [positions * h, 2 * h, h, h], [2 * h, 2]  # two types of token; start and end
    words = row["parameters"] - layers * sum(layer) - sum(others) - sum(head)
    return Parts([words], others, [layer] * layers, head)


def fill_buckets(tensors, limit, first=None, over=True):
    """[[index of tensor, ...] of each bucket]. A bucket is full when it reaches the limit, or, if
    not `over`, before it would exceed it. The first one may have a limit of its own.
    """
    buckets, size = [[]], 0
    for index, tensor in enumerate(tensors):
        full = (first or limit) if len(buckets) == 1 else limit
        if buckets[-1] and (size >= full if over else size + tensor > limit):
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += tensor
    return buckets


def backward_tensors(parts):
    """[(size, stage)] in the order in which the backward pass makes gradients. Stage 0 is the last
    layer with the head, the last stage the embeddings.
    """
    last = len(parts.layers)
    found = [(size, 0) for size in reversed(parts.head)]
    for stage, layer in enumerate(reversed(parts.layers)):
        found += [(size, stage) for size in reversed(layer)]
    return found + [(size, last) for size in reversed(parts.words + parts.others)]


def empty_stages(parts):
    """Stages without calls: forward a layer each, a third of the computing; backward the same and
    the embeddings, two thirds, as a backward pass has two products for each of the forward pass.
    """
    count = max(1, len(parts.layers))
    forward = [Stage([], 1 / 3 / count, []) for _ in range(count)]
    backward = [Stage([], 2 / 3 / count, []) for _ in range(count)]
    return forward, backward + [Stage([], 0.0, [])]


def step_of_ddp(parts, **_):
    """An all-reduce for each bucket of gradients: 1 MiB, then 25 MiB (torch's bucket_cap_mb), in
    the order of the backward pass. A bucket is full when it reaches that.
    """
    (forward, backward), tensors = empty_stages(parts), backward_tensors(parts)
    sizes = [4 * size for size, _ in tensors]
    for bucket in fill_buckets(sizes, 25 * 2**20, first=2**20):
        stage = max(tensors[index][1] for index in bucket)
        backward[stage].after.append(Call("all_reduce", sum(sizes[index] for index in bucket)))
    return Step(forward + backward, [])


def step_of_fsdp(parts, width, keep, **_):
    """The units of FSDP2 are the layers, the word embeddings, and the root: all the rest. Each is
    gathered for the forward pass and, but for the root, again for the backward pass, unless it is
    kept; and each reduce-scatters its gradients.
    """
    forward, backward = empty_stages(parts)
    root, words = sum(parts.others) + sum(parts.head), sum(parts.words)
    forward[0].before.append(Call("all_gather", width * root))
    units = [(words, 0, len(backward) - 1)] if words else []
    units += [
        (sum(layer), place, len(parts.layers) - 1 - place)
        for place, layer in enumerate(parts.layers)
    ]
    for size, ahead, back in units:
        forward[ahead].before.append(Call("all_gather", width * size))
        if not keep:
            backward[back].before.append(Call("all_gather", width * size))
        backward[back].after.append(Call("reduce_scatter", width * size))
    backward[-1].after.append(Call("reduce_scatter", width * root))
    return Step(forward + backward, [])


def step_of_zero(parts, width, stage, options, devices, **_):
    """ZeRO-1 and ZeRO-2 reduce each bucket of `reduce_bucket_size` parameters to the ranks that
    own pieces of it, and all-gather the updated parameters.

    ZeRO-3 all-gathers what is larger than `stage3_param_persistence_threshold`, and
    reduce-scatters the buckets. After the step it all-gathers each small tensor, one by one, and
    all-reduces one number.
    """
    (forward, backward), tensors = empty_stages(parts), backward_tensors(parts)
    sizes = [size for size, _ in tensors]
    done = total = sum(sizes)  # ZeRO-1 and ZeRO-2 number parameters from the first layer on
    for bucket in fill_buckets(sizes, number(options, "reduce_bucket_size", 5e8), over=False):
        size = sum(sizes[index] for index in bucket)
        after = backward[max(tensors[index][1] for index in bucket)].after
        if stage == "3":
            after.append(Call("reduce_scatter", width * size))
            continue
        share = total / devices
        for owner in range(int((done - size) / share), math.ceil(done / share)):
            piece = min(done, (owner + 1) * share) - max(done - size, owner * share)
            if piece > 0.5:
                after.append(Call("reduce", width * piece))
        done -= size
    if stage != "3":
        return Step(forward + backward, [Call("all_gather", width * total)])
    small = number(options, "stage3_param_persistence_threshold", 1e5)
    gathers = gathers_of_zero3(
        [size for size in reversed(sizes) if size > small],
        number(options, "stage3_prefetch_bucket_size", 5e7),
        number(options, "stage3_max_live_parameters", 1e9),
    )
    for stages, found in zip((forward, backward), gathers, strict=True):
        for place, size in enumerate(found):
            where = stages[place * len(stages) // len(found)]
            where.before.append(Call("all_gather", width * size))
    kept = [Call("all_gather", width * size) for size in sizes if size <= small]
    return Step(forward + backward, [*kept, Call("all_reduce", 8)])


def gathers_of_zero3(tensors, at_once, at_most):
    """Sizes of the all-gathers of the forward and of the backward pass through these tensors, as
    DeepSpeed's PartitionedParameterCoordinator makes them: what the next module needs, and then,
    ahead of it, tensors of up to `at_once` parameters, or one more; while `at_most` are gathered.
    What is used again within what was fetched ahead stays gathered.
    """
    order = [*range(len(tensors)), *reversed(range(len(tensors)))]
    calls, held, live, ahead = ([], []), set(), 0, 0
    for now in range(-2, len(order)):  # two modules around the first one have no tensors
        found = calls[now >= len(tensors)]
        if now >= 0 and order[now] not in held:
            found.append(tensors[order[now]])
            held.add(order[now])
            live += tensors[order[now]]
        room, size, ahead = min(at_most - live, at_once), 0, max(ahead, now + 1)
        while ahead < len(order) and size < room:
            if order[ahead] not in held:
                held.add(order[ahead])
                size += tensors[order[ahead]]
            ahead += 1
        if size:
            found.append(size)
            live += size
        if now >= 0 and order[now] not in order[now + 1 : ahead]:
            held.discard(order[now])
            live -= tensors[order[now]]
    return calls


def number(options, name, default):
    """A number of DeepSpeed's settings; `default` is DeepSpeed's own."""
    value = options.get(name, default)
    return default if value == "auto" else float(value)


def steps_of(strategy, parts, devices, micro_batches=1, precision="no", options=None):
    """The micro-batches of an optimizer step, as a list of Steps; None if no formula is known.
    `strategy` is a YAML's name, `options` what a record calls strategy_options.

    In 16 bits FSDP and DeepSpeed send two bytes per parameter; DDP's gradients stay fp32. While
    they accumulate, DDP, FSDP and ZeRO-1 do not reduce.
    """
    options, plain = options or {}, strategy.removesuffix("_offload")
    width = 2 if precision in ("bf16", "fp16") and plain != "ddp" else 4
    if plain in ("baseline", "dp") or devices == 1:
        empty = Step([Stage([], 1.0, [])], [])
        return None if plain == "dp" else [empty] * micro_batches
    known = {
        "ddp": step_of_ddp,
        "fsdp": step_of_fsdp,
        "fsdp_keep": step_of_fsdp,
        "zero1": step_of_zero,
        "zero2": step_of_zero,
        "zero3": step_of_zero,
    }
    if plain not in known:
        return None
    last = known[plain](
        parts,
        width=width,
        keep=plain == "fsdp_keep",
        stage=plain[-1],
        options=options,
        devices=devices,
    )
    silent = plain in ("ddp", "fsdp", "fsdp_keep", "zero1")
    first = Step([stage._replace(after=[] if silent else stage.after) for stage in last.stages], [])
    return [first] * (micro_batches - 1) + [last]


def calls_of(steps):
    """All collectives of these Steps."""
    return [
        call
        for step in steps
        for calls in [*(stage.before + stage.after for stage in step.stages), step.end]
        for call in calls
    ]


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


def predict(alone, row, devices, link, tree=False):
    """Predicted seconds of a step, or None if no formula is known. `alone`: those of the same
    strategy on one device. `row`: what a record says of the run. `link`: a check.json.

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
    return step_seconds(
        alone,
        steps,
        lambda call, in_a_row: seconds_of(call, in_a_row, link, devices, tree),
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
