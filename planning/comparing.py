"""Compare what ranks of a script did with what one process did: how far they are apart, what
rounding explains, and what differs first. verify.py says how runs are made.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

# A difference counts if it is 30 times as large as that of the control, and larger than LEAST.
TIMES = 30
LEAST = {"no": 2e-5, "bf16": 2**-7, "fp16": 2**-10}  # by precision
# In this order one causes the next. Inputs, outputs and the loss explain other gradients; alone
# they do no harm. "apart" is what the ranks do not share, though they have to.
KINDS = ["samples", "rate", "weights", "inputs", "outputs", "loss", "grads", "apart"]
EXPLAIN = ("inputs", "outputs", "loss")


class CannotTellError(Exception):
    """The runs cannot be compared. The text says why."""


@dataclass
class Difference:
    """At step `step`, `one` process and the ranks (`many`) differ in `kind`, in tensors `names`.
    `others` are the kinds that differ at the same step before it, and `steps` those of one process.
    """

    kind: str
    step: int
    one: dict
    many: dict
    names: list
    others: list
    steps: list

    @property
    def ranks(self):
        """How many there are."""
        return len(self.many["each"])


def merge(ranks):
    """The steps of all ranks as one."""
    merged = [merge_step(parts) for parts in zip(*[rank["steps"] for rank in ranks], strict=False)]
    return [step | {"norms": ranks[0]["norms"]} for step in merged]


def merge_step(parts):
    """A step of all ranks. "apart" are the tensors that they do not share."""
    means = [sum(part["losses"]) / len(part["losses"]) for part in parts if part["losses"]]
    step = parts[0] | {
        "samples": Counter(sample for part in parts for sample in part["samples"]),
        "each": [part["samples"] for part in parts],
        "rates": [part["rate"] for part in parts],
        "loss": sum(means) / len(means) if means else None,
        "draws": any(part["draws"] for part in parts),
        "apart": {},
    }
    for kind in ("inputs", "outputs"):
        step[kind] = [sum(column) for column in zip(*[part[kind] for part in parts], strict=True)]
    for kind in ("weights", "grads"):
        for name, first in parts[0][kind].items():
            if any(far(first, part[kind].get(name), 1e-20) > 1e-9 for part in parts[1:]):
                step["apart"].setdefault(kind, []).append(name)
    return step


def relative(a, b):
    """How far two numbers are apart, relative to the larger one."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-30) if a != b else 0.0


def far(a, b, least):
    """How far two tensors are apart, relative to their norm, which counts as `least` or more."""
    if a is None or b is None or math.isnan(a[0] + b[0]):
        return relative(a and a[0], b and b[0])
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) / max(a[0], b[0], least)


def far_by_name(a, b, share):
    """{name: how far}. Tensors below `share` of the norm of all are compared with that."""
    least = share * math.sqrt(sum(two[0] ** 2 for two in a.values() if two))
    names = [*a, *(name for name in b if name not in a)]
    return {name: far(a.get(name), b.get(name), least) for name in names}


def weights_apart(a, b):
    """{name: how far}, of the weights that both runs tell: ZeRO-3 tells no frozen ones."""
    known = [name for name in a if a[name] and b.get(name)]
    return far_by_name(*({name: weights[name] for name in known} for weights in (a, b)), 1e-3)


def distances(a, b):
    """{(kind, tensor): how far step b is from step a}, in the order of the model's tensors. What is
    no tensor has the name "".
    """
    found = {("loss", ""): relative(a["loss"], b["loss"])}
    for kind in ("inputs", "outputs"):  # With other padding they have other sizes.
        same_size = a[kind][1] == b[kind][1]
        found[kind, ""] = relative(a[kind][0], b[kind][0]) if same_size else 0.0
    weights = weights_apart(a["weights"], b["weights"])
    grads = far_by_name(a["grads"], b["grads"], 1e-4)
    found |= {("weights", name): value for name, value in weights.items()}
    return found | {("grads", name): value for name, value in grads.items()}


def limits_of(base, control, precision):
    """For each step of `base`, {(kind, tensor): how large a distance may be}: TIMES the largest of
    the control so far, or LEAST, as for what is not in it. Rounding to bf16 is so rough that all
    tensors of a kind count.
    """
    found, largest, least = [], Counter(), least_of(precision)
    for k, step in enumerate(base):
        here = distances(step, control[k]) if k < len(control) else {}
        if precision != "no":
            of_kind = {kind: max(here[key] for key in here if key[0] == kind) for kind, _ in here}
            here = {key: of_kind[key[0]] for key in here}
        largest |= Counter(here)  # the larger of both
        found.append({key: max(least, TIMES * value) for key, value in largest.items()})
    return found


def least_of(precision):
    """The smallest difference that counts."""
    return LEAST.get(precision, LEAST["bf16"])


def differences(a, b, distance, most, least):
    """{kind: its tensors that differ} of a step, in the order of causes."""
    far_off = [key for key, value in distance.items() if value > most.get(key, least)]
    rates = [pair for rate in b["rates"] for pair in zip(a["rate"], rate, strict=False)]
    here = {kind: [name for k, name in far_off if k == kind] for kind, _ in far_off}
    here |= {"samples": []} if a["samples"] != b["samples"] else {}
    here |= {"rate": []} if any(relative(*pair) > 1e-6 for pair in rates) else {}
    here |= {"apart": []} if b["apart"] else {}
    return {kind: here[kind] for kind in KINDS if kind in here}


def compare(one, many, limits, least, skipped=0):
    """The first Difference of each kind, earliest first; {kind: the first step at which it
    differs}, harmless ones too; and {kind: the largest distance}. "first" are the first weights.
    `many` and `limits` begin `skipped` steps later than `one`.
    """
    found, first, worst = {}, {}, Counter()
    for k, (a, b, most) in enumerate(zip(one[skipped:], many, limits, strict=False), skipped):
        distance = distances(a, b)
        for (kind, _), value in distance.items():
            worst[kind] = max(worst[kind], value)
        here = differences(a, b, distance, most, least)
        if k == skipped:
            worst["first"] = worst["weights"]
            first |= {"first": k + 1} if "weights" in here else {}
        first = dict.fromkeys(here, k + 1) | first
        kinds = [kind for kind in here if "grads" in here or kind not in EXPLAIN]
        # What the ranks do not share explains all that comes after, but for samples.
        if "apart" in kinds and "samples" not in kinds:
            kinds.sort(key=lambda kind: kind != "apart")
        for place, kind in enumerate(kinds):
            new = Difference(kind, k + 1, a, b, here[kind], kinds[:place], one)
            found.setdefault(kind, new)
    return list(found.values()), first, worst


def check_repeats(base, control):
    """Raises CannotTellError unless the script does on one process what it did before."""
    one, again = merge(base), merge(control)
    for k, (a, b) in enumerate(zip(one, again, strict=False)):
        if a["loss"] is not None and math.isnan(a["loss"]):
            raise CannotTellError(f"the loss is NaN from step {k + 1} on")
        what = "other samples" if a["samples"] != b["samples"] else None
        what = what or ("other learning rates" if a["rate"] != b["rate"] else None)
        if k == 0 and base[0]["precision"] == "no":
            weights = max(weights_apart(a["weights"], b["weights"]).values(), default=0.0)
            what = what or ("other first weights" if weights > 1e-4 else None)
            what = what or ("another loss" if relative(a["loss"], b["loss"]) > 1e-3 else None)
        if what:
            raise CannotTellError(
                f"step {k + 1} has {what} each time that the script runs: "
                "call accelerate.utils.set_seed before anything is drawn"
            )
    if len(one) < 2:
        raise CannotTellError(
            f"{len(one)} training steps were seen, and 2 are needed: a step is a forward pass of a "
            "model, and a step of an optimizer, that Accelerator.prepare returned"
        )


def check_batch(one, many):
    """Raises CannotTellError if the ranks read, together, as many batches as there are ranks."""
    if not one or not many:
        return
    each = many[0]["each"]
    alone, together = one[0]["samples"].total(), many[0]["samples"].total()
    same_batch = len(set(map(tuple, each))) == 1  # on all ranks: that is a difference
    if alone and together == alone * len(each) and not same_batch:
        raise CannotTellError(
            f"{together} samples in step 1 on all ranks, {alone} on one process: divide the batch "
            "by --batch_flag or --split"
        )


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
# Times, speeds and memory are others in each run.
UNIT = r"\s*(?:m?s|sec\w*|min\w*|h|\S*/s|[kMG]i?B)\b"
NAMED = r"\w*(?:time|second)\w*\W+"
MEASURED = re.compile(rf"\d+(?::\d+)+|{NUMBER.pattern}(?={UNIT})|{NAMED}{NUMBER.pattern}", re.I)


def printed_numbers(rank):
    """{a line with # for its numbers: [(the line, its numbers)]}"""
    found = {}
    for line in rank["out"].splitlines():
        if "it/s" in line or "s/it" in line:  # of a progress bar
            continue
        kept = MEASURED.sub("measured", line)
        if numbers := [float(number) for number in NUMBER.findall(kept)]:
            found.setdefault(NUMBER.sub("#", kept), []).append((line.strip(), numbers))
    return found


def compare_printed(base, control, many, batch):
    """What rank 0 prints otherwise: (its line, the line of one process), or None; and how many
    numbers were compared: those that the control prints, too. The ranks divide `batch`.
    """
    meant = [(1, len(many)), (batch, batch // len(many))]
    one, again, other = (printed_numbers(ranks[0]) for ranks in (base, control, many))
    compared = 0
    for text, lines in one.items():
        same_lines = lines, again.get(text, []), other.get(text, [])
        for mine, twin, theirs in zip(*same_lines, strict=False):
            for a, b, c in zip(mine[1], twin[1], theirs[1], strict=True):
                if relative(a, b) > 1e-4 or (a, c) in meant:
                    continue
                compared += 1
                if relative(a, c) > 1e-3:
                    return (theirs[0], mine[0]), compared
    return None, compared


def first_apart(ranks):
    """The names of weights that the ranks make otherwise, before Accelerator.prepare."""
    one, *others = (rank["first"] for rank in ranks)
    return [name for name in one if any(one[name] != other.get(name) for other in others)]


def compare_last(base, control, many):
    """The largest distance of the weights after the last step, and whether rounding explains it."""
    precision, none = base[0]["precision"], {"loss": None, "inputs": [0, 0], "outputs": [0, 0]}
    steps = [none | {"weights": run[0]["last"], "grads": {}} for run in (base, control, many)]
    [limits] = limits_of(steps[:1], steps[1:2], precision)
    last = distances(steps[0], steps[2])
    alike = all(value <= limits.get(key, least_of(precision)) for key, value in last.items())
    return max(last.values()), alike


def evaluations(ranks):
    """{after which step: the samples that all ranks read, those of rank 0, and what it noted}"""
    found = {}
    for rank in ranks:
        for one in rank["evaluations"]:
            if one["read"]:
                here = Counter(one["read"])
                found.setdefault(one["after"], {"read": Counter(), "first": here, "rank 0": one})
                found[one["after"]]["read"] += here
    return found


def compare_evaluations(base, many, printed_alike):
    """(after which step, what differs, one process, the ranks) of the first, or None; and the
    number of samples of one process. What is gathered does not matter if what is printed is equal.
    """
    one, other = evaluations(base), evaluations(many)
    for step in one.keys() & other.keys():
        a, b = one[step], other[step]
        read, rows, gathered = a["read"], a["rank 0"]["gathered"], b["rank 0"]["gathered"]
        if missing := (read - b["read"]).total():
            return (step, "missing", read.total(), missing), read.total()
        if printed_alike:
            continue
        if not b["rank 0"]["collectives"] and b["first"].keys() != read.keys():
            return (step, "alone", len(read), len(b["first"])), read.total()
        if rows != gathered:
            return (step, "rows", rows, gathered), read.total()
    return None, sum(each["read"].total() for each in one.values())
