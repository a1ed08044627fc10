"""Times that were measured by hand, as runs."""

import csv
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from common.printing import one_line
from common.strategies import STRATEGIES
from reporting.records import Figures, Run, Setting, explain
from reporting.schema import Row


def parse_seconds(text: str) -> float:
    """Seconds from "186.6" or, as `time` prints them, "3m6.619s". Raises ValueError."""
    match = re.fullmatch(r"(?:(\d+)m)?(\d+(?:\.\d*)?)s?", text.strip())
    if not match:
        raise ValueError(
            f"{text!r} is not a time; write seconds (186.6) or minutes and seconds (3m6.619s)"
        )
    return 60 * float(match[1] or 0) + float(match[2])


class Time(Row):
    """A row of a file of times."""

    seconds: Annotated[float, BeforeValidator(parse_seconds), Field(ge=1e-6, le=1e12)]


def name_strategy(text: str) -> str:
    """The YAML's name for what a person writes: "zero2" for "DeepSpeed ZeRO-2". Other names stay as
    they are, in small letters.
    """
    known = {name.replace("_", ""): name for name in STRATEGIES}
    return known.get(re.sub(r"deepspeed|[\W_]", "", text.lower()), text.lower())


def read_times(path: Path) -> tuple[list[Run], list[str]]:
    """A Run for each row, and a sentence for each row that cannot be read. Columns are separated by
    commas, semicolons or tabs. Raises OSError, csv.Error, or ValueError if no row can be read.
    """
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines() or [""]
    separator = max(",;\t", key=lines[0].count)
    lines[0] = lines[0].lower()
    rows = csv.DictReader(lines, delimiter=separator, restval="", skipinitialspace=True)
    missing = [name for name in Time.model_fields if name not in (rows.fieldnames or [])]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]}; "
            f"its first line has to name {','.join(Time.model_fields)}"
        )
    runs: list[Run] = []
    notes = []
    for row in rows:
        more = "".join(row.pop(None, [])).strip()
        if not more + "".join(row.values()).strip():
            continue  # spreadsheets write such rows
        try:
            if more:
                raise ValueError("it has more columns than the first line; decimals need a point")
            time = Time.model_validate(row)
        except ValueError as problem:
            notes.append(one_line(f"{path}, line {rows.line_num}: {explain(problem)}"))
            continue
        runs.append(
            Run(
                name=f"line {rows.line_num}",
                workload={"script": f"measured by hand, {path.name}"},
                setting=Setting(name_strategy(time.strategy), time.nodes, time.gpus_per_node),
                figures=Figures(seconds=time.seconds),
            )
        )
    if not runs:
        raise ValueError(notes[0] if notes else f"{path} has no times below its first line")
    return runs, [f"skipped {note}" for note in notes]
