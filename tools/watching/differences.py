"""Compare what the ranks of a script did with what one process did: how far they are apart, and
what differs first. verify.py says how the runs are made.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

from common.losses import gap

# Larger distances count. In float64 the largest of right scripts was 4e-11. In a script's own
# precision, a ReLU near 0 may come out on the other side. A resumed run may round.
EXACT, ROUGH, ROUNDED = 1e-9, 3e-2, 2e-5
# Each kind can cause those after it. "apart" is what the ranks should share, but do not; "alike"
# are random numbers that they should not share, but do. Inputs, outputs and the loss only explain a
# difference of the gradients or buffers.
NAMES = {"samples": "samples", "rate": "learning rate", "weights": "weights", "inputs": "inputs"}
NAMES |= {"outputs": "outputs", "loss": "loss", "grads": "gradients", "buffers": "buffers"}
NAMES |= {"apart": "not the same on all ranks", "alike": "random numbers"}
EXPLAIN = ("inputs", "outputs", "loss")
CERTAIN = ("samples", "rate", "apart", "alike")  # differences that random numbers cannot cause


class CannotTellError(Exception):
    """The runs cannot be compared. The text says why."""


class NotComparableError(CannotTellError):
    """No runs of this script can be compared."""


@dataclass
class Difference:
    """At step `step`, `one` process and the ranks (`many`) differ in `kind`, in tensors `names`.
    `steps` are those of one process. `uncertain` says that it may come from random numbers that
    belong to no sample.
    """

    kind: str
    step: int
    one: dict
    many: dict
    names: list
    steps: list
    uncertain: bool

    @property
    def ranks(self):
        """The number of ranks."""
        return len(self.many["each"])


def merge(ranks):
    """The steps of all ranks as one list."""
    merged = [merge_step(parts) for parts in zip(*[rank["steps"] for rank in ranks], strict=False)]
    own = {name: ranks[0][name] for name in ("batchnorms", "unprepared", "torchrun")}
    return [step | own for step in merged]


def merge_step(parts):
    """One step of all ranks. "apart" are the tensors that they do not share, "drawn" the rows of
    random numbers that belong to samples. "others" tells what each rank drew besides.
    """
    losses = [part["loss"] for part in parts]
    step = parts[0] | {
        "samples": Counter(sample for part in parts for sample in part["samples"]),
        "indices": Counter(str(index) for part in parts for index in part["indices"]),
        "each": [part["samples"] for part in parts],
        "rates": [part["rate"] for part in parts],
        "loss": None if None in losses else sum(losses) / len(losses),
        "drawn": sum(part["drawn"]["rows"] for part in parts),
        "others": {part["drawn"]["others"] for part in parts},
        "noise": drawn_alike([part["drawn"]["noise"] for part in parts]),
        "cut": any(part["cut"] for part in parts),
        "same_bits": all(part["weights"] == parts[0]["weights"] for part in parts),
        "apart": {},
    }
    for kind in ("inputs", "outputs"):
        step[kind] = [sum(column) for column in zip(*[part[kind] for part in parts], strict=True)]
    for name, first in parts[0]["start"].items():
        if any(far(first, part["start"].get(name), 0.0) > EXACT for part in parts[1:]):
            step["apart"].setdefault("weights", []).append(name)
    least = least_of(parts[0])
    for kind in ("weights", "grads"):
        for name, first in parts[0][kind].items():
            if any(far(first, part[kind].get(name), least[kind]) > EXACT for part in parts[1:]):
                step["apart"].setdefault(kind, []).append(name)
    return step


def drawn_alike(noise):
    """The kinds of random numbers that all ranks, if there are several, draw from one state."""
    first, *others = noise
    return [
        kind
        for kind, state in first.items()
        if others and all(other.get(kind) == state for other in others)
    ]


def find_remarks(steps, ranks):
    """(where, what) of random numbers that all ranks draw alike, though training is no different:
    masks of dropout, and what evaluations draw. Each kind once.
    """
    found = {}
    for k, step in enumerate(steps, 1):
        if "dropout" in step["noise"]:
            found.setdefault("masks of dropout", f"step {k}")
    for step in ranks[0]["evaluations"]:
        drawn = [rank["evaluations"].get(step, {"noise": {}})["noise"] for rank in ranks]
        if drawn_alike(drawn):
            found.setdefault("in an evaluation", f"evaluation after step {step}")
    return [(where, what) for what, where in found.items()]


def far(a, b, least):
    """How far two tensors are apart, relative to their norm, which counts as `least` or more."""
    if a is None or b is None:  # A gradient may be left out, or 0.
        return math.inf if (a or b or [0.0])[0] else 0.0
    if not all(map(math.isfinite, (*a, *b))):
        return 0.0 if str(a) == str(b) else math.inf
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) / max(a[0], b[0], least, 1e-30)


def far_by_name(kind, a, b, least):
    """{(kind, name): how far}. Tensors with a norm below `least[kind]` are compared with that."""
    names = [name for name in {**a, **b} if a.get(name) or b.get(name)]
    return {(kind, name): far(a.get(name), b.get(name), least[kind]) for name in names}


def norm_of_all(tensors):
    """The norm of all tensors together, {name: its two numbers, or None}, that are finite."""
    norms = [two[0] for two in tensors.values() if two and math.isfinite(two[0])]
    return math.hypot(*norms)


def least_of(step, scale=0.0):
    """{kind: the norm with which smaller tensors are compared}. `scale` is the largest norm of all
    gradients so far. The gradient of a bias before a softmax is only the rounding of numbers that
    are as large as the loss.
    """
    least = {kind: 1e-3 * norm_of_all(step[kind]) for kind in ("weights", "buffers")}
    norm = max(scale, norm_of_all(step["grads"]))
    return least | {"grads": max(1e-4 * norm, 1e-5 * abs(step["loss"] or 0.0))}


def distances(a, b, scale):
    """{(kind, tensor): how far step b is from step a}, in the order of the model's tensors. What is
    not a tensor has the name "". `scale` is the largest norm of all gradients so far.
    """
    found = {("loss", ""): gap(a["loss"], b["loss"])}
    for kind in ("inputs", "outputs"):  # Their sizes differ if the padding does.
        same_size = a[kind][1] == b[kind][1]
        found[kind, ""] = gap(a[kind][0], b[kind][0]) if same_size else 0.0
    # ZeRO-3 gives no access to frozen weights.
    known = [name for name, two in a["weights"].items() if two and b["weights"].get(name)]
    if a["weights"] and not b["weights"].keys() & a["weights"].keys():
        raise NotComparableError(
            f"the ranks' models have other names for weights: {next(iter(b['weights']), 'none')} "
            f"instead of {next(iter(a['weights']))}"
        )
    weights = [{name: step["weights"][name] for name in known} for step in (a, b)]
    least = least_of(a, scale)
    found |= far_by_name("weights", *weights, least)
    for kind in ("grads", "buffers"):
        found |= far_by_name(kind, a[kind], b[kind], least)
    return found


def kinds_that_differ(a, b, distance, limit):
    """{kind: its tensors that differ} of a step, in the order of causes."""
    far_off = [key for key, value in distance.items() if value > limit]
    rates = [pair for rate in b["rates"] for pair in zip(a["rate"], rate, strict=False)]
    here = {kind: [name for k, name in far_off if k == kind] for kind, _ in far_off}
    if a["samples"] != b["samples"] and not same_indices(a, b):
        here["samples"] = []
    if any(gap(*pair) > 1e-6 for pair in rates):
        here["rate"] = []
    if b["apart"]:
        here["apart"] = []
    if "noise" in b["noise"]:
        here["alike"] = []
    return {kind: here[kind] for kind in NAMES if kind in here}


def same_indices(a, b):
    """Whether two steps read the samples of the same indices: their values may be drawn."""
    return a["indices"] == b["indices"] and "None" not in a["indices"]


def harmless(kind, here, loader):
    """Whether a kind of difference has no effect on the other kinds `here`, of the same step. The
    gradient of a bias before a softmax is only rounding, but some optimizers make steps of it.
    Without a loader, samples are the inputs, which padding changes.
    """
    if kind == "samples" and not loader:
        return here.keys().isdisjoint({"outputs", "loss", "grads", "buffers"})
    needs = {"weights": {"outputs", "loss", "grads"}} | dict.fromkeys(EXPLAIN, {"grads", "buffers"})
    return kind in needs and needs[kind].isdisjoint(here)


def reduced_in_step(steps, limit, known):
    """Whether an optimizer reduces gradients itself, which the ranks do not share in the first of
    these pairs of steps: before its next step they have the weights of one process, and in all its
    later ones the same bits. If none follows, the answer is what is `known` of {optimizer: answer}.
    """
    optimizer = steps[0][0]["optimizer"]
    later = [pair for pair in steps[1:] if pair[0]["optimizer"] == optimizer]
    if later:
        far_off = {kind for (kind, _), value in distances(*later[0], 0.0).items() if value > limit}
        known[optimizer] = "weights" not in far_off and all(b["same_bits"] for _, b in later)
    return known.get(optimizer, False)


def compare(one, many, limit, skipped=0):
    """The first Difference of each kind, earliest first; {kind: the first step at which it
    differs}, harmless ones too; and {kind: the largest distance}. "first weights" are a kind.
    `many` begins `skipped` steps later than `one`.
    """
    found, since, largest, scale, drawn = {}, {}, Counter(), 0.0, False
    draws_batches = any(step["own"] for step in one[1:])  # Before the first, it makes the model.
    steps, reducing = list(zip(one[skipped:], many, strict=False)), {}
    for k, (a, b) in enumerate(steps, skipped):
        distance = distances(a, b, scale)
        only_grads = [*b["apart"]] == ["grads"]
        if only_grads and reduced_in_step(steps[k - skipped :], limit, reducing):
            distance = {key: value for key, value in distance.items() if key[0] != "grads"}
            b["apart"].clear()
        scale = max(scale, norm_of_all(a["grads"]))
        for (kind, _), value in distance.items():
            largest[kind] = max(largest[kind], value)
        here = kinds_that_differ(a, b, distance, limit)
        if k == skipped:
            largest["first weights"] = largest["weights"]
            if "weights" in here:
                since["first weights"] = k + 1
        since = dict.fromkeys(here, k + 1) | since
        kinds = [kind for kind in here if not harmless(kind, here, a["epoch"] > 0)]
        # What the ranks do not share explains all that comes after, except samples.
        if "apart" in kinds and "samples" not in kinds:
            kinds.sort(key=lambda kind: kind != "apart")
        before = drawn
        # Without a loader, each rank may draw other batches, or pad its own to another length.
        padded = not a["epoch"] and a["inputs"][1] != b["inputs"][1]
        by_design = (draws_batches or padded) and len(set(map(tuple, b["each"]))) > 1
        drawn = drawn or (by_design and "samples" in kinds)
        drawn = drawn or a["others"] != b["others"] or a["drawn"] != b["drawn"]
        drawn = drawn or (a["samples"] != b["samples"] and same_indices(a, b))
        for kind in kinds:
            # The weights were noted before something was drawn in their step.
            uncertain = kind not in CERTAIN and (before if kind == "weights" else drawn)
            uncertain = by_design if kind == "samples" else uncertain
            found.setdefault(kind, Difference(kind, k + 1, a, b, here[kind], one, uncertain))
    return list(found.values()), since, largest


def check_trains(base):
    """Raises NotComparableError if one process does not train."""
    if len(base[0]["steps"]) < 2:
        why = "a step needs a backward pass and the step of a torch optimizer"
        if base[0]["loaded"]:
            why = "it has loaded a file by torch.load: does it continue a run that was over?"
        raise NotComparableError(
            f"one process made {len(base[0]['steps'])} training steps, and 2 are needed: {why}"
        )
    steps = merge(base)
    for k, step in enumerate(steps, 1):
        if step["loss"] is not None and math.isnan(step["loss"]):
            raise NotComparableError(
                f"it does not train: on one process, the loss is NaN from step {k}"
            )
    known = any(two for step in steps for two in step["grads"].values())
    if not any(norm_of_all(step["grads"]) if known else step["loss"] for step in steps):
        what = "all gradients are" if known else "the loss is"
        raise NotComparableError(f"it does not train: on one process, {what} 0 in all steps")


def check_repeats(base, again):
    """Raises NotComparableError unless one process repeats what it did."""
    found, _, _ = compare(merge(base), merge(again), ROUNDED)
    if found:
        how = "torch.manual_seed" if base[0]["torchrun"] else "accelerate.utils.set_seed"
        raise NotComparableError(
            f"step {found[0].step} has different {NAMES[found[0].kind]} in each run: add --seed 0 "
            f"here, or call {how} before anything is drawn"
        )


def check_batch(one, many, flags, split):
    """Raises NotComparableError if the ranks together read as many batches as there are ranks. The
    script's `flags` are {a name with "batch": its value}. With `split`, its loaders were divided.
    """
    if not one or not many:
        return
    each = many[0]["each"]
    alone, together = one[0]["samples"].total(), many[0]["samples"].total()
    same_batch = len(set(map(tuple, each))) == 1  # on all ranks: that is a difference
    if alone and together == alone * len(each) and not same_batch:
        # One that is as large as the batch, or as a micro-batch of it; of training, if it says so.
        fits = [name for name, value in flags.items() if value and alone % value == 0]
        fits.sort(key=lambda name: (flags[name] != alone, "train" not in name, "eval" in name))
        how = "in the script, which makes its batches itself"
        if fits:
            how = f"by --batch_flag {fits[0]}={flags[fits[0]]}"
        elif one[0]["epoch"] and not split:
            how = "by --split"
        elif one[0]["torchrun"]:
            how = f"by braces around its size in the script's flags, as in --size={{{alone}}}"
        raise NotComparableError(
            f"all ranks read {together} samples in step 1, and one process reads {alone}: divide "
            f"the batch {how}"
        )


NUMBER = re.compile(r"(?:[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:none|nan|inf)\b)", re.IGNORECASE)
# Times, speeds and memory differ in each run.
UNIT = r"\s*(?:m?s|sec\w*|min\w*|h|\S*/s|[kMG]i?B)\b"
NAMED = r"\w*(?:time|second)\w*\W+"
MEASURED = re.compile(rf"\d+(?::\d+)+|{NUMBER.pattern}(?={UNIT})|{NAMED}{NUMBER.pattern}", re.I)
PROGRESS = re.compile(r"%\||it/s|s/it")  # of tqdm's bars


def printed_numbers(rank):
    """{a line with # for its numbers: [(the line, its numbers)]}"""
    found = {}
    for line in rank["out"].splitlines():
        kept = MEASURED.sub("measured", line)
        words = [word.lower().replace("none", "nan") for word in NUMBER.findall(kept)]
        numbers = [float(word) for word in words]
        if numbers and not PROGRESS.search(line):
            found.setdefault(NUMBER.sub("#", kept), []).append((line.strip(), numbers))
    return found


def compare_printed(base, again, many, divided, split):
    """The first line that rank 0 prints with other numbers: (its line, that of one process), or
    None; and how many numbers were compared, all of which one process repeats when it runs `again`.
    The ranks divide the numbers `divided`. With `split`, a script believes in more samples a step.
    """
    meant = [(1, len(many)), *((number, number // len(many)) for number in divided)]
    meant_in = re.compile("batch|size|world|rank|proc|gpu|device|accum|micro", re.IGNORECASE)
    one, twin, other = (printed_numbers(ranks[0]) for ranks in (base, again, many))
    compared = 0
    for text, lines in one.items():
        measured = set()  # the places in the line of numbers that differ in each run
        for (_, mine), (_, repeated) in zip(lines, twin.get(text, []), strict=False):
            pairs = enumerate(zip(mine, repeated, strict=True))
            measured |= {place for place, (a, b) in pairs if gap(a, b) > 1e-4}
        for (line, mine), (their_line, theirs) in zip(lines, other.get(text, []), strict=False):
            for place, (a, c) in enumerate(zip(mine, theirs, strict=True)):
                if place in measured or (split and c == a * len(many)):
                    continue
                if (a, c) in meant and meant_in.search(text):
                    continue
                compared += 1
                if gap(a, c) > 1e-3:
                    return (their_line, line), compared
    return None, compared


def evaluations(ranks):
    """{after which step: what rank 0 noted, with "all", the samples that all ranks read}"""
    found = {}
    for rank in ranks:
        for step, one in rank["evaluations"].items():
            if one["read"]:
                first = found.setdefault(step, one | {"all": Counter()})
                first["all"] += Counter(one["read"])
    return found


def compare_evaluations(base, many):
    """(after which step, what differs, one process, the ranks) of the first, or None; and the
    number of samples of one process.
    """
    one, other = evaluations(base), evaluations(many)
    for step, a in one.items():
        if step not in other:
            continue
        b = other[step]
        total, missing = a["all"].total(), (a["all"] - b["all"]).total()
        if missing:
            return (step, "missing", total, missing), total
        mine, read = len(set(b["read"])), len(a["all"])
        if not b["collectives"] and mine < read:
            return (step, "alone", read, mine), total
        if a["gathered"] != b["gathered"]:
            return (step, "rows", a["gathered"], b["gathered"]), total
    return None, sum(each["all"].total() for each in one.values())
