"""Compare what the ranks of a script did with what one process did: how far they are apart, what
rounding explains, and what differs first. verify.py says how the runs are made.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

from common.losses import gap

# A difference counts if it is TIMES as large as that of the control, and larger than LEAST.
TIMES = 30
LEAST = {"no": 2e-5, "bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-7}  # by precision
# Each kind can cause those after it. Inputs, outputs and the loss explain a difference of the
# gradients, and are harmless otherwise. "apart" is what the ranks should share, but do not.
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
        """The number of ranks."""
        return len(self.many["each"])


def merge(ranks):
    """The steps of all ranks as one list."""
    merged = [merge_step(parts) for parts in zip(*[rank["steps"] for rank in ranks], strict=False)]
    return [step | {"norms": ranks[0]["norms"]} for step in merged]


def merge_step(parts):
    """One step of all ranks. "apart" are the tensors that they do not share."""
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


def far(a, b, least):
    """How far two tensors are apart, relative to their norm, which counts as `least` or more."""
    if a is None or b is None or math.isnan(a[0] + b[0]):
        return gap(a and a[0], b and b[0])
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) / max(a[0], b[0], least, 1e-30)


def far_by_name(kind, a, b, share):
    """{(kind, name): how far}. Tensors below `share` of the norm of all are compared with that."""
    least = share * math.sqrt(sum(two[0] ** 2 for two in a.values() if two))
    names = [*a, *(name for name in b if name not in a)]
    return {(kind, name): far(a.get(name), b.get(name), least) for name in names}


def distances(a, b):
    """{(kind, tensor): how far step b is from step a}, in the order of the model's tensors. What is
    not a tensor has the name "".
    """
    found = {("loss", ""): gap(a["loss"], b["loss"])}
    for kind in ("inputs", "outputs"):  # Their sizes differ if the padding does.
        same_size = a[kind][1] == b[kind][1]
        found[kind, ""] = gap(a[kind][0], b[kind][0]) if same_size else 0.0
    # ZeRO-3 does not tell frozen weights.
    known = [name for name, two in a["weights"].items() if two and b["weights"].get(name)]
    weights = ({name: step["weights"][name] for name in known} for step in (a, b))
    found |= far_by_name("weights", *weights, 1e-3)
    return found | far_by_name("grads", a["grads"], b["grads"], 1e-4)


def largest_of(distance, before=None):
    """{kind: the largest distance}, also of those `before`."""
    largest = Counter(before)
    for (kind, _), value in distance.items():
        largest[kind] = max(largest[kind], value)
    return largest


def limits_of(base, control, precision):
    """For each step of `base`, {(kind, tensor): how large a distance may be}: TIMES the largest of
    the control so far, or LEAST. Rounding to bf16 is so rough that all tensors of a kind count.
    """
    found, largest = [], Counter()
    for k, step in enumerate(base):
        here = distances(step, control[k]) if k < len(control) else {}
        if precision != "no":
            of_kind = largest_of(here)
            here = {key: of_kind[key[0]] for key in here}
        largest |= Counter(here)  # the larger of both
        found.append({key: max(LEAST[precision], TIMES * value) for key, value in largest.items()})
    return found


def differences(a, b, distance, limits, least):
    """{kind: its tensors that differ} of a step, in the order of causes."""
    far_off = [key for key, value in distance.items() if value > limits.get(key, least)]
    rates = [pair for rate in b["rates"] for pair in zip(a["rate"], rate, strict=False)]
    here = {kind: [name for k, name in far_off if k == kind] for kind, _ in far_off}
    if a["samples"] != b["samples"]:
        here["samples"] = []
    if any(gap(*pair) > 1e-6 for pair in rates):
        here["rate"] = []
    if b["apart"]:
        here["apart"] = []
    return {kind: here[kind] for kind in KINDS if kind in here}


def compare(one, many, limits, least, skipped=0):
    """The first Difference of each kind, earliest first; {kind: the first step at which it
    differs}, harmless ones too; and {kind: the largest distance}. "first" are the first weights.
    `many` and `limits` begin `skipped` steps later than `one`.
    """
    found, first, worst = {}, {}, {}
    for k, (a, b, limit) in enumerate(zip(one[skipped:], many, limits, strict=False), skipped):
        distance = distances(a, b)
        worst = largest_of(distance, worst)
        here = differences(a, b, distance, limit, least)
        if k == skipped:
            worst["first"] = worst["weights"]
            if "weights" in here:
                first["first"] = k + 1
        first = dict.fromkeys(here, k + 1) | first
        kinds = [kind for kind in here if "grads" in here or kind not in EXPLAIN]
        # What the ranks do not share explains all that comes after, except samples.
        if "apart" in kinds and "samples" not in kinds:
            kinds.sort(key=lambda kind: kind != "apart")
        for place, kind in enumerate(kinds):
            new = Difference(kind, k + 1, a, b, here[kind], kinds[:place], one)
            found.setdefault(kind, new)
    return list(found.values()), first, worst


def check_repeats(base, control):
    """Raises CannotTellError unless the script repeats on one process what it did before."""
    one, again = merge(base), merge(control)
    for k, (a, b) in enumerate(zip(one, again, strict=False)):
        if a["loss"] is not None and math.isnan(a["loss"]):
            raise CannotTellError(f"the loss is NaN from step {k + 1}")
        different = None
        if a["samples"] != b["samples"]:
            different = "samples"
        elif a["rate"] != b["rate"]:
            different = "learning rates"
        elif k == 0 and base[0]["precision"] == "no":
            if largest_of(distances(a, b))["weights"] > 1e-4:
                different = "weights"
            elif gap(a["loss"], b["loss"]) > 1e-3:
                different = "losses"
        if different:
            raise CannotTellError(
                f"step {k + 1} has different {different} in each run: call "
                "accelerate.utils.set_seed before anything is drawn"
            )
    if len(one) < 2:
        raise CannotTellError(
            f"it made {len(one)} training steps, and 2 are needed: a step needs a model and an "
            "optimizer from Accelerator.prepare"
        )


def check_batch(one, many):
    """Raises CannotTellError if the ranks together read as many batches as there are ranks."""
    if not one or not many:
        return
    each = many[0]["each"]
    alone, together = one[0]["samples"].total(), many[0]["samples"].total()
    same_batch = len(set(map(tuple, each))) == 1  # on all ranks: that is a difference
    if alone and together == alone * len(each) and not same_batch:
        raise CannotTellError(
            f"all ranks read {together} samples in step 1, and one process reads {alone}: divide "
            "the batch by --batch_flag or --split"
        )


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
# Times, speeds and memory differ in each run.
UNIT = r"\s*(?:m?s|sec\w*|min\w*|h|\S*/s|[kMG]i?B)\b"
NAMED = r"\w*(?:time|second)\w*\W+"
MEASURED = re.compile(rf"\d+(?::\d+)+|{NUMBER.pattern}(?={UNIT})|{NAMED}{NUMBER.pattern}", re.I)


def printed_numbers(rank):
    """{a line with # for its numbers: [(the line, its numbers)]}"""
    found = {}
    for line in rank["out"].splitlines():
        kept = MEASURED.sub("measured", line)
        numbers = [float(number) for number in NUMBER.findall(kept)]
        if numbers and "it/s" not in line and "s/it" not in line:  # those are of progress bars
            found.setdefault(NUMBER.sub("#", kept), []).append((line.strip(), numbers))
    return found


def compare_printed(base, control, many, batch):
    """The first line that rank 0 prints with other numbers: (its line, that of one process), or
    None; and how many numbers were compared, all of which the control repeats. The ranks divide
    `batch`.
    """
    meant = [(1, len(many)), (batch, batch // len(many))]
    one, again, other = (printed_numbers(ranks[0]) for ranks in (base, control, many))
    compared = 0
    for text, lines in one.items():
        same_lines = lines, again.get(text, []), other.get(text, [])
        for mine, twin, theirs in zip(*same_lines, strict=False):
            for a, b, c in zip(mine[1], twin[1], theirs[1], strict=True):
                if gap(a, b) > 1e-4 or (a, c) in meant:
                    continue
                compared += 1
                if gap(a, c) > 1e-3:
                    return (theirs[0], mine[0]), compared
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


def compare_evaluations(base, many, printed_alike):
    """(after which step, what differs, one process, the ranks) of the first, or None; and the
    number of samples of one process. What is gathered does not matter if what is printed is equal.
    """
    one, other = evaluations(base), evaluations(many)
    for step, a in one.items():
        if step not in other:
            continue
        b = other[step]
        total, missing = a["all"].total(), (a["all"] - b["all"]).total()
        if missing:
            return (step, "missing", total, missing), total
        if printed_alike:
            continue
        mine, read = len(set(b["read"])), len(a["all"])
        if not b["collectives"] and mine < read:
            return (step, "alone", read, mine), total
        if a["gathered"] != b["gathered"]:
            return (step, "rows", a["gathered"], b["gathered"]), total
    return None, sum(each["all"].total() for each in one.values())
