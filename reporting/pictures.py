"""The pictures of a report: bars where there are one or two device counts, lines from three on.

They have to be legible in grey and at half the width of a page: bars carry their names and values,
stacked parts differ in hatching, lines in marker and dash.
"""

import math

import matplotlib
import numpy
import pandas as pd

matplotlib.use("Agg")  # files only, no screen
from matplotlib import pyplot, ticker  # noqa: E402  after the choice above

FONTS = {"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 9, "figure.dpi": 150}

# Colour, marker and line of a strategy; a variant has the colour of its strategy. A larger marker
# means activation checkpointing. Colours: Okabe and Ito, https://jfly.uni-koeln.de/color/
STYLES = {
    "baseline": ("#000000", "o", "-"),
    "dp": ("#999999", "v", ":"),
    "ddp": ("#0072B2", "s", "--"),
    "zero1": ("#E69F00", "*", (0, (5, 1))),
    "fsdp": ("#D55E00", "^", "-."),
    "fsdp_keep": ("#D55E00", "<", (0, (7, 2, 1, 2))),
    "fsdp_offload": ("#D55E00", ">", (0, (2, 2))),
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


def style_of(cell):
    """Colour, marker, line and marker size, in points, of a cell's strategy."""
    color, marker, line = STYLES.get(cell["strategy"], ("#56B4E9", "x", "-"))
    return color, marker, line, 9 if cell["activation_checkpointing"] else 5


def plot_work(group, parts, held, folder, suffix):
    """The pictures of one workload; returns {name: file}. `parts` says where a step's time went,
    `held` what the formulas say of memory, both with a row for each cell that is known.
    """
    model, files = group["model"].iloc[0], {}
    with pyplot.rc_context(FONTS):
        figures = dict(plot_figures(group))
        figures["step"] = plot_parts(
            group,
            parts.drop(columns="step") * 1000,
            parts["step"] * 1000,
            "ms of a step (less is better)",
            "{:.1f}",
            "the measured step",
        )
        figures["memory"] = plot_parts(
            group,
            held / 1e6,
            group["training_memory_mb"],
            "MB of a rank by formula (less is better)",
            "{:,.4g}",
            "measured in training",
        )
        figures["loss"] = plot_losses(group, "samples trained on")
        figures["loss-seconds"] = plot_losses(group, "seconds of training")
        for name, figure in figures.items():
            if figure:
                title = "" if pd.isna(model) else f"{model}\n"
                figure.axes[0].set_title(title + figure.axes[0].get_title())
                files[name] = f"{name}{suffix}.png"
                figure.savefig(folder / files[name])
                pyplot.close(figure)
    return files


def plot_figures(group):
    """(name, figure) of each figure of the table that is known."""
    panels = [
        (
            "time",
            "seconds",
            ("fastest", "slowest"),
            "seconds of training (less is better)",
            "{:,.2f}",
        ),
        (
            "speedup",
            "speedup",
            ("speedup_low", "speedup_high"),
            "speedup over one device (more is better)",
            "{:.2f}",
        ),
        (
            "efficiency",
            "efficiency",
            None,
            "efficiency = speedup / devices (more is better)",
            "{:.0%}",
        ),
    ]
    for name, column, band, title, form in panels:
        known = group[group[column].notna()]
        if len(known) and set(known["devices"]) != {1} or name == "time":
            draw = plot_bars if known["devices"].nunique() < 3 else plot_lines
            yield name, draw(known, column, band, title, form)


def plot_bars(cells, column, band, title, form):
    """A bar for each cell, its value beside it, and a line from the lowest repeat to the highest.
    Ticks mark the ideal: a speedup of as many times as there are devices.
    """
    figure, axes = pyplot.subplots(figsize=(5, 1.4 + 0.34 * len(cells)), layout="constrained")
    places, values = range(len(cells)), list(cells[column])
    colors = [style_of(cell)[0] for _, cell in cells.iterrows()]
    axes.barh(places, values, color=colors, alpha=0.75, height=0.7)
    ends = cells[[column, *(band or ())]].max(axis=1)
    if band:
        axes.hlines(
            places,
            cells[band[0]],
            cells[band[1]],
            color="black",
            linewidth=1.2,
            label="from the lowest to the highest repeat",
        )
    if column in ("speedup", "efficiency"):
        ideal = cells["devices"] if column == "speedup" else cells["devices"] * 0 + 1
        several = [place for place in places if cells["devices"].iloc[place] > 1]
        axes.vlines(
            ideal.iloc[several],
            [place - 0.42 for place in several],
            [place + 0.42 for place in several],
            color="black",
            linestyle="--",
            linewidth=1.2,
            label="ideal: as many times as devices, 100 %",
        )
        ends = ends.combine(ideal, max)
    if column == "speedup":
        axes.axvline(1, color="0.4", linewidth=1, linestyle=":", label="1: one device")
    axes.set_xlim(0, 1.05 * ends.max())
    finish_bars(figure, axes, cells, places, title)
    write_numbers(axes, places, values, form)
    if column == "efficiency":
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1))
    return figure


def finish_bars(figure, axes, cells, places, title):
    """The names of the cells, ticks, title and legend."""
    axes.set_yticks(places, cells["shown"] + ", " + cells["shape"])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=1 + (len(axes.containers) > 1))


def write_numbers(axes, places, values, form):
    """The numbers, in a column right of the axes, where nothing crosses them."""
    for place, value in zip(places, values, strict=True):
        if value == value:
            axes.annotate(
                form.format(value),
                (1.01, place),
                xycoords=("axes fraction", "data"),
                va="center",
                annotation_clip=False,
            )


def plot_lines(cells, column, band, title, form):
    """A line for each strategy and kind of comparison over the devices: filled markers on one node,
    half filled if the global batch is fixed, hollow on several nodes; repeats as a band.
    """
    figure, axes = pyplot.subplots(figsize=(5, 3.6), layout="constrained")
    for shown, alike in cells.groupby("shown", sort=False):
        color, marker, line, size = style_of(alike.iloc[0])
        kinds = [alike["nodes"] > 1, alike["fixed"].fillna("")]
        for (many, fixed), points in alike.sort_values("devices").groupby(kinds, sort=False):
            strong = fixed == "global batch"
            label = ", ".join([shown] + ["several nodes"] * many + ["global batch fixed"] * strong)
            axes.plot(
                points["devices"],
                points[column],
                color=color,
                marker=marker,
                linewidth=1.2,
                linestyle=":" if strong else line,
                markersize=size,
                label=label,
                markerfacecoloralt="white",
                fillstyle="none" if many else "left" if strong else "full",
            )
            if band:
                axes.fill_between(
                    points["devices"],
                    points[band[0]],
                    points[band[1]],
                    color=color,
                    alpha=0.2,
                    linewidth=0,
                )
    counts = sorted(set(cells["devices"]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, counts)
    axes.minorticks_off()
    axes.set(xlabel="devices", title=title)
    if column in ("speedup", "efficiency"):
        ideal = counts if column == "speedup" else [1] * len(counts)
        axes.plot(counts, ideal, color="0.6", linewidth=1, label="ideal", zorder=0)
    if column == "speedup":  # on two logarithmic axes the ideal is a straight line
        axes.set_yscale("log", base=2)
        axes.set_yticks([2.0**power for power in range(-8, 12)])
        highest = max(counts[-1], cells[band[1]].max())
        axes.set_ylim(0.8 * min(1, cells[band[0]].min()), 1.25 * highest)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.legend()
    return figure


def plot_parts(group, parts, known, title, form, name_known):
    """A stacked bar for each cell of `parts`, from zero, and its sum. A part below zero is not
    drawn. Below each bar is one of what is `known` by measuring. None without cells.
    """
    parts = parts.dropna(how="all").clip(lower=0)
    if not len(parts):
        return None
    cells, known, places = group.loc[parts.index], known.loc[parts.index], range(len(parts))
    figure, axes = pyplot.subplots(figsize=(5, 1.9 + 0.5 * len(cells)), layout="constrained")
    below, right = [place + 0.38 for place in places], parts.iloc[:, 0].fillna(0) * 0.0
    for (name, values), (color, hatch) in zip(parts.items(), SHADES, strict=False):
        if values.sum():
            axes.barh(
                places,
                values.fillna(0),
                left=right,
                color=color,
                hatch=hatch,
                height=0.4,
                edgecolor="0.2",
                linewidth=0.4,
                label=name,
            )
            right = right + values.fillna(0)
    if known.notna().any():
        axes.barh(below, known, height=0.3, color="white", edgecolor="black", label=name_known)
    axes.set_xlim(0, 1.05 * max(right.max(), known.fillna(0).max()))
    finish_bars(figure, axes, cells, places, title)
    write_numbers(axes, places, right, form)
    write_numbers(axes, below, known, form)
    return figure


def plot_losses(group, over):
    """The training losses over samples or seconds, as means over up to LOSS_POINTS pieces of a run:
    the colour is the strategy's, the dash tells global batches apart. None if there are none.
    """
    curves = [
        (cell, history)
        for _, cell in group.iterrows()
        for history in cell["losses"]
        if isinstance(history, list) and history
    ]
    if not curves:
        return None
    figure, axes = pyplot.subplots(figsize=(5, 4.4), layout="constrained")
    batches, labels = sorted({cell["global_batch_size"] for cell, _ in curves}), set()
    for number, (cell, history) in enumerate(curves):
        color, marker, _, size = style_of(cell)
        label = f"{cell['shown']}, {cell['shape']}, global batch {cell['global_batch_size']:.0f}"
        width = math.ceil(len(history) / LOSS_POINTS)  # of a piece, in steps
        pieces = [numpy.mean(history[i : i + width], axis=0) for i in range(0, len(history), width)]
        steps, losses, seconds = zip(*pieces, strict=True)
        samples = [step * cell["global_batch_size"] for step in steps]
        gap = max(1, len(steps) // 6)
        axes.plot(
            seconds if over.startswith("seconds") else samples,
            losses,
            color=color,
            linewidth=1,
            marker=marker,
            markersize=size - 1,
            markevery=(number % gap, gap),
            linestyle=DASHES[batches.index(cell["global_batch_size"]) % len(DASHES)],
            label=None if label in labels else label,
        )
        labels.add(label)
    axes.set(xlabel=over, title="training loss (less is better)")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    figure.legend(loc="outside lower center", ncols=2 if len(labels) > 3 else 1, fontsize=8)
    return figure
