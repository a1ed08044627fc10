"""Tells which faults of docs/lab/faulty.py are mended: `python docs/lab/check_ex10.py FILE`. With
`--part 2`, whether docs/lab/hanging.py is.

Exercise 10 (docs/lab/10-faults.md). It launches the script once, on two CPU processes.
"""

import re
import sys

import environment  # noqa: F401  It tells who forgot to activate .venv.
import torch
from sklearn.datasets import load_digits
from watch import check, mean_losses, repeated_order, samples, wrong_losses

EPOCHS, SAMPLES = 3, 1536  # of both scripts
ACCURACY = r"epoch \d+: test accuracy ([\d.]+)%"
LINE = r"epoch \d+: training loss ([\d.]+)"


def judge(ranks, _, part):
    """The faults of a part, after what the script did well already."""
    if part == "2":
        return [
            ("it trains as before", training(ranks)),
            ("one rank prints the accuracy of all test samples", accuracy(ranks)),
        ]
    return [
        ("it trains as before", training(ranks)),
        ("each epoch has a different order", ordering(ranks)),
        ("the loss is that of all samples", losses(ranks)),
        ("one rank saves the checkpoint", saving(ranks)),
    ]


def training(ranks):
    if any(notes["world"] != 2 for notes in ranks):
        return "the two ranks do not know of each other"
    for epoch in range(EPOCHS):
        seen = sum(samples(ranks, epoch, EPOCHS), [])
        if len(seen) != SAMPLES or len(set(seen)) != SAMPLES:
            return f"epoch {epoch} used {len(set(seen))} different samples, {len(seen)} in all"
    if not all(map(torch.allclose, *[notes["weights"] for notes in ranks])):
        return "the ranks end with different weights"
    return ""


def ordering(ranks):
    problem = repeated_order(ranks, EPOCHS)
    return problem and f"{problem}. What does the sampler shuffle with?"


def losses(ranks):
    none, printed = sorted((re.findall(LINE, notes["printed"]) for notes in ranks), key=len)
    if none or len(printed) != EPOCHS:
        return f"expected one line with it for each of {EPOCHS} epochs, all from one rank"
    problem = wrong_losses(map(float, printed), mean_losses(ranks, EPOCHS))
    return problem and f"{problem} over all steps of both ranks. Whose loss is it?"


def accuracy(ranks):
    none, printed = sorted((re.findall(ACCURACY, notes["printed"]) for notes in ranks), key=len)
    if none or len(printed) != EPOCHS:
        return f"expected one line with it for each of {EPOCHS} epochs, all from one rank"
    digits = load_digits()
    first, bias, second, other = ranks[0]["weights"]
    images = torch.tensor(digits.data[SAMPLES:] / 16, dtype=torch.float32)
    answers = (torch.relu(images @ first.T + bias) @ second.T + other).argmax(dim=1)
    right = 100 * (answers == torch.tensor(digits.target[SAMPLES:])).double().mean().item()
    if abs(right - float(printed[-1])) < 0.3:  # one of 261 samples is 0.4 %
        return ""
    return (
        f"the last line says {printed[-1]} %, but it is {right:.2f} %. Each rank tests a part of "
        "the samples, so all ranks have to add up what they found"
    )


def saving(ranks):
    found = [notes["saved"] for notes in ranks if notes["saved"] is not None]
    if len(found) != 1:
        return f"{len(found)} ranks wrote a file with the name that the command line gives"
    if not isinstance(found[0], dict) or found[0].keys() != {"model", "optimizer", "epoch"}:
        return "its keys are not model, optimizer and epoch"
    return ""


if __name__ == "__main__":
    sys.exit(check(judge, parts=("1", "2")))
