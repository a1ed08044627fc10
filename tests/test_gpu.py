"""Both scripts on this machine's GPUs: `make test-gpu` runs these tests, and prints what they
measured. Without a GPU they are skipped. GPU_TESTS=cpu tries them on CPU ranks, with a tiny BERT.
"""

import functools
import json
import os
import shutil
import statistics
import sys

import isolated
import pytest
from conftest import ACCELERATE, ROOT, RUNGS, run

import fit
from memory.formulas import memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CPU = os.environ.get("GPU_TESTS") == "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SHORT = "--max_train_steps 20 --dropout 0 --learning_rate 1e-4".split()
# How far a loss may be from the baseline's in fp32, relative to it. In fp32 only the order of sums
# differs. bf16 has 8 bits.
TOLERANCE = {"no": 1e-4, "bf16": 0.05}
YAMLS = ["baseline", "dp", "ddp", "fsdp", "zero2", "zero3"]
# What one GPU can do comes first.
CASES = [
    (script, yaml, processes, precision)
    for processes in (1, 2)
    for script in ("train_mnist_rnn.py", "train_bert_squad.py")
    for precision in TOLERANCE
    for yaml in YAMLS + RUNGS * (script == "train_bert_squad.py")
    if processes == 1 or yaml not in ("baseline", "dp")
    if (yaml, precision) != ("dp", "bf16")
]
TABLE = "| script | strategy | processes | precision | losses differ by | peak MB | formula | on |"
TABLE += "\n|---|---|---|---|---|---|---|---|"
WIDTHS = "| tokens/s with many widths | with one | ratio |\n|---|---|---|"
LINK = "| link of two GPUs | GB/s of all-reduce | latency in us |\n|---|---|---|"


@pytest.fixture(scope="module")
def gpus():
    """The visible GPUs, by their numbers. conftest.py hides them from all other tests."""
    seen = isolated.VISIBLE_GPUS
    user = ["-u", VISIBLE] if seen is None else [f"{VISIBLE}={seen}"]
    ask = "import torch; print(*range(torch.cuda.device_count()), sep=',')"
    every = run(["env", *user, sys.executable, "-c", ask]).out.strip()
    if not every and not CPU:
        pytest.skip("torch sees no GPU here")
    return (seen or every).split(",") if every else ["", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the config of a BERT and a tokenizer, and no weights."""
    folder = tmp_path_factory.mktemp("model") / "bert"
    shutil.copytree(ROOT / "tests" / "data" / "tiny_bert", folder)
    if not CPU:  # 110 million random weights
        config = json.loads((folder / "config.json").read_text()) | fit.MODELS["bert-base"]
        (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 12}))
    return folder


@pytest.fixture(scope="module")
def train(gpus, model, tmp_path_factory):
    """A function that trains, and returns the Result of the run."""
    squad = "tests/data/squad_v1.json"
    bert = ["--model_name_or_path", model, "--from_scratch", "--max_eval_samples", 16]
    bert += ["--train_file", squad, "--validation_file", squad]
    flags = {"train_mnist_rnn.py": ["--dataset", "digits"], "train_bert_squad.py": bert}

    @functools.cache
    def start(script, yaml, processes, precision):
        # On a CPU, dp has one device.
        devices = min(2, len(gpus)) if yaml == "dp" and not CPU else processes
        env = {VISIBLE: ",".join(gpus[:devices])}
        if precision == "no":  # The scripts turn on TF32, with which equal losses cannot be told.
            env["NVIDIA_TF32_OVERRIDE"] = "0"
        folder = tmp_path_factory.mktemp(yaml) / "run"
        words = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--main_process_port", 0]
        words += ["--num_processes", processes, "--mixed_precision", precision, script]
        words += [*flags[script], *SHORT, "--per_device_train_batch_size", 8 // devices]
        words += ["--output_dir", folder]
        done = run([*ACCELERATE, *map(str, words)], folder, env)
        assert done.code == 0, done.err
        # BERT-base's two checkpoints have 2.6 GB, and there are dozens of runs.
        for name in ("checkpoints", "best"):
            shutil.rmtree(folder / name)
        return done

    return start


@pytest.mark.parametrize("script, yaml, processes, precision", CASES)
def test_every_strategy_has_the_baselines_losses_and_the_memory_of_the_formula(
    script, yaml, processes, precision, gpus, model, train, say_row
):
    if processes > len(gpus):
        pytest.skip("needs two GPUs")
    baseline = train(script, "baseline", 1, "no")
    ours = train(script, yaml, processes, precision)
    pairs = zip(ours.losses, baseline.losses, strict=True)
    worst = max(abs(loss / expected - 1) for loss, expected in pairs)
    record, formula = ours.record, None
    peak = record["ranks"][0]["peak_memory_mb"]
    if script == "train_bert_squad.py":
        batch = record["per_device_batch_size"], record["workload"]["sequence_length"]
        sizes = fit.read_model(str(model))
        formula = memory_of(yaml, sizes, *batch, processes, precision)["total"] / 1e6
    row = [script, yaml, processes, precision.replace("no", "fp32"), f"{worst:.1e}"]
    row += [f"{number:,.0f}" if number else "" for number in (peak, formula)]
    say_row(TABLE, [*row, record["device_name"]])
    assert worst <= TOLERANCE[precision] and len(baseline.losses) == 20
    assert CPU or formula is None or peak == pytest.approx(formula, rel=0.15)


@pytest.mark.parametrize("script", ["train_mnist_rnn.py", "train_bert_squad.py"])
def test_bf16_runs_save_the_same_names_and_dtypes_under_every_strategy(script, train):
    yamls = [case[1] for case in CASES if case[0] == script and case[2:] == (1, "bf16")]
    weights = [train(script, yaml, 1, "bf16").weights for yaml in yamls]
    kinds = [{name: weight.dtype for name, weight in saved.items()} for saved in weights]
    assert all(kind == kinds[0] for kind in kinds)


def write_questions(file, lengths):
    """Write a SQuAD file. Each of its texts has one of these numbers of words."""
    answers = {"answers": [{"text": "a", "answer_start": 0}], "question": "a"}
    texts = [" ".join(["a"] * length) for length in lengths]
    paragraphs = [
        {"context": text, "qas": [answers | {"id": str(number)}]}
        for number, text in enumerate(texts)
    ]
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def test_many_widths_are_about_as_fast_as_one(gpus, model, tmp_path, say_row):
    """With BERT-base in bf16. cuDNN's attention would make a plan for each new width."""
    many = [128 + 240 * number // 1023 for number in range(1024)]  # 17 widths in 32 steps
    speeds = []
    for name, lengths in (("many", many), ("one", [248] * 1024)):
        file, folder = tmp_path / f"{name}.json", tmp_path / name
        write_questions(file, lengths[:: 32 if CPU else 1])
        words = [*ACCELERATE, "--config_file", "accelerate_configs/baseline.yaml"]
        words += ["--mixed_precision", "bf16", "train_bert_squad.py", "--model_name_or_path", model]
        words += ["--from_scratch", "--train_file", file, "--validation_file", file]
        words += ["--max_eval_samples", 8, "--num_epochs", 1, "--logging_steps", 1]
        words += ["--per_device_train_batch_size", 1 if CPU else 32, "--output_dir", folder]
        done = run([*map(str, words)], folder, {VISIBLE: gpus[0]})
        assert done.code == 0, done.err
        rates = done.record["steps_per_second"][4:]  # after the warm-up
        tokens = done.record["tokens"] / done.record["steps"]
        speeds.append(tokens * statistics.harmonic_mean(rates))
    ratio = speeds[0] / speeds[1]
    say_row(WIDTHS, [*(f"{speed:,.0f}" for speed in speeds), f"{ratio:.2f}"])
    assert CPU or ratio >= 0.8


def test_the_link_of_two_gpus(gpus, tmp_path, say_row):
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    words = "--config_file accelerate_configs/ddp.yaml --num_processes 2 tools/check.py".split()
    env = {VISIBLE: ",".join(gpus[:2])}
    done = run([*ACCELERATE, *words, "--output_dir", tmp_path], env=env)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "check.json").read_text())
    line = found["collectives"]["all_reduce"]
    rate, latency = line["bandwidth_bytes_per_second"] / 1e9, line["latency_seconds"] * 1e6
    say_row(LINK, (found["backend"], f"{rate:.1f}", f"{latency:.0f}"))
    assert found["backend"] == ("gloo" if CPU else "nccl")
