"""Fine-tune BERT on SQuAD, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py
    python train_bert_squad.py --prepare_data_only    # on a login node that has a network

BERT reads a question and a text (the context), and says at which token of the text the answer
starts and ends. A run leaves in OUTPUT_DIR:
    run.json             what ran, the seconds of each phase, the loss of each step
    predictions.json     the answer to each validation question
    model.safetensors    the final weights; with config and tokenizer, for `from_pretrained`
    best/                the same of the epoch with the lowest validation loss
    checkpoints/         the two newest checkpoints, for --resume

A rank is one of the processes that train together. A function that says "A collective" makes the
ranks wait for each other, so every rank has to call it.

The first part of this file trains BERT. The second part starts, saves and records a run, and is the
same text in both scripts.
"""

import argparse
import collections
import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import string
import sys
import tempfile
import time
import traceback
import unicodedata
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import psutil
import torch

# Workaround optimizers_import_dynamo (torch 2.15): import it now. The first optimizer would, and
# its memory would be counted as training.
import torch._dynamo
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, PartialState, utils
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import BertForQuestionAnswering

BERT = "google-bert/bert-base-uncased"
OFFLINE = "; without a network, run --prepare_data_only where there is one, or give files"
HUB_NAMES = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}


def main(args):
    """Do one run, from its flags to its record. Returns the model."""
    accelerator, strategy = make_accelerator(args)
    # Workaround dynamic_shapes_off (accelerate 1.15): without them, torch gives up after 8 widths.
    accelerator.state.dynamo_plugin.dynamic = None
    # Rank 0 goes first and fills the caches. Then one rank of each node loads, and then the others.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        config, tokenizer, train_set, eval_set = load_inputs(args)
    rank = describe_rank(accelerator)
    model = load_model(args, config)
    if args.prepare_data_only:
        say(f"ready: the model, {len(train_set)} training and {len(eval_set)} validation features")
        return None
    workload = describe_workload(args, config, train_set, eval_set)
    record = describe_run(accelerator, strategy, args, workload, model, rank)
    train_loader, eval_loader = make_loaders(args, train_set, eval_set, record)
    status, checkpoint = open_folder(accelerator, record, args.resume)
    if status == "completed":
        say(f"{accelerator.project_dir} is a completed run already: see its run.json")
        return None
    steps_per_epoch = len(train_loader) // args.gradient_accumulation_steps
    steps = args.max_train_steps or args.num_epochs * steps_per_epoch
    progress = Progress(agreement(record), steps, steps_per_epoch)
    # Accelerate has no DataParallel. This runs a thread for each GPU.
    if strategy == "dp":
        model = torch.nn.DataParallel(model.to(accelerator.device))
    optimizer, schedule = make_optimizer(args, model, steps)
    model, optimizer, schedule, train_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader
    )
    # Workaround deepspeed_takes_the_smallest_batch (accelerate 1.15): it looks at all loaders
    # that are prepared with the model, so the validation loader is prepared separately.
    eval_loader = accelerator.prepare(eval_loader)
    utils.set_seed(args.seed, device_specific=True)  # Each rank has its own dropout masks.
    load_checkpoint(accelerator, progress, checkpoint)
    signals = watch_signals()
    accelerator.init_trackers(Path(__file__).stem, vars(args))
    with profiled(accelerator, args, progress) as on_step:
        with recorded(accelerator, record, rank, progress):
            train(
                accelerator,
                args,
                model,
                optimizer,
                schedule,
                train_loader,
                eval_loader,
                progress,
                signals,
                on_step,
            )
            if steps:
                save_model(accelerator, model, tokenizer, accelerator.project_dir)
    accelerator.end_training()
    return model


def train(
    accelerator, args, model, optimizer, schedule, loader, eval_loader, progress, signals, on_step
):
    """Train and evaluate, epoch by epoch. Raises KeyboardInterrupt if a signal asks to stop, and
    FloatingPointError if a loss is not finite: on all ranks.
    """
    save_every = args.checkpointing_steps or progress.steps
    # The losses of the micro-batches since the last log, on the device.
    losses = []
    # Of the same micro-batches: the tokens without and with padding.
    sizes = []
    # The norm of the last step's gradients, if they are clipped.
    norm = None
    if not progress.steps:  # --num_epochs 0
        evaluate(accelerator, args, model, eval_loader, progress, signals)
    for epoch in range(len(progress.evaluations), progress.epochs):
        model.train()
        last_step = min((epoch + 1) * progress.steps_per_epoch, progress.steps)
        began = time.perf_counter()
        for inputs, spans, size in batches_left(accelerator, loader, epoch, progress):
            with accelerator.accumulate(model):
                rate = schedule.get_last_lr()[0]  # of this step
                logits = span_logits(model, inputs)
                loss = span_losses(logits, spans["start"], spans["end"]).mean()
                # The gradients become means over micro-batches and ranks.
                accelerator.backward(loss)
                if args.max_grad_norm and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            # Do not read it now: that would wait for the device.
            losses.append(loss.detach())
            sizes.append(size)
            if not accelerator.sync_gradients:
                continue  # The step has more micro-batches.
            progress.step += 1
            on_step()
            saving = progress.step == last_step or progress.step % save_every == 0
            if saving or progress.step % args.logging_steps == 0:
                log_step(accelerator, losses, rate, norm, began, progress)
                count_tokens(accelerator, sizes, progress)
                stopping = any_signal(accelerator, signals)
                if saving or stopping:
                    save_checkpoint(accelerator, progress)
                if stopping:
                    raise KeyboardInterrupt
                losses, sizes = [], []
                began = time.perf_counter()
        evaluate(accelerator, args, model, eval_loader, progress, signals)
        keep_best(accelerator, model, eval_loader.dataset.tokenizer, progress)


def batches_left(accelerator, loader, epoch, progress):
    """The batches of an epoch that the run has not trained on, and none after its last step."""
    # Workaround epoch_of_a_skipped_loader (accelerate 1.15): call it first, as it does not reach
    # BERT's sampler through what skip_first_batches returns.
    loader.set_epoch(epoch)
    accumulation = accelerator.gradient_accumulation_steps
    done = progress.step - epoch * progress.steps_per_epoch
    if done:
        loader = accelerator.skip_first_batches(loader, done * accumulation)
    return itertools.islice(loader, (progress.steps - progress.step) * accumulation)


def log_step(accelerator, losses, rate, norm, began, progress):
    """Read the losses of the micro-batches since `began`, and log how the run goes: also the last
    step's learning rate and, if it is not None, the norm of its gradients. Raises
    FloatingPointError if a loss is inf or NaN. A collective.
    """
    means = torch.stack(losses).view(-1, accelerator.gradient_accumulation_steps).mean(1)
    # The mean over all ranks. Reading it waits for the device.
    means = accelerator.reduce(means, "mean").tolist()
    seconds = time.perf_counter() - began
    progress.train_seconds += seconds
    progress.rates.append(len(means) / seconds)
    # Only before the first evaluation, which may need more memory than training.
    if not progress.evaluations:
        progress.peak_memory = peak_memory()
    for loss in means:
        step = len(progress.losses) + 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss of step {step} is {loss}")
        progress.losses.append(loss)
    values = {"loss": loss, "learning_rate": rate}
    if norm is not None:
        values["gradient_norm"] = float(norm)
    accelerator.log(values, step)
    speed = progress.rates[-1]
    left = duration((progress.steps - step) / speed)
    say(f"step {step:,}/{progress.steps:,}: loss {loss:.4f}, {speed:.2f} steps/s, {left} left")


def duration(seconds):
    """A number of seconds in the units that one reads."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def count_tokens(accelerator, sizes, progress):
    """Add up the tokens that all ranks trained on, without and with padding. A collective.

    `sizes` has [tokens, tokens with padding] of each micro-batch of this rank.
    """
    own = torch.tensor(sizes, device=accelerator.device).sum(0)
    tokens, padded_tokens = accelerator.reduce(own, "sum").tolist()
    progress.tokens += tokens
    progress.padded_tokens += padded_tokens


def any_signal(accelerator, signals):
    """Whether any rank was asked to stop. A collective."""
    if signals:
        accelerator.set_trigger()
    return accelerator.check_trigger()


def save_checkpoint(accelerator, progress):
    """Save what --resume needs. It gets its name when all of it is on disk. A collective."""
    folder = Path(accelerator.project_dir) / "checkpoints"
    partial = folder / "partial"
    # Workaround safetensors_are_private (safetensors 0.8): its files have mode 0600.
    accelerator.save_state(partial, safe_serialization=False)
    if accelerator.is_main_process:
        # Workaround registered_objects_run_code (accelerate 1.15): write JSON, as accelerate loads
        # registered objects in a way that can run code.
        state = {key: value for key, value in vars(progress).items() if key not in OF_THIS_PROCESS}
        state |= {"processes": accelerator.num_processes, "gpus": torch.cuda.device_count()}
        (partial / "progress.json").write_text(json.dumps(state))
    # Wait until the disk has it. os.sync() would wait for all disks of the node.
    descriptor = os.open(partial, os.O_RDONLY)
    failed = ctypes.CDLL(None, use_errno=True).syncfs(descriptor)
    os.close(descriptor)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.rename(folder / f"step_{progress.step:08d}")
        for old in sorted(folder.glob(CHECKPOINT))[:-2]:
            # Rename first: if the run is killed here, no half folder looks like a checkpoint.
            old.rename(folder / f"removed_{time.time_ns()}_{old.name}")
        for removed in folder.glob("removed_*"):
            shutil.rmtree(removed, ignore_errors=True)


def batches_to_evaluate(accelerator, loader, signals):
    """The batches of an evaluation. Says once a minute how far it is. Raises KeyboardInterrupt, on
    all ranks, if a signal asks one of them to stop. A collective.
    """
    said = time.perf_counter()
    for number, batch in enumerate(loader):
        if any_signal(accelerator, signals):
            raise KeyboardInterrupt
        if time.perf_counter() - said > 60:
            said = time.perf_counter()
            say(f"evaluation: {number:,} of {len(loader):,} batches are done")
        yield batch


@torch.no_grad()
def evaluate(accelerator, args, model, loader, progress, signals):
    """Note exact match, F1 and loss on the validation questions. Rank 0 writes predictions.json.

    A signal ends the evaluation early, and --resume repeats it. A collective.
    """
    began = time.perf_counter()
    model.eval()
    batches = []
    for inputs, spans, _ in batches_to_evaluate(accelerator, loader, signals):
        logits = span_logits(model, inputs)
        longest = min(args.max_answer_length, logits.shape[1])
        score, start, end = best_spans(logits, spans["first"], spans["last"], longest)
        found = {
            "id": spans["ids"],
            "loss": span_losses(logits, spans["start"], spans["end"]),
            "no_answer": logits[:, 0].sum(1),  # the score of "no answer", at [CLS]
            "score": score,
            "start": start,
            "end": end,
        }
        # One tensor, so that a batch is one message. The last batch is filled up with features from
        # the beginning, and gather_for_metrics drops their rows.
        columns = torch.stack(list(found.values()), 1)
        batches.append(accelerator.gather_for_metrics(columns))
    metrics = None
    if accelerator.is_main_process:
        rows = torch.cat(batches).cpu()
        columns = dict(zip(found, rows[rows[:, 0].argsort()].unbind(1), strict=True))
        answers = choose_answers(columns, loader.dataset, args.version_2_with_negative)
        metrics = squad_metric(args.version_2_with_negative).compute(
            predictions=list(answers.values()),
            references=[question["answers"] for question in loader.dataset.questions],
        )
        metrics["eval_loss"] = columns["loss"].double().mean().item()
        file = Path(accelerator.project_dir) / "predictions.json"
        file.write_text(json.dumps(answers, indent=1, ensure_ascii=False), encoding="utf-8")
    metrics = utils.broadcast_object_list([metrics])[0]
    if not math.isfinite(metrics["eval_loss"]):
        raise FloatingPointError(f"the evaluation after step {progress.step} gave {metrics}")
    progress.evaluations.append(metrics)
    progress.eval_seconds += time.perf_counter() - began
    accelerator.log(metrics, progress.step)
    text = "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}".format(**metrics)
    if progress.losses:
        text = f"epoch {len(progress.evaluations)}/{progress.epochs}: {text}, training loss "
        text += f"{progress.losses[-1]:.4f}, {progress.train_seconds:.1f} s of training"
    say(text)


def keep_best(accelerator, model, tokenizer, progress):
    """Save the model in best/ if the last evaluation was better than all before. A collective."""
    *before, last = [metrics["eval_loss"] for metrics in progress.evaluations]
    if last < min(before, default=math.inf):
        save_model(accelerator, model, tokenizer, f"{accelerator.project_dir}/best")


def save_model(accelerator, model, tokenizer, folder):
    """Save weights, gathered from all ranks, config and tokenizer, for `from_pretrained`. A kill
    leaves the old weights whole. A collective.
    """
    weights = accelerator.get_state_dict(model) or {}  # ZeRO-3 gives them to rank 0 alone.
    # Workaround prefix_of_compiled_weights (accelerate 1.15): torch.compile renames weights.
    weights = {name.replace("_orig_mod.", ""): weight.float() for name, weight in weights.items()}
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
        utils.save(weights, f"{folder}/.partial", safe_serialization=True)
        # Workaround safetensors_are_private (safetensors 0.8): only the owner may read its files
        # (mode 0600). Give the file the mode of another.
        shutil.copymode(f"{accelerator.project_dir}/.lock", f"{folder}/.partial")
        os.replace(f"{folder}/.partial", f"{folder}/model.safetensors")
        config = accelerator.unwrap_model(model, keep_torch_compile=False).config
        # Workaround fsdp_renames_classes (torch 2.15): a sharded model has another class.
        config.architectures = ["BertForQuestionAnswering"]
        config.dtype = "float32"  # of the saved weights
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@dataclass
class Progress:
    """How far a run is. Checkpoints hold it as it is on rank 0."""

    run: dict  # what a resumed run must have again
    steps: int  # of the whole run
    steps_per_epoch: int
    began: str | None = None  # UTC, as ISO 8601 writes it
    step: int = 0  # the last one that is done
    losses: list = field(default_factory=list)  # of each step: of the global batch
    rates: list = field(default_factory=list)  # steps per second, from log to log
    evaluations: list = field(default_factory=list)  # the metrics of each epoch
    train_seconds: float = 0.0  # without evaluations and saving
    eval_seconds: float = 0.0
    tokens: int = 0  # that all ranks trained on
    padded_tokens: int = 0  # the same with padding
    # These three are this process's own, and in no checkpoint.
    resumed_from: str | None = None  # a checkpoint
    startup_seconds: float | None = None
    peak_memory: float | None = None  # in MB, in training

    @property
    def epochs(self):
        return math.ceil(self.steps / self.steps_per_epoch) if self.steps else 0

    def counts(self):
        """What run.json says besides, in this script alone. Before the first log, it is null."""
        counts = dict.fromkeys(["tokens", "padding_share", "tokens_per_second"])
        if self.tokens:
            counts["tokens"] = self.tokens
            # The share of the tokens that are computed for nothing: they only fill up a batch.
            counts["padding_share"] = round(1 - self.tokens / self.padded_tokens, 4)
            rate = statistics.median(self.rates)
            counts["tokens_per_second"] = self.tokens / self.step * rate
        return counts


def best_spans(logits, first, last, max_answer_length):
    """The span of each feature that scores best (start logit + end logit) and can be an answer: it
    has at most `max_answer_length` tokens and lies between the tokens `first` and `last`.

    In: logits [batch, width, 2], first and last [batch].
    Out: the span's score, its first token and its last token, each [batch].
    """
    positions = torch.arange(logits.shape[1], device=logits.device)
    inside = (positions >= first[:, None]) & (positions <= last[:, None])
    starts, ends = logits.masked_fill(~inside[:, :, None], -torch.inf).unbind(-1)
    # For each start, the ends that may follow it: [batch, width, max_answer_length].
    ends_ahead = F.pad(ends, (0, max_answer_length - 1), value=-torch.inf)
    scores = starts[:, :, None] + ends_ahead.unfold(1, max_answer_length, 1)
    best, pair = scores.flatten(1).max(1)
    start = pair // max_answer_length
    return best, start, start + pair % max_answer_length


def choose_answers(columns, features, version_2):
    """{question id: text}: the best span in all windows of a question.

    `columns` [features] each: the score of "no answer", and of a window's best span the score, the
    first and the last token. With `version_2` the answer is "" where "no answer" scores higher than
    the best span. A question's score of "no answer" is the lowest of its windows, as in the
    official recipe: a window without the answer says nothing about the others.
    """
    best = {}
    no_answer = {}
    names = ["no_answer", "score", "start", "end"]
    owners = features.columns["owner"].tolist()
    rows = zip(owners, *[columns[name].tolist() for name in names], strict=True)
    for window, (owner, null_score, score, start, end) in enumerate(rows):
        no_answer[owner] = min(no_answer.get(owner, null_score), null_score)
        if owner not in best or score > best[owner][0]:
            best[owner] = [score, window, int(start), int(end)]

    answers = {}
    begins = features.table.data["begins"]
    stops = features.table.data["stops"]
    for owner, (score, window, start, end) in sorted(best.items()):
        question = features.questions[owner]
        context = question["context"]
        stop = stops[window][end].as_py()
        # A tokenizer that strips accents has no token for a mark after the last letter.
        while stop < len(context) and unicodedata.category(context[stop]).startswith("M"):
            stop += 1
        text = context[begins[window][start].as_py() : stop]
        answers[question["id"]] = "" if version_2 and no_answer[owner] > score else text
    return answers


def squad_metric(version_2):
    """Exact match and F1 in percent, as a metric of the package `evaluate`.

    The rules are those of SQuAD's official scripts (Rajpurkar et al., 2016 and 2018).
    """
    # Workaround squad_metric_needs_a_network (evaluate 0.4.6): it would download its own "squad".
    # Import it only here: it takes half a second, and only rank 0 needs it.
    import evaluate

    text = datasets.Value("string")
    answers = {"text": datasets.List(text), "answer_start": datasets.List(datasets.Value("int64"))}

    class Squad(evaluate.Metric):
        """`compute` takes a text for each question, and the answers that are right."""

        def _info(self):
            return evaluate.MetricInfo(
                description="exact match and F1",
                citation="",
                features=datasets.Features({"predictions": text, "references": answers}),
            )

        def _compute(self, predictions, references):
            exact = []
            f1 = []
            for prediction, reference in zip(predictions, references, strict=True):
                right = [answer_words(text) for text in reference["text"]]
                # A text of only articles and punctuation is no answer.
                if version_2:
                    right = [words for words in right if words] or [[]]
                words = answer_words(prediction)
                exact.append(words in right)
                f1.append(max(word_f1(words, others, version_2) for others in right))
            return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}

    # It makes a folder in cache_dir, where the features of the questions are, too.
    return Squad(cache_dir=datasets.config.HF_DATASETS_CACHE, keep_in_memory=True)


def answer_words(text):
    """The words of an answer, in lower case, without punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def word_f1(words, others, version_2):
    """The F1 score of an answer's words: the harmonic mean of precision and recall.

    Where one side has no words, the rules of v1.1 give 0, and those of v2.0 compare the two.
    """
    if version_2 and not (words and others):
        return float(words == others)
    same = (collections.Counter(words) & collections.Counter(others)).total()
    return 2 * same / (len(words) + len(others)) if same else 0.0


def load_model(args, config):
    """BERT with a new head, or the one it has, in float32: precision is the launcher's."""
    config.hidden_dropout_prob = args.dropout
    config.attention_probs_dropout_prob = args.dropout
    config.num_labels = 2  # an answer's start and its end
    # Workaround eager_attention_adds_masks (transformers 5.24): SDPA knows bool masks.
    config._attn_implementation = "sdpa"
    utils.set_seed(args.seed)  # New weights are the same on all ranks.
    # Workaround zero_3_shards_while_loading (transformers 5.24): under ZeRO-3, it would draw a new
    # head on the GPU, with other numbers.
    transformers.integrations.unset_hf_deepspeed_config()
    if args.from_scratch:
        model = BertForQuestionAnswering(config)
    else:
        model = load_weights(args.model_name_or_path, config)
    # FSDP's units. Workaround berts_own_fsdp_units (accelerate 1.15, transformers 5.24): with
    # transformers' own list, which has the embeddings too, FSDP2 fails.
    model._no_split_modules = ["BertLayer"]
    # The second forward pass restores the random state, so its dropout masks are the same.
    if args.activation_checkpointing:
        old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return model.float()


def load_weights(name, config):
    """Load BERT's weights from a folder or the Hub. Another task's head is left out."""
    try:
        model, loading = BertForQuestionAnswering.from_pretrained(
            name,
            config=config,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    # The file may be cut, or of another kind, such as a web page or a pointer of Git LFS.
    except Exception as problem:
        files = ("model.safetensors", "pytorch_model.bin")
        found = [file for file in files if Path(name, file).exists()]
        where = " of ".join([*found[:1], name])
        abort(f"cannot load {where}: {type(problem).__name__}: {problem}")
    # Lists of missing, unexpected and misshapen weights.
    keys = sorted(str(key) for keys in loading.values() for key in keys)
    wrong = [key for key in keys if re.search("encoder|embeddings[.](?!position_ids)", key)]
    if wrong:
        abort(f"{len(wrong)} weights of {name} do not fit its config.json: {wrong[0]} ...")
    return model


def span_logits(model, inputs):
    """The logits of an answer's start and end at each token, float32 [batch, width, 2]. They are
    lowest on padding, so that the width of a batch changes nothing.
    """
    logits = torch.stack(model(**inputs, return_dict=False), 2).float()
    hidden = ~inputs["attention_mask"][:, 0, 0, :, None]
    return logits.masked_fill(hidden, torch.finfo(logits.dtype).min)


def span_losses(logits, starts, ends):
    """The mean of the start's and the end's cross-entropy, [batch].

    In: logits [batch, width, 2], and the right tokens, int64 [batch] each.
    """
    start_logits, end_logits = logits.unbind(-1)
    start_losses = F.cross_entropy(start_logits, starts, reduction="none")
    end_losses = F.cross_entropy(end_logits, ends, reduction="none")
    return (start_losses + end_losses) / 2


def make_optimizer(args, model, steps):
    """AdamW, and a schedule that raises the learning rate linearly, and then lowers it to 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    warmup = args.num_warmup_steps
    return optimizer, transformers.get_linear_schedule_with_warmup(optimizer, warmup, steps)


def load_inputs(args):
    """The model's config, its tokenizer, and the `Features` of both splits."""
    # Otherwise each rank would warn about the new head.
    transformers.logging.set_verbosity_error()
    if not show_progress_bars():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
    name = args.model_name_or_path
    check_hub(args)
    try:
        # The model's outputs are a start and an end, and its folder's own code is not run.
        config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=False, output_attentions=False, output_hidden_states=False
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # Rank 0 downloads the weights before the others look for them.
        if not args.from_scratch:
            transformers.utils.cached_file(
                name, "model.safetensors", _raise_exceptions_for_missing_entries=False
            )
    except Exception as problem:  # of the network, or a file
        abort(f"cannot load {name}: {problem}"[:380] + OFFLINE)
    fits = 5 < len(tokenizer) <= config.vocab_size  # Without vocab.txt there are 5 tokens.
    positions = getattr(config, "position_embedding_type", "absolute")
    bert = config.model_type == "bert" and positions == "absolute" and config.type_vocab_size > 1
    if not (bert and tokenizer.is_fast and fits):
        abort(
            f"{name} is a {config.model_type} model with {positions} positions and a "
            f"{type(tokenizer).__name__} of {len(tokenizer)} tokens, but the script needs BERT "
            "with absolute positions, two types of tokens, and a fast tokenizer that fits it"
        )
    if args.max_seq_length > config.max_position_embeddings:
        abort(
            f"--max_seq_length {args.max_seq_length} is more than the "
            f"{config.max_position_embeddings} positions of {name}"
        )
    tokenizer.truncation_side = "right"
    train_set = eval_set = load_features(read_questions(args, "validation"), tokenizer, args)
    if trains(args):
        train_set = load_features(read_questions(args, "train"), tokenizer, args)
    return config, tokenizer, train_set, eval_set


def trains(args):
    """Whether the run trains, and does not only evaluate."""
    return bool(args.num_epochs or args.max_train_steps)


def check_hub(args):
    """Take only what is cached if the Hub does not answer."""
    # Workaround the_hub_waits_for_ever (huggingface_hub 2.4): its client has no timeout.
    if huggingface_hub.is_offline_mode():
        return
    api = huggingface_hub.HfApi()
    try:
        if not os.path.isdir(args.model_name_or_path):
            api.model_info(args.model_name_or_path, timeout=20)
        elif not args.validation_file:
            api.dataset_info(HUB_NAMES[args.version_2_with_negative], timeout=20)
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError):
        # It says no, or this is no name. from_pretrained and load_dataset report why.
        pass
    # The types of these exceptions differ between versions of huggingface_hub.
    except Exception as problem:
        say(f"the Hub does not answer, so only cached files are used: {problem}")
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def read_questions(args, split):
    """The first --max_..._samples questions of "train" or "validation": dicts of id, question,
    context and answers {text: [...], answer_start: [...]}, as on the Hub.
    """
    train = split == "train"
    path = args.train_file if train else args.validation_file
    limit = args.max_train_samples if train else args.max_eval_samples
    name = path or HUB_NAMES[args.version_2_with_negative]
    try:
        rows = read_squad(path) if path else datasets.load_dataset(name, split=split)
    except (OSError, ValueError) as problem:  # of the network
        abort(f"cannot load {name}: {problem}"[:380] + OFFLINE)
    questions = {}
    for row in itertools.islice(rows, limit or None):
        fault = check_question(row, args.version_2_with_negative, questions)
        if fault:
            abort(f"{name}: question {row['id']} {fault}")
        questions[row["id"]] = row
    if not questions:
        abort(f"{name} has no questions")
    return list(questions.values())


def check_question(row, version_2, others):
    """What is wrong with a question that a user can correct, or None. `others` are the questions
    before it, by their ids.
    """
    texts = row["answers"]["text"]
    if row["id"] in others:
        return "is there twice"
    if not texts and not version_2:
        return "has no answer: add --version_2_with_negative if this is SQuAD v2.0"
    # Later answers are used as texts alone, for the scores. Published files misplace some of them.
    start = row["answers"]["answer_start"][0] if texts else 0
    if start < 0 or not row["context"].startswith("".join(texts[:1]), start):
        return f"has the answer {texts[0]!r}, which is not at character {start} of its context"
    if not all(text.strip() for text in texts):
        return "has an answer without text"
    return None


def read_squad(path):
    """Yield the questions of a file in SQuAD's nested JSON, v1.1 or v2.0, in the Hub's form."""
    place = "its top"
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8-sig"))["data"]
        for number, article in enumerate(articles, 1):
            place = f"article {number}"
            for paragraph in article["paragraphs"]:
                place = f"the context {str(paragraph.get('context'))[:40]!r}"
                for qa in paragraph["qas"]:
                    place = f"question {qa.get('id')}"
                    impossible = utils.str_to_bool(str(qa.get("is_impossible") or False))
                    answers = [] if impossible else qa["answers"]
                    texts = [answer["text"] for answer in answers]
                    starts = [int(answer["answer_start"]) for answer in answers[:1]]
                    row = {
                        "id": str(qa["id"]),
                        "question": qa["question"],
                        "context": paragraph["context"],
                    }
                    for text in (*row.values(), *texts):
                        # This fails if it is no text, or has half a character.
                        text.encode()
                    row["answers"] = {"text": texts, "answer_start": starts}
                    yield row
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as problem:
        abort(f"{path} is not in SQuAD's form, at {place}: {problem!r}")


def load_features(questions, tokenizer, args):
    """The `Features` of questions. They are cached under a key of all that they depend on."""
    sizes = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    # Workaround tokenizers_remember_truncation (transformers 5.24): the setting of the last call
    # would change the key.
    tokenizer.backend_tokenizer.no_truncation()
    words = tokenizer.backend_tokenizer.to_str()
    text = json.dumps(questions)
    key = datasets.fingerprint.Hasher.hash([text, sizes, words, tokenize])
    file = Path(datasets.config.HF_DATASETS_CACHE) / "squad_features" / f"{key}.arrow"
    if not file.exists():
        # Write it into a folder that is deleted if the disk is full.
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = tempfile.TemporaryDirectory(dir=file.parent, ignore_cleanup_errors=True)
        except PermissionError as problem:
            abort(f"{problem}: let HF_HOME name a folder in which you may write")
        with partial as folder:
            # Workaround datasets_in_memory_have_no_cache (datasets 5.2): so name a file.
            table = datasets.Dataset.from_list(questions)
            table.map(
                tokenize,
                batched=True,
                with_indices=True,
                remove_columns=table.column_names,
                fn_kwargs={"tokenizer": tokenizer} | sizes,
                new_fingerprint=key,
                cache_file_name=f"{folder}/{file.name}",
            )
            os.replace(f"{folder}/{file.name}", file)
        tokenizer.backend_tokenizer.no_truncation()  # The tokenizer is saved with the model.
    table = datasets.Dataset.from_file(str(file))
    # The key depends on Python's version. This number depends on the data alone.
    checksum = zlib.crc32(text.encode())
    for name in ("input_ids", "start", "end"):
        for chunk in table.data.column(name).chunks:
            numbers = chunk.flatten() if name == "input_ids" else chunk
            checksum = zlib.crc32(numbers.to_numpy(), checksum)
    return Features(questions, table, tokenizer, checksum, args.max_seq_length)


def tokenize(batch, owners, tokenizer, max_seq_length, doc_stride):
    """The features of a batch of questions, for `datasets.map`. A feature is a question with a
    window of its context, [CLS] question [SEP] window [SEP].

    Columns, each with one value for each feature:
        input_ids       the tokens
        length          their number
        begins, stops   the first and one-past-last character of each token, in the context
        first           the first token of the window
        start, end      the answer's first and last token, or 0 and 0, [CLS], where there is none
        owner           the number of the question
    """
    asked = [question.strip() for question in batch["question"]]
    for name, ids in zip(batch["id"], tokenizer(asked)["input_ids"], strict=True):
        room = max_seq_length - 1 - len(ids)  # 1 is the last [SEP].
        if room <= doc_stride:
            abort(
                f"question {name} leaves {max(room, 0)} of --max_seq_length {max_seq_length} "
                f"tokens for its context, which must be more than --doc_stride {doc_stride}"
            )
    texts = ["".join(answers["text"][:1]) for answers in batch["answers"]]
    answers = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    found = tokenizer(
        asked,
        batch["context"],
        truncation="only_second",
        max_length=max_seq_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    features = []
    for encoding, row in zip(found.encodings, found["overflow_to_sample_mapping"], strict=True):
        pieces = answers["offset_mapping"][row]
        if 1 not in encoding.sequence_ids or (texts[row] and not pieces):
            abort(f"question {batch['id'][row]} has a context or answer without tokens")
        offsets = np.array(encoding.offsets)
        start, end = find_span(encoding, batch["answers"][row]["answer_start"], pieces)
        feature = {
            "input_ids": encoding.ids,
            "length": len(encoding.ids),
            "begins": offsets[:, 0],
            "stops": offsets[:, 1],
            "first": encoding.sequence_ids.index(1),
            "start": start,
            "end": end,
            "owner": owners[row],
        }
        features.append(feature)
    return {name: [feature[name] for feature in features] for name in features[0]}


def find_span(encoding, starts, pieces):
    """The first and last token of the first answer, in one window of its context.

    The answer starts at character starts[0]. `pieces` are the first and one-past-last characters of
    each token of the answer's text. (Spaces, accents and invisible characters at its edges may
    belong to no token.) The span is 0 and 0 unless the whole answer is in the window.
    """
    if not starts:
        return 0, 0
    first = starts[0] + pieces[0][0]
    last = starts[0] + pieces[-1][1] - 1
    # The context is sequence 1. A character that is in no token of the window gives None.
    span = encoding.char_to_token(first, 1), encoding.char_to_token(last, 1)
    return (0, 0) if None in span else span


class Features(Dataset):
    """A split of the data as BERT reads it. Item `i` is a feature, as `tokenize` explains it."""

    def __init__(self, questions, table, tokenizer, checksum, max_seq_length):
        self.questions = questions  # dicts
        self.table = table  # a datasets.Dataset
        self.tokenizer = tokenizer  # that made it
        self.checksum = checksum
        self.max_width = max_seq_length
        self.tokens = table.with_format("torch", columns=["input_ids"])  # They stay on the disk.
        names = ["length", "first", "start", "end", "owner"]
        self.columns = table.with_format("torch", columns=names)[:]  # int64 [features] each
        self.lengths = self.columns["length"]

    def __len__(self):
        return len(self.table)

    def __getitems__(self, ids):
        """A whole batch: what the model reads, what belongs to its answers, and its size.

        The inputs are [batch, width], with the width of the longest feature (dynamic padding). What
        belongs to the answers is [batch] each. The size is [tokens, tokens with padding].
        """
        input_ids = pad_sequence(list(self.tokens[ids]["input_ids"]), batch_first=True)
        width = input_ids.shape[1]
        if torch.cuda.is_available():  # Tensor cores want multiples of 8.
            width = min((width + 7) // 8 * 8, self.max_width)
        input_ids = F.pad(input_ids, (0, width - input_ids.shape[1]))
        ids = torch.tensor(ids)
        positions = torch.arange(width)
        mask = positions < self.lengths[ids, None]
        in_context = positions >= self.columns["first"][ids, None]
        inputs = {
            "input_ids": input_ids,
            # transformers takes a mask [batch, heads, query, key] as it is.
            "attention_mask": mask[:, None, None, :],
            "token_type_ids": (mask & in_context).int(),
        }
        spans = {name: self.columns[name][ids] for name in ("start", "end", "first")}
        size = [self.lengths[ids].sum().item(), mask.numel()]
        return inputs, spans | {"ids": ids, "last": self.lengths[ids] - 2}, size


class LengthSampler(Sampler):
    """The order of the training features. A global batch has similar lengths, which saves padding.

    It shuffles the features, sorts pools of 50 global batches (fewer if there would not be 4 pools)
    by length, cuts them into batches, and shuffles the batches. The batch with the longest feature
    comes first: if memory is short, that shows at once. The order depends on seed and epoch, not on
    the number of processes. Features that do not fill a global batch are dropped.
    """

    def __init__(self, lengths, global_batch_size, seed):
        self.lengths = lengths
        self.size = global_batch_size
        self.seed = seed
        self.steps = len(lengths) // global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Order the features of an epoch: int64 [steps, global batch].

        The set_epoch of the prepared DataLoader calls this.
        """
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.steps * self.size]
        pools = order.split(self.size * max(1, min(50, self.steps // 4)))
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(pools).view(self.steps, self.size)
        batches = batches[torch.randperm(self.steps, generator=generator)]
        # The batch with the longest feature comes first.
        longest = self.lengths[batches].amax(1).argmax().item()
        self.order = torch.cat([batches[longest:], batches[:longest]])

    def __len__(self):
        return self.order.numel()

    def __iter__(self):
        return iter(self.order.flatten().tolist())


def make_loaders(args, train_set, eval_set, record):
    """The DataLoaders of both splits. A batch is that of all ranks, and each takes its part."""
    sampler = None
    if trains(args):
        if record["global_batch_size"] > len(train_set):
            abort(f"the global batch of {record['global_batch_size']} is more than all samples")
        sampler = LengthSampler(train_set.lengths, record["global_batch_size"], args.seed)
    by_length = eval_set.lengths.argsort(descending=True, stable=True).tolist()
    batch_size = args.per_device_train_batch_size * record["devices"]
    eval_batch_size = args.per_device_eval_batch_size * record["devices"]
    # Workaround loaders_draw_random_numbers (torch 2.15): give the loaders their own generator.
    # Otherwise they advance the one that dropout uses, and a resumed run has other masks.
    # Features makes whole batches, so there is nothing to collate.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    options["pin_memory"] = torch.cuda.is_available()
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, **options)
    return train_loader, DataLoader(eval_set, eval_batch_size, sampler=by_length, **options)


def describe_workload(args, config, train_set, eval_set):
    """The work of this script, which a resumed run must have again."""
    scratch = ", from scratch" if args.from_scratch else ""
    file = args.train_file or args.validation_file
    return {
        "model": Path(args.model_name_or_path).name + scratch,
        "dataset": Path(file).name if file else HUB_NAMES[args.version_2_with_negative],
        "questions": len(train_set.questions),
        "samples": len(train_set),
        "eval_questions": len(eval_set.questions),
        "eval_samples": len(eval_set),
        "features": f"{train_set.checksum:08x}, {eval_set.checksum:08x}",
        "version_2": args.version_2_with_negative,
        "sequence_length": args.max_seq_length,
        "max_answer_length": args.max_answer_length,
        "num_warmup_steps": args.num_warmup_steps,
        "layers": config.num_hidden_layers,
        "positions": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    description = (__doc__ or "").partition("\n")[0]  # python -OO takes docstrings away.
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    # An error is one line, without the usage.
    parser.error = abort  # type: ignore[method-assign]
    add = parser.add_argument
    add("--model_name_or_path", default=BERT, help="BERT's name on the Hub, or a folder")
    add("--from_scratch", action="store_true", help="the model's config, but random weights")
    add("--train_file", help="SQuAD's nested JSON to train on (without: SQuAD from the Hub)")
    add("--validation_file", help="questions to evaluate on, in the same form")
    add("--version_2_with_negative", action="store_true", help="some questions have no answer")
    add("--max_train_samples", type=int, default=10_000, help="the first N questions; 0: all")
    add("--max_eval_samples", type=int, default=500, help="the same in evaluation")
    add("--max_seq_length", type=int, default=384, help="tokens of question and context")
    add("--doc_stride", type=int, default=128, help="tokens that windows of a long context share")
    add("--max_answer_length", type=int, default=30, help="of a predicted answer, in tokens")
    add("--activation_checkpointing", action="store_true", help="less memory, a third more work")
    add("--prepare_data_only", action="store_true", help="fetch and check all inputs, then stop")
    add("--num_epochs", type=int, default=4, help="passes over the data; 0: only evaluate")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=4, help="samples in a micro-batch")
    add("--per_device_eval_batch_size", type=int, default=32, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--learning_rate", type=float, default=3e-5, help="AdamW's, before it falls linearly to 0")
    add("--num_warmup_steps", type=int, default=0, help="steps in which it rises linearly from 0")
    add("--weight_decay", type=float, default=0.0, help="AdamW's")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add("--output_dir", type=os.path.expanduser, help="without it, a new folder in runs/")
    add("--logging_steps", type=int, default=10, help="steps from log to log; then a run can stop")
    add("--checkpointing_steps", type=int, help="steps from save to save, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="log to the tracker of --report_to")
    trackers = utils.LoggerType.list()
    add("--report_to", choices=trackers, default="tensorboard", help="all: each that is installed")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    args = parser.parse_args()
    may_be_0 = ["seed", "dropout", "doc_stride", "max_train_samples", "max_eval_samples"]
    check_numbers(args, [*may_be_0, "num_epochs", "num_warmup_steps", "weight_decay"])
    if args.resume and not args.output_dir:
        abort("--resume goes on with the run in a folder: name it by --output_dir")
    one_file = bool(args.train_file) != bool(args.validation_file)
    if one_file and (trains(args) or args.train_file):
        abort("--train_file and --validation_file go together: give both, or none")
    if os.path.realpath(args.output_dir or "runs") == os.path.realpath(args.model_name_or_path):
        abort("--output_dir is the model's own folder, and its weights would be overwritten")
    return args


# -------- The rest is one text in both scripts: steps, launch, record, folder, signals, errors.
# -------- A test compares them, so change both.

VERSION = "0.6.0"  # CHANGELOG.md says what changed
# Only folders with such names are checkpoints.
CHECKPOINT = "step_" + "[0-9]" * 8
# The flags that name a file or a folder.
PATHS = {"output_dir", "data_dir", "model_name_or_path", "train_file", "validation_file"}
REMOVE_IT = ". If it is damaged, remove it, and --resume takes the one before"
# Fields of Progress that describe one process. Checkpoints do not hold them.
OF_THIS_PROCESS = {"resumed_from", "startup_seconds", "peak_memory"}
# The keys that DeepSpeed's JSON may have. With others, the record would not say what was computed.
DEEPSPEED_KEYS = {
    "bf16",
    "comms_logger",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "steps_per_print",
    "timers",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
}


def load_checkpoint(accelerator, progress, checkpoint):
    """Go on where a checkpoint was saved, if there is one. A collective."""
    if not checkpoint:
        return
    say(f"resuming from {checkpoint}")
    try:
        state = json.loads(Path(checkpoint, "progress.json").read_bytes())
        accelerator.load_state(checkpoint)
        # Other ranks, or ranks that see other GPUs, cannot go on with the same random numbers.
        here = accelerator.num_processes, torch.cuda.device_count()
        if (state["processes"], state["gpus"]) == here:
            restore_random_states(f"{checkpoint}/random_states_{accelerator.process_index}.pkl")
        for name in vars(progress).keys() - OF_THIS_PROCESS:
            setattr(progress, name, state[name])
    # Workaround checkpoint_errors_are_no_exceptions (torch 2.15): FSDP's CheckpointException is a
    # BaseException.
    except BaseException as problem:
        if isinstance(problem, (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError)):
            raise
        abort(f"cannot load {checkpoint}: {type(problem).__name__}: {problem}"[:400] + REMOVE_IT)
    progress.resumed_from = checkpoint
    # Workaround count_of_micro_batches (accelerate 1.15): it loads that of the old run, which may
    # have had more micro-batches per step.
    accelerator.step = 0


def restore_random_states(file):
    """Give the generators their states of a checkpoint, or raise an error."""
    # Workaround lost_random_states (accelerate#4283): accelerate 1.15 goes on without them, with
    # other dropout masks.
    states = utils.load(file)
    torch.set_rng_state(states["torch_manual_seed"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])


def make_accelerator(args):
    """The Accelerator for the launcher's YAML, and its strategy, such as "zero2". A collective."""
    die_with_the_launcher()
    dp = os.environ.get("ACCELERATE_DYNAMO_MODE") == "data_parallel"
    # torch.compile has no such mode: it is how dp.yaml marks itself.
    if dp:
        del os.environ["ACCELERATE_DYNAMO_MODE"]
    fsdp = utils.parse_flag_from_env("ACCELERATE_USE_FSDP")
    zero = utils.parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    # Workaround flags_that_must_say_true (accelerate 1.15): it reads them in several places, and
    # some of these understand only "true".
    os.environ |= {"ACCELERATE_USE_FSDP": str(fsdp), "ACCELERATE_USE_DEEPSPEED": str(zero)}
    check_launch(fsdp, zero)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
        PartialState()
    else:
        connect_cpu_ranks(fsdp, zero)
    folder = args.output_dir or time.strftime(f"runs/{Path(__file__).stem[6:]}-%Y%m%d-%H%M%S")
    # All ranks take rank 0's: they may start in different seconds.
    folder = utils.broadcast_object_list([folder])[0]
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # A batch is that of all ranks, and the order depends on the seed and the epoch alone.
        dataloader_config=utils.DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=args.seed, non_blocking=True
        ),
        kwargs_handlers=[
            # Gradients are views of the all-reduce's buckets, which saves a copy of them.
            utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            utils.ProfileKwargs(
                schedule_option={"wait": 0, "warmup": 12, "active": 5, "repeat": 1},
                output_trace_dir=f"{folder}/traces",
            ),
        ],
        log_with=args.report_to if args.with_tracking else None,
        project_config=utils.ProjectConfiguration(folder, logging_dir=f"{folder}/tensorboard"),
    )
    strategy = name_strategy(accelerator.state, dp)
    if strategy.startswith("zero"):
        configure_deepspeed(accelerator, args)
    if strategy in ("fsdp", "hsdp"):
        configure_fsdp(accelerator.state.fsdp_plugin, args)
    check_accelerator(accelerator, strategy, args)
    return accelerator, strategy


def check_launch(fsdp, zero):
    """Refuse a launch that would silently be another run."""
    env = os.environ.get
    gpus = torch.cuda.device_count()
    # Workaround ranks_train_alone (accelerate 1.15): each rank trains alone if LOCAL_RANK is not
    # set. The launcher also sets MASTER_ADDR when it starts one process instead of --num_processes.
    alone = env("WORLD_SIZE", "1") == env("SLURM_STEP_NUM_TASKS", "1") == "1"
    if "LOCAL_RANK" not in os.environ and (not alone or "MASTER_ADDR" in os.environ):
        abort(
            "WORLD_SIZE, MASTER_ADDR or SLURM_STEP_NUM_TASKS asks for several processes, but each "
            "would train alone. Use ddp.yaml without --cpu. For one process, use --num_processes 1 "
            "and unset these variables"
        )
    if 0 < gpus < int(env("LOCAL_WORLD_SIZE", 1)):
        abort(f"more processes than GPUs: add --num_processes {gpus} (times the nodes)")
    # Workaround fsdp_version_is_1 (accelerate 1.15): version 1 is its default.
    if fsdp and env("FSDP_VERSION", "1") != "2":
        abort("fsdp_version must be 2: write it into the YAML, or set FSDP_VERSION=2")
    # In torch 2.15, restarted ranks may connect to the ports of those that died.
    if env("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        abort("--max_restarts must be 0: launch again with --resume instead")
    if gpus and not torch.cuda.is_available():
        abort(f"torch {torch.__version__} cannot use the GPU here: is the driver too old for it?")
    # Accelerator would read this flag, but PartialState has taken the GPU before.
    if utils.parse_flag_from_env("ACCELERATE_USE_CPU") and torch.cuda.is_available():
        abort("--cpu and use_cpu do not hide the GPUs: set CUDA_VISIBLE_DEVICES= instead")
    if zero and launched_with_dynamo():
        abort("accelerate drops --dynamo_backend under DeepSpeed: leave it out, or use fsdp.yaml")


def launched_with_dynamo():
    """Whether the `accelerate launch` that started this rank, or its YAML, asks for a compiler."""
    # Workaround deepspeed_gets_no_compiler (accelerate 1.15): it sets its variable for all ranks
    # except DeepSpeed's, so read the launcher's command line.
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    asked = os.environ.get("ACCELERATE_DYNAMO_BACKEND")
    words = []
    # There may be no parent to see.
    with contextlib.suppress(psutil.Error, AttributeError):
        words = psutil.Process().parent().cmdline()
    # Before the flags are python, and `accelerate launch`, `accelerate-launch` or its module.
    while words and not words.pop(0).endswith("launch"):
        pass
    if words:
        flags, _ = launch_command_parser().parse_known_args(words)
        asked = asked or flags.dynamo_backend
        if not asked and (flags.config_file or os.path.isfile(default_config_file)):
            config = load_config_from_file(flags.config_file).dynamo_config
            asked = config.get("dynamo_backend") or config.get("backend")
    return str(asked or "no").lower() != "no"


def connect_cpu_ranks(fsdp, zero):
    """Connect ranks that have no GPU, over gloo. A collective."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this node
    # A rank and its gloo threads are faster on cores of their own.
    if 1 < ranks <= len(cores):
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"]) :: ranks])
    # Workaround deepspeed_warns_on_a_cpu (deepspeed 0.19.8): it would look for a GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if zero:
        import deepspeed.ops

        # Workaround deepspeed_compiles_on_a_cpu (deepspeed 0.19.8): it would take 20 seconds, and
        # write into the user's home.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Workaround no_fsdp_on_a_cpu (accelerate 1.15): it shards on CPUs only over gloo, and only if
    # the type says MULTI_GPU.
    sharded = fsdp or zero
    state = PartialState(cpu=not sharded, backend="gloo" if sharded else None)
    if fsdp:
        state.distributed_type = utils.DistributedType.MULTI_GPU


def name_strategy(state, dp):
    """The strategy that accelerate's state shows, such as "zero2"."""
    if state.distributed_type == utils.DistributedType.DEEPSPEED:
        zero = state.deepspeed_plugin.deepspeed_config.get("zero_optimization")
        if not isinstance(zero, dict) or zero.get("stage") not in (0, 1, 2, 3):
            abort("DeepSpeed's JSON needs zero_optimization with a stage from 0 to 3")
        return f"zero{zero['stage']}"
    if state.distributed_type == utils.DistributedType.FSDP:
        return "hsdp" if "ACCELERATE_USE_PARALLELISM_CONFIG" in os.environ else "fsdp"
    if "LOCAL_RANK" in os.environ:
        return "ddp"
    return "dp" if dp else "baseline"


def configure_deepspeed(accelerator, args):
    """Set in DeepSpeed's config what the script's flags say."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    zero = config["zero_optimization"]
    unknown = sorted(set(config) - DEEPSPEED_KEYS)
    if unknown:
        known = ", ".join(sorted(DEEPSPEED_KEYS))
        abort(f"DeepSpeed's JSON may not have {unknown[0]}, only {known}")
    # Workaround zero_3_gathers_no_weights (deepspeed 0.19.8): save_model needs it in any precision.
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    # Workaround deepspeed_clips_unasked (accelerate 1.15): it would clip to 1.0.
    if config.get("gradient_clipping", "auto") == "auto":
        config["gradient_clipping"] = 0.0
    if args.max_grad_norm:
        config["gradient_clipping"] = args.max_grad_norm
        # Workaround clipping_needs_the_norm (deepspeed 0.19.8): it refuses to clip without it.
        zero.pop("compute_grad_norm", None)
    # Workaround deepspeed_globs_its_folder (deepspeed 0.19.8): it takes the path for a pattern.
    if re.search(r"[*?\[]", os.path.abspath(accelerator.project_dir)):
        abort(f"DeepSpeed cannot load from {accelerator.project_dir}: choose a path without * ? [")


def configure_fsdp(plugin, args):
    """Set in FSDP's plugin what a YAML cannot say, and refuse what would train otherwise."""
    # Workaround ram_efficient_loading (transformers 5.24): other ranks do not train a new head.
    if plugin.cpu_ram_efficient_loading:
        abort("write fsdp_cpu_ram_efficient_loading: false, or a new head is not trained")
    # Workaround fsdp_checkpointing_masks (accelerate 1.15): it does not keep the random state.
    if plugin.activation_checkpointing and args.dropout:
        abort(
            "fsdp_activation_checkpointing computes other dropout masks the second time: use "
            "train_bert_squad.py's --activation_checkpointing instead"
        )
    if not torch.cuda.is_available():
        # Workaround offloading_pins_memory (torch 2.15): it pins memory for a GPU only.
        plugin.cpu_offload.pin_memory = False


def check_accelerator(accelerator, strategy, args):
    """Refuse settings with which accelerate would silently train otherwise."""
    precision = accelerator.mixed_precision
    # Workaround launchers_accumulation_wins (accelerate 1.15): it replaces the script's, silently.
    if accelerator.gradient_accumulation_steps != args.gradient_accumulation_steps:
        abort("only the script's --gradient_accumulation_steps counts: leave out the launcher's")
    # Workaround fp16_without_a_gpu (accelerate 1.15): it would compute in fp32, silently.
    if precision == "fp16" and not torch.cuda.is_available():
        abort("fp16 needs a GPU, and without one accelerate would compute in fp32: use bf16 or no")
    # Workaround threads_autocast_to_fp16 (torch 2.15): each thread has its own dtype.
    if precision == "bf16" and strategy == "dp":
        abort("dp's threads would compute in fp16, not in bf16: use ddp.yaml")
    # Tensor, context and sequence parallelism give several ranks the same samples.
    sizes = accelerator.parallelism_config
    if sizes and sizes.non_data_parallel_size > 1:
        abort("parallelism_config: only dp_replicate_size and dp_shard_size may be above 1")
    # Workaround missing_trackers (accelerate 1.15): it leaves them out, silently.
    if args.with_tracking and not accelerator.log_with:
        abort(f"--report_to {args.report_to}: no such tracker is installed here")


def describe_rank(accelerator):
    """Where this rank runs, and what memory it holds without a model."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        model = re.search(r"model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text())
        name = f"CPU ({model[1] if model else os.uname().machine})"  # ARM names no model.
        with contextlib.suppress(OSError):  # Reset the peak, VmHWM: see man 5 proc.
            Path("/proc/self/clear_refs").write_text("5")
    return {
        "rank": accelerator.process_index,
        "host": os.uname().nodename,
        "device_name": name,
        "memory_before_mb": peak_memory(),
    }


def peak_memory():
    """The most MB that this process has held on its (first) GPU, or CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", status)  # Not all kernels know HWM.
    return int(kilobytes[0]) * 1024 / 1e6


def describe_run(accelerator, strategy, args, workload, model, rank):
    """What run.json says from the start: what was asked for, and where it runs."""
    devices = accelerator.num_processes
    # The one process uses all GPUs that it sees.
    if strategy == "dp":
        devices = max(1, torch.cuda.device_count())
    micro_batch = args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps
    options = {
        re.sub("FSDP_|PARALLELISM_CONFIG_", "", name).lower(): value
        for name, value in os.environ.items()
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_DP_"))
    }
    dynamo = accelerator.state.dynamo_plugin.backend.value.lower()
    compute = {"precision": accelerator.mixed_precision, "dynamo": dynamo}
    names = ["num_epochs", "max_train_steps", "max_grad_norm", "seed", "dropout"]
    flags = {name: getattr(args, name) for name in [*names, "learning_rate", "weight_decay"]}
    if strategy.startswith("zero"):  # A YAML may clip gradients, too.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        options = dict(config["zero_optimization"])
        flags["max_grad_norm"] = config["gradient_clipping"] or None
    return compute | {
        "version": VERSION,
        "script": Path(__file__).name,
        "strategy": strategy,
        "strategy_options": options,
        "workload": workload | compute | flags,
        "processes": accelerator.num_processes,
        "devices": devices,
        "device_name": rank["device_name"],
        "threads": torch.get_num_threads(),
        "per_device_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": micro_batch * devices * accumulation,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "activation_checkpointing": getattr(args, "activation_checkpointing", False),
        "profiled": args.profile,
        "argv": sys.argv,
        "versions": {
            name: getattr(sys.modules.get(name), "__version__", None)
            for name in ("torch", "accelerate", "deepspeed", "transformers")
        },
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def write_record(accelerator, record, rank, progress, status):
    """Add what was measured, write run.json, and say how the run stands. A collective."""
    # psutil rounds the time of boot, and with it the start: the difference of both is exact.
    began = psutil.Process().create_time() - psutil.boot_time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - began  # of this process, imports included
    progress.startup_seconds = progress.startup_seconds or age
    # A resumed run began when its first attempt did.
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    progress.began = progress.began or now
    used = os.times()
    measured = {"real": age, "user": used.user, "sys": used.system}
    ranks = utils.gather_object([rank | measured | {"peak_memory_mb": progress.peak_memory}])
    # The median leaves out the warm-up of devices and links.
    rate = statistics.median(progress.rates or [0])
    seconds = {"startup": progress.startup_seconds, "total": age}
    seconds |= {"train": progress.train_seconds, "eval": progress.eval_seconds}
    record |= progress.counts() | {
        "status": status,
        "began": progress.began,
        "steps": progress.step,
        "seconds": seconds,
        "loss_history": list(enumerate(progress.losses, 1)),
        "metrics": progress.evaluations[-1] if progress.evaluations else None,
        "steps_per_second": progress.rates,
        "samples_per_second": rate * record["global_batch_size"] or None,
        "ranks": ranks,
        "nodes": len({rank["host"] for rank in ranks}),
        "resumed_from": progress.resumed_from,
    }
    folder = accelerator.project_dir
    if accelerator.is_main_process:
        partial = Path(folder, "run.json.partial")
        partial.write_text(json.dumps(record, indent=1))
        # If the run is killed now, the old file or the new one is there.
        partial.replace(f"{folder}/run.json")
    if status == "running":
        say(
            f"{record['strategy']} on {record['devices']} x {record['device_name']}: "
            f"{record['parameters']:,} parameters, {progress.steps:,} steps of "
            f"{record['global_batch_size']} samples; results go to {folder}"
        )
        return
    say(
        f"{status} at step {progress.step:,}: {progress.train_seconds:.1f} s of training, "
        f"{age:.1f} s in all; record: {folder}/run.json"
    )


@contextlib.contextmanager
def recorded(accelerator, record, rank, progress):
    """Write run.json before and after what is done within. A collective."""
    # All ranks raise KeyboardInterrupt when they have agreed to stop, and FloatingPointError when a
    # loss is no number.
    # Write it before, so that there is a record even if the run is killed.
    write_record(accelerator, record, rank, progress, "running")
    status = "completed"
    try:
        yield
    except KeyboardInterrupt:
        status = "preempted"
    except FloatingPointError as problem:
        write_record(accelerator, record, rank, progress, "failed")
        abort(f"{problem}: not saved; --resume, or start again with a lower --learning_rate")
    write_record(accelerator, record, rank, progress, status)


@contextlib.contextmanager
def profiled(accelerator, args, progress):
    """Trace some steps, if --profile asks for it. Yields what to call after each step."""
    if not args.profile:
        yield lambda: None
        return
    if progress.steps - progress.step < 17:
        say("warning: --profile traces the steps 13 to 17 of a run, and this one has fewer")
    with accelerator.profile() as profiler:
        yield profiler.step


def agreement(record):
    """What a resumed run must have again: {name: value}."""
    names = ("version", "strategy", "strategy_options", "global_batch_size")
    return {name: record.get(name) for name in names} | record["workload"]


def open_folder(accelerator, record, may_resume):
    """Keep other runs out of the output folder, and look for one there to continue. Returns the
    status of that run or None, and its newest checkpoint or None. A collective.
    """
    folder = Path(accelerator.project_dir)
    found = None
    # Only rank 0 looks: on a network disk, other nodes may still see an older state.
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder)
        for partial in folder.glob("checkpoints/partial"):  # A killed run has left it.
            partial.rename(f"{partial.parent}/removed_{time.time_ns()}")
        newest = max(map(str, folder.glob(f"checkpoints/{CHECKPOINT}")), default=None)
        if not may_resume and (newest or (folder / "run.json").exists()):
            abort(f"{folder} holds another run: add --resume, or change --output_dir")
        old = read_json(folder / "run.json")
        if not isinstance(old.get("workload"), dict):  # It is damaged, or is no record.
            old = {}
        check_agreement(agreement(record), old, newest)
        found = [old.get("status"), newest]
    return utils.broadcast_object_list([found])[0]


def lock_folder(folder):
    """Lock an output folder, also over NFS, for as long as this process lives."""
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        abort(f"another run is writing into {folder}: wait for it, or change --output_dir")
    except OSError as problem:
        # Lustre without -o flock and NFS without lockd have no locks. The run needs none.
        if problem.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        say(f"warning: {folder} cannot be locked ({problem.strerror}): start no second run in it")


def read_json(file):
    """The JSON object in a file, or {} if there is none or only half of it."""
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def check_agreement(now, old, checkpoint):
    """Refuse to continue a run of other settings."""
    # A checkpoint holds its settings. Without a checkpoint, compare with run.json, which is `old`.
    saved = read_json(Path(checkpoint, "progress.json")).get("run") if checkpoint else None
    whole = isinstance(saved, dict)
    was = saved if whole else agreement(old) if old else {}
    # Before version 0.6.0 checkpoints had no such file.
    if checkpoint and not whole and was.get("version", VERSION) == VERSION:
        abort(f"cannot load {checkpoint}: it has no whole progress.json{REMOVE_IT}")
    for key in now:
        before, after = was.get(key), now[key]
        if was and before != after:
            if isinstance(before, dict) and isinstance(after, dict):
                names = [name for name in before | after if before.get(name) != after.get(name)]
                before = {name: before.get(name) for name in names}
                after = {name: after.get(name) for name in names}
            abort(f"cannot resume with another {key}: {before} -> {after}")


def watch_signals():
    """A list that gets the signals which ask this rank to stop."""
    # A handler may run in the middle of anything, so it only makes a note.
    signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        # Ignore SIGHUP if nohup does. The launcher may ignore other signals, which ranks need.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: signals.append(True))
    return signals


def die_with_the_launcher():
    """Let the kernel send SIGTERM to this rank when its launcher dies."""
    # Each launcher is a Python program. A shell is none, and may end before the run.
    launched = "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    # The parent may have ended, or be another user's.
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        if launched and parent and "python" in Path(parent.exe()).name:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG.


def check_numbers(args, may_be_0):
    """Refuse numbers with which no run can train."""
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        # With the number of a rank, a seed has to stay below 2**32.
        highest = 1 if name == "dropout" else 2**31 - 1
        lowest = "0 or greater" if name in may_be_0 else "greater than 0"
        if not (0 <= value <= highest and (value or name in may_be_0)):
            abort(f"--{name} must be {lowest}, and at most {highest}, got {value}")


def show_progress_bars():
    """Whether this rank may show progress bars: rank 0, on a terminal. A log gets none."""
    return PartialState().is_main_process and sys.stderr.isatty()


def say(line):
    """Print a line once."""
    if PartialState().is_main_process:
        print(line, flush=True)


def abort(message):
    """End the run with one line."""
    message = " ".join(str(message).split())
    sys.exit(f"error: {message}"[:500])  # A library may quote a whole file.


def cli():
    """Run the script as a command. A failure ends with one line, after a traceback if needed."""
    args = None
    try:
        args = parse_args()
        # Keep the model until the end: gloo may hang when DDP is freed.
        _ = main(args)
    except BaseException as problem:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        expected = is_expected(problem, args)
        # When a rank has failed, the launcher ends the others. So rank 0 reports an error that all
        # ranks have, and the launcher reports a rank that was killed. Other nodes hear of it later.
        rank = os.environ.get("RANK")
        one_node = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        if rank and (rank != "0" or not expected):
            time.sleep(10 if rank != "0" else 1 if one_node else 5)
        if isinstance(problem, SystemExit):
            raise
        if not expected:
            show_traceback(problem)
        abort(explain(problem, args))
    # Skip Python's own end, in which gloo may hang or abort: pytorch#56297 and #190489.
    os._exit(0)


def show_traceback(problem):
    """Let torch's launcher print the traceback in its summary. Without the launcher, print it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handed_over = False
    # The disk of the launcher's file may be full.
    with contextlib.suppress(OSError):
        # torch's @record does this too, but on all ranks, which hide the first one's traceback.
        get_error_handler().record_exception(problem)
        handed_over = "TORCHELASTIC_RUN_ID" in os.environ
    if not handed_over:
        traceback.print_exception(problem)


def is_expected(problem, args):
    """Whether one line says enough: the script's own, or an OSError about a path that was given."""
    if isinstance(problem, SystemExit):
        return True
    if not (args and isinstance(problem, OSError) and isinstance(problem.filename, str)):
        return False
    given = [path for name, path in vars(args).items() if path and name in PATHS]
    file, *paths = [Path(path).absolute() for path in (problem.filename, *given)]
    if any(file.is_relative_to(path) for path in paths):
        return True
    # A folder above may forbid to make the one that was given.
    above = any(path.is_relative_to(file) for path in paths)
    return above and not isinstance(problem, FileNotFoundError)


def explain(problem, args):
    """What was raised, what came before it, and what helps, where that is certain."""
    chain = []
    while problem and problem not in chain:
        chain.append(problem)
        context = None if problem.__suppress_context__ else problem.__context__
        problem = None if is_expected(problem, args) else problem.__cause__ or context
    texts = [f"{type(error).__name__}: {error}".rstrip(": ") for error in chain]
    text = ", after ".join(texts)[:380]
    full = any(getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for error in chain)
    # Workaround errors_without_their_number (torch 2.15, safetensors 0.8): they lose the number of
    # the error, so ask the disk.
    # The folder or the flags may be missing.
    with contextlib.suppress(OSError, AttributeError):
        full = full or shutil.disk_usage(args.output_dir or "runs").free < 2**20
    if full:
        return f"{text} (the disk is full: free space, then --resume)"
    if any(isinstance(error, (MemoryError, torch.OutOfMemoryError)) for error in chain):
        flags = "--per_device_train_batch_size or --per_device_eval_batch_size"
        return f"{text} (memory: try a smaller {flags}, or fsdp.yaml)"
    return text


if __name__ == "__main__":
    cli()
