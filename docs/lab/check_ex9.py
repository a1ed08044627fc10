"""Tells whether a script is docs/lab/single.py on two ranks: `python docs/lab/check_ex9.py FILE`.

Exercise 9 (docs/lab/09-by-hand.md). It launches the script once, on two CPU processes.
"""

import re
import sys

import environment  # noqa: F401  It tells who forgot to activate .venv.
import torch
from watch import HERE, check, mean_losses, repeated_order, samples, wrong_losses

BATCH_SIZE, SAMPLES = 64, 1536  # of single.py
LINE = r"epoch \d+: training loss ([\d.]+), test accuracy ([\d.]+)%"
PARTS = ("1", "2", "2b", "3", "4")
PAGE = "docs/strategies.md#the-same-step-in-torch-and-in-accelerate"


def judge(ranks, single, part):
    """The points of the exercise, with what is wrong about each, and why it matters."""
    expected = re.findall(LINE, single["printed"])
    epochs = len(expected)
    alone = meeting(ranks)
    points = [
        ("two ranks know of each other", alone),
        ("each sample is used once in an epoch", sharing(ranks, epochs)),
        ("each epoch has a different order", ordering(ranks, epochs)),
        (f"a step takes {BATCH_SIZE} samples from both ranks together", batch(ranks)),
        ("both ranks end with the same weights", agreeing(ranks)),
    ]
    lines = [re.findall(LINE, notes["printed"]) for notes in ranks]
    printed = max(lines, key=len)
    points += [
        ("the loss is the mean over both ranks", losses(ranks, printed, epochs)),
        ("each epoch prints one line", printing(lines, epochs)),
        ("one rank saves the weights", saving(ranks)),
        ("the plain model can load the weights", loading(ranks, single)),
    ]
    if part == "2":
        points.append(("a step sends all gradients in one message", packing(ranks)))
    if part == "2b":
        points.append(("all gradients are sent during the backward pass", overlapping(ranks)))
        points.append(("the step waits for each all-reduce", waiting(ranks)))
    if part == "3":
        points.append(("a rank updates its half of the weights", sharding(ranks)))
        points.append(("a step sends gradients once, and weights once", exchanging(ranks)))
    if alone:  # then nothing that follows is the work of two ranks
        points[1:] = [(name, None) for name, _ in points[1:]]
    right = not any(problem != "" for _, problem in points)
    same = training(ranks, printed, single, expected) if right else None
    return [*points, ("the training matches single.py", same)]


def meeting(ranks):
    if all(notes["world"] == 2 for notes in ranks):
        return ""
    return (
        "each rank trains alone, with a world size of 1, as single.py does. The launcher only "
        "starts processes. "
        "Call dist.init_process_group(), or make an Accelerator (with cpu=True where there is "
        f"no GPU). See {PAGE}"
    )


def sharing(ranks, epochs):
    seen = sum(samples(ranks, 0, epochs), [])
    if None in seen:
        return "the model is not trained on the images of single.py"
    if len(seen) > len(set(seen)):
        return (
            f"epoch 0 used {len(seen)} samples, but only {len(set(seen))} different ones. The "
            "ranks repeat each other's work. Give each rank its own part: DistributedSampler, "
            "or accelerator.prepare(loader) of an Accelerator with cpu=True, if there is no "
            f"GPU. See {PAGE}"
        )
    if len(seen) < SAMPLES:
        return f"epoch 0 used {len(seen)} samples of {SAMPLES}. The model never sees the others"
    return ""


def ordering(ranks, epochs):
    problem = repeated_order(ranks, epochs)
    return problem and (
        f"{problem}. The same samples then always share a batch. Call "
        f"sampler.set_epoch(epoch) before each epoch. See {PAGE}"
    )


def batch(ranks):
    steps = zip(*[notes["steps"] for notes in ranks], strict=False)
    sizes = {sum(map(len, step)) for step in steps}
    if sizes == {BATCH_SIZE}:
        return ""
    return (
        f"it takes {', '.join(map(str, sorted(sizes))) or 'none'}. A DataLoader's batch size is "
        "per rank. A different global batch needs a different learning rate. See "
        "docs/lab.md#3-the-batch-and-the-learning-rate"
    )


def agreeing(ranks):
    pairs = list(zip(*[notes["weights"] for notes in ranks], strict=False))
    if pairs and all(torch.allclose(one, other, atol=1e-5) for one, other in pairs):
        return ""
    return (
        "they differ, so you trained two models. After the backward pass, each weight.grad has "
        "to be replaced by its mean over the ranks. If each rank updates a part of the weights, an "
        f"all-gather has to give all parts to all ranks. See {PAGE}"
    )


def calls_of_step(ranks):
    """What is noted of the collectives of the second step that carry more than one number."""
    steps = ranks[0]["calls"][1:2] or [[]]
    return [call for call in steps[0] if call["numbers"] > 1]


def packing(ranks):
    calls = calls_of_step(ranks)
    total = sum(weight.numel() for weight in ranks[0]["weights"])
    most = max((call["numbers"] for call in calls), default=0)
    if len(calls) == 1 and most >= total:
        return ""
    return (
        f"the second step makes {len(calls)} calls that carry more than one number. The largest "
        f"carries {most:,}, and the model has {total:,}. Each call costs a latency: torch.cat the "
        "flattened gradients, all-reduce that vector, and copy its parts back"
    )


def overlapping(ranks):
    calls = calls_of_step(ranks)
    total = sum(weight.numel() for weight in ranks[0]["weights"])
    inside = [call for call in calls if call["started"] == "backward"]
    beside = [call["numbers"] for call in inside if "backward" not in call["waits"]]
    if sum(beside) >= 2 * total:
        return (
            f"the calls carry {sum(beside):,} numbers, and the model has {total:,}: the hooks send "
            "buckets twice. A gradient of the step before is not None if zero_grad() keeps it"
        )
    if len(beside) > 1 and sum(beside) >= total:
        return ""
    return (
        f"of the {len(calls)} calls of the second step, {len(inside)} start during the backward "
        f"pass, and {len(beside)} of these let it go on. These carry {sum(beside):,} numbers, and "
        f"the model has {total:,}. Make at least two buckets, which together hold all gradients. "
        "When all gradients of a bucket are there, let a hook start its all-reduce with "
        "async_op=True. Call wait() only after loss.backward(): a wait() in the hook stops the "
        "backward pass"
    )


def waiting(ranks):
    calls = calls_of_step(ranks)
    late = [call for call in calls if set(call["waits"]) <= {"after"}]
    if late:
        return (
            f"the second step updates the weights while {len(late)} of its {len(calls)} calls may "
            "still be running. dist.all_reduce(..., async_op=True) returns a handle: call its "
            "wait() before you use the sum"
        )
    if any("after" in call["waits"] for call in calls):
        return (
            "later steps wait again for the calls of the second step. Your list of handles grows "
            "with each step, and keeps the gradients of all steps in memory. Empty it when the "
            "step has waited for all of them"
        )
    return ""


def sharding(ranks):
    total = sum(weight.numel() for weight in ranks[0]["weights"])
    sizes = [notes["updated"] for notes in ranks]
    if sizes[0] == sizes[1] == -(-total // 2):
        return ""
    return (
        f"the optimizers of the two ranks update {sizes[0]:,} and {sizes[1]:,} numbers of "
        f"{total:,}. An optimizer keeps its states for all that it updates. Give it a tensor with "
        "the rank's half of the flat weights"
    )


def exchanging(ranks):
    names = [call["name"] for call in calls_of_step(ranks)]
    gathers = [name for name in names if "gather" in name]
    sums = [name for name in names if name in ("all_reduce", "reduce_scatter_tensor")]
    if len(names) == 2 and gathers and sums:
        return ""
    return (
        f"from the first update to the second, these are called: {', '.join(names) or 'none'}. "
        "Needed are one all_gather_into_tensor of the updated weights, and one "
        "reduce_scatter_tensor of the gradients: a rank needs the mean of its own half only"
    )


def losses(ranks, printed, epochs):
    if len(printed) != epochs:
        return None
    problem = wrong_losses([float(loss) for loss, _ in printed], mean_losses(ranks, epochs))
    return problem and (
        f"{problem} over all steps of both ranks. One rank sees only its part of "
        "the samples. Use dist.all_reduce, or accelerator.reduce, on all ranks. "
        f"See {PAGE}"
    )


def printing(lines, epochs):
    if sum(map(len, lines)) == epochs:
        return ""
    return (
        f"rank 0 printed {len(lines[0])} lines like those of single.py, rank 1 "
        f"{len(lines[1])}; {epochs} in all are expected. Nobody can read a log in which every "
        "rank prints every line. Print on rank 0, or with accelerator.print, and keep the words"
    )


def saving(ranks):
    found = [rank for rank, notes in enumerate(ranks) if notes["saved"] is not None]
    if len(found) == 1:
        return ""
    if not found:
        return "no rank wrote a file with the name that the command line gives, sys.argv[1]"
    return (
        "both ranks save to the same file. The file is damaged if one dies, or reads it, while the "
        "other writes. Save on rank 0, or with accelerator.save. See docs/lab/10-faults.md"
    )


def loading(ranks, single):
    saved = next((notes["saved"] for notes in ranks if notes["saved"] is not None), None)
    if saved is None:
        return None
    if not isinstance(saved, dict):
        return f"the file contains a {type(saved).__name__}, and not a state_dict"
    if saved.keys() == single["saved"].keys():
        return ""
    return (
        f"its keys are {', '.join(saved)}. They belong to the wrapper, which a user of the "
        "weights does not have. Save model.module.state_dict(), or "
        "accelerator.get_state_dict(model)"
    )


def mistake_in(here, there):
    """What the first two updates of the weights show when compared with single.py's, or ""."""
    if list(map(len, here)) != list(map(len, there)):
        return ""
    first, second = here[1] - here[0], here[2] - here[1]
    right, next_right = there[1] - there[0], there[2] - there[1]

    def is_right(update, times):
        return (update - times * right).norm() < 0.01 * right.norm()

    if is_right(first, 2):
        return "The first update is twice as large. Is the sum divided by the number of ranks?"
    if is_right(first, 1 / 2):
        return "The first update is half as large. Are gradients divided twice? DDP divides them."
    if is_right(first, 0) and is_right(second, 0):
        return "The weights do not change. Does zero_grad() come between backward() and step()?"
    if is_right(first, 0) and is_right(second, 1):
        return "Updates reach the model a step late. Is the all-gather before optimizer.step()?"
    if is_right(first, 1) and is_right(second - next_right, 1):
        return "The second update also has the first step's gradients. Where is zero_grad()?"
    return ""


def training(ranks, printed, single, expected):
    problem = wrong_losses(*[[float(loss) for loss, _ in lines] for lines in (printed, expected)])
    if problem:
        return f"{problem} on one device. " + (
            mistake_in(ranks[0]["begun"], single["begun"])
            or "Is the order of the samples the same? DistributedSampler(data, seed=SEED) with "
            "set_epoch(epoch) makes that of single.py. With Accelerate, keep its own sampler. Is "
            "the sum of the gradients divided by the number of ranks? Does each weight get its own "
            "gradient? Are the first weights, the optimizer and the learning rate the same?"
        )
    for (_, here), (_, there) in zip(printed, expected, strict=True):
        if abs(float(here) - float(there)) > 0.5:  # one of 261 samples is 0.4 %
            return f"a test accuracy is {here} %, but {there} % on one device"
    [saved] = [notes["saved"] for notes in ranks if notes["saved"] is not None]
    for name, weight in single["saved"].items():
        if saved[name].shape != weight.shape or not torch.allclose(saved[name], weight, atol=1e-3):
            return f"the saved {name} differs from that of one device"
    return ""


if __name__ == "__main__":
    sys.exit(check(judge, HERE / "single.py", PARTS))
