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
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from side_by_side import ROOT, record, role, row

from planning import facts

SCRIPT = "train_bert_squad.py"


def script_args(args):
    """The script's own flags, as far as its data and model need them."""
    return argparse.Namespace(
        model_name_or_path=args.model,
        from_scratch=args.from_scratch,
        train_file=args.train_file,
        validation_file=args.validation_file,
        version_2_with_negative=False,
        max_train_samples=args.questions,
        max_eval_samples=args.eval_questions,
        max_seq_length=384,
        doc_stride=128,
        dropout=0.1,
        seed=0,
        activation_checkpointing=False,
    )


def load_inputs(args):
    """The script's own config, tokenizer and features: both sides have the same windows."""
    import train_bert_squad as script

    return script.load_inputs(script_args(args))


def rows_of(features):
    """The windows as Trainer reads them."""
    columns = (features.columns[name].tolist() for name in ("first", "start", "end"))
    return [
        {
            "input_ids": ids,
            "token_type_ids": [0] * first + [1] * (len(ids) - first),
            "attention_mask": [1] * len(ids),
            "start_positions": start,
            "end_positions": end,
        }
        for ids, first, start, end in zip(features.table["input_ids"], *columns, strict=True)
    ]


def make_trainer(args, **settings):
    """transformers' Trainer for an epoch, and a list to which each batch adds its [batch, width].

    Without settings, all that counts is as Trainer has it: random order, each batch padded to its
    longest, and gradients clipped.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config, tokenizer, features, _ = load_inputs(args)
    pad, shapes = transformers.DataCollatorWithPadding(tokenizer), []

    def collate(rows):
        batch = pad(rows)
        shapes.append(batch["input_ids"].shape)
        return batch

    if args.grouped and hasattr(transformers.TrainingArguments, "train_sampling_strategy"):
        settings["train_sampling_strategy"] = "group_by_length"
    elif args.grouped:  # its name in transformers 5.0
        settings["group_by_length"] = True
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
    return transformers.Trainer(
        model, arguments, train_dataset=rows_of(features), data_collator=collate
    ), shapes


def train_and_time(args, **settings):
    """Train with Trainer. Returns it, the seconds of its last epoch, and the shapes of that epoch's
    batches: [batch, width], padding included.
    """
    import transformers

    class Stopwatch(transformers.TrainerCallback):
        def on_epoch_begin(self, *_, **__):
            shapes.clear()
            self.start = time.perf_counter()

        def on_epoch_end(self, *_, **__):
            if args.gpu:
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.start

    # No clipping: the script has none.
    trainer, shapes = make_trainer(args, max_grad_norm=0, **settings)
    stopwatch = Stopwatch()
    trainer.add_callback(stopwatch)
    trainer.train()
    return trainer, stopwatch.seconds, shapes


def train_by_trainer(args):
    """Seconds, places and peak memory of an epoch of Trainer; compiled, of a second epoch."""
    settings = {"num_train_epochs": 2, "torch_compile": True} if args.compiled else {}
    _, seconds, shapes = train_and_time(args, **{"num_train_epochs": 1} | settings)
    assert all(batch == args.batch for batch, _ in shapes), "not the features of the script"
    memory = torch.cuda.max_memory_allocated() / 1e6 if args.gpu else None
    return {"seconds": seconds, "places": sum(map(math.prod, shapes)), "memory": memory}


def save_trainers_model(args):
    """Train for an epoch with Trainer's defaults, and save the model."""
    trainer, _ = make_trainer(args, num_train_epochs=1)
    trainer.train()
    trainer.save_model(args.output)


def steps_by_turns(args):
    """Seconds of each step of Trainer / of the script, on the same batches in one process, where a
    slow moment or an unlucky place in memory is the same for both.
    """
    import train_bert_squad as script

    trainer, _ = make_trainer(args, max_grad_norm=0)
    trainer.current_gradient_accumulation_steps = 1  # as its `train` sets it
    config, _, features, _ = load_inputs(args)
    model = script.load_model(script_args(args), config)
    model = model.to(trainer.args.device).train()
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

    order = script.EpochSampler(features.lengths, args.batch, 0).order.tolist()[: args.steps]
    ratios = []
    for number, ids in enumerate(order):
        seconds = {}
        for side in (by_script, by_trainer)[:: 1 - 2 * (number % 2)]:
            clock = time.perf_counter()
            side(*features.__getitems__(ids))
            seconds[side] = time.perf_counter() - clock
        ratios.append(seconds[by_trainer] / seconds[by_script])
    return ratios[3:]  # without those that set up memory


def scores_by_trainer(args):
    """All that a user waits for, by Trainer: an epoch, the logits of the validation windows, their
    answers by the n-best loops, the scores, and the saved model.
    """
    import answers

    import train_bert_squad as script

    trainer, seconds, shapes = train_and_time(
        args, num_train_epochs=1, per_device_eval_batch_size=32
    )
    places = sum(map(math.prod, shapes))  # before the batches of `predict` join them
    *_, features = load_inputs(args)
    trainer.args.train_sampling_strategy = "random"  # or it would group, so reorder, these, too
    trainer.args.group_by_length = False  # its name in transformers 5.0
    starts, ends = trainer.predict(rows_of(features)).predictions
    texts, _ = answers.answers_by_loops(np.stack([starts, ends], 2), answers.as_lists(features))
    trainer.save_model(args.output)
    scores = script.score_answers(texts, features.questions, version_2=False)
    return {"train": seconds, "places": places, "f1": scores["f1"]}


def compare_commands(args, trainer):
    """Print a table of whole runs of either side, by turns: seconds from the command to the scores,
    and of the epoch in it.
    """
    runs = {SCRIPT: [], "Trainer": []}
    flags = f"--num_epochs 1 --per_device_train_batch_size 8 --max_train_samples {args.questions}"
    flags += f" --max_eval_samples 500 --learning_rate {args.learning_rate} --output_dir"
    for number in range(2 * args.repeats):
        side = list(runs)[(number + number // 2) % 2]  # A B B A
        with tempfile.TemporaryDirectory() as folder:
            clock = time.perf_counter()
            if side == "Trainer":
                run = trainer("whole", 8, args.questions, "--grouped", "--output", folder)
            else:
                command = [sys.executable, SCRIPT, *script_inputs(args), *flags.split(), folder]
                subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
                run = json.loads((Path(folder) / "run.json").read_text())
                places = run["tokens"] / (1 - run["padding_share"])
                f1 = run["metrics"]["f1"]
                run = {"train": run["seconds"]["train"], "places": places, "f1": f1}
            runs[side].append(run | {"whole": time.perf_counter() - clock})
        print(f"{side}: {runs[side][-1]}", file=sys.stderr, flush=True)
    print("\n| what | median | from to | target |\n|---|---|---|---|")
    for what, key in (("from the command to the scores", "whole"), ("the epoch in it", "train")):
        seconds = {side: [run[key] for run in found] for side, found in runs.items()}
        for side, found in seconds.items():
            row(f"{what}, {side}", found, "s")
        ratios = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
        row(f"{what}, Trainer grouped by length / script", ratios, "times", ">= 1")


def script_inputs(args):
    """The flags of the script for the model and the questions."""
    words = ["--model_name_or_path", args.model] + ["--from_scratch"] * args.from_scratch
    if args.train_file:
        words += ["--train_file", args.train_file, "--validation_file", args.validation_file]
    return words


ROLES = {
    "whole": scores_by_trainer,
    "trainer": train_by_trainer,
    "save": save_trainers_model,
    "steps": steps_by_turns,
}


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
        share = facts.flops_utilization(
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


def parse_args():
    """The flags; files become absolute paths."""
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
    sizes = "batch sizes whose speed is compared (default: 8 32; with --gpu: 8 16 32 64)"
    add("--batches", type=int, nargs="*", help=sizes)
    add("--questions", type=int, help="to compare speed on (default: 600; with --gpu: 4000)")
    add("--compile", action="store_true", help="also compare speed by torch.compile")
    trained = "to compare F1 on; 0: neither F1 nor answers (default: %(default)s)"
    add("--epoch_questions", type=int, default=4000, help=trained)
    add("--eval_questions", type=int, default=0, help=argparse.SUPPRESS)
    add("--learning_rate", type=float, default=1e-4)
    add("--commands", action="store_true", help="only compare seconds from command to scores")
    add("--steps", type=int, help="of each side by turns in one process (default: an epoch)")
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
    return args


def main():
    args = parse_args()
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
    rate = ["--learning_rate", args.learning_rate]

    def trainer(name, batch, questions, *flags):
        _, model, *inputs = script_inputs(args)
        words = ["--model", model, *inputs, *rate, "--batch", batch, "--questions", questions]
        words += ["--gpu"] * args.gpu + (["--steps", args.steps] if args.steps else [])
        words += ["--eval_questions", 500] if name == "whole" else []
        return role(__file__, name, *words, *flags)

    def train_by_script(batch, questions, eval_questions=1, epochs=1, dynamo="no"):
        words = [*script_inputs(args), *rate, "--max_eval_samples", eval_questions]
        words += ["--max_train_samples", questions, "--per_device_train_batch_size", batch]
        precision = "bf16" if args.gpu else "no"
        words += ["--num_epochs", epochs]
        return record("baseline", SCRIPT, *words, precision=precision, dynamo=dynamo)

    def train_lstm(batch):
        words = ["--dataset", "digits", "--num_epochs", 60, "--per_device_train_batch_size", batch]
        run = record("baseline", "train_mnist_rnn.py", *words, precision="bf16")
        row(f"LSTM on digits, batch {batch}", [run["samples_per_second"]], "samples/s")

    where = torch.cuda.get_device_name() if args.gpu else f"{cores} CPU cores, {cores} threads"
    print(f"torch {torch.__version__}, {where}")
    if args.commands:
        return compare_commands(args, trainer)
    for batch in args.batches:
        compare_speed(args, batch, train_by_script, trainer)
    if args.gpu:
        print("\n| what | median | from to | target |\n|---|---|---|---|")
        for batch in (16, 64, 256):
            train_lstm(batch)
    elif args.epoch_questions:
        import answers

        *_, features = load_inputs(args)
        answers.compare_scores(args, features, train_by_script, trainer)


if __name__ == "__main__":
    main()
