"""The report as Markdown, the answer first, then the details; as one HTML file; and as CSV."""

import base64
import csv
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import markdown

from common.printing import markdown_table, printable
from common.strategies import FAMILIES, label_of
from reporting.answer import sentences
from reporting.comparing import (
    Cell,
    Comparison,
    Workload,
    find_differences,
    order_of,
)
from reporting.records import Run

HERE = Path(__file__).parent
WIDE = 6  # strategies in a table of the first page; more of them make another table


# -------- Markdown


def plain(text: Any) -> str:
    """A text as Markdown and HTML show it, whatever characters it has."""
    escaped = html.escape(printable(text), quote=False)
    return re.sub(r"[\\`*\[\]|!~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", escaped)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table; what is not known is blank, and so a column of which nothing is known is
    left out.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    cells = [[plain("" if row.get(name) is None else row[name]) for name in known] for row in rows]
    return str(markdown_table([[plain(name) for name in known], *cells]))


def show(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def as_time_prints(seconds: float) -> str:
    """118.544 as 1m58.544s."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 60000}m{milliseconds % 60000 / 1000:.3f}s"


def title(workload: Workload, workloads: list[Workload]) -> str:
    """A workload in a few words: model, data, and in what others with the same two differ."""
    values = workload.values
    names = ("model", "dataset")
    twins = [
        one
        for one in workloads
        if [one.values.get(name) for name in names] == [values.get(name) for name in names]
    ]
    known = [str(values[name]) for name in names if values.get(name)]
    head = " on ".join(known) or values["script"]
    return plain(", ".join([head, *in_words(values, differing(twins))]))


def differing(workloads: list[Workload]) -> list[str]:
    """The names in which these workloads differ."""
    return find_differences([workload.values for workload in workloads])


def in_words(values: dict[str, Any], names: Iterable[str]) -> list[str]:
    """What a workload has of these names, as texts such as "threads 1"."""
    known = [(name, values.get(name)) for name in names]
    return [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in known
        if value is not None
    ]


def write_page(
    workloads: list[Workload],
    pictures: list[dict[str, str]],
    left_out: list[str],
) -> str:
    """The report. `pictures` are those of each workload, {name: file}."""
    first, more = ["# Report"], ["# Details"]
    if len(workloads) > 1:
        names = ", ".join(map(plain, differing(workloads)))
        first.append(
            f"These are {len(workloads)} workloads, never compared with each other; they "
            f"differ in {names}."
        )
    for workload, files in zip(workloads, pictures, strict=True):
        heading = f"## {title(workload, workloads)}"
        first += [heading, *first_page(workload, files)]
        more += [heading, *details(workload)]
    if left_out:
        more += ["## Not in the tables", "\n".join(f"- {plain(line)}" for line in left_out)]
    how_to_read = (HERE / "how-to-read.md").read_text(encoding="utf-8").rstrip()
    blocks = [*first, *more, "## How to read the tables", how_to_read]
    return "\n\n".join(block for block in blocks if block) + "\n"


# -------- the first page


def first_page(workload: Workload, files: dict[str, str]) -> Iterator[str]:
    """What is to be known first of a workload: sentences, small tables, and pictures."""
    yield plain(" ".join(sentences(workload)))
    yield from scaling_tables(workload)
    yield " ".join(f"![{name}]({file})" for name, file in files.items())


# The comparison, what its cells have in common, and the caption of their table.
TABLES = (
    (
        "weak",
        "batch_per_device",
        "**Weak scaling**, {} samples per device and step: time of training, speedup and "
        "efficiency against the baseline with the same batch per device.",
    ),
    (
        "strong",
        "global_batch_size",
        "**Strong scaling**, {} samples per step in all: time of training, speedup and "
        "efficiency against the baseline with the same global batch.",
    ),
    ("by_hand", "batch_per_device", "Time, speedup and efficiency:"),
    (
        "comparison",
        "batch_per_device",
        "Time of training without a baseline, {} samples per device and step:",
    ),
)


def scaling_tables(workload: Workload) -> Iterator[str]:
    """A table for each batch per device (weak scaling), for each global batch (strong scaling), and
    for the cells that are compared with nothing. Shapes without a result are in the first one.
    """
    known = {(cell.setting.strategy, cell.setting.shape) for cell in workload.cells}
    lost = [run for run in workload.lost if (run.setting.strategy, run.setting.shape) not in known]
    for kind, common, caption in TABLES:
        groups: dict[int | None, list[tuple[Cell, Comparison | None]]] = {}
        for cell in workload.cells:
            one = getattr(cell, kind)
            if bool(one) != (kind == "comparison"):
                batch = getattr(cell.setting, common)
                groups.setdefault(batch, []).append((cell, one))
        for batch, pairs in sorted(groups.items(), key=lambda group: group[0] or 0):
            if kind != "strong" or any(cell.devices > 1 for cell, _ in pairs):
                words = caption.format(batch).replace(", None samples per device and step", "")
                yield from shape_tables(words, pairs, lost)


Place = tuple[int, int, int]  # nodes, GPUs of each, global batch or 0


def shape_tables(
    caption: str, pairs: Sequence[tuple[Cell, Comparison | None]], lost: list[Run]
) -> Iterator[str]:
    """Rows are shapes with their global batch, columns strategies. The entries of `lost` are taken
    out of it as they are shown. Nothing if only baselines are known.
    """
    found: dict[tuple[str, Place], list[str]] = {}
    order: dict[str, int] = {}  # of the columns
    for cell, one in sorted(pairs, key=lambda pair: pair[0].cost):
        gain = f", {one.speedup:.2f}×, {100 * one.efficiency:.0f} %" if one else ""
        if not cell.is_baseline:
            setting = cell.setting
            place = (setting.nodes, setting.gpus_per_node, setting.global_batch_size or 0)
            found.setdefault((cell.name, place), []).append(f"{cell.seconds:.1f} s{gain}")
            order[cell.name] = order_of(cell)[0]
    if not found:
        return
    for run in lost:
        shape = run.setting.nodes, run.setting.gpus_per_node
        place = min((place for _, place in found if place[:2] == shape), default=(*shape, 0))
        name = label_of(run.setting.strategy)
        found.setdefault((name, place), ["no result"])
        order.setdefault(name, len(FAMILIES))
    lost.clear()
    places = sorted({place for _, place in found}, key=lambda it: (it[0] * it[1], it[0], it[2]))
    names = sorted(order, key=lambda name: (order[name], name))
    samples = [cell.figures.samples_trained or 0 for cell, one in pairs if one]
    if samples and min(samples) < 0.99 * max(samples):
        caption += " They trained on unlike numbers of samples: a speedup is that of one sample."
    yield caption
    for first in range(0, len(names), WIDE):
        rows = []
        for place in places:
            row = {"nodes x devices": f"{place[0]} x {place[1]}", "global batch": place[2] or None}
            for name in names[first : first + WIDE]:
                cells = found.get((name, place), [""])
                # Several differ in micro-batches or options: the first is the fastest.
                more = f" (fastest of {len(cells)})" if len(cells) > 1 else ""
                row[name] = cells[0] + more
            rows.append(row)
        yield table(rows)


# -------- the details


def details(workload: Workload) -> Iterator[str]:
    """All that is known of one workload, as sections of Markdown."""
    values = {name: value for name, value in workload.values.items() if value != "no"}
    yield f"All runs have in common: {plain(', '.join(in_words(values, values)))}."
    yield table([measured(cell) for cell in workload.cells])
    yield from describe_comparisons(workload)
    known = [cell for cell in workload.cells if cell.middle.ranks]
    if known:
        yield "The middle runs and their ranks, as `time` prints them:"
        yield table([row for cell in known for row in ranks_of(cell)])


def name_cell(cell: Cell) -> dict[str, Any]:
    """The columns that tell a cell from all others, with its batches."""
    setting = cell.setting
    times = setting.gradient_accumulation_steps or 1
    batch = setting.per_device_batch_size
    return {
        "strategy": cell.name,
        "variant": cell.apart,
        "nodes x devices": setting.shape,
        "batch per device": f"{batch} x {times}" if times > 1 else batch,
        "global batch": setting.global_batch_size,
    }


def measured(cell: Cell) -> dict[str, Any]:
    figures = cell.figures
    return name_cell(cell) | {
        "runs": len(cell.runs),
        "step in ms": show(cell.step_seconds and cell.step_seconds * 1000, "{:.2f}"),
        "samples/s": show(figures.samples_per_second, "{:,.1f}"),
        "seconds": f"{cell.seconds:.2f}",
        "fastest-slowest": f"{cell.fastest:.2f}-{cell.slowest:.2f}",
        "total": show(figures.total_seconds, "{:.1f}"),
        "last loss": show(figures.last_loss, "{:.6f}"),
        "peak MB": show(figures.peak_memory_mb, "{:,.0f}"),
        "MB of training alone": show(figures.training_memory_mb, "{:,.0f}"),
        "MFU": show(cell.mfu, "{:.0%}"),
        "note": cell.note,
        "middle run": cell.middle.name,
        "log": cell.middle.log,
    }


def describe_comparisons(workload: Workload) -> Iterator[str]:
    """A table for weak scaling, one for strong scaling, and one for times by hand."""
    for kind, caption in {
        "weak": "Weak scaling, the batch per device fixed:",
        "strong": "Strong scaling, the global batch fixed:",
        "by_hand": "By hand:",
    }.items():
        pairs = [(cell, getattr(cell, kind)) for cell in workload.cells]
        known = [(cell, one) for cell, one in pairs if one]
        if not known or kind == "strong" and all(cell.devices == 1 for cell, _ in known):
            continue
        yield caption
        yield table(
            [
                name_cell(cell)
                | costs(cell, one.baseline)
                | {
                    "speedup": f"{one.speedup:.2f}",
                    "from-to": one.low and f"{one.low:.2f}-{one.high:.2f}",
                    "efficiency": f"{one.efficiency:.0%}",
                    "margin": show(workload.margin(cell, one.baseline), "{:.1%}"),
                    "sure": one.sure,
                }
                for cell, one in known
            ]
        )
    without = [cell for cell in workload.cells if cell.comparison is None]
    if without and len(without) < len(workload.cells):
        yield (
            "Cells that are in none of these have no baseline with the same batch per device or "
            "the same global batch."
        )


def costs(cell: Cell, base: Cell) -> dict[str, str]:
    """From what the speedup is computed."""
    samples = cell.figures.samples_trained
    if samples is None:
        return {"baseline in s": f"{base.seconds:.2f}", "seconds": f"{cell.seconds:.2f}"}
    return {
        "seconds": f"{cell.seconds:.2f}",
        "samples": f"{samples:,.0f}",
        "ms per sample": f"{1000 * cell.cost:.3f}",
        "baseline's": f"{1000 * base.cost:.3f}",
    }


def ranks_of(cell: Cell) -> list[dict[str, Any]]:
    return [
        {"run": cell.middle.name, "rank": rank.rank, "host": rank.host}
        | {name: as_time_prints(getattr(rank, name)) for name in ("real", "user", "sys")}
        | {
            "peak MB": show(rank.peak_memory_mb, "{:,.0f}"),
            "device": rank.device_name,
        }
        for rank in cell.middle.ranks
    ]


# -------- HTML and CSV


def as_html(text: str, folder: Path, pictures: list[str]) -> str:
    """The Markdown of a report as one HTML file. The pictures and report.csv, which lie in
    `folder`, are in it, also as links by which a reader saves them.
    """
    body = markdown.markdown(text.replace("<", "&lt;"), extensions=["tables", "sane_lists"])
    body = re.sub(r"(?<=;\">)[^<]+(?=</td>)", lambda cell: may_break(cell[0]), body)
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")
    body = body.replace("<h1>Details</h1>", '<div class="details">\n<h1>Details</h1>') + "</div>"
    links = []
    for name in ["report.csv", *pictures]:
        kind = "text/csv" if name.endswith(".csv") else "image/svg+xml"
        data = f"data:{kind};base64,{base64.b64encode((folder / name).read_bytes()).decode()}"
        body = body.replace(f'src="{name}"', f'src="{data}"')
        links.append(f'<a download="{name}" href="{data}">{name}</a>')
    style = (HERE / "style.css").read_text(encoding="utf-8")
    body += f"\n<p>To save: {', '.join(links)}.</p>"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def may_break(cell: str) -> str:
    """A cell that may go on in the next line after each 24 characters without a space."""
    return re.sub(r"(?:&#?\w+;|[^\s&]){24}", r"\g<0><wbr>", cell)


def write_csv(path: Path, workloads: list[Workload]) -> None:
    """A row with plain numbers for each cell; what is not known is blank."""
    rows = [plain_row(cell) for workload in workloads for cell in workload.cells]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["strategy"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([harmless(name) for name in names])
        writer.writerows([harmless(row.get(name)) for name in names] for row in rows)


def harmless(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula; a number as it is.
    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def plain_row(cell: Cell) -> dict[str, Any]:
    """A cell as plain numbers and texts."""
    return (
        cell.workload
        | asdict(cell.setting)
        | {"devices": cell.devices}
        | asdict(cell.figures)
        | {
            "run": cell.middle.name,
            "log": cell.middle.log,
            "repeats": len(cell.runs),
            "fastest": cell.fastest,
            "slowest": cell.slowest,
            "step_seconds": cell.step_seconds,
            "seconds_per_sample": cell.cost if cell.figures.samples_trained else None,
            "mfu": cell.mfu,
            "note": cell.note,
            "fixed": cell.fixed,
            "weak_speedup": cell.weak and cell.weak.speedup,
            "strong_speedup": cell.strong and cell.strong.speedup,
        }
        | {
            column: getattr(cell.comparison, name, None)
            for column, name in {
                "speedup": "speedup",
                "efficiency": "efficiency",
                "speedup_from": "low",
                "speedup_to": "high",
                "sure": "sure",
            }.items()
        }
    )
