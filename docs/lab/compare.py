"""Compares the losses of two runs, step by step, and the time that they trained.

python docs/lab/compare.py runs/lab/baseline runs/lab/ddp
"""

import json
import sys
from pathlib import Path


def main():
    folders = [Path(folder) for folder in sys.argv[1:]]
    if len(folders) != 2:
        sys.exit("error: name the folders of two runs")
    for folder in folders:
        if not (folder / "run.json").is_file():
            sys.exit(f"error: there is no {folder}/run.json: has this run begun?")
    one, two = [json.loads((folder / "run.json").read_text()) for folder in folders]
    first, second = [folder.name for folder in folders]
    losses, others = dict(one["loss_history"]), dict(two["loss_history"])
    steps = losses.keys() & others.keys()
    if not steps:
        sys.exit(f"error: {first} and {second} have no step in common")
    worst = max(abs(others[step] - losses[step]) / losses[step] for step in steps)
    ratio = two["seconds"]["train"] / one["seconds"]["train"]
    print(
        f"{first} and {second}: {len(losses)} and {len(others)} steps, losses differ by at most "
        f"{worst:.1e} of their value; {second} trained {ratio:.2f} times as long"
    )


if __name__ == "__main__":
    main()
