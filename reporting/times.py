"""Times that were measured by hand, as runs."""

import csv
import re
from pathlib import Path

from reporting.runs import Figures, Run, Setting, Work

COLUMNS = ("strategy", "nodes", "gpus_per_node", "seconds")

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
    Other names stay as they are, in small letters.
    """
    words = re.sub(r"[\W_]+", " ", text).strip().lower()
    if not words:
        raise ValueError("the strategy has no name")
    for name, pattern in SPELLINGS.items():
        if re.fullmatch(pattern, words):
            return name
    zero = re.fullmatch(ZERO, words)
    if zero:
        return f"zero{zero[1]}" + ("_offload" if zero[2] else "")
    return text.strip().lower()


def parse_seconds(text: str) -> float:
    """Seconds from "186.6", "3m6.619s", "1h2m3s" or, as a German `time` prints, "3m6,619s". Raises
    ValueError.
    """
    text = str(text).strip().lower()
    if re.fullmatch(r"\d{1,3},\d{3}s?", text):
        raise ValueError(f"{text!r} is no time: a comma may mean thousands here, so write a point")
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+(?:[.,]\d*)?)s?", text)
    parts = match.groups() if match else ("0", "0", "0")
    numbers = [float((part or "0").replace(",", ".")) for part in parts]
    seconds = numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time such as 186.6 or 3m6.619s")
    return seconds


def parse_count(name: str, text: str) -> int:
    """A number of nodes or GPUs: "2", or "2.0" as spreadsheets write it. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(?:[.,]0*)?", text.strip())
    if not match or int(match[1]) < 1:
        raise ValueError(f"{name} has to be a whole number from 1 on, got {text.strip()!r}")
    return int(match[1])


def split_row(line: str, separator: str, names: list[str]) -> dict[str, str]:
    """A line as {column: text}. Raises ValueError if it has more or fewer columns than names."""
    values = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
    while len(values) > len(names) and not values[-1].strip():
        values.pop()
    if len(values) == len(names) + 1 and separator == "," and names[-1] == "seconds":
        decimals = values.pop()  # 186,6 or 0m2,513s in a file with commas between its columns
        values[-1] += "," + decimals
    if len(values) != len(names):
        raise ValueError(f"it has {len(values)} columns, and the first line names {len(names)}")
    return dict(zip(names, values, strict=True))


def read_times(path: Path) -> tuple[list[Run], list[str]]:
    """A Run for each row, and a sentence for each row that cannot be read. Columns are separated by
    commas, semicolons or tabs. Raises ValueError if nothing can be read.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as problem:
        raise ValueError(f"{path} is no text: {problem}") from None
    head = lines[0].lower() if lines else ""
    separator = max(",;\t", key=head.count)
    names = [name.strip(' "') for name in head.split(separator)]
    while names and not names[-1]:
        names.pop()
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(
            f"{path}: no column {', '.join(missing)}; the first line has to name "
            f"{','.join(COLUMNS)}"
        )
    runs, notes = [], []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip(" \t,;"):
            continue
        try:
            row = split_row(line, separator, names)
            runs.append(
                Run(
                    name=f"line {number}",
                    work=Work(script=f"measured by hand, {path.name}"),
                    setting=Setting(
                        name_strategy(row["strategy"]),
                        parse_count("nodes", row["nodes"]),
                        parse_count("gpus_per_node", row["gpus_per_node"]),
                    ),
                    figures=Figures(seconds=parse_seconds(row["seconds"])),
                )
            )
        except ValueError as problem:
            notes.append(f"skipped {path}, line {number}: {problem}")
    if not runs:
        raise ValueError(
            notes[0].removeprefix("skipped ")
            if notes
            else f"{path}: there are no times below the first line"
        )
    return runs, notes
