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
"""

import argparse
import collections
import contextlib
import ctypes
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
import time
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import psutil
import torch
import torch._dynamo  # torch 2.15 imports it for the first optimizer, which would count as memory.
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, PartialState, utils
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import BertForQuestionAnswering

VERSION = "0.5.0"  # of the project; CHANGELOG.md says what changed
CHECKPOINT = "step_" + "[0-9]" * 8  # Folders with other names are not the script's.
KNOWN = (  # how libraries say what a user can mend; a SystemExit has its own line
    "^(?!SystemExit).*(MemoryError|of memory|allocate memory|ALLOC_FAILED|bad_alloc|No space|"
    "quota|StreamWriter|os error|UnicodeEncodeError|dropout probability|invalid truth value|"
    "Size mismatch between tensors|transformer layer class|dimension for FSDP|fp16 is not supp|"
    "train_batch_size|ZeRO optimization config|.auto. entries|WordPiece|deserializing|MASTER_ADDR)"
)
HONOURED = (  # in DeepSpeed's JSON
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps bf16 fp16 timers "
    "gradient_clipping zero_optimization zero_force_ds_cpu_optimizer steps_per_print comms_logger"
)
BERT = "google-bert/bert-base-uncased"
HUB_NAMES = {False: "rajpurkar/squad", True: "rajpurkar/squad_v2"}


def main(args):
    """Do one run, from its flags to its record. Returns the model."""
    accelerator, strategy = make_accelerator(args)
    # accelerate 1.15 says False, and torch would give up after 8 widths. None lets widths differ.
    accelerator.state.dynamo_plugin.dynamic = None
    # Rank 0 goes first and fills the caches. Then one rank of each node loads, and then the others.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        config, tokenizer, train_set, eval_set = load_inputs(args)
    rank = describe_rank(accelerator)
    model = load_model(args, config)
    if args.prepare_data_only:
        say(f"ready: the model, {len(train_set)} training and {len(eval_set)} validation features")
        return
    workload = describe_workload(args, config, train_set, eval_set)
    record = describe_run(accelerator, strategy, args, workload, model, rank)
    record["activation_checkpointing"] = args.activation_checkpointing
    train_loader, eval_loader = make_loaders(args, train_set, eval_set, record)
    lock, status = open_folder(accelerator, record, args.resume)
    if status == "completed":
        say(f"{accelerator.project_dir} is a completed run already: see its run.json")
        return
    steps_per_epoch = len(train_loader) // args.gradient_accumulation_steps
    steps = args.max_train_steps or args.num_epochs * steps_per_epoch
    progress = Progress(steps, steps_per_epoch, epochs=math.ceil(steps / steps_per_epoch))
    if strategy == "dp":  # Accelerate has no DataParallel, which runs a thread for each GPU.
        model = torch.nn.DataParallel(model.to(accelerator.device))
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=0, fused=True)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    model, *others = accelerator.prepare(model, optimizer, schedule, train_loader)
    # DeepSpeed would take the smaller batch size of two loaders, so this one is prepared alone.
    parts = (model, *others, accelerator.prepare(eval_loader), tokenizer)
    utils.set_seed(args.seed, device_specific=True)  # Each rank has its own dropout masks.
    signals = start(accelerator, progress, record["resumed_from"])
    accelerator.init_trackers("tensorboard", vars(args))
    write_record(accelerator, record, rank, progress, "running")  # so it stays after a kill
    with accelerator.profile() if args.profile else contextlib.nullcontext() as profiler:
        try:
            train(accelerator, args, parts, progress, signals, profiler)
            save_model(accelerator, model, tokenizer, accelerator.project_dir)
            status = "completed"
        except KeyboardInterrupt:  # All ranks have agreed to stop.
            status = "preempted"
        except FloatingPointError as problem:  # Every rank raises it.
            write_record(accelerator, record, rank, progress, "failed")
            abort(f"{problem}: not saved; --resume, or start afresh with a lower --learning_rate")
    record |= describe_tokens(progress)
    write_record(accelerator, record, rank, progress, status)
    accelerator.end_training()
    return model


def train(accelerator, args, parts, progress, signals, profiler):
    """Train and evaluate, epoch by epoch. Raises KeyboardInterrupt if a signal asks to stop, and
    FloatingPointError if a loss is not finite: on all ranks.
    """
    model, optimizer, schedule, train_loader, eval_loader, tokenizer = parts
    save_every = args.checkpointing_steps or progress.steps
    losses = []  # of the micro-batches since the last log, on the device
    sizes = []  # of the same micro-batches: tokens without and with padding
    for epoch in range(len(progress.evaluations), progress.epochs):
        model.train()
        last_step = min((epoch + 1) * progress.steps_per_epoch, progress.steps)
        began = time.perf_counter()
        for inputs, spans, size in batches_left(accelerator, train_loader, epoch, progress):
            with accelerator.accumulate(model):
                logits = span_logits(model, inputs)
                loss = span_losses(logits, spans["start"], spans["end"]).mean()
                accelerator.backward(loss)  # Gradients are means over micro-batches and ranks.
                if args.max_grad_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())  # Reading it now would wait for the device.
            sizes.append(size)
            if not accelerator.sync_gradients:
                continue  # The step has more micro-batches.
            progress.step += 1
            if profiler:
                profiler.step()
            saving = progress.step == last_step or progress.step % save_every == 0
            if saving or progress.step % args.logging_steps == 0:
                log_losses(accelerator, losses, began, progress)
                count_tokens(accelerator, sizes, progress)
                stopping = any_signal(accelerator, signals)
                if saving or stopping:
                    save_checkpoint(accelerator, progress)
                if stopping:
                    raise KeyboardInterrupt
                losses.clear()
                sizes.clear()
                began = time.perf_counter()
        evaluate(accelerator, args, model, eval_loader, progress, signals)
        keep_best(accelerator, model, tokenizer, progress)


def batches_left(accelerator, loader, epoch, progress):
    """The batches of an epoch that the run has not trained on, and none after its last step."""
    loader.set_epoch(epoch)  # accelerate 1.15 ignores it after skip_first_batches.
    accumulation = accelerator.gradient_accumulation_steps
    done = progress.step - epoch * progress.steps_per_epoch
    if done:
        loader = accelerator.skip_first_batches(loader, done * accumulation)
    return itertools.islice(loader, (progress.steps - progress.step) * accumulation)


def log_losses(accelerator, losses, began, progress):
    """Read the losses since `began`. Raises FloatingPointError for inf or NaN. A collective."""
    means = torch.stack(losses).view(-1, accelerator.gradient_accumulation_steps).mean(1)
    means = accelerator.reduce(means, "mean").tolist()  # over all ranks; it waits for the device
    seconds = time.perf_counter() - began
    progress.train_seconds += seconds
    progress.rates.append(len(means) / seconds)
    if not progress.evaluations:  # An evaluation may need more memory than training.
        progress.peak_memory = peak_memory()
    for loss in means:
        step = len(progress.losses) + 1
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss of step {step} is {loss}")
        progress.losses.append(loss)
    accelerator.log({"loss": loss}, step)
    say(f"step {step}/{progress.steps}: loss {loss:.4f}, {progress.rates[-1]:.2f} steps/s")


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
    accelerator.save_state(partial, safe_serialization=False)  # safetensors hides its files.
    os.sync()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.rename(folder / f"step_{progress.step:08d}")
        for old in sorted(folder.glob(CHECKPOINT))[:-2]:
            # A kill while it is deleted leaves no half under the name of a complete one.
            old.rename(folder / f"removed_{time.time_ns()}_{old.name}")
        for removed in folder.glob("removed_*"):
            shutil.rmtree(removed, ignore_errors=True)


@torch.no_grad()
def evaluate(accelerator, args, model, loader, progress, signals):
    """Note exact match, F1 and loss on the validation questions. Rank 0 writes predictions.json.

    A signal cuts the evaluation short, and --resume repeats it. A collective.
    """
    began = time.perf_counter()
    model.eval()
    # One row for each feature: its number, its loss, the score of "no answer", and of the best span
    # the score, the first token and the last token.
    found = []
    for inputs, spans, _ in loader:
        if any_signal(accelerator, signals):
            raise KeyboardInterrupt
        logits = span_logits(model, inputs)
        losses = span_losses(logits, spans["start"], spans["end"])
        longest = min(args.max_answer_length, logits.shape[1])
        best = best_spans(logits, spans["first"], spans["last"], longest)
        rows = torch.stack([spans["ids"], losses, logits[:, 0].sum(1), *best], 1)
        # The last batch is filled up with features from the start, and this drops their rows.
        found.append(accelerator.gather_for_metrics(rows))
    metrics = None
    if accelerator.is_main_process:
        rows = torch.cat(found).cpu()
        rows = rows[rows[:, 0].argsort(), 1:]
        answers = choose_answers(rows, loader.dataset, args.version_2_with_negative)
        metrics = squad_metric(args.version_2_with_negative).compute(
            predictions=list(answers.values()),
            references=[question["answers"] for question in loader.dataset.questions],
        )
        metrics["eval_loss"] = rows[:, 0].double().mean().item()
        file = Path(accelerator.project_dir) / "predictions.json"
        file.write_text(json.dumps(answers, indent=1, ensure_ascii=False), encoding="utf-8")
    metrics = utils.broadcast_object_list([metrics])[0]
    if not math.isfinite(metrics["eval_loss"]):
        raise FloatingPointError(f"the evaluation after step {progress.step} gave {metrics}")
    progress.evaluations.append(metrics)
    progress.eval_seconds += time.perf_counter() - began
    accelerator.log(metrics, progress.step)
    text = "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}".format(**metrics)
    say(
        f"epoch {len(progress.evaluations)}/{progress.epochs}: {text}, "
        f"training loss {progress.losses[-1]:.4f}, {progress.train_seconds:.1f} s of training"
    )


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
    # accelerate 1.15 leaves torch.compile's prefix in the names.
    weights = {name.replace("_orig_mod.", ""): weight.float() for name, weight in weights.items()}
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
        utils.save(weights, f"{folder}/.partial", safe_serialization=True)
        # safetensors lets nobody else read a file, so it gets the mode of another.
        shutil.copymode(f"{accelerator.project_dir}/.lock", f"{folder}/.partial")
        os.replace(f"{folder}/.partial", f"{folder}/model.safetensors")
        config = accelerator.unwrap_model(model, keep_torch_compile=False).config
        config.architectures = ["BertForQuestionAnswering"]  # FSDP2 renames the class.
        config.dtype = "float32"  # of the saved weights
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@dataclass
class Progress:
    """How far a run is. Checkpoints hold it, as it is on rank 0."""

    steps: int  # of the whole run
    steps_per_epoch: int
    epochs: int
    step: int = 0  # the last one that is done
    losses: list = field(default_factory=list)  # of each step, means over the global batch
    rates: list = field(default_factory=list)  # steps per second, from log to log
    evaluations: list = field(default_factory=list)  # the metrics of each epoch
    train_seconds: float = 0.0  # without evaluations and saving
    eval_seconds: float = 0.0
    tokens: int = 0  # that all ranks trained on
    padded_tokens: int = 0  # the same with padding
    peak_memory: float | None = None  # in MB, of this rank in training; in no checkpoint

    def state_dict(self):
        return vars(self) | {"peak_memory": None}

    def load_state_dict(self, state):
        vars(self).update(state)


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


def choose_answers(rows, features, version_2):
    """{question id: text}: the best span in all windows of a question.

    `rows` [features, 5] have the loss, the score of "no answer", and the score, the first and the
    last token of the window's best span. With `version_2` the answer is "" where "no answer", at
    [CLS], scores higher than the best span. As in the official recipe, the window in which "no
    answer" scores lowest counts.
    """
    best = {}
    no_answer = {}
    owners = features.columns["owner"].tolist()
    for window, (owner, row) in enumerate(zip(owners, rows.tolist(), strict=True)):
        _, null_score, score, start, end = row
        no_answer[owner] = min(no_answer.get(owner, null_score), null_score)
        if owner not in best or score > best[owner][0]:
            best[owner] = [score, window, int(start), int(end)]

    answers = {}
    begins = features.table.data["begins"]
    stops = features.table.data["stops"]
    for owner, (score, window, start, end) in sorted(best.items()):
        question = features.questions[owner]
        text = question["context"][begins[window][start].as_py() : stops[window][end].as_py()]
        answers[question["id"]] = "" if version_2 and no_answer[owner] > score else text
    return answers


def squad_metric(version_2):
    """Exact match and F1 in percent, as a metric of the package `evaluate`.

    The rules are those of SQuAD's official scripts (Rajpurkar et al., 2016 and 2018). The package
    has a metric "squad" too, but it would have to download that.
    """
    import evaluate  # It takes half a second, and only rank 0 needs it.

    text = datasets.Value("string")
    answers = {
        "text": datasets.List(text),
        "answer_start": datasets.List(datasets.Value("int64")),
    }

    class Squad(evaluate.Metric):
        """`compute` takes a text for each question, and the answers that are right."""

        def _info(self):
            return evaluate.MetricInfo(
                description=squad_metric.__doc__,
                citation="",
                features=datasets.Features({"predictions": text, "references": answers}),
            )

        def _compute(self, predictions, references):
            exact = []
            f1 = []
            for prediction, reference in zip(predictions, references, strict=True):
                right = [answer_words(text) for text in reference["text"]]
                if version_2:  # A text of only articles and punctuation is no answer.
                    right = [words for words in right if words] or [[]]
                words = answer_words(prediction)
                exact.append(words in right)
                f1.append(max(word_f1(words, others, version_2) for others in right))
            return {
                "exact_match": 100 * float(np.mean(exact)),
                "f1": 100 * float(np.mean(f1)),
            }

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
    name = args.model_name_or_path
    config.hidden_dropout_prob = args.dropout
    config.attention_probs_dropout_prob = args.dropout
    config.num_labels = 2  # an answer's start and its end
    config._attn_implementation = "sdpa"  # It knows bool masks.
    utils.set_seed(args.seed)  # New weights are the same on all ranks.
    # transformers 5.23 would draw a new head on the GPU under ZeRO-3, so with other numbers.
    transformers.integrations.unset_hf_deepspeed_config()
    if args.from_scratch:
        model = BertForQuestionAnswering(config)
    else:
        model, loading = BertForQuestionAnswering.from_pretrained(
            name,
            config=config,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        # Lists of missing, unexpected and misshapen weights. Heads may differ, for other tasks.
        keys = sorted(str(key) for keys in loading.values() for key in keys)
        wrong = [key for key in keys if re.search("encoder|embeddings[.](?!position_ids)", key)]
        if wrong:
            abort(f"{len(wrong)} weights of {name} do not fit its config.json: {wrong[0]} ...")
    model._no_split_modules = ["BertLayer"]  # FSDP's units. FSDP fails with transformers' list.
    if args.activation_checkpointing:  # It restores the RNG's state, so dropout masks are the same.
        old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return model.float()


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


def load_inputs(args):
    """The model's config, its tokenizer, and the `Features` of both splits."""
    transformers.logging.set_verbosity_error()  # Otherwise each rank warns of the new head.
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    name = args.model_name_or_path
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        train_questions = read_questions(args, "train")
        eval_questions = read_questions(args, "validation")
        if not args.from_scratch:  # Rank 0 fetches the weights before the others look for them.
            transformers.utils.cached_file(
                name, "model.safetensors", _raise_exceptions_for_missing_entries=False
            )
    except (OSError, ValueError) as problem:  # of the network, the Hub, or a file
        abort(
            f"cannot load {name} or the questions: {problem}; without a network, "
            "run --prepare_data_only where there is one, or give files"
        )
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
    train_set = load_features(train_questions, tokenizer, args)
    eval_set = load_features(eval_questions, tokenizer, args)
    return config, tokenizer, train_set, eval_set


def read_questions(args, split):
    """The first --max_..._samples questions of "train" or "validation": dicts of id, question,
    context and answers {text: [...], answer_start: [...]}, as on the Hub.
    """
    train = split == "train"
    path = args.train_file if train else args.validation_file
    limit = args.max_train_samples if train else args.max_eval_samples
    name = path or HUB_NAMES[args.version_2_with_negative]
    rows = read_squad(path) if path else datasets.load_dataset(name, split=split)
    questions = {}
    for row in itertools.islice(rows, limit or None):
        problem = check_question(row, args.version_2_with_negative, questions)
        if problem:
            abort(f"{name}: question {row['id']} {problem}")
        questions[row["id"]] = row
    if not questions:
        abort(f"{name} has no questions")
    return list(questions.values())


def check_question(row, version_2, others):
    """What is wrong with a question that a user can correct, or None. `others` are the questions
    before it, by their ids.
    """
    texts = row["answers"]["text"]
    starts = row["answers"]["answer_start"]
    if row["id"] in others:
        return "is there twice"
    if not texts and not version_2:
        return "has no answer: add --version_2_with_negative if this is SQuAD v2.0"
    for text, start in zip(texts, starts, strict=True):
        if not text.strip() or start < 0 or not row["context"].startswith(text, start):
            return f"has the answer {text!r}, which is not at character {start} of its context"
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
                    starts = [int(answer["answer_start"]) for answer in answers]
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
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        abort(f"{path} is not in SQuAD's form, at {place}: {problem!r}")


def load_features(questions, tokenizer, args):
    """The `Features` of questions. `datasets` caches them under a key of their content."""
    sizes = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    tokenizer.backend_tokenizer.no_truncation()  # The last call's setting would change the key.
    words = tokenizer.backend_tokenizer.to_str()
    key = datasets.fingerprint.Hasher.hash([json.dumps(questions), sizes, words, tokenize])
    file = Path(datasets.config.HF_DATASETS_CACHE) / "squad_features" / f"{key}.arrow"
    file.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_list(questions)
    try:
        table = table.map(
            tokenize,
            batched=True,
            with_indices=True,
            remove_columns=table.column_names,
            fn_kwargs={"tokenizer": tokenizer} | sizes,
            new_fingerprint=key,
            cache_file_name=str(file),
        )
    except ValueError as problem:  # datasets has removed what it wrote so far.
        abort(problem)
    return Features(questions, table, key, args.max_seq_length)


def tokenize(batch, owners, tokenizer, max_seq_length, doc_stride):
    """The features of a batch of questions, for `datasets.map`. A feature is a question with a
    window of its context, [CLS] question [SEP] window [SEP]. ValueError names a bad question.

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
            raise ValueError(
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
            raise ValueError(f"question {batch['id'][row]} has a context or answer without tokens")
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
    the tokens of its text alone: spaces, accents and invisible characters at its edges may be in no
    token. The span is 0 and 0 unless all of the answer is in the window.
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

    def __init__(self, questions, table, key, max_seq_length):
        self.questions = questions  # dicts
        self.table = table  # a datasets.Dataset
        self.key = key
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
    if record["global_batch_size"] > len(train_set):
        abort(f"the global batch of {record['global_batch_size']} is more than all samples")
    sampler = LengthSampler(train_set.lengths, record["global_batch_size"], args.seed)
    by_length = eval_set.lengths.argsort(descending=True, stable=True).tolist()
    batch_size = args.per_device_train_batch_size * record["devices"]
    eval_batch_size = args.per_device_eval_batch_size * record["devices"]
    # Without a generator of its own, a loader draws from that of dropout, and a resumed run would
    # have other masks. Features makes whole batches, so there is nothing to collate.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    options["pin_memory"] = torch.cuda.is_available()
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, **options)
    return train_loader, DataLoader(eval_set, eval_batch_size, sampler=by_length, **options)


def describe_tokens(progress):
    """The tokens that the run trained on, for its record.

    A padded token is computed, and its result is not used.
    """
    return {
        "tokens": progress.tokens,
        "padding_share": round(1 - progress.tokens / progress.padded_tokens, 4),
        "tokens_per_second": progress.tokens / progress.step * statistics.median(progress.rates),
    }


def describe_workload(args, config, train_set, eval_set):
    """The work of this script, which a resumed run must have again."""
    scratch = ", from scratch" if args.from_scratch else ""
    return {
        "model": Path(args.model_name_or_path).name + scratch,
        "dataset": Path(args.train_file).name
        if args.train_file
        else HUB_NAMES[args.version_2_with_negative],
        "questions": len(train_set.questions),
        "samples": len(train_set),
        "eval_questions": len(eval_set.questions),
        "eval_samples": len(eval_set),
        "features": f"{train_set.key[:8]}, {eval_set.key[:8]}",
        "version_2": args.version_2_with_negative,
        "sequence_length": args.max_seq_length,
        "max_answer_length": args.max_answer_length,
        "layers": config.num_hidden_layers,
        "positions": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }


def describe_rank(accelerator):
    """Where this rank runs, and what memory it holds without a model."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        model = re.search(r"model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text())
        name = f"CPU ({model[1] if model else os.uname().machine})"  # ARM names no model.
        with contextlib.suppress(OSError):  # The peak until here is forgotten: see man 5 proc.
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
    if strategy == "dp":  # The one process uses all GPUs that it sees.
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
    names = "num_epochs max_train_steps max_grad_norm seed dropout learning_rate"
    workload = workload | compute | {name: getattr(args, name) for name in names.split()}
    if strategy.startswith("zero"):  # A YAML may clip gradients, too.
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        options = dict(config["zero_optimization"])
        workload["max_grad_norm"] = config["gradient_clipping"] or None
    return compute | {
        "version": VERSION,
        "script": Path(__file__).name,
        "strategy": strategy,
        "strategy_options": options,
        "workload": workload,
        "processes": accelerator.num_processes,
        "devices": devices,
        "device_name": rank["device_name"],
        "threads": torch.get_num_threads(),
        "per_device_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": micro_batch * devices * accumulation,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "profiled": args.profile,
        "argv": sys.argv,
        "versions": {
            name: getattr(sys.modules.get(name), "__version__", None)
            for name in ("torch", "accelerate", "deepspeed", "transformers")
        },
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def open_folder(accelerator, record, may_resume):
    """Look for a run in the output folder, and keep others out. Return the lock, and the status of
    the run, or None. The record gets its newest checkpoint. A collective.
    """
    folder = Path(accelerator.project_dir)
    lock = found = None
    if accelerator.is_main_process:  # A network disk may show other nodes an older state.
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # also over NFS
        except BlockingIOError:
            abort(f"another run is writing into {folder}: wait for it, or change --output_dir")
        for partial in folder.glob("checkpoints/partial"):  # A killed run has left it.
            partial.rename(f"{partial.parent}/removed_{time.time_ns()}")
        newest = max(map(str, folder.glob(f"checkpoints/{CHECKPOINT}")), default=None)
        if not may_resume and (newest or (folder / "run.json").exists()):
            abort(f"{folder} holds another run: add --resume, or change --output_dir")
        old = {}
        with contextlib.suppress(OSError, TypeError, ValueError):  # There is none, or half of it.
            old = dict(json.loads((folder / "run.json").read_bytes()))
        was = old | old.get("workload", {})
        now = record | record["workload"]
        for key in ("strategy", "strategy_options", "global_batch_size", *record["workload"]):
            if was and was.get(key) != now[key]:
                abort(f"cannot resume with another {key}: {was.get(key)} -> {now[key]}")
        found = [old.get("status"), newest]
    status, record["resumed_from"] = utils.broadcast_object_list([found])[0]
    return lock, status


def start(accelerator, progress, checkpoint):
    """Go on from a checkpoint if there is one, and let later ones hold `progress`. Return a list
    that gets the signals which ask this rank to stop. A collective.
    """
    accelerator.register_for_checkpointing(progress)
    if checkpoint:
        say(f"resuming from {checkpoint}")
        try:
            accelerator.load_state(checkpoint)
        except BaseException as problem:  # FSDP's CheckpointException is no Exception.
            advice = "if damaged, remove it for the one before; DeepSpeed fails at [*? in a path"
            abort(f"cannot load {checkpoint}; {advice}: {problem}")
        accelerator.step = 0  # It counts micro-batches, and a step may have more or fewer now.
    signals = []  # A handler runs in the middle of anything, so it only makes a note.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        # nohup ignores SIGHUP. The wrappers' launcher ignores others, which its ranks have to heed.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: signals.append(True))
    return signals


def write_record(accelerator, record, rank, progress, status):
    """Write run.json, and say how the run stands. A collective."""
    # Both times are off by the same part of a second.
    began = psutil.Process().create_time() - psutil.boot_time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - began  # of this process, imports included
    used = os.times()
    measured = {"real": age, "user": used.user, "sys": used.system}
    ranks = utils.gather_object([rank | measured | {"peak_memory_mb": progress.peak_memory}])
    seconds = record.setdefault("seconds", {"startup": age})
    seconds |= {"train": progress.train_seconds, "eval": progress.eval_seconds, "total": age}
    # The median leaves out the warm-up of devices and links.
    rate = statistics.median(progress.rates or [0])
    record |= {
        "status": status,
        "steps": progress.step,
        "loss_history": list(enumerate(progress.losses, 1)),
        "metrics": progress.evaluations[-1] if progress.evaluations else None,
        "steps_per_second": progress.rates,
        "samples_per_second": rate * record["global_batch_size"] or None,
        "ranks": ranks,
        "nodes": len({rank["host"] for rank in ranks}),
    }
    folder = accelerator.project_dir
    if accelerator.is_main_process:
        partial = Path(folder, "run.json.partial")
        partial.write_text(json.dumps(record, indent=1))
        partial.replace(f"{folder}/run.json")  # A kill leaves the old file or the new one.
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


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.error = abort  # type: ignore[method-assign]  # one line, without the usage
    add = parser.add_argument
    add("--model_name_or_path", default=BERT, help="BERT's name on the Hub, or a folder")
    add("--from_scratch", action="store_true", help="the model's config, but random weights")
    add("--train_file", help="SQuAD's nested JSON to train on (without: SQuAD from the Hub)")
    add("--validation_file", help="questions to evaluate on, likewise")
    add("--version_2_with_negative", action="store_true", help="some questions have no answer")
    add("--max_train_samples", type=int, default=10_000, help="the first N questions; 0: all")
    add("--max_eval_samples", type=int, default=500, help="likewise in evaluation")
    add("--max_seq_length", type=int, default=384, help="tokens of question and context")
    add("--doc_stride", type=int, default=128, help="tokens that windows of a long context share")
    add("--max_answer_length", type=int, default=30, help="of a predicted answer, in tokens")
    add(
        "--activation_checkpointing",
        action="store_true",
        help="compute activations again in the backward pass: less memory, a third more work",
    )
    add("--prepare_data_only", action="store_true", help="fetch and check all inputs, then stop")
    add("--num_epochs", type=int, default=4, help="passes over the training data")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=4, help="samples in a micro-batch")
    add("--per_device_eval_batch_size", type=int, default=32, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--learning_rate", type=float, default=3e-5, help="the highest of the schedule")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add("--output_dir", type=os.path.expanduser, help="without it, a new folder in runs/")
    add("--logging_steps", type=int, default=10, help="steps from log to log; then a run can stop")
    add("--checkpointing_steps", type=int, help="steps from save to save, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    args = parser.parse_args()
    may_be_0 = ["seed", "dropout", "doc_stride", "max_train_samples", "max_eval_samples"]
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0 and not (value == 0 and name in may_be_0):
            abort(f"--{name} must be greater than 0, got {value}")
    if args.resume and not args.output_dir:
        abort("--resume goes on with the run in a folder: name it by --output_dir")
    if bool(args.train_file) != bool(args.validation_file):
        abort("--train_file and --validation_file go together: give both, or none")
    if os.path.realpath(args.output_dir or "runs") == os.path.realpath(args.model_name_or_path):
        abort("--output_dir is the model's own folder, and its weights would be overwritten")
    return args


def make_accelerator(args):
    """The Accelerator for the launcher's YAML, and its strategy, such as "zero2". A collective."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        # A launcher started this rank. If the launcher dies, the kernel sends SIGTERM to the rank.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG.
    dp = os.environ.get("ACCELERATE_DYNAMO_MODE") == "data_parallel"
    if dp:  # It is the mark of dp.yaml, and no mode of torch.compile.
        del os.environ["ACCELERATE_DYNAMO_MODE"]
    connect_ranks()
    folder = args.output_dir or time.strftime(f"runs/{Path(__file__).stem[6:]}-%Y%m%d-%H%M%S")
    folder = utils.broadcast_object_list([folder])[0]  # The ranks may start in different seconds.
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
        log_with="tensorboard" if args.with_tracking else None,
        project_dir=folder,
    )
    if accelerator.gradient_accumulation_steps != args.gradient_accumulation_steps:
        abort("only the script's --gradient_accumulation_steps counts: leave out the launcher's")
    strategy = name_strategy(accelerator.state, args, dp)
    if strategy == "dp" and accelerator.mixed_precision == "bf16":
        abort("dp's threads would compute in fp16, not in bf16: use ddp.yaml")
    return accelerator, strategy


def connect_ranks():
    """Connect the ranks, or refuse a launch that would silently be another run. A collective."""
    env = os.environ.get
    gpus = torch.cuda.device_count()
    ranks = int(env("LOCAL_WORLD_SIZE", 1))  # on this node
    # The launcher sets MASTER_ADDR also where it starts one process in spite of --num_processes.
    alone = env("WORLD_SIZE", "1") == env("SLURM_STEP_NUM_TASKS", "1") == "1"
    if "LOCAL_RANK" not in os.environ and (not alone or "MASTER_ADDR" in os.environ):
        abort(
            "WORLD_SIZE, MASTER_ADDR or Slurm tell of more processes, and each would train alone: "
            "use ddp.yaml, without --cpu; for one process, --num_processes 1, or unset these"
        )
    if 0 < gpus < ranks:
        abort(f"more processes than GPUs: add --num_processes {gpus} (times the nodes)")
    # torch 2.15 lets restarted ranks call the ports of those that died.
    if env("FSDP_VERSION", "2") != "2" or env("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        abort("fsdp_version must be 2, and --max_restarts 0: launch again with --resume instead")
    fsdp = utils.parse_flag_from_env("ACCELERATE_USE_FSDP")
    zero = utils.parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    # Elsewhere accelerate 1.15 knows no other spelling of true.
    os.environ |= {"ACCELERATE_USE_FSDP": str(fsdp), "ACCELERATE_USE_DEEPSPEED": str(zero)}
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
        PartialState()
        return
    cores = sorted(os.sched_getaffinity(0))
    if 1 < ranks <= len(cores):  # With cores of its own, a rank and its gloo threads are faster.
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"]) :: ranks])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Otherwise deepspeed 0.19.8 warns.
    if zero:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or 0.19.8 compiles it
    # accelerate 1.15 shards on CPUs only over gloo, and only if it takes them for several GPUs.
    sharded = fsdp or zero
    state = PartialState(cpu=not sharded, backend="gloo" if sharded else None)
    if fsdp:
        state.distributed_type = utils.DistributedType.MULTI_GPU


def name_strategy(state, args, dp):
    """The name of the strategy, whose plugin gets what a YAML cannot say."""
    if state.distributed_type == utils.DistributedType.DEEPSPEED:
        config = state.deepspeed_plugin.deepspeed_config
        zero = config["zero_optimization"]
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # in any dtype
        config["gradient_accumulation_steps"] = args.gradient_accumulation_steps
        if set(config) - set(HONOURED.split()) or "stage" not in zero:
            abort(f"DeepSpeed's JSON needs a stage, and may have these keys only: {HONOURED}")
        if config.get("gradient_clipping", "auto") == "auto":  # It would clip by 1.0.
            config["gradient_clipping"] = 0.0
        if args.max_grad_norm:
            config["gradient_clipping"] = args.max_grad_norm
            zero.pop("compute_grad_norm", None)
        return f"zero{zero['stage']}"
    if state.distributed_type == utils.DistributedType.FSDP:
        plugin = state.fsdp_plugin
        if plugin.cpu_ram_efficient_loading or (plugin.activation_checkpointing and args.dropout):
            abort(
                "write fsdp_cpu_ram_efficient_loading: false, and in place of "
                "fsdp_activation_checkpointing train_bert_squad.py's --activation_checkpointing"
            )
        if not torch.cuda.is_available():
            plugin.cpu_offload.pin_memory = False  # torch 2.15 pins for a GPU only.
        return "hsdp" if "ACCELERATE_USE_PARALLELISM_CONFIG" in os.environ else "fsdp"
    if "LOCAL_RANK" in os.environ:
        return "ddp"
    return "dp" if dp else "baseline"


def say(line):
    """Print a line once."""
    if PartialState().is_main_process:
        print(line, flush=True)


def abort(message):
    """End the run with one line."""
    message = " ".join(str(message).split())
    sys.exit(f"error: {message}"[:500])  # A library may quote a whole file.


def cli():
    """Run the script as a command. What a user can mend ends it with one line."""
    try:
        _ = main(parse_args())  # It keeps the model: gloo may hang when DDP lets go of it.
    except BaseException as problem:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ.get("RANK", "0") != "0" or "by peer" in str(problem):
            time.sleep(10)  # The launcher ends this rank in silence when another one has ended.
        if isinstance(problem, OSError) or re.search(KNOWN, repr(problem)):
            abort(f"{problem}: mend that, and go on with --resume (fsdp.yaml needs less memory)")
        raise
    os._exit(0)  # In an orderly end gloo may hang or abort: pytorch#56297 and #190489.


if __name__ == "__main__":
    cli()
