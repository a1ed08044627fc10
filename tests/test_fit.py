"""fit.py: formulas against what is counted on a CPU, the table, and errors in one line."""

import json
import re
import shlex
import sys
import weakref

import pytest
import torch
import transformers
from conftest import ROOT, launch, run
from test_bert import TINY
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fit
import train_bert_squad
from reporting import memory

SHAPES = [  # batch, width, hidden size, intermediate size, layers
    (4, 72, 128, 256, 3), (8, 128, 128, 512, 6), (3, 96, 192, 192, 4), (16, 64, 64, 256, 12),
]


def make_bert(shape, dtype="no", checkpointing=False, dropout=0.0, rows=344):
    """The script's model and its inputs. Attention has no dropout: with it, a CPU keeps the scores,
    which a GPU does not.
    """
    batch, width, hidden, inner, layers = shape
    config = transformers.BertConfig(
        vocab_size=rows, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = transformers.BertForQuestionAnswering(config).train()
    if dtype == "bf16":
        model = model.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mask = torch.ones(batch, 1, 1, width, dtype=torch.bool)
    mask[0, ..., -9:] = False
    ids, types = torch.randint(rows, (batch, width)), torch.zeros(batch, width, dtype=torch.int)
    return model, {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def forward(model, inputs, dtype):
    """The loss of a micro-batch, as accelerate computes it under baseline and ddp."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "autocast"):
        logits = train_bert_squad.span_logits(model, inputs)
    spans = torch.zeros(len(logits), dtype=torch.long)
    return train_bert_squad.span_losses(logits, spans, spans).mean()


def count_kept(model, compute):
    """Bytes that autograd keeps of `compute()`: activations, and autocast's copies of the weights.
    Each storage counts once, and parameters do not.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weights = {tuple(shape) for weight in model.parameters() if weight.dim() == 2
               for shape in (weight.shape, weight.shape[::-1])}  # fmt: skip
    kept, copies = {}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            copy = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in weights
            group = copies if copy else kept
            group[storage.data_ptr()] = storage  # held, so that no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = compute()
    assert result is not None
    return tuple(sum(storage.nbytes() for storage in group.values()) for group in (kept, copies))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["no", "autocast", "bf16"])
def test_activations_are_what_autograd_keeps(dtype, shape):
    """With and without activation checkpointing, and what one layer adds that is computed again."""
    batch, width, hidden, inner, layers = shape
    tokens, sizes = batch * width, (layers, hidden, inner, dtype)
    outside = memory.bytes_outside_layers(tokens, hidden, dtype)
    model, inputs = make_bert(shape, dtype)
    assert batch * width not in (hidden, inner), "or a weight could not be told from an activation"
    kept, copies = count_kept(model, lambda: forward(model, inputs, dtype))
    formula = memory.bytes_of_activations(tokens, *sizes) + outside
    assert kept == pytest.approx(formula, rel=0.1)
    model_sizes = dict(zip(memory.SIZES, (layers, hidden, inner, 344, 512, 2), strict=True))
    if dtype == "autocast":
        assert copies == memory.bytes_of_buffers("ddp", model_sizes, 2, "bf16")[0]

    layer = model.bert.encoder.layer[0]
    entry = torch.randn(batch, width, hidden, requires_grad=True,
                        dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)  # fmt: skip
    entry = entry.clone()  # as from a layer before it: of a leaf, autocast would share a copy
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "autocast"):
        again, _ = count_kept(layer, lambda: layer(entry, inputs["attention_mask"]))
    # A layer's input counts among those that are kept, but autocast keeps its own copies of it.
    again -= 0 if dtype == "autocast" else entry.nbytes
    model, inputs = make_bert(shape, dtype, checkpointing=True)
    kept_again, _ = count_kept(model, lambda: forward(model, inputs, dtype))
    formula_again = memory.bytes_of_activations(tokens, *sizes, True) + outside
    assert kept_again + again == pytest.approx(formula_again, rel=0.1)
    assert kept_again < 0.4 * kept
    ratios = kept / formula, (kept_again + again) / formula_again
    print(f"{dtype} {shape}: counted / formula {ratios[0]:.3f}, checkpointing {ratios[1]:.3f}")


def test_dropout_keeps_a_mask_of_every_element():
    """A CPU keeps masks in the dtype of what they mask, a GPU in one byte an element."""
    shape = batch, width, hidden, inner, layers = SHAPES[0]
    kept = []
    for dropout in (0.0, 0.1):
        model, inputs = make_bert(shape, dropout=dropout)
        kept.append(count_kept(model, lambda m=model, i=inputs: forward(m, i, "no"))[0])
    tokens = batch * width
    masks = [memory.bytes_of_activations(tokens, layers, hidden, inner, dropout=dropout)
             + memory.bytes_outside_layers(tokens, hidden, dropout=dropout)
             for dropout in (False, True)]  # fmt: skip
    assert kept[1] - kept[0] == 4 * (masks[1] - masks[0]) == 4 * tokens * hidden * (2 * layers + 1)


class Live(TorchDispatchMode):
    """Count the bytes of the storages that are there, and the most that ever were."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.peak = {}, 0, 0

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, storage):
        self.now -= self.seen.pop(storage)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return results


def count_peak(shape, dtype, checkpointing, accumulation, rows):
    """The most bytes in two steps of the baseline."""
    model, inputs = make_bert(shape, checkpointing=checkpointing, rows=rows)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Live() as live:
        for parameter in model.parameters():
            live.see(parameter)
        for _ in range(2):
            for _ in range(accumulation):
                forward(model, inputs, dtype).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def compare_peak(shape, precision, checkpointing, accumulation=1, rows=344):
    """A second micro-batch finds all gradients there, as DDP does: then DDP's total holds."""
    batch, width, hidden, inner, layers = shape
    yaml = "baseline" if accumulation == 1 else "ddp"
    dtype = memory.compute_dtype(yaml, precision)
    peak = count_peak(shape, dtype, checkpointing, accumulation, rows)
    sizes = dict(zip(memory.SIZES, (layers, hidden, inner, rows, 512, 2), strict=True))
    total = memory.memory_of(yaml, sizes, batch, width, 1, precision, checkpointing)["total"]
    print(f"{shape}, {precision}, checkpointing {checkpointing}, accumulation {accumulation}: "
          f"{peak / 1e6:.1f} / {total / 1e6:.1f} MB = {peak / total:.3f}")
    assert peak == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_the_total_is_the_peak_of_a_step(shape, precision, checkpointing, accumulation):
    compare_peak(shape, precision, checkpointing, accumulation)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("batch", [1, 8])
def test_the_total_is_the_peak_of_a_step_of_bert_base(batch, precision, checkpointing):
    """Its tensors have sizes and no contents, so this takes no memory."""
    with FakeTensorMode():
        compare_peak((batch, 384, 768, 3072, 12), precision, checkpointing, rows=30522)


HELD = {  # bytes a parameter of parameters, gradients, states and host, as counted on 2 CPU ranks
    ("baseline", "no"): (4, 4, 8, 0), ("baseline", "bf16"): (4, 4, 8, 0),
    ("ddp", "no"): (4, 4, 8, 0), ("ddp", "bf16"): (4, 4, 8, 0),
    ("zero1", "no"): (4, 2, 6, 0), ("zero1", "bf16"): (2, 1, 6, 0),
    ("zero2", "no"): (4, 2, 6, 0), ("zero2", "bf16"): (2, 1, 6, 0),
    ("zero2_offload", "no"): (4, 0, 0, 8), ("zero2_offload", "bf16"): (2, 0, 0, 8),
    ("fsdp", "no"): (2, 2, 4, 0), ("fsdp", "bf16"): (2, 2, 4, 0),
    ("fsdp_keep", "no"): (2, 2, 4, 0), ("fsdp_keep", "bf16"): (2, 2, 4, 0),
    ("fsdp_offload", "no"): (0, 0, 0, 8), ("fsdp_offload", "bf16"): (0, 0, 0, 8),
    ("zero3", "no"): (2, 2, 6, 0), ("zero3", "bf16"): (1, 1, 6, 0),
    ("zero3_offload", "no"): (0, 0, 0, 10), ("zero3_offload", "bf16"): (0, 0, 0, 9),
}  # fmt: skip


@pytest.mark.parametrize("strategy, precision", HELD)
def test_bytes_held_by_hand(strategy, precision):
    parts = memory.bytes_of_parts(strategy, 1000, 2, precision)
    assert tuple(parts.values()) == tuple(1000 * size for size in HELD[strategy, precision])
    assert memory.bytes_held(strategy, 1000, 2, precision) == 1000 * sum(HELD[strategy, precision])
    assert memory.bytes_held("torch", 1000, 2) is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(set(memory.PLACES) - {"baseline", "dp"}))
def test_bytes_held_as_counted(strategy, tmp_path, precision="bf16"):
    """What both ranks of a run hold after a backward pass: part by part, or on the host in all. In
    fp32 test_bert.py and test_ladder.py count it.
    """
    launch(strategy, "train_bert_squad.py", tmp_path / "run", *TINY, "--max_train_steps", 3,
           "--dropout", 0, "--max_eval_samples", 4, launcher=["--mixed_precision", precision],
           env={"SPY_DIR": str(tmp_path), "SPY_BYTES": "1"})  # fmt: skip
    for rank in (0, 1):
        held = json.loads((tmp_path / f"bytes_{rank}.json").read_text())
        parts = memory.bytes_of_parts(strategy, sum(held["sizes"]), 2, precision)
        # Gradients: both ranks hold the one that the border between them cuts through.
        share = 2 * max(held["sizes"]) / sum(held["sizes"])
        cut = share * parts["gradients"] if strategy in ("zero1", "zero2") else 0
        counted = held | {"states": held["states"] + held["master_copy"]}
        if strategy.endswith("_offload"):  # a CPU run has one memory: its device's part is known
            counted["host"] = sum(counted[name] for name in list(parts)[:3]) - parts["parameters"]
        for name in ["host"] if parts["host"] else ["parameters", "gradients", "states"]:
            most = 1.1 * parts[name] + (cut if name == "gradients" else 0)
            assert 0.9 * parts[name] <= counted[name] <= most, (name, counted[name], parts[name])
            print(f"{strategy} {precision} {name}: {counted[name] / sum(held['sizes']):.2f}")


@pytest.mark.parametrize("name, known", [("bert-base", 108_893_186), ("bert-large", 334_094_338)])
def test_parameters_are_torchs(name, known):
    sizes = fit.MODELS[name]
    with torch.device("meta"):
        model = transformers.BertForQuestionAnswering(transformers.BertConfig(
            **sizes, num_attention_heads=sizes["hidden_size"] // 64))  # fmt: skip
    total, embeddings, layer, weights = memory.count_parameters(sizes)
    count = {"all": 0, "embeddings": 0, "layer.0.": 0, "linear": 0}
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            count["linear"] += module.weight.numel()
        for parameter in module.parameters(recurse=False):
            for part in ("embeddings", "layer.0."):
                count[part] += parameter.numel() * (part in module_name)
            count["all"] += parameter.numel()
    assert count == {"all": total, "embeddings": embeddings, "layer.0.": layer, "linear": weights}
    assert total == known


def test_a_total_by_hand():
    """BERT-base, 4 windows of 384 tokens on 2 devices, without dropout, by hand.

    Activations in fp32: 1536 tokens x 12 layers x 64 x 768 bytes; of embeddings and head 8 x 768
    bytes a token, and 20 x 768 for the gradients in one layer.
    """
    psi, tokens = 108_893_186, 1536
    activations = tokens * (12 * 64 + 8 + 20) * 768
    base = fit.MODELS["bert-base"]
    assert memory.memory_of("ddp", base, 4, 384, 2)["total"] == 16 * psi + activations
    zero3 = memory.memory_of("zero3", base, 4, 384, 2)
    assert zero3["total"] == 10 * psi + 4 * 40_000_000 + activations
    # Others have no gradients yet when all activations are there.
    assert memory.memory_of("baseline", base, 4, 384, 2)["total"] == 12 * psi + activations
    held = memory.memory_of("zero2", base, 4, 384, 2)
    assert held["total"] == 10 * psi + 2 * 4 * 10_000_000 + activations
    assert held["activations"] == activations == 938_999_808
    layer, embeddings = 7_087_872, 23_837_184
    held = memory.memory_of("fsdp_keep", base, 4, 384, 2, "bf16")
    in_bf16 = tokens * (12 * 32 + 4 + 10) * 768
    assert held["total"] == 6 * psi + 2 * (psi + 2 * layer) + in_bf16
    # Where a layer is recomputed, the peak is at the first layer: only the embeddings have no
    # gradients yet. FSDP has them gathered, and three times a layer.
    again = tokens * 2 * (64 + 8 + 20) * 768
    total = memory.memory_of("baseline", base, 8, 384, 1, "no", True)["total"]
    assert total == pytest.approx(16 * psi - 4 * embeddings + again)
    total = memory.memory_of("fsdp", base, 8, 384, 2, "no", True)["total"]
    assert total == pytest.approx(8 * psi + 2 * embeddings + 12 * layer + again)
    # Under autocast as well, with the copies of one layer. DDP's peak is before, with all copies.
    linear, window = layer - 9 * 768 - 3072, 384 * 768  # without biases and normalisations
    total = memory.memory_of("baseline", base, 8, 384, 1, "bf16", True)["total"]
    one = 2 * (linear + 2 * 768 / 12) + 8 * window * (24 + 16 + 6 + 10)
    assert total == pytest.approx(16 * psi - 4 * embeddings + one)
    total = memory.memory_of("ddp", base, 1, 384, 2, "bf16", True)["total"]
    assert total == 16 * psi + 2 * (12 * linear + 2 * 768) + window * (12 * 4 + 6)
    # With hardly an activation, the gradients, the embeddings or the copies in ZeRO's step are.
    assert memory.memory_of("baseline", base, 1, 1, 2, "bf16", True)["total"] == 16 * psi
    assert memory.memory_of("fsdp", base, 1, 1, 2, "bf16")["total"] == 8 * psi + 6 * embeddings
    assert memory.memory_of("zero2", base, 1, 1, 2, "bf16")["total"] == (2 + 7 + 3) * psi
    assert memory.memory_of("zero2_offload", base, 1, 1, 2, "bf16")["host"] == (8 + 1) * psi
    assert memory.memory_of("zero3_offload", base, 1, 1, 2)["host"] == (10 + 2) * psi


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("device", ["500MB", "2GB", "16GB", "80GiB"])
def test_the_largest_micro_batch_is_the_last_that_fits(device, precision):
    size, base = fit.read_memory(device), fit.MODELS["bert-base"]
    for strategy in memory.PLACES:
        batches = []
        for checkpointing in (False, True):
            rest = 384, 4, precision, checkpointing, True
            batches.append(memory.largest_batch(size, strategy, base, *rest))
            assert batches[-1] == 0 or memory.memory_of(
                strategy, base, batches[-1], *rest)["total"] <= size  # fmt: skip
            assert memory.memory_of(strategy, base, batches[-1] + 1, *rest)["total"] > size
        assert batches[0] < batches[1] or batches[1] == 0 or size < 3e9


@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_total_is_more_than_its_parts(batch, precision, checkpointing):
    for strategy in memory.PLACES:
        held = memory.memory_of(strategy, fit.MODELS["bert-base"], batch, 384, 2, precision,
                             checkpointing)  # fmt: skip
        parts = sum(held[name] for name in ("parameters", "gradients", "states", "buffers",
                                            "activations"))  # fmt: skip
        assert held["parameters"] + held["states"] < held["total"] <= parts
        if strategy == "ddp" and precision == "no":
            assert held["total"] == parts
        elif strategy == "baseline":
            assert held["total"] < parts


def test_every_rung_frees_memory():
    """From DDP on, of a large model on many devices."""
    ladder = ["ddp", "zero2", "fsdp", "fsdp_offload"]
    large = fit.MODELS["bert-large"]
    totals = [memory.memory_of(name, large, 4, 384, 8)["total"] for name in ladder]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4
    for name in ("zero2", "zero3"):
        before, after = (memory.memory_of(yaml, fit.MODELS["bert-large"], 4, 384, 8)
                         for yaml in (name, f"{name}_offload"))  # fmt: skip
        assert after["total"] < before["total"] and after["host"] > before["host"] == 0


def table_of(*words):
    """The table that the command prints, {YAML: {column: text}}, and all that it prints."""
    done = run([sys.executable, "fit.py", *words])
    assert done.code == 0, done.err
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                      for line in done.out.splitlines() if line.startswith("|")]  # fmt: skip
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}, done.out


def test_the_table_has_a_row_for_every_yaml():
    rows, out = table_of("2GB", "--model", "tests/data/tiny_bert", "--max_seq_length", "128")
    assert set(rows) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {row["fits"] for row in rows.values()} == {"yes"}
    assert max(map(len, out.splitlines())) <= 110
    rows, out = table_of("1800MB", "--mixed_precision", "bf16", "--num_processes", "8")
    assert rows["ddp"]["fits"] == "no" and rows["fsdp"]["fits"] == "yes"
    assert rows["ddp"]["batch"] == "0" and rows["dp"]["fits"] == "-" and "refuse it" in out
    base = fit.MODELS["bert-base"]
    held = memory.memory_of("zero2_offload", base, 4, 384, 8, "bf16", False, True)
    assert int(rows["zero2_offload"]["host"].replace(",", "")) == -(-held["host"] // 1e6)
    assert max(map(len, out.splitlines())) <= 110
    again, _ = table_of("1800MB", "--mixed_precision", "bf16", "--num_processes", "8",
                        "--activation_checkpointing")  # fmt: skip
    for name, row in again.items():
        assert all(row[column] == rows[name][column] for column in ("batch", "with AC"))
        assert name == "dp" or int(row["activations"]) < 0.5 * int(rows[name]["activations"])


@pytest.mark.parametrize("text, size", [
    ("40GB", 40e9), ("40 gb", 40e9), ("1.5GiB", 1.5 * 2**30), ("16000MB", 16e9), ("1TB", 1e12),
    ("512MiB", 2**29)])  # fmt: skip
def test_memory_is_read(text, size):
    assert fit.read_memory(text) == size


@pytest.mark.parametrize("words, message", [
    (["40 apples"], "'40 apples' is no memory such as"), (["0GB"], "'0GB' is no memory"),
    (["40"], "'40' is no memory"), ([], "memory"),
    (["4GB", "--per_device_train_batch_size", "0"], "--per_device_train_batch_size has to be 1"),
    (["4GB", "--num_processes", "two"], "invalid int value"),
    (["4GB", "--max_seq_length", "1024"], "the model's longest input 512"),
    (["4GB", "--mixed_precision", "fp16"], "invalid choice"),
    (["4GB", "--dropout", "1"], "--dropout has to be"),
    (["4GB", "--model", "gpt-5"], "cannot read the model gpt-5"),
    (["4GB", "--config_overrides", "heads=3"], "--config_overrides heads=3: 'heads=3' is none of"),
    (["4GB", "--config_overrides", "hidden_size=0"], "'hidden_size=0' is none of"),
    (["4GB", "--model", "README.md"], "README.md is not the config of a BERT")])  # fmt: skip
def test_bad_input_is_one_line(words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["fit.py", *words])
    with pytest.raises(SystemExit) as stop:
        fit.main()
    assert str(stop.value).startswith("error: ") and message in str(stop.value)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize("content, message", [
    ('{"model_type": "gpt2"}', "'gpt2'"), ("{}", "model_type"), ("[]", "not the config"),
    ('{"model_type": "bert", "hidden_size": "768"}', "hidden_size is '768'"),
    ('{"model_type": "bert", "vocab_size": 0}', "vocab_size is 0"),
    ("{", "not the config")])  # fmt: skip
def test_what_is_no_bert_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        fit.read_model(str(tmp_path))


def test_a_config_is_read_with_transformers_defaults(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "num_hidden_layers": 2}')
    expected = fit.MODELS["bert-base"] | {"num_hidden_layers": 2}
    for path in (tmp_path, tmp_path / "config.json"):
        assert fit.read_model(str(path)) == expected


def test_the_settings_are_those_of_the_jsons():
    for path in (ROOT / "accelerate_configs").glob("*.json"):
        zero = json.loads(path.read_text())["zero_optimization"]
        assert zero["reduce_bucket_size"] == memory.BUCKET
        assert zero.get("stage3_max_live_parameters", memory.LIVE) == memory.LIVE


def test_commands_of_the_docstring_work():
    commands = re.findall(r"^ +python (fit.py .*)$", fit.__doc__, re.M)
    assert len(commands) == 3
    for command in commands:
        rows, _ = table_of(*shlex.split(command)[1:])
        assert rows["ddp"]["fits"] == "yes"


def test_config_overrides_make_the_model_that_transformers_makes():
    changes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
               "intermediate_size": 96}  # fmt: skip
    folder = str(ROOT / "tests" / "data" / "tiny_bert")
    with torch.device("meta"):
        model = transformers.BertForQuestionAnswering(
            transformers.BertConfig.from_pretrained(folder, **changes))  # fmt: skip
    words = ",".join(f"{name}={value}" for name, value in changes.items())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == memory.count_parameters(fit.read_model(folder, words))[0]


# ---------------------------------------------------------------------------- the record of a run

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}
ALL_HOST = OPTIMIZER | {"offload_param": {"device": "cpu"}}
KEEP, OFFLOAD = {"reshard_after_forward": "false"}, {"offload_params": "true"}
# YAML, options, MB of parameters, gradients and states of 25 million parameters on 4 GPUs, and what
# the rungs save. fsdp_keep has 100 MB gathered besides.
CASES = [
    ("baseline", {}, (100, 100, 200), "fsdp_keep 100, fsdp 200, fsdp_offload 400"),  # on two
    ("ddp", {}, (100, 100, 200), "fsdp_keep 200, fsdp 300, fsdp_offload 400"),
    ("zero1", {}, (100, 25, 75), "fsdp 100, fsdp_offload 200"),
    ("zero2", {}, (100, 25, 75), "fsdp 100, fsdp_offload 200"),
    ("zero3", {}, (25, 25, 75), "fsdp 25, fsdp_offload 125, twice 62"),
    ("fsdp", {}, (25, 25, 50), "fsdp_offload 100, twice 50"),
    ("fsdp_keep", KEEP, (25, 25, 50), "fsdp 100, fsdp_offload 200, twice 50"),
    ("zero2_offload", OPTIMIZER, (100, 0, 0), "fsdp_offload 100"),
    ("fsdp_offload", OFFLOAD, (0, 0, 0), "a smaller model, or a device with more memory"),
    ("zero3_offload", ALL_HOST, (0, 0, 0), "a smaller model, or a device with more memory"),
]  # fmt: skip


def parts_and_rungs(text):
    """{part: MB} and {what to try: MB}, as fit.py prints them of a record."""
    above, below = text.split("Try next")
    parts = dict(re.findall(r"^(\S.*?) {2,}([\d,]+)$", above, re.M))
    rungs = re.findall(r"^ *([\d,]+|not known)  (.*)$", below, re.M)
    return ({name: int(size.replace(",", "")) for name, size in parts.items()},
            {name: saved.replace(",", "") for saved, name in rungs})  # fmt: skip


def explained(strategy, options=None, before=7, peak=0, work=None, **changes):
    """`parts_and_rungs` of a record, and the whole text."""
    record = {
        "strategy": strategy.split("_")[0], "strategy_options": options or {}, "devices": 4,
        "per_device_batch_size": 1, "gradient_accumulation_steps": 1, "parameters": 25 * 10**6,
        "activation_checkpointing": True, "device_name": "NVIDIA H200",
        "workload": {"sequence_length": 384, "precision": "no"} | (work or {}),
        "ranks": [{"rank": 0, "memory_before_mb": before, "peak_memory_mb": peak},
                  {"rank": 1, "memory_before_mb": 2, "peak_memory_mb": 0}]}  # fmt: skip
    text = "\n".join(memory.explain_run(record | changes))
    return *parts_and_rungs(text), text


@pytest.mark.parametrize("name, options, parts, rungs", CASES, ids=[case[0] for case in CASES])
def test_what_a_run_held_and_what_to_try_next(name, options, parts, rungs):
    devices = 1 if name == "baseline" else 4
    held, tried, text = explained(name, options, devices=devices, peak=1000)
    assert held == dict(zip(
        ("parameters", "gradients", "optimizer states"), parts, strict=True)) | {
        "libraries and data": 7, "activations and all else": 993 - sum(parts), "total": 1000}
    assert "rank 0 held at its peak" in text and "not known" not in text
    words = [f"{re.search(r'twice|[a-z_]+(?=.yaml)', rung)[0]} {saved}"
             for rung, saved in tried.items()]  # fmt: skip
    assert ", ".join(words) == rungs or not words and rungs in text
    assert all(f" on {max(2, devices)} devices" in rung for rung in tried if "yaml" in rung)
    host = {"zero2_offload": 75, "fsdp_offload": 100, "zero3_offload": 125}.get(name)
    assert not host or "the host holds " in text
    held, tried, _ = explained(name, options, devices=devices, peak=1000, device_name="CPU (x)")
    assert "offload" not in " ".join(tried) and bool(held.get("offloaded")) == bool(host)


def test_what_accumulation_and_recomputing_would_save():
    """BERT-base on 2 GPUs, 4 windows of 384 tokens, by `memory_of`; and what a peak leaves."""
    base, sizes = fit.MODELS["bert-base"], dict(zip(
        ("layers", "hidden_size", "intermediate_size"), (12, 768, 3072), strict=True))  # fmt: skip
    run = {"work": sizes | {"dropout": 0.0}, "parameters": 108_893_186, "devices": 2,
           "per_device_batch_size": 4, "activation_checkpointing": False}  # fmt: skip
    held, tried, text = explained("ddp", **run)
    step, again = (memory.memory_of("ddp", base, 4, 384, 2, "no", way) for way in (False, True))
    assert held["activations"] == round(step["activations"] / 1e6) and "wrote down no peak" in text
    assert held["total"] == pytest.approx(7 + step["total"] / 1e6, abs=1)
    halves = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    assert list(tried)[:2] == [halves, "--activation_checkpointing"]
    assert float(tried[halves]) == pytest.approx(step["activations"] / 2e6 - 4 * 108.9, abs=1)
    spared = (step["activations"] - again["activations"]) / 1e6
    assert float(tried["--activation_checkpointing"]) == pytest.approx(spared, abs=1)
    held, tried, _ = explained("ddp", **run, peak=2000)
    assert held["activations and all else"] == 2000 - 7 - round(16 * 108.893)
    assert tried["--activation_checkpointing"] == str(held["activations and all else"])
    held, _, _ = explained("ddp", **run | {"gradient_accumulation_steps": 2})
    assert held["gradients"] == round(8 * 108.893)


def test_what_is_not_known_of_an_lstm():
    _, tried, text = explained("baseline", per_device_batch_size=9, activation_checkpointing=None)
    assert list(tried.items())[0] == (
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 9", "not known")
    assert "no formula here knows those of this model" in text and "--activation_ch" not in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"workload": {}, "device_name": 3}', None])
def test_what_is_no_record_is_one_line(content, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(sys, "argv", ["fit.py", str(path)])
    with pytest.raises(SystemExit, match=r"^error: \S+/run\.json is no record of a run \(.*\)$"):
        fit.main()
