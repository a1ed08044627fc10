"""train_mnist_rnn.py under every strategy: equal numbers, every sample once, a whole record, and
one line for bad input.
"""

import functools
import gzip
import hashlib
import http.server
import math
import re
import shutil
import statistics
import struct
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torchvision
from conftest import BASELINE, STRATEGIES, launch, run, run_forked, silent_server, spied
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
    workload = """model dataset samples eval_samples labels sequence_length compute_dtype precision
        dynamo num_epochs max_train_steps max_grad_norm seed dropout learning_rate weight_decay"""
    assert set(record["workload"]) == set(workload.split())
    measured = "rank host device_name real user sys memory_before_mb peak_memory_mb"
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
    step = r"^step 22/44: loss \d\.\d{4}, \d+\.\d\d steps/s, \d+ s left\nepoch 1/2: test accuracy"
    assert re.search(step, log, re.M)
    assert log.splitlines()[-1].startswith(f"completed at step {STEPS}:")
    assert log.splitlines()[-1].endswith(f"{baseline.folder}/run.json")


def test_every_sample_once_an_epoch_and_in_another_order_in_each(baseline):
    steps = ids_seen(baseline.folder, 0)
    first, second = sum(steps[:22], []), sum(steps[22:], [])
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == 22 * GLOBAL_BATCH
    assert first != second


# -------- bad input, one clear line


NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
NO_MNIST = "no MNIST in FOLDER/data/MNIST/raw: .*Error downloading train-images.*--dataset digits"


@pytest.mark.parametrize(
    "strategy, flags, pattern",
    [
        ("baseline", "--checkpointing_steps 0", "--checkpointing_steps must be greater than 0"),
        ("baseline", "--learning_rate nan", "--learning_rate must be greater than 0, .* got nan"),
        ("baseline", "--dropout 2", "--dropout must be 0 or greater, and at most 1, got 2"),
        ("baseline", "--weight_decay -1", "--weight_decay must be 0 or greater, .*got -1"),
        ("baseline", f"--max_train_steps {10**20}", "at most 2147483647, got 1000"),
        ("ddp", f"--seed {2**32 - 1}", "--seed must be 0 or greater, and at most 2147483647"),
        ("baseline", "--with_tracking --report_to wandb", "--report_to wandb: no such tracker"),
        ("baseline", "--report_to x", "invalid choice: 'x'"),
        ("baseline", "--dataset cifar", "invalid choice: 'cifar'"),
        ("baseline", "--dataset digits --seeds 1", "unrecognized arguments: --seeds 1"),
        ("ddp", f"{BATCH} 719", "global batch of 1438 is more than all samples"),
        ("ddp", f"{BATCH} 1 --output_dir FOLDER/file/run", "Not a directory: 'FOLDER/file/run"),
        ("ddp", "--data_dir FOLDER/data", NO_MNIST),
    ],
)
def test_one_line_for_bad_input(strategy, flags, pattern, tmp_path):
    """From one process and from two, without a network; nothing is left behind."""
    (tmp_path / "file").touch()
    words = flags.replace("FOLDER", str(tmp_path)).split()
    result = launch(strategy, SCRIPT, tmp_path / "run", *words, env=NO_NETWORK, ok=False)
    assert re.search(f"^error: .*{pattern}".replace("FOLDER", str(tmp_path)), result.error_line())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "env, gpus, sentence",
    [
        ({"WORLD_SIZE": "2"}, 0, "each would train alone"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 1, "each would train alone"),  # on two nodes
        ({"MASTER_ADDR": "127.0.0.1"}, 0, "--num_processes 1"),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 1, "add --num_processes 1"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, 0, "--max_restarts must be 0: launch again with"),
        ({"LOCAL_RANK": "0"}, 0, "fsdp_version must be 2"),  # torchrun, and accelerate's default
        ({}, 2, "cannot use the GPU here: is the driver too old"),
        ({"ACCELERATE_USE_CPU": "true"}, 1, "set CUDA_VISIBLE_DEVICES= instead"),
    ],
)
def test_launches_that_would_not_do_what_was_asked(env, gpus, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "ACCELERATE_USE_CPU" in env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="^error: .*" + re.escape(sentence)):
        script.check_launch(fsdp="fsdp" in sentence, zero=False)


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """A mirror with four tiny IDX files, which the script takes for MNIST's; returns its folder."""
    mnist, mirror, resources = torchvision.datasets.MNIST, tmp_path / "mirror", []
    mirror.mkdir()
    for name, _ in mnist.resources:
        count, body = 20 if name.startswith("train") else 10, b""
        if "labels" in name:
            body = struct.pack(">II", 2049, count) + bytes(i % 10 for i in range(count))
        else:
            body = struct.pack(">IIII", 2051, count, 28, 28)
            body += bytes(i % 251 for i in range(count * 784))
        (mirror / name).write_bytes(gzip.compress(body))
        resources.append((name, hashlib.md5((mirror / name).read_bytes()).hexdigest()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=mirror)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(mnist, "resources", resources)
    mirrors = ["http://127.0.0.1:9/", f"http://127.0.0.1:{server.server_port}/"]  # one is down
    monkeypatch.setattr(mnist, "mirrors", mirrors)
    yield mirror
    server.shutdown()


def test_mnist_is_downloaded_checked_and_read(tiny_mnist, tmp_path, capsys, monkeypatch):
    raw, args = tmp_path / "MNIST" / "raw", SimpleNamespace(dataset="mnist", data_dir=tmp_path)
    train_x, test_x, train_y, test_y = script.read_images(args)
    assert not capsys.readouterr().err, "a log gets no progress bar"
    assert train_x.shape == (20, 28, 28) and test_x.shape == (10, 28, 28)
    assert train_y.tolist() == [*range(10)] * 2 and test_y.tolist() == [*range(10)]
    assert train_x[1].flatten().tolist() == [i % 251 for i in range(784, 2 * 784)]

    # Files of different data sets.
    for name, shape, number in (
        ("train-labels-idx1-ubyte", [21], 1),  # one more than images
        ("t10k-labels-idx1-ubyte", [11], 1),
        ("t10k-labels-idx1-ubyte", [10], 10),
        ("t10k-images-idx3-ubyte", [10, 20, 20], 1),
        ("train-labels-idx1-ubyte", [10], 1),
    ):
        whole = (raw / name).read_bytes()
        header = struct.pack(f">{len(shape) + 1}I", 2048 + len(shape), *shape)
        (raw / name).write_bytes(header + bytes([number]) * math.prod(shape))
        with pytest.raises(SystemExit, match="^error: .* do not belong together$"):
            script.read_images(args)
        (raw / name).write_bytes(whole)

    # A page of a captive portal, under the name of an image file.
    images = raw / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    images.write_text("<html>Please log in")
    with pytest.raises(SystemExit, match=f"^error: no MNIST in {raw}: {images.name} is not MNIST"):
        script.read_images(args)
    images.write_bytes(whole)

    # What torchvision before 0.9 left, which it would still read first.
    old = raw.with_name("processed")
    old.mkdir()
    assert len(script.read_images(args)) == 4, "an empty folder is none of its business"
    for name in ("training.pt", "test.pt"):
        torch.save((torch.zeros(3, 28, 28), torch.zeros(3)), old / name)
    with pytest.raises(SystemExit, match=f"^error: torchvision would read {old} instead of {raw}"):
        script.read_images(args)
    shutil.rmtree(old)

    # Half unpacked: one line. Without the half, it is unpacked again.
    labels = raw / "t10k-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:3])
    with pytest.raises(SystemExit, match=f"^error: no MNIST in {raw}: .*--dataset digits"):
        script.read_images(args)
    labels.unlink()
    assert len(script.read_images(args)) == 4

    # A damaged download is made anew where there is a network; elsewhere it is named. A terminal
    # shows progress.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    download = raw / f"{labels.name}.gz"
    for network in (True, False):
        download.write_bytes(b"half of a downl")
        labels.unlink()
        if network:
            assert len(script.read_images(args)) == 4 and "%|" in capsys.readouterr().err
            shutil.rmtree(tiny_mnist)
    with pytest.raises(SystemExit, match=f"^error: .*Error downloading {download.name}"):
        script.read_images(args)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n\x1f"])
def test_a_server_that_is_silent_ends_the_download_with_one_line(answer, tmp_path, monkeypatch):
    """At once, or in the middle of a file. The script's patience is cut to a twentieth here."""
    patience = script.socket.setdefaulttimeout
    asked = []
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [silent_server(answer)])
    monkeypatch.setattr(
        script.socket,
        "setdefaulttimeout",
        lambda seconds: asked.append(seconds) or patience(seconds and seconds / 20),
    )
    args = SimpleNamespace(dataset="mnist", data_dir=tmp_path)
    with pytest.raises(SystemExit, match="^error: no MNIST in .*--dataset digits"):
        script.read_images(args)
    assert asked == [7, None], "two mirrors of eight addresses each take less than two minutes"


def test_a_run_needs_scikit_learn_for_digits_alone(monkeypatch):
    monkeypatch.setitem(script.sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="^error: --dataset digits needs scikit-learn .*pip"):
        script.read_images(SimpleNamespace(dataset="digits"))


# -------- what a run says of itself


def test_a_long_evaluation_says_once_a_minute_how_far_it_is(monkeypatch, capsys):
    """With batches of 25 seconds."""
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(script.time, "perf_counter", lambda: next(clock))
    accelerator = SimpleNamespace(check_trigger=lambda: False)
    batches = script.batches_to_evaluate(accelerator, [*range(12)], [])
    assert list(batches) == [*range(12)]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"evaluation: {done} of 12 batches are done" for done in (2, 5, 8, 11)]


def test_durations():
    texts = {0: "0 s", 99.4: "99 s", 100: "2 min", 5_900: "98 min", 7_200: "2 h 0 min"}
    assert {seconds: script.duration(seconds) for seconds in texts} == texts


def test_weight_decay_is_the_optimizers():
    args = SimpleNamespace(learning_rate=0.1, weight_decay=0.3)
    optimizer, _ = script.make_optimizer(args, torch.nn.Linear(2, 2), 10)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]


# It runs the script as Python's -OO compiles it. Warnings of an open file are errors.
WITHOUT_DOCSTRINGS = f"""import pathlib, warnings
warnings.simplefilter("error", ResourceWarning)
exec(compile(pathlib.Path("{SCRIPT}").read_text(), "{SCRIPT}", "exec", optimize=2))
"""


@pytest.mark.slow
def test_help_and_runs_of_plain_python_and_without_docstrings(tmp_path):
    help_text = run_forked(BASELINE, [SCRIPT, "--help"])
    assert help_text.code == 0 and "AdamW" in help_text.out and "one cycle" in help_text.out
    words = [*DIGITS, "--max_train_steps", "3", "--output_dir", str(tmp_path / "run")]
    plain = [sys.executable, "-W", "error::ResourceWarning", SCRIPT, *words, "--profile"]
    done = run(plain, tmp_path / "run")
    assert done.code == 0 and "Exception ignored" not in done.err, done.err
    assert "warning: --profile traces the steps 13 to 17 of a run, and this one has" in done.out
    began = datetime.fromisoformat(done.record["began"])
    assert began.utcoffset() == timedelta(0) and abs(began.timestamp() - time.time()) < 600
    stripped = tmp_path / "stripped.py"
    stripped.write_text(WITHOUT_DOCSTRINGS)
    again = run_forked(BASELINE, [str(stripped), *words])
    assert "holds another run" in again.error_line() and "ResourceWarning" not in again.err
    done = run_forked(BASELINE, [str(stripped), *words[:-1], str(tmp_path / "other")])
    assert done.code == 0 and "Exception ignored" not in done.err, done.err
