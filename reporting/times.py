"""Times that were measured by hand, as runs."""

import csv
import re
from pathlib import Path

from common.printing import one_line
from common.strategies import STRATEGIES
from reporting.records import Figures, Run, Setting

COLUMNS = ("strategy", "nodes", "gpus_per_node", "seconds")
ALIASES = {
    "singlegpu": "baseline",
    "onegpu": "baseline",
    "dataparallel": "dp",
    "distributeddataparallel": "ddp",
    "fullyshardeddataparallel": "fsdp",
    "fsdp2": "fsdp",
}


def name_strategy(text: str) -> str:
    """The YAML's name for what a person calls a strategy: "zero2" for ZeRO-2, DeepSpeed stage 2.
    Other names stay as they are, in small letters. Raises ValueError.
    """
    if len(text) > 60:
        raise ValueError(f"the strategy's name has {len(text):,} characters, more than 60")
    known = {name.replace("_", ""): name for name in STRATEGIES} | ALIASES
    word = re.sub(r"deepspeed|^ds|stage|[\W_]", "", text.lower())
    return known.get(word) or known.get(f"zero{word}") or text.strip().lower()


def parse_seconds(text: str, decimal_commas: bool = False) -> float:
    """Seconds from "186.6", "3m6.619s", "1h2m3s" or, as a German `time` prints, "3m6,619s". A
    separator before three digits may be one of thousands: a comma always, and a point in a file
    with `decimal_commas`. Raises ValueError.
    """
    text = str(text).strip().lower()
    if re.fullmatch(r"\d{1,3},\d{3}s?", text):
        raise ValueError(f"{text!r} is no time: a comma may mean thousands here, so write a point")
    if decimal_commas and re.fullmatch(r"\d{1,3}\.\d{3}s?", text):
        raise ValueError(
            f"{text!r} is no time: other rows have decimal commas, so the point may mean thousands"
        )
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+(?:[.,]\d*)?)s?", text)
    parts = match.groups() if match and len(text) < 30 else ("0", "0", "0")
    numbers = [float((part or "0").replace(",", ".")) for part in parts]
    seconds = numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if not 0 < seconds < 1e12:
        raise ValueError(f"{text!r} is no time such as 186.6 or 3m6.619s")
    return seconds


def parse_count(name: str, text: str) -> int:
    """A number of nodes or GPUs: "2", or "2.0" as spreadsheets write it. Raises ValueError."""
    match = re.fullmatch(r"(\d{1,9})(?:[.,]0*)?", text.strip())
    if not match or int(match[1]) < 1:
        raise ValueError(f"{name} has to be a whole number from 1 on, got {text.strip()!r}")
    return int(match[1])


def split_row(line: str, separator: str, names: list[str]) -> dict[str, str]:
    """A line as {column: text}. Raises ValueError if it has more or fewer columns than names."""
    try:
        values = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
    except csv.Error as problem:
        raise ValueError(problem) from None
    while len(values) > len(names) and not values[-1].strip():
        values.pop()
    if len(values) == len(names) + 1 and separator == "," and names[-1] == "seconds":
        decimals = values.pop()  # 186,6 or 0m2,513s in a file with commas between its columns
        values[-1] += "," + decimals
    if len(values) != len(names):
        raise ValueError(f"it has {len(values)} columns, and the first line names {len(names)}")
    return dict(zip(names, values, strict=True))


def make_run(row: dict[str, str], file: str, line: int, decimal_commas: bool) -> Run:
    """A row as a Run. Raises ValueError."""
    if not row["strategy"].strip():
        raise ValueError("the strategy has no name")
    return Run(
        name=f"line {line}",
        workload={"script": f"measured by hand, {file}"},
        setting=Setting(
            name_strategy(row["strategy"]),
            parse_count("nodes", row["nodes"]),
            parse_count("gpus_per_node", row["gpus_per_node"]),
        ),
        figures=Figures(seconds=parse_seconds(row["seconds"], decimal_commas)),
    )


def read_times(path: Path) -> tuple[list[Run], list[str]]:
    """A Run for each row, and a sentence for each row that cannot be read. Columns are separated by
    commas, semicolons or tabs. Raises ValueError if nothing can be read.
    """
    try:
        head, *lines = path.read_text(encoding="utf-8-sig").splitlines() or [""]
    except ValueError as problem:
        raise ValueError(f"{path} is no text: {problem}") from None
    separator = max(",;\t", key=head.count)
    names = [name.strip(' "').lower() for name in head.rstrip(f" {separator}").split(separator)]
    missing = [name for name in COLUMNS if names.count(name) != 1]
    if missing:
        raise ValueError(
            f"{path}: no column {missing[0]}, or two; the first line names {','.join(COLUMNS)}"
        )
    rows: dict[int, dict[str, str]] = {}
    runs: list[Run] = []
    notes = []
    for number, line in enumerate(lines, 2):
        try:
            if line.strip(" \t,;"):
                rows[number] = split_row(line, separator, names)
        except ValueError as problem:
            notes.append(one_line(f"skipped {path}, line {number}: {problem}"))
    decimal_commas = any(re.search(r"\d,\d", row["seconds"]) for row in rows.values())
    for number, row in rows.items():
        try:
            runs.append(make_run(row, path.name, number, decimal_commas))
        except ValueError as problem:
            notes.append(one_line(f"skipped {path}, line {number}: {problem}"))
    if not runs:
        empty = f"{path}: there are no times below the first line"
        raise ValueError(notes[0].removeprefix("skipped ") if notes else empty)
    return runs, notes
