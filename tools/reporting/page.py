"""The report as Markdown (first the answer, then the details), as one HTML file, and as CSV."""

import base64
import csv
import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import markdown

from common.printing import markdown_table, printable, show_seconds
from reporting.answer import sentences
from reporting.comparing import FIXED, Cell, Workload, find_differences

HERE = Path(__file__).parent
BELOW_PICTURES = (
    "A bar is the interval of the test (*from-to*, divided by the devices), not the fastest and "
    "slowest run. At 100 %, N devices are N times as fast as the baseline."
)


# -------- Markdown


def plain(text: Any) -> str:
    """A text, escaped for Markdown and HTML."""
    escaped = html.escape(printable(text), quote=False)
    # An underscore inside of a word means nothing in Markdown.
    return re.sub(r"[\\`*\[\]|!~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", escaped)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table. Unknown values are blank, and columns without any known value left out."""
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
    """A workload in a few words: model, data, and how others with the same two differ."""
    values = workload.values
    names = ("model", "dataset")
    twins = [
        one.values
        for one in workloads
        if all(one.values.get(name) == values.get(name) for name in names)
    ]
    head = " on ".join(str(values[name]) for name in names if values.get(name))
    return plain(", ".join([head or values["script"], *in_words(values, find_differences(twins))]))


def in_words(values: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The known values of these names, as texts such as "threads 1"."""
    known = [(name, values[name]) for name in names if values.get(name) is not None]
    return [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in known
    ]


def write_page(
    workloads: list[Workload], pictures: list[dict[str, str]], left_out: list[str]
) -> str:
    """The report. `pictures` are those of each workload, {name: file}."""
    first, more = ["# Report"], ["# Details"]
    if len(workloads) > 1:
        names = ", ".join(map(plain, find_differences([one.values for one in workloads])))
        first.append(
            f"These are {len(workloads)} workloads, never compared with each other; they "
            f"differ in {names}."
        )
    for workload, files in zip(workloads, pictures, strict=True):
        heading = f"## {title(workload, workloads)}"
        first += [heading, plain(sentences(workload)), *answer_tables(workload)]
        if files:
            first.append(" ".join(f"![{name}]({file})" for name, file in files.items()))
        if set(files) - {"trade"}:
            first.append(BELOW_PICTURES)
        more += [heading, *details(workload)]
    if left_out:
        more += ["## Not in the tables", "\n".join(f"- {plain(line)}" for line in left_out)]
    how_to_read = (HERE / "how-to-read.md").read_text(encoding="utf-8").rstrip()
    blocks = [*first, *more, "## How to read the tables", how_to_read]
    return "\n\n".join(blocks) + "\n"


CAPTIONS = {
    "weak": "**Weak scaling**: each row against the baseline with the same batch per device.",
    "strong": "**Strong scaling**: each row against the baseline with the same global batch.",
    "by_hand": "Times by hand, against the baseline:",
}


def answer_tables(workload: Workload) -> Iterator[str]:
    """A table for each kind of comparison, and one of the cells without a baseline."""
    alone = workload.cells
    for kind, caption in CAPTIONS.items():
        cells = [cell for cell in workload.cells if kind in cell.comparisons]
        others = [cell for cell in cells if not cell.is_baseline]
        # Strong scaling on one device is weak scaling.
        if others and (kind != "strong" or any(cell.devices > 1 for cell in others)):
            yield caption
            yield table([answer_row(cell, kind) for cell in cells])
            alone = [cell for cell in alone if cell not in cells and not cell.is_baseline]
    if not all(cell.is_baseline for cell in alone):
        yield "Without a baseline that has the same batch:"
        yield table([answer_row(cell) for cell in alone])


def answer_row(cell: Cell, kind: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {"strategy and shape": cell.label}
    one = cell.comparisons.get(kind)
    if one:  # near the left, as a phone shows it without scrolling
        row["verdict"] = "" if one.baseline is cell else one.sure or "no difference shown"
    row["global batch"] = cell.setting.global_batch_size
    row["seconds"] = show_seconds(cell.figures.seconds)
    if one:
        row |= {
            "speedup": f"{one.speedup:.2f}",
            "from-to": one.low and f"{one.low:.2f}-{one.high:.2f}",
            "efficiency": f"{100 * one.efficiency:.0f} %",
        }
    return row | {"mind": ", ".join(cell.notes)}


# -------- the details


def details(workload: Workload) -> Iterator[str]:
    values = {name: value for name, value in workload.values.items() if value != "no"}
    yield f"All runs have in common: {plain(', '.join(in_words(values, values)))}."
    yield table([measured(cell) for cell in workload.cells])
    known = [cell for cell in workload.cells if cell.middle.ranks]
    if known:
        yield "The middle runs and their ranks, as `time` prints them:"
        yield table([row for cell in known for row in ranks_of(cell)])


def measured(cell: Cell) -> dict[str, Any]:
    figures, setting, samples = cell.figures, cell.setting, cell.figures.samples_trained
    return {
        "strategy": cell.name,
        "variant": cell.apart,
        "nodes x devices": setting.shape,
        "batch per device": cell.batch.removeprefix("batch "),
        "global batch": setting.global_batch_size,
        "runs": len(cell.runs),
        "step in ms": cell.step_seconds and show_seconds(cell.step_seconds * 1000),
        "samples/s": show(figures.samples_per_second, "{:,.1f}"),
        "seconds": show_seconds(figures.seconds),
        "fastest-slowest": "-".join(show_seconds(pick(cell.times)) for pick in (min, max)),
        "samples": show(samples, "{:,.0f}"),
        "ms per sample": samples and show_seconds(1000 * cell.cost, 3),
        "total": figures.total_seconds and show_seconds(figures.total_seconds),
        "last loss": show(figures.last_loss, "{:.6f}"),
        "peak MB": show(figures.peak_memory_mb, "{:,.0f}"),
        "MB of training alone": show(figures.training_memory_mb, "{:,.0f}"),
        "MFU": show(cell.mfu, "{:.0%}"),
        "mind": "; ".join(f"{code}: {words}" for code, words in cell.notes.items()),
        "middle run": cell.middle.name,
        "log": cell.middle.log,
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
    """The Markdown of a report as one HTML file, which includes the pictures in `folder`."""
    body = markdown.markdown(text.replace("<", "&lt;"), extensions=["tables", "sane_lists"])
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")
    body = body.replace("<h1>Details</h1>", '<div class="details">\n<h1>Details</h1>') + "</div>"
    for name in pictures:
        data = base64.b64encode((folder / name).read_bytes()).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/svg+xml;base64,{data}"')
    style = (HERE / "style.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Report</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def write_csv(path: Path, workloads: list[Workload]) -> None:
    """A row with plain numbers for each cell. Unknown values are blank."""
    rows = [plain_row(cell) for workload in workloads for cell in workload.cells]
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["strategy"]
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def plain_row(cell: Cell) -> dict[str, Any]:
    one, kinds = cell.comparison, list(cell.comparisons)
    row = cell.workload | asdict(cell.setting) | {"devices": cell.devices} | asdict(cell.figures)
    row |= {
        "run": cell.middle.name,
        "log": cell.middle.log,
        "repeats": len(cell.runs),
        "fastest": min(cell.times),
        "slowest": max(cell.times),
        "step_seconds": cell.step_seconds,
        "seconds_per_sample": cell.cost if cell.figures.samples_trained else None,
        "mfu": cell.mfu,
        "note": ", ".join(cell.notes.values()),
        "fixed": "itself" if one and one.baseline is cell else FIXED[kinds[0]] if one else None,
    }
    speedups = {kind: one.speedup for kind, one in cell.comparisons.items()}
    return row | {
        "weak_speedup": speedups.get("weak"),
        "strong_speedup": speedups.get("strong"),
        "speedup": one and one.speedup,
        "efficiency": one and one.efficiency,
        "speedup_from": one and one.low,
        "speedup_to": one and one.high,
        "sure": one and one.sure,
    }
