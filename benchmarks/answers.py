"""Answers from logits: by the script's tensor operations, and by the usual n-best loops."""

import argparse
import tempfile
import time

import numpy as np
import side_by_side  # It makes the scripts importable, too.
import torch
import transformers

import train_bert_squad as script


def logits_of(model_folder, features):
    """The logits of a saved model, float32 [features, longest, 2]; lowest on padding."""
    model = transformers.BertForQuestionAnswering.from_pretrained(model_folder).eval()
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((len(features), features.lengths.max(), 2), lowest)
    with torch.no_grad():
        for ids in features.lengths.argsort().split(32):
            inputs, _ = features.__getitems__(ids.tolist())
            logits[ids, : inputs["input_ids"].shape[1]] = script.span_logits(model, inputs)
    return logits


def answers_at_once(logits, features):
    """{question id: text} and the questions' scores by the script's tensor operations, 32 features
    at a time.
    """
    parts = []
    for start in range(0, len(logits), 32):
        part = slice(start, start + 32)
        score, first, last = script.best_spans(
            logits[part], features.columns["first"][part], features.lengths[part] - 2, 30
        )
        parts.append(torch.stack([score * 0, logits[part, 0].sum(1), score, first, last], 1))
    rows = torch.cat(parts)
    scores = torch.full((len(features.questions),), -torch.inf)
    scores = scores.scatter_reduce(0, features.columns["owner"], rows[:, 2], "amax")
    return script.choose_answers(rows, features, False), scores.tolist()


def answers_by_loops(logits, features, n_best=20, limit=30):
    """The same in the usual way: for each feature of a question, the n best starts times the n best
    ends, in Python; then the n best of the question with their probabilities. On numpy arrays and
    lists, as gathered and mapped.
    """
    of_question = [[] for _ in features.questions]
    for number, owner in enumerate(features.owner):
        of_question[owner].append(number)
    answers, scores = {}, []
    for question, rows in zip(features.questions, of_question, strict=True):
        found = []
        for number in rows:
            starts, ends = logits[number, :, 0], logits[number, :, 1]
            offsets = features.offsets[number]
            first, last = features.first[number], features.lengths[number] - 2
            best_starts = np.argsort(starts)[: -n_best - 1 : -1].tolist()
            best_ends = np.argsort(ends)[: -n_best - 1 : -1].tolist()
            for start in best_starts:
                for end in best_ends:
                    if start < first or end < first or start > last or end > last:
                        continue
                    if end < start or end - start + 1 > limit:
                        continue
                    found.append(
                        {
                            "offsets": (offsets[start][0], offsets[end][1]),
                            "score": starts[start] + ends[end],
                            "start_logit": starts[start],
                            "end_logit": ends[end],
                        }
                    )
        found = sorted(found, key=lambda one: one["score"], reverse=True)[:n_best]
        for one in found:
            begin, stop = one.pop("offsets")
            one["text"] = question["context"][begin:stop]
        if not found:
            found = [{"text": "empty", "score": -np.inf}]
        values = np.array([one["score"] for one in found])
        odds = np.exp(values - values.max())
        for one, probability in zip(found, odds / odds.sum(), strict=True):
            one["probability"] = probability
        answers[question["id"]], scores = found[0]["text"], [*scores, found[0]["score"]]
    return answers, scores


def as_lists(features):
    """The features as the loops read them: Python lists, and the questions."""
    columns = features.table[:]
    return argparse.Namespace(
        questions=features.questions,
        owner=columns["owner"],
        offsets=[
            list(zip(*both, strict=True))
            for both in zip(columns["begins"], columns["stops"], strict=True)
        ],
        first=columns["first"],
        lengths=features.lengths.tolist(),
    )


def compare_answers(model_folder, few, repeats):
    """Time of the loops / time of the script on 10,000 features with a trained model's logits, and
    how spans differ.
    """
    ids, copies = torch.arange(10_000) % len(few), torch.arange(10_000) // len(few)
    owner = few.columns["owner"][ids] + copies * len(few.questions)
    questions = [
        question | {"id": f"{question['id']}-{copy}"}
        for copy in range(copies.max() + 1)
        for question in few.questions
    ]
    table = few.table.select(ids.tolist()).remove_columns("owner").flatten_indices()
    table = table.add_column("owner", owner.tolist())
    many = script.Features(questions[: owner.max() + 1], table, few.key, few.max_width)
    logits = logits_of(model_folder, few)[ids]
    arrays, lists = logits.numpy(), as_lists(many)
    ratios = []
    for _ in range(repeats):
        clock = time.perf_counter()
        ours, our_scores = answers_at_once(logits, many)
        middle = time.perf_counter()
        theirs, their_scores = answers_by_loops(arrays, lists)
        ratios.append((time.perf_counter() - middle) / (middle - clock))
    gains = np.array(our_scores) - np.array(their_scores)
    assert gains.min() >= -1e-5, "the loops found a better span"
    better, same = np.mean(gains > 1e-5), np.mean([ours[key] == theirs[key] for key in ours])
    return ratios, (
        f"a better span in {better:.2%} of questions, never a worse one; the same text "
        f"in {same:.2%}"
    )


def compare_scores(args, features, train_by_script, trainer):
    """Print a table: F1 after an epoch on either side, and answers by tensors and by loops."""
    print("\n| what | median | from to | target |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        trainer("save", 8, args.epoch_questions, "--output", folder)
        texts, _ = answers_at_once(logits_of(folder, features), features)
        trainer_f1 = script.score_answers(texts, features.questions, version_2=False)["f1"]
        f1 = train_by_script(8, args.epoch_questions, eval_questions=0)["metrics"]["f1"]
        side_by_side.row("an epoch at batch 8: F1 of the script", [f1], "")
        side_by_side.row("... F1 of Trainer", [trainer_f1], "")
        side_by_side.row("... script - Trainer", [f1 - trainer_f1], "points", ">= -1")
        ratios, difference = compare_answers(folder, features, args.repeats)
        side_by_side.row(
            "answers of 10,000 features: n-best loops / script", ratios, "times", ">= 10"
        )
        print(f"\nAgainst the n-best loops: {difference}.")
