"""fit.py: its table, what it says about a record, and one line for bad input; its formulas beside
what is counted on a CPU.
"""

import math
import re
import shlex
import sys
import weakref

import draw_scale
import pytest
import torch
import transformers
from conftest import ROOT, rows_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fit
import train_bert_squad
from common.strategies import STRATEGIES
from memory import formulas

BASE, PSI = fit.MODELS["bert-base"], 108_893_186  # its parameters
MEMORY = {"40GB": 40e9, "40 gb": 40e9, "16000MB": 16e9, "1TB": 1e12, "1.5GiB": 1.5 * 2**30}
TINY = str(ROOT / "tests" / "data" / "tiny_bert")
PARTS = "parameters", "gradients", "optimizer states"


@pytest.fixture
def fit_says(monkeypatch, capsys):
    """A function that runs fit.py with these words: {YAML: {column: text}}, and all it prints."""

    def say(*words):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["fit.py", *words])
        fit.main()
        out = capsys.readouterr().out
        head, *rows = rows_of(out)
        return {row[0]: dict(zip(head, row, strict=True)) for row in rows}, out

    return say


def test_a_row_for_every_yaml_and_the_largest_batch_that_fits(fit_says):
    assert all(fit.memory_or_record(text) == size for text, size in MEMORY.items())
    rows, out = fit_says("1800MB", "--mixed_precision", "bf16", "--num_processes", "8")
    assert set(rows) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set(rows.pop("dp").values()) == {"dp", "", "-"} and "refuse it in bf16" in out
    assert rows["ddp"]["fits"] == "no" and rows["fsdp"]["fits"] == "yes"
    for name, row in rows.items():
        for column, again in (("batch without AC", False), ("batch with AC", True)):
            batch, rest = int(row[column]), (384, 8, "bf16", again, True)
            fits, fails = (
                formulas.memory_of(name, BASE, size, *rest)["total"] <= 1800e6
                for size in (batch or 1, batch + 1)
            )
            assert fits == bool(batch) and not fails


def test_it_says_how_many_devices_are_enough(fit_says):
    """The smallest power of two whose total leaves CUDA its gigabyte. HSDP shards inside a node."""
    rows, _ = fit_says(
        "5GB", "--model", "bert-large", "--num_processes", "6", "--num_machines", "3"
    )
    named = {name: row["fits from N"] for name, row in rows.items()}
    assert (named["ddp"], named["zero2"], named["fsdp"], named["hsdp"]) == (
        "never",
        "128",
        "4",
        "12",
    )
    for name, nodes in (("fsdp", 1), ("hsdp", 3)):
        devices = int(named[name])
        left = [
            5e9
            - formulas.memory_of(name, fit.MODELS["bert-large"], 4, 384, shards, "no", False, True)[
                "total"
            ]
            for shards in (devices // nodes, devices // nodes // 2)
        ]
        assert left[0] >= 1e9 > left[1]


def test_what_leaves_cuda_no_room_is_tight(fit_says):
    """The total of ZeRO-2, and 1 GB more for CUDA's context and workspaces."""
    total = formulas.memory_of("zero2", BASE, 4, 384, 2, "no", False, True)["total"]
    for more, expected in ((-1e6, "no"), (0, "tight"), (999e6, "tight"), (1e9, "yes")):
        rows, out = fit_says(f"{math.ceil(total + more) / 1e6:.6f}MB")
        assert rows["zero2"]["fits"] == expected
    assert "\nAC: " in out and "\ntight: " in out


@pytest.mark.parametrize(
    "words, content, message",
    [
        ("6gbit", None, "'6gbit' is not a size: write 40GB"),
        ("4GB --per_device_train_batch_size 0", None, "--per_device_train_batch_size must be 1"),
        ("4GB --max_seq_length 1024", None, "the model's limit is 512"),
        ("4GB --model gpt-5", None, "gpt-5 is not bert-base, bert-large, or a folder"),
        ("4GB --model FILE", '{"model_type": "gpt2"}', "BERT: its model_type is 'gpt2'"),
        ("FILE", None, "FILE is not a run's record (FileNotFoundError"),
        ("FILE", '{"workload": {}, "device_name": 3}', "FILE is not a run's record"),
    ],
)
def test_bad_input_is_one_line(words, content, message, fit_says, tmp_path):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as stop:
        fit_says(*shlex.split(words.replace("FILE", shlex.quote(str(file)))))
    line = str(stop.value).replace(str(file), "FILE")
    assert line.startswith("error: ") and message in line and "\n" not in line


@pytest.mark.parametrize("name", ["bert-base", TINY])
def test_parameters_are_those_of_transformers(name):
    sizes = fit.read_model(name)
    heads = {"num_attention_heads": sizes["hidden_size"] // 16}
    with torch.device("meta"):
        model = transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes | heads))
    total, embeddings, layer, _ = formulas.count_parameters(sizes)
    parts = model, model.bert.embeddings, model.bert.encoder.layer[0]
    counted = [sum(weight.numel() for weight in part.parameters()) for part in parts]
    assert counted == [total, embeddings, layer] and (total == PSI or name == TINY)


class Live(TorchDispatchMode):
    """Finds the most bytes of storages that exist at the same time."""

    def __init__(self):
        super().__init__()
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held:
                    self.held[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.held.values()))
        return results


@pytest.mark.parametrize(
    "words", ["baseline no", pytest.param("ddp bf16 AC", marks=pytest.mark.slow)]
)
def test_the_total_is_the_peak_of_a_step_of_bert_base(words, batch=8, width=384):
    """Its tensors have sizes and no contents, so this takes no memory. A second micro-batch finds
    all gradients there, as DDP does. Attention has no dropout: with it, a CPU keeps the scores.
    """
    yaml, precision, *again = words.split()
    with FakeTensorMode(), Live() as live:
        model = transformers.BertForQuestionAnswering(
            transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        ).train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = {
            "input_ids": torch.zeros(batch, width, dtype=torch.long),
            "attention_mask": torch.ones(batch, 1, 1, width, dtype=torch.bool),
            "token_type_ids": torch.zeros(batch, width, dtype=torch.int),
        }
        spans = torch.zeros(batch, dtype=torch.long)
        for _ in range(2):
            for _ in range(2 if yaml == "ddp" else 1):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                    logits = train_bert_squad.span_logits(model, inputs)
                train_bert_squad.span_losses(logits, spans, spans).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    total = formulas.memory_of(yaml, BASE, batch, width, 1, precision, bool(again))["total"]
    assert live.peak == pytest.approx(total, rel=0.1)


def test_zeros_buffers_are_what_its_json_asks_for(fit_says):
    """In fp32, of 4 bytes: two buckets of 10 million elements; and with offload the embeddings of
    words, the largest parameter; in ZeRO-3 a bucket, and 30 million live parameters. On two
    devices, the copy of the gradients in the optimizer's step is larger than two buckets.
    """
    rows, _ = fit_says("40GB", "--num_processes", "8")
    words = 4 * 30_522 * 768
    for name, size in {"zero1": 80e6, "zero2_offload": 80e6 + words, "zero3": 160e6}.items():
        assert int(rows[name]["buffers"]) == math.ceil(size / 1e6), name
    rows, _ = fit_says("40GB", "--num_processes", "2")
    assert int(rows["zero2"]["buffers"]) == math.ceil(4 * PSI / 2 / 1e6)


def test_gradients_under_zero2_are_those_that_dry_runs_count():
    """On rank 0 of 2 to 4,096, before the update: on many devices more than its shard. Of the tiny
    BERT, a dry run on 8 ranks counted 438,272 bytes: the embeddings of words and of positions.
    """
    cases = [(BASE, cell) for cell in draw_scale.KEPT if cell["strategy"] == "zero2"]
    cases.append((fit.read_model(TINY), {"devices": 8, "held_bytes": {"gradients": 438_272}}))
    for model, cell in cases:
        parts = formulas.memory_of("zero2", model, 1, 64, cell["devices"])
        assert parts["gradients"] == pytest.approx(cell["held_bytes"]["gradients"], rel=0.01)


def explained(strategy, options=None, peak=0, work=None, **changes):
    """What fit.py prints about a record: {part: MB}, {what to try: MB}, and the whole text."""
    record = {"strategy": strategy.split("_")[0], "strategy_options": options or {}, "devices": 4}
    record |= {"per_device_batch_size": 1, "gradient_accumulation_steps": 1}
    record |= {"activation_checkpointing": True, "device_name": "NVIDIA H200"}
    record |= {"status": "failed", "parameters": 25 * 10**6}
    record["workload"] = {"sequence_length": 384, "precision": "no"} | (work or {})
    first = {"rank": 0, "memory_before_mb": 7, "peak_memory_mb": peak}
    record["ranks"] = [first, {"rank": 1, "memory_before_mb": 2, "peak_memory_mb": 0}]
    text = "\n".join(fit.explain_run(record | changes))
    above, below = text.replace(",", "").split("Try next")
    parts = re.findall(r"^(\S.*?) {2,}(\d+)$", above, re.M)
    rungs = re.findall(r"^ *(\d+)  (.*)$", below, re.M)
    return {name: int(mb) for name, mb in parts}, {name: int(mb) for mb, name in rungs}, text


@pytest.mark.parametrize(
    "name, parts, rungs, host",
    [
        ("ddp", (100, 100, 200), {"fsdp_keep": 200, "fsdp": 300, "fsdp_offload": 400}, 0),
        # it has 100 MB gathered besides
        ("fsdp_keep", (25, 25, 50), {"fsdp": 100, "fsdp_offload": 200, "twice": 50}, 0),
        ("zero2_offload", (100, 0, 0), {"fsdp_offload": 100}, 100),
        ("fsdp_offload", (0, 0, 0), {}, 100),
    ],
)
def test_what_a_run_held_and_what_to_try_next(name, parts, rungs, host):
    """MB of parameters, gradients and states of 25 million parameters on 4 GPUs, and what each
    rung saves, of a run that ended.
    """
    options = STRATEGIES[name].options
    held, tried, text = explained(name, options, peak=1000)
    expected = {"libraries and data": 7} | dict(zip(PARTS, parts, strict=True))
    expected |= {"activations and all else": 993 - sum(parts), "total": 1000}
    assert list(held.items()) == list(expected.items())
    saved = {re.search(r"twice|[a-z_]+(?=.yaml)", rung)[0]: mb for rung, mb in tried.items()}
    assert saved == rungs
    assert bool(rungs) != ("a smaller batch or model, or a device with more memory" in text)
    assert "rank 0 held at its peak" in text
    assert (f"The host holds another {host} MB" in text) == bool(host)
    held, tried, _ = explained(name, options, peak=1000, device_name="CPU (x)")
    assert "offload" not in " ".join(tried) and held.get("offloaded", 0) == host


@pytest.mark.parametrize(
    "name, precision, mb",
    [("ddp", "bf16", 200), ("fsdp", "no", 125), ("fsdp", "bf16", 75), ("zero3", "bf16", 12)],
)
def test_gradients_of_an_accumulated_step(name, precision, mb):
    """The whole ones that DDP and FSDP add up, and the reduced ones. FSDP's are in bf16."""
    work, options = {"precision": precision}, STRATEGIES[name].options
    held, _, _ = explained(name, options, 1000, work, gradient_accumulation_steps=2)
    assert held["gradients"] == mb


def test_what_a_run_needs_that_died():
    """Its record has no peak. The formulas know all of a BERT, but not an LSTM's activations."""
    bert = {"layers": 12, "hidden_size": 768, "intermediate_size": 3072, "dropout": 0.0}
    held, tried, text = explained("ddp", work=bert, parameters=PSI, per_device_batch_size=4)
    step = formulas.memory_of("ddp", BASE, 4, 384, 4, "no", True)
    assert held["total"] == pytest.approx(7 + step["total"] / 1e6, abs=1)
    assert held["activations"] == round(step["activations"] / 1e6) and "wrote down no peak" in text
    assert "died in an evaluation" in text
    held, tried, text = explained("baseline", activation_checkpointing=None, status="completed")
    assert [held[part] for part in PARTS] == [100, 100, 200] and "died" not in text
    assert "batch_size" not in " ".join(tried) and "no formula for this model's" in text
