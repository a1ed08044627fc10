"""Speed of train_bert_squad.py, side by side with what a user would pick instead: transformers'
Trainer, in random order or grouped by length.

    python benchmarks/bert.py --model DIR --train_file JSON --validation_file JSON
    python benchmarks/bert.py --gpu    # BERT-base and SQuAD from the Hub, in bf16

Every comparison has the same model, questions, windows, batch, precision and number of threads, and
runs its sides by turns within one call, as machines are shared and noisy. The last half of an epoch
is shown beside all of it, which includes the warm-up. On two CPU cores it takes 15 minutes. With
--gpu it is on one GPU, with MFU (of the last half) and memory.
"""

import math
import os
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

import side_by_side as sides
import torch
import transformers

import train_bert_squad
from common.facts import flops_utilization
from common.printing import markdown_table

SCRIPT = "train_bert_squad.py"
LENGTH, STRIDE = 384, 128


# -------- Trainer, in a process of its own


def make_windows(args):
    """The windows of the questions, as transformers' tokenizers make them. Where the answer is does
    not change the speed, so it is at the start.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    asked = Namespace(max_train_samples=args.questions, version_2_with_negative=False, **vars(args))
    questions = train_bert_squad.read_questions(asked, "train")
    windows = tokenizer(
        [question["question"] for question in questions],
        [question["context"] for question in questions],
        truncation="only_second",
        max_length=LENGTH,
        stride=STRIDE,
        return_overflowing_tokens=True,
    )
    names = ("input_ids", "token_type_ids", "attention_mask")
    return tokenizer, [
        {name: windows[name][i] for name in names} | {"start_positions": 0, "end_positions": 0}
        for i in range(len(windows["input_ids"]))
    ]


def train_by_trainer(args, batch, grouped, compiled):
    """Train an epoch; compiled, a second one. Returns windows/s, also of its last half, tokens with
    padding per second, and the peak memory.
    """

    class Stopwatch(transformers.TrainerCallback):
        def lap(self):
            if args.gpu:
                torch.cuda.synchronize()
            self.laps.append(time.perf_counter())

        def on_epoch_begin(self, _, state, *__, **___):
            shapes.clear()
            self.before, self.laps = state.global_step, []
            self.lap()

        def on_step_end(self, _, state, *__, **___):
            if state.global_step - self.before == steps // 2:
                self.lap()

        def on_epoch_end(self, *_, **__):
            self.lap()

    def collate(rows):
        batch = pad(rows)
        shapes.append(batch["input_ids"].shape)
        return batch

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer, windows = make_windows(args)
    steps = len(windows) // batch
    pad, shapes, stopwatch = transformers.DataCollatorWithPadding(tokenizer), [], Stopwatch()
    transformers.set_seed(0)
    auto = transformers.AutoModelForQuestionAnswering
    config = transformers.AutoConfig.from_pretrained(args.model)
    model = auto.from_config(config) if args.from_scratch else auto.from_pretrained(args.model)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=batch,
            num_train_epochs=2 if compiled else 1,
            torch_compile=compiled,
            train_sampling_strategy="group_by_length" if grouped else "random",
            max_grad_norm=0,  # The script clips no gradients.
            use_cpu=not args.gpu,
            bf16=args.gpu,
            dataloader_drop_last=True,
            dataloader_pin_memory=args.gpu,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=windows,
        data_collator=collate,
        callbacks=[stopwatch],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # It would print what it measured.
    trainer.train()
    start, half, end = stopwatch.laps
    return {
        "rate": steps * batch / (end - start),
        "late": (steps - steps // 2) * batch / (end - half),
        "places": sum(map(math.prod, shapes)) / (end - start),
        "memory": torch.cuda.max_memory_allocated() / 1e6 if args.gpu else None,
    }


# -------- the comparison


def train_by_script(args, batch, compiled):
    """The same of the script. A compiled run's seconds are by the median of its speed."""
    words = ["--model_name_or_path", args.model] + ["--from_scratch"] * args.from_scratch
    if args.train_file:
        words += ["--train_file", args.train_file, "--validation_file", args.validation_file]
    words += ["--max_train_samples", args.questions, "--max_eval_samples", 1]
    words += ["--max_seq_length", LENGTH, "--doc_stride", STRIDE]
    words += ["--per_device_train_batch_size", batch, "--num_epochs", 2 if compiled else 1]
    precision, dynamo = "bf16" if args.gpu else "no", "inductor" if compiled else "no"
    run = sides.record("baseline", SCRIPT, *words, precision=precision, dynamo=dynamo)
    rates, seconds = run["steps_per_second"], run["seconds"]["train"]
    if compiled:
        seconds = run["steps"] * batch / run["samples_per_second"]
    return {
        "rate": run["steps"] * batch / seconds,
        "late": statistics.harmonic_mean(rates[len(rates) // 2 :]) * batch,  # a rate per log
        "places": run["tokens"] / (1 - run["padding_share"]) / seconds,
        "memory": run["ranks"][0]["peak_memory_mb"],
        "record": run,
    }


def compare_speed(args, batch):
    """Print a table: an epoch of the same windows on each side."""

    def trainer(grouped, compiled=False):
        return sides.alone(train_by_trainer, args, batch, grouped, compiled)

    train = {
        SCRIPT: lambda: train_by_script(args, batch, compiled=False),
        "Trainer, random order (its default)": lambda: trainer(grouped=False),
        "Trainer, grouped by length": lambda: trainer(grouped=True),
    }
    if args.compile:
        train[f"{SCRIPT}, compiled"] = lambda: train_by_script(args, batch, compiled=True)
        train["Trainer, grouped by length, compiled"] = lambda: trainer(True, compiled=True)
    runs = {name: [] for name in train}
    for _ in range(args.repeats):
        for name in train:
            runs[name].append(train[name]())
            rate, late = runs[name][-1]["rate"], runs[name][-1]["late"]
            print(f"{name}: {rate:,.2f} windows/s, {late:,.2f} in the last half", flush=True)
    print(f"\nBatch {batch}, {args.questions} questions, {args.repeats} times\n")
    rows = [["side", "windows/s", "the script / this", "windows/s, last half"]]
    rows[0] += ["the script / this, last half", "padded tokens/s", "MFU", "peak MB"]
    own = runs[SCRIPT][0]["record"]
    for name in runs:
        values = {key: [run[key] for run in runs[name]] for key in ("rate", "late", "places")}
        cells = [name]
        for key in ("rate", "late"):
            pairs = zip(runs[SCRIPT], values[key], strict=True)
            cells += [spread(values[key]), spread([run[key] / theirs for run, theirs in pairs])]
        tokens = own["tokens"] / (own["steps"] * batch) * statistics.median(values["late"])
        share = flops_utilization(own | own["workload"] | {"tokens_per_second": tokens})
        memory = f"{max(run['memory'] for run in runs[name]):,.0f}" if args.gpu else ""
        rows.append([*cells, spread(values["places"]), f"{share:.1%}" if share else "", memory])
    print(markdown_table(rows), flush=True)


def spread(values):
    digits = ",.0f" if max(values) > 100 else ".2f"
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:{digits}} ({low:{digits}} to {high:{digits}})"


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", action="store_true", help="compare on one GPU, in bf16")
    add("--model", default="google-bert/bert-base-uncased", help="a BERT, as --model_name_or_path")
    add("--from_scratch", action="store_true", help="random weights, which train as fast")
    add("--train_file", help="SQuAD's training questions (without: from the Hub)")
    add("--validation_file", help="SQuAD's validation questions")
    add("--repeats", type=int, default=3, help="of each comparison (default: %(default)s)")
    add("--batches", type=int, nargs="*", help="default: 8 32; with --gpu: 32 8 64 16")
    add("--questions", type=int, help="default: 600; with --gpu: 4000")
    add("--compile", action="store_true", help="also compare with torch.compile")
    args = parser.parse_args()
    args.batches = args.batches or ([32, 8, 64, 16] if args.gpu else [8, 32])
    args.questions = args.questions or (4000 if args.gpu else 600)
    if args.gpu and not torch.cuda.is_available():
        return print("skipped: torch sees no GPU here, so nothing was measured on one")
    cores = len(os.sched_getaffinity(0))
    os.environ |= {
        "OMP_NUM_THREADS": str(cores),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "CUDA_VISIBLE_DEVICES": "0" if args.gpu else "",
    }
    where = torch.cuda.get_device_name() if args.gpu else f"{cores} CPU cores, {cores} threads"
    print(f"torch {torch.__version__}, {where}")
    for batch in args.batches:
        compare_speed(args, batch)


if __name__ == "__main__":
    main()
