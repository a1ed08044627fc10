"""train_mnist_rnn.py under every strategy: the same numbers, every sample once, a whole record."""

import fcntl
import functools
import gzip
import hashlib
import http.server
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, RUNGS, STRATEGIES, launch, run
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_mnist_resume import ids_seen

import train_mnist_rnn as script

SCRIPT = "train_mnist_rnn.py"
SAME_RUN = "--dataset digits --num_epochs 2 --dropout 0".split()  # 44 steps of a global batch of 64


def batch_flags(micro_batch, accumulation):
    return ["--per_device_train_batch_size", micro_batch, "--gradient_accumulation_steps", accumulation]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    return launch("baseline", SCRIPT, folder, *SAME_RUN, *batch_flags(64, 1), env={"SPY_DIR": str(folder)})


@pytest.mark.parametrize("strategy, accumulation", [
    *itertools.product(STRATEGIES, (1, 2)), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in RUNGS)])
def test_same_numbers_as_the_baseline(strategy, accumulation, baseline, tmp_path):
    flags = [*SAME_RUN, *batch_flags(32 // accumulation, accumulation), "--per_device_eval_batch_size", 7]
    result = launch(strategy, SCRIPT, tmp_path, *flags, env={"SPY_DIR": str(tmp_path)})
    record, reference = result.record, baseline.record
    assert (record["strategy"], record["processes"], record["devices"]) == (strategy.split("_")[0], 2, 2)
    assert record["global_batch_size"] == reference["global_batch_size"] == 64

    assert len(result.losses) == 44
    assert result.losses == pytest.approx(baseline.losses, rel=1e-4)
    assert result.weights.keys() == baseline.weights.keys()
    for name, weight in baseline.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-3, atol=1e-5, msg=name)
    # 360 test images in batches of 7 from 2 processes: the last round is uneven, and each image still counts once.
    assert record["metrics"] == reference["metrics"]

    losses = max(abs(a / b - 1) for a, b in zip(result.losses, baseline.losses, strict=True))
    weights = max((result.weights[name] - weight).abs().max().item() for name, weight in baseline.weights.items())
    print(f"{strategy}, accumulation {accumulation}: relative loss {losses:.1e}, absolute weights {weights:.1e}")

    steps = ids_seen(baseline.folder, 0)
    mine = [ids_seen(tmp_path, rank) for rank in (0, 1)]
    for step, ids in enumerate(steps):
        micro_batches = [mine[rank][step * accumulation + micro] for micro in range(accumulation) for rank in (0, 1)]
        assert sorted(sum(micro_batches, [])) == sorted(ids), f"step {step + 1} saw other samples"


def test_a_gpus_way_with_lstm_weights_does_no_harm(baseline, tmp_path):
    """cuDNN moves an LSTM's weights into one buffer, which FSDP2 and checkpoints cannot bear; here that is imitated."""
    flags, env = [*SAME_RUN, *batch_flags(32, 1)], {"SPY_FLATTEN": "1"}
    fsdp = launch("fsdp", SCRIPT, tmp_path / "fsdp", *flags, env=env)
    assert fsdp.losses == pytest.approx(baseline.losses, rel=1e-4)
    # torch.compile puts a prefix before the names of the weights; the saved ones must not have it.
    compiled = launch("baseline", SCRIPT, tmp_path / "one", *SAME_RUN, launcher=["--dynamo_backend", "eager"], env=env)
    assert compiled.record["workload"]["dynamo"] == "eager"
    assert compiled.losses == pytest.approx(baseline.losses, rel=1e-4)
    saved = load_file(tmp_path / "one" / "checkpoints" / "step_00000044" / "model.safetensors")
    assert {name.split("_orig_mod.")[-1] for name in saved} == set(baseline.weights) == set(compiled.weights)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_the_lstm_computes_in_the_dtype_of_its_weights(precision):
    """Whatever autocast makes of an LSTM: on CUDA it is fp16 (AutocastRNN.cpp), on a CPU what was asked for."""
    model = script.RowLSTM(8, 16, 0.0)
    model.lstm.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0].dtype))
    for weights in (torch.float32, precision):
        seen, model = [], model.to(weights)
        with torch.autocast("cpu", precision):
            logits = model(torch.rand(4, 8, 8))
        assert seen == [weights] and logits.dtype == precision
        logits.float().sum().backward()


def test_memory_is_that_of_training_alone(baseline, tmp_path):
    """An evaluation holds 400 MB more than training does, also than the epoch after it."""
    [usual] = baseline.record["ranks"]
    result = launch("baseline", SCRIPT, tmp_path, *SAME_RUN, env={"SPY_MEMORY": "400"})
    [rank] = result.record["ranks"]
    assert 50 < rank["memory_before_mb"] < rank["peak_memory_mb"] < usual["peak_memory_mb"] + 200


def test_dp_is_the_baseline_on_one_device_and_says_so(baseline, tmp_path):
    result = launch("dp", SCRIPT, tmp_path, *SAME_RUN)
    assert result.record["strategy"] == "dp" and result.record["devices"] == 1
    assert re.search(r"^dp on 1 x CPU \(.*\): ", result.out)
    assert result.losses == baseline.losses


def test_the_mark_of_dp_counts_with_one_process_only(tmp_path):
    flags, launcher = ["--dataset", "digits", "--max_train_steps", 1], ["--multi_gpu"]
    record = launch("dp", SCRIPT, tmp_path, *flags, launcher=launcher, processes=2).record
    assert (record["strategy"], record["processes"]) == ("ddp", 2)


def test_any_number_of_processes_counts_every_image_once_and_logs(baseline, tmp_path):
    """Three processes: the record is complete, TensorBoard can read the logs, the learning rate is the baseline's."""
    flags = ["--max_train_steps", 30, "--dropout", 0, *batch_flags(21, 1), "--per_device_eval_batch_size", 11]
    flags += ["--dataset", "digits", "--with_tracking", "--max_grad_norm", 1]
    three = launch("ddp", SCRIPT, tmp_path / "three", *flags, processes=3, real=True)
    record = three.record
    fields = """script strategy strategy_options nodes processes devices device_name threads precision dynamo
        per_device_batch_size gradient_accumulation_steps global_batch_size steps workload
        parameters seconds samples_per_second ranks metrics loss_history status resumed_from
        profiled versions slurm_job_id argv"""
    assert set(record) == set(fields.split())
    workload = """model dataset samples eval_samples sequence_length precision dynamo epochs steps
        max_grad_norm seed dropout learning_rate"""
    assert set(record["workload"]) == set(workload.split())
    measured = "rank host real user sys train_cpu memory_before_mb peak_memory_mb"
    assert all(set(rank) == set(measured.split()) for rank in record["ranks"])
    assert record["global_batch_size"] == 63 and record["steps"] == 30 and record["status"] == "completed"
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1, 2]
    assert all(rank["real"] > 1 and rank["user"] > 1 and rank["peak_memory_mb"] > 50 for rank in record["ranks"])
    seconds = record["seconds"]
    assert seconds["total"] >= seconds["startup"] + seconds["train"] + seconds["eval"] > 0
    assert record["samples_per_second"] > 0 and record["resumed_from"] is None

    # The saved weights, evaluated by hand in this process, give the accuracy that three processes counted.
    model = script.RowLSTM(8, 64, 0.0).eval()
    model.load_state_dict(load_file(tmp_path / "three" / "model.safetensors"))
    train_x, _, test_x, labels = script.read_images(SimpleNamespace(dataset="digits"))
    rows = (test_x.float() - train_x.float().mean()) / train_x.float().std(correction=0)
    assert record["metrics"]["accuracy"] == (model(rows).argmax(1) == labels).sum().item() / 360

    inspected = run([sys.executable, "-m", "tensorboard.main", "--inspect", "--logdir", str(tmp_path / "three")])
    assert inspected.code == 0 and "learning_rate" in inspected.out
    logs = EventAccumulator(str(tmp_path / "three" / "tensorboard")).Reload()
    names = {"loss", "learning_rate", "samples_per_second", "accuracy", "grad_norm"}
    assert set(logs.Tags()["scalars"]) >= names
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.005)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, 30, cycle_momentum=False)
    rates = []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    for event in logs.Scalars("learning_rate"):
        assert event.value == pytest.approx(rates[event.step - 1], rel=1e-6), f"learning rate of step {event.step}"
    assert list((tmp_path / "three" / "tensorboard").glob("*/hparams.yml"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["baseline", "dp", *STRATEGIES])
def test_the_users_command_on_real_mnist(strategy, real_data, tmp_path):
    """`accelerate launch --config_file accelerate_configs/X.yaml train_mnist_rnn.py`, on real MNIST."""
    shutil.copytree(real_data / "MNIST", tmp_path / "data" / "MNIST", copy_function=shutil.copyfile)
    result = launch(strategy, SCRIPT, tmp_path / "run", "--max_train_steps", 60, "--data_dir", tmp_path / "data")
    record = result.record
    assert record["strategy"] == strategy and record["processes"] == (1 if strategy in ("baseline", "dp") else 2)
    assert record["workload"]["samples"] == 60_000 and record["workload"]["eval_samples"] == 10_000
    assert record["metrics"]["accuracy"] > 0.3
    assert record["metrics"]["accuracy"] * 10_000 == pytest.approx(round(record["metrics"]["accuracy"] * 10_000))


def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(tmp_path):
    flags = ["--dataset", "digits", "--num_epochs", "1"]
    log = launch("baseline", SCRIPT, tmp_path / "log", *flags)
    assert "\r" not in log.out + log.err and "%|" not in log.out + log.err and "epoch 1/1" in log.out
    assert log.out.splitlines()[-1].startswith("completed 22 steps") and f"{tmp_path}/log/run.json" in log.out

    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, SCRIPT, *flags, "--output_dir", str(tmp_path / "terminal")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:  # how a closed terminal reads on Linux
        pass
    assert process.wait() == 0
    assert re.search(rb"\r.*\d+%\|.*/22 ", shown), shown


def test_a_log_has_a_line_now_and_then(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "SYNC_SECONDS", 0)
    flags = ["--dataset", "digits", "--max_train_steps", "3", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *flags])
    script.main()
    printed = capsys.readouterr().out
    lines = re.findall(r"^step (.*)  loss \d\.\d{4}  [\d,]+ samples/s$", printed, re.M)
    assert lines == ["1/3", "2/3", "3/3"]


def test_help_names_every_flag_with_a_sentence():
    text = run([sys.executable, SCRIPT, "--help"]).out.split("options:")[1]
    for flag in """output_dir seed num_epochs per_device_train_batch_size per_device_eval_batch_size learning_rate
            gradient_accumulation_steps dropout max_train_steps checkpointing_steps resume with_tracking
            prepare_data_only dataset data_dir""".split():
        assert re.search(rf"^  --{flag}( [A-Z_]+| {{[a-z,]+}})?\s+[A-Za-z][A-Za-z]", text, re.M), flag


def epoch_order(num_samples, seed, epoch, global_batch_size):
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), global_batch_size=global_batch_size,
        batch_size=global_batch_size, steps_per_epoch=num_samples // global_batch_size, devices=1,
        args=SimpleNamespace(seed=seed, per_device_eval_batch_size=8))
    pixels, labels = torch.rand(num_samples, 2, 2), torch.arange(num_samples)
    loader, _ = script.make_loaders(pixels, labels, pixels, labels, run)
    loader.sampler.set_epoch(epoch)
    order = torch.cat([labels for _, labels in loader]).tolist()
    assert len(loader.sampler) == len(order)
    return order


def test_order_depends_on_seed_and_epoch_alone():
    orders = {(seed, epoch): epoch_order(100, seed, epoch, 30) for seed in (0, 7) for epoch in (0, 1)}
    for key, order in orders.items():
        assert len(order) == len(set(order)) == 90  # the last 10 are dropped
        assert order == epoch_order(100, *key, 30)
        # A larger global batch walks through the same sequence of samples.
        assert order[:50] == epoch_order(100, *key, 50)[:50]
    assert orders[0, 0] != orders[0, 1] and orders[0, 0] != orders[7, 0]


# ---------------------------------------------------------------------------------------- bad input, one clear line


@pytest.mark.parametrize("flags, sentence", [
    ("--num_epochs 0", "--num_epochs must be greater than 0"),
    ("--max_train_steps -1", "--max_train_steps must be greater than 0"),
    ("--per_device_train_batch_size 0", "--per_device_train_batch_size must be greater than 0"),
    ("--checkpointing_steps 0", "--checkpointing_steps must be greater than 0"),
    ("--learning_rate nan", "--learning_rate must be greater than 0"),
    ("--dropout 1", "--dropout must be less than 1"),
    ("--dataset cifar", "invalid choice: 'cifar'"),
    ("--epochs 3", "unrecognized arguments: --epochs"),
    ("--dataset digits --per_device_train_batch_size 1438", "global batch of 1438 is more than"),
])  # fmt: skip
def test_bad_flags(flags, sentence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *shlex.split(flags)])
    with pytest.raises(SystemExit) as exit:
        script.main()
    assert str(exit.value).startswith("error: ") and sentence in str(exit.value) and "\n" not in str(exit.value)
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing behind"


def test_one_line_from_two_processes(tmp_path):
    flags = ["--dataset", "digits", "--per_device_train_batch_size", 719]
    result = launch("ddp", SCRIPT, tmp_path / "run", *flags, ok=False)
    assert "global batch of 1438 is more than all samples" in result.error_line()


def test_an_output_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    result = launch("ddp", SCRIPT, tmp_path / "file" / "run", "--dataset", "digits", ok=False)
    assert f"Not a directory: '{tmp_path}/file/run" in result.error_line()


def test_processes_that_would_train_alone(tmp_path):
    """A plain Accelerator() on a machine without a GPU sees one process where two were started."""
    if torch.cuda.is_available():
        pytest.skip("accelerate sees all processes where there is a GPU")
    result = launch("ddp", SCRIPT, tmp_path / "run", "--dataset", "digits", env={"SPY_PLAIN": "1"}, ok=False)
    assert "each process would train alone" in result.error_line()


@pytest.mark.parametrize("env, gpus, sentence", [
    ({"WORLD_SIZE": "2"}, 0, "each would train alone"),
    ({"SLURM_STEP_NUM_TASKS": "2"}, 1, "each would train alone"),  # the baseline on two nodes
    ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 1, "add --num_processes 1"),
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, 0, "dp does not know bf16"),
])  # fmt: skip
def test_launches_that_would_not_do_what_was_asked(env, gpus, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="^error: .*" + re.escape(sentence)):
        script.prepare_launch(zero=False, dp=True)


def test_ranks_wait_for_each_other_as_long_as_torch_does(monkeypatch):
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    assert script.parse_args().collective_timeout == 1800


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])  # DeepSpeed has groups of its own
def test_a_hang_ends_by_the_collective_timeout(strategy, tmp_path):
    env = {"SPY_DIR": str(tmp_path), "SPY_SIGNAL": "HANG 1 5"}
    flags = ["--dataset", "digits", "--collective_timeout", 5]
    result = launch(strategy, SCRIPT, tmp_path / "run", *flags, env=env, ok=False, timeout=100)
    assert result.code and re.search("[Tt]imed out .*5000 ?ms", result.err), result.err


@pytest.fixture
def tiny_mnist(tmp_path, monkeypatch):
    """A mirror with four tiny IDX files of our own, which the script takes for MNIST's; returns its folder."""
    from torchvision.datasets import MNIST

    mirror, resources = tmp_path / "mirror", []
    mirror.mkdir()
    for name, _ in MNIST.resources:
        count = 20 if name.startswith("train") else 10
        body = bytes(range(count)) if "labels" in name else bytes(i % 251 for i in range(count * 784))
        header = struct.pack(">II", 2049, count) if "labels" in name else struct.pack(">IIII", 2051, count, 28, 28)
        (mirror / name).write_bytes(gzip.compress(header + body))
        resources.append((name, hashlib.md5((mirror / name).read_bytes()).hexdigest()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=mirror)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(MNIST, "resources", resources)
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/", f"http://127.0.0.1:{server.server_port}/"])
    yield mirror
    server.shutdown()


def test_mnist_is_downloaded_checked_and_read(tiny_mnist, tmp_path):
    raw = tmp_path / "data" / "MNIST" / "raw"
    args = SimpleNamespace(dataset="mnist", data_dir=tmp_path / "data")
    # The first mirror is down, the second is used.
    train_x, train_y, test_x, test_y = script.read_images(args)
    assert len(list(raw.glob("*.gz"))) == 4
    assert train_x.shape == (20, 28, 28) and test_x.shape == (10, 28, 28)
    assert train_y.tolist() == list(range(20)) and test_y.tolist() == list(range(10))
    assert train_x[1].flatten().tolist() == [i % 251 for i in range(784, 2 * 784)]

    def spoil(name, content):
        (raw / name).write_bytes(content)
        for file in raw.glob("*-ubyte"):
            if name.endswith(".gz"):
                file.unlink()

    spoil("t10k-labels-idx1-ubyte.gz", b"half of a downl")
    assert len(script.read_images(args)) == 4, "a corrupt download is made anew where there is a network"
    spoil("t10k-labels-idx1-ubyte.gz", b"half of a downl")
    shutil.rmtree(tiny_mnist)
    with pytest.raises(SystemExit, match="^error: .*Error downloading t10k-labels-idx1-ubyte.gz"):
        script.read_images(args)


@pytest.mark.parametrize("name, size", [
    ("t10k-labels-idx1-ubyte", 0), ("t10k-labels-idx1-ubyte", 3), ("train-images-idx3-ubyte", -1)])
def test_a_half_unpacked_file_is_one_line(name, size, tiny_mnist, tmp_path):
    args = SimpleNamespace(dataset="mnist", data_dir=tmp_path / "data")
    script.read_images(args)
    file = tmp_path / "data" / "MNIST" / "raw" / name
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SystemExit, match=r"^error: cannot read MNIST: .* in .*/MNIST/raw, or "):
        script.read_images(args)


NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


def test_mnist_without_a_network(tmp_path):
    result = launch("ddp", SCRIPT, tmp_path / "run", "--data_dir", tmp_path / "data", env=NO_NETWORK, ok=False)
    line = result.error_line()
    assert "Error downloading train-images-idx3-ubyte.gz" in line and "--dataset digits" in line
    assert all(name in line for name in ("train-labels", "t10k-images", "t10k-labels", f"{tmp_path}/data/MNIST/raw"))


def test_a_corrupt_file_is_named_and_kept(real_data, tmp_path):
    shutil.copytree(real_data / "MNIST", tmp_path / "MNIST", copy_function=shutil.copyfile,
                    ignore=shutil.ignore_patterns("*-ubyte"))
    victim = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    content = bytearray(victim.read_bytes())
    content[1000] ^= 255
    victim.write_bytes(content)
    command = [sys.executable, SCRIPT, "--data_dir", str(tmp_path), "--prepare_data_only"]
    broken = run(command, env=NO_NETWORK)
    assert f"Error downloading {victim.name}" in broken.error_line() and victim.read_bytes() == content
    shutil.copyfile(real_data / "MNIST" / "raw" / victim.name, victim)
    assert "60000 training and 10000 test images are ready" in run(command, env=NO_NETWORK).out


def test_one_step_is_a_run_too(tmp_path):
    result = launch("baseline", SCRIPT, tmp_path, "--dataset", "digits", "--max_train_steps", 1)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["argv"][0].endswith(SCRIPT) and "--max_train_steps" in record["argv"]
    assert record["steps"] == len(result.losses) == 1 and record["samples_per_second"] > 0
