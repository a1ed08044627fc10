"""Speed and scores of train_bert_squad.py, side by side with what a user would pick instead:
transformers' Trainer, in random order or grouped by length, both also compiled, and n-best loops
over the logits.

    python benchmarks/bert.py --model DIR --train_file JSON --validation_file JSON
    python benchmarks/bert.py --gpu    # BERT-base and SQuAD from the Hub, in bf16

Every comparison has the same model, questions, windows, batch, precision and number of threads, and
runs its sides by turns within one call, as machines are shared and noisy. On two CPU cores, speed
at batch 8 takes 15 minutes, at batch 32 more, F1 and answers half an hour. With --gpu it is on one
GPU, with MFU and memory, and speed only.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from side_by_side import record, role, row

from reporting import comparing

SCRIPT = "train_bert_squad.py"


def load_inputs(args):
    """The script's own config, tokenizer and features: both sides have the same windows."""
    import train_bert_squad as script

    return script.load_inputs(
        argparse.Namespace(
            model_name_or_path=args.model,
            from_scratch=args.from_scratch,
            train_file=args.train_file,
            validation_file=args.validation_file,
            version_2_with_negative=False,
            max_train_samples=args.questions,
            max_eval_samples=0,
            max_seq_length=384,
            doc_stride=128,
        )
    )


def make_trainer(args, **settings):
    """transformers' Trainer for an epoch, and a list to which each batch adds its [batch, width].

    Without settings, all that counts is as Trainer has it: random order, each batch padded to its
    longest, and gradients clipped.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config, tokenizer, features, _ = load_inputs(args)
    columns = (features.columns[name].tolist() for name in ("first", "start", "end"))
    rows = [
        {
            "input_ids": ids,
            "token_type_ids": [0] * first + [1] * (len(ids) - first),
            "attention_mask": [1] * len(ids),
            "start_positions": start,
            "end_positions": end,
        }
        for ids, first, start, end in zip(features.table["input_ids"], *columns, strict=True)
    ]
    pad, shapes = transformers.DataCollatorWithPadding(tokenizer), []

    def collate(rows):
        batch = pad(rows)
        shapes.append(batch["input_ids"].shape)
        return batch

    transformers.set_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        use_cpu=not args.gpu,
        bf16=args.gpu,
        dataloader_pin_memory=args.gpu,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        **settings,
    )
    auto = transformers.AutoModelForQuestionAnswering
    model = (
        auto.from_config(config)
        if args.from_scratch
        else auto.from_pretrained(args.model, config=config)
    )
    return transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate), shapes


def train_by_trainer(args):
    """Seconds of the last epoch of Trainer, and the places in its batches, padding included."""
    import transformers

    class Stopwatch(transformers.TrainerCallback):
        def on_epoch_begin(self, *_, **__):
            shapes.clear()
            self.start = time.perf_counter()

        def on_epoch_end(self, *_, **__):
            if args.gpu:
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start

    settings = {"max_grad_norm": 0, "num_train_epochs": 1}  # no clipping: the script has none
    if args.compiled:  # in the first epoch
        settings |= {"torch_compile": True, "num_train_epochs": 2}
    if args.grouped and hasattr(transformers.TrainingArguments, "train_sampling_strategy"):
        settings["train_sampling_strategy"] = "group_by_length"
    elif args.grouped:  # its name in transformers 5.0
        settings["group_by_length"] = True
    trainer, shapes = make_trainer(args, **settings)
    stopwatch = Stopwatch()
    trainer.add_callback(stopwatch)
    trainer.train()
    assert all(batch == args.batch for batch, _ in shapes), "not the features of the script"
    memory = torch.cuda.max_memory_allocated() / 1e6 if args.gpu else None
    return {
        "seconds": stopwatch.seconds,
        "places": sum(batch * width for batch, width in shapes),
        "memory": memory,
    }


def save_trainers_model(args):
    """Train for an epoch with Trainer's defaults, and save the model."""
    trainer, _ = make_trainer(args, num_train_epochs=1)
    trainer.train()
    trainer.save_model(args.output)


def logits_of(model_folder, features):
    """The logits of a saved model, float32 [features, longest, 2]; lowest on padding."""
    import transformers

    import train_bert_squad as script

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
    import train_bert_squad as script

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


def compare_answers(model_folder, args):
    """Time of the loops / time of the script on 10,000 features with a trained model's logits, and
    how spans differ.
    """
    import train_bert_squad as script

    _, _, _, few = load_inputs(args)
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
    arrays, columns = logits.numpy(), table[:]
    offsets = [
        list(zip(*both, strict=True))
        for both in zip(columns["begins"], columns["stops"], strict=True)
    ]
    lists = argparse.Namespace(
        questions=many.questions,
        owner=columns["owner"],
        offsets=offsets,
        first=columns["first"],
        lengths=many.lengths.tolist(),
    )
    ratios = []
    for _ in range(args.repeats):
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


def steps_by_turns(args):
    """Seconds of each step of Trainer / of the script, on the same batches in one process, where a
    slow moment or an unlucky place in memory is the same for both.
    """
    import train_bert_squad as script

    trainer, _ = make_trainer(args, max_grad_norm=0)
    trainer.current_gradient_accumulation_steps = 1  # as its `train` sets it
    config, _, features, _ = load_inputs(args)
    model = (
        script.load_model(
            argparse.Namespace(
                model_name_or_path=args.model,
                from_scratch=args.from_scratch,
                dropout=0.1,
                seed=0,
                activation_checkpointing=False,
            ),
            config,
        )
        .to(trainer.args.device)
        .train()
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True
    )
    trainers = trainer.create_optimizer()
    fields = "start", "end"

    def by_script(inputs, spans):
        logits = script.span_logits(model, inputs)
        script.span_losses(logits, *map(spans.get, fields)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def by_trainer(inputs, spans):
        batch = {f"{name}_positions": spans[name] for name in fields} | inputs
        batch["attention_mask"] = inputs["attention_mask"][:, 0, 0].long()
        trainer.training_step(trainer.model, batch)
        trainers.step()
        trainers.zero_grad()

    order = script.EpochSampler(features.lengths, args.batch, 0).order.tolist()
    ratios = []
    for number, ids in enumerate(order):
        seconds = {}
        for side in (by_script, by_trainer)[:: 1 - 2 * (number % 2)]:
            clock = time.perf_counter()
            side(*features.__getitems__(ids))
            seconds[side] = time.perf_counter() - clock
        ratios.append(seconds[by_trainer] / seconds[by_script])
    return ratios[3:]  # without those that set up memory


ROLES = {"trainer": train_by_trainer, "save": save_trainers_model, "steps": steps_by_turns}


def fill_batches(args, batch):
    """(questions, features, tokens): the most of the first `args.questions` questions whose
    features fill all batches, so that an epoch leaves no feature out, on any side.
    """
    _, _, features, _ = load_inputs(args)
    ends = features.columns["owner"].bincount().cumsum(0)  # of the features of each question
    questions = (ends % batch == 0).nonzero().max().item() + 1
    count = ends[questions - 1].item()
    return questions, count, features.lengths[:count].sum().item()


def compare_speed(args, batch, train_by_script, trainer):
    """Print a table: an epoch of the same features on each side. Every step is timed; of compiled
    sides, every step of a second epoch.
    """
    questions, features, tokens = fill_batches(args, batch)
    records = []  # of the script

    def script(epochs=1, **options):
        run = train_by_script(batch, questions, epochs=epochs, **options)
        assert run["tokens"] == tokens * epochs and run["steps"] * batch == features * epochs
        seconds = [float(found) for found in re.findall(r"([\d.]+) s of training", run["printed"])]
        records.append(run)
        return {
            "seconds": run["seconds"]["train"] - (seconds[0] if epochs > 1 else 0),
            "places": tokens / (1 - run["padding_share"]),
            "memory": run["ranks"][0]["peak_memory_mb"],
        }

    def utilization(seconds):
        """MFU, of the tokens without padding; "" on devices whose peak is not known."""
        share = comparing.flops_utilization(
            records[0] | records[0]["workload"] | {"tokens_per_second": tokens / seconds}
        )
        return f"{share:.1%}" if share else ""

    sides = {
        SCRIPT: script,
        "Trainer, random order (its default)": lambda: trainer("trainer", batch, questions),
        "Trainer, grouped by length": lambda: trainer("trainer", batch, questions, "--grouped"),
    }
    if args.compile:
        sides |= {
            f"{SCRIPT}, compiled": lambda: script(2, dynamo="inductor"),
            "Trainer, grouped by length, compiled": lambda: trainer(
                "trainer", batch, questions, "--grouped", "--compiled"
            ),
        }
    runs_of = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, run_side in sides.items():
            runs_of[name].append(run_side())

    def spread(values):
        digits = ",.0f" if max(values) > 100 else ".2f"
        median, low, high = statistics.median(values), min(values), max(values)
        return f"{median:{digits}} ({low:{digits}} to {high:{digits}})"

    print(
        f"\nBatch {batch}: {features} features of {questions} questions, {tokens:,} tokens "
        f"without padding, {args.repeats} times\n"
    )
    print(
        "| side | features/s | tokens/s | tokens and padding/s | padding | the script / this "
        "| MFU | peak MB |\n|---|---|---|---|---|---|---|---|"
    )
    for name, runs in runs_of.items():
        rates = [[amount / run["seconds"] for run in runs] for amount in (features, tokens)]
        rates += [[run["places"] / run["seconds"] for run in runs]]
        padding = statistics.median(1 - tokens / run["places"] for run in runs)
        faster = [
            run["seconds"] / own["seconds"] for run, own in zip(runs, runs_of[SCRIPT], strict=True)
        ]
        share = utilization(statistics.median(run["seconds"] for run in runs))
        memory = f"{max(run['memory'] for run in runs):,.0f}" if args.gpu else ""
        print(
            f"| {name} | {' | '.join(map(spread, rates))} | {padding:.1%} | {spread(faster)} | "
            f"{share} | {memory} |",
            flush=True,
        )
    if not args.gpu:
        low, median, high = statistics.quantiles(trainer("steps", batch, questions), n=4)
        print(
            "\nThe same batches by turns in one process, a step of Trainer / of the script: "
            f"median {median:.3f}, half of the steps {low:.3f} to {high:.3f}."
        )


def compare_scores(args, train_by_script, trainer):
    """Print a table: F1 after an epoch on either side, and answers by tensors and by loops."""
    import train_bert_squad as script

    print("\n| what | median | from to | target |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        trainer("save", 8, args.epoch_questions, "--output", folder)
        _, _, _, features = load_inputs(args)
        answers, _ = answers_at_once(logits_of(folder, features), features)
        trainer_f1 = script.score_answers(answers, features.questions, version_2=False)["f1"]
        f1 = train_by_script(8, args.epoch_questions, eval_questions=0)["metrics"]["f1"]
        row("an epoch at batch 8: F1 of the script", [f1], "")
        row("... F1 of Trainer", [trainer_f1], "")
        row("... script - Trainer", [f1 - trainer_f1], "points", ">= -1")
        ratios, difference = compare_answers(folder, args)
        row("answers of 10,000 features: n-best loops / script", ratios, "times", ">= 10")
        print(f"\nAgainst the n-best loops: {difference}.")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpu", action="store_true", help="compare speed on one GPU, in bf16")
    add("--model", default="google-bert/bert-base-uncased", help="a BERT, as --model_name_or_path")
    add("--from_scratch", action="store_true", help="random weights, which train as fast")
    add("--train_file", help="SQuAD's training questions (without: from the Hub)")
    add("--validation_file", help="SQuAD's validation questions")
    add("--repeats", type=int, default=3, help="of each comparison (default: %(default)s)")
    add(
        "--batches",
        type=int,
        nargs="*",
        help="batch sizes whose speed is compared (default: 8 32; with --gpu: 8 16 32 64)",
    )
    add("--questions", type=int, help="to compare speed on (default: 600; with --gpu: 4000)")
    add("--compile", action="store_true", help="also compare speed by torch.compile")
    add(
        "--epoch_questions",
        type=int,
        default=4000,
        help="to compare F1 on; 0: neither F1 nor answers (default: %(default)s)",
    )
    add("--learning_rate", type=float, default=1e-4)
    add("--role", choices=ROLES, help=argparse.SUPPRESS)
    add("--batch", type=int, help=argparse.SUPPRESS)
    add("--grouped", action="store_true", help=argparse.SUPPRESS)
    add("--compiled", action="store_true", help=argparse.SUPPRESS)
    add("--output", default=tempfile.gettempdir(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.batches = args.batches or ([8, 16, 32, 64] if args.gpu else [8, 32])
    args.questions = args.questions or (4000 if args.gpu else 600)
    for name in ("model", "train_file", "validation_file"):
        value = getattr(args, name)
        if value and Path(value).exists():  # else a name on the Hub, or none
            setattr(args, name, str(Path(value).resolve()))
    if args.role:
        return print("number:", json.dumps(ROLES[args.role](args)))
    if args.gpu and not torch.cuda.is_available():
        return print("skipped: torch sees no GPU here, so nothing was measured on one")
    cores = len(os.sched_getaffinity(0))
    os.environ |= {
        "OMP_NUM_THREADS": str(cores),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "CUDA_VISIBLE_DEVICES": "0" if args.gpu else "",
    }
    inputs = ["--train_file", args.train_file, "--validation_file", args.validation_file]
    inputs = (inputs if args.train_file else []) + ["--from_scratch"] * args.from_scratch

    def trainer(name, batch, questions, *flags):
        return role(
            __file__,
            name,
            "--model",
            args.model,
            *inputs,
            "--batch",
            batch,
            "--questions",
            questions,
            "--learning_rate",
            args.learning_rate,
            *["--gpu"] * args.gpu,
            *flags,
        )

    def train_by_script(batch, questions, eval_questions=1, epochs=1, dynamo="no"):
        return record(
            "baseline",
            SCRIPT,
            "--model_name_or_path",
            args.model,
            *inputs,
            "--max_train_samples",
            questions,
            "--max_eval_samples",
            eval_questions,
            "--per_device_train_batch_size",
            batch,
            "--learning_rate",
            args.learning_rate,
            "--num_epochs",
            epochs,
            precision="bf16" if args.gpu else "no",
            dynamo=dynamo,
        )

    def train_lstm(batch):
        run = record(
            "baseline",
            "train_mnist_rnn.py",
            "--dataset",
            "digits",
            "--num_epochs",
            60,
            "--per_device_train_batch_size",
            batch,
            precision="bf16",
        )
        row(f"LSTM on digits, batch {batch}", [run["samples_per_second"]], "samples/s")

    where = torch.cuda.get_device_name() if args.gpu else f"{cores} CPU cores, {cores} threads"
    print(f"torch {torch.__version__}, {where}")
    for batch in args.batches:
        compare_speed(args, batch, train_by_script, trainer)
    if args.gpu:
        print("\n| what | median | from to | target |\n|---|---|---|---|")
        for batch in (16, 64, 256):
            train_lstm(batch)
    elif args.epoch_questions:
        compare_scores(args, train_by_script, trainer)


if __name__ == "__main__":
    main()
