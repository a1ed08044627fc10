"""The parts of train_bert_squad.py: questions, features, batches, spans, scores, and bad input."""

import copy
import json
import random
import shutil
import sys
from argparse import Namespace

import pytest
import torch
import transformers
from conftest import ROOT, launch, namespaces, run, run_forked
from tokenizers import processors

import train_bert_squad as script

SCRIPT = "train_bert_squad.py"
DATA = ROOT / "tests" / "data"
V1, V2, MODEL = DATA / "squad_v1.json", DATA / "squad_v2.json", DATA / "tiny_bert"
CONFIG = transformers.AutoConfig.from_pretrained(MODEL)


def options(**changes):
    paths = {"train_file": V1, "validation_file": V1, "model_name_or_path": MODEL}
    values = {"version_2_with_negative": False, "max_train_samples": 0, "max_eval_samples": 0}
    values |= {"max_seq_length": 96, "doc_stride": 24, "num_epochs": 4} | paths
    return Namespace(**values | changes)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


# -------- questions


def write_squad(path, text="Rosa", start=0, **more):
    """Write a SQuAD file of one question. `more` are fields of the question."""
    answers = [{"text": text, "answer_start": start}]
    question = {"id": "q1", "question": "Who built it?", "answers": answers} | more
    if question["answers"] is None:
        del question["answers"]
    paragraph = {"context": "Rosa built a mill.", "qas": [question]}
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    return path


@pytest.mark.parametrize("change", [{"start": 5}, {"text": " "}, {"text": "mill.", "start": -5}])
def test_a_first_answer_that_is_not_in_the_text_is_refused(change, tokenizer, tmp_path):
    args = options(train_file=write_squad(tmp_path / "questions.json", **change))
    rows = script.read_questions(args, "train")
    with pytest.raises(SystemExit, match="^error: 1 training questions, such as q1, have a first"):
        script.check_inputs(args, CONFIG, tokenizer, rows, [])


@pytest.mark.parametrize("value, true", [("false", 0), (None, 0), ("0", 0), ("True", 1), (1, 1)])
def test_is_impossible_may_be_text_or_a_number(value, true, tmp_path):
    file = write_squad(tmp_path / "questions.json", is_impossible=value)
    [question] = script.read_squad(file)
    assert question["answers"]["text"] == ([] if true else ["Rosa"])


@pytest.mark.parametrize("form", ["data", "list", "lines", "line"])
def test_rows_as_on_the_hub_are_the_same_questions(form, tmp_path):
    """As `datasets` and run_qa.py write them, in a list or on lines. Some text has a line break
    that only Python's splitlines knows.
    """
    nested = write_squad(tmp_path / "nested.json", question="Who\u2028built it?")
    [row] = rows = [*script.read_squad(nested)]
    texts = {"data": {"data": rows}, "list": rows, "line": row}
    text = json.dumps(texts.get(form), ensure_ascii=False)
    if form == "lines":
        text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in (row, row))
    flat = tmp_path / "flat"
    flat.write_text(text, encoding="utf-8")
    assert [*script.read_squad(flat)] == rows * (2 if form == "lines" else 1)


ROW = '{"id": 1, "question": "Who?", "context": "Rosa", "answers": null}\n'
TEXT = ROW.replace("null", '{"text": "Rosa", "answer_start": [0]}')
OTHER_FORMS = {
    "{\n": "neither JSON nor JSONL: Expecting property name .*: line 2",
    "id,question\n1,Who?": "neither JSON nor JSONL: Expecting value: line 1",
    ROW + ROW + ROW[:-3]: "neither JSON nor JSONL: .*: line 3",
    '{"version": 2}': "question 1 is neither SQuAD's nested form nor a row .*'id'",
    ROW + '["id"]': "question 2 is neither",
    ROW + TEXT: "question 2 is neither",
    '{"data": []}': "no questions",
    "": "no questions",
}


@pytest.mark.parametrize("text", OTHER_FORMS)
def test_another_form_is_one_line_with_the_file_and_the_place(text, tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(text)
    with pytest.raises(SystemExit, match=f"^error: {file}:? (is|has)? ?{OTHER_FORMS[text]}"):
        script.read_questions(options(train_file=file), "train")


def test_questions_without_answers_are_no_data_to_train_on(tokenizer, tmp_path):
    """Nor are some of many. All of them can be evaluated, without scores."""
    args = options(train_file=write_squad(tmp_path / "questions.json", answers=None))
    rows, known = script.read_questions(args, "train"), script.read_questions(options(), "train")
    lacking = "^error: 1 {} questions, such as q1, lack `answers`"
    for split, train, evaluated in (("training", rows, []), ("validation", None, rows + known)):
        with pytest.raises(SystemExit, match=lacking.format(split)):
            script.check_inputs(args, CONFIG, tokenizer, train, evaluated)
    script.check_inputs(args, CONFIG, tokenizer, None, rows)


def test_later_answers_may_be_blank_or_misplaced(tokenizer, tmp_path):
    """They only count for the scores. CMRC 2018 misplaces some, and SQuAD-es leaves some blank."""
    texts = ["Rosa", "a mill", " "]
    answers = [{"text": text, "answer_start": 0} for text in texts]
    args = options(validation_file=write_squad(tmp_path / "questions.json", answers=answers))
    rows = script.read_questions(args, "validation")
    script.check_inputs(args, CONFIG, tokenizer, [], rows)
    assert rows[0]["answers"]["text"] == texts


# -------- features


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of tokenised questions, empty."""
    monkeypatch.setattr(script.datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "squad_features"


@pytest.mark.canary
@pytest.mark.parametrize(
    "context, text, answer",
    [
        ("  The  mill's wheel", "wheel", "wheel"),
        ("  The  mill's wheel", " The  mill", "The  mill"),  # Spaces are in no token.
        ("They said hello \u200b", "hello \u200b", "hello"),  # a space without width
        ("\ufeffhello they said", "\ufeffhello", "hello"),  # a byte order mark
        ("A mill near Pen\u0303alte\u0301", "Pen\u0303alte\u0301", "Pen\u0303alte\u0301"),
        ("\u0301abc", "\u0301abc", "abc"),
        ("kha\u0301 ma", "kha\u0301", "kha\u0301"),
        ("\u0939\u093f\u0928\u094d \u0939", "\u0939\u093f\u0928\u094d", "\u0939\u093f\u0928\u094d"),
        ("and a wheel\u0301\u0302", "wheel\u0301\u0302", "wheel\u0301\u0302"),
    ],
)
def test_the_labels_of_an_answer_give_its_text_back(context, text, answer, cache, tokenizer):
    """The tiny tokenizer has no token for combining marks, as in Vietnamese and Hindi. An answer
    includes those after its last letter.
    """
    question = {"id": "q1", "question": "Why?", "context": context}
    question["answers"] = {"text": [text], "answer_start": [context.index(text)]}
    features = script.Features([question], tokenizer, options())
    [row] = features.table
    assert row["first"] <= row["start"] <= row["end"]
    found = torch.tensor([[0, 0, 0, 0, row["start"], row["end"]]])
    assert script.choose_answers(found, features, 0) == {0: answer}


def test_without_an_answer_the_labels_point_to_cls(cache, tokenizer):
    question = {"id": "q1", "question": "Why?", "context": "The mill"}
    question["answers"] = {"text": [], "answer_start": []}
    [row] = script.Features([question], tokenizer, options()).table
    assert (row["start"], row["end"]) == (0, 0)


@pytest.mark.canary
@torch.no_grad()
def test_the_loss_is_the_one_that_transformers_computes(cache, tokenizer):
    """transformers gets each feature alone, without a mask. The script pads them into a batch."""
    questions = script.read_questions(options(), "train")
    features = script.Features(questions, tokenizer, options())
    model = transformers.BertForQuestionAnswering(CONFIG)
    ids, losses = [0, 40, 80], []
    assert len({features.columns["length"][number].item() for number in ids}) == 3
    for number in ids:
        inputs, spans, _ = features.__getitems__([number])
        words = {name: inputs[name] for name in ("input_ids", "token_type_ids")}
        answer = {f"{side}_positions": spans[side] for side in ("start", "end")}
        losses.append(model.eval()(**words, **answer).loss)
    inputs, spans, _ = features.__getitems__(ids)
    logits = script.span_logits(model, inputs)
    own = script.span_losses(logits, spans["start"], spans["end"])
    torch.testing.assert_close(own, torch.stack(losses))


@pytest.mark.canary
def test_features_are_cached_by_what_they_depend_on(cache, tokenizer, monkeypatch):
    questions = script.read_questions(options(), "train")

    def load(questions=questions, **changes):
        """The checksum of the features, and the times when the files of the cache were written."""
        features = script.Features(questions, tokenizer, options(**changes))
        return features.checksum, {file: file.stat().st_mtime_ns for file in cache.iterdir()}

    first = load()
    assert tokenizer.backend_tokenizer.truncation is None, "it is saved with the model"
    with monkeypatch.context() as patch:  # a cached start does not build the questions' table
        patch.delattr(script.datasets.Dataset, "from_list")
        assert load() == first
    others = [load(max_seq_length=80), load(doc_stride=16), load(questions=questions[1:])]
    assert [len(files) for _, files in others] == [2, 3, 4]
    assert len({first[0], *(checksum for checksum, _ in others)}) == 4
    shutil.rmtree(cache)
    checksum, _ = load()
    assert checksum == first[0]


# -------- batches, scores


def test_global_batches_have_similar_lengths_and_lose_no_sample():
    lengths = torch.tensor([random.Random(i).randint(30, 384) for i in range(2_005)])

    def epoch_order(seed, epoch):
        sampler = script.LengthSampler(lengths, 10, seed)
        sampler.set_epoch(epoch)
        return torch.tensor(list(sampler)).view(-1, 10)

    order = epoch_order(0, 0)
    assert order.shape == (200, 10) and len(set(order.flatten().tolist())) == 2_000  # 5 are dropped
    assert torch.equal(order, epoch_order(0, 0))
    assert lengths[order[0]].max() == lengths[order].max(), "the longest comes first"
    orders = [epoch_order(*which) for which in ((0, 0), (0, 1), (1, 0), (7, 0))]
    batches = [{frozenset(batch) for batch in order.tolist()} for order in orders]
    assert len(set.union(*batches)) == 800, "another seed or epoch has other batches"
    spread = (lengths[order].amax(1) - lengths[order].amin(1)).float()
    assert spread.mean() < 15  # of 354


@pytest.mark.canary
@pytest.mark.parametrize(
    "prediction, references, v1, v2",
    [
        ("The Green Heron!", ["green heron"], (100, 100), (100, 100)),  # case, punctuation, article
        ("another apple", ["apple"], (0, 200 / 3), (0, 200 / 3)),  # "an" only as a word of its own
        ("the cat sat", ["cat", "the cat sat down"], (0, 80), (0, 80)),  # the best of several
        ("sea - water", ["sea-water"], (0, 0), (0, 0)),  # punctuation is deleted, not a space
        ("the the dog dog", ["dog"], (0, 200 / 3), (0, 200 / 3)),  # a word counts each time
        ("Zoë  Carter\n", ["zoë carter"], (100, 100), (100, 100)),
        ("watchmakers’ guild", ["watchmakers guild"], (0, 50), (0, 50)),  # not ASCII's punctuation
        ("", [], None, (100, 100)),  # v2.0: rightly no answer
        ("red", [], None, (0, 0)),
        ("", [""], (100, 0), (100, 100)),  # v1.1 gives F1 0 also where there are no words
        ("red", ["the", "red"], (100, 100), (100, 100)),
        ("", ["the", "red"], (100, 0), (0, 0)),  # v2.0 leaves out answers of nothing but articles
    ],
)
def test_scores_follow_the_official_rules(prediction, references, v1, v2):
    """Of v1.1 and of v2.0. Scores are means: a second question has a wrong answer."""
    for version_2, expected in ((False, v1), (True, v2)):
        if expected:
            metric, answers = script.SquadMetric(version_2), [["red"], references]
            scores = metric.compute(predictions=["blue", prediction], references=answers)
            assert 2 * scores["exact_match"] == expected[0]
            assert 2 * scores["f1"] == pytest.approx(expected[1])


# -------- bad input is one clear line


FILES = ["--train_file", V1, "--validation_file", V1]
LOCAL = ["--model_name_or_path", MODEL, "--from_scratch", *FILES]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--train_file", V1], "--train_file and --validation_file go together"),
        ([*LOCAL, "--train_file", V2], "SQuAD v2.0, add --version_2_with_negative"),
        ([*LOCAL, "--max_seq_length", 513], "--max_seq_length exceeds the 512 positions of"),
        ([*LOCAL, "--per_device_train_batch_size", 500], "the global batch (1000) is larger"),
    ],
)
def test_one_line_for_bad_input(flags, message, tmp_path):
    """From two processes, of which none hangs. Nothing is left behind."""
    result = launch("zero3", SCRIPT, tmp_path / "run", *flags, ok=False)
    assert message in result.error_line() and not list(tmp_path.iterdir())


def model_folder(tmp_path, **config):
    """A copy of the tiny model, with weights, and with another config."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, copy_function=shutil.copyfile)
    transformers.BertForQuestionAnswering(CONFIG).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_model_that_is_not_bert_is_refused(tokenizer):
    with pytest.raises(SystemExit, match="is not a BERT model with a fast tokenizer"):
        script.check_inputs(options(), transformers.RobertaConfig(), tokenizer, [], [])


def test_a_tokenizer_without_berts_special_tokens_is_refused(tokenizer):
    """PreTrainedTokenizerFast(tokenizer_object=...) saves such a tokenizer."""
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.post_processor = processors.Sequence([])
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)
    with pytest.raises(SystemExit, match="does not write .CLS. question .SEP. context .SEP."):
        script.check_inputs(options(), CONFIG, made, [], [])


def test_no_code_of_a_model_folder_is_run_and_nobody_is_asked(tmp_path):
    folder = model_folder(tmp_path, auto_map={"AutoConfig": "own.Config"}, model_type="own")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'sign')!r}, 'w')")
    words = ["--model_name_or_path", folder, *FILES]
    done = launch("baseline", SCRIPT, tmp_path / "run", *words, ok=False)
    assert done.code and "[y/N]" not in done.out + done.err and not (tmp_path / "sign").exists()


@pytest.mark.slow
def test_the_default_model_and_data_are_prepared_and_trained_on(tmp_path):
    """They lie in the folder where the script runs, as they would in the Hub's cache. The model's
    config asks for more outputs, as those of some published models do.
    """
    squad = tmp_path / "rajpurkar" / "squad"
    squad.mkdir(parents=True)
    (tmp_path / "google-bert").mkdir()
    model = model_folder(tmp_path, output_hidden_states=True, output_attentions=True)
    model.rename(tmp_path / "google-bert" / "bert-base-uncased")
    rows = script.datasets.Dataset.from_list([row | {"title": ""} for row in script.read_squad(V1)])
    for split in ("train", "validation"):
        rows.to_parquet(squad / f"{split}-00000-of-00001.parquet")
    words = [ROOT / SCRIPT, "--output_dir", "run", "--max_train_steps", 2]
    yaml = ["--config_file", f"{ROOT}/accelerate_configs/fsdp.yaml"]
    for more in (["--prepare_data_only"], []):
        argv = [str(word) for word in [*words, *more]]
        done = run_forked(yaml, argv, tmp_path / "run", root=tmp_path)
        assert done.code == 0, done.err
        assert "%|" not in done.err, "a log gets no progress bar"
        assert (tmp_path / "run").exists() == (not more)
    workload = done.record["workload"]
    assert workload["model"] == "bert-base-uncased" and workload["dataset"] == "rajpurkar/squad"
    assert workload["sequence_length"] == 384


@pytest.mark.slow
def test_a_compute_node_needs_no_more_than_a_login_node_prepared(tmp_path):
    """There the cache is read-only."""
    cache = tmp_path / "cache"
    words = [sys.executable, SCRIPT, *map(str, LOCAL), "--max_train_steps", "1"]
    prepared = run([*words, "--prepare_data_only"], env={"HF_HOME": str(cache)})
    assert prepared.code == 0 and "training and" in prepared.out, prepared.err
    lock = namespaces(f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache}")
    words = [*lock, *words, "--output_dir", str(tmp_path / "run")]
    trained = run(words, tmp_path / "run", env={"HF_HOME": str(cache)})
    assert trained.code == 0 and trained.record["metrics"], trained.err
