"""The report as Markdown, the answer first, then the details; and as one HTML file."""

import base64
import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import markdown

from reporting.comparing import STRATEGIES, Cell, Comparison, Workload, doubts
from reporting.formulas import describe_formulas, describe_growth, describe_predictions
from reporting.pictures import Held
from reporting.runs import Work
from reporting.sentences import say_margin, say_missing, say_prediction, sentences
from reporting.splitting import PARTS, Split, Trace
from reporting.tables import Rows, as_time_prints, in_ms, name_briefly, name_cell, show, table

WIDE = 6  # strategies in a table of the first page; more of them make another table

KINDS = """Speedup = time of the baseline, one device, / time; efficiency = speedup / devices. The
time is `seconds`, all of training, the median over the repeats. `total` also has the start,
evaluations and saving. *Weak scaling*: each device has as much to do in a step as the baseline, so
the global batch grows, an epoch has fewer steps, and the losses differ. *Strong scaling*: the
global batch and the steps are those of the baseline, and without dropout the losses and weights
too. Of several baselines the fastest counts. Of times that were measured by hand, you answer for
the work being the same.

*Steady steps* are all steps but the first 10. Their speedup leaves out the start of a run; it is
given where both cells have at least 30 such steps. *Sure* is what the repeats carry. *Note* marks a
cell that you should not rely on: fewer than 30 steady steps, a start of more than 10 %, repeats
that differ by more than 10 %, a rank that computed less than 80 % of the time, ranks on different
devices, or fewer cores than the baseline has. MFU is the share of the GPU's peak FLOP/s that the
model's matrix products use."""


def title(work: Work, works: list[Work]) -> str:
    """A workload in a few words: model, data, and in what others with the same two differ."""
    alike = [one for one in works if (one.model, one.dataset) == (work.model, work.dataset)]
    known = [name for name in (work.model, work.dataset) if name]
    return ", ".join([" on ".join(known) or work.script, *in_words(work, differing(alike))])


def differing(works: list[Work]) -> list[str]:
    """The names of what must be the same, in which these workloads differ."""
    names = [one.name for one in fields(Work)]
    return [name for name in names if len({getattr(work, name) for work in works}) > 1]


def in_words(work: Work, names: Iterable[str]) -> list[str]:
    """What a workload has of these names, as texts such as "threads 1"."""
    known = [(name, getattr(work, name)) for name in names]
    return [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in known
        if value is not None
    ]


# ------------------------------------------------------------------------- the first page
def first_page(workload: Workload, splits: list[Split], files: dict[str, str]) -> Iterator[str]:
    """What is to be known first of a workload: sentences, small tables, and pictures."""
    yield " ".join(sentences(workload, splits))
    yield from scaling_tables(workload)
    margin = say_margin(workload)
    if margin:
        yield margin
    yield pictures_of(files, ("time", "speedup", "speedup-strong"))


def scaling_tables(workload: Workload) -> Iterator[str]:
    """A table for each batch per device (weak scaling), for each global batch (strong scaling), and
    for the cells that are compared with nothing. Cells without a result are in the first one.
    """
    cells = workload.cells
    lost = set()
    for run in workload.lost:
        lost.add((STRATEGIES.get(run.setting.strategy, run.setting.strategy), run.setting.shape))
    weak = group_by(
        (cell for cell in cells if cell.weak), lambda cell: cell.setting.batch_per_device
    )
    strong = group_by(
        (cell for cell in cells if cell.strong), lambda cell: cell.setting.global_batch_size
    )
    alone = group_by(
        (cell for cell in cells if not cell.comparison), lambda cell: cell.setting.batch_per_device
    )
    for batch, group in weak.items():
        yield from shape_tables(
            f"**Weak scaling**, {batch} samples per device and step: time of training, speedup and "
            "efficiency against the baseline with the same batch per device.",
            [(cell, cell.weak) for cell in group],
            lost,
        )
    for batch, group in strong.items():
        if any(cell.devices > 1 for cell in group):
            yield from shape_tables(
                f"**Strong scaling**, {batch} samples per step in all: time of training, speedup "
                "and efficiency against the baseline with the same global batch.",
                [(cell, cell.strong) for cell in group],
                lost,
            )
    hand = [(cell, cell.by_hand) for cell in cells if cell.by_hand]
    yield from shape_tables("Time, speedup and efficiency:", hand, lost)
    for batch, group in alone.items():
        samples = f", {batch} samples per device and step" if batch else ""
        pairs: list[tuple[Cell, Comparison | None]] = [(cell, None) for cell in group]
        yield from shape_tables(f"Time of training without a baseline{samples}:", pairs, lost)


def group_by(cells: Iterable[Cell], key: Any) -> dict[Any, list[Cell]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return dict(sorted(groups.items(), key=lambda group: group[0] or 0))


def shape_tables(
    caption: str, pairs: Sequence[tuple[Cell, Comparison | None]], lost: set[tuple[str, str]]
) -> Iterator[str]:
    """Rows are shapes with their global batch, columns strategies. The entries of `lost` are taken
    out of it as they are shown. Nothing if only baselines are known.
    """
    found = {}
    numbers: Counter[tuple[str, tuple[int, int, int | None]]] = Counter()
    for cell, one in sorted(pairs, key=lambda pair: -pair[0].seconds):
        text = f"{cell.seconds:.1f} s"
        if one:
            text += f", {one.speedup:.2f}×, {100 * one.efficiency:.0f} %"
        if not cell.is_baseline:
            place = (cell.setting.nodes, cell.setting.gpus_per_node, cell.setting.global_batch_size)
            numbers[cell.short, place] += 1
            if numbers[cell.short, place] > 1:  # They differ in cores, micro-batches or shards.
                text += f" (fastest of {numbers[cell.short, place]})"
            found[cell.short, place] = text
    if not found:
        return
    for name, shape in lost:
        nodes, gpus = map(int, shape.split(" x "))
        fits = [place for _, place in found if place[:2] == (nodes, gpus)]
        found.setdefault((name, fits[0] if fits else (nodes, gpus, None)), "no result")
    lost.clear()
    places = sorted({place for _, place in found}, key=place_order)
    if pairs[0][0].work.on_cpu:
        found |= {
            ("DP", place): "needs two GPUs" if place[0] == 1 else "one node only"
            for place in places
            if place[1] > 1 and not any(name == "DP" for name, _ in found)
        }
    order = {name: number for number, name in enumerate(STRATEGIES.values())}
    names = sorted({name for name, _ in found}, key=lambda name: name_order(name, order))
    yield caption
    for first in range(0, len(names), WIDE):
        yield table(
            [
                {"nodes x devices": f"{place[0]} x {place[1]}", "global batch": place[2]}
                | {name: found.get((name, place)) for name in names[first : first + WIDE]}
                for place in places
            ]
        )


def place_order(place: tuple[int, int, int | None]) -> tuple[int, int, int]:
    nodes, gpus, batch = place
    return nodes * gpus, nodes, batch or 0


def name_order(name: str, order: dict[str, int]) -> tuple[int, str]:
    """The order of STRATEGIES, also of variants; other names come last."""
    return order.get(name.split(" #")[0].removesuffix(", recomputing"), len(order)), name


def pictures_of(files: dict[str, str], names: Iterable[str]) -> str:
    """Markdown of those pictures that were drawn; `files` maps names to files."""
    return " ".join(f"![{name}]({files[name]})" for name in names if name in files)


# ----------------------------------------------------------------------------- the details
def details(
    workload: Workload,
    splits: list[Split],
    held: dict[Cell, Held],
    links: dict[Cell, list[dict[str, Any]]],
    predict_to: int | None,
    files: dict[str, str],
) -> Iterator[str]:
    """All that is known of one workload, as sections of Markdown."""
    work = [one.name for one in fields(Work) if getattr(workload.work, one.name) != "no"]
    yield f"All runs have in common: {', '.join(in_words(workload.work, work))}."
    checked = any(links.values())
    says = [say_prediction(workload), say_missing(workload, checked)]
    yield " ".join(text for text in says if text)
    yield table([measured(cell) for cell in workload.cells])
    yield from describe_comparisons(workload)
    if splits:
        yield describe_parts(splits)
    yield from describe_predictions(workload)
    if predict_to:
        yield from describe_growth(workload, links, predict_to)
    known = [cell for cell in workload.cells if cell.ranks]
    if known:
        yield describe_formulas(known, held)
        yield "The median runs and their ranks, as `time` prints them:"
        yield table([row for cell in known for row in ranks_of(cell)])
    shown = ("time", "speedup", "speedup-strong")
    yield pictures_of(files, [name for name in files if name not in shown])


def measured(cell: Cell) -> dict[str, Any]:
    figures = cell.figures
    return name_cell(cell) | {
        "runs": len(cell.runs),
        "step in ms": in_ms(cell.step_seconds),
        "samples/s": show(figures.samples_per_second, "{:,.1f}"),
        "seconds": f"{cell.seconds:.2f}",
        "fastest-slowest": f"{cell.fastest:.2f}-{cell.slowest:.2f}",
        "total": show(figures.total_seconds, "{:.1f}"),
        "peak MB": show(figures.peak_memory_mb, "{:,.0f}"),
        "MFU": show(cell.mfu, "{:.0%}"),
        "cores per rank": show(cell.setting.cores, "{:g}"),
        "note": doubts(cell),
        "median run": cell.median.name,
        "log": cell.median.log,
    }


def describe_comparisons(workload: Workload) -> Iterator[str]:
    """A table for weak scaling and one for strong scaling."""
    for name, kind in (("Weak", "weak"), ("Strong", "strong"), ("By hand", "by_hand")):
        pairs = [(cell, getattr(cell, kind)) for cell in workload.cells]
        known = [(cell, one) for cell, one in pairs if one]
        if all(cell.devices == 1 for cell, _ in known) and kind == "strong" or not known:
            continue
        fixed = {
            "weak": " scaling, the batch per device fixed",
            "strong": " scaling, the global batch fixed",
        }
        yield f"{name}{fixed.get(kind, '')}:"
        yield table(
            [
                name_cell(cell)
                | {
                    "baseline in s": f"{one.baseline.seconds:.2f}",
                    "seconds": f"{cell.seconds:.2f}",
                    "speedup": f"{one.speedup:.2f}",
                    "from-to": f"{one.low:.2f}-{one.high:.2f}",
                    "efficiency": f"{one.efficiency:.0%}",
                    "of steady steps": show(one.steady, "{:.2f}"),
                    "sure": one.verdict,
                }
                for cell, one in known
            ]
        )
    if any(cell.comparison is None for cell in workload.cells) and any(
        cell.comparison for cell in workload.cells
    ):
        yield (
            "Cells that are in none of these have no baseline with the same batch per device or "
            "the same global batch that trained on as many samples (1 % more or less). With "
            "--max_train_steps it takes the same global batch; with epochs, numbers of samples "
            "that global batches divide."
        )


def ranks_of(cell: Cell) -> Rows:
    return [
        {"run": cell.median.name, "rank": rank.rank, "host": rank.host}
        | {name: as_time_prints(getattr(rank, name)) for name in ("real", "user", "sys")}
        | {
            "peak MB": show(rank.peak_memory_mb, "{:,.0f}"),
            "device": rank.device_name,
            "cores": rank.cores,
        }
        for rank in cell.ranks
    ]


def describe_parts(splits: list[Split]) -> str:
    """Where the time of a step went, as Markdown."""
    rows = []
    for split in splits:
        row = name_briefly(split.cell) | {"step": in_ms(split.step)}
        rows.append(row | {name: in_ms(split.parts.get(name)) for name in PARTS})
    return (
        "Where the time of a step went, in ms. The parts add up to the mean step, all steps of "
        "training. *Computing* is the baseline's steady step without its loading, *bookkeeping* "
        "what the same strategy takes longer on one device. *Communication* is what profiled runs "
        "of the cell measured. Without one it is *predicted*: what the formula adds for several "
        "devices. *Waiting* is how much longer the slowest rank computes than the mean rank, by "
        "the profiled run or by the ranks' CPU time. *Start* is what the first "
        "steps took longer, shared out over all steps. What is left is *unexplained*; below zero, "
        "the other parts are too large.\n\n" + table(rows)
    )


def describe_traces(traces: list[Trace]) -> str:
    """The time shares of profiled runs, as Markdown."""
    return table(
        [
            {"run": trace.run.name, "strategy": trace.run.setting.strategy, "rank": trace.rank}
            | {name: f"{share:.0%}" for name, share in trace.shares.items()}
            for trace in traces
        ]
    )


# -------------------------------------------------------------------------------- as HTML
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem; }
img { max-width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85em; }
th, td { border: 1px solid #bbb; padding: 0.2em 0.5em; text-align: left; }
td { white-space: nowrap; }
td:empty { background: #f6f6f6; }
p, li, h1, h2 { overflow-wrap: anywhere; }
@page { size: A4; margin: 12mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .table { overflow: visible; }
  table { font-size: 6.5pt; width: 100%; }
  th, td { white-space: normal; overflow-wrap: anywhere; padding: 1pt 2pt; }
  img { width: 49%; }
  img, tr { break-inside: avoid; }
  h1, h2 { break-after: avoid; }
}
"""


def as_html(text: str, folder: Path) -> str:
    """The Markdown of a report as one HTML file; the pictures, which lie in `folder`, are in it."""
    body = markdown.markdown(html.escape(text, quote=False), extensions=["tables", "sane_lists"])
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")
    for picture in folder.glob("*.svg"):
        data = base64.b64encode(picture.read_bytes()).decode()
        body = body.replace(f'src="{picture.name}"', f'src="data:image/svg+xml;base64,{data}"')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Report</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )
