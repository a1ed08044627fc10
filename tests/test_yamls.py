"""Other people's YAMLs, as `accelerate config` writes them: each key that changes the numbers is
honoured and recorded, and what cannot work is one line.
"""

import json
from functools import cache

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from conftest import launch

SCRIPT = "train_mnist_rnn.py"
FLAGS = ["--dataset", "digits", "--num_epochs", 2, "--dropout", 0]
FSDP = {  # accelerate's default answers, as its questions put them
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
FSDP_1 = FSDP | {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}
FSDP_2 = FSDP | {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_cpu_ram_efficient_loading": False,
}
NORM = 0.05  # Most gradients of the LSTM are longer.
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
JSON = {"zero_optimization": {"stage": 1}} | dict.fromkeys(AUTO, "auto")


def zero(stage, **more):
    """The settings of ZeRO without a JSON, with accelerate's default answers."""
    config = {"zero_stage": stage, "gradient_accumulation_steps": 1, "zero3_init_flag": False}
    return {"deepspeed_config": config | more}


def written(folder, kind, **settings):
    """The path of a YAML of these settings, as accelerate writes it."""
    if "zero_optimization" in settings:  # They are DeepSpeed's own, in a JSON.
        (folder / "own.json").write_text(json.dumps(settings))
        own = {"zero3_init_flag": False, "deepspeed_config_file": str(folder / "own.json")}
        settings = {"deepspeed_config": own, "mixed_precision": None}
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "debug": False}
    config |= {"mixed_precision": "no", "use_cpu": False, "num_processes": 2} | settings
    ClusterConfig(**config).to_yaml_file(folder / "own.yaml")
    return folder / "own.yaml"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """norm -> the losses of the baseline, with gradients clipped to it."""
    make, words = tmp_path_factory.mktemp, [*FLAGS, "--per_device_train_batch_size", 128]
    clip = {None: [], NORM: ["--max_grad_norm", NORM]}
    return cache(lambda norm: launch("baseline", SCRIPT, make("run"), *words, *clip[norm]).losses)


@pytest.mark.parametrize(
    "strategy, clipped, kind, settings",
    [
        ("ddp", None, "MULTI_GPU", {}),
        ("fsdp", None, "FSDP", {"fsdp_config": FSDP_2}),
        ("fsdp", None, "FSDP", {"fsdp_config": FSDP_2 | {"fsdp_cpu_ram_efficient_loading": True}}),
        ("zero1", NORM, "DEEPSPEED", zero(1, gradient_clipping=NORM)),
        ("zero2", None, "DEEPSPEED", zero(2)),
        ("zero3", NORM, "DEEPSPEED", zero(3, gradient_clipping=NORM)),
        ("zero1", NORM, "DEEPSPEED", JSON | {"gradient_clipping": NORM}),
        ("zero1", None, "DEEPSPEED", JSON),
        ("fsdp", None, "FSDP", {"fsdp_config": FSDP_2 | {"fsdp_activation_checkpointing": True}}),
    ],
)
def test_what_a_yaml_changes_is_honoured_and_recorded(
    strategy, clipped, kind, settings, baseline, tmp_path
):
    run = launch(written(tmp_path, kind, **settings), SCRIPT, tmp_path / "run", *FLAGS)
    record = run.record
    assert record["strategy"] == strategy and record["workload"]["max_grad_norm"] == clipped
    assert record["gradient_accumulation_steps"] == 1
    assert record["strategy_options"].get("cpu_ram_efficient_loading", "false") == "false"
    assert run.losses == pytest.approx(baseline(clipped), rel=2e-5)
    if clipped:
        assert run.losses != pytest.approx(baseline(None), rel=1e-4), "clipping changes the losses"


ACCUMULATE = ["--gradient_accumulation_steps", "4"]
TYPED = ["--gradient_accumulation_steps", "2"]
IN_JSON = JSON | {"gradient_accumulation_steps": 4}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize(
    "kind, settings, launcher, flags, counts",
    [
        ("MULTI_GPU", {}, ACCUMULATE, [], 1),  # accelerate hands it to DeepSpeed's ranks alone
        ("MULTI_GPU", {}, [], TYPED, 2),
        ("DEEPSPEED", zero(2, gradient_accumulation_steps=4), [], [], 4),
        ("DEEPSPEED", zero(2, gradient_accumulation_steps=4), [], TYPED, 2),
        ("DEEPSPEED", zero(2), ACCUMULATE, [], 4),
        ("DEEPSPEED", IN_JSON, [], [], 4),
        ("DEEPSPEED", IN_JSON, [], TYPED, 2),
    ],
)
def test_the_accumulation_that_is_typed_counts_or_else_the_launchers(
    kind, settings, launcher, flags, counts, tmp_path
):
    """DeepSpeed itself would go its own way. The losses are those of whole batches."""
    yaml, batch = written(tmp_path, kind, **settings), 64 // counts
    words = [*FLAGS, "--per_device_train_batch_size", batch, "--max_train_steps", 3, *flags]
    run = launch(yaml, SCRIPT, tmp_path / "run", *words, launcher=launcher)
    assert run.record["gradient_accumulation_steps"] == counts and len(run.losses) == 3
    whole = [*FLAGS, "--per_device_train_batch_size", 128, "--max_train_steps", 3]
    expected = launch("baseline", SCRIPT, tmp_path / "whole", *whole).losses
    assert run.losses == pytest.approx(expected, rel=2e-5)


def test_the_whole_json_of_deepspeed_is_recorded(tmp_path):
    yaml = written(tmp_path, "DEEPSPEED", **JSON | AUTOCAST)
    run = launch(yaml, SCRIPT, tmp_path / "run", *FLAGS, "--max_train_steps", 1)
    assert run.record["strategy_options"]["torch_autocast"]["enabled"] is True


DP = {"dynamo_config": {"dynamo_mode": "data_parallel"}, "num_processes": 1}
MASKS = FSDP_2 | {"fsdp_activation_checkpointing": True}
BF16, FP16 = ["--mixed_precision", "bf16"], ["--mixed_precision", "fp16"]
SIZES = {"parallelism_config_dp_shard_size": 1, "parallelism_config_cp_size": 2}
CONTEXT = {"fsdp_config": FSDP_2, "parallelism_config": SIZES}


@pytest.mark.parametrize(
    "kind, settings, launcher, flags, sentence",
    [
        ("MULTI_CPU", {"use_cpu": True}, [], [], "each process would train alone"),
        ("MULTI_GPU", {}, ["--cpu"], [], "each process would train alone"),
        ("NO", {}, [], [], "each process would train alone"),
        ("NO", DP, BF16, [], "in fp16 instead of bf16: use ddp.yaml"),
        ("NO", {"num_processes": 1}, FP16, [], "fp16 needs a GPU"),
        ("FSDP", {"fsdp_config": FSDP_2}, FP16, [], "fp16 needs a GPU"),
        ("DEEPSPEED", JSON | {"fp16": {"enabled": True}}, [], [], "fp16 needs a GPU"),
        ("FSDP", {"fsdp_config": FSDP_1}, [], [], "fsdp_version must be 2"),
        ("FSDP", {"fsdp_config": MASKS}, [], ["--dropout", 0.1], "needs --dropout 0"),
        ("FSDP", CONTEXT, [], [], "context and sequence parallelism are not supported"),
    ],
)
def test_what_would_be_another_run_is_refused_and_leaves_nothing(
    kind, settings, launcher, flags, sentence, tmp_path
):
    folder, yaml = tmp_path / "run", written(tmp_path, kind, **settings)
    run = launch(yaml, SCRIPT, folder, *FLAGS, *flags, launcher=launcher, ok=False)
    assert sentence in run.error_line() and not folder.exists()
