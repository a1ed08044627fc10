"""Draw memory and measured steps as SVG: python docs/img/draw.py [FOLDER]

memory.svg and held.svg follow the formulas of fit.py, and slow.svg has measured times. README.md
and docs/strategies.md show them. A test holds the files to this.
"""

import json
import math
import sys
import tarfile
from pathlib import Path

from picture import BLUE, GREEN, LEFT, ORANGE, PINK, SKY, WIDTH, YELLOW, Picture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from fit import MODELS  # noqa: E402
from memory import formulas  # noqa: E402

GPUS = 4
NAMES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP"}
MEASURED = ROOT / "docs" / "results" / "links-cpu" / "records.tar.xz"
LINKS = {"10gbit": "10 Gbit/s", "200mbit": "200 Mbit/s"}


# -------- slow.svg: measured steps on a fast and on a slow link


def measured_step(records, link, name, nodes):
    """Milliseconds of a step."""
    run = json.load(records.extractfile(f"{link}/bert/{name}-{nodes}x1-r1/run.json"))
    return 1000 * run["global_batch_size"] / run["samples_per_second"]


def draw_slow(picture):
    """Returns where the picture ends."""
    y, scale = 4, 2.25
    with tarfile.open(MEASURED) as records:
        steps = {
            (link, name): [measured_step(records, link, name, nodes) for nodes in (1, 2)]
            for link in LINKS
            for name in NAMES
        }
    for link, speed in LINKS.items():
        picture.text(LEFT, y + 12, f"One step over {speed}, measured", weight="bold")
        y += 20
        for name, title in NAMES.items():
            alone, two = steps[link, name]
            middle, end = LEFT + alone * scale, LEFT + two * scale
            longer = f"+{round(two) - round(alone)}" if end - middle > 24 else ""
            picture.text(LEFT - 8, y + 16, title, "end")
            picture.box(LEFT, y, alone * scale, 22, SKY, f"{alone:.0f}")
            picture.box(middle, y, (two - alone) * scale, 22, PINK, longer)
            picture.text(end + 6, y + 16, f"{two:.0f} ms", size=11)
            y += 26
        y += 8
    y = picture.legend(
        y,
        [
            ("the same step on one process alone, in ms", SKY),
            ("longer on two nodes: sending and waiting", PINK),
        ],
    )
    text = "A BERT with 0.4 million parameters, one CPU process on each node, gloo"
    picture.text(LEFT, y + 8, text, size=11)
    return y + 20


# -------- memory.svg: what a rank holds during a step of BERT-base

COLOURS = {
    "parameters": BLUE,
    "optimizer states": GREEN,
    "gradients": ORANGE,
    "gathered layers, and buffers": YELLOW,
    "activations": SKY,
}


def moments(name, model, tokens):
    """[(units of time, its label, MB of each part in COLOURS)] of a step. The backward pass of a
    layer takes twice its forward pass, and the update as long as a backward pass.
    """
    layers, hidden, inner = (model[size] for size in formulas.SIZES[:3])
    parameters, embeddings, _, _ = formulas.count_parameters(model)
    parts = formulas.bytes_of_parts(name, parameters, GPUS)
    whole, early = parts["gradients"], name in formulas.EARLY
    buffers, first, after = formulas.bytes_of_buffers(name, model, GPUS)
    layer = formulas.bytes_of_activations(tokens, 1, hidden, inner)
    outside = 8 * tokens * hidden  # what the embeddings and the head keep
    way = 4 * tokens * (hidden + inner)  # the activations' own gradients
    found = []

    def note(units, label, gradients, gathered, activations):
        gradients = whole if early else gradients
        held = [parts["parameters"], parts["states"], gradients, gathered, activations]
        found.append((units, label, [size / 1e6 for size in held]))

    for done in range(1, layers + 1):
        note(1, "forward", 0, buffers, outside + done * layer)
    for left in range(layers, 0, -1):
        made = whole * (1 - embeddings / parameters) * (layers - left) / (layers - 1)
        note(2, "backward", made, first if left == 1 else buffers, outside + left * layer + way)
    note(1, "backward", whole, after, outside)
    note(2, "update", whole, 0, 0)
    return found


def draw_memory(picture):
    """Returns where the picture ends."""
    high, bottom, wide = 0.075, 254, 322
    for gb in range(4):
        y = bottom - 1000 * gb * high
        picture.text(44, y + 4, f"{gb} GB" if gb else "0", "end", 11)
        picture.line((50, y), (WIDTH - 10, y), dash="2,3")
    for name, left in (("ddp", 60), ("fsdp", 450)):
        step = moments(name, MODELS["bert-base"], 4 * 384)
        scale = wide / sum(units for units, *_ in step)
        most = math.ceil(max(sum(held) for *_, held in step))  # as fit.py rounds
        picture.text(left, 16, f"{NAMES[name]}: at most {most:,} MB", weight="bold")
        for part, colour in enumerate(COLOURS.values()):  # an area above those before it
            lower, upper, x = [], [], left
            for units, _, held in step:
                for edge in (x, x + units * scale):
                    lower.append((edge, bottom - sum(held[:part]) * high))
                    upper.append((edge, bottom - sum(held[: part + 1]) * high))
                x += units * scale
            picture.line(*lower, *reversed(upper), lower[0], fill=colour)
        x = left
        for phase in ("forward", "backward", "update"):
            units = sum(units for units, label, _ in step if label == phase)
            picture.line((x, bottom), (x, bottom + 8))
            picture.text(x + units * scale / 2, bottom + 18, phase, "middle", 11)
            x += units * scale
    y = picture.legend(bottom + 30, COLOURS.items())
    for text in (
        "BERT-base in fp32, 4 windows of 384 tokens on each of 4 devices;  "
        "by the formulas of fit.py",
        "DDP's gradients lie in the buckets of its all-reduce, which stay from step to step",
    ):
        picture.text(LEFT, y + 8, text, size=11)
        y += 16
    return y + 4


# -------- held.svg: what a device holds of BERT-large between two steps


def draw_held(picture):
    """Returns where the picture ends."""
    parameters = formulas.count_parameters(MODELS["bert-large"])[0]
    titles = {"baseline": "baseline", "dp": "DP, on GPU 0"} | NAMES
    colours = {"parameters": BLUE, "gradients": ORANGE, "states": GREEN}
    scale, y = 560 / (16 * parameters), 8
    for name, title in titles.items():
        picture.text(LEFT + 6, y + 23, title, "end", 16)
        parts, x = formulas.bytes_of_parts(name, parameters, GPUS), LEFT + 14
        for part, colour in colours.items():
            picture.box(x, y, parts[part] * scale, 32, colour)
            x += parts[part] * scale
        picture.text(x + 8, y + 23, f"{sum(parts.values()) / 1e6:,.0f} MB", size=16)
        y += 42
    x = LEFT + 14
    for part, colour in colours.items():
        picture.box(x, y + 4, 18, 18, colour)
        picture.text(x + 25, y + 19, part.replace("states", "optimizer states"), size=16)
        x += 150
    return y + 34


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    for name, draw in (("slow", draw_slow), ("memory", draw_memory), ("held", draw_held)):
        picture = Picture()
        picture.save(folder / f"{name}.svg", draw(picture))
