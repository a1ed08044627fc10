"""The YAMLs hold a strategy and nothing else, and accelerate reads every key of them."""

from dataclasses import fields

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, STRATEGIES

YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
# Where the run takes place, and what is a hyper-parameter: not in a YAML. The first two have no effect there anyway.
FORBIDDEN = set("""rdzv_backend same_network machine_rank num_machines main_process_ip main_process_port gpu_ids use_cpu
    tpu_name tpu_zone gradient_accumulation_steps gradient_clipping""".split())
SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": "", "dynamo_config": "dynamo_"}


def faults(text):
    """What is wrong with the text of a YAML, as a list of sentences."""
    config = yaml.safe_load(text)
    flags = {action.dest for action in launch_command_parser()._actions}
    found = [f"{key} is not read from a YAML" for key in set(config) - {field.name for field in fields(ClusterConfig)}]
    for section, prefix in SECTIONS.items():
        for key in config.get(section, {}):
            name = key if key.startswith(prefix) else prefix + key
            if name not in flags:
                found.append(f"{section}.{key} is ignored by accelerate launch")
            found += [f"{key} does not belong into a YAML"] * (key in FORBIDDEN)
    found += [f"{key} does not belong into a YAML" for key in FORBIDDEN & set(config)]
    if config["distributed_type"] != "NO" and "num_processes" not in config:
        found.append("num_processes is missing: accelerate launch would refuse to start")
    return found


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_holds_the_strategy_only(path):
    text = path.read_text()
    assert faults(text) == []
    head = text[: text.index("compute_environment")]
    for word in ("replicated:", "sharded:", "communicated:", "choose it:"):
        assert f"#   {word}" in head, f"{path.name} does not say what is {word}"
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.mixed_precision == "no"
    assert config.num_processes == (1 if path.stem in ("baseline", "dp") else 2)


def test_there_is_one_yaml_a_strategy():
    assert sorted(path.stem for path in YAMLS) == sorted(["baseline", "dp", *STRATEGIES])


@pytest.mark.parametrize("line, fault", [
    ("rdzv_backend: c10d", "rdzv_backend does not belong"),
    ("num_machines: 2", "num_machines does not belong"),
    ("gpu_ids: '0'", "gpu_ids does not belong"),
    ("world_size: 2", "world_size is not read"),
    ("fsdp_config: {fsdp_version: 2, fsdp_colour: red}", "fsdp_config.fsdp_colour is ignored"),
    ("deepspeed_config: {gradient_accumulation_steps: 1}", "gradient_accumulation_steps does not belong"),
])  # fmt: skip
def test_a_bad_key_is_found(line, fault):
    text = f"distributed_type: MULTI_GPU\nnum_processes: 2\n{line}\n"
    assert any(found.startswith(fault) for found in faults(text)), faults(text)


def test_fsdp_is_fsdp2():
    assert yaml.safe_load((ROOT / "accelerate_configs" / "fsdp.yaml").read_text())["fsdp_config"]["fsdp_version"] == 2
