"""Draw the flowchart of docs/before-you-scale.md: python docs/img/draw_flow.py [FOLDER].

A test holds docs/img/choose.svg to this.
"""

import sys
from pathlib import Path

from picture import Picture

QUESTION, DO, END = "#FFFFFF", "#F0E442", "#56B4E9"  # a question, something to do, a YAML
WIDE, HIGH, GAP_Y = 190, 66, 28
# Name: column, row, kind, lines of text.
BOXES = {
    "fits": (0, 0, QUESTION, ["Does a micro-batch fit", "on one device?"]),
    "fast": (1, 0, QUESTION, ["Is one device", "fast enough?"]),
    "smaller": (0, 1, DO, ["a smaller micro-batch", "that accumulates"]),
    "busy": (1, 1, QUESTION, ["Is the device busy?"]),
    "feed": (2, 1, DO, ["a faster loader, a larger", "batch, compilation:", "steps 2, 3 and 5"]),
    "now": (0, 2, QUESTION, ["Does it fit now?"]),
    "tune": (1, 2, DO, ["bf16, then compilation:", "steps 4 and 5"]),
    "enough": (1, 3, QUESTION, ["Is one device", "fast enough now?"]),
    "baseline": (2, 3, END, ["baseline.yaml"]),
    "ddp": (1, 4, END, ["ddp.yaml: fill a node,", "then add nodes"]),
    "several": (0, 5, QUESTION, ["Have you several", "devices?"]),
    "sharded": (1, 5, QUESTION, ["Does it fit with", "optimizer and gradients", "in shards?"]),
    "zero2": (2, 5, END, ["zero2.yaml or", "fsdp_keep.yaml"]),
    "checkpointed": (1, 6, QUESTION, ["Does it fit with activation", "checkpointing, too?"]),
    "same": (2, 6, END, ["the same, with", "--activation_checkpointing"]),
    "again": (
        0,
        7,
        END,
        [
            "activation checkpointing,",
            "then zero2_offload.yaml,",
            "zero3_offload.yaml or",
            "fsdp_offload.yaml",
        ],
    ),
    "all": (1, 7, QUESTION, ["Does it fit with parameters", "in shards, too?"]),
    "fsdp": (2, 7, END, ["fsdp.yaml, or zero3.yaml"]),
}
ARROWS = [
    ("fits", "fast", "yes"),
    ("fast", "baseline", "yes"),
    ("fits", "smaller", "no"),
    ("fast", "busy", "no"),
    ("busy", "feed", "no"),
    ("busy", "tune", "yes"),
    ("feed", "enough", ""),
    ("tune", "enough", ""),
    ("enough", "baseline", "yes"),
    ("enough", "ddp", "no"),
    ("smaller", "now", ""),
    ("now", "fast", "yes"),
    ("now", "several", "no"),
    ("several", "sharded", "yes"),
    ("several", "again", "no"),
    ("sharded", "zero2", "yes"),
    ("sharded", "checkpointed", "no"),
    ("checkpointed", "same", "yes"),
    ("checkpointed", "all", "no"),
    ("all", "fsdp", "yes"),
    ("all", "again", "no"),
]


def corner(name):
    column, row, *_ = BOXES[name]
    return 20 + column * (WIDE + 92), 16 + row * (HIGH + GAP_Y)


def arrow(picture, points, label):
    """An arrow through the points, with its label at the first piece."""
    picture.arrow(*points)
    (x0, y0), (x1, y1) = points[:2]
    if label and y0 == y1:
        picture.text(x0 + 24 * (1 if x1 > x0 else -1), y0 - 5, label, "middle", 11)
    elif label:
        picture.text(x0 + 6, (y0 + min(y1, y0 + GAP_Y)) / 2 + 4, label, size=11)


def route(start, end):
    """The points from one box to another: straight, or around by a channel beside a column."""
    (x0, y0), (x1, y1) = corner(start), corner(end)
    if y0 == y1:
        return (
            [(x0 + WIDE, y0 + HIGH / 2), (x1, y1 + HIGH / 2)]
            if x1 > x0
            else [(x0, y0 + HIGH / 2), (x1 + WIDE, y1 + HIGH / 2)]
        )
    if x0 == x1:
        return [(x0 + WIDE / 2, y0 + HIGH), (x1 + WIDE / 2, y1)]
    if end == "baseline":  # down at the right edge
        return [
            (x0 + WIDE, y0 + HIGH / 2),
            (x1 + WIDE + 16, y0 + HIGH / 2),
            (x1 + WIDE + 16, y1 + HIGH / 2),
            (x1 + WIDE, y1 + HIGH / 2),
        ]
    if x1 > x0:  # up by the channel to the right of the first column
        middle = x0 + WIDE + 50
        return [
            (x0 + WIDE, y0 + HIGH / 2),
            (middle, y0 + HIGH / 2),
            (middle, y1 + HIGH - 12),
            (x1, y1 + HIGH - 12),
        ]
    middle = x0 + WIDE / 2  # down, and then to the left, below what stands beside it
    channel = y1 - GAP_Y / 2
    return [
        (middle, y0 + HIGH),
        (middle, channel),
        (x1 + WIDE - 20, channel),
        (x1 + WIDE - 20, y1),
    ]


def main(folder):
    picture = Picture()
    for start, end, label in ARROWS:
        arrow(picture, route(start, end), label)
    for name, (_, _, fill, texts) in BOXES.items():
        x, y = corner(name)
        dash = "none" if fill != QUESTION else "4,2"
        picture.box(x, y, WIDE, HIGH, fill, dash=dash)
        for number, text in enumerate(texts):
            height = y + HIGH / 2 + 4 + 15 * (number - (len(texts) - 1) / 2)
            picture.text(x + WIDE / 2, height, text, "middle", 12)
    picture.save(folder / "choose.svg", corner("all")[1] + HIGH + 16)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
