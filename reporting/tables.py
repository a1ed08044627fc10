"""Tables as Markdown, and numbers as the report shows them."""

from typing import Any

from tabulate import tabulate

from reporting.comparing import Cell

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


def name_cell(cell: Cell) -> dict[str, Any]:
    """The columns that tell a cell from all others."""
    setting = cell.setting
    times = setting.gradient_accumulation_steps or 1
    batch = setting.per_device_batch_size
    return {
        "strategy": cell.shown,
        "nodes x devices": setting.shape,
        "batch per device": f"{batch} x {times}" if times > 1 else batch,
        "global batch": setting.global_batch_size,
    }
