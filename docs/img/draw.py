"""Draw the diagrams of docs/strategies.md as SVG: python docs/img/draw.py [FOLDER]. A test holds the files to this.

In all of them time has the same scale, and durations are made up: a layer's backward pass takes twice its forward pass,
an all-reduce is a reduce-scatter and an all-gather, a quarter of the optimizer's work takes a quarter of its time.
When something starts follows from them: as soon as its lane is free, and what it needs is there.
"""

import re
import sys
from pathlib import Path

BLUE, ORANGE, GREEN, SKY, YELLOW, PINK = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#F0E442", "#CC79A7"  # Okabe-Ito
WIDTH, LEFT, RIGHT, PIXELS = 800, 112, 790, 21  # of the picture; PIXELS a unit of time
PARAMETERS, GRADIENTS, STATES = ("parameters P", BLUE), ("gradients G", ORANGE), ("optimizer O", GREEN)
# What happens, by how its label begins: colour, units of time, legend, and what the box says instead of the label.
KINDS = {"F": (SKY, 2, "F1: forward of layer 1"), "B": (ORANGE, 4, "B1: backward of layer 1"),
         "O": (GREEN, 2, "O: optimizer"), "Os": (GREEN, 0.7, "O: optimizer", "O"),
         "AG": (YELLOW, 1.6, "AG: all-gather of P"), "AGs": (YELLOW, 4.8, "AG: all-gather of P", "AG, all layers"),
         "RS": (PINK, 1.6, "RS: reduce-scatter of G"), "AR": (PINK, 3.2, "AR: all-reduce of G"),
         "P": (YELLOW, 5.6, "", "parameters, inputs"), "Y": (PINK, 0.8, ""), "dY": (YELLOW, 0.8, ""),
         "G": (PINK, 4.8, "", "gradients")}
PASSES = "0 F1, 0 F2, 0 F3, 0 B3, 0 B2, 0 B1"
# Of each strategy: what the devices hold (a row: label, colour, and of each device "whole", "shard", "" or words);
# what they exchange (words, who sends, who receives); lanes and events of a step (LANE LABEL < what has to be over).
STRATEGIES = {
    "baseline": ([(*PARAMETERS, "whole"), (*GRADIENTS, "whole"), (*STATES, "whole")], [], ["computes"],
                 f"{PASSES}, 0 O"),
    "dp": ([(*PARAMETERS, "whole", "copy, for this step"), (*GRADIENTS, "whole", "of its part, for this step"),
            (*STATES, "whole", "")],
           [("GPU 0 sends all parameters to each GPU, and its part of the batch", "0", "123"),
            ("GPU 0 gets the outputs Y, and after the backward pass all gradients, which it sums", "123", "0")],
           ["GPU 0 computes", "1-3 computes", "GPU 0's links"],
           "2 P, 1 F1 < P, 1 F2, 1 F3, 0 F1' < P, 0 F2', 0 F3', 2 Y < F3, 2 dY, 1 B3 < dY, 1 B2, 1 B1, 0 B3' < dY, "
           "0 B2', 0 B1', 2 G < B1, 0 O < G"),
    "ddp": ([(*PARAMETERS, "whole"), (*GRADIENTS, "whole"), (*STATES, "whole")],
            [("all-reduce of G, bucket by bucket: every device gets the mean", "0123", "0123")],
            ["computes", "communicates"], f"{PASSES}, 1 AR3 < B3, 1 AR2 < B2, 1 AR1 < B1, 0 O < AR1"),
    "zero2": ([(*PARAMETERS, "whole"), (*GRADIENTS, "shard"), (*STATES, "shard")],
              [("reduce-scatter of G: each device gets the mean of its own shard", "0123", "0123"),
               ("all-gather of P: each device sends the shard that it has updated", "0123", "0123")],
              ["computes", "communicates"], f"{PASSES}, 1 RS3 < B3, 1 RS2 < B2, 1 RS1 < B1, 0 Os < RS1, 1 AGs < Os"),
    "fsdp": ([(*PARAMETERS, "shard"), (*GRADIENTS, "shard"), (*STATES, "shard"),
              ("gathered", BLUE, "one or two layers, whole")],
             [("all-gather of a layer's P, before its forward and again before its backward pass", "0123", "0123"),
              ("reduce-scatter of a layer's G, after its backward pass", "0123", "0123")],
             ["computes", "communicates"],
             "1 AG1, 0 F1 < AG1, 1 AG2, 0 F2 < AG2, 1 AG3 < F1, 0 F3 < AG3, 1 AG3' < F3, 0 B3 < AG3', 1 AG2', "
             "0 B2 < AG2', 1 RS3 < B3, 1 AG1', 0 B1 < AG1', 1 RS2 < B2, 1 RS1 < B1, 0 Os < RS1")}


class Picture:
    def __init__(self):
        self.lines = []

    def text(self, x, y, text, anchor="start", size=12, colour="black", weight="normal"):
        self.lines.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}" '
                          f'font-weight="{weight}">{text}</text>')

    def box(self, x, y, width, height, fill="white", text="", edge="black", colour="black", dash="none", opacity=1):
        self.lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
                          f'fill-opacity="{opacity}" stroke="{edge}" stroke-dasharray="{dash}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle", 11, colour)

    def arrow(self, x, y, end):
        """A vertical arrow, its head at `end`."""
        back = -6 if end > y else 6
        self.lines.append(f'<path d="M{x:.1f},{y:.1f} V{end + back:.1f} M{x:.1f},{end:.1f} l-4,{back} h8 z" '
                          'stroke="black"/>')

    def devices(self, rows, bands):
        """What each device holds, and below it what they exchange. Returns where this ends."""
        wide, bottom = (RIGHT - LEFT - 3 * 12) / 4, 42 + 22 * len(rows)
        for device in range(4 if bands else 1):
            x = LEFT + device * (wide + 12)
            self.text(x + wide / 2, 16, f"GPU {device}", "middle", weight="bold")
            for y, (label, colour, *held) in enumerate(rows):
                y, has = 24 + y * 22, held[min(device, len(held) - 1)]
                if device == 0:
                    self.text(LEFT - 8, y + 13, label, "end")
                for part in range(4):
                    look = ["white", "", "#888", "black", "2,3"]
                    if has == "whole" or has == "shard" and part == device:
                        look = [colour, str(part), "black", "white" if colour == BLUE else "black"]
                    self.box(x + part * wide / 4, y, wide / 4, 18, *look)
                if has not in ("whole", "shard", ""):
                    self.box(x, y, wide, 18)
                    self.box(x, y, wide, 18, colour, has, opacity=0.25)
            for i, (_, senders, receivers) in enumerate(bands):
                middle = x + wide / 2 + (i - len(bands) / 2 + 0.5) * 34
                if str(device) in senders:
                    self.arrow(middle - 7, bottom - 18, bottom + i * 30)
                if str(device) in receivers:
                    self.arrow(middle + 7, bottom + i * 30, bottom - 18)
        for i, (text, *_) in enumerate(bands):
            self.box(LEFT, bottom + i * 30, RIGHT - LEFT, 20, "#EEEEEE", text)
        return bottom + 30 * len(bands)

    def timeline(self, y, lanes, events):
        """One step, below `y`. Returns where this ends."""
        self.text(LEFT, y + 12, "One step, time to the right; hatched: waits", weight="bold")
        ends, free, legend = {}, [0.0] * len(lanes), []
        for event in [*events.split(", "), *(f"{lane} end" for lane, name in enumerate(lanes) if "computes" in name)]:
            lane, label, need = re.fullmatch(r"(\d) (\S+)(?: < (\S+))?", event).groups()
            lane = int(lane)
            start, top = max(free if label == "end" else [free[lane], ends.get(need, 0)]), y + 20 + lane * 30
            if start > free[lane] and "computes" in lanes[lane]:
                self.box(LEFT + free[lane] * PIXELS, top, (start - free[lane]) * PIXELS, 24, "url(#hatch)")
            if label != "end":
                fill, units, meaning, *says = KINDS[re.match("[A-Za-z]+", label)[0]]
                free[lane] = ends[label] = start + units
                legend += [meaning] * (meaning not in legend)
                self.box(LEFT + start * PIXELS, top, units * PIXELS, 24, fill, says[0] if says else label.strip("'"))
        for lane, name in enumerate(lanes):
            self.text(LEFT - 8, y + 36 + lane * 30, name, "end")
        self.text(LEFT, y + 34 + len(lanes) * 30, ";  ".join(filter(None, legend)), size=11)
        return y + 42 + len(lanes) * 30

    def launchers(self):
        """One task a GPU, and one launcher a node, on two nodes with four GPUs each. Returns where this ends."""
        for x, command in ((8, "ntasks-per-node=4 python train.py"), (408, "ntasks-per-node=1 accelerate launch ...")):
            self.text(x, 16, "One task a GPU" if x == 8 else "One launcher a node", weight="bold")
            self.box(x, 24, 384, 22, "#EEEEEE", f"srun --{command}")
            for node, left in enumerate((x, x + 196)):
                self.arrow(left + 94, 46, 62)
                self.box(left, 62, 188, 112)
                self.text(left + 8, 78, f"node {node}: SLURM_NODEID={node}", size=11)
                for task in range(4 if x == 8 else 1):
                    self.box(left + 5 + task * 45, 86, 43 if x == 8 else 178, 82, YELLOW, opacity=0.4)
                    says = f"task {node}: --machine_rank {node}" if x > 8 else f"task {4 * node + task}"
                    self.text(left + 9 + task * 45, 102, says, size=11)
                for gpu in range(4):
                    self.box(left + 8 + gpu * 45, 112, 37, 50, SKY)
                    self.text(left + 26.5 + gpu * 45, 132, "rank", "middle", 11)
                    self.text(left + 26.5 + gpu * 45, 148, 4 * node + gpu, "middle", 11)
        return 182


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    for name in (*STRATEGIES, "launch"):
        picture = Picture()
        height = (picture.launchers() if name == "launch" else
                  picture.timeline(picture.devices(*STRATEGIES[name][:2]), *STRATEGIES[name][2:]))
        (folder / f"{name}.svg").write_text("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">', '<pattern id="hatch" width="6" height="6" '
            'patternUnits="userSpaceOnUse"><path d="M0,6 L6,0" stroke="#555"/></pattern>',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *picture.lines, "</svg>\n"]), encoding="utf-8")
