"""What a rank sends in a step, by formula: its collectives, one by one, in their order."""

import math
from collections import namedtuple

import pandas as pd

from planning.facts import ARCHITECTURE, shards_of
from planning.links import Call

# A tensor of a model: its first dimension, which FSDP divides, and the product of the others.
Tensor = namedtuple("Tensor", "rows columns")
# The Tensors of a model, in its order: the word embeddings;
# position and type embeddings and their norm, or all of a model without layers; a list for each
# layer; and the head.
Parts = namedtuple("Parts", "words others layers head")
# A part of a step: calls that it waits for, its share of the computing, and calls that can start
# when it is over.
Stage = namedtuple("Stage", "before share after")
# The stages of a micro-batch, and the calls after the last one.
Step = namedtuple("Step", "stages end")


def vectors(sizes):
    """Tensors of one dimension each, of so many parameters."""
    return [Tensor(size, 1) for size in sizes]


def size_of(tensors):
    """The parameters of these Tensors."""
    return sum(tensor.rows * tensor.columns for tensor in tensors)


def padded(tensors, shards):
    """The parameters of these Tensors when each first dimension is filled up so that so many shards
    are equal: fully_shard of torch pads so.
    """
    return sum(shards * math.ceil(rows / shards) * columns for rows, columns in tensors)


def parts_of(row):
    """The Parts of a model, from what a record says of it: `tensors`, the sizes of all its tensors,
    or a BERT's sizes (ARCHITECTURE). A model that is not known is one tensor. Where only sizes are
    known, tensors count as vectors, so that what FSDP pads is more than the formulas say.
    """
    if isinstance(row["tensors"], list):
        return Parts([], vectors(row["tensors"]), [], [])
    if any(pd.isna(row[name]) for name in ARCHITECTURE):
        return Parts([], vectors([row["parameters"]]), [], [])
    layers, h, i, positions = (int(row[name]) for name in ARCHITECTURE)
    square, bias = Tensor(h, h), Tensor(h, 1)
    # Query, key, value and output, each with a bias; and twice a norm with weights and bias.
    attention = [square, bias] * 4 + [bias, bias]
    layer = [*attention, Tensor(i, h), Tensor(i, 1), Tensor(h, i), bias, bias, bias]
    # Two types of token; the head finds start and end.
    others, head = [Tensor(positions, h), Tensor(2, h), bias, bias], [Tensor(2, h), Tensor(2, 1)]
    words = row["parameters"] - layers * size_of(layer) - size_of(others) - size_of(head)
    return Parts([Tensor(words // h, h)], others, [layer] * layers, head)


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
    found = [(tensor, 0) for tensor in reversed(parts.head)]
    for stage, layer in enumerate(reversed(parts.layers)):
        found += [(tensor, stage) for tensor in reversed(layer)]
    found += [(tensor, last) for tensor in reversed(parts.words + parts.others)]
    return [(size_of([tensor]), stage) for tensor, stage in found]


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


def step_of_fsdp(parts, width, keep, options, devices, **_):
    """The units of FSDP2 are the layers, the word embeddings, and the root: all the rest. Each is
    gathered for the forward pass and, but for the root, again for the backward pass, unless it is
    kept; and each reduce-scatters its gradients. All tensors are padded.

    In HSDP the ranks that share the shards of a replica do that, and then those that have the same
    shard all-reduce its gradients.
    """
    shards = shards_of(options, devices)
    replicas = devices // shards
    forward, backward = empty_stages(parts)

    def gather(unit, before):
        before.append(Call("all_gather", width * padded(unit, shards), shards))

    def reduce(unit, after):
        size = width * padded(unit, shards)
        after.append(Call("reduce_scatter", size, shards))
        if replicas > 1:
            after.append(Call("all_reduce", size / shards, replicas))

    root = parts.others + parts.head
    gather(root, forward[0].before)
    units = [(parts.words, 0, len(backward) - 1)] if parts.words else []
    units += [
        (layer, place, len(parts.layers) - 1 - place) for place, layer in enumerate(parts.layers)
    ]
    for unit, ahead, back in units:
        gather(unit, forward[ahead].before)
        if not keep:
            gather(unit, backward[back].before)
        reduce(unit, backward[back].after)
    reduce(root, backward[-1].after)
    return Step(forward + backward, [])


def step_of_zero(parts, width, options, devices, **_):
    """ZeRO-1 and ZeRO-2 reduce each bucket of `reduce_bucket_size` parameters, and all-gather the
    updated parameters, filled up so that each rank owns an even number of them.

    With `use_multi_rank_bucket_allreduce` each bucket is an all-reduce, or some of them if one
    tensor is more than a bucket. Without, each rank that
    owns a piece of it gets a reduce: so there are as many as buckets and ranks together.
    """
    (forward, backward), tensors = empty_stages(parts), backward_tensors(parts)
    sizes = [size for size, _ in tensors]
    done = sum(sizes)  # Parameters are numbered from the first layer on.
    share = 2 * math.ceil(done / (2 * devices))
    limit = number(options, "reduce_bucket_size", 5e8)
    for bucket in fill_buckets(sizes, limit, over=False):
        size = sum(sizes[index] for index in bucket)
        after = backward[max(tensors[index][1] for index in bucket)].after
        first, last = (done - size) // share, (done - 1) // share
        pieces = [
            min(done, (owner + 1) * share) - max(done - size, owner * share)
            for owner in range(first, last + 1)
        ]
        if options.get("use_multi_rank_bucket_allreduce", True):
            after += [Call("all_reduce", width * part) for part in joined(pieces, limit)]
        else:
            after += [Call("reduce", width * piece) for piece in pieces]
        done -= size
    return Step(forward + backward, [Call("all_gather", width * share * devices)])


def joined(pieces, limit):
    """Sizes of pieces that go together: DeepSpeed sends them when they are more than the limit."""
    sizes = [0]
    for piece in pieces:
        if sizes[-1] > limit:
            sizes.append(0)
        sizes[-1] += piece
    return sizes


def step_of_zero3(parts, width, options, devices, **_):
    """ZeRO-3 all-gathers what is larger than `stage3_param_persistence_threshold`, and
    reduce-scatters the buckets. After the step it all-gathers each small tensor, one by one, and
    all-reduces one number. Each tensor is filled up to a multiple of the ranks.
    """
    (forward, backward), tensors = empty_stages(parts), backward_tensors(parts)
    sizes = [size for size, _ in tensors]

    def filled(some):
        return width * devices * sum(math.ceil(size / devices) for size in some)

    for bucket in fill_buckets(sizes, number(options, "reduce_bucket_size", 5e8), over=False):
        after = backward[max(tensors[index][1] for index in bucket)].after
        after.append(Call("reduce_scatter", filled(sizes[index] for index in bucket)))
    small = number(options, "stage3_param_persistence_threshold", 1e5)
    gathers = gathers_of_zero3(
        [size for size in reversed(sizes) if size > small],
        number(options, "stage3_prefetch_bucket_size", 5e7),
        number(options, "stage3_max_live_parameters", 1e9),
    )
    for stages, found in zip((forward, backward), gathers, strict=True):
        for place, together in enumerate(found):
            where = stages[place * len(stages) // len(found)]
            where.before.append(Call("all_gather", filled(together)))
    kept = [Call("all_gather", filled([size])) for size in sizes if size <= small]
    return Step(forward + backward, [*kept, Call("all_reduce", 8)])


def gathers_of_zero3(tensors, at_once, at_most):
    """The tensors of each all-gather of the forward and of the backward pass through these, as
    DeepSpeed's PartitionedParameterCoordinator makes them: what the next module needs, and then,
    ahead of it, tensors of up to `at_once` parameters, or one more; while `at_most` are gathered.
    What is used again within what was fetched ahead stays gathered.
    """
    order = [*range(len(tensors)), *reversed(range(len(tensors)))]
    calls, held, live, ahead = ([], []), set(), 0, 0
    for now in range(-2, len(order)):  # two modules around the first one have no tensors
        found = calls[now >= len(tensors)]
        if now >= 0 and order[now] not in held:
            found.append([tensors[order[now]]])
            held.add(order[now])
            live += tensors[order[now]]
        room, fetched, ahead = min(at_most - live, at_once), [], max(ahead, now + 1)
        while ahead < len(order) and sum(fetched) < room:
            if order[ahead] not in held:
                held.add(order[ahead])
                fetched.append(tensors[order[ahead]])
            ahead += 1
        if fetched:
            found.append(fetched)
            live += sum(fetched)
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
        "hsdp": step_of_fsdp,
        "zero1": step_of_zero,
        "zero2": step_of_zero,
        "zero3": step_of_zero3,
    }
    if plain not in known:
        return None
    keep = plain == "fsdp_keep"
    last = known[plain](parts, width=width, keep=keep, options=options, devices=devices)
    silent = plain in ("ddp", "fsdp", "fsdp_keep", "hsdp", "zero1")
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
