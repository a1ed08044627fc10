"""The YAMLs and DeepSpeed's JSONs hold a strategy and nothing else; accelerate and DeepSpeed read
every key. A new strategy is a YAML, and no other edit.
"""

import json
import shutil
import sys

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, rows_of, run, run_forked
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from test_bert import TINY

from common.strategies import STRATEGIES, name_yaml

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
    "bf16": {"enabled": "auto", "check_grad_overflow": False},  # ZeRO-1 and ZeRO-2 skip none
    "gradient_clipping": 0.0,  # none, where accelerate and DeepSpeed have a default of 1
    "timers": {"throughput": {"enabled": False}},  # it would stop the GPU at every step
}
# The last one is off: torch's AdamW works on a CPU, uncompiled.
JSON_KEYS = {*JSON_VALUES, "zero_optimization", "zero_force_ds_cpu_optimizer"}


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_holds_the_strategy_only(path):
    """A report tells its records from those of other YAMLs, and its name begins with theirs."""
    text = path.read_text()
    written = yaml.safe_load(text)
    flags = {action.dest for action in launch_command_parser()._actions}
    for section, prefix in SECTIONS.items():
        for key in written.get(section, {}):
            name = key if key.startswith(prefix) else prefix + key
            assert name in flags, f"{section}.{key} is ignored by accelerate launch"
            assert name not in FORBIDDEN
    assert not {*written} & {*FORBIDDEN}
    assert not written.get("fsdp_config", {}).get(RECOMPUTES)
    config = ClusterConfig.from_yaml_file(str(path))  # which refuses keys that it does not read
    zero = config.distributed_type == "DEEPSPEED"
    assert config.mixed_precision == (None if zero else "no")
    known = STRATEGIES[path.stem]
    assert path.stem.split("_")[0] == known.family
    assert name_yaml(known.family, known.options) == path.stem
    assert config.num_processes == {"baseline": 1, "dp": 1, "hsdp": 4}.get(known.family, 2)


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_deepspeeds_json_holds_the_strategy_only(path):
    """It is the one that the YAML of its name names. A variant differs from its base in one or
    two options.
    """
    config = json.loads(path.read_text())
    assert set(config) <= JSON_KEYS and JSON_VALUES.items() <= config.items()
    zero = config["zero_optimization"]
    DeepSpeedZeroConfig(**zero)  # which refuses keys that it does not know
    named = yaml.safe_load(path.with_suffix(".yaml").read_text())["deepspeed_config"]
    assert named["deepspeed_config_file"] == f"accelerate_configs/{path.name}"
    base = json.loads((CONFIGS / f"zero{max(2, zero['stage'])}.json").read_text())
    base = base["zero_optimization"] | {"stage": zero["stage"]}
    on_host = [value for name, value in zero.items() if name.startswith("offload_")]
    if on_host:  # DeepSpeed wants the norm then, and refuses to go without
        base.pop("compute_grad_norm", None)
    changed = [name for name in {*zero, *base} if zero.get(name) != base.get(name)]
    assert len(changed) in ((1, 2) if "_" in path.stem else (0,)), changed
    assert all(place == {"device": "cpu", "pin_memory": True} for place in on_host)
    assert config.get("zero_force_ds_cpu_optimizer", True) is not bool(on_host)


NEW = "zero1_offload"  # ZeRO-1 with its optimizer states on the host
BERT = ["train_bert_squad.py", *TINY, "--per_device_train_batch_size", "2", "--output_dir"]
DIGITS = "train_mnist_rnn.py --dataset digits --max_train_steps 2 --output_dir".split()


@pytest.mark.slow
def test_a_new_yaml_needs_no_other_edit(tmp_path):
    """In a copy of the project fit.py, dry_run.py, sweep.sh, the report and the tests know it. It
    stands between ZeRO-1 and ZeRO-2.
    """
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

    names = [row[0] for row in rows_of(run_there(sys.executable, "fit.py", "40GB"))]
    assert names[names.index("zero1") :][:3] == ["zero1", NEW, "zero2"]
    train("baseline", "dry_run.py", "2", f"accelerate_configs/{NEW}.yaml", *BERT, "dry")
    dry = json.loads((copy / "dry" / "dry_run.json").read_text())
    assert sum(dry["held_bytes"].values()) == pytest.approx(12 * dry["parameters"], rel=0.06)
    out = run_there("sbatch/sweep.sh", "--dry_run", "--strategies", NEW)
    assert f"\n{NEW}-2x2-r1\n" in out
    for name in ("zero2", NEW, "zero1"):
        train(name, *DIGITS, f"runs/{name}")
    run_there(sys.executable, "report.py", "runs")
    report = rows_of((copy / "runs" / "report.md").read_text().split("# Details")[0])
    assert [row[0] for row in report[1:]] == [
        f"{name} on 1 x 2" for name in ("ZeRO-1", "ZeRO-1 offload", "ZeRO-2")
    ]
    tests = "tests/test_configs.py", "tests/test_fit.py"
    out = run_there(sys.executable, "-m", "pytest", "-k", f"{NEW} or every_yaml", *tests)
    assert "3 passed" in out  # the YAML, the JSON, and a row of fit.py
