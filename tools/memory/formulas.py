"""What a device holds while a model trains, by formula; what a run held, and what to try next."""

import bisect
import itertools

from common.strategies import STRATEGIES, shards_of

SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"]
SIZES += ["max_position_embeddings", "type_vocab_size"]
EARLY = ("ddp", "zero3")  # all gradients are there before the backward pass


def bytes_of_parts(strategy, parameters, devices, precision="no"):
    """Bytes of parameters, gradients and states on each device, and of their parts on the host: a
    dict of these four. `precision` is the launcher's, "no" or "bf16". Raises KeyError for a
    strategy that has no YAML.

    Parameters and gradients are fp32, 4 bytes each, and Adam's two moments are 8. DeepSpeed's
    optimizer works on an fp32 copy of its parameters, 4 more; with that copy, parameters and
    gradients of its bf16 are 2 each. Offloaded gradients are fp32.
    """
    known = STRATEGIES[strategy]
    zero = known.family.startswith("zero")
    size = 2 if precision == "bf16" and zero else 4
    bytes_each = size, 4 if known.gradients == "host" else size, 12 if zero else 8
    parts = dict.fromkeys(("parameters", "gradients", "states", "host"), 0)
    for name, each in zip(parts, bytes_each, strict=False):
        place = getattr(known, name)
        share = each * parameters / (1 if place == "whole" else devices)
        parts["host" if place == "host" else name] += share
    return parts


def bytes_of_activations(
    tokens, layers, hidden, inner, precision="no", checkpointing=False, dropout=False
):
    """Bytes that the layers of a transformer keep for the backward pass, for a micro-batch of
    `tokens`. `precision` is "no", "bf16", or "autocast": fp32 weights and bf16 products.

    Each token and layer keeps 8 tensors of the hidden size (the input; query, key and value;
    attention's output; the input of both normalisations, and the output of the first) and 2 of
    the inner size: equation 1 of https://arxiv.org/abs/2205.05198, with fused attention, which
    keeps no scores: always on GPUs, and on a CPU only without dropout. Autocast keeps the inputs of
    normalisations in fp32, and casts a layer's input three times, for query, key and value. Dropout
    keeps two masks on a GPU, with a byte for each element. Activation checkpointing keeps the
    inputs of the layers, and computes one layer again at a time: section 5 there.
    """
    size = 4 if precision == "no" else 2
    layer = tokens * size * (8 * hidden + 2 * inner)
    if precision == "autocast":
        layer = tokens * (24 * hidden + 4 * inner)
    layer += 2 * tokens * hidden * bool(dropout)
    if not checkpointing:
        return layers * layer
    if precision == "autocast":  # a layer's input is fp32, and not a part of what the layer keeps
        return layers * 4 * tokens * hidden + layer
    return (layers - 1) * size * tokens * hidden + layer


def bytes_of_buffers(strategy, model, devices, precision="no"):
    """Bytes of what exists only for a while, without activations: while all activations are
    there, while the backward pass is at the first layer, and after that.

    Autocast makes bf16 copies of the weights of linear layers, and frees them with a layer's
    activations. FSDP has two gathered layers (one is prefetched), the gradients of one, and the
    buffer that reduces them. At the end of the backward pass the embeddings take two places at a
    time, gathered and as a gradient, or as a gradient and in the buffer, beside the buffer of the
    first layer. Without resharding, all parameters stay gathered up to the backward pass of their
    layer. (On CPUs alone, torch's _chunk_cat also copies a gradient if the devices do not divide
    its rows.) ZeRO has its JSON's settings:
    one or two buckets, and gathered parameters. In its step DeepSpeed copies its gradients into one
    tensor and that into fp32. ZeRO-1 and 2 offload through a buffer for the largest parameter.
    All this is read in the libraries' code. docs/lab/12-ladder.md has counted totals.
    """
    parameters, embeddings, layer, weights = count_parameters(model)
    size = 4 if precision == "no" else 2
    step = (4 if precision == "no" else 6) * parameters / devices
    known = STRATEGIES[strategy]
    if known.family in ("fsdp", "hsdp"):
        keeps = known.options.get("reshard_after_forward") == "false"
        gathered = parameters if keeps else 2 * layer
        first = size * (embeddings + 3 * layer)
        return size * (gathered + 2 * layer), first, size * (2 * embeddings + layer)
    if known.family == "zero3":
        bucket = size * float(known.options["reduce_bucket_size"])
        live = bucket + size * min(parameters, float(known.options["stage3_max_live_parameters"]))
        return live, live, bucket + (step if known.states == "shard" else 0)
    if known.family.startswith("zero"):
        buckets = 2 * size * float(known.options["reduce_bucket_size"])
        if known.states == "shard":
            return buckets, buckets, step
        largest = size * model["vocab_size"] * model["hidden_size"]
        return buckets + largest, buckets + largest, largest
    copies = 0 if precision == "no" else 2 * weights
    return copies, copies / model["num_hidden_layers"], 0


def count_parameters(model):
    """The parameters of BERT with a head for answers and no pooler: all; those of the embeddings
    and of one layer, which are FSDP's units; and all weights of linear layers, without biases.
    """
    layers, hidden, inner = (model[name] for name in SIZES[:3])
    rows = model["vocab_size"] + model["max_position_embeddings"] + model["type_vocab_size"]
    embeddings = rows * hidden + 2 * hidden  # 2: scale and shift of a normalisation
    weights = 4 * hidden * hidden + 2 * hidden * inner
    layer = weights + 4 * hidden + inner + hidden + 4 * hidden  # biases, and two normalisations
    head = 2 * hidden
    return embeddings + layers * layer + head + 2, embeddings, layer, layers * weights + head


def memory_of(
    strategy, model, batch, length, devices, precision="no", checkpointing=False, dropout=False
):
    """Bytes on each device in a step with `batch` windows of `length` tokens: parameters,
    gradients, states, buffers and activations, each at its largest; total; and host.

    The total is the peak of a step without accumulation: its largest moment. The backward pass
    frees activations while it makes gradients. So the total is less than the sum of the parts,
    unless all gradients are there from the start (EARLY). Activations include their own gradients
    on their way back through one layer. Under ZeRO-1 and 2 gradients are those of rank 0: until the
    update, a rank keeps whole each tensor that is partly in its shard.
    """
    parameters, embeddings = count_parameters(model)[:2]
    parts = bytes_of_parts(strategy, parameters, devices, precision)
    shard = gradients = parts["gradients"]
    host, family = parts.pop("host"), STRATEGIES[strategy].family
    layers, hidden, inner = (model[name] for name in SIZES[:3])
    if family in ("zero1", "zero2") and gradients:
        # Rank 0's shard begins with the embeddings of words, positions and types.
        size = 2 if precision == "bf16" else 4
        tensors = itertools.accumulate(size * hidden * model[name] for name in SIZES[3:])
        parts["gradients"] = gradients = next((whole for whole in tensors if whole > shard), shard)
    # FSDP and DeepSpeed make bf16 weights. The others use autocast.
    autocast = precision == "bf16" and family in ("baseline", "dp", "ddp")
    dtype, tokens = "autocast" if autocast else precision, batch * length
    rest = hidden, inner, dtype
    layer = bytes_of_activations(tokens, 1, *rest, False, dropout)
    # Embeddings keep the input of a normalisation and a mask, and the head keeps its input. Ids,
    # masks of attention and logits are too small to count.
    outside = tokens * hidden * ({"no": 8, "autocast": 6, "bf16": 4}[dtype] + bool(dropout))
    kept = bytes_of_activations(tokens, layers, *rest, checkpointing, dropout) + outside
    way = tokens * (4 if dtype == "no" else 2) * (hidden + inner)
    buffers, in_layer, after = bytes_of_buffers(strategy, model, devices, precision)
    early = gradients if family in EARLY else 0
    made = max(early, shard * (1 - embeddings / parameters))  # the embeddings' come last
    # With checkpointing, autocast frees its copies after the forward pass. It makes a layer's anew.
    anew = in_layer if checkpointing and autocast else buffers
    moments = {
        "end of the forward pass": early + kept - layer * checkpointing + buffers,
        "start of the backward pass": early + kept + way + anew,
        "backward, at the first layer": made + layer + outside + way + in_layer,
        "backward, at the embeddings": (made if family in ("fsdp", "hsdp") else gradients) + after,
    }
    if family.startswith("zero") and host:  # DeepSpeed's buffer to or from the device, there
        host += (4 if precision == "no" else 2) * parameters / devices
    return parts | {
        "buffers": max(buffers, in_layer, after),
        "activations": kept + way,
        "total": parts["parameters"] + parts["states"] + max(moments.values()),
        "host": host,
    }


def largest_batch(memory, strategy, model, *rest):
    """The largest micro-batch whose total fits into `memory` bytes; 0 if none does. `rest` is what
    `memory_of` takes after the batch.
    """

    def total(batch):
        return memory_of(strategy, model, batch, *rest)["total"]

    return bisect.bisect_right(range(1, 2**30), memory, key=total)


def held_by_run(run):
    """What the fullest rank of a record held at its peak or, if that is not known, what a step
    needs at most, {part: bytes}. Then the bytes on the host of a GPU, those of activations, and how
    many of these activation checkpointing would save: 0 where no formula knows the model.
    """
    work, rank = run["workload"], run["rank"]
    strategy, precision, parameters = run["yaml"], run["dtype"], run["parameters"]
    shards, peak = shards_of(run["strategy_options"], run["devices"]), rank["peak_memory_mb"]
    parts = {"libraries and data": rank["memory_before_mb"] * 1e6}
    parts |= bytes_of_parts(strategy, parameters, shards, precision)
    if run["gradient_accumulation_steps"] > 1:
        parts["gradients"] += bytes_to_accumulate(run)
    host = parts.pop("host")
    if run["on_cpu"] and host:  # it has one memory
        parts["offloaded"], host = host, 0
    activations = saved = 0
    if work.get("layers"):
        sizes = work["layers"], work["hidden_size"], work["intermediate_size"], 0, 0, 0
        model = dict(zip(SIZES, sizes, strict=True))
        # A record has no size of the vocabulary: positions and token types count as words.
        embeddings = parameters - count_parameters(model)[0]
        model["vocab_size"] = embeddings // work["hidden_size"]
        rest = run["per_device_batch_size"], work["sequence_length"], shards, precision
        dropout = work["dropout"] > 0
        step = memory_of(strategy, model, *rest, run["activation_checkpointing"], dropout)
        least = memory_of(strategy, model, *rest, True, dropout)
        parts["gradients"] = max(parts["gradients"], step["gradients"])
        activations, saved = step["activations"], step["activations"] - least["activations"]
        if not peak:
            parts |= {"buffers": step["buffers"], "activations": activations}
    if peak:
        activations = max(0, peak * 1e6 - sum(parts.values()))
        parts["activations and all else"] = activations
        saved = min(activations, saved)
    return parts, host, activations, saved


def bytes_to_accumulate(run):
    """Bytes of the whole gradients that some strategies keep until an accumulated step is complete,
    on top of those that any step needs.
    """
    family = STRATEGIES[run["yaml"]].family
    size = 2 if run["dtype"] == "bf16" and family != "ddp" else 4  # DDP's weights stay in fp32
    return size * run["parameters"] if family in ("ddp", "zero1", "fsdp", "hsdp") else 0


def rungs_of(run, activations, saved):
    """[(what to try next, bytes that it saves at most)], in the order of docs/lab/12-ladder.md.
    `activations` and `saved` are those of `held_by_run`.
    """

    def needed(strategy, devices):
        """Bytes of parameters, gradients and states on a device, with what it keeps gathered."""
        parts = bytes_of_parts(strategy, run["parameters"], devices, run["dtype"])
        keeps = STRATEGIES[strategy].options.get("reshard_after_forward") == "false"
        gathered = (4 if run["dtype"] == "no" else 2) * run["parameters"] * keeps
        return sum(parts.values()) + gathered - (0 if run["on_cpu"] else parts["host"])

    def rung_of(name):
        return f"accelerate_configs/{name}.yaml on {ranks} devices", now - needed(name, ranks)

    batch, micro_batches = run["per_device_batch_size"], run["gradient_accumulation_steps"]
    now = needed(run["yaml"], shards_of(run["strategy_options"], run["devices"]))
    ranks, rungs = max(2, run["devices"]), []
    transformer = bool(run["workload"].get("layers"))
    if transformer and batch > 1:  # the global batch stays the same
        parts = batch if batch % 2 else 2
        whole = bytes_to_accumulate(run) if micro_batches == 1 else 0
        flags = (
            f"--per_device_train_batch_size {batch // parts} "
            f"--gradient_accumulation_steps {micro_batches * parts}"
        )
        rungs.append((flags, activations * (1 - 1 / parts) - whole))
    rungs.append(rung_of("fsdp_keep"))
    if transformer and not run["activation_checkpointing"]:
        rungs.append(("--activation_checkpointing", saved))
    rungs.append(rung_of("fsdp"))
    if not run["on_cpu"]:
        rungs.append(rung_of("fsdp_offload"))
    if STRATEGIES[run["yaml"]].family in ("fsdp", "zero3"):
        rungs.append(("twice as many devices", now - needed(run["yaml"], 2 * ranks)))
    return [rung for rung in rungs if rung[1] >= 1e6]
