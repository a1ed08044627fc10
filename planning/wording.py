"""Say what verify.py found: what was seen, and what usually makes it."""

import math

from planning.comparing import EXPLAIN, relative


def sentence_of(difference, ranks, norms, resumed=False):
    """One Difference as a sentence. `norms` names the model's BatchNorm layers."""
    d = difference
    if resumed:
        return RESUMED[d.kind](d)
    if d.kind in ("inputs", "outputs", "loss"):
        return tell_sum(d, ranks, norms)
    tell = {"samples": tell_samples, "rate": tell_rate, "weights": tell_weights}
    return (tell | {"grads": tell_grads, "apart": tell_apart})[d.kind](d, ranks)


def some(names):
    """The tensors nearest to the loss first, three at most."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[::-1][:3]) + more


def times(ratio):
    return f"{ratio:.4g} times"


def tell_samples(d, ranks):
    sizes, of_one = [len(samples) for samples in d.many["each"]], sum(d.one["samples"].values())
    sets = [set(samples) for samples in d.many["each"]]
    shared = len(set.intersection(*sets)) if len(sets) > 1 else 0
    if shared and shared == len(sets[0]):
        return (
            f"all ranks read the same {sizes[0]} samples: was the loader given to "
            "accelerator.prepare, and does each rank take its own part?"
        )
    if shared:
        return (
            f"several ranks read the same {shared} of {sizes[0]} samples: do they shuffle with "
            "other seeds?"
        )
    seen = f"{sum(sizes)} samples on all ranks, {of_one} on one process"
    if sum(sizes) == of_one * ranks and d.step == 1:
        return f"{seen}: divide the batch (--batch_flag, or --split), or nothing can be compared"
    if sum(sizes) > of_one:
        return (
            f"{seen}: accelerate fills up an uneven last batch with samples that were read before; "
            "with drop_last=True the loader leaves it out"
        )
    if sum(sizes) < of_one:
        return f"{seen}: does each rank divide the data once more than accelerate does?"
    if whose := same_step(d, "samples"):
        return f"the {of_one} samples are those of step {whose} of one process"
    others = of_one - sum((d.one["samples"] & d.many["samples"]).values())
    return (
        f"{others} of {of_one} samples are others than on one process: another order, or is the "
        "data divided among the ranks before accelerate divides it?"
    )


def same_step(d, kind):
    """The first step of one process that has these samples, or these learning rates."""
    here = d.many[kind]
    return next((k + 1 for k, step in enumerate(d.steps) if step[kind] == here), None)


def tell_rate(d, ranks):
    if any(rate != d.many["rates"][0] for rate in d.many["rates"]):
        rates = ", ".join(f"{rate[0]:.6g}" for rate in d.many["rates"])
        return f"the ranks have other learning rates ({rates}): does each rank step its schedule?"
    here, before = d.one["rate"][0], d.steps[d.step - 2]["rate"][0] if d.step > 1 else None
    now = d.many["rate"][0]
    text = f"learning rate {now:.6g} instead of {here:.6g}"
    if d.step == 1 and here and abs(now / here - ranks) < 1e-6:
        return f"{text}, {times(ranks)}: is it multiplied by the number of processes?"
    steps = [k for k, step in enumerate(d.steps) if relative(step["rate"][0], now) < 1e-6]
    if before is not None and here != before and (
        steps and steps[0] == (d.step - 1) * ranks or relative(now - before, (here - before) * ranks) < 1e-3
    ):
        return (
            f"{text}: it changes {ranks} times as fast: a prepared schedule steps once for each rank "
            "(split_batches is off), so its length counts such steps. Or is it stepped twice?"
        )
    return (
        f"{text}: the schedule has another length. Is it prepared, and is its length that of the "
        "loader before it was prepared?"
    )


def tell_weights(d, ranks):
    seen = f"{len(d.names)} of {len(d.one['weights'])} weights differ before the update"
    seen += f" ({some(d.names)})"
    if d.step == 1:
        return f"{seen}: set the seed on all ranks before the model is made"
    if d.steps[d.step - 2]["norm"] and not d.many["norm"]:
        return (
            f"{seen}, and clip_grad_norm_ clipped nothing: under DeepSpeed only gradient_clipping "
            "in its JSON does"
        )
    return f"{seen}, though all before was the same: what changes weights between two steps?"


def draws(d):
    """Whether random numbers explain it: no tool can tell what they hide."""
    return d.kind in EXPLAIN and d.one["draws"] and not {"samples", "weights"} & set(d.others)


def tell_sum(d, ranks, norms):
    one, many = ((step["loss"] if d.kind == "loss" else step[d.kind][0]) for step in (d.one, d.many))
    what = {"inputs": "the model's inputs", "outputs": "the model's outputs", "loss": "the loss"}
    if one is None or many is None:
        return f"{what[d.kind]}: {many} instead of {one}: is Accelerator.backward called on all?"
    ratio = many / one if one else math.inf
    text = f"{what[d.kind]}: {many:.6g} instead of {one:.6g}"
    if draws(d):
        return f"{text}: random numbers are drawn in this step, others on each rank: {OFF}"
    if d.kind == "inputs":
        return f"{text}, from the same samples: are they augmented, or padded?"
    if {"samples", "weights", "inputs"} & set(d.others):
        return text
    if d.kind == "outputs":
        if norms:
            return (
                f"{text}, from the same inputs: the model has BatchNorm ({norms[0]}), which takes "
                "its mean over each rank's own samples; torch.nn.SyncBatchNorm takes that of all"
            )
        return f"{text}, from the same inputs: does the model use its rank, or the batch's size?"
    if "outputs" in d.others:
        return text
    if abs(ratio * ranks - 1) < 1e-4:
        return (
            f"{text}, {times(ratio)}, with the same outputs: a sum over samples? Gradients are "
            "averaged over ranks: use a mean"
        )
    if abs(ratio / ranks - 1) < 1e-4:
        return f"{text}, {times(ratio)}: is a mean multiplied by the number of processes?"
    return (
        f"{text}, with the same outputs: is it a mean over what is not the same number on each "
        "rank (tokens, weights, a mask), or does it compare the samples of a batch?"
    )


def tell_grads(d, ranks):
    one, many, names = d.one["grads"], d.many["grads"], d.names
    if none := [name for name in names if (one.get(name) is None) != (many.get(name) is None)]:
        side = "the ranks" if many.get(none[0]) is None else "one process"
        return f"{some(none)}: no gradient on {side}"
    seen = f"gradients of {len(names)} of {len(one)} tensors ({some(names)})"
    ratios = [many[name][i] / (one[name][i] or 1e-30) for name in names for i in (0, 1)]
    if len(names) > 1 and max(abs(ratio - ratios[0]) for ratio in ratios) < 1e-3 * abs(ratios[0]):
        return (
            f"{seen} are {times(ratios[0])}: is a sum over ranks or micro-batches taken where a mean "
            "is meant, or the loss divided once too often?"
        )
    return f"{seen} differ; the last has norm {many[names[-1]][0]:.4g} instead of " + (
        f"{one[names[-1]][0]:.4g}: are gradients of another step left in it, or changed before "
        "they are reduced?"
    )


def tell_apart(d, _):
    apart = d.many["apart"]
    if names := apart.get("weights"):
        return (
            f"{len(names)} weights are not the same on all ranks ({some(names)}): does one rank "
            "alone change them, or start with others?"
        )
    return (
        f"{len(apart['grads'])} gradients are not the same on all ranks ({some(apart['grads'])}): is "
        "the loss computed by the prepared model, on all ranks?"
    )


def resumed_samples(d):
    whose = same_step(d, "samples")
    whose = f"those of step {whose}" if whose else "those of no step"
    return f"the samples are {whose} of the undisturbed run: {SKIP}"


def resumed_rate(d):
    whose = same_step(d, "rate")
    whose = f", that of step {whose}," if whose else ""
    return (
        f"learning rate {d.many['rate'][0]:.6g}{whose} instead of {d.one['rate'][0]:.6g}: does the "
        "checkpoint hold the schedule (was it prepared, or registered)?"
    )


def resumed_weights(d):
    return (
        f"{len(d.names)} of {len(d.one['weights'])} weights are others ({some(d.names)}): does the "
        "checkpoint hold them, and the optimizer's states?"
    )


OFF = "switch that off (noise, augmentation) to compare"
SKIP = "are the batches before the checkpoint skipped, in the order of the same epoch?"
DICE = "does the checkpoint hold the random states, and is no seed set after it was loaded?"
RESUMED = {
    "samples": resumed_samples,
    "rate": resumed_rate,
    "weights": resumed_weights,
    "inputs": lambda d: f"the same samples with other numbers: {DICE}",
    "outputs": lambda d: f"the same inputs, other outputs (dropout, a buffer): {DICE}",
    "loss": lambda d: f"loss {d.many['loss']:.6g} instead of {d.one['loss']:.6g}",
    "grads": lambda d: f"gradients of {len(d.names)} tensors ({some(d.names)}) differ",
    "apart": lambda d: tell_apart(d, None),
}
SEEN = {"samples": "samples", "rate": "learning rate", "weights": "weights", "inputs": "inputs"}
SEEN |= {"outputs": "outputs", "loss": "loss", "grads": "gradients", "apart": "ranks apart"}


def tell(found, ranks, norms, resumed=False):
    """Lines about all Differences of a run: a sentence for the first, and for each other that does
    not follow from it; the rest in one line.
    """
    lines, rest = [], []
    for difference in found:
        if not lines or difference.kind in ("samples", "rate"):
            sentence = sentence_of(difference, ranks, norms, resumed)
            lines.append(f"step {difference.step}: {sentence}")
        else:
            rest.append(f"{SEEN[difference.kind]} from step {difference.step}")
    return lines + [f"then {', '.join(rest)}"] * bool(rest)


EVALUATIONS = {
    "missing": "{1} of {0} samples are read by no rank",
    "alone": "rank 0 read {1} of {0} samples, and nothing was gathered: is the metric that of its "
    "own part?",
    "rows": "{1} rows gathered instead of {0}: gather_for_metrics drops what fills up the last "
    "batch, if the loader is prepared. A mean of the ranks' means is wrong where that is uneven",
}


def tell_evaluation(step, what, one, many):
    """A line about an evaluation that differs, see comparing.compare_evaluations."""
    return f"evaluation after step {step}: {EVALUATIONS[what].format(one, many)}"
