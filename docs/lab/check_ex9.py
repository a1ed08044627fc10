"""Tells whether a script is docs/lab/single.py on two ranks: `python docs/lab/check_ex9.py FILE`.

Exercise 9 (docs/lab/09-by-hand.md). It launches the script once, on two CPU processes.
"""

import re
import sys

import torch
from watch import HERE, check, mean_losses, repeated_order, samples, wrong_losses

BATCH_SIZE, SAMPLES = 64, 1536  # of single.py
LINE = r"epoch \d+: training loss ([\d.]+), test accuracy ([\d.]+)%"
PAGE = "docs/strategies.md#the-same-step-in-torch-in-accelerate-in-fabric"


def judge(ranks, single):
    """The points of the exercise, with what is wrong about each, and why it matters."""
    expected = re.findall(LINE, single["printed"])
    epochs = len(expected)
    points = [
        ("two ranks know of each other", meeting(ranks)),
        ("each sample is used once in an epoch", sharing(ranks, epochs)),
        ("each epoch has another order", ordering(ranks, epochs)),
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
    right = not any(problem != "" for _, problem in points)
    same = training(ranks, printed, single, expected) if right else None
    return [*points, ("the training is that of single.py", same)]


def meeting(ranks):
    if all(notes["world"] == 2 for notes in ranks):
        return ""
    return (
        "each rank trains alone, with a world size of 1. The launcher only starts processes. "
        "Call dist.init_process_group(), or make an Accelerator (with cpu=True where there is "
        f"no GPU). See {PAGE}"
    )


def sharing(ranks, epochs):
    seen = sum(samples(ranks, 0, epochs), [])
    if None in seen:
        return "the model is trained on images that are not those of single.py"
    if len(seen) > len(set(seen)):
        return (
            f"epoch 0 used {len(seen)} samples, but only {len(set(seen))} different ones. The "
            "ranks repeat each other's work. Give each rank its own part: DistributedSampler, "
            "or accelerator.prepare(loader) of an Accelerator with cpu=True, if there is no "
            f"GPU. See {PAGE}"
        )
    if len(seen) < SAMPLES:
        return f"epoch 0 used {len(seen)} samples of {SAMPLES}. The others are never learned from"
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
        f"it takes {', '.join(map(str, sorted(sizes))) or 'none'}. The batch size of a "
        "DataLoader is that of one rank. Another global batch needs another learning rate. "
        "See docs/lab.md#3-the-batch-and-the-learning-rate"
    )


def agreeing(ranks):
    pairs = list(zip(*[notes["weights"] for notes in ranks], strict=False))
    if pairs and all(torch.allclose(one, other, atol=1e-5) for one, other in pairs):
        return ""
    return (
        "they differ, so you trained two models. Nothing averages the gradients. Wrap the "
        "model: DistributedDataParallel(model), or accelerator.prepare(model), and call "
        f"the wrapped one. See {PAGE}"
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
        f"{len(lines[1])}; expected are {epochs} in all. A log with every line from every rank "
        "cannot be read. Print on rank 0, or with accelerator.print, and keep the words"
    )


def saving(ranks):
    found = [rank for rank, notes in enumerate(ranks) if notes["saved"] is not None]
    if len(found) == 1:
        return ""
    if not found:
        return "no rank wrote a file with the name that the command line gives, sys.argv[1]"
    return (
        "both ranks save to the same file. It is torn if one reads or dies while the other "
        "writes. Save on rank 0, or with accelerator.save. See docs/lab/10-faults.md"
    )


def loading(ranks, single):
    saved = next((notes["saved"] for notes in ranks if notes["saved"] is not None), None)
    if saved is None:
        return None
    if not isinstance(saved, dict):
        return f"the file holds no state_dict ({type(saved).__name__})"
    if saved.keys() == single["saved"].keys():
        return ""
    return (
        f"its keys are {', '.join(saved)}. They belong to the wrapper, which a user of the "
        "weights does not have. Save model.module.state_dict(), or "
        "accelerator.get_state_dict(model)"
    )


def training(ranks, printed, single, expected):
    problem = wrong_losses(*[[float(loss) for loss, _ in lines] for lines in (printed, expected)])
    if problem:
        return (
            f"{problem} on one device. Is the order another one? DistributedSampler(data, "
            "seed=SEED) with set_epoch(epoch) has that of single.py. Are the first weights, "
            "the optimizer and the learning rate its own?"
        )
    for (_, here), (_, there) in zip(printed, expected, strict=True):
        if abs(float(here) - float(there)) > 0.5:  # one of 261 samples is 0.4 %
            return f"a test accuracy is {here} %, but {there} % on one device"
    [saved] = [notes["saved"] for notes in ranks if notes["saved"] is not None]
    for name, weight in single["saved"].items():
        if saved[name].shape != weight.shape or not torch.allclose(saved[name], weight, atol=1e-3):
            return f"the saved {name} is not that of one device"
    return ""


if __name__ == "__main__":
    sys.exit(check(judge, HERE / "single.py"))
