"""Real launches, of script and YAML copied to another folder. The ranks that other tests fork (see
warm.py) train as these do.
"""

import functools
import shutil

import pytest
import test_bert
import test_mnist
from conftest import ACCELERATE, ROOT, RunFailed, launch, run
from test_mnist_resume import SLOW

TESTS = {tests.SCRIPT: tests for tests in (test_mnist, test_bert)}
MNIST, BERT = TESTS
RANKS = {"dp": 1, "ddp": 2, "zero3": 2}
PAIRS = [
    ("ddp", MNIST),
    pytest.param("dp", MNIST, marks=SLOW),
    # test_elsewhere.py and test_sbatch.py launch it, too, but not in `make canary`.
    pytest.param("zero3", BERT, marks=[pytest.mark.matrix, pytest.mark.canary]),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A folder with copies of scripts, YAMLs and JSONs, and nothing else but BERT's data."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "accelerate_configs", copy / "accelerate_configs")
    for script in TESTS:
        shutil.copy(ROOT / script, copy)
    (copy / "tests").mkdir()
    (copy / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    return copy


@functools.cache
def reference(script, folder):
    """A forked baseline."""
    return launch("baseline", script, folder, *TESTS[script].flags(TESTS[script].GLOBAL_BATCH))


@pytest.mark.parametrize("yaml, script", PAIRS)
def test_yaml_and_script_copied_to_another_folder(yaml, script, copy):
    """The commands of Slurm, of pages, `make train` and `make sweep` launch other strategies."""
    tests, folder, count = TESTS[script], copy / f"{yaml}-{script}", RANKS[yaml]
    words = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--main_process_port", 0, script]
    words += ["--output_dir", folder, *tests.flags(tests.GLOBAL_BATCH // count)]
    result = run(["env", "-C", str(copy), *ACCELERATE, *map(str, words)], folder)
    if result.code:
        raise RunFailed(result.err)
    record, expected = result.record, reference(script, copy / script.removesuffix(".py"))
    assert record["strategy"] == yaml and record["status"] == "completed"
    assert record["processes"] == record["devices"] == len(record["ranks"]) == count
    assert f"{record['strategy']} on {count} x CPU (" in result.out
    assert all(rank["real"] > 0.1 and rank["user"] > 0.1 for rank in record["ranks"])
    tests.assert_same_numbers(result, expected)
    if count == 1:  # as on a CPU, dp is the baseline
        assert result.losses == expected.losses


@pytest.mark.parametrize(
    "yaml, launcher, strategy",
    [
        ("dp", "--multi_gpu --num_processes 2", "ddp"),  # its mark counts with one process only
        ("baseline", "--debug --dynamo_backend eager", "baseline"),
        ("ddp", "--debug --mixed_precision bf16", "ddp"),
        ("fsdp", "--mixed_precision bf16", "fsdp"),
        ("zero2", "--dynamo_backend eager", "zero2"),  # accelerate leaves it out
    ],
)
def test_options_of_the_launcher(yaml, launcher, strategy, tmp_path):
    """They are in the record, and make no dp. The weights have their names, also when compiled. In
    bf16 the LSTM itself computes in fp32 under ddp: its weights are fp32.
    """
    words = "--dataset digits --max_train_steps 1".split()
    result = launch(yaml, MNIST, tmp_path, *words, launcher=launcher.split())
    record = result.record
    assert (record["strategy"], record["processes"]) == (strategy, 1 if yaml == "baseline" else 2)
    for name, word in (("precision", "bf16"), ("dynamo", "eager")):
        asked = word in launcher and (yaml, name) != ("zero2", "dynamo")
        assert record[name] == record["workload"][name] == (word if asked else "no")
    dtype = "bf16" if yaml == "fsdp" else "no"
    assert record["workload"]["compute_dtype"] == dtype
    assert record["steps"] == len(result.losses) == 1 and record["samples_per_second"] > 0
    assert "head.weight" in result.weights
