"""The parts of train_bert_squad.py, in this process: questions, features, batches, spans, scores; and bad input."""

import ast
import copy
import difflib
import json
import random
import shlex
import shutil
import sys
from argparse import Namespace

import hub
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, launch, run

import train_bert_squad as script

SCRIPT = "train_bert_squad.py"
DATA = ROOT / "tests" / "data"
V1, V2, MODEL = DATA / "squad_v1.json", DATA / "squad_v2.json", DATA / "tiny_bert"


def options(**changes):
    values = {"train_file": V1, "validation_file": V1, "version_2_with_negative": False, "max_train_samples": 0,
              "max_eval_samples": 0, "max_seq_length": 96, "doc_stride": 24, "model_name_or_path": MODEL}
    return Namespace(**values | changes)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


def spans(features):
    """For each feature its question, the text of its labelled span or None, and its window's first and last character.
    """
    begins, stops = features.table["begins"], features.table["stops"]
    for owner, length, first, start, end, begin, stop in zip(
            features.owner.tolist(), features.lengths.tolist(), features.first.tolist(), features.start.tolist(),
            features.end.tolist(), begins, stops, strict=True):  # fmt: skip
        question, last = features.questions[owner], length - 2
        text = question["context"][begin[start] : stop[end]] if start else None
        assert (start == 0) == (end == 0) and (not start or first <= start <= end <= last)
        yield question, text, begin[first], stop[last]


# --------------------------------------------------------------------------------------------------------- questions


def test_questions_are_read_as_they_are():
    questions = script.read_questions(options(), "train")
    assert len(questions) == 132 and len({question["id"] for question in questions}) == 132
    for question in questions:
        [text], [start] = question["answers"]["text"], question["answers"]["answer_start"]
        assert question["context"][start:].startswith(text)
    assert script.read_questions(options(max_train_samples=7), "train") == questions[:7]
    assert script.read_questions(options(max_eval_samples=7), "train") == questions
    both = script.read_questions(options(train_file=V2, version_2_with_negative=True), "train")
    assert sum(not question["answers"]["text"] for question in both) == 24 and len(both) == 84


def nested(context="Rosa built a mill.", question="Who built it?", text="Rosa", start=0, **more):
    return {"data": [{"title": "Mills", "paragraphs": [{"context": context, "qas": [
        {"id": "q1", "question": question, "answers": [{"text": text, "answer_start": start}]} | more]}]}]}


def without(*path):
    data = nested()
    place = data
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return data


QA = ("data", 0, "paragraphs", 0, "qas", 0)
FORM = "is not in SQuAD's form, at "
BAD_FILES = [
    (nested(start=5), "question q1 has the answer 'Rosa', which is not at character 5 of"),
    (nested(start=-4), "question q1 has the answer 'Rosa', which is not at character -4"),
    (nested(text=""), "question q1 has the answer ''"),
    (nested(answers=[]), "question q1 has no answer: add --version_2_with_negative"),
    (nested(is_impossible=True), "question q1 has no answer: add --version_2_with_negative"),
    (without(*QA, "answers"), FORM + "question q1: KeyError('answers')"),
    (without(*QA, "question"), FORM + "question q1: KeyError('question')"),
    (without(*QA, "answers", 0, "answer_start"), FORM + "question q1: KeyError('answer_start')"),
    (without(*QA, "id"), FORM + "question None: KeyError('id')"),
    (without("data"), FORM + "its top: KeyError('data')"),
    (nested(start="x"), FORM + "question q1: ValueError("),
    ({"data": nested()["data"] * 2}, "question q1 is there twice"),
    ({"data": []}, "has no questions"),
    ([1, 2], FORM + "its top: TypeError("),
    ("[" * 100_000, FORM + "its top: RecursionError("),
    ('{"data": [', FORM + "its top: JSONDecodeError('Expecting value: line 1 column 11"),
    (b"\xff\xfe\x00", FORM + "its top: UnicodeDecodeError('utf-8'"),
]


@pytest.mark.parametrize("content, sentence", BAD_FILES, ids=[sentence[-30:] for _, sentence in BAD_FILES])
def test_malformed_files_are_named_with_question_and_fault(content, sentence, tmp_path):
    file = tmp_path / "questions.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SystemExit) as fault:
        script.read_questions(options(train_file=file), "train")
    line = str(fault.value)
    assert line.startswith(f"error: {file}") and sentence in line and "\n" not in line


def test_a_file_that_is_not_there():
    with pytest.raises(SystemExit, match="error: cannot read /nowhere.json: No such file"):
        script.read_questions(options(train_file="/nowhere.json"), "train")


# ---------------------------------------------------------------------------------------------------------- features


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of tokenised questions, empty."""
    monkeypatch.setattr(script.datasets.config, "HF_DATASETS_CACHE", tmp_path)
    return tmp_path / "squad_features"


@pytest.fixture
def features(cache, tokenizer):
    return script.load_features(script.read_questions(options(), "train"), tokenizer, options())


def test_every_labelled_span_decodes_to_the_answer(features):
    answered, elsewhere = set(), 0
    for question, text, begin, stop in spans(features):
        [answer], [start] = question["answers"]["text"], question["answers"]["answer_start"]
        inside = begin <= start and start + len(answer) <= stop
        assert text == (answer if inside else None), question["id"]
        answered |= {question["id"]} if inside else set()
        elsewhere += not inside
    assert len(answered) == 132 and elsewhere > 100, "each question has its answer in a window; many windows have none"


def test_spans_where_characters_and_tokens_do_not_match():
    """A tokenizer makes several tokens of some characters (Hangul), and none of others (a zero-width space)."""
    offsets = np.array([[0, 0], [0, 3], [0, 0], [0, 1], [0, 1], [0, 1], [1, 3], [3, 4], [5, 8], [0, 0]])
    for text, start, span in (
            ("x", 0, (3, 5)), ("xyz", 0, (3, 6)), (" xyz ", -1, (3, 6)),
            ("_abc", 4, (8, 8)),  # character 4 has no token
            ("y", 1, (6, 6)),  # inside of a token
            ("abcd", 5, (0, 0)), ("", 0, (0, 0))):
        answers = {"text": [text] * bool(text), "answer_start": [start] * bool(text)}
        assert script.find_span(offsets, 3, answers) == span, text


def test_windows_cover_the_context_and_overlap(features, tokenizer):
    assert features.lengths.max() == 96
    for owner, question in enumerate(features.questions):
        rows = (features.owner == owner).nonzero().flatten().tolist()
        tokens = tokenizer(question["context"], add_special_tokens=False)["input_ids"]
        together = []
        for row in rows:
            first, ids = features.first[row].item(), features.input_ids[row].tolist()
            window = ids[first:-1]
            assert not together or together[-24:] == window[:24]
            together += window[24:] if together else window
            head = tokenizer.decode(ids[:first])
            assert head.startswith("[CLS]") and head.endswith("[SEP]")
        assert together == tokens


def test_batches_are_cut_and_masked(features, tokenizer):
    ids = [0, 150, 3]
    inputs, spans = features.__getitems__(ids)
    lengths = features.lengths[ids]
    mask, width = inputs["attention_mask"], lengths.max().item()
    assert mask.shape == (3, 1, 1, width) and mask.dtype == torch.bool
    assert inputs["input_ids"].shape == inputs["token_type_ids"].shape == (3, width)
    assert mask.sum((1, 2, 3)).tolist() == lengths.tolist()
    assert spans["ids"].tolist() == ids and spans["last"].tolist() == (lengths - 2).tolist()
    for row, feature in enumerate(ids):
        question = features.questions[features.owner[feature]]
        whole = tokenizer(question["question"], question["context"], truncation="only_second", max_length=96)
        if feature in (0, 3):  # the first windows of their questions
            length = features.lengths[feature]
            assert inputs["token_type_ids"][row, :length].tolist() == whole["token_type_ids"]
            assert inputs["input_ids"][row, :length].tolist() == whole["input_ids"]
        assert not inputs["token_type_ids"][row][~mask[row, 0, 0]].any()


@pytest.mark.parametrize("ranks, accumulation", [(1, 1), (2, 1), (2, 3)])
def test_tokens_are_those_of_the_batches(features, ranks, accumulation):
    """What the record says is what every rank reads, batch by batch, also after a resume."""
    size, first, steps = 4 * ranks * accumulation, 3, 2 * (len(features) // (4 * ranks * accumulation)) - 1
    run = Namespace(global_batch_size=size, batch_size=4 * ranks, epochs=2, step=steps,
                    accelerator=Namespace(num_processes=ranks), args=Namespace(seed=5),
                    seconds={"train": 2.0})  # fmt: skip
    sampler, masks = script.EpochSampler(features.lengths, size, 5), []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        ids = list(sampler)
        masks += [features.__getitems__(ids[i : i + 4])[0]["attention_mask"] for i in range(0, len(ids), 4)]
    parts = ranks * accumulation
    tokens = [mask.sum().item() for mask in masks[: steps * parts]]
    places = sum(mask.numel() for mask in masks[: steps * parts])
    assert script.describe_tokens(features, run, first) == {
        "tokens": sum(tokens), "padding_share": round(1 - sum(tokens) / places, 4),
        "tokens_per_second": sum(tokens[first * parts :]) / 2}  # fmt: skip


def test_features_are_cached_by_what_they_depend_on(cache, tokenizer, tmp_path, monkeypatch):
    questions, original, made = script.read_questions(options(), "train"), script.find_span, []
    monkeypatch.setattr(script, "find_span", lambda *args: made.append(1) or original(*args))

    def load(*changed, questions=questions, tokenizer=tokenizer):
        """The key, the features, and whether they were made now."""
        made.clear()
        features = script.load_features(questions, tokenizer, *changed or [options()])
        return features.key, features, bool(made)

    key, first, new = load()
    assert new
    for again in (load(), load(tokenizer=transformers.AutoTokenizer.from_pretrained(MODEL))):
        assert again[0] == key and not again[2]
        for name in ("input_ids", "lengths", "first", "start", "end", "owner"):
            mine, theirs = getattr(first, name), getattr(again[1], name)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), name
    others = [load(options(max_seq_length=80)), load(options(doc_stride=16)), load(questions=questions[1:])]
    assert all(new for _, _, new in others) and len({key, *(other[0] for other in others)}) == 4

    def tokenize(*args, **options):  # has another source
        return tokenize_before(*args, **options)

    tokenize_before = script.tokenize
    with monkeypatch.context() as changes:
        changes.setattr(script, "tokenize", tokenize)
        other, _, new = load()
    assert new and other != key, "a changed tokenize"

    file = tmp_path / "questions.json"
    for answer, start in (("Rosa", 0), ("mill", 13)):
        file.write_text(json.dumps(nested(text=answer, start=start)))
        changed = load(questions=script.read_questions(options(train_file=file), "train"))
        [(_, text, *_)] = spans(changed[1])
        assert changed[2] and text == answer, "a changed file"

    [file] = cache.glob(f"{key}*")
    whole = file.read_bytes()
    garbled = whole[:4] + bytes(100) + whole[104:]
    for damaged in (b"", whole[:1000], whole[: len(whole) // 2], whole[:-1000], b"x" * 1000, garbled):
        file.write_bytes(damaged)
        _, features, new = load()
        assert new, "a damaged cache is made anew"
        assert torch.equal(features.start, first.start) and file.read_bytes() == whole
    assert {path.suffix for path in cache.iterdir()} == {".arrow"}


def test_real_answers_survive_the_tokenizer(real_data, cache):
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_data / "minilm")
    args = options(train_file=real_data / "squad" / "train.json", max_seq_length=384, doc_stride=128)
    features = script.load_features(script.read_questions(args, "train"), tokenizer, args)
    exact, seen, answered = 0, 0, set()
    for question, text, begin, stop in spans(features):
        answer, start = question["answers"]["text"][0], question["answers"]["answer_start"][0]
        assert (text is not None) == (begin <= start and start + len(answer) <= stop)
        if text is not None:
            assert answer in text, question["id"]  # some annotations begin or end inside of a word
            answered.add(question["id"])
            exact, seen = exact + (text == answer), seen + 1
    assert len(features) == 12_280 and len(answered) == 11_998 and exact / seen > 0.995
    for batch, ranks in ((8, 1), (32, 1), (8, 2)):
        order = script.EpochSampler(features.lengths, batch, 0).order
        slices = features.lengths[order].view(len(order), ranks, -1)
        padding = 1 - slices.sum().item() / (slices.amax(-1).sum().item() * slices.shape[-1])
        assert padding < 0.03, f"batch {batch} on {ranks} ranks: {padding:.1%}"


# ----------------------------------------------------------------------------------------------------------- batches


def test_global_batches_have_similar_lengths_and_lose_no_sample():
    lengths = torch.tensor([random.Random(i).randint(30, 384) for i in range(2_005)])

    def epoch_order(lengths, seed, epoch, size):
        sampler = script.EpochSampler(lengths, size, seed)
        sampler.set_epoch(epoch)
        assert list(sampler) == sampler.order.flatten().tolist() and len(sampler) == sampler.order.numel()
        return sampler.order

    order = epoch_order(lengths, 0, 0, 10)
    assert order.shape == (200, 10) and len(set(order.flatten().tolist())) == 2_000  # the last 5 are dropped
    assert torch.equal(order, epoch_order(lengths, 0, 0, 10))
    assert lengths[order[0]].max() == lengths[order].max(), "the longest comes first"
    for other in (epoch_order(lengths, 0, 1, 10), epoch_order(lengths, 1, 0, 10)):
        assert {frozenset(batch) for batch in order.tolist()}.isdisjoint(frozenset(batch) for batch in other.tolist())
    spread = (lengths[order].amax(1) - lengths[order].amin(1)).float()
    assert spread.mean() < 15  # of 354
    means = lengths[order].float().mean(1)
    assert (means[1:] < means[:-1]).float().mean().item() == pytest.approx(0.5, abs=0.15), "not sorted over the epoch"
    assert epoch_order(lengths[:12], 0, 0, 12).shape == (1, 12)


# ------------------------------------------------------------------------------------------------------------- model


@pytest.fixture(scope="module")
def model():
    args = options(dropout=0.1, seed=0, from_scratch=True, activation_checkpointing=False)
    return script.load_model(args, transformers.AutoConfig.from_pretrained(MODEL)).eval()


@torch.no_grad()
def test_the_model_is_transformers_own_and_blind_to_padding(model, features):
    assert type(model) is transformers.BertForQuestionAnswering
    ids = [0, 1, 40, 3]
    batch, answers = features.__getitems__(ids)
    wide = {name: torch.nn.functional.pad(tensor, (0, 96 - tensor.shape[-1]))
            for name, tensor in batch.items()}
    narrow, logits = script.span_logits(model, batch), script.span_logits(model, wide)
    assert narrow.shape[1] < logits.shape[1] == 96
    mask = wide["attention_mask"][:, 0, 0]
    output = model(**wide | {"attention_mask": mask})  # transformers' own mask
    assert torch.equal(logits[mask], torch.stack([output.start_logits, output.end_logits], 2)[mask])
    assert (logits[~mask] == torch.finfo(torch.float32).min).all()
    targets = answers["start"], answers["end"]
    losses = script.span_losses(logits, *targets)
    torch.testing.assert_close(script.span_losses(narrow, *targets), losses)
    whole = [model(input_ids=features.input_ids[i][None],
                   token_type_ids=batch["token_type_ids"][n : n + 1, : features.lengths[i]],
                   start_positions=features.start[i][None],
                   end_positions=features.end[i][None]).loss.item()
             for n, i in enumerate(ids)]  # fmt: skip
    assert losses.tolist() == pytest.approx(whole, rel=1e-5)


def test_the_forward_pass_never_looks_at_the_mask(model, features):
    """Which would wait for a GPU. With tensors on "meta" one can compute, but not look at them."""
    inputs = {name: tensor.to("meta") for name, tensor in features.__getitems__([0, 1])[0].items()}
    without_values = copy.deepcopy(model).to("meta")
    assert script.span_logits(without_values, inputs).shape[2] == 2
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        without_values(**inputs | {"attention_mask": inputs["attention_mask"][:, 0, 0]})


# -------------------------------------------------------------------------------------------------------- evaluation


def test_best_spans_are_those_of_a_search_one_by_one():
    generator = torch.Generator().manual_seed(0)
    for width, limit in ((5, 30), (40, 3), (64, 30), (33, 1)):
        logits = torch.randn(20, width, 2, generator=generator) * 3
        first = torch.randint(0, width // 2, (20,), generator=generator)
        last = torch.randint(width // 2, width, (20,), generator=generator)
        logits[:, width - 1] += 20  # the best positions are often outside of the context
        scores, starts, ends = script.best_spans(logits, first, last, limit)
        for row in range(20):
            allowed = {(s, e): (logits[row, s, 0] + logits[row, e, 1]).item()
                       for s in range(first[row], last[row] + 1)
                       for e in range(s, min(s + limit, last[row].item() + 1))}  # fmt: skip
            assert max(allowed, key=allowed.get) == (starts[row].item(), ends[row].item())
            assert scores[row].item() == pytest.approx(max(allowed.values()))


def test_answers_come_from_the_best_window_and_from_cls():
    context = "Ada and Bo met."
    questions = [{"id": name, "context": context, "question": "?", "answers": []} for name in "abc"]
    table = {"begins": [[0, 0, 4, 8, 11]] * 4, "stops": [[0, 3, 7, 10, 14]] * 4}
    table = script.datasets.Dataset.from_dict(table)
    features = Namespace(questions=questions, owner=torch.tensor([0, 0, 1, 2]), table=table)
    rows = torch.tensor([  # loss, "no answer", best span's score, start, end
        [0.0, 9.0, 5.0, 1, 1],
        [0.0, 1.0, 6.0, 3, 4],  # a's second window: the better span, and the lower "no answer"
        [0.0, 2.0, 3.0, 1, 3],
        [0.0, 4.0, 3.0, 2, 2],
    ])  # fmt: skip
    assert script.choose_answers(rows, features, False) == {"a": "Bo met", "b": "Ada and Bo", "c": "and"}
    assert script.choose_answers(rows, features, True) == {"a": "Bo met", "b": "Ada and Bo", "c": ""}


def as_rows(predictions, references):
    """What a metric of evaluate takes, of lists of texts and of lists of lists of texts."""
    return {"predictions": [{"id": str(i), "prediction_text": text}
                            for i, text in enumerate(predictions)],
            "references": [{"id": str(i),
                            "answers": {"text": texts, "answer_start": [0] * len(texts)}}
                           for i, texts in enumerate(references)]}


def score(config, predictions, references):
    metric = script.SquadMetric(config, keep_in_memory=True)
    return metric.compute(**as_rows(predictions, references))


@pytest.mark.parametrize("prediction, references, exact, f1", [
    ("The Green Heron!", ["green heron"], 100, 100),  # case, punctuation, article
    ("an apple a day", ["apple day"], 100, 100),
    ("another apple", ["apple"], 0, 200 / 3),  # "an" only as a word of its own
    ("the cat sat", ["cat", "the cat sat down"], 0, 100 * 2 * 2 / (2 + 3)),  # the best of several answers
    ("1,300", ["1300"], 100, 100),
    ("sea - water", ["sea-water"], 0, 0),  # punctuation is deleted, not turned into a space
    ("the the dog dog", ["dog"], 0, 100 * 2 * 0.5 * 1 / 1.5),  # words count as often as they occur
    ("Zoë  Carter\n", ["zoë carter"], 100, 100),
    ("watchmakers’ guild", ["watchmakers guild"], 0, 50),  # a curly apostrophe is not among ASCII's punctuation
    ("blue", ["red"], 0, 0),
    ("", ["red"], 0, 0),
])  # fmt: skip
def test_scores_follow_the_official_rules(prediction, references, exact, f1):
    for config in ("squad", "squad_v2"):
        expected = {"exact_match": exact, "f1": f1}
        assert score(config, [prediction], [references]) == pytest.approx(expected)


@pytest.mark.parametrize("prediction, references, v1, v2", [
    ("", [], None, (100, 100)),  # v2.0: rightly no answer
    ("red", [], None, (0, 0)),
    ("", [""], (100, 0), (100, 100)),  # v1.1 gives F1 0 where no words are shared, even if there are none
    ("the", ["a"], (100, 0), (100, 100)),
    ("red", ["the", "red"], (100, 100), (100, 100)),
    ("", ["the", "red"], (100, 0), (0, 0)),  # v2.0 leaves out answers that are nothing but articles
])  # fmt: skip
def test_scores_without_words(prediction, references, v1, v2):
    for config, expected in (("squad", v1), ("squad_v2", v2)):
        if expected:
            scores = score(config, [prediction], [references])
            assert (scores["exact_match"], scores["f1"]) == expected


def test_scores_are_means_over_questions():
    scores = score("squad", ["red", "blue", "a b c"], [["red"], ["green"], ["b c d"]])
    assert scores == pytest.approx({"exact_match": 100 / 3, "f1": 100 * (1 + 0 + 4 / 5) / 3})


HUBS_METRICS = """
import evaluate, json, sys
rows = json.load(open(sys.argv[1]))
given = [row | {"no_answer_probability": 0.0} for row in rows["predictions"]]
scores = [evaluate.load("squad").compute(**rows),
          evaluate.load("squad_v2").compute(**rows | {"predictions": given})]
print(json.dumps(scores))
"""


@pytest.mark.slow
def test_scores_are_those_of_the_hubs_metrics(tmp_path):
    """Of evaluate's own "squad" and "squad_v2", where a network can load them."""
    words, choose = ["the", "a", "red", "Red.", "blue,", "mill", "Zoë", "1,300"], random.Random(0)

    def texts(least, most):
        return [" ".join(choose.choices(words, k=choose.randint(least, 4)))
                for _ in range(choose.randint(1, most))]

    rows = as_rows([texts(0, 1)[0] for _ in range(300)], [texts(1, 3) for _ in range(300)])
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-c", HUBS_METRICS, str(tmp_path / "rows.json")]
    done = run(command, env={"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)})
    if done.code:
        pytest.skip(f"evaluate cannot load its metrics here: {done.err.strip().splitlines()[-1]}")
    v1, v2 = json.loads(done.out.splitlines()[-1])
    for config, exact, theirs in (("squad", "exact_match", v1), ("squad_v2", "exact", v2)):
        ours = script.SquadMetric(config, keep_in_memory=True).compute(**rows)
        expected = {"exact_match": theirs[exact], "f1": theirs["f1"]}
        assert ours == pytest.approx(expected) and 0 < ours["exact_match"] < ours["f1"] < 100


# ---------------------------------------------------------------------------------------- bad input, one clear line


def refused(monkeypatch, tmp_path, *flags):
    """The error line of the script with these flags, in this process; it must leave no file behind."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        script.main()
    assert str(exit.value).startswith("error: ") and "\n" not in str(exit.value)
    assert not list(folder.iterdir()), "a refused run leaves nothing behind"
    return str(exit.value)


FILES = ["--train_file", V1, "--validation_file", V1]


@pytest.mark.parametrize("flags, sentence", [
    ("--num_epochs 0", "--num_epochs must be greater than 0"),
    ("--max_train_samples -1", "--max_train_samples must be greater than 0"),
    ("--max_seq_length 0", "--max_seq_length must be greater than 0"),
    ("--dropout 1", "--dropout must be less than 1"),
    ("--learning_rate nan", "--learning_rate must be greater than 0"),
    ("--models bert", "unrecognized arguments: --models"),
    ("--train_file x.json", "--train_file and --validation_file go together"),
])  # fmt: skip
def test_bad_flags(flags, sentence, monkeypatch, tmp_path):
    assert sentence in refused(monkeypatch, tmp_path, *shlex.split(flags))


@pytest.mark.parametrize("flags, sentence", [
    ("--max_seq_length 513 --doc_stride 128", "--max_seq_length 513 is more than the 512 positions of"),
    ("--max_seq_length 64 --doc_stride 60", "tokens for its context, which must be more than --doc_stride 60"),
    ("--max_seq_length 10 --doc_stride 0", "leaves 0 of --max_seq_length 10 tokens"),
    ("--per_device_train_batch_size 500", "the global batch of 500"),
])  # fmt: skip
def test_sizes_that_do_not_fit(flags, sentence, monkeypatch, tmp_path):
    flags = ["--model_name_or_path", MODEL, "--from_scratch", *FILES, *flags.split()]
    assert sentence in refused(monkeypatch, tmp_path, *flags)


def model_folder(tmp_path, without=(), **config):
    """A copy of the tiny model, with weights, lacking some files and with changes to its config."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, copy_function=shutil.copyfile)
    model = transformers.BertForQuestionAnswering(transformers.AutoConfig.from_pretrained(MODEL))
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    for name in without:
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("without, config, sentence", [
    (["model.safetensors"], {}, "cannot load the model {}: Error no file named"),
    (["config.json"], {}, "cannot load {}: "),
    ([], {"model_type": "roberta"}, "{} is a roberta model with a "),
    (["vocab.txt"], {}, "{} is a bert model with a BertTokenizer of 5 tokens"),
    ([], {"vocab_size": 100}, "{} is a bert model with a BertTokenizer of 341 tokens"),
    ([], {"hidden_size": 64}, "cannot load the model {}"),
    ([], {"num_hidden_layers": 3},
     "the weights of {} lack 16 parameters, such as bert.encoder.layer.2."),
])  # fmt: skip
def test_model_folders_that_are_not_whole(without, config, sentence, monkeypatch, tmp_path):
    folder = model_folder(tmp_path, without, **config)
    assert sentence.format(folder) in refused(monkeypatch, tmp_path, "--model_name_or_path", folder, *FILES)


def test_a_model_folder_that_is_not_there(monkeypatch, tmp_path):
    line = refused(monkeypatch, tmp_path, "--model_name_or_path", "a/b/c", *FILES)
    assert "error: cannot load a/b/c: " in line


def test_a_tokenizer_that_is_not_fast(monkeypatch, tmp_path):
    folder = model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    line = refused(monkeypatch, tmp_path, "--model_name_or_path", folder, *FILES)
    assert f"{folder} is a bert model with a ByT5Tokenizer" in line


def test_no_model_no_network(monkeypatch, tmp_path):
    assert "cannot load google-bert/bert-base-uncased: " in refused(monkeypatch, tmp_path)
    assert "--prepare_data_only" in refused(monkeypatch, tmp_path / "cwd", "--model_name_or_path", "nobody/nothing")


def test_no_data_no_network(monkeypatch, tmp_path):
    line = refused(monkeypatch, tmp_path, "--model_name_or_path", MODEL, "--from_scratch")
    assert "cannot load rajpurkar/squad: " in line and "--prepare_data_only" in line


def test_one_line_from_two_processes_and_the_checkpoints_stay(tmp_path):
    """Also where only one rank reads first: no process hangs, and a folder that holds a run is left as it was."""
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(nested(start=3)))
    flags = ["--model_name_or_path", MODEL, "--from_scratch", "--train_file", bad, "--validation_file", V1]
    result = launch("zero3", SCRIPT, tmp_path / "run", *flags, ok=False)
    assert f"{bad}: question q1 has the answer 'Rosa', which is not at" in result.error_line()
    assert not (tmp_path / "run").exists()
    unwritable = launch("ddp", SCRIPT, tmp_path / "run", *flags[:3], *FILES, ok=False, env={"HF_HOME": str(bad)})
    assert "; set HF_HOME" in unwritable.error_line()


def test_v2_data_without_the_flag(monkeypatch, tmp_path):
    flags = ["--model_name_or_path", MODEL, "--from_scratch", "--train_file", V2, "--validation_file", V2]
    assert "add --version_2_with_negative if this is SQuAD v2.0" in refused(monkeypatch, tmp_path, *flags)


def test_prepared_on_one_node_then_trained_without_the_files_work(tmp_path):
    """--prepare_data_only fills the cache; the run after it tokenises nothing."""
    env = {"HF_HOME": str(tmp_path / "cache")}
    flags = ["--model_name_or_path", str(MODEL), "--from_scratch", *map(str, FILES)]
    prepared = run([sys.executable, SCRIPT, *flags, "--prepare_data_only"], env=env)
    assert prepared.code == 0 and "132 training questions and" in prepared.out, prepared.err
    cached = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    assert len(cached) == 1, "training and validation questions are the same here"
    launch("ddp", SCRIPT, tmp_path / "run", *flags, "--max_train_steps", 1, env=env)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")} == cached


SQUAD_CARD = """---
configs:
- config_name: plain_text
  data_files:
  - {split: train, path: plain_text/train-*}
  - {split: validation, path: plain_text/validation-*}
---
"""


@pytest.mark.slow
def test_the_default_model_and_data_come_from_the_hub_once(tmp_path):
    """A Hub on this machine gives a login node google-bert/bert-base-uncased and rajpurkar/squad (tiny ones); then the
    main command, as README has it, trains without any network.
    """
    root, squad = tmp_path / "hub", tmp_path / "hub" / "datasets" / "rajpurkar" / "squad"
    (root / "google-bert").mkdir(parents=True)
    model_folder(tmp_path).rename(root / "google-bert" / "bert-base-uncased")
    rows = [row | {"title": ""} for row in script.read_squad(V1)]
    for split in ("train", "validation"):
        (squad / "plain_text").mkdir(parents=True, exist_ok=True)
        script.datasets.Dataset.from_list(rows).to_parquet(squad / "plain_text" / f"{split}-00000-of-00001.parquet")
    (squad / "README.md").write_text(SQUAD_CARD)
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    with hub.serve(root) as address:
        prepared = run([sys.executable, SCRIPT, "--prepare_data_only"], env=env | {"HF_ENDPOINT": address})
    assert prepared.code == 0 and "132 training questions and" in prepared.out, prepared.err
    command = ["--max_train_steps", 2, "--dropout", 0]  # besides what README says
    fsdp, zero3 = (launch(strategy, SCRIPT, tmp_path / strategy, *command, env=env | {"HF_HUB_OFFLINE": "1"})
                   for strategy in ("fsdp", "zero3"))  # fmt: skip
    workload = fsdp.record["workload"]
    assert workload["model"] == "bert-base-uncased" and workload["dataset"] == "rajpurkar/squad"
    assert workload["questions"] == 132 and workload["sequence_length"] == 384 and fsdp.record["steps"] == 2
    assert zero3.losses == pytest.approx(fsdp.losses, rel=1e-5) and zero3.record["workload"] == workload
    # transformers shards pretrained weights under ZeRO-3 while it loads them.
    assert zero3.record["parameters"] == fsdp.record["parameters"] == sum(map(torch.numel, zero3.weights.values()))


def test_help_names_every_flag_with_a_sentence():
    text = run([sys.executable, SCRIPT, "--help"]).out.split("options:")[1]
    for flag in """output_dir seed num_epochs per_device_train_batch_size per_device_eval_batch_size learning_rate
            gradient_accumulation_steps dropout max_train_steps checkpointing_steps resume with_tracking
            prepare_data_only model_name_or_path train_file validation_file max_train_samples max_eval_samples
            max_seq_length doc_stride version_2_with_negative max_answer_length from_scratch
            activation_checkpointing max_grad_norm profile collective_timeout""".split():
        assert f"  --{flag}" in text, flag
    assert "google-bert/bert-base-uncased" in "".join(text.split())  # without the line breaks


# ------------------------------------------------------------------------------------------------- two scripts, one


SCRIPTS = ["train_mnist_rnn.py", "train_bert_squad.py"]


def test_both_scripts_share_their_machinery_word_for_word():
    """Each script stands alone; what both need is the same text, below `main` to the end."""
    tails, names, constants = [], [], []
    for name in SCRIPTS:
        head, _, tail = (ROOT / name).read_text().partition(
            "launching, the record, checkpoints: the same in both scripts\n")
        tails.append(tail)
        lines = head.splitlines()
        names.append({line.split("(")[0] for line in lines if line.startswith(("def ", "class "))})
        constants.append({line for line in lines if line[:1].isupper() and " = " in line})
    assert tails[0] == tails[1] and tails[0].count("\ndef ") + tails[0].count("\n    def ") > 15
    assert constants[0] < constants[1] and len(constants[0]) >= 5
    assert names[0] & names[1] == {"def parse_args", "def train", "def make_loaders",
                                   "def save_model", "def main"}  # not the same work


def test_a_reader_needs_no_wide_screen_and_no_scrolling():
    """How long the scripts, their lines and functions may be, and how much may stand in both."""
    texts = {name: (ROOT / name).read_text() for name in SCRIPTS}
    bounds = (650, 34_000), (1040, 56_000)
    for (name, text), (most, size) in zip(texts.items(), bounds, strict=True):
        lines = text.splitlines()
        assert len(lines) <= most and len(text.encode()) <= size, name
        assert max(map(len, lines)) <= 100 and len(text) / len(lines) <= 53, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name != "parse_args":
                assert node.end_lineno - node.lineno < 45, node.name
    first, second = ([line for line in text.splitlines() if line.strip()]
                     for text in texts.values())
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    assert sum(block.size for block in blocks if block.size > 5) <= 400
