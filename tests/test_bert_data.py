"""The parts of train_bert_squad.py, in this process: questions, features, batches, spans, scores;
bad input; and what both scripts share.
"""

import copy
import json
import os
import random
import re
import shutil
import sys
from argparse import Namespace

import pytest
import torch
import transformers
from conftest import ROOT, launch, namespaces, run
from tokenizers import processors

import train_bert_squad as script

SCRIPT = "train_bert_squad.py"
DATA = ROOT / "tests" / "data"
V1, V2, MODEL = DATA / "squad_v1.json", DATA / "squad_v2.json", DATA / "tiny_bert"


def options(**changes):
    paths = {"train_file": V1, "validation_file": V1, "model_name_or_path": MODEL}
    values = {"version_2_with_negative": False, "max_train_samples": 0, "max_eval_samples": 0}
    values |= {"max_seq_length": 96, "doc_stride": 24, "num_epochs": 4} | paths
    return Namespace(**values | changes)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


# -------- questions


def nested(text="Rosa", start=0, drop=None, context="Rosa built a mill.", **more):
    """A file of one question, without the key `drop`."""
    answer = {"text": text, "answer_start": start}
    qa = {"id": "q1", "question": "Who built it?", "answers": [answer]} | more
    file = {"data": [{"paragraphs": [{"context": context, "qas": [qa]}]}]}
    for place in (answer, qa, file):
        place.pop(drop, None)
    return file


@pytest.mark.parametrize(
    "content, sentence",
    [
        (
            nested(start=5),
            "1 training questions, such as q1, have a first answer that is blank, or",
        ),
        (nested(start=-1), "1 training questions, such as q1, have a first answer that is blank"),
        (nested(text=" "), "1 training questions, such as q1, have a first answer that is blank"),
        (nested(is_impossible=True), "1 training questions have no answer, such as q1: if this is"),
        (
            {"data": nested(start=1)["data"] * 3},
            "3 training questions, such as q1, have a first ans",
        ),
    ],
)
def test_first_answers_from_which_bert_would_learn_something_else_are_one_line(
    content, sentence, tokenizer, tmp_path
):
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(content))
    args = options(train_file=file)
    config = transformers.AutoConfig.from_pretrained(MODEL)
    splits = [script.read_questions(args, split) for split in ("train", "validation")]
    with pytest.raises(SystemExit, match=f"^error: {sentence}"):
        script.check_inputs(args, config, tokenizer, *splits)


@pytest.mark.parametrize("text, true", [("false", 0), (None, 0), ("0", 0), ("True", 1), (1, 1)])
def test_impossible_is_understood_as_people_write_it(text, true, tmp_path):
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(nested(is_impossible=text)))
    [question] = script.read_squad(file)
    assert question["answers"]["text"] == ([] if true else ["Rosa"])


# -------- features


HINDI = "\u0939\u093f\u0928\u094d\u0926\u0940"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of tokenised questions, empty."""
    monkeypatch.setattr(script.datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "squad_features"


@pytest.fixture
def features(cache, tokenizer):
    return script.Features(script.read_questions(options(), "train"), tokenizer, options())


@pytest.mark.canary
@pytest.mark.parametrize(
    "context, text, answer",
    [
        ("  The  mill's wheel", "The", "The"),
        ("  The  mill's wheel", " The  mill", "The  mill"),  # Spaces are in no token.
        ("  The  mill's wheel", "wheel", "wheel"),
        ("They said hello \u200b", "hello \u200b", "hello"),  # a space without width
        ("\ufeffhello they said", "\ufeffhello", "hello"),  # a mark of byte order
        ("They \ufffd hello \ufffd said", "\ufffd hello \ufffd", "hello"),
        ("A mill near Pen\u0303alte\u0301", "Pen\u0303alte\u0301", "Pen\u0303alte\u0301"),  # NFD
        ("\u0301abc", "\u0301abc", "abc"),
        ("kha\u0301 ma", "kha\u0301", "kha\u0301"),
        (f"{HINDI} \u0939", HINDI, HINDI),
        ("and a wheel\u0301\u0302", "wheel\u0301\u0302", "wheel\u0301\u0302"),
        ("mill. x", "mill", "mill"),
        ("The mill", None, None),
    ],
)
def test_a_perfect_reader_finds_what_characters_and_tokens_do_not_share(
    context, text, answer, cache, tokenizer
):
    """The tiny tokenizer knows letters and pieces of words. It has no token for marks, as in
    Vietnamese and Hindi: an answer takes along those after its last letter.
    """
    answers = {"text": [text], "answer_start": [context.index(text)]} if text else {"text": []}
    question = {"id": "q1", "question": "Why?", "context": context}
    question |= {"answers": {"answer_start": []} | answers}
    features = script.Features([question], tokenizer, options())
    [row] = features.table
    start, end = row["start"], row["end"]
    assert (start, end) == (0, 0) if answer is None else row["first"] <= start <= end
    found = torch.tensor([[0, 0, 0, 0, start, end]])
    assert answer is None or script.choose_answers(found, features, 0) == {"q1": answer}


def test_later_answers_are_texts_for_the_scores_alone(tmp_path, tokenizer):
    """Published files misplace some (CMRC 2018), or leave them blank (SQuAD-es, SQuAD-it)."""
    file = nested()
    answers = file["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    answers += [{"text": "a mill", "answer_start": 0}, {"text": "mill"}, {"text": " "}]
    path = tmp_path / "file.json"
    path.write_text(json.dumps(file))
    [question] = script.read_questions(options(validation_file=path), "validation")
    config = transformers.AutoConfig.from_pretrained(MODEL)
    script.check_inputs(options(), config, tokenizer, [], [question])
    assert question["answers"]["text"] == ["Rosa", "a mill", "mill", " "]


@pytest.mark.canary
@torch.no_grad()
def test_the_loss_is_the_one_that_transformers_computes(features):
    """Of each feature alone, without a mask. In a batch with padding, the loss stays the same."""
    model = transformers.BertForQuestionAnswering(transformers.BertConfig.from_pretrained(MODEL))
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
    questions, original, made = script.read_questions(options(), "train"), script.find_span, []
    monkeypatch.setattr(script, "find_span", lambda *args: made.append(1) or original(*args))

    def load(args=None, questions=questions, tokenizer=tokenizer):
        """The features, and whether they were made now."""
        made.clear()
        return script.Features(questions, tokenizer, args or options()), bool(made)

    first, new = load()
    assert new and tokenizer.backend_tokenizer.truncation is None, "it is saved with the model"
    again, new = load(tokenizer=transformers.AutoTokenizer.from_pretrained(MODEL))
    assert again.checksum == first.checksum and not new
    assert again.table["input_ids"][:] == first.table["input_ids"][:]
    others = [load(options(max_seq_length=80)), load(options(doc_stride=16))]
    others.append(load(questions=questions[1:]))
    assert all(new for _, new in others)
    assert len({first.checksum, *(other.checksum for other, _ in others)}) == 4
    shutil.rmtree(cache)  # Another Python would name the file otherwise.
    again, new = load()
    assert new and again.checksum == first.checksum


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
    orders = [epoch_order(*which) for which in ((0, 0), (0, 1), (7, 0))]
    batches = [{frozenset(batch) for batch in order.tolist()} for order in orders]
    assert len(set.union(*batches)) == 600, "another seed or epoch has other batches"
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
        ("blue", ["red"], (0, 0), (0, 0)),
        ("", [], None, (100, 100)),  # v2.0: rightly no answer
        ("red", [], None, (0, 0)),
        ("", [""], (100, 0), (100, 100)),  # v1.1 gives F1 0 also where there are no words
        ("the", ["a"], (100, 0), (100, 100)),
        ("red", ["the", "red"], (100, 100), (100, 100)),
        ("", ["the", "red"], (100, 0), (0, 0)),  # v2.0 leaves out answers of nothing but articles
    ],
)
def test_scores_follow_the_official_rules(prediction, references, v1, v2):
    """By v1.1, and by v2.0. Another question has a wrong answer: scores are means."""
    for version_2, expected in ((False, v1), (True, v2)):
        if expected:
            metric, answers = script.SquadMetric(version_2), [["red"], references]
            scores = metric.compute(predictions=["blue", prediction], references=answers)
            assert 2 * scores["exact_match"] == expected[0]
            assert 2 * scores["f1"] == pytest.approx(expected[1])


# -------- bad input, one clear line


FILES = "--train_file V1 --validation_file V1 "
LOCAL = "--model_name_or_path MODEL --from_scratch "
PLACES = {"V1": V1, "V2": V2, "MODEL": MODEL}


def refused(monkeypatch, tmp_path, *flags):
    """The error line of the script with these flags, in this process; it must leave no file."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = [str(PLACES.get(word, word)) for word in flags]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *words])
    monkeypatch.setattr(os, "_exit", pytest.fail)  # how a run ends that was not refused
    with pytest.raises(SystemExit) as exit:
        script.cli()
    assert str(exit.value).startswith("error: ") and "\n" not in str(exit.value)
    assert not list(folder.iterdir()), "a refused run leaves nothing behind"
    return str(exit.value)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--num_epochs -1", "--num_epochs: -1 is not a whole number between 0"),
        ("--train_file x.json", "--train_file and --validation_file go together"),
        ("--train_file x.json --num_epochs 0", "--train_file and --validation_file go together"),
        (LOCAL + "--train_file V2 --validation_file V2", "add --version_2_with_negative"),
        (LOCAL + FILES + "--max_seq_length 513", "--max_seq_length exceeds the 512 positions of"),
        (
            LOCAL + FILES + "--per_device_train_batch_size 500",
            r"the global batch \(500\) is larger",
        ),
    ],
)
def test_bad_flags(flags, sentence, monkeypatch, tmp_path):
    assert re.search(sentence, refused(monkeypatch, tmp_path, *flags.split()))


def model_folder(tmp_path, **config):
    """A copy of the tiny model, with weights, and with another config."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, copy_function=shutil.copyfile)
    model = transformers.BertForQuestionAnswering(transformers.AutoConfig.from_pretrained(MODEL))
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("config", [{"model_type": "roberta"}, {"model_type": "canine"}])
def test_a_model_that_is_not_bert_is_one_line(config, monkeypatch, tmp_path):
    """Also one whose config has no vocab_size."""
    folder = model_folder(tmp_path, **config)
    line = refused(monkeypatch, tmp_path, "--model_name_or_path", folder, *FILES.split())
    assert line == f"error: {folder} is not a BERT model with a fast tokenizer"


FORMS = {
    "nothing": None,
    "of one text only": {"single": "[CLS] $A [SEP]"},
    "without [CLS]": {"single": "$A [SEP]", "pair": "$A [SEP] $B [SEP]"},
    "without [SEP]": {"single": "[CLS] $A", "pair": "[CLS] $A $B"},
    "right": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tokenizer_without_berts_special_tokens_is_one_line(form, tokenizer):
    """What PreTrainedTokenizerFast(tokenizer_object=...) saves has none."""
    own = copy.deepcopy(tokenizer.backend_tokenizer)
    own.post_processor = processors.Sequence([])
    if FORMS[form]:
        special = [("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)]
        used = [pair for pair in special if pair[0] in str(FORMS[form])]
        own.post_processor = processors.TemplateProcessing(**FORMS[form], special_tokens=used)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)
    config = transformers.AutoConfig.from_pretrained(MODEL)
    if form == "right":
        script.check_inputs(options(), config, made, [], [])
        return
    with pytest.raises(SystemExit, match="does not write .CLS. question .SEP. context .SEP."):
        script.check_inputs(options(), config, made, [], [])


def test_one_line_from_two_processes(tmp_path):
    """Also where one rank reads first: no process hangs, and no folder is made."""
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(nested(start=3)))
    flags = ["--model_name_or_path", MODEL, "--from_scratch"]
    flags += ["--train_file", bad, "--validation_file", V1]
    result = launch("zero3", SCRIPT, tmp_path / "run", *flags, ok=False)
    assert "1 training questions, such as q1, have a first answer" in result.error_line()
    assert not (tmp_path / "run").exists()


def test_outputs_that_a_config_asks_for_besides_change_nothing(tmp_path):
    """Some published models ask for their hidden states and attentions."""
    folder = model_folder(tmp_path, output_hidden_states=True, output_attentions=True)
    words = ["--model_name_or_path", folder, "--train_file", V1, "--validation_file", V1]
    run = launch("baseline", SCRIPT, tmp_path / "run", *words, "--max_train_steps", 1)
    assert run.record["metrics"]["eval_loss"] > 0


def test_no_code_of_a_model_folder_is_run_and_nobody_is_asked(monkeypatch, tmp_path):
    folder = model_folder(tmp_path, auto_map={"AutoConfig": "own.Config"}, model_type="own")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'sign')!r}, 'w')")
    words = ["--model_name_or_path", folder, "--train_file", V1, "--validation_file", V1]
    done = launch("baseline", SCRIPT, tmp_path / "run", *words, ok=False)
    assert done.code and "[y/N]" not in done.out + done.err and not (tmp_path / "sign").exists()


@pytest.mark.slow
def test_what_a_login_node_prepares_is_not_made_again(tmp_path):
    """The default model and data lie in the folder where the script runs, as they would in the
    Hub's cache. README's command then trains without tokenising again.
    """
    squad = tmp_path / "rajpurkar" / "squad"
    squad.mkdir(parents=True)
    (tmp_path / "google-bert").mkdir()
    model_folder(tmp_path).rename(tmp_path / "google-bert" / "bert-base-uncased")
    rows = script.datasets.Dataset.from_list([row | {"title": ""} for row in script.read_squad(V1)])
    for split in ("train", "validation"):
        rows.to_parquet(squad / f"{split}-00000-of-00001.parquet")
    env = {"HF_HOME": str(tmp_path / "cache")}
    words = ["env", "-C", tmp_path, sys.executable]
    prepared = run([*words, ROOT / SCRIPT, "--prepare_data_only"], env=env)
    assert prepared.code == 0 and " training and " in prepared.out, prepared.err
    assert "%|" not in prepared.err, "a log gets no progress bar"
    cached = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*_features/*")}
    words += ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    words += [ROOT / "accelerate_configs" / "fsdp.yaml", ROOT / SCRIPT, "--output_dir", "run"]
    trained = run([*words, "--max_train_steps", "2"], tmp_path / "run", env=env)
    assert trained.code == 0, trained.err
    workload = trained.record["workload"]
    assert workload["model"] == "bert-base-uncased" and workload["dataset"] == "rajpurkar/squad"
    assert workload["sequence_length"] == 384
    assert cached == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*_features/*")}


@pytest.mark.slow
def test_cached_features_are_enough_where_the_cache_is_read_only(tmp_path):
    """A run trains and evaluates with what --prepare_data_only has left."""
    cache = tmp_path / "cache"
    words = [sys.executable, SCRIPT, "--model_name_or_path", MODEL, "--from_scratch"]
    words += ["--train_file", V1, "--validation_file", V1, "--max_train_steps", 1]
    words = [str(word) for word in words]
    prepared = run([*words, "--prepare_data_only"], env={"HF_HOME": str(cache)})
    assert prepared.code == 0, prepared.err
    lock = namespaces(f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache}")
    words = [*lock, *words, "--output_dir", str(tmp_path / "run")]
    trained = run(words, tmp_path / "run", env={"HF_HOME": str(cache)})
    assert trained.code == 0 and trained.record["metrics"], trained.err
