"""Reads and checks what runs left: run.json, and the plan of a sweep (sweep.csv).

None means "not known" everywhere.
"""

import csv
import itertools
import json
import math
import os
import statistics
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common import UNREADABLE
from common.printing import one_line
from common.strategies import name_yaml
from reporting.schema import PlannedRun, Rank, Record, find_contradiction

# -------- a run, as the report knows it

PROFILED = "profiled: not a timing"
EVALUATED = "evaluated: no training"
MEANT = (PROFILED, EVALUATED)  # by the user, so nothing is lost
SEEDS = ("seed", "learning_rate")
# The answer names the word before the colon.
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
    gradient_accumulation_steps: int = 1
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
        return self.per_device_batch_size * self.gradient_accumulation_steps


@dataclass
class Figures:
    """What a run measured. Times are in seconds, memory in MB of the fullest rank."""

    seconds: float = math.nan  # every optimizer step; known for runs without a problem
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
    """One run. `problem` says why its time does not count, or is ""."""

    name: str
    workload: dict[str, Any]  # what has to be the same in runs that are compared
    setting: Setting
    problem: str = ""
    figures: Figures = field(default_factory=Figures)
    ranks: list[Rank] = field(default_factory=list)
    log: str | None = None
    began: datetime | None = None
    seeds: tuple[Any, ...] = ()  # the values of SEEDS, which losses depend on
    late_loss: float | None = None  # median of the last tenth, if the first loss is that of step 1

    @property
    def cost(self) -> float:
        """Seconds of training for each sample, or all seconds of times by hand."""
        return self.figures.seconds / (self.figures.samples_trained or 1)

    @property
    def learned(self) -> bool:
        """False if the loss is known and did not fall below the first one."""
        first = self.figures.first_loss
        return first is None or self.late_loss is None or self.late_loss < first < math.inf


def make_run(record: Record, path: Path, folder: Path) -> Run:
    log, problem = find_log(path, record, folder), STATUS[record.status]
    if record.status == "running" and log:
        problem += f": see {log}"
    if record.status == "completed":
        if record.resumed_from:
            problem = "resumed: not a timing"
        elif record.profiled:
            problem = PROFILED
        else:
            problem = find_contradiction(record) if record.steps else EVALUATED
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
        late_loss=find_late_loss(record.loss_history),
    )


def find_workload(record: Record) -> dict[str, Any]:
    """What has to be the same in compared runs. Seed and learning rate change no time."""
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
        "cores": count_cores(record, on_cpu),
        **record.versions,
    }


def count_cores(record: Record, on_cpu: bool) -> str | None:
    """The cores of each device and of each node, in words. On CPUs the scripts divide those of a
    node among its ranks; with GPUs, each rank may use all of them.
    """
    nodes: dict[str, list[int]] = {}
    for rank in record.ranks:
        if rank.cores is None:
            return None
        nodes.setdefault(rank.host, []).append(rank.cores)
    totals = {sum(cores) if on_cpu else max(cores) for cores in nodes.values()}
    devices = record.devices // record.nodes
    each = set(itertools.chain(*nodes.values())) if on_cpu else {max(totals) / devices}
    per_device, per_node = ("/".join(f"{n:g}" for n in sorted(some)) for some in (each, totals))
    return f"{per_device} per device, {per_node} per node"


def find_late_loss(losses: list[tuple[int, float]]) -> float | None:
    """The median of the last tenth of a run's losses, if these begin with the first step."""
    if len(losses) < 2 or losses[0][0] != 1:
        return None
    return statistics.median(loss for _, loss in losses[-max(1, len(losses) // 10) :])


def find_setting(record: Record) -> Setting:
    return Setting(
        strategy=name_yaml(record.strategy, record.strategy_options),
        nodes=record.nodes,
        gpus_per_node=record.devices // record.nodes,
        per_device_batch_size=record.per_device_batch_size,
        gradient_accumulation_steps=record.gradient_accumulation_steps,
        global_batch_size=record.global_batch_size,
        strategy_options=json.dumps(record.strategy_options, sort_keys=True),
        activation_checkpointing=record.activation_checkpointing,
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
    """The log of a run: a sweep's RUN.log, or Slurm's default name."""
    run = path.parent.resolve()
    log = run.with_name(run.name + ".log")
    if log.exists():
        return os.path.relpath(log, folder.resolve())
    return f"slurm-{record.slurm_job_id}.out" if record.slurm_job_id else None


# -------- a folder of runs


def find_files(folder: Path, name: str) -> list[Path]:
    """All files of this name below a folder, those in linked folders too, each once."""
    found, seen = [], set()
    for here, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:  # through a link
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        if name in files:
            found.append(Path(here) / name)
    return sorted(found)


def explain(problem: Exception) -> str:
    """What is wrong with a record or a row, in a few words."""
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"]
        message = message.removeprefix("Value error, ")  # pydantic's, before a validator's words
        return one_line(f"{place}: {message}" if place else message)
    return one_line(problem)


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """All runs below a folder, and a sentence for each file that is not a record or copies another
    one. A run that was planned (sweep.csv) but is not there is a run with a problem, and has the
    workload of the sweep's other runs. Raises FileNotFoundError if there is nothing at all.
    """
    runs: list[Run] = []
    notes: list[str] = []
    paths = find_files(folder, "run.json")
    originals: dict[str, str] = {}
    for path in paths:
        name = os.path.relpath(path, folder)
        try:
            record = Record.model_validate_json(path.read_bytes())
            run = make_run(record, path, folder)
        except UNREADABLE as problem:
            notes.append(f"skipped {name}: not a run record ({explain(problem)})")
            continue
        first = originals.setdefault(record.model_dump_json(), name)
        if first == name:
            runs.append(run)
        else:
            notes.append(f"skipped {name}: a copy of {first}, so not a repeat")
    found = {path.parent.resolve() for path in paths}
    for plan in find_files(folder, "sweep.csv"):
        try:
            runs += read_plan(plan, folder, found, runs)
        except (*UNREADABLE, csv.Error) as problem:
            name = os.path.relpath(plan, folder)
            notes.append(f"skipped {name}: not the plan of a sweep ({explain(problem)})")
    if not runs and not notes:
        raise FileNotFoundError(
            f"no run.json below {folder}: the training scripts leave one in their output directory"
        )
    return runs, notes


def read_plan(plan: Path, folder: Path, found: set[Path], runs: list[Run]) -> list[Run]:
    """The runs of a sweep.csv that are not among `found`."""
    missing = []
    with open(plan, newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            planned = PlannedRun.model_validate(row)
            path = plan.parent / planned.run
            if path.resolve() in found:
                continue
            job = f", job {planned.job}" if planned.job else ""
            name = os.path.relpath(path, folder)
            here = [run for run in runs if Path(run.name).parent == Path(name).parent]
            known = [run.workload for run in here if not run.problem]
            missing.append(
                Run(
                    name=name,
                    workload=known[0] if known else {"script": "a sweep"},
                    setting=Setting(planned.strategy, planned.nodes, planned.gpus_per_node),
                    problem=f"failed or missing{job}: see {name}.log",
                )
            )
    return missing
