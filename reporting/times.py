"""Times that were measured by hand, as runs."""

import csv
import re
from pathlib import Path

from common.printing import one_line
from reporting.records import Figures, Run, Setting

COLUMNS = ("strategy", "nodes", "gpus_per_node", "seconds")
LONGEST_NAME = 60  # characters of a strategy

# How people write the strategies, without spaces, dashes and capitals.
SPELLINGS = {
    "baseline": "single|(?:single|one|1) ?(?:gpu|device)",
    "dp": "data ?parallel",
    "ddp": "distributed ?data ?parallel",
    "fsdp": "fsdp ?2|fully ?sharded(?: ?data ?parallel)?|full ?shard",
    "hsdp": "hybrid ?shard(?:ed)?(?: ?data ?parallel)?",
    "fsdp_keep": "fsdp ?keep|shard ?grad ?op",
    "fsdp_offload": "fsdp2? ?(?:cpu ?)?offload",
}
ZERO = r"(?:deep ?speed ?|ds ?|zero ?|stage ?)+([123])( ?(?:cpu ?)?offload)?"


def name_strategy(text: str) -> str:
    """The YAML's name for what a person calls a strategy: "zero2" for ZeRO-2, DeepSpeed stage 2.
    Other names stay as they are, in small letters. Raises ValueError.
    """
    words = re.sub(r"[\W_]+", " ", text).strip().lower()
    if not words:
        raise ValueError("the strategy has no name")
    if len(text) > LONGEST_NAME:
        raise ValueError(f"the strategy's name has {len(text):,} characters, more than 60")
    for name, pattern in SPELLINGS.items():
        if re.fullmatch(pattern, words):
            return name
    zero = re.fullmatch(ZERO, words)
    if zero:
        return f"zero{zero[1]}" + ("_offload" if zero[2] else "")
    return text.strip().lower()


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


def read_head(path: Path, line: str) -> tuple[str, list[str]]:
    """The separator (comma, semicolon or tab) and the names of the columns. Raises ValueError."""
    separator = max(",;\t", key=line.count)
    names = [name.strip(' "').lower() for name in line.split(separator)]
    while names and not names[-1]:
        names.pop()
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(missing)}; the first line has to name "
            f"{','.join(COLUMNS)}"
        )
    twice = [name for name in COLUMNS if names.count(name) > 1]
    if twice:
        raise ValueError(f"{path}: the first line names {', '.join(twice)} twice")
    return separator, names


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


def make_run(row: dict[str, str], number: int, file: str, decimal_commas: bool) -> Run:
    """A row as a Run. Raises ValueError."""
    return Run(
        name=f"line {number}",
        workload={"script": f"measured by hand, {file}"},
        setting=Setting(
            name_strategy(row["strategy"]),
            parse_count("nodes", row["nodes"]),
            parse_count("gpus_per_node", row["gpus_per_node"]),
        ),
        figures=Figures(seconds=parse_seconds(row["seconds"], decimal_commas)),
    )


def read_times(path: Path) -> tuple[list[Run], list[str]]:
    """A Run for each row, and a sentence for each row that cannot be read. Raises ValueError if
    nothing can be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as problem:
        raise ValueError(f"{path} is no text: {problem}") from None
    separator, names = read_head(path, lines[0] if lines else "")
    rows, runs, notes = {}, [], []
    for number, line in enumerate(lines[1:], 2):
        try:
            if line.strip(" \t,;"):
                rows[number] = split_row(line, separator, names)
        except ValueError as problem:
            notes.append(one_line(f"skipped {path}, line {number}: {problem}"))
    decimal_commas = any(re.search(r"\d,\d", row["seconds"]) for row in rows.values())
    for number, row in rows.items():
        try:
            runs.append(make_run(row, number, path.name, decimal_commas))
        except ValueError as problem:
            notes.append(one_line(f"skipped {path}, line {number}: {problem}"))
    if not runs:
        empty = f"{path}: there are no times below the first line"
        raise ValueError(notes[0].removeprefix("skipped ") if notes else empty)
    return runs, notes
