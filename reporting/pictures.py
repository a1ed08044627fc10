"""The pictures of a report, as SVG: bars where there are one or two device counts, lines from three
on.

They have to be legible in grey and on a phone: bars carry their names and values, stacked parts
differ in hatching, lines in marker and dash. Legends are outside the axes. A picture has at most
MOST entries: those on the most devices, and of these the fastest; the table names the rest.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy

from reporting.comparing import Cell, Comparison, Workload
from reporting.splitting import PARTS, Split

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot, ticker  # noqa: E402  after the choice above

MOST = 12  # entries of a picture
WIDTH = 5.0  # inches
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 11,
    "legend.fontsize": 9,
    "svg.fonttype": "path",  # the same in every browser
    "svg.hashsalt": "report",  # the same file from the same records
}
NO_METADATA = {"Date": None, "Creator": None}

# Colour, marker and line of a strategy; a variant has the colour of its strategy. A larger marker
# means activation checkpointing. Colours: Okabe and Ito, https://jfly.uni-koeln.de/color/
STYLES: dict[str, tuple[str, str, Any]] = {
    "baseline": ("#000000", "o", "-"),
    "dp": ("#999999", "v", ":"),
    "ddp": ("#0072B2", "s", "--"),
    "zero1": ("#E69F00", "*", (0, (5, 1))),
    "fsdp": ("#D55E00", "^", "-."),
    "fsdp_keep": ("#D55E00", "<", (0, (7, 2, 1, 2))),
    "fsdp_offload": ("#D55E00", ">", (0, (2, 2))),
    "hsdp": ("#A6761D", "p", (0, (5, 2, 1, 2, 1, 2))),
    "zero2": ("#009E73", "D", (0, (3, 1, 1, 1))),
    "zero2_offload": ("#009E73", "h", (0, (3, 1, 1, 1, 1, 1))),
    "zero3": ("#CC79A7", "P", (0, (1, 1))),
    "zero3_offload": ("#CC79A7", "X", (0, (1, 3))),
}

# Lightness and hatching of stacked parts, in their order.
SHADES = [
    ("#1b4965", ""),
    ("#b3dcf2", "//"),
    ("#e07a5f", "\\\\"),
    ("#f6d5cb", "\\\\\\\\"),
    ("#f2cc8f", "xx"),
    ("#81b29a", "++"),
    ("#cae9ff", ".."),
    ("#f4f4f4", ""),
]

LOSS_POINTS = 60  # of a curve: more steps than that are drawn as means, or noise hides the curves
DASHES = ["-", "--", ":", "-."]  # of losses, by global batch
ENOUGH = 0.3  # of a measured peak: where formulas know less of it, no bar is drawn

Bar = tuple[Cell, float, float, float]  # a cell, its value, and its lowest and highest repeat
Held = dict[str, float]  # bytes of a rank, by formula


def style_of(cell: Cell) -> tuple[str, str, Any, int]:
    """Colour, marker, line and marker size, in points, of a cell's strategy."""
    color, marker, line = STYLES.get(cell.setting.strategy, ("#56B4E9", "x", "-"))
    return color, marker, line, 9 if cell.setting.activation_checkpointing else 5


def most_telling(cells: list[Cell]) -> list[Cell]:
    """At most MOST of these cells, in their order."""
    ranked = sorted(cells, key=lambda cell: (not cell.is_baseline, -cell.devices, cell.seconds))
    kept = ranked[:MOST]
    return [cell for cell in cells if cell in kept]


def add_legend(figure: Any, columns: int, left: int) -> None:
    """A legend below the axes, which says how much of the table the picture leaves out."""
    title = f"{left} more in the table under Details" if left > 0 else None
    figure.legend(loc="outside lower center", ncols=columns, title=title, title_fontsize=9)


def plot_work(
    workload: Workload, splits: list[Split], held: dict[Cell, Held], folder: Path, suffix: str
) -> dict[str, str]:
    """The pictures of one workload; returns {name: file}. `held` is what the formulas say of a
    cell's memory.
    """
    files = {}
    with pyplot.rc_context(STYLE):
        figures = {
            "time": plot_time(workload),
            "speedup": plot_speedup(workload, "speedup", lambda cell: cell.weak or cell.by_hand),
            "speedup-strong": plot_speedup(
                workload, "speedup, global batch fixed", lambda cell: cell.strong
            ),
            "step": plot_steps(splits),
            "memory": plot_memory(workload, held),
            "loss": plot_losses(workload, "samples trained on"),
            "loss-seconds": plot_losses(workload, "seconds of training"),
        }
        for name, figure in figures.items():
            if figure:
                title = f"{workload.work.model}\n" if workload.work.model else ""
                figure.axes[0].set_title(title + figure.axes[0].get_title())
                files[name] = f"{name}{suffix}.svg"
                figure.savefig(folder / files[name], metadata=NO_METADATA)
                pyplot.close(figure)
    return files


def plot_time(workload: Workload) -> Any:
    bars = [(cell, cell.seconds, cell.fastest, cell.slowest) for cell in workload.cells]
    return plot_bars_or_lines(bars, "seconds of training (less is better)", "{:,.2f}", False)


def plot_speedup(
    workload: Workload, title: str, comparison_of: Callable[[Cell], Comparison | None]
) -> Any:
    """None if there is no such comparison on several devices."""
    pairs = [(cell, comparison_of(cell)) for cell in workload.cells]
    bars = [(cell, one.speedup, one.low, one.high) for cell, one in pairs if one]
    if all(cell.devices == 1 for cell, *_ in bars):
        return None
    return plot_bars_or_lines(bars, f"{title} (more is better)", "{:.2f}", True)


def plot_bars_or_lines(bars: list[Bar], title: str, form: str, ideal: bool) -> Any:
    draw = plot_bars if len({cell.devices for cell, *_ in bars}) < 3 else plot_lines
    return draw(bars, title, form, ideal)


def plot_bars(bars: list[Bar], title: str, form: str, ideal: bool) -> Any:
    """A bar for each cell, its value beside it, and a line from the lowest repeat to the highest.
    Ticks mark the ideal: a speedup of as many times as there are devices.
    """
    kept = most_telling([cell for cell, *_ in bars])
    left = len(bars) - len(kept)
    bars = [bar for bar in bars if bar[0] in kept]
    height = 0.5 if any(cell.apart for cell in kept) else 0.34  # names of two lines, or of one
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
        label="from the lowest to the highest repeat",
    )
    ends = [max(value, high) for _, value, _, high in bars]
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
    finish_bars(figure, axes, kept, title, left)
    write_numbers(axes, places, values, form)
    return figure


def finish_bars(figure: Any, axes: Any, cells: list[Cell], title: str, left: int) -> None:
    """The names of the cells, ticks, title and legend."""
    axes.set_yticks(range(len(cells)), [name_on_axis(cell) for cell in cells])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    add_legend(figure, 2 if len(axes.containers) > 1 else 1, left)


def name_on_axis(cell: Cell) -> str:
    apart = f"\n{cell.apart}" if cell.apart else ""
    return f"{cell.short}, {cell.setting.shape}{apart}"


def write_numbers(axes: Any, places: Any, values: Sequence[float | None], form: str) -> None:
    """The numbers, in a column right of the axes, where nothing crosses them."""
    for place, value in zip(places, values, strict=True):
        if value is not None:
            axes.annotate(
                form.format(value),
                (1.01, place),
                xycoords=("axes fraction", "data"),
                va="center",
                annotation_clip=False,
            )


def group_lines(bars: list[Bar]) -> dict[str, list[Bar]]:
    """The points of each line, by its name: a strategy and its batch."""
    batches = {cell.setting.batch_per_device for cell, *_ in bars}
    lines: dict[str, list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: (bar[0].devices, bar[0].setting.nodes)):
        batch = f", {bar[0].batch}" if len(batches) > 1 else ""
        lines.setdefault(f"{bar[0].short}{batch}", []).append(bar)
    return lines


def rank_line(points: list[Bar]) -> tuple[bool, int, float]:
    """Baselines come first, then lines that reach the most devices, and of these the best."""
    last = points[-1][0]
    return not last.is_baseline, -last.devices, last.seconds


def plot_lines(bars: list[Bar], title: str, form: str, ideal: bool) -> Any:
    """A line for each strategy and batch over the devices: filled markers on one node, hollow ones
    on several nodes; repeats as a band. Of several shapes with as many devices, the line takes that
    with the fewest nodes.
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
        draw_line(axes, name, points, 1.2 + thicker)
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
    lowest, highest = min(low for *_, low, _ in bars), max(high for *_, high in bars)
    if ideal:
        axes.plot(counts, counts, color="0.6", linewidth=1, label="ideal", zorder=0)
        lowest, highest = min(1, lowest), max(counts[-1], highest)
    axes.set_yscale("log", base=2)  # on two logarithmic axes the ideal is a straight line
    powers = range(math.floor(math.log2(0.8 * lowest)), math.ceil(math.log2(1.25 * highest)) + 1)
    axes.set_yticks([2.0**power for power in powers])
    axes.set_ylim(0.8 * lowest, 1.25 * highest)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def plot_steps(splits: list[Split]) -> Any:
    """Where the step of each cell went, in ms. None without cells."""
    parts = [(one.cell, {k: 1000 * v for k, v in one.parts.items()}) for one in splits]
    known = {one.cell: 1000 * one.step for one in splits}
    title = "ms of a step (less is better)"
    return plot_parts(parts, known, title, "{:.1f}", "the measured step")


def memory_is_known(cell: Cell, held: Held) -> bool:
    """Whether the formulas explain enough of a cell's measured memory."""
    measured = cell.figures.training_memory_mb
    return bool(measured and held and sum(held.values()) >= ENOUGH * measured * 1e6)


def plot_memory(workload: Workload, held: dict[Cell, Held]) -> Any:
    """What a rank holds by formula, in MB, of the cells of which formulas know enough."""
    cells = [cell for cell in workload.cells if memory_is_known(cell, held.get(cell, {}))]
    parts = [(cell, {k: v / 1e6 for k, v in held[cell].items()}) for cell in cells]
    known = {cell: cell.figures.training_memory_mb for cell in cells}
    title = "MB of a rank by formula (less is better)"
    return plot_parts(parts, known, title, "{:,.4g}", "measured in training")


def plot_parts(
    parts: list[tuple[Cell, dict[str, float]]],
    known: dict[Cell, Any],
    title: str,
    form: str,
    name_known: str,
) -> Any:
    """A stacked bar for each cell, from zero, and its sum. A part below zero is not drawn. Below
    each bar is one of what is `known` by measuring. None without cells.
    """
    kept = most_telling([cell for cell, _ in parts])
    left = len(parts) - len(kept)
    parts = [one for one in parts if one[0] in kept]
    if not kept:
        return None
    figure, axes = pyplot.subplots(figsize=(WIDTH, 2.1 + 0.5 * len(kept)), layout="constrained")
    places = range(len(kept))
    right = [0.0] * len(kept)
    names = list(dict.fromkeys(name for _, sizes in parts for name in sizes))
    shades = dict(zip(names_in_order(names), SHADES, strict=False))
    for name, (color, hatch) in shades.items():
        sizes = [max(0.0, sizes.get(name, 0.0)) for _, sizes in parts]
        if sum(sizes):
            axes.barh(
                places,
                sizes,
                left=right,
                color=color,
                hatch=hatch,
                height=0.4,
                edgecolor="0.2",
                linewidth=0.4,
                label=name,
            )
            right = [start + size for start, size in zip(right, sizes, strict=True)]
    below, measured = [place + 0.38 for place in places], [known[cell] for cell in kept]
    widths = [value or 0.0 for value in measured]
    axes.barh(below, widths, height=0.3, color="white", edgecolor="black", label=name_known)
    axes.set_xlim(0, 1.05 * max([*right, *widths]))
    finish_bars(figure, axes, kept, title, left)
    write_numbers(axes, places, [*right], form)
    write_numbers(axes, below, measured, form)
    return figure


def names_in_order(names: list[str]) -> list[str]:
    """The parts of a step in the order of PARTS; other parts as they come."""
    order = {name: place for place, name in enumerate(PARTS)}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def plot_losses(workload: Workload, over: str) -> Any:
    """The training losses of each cell's median run over samples or seconds, as means over up to
    LOSS_POINTS pieces of the run: the colour is the strategy's, the dash tells global batches
    apart. None if there are none.
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
        steps, losses, seconds = zip(*pieces, strict=True)
        gap = max(1, len(steps) // 6)
        axes.plot(
            seconds if over.startswith("seconds") else [step * batch for step in steps],
            losses,
            color=color,
            linewidth=1,
            marker=marker,
            markersize=size - 1,
            markevery=(number % gap, gap),
            linestyle=DASHES[batches.index(batch) % len(DASHES)],
            label=f"{cell.short}, {cell.setting.shape}, batch {batch}",
        )
    axes.set(xlabel=over, title="training loss (less is better)")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    add_legend(figure, 2 if len(cells) > 3 else 1, len(known) - len(cells))
    return figure
