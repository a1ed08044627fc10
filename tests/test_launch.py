"""Real launches: copied scripts, and the launcher's options. The ranks that other tests fork (see
warm.py) must train as the launcher's do.
"""

import re
import shutil

import pytest
import test_bert
import test_mnist
from conftest import ACCELERATE, ROOT, RunFailed, launch, run


@pytest.mark.parametrize(
    "yaml, tests, ranks",
    [
        ("ddp", test_mnist, 2),
        pytest.param("dp", test_mnist, 1, marks=pytest.mark.slow),  # on a CPU, it is the baseline
        # test_elsewhere.py and test_sbatch.py launch it, too, but not in `make canary`.
        pytest.param("zero3", test_bert, 2, marks=[pytest.mark.matrix, pytest.mark.canary]),
    ],
)
def test_yaml_and_script_copied_to_another_folder(yaml, tests, ranks, tmp_path):
    """They need nothing else there, except BERT its data."""
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    shutil.copy(ROOT / tests.SCRIPT, tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    flags = [*tests.flags(tests.GLOBAL_BATCH // ranks), "--output_dir", "run"]
    words = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--main_process_port", "0"]
    words += [tests.SCRIPT, *flags]
    place = ["env", "-C", str(tmp_path)]
    result = run([*place, *ACCELERATE, *words], tmp_path / "run", {"PYTHONPROFILEIMPORTTIME": "1"})
    if result.code:
        raise RunFailed(re.sub("import time: .*\n", "", result.err))
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", result.err, re.M))
    assert "torch" in imported and ("deepspeed" in imported) == yaml.startswith("zero")
    record = result.record
    assert record["strategy"] == yaml and record["status"] == "completed"
    assert record["processes"] == record["devices"] == len(record["ranks"]) == ranks
    assert all(rank["real"] > 0.1 and rank["user"] > 0.1 for rank in record["ranks"])
    flags = tests.flags(tests.GLOBAL_BATCH)
    forked = launch("baseline", tests.SCRIPT, tmp_path / "baseline", *flags)
    tests.assert_same_numbers(result, forked)


@pytest.mark.parametrize(
    "yaml, launcher, strategy, precision, dynamo, compute",
    [
        # The mark of dp.yaml counts with one process only.
        ("dp", "--multi_gpu --num_processes 2", "ddp", "no", "no", "no"),
        ("baseline", "--dynamo_backend eager", "baseline", "no", "eager", "no"),
        (
            "ddp",
            "--debug --mixed_precision bf16",
            "ddp",
            "bf16",
            "no",
            "no",
        ),  # its weights are in fp32
        ("fsdp", "--mixed_precision bf16", "fsdp", "bf16", "no", "bf16"),
        ("zero2", "--dynamo_backend eager", "zero2", "no", "no", "no"),  # accelerate leaves it out
    ],
)
def test_options_of_the_launcher(yaml, launcher, strategy, precision, dynamo, compute, tmp_path):
    """The record has them. Also the weights of a compiled model have their usual names."""
    words = "--dataset digits --max_train_steps 1".split()
    result = launch(yaml, test_mnist.SCRIPT, tmp_path, *words, launcher=launcher.split())
    record, workload = result.record, result.record["workload"]
    assert (record["strategy"], record["processes"]) == (strategy, 1 if yaml == "baseline" else 2)
    assert record["precision"] == workload["precision"] == precision
    assert record["dynamo"] == workload["dynamo"] == dynamo
    assert workload["compute_dtype"] == compute
    assert "head.weight" in result.weights
