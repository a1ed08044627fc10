"""train_mnist_rnn.py under every strategy: equal numbers, every sample once, a whole record, and
one line for bad input.
"""

import os
import re
import shutil
import statistics
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, STRATEGIES, launch, run, run_forked, spied
from safetensors.torch import load_file
from test_mnist_resume import assert_near, ids_seen
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
GLOBAL_BATCH, STEPS = 64, 44  # two epochs
DIGITS = ["--dataset", "digits"]
BATCH = "--dataset digits --per_device_train_batch_size"


def flags(micro_batch, accumulation=1):
    sizes = f"{micro_batch} --gradient_accumulation_steps {accumulation}"
    words = f"--num_epochs 2 --dropout 0 --per_device_train_batch_size {sizes}"
    return [*DIGITS, *words.split()]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return spied("baseline", SCRIPT, tmp_path_factory.mktemp("baseline"), *flags(GLOBAL_BATCH))


def assert_same_numbers(result, baseline):
    assert result.record["global_batch_size"] == GLOBAL_BATCH and len(result.losses) == STEPS
    assert_near(result, baseline, rel=1e-4, atol=1e-5)
    assert result.record["metrics"] == baseline.record["metrics"]


@pytest.mark.canary
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_numbers_as_the_baseline(strategy, baseline, tmp_path):
    """With accumulation, from the same samples in every step. 360 test images in batches of 7 from
    2 processes: the last round is uneven, and each image still counts once.
    """
    result = spied(strategy, SCRIPT, tmp_path, *flags(16, 2), "--per_device_eval_batch_size", 7)
    assert_same_numbers(result, baseline)
    mine = [ids_seen(tmp_path, rank) for rank in (0, 1)]
    for step, ids in enumerate(ids_seen(baseline.folder, 0)):
        both = [sum(mine[rank][2 * step : 2 * step + 2], []) for rank in (0, 1)]
        assert sorted(sum(both, [])) == sorted(ids), f"step {step + 1} saw other samples"


def test_the_baseline_trains_as_a_plain_loop_does(baseline):
    """On the same samples, with the defaults of the learning rate and of the decay."""
    train_x, test_x, train_y, test_y = script.read_images(SimpleNamespace(dataset="digits"))
    std, mean = torch.std_mean(train_x, correction=0)
    train_x, test_x = (((values - mean) / std).float() for values in (train_x, test_x))
    torch.manual_seed(0)
    model = script.RowLSTM(8, 64, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.005, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 0.005, STEPS, cycle_momentum=False)
    losses = []
    for ids in ids_seen(baseline.folder, 0):
        loss = F.cross_entropy(model(train_x[ids]), train_y[ids])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert baseline.losses == pytest.approx(losses, rel=1e-4)
    right = (model(test_x).argmax(1) == test_y).float().mean().item()
    assert baseline.record["metrics"]["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_lstm_computes_in_the_dtype_of_its_weights(precision):
    """Whatever autocast makes of an LSTM: on CUDA it is fp16, on a CPU what was asked for."""
    model = script.RowLSTM(8, 16, 0.0)
    model.lstm.register_forward_hook(lambda module, ins, outs: seen.append(outs[0].dtype))
    for weights in (torch.float32, precision):
        seen, model = [], model.to(weights)
        with torch.autocast("cpu", precision):
            logits = model(torch.rand(4, 8, 8))
        assert seen == [weights] and logits.dtype == precision
        logits.float().sum().backward()


def test_memory_is_that_of_training_alone(baseline, tmp_path):
    """An evaluation holds 400 MB more than training does, also than the epoch after it. The run's
    real time is not longer than the run. The peak is the most held, and not what is held.
    """
    [usual], start = baseline.record["ranks"], time.time()
    result = launch("baseline", SCRIPT, tmp_path, *flags(64), env={"SPY_MEMORY": "400"})
    longest, [rank] = time.time() - start, result.record["ranks"]
    peak = rank["peak_memory_mb"]
    assert result.record["seconds"]["train"] < rank["real"] < longest
    assert 50 < rank["memory_before_mb"] < peak < usual["peak_memory_mb"] + 200
    block = torch.ones(100_000_000)
    held = psutil.Process().memory_info().rss / 1e6
    del block
    kernel_knows_it = "VmHWM" in Path("/proc/self/status").read_text()
    assert script.peak_memory() > held - 1 or not kernel_knows_it


RECORD = """version script strategy strategy_options nodes processes devices device_name threads
    precision dynamo per_device_batch_size gradient_accumulation_steps global_batch_size steps
    workload parameters activation_checkpointing seconds steps_per_second samples_per_second ranks
    metrics loss_history began status resumed_from profiled versions slurm_job_id argv""".split()


def test_any_number_of_processes_counts_every_image_once_and_logs(tmp_path):
    """Three: the record is whole, and TensorBoard has what it says."""
    words = "--max_train_steps 30 --with_tracking --max_grad_norm 1 --per_device_eval_batch_size 11"
    words = [*flags(21), *words.split(), "--logging_steps", 8]
    result = launch("zero3", SCRIPT, tmp_path, *words, processes=3)
    record = result.record
    assert set(record) == set(RECORD)
    workload = """model dataset samples eval_samples checksum sequence_length compute_dtype
        precision dynamo num_epochs max_train_steps max_grad_norm seed dropout learning_rate
        weight_decay"""
    assert set(record["workload"]) == set(workload.split())
    measured = "rank host device_name cores real user sys memory_before_mb peak_memory_mb"
    assert all(set(rank) == set(measured.split()) for rank in record["ranks"])
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1, 2]
    assert record["global_batch_size"] == 63 and record["steps"] == 30
    assert set(record["versions"]) == {"torch", "accelerate", "deepspeed", "transformers"}
    seconds = record["seconds"]
    assert seconds["total"] >= seconds["startup"] + seconds["train"] + seconds["eval"] > 0
    rates = record["steps_per_second"]
    assert len(rates) == 5, "8, 16, 22 (the epoch's end), 24, 30"
    assert record["samples_per_second"] == 63 * statistics.median(rates)

    # The saved weights, evaluated by hand in this process, are as accurate as three counted.
    model = script.RowLSTM(8, 64, 0.0).eval()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    train_x, test_x, _, labels = script.read_images(SimpleNamespace(dataset="digits"))
    rows = (test_x.float() - train_x.float().mean()) / train_x.float().std(correction=0)
    assert record["metrics"]["accuracy"] == (model(rows).argmax(1) == labels).sum().item() / 360

    losses = {step: result.losses[step - 1] for step in (8, 16, 22, 24, 30)}
    assert result.logged("loss") == pytest.approx(losses)
    assert [*result.logged("accuracy")] == [22, 30]
    rates = result.logged("learning_rate")
    assert 0.004 < max(rates.values()) <= 0.005 and rates[30] < 1e-7, "a cycle, whose top is 0.005"
    norms = result.logged("gradient_norm").values()
    assert len(norms) == 5 and all(0.01 < norm < 10 for norm in norms)


def test_progress_is_lines(baseline):
    log = baseline.out
    assert re.search(r"^baseline on 1 x CPU .*samples; results go to ", log, re.M)
    step = r"^step 22/44: loss \d\.\d{4}, \d+\.\d\d steps/s, 0:00:\d\d left\nepoch 1/2: test acc"
    assert re.search(step, log, re.M)
    assert log.splitlines()[-1].startswith(f"completed at step {STEPS}: ")


def test_every_sample_once_an_epoch_and_in_another_order_in_each(baseline):
    steps = ids_seen(baseline.folder, 0)
    first, second = sum(steps[:22], []), sum(steps[22:], [])
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == 22 * GLOBAL_BATCH
    assert first != second


# -------- bad input, one clear line


@pytest.mark.parametrize(
    "strategy, flags, pattern",
    [
        (
            "baseline",
            "--checkpointing_steps 0",
            "--checkpointing_steps: 0 is not a whole number between",
        ),
        ("baseline", "--learning_rate nan", "--learning_rate: nan is not a number between"),
        ("baseline", "--max_train_steps x", "--max_train_steps: x is not a whole number between"),
        ("baseline", "--dropout 2", "--dropout: 2 is not a number between 0 and 1"),
        ("ddp", f"--seed {2**32 - 1}", "--seed: 4294967295 is not a whole number between 0"),
        ("baseline", "--with_tracking --report_to wandb", "--report_to wandb is not installed"),
        ("baseline", "--dataset cifar", "invalid choice: 'cifar'"),
        ("baseline", "--dataset digits --seeds 1", "unrecognized arguments: --seeds 1"),
        ("baseline", "--resume", "--resume needs --output_dir"),
        ("ddp", f"{BATCH} 719", r"global batch \(1438\) is larger than the training set \(1437\)"),
    ],
)
def test_one_line_for_bad_input(strategy, flags, pattern, tmp_path):
    """From one process and from two; nothing is left behind."""
    words = ["--config_file", f"{ROOT}/accelerate_configs/{strategy}.yaml"]
    argv = [str(ROOT / SCRIPT), *flags.split()]
    if "--resume" not in argv:
        argv += ["--output_dir", "run"]
    result = run_forked(words, argv, root=tmp_path)
    assert re.search(f"^error: .*{pattern}", result.error_line())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "env, gpus, sentence",
    [
        ({"WORLD_SIZE": "2"}, 0, "each process would train alone"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, 0, "each process would train alone"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 1, "each process would train alone"),  # on two nodes
        ({"MASTER_ADDR": "127.0.0.1"}, 0, "each process would train alone"),
        ({}, 2, "cannot use the GPU here: is its driver too old"),
    ],
)
def test_launches_that_would_not_do_what_was_asked(env, gpus, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "PartialState", lambda **options: None)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="^error: .*" + re.escape(sentence)):
        script.connect_ranks()


def test_a_process_of_its_own_is_a_baseline_whatever_the_environment_says(tmp_path):
    """LOCAL_RANK=-1 is what some launchers set for one process."""
    env = {"LOCAL_RANK": "-1", "FSDP_VERSION": "1"}
    record = launch("baseline", SCRIPT, tmp_path, *DIGITS, "--max_train_steps", 1, env=env).record
    assert record["strategy"] == "baseline" and record["strategy_options"] == {}


def test_a_run_does_not_go_on_with_other_images_of_the_same_labels(baseline, tmp_path):
    text = (ROOT / SCRIPT).read_text()
    assert text.count("digits.images, digits.target") == 1
    inverted = tmp_path / "train_mnist_rnn.py"
    inverted.write_text(text.replace("digits.images, d", "16 - digits.images, d"))
    folder = tmp_path / "run"
    shutil.copytree(baseline.folder, folder)
    result = launch("baseline", inverted, folder, *flags(GLOBAL_BATCH), "--resume", ok=False)
    assert "cannot resume with another checksum: " in result.error_line()


@pytest.mark.slow
def test_cores_of_ranks_are_counted_and_missing_ones_are_a_warning(tmp_path):
    """A launcher with OMP_PROC_BIND=true leaves its ranks one core."""
    flags = [*DIGITS, "--max_train_steps", 1]
    core = str(min(os.sched_getaffinity(0)))
    words = ["taskset", "-c", core, sys.executable, "-m", "accelerate.commands.launch"]
    words += ["--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", "0", SCRIPT]
    words += ["--output_dir", tmp_path, *flags]
    done = run([str(word) for word in words], tmp_path)
    assert done.code == 0 and done.out.count("warning: 2 ranks share 1 core(s)") == 1
    assert [rank["cores"] for rank in done.record["ranks"]] == [1, 1]


# -------- what a run says of itself


def test_a_long_evaluation_says_once_a_minute_how_far_it_is(monkeypatch, capsys):
    """With batches of 25 seconds."""
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(script.time, "perf_counter", lambda: next(clock))
    batches = script.batches_to_evaluate(None, [*range(12)], None, None, [])
    assert list(batches) == [*range(12)]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"evaluation: {done} of 12 batches done" for done in (2, 5, 8, 11)]


@pytest.mark.slow
def test_help_and_a_run_of_plain_python(tmp_path):
    """All that a run prints is there, also where it is not a terminal."""
    help_text = run([sys.executable, SCRIPT, "--help"])
    assert help_text.code == 0 and "AdamW" in help_text.out and "one cycle" in help_text.out
    words = [*DIGITS, "--max_train_steps", "3", "--output_dir", str(tmp_path), "--profile"]
    plain = [sys.executable, "-W", "error::ResourceWarning", SCRIPT, *words]
    done = run(plain, tmp_path)
    assert done.code == 0 and "Exception ignored" not in done.err, done.err
    began = datetime.fromisoformat(done.record["began"])
    assert began.utcoffset() == timedelta(0) and abs(began.timestamp() - time.time()) < 600
