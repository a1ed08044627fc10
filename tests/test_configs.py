"""The YAMLs and DeepSpeed's JSONs hold a strategy and nothing else; accelerate and DeepSpeed read
every key.
"""

import json
from dataclasses import fields

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, RUNGS, STRATEGIES
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from planning import memory

CONFIGS = ROOT / "accelerate_configs"
YAMLS, JSONS = (sorted(CONFIGS.glob(f"*.{kind}")) for kind in ("yaml", "json"))
# Where the run takes place, and what is a hyper-parameter; the first two have no effect anyway.
FORBIDDEN = """rdzv_backend same_network machine_rank num_machines main_process_ip main_process_port
    gpu_ids use_cpu tpu_name tpu_zone gradient_accumulation_steps gradient_clipping""".split()
RECOMPUTES = "fsdp_activation_checkpointing"  # with other dropout masks: preserve_rng_state=False
SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": "", "dynamo_config": "dynamo_"}
SECTIONS["parallelism_config"] = "parallelism_config_"
# DeepSpeed says nothing of a top-level key that it does not know. A JSON may have these and no
# other, with these values.
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # the script's
JSON_VALUES = dict.fromkeys(AUTO, "auto") | {
    "bf16": {"enabled": "auto", "check_grad_overflow": False},  # bad gradients are not skipped
    "gradient_clipping": 0.0,  # none, where accelerate and DeepSpeed have a default of 1
    "timers": {"throughput": {"enabled": False}},  # it would stop the GPU at every step
}
# The last one is off: torch's AdamW works on a CPU, uncompiled.
JSON_KEYS = {*JSON_VALUES, "zero_optimization", "zero_force_ds_cpu_optimizer"}


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_holds_the_strategy_only(path):
    text = path.read_text()
    written = yaml.safe_load(text)
    assert set(written) <= {field.name for field in fields(ClusterConfig)}, "keys that are not read"
    flags = {action.dest for action in launch_command_parser()._actions}
    for section, prefix in SECTIONS.items():
        for key in written.get(section, {}):
            name = key if key.startswith(prefix) else prefix + key
            assert name in flags, f"{section}.{key} is ignored by accelerate launch"
            assert name not in FORBIDDEN
    assert not {*written} & {*FORBIDDEN}
    assert not written.get("fsdp_config", {}).get(RECOMPUTES)
    config = ClusterConfig.from_yaml_file(str(path))
    zero = config.distributed_type == "DEEPSPEED"
    assert config.mixed_precision == (None if zero else "no")
    assert config.num_processes == {"baseline": 1, "dp": 1, "hsdp": 4}.get(path.stem, 2)


def test_there_is_one_yaml_a_strategy():
    names = ["baseline", "dp", "hsdp", *STRATEGIES, *RUNGS]
    assert sorted(path.stem for path in YAMLS) == sorted(names)


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_deepspeeds_json_holds_the_strategy_only(path):
    """It is the one that the YAML of its name names. A variant differs from its base in nothing
    else.
    """
    config = json.loads(path.read_text())
    assert set(config) <= JSON_KEYS and JSON_VALUES.items() <= config.items()
    zero = config["zero_optimization"]
    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert set(zero) <= known, "DeepSpeed has no such key"
    assert zero["reduce_bucket_size"] == memory.BUCKET, "fit.py's formulas count on it"
    assert path.stem.removesuffix("_offload") == f"zero{zero['stage']}"
    named = yaml.safe_load(path.with_suffix(".yaml").read_text())["deepspeed_config"]
    assert named["deepspeed_config_file"] == f"accelerate_configs/{path.name}"
    base = CONFIGS / f"zero{max(2, zero['stage'])}.json"
    base = json.loads(base.read_text())["zero_optimization"] | {"stage": zero["stage"]}
    moved = {"zero2_offload": ["optimizer"], "zero3_offload": ["optimizer", "param"]}
    moved = moved.get(path.stem, [])
    if moved:  # DeepSpeed wants the norm then, and refuses to go without
        base.pop("compute_grad_norm", None)
    place = {"device": "cpu", "pin_memory": True}
    assert zero == base | {f"offload_{part}": place for part in moved}
    assert config.get("zero_force_ds_cpu_optimizer", True) is not bool(moved)
