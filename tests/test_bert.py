"""train_bert_squad.py: equal numbers under every strategy, saved models, resumed runs."""

import itertools
import json
import re
import shutil
from functools import cache

import pytest
import torch
from conftest import ROOT, RUNGS, STRATEGIES, launch, spied
from safetensors.torch import save_file
from test_bert_data import options
from test_mnist import RECORD
from test_mnist_resume import assert_near, assert_same_end, ids_seen, samples_of_steps, slow
from transformers import AutoTokenizer, BertConfig, BertForQuestionAnswering, BertModel

import train_bert_squad as script
from reporting.schema import Record, find_contradiction

SCRIPT = "train_bert_squad.py"
TINY_BERT, QUESTIONS = "tests/data/tiny_bert", "tests/data/squad_v1.json"
TINY = f"""--model_name_or_path {TINY_BERT} --from_scratch --train_file {QUESTIONS}
    --validation_file {QUESTIONS} --max_seq_length 128 --doc_stride 32
    --learning_rate 1e-3""".split()
GLOBAL_BATCH, STEPS, WARMUP = 16, 18, 4  # an epoch has 13 steps
# A softmax does not change if all its inputs move alike, so these weights have no gradient, except
# for rounding errors. Adam turns even those into steps of full size.
NO_GRADIENT = re.compile(
    r"qa_outputs\.bias|encoder\.layer\.1\.output\.LayerNorm\.bias|attention\.self\.key\.bias"
)


def flags(micro_batch=8, accumulation=1, dropout=0.0):
    words = f"--per_device_train_batch_size {micro_batch} --dropout {dropout}"
    words += f" --gradient_accumulation_steps {accumulation} --max_train_steps {STEPS}"
    words += f" --num_warmup_steps {WARMUP}"
    return [*TINY, *words.split()]


def predictions(result):
    return json.loads((result.folder / "predictions.json").read_text())


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """The loaders and the evaluations need 400 MB more than training."""
    folder = tmp_path_factory.mktemp("baseline")
    return spied("baseline", SCRIPT, folder, *flags(16), SPY_MEMORY="400")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """strategy -> the Result of a run on two processes that accumulates."""
    words = [*flags(4, 2), "--per_device_eval_batch_size", 7, "--with_tracking"]
    make = tmp_path_factory.mktemp
    return cache(lambda strategy: spied(strategy, SCRIPT, make(strategy), *words))


def assert_same_numbers(result, baseline):
    record, reference = result.record, baseline.record
    assert record["global_batch_size"] == GLOBAL_BATCH and len(result.losses) == STEPS
    assert_near(result, baseline, rel=1e-5, atol=1e-4, leave_out=NO_GRADIENT)
    metrics, others = record["metrics"], reference["metrics"]
    assert metrics["eval_loss"] == pytest.approx(others["eval_loss"], rel=1e-6)
    assert {**metrics, "eval_loss": 0} == {**others, "eval_loss": 0}
    assert predictions(result) == predictions(baseline) and len(predictions(result)) == 132
    assert record["tokens"] == reference["tokens"]


@pytest.mark.canary
@pytest.mark.parametrize("strategy", [*STRATEGIES, *slow(*RUNGS)])
def test_same_numbers_as_the_baseline(strategy, baseline, runs):
    """With accumulation, from the same samples in the same order. Batches of 7 features from 2
    processes leave an uneven last round, and each feature still counts once.
    """
    result = runs(strategy)
    assert_same_numbers(result, baseline)
    mine = samples_of_steps(result.folder, 2, GLOBAL_BATCH)
    assert torch.equal(mine, samples_of_steps(baseline.folder, 1, GLOBAL_BATCH))


@torch.no_grad()
def answer(model, tokenizer, question, context):
    """The best of all spans in all windows, by a plain search that uses nothing of the script."""
    cut = {"truncation": "only_second", "max_length": 128, "stride": 32}
    more = {"return_overflowing_tokens": True, "return_offsets_mapping": True}
    windows = tokenizer(question, context, **cut, **more)
    best, text = float("-inf"), ""
    for number, offsets in enumerate(windows["offset_mapping"]):
        names = ("input_ids", "token_type_ids")
        output = model(**{name: torch.tensor([windows[name][number]]) for name in names})
        starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        tokens = [token for token, side in enumerate(windows.sequence_ids(number)) if side == 1]
        for start, end in itertools.product(tokens, tokens):
            score = starts[start] + ends[end]
            if start <= end < start + 30 and score > best:
                best, text = score, context[offsets[start][0] : offsets[end][1]]
    return text


def test_the_page_asks_a_saved_model(baseline, capsys):
    """The Python of docs/scripts.md answers as the search over all spans above."""
    page = (ROOT / "docs" / "scripts.md").read_text()
    [lines] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {}
    exec(lines.replace("runs/x/best", str(baseline.folder)), names)
    said = capsys.readouterr().out.strip()
    asked = [names[name] for name in ("model", "tokenizer", "question", "text")]
    assert said == answer(*asked) != ""


@pytest.mark.canary
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_saved_models_answer_the_same_when_transformers_loads_them(strategy, runs):
    """And best/ is the model of the epoch with the smaller validation loss."""
    result = runs(strategy)
    first, last = re.findall(r"validation loss ([\d.]+)", result.out)
    best = BertForQuestionAnswering.from_pretrained(result.folder / "best").state_dict()
    final = result.weights["qa_outputs.weight"]
    assert torch.equal(best["qa_outputs.weight"], final) == (float(last) < float(first))
    model = BertForQuestionAnswering.from_pretrained(result.folder).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(result.folder), predictions(result)
    questions = script.read_questions(options(), "validation")[::7]
    for row in questions:
        told = answer(model, tokenizer, row["question"], row["context"])
        assert told == found[row["id"]], row
    assert len(questions) > 15


def test_the_record_is_complete(runs, baseline):
    result = runs("ddp")
    record = result.record
    whole, part = baseline.record["ranks"][0], record["ranks"][0]
    whole, part = (rank["peak_memory_mb"] - rank["memory_before_mb"] for rank in (whole, part))
    assert whole < part + 200, "the peak of training alone"
    more = ["padding_share", "padded_tokens", "tokens", "tokens_per_second"]
    assert set(record) == {*RECORD, *more} and record["script"] == SCRIPT
    read = Record.model_validate_json((result.folder / "run.json").read_bytes())
    assert find_contradiction(read) == "", "the report leaves it out"
    assert record["parameters"] == sum(map(torch.numel, result.weights.values()))
    assert set(record["metrics"]) == {"exact_match", "f1", "eval_loss"}
    workload = record["workload"]
    assert workload["model"] == "tiny_bert, from scratch"
    assert (workload["max_train_steps"], workload["num_epochs"]) == (STEPS, 4)
    assert len(record["steps_per_second"]) == 3, "10, 13 (the epoch's end), 18"
    assert [*result.logged("loss")] == [10, 13, 18] and [*result.logged("f1")] == [13, 18]
    falling = {step: 1e-3 * (STEPS + 1 - step) / (STEPS - WARMUP) for step in (10, 13, 18)}
    assert result.logged("learning_rate") == pytest.approx(falling), "after the warm-up"


def test_a_saved_model_is_evaluated_without_training(baseline, tmp_path):
    """It scores as it did, and needs no training file."""
    words = ["--model_name_or_path", baseline.folder, "--validation_file", QUESTIONS]
    words += ["--max_seq_length", 128, "--doc_stride", 32, "--num_epochs", 0]
    words += ["--per_device_train_batch_size", 500, "--gradient_accumulation_steps", 9]
    result = launch("ddp", SCRIPT, tmp_path, *words, "--learning_rate", 1)
    record = result.record
    assert (record["status"], record["steps"], record["loss_history"]) == ("completed", 0, [])
    assert record["metrics"] == pytest.approx(baseline.record["metrics"])
    assert record["samples_per_second"] is None and "tokens" not in record
    assert predictions(result) == predictions(baseline)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["predictions.json", "run.json"]
    assert "epoch" not in result.out and "validation loss" in result.out


@pytest.mark.slow
def test_questions_without_answers_get_predictions_but_no_scores(baseline, tmp_path):
    """The record is one that the report can read."""
    lines = [json.dumps(row | {"answers": None}) for row in script.read_squad(ROOT / QUESTIONS)]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    words = ["--model_name_or_path", baseline.folder, "--validation_file", tmp_path / "asked.jsonl"]
    words += ["--max_seq_length", 128, "--doc_stride", 32, "--num_epochs", 0]
    result = launch("ddp", SCRIPT, tmp_path / "run", *words)
    assert predictions(result) == predictions(baseline)
    assert set(result.record["metrics"].values()) == {None}
    assert "no scores, as the questions have no answers" in result.out
    Record.model_validate_json((tmp_path / "run" / "run.json").read_text())
    ready = launch("baseline", SCRIPT, tmp_path / "ready", *words, "--prepare_data_only")
    assert "ready: 0 training and 223 validation features" in ready.out


def test_answers_belong_to_questions_not_to_ids(baseline, tmp_path):
    """Some data sets number their questions in each paragraph. Scores do not depend on that."""
    data = json.loads((ROOT / QUESTIONS).read_text())
    paragraphs = [part for article in data["data"] for part in article["paragraphs"]]
    for paragraph in paragraphs:
        for number, question in enumerate(paragraph["qas"]):
            question["id"] = number
    (tmp_path / "own.json").write_text(json.dumps(data))
    words = ["--model_name_or_path", baseline.folder, "--validation_file", tmp_path / "own.json"]
    words += ["--max_seq_length", 128, "--doc_stride", 32, "--num_epochs", 0]
    result = launch("baseline", SCRIPT, tmp_path / "run", *words)
    assert result.record["metrics"] == pytest.approx(baseline.record["metrics"])
    right = [*predictions(baseline).values()]
    ids = [str(question["id"]) for part in paragraphs for question in part["qas"]]
    assert predictions(result) == dict(zip(ids, right, strict=True)), "the last of each id"
    line = f"warning: {132 - len(set(ids))} of 132 validation questions repeat an id: "
    assert result.out.count(line) == 1


def test_a_validation_loss_that_is_not_finite_ends_the_run(baseline, tmp_path):
    """Here one weight of a saved model is NaN."""
    model = tmp_path / "model"
    shutil.copytree(baseline.folder, model)
    weights = baseline.weights
    weights["qa_outputs.weight"][0, 0] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    words = ["--model_name_or_path", model, "--validation_file", QUESTIONS, "--num_epochs", 0]
    failed = launch("ddp", SCRIPT, tmp_path / "run", *words, "--max_eval_samples", 8, ok=False)
    assert failed.error_line().startswith("error: the validation loss is not finite")
    assert failed.record["status"] == "failed"


def test_the_record_counts_tokens_and_padding(runs):
    """Of all batches of both ranks. A batch is as wide as its longest feature."""
    result, args = runs("ddp"), options(max_seq_length=128, doc_stride=32)
    questions = script.read_questions(args, "train")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / TINY_BERT)
    lengths = script.Features(questions, tokenizer, args).columns["length"]
    batches = [lengths[ids] for rank in (0, 1) for ids in ids_seen(result.folder, rank)]
    tokens = sum(batch.sum().item() for batch in batches)
    padded_tokens = sum(len(batch) * batch.max().item() for batch in batches)
    record = result.record
    assert record["tokens"] == tokens
    assert record["padding_share"] == round(1 - tokens / padded_tokens, 4) > 0
    rates = record["tokens_per_second"] / record["samples_per_second"]
    assert rates == pytest.approx(tokens / (STEPS * GLOBAL_BATCH))


@pytest.mark.slow
def test_clipping_is_the_same_under_every_strategy(tmp_path):
    """The first three also accumulate and use activation checkpointing."""
    clipped = "--max_grad_norm 1.0 --max_train_steps 8 --with_tracking --logging_steps 2".split()
    baseline = launch("baseline", SCRIPT, tmp_path / "baseline", *flags(16), *clipped)
    norms = baseline.logged("gradient_norm")
    assert len(norms) == 4 and max(norms.values()) > 1, "as it is before it is clipped"
    for name in ("zero1", "fsdp_keep", "zero3_offload", "hsdp"):
        more = flags(4) if name == "hsdp" else [*flags(4, 2), "--activation_checkpointing"]
        result = launch(name, SCRIPT, tmp_path / name, *more, *clipped)
        assert_near(result, baseline, rel=1e-5, atol=1e-4, leave_out=NO_GRADIENT)
        assert predictions(result) == predictions(baseline), name
        assert result.logged("gradient_norm") == pytest.approx(norms, rel=1e-4), name


# -------- dropout: resumed runs, activation checkpointing


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """strategy -> the Result of a run with dropout that nothing happened to."""
    words, make = flags(dropout=0.1), tmp_path_factory.mktemp
    return cache(lambda strategy: spied(strategy, SCRIPT, make(strategy), *words))


@pytest.mark.canary
@pytest.mark.slow
def test_resume_after_sigkill_is_exact(undisturbed, tmp_path):
    """A signal stops the run after its first step, between two logs. Then rank 1 is killed in step
    18. MNIST's test of the same code covers more strategies.
    """
    reference = undisturbed("fsdp")
    saving = [*flags(dropout=0.1), "--checkpointing_steps", 5]
    stopped = spied("fsdp", SCRIPT, tmp_path, *saving, SPY_SIGNAL="SIGTERM 1 0")
    assert (stopped.record["status"], stopped.record["steps"]) == ("preempted", 1)
    saving.append("--resume")
    killed = spied("fsdp", SCRIPT, tmp_path, *saving, ok=False, SPY_SIGNAL="SIGKILL 1 16")
    assert killed.code != 0 and killed.record["status"] == "running"
    for file in tmp_path.glob("ids_*"):
        file.unlink()
    resumed = spied("fsdp", SCRIPT, tmp_path, *saving)
    assert resumed.record["resumed_from"].endswith("step_00000015")  # in the second epoch
    whole = samples_of_steps(reference.folder, 2, GLOBAL_BATCH)
    assert torch.equal(samples_of_steps(tmp_path, 2, GLOBAL_BATCH), whole[15:])
    assert_same_end(resumed, reference)
    assert predictions(resumed) == predictions(reference)
    for name in ("tokens", "padding_share"):
        assert resumed.record[name] == reference.record[name]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_activation_checkpointing_changes_no_number(strategy, undisturbed, tmp_path):
    """Each layer is computed twice per step, and draws the same dropout masks both times."""
    words = [*flags(dropout=0.1), "--activation_checkpointing"]
    again = spied(strategy, SCRIPT, tmp_path, *words, SPY_LAYERS=str(tmp_path))
    passes = json.loads((tmp_path / "layers_1.json").read_text())
    assert passes == STEPS * 2 * 2, "of two layers"
    assert again.record["activation_checkpointing"] is True
    assert_same_end(again, undisturbed(strategy))


# -------- other data, other precision


@pytest.mark.slow
def test_unanswerable_questions_get_no_answer(tmp_path):
    """SQuAD v2.0. After 25 epochs, the model recognises most questions without an answer."""
    data = ROOT / "tests" / "data" / "squad_v2.json"
    words = [*TINY, "--train_file", data, "--validation_file", data, "--version_2_with_negative"]
    words += ["--dropout", 0, "--num_epochs", 25, "--per_device_train_batch_size", 8]
    result = launch("baseline", SCRIPT, tmp_path, *words)
    answers, questions = predictions(result), list(script.read_squad(data))
    empty = [row["id"] for row in questions if not row["answers"]["text"]]
    assert len(empty) == 24 and sum(answers[question] == "" for question in empty) >= 20
    assert "" not in {answers[row["id"]] for row in questions[:3]}
    assert result.record["metrics"]["f1"] > 80 and result.record["workload"]["version_2"] is True


@pytest.mark.slow
def test_bf16_and_compiled_runs_walk_nearly_the_same_curve(tmp_path):
    """The launcher asks for both. The saved weights keep their names and dtype."""
    few = ["--max_train_steps", 5, "--max_eval_samples", 8]
    baseline = launch("baseline", SCRIPT, tmp_path / "baseline", *flags(16), *few)
    kinds = [("zero3", "bf16", "no", 0.05), ("fsdp", "no", "eager", 1e-5)]
    for strategy, precision, dynamo, rel in kinds:
        launcher = ["--mixed_precision", precision, "--dynamo_backend", dynamo]
        result = launch(strategy, SCRIPT, tmp_path / strategy, *flags(8), *few, launcher=launcher)
        assert result.losses == pytest.approx(baseline.losses, rel=rel)
        assert result.weights.keys() == baseline.weights.keys()
        assert {weight.dtype for weight in result.weights.values()} == {torch.float32}


@pytest.mark.slow
def test_torch_compiles_three_times_for_all_widths(tmp_path):
    """For the first batch, for all others, and to evaluate. It would give up after four times."""
    few = [*TINY, "--max_train_steps", 12, "--per_device_train_batch_size", 2, "--dropout", 0]
    options = {"launcher": ["--dynamo_backend", "eager"], "env": {"SPY_SHAPES": "4"}}
    result = launch("baseline", SCRIPT, tmp_path, *few, **options)
    assert "recompile_limit" not in result.err + result.out


@pytest.mark.slow
def test_a_pretrained_encoder_with_a_new_head_trains_the_same(tmp_path):
    """As a model of the Hub does: all ranks load its weights, and draw the same head."""
    encoder = tmp_path / "encoder"
    BertModel(BertConfig.from_pretrained(ROOT / TINY_BERT)).save_pretrained(encoder)
    AutoTokenizer.from_pretrained(ROOT / TINY_BERT).save_pretrained(encoder)
    more = ["--model_name_or_path", encoder, "--max_train_steps", 4, "--max_eval_samples", 16]

    def train(strategy, micro_batch):
        words = flags(micro_batch)
        words.remove("--from_scratch")
        return launch(strategy, SCRIPT, tmp_path / strategy, *words, *more)

    baseline = train("baseline", 16)
    for strategy in STRATEGIES:
        result = train(strategy, 8)
        assert_near(result, baseline, rel=1e-5, atol=1e-4, leave_out=NO_GRADIENT)
        assert predictions(result) == predictions(baseline), strategy
        saved = BertConfig.from_pretrained(result.folder)
        assert saved.architectures == ["BertForQuestionAnswering"], "not the encoder's"
