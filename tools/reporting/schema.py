"""The fields of a run.json and of a sweep.csv with their types, and the values of a run.json that
have to agree.
"""

import math
import statistics
from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt

SHORTEST = 1e-6  # seconds of training
OFF = 0.25  # values that differ by a larger share contradict each other

Amount = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Name = Annotated[str, Field(max_length=60)]


class Row(BaseModel):
    """The columns that a sweep.csv and a file of times share. Their texts become numbers."""

    model_config = ConfigDict(str_strip_whitespace=True, str_max_length=200)

    strategy: Annotated[Name, Field(min_length=1)]
    nodes: Count
    gpus_per_node: Count


class PlannedRun(Row):
    """A row of a sweep.csv."""

    run: str
    job: str


class Strict(BaseModel):
    """A part of a record. A wrong type, NaN, infinity or a long text is a ValidationError."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, str_max_length=400)


class Seconds(Strict):
    train: Amount
    total: Amount


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
    samples: Count | None = None
    num_epochs: NonNegativeInt | None = None
    max_train_steps: NonNegativeInt | None = None


class Rank(Strict):
    rank: NonNegativeInt
    host: Annotated[str, Field(min_length=1, max_length=253)]
    real: Amount
    user: Amount
    sys: Amount
    peak_memory_mb: Amount | None = None
    memory_before_mb: Amount | None = None
    device_name: str | None = None
    cores: Count | None = None


class Record(Strict):
    """The fields of a run.json that the report reads."""

    script: str
    status: Literal["completed", "preempted", "failed", "running"]
    strategy: Name
    nodes: Count
    devices: Count
    device_name: str
    steps: Annotated[int, Field(ge=0, le=10**12)]
    global_batch_size: Count
    per_device_batch_size: Count
    parameters: Count
    workload: Workload
    ranks: list[Rank] = Field(min_length=1)
    seconds: Seconds
    versions: dict[Name, Name | None]
    loss_history: list[tuple[NonNegativeInt, Annotated[float, AllowInfNan(True)]]]
    gradient_accumulation_steps: Count = 1
    strategy_options: dict[str, Any] = {}
    activation_checkpointing: bool = False
    threads: Count | None = None
    samples_per_second: Amount | None = None  # the median over the intervals between two logs
    steps_per_second: list[Amount] | None = None  # between two logs, for each log
    tokens_per_second: Amount | None = None
    tokens: NonNegativeInt | None = None
    resumed_from: str | None = None
    profiled: bool = False
    slurm_job_id: str | int | None = None
    began: AwareDatetime | None = None


def find_contradiction(record: Record) -> str:
    """What cannot be true of a run that was completed in one go, or "" if all values agree."""
    found = contradict_ranks(record) or contradict_samples(record) or contradict_seconds(record)
    return f"contradicts itself: {found}" if found else ""


def contradict_ranks(record: Record) -> str:
    """Compare the ranks, devices, nodes and batches."""
    processes = 1 if record.strategy == "dp" else record.devices  # DP's one has all devices
    ranks = sorted(rank.rank for rank in record.ranks)
    if len(ranks) != processes or ranks != list(range(len(ranks))):
        return f"it should have each rank from 0 to {processes - 1} once"
    if record.devices % record.nodes:
        return f"its {record.devices} devices cannot be divided among {record.nodes} nodes"
    batch = record.per_device_batch_size * record.gradient_accumulation_steps
    if batch * record.devices != record.global_batch_size:
        return f"its global batch is {record.global_batch_size}, not {record.devices} x {batch}"
    return ""


def contradict_samples(record: Record) -> str:
    """Compare the steps with the losses, the settings and the tokens."""
    work, batch = record.workload, record.global_batch_size
    if record.loss_history and record.loss_history[-1][0] != record.steps:
        last = record.loss_history[-1][0]
        return f"it made {record.steps:,} steps, but its last loss is from step {last:,}"
    steps = work.max_train_steps
    if not steps and work.num_epochs and work.samples:
        steps = work.num_epochs * (work.samples // batch)
    if steps is not None and steps != record.steps:
        return (
            f"it made {record.steps:,} steps, but its settings ask for {steps:,} of {batch} samples"
        )
    if record.tokens and record.samples_per_second and record.tokens_per_second:
        one = record.tokens / (record.steps * batch)
        other = record.tokens_per_second / record.samples_per_second
        if abs(one / other - 1) > OFF:
            return f"a sample has {one:.1f} tokens by their number, but {other:.1f} by the rates"
    return ""


def contradict_seconds(record: Record) -> str:
    """Compare the time of training with that of its steps. The rates between two logs show slow
    steps, such as those of a warm-up, which explain a longer time.
    """
    train, total = record.seconds.train, record.seconds.total
    if train > total:
        return f"it trained for {train:.6g} s, but the whole run took {total:.6g} s"
    if train < SHORTEST:
        return f"it trained for {train:g} s"
    if not record.samples_per_second:
        return ""
    usual = record.steps * record.global_batch_size / record.samples_per_second
    shortest, longest = (1 - OFF) * usual, math.inf
    rates = sorted(rate for rate in record.steps_per_second or [] if rate)
    if rates:
        if abs(statistics.median(rates) * usual / record.steps - 1) > OFF:
            return "its samples per second do not match its steps per second"
        # Between two logs are at most twice as many steps as on average.
        half = max(1, len(rates) // 2)
        shortest = min(shortest, record.steps / statistics.harmonic_mean(rates[-half:]))
        longest = max((1 + OFF) * usual, record.steps / statistics.harmonic_mean(rates[:half]))
    if 0.999 * shortest <= train <= 1.001 * longest:  # numbers are rounded
        return ""
    return f"it trained for {train:.4g} s, but its steps take {usual:.4g} s at their median pace"
