"""The pictures of a report, as SVG: time and speedup over the number of devices, a line for each
strategy and batch.

They have to be legible in grey and on a phone: lines differ in marker and dash, and the legend is
below the axes. A picture has at most MOST lines: those that reach the most devices, and of these
the fastest; it says how many it leaves out, and the table has them.
"""

import math
from pathlib import Path
from typing import Any

import matplotlib

from common.facts import STRATEGIES
from common.printing import own_file
from reporting.comparing import Cell, Workload, quiet

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot  # noqa: E402  after the choice above

MOST = 12  # lines of a picture
LONGEST = 44  # characters of a name
STYLE: Any = {
    "font.size": 11,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 11,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same file from the same records
    "text.parse_math": False,  # a $ in a name is a $
}
NO_METADATA = {"Date": None, "Creator": None}

# A variant has the colour of its strategy. A larger marker means activation checkpointing. Colours:
# Okabe and Ito, https://jfly.uni-koeln.de/color/
FAMILIES = dict.fromkeys(name.split("_")[0] for name in STRATEGIES)
COLOURS = "#000000 #999999 #0072B2 #D55E00 #A6761D #E69F00 #009E73 #CC79A7".split()
COLOUR_OF = dict(zip(FAMILIES, COLOURS, strict=True))
MARKERS = "ovs^<>p*DhPX"
DASHES: list[Any] = ["-", ":", "--", "-.", (0, (7, 2, 1, 2)), (0, (2, 2)), (0, (5, 2, 1, 2, 1, 2))]
DASHES += [(0, (5, 1)), (0, (3, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (1, 3))]
LOOKS = dict(zip(STRATEGIES, zip(MARKERS, DASHES, strict=True), strict=True))

Point = tuple[Cell, float, float, float]  # a cell, its value, and the ends of the band


def draw_workload(workload: Workload, folder: Path, suffix: str) -> dict[str, str]:
    """The pictures of one workload, their names with this suffix; returns {name: file}."""
    cells, files = workload.cells, {}
    points = {"time": [(cell, cell.seconds, cell.fastest, cell.slowest) for cell in cells]}
    for name, kinds in {"speedup": ("weak", "by_hand"), "speedup-strong": ("strong",)}.items():
        pairs = [(cell, getattr(cell, kind)) for cell in cells for kind in kinds]
        points[name] = [
            (cell, one.speedup, one.low or one.speedup, one.high or one.speedup)
            for cell, one in pairs
            if one
        ]
    titles = {
        "time": "seconds of training (less is better)",
        "speedup": "speedup (more is better)",
        "speedup-strong": "speedup, global batch fixed (more is better)",
    }
    with quiet(), pyplot.rc_context(STYLE):  # A missing glyph is no matter: text stays text.
        for name, of_cells in points.items():
            if name != "time" and all(cell.devices == 1 for cell, *_ in of_cells):
                continue
            model = workload.values.get("model")
            title = (f"{shorten(model)}\n" if model else "") + titles[name]
            figure = draw(of_cells, title, ideal=name != "time")
            files[name] = f"{name}{suffix}.svg"
            figure.savefig(own_file(folder / files[name]), metadata=NO_METADATA)
            pyplot.close(figure)
    return files


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def group_lines(points: list[Point]) -> dict[str, list[Point]]:
    """The points of each line in the order of devices and nodes, by its name."""
    batches = {cell.setting.batch_per_device for cell, *_ in points}
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point[0].devices, point[0].setting.nodes)):
        cell = point[0]
        batch = cell.batch if len(batches) > 1 and cell.batch not in cell.apart else ""
        name = ", ".join(word for word in (cell.name, batch, cell.apart) if word)
        lines.setdefault(name, []).append(point)
    return lines


def rank_line(points: list[Point]) -> tuple[bool, int, float]:
    """Baselines come first, then lines that reach the most devices, and of these the best."""
    last = points[-1][0]
    return not last.is_baseline, -last.devices, last.seconds


def draw(points: list[Point], title: str, ideal: bool) -> Any:
    """Filled markers are on one node, hollow ones on several nodes. Repeats, or the interval of a
    speedup, are a band. Of several shapes with as many devices, the line takes that with the fewest
    nodes.
    """
    lines = group_lines(points)
    telling = sorted(lines, key=lambda name: rank_line(lines[name]))[:MOST]
    columns = 2 if max(map(len, telling)) < 24 else 1
    height = 3.4 + 0.22 * math.ceil(len(telling) / columns)
    figure, axes = pyplot.subplots(figsize=(5.0, height), layout="constrained")
    for name in lines:
        if name in telling:
            draw_line(axes, shorten(name), lines[name])
    counts = sorted({cell.devices for cell, *_ in points})
    axes.set(xlabel="devices (hollow: several nodes)", title=title, xscale="log", yscale="log")
    if ideal:
        axes.plot(counts, counts, color="0.6", linewidth=1, label="ideal", zorder=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xticks(counts, map(str, counts))
    low, high = (math.floor(math.log2(end)) for end in axes.get_ylim())
    axes.set_yticks([2.0**power for power in range(low, high + 2)])
    left = len(lines) - len(telling)
    legend = f"{left} more lines in the table under Details" if left else None
    figure.legend(loc="outside lower center", ncols=columns, title=legend, title_fontsize=9)
    return figure


def draw_line(axes: Any, name: str, points: list[Point]) -> None:
    cell = points[0][0]
    color = COLOUR_OF.get(cell.setting.strategy.split("_")[0], "#56B4E9")
    marker, line = LOOKS.get(cell.setting.strategy, ("x", "-"))
    size = 9 if cell.setting.activation_checkpointing else 5
    shape: Any = {"color": color, "marker": marker, "markersize": size}
    on_line = {point[0].devices: point for point in reversed(points)}
    counts = sorted(on_line)
    cells, values, lows, highs = zip(*(on_line[count] for count in counts), strict=True)
    fill = "full" if cells[0].setting.nodes == 1 else "none"
    axes.plot(counts, values, linestyle=line, label=name, fillstyle=fill, **shape)
    for cell, value, *_ in points:
        if cell not in cells or fill == "full" and cell.setting.nodes > 1:
            axes.plot(cell.devices, value, linestyle="", markerfacecolor="white", **shape)
    axes.fill_between(counts, lows, highs, color=color, alpha=0.2, linewidth=0)
