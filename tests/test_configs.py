"""The YAMLs and DeepSpeed's JSONs hold a strategy and nothing else; accelerate and DeepSpeed read every key."""

import json
import os
from dataclasses import fields
from unittest import mock

import pytest
import warm
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DeepSpeedPlugin
from conftest import ROOT, RUNGS, STRATEGIES, environment

YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
WRONG = {  # what does not do what it says, and why
    "fsdp_activation_checkpointing": "accelerate recomputes with other dropout masks (preserve_rng_state=False): "
    "use the script's --activation_checkpointing",
}
# Where the run takes place, and what is a hyper-parameter: not in a YAML. The first two have no effect there anyway.
FORBIDDEN = set("""rdzv_backend same_network machine_rank num_machines main_process_ip main_process_port gpu_ids use_cpu
    tpu_name tpu_zone gradient_accumulation_steps gradient_clipping""".split())
# DeepSpeed says nothing of a top-level key that it does not know, so these are all that a JSON may have, and why.
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # from DataLoader and Accelerator
JSON_KEYS = {
    *AUTO,
    "bf16",  # on by the launcher's --mixed_precision; the JSON says what DeepSpeed checks then
    "gradient_clipping",  # none, where accelerate and DeepSpeed have a default of 1
    "zero_optimization",  # the strategy
    "timers",  # that of the throughput would stop the GPU at every step
    "zero_force_ds_cpu_optimizer",  # off beside offload: torch's AdamW works on a CPU too, uncompiled
}
SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": "", "dynamo_config": "dynamo_"}


def faults(text):
    """What is wrong with the text of a YAML, as a list of sentences."""
    config = yaml.safe_load(text)
    flags = {action.dest for action in launch_command_parser()._actions}
    found = [f"{key} is not read from a YAML" for key in set(config) - {field.name for field in fields(ClusterConfig)}]
    for section, prefix in SECTIONS.items():
        for key, value in config.get(section, {}).items():
            name = key if key.startswith(prefix) else prefix + key
            if name not in flags:
                found.append(f"{section}.{key} is ignored by accelerate launch")
            found += [f"{key} does not belong into a YAML"] * (key in FORBIDDEN)
            if name in WRONG and value is not False:
                found.append(f"{name} is wrong: {WRONG[name]}")
    found += [f"{key} does not belong into a YAML" for key in FORBIDDEN & set(config)]
    if config["distributed_type"] != "NO" and "num_processes" not in config:
        found.append("num_processes is missing: accelerate launch would refuse to start")
    if config["distributed_type"] == "DEEPSPEED":
        file = str(config["deepspeed_config"].get("deepspeed_config_file"))
        found += [f"deepspeed_config_file: {file} is not there"] * (not (ROOT / file).is_file())
        found += ["accelerate refuses mixed_precision beside a JSON"] * ("mixed_precision" in config)
    return found


def json_faults(text):
    """What is wrong with the text of a JSON for DeepSpeed, as a list of sentences."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = json.loads(text)
    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    found = [f"{key} does not belong into a JSON" for key in set(config) - JSON_KEYS]
    found += [f"DeepSpeed has no zero_optimization.{key}" for key in set(config["zero_optimization"]) - known]
    found += [f"{key} is not auto, so it is not the script's" for key in AUTO if config.get(key) != "auto"]
    if config.get("gradient_clipping") != 0.0:
        found.append("gradient_clipping is not 0.0, so ZeRO would train otherwise than DDP")
    if config.get("bf16") != {"enabled": "auto", "check_grad_overflow": False}:
        found.append("bf16 is not the launcher's, or bad gradients are skipped silently")
    if config.get("timers") != {"throughput": {"enabled": False}}:
        found.append("timers has more than that of the throughput, off")
    return found


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_holds_the_strategy_only(path):
    text = path.read_text()
    assert faults(text) == []
    head = text[: text.index("compute_environment")]
    for word in ("replicated:", "sharded:", "communicated:", "choose it:"):
        assert f"#   {word}" in head, f"{path.name} does not say what is {word}"
    config = ClusterConfig.from_yaml_file(str(path))
    assert config.mixed_precision == (None if config.distributed_type == "DEEPSPEED" else "no")
    assert config.num_processes == (1 if path.stem in ("baseline", "dp") else 2)


def test_there_is_one_yaml_a_strategy():
    assert sorted(path.stem for path in YAMLS) == sorted(["baseline", "dp", *STRATEGIES, *RUNGS])


@pytest.mark.parametrize("line, fault", [
    ("rdzv_backend: c10d", "rdzv_backend does not belong"),
    ("num_machines: 2", "num_machines does not belong"),
    ("gpu_ids: '0'", "gpu_ids does not belong"),
    ("world_size: 2", "world_size is not read"),
    ("fsdp_config: {fsdp_version: 2, fsdp_colour: red}", "fsdp_config.fsdp_colour is ignored"),
    ("deepspeed_config: {gradient_accumulation_steps: 1}", "gradient_accumulation_steps does not belong"),
    ("fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}", "fsdp_activation_checkpointing is wrong"),
    ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero9.json}", "deepspeed_config_file: z"),
    ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero3_init_flag: false}", "deepspeed_config_file: None"),
    ("distributed_type: DEEPSPEED\ndeepspeed_config: {}\nmixed_precision: 'no'", "accelerate refuses mixed_precision"),
])  # fmt: skip
def test_a_bad_key_is_found(line, fault):
    text = f"distributed_type: MULTI_GPU\nnum_processes: 2\n{line}\n"
    assert any(found.startswith(fault) for found in faults(text)), faults(text)


@pytest.mark.parametrize("path", sorted(YAMLS[0].parent.glob("*.json")), ids=lambda path: path.stem)
def test_deepspeeds_json_holds_the_strategy_only(path):
    """And it is the one that the YAML of its name names. A variant differs from its base in nothing else."""
    text = path.read_text()
    assert json_faults(text) == []
    zero = json.loads(text)["zero_optimization"]
    assert path.stem.removesuffix("_offload") == f"zero{zero['stage']}"
    config = yaml.safe_load(path.with_suffix(".yaml").read_text())
    assert config["deepspeed_config"]["deepspeed_config_file"] == f"accelerate_configs/{path.name}"
    base = "zero2" if path.stem == "zero1" else f"zero{zero['stage']}"
    base = json.loads((path.parent / f"{base}.json").read_text())["zero_optimization"] | {"stage": zero["stage"]}
    place = {"device": "cpu", "pin_memory": True}
    moved = {"zero2_offload": ["optimizer"], "zero3_offload": ["optimizer", "param"]}.get(path.stem, [])
    if moved:  # DeepSpeed wants the norm then, and refuses to go without
        base.pop("compute_grad_norm", None)
    assert zero == base | {f"offload_{part}": place for part in moved}
    assert json.loads(text).get("zero_force_ds_cpu_optimizer", True) is not bool(moved)


@pytest.mark.parametrize("name, option", [("fsdp_keep", {"fsdp_reshard_after_forward": False}),
                                          ("fsdp_offload", {"fsdp_offload_params": True})])
def test_a_variant_of_fsdp_differs_in_one_option(name, option):
    base, variant = (yaml.safe_load((ROOT / "accelerate_configs" / f"{yaml_name}.yaml").read_text())
                     for yaml_name in ("fsdp", name))
    assert variant == base | {"fsdp_config": base["fsdp_config"] | option}


@pytest.mark.parametrize("change, fault", [
    ({"train_batch_size": 64}, "train_batch_size does not belong"),
    ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu is not auto"),
    ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is not auto"),
    ({"gradient_clipping": 1.0}, "gradient_clipping is not 0.0"),
    ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "DeepSpeed has no zero_optimization.overlap_com"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer does not belong"),
    ({"timers": {}}, "timers has more"),
    ({"bf16": {"enabled": True}}, "bf16 is not the launcher's"),
])  # fmt: skip
def test_a_bad_key_of_a_json_is_found(change, fault):
    text = json.dumps(json.loads((ROOT / "accelerate_configs" / "zero2.json").read_text()) | change)
    [found] = json_faults(text)
    assert found.startswith(fault)


@pytest.mark.parametrize("line", [
    "mixed_precision: 'no'", "  gradient_clipping: 0.0", "  gradient_accumulation_steps: 1", "  zero_stage: 3",
])  # fmt: skip
def test_accelerate_refuses_a_setting_in_two_places(line, tmp_path, monkeypatch):
    """A YAML that names a JSON must not hold what the JSON is for."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "accelerate_configs" / "zero3.yaml").read_text()
    for added in ("", line):
        (tmp_path / "zero3.yaml").write_text(f"{text}\n{added}\n")
        words = ["--config_file", str(tmp_path / "zero3.yaml"), "--main_process_port", "0", "script.py"]
        _, launched = warm.what_the_launcher_starts(words, environment(None))
        with mock.patch.dict(os.environ, launched, clear=True):
            if added:
                with pytest.raises(ValueError, match="When using `deepspeed_config_file`"):
                    DeepSpeedPlugin()
            else:
                assert DeepSpeedPlugin().zero_stage == 3


def test_fsdp_is_fsdp2():
    assert yaml.safe_load((ROOT / "accelerate_configs" / "fsdp.yaml").read_text())["fsdp_config"]["fsdp_version"] == 2
