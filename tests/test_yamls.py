"""The project's YAMLs contain a strategy and nothing else, and a new one needs no other edit. In
other people's YAMLs, as `accelerate config` writes them, each setting takes effect and is recorded.
"""

import json
import shutil
import sys
from functools import cache

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, launch, rows_of, run, run_forked
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from test_bert import TINY

from common.strategies import STRATEGIES, name_yaml

CONFIGS = ROOT / "accelerate_configs"
YAMLS, JSONS = (sorted(CONFIGS.glob(f"*.{kind}")) for kind in ("yaml", "json"))
# Where the run takes place, and what is a hyper-parameter.
FORBIDDEN = """rdzv_backend same_network machine_rank num_machines main_process_ip main_process_port
    gpu_ids use_cpu tpu_name tpu_zone gradient_accumulation_steps gradient_clipping
    fsdp_activation_checkpointing""".split()
SECTIONS = {"fsdp_config": "fsdp_", "deepspeed_config": "", "dynamo_config": "dynamo_"}
SECTIONS["parallelism_config"] = "parallelism_config_"
# DeepSpeed ignores top-level keys that it does not know, so the JSONs may have only these.
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # the script's
JSON_VALUES = dict.fromkeys(AUTO, "auto") | {
    "bf16": {"enabled": "auto", "check_grad_overflow": False},  # else ZeRO-1 and 2 skip steps
    "gradient_clipping": 0.0,  # accelerate's and DeepSpeed's default is 1
    "timers": {"throughput": {"enabled": False}},  # they would stop the GPU at every step
}
JSON_KEYS = {*JSON_VALUES, "zero_optimization", "zero_force_ds_cpu_optimizer"}
OFFLOAD = {"offload_optimizer", "offload_param"}


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_yaml_contains_only_its_strategy(path):
    """A report finds the YAML of a record again."""
    written = yaml.safe_load(path.read_text())
    flags = {action.dest for action in launch_command_parser()._actions}
    for section, prefix in SECTIONS.items():
        for key in written.get(section, {}):
            name = key if key.startswith(prefix) else prefix + key
            assert name in flags, f"accelerate launch ignores {section}.{key}"
            assert name not in FORBIDDEN
    assert not {*written} & {*FORBIDDEN}
    config = ClusterConfig.from_yaml_file(str(path))  # refuses top-level keys that it does not know
    zero = config.distributed_type == "DEEPSPEED"
    assert config.mixed_precision == (None if zero else "no")
    known = STRATEGIES[path.stem]
    assert path.stem.split("_")[0] == known.family
    assert name_yaml(known.family, known.options) == path.stem
    assert config.num_processes == {"baseline": 1, "dp": 1, "hsdp": 4}.get(known.family, 2)


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_a_json_of_deepspeed_contains_only_its_strategy(path):
    """The YAML of the same name uses it. With offload it is the JSON of its stage, plus offload."""
    config = json.loads(path.read_text())
    assert set(config) <= JSON_KEYS and JSON_VALUES.items() <= config.items()
    zero = config["zero_optimization"]
    DeepSpeedZeroConfig(**zero)  # refuses keys that it does not know
    named = yaml.safe_load(path.with_suffix(".yaml").read_text())["deepspeed_config"]
    assert named["deepspeed_config_file"] == f"accelerate_configs/{path.name}"
    base = json.loads((CONFIGS / f"zero{max(2, zero['stage'])}.json").read_text())
    base = base["zero_optimization"] | {"stage": zero["stage"]}
    changed = {name for name in {*zero, *base} if zero.get(name) != base.get(name)}
    offloaded = changed & OFFLOAD
    assert bool(offloaded) == ("_" in path.stem) and changed <= OFFLOAD | {"compute_grad_norm"}
    assert all(zero[name] == {"device": "cpu", "pin_memory": True} for name in offloaded)
    # torch's AdamW does the step on a CPU: DeepSpeed's would have to be compiled.
    assert config.get("zero_force_ds_cpu_optimizer", True) is not bool(offloaded)


NEW = "zero1_offload"  # ZeRO-1 with its optimizer states on the host
BERT = ["train_bert_squad.py", *TINY, "--per_device_train_batch_size", "2", "--output_dir"]
DIGITS = "train_mnist_rnn.py --dataset digits --max_train_steps 2 --output_dir".split()


@pytest.mark.slow
def test_a_new_yaml_needs_no_other_edit(tmp_path):
    """In a copy of the project, the tools know it and place it between ZeRO-1 and ZeRO-2."""
    copy = tmp_path / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs"))
    for kind in ("yaml", "json"):
        text = (CONFIGS / f"zero2_offload.{kind}").read_text().replace("zero2_offload", NEW)
        text = text.replace('"stage": 2', '"stage": 1')
        (copy / "accelerate_configs" / f"{NEW}.{kind}").write_text(text)

    def run_there(*words):
        done = run(["env", "-C", str(copy), *words])
        assert done.code == 0, done.out + done.err
        return done.out

    def train(yaml, *argv):
        words = ["--config_file", f"{copy}/accelerate_configs/{yaml}.yaml"]
        words += ["--main_process_port", "0"]
        done = run_forked(words, argv, root=copy)
        assert done.code == 0, done.err

    names = [row[0] for row in rows_of(run_there(sys.executable, "tools/fit.py", "40GB"))]
    assert names[names.index("zero1") :][:3] == ["zero1", NEW, "zero2"]
    train("baseline", "tools/dry_run.py", "2", f"accelerate_configs/{NEW}.yaml", *BERT, "dry")
    dry = json.loads((copy / "dry" / "dry_run.json").read_text())
    assert sum(dry["held_bytes"].values()) == pytest.approx(12 * dry["parameters"], rel=0.06)
    assert f"\n{NEW}-2x2-r1\n" in run_there("sbatch/sweep.sh", "--dry_run", "--strategies", NEW)
    for name in ("zero2", NEW, "zero1"):
        train(name, *DIGITS, f"runs/{name}")
    run_there(sys.executable, "tools/report.py", "runs")
    report = rows_of((copy / "runs" / "report.md").read_text().split("# Details")[0])
    assert [row[0] for row in report[1:]] == [
        f"{name} on 1 x 2" for name in ("ZeRO-1", "ZeRO-1 offload", "ZeRO-2")
    ]


# -------- other people's YAMLs

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
# Keys of FSDP1 without effect in FSDP2, and one that the scripts turn off.
OLD = {
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_sync_module_states": True,
    "fsdp_cpu_ram_efficient_loading": True,
}
MASKS = FSDP_2 | {"fsdp_activation_checkpointing": True}
NORM = 0.05  # Most gradients of the LSTM are longer.
JSON = {"zero_optimization": {"stage": 1}} | dict.fromkeys(AUTO, "auto")
JSON["memory_breakdown"] = False  # a key that no YAML of the project has


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
    """A function: flags -> the losses of a baseline with these flags."""
    make, words = tmp_path_factory.mktemp, [*FLAGS, "--per_device_train_batch_size", 128]
    return cache(lambda *more: launch("baseline", SCRIPT, make("run"), *words, *more).losses)


@pytest.mark.parametrize(
    "strategy, clipped, kind, settings",
    [
        ("ddp", None, "MULTI_GPU", {}),
        ("fsdp", None, "FSDP", {"fsdp_config": FSDP_2}),
        ("fsdp", None, "FSDP", {"fsdp_config": FSDP_2 | OLD}),
        ("zero1", NORM, "DEEPSPEED", zero(1, gradient_clipping=NORM)),
        ("zero2", None, "DEEPSPEED", zero(2)),
        ("zero3", NORM, "DEEPSPEED", zero(3, gradient_clipping=NORM)),
        ("zero1", NORM, "DEEPSPEED", JSON | {"gradient_clipping": NORM}),
        ("zero1", None, "DEEPSPEED", JSON),
        ("fsdp", None, "FSDP", {"fsdp_config": MASKS}),
    ],
)
def test_settings_of_a_yaml_take_effect_and_are_recorded(
    strategy, clipped, kind, settings, baseline, tmp_path
):
    run = launch(written(tmp_path, kind, **settings), SCRIPT, tmp_path / "run", *FLAGS)
    record = run.record
    assert record["strategy"] == strategy and record["workload"]["max_grad_norm"] == clipped
    assert record["gradient_accumulation_steps"] == 1
    options = record["strategy_options"]
    without_effect = {name.removeprefix("fsdp_") for name in OLD} - {"cpu_ram_efficient_loading"}
    assert without_effect.isdisjoint(options)
    assert options.get("cpu_ram_efficient_loading", "false") == "false"
    assert options.get("memory_breakdown") == settings.get("memory_breakdown")
    clip = ["--max_grad_norm", NORM] if clipped else []
    assert run.losses == pytest.approx(baseline(*clip), rel=2e-5)
    if clipped:
        assert run.losses != pytest.approx(baseline(), rel=1e-4), "clipping changes the losses"


ACCUMULATE = ["--gradient_accumulation_steps", "4"]
TYPED = ["--gradient_accumulation_steps", "2"]
IN_JSON = JSON | {"gradient_accumulation_steps": 4}


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
def test_the_accumulation_flag_overrides_the_launchers(
    kind, settings, launcher, flags, counts, baseline, tmp_path
):
    """The losses are those of whole batches."""
    yaml, batch = written(tmp_path, kind, **settings), 64 // counts
    words = [*FLAGS, "--per_device_train_batch_size", batch, "--max_train_steps", 3, *flags]
    run = launch(yaml, SCRIPT, tmp_path / "run", *words, launcher=launcher)
    assert run.record["gradient_accumulation_steps"] == counts and len(run.losses) == 3
    assert run.losses == pytest.approx(baseline("--max_train_steps", 3), rel=2e-5)


DP = {"dynamo_config": {"dynamo_mode": "data_parallel"}, "num_processes": 1}
BF16, FP16 = ["--mixed_precision", "bf16"], ["--mixed_precision", "fp16"]


@pytest.mark.parametrize(
    "kind, settings, launcher, flags, sentence",
    [
        ("MULTI_CPU", {"use_cpu": True}, [], [], "each process would train alone"),
        ("MULTI_GPU", {}, ["--cpu"], [], "each process would train alone"),
        ("NO", {}, [], [], "each process would train alone"),
        ("NO", DP, BF16, [], "in fp16 instead of bf16: use ddp.yaml"),
        ("FSDP", {"fsdp_config": FSDP_2}, FP16, [], "fp16 needs a GPU"),
        ("DEEPSPEED", JSON | {"fp16": {"enabled": True}}, [], [], "fp16 needs a GPU"),
        ("FSDP", {"fsdp_config": FSDP_1}, [], [], "must be 2: convert the YAML with `accelerate"),
        ("FSDP", {"fsdp_config": MASKS}, [], ["--dropout", 0.1], "needs --dropout 0"),
    ],
)
def test_settings_that_would_train_something_else_are_refused(
    kind, settings, launcher, flags, sentence, tmp_path
):
    folder, yaml = tmp_path / "run", written(tmp_path, kind, **settings)
    run = launch(yaml, SCRIPT, folder, *FLAGS, *flags, launcher=launcher, ok=False)
    assert sentence in run.error_line() and not folder.exists()
