"""Speed and scores of train_bert_squad.py, side by side with what a user would pick instead: transformers' Trainer, and
the usual n-best loops over the logits.

    python benchmarks/bert.py --model DIR --train_file JSON --validation_file JSON       about an hour on two CPU cores

Every comparison has the same model, questions, windows, batch, precision and number of threads, and alternates A and B
within one call, as machines are shared and noisy; rows are medians of the ratios. On the CPU only.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from side_by_side import record, role, row

SCRIPT = "train_bert_squad.py"


def load_inputs(args):
    """The script's own tokenizer, config and features, so that both sides have the same windows."""
    import train_bert_squad as script

    return script.load_inputs(argparse.Namespace(
        model_name_or_path=args.model, train_file=args.train_file, validation_file=args.validation_file,
        version_2_with_negative=False, max_train_samples=args.questions, max_eval_samples=0, max_seq_length=384,
        doc_stride=128))  # fmt: skip


def train_by_trainer(args):
    """Features a second of transformers' Trainer at its defaults: random order, padded to the longest of a batch."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer, config, features, _ = load_inputs(args)
    columns = (getattr(features, name).tolist() for name in ("lengths", "firsts", "starts", "ends"))
    rows = [{
        "input_ids": ids[:length].tolist(),
        "token_type_ids": [0] * first + [1] * (length - first),
        "attention_mask": [1] * length,
        "start_positions": start,
        "end_positions": end,
    } for ids, length, first, start, end in zip(features.input_ids, *columns, strict=True)]  # fmt: skip
    transformers.set_seed(0)
    settings = transformers.TrainingArguments(
        output_dir=args.output, num_train_epochs=1, max_steps=args.steps or -1, use_cpu=True, report_to="none",
        per_device_train_batch_size=args.batch, learning_rate=args.learning_rate, save_strategy="no",
        logging_strategy="no", dataloader_pin_memory=False)  # fmt: skip
    trainer = transformers.Trainer(
        transformers.AutoModelForQuestionAnswering.from_pretrained(args.model, config=config), settings,
        train_dataset=rows, data_collator=transformers.DataCollatorWithPadding(tokenizer))  # fmt: skip
    speed = trainer.train().metrics["train_samples_per_second"]
    trainer.save_model(args.output)
    return speed


def logits_of(model_folder, features):
    """The logits of a saved model, float32 [features, longest, 2], and lowest where a feature is padded."""
    import train_bert_squad as script

    model = script.SpanBert.from_pretrained(model_folder).eval()
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((*features.input_ids.shape, 2), lowest)
    with torch.no_grad():
        for ids in features.lengths.argsort().split(32):
            width = features.widths(features.lengths[ids]).item()
            logits[ids, :width] = model(**features.batch(ids, width))
    return logits


def answers_at_once(logits, features):
    """{question id: text} and {question id: score} by the script's tensor operations, 32 features at a time."""
    import train_bert_squad as script

    parts = []
    for start in range(0, len(logits), 32):
        part = slice(start, start + 32)
        score, first, last = script.best_spans(logits[part], features.firsts[part], features.lengths[part] - 2, 30)
        parts.append(torch.stack([score * 0, logits[part, 0].sum(1), score, first, last], 1))
    rows = torch.cat(parts)
    scores = torch.full((len(features.questions),), -torch.inf).scatter_reduce(0, features.owners, rows[:, 2], "amax")
    return script.choose_answers(rows, features, False), scores.tolist()


def answers_by_loops(logits, features, n_best=20, limit=30):
    """The same in the usual way: for each feature of a question, the n best starts times the n best ends, in Python;
    then the n best of the question with their probabilities. On numpy arrays and lists, as gathered and mapped.
    """
    of_question = [[] for _ in features.questions]
    for number, owner in enumerate(features.owners.tolist()):
        of_question[owner].append(number)
    answers, scores = {}, []
    for question, rows in zip(features.questions, of_question, strict=True):
        found = []
        for number in rows:
            starts, ends, offsets = logits[number, :, 0], logits[number, :, 1], features.offsets[number]
            first, last = features.firsts[number], features.lengths[number] - 2
            best_starts = np.argsort(starts)[: -n_best - 1 : -1].tolist()
            best_ends = np.argsort(ends)[: -n_best - 1 : -1].tolist()
            for start in best_starts:
                for end in best_ends:
                    if start < first or end < first or start > last or end > last:
                        continue
                    if end < start or end - start + 1 > limit:
                        continue
                    found.append({"offsets": (offsets[start][0], offsets[end][1]), "score": starts[start] + ends[end],
                                  "start_logit": starts[start], "end_logit": ends[end]})
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


def compare_answers(model_folder, args):
    """Time of the loops / time of the script on 10,000 features with a trained model's logits, and how spans differ."""
    _, _, _, few = load_inputs(args)
    logits = logits_of(model_folder, few)
    copies = -(-10_000 // len(few.lengths))
    ids = torch.arange(10_000) % len(few.lengths)
    owners = few.owners[ids] + torch.arange(10_000) // len(few.lengths) * len(few.questions)
    questions = [question | {"id": f"{question['id']}-{copy}"} for copy in range(copies) for question in few.questions]
    tensors = {name: getattr(few, name)[ids] for name in ("input_ids", "lengths", "firsts", "offsets")}
    many = replace(few, questions=questions[: owners.max() + 1], owners=owners, **tensors)
    logits = logits[ids]
    arrays = logits.numpy()
    lists = argparse.Namespace(questions=many.questions, owners=many.owners, offsets=many.offsets.tolist(),
                               firsts=many.firsts.tolist(), lengths=many.lengths.tolist())  # fmt: skip
    ratios = []
    for _ in range(args.repeats):
        clock = time.perf_counter()
        ours, our_scores = answers_at_once(logits, many)
        middle = time.perf_counter()
        theirs, their_scores = answers_by_loops(arrays, lists)
        ratios.append((time.perf_counter() - middle) / (middle - clock))
    assert all(a >= b - 1e-5 for a, b in zip(our_scores, their_scores, strict=True)), "the loops found a better span"
    better = np.mean([a > b + 1e-5 for a, b in zip(our_scores, their_scores, strict=True)]) * 100
    same = np.mean([ours[key] == theirs[key] for key in ours]) * 100
    return ratios, f"a better span in {better:.2f} % of questions, never a worse one; the same text in {same:.2f} %"


ROLES = {"trainer": train_by_trainer}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a pretrained BERT, as --model_name_or_path of the script")
    add("--train_file", required=True, help="SQuAD's training questions")
    add("--validation_file", required=True, help="SQuAD's validation questions")
    add("--repeats", type=int, default=3, help="pairs of each comparison (default: %(default)s)")
    add("--questions", type=int, default=4000, help="to train on (default: %(default)s)")
    add("--learning_rate", type=float, default=1e-4)
    add("--role", choices=ROLES, help=argparse.SUPPRESS)
    add("--batch", type=int, help=argparse.SUPPRESS)
    add("--steps", type=int, default=0, help=argparse.SUPPRESS)
    add("--output", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("model", "train_file", "validation_file"):
        setattr(args, name, str(Path(getattr(args, name)).resolve()))
    if args.role:
        return print("number:", ROLES[args.role](args))
    cores = len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(cores), "CUDA_VISIBLE_DEVICES": ""}
    files = ["--train_file", args.train_file, "--validation_file", args.validation_file]

    print(f"torch {torch.__version__}, {cores} CPU cores, {cores} threads, {args.questions} questions\n")
    print("| what | median | from to | target |\n|---|---|---|---|")

    def trainer(batch, *flags):
        return role(__file__, "trainer", "--model", args.model, *files, "--batch", batch, "--questions", args.questions,
                    "--learning_rate", args.learning_rate, *flags)  # fmt: skip

    def ours_on(batch, *flags):
        return record("baseline", SCRIPT, "--model_name_or_path", args.model, *files, "--max_train_samples",
                      args.questions, "--per_device_train_batch_size", batch, "--learning_rate", args.learning_rate,
                      *flags)  # fmt: skip

    for batch, steps, target in ((8, 100, 1.6), (32, 50, 1.9)):
        ours, theirs, padding = [], [], []
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as folder:
                theirs.append(trainer(batch, "--steps", steps, "--output", folder))
            run = ours_on(batch, "--max_train_steps", steps, "--max_eval_samples", 1)
            ours.append(batch * steps / run["seconds"]["train"])
            padding.append(100 * run["padding_share"])
        row(f"batch {batch}, {steps} steps: the script", ours, "features/s", "")
        row("... Trainer", theirs, "features/s", "")
        row("... script / Trainer", [a / b for a, b in zip(ours, theirs, strict=True)], "times", f">= {target}")
        row("... padding share of the script", padding, "%", "<= 3 %")

    import train_bert_squad as script

    with tempfile.TemporaryDirectory() as folder:
        speed = trainer(8, "--output", folder)
        _, _, _, features = load_inputs(args)
        answers, _ = answers_at_once(logits_of(folder, features), features)
        references = [[text for text, _ in question["answers"]] for question in features.questions]
        trainer_f1 = script.SquadMetric(keep_in_memory=True).compute(
            predictions=list(answers.values()), references=references, version_2=False)["f1"]  # fmt: skip
        run = ours_on(8, "--num_epochs", 1, "--max_eval_samples", 0)
        row("an epoch at batch 8: F1 of the script", [run["metrics"]["f1"]], "", "")
        row("... F1 of Trainer", [trainer_f1], "", "")
        row("... script - Trainer", [run["metrics"]["f1"] - trainer_f1], "points", ">= -1")
        row("... features/s, script / Trainer", [run["samples_per_second"] / speed], "times", "")
        ratios, difference = compare_answers(folder, args)
        row("answers of 10,000 features: n-best loops / script", ratios, "times", ">= 10")
        print(f"\nAgainst the n-best loops: {difference}.")


if __name__ == "__main__":
    main()
