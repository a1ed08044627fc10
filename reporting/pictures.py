"""The pictures of a report, as SVG: efficiency over the number of devices, a line for each strategy
and batch; and what a strategy trades, memory for speed.

They have to be legible in grey and on a phone: lines differ in marker and dash, and each has its
name beside it. A picture has at most MOST names: those that reach the most devices, and of these
the fastest; it says how many it leaves out, and the table has them.
"""

import warnings
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

from common.printing import own_file, printable
from common.strategies import FAMILIES, STRATEGIES
from reporting.comparing import Cell, Comparison, Workload

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot  # noqa: E402  after the choice above

MOST = 12  # lines or points of a picture
LONGEST = 34  # characters of a name
HEIGHT = 0.055  # of a name, in heights of the axes
STYLE: Any = {
    "font.size": 11,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same file from the same records
    "text.parse_math": False,  # a $ in a name is a $
}
NO_METADATA = {"Date": None, "Creator": None}

# A variant has the colour of its strategy, and a marker and dash of its own, while there are any. A
# larger marker means activation checkpointing. Colours:
# Okabe and Ito, https://jfly.uni-koeln.de/color/
COLOURS = "#000000 #999999 #0072B2 #D55E00 #A6761D #E69F00 #009E73 #CC79A7".split()
COLOUR_OF = dict(zip(FAMILIES, COLOURS, strict=True))
MARKERS = "ovs^p*DP<>hX8Hd"
DASHES: list[Any] = ["-", ":", "--", "-.", (0, (5, 2, 1, 2, 1, 2)), (0, (5, 1)), (0, (3, 1, 1, 1))]
DASHES += [(0, (1, 1)), (0, (7, 2, 1, 2)), (0, (2, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3))]
LOOKS = dict(
    zip({**FAMILIES, **STRATEGIES}, zip(MARKERS, cycle(DASHES), strict=False), strict=False)
)

Point = tuple[Cell, Comparison]
Named = tuple[str, float, float, str]  # a name, where its point is, and its colour


def draw_workload(workload: Workload, folder: Path, suffix: str) -> dict[str, str]:
    """The pictures of one workload, their names with this suffix; returns {name: file}."""
    files: dict[str, str] = {}
    model = workload.values.get("model")
    head = f"{shorten(model)}\n" if model else ""

    def save(name: str, figure: Any) -> None:
        files[name] = f"{name}{suffix}.svg"
        figure.savefig(own_file(folder / files[name]), metadata=NO_METADATA)
        pyplot.close(figure)

    kinds = {"efficiency": ("weak", "by_hand"), "efficiency-strong": ("strong",)}
    with warnings.catch_warnings(), pyplot.rc_context(STYLE):
        warnings.simplefilter("ignore")  # A missing glyph is no matter: text stays text.
        for name, of_kind in kinds.items():
            pairs = [(cell, getattr(cell, kind)) for cell in workload.cells for kind in of_kind]
            points = [(cell, one) for cell, one in pairs if one and not cell.is_baseline]
            if any(cell.devices > 1 for cell, _ in points):
                strong = name.endswith("strong")
                fixed = ", global batch fixed" if strong else ""
                title = f"{head}efficiency{fixed} (more is better)"
                save(name, draw_efficiency(points, title, strong))
        place, cells = find_trade(workload)
        if len(cells) > 1:
            save("trade", draw_trade(cells, f"{head}speed and memory on {place}"))
    return files


def shorten(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def name_in(cell: Cell, cells: list[Cell], strong: bool) -> str:
    """What tells a cell from these others, but for the devices. Under strong scaling, the batch per
    device changes with them.
    """
    batch, apart = cell.batch, cell.apart
    if strong:
        batches = {other.setting.global_batch_size for other in cells}
        batch = f"global batch {cell.setting.global_batch_size}"
        kinds = [kind_of(other) for other in cells]
        if kinds.count(kind_of(cell)) == 1:  # else they accumulate otherwise
            apart = apart.removeprefix(cell.batch).removeprefix(", ")
    else:
        batches = {other.setting.batch_per_device for other in cells}
    batch = batch if len(batches) > 1 and batch not in apart else ""
    return ", ".join(word for word in (cell.name, batch, apart) if word)


def kind_of(cell: Cell) -> tuple[Any, ...]:
    """A cell but for its micro-batches."""
    setting = cell.setting
    return cell.name, setting.shape, setting.global_batch_size, setting.strategy_options


def look_of(cell: Cell) -> dict[str, Any]:
    """How its points are drawn: filled on one node, hollow on several nodes."""
    colour = COLOUR_OF.get(cell.setting.strategy.split("_")[0], "#56B4E9")
    return {
        "color": colour,
        "marker": LOOKS.get(cell.setting.strategy, ("x", "-"))[0],
        "markersize": 9 if cell.setting.activation_checkpointing else 6,
        "markerfacecolor": colour if cell.setting.nodes == 1 else "white",
    }


def spread_out(heights: list[float]) -> list[float]:
    """Ascending heights of names, each moved up until it is HEIGHT above the one below it, and then
    all down by half of what the highest has moved.
    """
    found = heights[:1]
    for height in heights[1:]:
        found.append(max(height, found[-1] + HEIGHT))
    return [height - (found[-1] - heights[-1]) / 2 for height in found]


def write_names(axes: Any, named: list[Named]) -> None:
    """Each name to the right of the axes, with a thin line from its point to it."""
    to_axes = axes.transData + axes.transAxes.inverted()
    named = sorted(named, key=lambda one: one[2])
    ends = [to_axes.transform((x, y)) for _, x, y, _ in named]
    heights = spread_out([end[1] for end in ends])
    for (name, *_, colour), end, height in zip(named, ends, heights, strict=True):
        axes.annotate(
            shorten(name),
            xy=end,
            xytext=(1.04, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkB": 4},
        )


# -------- efficiency


def draw_efficiency(points: list[Point], title: str, strong: bool) -> Any:
    """A bar at a point is the interval of the test. Of several shapes with as many devices, the
    line takes that with the fewest nodes.
    """
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point[0].devices, point[0].setting.nodes)):
        name = name_in(point[0], [cell for cell, _ in points], strong)
        lines.setdefault(name, []).append(point)
    telling = sorted(lines, key=lambda name: rank_line(lines[name]))[:MOST]
    counts = sorted({cell.devices for cell, _ in points})
    figure, axes = pyplot.subplots(figsize=(5.4, 4.2), layout="constrained")
    named: list[Named] = []
    for number, name in enumerate(name for name in lines if name in telling):
        # Side by side, so that the bars of several lines are seen.
        aside = 0.03 * (number - (len(telling) - 1) / 2)
        named.append(draw_line(axes, name, lines[name], counts, aside))
    left = len(lines) - len(telling)
    more = f"; {left} more lines in the table under Details" if left else ""
    axes.axhline(100, color="0.4", linewidth=1, zorder=0)
    highest = max(100 * one.efficiency for _, one in points)
    interval = max(100 * (one.high or 0) / cell.devices for cell, one in points)
    axes.set(title=title, xlabel=f"devices (hollow: several nodes){more}", ylabel="percent")
    top = max(110, 1.05 * highest, min(1.05 * interval, 200))
    axes.set(ylim=(0, top), xlim=(-0.4, len(counts) - 0.6))
    axes.set_xticks(range(len(counts)), map(str, counts))
    write_names(axes, named)
    return figure


def rank_line(points: list[Point]) -> tuple[int, float]:
    """Lines that reach the most devices come first, and of these the best."""
    last = points[-1][0]
    return -last.devices, last.cost


def draw_line(axes: Any, name: str, points: list[Point], counts: list[int], aside: float) -> Named:
    """Draw a line, and say where it ends."""
    on_line = {cell.devices: 100 * one.efficiency for cell, one in reversed(points)}
    places = [counts.index(devices) + aside for devices in sorted(on_line)]
    heights = [on_line[devices] for devices in sorted(on_line)]
    look, (_, dash) = look_of(points[0][0]), LOOKS.get(points[0][0].setting.strategy, ("x", "-"))
    axes.plot(places, heights, color=look["color"], linestyle=dash, linewidth=1.5)
    for cell, one in points:
        place, height = counts.index(cell.devices) + aside, 100 * one.efficiency
        axes.plot(place, height, linestyle="", **look_of(cell))
        if one.low and one.high:
            ends = 100 * one.low / cell.devices, 100 * one.high / cell.devices
            axes.vlines(place, *ends, color=look["color"], linewidth=1)
    return name, places[-1], heights[-1], look["color"]


# -------- what a strategy trades


def find_trade(workload: Workload) -> tuple[str, list[Cell]]:
    """In words the shape and the batch per device that most strategies have, of these those with
    the most devices; and the cells of which speed and memory are known, of each strategy the
    fastest. The baseline of this batch is one of them.
    """
    known = [
        cell
        for cell in workload.cells
        if cell.figures.samples_per_second and cell.figures.training_memory_mb
    ]
    places = {
        (cell.devices, cell.setting.shape, cell.setting.batch_per_device, cell.name)
        for cell in known
        if cell.devices > 1
    }
    counts = Counter(place[:3] for place in places)
    if not counts:
        return "", []
    most = max(counts, key=lambda place: (counts[place], *place[:2], place[2] or 0))
    _, shape, batch = most
    fastest: dict[str, Cell] = {}
    for cell in sorted(known, key=lambda cell: cell.cost):
        there = cell.setting.shape == shape or cell.is_baseline
        if there and cell.setting.batch_per_device == batch:
            fastest.setdefault(cell.name, cell)
    return f"{shape}, batch {batch}" if batch else shape, list(fastest.values())


def draw_trade(cells: list[Cell], title: str) -> Any:
    """A point for each strategy. Its memory is that of training alone, on the fullest device."""
    figure, axes = pyplot.subplots(figsize=(5.4, 4.2), layout="constrained")
    named: list[Named] = []
    for cell in cells[:MOST]:
        memory, speed = cell.figures.training_memory_mb, cell.figures.samples_per_second
        assert memory and speed
        axes.plot(memory, speed, linestyle="", **look_of(cell))
        more = " (one device)" if cell.is_baseline else ""
        named.append((cell.name + more, memory, speed, look_of(cell)["color"]))
    axes.set(title=f"{title}\n(up and to the left is better)", ylabel="samples per second")
    more = f"; {len(cells) - MOST} more in the table" if len(cells) > MOST else ""
    axes.set(xlabel=f"MB of each device for training alone{more}")
    axes.set_xlim(0, 1.05 * max(memory for _, memory, *_ in named))
    axes.set_ylim(0, 1.1 * max(speed for *_, speed, _ in named))
    write_names(axes, named)
    return figure
