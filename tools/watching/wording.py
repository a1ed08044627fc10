"""Say what verify.py found: what was seen, and what usually causes it."""

from common.losses import gap
from common.printing import listed
from watching.differences import NAMES, ROUGH

DRAWN = (
    ": this step draws random numbers that belong to no single sample, so they differ between the "
    "runs: switch them off to compare"
)


def tell(found, resumed=False):
    """Lines about the Differences of a run: a sentence for the first, and for those that do not
    follow from it; the rest in one line. What random numbers may explain comes last.
    """
    lines, rest = [], []
    sentences = {"samples": tell_samples, "rate": tell_rate, "weights": tell_weights}
    sentences |= {"loss": tell_loss, "grads": tell_grads, "buffers": tell_buffers}
    sentences |= {"apart": tell_apart, "alike": tell_alike}
    for difference in sorted(found, key=lambda difference: difference.uncertain):
        kind, step = difference.kind, difference.step
        if lines and kind not in ("samples", "rate", "alike"):
            rest.append(f"{NAMES[kind]} from step {step}")
            continue
        sentence = tell_resumed if resumed else sentences.get(kind, tell_sum)
        lines.append(f"step {step}: {sentence(difference)}")
    if rest:
        lines.append(f"then {', '.join(rest)}")
    return lines


def either(d, accelerate, torchrun):
    """What to say about a script for Accelerate, or for torchrun."""
    return torchrun if d.one["torchrun"] else accelerate


def some(names):
    """The tensors nearest to the loss first, three at most."""
    return listed(names[::-1], 3)


def instead(many, one):
    """Two numbers, as "A instead of B", with as many digits as show that they differ."""
    pairs = [(f"{many:.{digits}g}", f"{one:.{digits}g}") for digits in (*range(6, 17), 17)]
    shown = next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])
    return f"{shown[0]} instead of {shown[1]}"


def tell_samples(d):
    sizes, of_one = [len(samples) for samples in d.many["each"]], d.one["samples"].total()
    shared = set.intersection(*(set(samples) for samples in d.many["each"]))
    if len(sizes) > 1 and shared and len(shared) == len(set(d.many["each"][0])):
        cause = "is the position or the seed of batches the same on all ranks?"
        if d.one["epoch"]:  # There is a loader.
            cause = either(
                d,
                "was the loader given to accelerator.prepare",
                "has the loader a DistributedSampler",
            )
            cause += ", and does each rank take its own part?"
        return f"all ranks read the same {sizes[0]} samples: {cause}"
    if sum(sizes) > of_one:
        cause = either(
            d,
            "accelerate fills up an uneven last batch with samples that were read before; with "
            "drop_last=True the loader leaves it out",
            "a DistributedSampler gives each rank as many, and reads some again for this; with "
            "drop_last=True it leaves out the last ones",
        )
        return f"{sum(sizes)} samples on all ranks, {of_one} on one process: {cause}"
    if d.one["epoch"] != d.many["epoch"]:
        return tell_epoch(d)
    others = of_one - (d.one["samples"] & d.many["samples"]).total()
    seen = f"{others} of {of_one} samples differ from those on one process"
    if d.uncertain and d.one["own"]:
        return (
            f"{seen}, by design: the script has no loader, and each rank draws its own batches. "
            "The runs cannot be compared"
        )
    if d.uncertain:
        return f"{seen}, perhaps only by padding: the script has no loader, and pads its batches"
    cause = either(
        d,
        "is the loader prepared, is the data divided twice, or do the ranks shuffle with "
        "different seeds?",
        "do one process and the ranks have the same order (a DistributedSampler with one seed, "
        "set_epoch), and is the data divided once, by the world size?",
    )
    return f"{seen}: {cause}"


def tell_epoch(d):
    cause = either(
        d,
        "does a rank's own loss end the loop, or a length that was taken before prepare?",
        "does a rank's own loss end the loop, or a length without regard to the world size?",
    )
    if d.one["epoch"] > d.many["epoch"]:
        return (
            f"an epoch ends after step {d.step - 1} on one process, but not on the ranks: {cause}"
        )
    same = [k for k, step in enumerate(d.steps, 1) if step["epoch"] == d.one["epoch"]]
    return f"an epoch ends after step {d.step - 1}, not {same[-1]}: {cause}"


def tell_rate(d):
    if any(rate != d.many["rates"][0] for rate in d.many["rates"]):
        rates = ", ".join(f"{rate[0]:.6g}" for rate in d.many["rates"])
        return f"the ranks have different learning rates ({rates}): do all step the schedule?"
    pairs = zip(d.many["rate"], d.one["rate"], strict=False)
    group = next(k for k, (now, here) in enumerate(pairs) if gap(now, here) > 1e-6)
    now, here = d.many["rate"][group], d.one["rate"][group]
    seen = f"learning rate {instead(now, here)}"
    # The last step of the same optimizer.
    earlier = [step for step in d.steps[: d.step - 1] if step["optimizer"] == d.one["optimizer"]]
    before = earlier[-1]["rate"][group] if earlier else None
    if before is None and gap(now, here * d.ranks) < 1e-6:
        by = either(d, "number of processes", "world size")
        return f"{seen}, {d.ranks} times as large: is it multiplied by the {by}?"
    if earlier and here != before and gap(now - before, (here - before) * d.ranks) < 1e-3:
        cause = either(
            d,
            "a prepared schedule steps once per rank (split_batches is off), so its length and "
            "warm-up must be counted in those",
            "is its length, or its warm-up, divided by the world size",
        )
        cause += either(d, ". Is it stepped twice?", ", or is it stepped twice?")
        return f"{seen}, it changes {d.ranks} times as fast: {cause}"
    if earlier and gap(now - before, here - before) < 1 / 3:
        return (
            f"{seen}: the schedule has almost the same length. Is it, or its warm-up, rounded for "
            "each rank, by int(), math.ceil or the length of a loader?"
        )
    cause = either(
        d,
        "Is it prepared, and is its length that of the loader before it was prepared?",
        "Is it counted in steps of all ranks, such as the length of the loader with its "
        "DistributedSampler?",
    )
    return f"{seen}: the schedule has a different length. {cause}"


def tell_weights(d):
    seen = f"{len(d.names)} of {len(d.one['weights'])} weights differ before the update"
    seen += f" ({some(d.names)})"
    if d.step == 1:
        more = "; if they are drawn after fully_shard, add --same_start"
        more = either(d, "", more)
        return f"{seen}: set the seed on all ranks before the model is made{more}"
    if d.steps[d.step - 2]["grad_norm"] and not d.many["grad_norm"]:
        return (
            f"{seen}, and clip_grad_norm_ clipped nothing: under DeepSpeed only gradient_clipping "
            "in its JSON does"
        )
    return (
        f"{seen}, although gradients and learning rate were the same: does the script change "
        "weights outside the optimizer?"
    )


def tell_sum(d):
    one, many = d.one[d.kind][0], d.many[d.kind][0]
    seen = f"the model's {d.kind} (sum of squares): {instead(many, one)}"
    if d.uncertain:
        return f"{seen}{DRAWN}"
    if d.kind == "inputs":
        return f"{seen}, from the same samples: are they augmented, or padded?"
    if d.one["batchnorms"]:
        return (
            f"{seen}, from the same inputs: the model has BatchNorm ({d.one['batchnorms'][0]}), "
            "which normalizes over each rank's own samples; torch.nn.SyncBatchNorm uses all samples"
        )
    return f"{seen}, from the same inputs: does the model use its rank, or the batch's size?"


def tell_loss(d):
    one, many = d.one["loss"], d.many["loss"]
    if one is None or many is None:
        return f"the loss: {many} instead of {one}: do all ranks compute gradients?"
    seen = f"the loss: {instead(many, one)}"
    if d.uncertain:
        return f"{seen}{DRAWN}"
    times = f"{many / one:.4g}" if one else "1"
    seen += f", {times} times" if times != "1" else ""
    seen += ", with the same outputs" if d.one["outputs"][1] == d.many["outputs"][1] > 0 else ""
    if gap(many * d.ranks, one) < 1e-4:
        return f"{seen}: a sum over samples? Gradients are averaged over ranks: use a mean"
    if gap(many, one * d.ranks) < 1e-4:
        return f"{seen}: is a mean multiplied by the number of processes?"
    if d.one["inputs"][1] != d.many["inputs"][1]:
        return (
            f"{seen}: is it a mean over a count that differs between ranks (tokens, a mask)? The "
            "ranks pad their samples to other lengths: does padding count in it?"
        )
    return (
        f"{seen}: is it a mean over a count that differs between ranks (tokens, weights, a "
        f"mask), or does it compare the samples of a batch?{cut(d)}"
    )


def cut(d):
    """What to say if Accelerator.gather got tensors with gradients."""
    if not d.many["cut"]:
        return ""
    return " Accelerator.gather cuts gradients: torch.distributed.nn.functional.all_gather does not"


def tell_grads(d):
    one, many, names = d.one["grads"], d.many["grads"], d.names
    missing = [name for name in names if (one.get(name) is None) != (many.get(name) is None)]
    if missing:
        return f"{some(missing)}: there is no gradient on one side{cut(d)}"
    seen = f"gradients of {len(names)} of {len(one)} tensors ({some(names)})"
    ratios = [many[name][i] / (one[name][i] or 1e-30) for name in names for i in (0, 1)]
    alike = len(names) > 1 and all(gap(ratio, ratios[0]) < 1e-3 for ratio in ratios)
    if alike and gap(ratios[0], 1) > 1e-3:
        return (
            f"{seen} are {ratios[0]:.4g} times as large: is a sum over ranks or micro-batches "
            "taken where a mean is meant, or the loss divided once too often?"
        )
    if alike:
        return (
            f"{seen} differ by {gap(ratios[0], 1):.0e} of their norm: is a small constant (1e-5) "
            "added to a divisor, or is a value rounded?"
        )
    now, here = many[names[-1]], one[names[-1]]
    first = f"the first one's norm is {instead(now[0], here[0])}"
    if gap(now[0], here[0]) < gap(now[1], here[1]) / 1000:
        first = f"the first one's norm is {here[0]:.6g} on both sides, but not its direction"
    return (
        f"{seen} differ; {first}: are gradients of another step left in it, or are they changed "
        f"before they are reduced?{cut(d)}"
    )


def tell_buffers(d):
    return (
        f"{len(d.names)} buffers of the model differ ({some(d.names)}): does each rank update them "
        "from its own samples? Then all-reduce what the update takes"
    )


def tell_apart(d):
    kind, names = next(iter(d.many["apart"].items()))
    seen = f"{len(names)} {NAMES[kind]} are not the same on all ranks ({some(names)})"
    if kind == "grads" and set(names) <= set(d.many["unprepared"]):
        return (
            f"{seen}: no model that accelerator.prepare returned has these weights, so nothing "
            "reduces their gradients"
        )
    causes = {"weights": "does only one rank change them, or do they start with different ones?"}
    causes |= {
        "grads": either(
            d,
            "is the loss computed by the prepared model, on all ranks?",
            "does the wrapped model compute the loss, not its .module, or does the script reduce "
            "them all, and wait for each handle?",
        )
    }
    return f"{seen}: {causes[kind]}"


def tell_alike(d):
    return tell_same_draws("noise, augmentation", d.one["torchrun"])


def tell_same_draws(what, torchrun):
    """What to say if all ranks draw from the same state of a random generator."""
    how = "add the rank to the seed" if torchrun else "call set_seed(seed, device_specific=True)"
    return f"all ranks draw the same random numbers ({what}): {how} after the model is made"


def tell_remarks(found, since, drawn, torchrun):
    """Lines that change no verdict: about what differs without an effect (see
    differences.compare), and about what differences.find_remarks has found (`drawn`).
    """
    lines = [f"{where}: {tell_same_draws(what, torchrun)}" for where, what in drawn]
    for kind in ("samples", "weights"):
        if kind in since and kind not in {difference.kind for difference in found}:
            lines.append(
                f"step {since[kind]}: {kind} differ, but neither outputs nor gradients do, so this "
                "has no effect"
            )
    return lines


def tell_rough(problem):
    """A line about a script that does not run in float64."""
    return f"only differences above {ROUGH} count, as in float64 it fails ({problem})"


def tell_resumed(d):
    """What differs in a resumed run, compared with an undisturbed one."""
    seen = f"{NAMES[d.kind]} differ"
    cause = "does the checkpoint hold the random states, and is nothing drawn after loading it?"
    if d.kind == "samples":
        read = d.many["samples"]
        steps = [k for k, step in enumerate(d.steps, 1) if step["samples"] == read]
        whose = f"those of step {steps[0]}" if steps else "not those of any step"
        seen = f"the samples are {whose} of the undisturbed run"
        cause = "are the batches before the checkpoint skipped, in the order of the same epoch?"
    elif d.kind == "rate":
        seen = f"learning rate {d.many['rate'][0]:.6g} instead of {d.one['rate'][0]:.6g}"
        cause = either(
            d,
            "does the checkpoint hold the schedule (was it prepared, or registered)?",
            "does the checkpoint hold the schedule and the optimizer?",
        )
    elif d.kind == "weights":
        seen = f"{len(d.names)} of {len(d.one['weights'])} weights differ ({some(d.names)})"
        cause = "does the checkpoint hold them, and the optimizer's states?"
    elif d.kind == "inputs":
        seen = "the same samples, but different numbers"
    elif d.kind == "outputs":
        seen = "the same inputs, but different outputs (dropout, a buffer)"
    return f"{seen}: {cause}"


def tell_evaluation(step, what, one, many):
    """A line about an evaluation that differs, see differences.compare_evaluations."""
    sentence = {
        "missing": f"no rank reads {many} of {one} samples",
        "alone": f"rank 0 read {many} of {one} samples, and nothing was gathered: does the metric "
        "cover only its own part?",
        "rows": f"{many} rows gathered instead of {one}: gather_for_metrics drops what fills up "
        "the last batch, if the loader is prepared (or does the script drop it?). A mean of the "
        "ranks' means is not the overall mean",
    }[what]
    return f"evaluation after step {step}: {sentence}"
