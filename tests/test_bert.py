"""train_bert_squad.py under every strategy: equal numbers, shards, saved models, resumed runs, and
real text.
"""

import itertools
import json
import re
from functools import cache

import pytest
import torch
from conftest import ROOT, RUNGS, STRATEGIES, launch, spied
from test_bert_data import options
from test_mnist import RECORD
from test_mnist_resume import assert_near, assert_same_end, ids_seen, slow, step_of
from transformers import AutoTokenizer, BertForQuestionAnswering

import train_bert_squad as script
from reporting.schema import Record, find_contradiction

SCRIPT = "train_bert_squad.py"
QUESTIONS = "tests/data/squad_v1.json"
TINY = f"""--model_name_or_path tests/data/tiny_bert --from_scratch --train_file {QUESTIONS}
    --validation_file {QUESTIONS} --max_seq_length 128 --doc_stride 32
    --learning_rate 1e-3""".split()
GLOBAL_BATCH, STEPS = 16, 18  # an epoch has 13
# These move the logits of all tokens, or of all keys, alike: a softmax does not see that, their
# gradients are zero but for rounding, and Adam makes steps of a fixed size out of the rounding.
NO_GRADIENT = re.compile(
    r"qa_outputs\.bias|encoder\.layer\.1\.output\.LayerNorm\.bias|attention\.self\.key\.bias"
)


def flags(micro_batch=8, accumulation=1, dropout=0.0):
    words = f"--per_device_train_batch_size {micro_batch} --dropout {dropout}"
    words += f" --gradient_accumulation_steps {accumulation} --max_train_steps {STEPS}"
    return [*TINY, *words.split()]


def predictions(result):
    return json.loads((result.folder / "predictions.json").read_text())


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return spied("baseline", SCRIPT, tmp_path_factory.mktemp("baseline"), *flags(16))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """strategy -> the Result of a run on two processes that accumulates."""

    def start(strategy):
        more = ["--per_device_eval_batch_size", 7] + ["--with_tracking"] * (strategy == "ddp")
        folder = tmp_path_factory.mktemp(strategy)
        return spied(strategy, SCRIPT, folder, *flags(4, 2), *more)

    return cache(start)


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
    """With accumulation, from the same samples in the same order. Features in batches of 7 from 2
    processes: the last round is uneven, and each still counts once.
    """
    result = runs(strategy)
    assert_same_numbers(result, baseline)
    mine = [ids_seen(result.folder, rank) for rank in (0, 1)]
    for step, ids in enumerate(ids_seen(baseline.folder, 0)):
        places = [(micro, rank) for micro in (2 * step, 2 * step + 1) for rank in (0, 1)]
        assert sum([mine[rank][micro] for micro, rank in places], []) == ids, step + 1


@torch.no_grad()
def answer(model, tokenizer, question, context):
    """The best span, looked for one by one in windows one by one: nothing of the script is used."""
    windows = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=128,
        stride=32,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
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


def test_the_record_is_complete(runs):
    result = runs("ddp")
    record = result.record
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
    rates = {step: 1e-3 * (1 - (step - 1) / STEPS) for step in (10, 13, 18)}
    assert result.logged("learning_rate") == pytest.approx(rates)


@pytest.mark.slow
def test_the_learning_rate_rises_in_the_warm_up(tmp_path):
    words = [*flags(16), "--num_warmup_steps", 10, "--weight_decay", 0.1, "--with_tracking"]
    result = launch("baseline", SCRIPT, tmp_path, *words, "--logging_steps", 4)
    workload = result.record["workload"]
    assert (workload["num_warmup_steps"], workload["weight_decay"]) == (10, 0.1)
    rates = result.logged("learning_rate")
    # Step n has the rate after n - 1 steps.
    assert rates[4] == pytest.approx(1e-3 * 3 / 10) and rates[16] == pytest.approx(1e-3 * 3 / 8)


def test_a_saved_model_is_evaluated_without_training(baseline, tmp_path):
    """The final one scores as it did, from the validation file alone."""
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


def test_tokens_and_padding_are_those_of_the_batches(runs):
    """Of what both ranks trained on, each batch as wide as its longest feature."""
    result, args = runs("ddp"), options(max_seq_length=128, doc_stride=32)
    questions = script.read_questions(args, "train")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "data" / "tiny_bert")
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
    """The first three accumulate and checkpoint activations besides."""
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


# -------- nothing lost


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """strategy -> the Result of a run with dropout that nothing happened to."""
    words, make = flags(dropout=0.1), tmp_path_factory.mktemp
    return cache(lambda strategy: spied(strategy, SCRIPT, make(strategy), *words))


@pytest.mark.canary
@pytest.mark.slow
def test_resume_after_sigkill_is_exact(undisturbed, tmp_path):
    """Rank 1 gets it in step 18. What goes on has seen the rest of what the undisturbed run saw.
    MNIST's test, of the same code, has all YAMLs.
    """
    reference = undisturbed("fsdp")
    saving = [*flags(dropout=0.1), "--checkpointing_steps", 5]
    killed = spied("fsdp", SCRIPT, tmp_path, *saving, ok=False, SPY_SIGNAL="SIGKILL 1 17")
    assert killed.code != 0 and killed.record["status"] == "running"
    for rank in (0, 1):
        (tmp_path / f"ids_{rank}.jsonl").unlink()
    resumed = spied("fsdp", SCRIPT, tmp_path, *saving, "--resume")
    assert step_of(resumed.record["resumed_from"]) == 15  # in the second epoch
    for rank in (0, 1):
        whole = ids_seen(reference.folder, rank)
        assert len(whole) == STEPS and ids_seen(tmp_path, rank) == whole[15:]
    assert_same_end(resumed, reference)
    assert predictions(resumed) == predictions(reference)
    for name in ("tokens", "padding_share"):
        assert resumed.record[name] == reference.record[name]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_activation_checkpointing_changes_no_number(strategy, undisturbed, tmp_path):
    """With dropout: each layer is computed twice in a step, and draws the same masks the second
    time. No bit may differ.
    """
    words = [*flags(dropout=0.1), "--activation_checkpointing"]
    again = spied(strategy, SCRIPT, tmp_path, *words, SPY_LAYERS=str(tmp_path))
    passes = json.loads((tmp_path / "layers_1.json").read_text())
    assert passes == STEPS * 2 * 2, "of two layers"
    assert again.record["activation_checkpointing"] is True
    assert_same_end(again, undisturbed(strategy))


@pytest.mark.slow
def test_sigterm_in_the_evaluation_stops_it_and_costs_no_step(undisturbed, tmp_path):
    small = [*flags(dropout=0.1), "--per_device_eval_batch_size", 4]  # 28 batches
    stopped = spied("zero3", SCRIPT, tmp_path, *small, SPY_EVAL="SIGTERM 1 5")
    assert stopped.record["status"] == "preempted" and stopped.record["steps"] == 13
    assert "preempted at step 13" in stopped.out and stopped.record["metrics"] is None
    assert not (tmp_path / "predictions.json").exists()
    resumed = spied("zero3", SCRIPT, tmp_path, *flags(dropout=0.1), "--resume")
    assert step_of(resumed.record["resumed_from"]) == 13
    assert_same_end(resumed, undisturbed("zero3"))


# -------- other data, other precision


@pytest.mark.slow
def test_unanswerable_questions_get_no_answer(tmp_path):
    """SQuAD v2.0: after some epochs on the tiny data, most questions without an answer are
    recognised.
    """
    data = ROOT / "tests" / "data" / "squad_v2.json"
    words = [*TINY, "--train_file", data, "--validation_file", data, "--version_2_with_negative"]
    words += ["--dropout", 0, "--num_epochs", 25, "--per_device_train_batch_size", 8]
    result = launch("baseline", SCRIPT, tmp_path, *words)
    articles = json.loads(data.read_text())["data"]
    paragraphs = [part for article in articles for part in article["paragraphs"]]
    questions = [qa for part in paragraphs for qa in part["qas"]]
    answers = predictions(result)
    empty = {qa["id"] for qa in questions if qa["is_impossible"]}
    assert len(empty) == 24 and sum(answers[question] == "" for question in empty) >= 20
    assert "" not in {answers[qa["id"]] for qa in questions[:3]}
    assert result.record["metrics"]["f1"] > 80 and result.record["workload"]["version_2"] is True


@pytest.mark.slow
def test_bf16_and_compiled_runs_walk_nearly_the_same_curve(tmp_path):
    """Lower precision and torch.compile come from the launcher; "eager" compiles without a C++
    compiler. The weights that a run leaves have the same names and dtype.
    """
    few = ["--max_train_steps", 5, "--max_eval_samples", 8]
    baseline = launch("baseline", SCRIPT, tmp_path / "baseline", *flags(16), *few)
    kinds = [("zero3", "bf16", "no", 0.05), ("fsdp", "no", "eager", 1e-5)]
    for strategy, precision, dynamo, rel in kinds:
        launcher = ["--mixed_precision", precision, "--dynamo_backend", dynamo]
        result = launch(strategy, SCRIPT, tmp_path / strategy, *flags(8), *few, launcher=launcher)
        assert "recompile_limit" not in result.err + result.out
        assert result.losses == pytest.approx(baseline.losses, rel=rel)
        assert result.weights.keys() == baseline.weights.keys()
        assert {weight.dtype for weight in result.weights.values()} == {torch.float32}


@pytest.mark.slow
def test_every_width_is_compiled_once(tmp_path):
    """Batches differ in width. torch compiles for the first, then for all, and to evaluate."""
    few = [*TINY, "--max_train_steps", 12, "--per_device_train_batch_size", 2, "--dropout", 0]
    options = {"launcher": ["--dynamo_backend", "eager"], "env": {"SPY_SHAPES": "4"}}
    result = launch("baseline", SCRIPT, tmp_path, *few, **options)
    assert "recompile_limit" not in result.err + result.out


# -------- real data


@pytest.mark.slow
def test_real_text_and_weights_give_the_same_first_losses(real_data, tmp_path):
    """SQuAD v1.1 and a pretrained encoder, four steps."""
    squad = real_data / "squad"
    real = ["--model_name_or_path", real_data / "minilm", "--train_file", squad / "train.json"]
    real += ["--validation_file", squad / "dev.json", "--max_train_samples", 64, "--dropout", 0]
    real += "--max_eval_samples 16 --max_train_steps 4 --per_device_train_batch_size".split()
    reference = launch("baseline", SCRIPT, tmp_path / "baseline", *real, 8)
    metrics = reference.record["metrics"]
    for strategy in STRATEGIES:
        result = launch(strategy, SCRIPT, tmp_path / strategy, *real, 4)
        assert result.losses == pytest.approx(reference.losses, rel=1e-4), strategy
        assert result.record["parameters"] == reference.record["parameters"] == 22_566_146
        for name in ("exact_match", "f1"):
            assert result.record["metrics"][name] == pytest.approx(metrics[name]), strategy
        assert predictions(result) == predictions(reference), strategy
