"""Tables as Markdown and as CSV, and numbers as the report shows them."""

import csv
from pathlib import Path
from typing import Any

from tabulate import tabulate

from reporting.comparing import Cell, Comparison
from reporting.splitting import PREDICTED

Rows = list[dict[str, Any]]


def table(rows: Rows) -> str:
    """Markdown of a table; what is not known is blank, and so a column of which nothing is known is
    left out.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    cells = [[escape(row.get(name)) for name in known] for row in rows]
    text: str = tabulate(cells, known, tablefmt="pipe", disable_numparse=True)
    return text


def escape(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def show(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def in_ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.2f}"


def as_time_prints(seconds: float) -> str:
    """118.544 as 1m58.544s."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 60000}m{milliseconds % 60000 / 1000:.3f}s"


def name_briefly(cell: Cell) -> dict[str, Any]:
    """The columns that tell a cell from those beside it."""
    apart = f", {cell.apart}" if cell.apart else ""
    return {"strategy": f"{cell.shown}{apart}", "nodes x devices": cell.setting.shape}


def name_cell(cell: Cell) -> dict[str, Any]:
    """The columns that tell a cell from all others, with its batches."""
    setting = cell.setting
    times = setting.gradient_accumulation_steps or 1
    batch = setting.per_device_batch_size
    return {
        "strategy": cell.shown,
        "nodes x devices": setting.shape,
        "batch per device": f"{batch} x {times}" if times > 1 else batch,
        "global batch": setting.global_batch_size,
    }


def write_csv(path: Path, cells: list[Cell]) -> None:
    """A row with plain numbers for each cell; what is not known is blank."""
    rows = [plain_row(cell) for cell in cells]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0] if rows else ["strategy"])
        writer.writeheader()
        writer.writerows(rows)


def plain_row(cell: Cell) -> dict[str, Any]:
    """A cell as plain numbers and texts."""
    row = cell.row()
    del row["tensors"]
    found = cell.prediction
    forecast = [found.seconds, found.low, found.high, found.miss] if found else [None] * 4
    return row | {
        "run": cell.median.name,
        "log": cell.median.log,
        "repeats": len(cell.runs),
        "fastest": cell.fastest,
        "slowest": cell.slowest,
        "spread": cell.spread,
        "step_seconds": cell.step_seconds,
        "steady_steps": cell.steady_steps,
        "mfu": cell.mfu,
        "fixed": cell.fixed,
        **compared("", cell.comparison),
        **compared("weak_", cell.weak),
        **compared("strong_", cell.strong),
        **dict(zip([*PREDICTED, "miss"], forecast, strict=True)),
    }


def compared(kind: str, comparison: Comparison | None) -> dict[str, Any]:
    """The columns of a comparison; `kind` comes before their names."""
    names = {"speedup": "speedup", "efficiency": "efficiency", "steady": "steady_speedup"}
    return {
        kind + column: getattr(comparison, name) if comparison else None
        for name, column in names.items()
    }
