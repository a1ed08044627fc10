"""What runs left behind, read and checked: run.json, and the plan of a sweep (sweep.csv).

What is not known is None, everywhere.
"""

import atexit
import csv
import json
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AllowInfNan,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
)

from common.facts import UNREADABLE
from common.printing import one_line
from common.strategies import name_yaml

# -------- a run.json


class Strict(BaseModel):
    """A part of a record. A wrong type, NaN, infinity or a long text is a ValidationError."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, str_max_length=400)


Amount = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Name = Annotated[str, Field(max_length=60)]


class Seconds(Strict):
    train: Amount
    total: Amount


class Versions(Strict):
    torch: str
    accelerate: str | None = None
    deepspeed: str | None = None
    transformers: str | None = None


class Workload(Strict):
    """What the run had to do. All of it is compared; these are the fields that the report reads."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str | int | float | bool | None]

    model: str | None = None
    dataset: str | None = None
    precision: str | None = None
    layers: Count | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None


class Rank(Strict):
    rank: NonNegativeInt
    host: Annotated[str, Field(min_length=1, max_length=253)]
    real: Amount
    user: Amount
    sys: Amount
    peak_memory_mb: Amount | None = None
    memory_before_mb: Amount | None = None
    device_name: str | None = None


class Record(Strict):
    """The fields of a run.json that the report reads."""

    script: str
    status: str
    strategy: Name
    nodes: Count
    devices: Count
    device_name: str
    steps: Annotated[int, Field(ge=0, le=10**12)]
    global_batch_size: Count
    parameters: Count
    workload: Workload
    ranks: list[Rank] = Field(min_length=1)
    seconds: Seconds
    versions: Versions
    loss_history: list[tuple[NonNegativeInt, Annotated[float, AllowInfNan(True)]]]
    per_device_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    strategy_options: dict[str, Any] | None = None
    activation_checkpointing: bool | None = None
    threads: Count | None = None
    samples_per_second: Amount | None = None  # the median over the intervals between two logs
    tokens_per_second: Amount | None = None
    resumed_from: str | None = None
    profiled: bool | None = None
    slurm_job_id: str | int | None = None
    began: AwareDatetime | None = None


# -------- a run, as the report knows it

PROFILED = "profiled: not a timing"
EVALUATED = "evaluated: no training"
SEEDS = ("seed", "learning_rate")
MEANT = (PROFILED, EVALUATED)  # by the user, so nothing is lost
SHORTEST = 1e-6  # seconds of a run
LONGEST = 4000  # characters of the options of a strategy, or of the workload's fields
LARGEST, MOST = 2**30, 50_000  # bytes and members of an archive
# The word before the colon is the reason that the answer names.
STATUS = {
    "completed": "",
    "preempted": "preempted: stopped before its end",
    "failed": "failed: broke down",
    "running": "no end: died, or is still running",
}


@dataclass(frozen=True)
class Setting:
    """How a run did its work. Runs of one workload and one setting are repeats."""

    strategy: str  # the name of a YAML, or what a person wrote
    nodes: int
    gpus_per_node: int
    per_device_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    strategy_options: str | None = None  # as JSON
    activation_checkpointing: bool = False

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def shape(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node}"

    @property
    def batch_per_device(self) -> int | None:
        """The samples of a device in one optimizer step."""
        if self.per_device_batch_size is None:
            return None
        return self.per_device_batch_size * (self.gradient_accumulation_steps or 1)


@dataclass
class Figures:
    """What was measured of a run. Times are in seconds, memory in MB of the fullest rank."""

    seconds: float | None = None  # of training: every optimizer step
    total_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None
    training_memory_mb: float | None = None  # the peak without what was there before the model
    samples_trained: float | None = None
    steps: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None


@dataclass(eq=False)
class Run:
    """One run. `problem` says why it is no timing, or is ""."""

    name: str
    workload: dict[str, Any]  # what has to be the same in runs that are compared
    setting: Setting
    problem: str = ""
    figures: Figures = field(default_factory=Figures)
    ranks: list[Rank] = field(default_factory=list)
    log: str | None = None
    began: datetime | None = None
    seeds: tuple[Any, ...] = ()  # what losses depend on besides: the seed, the learning rate

    @property
    def cost(self) -> float:
        """Seconds of training for each sample trained on; of times by hand, whose samples are not
        known, all seconds.
        """
        return self.seconds / (self.figures.samples_trained or 1)

    @property
    def seconds(self) -> float:
        """Of training; only of a run that is a timing, which has them."""
        assert self.figures.seconds is not None
        return self.figures.seconds


def read_record(path: Path) -> Record:
    """A run.json. Raises an error of UNREADABLE if it is none."""
    record = Record.model_validate_json(path.read_bytes())
    if record.status not in STATUS:
        raise ValueError(f"status: {record.status!r} is not known")
    if record.devices % record.nodes:
        raise ValueError(f"devices: {record.devices} are not as many on each of the nodes")
    for name in ("strategy_options", "workload"):
        if len(record.model_dump_json(include={name})) > LONGEST:
            raise ValueError(f"{name}: it has more than {LONGEST:,} characters")
    if record.status == "completed":
        check_ranks(record)
    return record


def check_ranks(record: Record) -> None:
    """Raises ValueError if a record does not have each of its ranks once, or if its batches
    contradict each other. DP's one process has all devices.
    """
    processes = 1 if record.strategy == "dp" else record.devices
    ranks = sorted(rank.rank for rank in record.ranks)
    if len(ranks) != processes or ranks != list(range(len(ranks))):
        raise ValueError(f"ranks: they are not those from 0 to {processes - 1}, each once")
    batch = (record.per_device_batch_size or 0) * (record.gradient_accumulation_steps or 1)
    if batch * record.devices not in (0, record.global_batch_size):
        raise ValueError(
            f"global_batch_size: {record.devices} x {batch} are not {record.global_batch_size}"
        )


def make_run(record: Record, path: Path, folder: Path) -> Run:
    """A record as a Run. Raises ValueError if it has no times."""
    problem = STATUS[record.status]
    log = find_log(path, record, folder)
    if log and record.status == "running":
        problem += f": see {log}"
    if not problem and record.resumed_from:
        problem = "resumed: not a timing"
    if not problem and record.profiled:
        problem = PROFILED
    if not problem and not record.steps:
        problem = EVALUATED
    if not problem and min(record.seconds.train, record.seconds.total) < SHORTEST:
        raise ValueError(f"seconds: the times of a run have to be {SHORTEST:g} or more")
    inside = path.parent.resolve() == folder.resolve()
    return Run(
        name=folder.resolve().name if inside else os.path.relpath(path.parent, folder),
        workload=find_workload(record),
        setting=find_setting(record),
        problem=problem,
        figures=find_figures(record),
        ranks=record.ranks,
        log=log,
        began=record.began,
        seeds=tuple(getattr(record.workload, name, None) for name in SEEDS),
    )


def find_workload(record: Record) -> dict[str, Any]:
    """All that has to be the same in runs that are compared. Seed and learning rate change no
    time.
    """
    devices = {rank.device_name or record.device_name for rank in record.ranks}
    work = record.workload.model_dump(exclude={*SEEDS})
    on_cpu = record.device_name.startswith("CPU")
    return {
        "script": record.script,
        **work,
        "parameters": record.parameters,
        "device_name": " + ".join(sorted(devices)),
        # With a GPU, threads only feed it, and DP's one process has those of all its GPUs.
        "threads": record.threads if on_cpu else None,
        **record.versions.model_dump(),
    }


def find_setting(record: Record) -> Setting:
    options = record.strategy_options or {}
    return Setting(
        strategy=name_yaml(record.strategy, options),
        nodes=record.nodes,
        gpus_per_node=record.devices // record.nodes,
        per_device_batch_size=record.per_device_batch_size,
        gradient_accumulation_steps=record.gradient_accumulation_steps or 1,
        global_batch_size=record.global_batch_size,
        strategy_options=json.dumps(options, sort_keys=True),
        activation_checkpointing=bool(record.activation_checkpointing),
    )


def find_figures(record: Record) -> Figures:
    peaks = [rank.peak_memory_mb for rank in record.ranks]
    added = [
        rank.peak_memory_mb - rank.memory_before_mb
        for rank in record.ranks
        if rank.peak_memory_mb and rank.memory_before_mb is not None
    ]
    return Figures(
        seconds=record.seconds.train,
        total_seconds=record.seconds.total,
        samples_per_second=record.samples_per_second or None,
        tokens_per_second=record.tokens_per_second or None,
        peak_memory_mb=max((peak for peak in peaks if peak), default=None),
        training_memory_mb=max(added) if len(added) == len(record.ranks) else None,
        samples_trained=record.steps * record.global_batch_size,
        steps=record.steps,
        first_loss=record.loss_history[0][1] if record.loss_history else None,
        last_loss=record.loss_history[-1][1] if record.loss_history else None,
    )


def find_log(path: Path, record: Record, folder: Path) -> str | None:
    """The log of a run: a sweep's RUN.log, or Slurm's default name; None if neither is known."""
    run = path.parent.resolve()
    log = run.with_name(run.name + ".log")
    if log.exists():
        return os.path.relpath(log, folder.resolve())
    return f"slurm-{record.slurm_job_id}.out" if record.slurm_job_id else None


# -------- a folder of runs


def unpack(path: Path) -> Path:
    """A folder of runs as it is; a compressed one (.zip, .tar.xz and other .tar) unpacked into a
    fresh folder. Raises ValueError.
    """
    if path.is_dir():
        return path
    folder = tempfile.mkdtemp(prefix="report-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as zipped:
                check_sizes(member.file_size for member in zipped.infolist())
                zipped.extractall(folder)  # It drops names that lead outside.
        else:
            with tarfile.open(path) as tar:
                check_sizes(member.size for member in tar)
                tar.extractall(folder, filter="data")  # It refuses them.
    except (tarfile.ReadError, zipfile.BadZipFile):
        raise ValueError(f"{path} is neither a folder nor a whole .zip or .tar archive") from None
    except Exception as problem:  # each kind of compression has its own
        raise ValueError(f"cannot unpack {path}: {problem}") from None
    return Path(folder)


def check_sizes(sizes: Iterable[int]) -> None:
    """Raises ValueError if the members of an archive are too large, or too many."""
    total = 0
    for number, size in enumerate(sizes, 1):
        total += size
        if total > LARGEST or number > MOST:
            raise ValueError(
                f"it has more than {LARGEST / 2**30:.0f} GiB, or {MOST:,} files; pack run.json, "
                "sweep.csv and *.log only"
            )


def find_files(folder: Path, name: str) -> list[Path]:
    """All files of this name below a folder, those in linked folders too, each folder once."""
    found, seen = [], set()
    for here, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        if name in files:
            found.append(Path(here) / name)
    return sorted(found)


def explain(problem: Exception) -> str:
    """What is wrong with a record, in a few words."""
    if type(problem) is ValueError:  # one of ours
        return one_line(problem)
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return one_line(f"{place}: {first['msg']}" if place else first["msg"])
    return one_line(f"{type(problem).__name__}: {problem}")


def read_runs(folder: Path, archive: Path) -> tuple[list[Run], list[str]]:
    """All runs below a folder, and a sentence for each file that is no record, or the copy of one.
    A run that was planned (sweep.csv) but is not there is a run with a problem, and has the
    workload of the sweep's other runs. Raises FileNotFoundError if there is nothing at all: it
    names the `archive` of which the folder was unpacked, or the folder again.
    """
    runs: list[Run] = []
    notes: list[str] = []
    paths = find_files(folder, "run.json")
    originals: dict[str, str] = {}
    for path in paths:
        name = os.path.relpath(path, folder)
        try:
            record = read_record(path)
            run = make_run(record, path, folder)
        except UNREADABLE as problem:
            notes.append(f"skipped {name}: no run record ({explain(problem)})")
            continue
        first = originals.setdefault(record.model_dump_json(), name)
        if first == name:
            runs.append(run)
        else:
            notes.append(f"skipped {name}: a copy of {first}, and no repeat")
    found = {path.parent.resolve() for path in paths}
    for plan in find_files(folder, "sweep.csv"):
        try:
            runs += read_plan(plan, folder, found, runs)
        except (*UNREADABLE, csv.Error) as problem:
            name = os.path.relpath(plan, folder)
            notes.append(f"skipped {name}: no plan of a sweep ({explain(problem)})")
    if not runs and not notes:
        raise FileNotFoundError(
            f"no run.json below {archive}: the training scripts leave one in their output directory"
        )
    return runs, notes


def read_plan(plan: Path, folder: Path, found: set[Path], runs: list[Run]) -> list[Run]:
    """The runs that a sweep.csv has and that are not `found`."""
    missing = []
    with open(plan, newline="", encoding="utf-8") as file:
        for planned in csv.DictReader(file):
            path = plan.parent / planned["run"]
            place = int(planned["nodes"]), int(planned["gpus_per_node"])
            if min(place) < 1 or max(len(text) for text in planned.values()) > 200:
                raise ValueError("a shape has no device, or a text is longer than 200 characters")
            if path.resolve() in found:
                continue
            job = f", job {planned['job']}" if planned["job"] else ""
            name = os.path.relpath(path, folder)
            here = [run for run in runs if Path(run.name).parent == Path(name).parent]
            known = [run.workload for run in here if not run.problem]
            missing.append(
                Run(
                    name=name,
                    workload=known[0] if known else {"script": "a sweep"},
                    setting=Setting(planned["strategy"], *place),
                    problem=f"failed or missing{job}: see {name}.log",
                )
            )
    return missing
