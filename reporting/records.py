"""What runs left behind, read as runs: run.json, and the plan of a sweep (sweep.csv)."""

import atexit
import csv
import json
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AllowInfNan,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from planning.facts import UNREADABLE, name_yaml
from reporting.runs import PROFILED, Figures, Model, Rank, Run, Setting, Typed, Work


class Seconds(Typed):
    train: NonNegativeFloat
    total: NonNegativeFloat
    loading: NonNegativeFloat | None = None


class Versions(Typed):
    torch: str


class Workload(Typed):
    model: str | None = None
    dataset: str | None = None
    samples: NonNegativeInt | None = None
    eval_samples: NonNegativeInt | None = None
    sequence_length: PositiveInt | None = None
    max_grad_norm: float | None = None
    epochs: NonNegativeInt | None = None
    steps: NonNegativeInt | None = None
    precision: str | None = None
    compute_dtype: str | None = None
    dynamo: str | None = None
    layers: PositiveInt | None = None
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    positions: PositiveInt | None = None


STATUS = {
    "completed": "",
    "preempted": "stopped before its end",
    "failed": "broke down",
    "running": "died, or is still running",
}


Number = NonNegativeInt | NonNegativeFloat | Literal["auto"]


class Options(Typed):
    """Of a strategy's options, those that formulas calculate with. The others stay as they are."""

    model_config = ConfigDict(extra="allow")

    dp_shard_size: PositiveInt = 1
    reduce_bucket_size: Number = "auto"
    stage3_param_persistence_threshold: Number = "auto"
    stage3_prefetch_bucket_size: Number = "auto"
    stage3_max_live_parameters: Number = "auto"


class Record(Typed):
    """The fields of a run.json that the report reads."""

    script: str
    status: str
    strategy: str
    nodes: PositiveInt
    devices: PositiveInt
    device_name: str
    steps: NonNegativeInt
    global_batch_size: PositiveInt
    parameters: PositiveInt
    workload: Workload
    ranks: list[Rank] = Field(min_length=1)
    seconds: Seconds
    versions: Versions
    loss_history: list[tuple[NonNegativeInt, Annotated[float, AllowInfNan(True)]]]
    per_device_batch_size: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    strategy_options: Options | None = None
    activation_checkpointing: bool | None = None
    threads: PositiveInt | None = None
    tensors: list[PositiveInt] | None = None
    samples_per_second: NonNegativeFloat | None = None
    tokens_per_second: NonNegativeFloat | None = None
    tokens: NonNegativeInt | None = None
    padding_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    resumed_from: str | None = None
    profiled: bool | None = None
    slurm_job_id: str | int | None = None


def explain(problem: Exception) -> str:
    """What is wrong with a record, in a few words."""
    if isinstance(problem, ValidationError):
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else first["msg"]
    return f"{type(problem).__name__}: {problem}"


def read_record(path: Path, folder: Path) -> Run:
    """One run.json as a Run. Raises an error of UNREADABLE if it is none."""
    return make_run(parse(path), path, folder)


def parse(path: Path) -> Record:
    record = Record.model_validate_json(path.read_bytes())
    if record.status not in STATUS:
        raise ValueError(f"status: {record.status!r} is not known")
    if record.devices % record.nodes:
        raise ValueError(f"devices: {record.devices} are not as many on each of the nodes")
    return record


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
    if not problem and not (record.seconds.train and record.seconds.total):
        raise ValueError("seconds: the times of a run have to be greater than 0")
    inside = path.parent.resolve() == folder.resolve()
    work = record.workload
    sizes = {size.name: getattr(work, size.name, None) for size in fields(Model)}
    return Run(
        name=folder.resolve().name if inside else os.path.relpath(path.parent, folder),
        work=find_work(record),
        setting=find_setting(record),
        problem=problem,
        figures=find_figures(record),
        model=Model(**sizes | {"parameters": record.parameters, "tensors": record.tensors}),
        ranks=record.ranks,
        losses=add_seconds(record),
        log=log,
    )


def find_work(record: Record) -> Work:
    work = record.workload
    names = {one.name for one in fields(Work)} & set(Workload.model_fields)
    return Work(
        **{name: getattr(work, name) for name in names}
        | {
            "script": record.script,
            # What the model computed in, where that is not the launcher's mixed_precision.
            "compute_dtype": work.compute_dtype or work.precision,
            "device_name": record.device_name,
            # With a GPU, threads only feed it, and DP's one process has those of all its GPUs.
            "threads": record.threads if record.device_name.startswith("CPU") else None,
            "torch": record.versions.torch,
        }
    )


def find_setting(record: Record) -> Setting:
    known = record.strategy_options
    options = known.model_dump(exclude_unset=True) if known else {}
    on_host = Counter(rank.host for rank in record.ranks)
    cores = [rank.cores and rank.cores / on_host[rank.host] for rank in record.ranks]
    shares = [share for share in cores if share]
    return Setting(
        strategy=name_yaml(record.strategy, options),
        nodes=record.nodes,
        gpus_per_node=record.devices // record.nodes,
        per_device_batch_size=record.per_device_batch_size,
        gradient_accumulation_steps=record.gradient_accumulation_steps,
        global_batch_size=record.global_batch_size,
        strategy_options=json.dumps(options, sort_keys=True),
        activation_checkpointing=bool(record.activation_checkpointing),
        cores=min(shares) if shares else None,
    )


def find_figures(record: Record) -> Figures:
    peaks = [rank.peak_memory_mb for rank in record.ranks]
    added = [
        rank.peak_memory_mb - rank.memory_before_mb
        for rank in record.ranks
        if rank.peak_memory_mb and rank.memory_before_mb is not None
    ]
    steps, loading = record.steps, record.seconds.loading
    waiting, busy = share_of_cpu(record)
    return Figures(
        seconds=record.seconds.train,
        total_seconds=record.seconds.total,
        samples_per_second=record.samples_per_second or None,
        tokens_per_second=record.tokens_per_second or None,
        peak_memory_mb=max((peak for peak in peaks if peak), default=None),
        training_memory_mb=max(added) if len(added) == len(record.ranks) else None,
        samples_trained=steps * record.global_batch_size,
        trained_steps=steps,
        loading_seconds=None if loading is None else loading / max(1, steps),
        waiting_seconds=waiting,
        padded_tokens=find_padded_tokens(record),
        busy_share=busy,
    )


def add_seconds(record: Record) -> list[tuple[int, float, float]]:
    """The losses as (step, loss, seconds of training until then): steady steps are equally long."""
    rate, seconds = record.samples_per_second, record.seconds.train
    each = record.global_batch_size / rate if rate else seconds / max(1, record.steps)
    return [
        (step, loss, max(0.0, seconds - (record.steps - step) * each))
        for step, loss in record.loss_history
    ]


def share_of_cpu(record: Record) -> tuple[float | None, float | None]:
    """Seconds per step that a rank waits for the slowest one, on average: the most that a rank
    computes less the mean. And CPU seconds per second of training, of the rank with the fewest: 1
    if nothing else took the cores and no rank waited. None on GPUs.
    """
    computed = [rank.train_cpu for rank in record.ranks if rank.train_cpu is not None]
    on_cpu = record.device_name.startswith("CPU")
    if not on_cpu or len(computed) < len(record.ranks) or not record.seconds.train:
        return None, None
    waiting = (max(computed) - sum(computed) / len(computed)) / max(1, record.steps)
    return waiting, min(computed) / record.seconds.train


def find_padded_tokens(record: Record) -> float | None:
    """Tokens per device and step, padding included, the mean over the ranks: a larger global batch
    is padded more. None for what has no tokens.
    """
    if not record.tokens or record.padding_share is None or not record.steps:
        return None
    return record.tokens / (1 - record.padding_share) / record.steps / record.devices


def find_log(path: Path, record: Record, folder: Path) -> str | None:
    """The log of a run: a sweep's RUN.log, or Slurm's default name; None if neither is known."""
    run = path.parent.resolve()
    log = run.with_name(run.name + ".log")
    if log.exists():
        return os.path.relpath(log, folder.resolve())
    return f"slurm-{record.slurm_job_id}.out" if record.slurm_job_id else None


# ------------------------------------------------------------------------- a folder of runs
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


def read_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """All runs below a folder, and a sentence for each file that is no record, or the copy of one.
    A run that was planned (sweep.csv) but is not there is a run with a problem, and has the work of
    the sweep's other runs. Raises FileNotFoundError if there is nothing at all.
    """
    runs: list[Run] = []
    notes: list[str] = []
    paths = find_files(folder, "run.json")
    originals: dict[str, Path] = {}
    for path in paths:
        try:
            record = parse(path)
            run = make_run(record, path, folder)
        except UNREADABLE as problem:
            notes.append(
                f"skipped {os.path.relpath(path, folder)}: no run record ({explain(problem)})"
            )
            continue
        content = record.model_dump_json()
        if content in originals:
            notes.append(
                f"skipped {os.path.relpath(path, folder)}: a copy of "
                f"{os.path.relpath(originals[content], folder)}, and no repeat"
            )
            continue
        originals[content] = path
        runs.append(run)
    found = {path.parent.resolve() for path in paths}
    for plan in find_files(folder, "sweep.csv"):
        try:
            runs += read_plan(plan, folder, found, runs)
        except UNREADABLE as problem:
            notes.append(
                f"skipped {os.path.relpath(plan, folder)}: no plan of a sweep ({explain(problem)})"
            )
    if not runs and not notes:
        raise FileNotFoundError(
            f"no run.json below {folder}: the training scripts leave one in their output directory"
        )
    return runs, notes


def read_plan(plan: Path, folder: Path, found: set[Path], runs: list[Run]) -> list[Run]:
    """The runs that a sweep.csv has and that are not `found`. Raises an error of UNREADABLE."""
    missing = []
    with open(plan, newline="", encoding="utf-8") as file:
        for planned in csv.DictReader(file):
            path = plan.parent / planned["run"]
            if path.resolve() in found:
                continue
            job = f", job {planned['job']}" if planned["job"] else ""
            name = os.path.relpath(path, folder)
            siblings = [
                run.work
                for run in runs
                if not run.problem and Path(run.name).parent == Path(name).parent
            ]
            missing.append(
                Run(
                    name=name,
                    work=siblings[0] if siblings else Work(script="a sweep"),
                    setting=Setting(
                        planned["strategy"], int(planned["nodes"]), int(planned["gpus_per_node"])
                    ),
                    problem=f"failed or missing{job}: see {name}.log",
                )
            )
    return missing


def unpack(path: Path) -> Path:
    """A folder of runs as it is; a compressed one (such as .tar.xz) unpacked into a fresh folder.
    Raises ValueError.
    """
    if path.is_dir():
        return path
    folder = tempfile.mkdtemp(prefix="report-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        shutil.unpack_archive(path, folder)
    except Exception as problem:  # each kind of archive has its own
        raise ValueError(f"{path} is neither a folder nor a compressed one: {problem}") from None
    return Path(folder)
