"""Compare what ranks of a script did with what one process did: how far they are apart, what
rounding explains, and what differs first. verify.py says how runs are made.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

TIMES = 30  # A difference counts if it is so many times what rounding does to the control,
LEAST = {"no": 2e-5, "bf16": 2**-7, "fp16": 2**-10}  # and as large as this, by precision.
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


def merge(ranks):
    """The steps of all ranks as one."""
    return [merge_step(parts) for parts in zip(*[rank["steps"] for rank in ranks], strict=False)]


def merge_step(parts):
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
    return {name: far(a.get(name), b.get(name), least) for name in a.keys() | b.keys()}


def weights_apart(a, b):
    """{name: how far}, of the weights that both runs tell: ZeRO-3 tells no frozen ones."""
    known = [name for name in a.keys() & b.keys() if a[name] and b[name]]
    return far_by_name(*({name: weights[name] for name in known} for weights in (a, b)), 1e-3)


def distances(a, b):
    """{kind: how far step b is from step a}, and {kind: {tensor: how far}}."""
    names = {"grads": far_by_name(a["grads"], b["grads"], 1e-4)}
    names["weights"] = weights_apart(a["weights"], b["weights"])
    found = {kind: max(of.values(), default=0.0) for kind, of in names.items()}
    for kind in ("inputs", "outputs"):  # With other padding they have other sizes.
        same_size = a[kind][1] == b[kind][1]
        found[kind] = relative(a[kind][0], b[kind][0]) if same_size else 0.0
    return found | {"loss": relative(a["loss"], b["loss"])}, names


def limits_of(base, control, least):
    """For each step {kind: how large a distance may be}: by the control's so far, or `least`."""
    found, largest = [], Counter()
    for a, b in zip(base, control, strict=False):
        for kind, distance in distances(a, b)[0].items():
            largest[kind] = max(largest[kind], distance)
        found.append({kind: max(least, TIMES * value) for kind, value in largest.items()})
    return found


def compare(one, many, limits):
    """The first Difference of each kind, earliest first; {kind: the first step at which it
    differs}, harmless ones too; and {kind: the largest distance}. `one` may have more steps than
    `limits`, which go with those of `many`.
    """
    found, first, worst, skipped = {}, {}, Counter(), len(one) - len(limits)
    for k, (a, b, most) in enumerate(zip(one[skipped:], many, limits, strict=False), skipped):
        distance, names = distances(a, b)
        here = [kind for kind, value in distance.items() if value > most[kind]]
        here += ["samples"] * (a["samples"] != b["samples"])
        here += ["apart"] * bool(b["apart"])
        if any(relative(x, y) > 1e-6 for rate in b["rates"] for x, y in zip(a["rate"], rate)):  # noqa: B905
            here.append("rate")
        here.sort(key=KINDS.index)
        if k == skipped:
            worst["first"] = distance["weights"]
            first |= {"first": k + 1} if "weights" in here else {}
        first = dict.fromkeys(here, k + 1) | first
        if "grads" not in here:
            here = [kind for kind in here if kind not in EXPLAIN]
        # What the ranks do not share explains all that comes after, but for samples.
        if "apart" in here and "samples" not in here:
            here = ["apart", *[kind for kind in here if kind != "apart"]]
        for place, kind in enumerate(here):
            bad = [name for name, value in names.get(kind, {}).items() if value > most[kind]]
            order = list(a[kind]) if kind in names else []
            bad.sort(key=lambda name, order=order: order.index(name) if name in order else -1)
            new = Difference(kind, k + 1, a, b, bad, here[:place], one)
            found.setdefault(kind, new)
        for kind, value in distance.items():
            worst[kind] = max(worst[kind], value)
    return list(found.values()), first, worst


def check_repeats(base, control):
    """Raises CannotTellError unless the script does on one process what it did before."""
    one, again = merge(base), merge(control)
    for k, (a, b) in enumerate(zip(one, again, strict=False)):
        distance, _ = distances(a, b)
        what = "other samples" if a["samples"] != b["samples"] else None
        what = what or ("other learning rates" if a["rate"] != b["rate"] else None)
        if k == 0 and base[0]["precision"] == "no":
            what = what or ("other first weights" if distance["weights"] > 1e-4 else None)
            what = what or ("another loss" if distance["loss"] > 1e-3 else None)
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


def compare_printed(base, control, many):
    """What rank 0 prints otherwise: (its line, the line of one process), or None; and how many
    numbers were compared: those that the control prints, too.
    """
    one, again, other = (printed_numbers(ranks[0]) for ranks in (base, control, many))
    compared = 0
    for text, lines in one.items():
        for mine, twin, theirs in zip(lines, again.get(text, []), other.get(text, [])):  # noqa: B905
            for a, b, c in zip(mine[1], twin[1], theirs[1], strict=True):
                # Some scripts print how many processes there are.
                if relative(a, b) > 1e-4 or (a, c) == (1, len(many)):
                    continue
                compared += 1
                if relative(a, c) > 1e-3:
                    return (theirs[0], mine[0]), compared
    return None, compared


def first_apart(ranks):
    """The names of weights that the ranks make otherwise, before Accelerator.prepare."""
    one, *others = (rank["first"] for rank in ranks)
    return [name for name in one if any(one[name] != other.get(name) for other in others)]


def compare_last(base, control, many, least):
    """The largest distance of the weights after the last step, and whether rounding explains it."""
    twin, last = (weights_apart(base[0]["last"], run[0]["last"]) for run in (control, many))
    apart = max(last.values(), default=0.0)
    return apart, apart <= max(least, TIMES * max(twin.values(), default=0.0))


def evaluations(ranks):
    """{after which step: (the samples that all ranks read, those of rank 0, rows gathered)}"""
    found = {}
    for number, rank in enumerate(ranks):
        for one in rank["evaluations"]:
            if one["read"]:
                read, first, rows = found.get(one["after"], (Counter(), Counter(), one["gathered"]))
                first = Counter(one["read"]) if number == 0 else first
                found[one["after"]] = (read + Counter(one["read"]), first, rows)
    return found


def compare_evaluations(base, many, printed_alike):
    """(after which step, what differs, one process, the ranks) of the first, or None; and the
    number of samples of one process. What is gathered does not matter if what is printed is equal.
    """
    one, other = evaluations(base), evaluations(many)
    for step in one.keys() & other.keys():
        (read, _, rows), (theirs, first, gathered) = one[step], other[step]
        if missing := sum((read - theirs).values()):
            return (step, "missing", read.total(), missing), read.total()
        if not rows and not gathered and first.keys() != read.keys():
            return (step, "alone", len(read), len(first)), read.total()
        if rows != gathered and not printed_alike:
            return (step, "rows", rows, gathered), read.total()
    return None, sum(read.total() for read, _, _ in one.values())
