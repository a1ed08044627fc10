"""The strategies: what each YAML of accelerate_configs/ says, with DeepSpeed's JSON."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from common import UNREADABLE

ROOT = Path(__file__).resolve().parents[2]
# A record's `strategy`, in the order of tables, and its name in a report.
FAMILIES = {"baseline": "baseline", "dp": "DP", "ddp": "DDP", "fsdp": "FSDP", "hsdp": "HSDP"}
FAMILIES |= {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


@dataclass(frozen=True)
class Strategy:
    """A YAML: a record's `strategy` and `strategy_options`, and where it keeps parameters,
    gradients and optimizer states.

    "whole": on each device. "shard": 1/n of it on each of n devices; in HSDP n counts the devices
    that share a replica. "host": each process keeps its 1/n in the CPU's memory.
    """

    family: str
    options: dict
    parameters: str
    gradients: str
    states: str


def plain(value):
    """An option as text: YAML's `true` and a record's "True" are "true". A place is its device."""
    return str(value.get("device") if isinstance(value, dict) else value).lower()


def words_for(path):
    """Words of `accelerate launch` for a YAML, from any folder: a YAML of DeepSpeed names its JSON
    from the folder above its own. Raises an error of UNREADABLE, or one of yaml.
    """
    words = ["--config_file", str(path)]
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    file = (config.get("deepspeed_config") or {}).get("deepspeed_config_file")
    beside = path.resolve().parent.parent / str(file)
    if file and not Path(file).is_file() and beside.is_file():
        words += ["--deepspeed_config_file", str(beside)]
    return words


def read_strategy(path):
    """The Strategy of a YAML: sections 5.1 to 5.3 of ZeRO, https://arxiv.org/abs/1910.02054, and
    for the host ZeRO-Offload, https://arxiv.org/abs/2101.06840. DeepSpeed's ZeRO-1 shards the
    gradients, too. Raises an error of UNREADABLE, or one of yaml.
    """
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    family = {"NO": "baseline", "FSDP": "fsdp"}.get(config["distributed_type"], "ddp")
    options = config.get("fsdp_config", {}) | config.get("parallelism_config", {})
    if config["distributed_type"] == "DEEPSPEED":
        file = path.parent.parent / config["deepspeed_config"]["deepspeed_config_file"]
        options = json.loads(file.read_text(encoding="utf-8"))["zero_optimization"]
        family = f"zero{options['stage']}"
    elif "parallelism_config" in config:
        family = "hsdp"
    elif "data_parallel" in str(config.get("dynamo_config")):
        family = "dp"
    prefix = "^(fsdp_|parallelism_config_)"  # a record has the names without it
    options = {re.sub(prefix, "", name): plain(value) for name, value in options.items()}
    parameters = "shard" if family in ("fsdp", "hsdp", "zero3") else "whole"
    rest = "whole" if family in ("baseline", "dp", "ddp", "zero0") else "shard"
    if "true" == options.get("offload_params") or "cpu" == options.get("offload_param"):
        parameters = "host"
    if "true" == options.get("offload_params") or "cpu" == options.get("offload_optimizer"):
        rest = "host"
    return Strategy(family, options, parameters, rest, rest)


def place_of(name):
    """The place of a YAML in tables, by the strategy that its name begins with; others are last."""
    family = name.split("_")[0]
    return [*FAMILIES, family].index(family)


def label_of(name):
    """A YAML's name for readers: "ZeRO-2 offload" for "zero2_offload"."""
    family, *more = name.split("_")
    return " ".join([FAMILIES[family], *more]) if family in FAMILIES else name


def read_strategies():
    """{name: Strategy} of the YAMLs, in the order of tables, without those that are unreadable."""
    found = {}
    for path in sorted(ROOT.glob("accelerate_configs/*.yaml")):
        with suppress(*UNREADABLE, yaml.YAMLError):
            found[path.stem] = read_strategy(path)
    return {name: found[name] for name in sorted(found, key=place_of)}


STRATEGIES = read_strategies()


def name_yaml(strategy, options):
    """The YAML behind a record's `strategy` and `strategy_options`: "fsdp_keep" is an "fsdp" that
    does not reshard. Of the YAMLs whose additions to STRATEGY.yaml the record has, it is the one
    that adds most, or the strategy itself if two add as much.
    """
    usual = STRATEGIES[strategy].options.items() if strategy in STRATEGIES else set()
    added = {strategy: 0}
    for name, known in STRATEGIES.items():
        own = known.options.items() - usual
        if known.family == strategy and all(plain(options.get(key)) == text for key, text in own):
            added[name] = len(own)
    first, *others = [name for name in added if added[name] == max(added.values())]
    return strategy if others else first


def shards_of(options, devices):
    """How many ranks share a model: in HSDP those of a replica, otherwise all."""
    return int(options.get("dp_shard_size", devices))
