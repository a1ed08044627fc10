"""Lines of the scripts that only a GPU would miss. Each has a test here that needs no GPU.

tests/spy.py also checks some of them in every run that it watches: copies that do not wait, the
fused AdamW, buckets that are views, patience.
"""

import json
import sys
from argparse import Namespace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, launch, rows_of, run, spied
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from test_bert import TINY
from test_bert_data import MODEL, options
from transformers import AutoTokenizer

import train_bert_squad as bert
import train_mnist_rnn as mnist
from common.facts import flops_utilization

DIGITS = "--dataset digits --max_grad_norm 1 --per_device_train_batch_size 16".split()


@pytest.fixture
def gpu(monkeypatch):
    """torch says that it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """The features of the tests' questions, from a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(bert.datasets.config, "HF_DATASETS_CACHE", cache)
        questions = bert.read_questions(options(), "train")
        return bert.Features(questions, AutoTokenizer.from_pretrained(MODEL), options())


# -------- before training


@pytest.mark.parametrize("script", [mnist, bert])
def test_on_a_gpu_ranks_compute_in_tf32_and_without_cudnns_attention(script, gpu, monkeypatch):
    """cuDNN's attention would make a plan for each width of a batch."""
    asked, precision = {}, torch.get_float32_matmul_precision()
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # connect_ranks changes it
    monkeypatch.setattr(script, "PartialState", lambda **options: asked.update(options))
    try:
        script.connect_ranks()
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert asked == {"timeout": timedelta(minutes=30)}, "NCCL's default is 10"


def test_a_gpu_that_torch_cannot_use_ends_the_run_before_ranks_wait(tmp_path):
    """On any rank. The line names its host."""
    env = {"SPY_DRIVER": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # as DeepSpeed sets it
    done = launch("ddp", "train_mnist_rnn.py", tmp_path, *DIGITS, env=env, ok=False)
    host = mnist.os.uname().nodename
    assert f" cannot use the GPU of {host}: is its driver too" in done.error_line()
    assert "Connection" not in done.err and not (tmp_path / "run.json").exists()


def test_the_peak_of_a_gpu_is_forgotten_before_training(gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    mnist.reset_peak_memory()
    assert calls == ["reset"]


def test_dp_uses_all_gpus(gpu, monkeypatch):
    """The global batch counts each of them."""
    monkeypatch.setattr(sys, "argv", ["script", "--gradient_accumulation_steps", "1"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    plugin = SimpleNamespace(backend=SimpleNamespace(value="NO"))
    state = SimpleNamespace(dynamo_plugin=plugin)
    accelerator = SimpleNamespace(num_processes=1, mixed_precision="no", state=state)
    run = mnist.describe_run(accelerator, "dp", mnist.parse_args())
    assert (run["devices"], run["global_batch_size"], run["device_name"]) == (4, 256, "A")


# -------- data


def test_the_images_lie_on_the_device():
    """Nothing is copied from the host in a step, but the numbers of the samples."""
    images = mnist.read_images(Namespace(dataset="digits"))
    accelerator = SimpleNamespace(device=torch.device("meta"))
    args = Namespace(per_device_train_batch_size=8, per_device_eval_batch_size=8)
    args.gradient_accumulation_steps = 1
    for loader in mnist.make_loaders(accelerator, args, images, 1):
        assert {values.device.type for values in loader.dataset.tensors} == {"meta"}


def test_the_numbers_of_the_samples_are_copied_from_pinned_memory(monkeypatch):
    """The copy does not wait."""

    class OnGpu:
        is_cuda, device = True, "cpu"

        def __getitem__(self, ids):
            return ids

    copies = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda ids: (copies.append("pinned"), ids)[1])
    monkeypatch.setattr(torch.Tensor, "to", lambda ids, *to, **how: (copies.append(how), ids)[1])
    images = mnist.Images(torch.ones(4))
    images.tensors = [OnGpu()]
    assert images.__getitems__([3, 1])[0].tolist() == [3, 1]
    assert copies == ["pinned", {"non_blocking": True}]


def test_batches_of_bert_lie_in_pinned_memory(gpu, features):
    """From there a GPU copies them while it computes."""
    args = Namespace(per_device_train_batch_size=4, per_device_eval_batch_size=4, seed=0)
    args.gradient_accumulation_steps = 1
    loaders = bert.make_loaders(args, features, features, 1)
    assert all(loader.pin_memory for loader in loaders)


def test_widths_are_multiples_of_8(features, monkeypatch):
    """On a GPU, up to --max_seq_length. The tokens and the mask are those of the narrow batch."""
    lengths = features.columns["length"]
    ids = [i for i in range(len(features)) if lengths[i] % 8][:5]
    narrow, _, _ = features.__getitems__(ids)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wide, _, size = features.__getitems__(ids)
    width, longest = wide["input_ids"].shape[1], lengths[ids].max().item()
    assert longest < width == size[1] / 5 == (longest + 7) // 8 * 8
    assert torch.equal(wide["input_ids"][:, :longest], narrow["input_ids"])
    assert wide["attention_mask"].sum() == narrow["attention_mask"].sum() == size[0]
    monkeypatch.setattr(features, "max_width", longest)
    assert features.__getitems__(ids)[0]["input_ids"].shape[1] == longest


def test_a_batch_is_one_array_not_a_tensor_for_each_feature(features, monkeypatch):
    """datasets' torch formatter took milliseconds between two steps, in which a GPU waits."""
    from datasets.formatting import TorchFormatter

    calls = []
    monkeypatch.setattr(TorchFormatter, "__init__", lambda *_, **__: calls.append("made"))
    monkeypatch.setattr(TorchFormatter, "recursive_tensorize", lambda *_: calls.append("called"))
    ids = [5, 3, 40]
    inputs, _, _ = features.__getitems__(ids)
    rows = [features.table[number]["input_ids"] for number in ids]
    width = max(map(len, rows))
    assert not calls
    assert inputs["input_ids"].tolist() == [row + [0] * (width - len(row)) for row in rows]


# -------- in a step


def test_copies_do_not_wait_in_resumed_epochs_either(tmp_path):
    """tests/spy.py checks each copy of each run, and how the ranks connect."""
    flags = [*DIGITS, "--num_epochs", 1, "--logging_steps", 3]
    stopped = spied("ddp", "train_mnist_rnn.py", tmp_path, *flags, SPY_SIGNAL="SIGTERM 0 1")
    assert stopped.record["status"] == "preempted"
    resumed = spied("ddp", "train_mnist_rnn.py", tmp_path, *flags, "--resume")
    assert resumed.record["resumed_from"] and resumed.record["status"] == "completed"


@pytest.mark.parametrize("script", ["train_mnist_rnn.py", "train_bert_squad.py"])
def test_nothing_reads_a_tensor_within_steps(script, tmp_path):
    """Between two logs, a GPU never waits for Python. This has accumulation and clipping."""
    flags = DIGITS if script == "train_mnist_rnn.py" else [*TINY, "--max_grad_norm", 1]
    flags = [*flags, "--gradient_accumulation_steps", 2, "--max_train_steps", 6]
    launch("baseline", script, tmp_path, *flags, env={"SPY_READS": str(tmp_path)})
    noted = json.loads((tmp_path / "reads_0.json").read_text())
    assert noted == {"logs": 1, "reads": []}


def test_deepspeed_communicates_while_a_gpu_computes_and_reads_no_overflow_back():
    """So say its JSONs. In stage 3, overlap_comm is DeepSpeed's default."""
    files = sorted((ROOT / "accelerate_configs").glob("*.json"))
    for file in files:
        config = json.loads(file.read_text())
        assert DeepSpeedZeroConfig(**config["zero_optimization"]).overlap_comm is True, file.name
        assert config["bf16"]["check_grad_overflow"] is False, file.name
    assert len(files) == 5


# -------- what else a GPU's users rely on


def test_a_long_evaluation_says_once_a_minute_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 1000, 25))  # an evaluation batch takes 25 seconds
    monkeypatch.setattr(mnist.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(mnist.utils, "gather_object", lambda signals: signals)
    batches = mnist.batches_to_evaluate(None, range(8), None, None, [])
    assert list(batches) == list(range(8))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"evaluation: {done} of 8 batches done" for done in (2, 5)]


@pytest.mark.slow
def test_the_benchmark_of_gpus_runs_on_a_cpu():
    """It shows the whole epoch and its last half for each side."""
    words = [sys.executable, "benchmarks/bert.py", "--model", *TINY[1:7], "--repeats", "1"]
    done = run([*words, "--batches", "4", "--questions", "24"])
    assert done.code == 0, done.err
    head, *rows = rows_of(done.out)
    assert [row[0] for row in rows] == [
        "train_bert_squad.py",
        "Trainer, random order (its default)",
        "Trainer, grouped by length",
    ]
    for row in rows:
        speeds = [row[head.index(name)] for name in ("windows/s", "windows/s, last half")]
        assert all(float(speed.split()[0].replace(",", "")) > 0 for speed in speeds)


def test_mfu_is_the_share_of_the_devices_peak():
    """BERT-base has 85 million parameters in its layers: 12 x (4 x 768² + 2 x 768 x 3072)."""
    sizes = {"layers": 12, "hidden_size": 768, "intermediate_size": 3072}
    run = {"device_name": "NVIDIA A100-SXM4-80GB", "devices": 2, "precision": "bf16", **sizes}
    run["tokens_per_second"] = 100_000
    assert flops_utilization(run) == pytest.approx(6 * 84_934_656 * 1e5 / (2 * 312e12))
    assert flops_utilization(run | {"precision": "no"}) == pytest.approx(
        6 * 84_934_656 * 1e5 / (2 * 156e12)  # TF32
    )
    assert flops_utilization(run | {"device_name": "CPU (x)"}) is None
    assert flops_utilization(run | {"layers": None}) is None
