"""What a run.json has to be: its fields with their types, and what has to agree in it."""

import json
import math
import statistics
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AllowInfNan,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
)

SHORTEST = 1e-6  # seconds of training
LONGEST = 4000  # characters of the options of a strategy
OFF = 0.25  # what differs by more than this share contradicts itself


class Strict(BaseModel):
    """A part of a record. A wrong type, NaN, infinity or a long text is a ValidationError."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, str_max_length=400)


def limit(options: dict[str, Any]) -> dict[str, Any]:
    """The same options. Raises ValueError if they are too long."""
    if len(json.dumps(options)) > LONGEST:
        raise ValueError(f"it has more than {LONGEST:,} characters")
    return options


Amount = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Name = Annotated[str, Field(max_length=60)]
Options = Annotated[dict[str, Any], AfterValidator(limit)]


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
    parameters: Count
    workload: Workload
    ranks: list[Rank] = Field(min_length=1)
    seconds: Seconds
    versions: dict[Name, Name | None]
    loss_history: list[tuple[NonNegativeInt, Annotated[float, AllowInfNan(True)]]]
    per_device_batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    strategy_options: Options | None = None
    activation_checkpointing: bool | None = None
    threads: Count | None = None
    samples_per_second: Amount | None = None  # the median over the intervals between two logs
    steps_per_second: list[Amount] | None = None  # between two logs, for each log
    tokens_per_second: Amount | None = None
    tokens: NonNegativeInt | None = None
    resumed_from: str | None = None
    profiled: bool | None = None
    slurm_job_id: str | int | None = None
    began: AwareDatetime | None = None


def find_contradiction(record: Record) -> str:
    """What cannot be true of a run that was completed in one go; "" if all fits."""
    found = contradict_ranks(record) or contradict_samples(record) or contradict_seconds(record)
    return f"contradicts itself: {found}" if found else ""


def contradict_ranks(record: Record) -> str:
    processes = 1 if record.strategy == "dp" else record.devices  # DP's one has all devices
    ranks = sorted(rank.rank for rank in record.ranks)
    if len(ranks) != processes or ranks != list(range(len(ranks))):
        return f"it has not each of {processes} ranks once, from 0 on"
    if record.devices % record.nodes:
        return f"its {record.devices} devices are not as many on each of {record.nodes} nodes"
    batch = (record.per_device_batch_size or 0) * (record.gradient_accumulation_steps or 1)
    if batch * record.devices not in (0, record.global_batch_size):
        return f"its global batch is {record.global_batch_size}, not {record.devices} x {batch}"
    return ""


def contradict_samples(record: Record) -> str:
    """Whether steps x global batch are not the losses, samples and tokens of the run."""
    work, batch = record.workload, record.global_batch_size
    if record.loss_history and record.loss_history[-1][0] != record.steps:
        last = record.loss_history[-1][0]
        return f"it made {record.steps:,} steps, and its last loss is that of step {last:,}"
    steps = work.max_train_steps
    if not steps and work.num_epochs and work.samples:
        steps = work.num_epochs * (work.samples // batch)
    if steps is not None and steps != record.steps:
        return f"it made {record.steps:,} steps, and was asked for {steps:,} of {batch} samples"
    if record.tokens and record.samples_per_second and record.tokens_per_second:
        one = record.tokens / (record.steps * batch)
        other = record.tokens_per_second / record.samples_per_second
        if abs(one / other - 1) > OFF:
            return f"a sample has {one:.1f} tokens by their number, and {other:.1f} by the rates"
    return ""


def contradict_seconds(record: Record) -> str:
    """Whether training took another time than its steps. The rates between two logs show slow
    steps, as of a warm-up: they explain a longer time.
    """
    train, total = record.seconds.train, record.seconds.total
    if train > total:
        return f"it trained for {train:.6g} s, and the whole run took {total:.6g} s"
    if train < SHORTEST:
        return f"it trained for {train:g} s"
    if not record.samples_per_second:
        return ""
    usual = record.steps * record.global_batch_size / record.samples_per_second
    shortest, longest = (1 - OFF) * usual, math.inf
    rates = sorted(rate for rate in record.steps_per_second or [] if rate)
    if rates:
        if abs(statistics.median(rates) * usual / record.steps - 1) > OFF:
            return "its samples per second are not those of its steps per second"
        # Between two logs are at most twice as many steps as on average.
        half = max(1, len(rates) // 2)
        shortest = min(shortest, record.steps / statistics.harmonic_mean(rates[-half:]))
        longest = max((1 + OFF) * usual, record.steps / statistics.harmonic_mean(rates[:half]))
    if 0.999 * shortest <= train <= 1.001 * longest:  # numbers are rounded
        return ""
    return f"it trained for {train:.4g} s, and at its median pace its steps take {usual:.4g} s"
