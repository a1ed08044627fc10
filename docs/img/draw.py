"""Draw the diagrams of the strategies as SVG: python docs/img/draw.py [FOLDER]. A test holds the
files to this. They are in docs/strategies.md, docs/lab.md and README.md.

Time has one scale in all timelines. Durations are made up, by one rule: three layers on n = 4 GPUs,
and

    forward pass of a layer                      2 units of time
    backward pass of a layer                     4: twice the forward pass
    optimizer, on all parameters                 2; on a shard 2/n
    the bytes of a layer over one link           2, as its forward pass
    all-gather or reduce-scatter of a layer      (n-1)/n of these bytes
    all-reduce of a layer                        2 (n-1)/n of these bytes
    DP's copies of P, and its sum of G           the bytes of all layers: NCCL relays them
    DP's inputs, outputs, gradients of outputs   an eighth of a layer for each of the n-1 GPUs

When something starts follows: as soon as its lane is free, and what it needs is there. slow.svg is
drawn from measured records, memory.svg and held.svg by the formulas of fit.py.
"""

import itertools
import json
import math
import re
import sys
import tarfile
from pathlib import Path

from picture import BLUE, GREEN, LEFT, ORANGE, PINK, RIGHT, SKY, WIDTH, YELLOW, Picture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for planning/, which only the pictures that need it import
SCALE = 19.5  # pixels per unit of time
LAYERS, GPUS, FORWARD, OPTIMIZER, LINK = 3, 4, 2, 2, 2

RING, BATCH = LINK * (GPUS - 1) / GPUS, LINK * (GPUS - 1) / 8
# Kinds of boxes: units of time, colour, legend, and what the box says where that is not its label.
KINDS = {
    "F": (FORWARD, SKY, "F1: forward of layer 1"),
    "B": (2 * FORWARD, ORANGE, "B1: backward of layer 1"),
    "O": (OPTIMIZER, GREEN, "O: optimizer"),
    "Os": (OPTIMIZER / GPUS, GREEN, "O: optimizer", "O"),
    "AG": (RING, YELLOW, "AG1: all-gather of layer 1's P"),
    "AGs": (LAYERS * RING, YELLOW, "AG: all-gather of P", "AG, all layers"),
    "RS": (RING, PINK, "RS1: reduce-scatter of layer 1's G"),
    "AR": (2 * RING, PINK, "AR1: all-reduce of layer 1's G"),
    "P": (LAYERS * LINK + BATCH, YELLOW, "", "parameters, inputs"),
    "Y": (BATCH, PINK, "Y: outputs"),
    "dY": (BATCH, YELLOW, "dY: gradients of Y"),
    "G": (LAYERS * LINK, PINK, "", "gradients"),
}
SENT = ("AG", "AGs", "RS", "AR", "P", "Y", "dY", "G")  # of these, those that a link carries
PARAMETERS, GRADIENTS, STATES = (
    ("parameters P", BLUE),
    ("gradients G", ORANGE),
    ("optimizer O", GREEN),
)
PASSES = "0 F1, 0 F2, 0 F3, 0 B3, 0 B2, 0 B1"
COMPUTES = ["computes", "communicates"]
ALL = "0123"
# Of each strategy: what the devices hold (a row: label, colour, and of each device "whole",
# "shard", "" or words); what they exchange, above these rows and below (words, who sends, who
# receives); the lanes; the events of a step (LANE LABEL < what has to be over); and a note.
STRATEGIES = {
    "baseline": (
        [(*PARAMETERS, "whole"), (*GRADIENTS, "whole"), (*STATES, "whole")],
        None,
        None,
        COMPUTES[:1],
        f"{PASSES}, 0 O",
        "",
    ),
    "dp": (
        [
            (*PARAMETERS, "whole", "copy, for this step"),
            (*GRADIENTS, "whole", "of its part, for this step"),
            (*STATES, "whole", ""),
        ],
        ("GPU 0 sends all parameters and a part of the batch; later dY", "0", "123"),
        ("GPU 0 gets the outputs Y, and later the sum of all gradients", "123", "0"),
        ["GPU 0 computes", "1-3 compute", "the links"],
        "2 P, 1 F1 < P, 1 F2, 1 F3, 0 F1' < P, 0 F2', 0 F3', 2 Y < F3, 2 dY, 1 B3 < dY, 1 B2, "
        "1 B1, 0 B3' < dY, 0 B2', 0 B1', 2 G < B1, 0 O < G",
        "",
    ),
    "ddp": (
        [(*PARAMETERS, "whole"), (*GRADIENTS, "whole"), (*STATES, "whole")],
        None,
        ("all-reduce of G, bucket by bucket: every device gets the mean", ALL, ALL),
        COMPUTES,
        f"{PASSES}, 1 AR3 < B3, 1 AR2 < B2, 1 AR1 < B1, 0 O < AR1",
        "",
    ),
    "zero2": (
        [(*PARAMETERS, "whole"), (*GRADIENTS, "shard"), (*STATES, "shard")],
        ("all-gather of P: each device sends the shard that it has updated", ALL, ALL),
        ("reduce-scatter of G: each device gets the mean of its own shard", ALL, ALL),
        COMPUTES,
        f"{PASSES}, 1 RS3 < B3, 1 RS2 < B2, 1 RS1 < B1, 0 Os < RS1, 1 AGs < Os",
        "",
    ),
    "fsdp": (
        [
            (*PARAMETERS, "shard"),
            ("gathered P", BLUE, "one or two layers, whole"),
            (*GRADIENTS, "shard"),
            (*STATES, "shard"),
        ],
        (
            "all-gather of a layer's P, before its forward and again before its backward pass",
            ALL,
            ALL,
        ),
        ("reduce-scatter of a layer's G, after its backward pass", ALL, ALL),
        COMPUTES,
        "1 AG1, 0 F1 < AG1, 1 AG2, 0 F2 < AG2, 1 AG3 < F1, 0 F3 < AG3, 1 AG3' < F3, "
        "0 B3 < AG3', 1 AG2', 0 B2 < AG2', 1 RS3 < B3, 1 AG1', 0 B1 < AG1', 1 RS2 < B2, "
        "1 RS1 < B1, 0 Os < RS1",
        "A layer is freed after its forward pass, so its backward pass gathers it again: "
        "AG3 comes twice, too.",
    ),
}


def kind(label):
    return re.match("[A-Za-z]+", label)[0]


def schedule(events, slower=1):
    """[(lane, label, start, end)] of these events, in units of time. The link is `slower` times
    slower.
    """
    ends, free, found = {None: 0}, {}, []
    for event in events.split(", "):
        lane, label, need = re.fullmatch(r"(\d) (\S+)(?: < (\S+))?", event).groups()
        start = max(free.get(lane, 0), ends[need])
        units = KINDS[kind(label)][0] * (slower if kind(label) in SENT else 1)
        free[lane] = ends[label] = start + units
        found.append((int(lane), label, start, ends[label]))
    return found


# -------------------------------------------------------- a strategy: what it holds, and its step


def devices(picture, rows, above, below):
    """What each device holds, and what they exchange. Returns where this ends."""
    wide, top = (RIGHT - LEFT - 3 * 12) / GPUS, 66 if above else 24
    bottom = top + 22 * len(rows) - 4
    for device in range(GPUS if below else 1):
        x = LEFT + device * (wide + 12)
        middle = x + wide / 2
        picture.text(middle, 16, f"GPU {device}", "middle", weight="bold")
        for y, (label, colour, *held) in enumerate(rows):
            y, has = top + y * 22, held[min(device, len(held) - 1)]
            if device == 0:
                picture.text(LEFT - 8, y + 13, label, "end")
            for part in sorted(range(4), key=lambda part: part == device):  # its shard on top
                look = ["white", "", "#888", "black", "2,3"]
                if has == "whole" or has == "shard" and part == device:
                    look = [colour, str(part), "black", "white" if colour == BLUE else "black"]
                picture.box(x + part * wide / 4, y, wide / 4, 18, *look)
            if has not in ("whole", "shard", ""):
                picture.box(x, y, wide, 18)
                picture.box(x, y, wide, 18, colour, has, opacity=0.25)
        for band, here, there in ((above, top - 2, 46), (below, bottom + 2, bottom + 20)):
            if band and str(device) in band[1]:
                picture.arrow((middle - 9, here), (middle - 9, there))
            if band and str(device) in band[2]:
                picture.arrow((middle + 9, there), (middle + 9, here))
    for band, y in ((above, 26), (below, bottom + 20)):
        if band:
            picture.box(LEFT, y, RIGHT - LEFT, 20, "#EEEEEE", band[0])
    return bottom + (50 if below else 18)


def timeline(picture, y, title, lanes, events, slower=1):
    """One step, below `y`. Returns where this ends, and the legend."""
    found, free = schedule(events, slower), [0.0] * len(lanes)
    over = max(end for *_, end in found)
    picture.text(LEFT, y + 12, f"{title}: {over:g} units", weight="bold")
    waits, boxes, legend = [], [], []
    for lane, name in enumerate(lanes):
        picture.text(LEFT - 8, y + 36 + lane * 30, name, "end")
    for lane, label, start, end in [*found, *((i, "", over, over) for i in range(len(lanes)))]:
        if start > free[lane] and "compute" in lanes[lane]:
            waits.append((lane, free[lane], start, "url(#hatch)", ""))
        free[lane] = end
        if label:
            _, fill, meaning, *says = KINDS[kind(label)]
            boxes.append((lane, start, end, fill, says[0] if says else label.strip("'")))
            legend += [meaning] * (meaning not in ["", *legend])
    for lane, start, end, fill, text in waits + boxes:
        x, top, wide = LEFT + start * SCALE, y + 20 + lane * 30, (end - start) * SCALE
        if len(text) < 3 and wide < 5 + 7 * len(text):  # then it stands to the right of the box
            picture.box(x, top, wide, 24, fill)
            picture.box(x + wide + 2, top + 4, 3 + 8 * len(text), 16, "white", text, "white")
        else:
            picture.box(x, top, wide, 24, fill, text)
    return y + 22 + len(lanes) * 30, legend + ["hatched: waits"] * bool(waits)


def explain(picture, y, legend):
    """The legend, in lines. Returns where this ends."""
    line = ""
    for text in [*legend, None]:
        if line and (text is None or len(f"{line};  {text}") > 100):
            y, line = y + 16, picture.text(LEFT, y + 12, line, size=11)
        line = f"{line};  {text}" if line else text
    return y + 8


def strategy(picture, name):
    rows, above, below, lanes, events, note = STRATEGIES[name]
    y = devices(picture, rows, above, below)
    y, legend = timeline(picture, y, "One step, time to the right", lanes, events)
    held = "0 to 3: the four quarters of P, G and O. A GPU holds the quarters that are coloured."
    for text in (held, *([note] if note else [])):
        y += 16
        picture.text(LEFT, y - 4, text, size=11)
    return explain(picture, y, legend)


def steps(picture):
    """A step of each strategy. Returns where this ends."""
    y, legend = 4, []
    for name, title, slower in (
        ("baseline", "Baseline, a quarter of the samples", 1),
        ("dp", "DP", 1),
        ("ddp", "DDP", 1),
        ("zero2", "ZeRO-2", 1),
        ("fsdp", "FSDP; ZeRO-3 is similar", 1),
        ("ddp", "DDP, over a link that is half as fast", 2),
        ("fsdp", "FSDP, over a link that is half as fast", 2),
    ):
        y, more = timeline(picture, y, title, *STRATEGIES[name][3:5], slower)
        legend, y = list(dict.fromkeys(legend + more)), y + 4
    return explain(
        picture, y, [text for text in legend if text != "hatched: waits"] + ["hatched: waits"]
    )


# --------------------------------------------------------------------- measured, and by formula

MEASURED = ROOT / "docs" / "results" / "links-cpu" / "records.tar.xz"
SPEEDS = {"10gbit": "10 Gbit/s", "200mbit": "200 Mbit/s"}
NAMES = {"ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP"}


def measured_steps():
    """{(link, strategy): ms of a step on one process alone, and on two nodes}."""
    found = {}
    with tarfile.open(MEASURED) as records:
        for link, name in itertools.product(SPEEDS, NAMES):
            runs = [
                json.load(records.extractfile(f"{link}/bert/{name}-{nodes}x1-r1/run.json"))
                for nodes in (1, 2)
            ]
            found[link, name] = [
                1000 * run["global_batch_size"] / run["samples_per_second"] for run in runs
            ]
    return found


def slow(picture):
    """Measured steps on a fast and on a slow link. Returns where this ends."""
    y, scale, found = 4, 2.25, measured_steps()
    for link, speed in SPEEDS.items():
        picture.text(LEFT, y + 12, f"One step over {speed}, measured", weight="bold")
        y += 20
        for name, title in NAMES.items():
            alone, two = found[link, name]
            picture.text(LEFT - 8, y + 16, title, "end")
            picture.box(LEFT, y, alone * scale, 22, SKY, f"{alone:.0f}")
            picture.box(
                LEFT + alone * scale,
                y,
                (two - alone) * scale,
                22,
                PINK,
                f"+{round(two) - round(alone)}" if (two - alone) * scale > 24 else "",
            )
            picture.text(LEFT + two * scale + 6, y + 16, f"{two:.0f} ms", size=11)
            y += 26
        y += 8
    y = picture.legend(
        y,
        [
            ("the same step on one process alone, in ms", SKY),
            ("longer on two nodes: sending and waiting", PINK),
        ],
    )
    return explain(
        picture,
        y - 4,
        ["A BERT with 0.4 million parameters, one CPU process on each node, gloo"],
    )


def moments(name, model, tokens, n):
    """[(units of time, its label, {what: MB})] of a step of fit.py's formulas: the backward pass of
    a layer takes twice its forward pass, and the update as long as a backward pass.
    """
    from planning import memory

    layers, hidden, inner = (model[size] for size in memory.SIZES[:3])
    parameters, embeddings, _, _ = memory.count_parameters(model)
    parts = memory.bytes_of_parts(name, parameters, n)
    whole, early = parts["gradients"], name in memory.EARLY
    buffers, first, after = memory.bytes_of_buffers(name, model, n)
    layer = memory.bytes_of_activations(tokens, 1, hidden, inner)
    outside = memory.bytes_outside_layers(tokens, hidden)
    way = 4 * tokens * (hidden + inner)  # the activations' own gradients
    held = []

    def note(units, label, gradients, gathered, activations):
        held.append(
            (
                units,
                label,
                {
                    "parameters": parts["parameters"] / 1e6,
                    "optimizer states": parts["states"] / 1e6,
                    "gradients": (whole if early else gradients) / 1e6,
                    "gathered": gathered / 1e6,
                    "activations": activations / 1e6,
                },
            )
        )

    for done in range(1, layers + 1):
        note(1, "forward", 0, buffers, outside + done * layer)
    for left in range(layers, 0, -1):
        made = whole * (1 - embeddings / parameters) * (layers - left) / (layers - 1)
        note(2, "backward", made, first if left == 1 else buffers, outside + left * layer + way)
    note(1, "backward", whole, after, outside)
    note(2, "update", whole, 0, 0)
    return held


def hold(picture):
    """What a rank holds during a step of BERT-base. Returns where this ends."""
    from fit import MODELS

    colours = {
        "parameters": BLUE,
        "optimizer states": GREEN,
        "gradients": ORANGE,
        "gathered": YELLOW,
        "activations": SKY,
    }
    high, bottom, wide = 0.075, 254, 322
    for gb in range(4):
        y = bottom - 1000 * gb * high
        picture.text(44, y + 4, f"{gb} GB" if gb else "0", "end", 11)
        picture.line((50, y), (WIDTH - 10, y), dash="2,3")
    for name, x in (("ddp", 60), ("fsdp", 450)):
        held = moments(name, MODELS["bert-base"], 4 * 384, GPUS)
        scale = wide / sum(units for units, *_ in held)
        most = max(sum(parts.values()) for *_, parts in held)
        picture.text(
            x,
            16,
            f"{NAMES[name]}: at most {math.ceil(most):,} MB",  # as fit.py rounds
            weight="bold",
        )
        base = [0.0] * len(held)
        for what, colour in colours.items():
            top = [low + parts[what] for low, (*_, parts) in zip(base, held, strict=True)]
            edges, at = ([], []), x
            for (units, *_), low, up in zip(held, base, top, strict=True):
                for place in (at, at + units * scale):
                    edges[0].append((place, bottom - low * high))
                    edges[1].append((place, bottom - up * high))
                at += units * scale
            picture.line(*edges[0], *reversed(edges[1]), edges[0][0], fill=colour)
            base = top
        at = x
        for phase in ("forward", "backward", "update"):
            units = sum(units for units, label, _ in held if label == phase) * scale
            picture.line((at, bottom), (at, bottom + 8))
            picture.text(at + units / 2, bottom + 18, phase, "middle", 11)
            at += units
    entries = [
        ("gathered layers, and buffers" if name == "gathered" else name, colour)
        for name, colour in colours.items()
    ]
    y = picture.legend(bottom + 30, entries)
    return explain(
        picture,
        y - 4,
        [
            "BERT-base in fp32, 4 windows of 384 tokens on each of 4 devices",
            "by the formulas of fit.py",
            "DDP's gradients lie in the buckets of its all-reduce, which stay from step to step",
        ],
    )


def held(picture):
    """What a device holds between two steps, under each strategy. Returns where this ends."""
    from fit import MODELS
    from planning import memory

    parameters = memory.count_parameters(MODELS["bert-large"])[0]
    whole = 16 * parameters / 1e6
    scale, y = 560 / whole, 8
    for name in ("baseline", "dp", *NAMES):
        title = {"baseline": "baseline", "dp": "DP, on GPU 0"} | NAMES
        picture.text(LEFT + 6, y + 23, title[name], "end", 16)
        parts, x = memory.bytes_of_parts(name, parameters, GPUS), LEFT + 14
        for part, (_, colour) in zip(
            ("parameters", "gradients", "states"), (PARAMETERS, GRADIENTS, STATES), strict=True
        ):
            wide = parts[part] / 1e6 * scale
            picture.box(x, y, wide, 32, colour)
            x += wide
        picture.text(x + 8, y + 23, f"{sum(parts.values()) / 1e6:,.0f} MB", size=16)
        y += 42
    x = LEFT + 14
    for part, colour in (PARAMETERS, GRADIENTS, ("optimizer states", STATES[1])):
        picture.box(x, y + 4, 18, 18, colour)
        picture.text(x + 25, y + 19, part.split(" ")[0] if colour != GREEN else part, size=16)
        x += 150
    return y + 34


# ------------------------------------------------------------------------------- a run's life

LIFE = {  # phases of a run: what each lane does in it
    "start": ("reads the YAML", "imports, connects", "imports, connects", ""),
    "open": ("waits", "locks, looks for a checkpoint", "waits for rank 0", "run.json: running"),
    "train": ("waits", "steps", "steps", ""),
    "log": ("waits", "losses, stop?, save", "losses, stop?, save", "partial, then step_N"),
    "evaluate": ("waits", "its part of the test set", "its part", "best/"),
    "finish": ("waits", "gathers and saves the model", "sends its shards", "run.json: completed"),
}


def inside(picture):
    """What launcher, ranks and disk do in each phase of a run. Returns where this ends."""
    lanes = ("the launcher", "rank 0", "rank 1", "the disk")
    fills = ("white", SKY, SKY, YELLOW)
    wide = (RIGHT - 66) / len(lanes)
    for lane, name in enumerate(lanes):
        picture.text(66 + (lane + 0.5) * wide, 14, name, "middle", weight="bold")
    y = 24
    for phase, cells in LIFE.items():
        picture.text(4, y + 18, phase)
        for lane, text in enumerate(cells):
            if text:
                picture.box(66 + lane * wide, y, wide - 6, 26, fills[lane], text)
        y += 34
    collectives = (
        "all ranks sync in open, log, evaluate and finish, and in the backward of each step"
    )
    return explain(picture, y - 4, ["time goes down", "train and log repeat", collectives])


# ----------------------------------------------------------------------------------- all pictures

# Name: what draws it into a Picture, and returns the height.
PICTURES = {name: (lambda picture, name=name: strategy(picture, name)) for name in STRATEGIES}
PICTURES |= {"steps": steps, "slow": slow, "memory": hold, "held": held, "inside": inside}

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    for name, draw in PICTURES.items():
        picture = Picture()
        picture.save(folder / f"{name}.svg", draw(picture))
