"""train_mnist_rnn.py: equal numbers under every strategy, a complete record, and bad input."""

import os
import statistics
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from conftest import ACCELERATE, ROOT, STRATEGIES, launch, namespaces, run, run_forked, spied
from test_mnist_resume import assert_near, ids_seen, samples_of_steps
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
GLOBAL_BATCH, STEPS = 64, 44  # two epochs


def flags(micro_batch, accumulation=1):
    sizes = f"{micro_batch} --gradient_accumulation_steps {accumulation}"
    words = f"--dataset digits --num_epochs 2 --dropout 0 --per_device_train_batch_size {sizes}"
    return words.split()


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
    """With accumulation, from the same samples in every step. Batches of 7 test images from 2
    processes leave an uneven last round, and each image still counts once.
    """
    result = spied(strategy, SCRIPT, tmp_path, *flags(16, 2), "--per_device_eval_batch_size", 7)
    assert_same_numbers(result, baseline)
    mine = samples_of_steps(tmp_path, 2, GLOBAL_BATCH)
    assert torch.equal(mine, samples_of_steps(baseline.folder, 1, GLOBAL_BATCH))


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
    """Not in that of autocast, which on a GPU is always fp16."""
    model = script.RowLSTM(8, 16, 0.0)
    model.lstm.register_forward_hook(lambda module, ins, outs: seen.append(outs[0].dtype))
    for weights in (torch.float32, precision):
        seen, model = [], model.to(weights)
        with torch.autocast("cpu", precision):
            logits = model(torch.rand(4, 8, 8))
        assert seen == [weights] and logits.dtype == precision
        logits.float().sum().backward()


def test_the_peak_memory_is_that_of_training(baseline, tmp_path):
    """Here making the loaders needs 400 MB more, and so does an evaluation. That must not count,
    even in the second epoch.
    """
    result = launch("baseline", SCRIPT, tmp_path, *flags(64), env={"SPY_MEMORY": "400"})
    [usual], [rank] = baseline.record["ranks"], result.record["ranks"]
    assert 50 < rank["memory_before_mb"] < rank["peak_memory_mb"] < usual["peak_memory_mb"] + 200


RECORD = """version script strategy strategy_options nodes processes devices device_name threads
    precision dynamo per_device_batch_size gradient_accumulation_steps global_batch_size steps
    workload parameters activation_checkpointing seconds steps_per_second samples_per_second ranks
    metrics loss_history began status resumed_from profiled versions slurm_job_id argv""".split()


def test_the_record_is_complete_and_agrees_with_tensorboard(tmp_path):
    """A run on three processes."""
    started = time.time()
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
    began = datetime.fromisoformat(record["began"])
    assert began.utcoffset() == timedelta(0) and began.timestamp() >= int(started)
    assert set(record["versions"]) == {"torch", "accelerate", "deepspeed", "transformers"}
    seconds = record["seconds"]
    assert seconds["total"] >= seconds["startup"] + seconds["train"] + seconds["eval"] > 0
    assert all(seconds["train"] < rank["real"] < time.time() - started for rank in record["ranks"])
    rates = record["steps_per_second"]
    assert len(rates) == 5, "8, 16, 22 (the epoch's end), 24, 30"
    assert [*result.logged("steps_per_second").values()] == pytest.approx(rates)
    assert record["samples_per_second"] == 63 * statistics.median(rates)

    losses = {step: result.losses[step - 1] for step in (8, 16, 22, 24, 30)}
    assert result.logged("loss") == pytest.approx(losses)
    assert [*result.logged("accuracy")] == [22, 30]
    rates = result.logged("learning_rate")
    assert 0.004 < max(rates.values()) <= 0.005 and rates[30] < 1e-7, "a cycle, whose top is 0.005"
    norms = result.logged("gradient_norm").values()
    assert len(norms) == 5 and all(0.01 < norm < 10 for norm in norms)


def test_every_sample_once_an_epoch_and_in_another_order_in_each(baseline):
    epochs = samples_of_steps(baseline.folder, 1, GLOBAL_BATCH).view(2, -1)
    first, second = epochs.tolist()
    assert len(first) == len(set(first)) == len(set(second)) == 22 * GLOBAL_BATCH
    assert first != second


def test_repeats_with_other_seeds_have_other_orders(baseline, tmp_path):
    """Epoch 0 of seed 1 is not epoch 1 of seed 0: both once drew with seed + epoch."""
    words = [*flags(GLOBAL_BATCH), "--seed", 1, "--max_train_steps", 22]
    spied("baseline", SCRIPT, tmp_path, *words)
    order = samples_of_steps(tmp_path, 1, GLOBAL_BATCH)
    epochs = samples_of_steps(baseline.folder, 1, GLOBAL_BATCH).view(2, 22, GLOBAL_BATCH)
    assert not any(torch.equal(order, epoch) for epoch in epochs)


# -------- bad input is one clear line


@pytest.mark.parametrize(
    "strategy, flags, message",
    [
        ("baseline", "--checkpointing_steps 0", "--checkpointing_steps: 0 is not a whole number"),
        ("baseline", "--learning_rate x", "--learning_rate: invalid float value: 'x'"),
        ("baseline", "--max_grad_norm -1", "--max_grad_norm must be above 0"),
        ("baseline", "--with_tracking --report_to wandb", "--report_to wandb is not installed"),
        ("baseline", "--seeds 1", "unrecognized arguments: --seeds 1"),
        ("baseline", "--resume", "--resume needs --output_dir"),
        ("ddp", "--per_device_train_batch_size 719", "global batch (1438) is larger than the"),
    ],
)
def test_one_line_for_bad_input(strategy, flags, message, tmp_path):
    """From one process and from two. Nothing is left behind."""
    words = ["--config_file", f"{ROOT}/accelerate_configs/{strategy}.yaml"]
    argv = [str(ROOT / SCRIPT), "--dataset", "digits", *flags.split()]
    if "--resume" not in argv:
        argv += ["--output_dir", "run"]
    result = run_forked(words, argv, root=tmp_path)
    assert message in result.error_line()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "env, gpus, message",
    [
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, 0, "each process would train alone"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 1, "each process would train alone"),
        ({"MASTER_ADDR": "127.0.0.1"}, 0, "each process would train alone"),
        ({}, 2, "cannot use the GPU of .*: is its driver too old"),
    ],
)
def test_launches_that_would_not_do_what_was_asked(env, gpus, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script, "PartialState", lambda **options: None)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        script.connect_ranks()


@pytest.mark.slow
def test_ranks_that_share_a_core_are_a_warning(tmp_path):
    """A launcher with OMP_PROC_BIND=true leaves one core to its ranks, and a container may have a
    quota of CPU time.
    """
    core = str(min(os.sched_getaffinity(0)))
    quota = "mount -t tmpfs none /sys/fs/cgroup && echo 150000 100000 >/sys/fs/cgroup/cpu.max"
    words = [
        *namespaces(quota),
        "taskset",
        "-c",
        core,
        *ACCELERATE,
        "--main_process_port",
        "0",
        "--config_file",
    ]
    words += ["accelerate_configs/ddp.yaml", SCRIPT, "--dataset", "digits"]
    done = run([*words, "--max_train_steps", "1", "--output_dir", str(tmp_path)], tmp_path)
    assert done.code == 0 and done.out.count("warning: 2 ranks share 1 core(s)") == 1
    assert done.out.count("warning: 2 ranks share the quota of 1.5 core(s) in cpu.max") == 1
    assert [rank["cores"] for rank in done.record["ranks"]] == [1, 1]
