"""A run as the report knows it: the names and types of all that is compared, measured and shown.

What is not known is None, everywhere.
"""

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

PROFILED = "profiled: not a timing"


class Typed(BaseModel):
    """A part of a record. A wrong type, NaN or infinity is a ValidationError."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Work:
    """What has to be the same for two runs to be compared: with other data or on another device, it
    is another experiment.
    """

    script: str
    model: str | None = None
    dataset: str | None = None
    samples: int | None = None
    eval_samples: int | None = None
    sequence_length: int | None = None
    max_grad_norm: float | None = None
    epochs: int | None = None
    steps: int | None = None
    precision: str | None = None
    compute_dtype: str | None = None
    dynamo: str | None = None
    device_name: str | None = None
    threads: int | None = None
    torch: str | None = None

    @property
    def on_cpu(self) -> bool:
        return (self.device_name or "").startswith("CPU")


@dataclass(frozen=True)
class Setting:
    """How a run did its work. Runs of one work and one setting are repeats."""

    strategy: str  # the name of a YAML, or what a person wrote
    nodes: int
    gpus_per_node: int
    per_device_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    strategy_options: str | None = None  # as JSON
    activation_checkpointing: bool = False
    cores: float | None = None  # of the CPU, for each rank

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
    samples_per_second: float | None = None  # of steady steps
    tokens_per_second: float | None = None
    peak_memory_mb: float | None = None
    training_memory_mb: float | None = None  # without what was there before the model
    samples_trained: float | None = None
    trained_steps: float | None = None
    loading_seconds: float | None = None  # per step, as the next ones
    waiting_seconds: float | None = None
    padded_tokens: float | None = None
    busy_share: float | None = None


@dataclass
class Model:
    """The sizes of a model that formulas need."""

    parameters: int | None = None
    tensors: list[int] | None = None
    layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    positions: int | None = None


class Rank(Typed):
    rank: NonNegativeInt
    host: str
    real: NonNegativeFloat
    user: NonNegativeFloat
    sys: NonNegativeFloat
    peak_memory_mb: NonNegativeFloat | None = None
    memory_before_mb: NonNegativeFloat | None = None
    train_cpu: NonNegativeFloat | None = None
    device_name: str | None = None
    cores: PositiveInt | None = None  # that the rank may use, with the other ranks of its host


@dataclass
class Run:
    """One run. `problem` says why it is no timing, or is ""."""

    name: str
    work: Work
    setting: Setting
    problem: str = ""
    figures: Figures = field(default_factory=Figures)
    model: Model = field(default_factory=Model)
    ranks: list[Rank] = field(default_factory=list)
    losses: list[tuple[int, float, float]] = field(default_factory=list)  # step, loss, seconds
    log: str | None = None

    @property
    def seconds(self) -> float:
        """Of training; only of a run that is a timing, which has them."""
        assert self.figures.seconds is not None
        return self.figures.seconds

    @property
    def device_names(self) -> list[str]:
        """The models of the ranks' devices, each once."""
        return sorted({rank.device_name for rank in self.ranks if rank.device_name})
