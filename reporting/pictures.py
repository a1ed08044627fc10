"""The pictures of a report, as SVG: bars where there are one or two device counts, lines from three
on.

They have to be legible in grey and on a phone: bars carry their names and values, lines differ in
marker and dash. Legends are outside the axes. A picture has at most MOST entries: those on the most
devices, and of these the fastest; it says how many it leaves out, and the table has them.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy

from planning.facts import STRATEGIES
from planning.printing import own_file
from reporting.comparing import Cell, Comparison, Workload, quiet

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot, ticker  # noqa: E402  after the choice above

MOST = 12  # entries of a picture
WIDTH = 5.0  # inches
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

# Of the strategies in their order. A variant has the colour of its strategy. A larger marker means
# activation checkpointing. Colours: Okabe and Ito, https://jfly.uni-koeln.de/color/
COLOURS = {
    "baseline": "#000000",
    "dp": "#999999",
    "ddp": "#0072B2",
    "fsdp": "#D55E00",
    "hsdp": "#A6761D",
    "zero1": "#E69F00",
    "zero2": "#009E73",
    "zero3": "#CC79A7",
}
MARKERS = "ovs^<>p*DhPX"
DASHES: list[Any] = ["-", ":", "--", "-.", (0, (7, 2, 1, 2)), (0, (2, 2)), (0, (5, 2, 1, 2, 1, 2))]
DASHES += [(0, (5, 1)), (0, (3, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (1, 3))]
LOOKS = dict(zip(STRATEGIES, zip(MARKERS, DASHES, strict=True), strict=True))

LOSS_POINTS = 16  # of a curve: more steps than that are drawn as means, or noise hides the curves
LOSS_DASHES = ["-", "--", ":", "-."]  # by global batch

Bar = tuple[Cell, float, float, float]  # a cell, its value, and the ends of what is drawn across it


def style_of(cell: Cell) -> tuple[str, str, Any, int]:
    """Colour, marker, line and marker size, in points, of a cell's strategy."""
    strategy = cell.setting.strategy
    color = COLOURS.get(strategy.split("_")[0], "#56B4E9")
    marker, line = LOOKS.get(strategy, ("x", "-"))
    return color, marker, line, 9 if cell.setting.activation_checkpointing else 5


def most_telling(cells: list[Cell]) -> list[Cell]:
    """At most MOST of these cells, in their order."""
    ranked = sorted(cells, key=lambda cell: (not cell.is_baseline, -cell.devices, cell.seconds))
    return [cell for cell in cells if cell in ranked[:MOST]]


def add_legend(figure: Any, columns: int, left: int) -> None:
    """A legend below the axes, which says how much of the table the picture leaves out."""
    title = f"{left} more in the table under Details" if left > 0 else None
    figure.legend(loc="outside lower center", ncols=columns, title=title, title_fontsize=9)


def draw_workload(workload: Workload, folder: Path, suffix: str) -> dict[str, str]:
    """The pictures of one workload, their names with this suffix; returns {name: file}."""
    files = {}
    with quiet(), pyplot.rc_context(STYLE):  # A missing glyph is no matter: text stays text.
        figures = {
            "time": draw_time(workload),
            "speedup": draw_speedup(workload, "speedup", lambda cell: cell.weak or cell.by_hand),
            "speedup-strong": draw_speedup(
                workload, "speedup, global batch fixed", lambda cell: cell.strong
            ),
            "loss": draw_losses(workload),
        }
        for name, figure in figures.items():
            if figure:
                model = workload.values.get("model")
                title = f"{model[-40:]}\n" if model else ""
                figure.axes[0].set_title(title + figure.axes[0].get_title())
                files[name] = f"{name}{suffix}.svg"
                figure.savefig(own_file(folder / files[name]), metadata=NO_METADATA)
                pyplot.close(figure)
    return files


def draw_time(workload: Workload) -> Any:
    bars = [(cell, cell.seconds, cell.fastest, cell.slowest) for cell in workload.cells]
    return draw_bars_or_lines(bars, "seconds of training (less is better)", "{:,.2f}", False)


def draw_speedup(
    workload: Workload, title: str, comparison_of: Callable[[Cell], Comparison | None]
) -> Any:
    """None if there is no such comparison on several devices."""
    pairs = [(cell, comparison_of(cell)) for cell in workload.cells]
    bars = [
        (cell, one.speedup, one.low or one.speedup, one.high or one.speedup)
        for cell, one in pairs
        if one
    ]
    if all(cell.devices == 1 for cell, *_ in bars):
        return None
    return draw_bars_or_lines(bars, f"{title} (more is better)", "{:.2f}", True)


def draw_bars_or_lines(bars: list[Bar], title: str, form: str, ideal: bool) -> Any:
    draw = draw_bars if len({cell.devices for cell, *_ in bars}) < 3 else draw_lines
    return draw(bars, title, form, ideal)


def draw_bars(bars: list[Bar], title: str, form: str, ideal: bool) -> Any:
    """A bar for each cell, its value beside it, and a line from the lowest repeat to the highest,
    or over the interval of a speedup. Ticks mark the ideal: a speedup of as many times as there are
    devices.
    """
    kept = most_telling([cell for cell, *_ in bars])
    left = len(bars) - len(kept)
    bars = [bar for bar in bars if bar[0] in kept]
    names = [name_on_axis(cell) for cell in kept]
    height = 0.5 if any("\n" in name for name in names) else 0.34
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.6 + height * len(bars)), layout="constrained")
    places = range(len(bars))
    values = [value for _, value, *_ in bars]
    colors = [style_of(cell)[0] for cell in kept]
    axes.barh(places, values, color=colors, alpha=0.75, height=0.7)
    axes.hlines(
        places,
        [low for *_, low, _ in bars],
        [high for *_, high in bars],
        color="black",
        linewidth=1.2,
        label="the test's interval" if ideal else "from the fastest to the slowest repeat",
    )
    ends = [max(value, min(high, 2 * value)) for _, value, _, high in bars]
    if ideal:
        several = [place for place in places if kept[place].devices > 1]
        axes.vlines(
            [kept[place].devices for place in several],
            [place - 0.42 for place in several],
            [place + 0.42 for place in several],
            color="black",
            linestyle="--",
            linewidth=1.2,
            label="ideal: as many times as devices",
        )
        axes.axvline(1, color="0.4", linewidth=1, linestyle=":", label="1: one device")
        ends += [cell.devices for cell in kept]
    axes.set_xlim(0, 1.05 * max(ends))
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    add_legend(figure, 1, left)
    for place, value in zip(places, values, strict=True):  # right of the axes: nothing crosses it
        axes.annotate(
            form.format(value),
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
        )
    return figure


def name_on_axis(cell: Cell) -> str:
    """At most two lines of at most 36 characters."""
    name, *checkpointing = cell.name.split(", activation ")
    first = f"{shorten(name, 26)}, {cell.setting.shape}"
    more = [*(f"activation {words}" for words in checkpointing), cell.apart]
    second = shorten(", ".join(text for text in more if text), 36)
    return f"{first}\n{second}" if second else first


def shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def group_lines(bars: list[Bar]) -> dict[str, list[Bar]]:
    """The points of each line, by its name: a strategy and its batch."""
    batches = {cell.setting.batch_per_device for cell, *_ in bars}
    lines: dict[str, list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: (bar[0].devices, bar[0].setting.nodes)):
        batch = f", {bar[0].batch}" if len(batches) > 1 else ""
        lines.setdefault(f"{bar[0].name}{batch}", []).append(bar)
    return lines


def rank_line(points: list[Bar]) -> tuple[bool, int, float]:
    """Baselines come first, then lines that reach the most devices, and of these the best."""
    last = points[-1][0]
    return not last.is_baseline, -last.devices, last.seconds


def draw_lines(bars: list[Bar], title: str, form: str, ideal: bool) -> Any:
    """A line for each strategy and batch over the devices: filled markers on one node, hollow ones
    on several nodes; repeats, or the interval of a speedup, as a band. Of several shapes with as
    many devices, the line takes that with the fewest nodes.
    """
    lines = group_lines(bars)
    telling = sorted(lines, key=lambda name: rank_line(lines[name]))[:MOST]
    kept = {name: points for name, points in lines.items() if name in telling}
    columns = 2 if max(map(len, kept)) < 24 else 1
    figure, axes = pyplot.subplots(
        figsize=(WIDTH, 3.4 + 0.22 * math.ceil(len(kept) / columns)), layout="constrained"
    )
    batches = sorted({bar[0].setting.batch_per_device or 0 for bar in bars})
    for name, points in kept.items():
        thicker = batches.index(points[0][0].setting.batch_per_device or 0)
        draw_line(axes, shorten(name, 50), points, 1.2 + thicker)
    finish_lines(axes, [bar for points in kept.values() for bar in points], ideal)
    hollow = any(bar[0].setting.nodes > 1 for bar in bars)
    axes.set(xlabel="devices (hollow: several nodes)" if hollow else "devices", title=title)
    add_legend(figure, columns, len(lines) - len(kept))
    return figure


def draw_line(axes: Any, name: str, points: list[Bar], width: float) -> None:
    """One strategy; `points` are in the order of devices and nodes. A thicker line is of a larger
    batch.
    """
    color, marker, line, size = style_of(points[0][0])
    line_points = {bar[0].devices: bar for bar in reversed(points)}
    on_line = [line_points[count] for count in sorted(line_points)]
    counts, values = [bar[0].devices for bar in on_line], [bar[1] for bar in on_line]
    shape = {"color": color, "marker": marker, "markersize": size}
    whole = on_line[0][0].setting.nodes == 1
    fill = "full" if whole else "none"
    axes.plot(counts, values, linewidth=width, linestyle=line, label=name, fillstyle=fill, **shape)
    for cell, value, *_ in points:
        if whole and cell.setting.nodes > 1:
            axes.plot(cell.devices, value, linestyle="", markerfacecolor="white", **shape)
    lows, highs = [low for *_, low, _ in on_line], [high for *_, high in on_line]
    axes.fill_between(counts, lows, highs, color=color, alpha=0.2, linewidth=0)


def finish_lines(axes: Any, bars: list[Bar], ideal: bool) -> None:
    """The scales of both axes, and the ideal speedup."""
    counts = sorted({cell.devices for cell, *_ in bars})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, counts)
    lowest, highest = min(value for _, value, *_ in bars), max(value for _, value, *_ in bars)
    if ideal:
        axes.plot(counts, counts, color="0.6", linewidth=1, label="ideal", zorder=0)
        lowest, highest = min(1, lowest), max(counts[-1], highest)
    axes.set_yscale("log", base=2)  # on two logarithmic axes the ideal is a straight line
    powers = range(math.floor(math.log2(0.8 * lowest)), math.ceil(math.log2(1.25 * highest)) + 1)
    axes.set_yticks([2.0**power for power in powers])
    axes.set_ylim(0.8 * lowest, 1.25 * highest)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def draw_losses(workload: Workload) -> Any:
    """The training losses of each cell's median run over samples, as means over up to LOSS_POINTS
    pieces of the run: the colour is the strategy's, the dash tells global batches apart. None if
    there are none.
    """
    known = [cell for cell in workload.cells if cell.median.losses]
    cells = most_telling(known)
    if not cells:
        return None
    rows = math.ceil(len(cells) / 2)
    figure, axes = pyplot.subplots(figsize=(WIDTH, 3.4 + 0.2 * rows), layout="constrained")
    batches = sorted({cell.setting.global_batch_size or 0 for cell in cells})
    for number, cell in enumerate(cells):
        color, marker, _, size = style_of(cell)
        history = cell.median.losses
        batch = cell.setting.global_batch_size or 0
        width = math.ceil(len(history) / LOSS_POINTS)  # of a piece, in steps
        pieces = [numpy.mean(history[i : i + width], axis=0) for i in range(0, len(history), width)]
        steps, losses = zip(*pieces, strict=True)
        gap = max(1, len(steps) // 4)
        axes.plot(
            [step * batch for step in steps],
            losses,
            color=color,
            linewidth=1,
            marker=marker,
            markersize=size - 1,
            markevery=(number % gap, gap),
            linestyle=LOSS_DASHES[batches.index(batch) % len(LOSS_DASHES)],
            label=shorten(f"{cell.name}, {cell.setting.shape}, batch {batch}", 60),
        )
    axes.set(xlabel="samples trained on", title="training loss (less is better)")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    add_legend(figure, 2 if len(cells) > 3 else 1, len(known) - len(cells))
    return figure
