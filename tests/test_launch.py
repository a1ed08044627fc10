"""Real launches, of script and YAML copied to another folder. The ranks that other tests fork (see
warm.py) train as these do.
"""

import functools
import shutil
from unittest import mock

import pytest
import test_bert
import test_mnist
from conftest import ACCELERATE, ROOT, RunFailed, launch, run
from test_mnist_resume import SLOW

import train_mnist_rnn

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


@SLOW
def test_a_compiler_that_deepspeed_would_not_get_is_refused(tmp_path):
    """accelerate does not pass it on, so the ranks ask their real launcher."""
    words = ["--config_file", "accelerate_configs/zero2.yaml", "--main_process_port", "0"]
    words += ["--dynamo-backend=eager", MNIST, "--dataset", "digits", "--output_dir"]
    done = run([*ACCELERATE, *words, str(tmp_path / "run")])
    [line] = {line for line in done.err.splitlines() if line.startswith("error: ")}  # of two ranks
    assert done.code and "accelerate drops --dynamo_backend under DeepSpeed" in line


@pytest.mark.parametrize("key, env", [("dynamo_backend", ""), ("backend", ""), ("", "EAGER")])
def test_a_compiler_is_found_in_a_yaml_and_in_the_environment(key, env, tmp_path, monkeypatch):
    """accelerate takes the YAML's key in both forms."""
    yaml = tmp_path / "zero2.yaml"
    text = (ROOT / "accelerate_configs" / "zero2.yaml").read_text()
    yaml.write_text(text + f"dynamo_config:\n  {key}: EAGER\n" * bool(key))
    launcher = mock.Mock(cmdline=lambda: ["accelerate-launch", "--config_file", str(yaml), MNIST])
    monkeypatch.setattr(train_mnist_rnn.psutil.Process, "parent", lambda self: launcher)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", env)
    assert train_mnist_rnn.launched_with_dynamo()
    yaml.write_text(text)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    assert not train_mnist_rnn.launched_with_dynamo()


@pytest.mark.parametrize(
    "yaml, launcher, strategy",
    [
        ("dp", "--multi_gpu --num_processes 2", "ddp"),  # its mark counts with one process only
        ("baseline", "--debug --dynamo_backend eager", "baseline"),
        ("ddp", "--debug --mixed_precision bf16", "ddp"),
        ("fsdp", "--mixed_precision bf16", "fsdp"),
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
        assert record[name] == record["workload"][name] == (word if word in launcher else "no")
    dtype = "bf16" if yaml == "fsdp" else "no"
    assert record["workload"]["compute_dtype"] == dtype
    assert record["steps"] == len(result.losses) == 1 and record["samples_per_second"] > 0
    assert "head.weight" in result.weights
