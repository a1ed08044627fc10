"""The pictures of a report, as SVG: efficiency over the number of devices, with a line for each
strategy and batch; and speed against memory, with a point for each strategy.

They have to be legible in grey and on a phone: lines differ in marker and dash.
"""

import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

from common.printing import printable
from common.strategies import FAMILIES
from reporting.comparing import Cell, Comparison, Workload, words_on

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot  # noqa: E402  after the choice above

WIDTH = 28  # characters in a line of a name
STYLE: Any = {
    "font.size": 11,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "figure.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same file from the same records
    "text.parse_math": False,  # a $ in a name is a $
}
SIZE: Any = {"figsize": (5.4, 5), "layout": "constrained"}
NO_METADATA = {"Date": None, "Creator": None}

# The colours of families: Okabe and Ito, https://jfly.uni-koeln.de/color/
COLOURS = "#000000 #999999 #0072B2 #D55E00 #A6761D #E69F00 #009E73 #CC79A7".split()
COLOUR_OF = dict(zip(FAMILIES, COLOURS, strict=True))
MARKERS = "ovs^p*DP<>hX8Hd"
DASHES: list[Any] = ["-", ":", "--", "-.", (0, (5, 2, 1, 2, 1, 2)), (0, (7, 2)), (0, (1, 3))]

Point = tuple[Cell, Comparison]


def draw_workload(workload: Workload, folder: Path, suffix: str) -> dict[str, str]:
    """The pictures of one workload, their names with this suffix; returns {name: file}."""
    files: dict[str, str] = {}
    model = workload.values.get("model")
    head = f"{in_lines(model)}\n" if model else ""
    order = list(dict.fromkeys(cell.setting.strategy for cell in workload.cells))

    def save(name: str, figure: Any, title: str) -> None:
        figure.suptitle(head + title)
        labels = figure.axes[0].get_legend_handles_labels()[1]
        lines = sum(label.count("\n") + 1 for label in labels)
        figure.set_figheight(4 + 0.1 * lines)
        figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
        files[name] = f"{name}{suffix}.svg"
        figure.savefig(folder / files[name], metadata=NO_METADATA)
        pyplot.close(figure)

    kinds = {"efficiency": ("weak", "by_hand"), "efficiency-strong": ("strong",)}
    with warnings.catch_warnings(), pyplot.rc_context(STYLE):
        warnings.simplefilter("ignore")  # on missing glyphs: text stays text
        for name, of_kind in kinds.items():
            points = [
                (cell, one)
                for cell in workload.cells
                for kind, one in cell.comparisons.items()
                if kind in of_kind and not cell.is_baseline
            ]
            if any(cell.devices > 1 for cell, _ in points):
                strong = name.endswith("strong")
                fixed = ", global batch fixed" if strong else ""
                figure = draw_efficiency(points, strong, order)
                save(name, figure, f"efficiency{fixed} (more is better)")
        place, cells = find_trade(workload)
        if len(cells) > 1:
            title = f"speed and memory on {place}\n(up and to the left is better)"
            save("trade", draw_trade(cells, order), title)
    return files


def in_lines(text: str) -> str:
    """A name as up to three lines."""
    return textwrap.fill(printable(text), WIDTH, max_lines=3, placeholder="…")


def name_in(cell: Cell, strong: bool) -> str:
    """The name of a cell's line, without its number of devices and the batch that follows it."""
    batch = f"global batch {cell.setting.global_batch_size}" if strong else cell.batch
    options = [text for name, text in words_on(cell).items() if name != "batch"]
    shown = [cell.name, batch, *(text for text in options if text in cell.apart)]
    return ", ".join(filter(None, shown))


def look_of(cell: Cell, order: list[str]) -> dict[str, Any]:
    """How a cell is drawn: in the colour of its family, with the marker and dash of its strategy's
    place in `order`. The marker is hollow on several nodes, and larger with activation
    checkpointing.
    """
    strategy, place = cell.setting.strategy, order.index(cell.setting.strategy)
    colour = COLOUR_OF.get(strategy.split("_")[0], "#56B4E9")
    return {
        "color": colour,
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[place % len(DASHES)],
        "markersize": 9 if cell.setting.activation_checkpointing else 6,
        "markerfacecolor": colour if cell.setting.nodes == 1 else "white",
    }


# -------- efficiency


def draw_efficiency(points: list[Point], strong: bool, order: list[str]) -> Any:
    """A bar is the interval of the test. Of shapes with the same number of devices, the line takes
    the one with the fewest nodes.
    """
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point[0].devices, point[0].setting.nodes)):
        cell, name = point[0], name_in(point[0], strong)
        if any(other.setting.shape == cell.setting.shape for other, _ in lines.get(name, [])):
            name += f", {cell.batch}"  # accumulated differently
        lines.setdefault(name, []).append(point)
    last = {name: of_line[-1][0] for name, of_line in lines.items()}
    names = sorted(lines, key=lambda name: (-last[name].devices, last[name].cost))
    counts = sorted({cell.devices for cell, _ in points})
    figure, axes = pyplot.subplots(**SIZE)
    axes.set(xlabel="devices (hollow: several nodes)", ylabel="percent")
    for number, name in enumerate(names):
        # Lines lie side by side, so that no bar hides another one.
        aside = 0.03 * (number - (len(names) - 1) / 2)
        line = {cell.devices: 100 * one.efficiency for cell, one in reversed(lines[name])}
        places = [counts.index(devices) + aside for devices in line]
        first = lines[name][0][0]
        axes.plot(places, line.values(), **look_of(first, order) | {"marker": ""})
        for cell, one in lines[name]:
            place, look = counts.index(cell.devices) + aside, look_of(cell, order)
            label = in_lines(name) if cell is first else ""
            axes.plot(place, 100 * one.efficiency, label=label, **look)
            if one.low and one.high:
                ends = 100 * one.low / cell.devices, 100 * one.high / cell.devices
                axes.vlines(place, *ends, color=look["color"], linewidth=1)
    axes.axhline(100, color="0.4", linewidth=1, zorder=0)
    highest = max(100 * one.efficiency for _, one in points)
    interval = max(100 * (one.high or 0) / cell.devices for cell, one in points)
    top = max(110, 1.05 * highest, min(1.05 * interval, 200))
    axes.set(ylim=(0, top), xlim=(-0.4, len(counts) - 0.6))
    axes.set_xticks(range(len(counts)), map(str, counts))
    return figure


# -------- what a strategy trades


def shape_and_batch(cell: Cell) -> tuple[int, str, int]:
    return cell.devices, cell.setting.shape, cell.setting.batch_per_device or 0


def find_trade(workload: Workload) -> tuple[str, list[Cell]]:
    """The shape and batch per device that most strategies have (or, of several, the one with the
    most devices), in words. And its cells whose speed and memory are known: their baseline, and the
    fastest of each strategy.
    """
    known = [
        cell
        for cell in workload.cells
        if cell.figures.samples_per_second and cell.figures.training_memory_mb
    ]
    counts = Counter(shape_and_batch(cell) for cell in known if cell.devices > 1)
    if not counts:
        return "", []
    most = max(counts, key=lambda place: (counts[place], *place))
    fastest: dict[str, Cell] = {}
    for cell in sorted(known, key=lambda cell: cell.cost):
        if shape_and_batch(cell) == most:
            base = cell.comparison and cell.comparison.baseline
            if base in known:
                fastest = {"": base} | fastest
            fastest.setdefault(cell.name, cell)
    _, shape, batch = most
    return f"{shape}, batch {batch}" if batch else shape, list(fastest.values())


def draw_trade(cells: list[Cell], order: list[str]) -> Any:
    """A point for each strategy. Its memory is that of training alone, on the fullest device."""
    below = "MB of each device for training alone (hollow: several nodes)"
    figure, axes = pyplot.subplots(**SIZE)
    axes.set(xlabel=below, ylabel="samples per second")
    for cell in cells:
        memory, speed = cell.figures.training_memory_mb, cell.figures.samples_per_second
        name = cell.name + (f" on 1 x 1, {cell.batch}" if cell.is_baseline else "")
        axes.plot(memory, speed, label=in_lines(name), **look_of(cell, order) | {"linestyle": ""})
    axes.set_xlim(0, 1.05 * axes.dataLim.x1)
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    return figure
