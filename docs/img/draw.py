"""Draw the diagrams of docs/strategies.md as SVG: python docs/img/draw.py [FOLDER]. A test holds
the files to this.

Time has one scale in all of them, but for slow.svg. Durations are made up, by one rule: three
layers on n = 4 GPUs, and

    forward pass of a layer                      2 units of time
    backward pass of a layer                     4: twice the forward pass
    optimizer, on all parameters                 2; on a shard 2/n
    the bytes of a layer over one link           2, as its forward pass; in slow.svg 8
    all-gather or reduce-scatter of a layer      (n-1)/n of these bytes
    all-reduce of a layer                        2 (n-1)/n of these bytes
    DP's copies of P, and its sum of G           the bytes of all layers: NCCL relays them
    DP's inputs, outputs, gradients of outputs   an eighth of a layer for each of the n-1 GPUs

When something starts follows: as soon as its lane is free, and what it needs is there.
"""

import re
import sys
from pathlib import Path

# The colours of Okabe and Ito
BLUE, ORANGE, GREEN, SKY, YELLOW, PINK = (
    "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#F0E442", "#CC79A7")
WIDTH, LEFT, RIGHT = 800, 112, 790  # of a picture, and where its lanes begin and end
SCALE, SLOW_SCALE = 19.5, 11.8  # pixels per unit of time
LAYERS, GPUS, FORWARD, OPTIMIZER, LINK, SLOW_LINK = 3, 4, 2, 2, 2, 8


def durations(link):
    """Units of time of each kind of box, if a layer's bytes take `link` units over one link."""
    passed, batch = link * (GPUS - 1) / GPUS, (GPUS - 1) * link / 8
    return {"F": FORWARD, "B": 2 * FORWARD, "O": OPTIMIZER, "Os": OPTIMIZER / GPUS,
            "AG": passed, "AGs": LAYERS * passed, "RS": passed, "AR": 2 * passed,
            "P": LAYERS * link + batch, "Y": batch, "dY": batch, "G": LAYERS * link}


# Kinds of boxes: colour, legend, and what the box says where that is not its label.
KINDS = {"F": (SKY, "F1: forward of layer 1"), "B": (ORANGE, "B1: backward of layer 1"),
         "O": (GREEN, "O: optimizer"), "Os": (GREEN, "O: optimizer", "O"),
         "AG": (YELLOW, "AG: all-gather of P"),
         "AGs": (YELLOW, "AG: all-gather of P", "AG, all layers"),
         "RS": (PINK, "RS: reduce-scatter of G"), "AR": (PINK, "AR: all-reduce of G"),
         "P": (YELLOW, "", "parameters, inputs"), "Y": (PINK, "Y: outputs"),
         "dY": (YELLOW, "dY: gradients of Y"), "G": (PINK, "", "gradients")}
PARAMETERS, GRADIENTS, STATES = (
    ("parameters P", BLUE), ("gradients G", ORANGE), ("optimizer O", GREEN))
PASSES = "0 F1, 0 F2, 0 F3, 0 B3, 0 B2, 0 B1"
# Of each strategy: what the devices hold (a row: label, colour, and of each device "whole",
# "shard", "" or words); what they exchange (words, who sends, who receives); the lanes, and the
# events of a step (LANE LABEL < what has to be over).
STRATEGIES = {
    "baseline": ([(*PARAMETERS, "whole"), (*GRADIENTS, "whole"), (*STATES, "whole")], [],
                 ["computes"], f"{PASSES}, 0 O"),
    "dp": ([(*PARAMETERS, "whole", "copy, for this step"),
            (*GRADIENTS, "whole", "of its part, for this step"), (*STATES, "whole", "")],
           [("GPU 0 sends all parameters to each GPU, and a part of the batch", "0", "123"),
            ("GPU 0 gets the outputs Y, and later the sum of all gradients", "123", "0")],
           ["GPU 0 computes", "1-3 compute", "the links"],
           "2 P, 1 F1 < P, 1 F2, 1 F3, 0 F1' < P, 0 F2', 0 F3', 2 Y < F3, 2 dY, 1 B3 < dY, 1 B2, "
           "1 B1, 0 B3' < dY, 0 B2', 0 B1', 2 G < B1, 0 O < G"),
    "ddp": ([(*PARAMETERS, "whole"), (*GRADIENTS, "whole"), (*STATES, "whole")],
            [("all-reduce of G, bucket by bucket: every device gets the mean", "0123", "0123")],
            ["computes", "communicates"],
            f"{PASSES}, 1 AR3 < B3, 1 AR2 < B2, 1 AR1 < B1, 0 O < AR1"),
    "zero2": ([(*PARAMETERS, "whole"), (*GRADIENTS, "shard"), (*STATES, "shard")],
              [("reduce-scatter of G: each device gets the mean of its own shard", "0123", "0123"),
               ("all-gather of P: each device sends the shard that it has updated",
                "0123", "0123")],
              ["computes", "communicates"],
              f"{PASSES}, 1 RS3 < B3, 1 RS2 < B2, 1 RS1 < B1, 0 Os < RS1, 1 AGs < Os"),
    "fsdp": ([(*PARAMETERS, "shard"), (*GRADIENTS, "shard"), (*STATES, "shard"),
              ("gathered", BLUE, "one or two layers, whole")],
             [("all-gather of a layer's P, before its forward and again before its backward pass",
               "0123", "0123"),
              ("reduce-scatter of a layer's G, after its backward pass", "0123", "0123")],
             ["computes", "communicates"],
             "1 AG1, 0 F1 < AG1, 1 AG2, 0 F2 < AG2, 1 AG3 < F1, 0 F3 < AG3, 1 AG3' < F3, "
             "0 B3 < AG3', 1 AG2', 0 B2 < AG2', 1 RS3 < B3, 1 AG1', 0 B1 < AG1', 1 RS2 < B2, "
             "1 RS1 < B1, 0 Os < RS1")}


def kind(label):
    return re.match("[A-Za-z]+", label)[0]


def schedule(events, link=LINK):
    """[(lane, label, start, end)] of these events, in units of time."""
    takes, ends, free, found = durations(link), {None: 0}, {}, []
    for event in events.split(", "):
        lane, label, need = re.fullmatch(r"(\d) (\S+)(?: < (\S+))?", event).groups()
        start = max(free.get(lane, 0), ends[need])
        free[lane] = ends[label] = start + takes[kind(label)]
        found.append((int(lane), label, start, ends[label]))
    return found


def length(events, link=LINK):
    """Units of time until all events are over."""
    return max(end for *_, end in schedule(events, link))


class Picture:
    def __init__(self):
        self.lines = []

    def text(self, x, y, text, anchor="start", size=12, colour="black", weight="normal"):
        self.lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}" font-weight="{weight}">{text}</text>')

    def box(self, x, y, width, height, fill="white", text="", edge="black", colour="black",
            dash="none", opacity=1):
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" fill-opacity="{opacity}" stroke="{edge}" stroke-dasharray="{dash}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", 11, colour)

    def arrow(self, *points):
        """Lines from point to point, each level or upright, with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        across, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines += [f'<path d="M{path}" fill="none" stroke="black"/>',
                       f'<path d="M{x:.1f},{y:.1f} l{-7 * across - 4 * down},'
                       f'{-7 * down - 4 * across} l{8 * down},{8 * across} z"/>']

    def save(self, path, height):
        path.write_text("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<path d="M0,6 L6,0" stroke="#555"/></pattern>',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *self.lines, "</svg>\n"]),
            encoding="utf-8")


# -------------------------------------------------------- a strategy: what it holds, and its step


def devices(picture, rows, bands):
    """What each device holds, and below it what they exchange. Returns where this ends."""
    wide, bottom = (RIGHT - LEFT - 3 * 12) / 4, 42 + 22 * len(rows)
    for device in range(GPUS if bands else 1):
        x = LEFT + device * (wide + 12)
        picture.text(x + wide / 2, 16, f"GPU {device}", "middle", weight="bold")
        for y, (label, colour, *held) in enumerate(rows):
            y, has = 24 + y * 22, held[min(device, len(held) - 1)]
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
        for i, (_, senders, receivers) in enumerate(bands):
            middle = x + wide / 2 + (i - len(bands) / 2 + 0.5) * 34
            if str(device) in senders:
                picture.arrow((middle - 7, bottom - 18), (middle - 7, bottom + i * 30))
            if str(device) in receivers:
                picture.arrow((middle + 7, bottom + i * 30), (middle + 7, bottom - 18))
    for i, (text, *_) in enumerate(bands):
        picture.box(LEFT, bottom + i * 30, RIGHT - LEFT, 20, "#EEEEEE", text)
    return bottom + 30 * len(bands)


def timeline(picture, y, title, lanes, events, link=LINK, scale=SCALE):
    """One step, below `y`. Returns where this ends, and the legend."""
    found = schedule(events, link)
    over, free = length(events, link), [0.0] * len(lanes)
    picture.text(LEFT, y + 12, f"{title}, time to the right: {over:g} units", weight="bold")
    waits, boxes, legend = [], [], []
    for lane, name in enumerate(lanes):
        picture.text(LEFT - 8, y + 36 + lane * 30, name, "end")
    for lane, label, start, end in [*found, *((i, "", over, over) for i in range(len(lanes)))]:
        if start > free[lane] and "compute" in lanes[lane]:
            waits.append((lane, free[lane], start, "url(#hatch)", ""))
        free[lane] = end
        if label:
            fill, meaning, *says = KINDS[kind(label)]
            boxes.append((lane, start, end, fill, says[0] if says else label.strip("'")))
            legend += [meaning] * (meaning not in ["", *legend])
    for lane, start, end, fill, text in waits + boxes:
        x, top, wide = LEFT + start * scale, y + 20 + lane * 30, (end - start) * scale
        narrow = wide < 8 * len(text)  # then what it says stands to the right of it
        if narrow and len(text) == 1:
            picture.box(x, top, wide, 24, fill)
            picture.box(x + wide + 2, top + 4, 11, 16, "white", text, "white")
        else:
            picture.box(x, top, wide, 24, fill, text)
    return y + 22 + len(lanes) * 30, legend + ["hatched: waits"] * bool(waits)


def explain(picture, y, legend):
    """The legend, four to a line. Returns where this ends."""
    for first in range(0, len(legend), 4):
        y += 16
        picture.text(LEFT, y - 4, ";  ".join(legend[first : first + 4]), size=11)
    return y + 4


def strategy(picture, name):
    rows, bands, lanes, events = STRATEGIES[name]
    y = devices(picture, rows, bands)
    return explain(picture, *timeline(picture, y, "One step", lanes, events))


def slow(picture):
    """Steps of three strategies on a slow link. Returns where this ends."""
    y, legend = 4, []
    for name, title in {"ddp": "DDP", "zero2": "ZeRO-2", "fsdp": "FSDP"}.items():
        top, (y, more) = y, timeline(
            picture, y, f"{title} on a slow link", *STRATEGIES[name][2:], SLOW_LINK, SLOW_SCALE)
        legend, y = list(dict.fromkeys(legend + more)), y + 14
        if name == "ddp":
            x = LEFT + length(STRATEGIES[name][3], SLOW_LINK) * SLOW_SCALE
            picture.text(x + 6, top + 66, "DDP is done")
    picture.lines.insert(0, f'<path d="M{x:.1f},50 V{y - 14}" stroke="black" '
                            'stroke-dasharray="6,4"/>')  # behind the boxes
    return explain(picture, y - 8, legend)


# ------------------------------------------------------------- who starts the ranks of two nodes


def launchers(picture):
    """One task per GPU, and one launcher per node, on two nodes with four GPUs each. Returns where
    this ends.
    """
    for x, title, command in (
            (8, "One task per GPU", "ntasks-per-node=4 python train.py"),
            (408, "One launcher per node", "ntasks-per-node=1 accelerate launch ...")):
        picture.text(x, 16, title, weight="bold")
        picture.box(x, 24, 384, 22, "#EEEEEE", f"srun --{command}")
        for node, left in enumerate((x, x + 196)):
            picture.arrow((left + 94, 46), (left + 94, 62))
            picture.box(left, 62, 188, 112)
            picture.text(left + 8, 78, f"node {node}: SLURM_NODEID={node}", size=11)
            for task in range(4 if x == 8 else 1):
                wide = 43 if x == 8 else 178
                picture.box(left + 5 + task * 45, 86, wide, 82, YELLOW, opacity=0.4)
                says = f"task {4 * node + task}"
                if x > 8:
                    says = f"task {node}: --machine_rank {node}"
                picture.text(left + 9 + task * 45, 102, says, size=11)
            for gpu in range(4):
                picture.box(left + 8 + gpu * 45, 112, 37, 50, SKY)
                picture.text(left + 26.5 + gpu * 45, 132, "rank", "middle", 11)
                picture.text(left + 26.5 + gpu * 45, 148, 4 * node + gpu, "middle", 11)
    return 182


# ----------------------------------------------------------------------------------- all pictures

# Name: what draws it into a Picture, and returns the height.
PICTURES = {name: (lambda picture, name=name: strategy(picture, name)) for name in STRATEGIES}
PICTURES |= {"slow": slow, "launch": launchers}

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    for name, draw in PICTURES.items():
        picture = Picture()
        picture.save(folder / f"{name}.svg", draw(picture))
