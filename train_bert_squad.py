"""Fine-tune BERT on SQuAD, on one device or many. The accelerate YAML chooses the strategy.

    accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py
    python train_bert_squad.py --prepare_data_only    # on a login node that has a network

BERT finds the answer to a question in a text. A run writes into OUTPUT_DIR: run.json (its record),
predictions.json, the model, best/ (the model of the epoch with the lowest validation loss) and
checkpoints/ (the two newest, for --resume).

A rank is one of the processes that train together. Functions marked "A collective" must be called
by every rank, or the others hang.
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
import tempfile
import time
import unicodedata
import zlib
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import evaluate
import numpy as np
import psutil
import safetensors.torch
import torch
import torch._dynamo  # early, to keep it out of peak memory
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, PartialState, utils
from torch import nn
from torch.distributed.elastic.multiprocessing import errors
from torch.utils.data import DataLoader, Dataset, Sampler


def main(args):
    """Run the training, from its flags to its record. Returns the model."""
    accelerator, strategy = make_accelerator(args)
    accelerator.state.dynamo_plugin.dynamic = None  # or torch gives up after 8 widths
    # Rank 0 goes first and fills the caches. Then one rank per node loads, then the others.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        config, tokenizer, train_rows, eval_rows = load_inputs(args)
    check_inputs(args, config, tokenizer, train_rows, eval_rows)
    metric = SquadMetric(args.version_2_with_negative)
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        eval_set = Features(eval_rows, tokenizer, args)
        train_set = eval_set if train_rows is None else Features(train_rows, tokenizer, args)
        run = describe_run(accelerator, strategy, args)
        utils.set_seed(args.seed)  # all ranks start with the same weights
        model = load_model(args, config)
    if args.prepare_data_only:
        features = 0 if train_set is eval_set else len(train_set)
        return say(f"ready: {features} training and {len(eval_set)} validation features")
    run["workload"] |= describe_workload(args, config, train_set, eval_set)
    run["parameters"] = sum(weight.numel() for weight in model.parameters())
    train_loader, eval_loader = make_loaders(args, train_set, eval_set, run["devices"])
    micro_batches = args.gradient_accumulation_steps
    steps_per_epoch = len(train_loader) // micro_batches
    steps = args.max_train_steps or args.num_epochs * steps_per_epoch
    epochs = math.ceil(steps / steps_per_epoch) if steps else 1  # --num_epochs 0: only evaluate
    save_every = args.checkpointing_steps or steps
    checkpoint = run["resumed_from"] = open_folder(accelerator, args, run)
    if strategy == "dp":  # accelerate has no DataParallel
        model = nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(
        model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, args.num_warmup_steps, steps)
    model, optimizer, schedule, train_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader
    )
    # Separately: DeepSpeed takes its batch size from the loaders prepared with the model.
    eval_loader = accelerator.prepare(eval_loader)
    utils.set_seed(args.seed, device_specific=True)  # each rank has its own dropout masks
    progress = load_checkpoint(accelerator, checkpoint)
    write_record(accelerator, run, progress, "running")
    say(
        f"{strategy} on {run['devices']} x {run['device_name']}: {run['parameters']:,} parameters, "
        f"{steps:,} steps of {run['global_batch_size']} samples; results go to {args.output_dir}"
    )
    signals = watch_signals()
    purge = {"tensorboard": {"purge_step": progress.step + 1}}  # drops points of a killed run
    accelerator.init_trackers(Path(__file__).stem, vars(args), purge)
    profiler = start_profiler(accelerator, args)
    listen_at = progress.step + 1  # the step at which ranks ask each other for signals
    reset_peak_memory()  # of reading and preparing the data

    for epoch in range(len(progress.evaluations), epochs):
        model.train()
        train_loader.set_epoch(epoch)  # skip_first_batches does not pass it on
        # Micro-batches of this epoch that are done: more than 0 only after --resume.
        done = (progress.step - epoch * steps_per_epoch) * micro_batches
        batches = accelerator.skip_first_batches(train_loader, done) if done else train_loader
        batches._non_blocking = True  # skip_first_batches of accelerate 1.15 forgets it
        last_step = min((epoch + 1) * steps_per_epoch, steps)
        batches = itertools.islice(batches, (steps - progress.step) * micro_batches)
        losses, sizes, norm = [], [], None
        began = time.perf_counter()
        for inputs, spans, size in batches:
            with accelerator.accumulate(model):
                rate = schedule.get_last_lr()[0]
                logits = span_logits(model, inputs)
                loss = span_losses(logits, spans["start"], spans["end"]).mean()
                accelerator.backward(loss)  # averages over micro-batches and ranks
                if args.max_grad_norm and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())  # .item() would synchronise with the GPU
            sizes.append(size)
            if not accelerator.sync_gradients:
                continue  # this step has more micro-batches
            progress.step += 1
            profiler.step()
            # The end of an epoch saves, too.
            saving = progress.step == last_step or progress.step % save_every == 0
            logging = saving or progress.step % args.logging_steps == 0
            if progress.step == listen_at and not logging:  # the next log may be minutes away
                stopping, listen_at = listen(accelerator, signals, losses, began, progress.step)
                logging = stopping  # a checkpoint holds all losses
            if logging:
                log_step(accelerator, losses, rate, norm, began, progress, steps)
                kept = len(progress.losses)  # log_step keeps the losses before a NaN
                if kept < progress.step:
                    write_record(accelerator, run, progress, "failed")
                    abort(f"the loss of step {kept + 1} is not finite: lower --learning_rate")
                count_tokens(accelerator, sizes, progress)
                stopping, listen_at = listen(accelerator, signals, losses, began, progress.step)
                if saving or stopping:
                    save_checkpoint(accelerator, run, progress)
                if stopping:
                    end_run(accelerator, run, progress, "preempted")
                losses, sizes = [], []
                began = time.perf_counter()
        metrics = validate(accelerator, args, model, eval_loader, metric, run, progress, signals)
        line = describe_scores(metrics)
        if steps:
            line = f"epoch {epoch + 1}/{epochs}: {line}, training loss {progress.losses[-1]:.4f}, "
            line += f"{progress.train_seconds:.1f} s of training"
        say(line)
        lowest = min((old["eval_loss"] for old in progress.evaluations), default=math.inf)
        if steps and metrics["eval_loss"] < lowest:
            save_bert(accelerator, model, config, tokenizer, f"{args.output_dir}/best")
        progress.evaluations.append(metrics)
    profiler.stop()
    if steps:
        save_bert(accelerator, model, config, tokenizer, args.output_dir)
    end_run(accelerator, run, progress, "completed")
    return model


def count_tokens(accelerator, sizes, progress):
    """Count the tokens that all ranks trained on since the last log. A collective."""
    sizes = torch.tensor(sizes, device=accelerator.device).sum(0)
    tokens, padded = accelerator.reduce(sizes, "sum").tolist()
    tokens += progress.counts.get("tokens", 0)
    padded += progress.counts.get("padded_tokens", 0)
    rate = statistics.median(progress.rates)
    progress.counts = {"tokens": tokens, "padded_tokens": padded}
    progress.counts["padding_share"] = round(1 - tokens / padded, 4)
    progress.counts["tokens_per_second"] = tokens / progress.step * rate


@torch.no_grad()
def validate(accelerator, args, model, loader, metric, run, progress, signals):
    """Return exact match, F1 and loss, or None for each if the questions have no answers. Rank 0
    writes predictions.json. A collective.
    """
    began = time.perf_counter()
    model.eval()
    rows = []
    for inputs, spans, _ in batches_to_evaluate(accelerator, loader, run, progress, signals):
        logits = span_logits(model, inputs)
        longest = min(args.max_answer_length, logits.shape[1])
        score, start, end = best_spans(logits, spans["first"], spans["last"], longest)
        loss = span_losses(logits, spans["start"], spans["end"])
        no_answer = logits[:, 0].sum(1)  # at [CLS]
        columns = torch.stack([spans["ids"], loss, no_answer, score, start, end], 1)
        rows.append(accelerator.gather_for_metrics(columns))
    metrics = None
    if accelerator.is_main_process:
        rows = torch.cat(rows).cpu()
        rows = rows[rows[:, 0].argsort()]
        answers = choose_answers(rows, loader.dataset, args.version_2_with_negative)
        questions = loader.dataset.questions
        metrics = dict.fromkeys(("exact_match", "f1", "eval_loss"))
        if questions[0]["answers"] is not None:
            metrics = metric.compute(
                predictions=[answers[number] for number in range(len(questions))],
                references=[question["answers"]["text"] for question in questions],
            )
            metrics["eval_loss"] = rows[:, 1].double().mean().item()
        texts = {question["id"]: answers[number] for number, question in enumerate(questions)}
        content = json.dumps(texts, indent=1, ensure_ascii=False).encode()
        write_file(f"{args.output_dir}/predictions.json", content)
    metrics = utils.broadcast_object_list([metrics])[0]
    if not math.isfinite(metrics["eval_loss"] or 0):
        write_record(accelerator, run, progress, "failed")
        abort("the validation loss is not finite: lower --learning_rate")
    progress.eval_seconds += time.perf_counter() - began
    accelerator.log(metrics, progress.step)
    return metrics


def describe_scores(metrics):
    """What `validate` returned, in words."""
    if metrics["eval_loss"] is None:
        return "no scores, as the questions have no answers: predictions.json has the model's"
    return "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}".format(**metrics)


def span_logits(model, inputs):
    """Logits of start and end, float32 [batch, width, 2]. Padding gets the lowest value."""
    logits = torch.stack(model(**inputs, return_dict=False), 2).float()
    hidden = ~inputs["attention_mask"][:, 0, 0, :, None]
    return logits.masked_fill(hidden, torch.finfo(logits.dtype).min)


def span_losses(logits, starts, ends):
    """The cross-entropy of each feature, the mean over its start and its end, [batch]."""
    start_logits, end_logits = logits.unbind(-1)
    start_losses = F.cross_entropy(start_logits, starts, reduction="none")
    return (start_losses + F.cross_entropy(end_logits, ends, reduction="none")) / 2


def best_spans(logits, first, last, longest):
    """Find the span of each feature with the highest start logit + end logit. A span has at most
    `longest` tokens and lies between `first` and `last`. Returns scores, starts and ends, [batch].
    """
    positions = torch.arange(logits.shape[1], device=logits.device)
    inside = (positions >= first[:, None]) & (positions <= last[:, None])
    starts, ends = logits.masked_fill(~inside[:, :, None], -torch.inf).unbind(-1)
    # For each start, the ends that may follow it: [batch, width, longest].
    ends_ahead = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    best, pair = (starts[:, :, None] + ends_ahead).flatten(1).max(1)
    start = pair // longest
    return best, start, start + pair % longest


def choose_answers(rows, features, version_2):
    """Return {number of the question: text}, the best span in all its windows. With `version_2` the
    text is "" if the lowest "no answer" score of these windows is higher: the official recipe.
    """
    best, no_answer = {}, {}
    for window, (_, _, null_score, score, start, end) in enumerate(rows.tolist()):
        owner = features.columns["owner"][window].item()
        no_answer[owner] = min(no_answer.get(owner, null_score), null_score)
        if owner not in best or score > best[owner][0]:
            best[owner] = score, window, int(start), int(end)
    answers = {}
    for owner, (score, window, start, end) in sorted(best.items()):
        question, feature = features.questions[owner], features.table[window]
        context, stop = question["context"], feature["stops"][end]
        # A tokenizer that strips accents leaves those of the last letter outside its token.
        while unicodedata.category(context[stop : stop + 1] or " ").startswith("M"):
            stop += 1
        text = context[feature["begins"][start] : stop]
        answers[owner] = "" if version_2 and no_answer[owner] > score else text
    return answers


class SquadMetric(evaluate.Metric):
    """SQuAD's exact match and F1 in percent. evaluate.load("squad") would need a network."""

    def __init__(self, version_2):
        # evaluate creates a folder that it does not use. HF_HOME may be read-only.
        with tempfile.TemporaryDirectory() as folder:
            version = "v2.0" if version_2 else "v1.1"
            super().__init__(version, keep_in_memory=True, cache_dir=folder)

    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": [text]})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        exact, f1 = [], []
        for prediction, texts in zip(predictions, references, strict=True):
            words, right = answer_words(prediction), [answer_words(text) for text in texts]
            if self.config_name == "v2.0":  # texts without words do not count
                right = [others for others in right if others] or [[]]
            exact.append(words in right)
            f1.append(max(self.word_f1(words, others) for others in right))
        return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}

    def word_f1(self, words, others):
        """The harmonic mean of precision and recall. In v2.0, two empty answers are equal."""
        if self.config_name == "v2.0" and not (words and others):
            return float(words == others)
        same = (collections.Counter(words) & collections.Counter(others)).total()
        return 2 * same / (len(words) + len(others)) if same else 0.0


def answer_words(text):
    """The words of an answer, in lower case, without punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def load_inputs(args):
    """Return the model's config, its tokenizer, and the questions of both splits."""
    other_rank = os.environ.get("RANK", "0") != "0"
    if other_rank:
        transformers.logging.set_verbosity_error()  # rank 0 reports new weights
    if other_rank or not sys.stderr.isatty():  # progress bars would fill a log
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    name = args.model_name_or_path
    outputs = {"output_attentions": False, "output_hidden_states": False}
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **outputs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    trains = args.num_epochs or args.max_train_steps
    train_rows = read_questions(args, "train") if trains else None
    return config, tokenizer, train_rows, read_questions(args, "validation")


def load_model(args, config):
    """Return BERT in float32, with its own question-answering head or a new one."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    config.num_labels = 2  # the start and the end of an answer
    config._attn_implementation = "sdpa"  # eager attention would add a bool mask
    transformers.integrations.unset_hf_deepspeed_config()  # or ZeRO-3 draws a different new head
    if args.from_scratch:
        model = transformers.BertForQuestionAnswering(config)
    else:
        model = transformers.BertForQuestionAnswering.from_pretrained(
            args.model_name_or_path, config=config, attn_implementation="sdpa"
        )
    model._no_split_modules = ["BertLayer"]  # FSDP's units. transformers' list fails
    if args.activation_checkpointing:  # recomputes with the same dropout masks
        old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return model.float()


def save_bert(accelerator, model, config, tokenizer, folder):
    """Save weights, config and tokenizer, for `from_pretrained`. A collective."""
    save_model(accelerator, model, folder)
    if accelerator.is_main_process:
        config.architectures = ["BertForQuestionAnswering"]
        config.dtype = "float32"  # of the saved weights
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def read_questions(args, split):
    """Return the first questions of "train" or "validation", as on the Hub: dicts of id, question,
    context and answers {text: [...], answer_start: [...]}. Answers are None if the file has none.
    """
    file = args.train_file if split == "train" else args.validation_file
    limit = args.max_train_samples if split == "train" else args.max_eval_samples
    name = "rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad"
    if not file:
        return list(itertools.islice(datasets.load_dataset(name, split=split), limit or None))
    rows = []  # read one by one: an error names the first question that is not in it
    try:
        for row in itertools.islice(read_squad(file), limit or None):
            rows.append(row)
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        abort(f"{file} is neither JSON nor JSONL: {problem}")
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        form = "neither SQuAD's nested form nor a row with id, question, context and answers"
        abort(f"{file}: question {len(rows) + 1} is {form}: {problem!r}")
    if not rows:
        abort(f"{file} has no questions")
    return rows


def read_squad(file):
    """Yield the questions of a file: SQuAD's nested JSON, v1.1 or v2.0, or rows as on the Hub, in a
    list, below "data", or one on each line.
    """
    text = Path(file).read_text(encoding="utf-8-sig")
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")
    content, end = [], blank.match(text).end()
    while end < len(text):  # so an error names its line, also in JSONL
        value, end = decoder.raw_decode(text, end)
        content.append(value)
        end = blank.match(text, end).end()
    if len(content) == 1:
        content = content[0]
    if isinstance(content, dict):
        content = content.get("data", [content])
    for article in content:
        for paragraph in article.get("paragraphs", [article]):
            for qa in paragraph.get("qas", [paragraph]):
                answers = qa.get("answers")
                if utils.str_to_bool(str(qa.get("is_impossible") or False)):
                    answers = []
                if isinstance(answers, dict):  # as on the Hub, a list of each
                    pairs = zip(answers["text"], answers["answer_start"], strict=True)
                    answers = [{"text": text, "answer_start": start} for text, start in pairs]
                if answers is not None:
                    texts = [answer["text"] for answer in answers]
                    starts = [answer["answer_start"] for answer in answers[:1]]
                    answers = {"text": texts, "answer_start": starts}
                row = {"id": str(qa["id"]), "question": qa["question"]}
                yield row | {"context": paragraph["context"], "answers": answers}


def check_inputs(args, config, tokenizer, train_rows, eval_rows):
    """Refuse inputs from which BERT would silently learn something wrong."""
    name = args.model_name_or_path
    if config.model_type != "bert" or not tokenizer.is_fast:
        abort(f"{name} is not a BERT model with a fast tokenizer")
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id]
    if tokenizer(" ", " ")["input_ids"] != special:  # the labels rely on this order
        abort(f"the tokenizer of {name} does not write [CLS] question [SEP] context [SEP]")
    if args.max_seq_length > config.max_position_embeddings:
        abort(f"--max_seq_length exceeds the {config.max_position_embeddings} positions of {name}")
    if not 5 < len(tokenizer) <= config.vocab_size:  # without vocab.txt there are only 5
        abort(f"the tokenizer of {name} has {len(tokenizer)} tokens, which do not fit the model")
    splits = {"training": train_rows or [], "validation": eval_rows}
    for split, questions in splits.items():
        missing, wrong = [], []
        unknown = [question["id"] for question in questions if question["answers"] is None]
        if unknown and train_rows is None and len(unknown) == len(questions):
            continue  # an evaluation without scores
        if unknown:
            which = f"{len(unknown)} {split} questions, such as {unknown[0]}"
            abort(f"{which}, lack `answers`: only --num_epochs 0 can do without, for all questions")
        for question in questions:
            texts, starts = question["answers"]["text"], question["answers"]["answer_start"]
            if not texts:
                missing.append(question["id"])
            elif not texts[0].strip() or starts[0] < 0:
                wrong.append(question["id"])
            elif not question["context"].startswith(texts[0], starts[0]):
                wrong.append(question["id"])
        if missing and not args.version_2_with_negative:
            which = f"{len(missing)} {split} questions have no answer, such as {missing[0]}"
            abort(f"{which}: if this is SQuAD v2.0, add --version_2_with_negative")
        if wrong:
            which = f"{len(wrong)} {split} questions, such as {wrong[0]}"
            abort(f"{which}, have a first answer that is blank, or not at its answer_start")
    repeated = len(eval_rows) - len({question["id"] for question in eval_rows})
    if repeated:
        which = f"{repeated} of {len(eval_rows)} validation questions repeat an id"
        say(f"warning: {which}: predictions.json keeps the last answer of each id")


def tokenize(batch, owners, tokenizer, max_seq_length, doc_stride):
    """Turn a batch of questions into features, for `datasets.map`. A feature is a question with a
    window of its context, [CLS] question [SEP] window [SEP].

    The columns have one value per feature:
        input_ids       the tokens
        length          their number
        begins, stops   the first and one-past-last character of each token, in the context
        first           the first token of the window
        start, end      the answer's first and last token; 0 and 0, for [CLS], without an answer
        owner           the number of the question
    """
    found = tokenizer(
        [question.strip() for question in batch["question"]],
        batch["context"],
        truncation="only_second",
        max_length=max_seq_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    known = [answers or {"text": [], "answer_start": []} for answers in batch["answers"]]
    texts = ["".join(answers["text"][:1]) for answers in known]
    answers = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    features = collections.defaultdict(list)
    for encoding, row in zip(found.encodings, found["overflow_to_sample_mapping"], strict=True):
        starts, pieces = known[row]["answer_start"], answers["offset_mapping"][row]
        start, end = find_span(encoding, starts, pieces)
        offsets = np.array(encoding.offsets)
        features["input_ids"].append(encoding.ids)
        features["length"].append(len(encoding.ids))
        features["begins"].append(offsets[:, 0])
        features["stops"].append(offsets[:, 1])
        features["first"].append(encoding.sequence_ids.index(1))
        features["start"].append(start)
        features["end"].append(end)
        features["owner"].append(owners[row])
    return dict(features)


def find_span(encoding, starts, pieces):
    """Return the first and last token of an answer in a window, or 0 and 0 if a part is outside.

    The answer begins at character starts[0]. `pieces` are the first and one-past-last character of
    each token of the answer: spaces and accents at its edges may not belong to a token.
    """
    if not (starts and pieces):
        return 0, 0
    first = encoding.char_to_token(starts[0] + pieces[0][0], 1)
    last = encoding.char_to_token(starts[0] + pieces[-1][1] - 1, 1)
    return (0, 0) if first is None or last is None else (first, last)


class Features(Dataset):
    """A split of the data as BERT reads it. An item is a feature, which `tokenize` explains."""

    def __init__(self, questions, tokenizer, args):
        sizes = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
        vocabulary = tokenizer.backend_tokenizer.to_str()
        text = json.dumps(questions)  # hashing the questions themselves takes seconds
        key = datasets.fingerprint.Hasher.hash([text, sizes, vocabulary, tokenize])
        folder = Path(datasets.config.HF_DATASETS_CACHE, "squad_features")
        folder.mkdir(parents=True, exist_ok=True)
        file = f"{folder}/{key}.arrow"
        if not os.path.exists(file):
            table = datasets.Dataset.from_list(questions)
            table.map(
                tokenize,
                batched=True,
                with_indices=True,
                remove_columns=table.column_names,
                fn_kwargs={"tokenizer": tokenizer} | sizes,
                new_fingerprint=key,
                cache_file_name=file,
            )
        self.table = datasets.Dataset.from_file(file)
        tokenizer.backend_tokenizer.no_truncation()  # it is saved with the model
        self.questions = questions
        self.max_width = args.max_seq_length
        self.tokens = self.table.with_format("arrow", columns=["input_ids"])  # stay on the disk
        names = ["length", "first", "start", "end", "owner"]
        columns = self.table.with_format("arrow", columns=names)[:]
        self.columns = {name: torch.tensor(columns[name].to_numpy()) for name in names}  # int64
        text += str([self.columns[name].tolist() for name in names])
        self.checksum = zlib.crc32(text.encode())

    def __len__(self):
        return len(self.table)

    def __getitems__(self, ids):
        """Return a batch, as wide as its longest feature: the model's inputs, what belongs to the
        answers, and the number of tokens without and with padding.
        """
        # All tokens of the batch in one array: a tensor for each feature would cost milliseconds.
        tokens = self.tokens[ids]["input_ids"].combine_chunks().flatten().to_numpy()
        ids = torch.tensor(ids)
        lengths = self.columns["length"][ids]
        width = lengths.max().item()
        if torch.cuda.is_available():  # tensor cores prefer multiples of 8
            width = min((width + 7) // 8 * 8, self.max_width)
        mask = torch.arange(width) < lengths[:, None]
        input_ids = torch.zeros(mask.shape, dtype=torch.int64)  # padding is hidden by the mask
        input_ids[mask] = torch.tensor(tokens, dtype=torch.int64)
        in_context = torch.arange(width) >= self.columns["first"][ids, None]
        inputs = {
            "input_ids": input_ids,
            "attention_mask": mask[:, None, None, :],  # transformers leaves this shape alone
            "token_type_ids": (mask & in_context).int(),
        }
        spans = {name: self.columns[name][ids] for name in ("start", "end", "first")}
        size = [lengths.sum().item(), mask.numel()]
        return inputs, spans | {"ids": ids, "last": lengths - 2}, size


class LengthSampler(Sampler):
    """The order of the training features. A global batch has similar lengths, which saves padding.

    It shuffles the features, sorts each pool of 50 global batches by length (smaller pools if there
    would be fewer than 4), cuts the pools into global batches, and shuffles these. The batch with
    the longest feature comes first, so a lack of memory shows at once. The order depends on seed
    and epoch, not on the number of processes.
    """

    def __init__(self, lengths, global_batch_size, seed):
        self.lengths, self.size, self.seed = lengths, global_batch_size, seed
        self.steps = len(lengths) // global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Order the features of an epoch. The set_epoch of the prepared DataLoader calls this."""
        generator = torch.Generator().manual_seed(self.seed * ORDERS_PER_SEED + epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.steps * self.size]
        pools = order.split(self.size * max(1, min(50, self.steps // 4)))
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(pools).view(self.steps, self.size)
        batches = batches[torch.randperm(self.steps, generator=generator)]
        longest = self.lengths[batches].amax(1).argmax().item()
        self.order = torch.cat([batches[longest:], batches[:longest]]).flatten().tolist()

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def make_loaders(args, train_set, eval_set, devices):
    """The DataLoaders for training and validation. Each batch is split across the ranks, so the
    number of ranks does not change which samples a step takes.
    """
    batch = args.per_device_train_batch_size * devices
    sampler = None
    if train_set is not eval_set:  # the run trains
        global_batch, samples = batch * args.gradient_accumulation_steps, len(train_set)
        if global_batch > samples:
            abort(f"the global batch ({global_batch}) is larger than the training set ({samples})")
        sampler = LengthSampler(train_set.columns["length"], global_batch, args.seed)
    by_length = eval_set.columns["length"].argsort(descending=True, stable=True).tolist()
    # With a generator of their own, the loaders do not disturb the one that dropout uses.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    options["pin_memory"] = torch.cuda.is_available()
    eval_batch = args.per_device_eval_batch_size * devices
    train_loader = DataLoader(train_set, batch, sampler=sampler, **options)
    return train_loader, DataLoader(eval_set, eval_batch, sampler=by_length, **options)


def describe_workload(args, config, train_set, eval_set):
    """This script's part of run["workload"], which must not change when a run is resumed."""
    file = args.train_file or args.validation_file
    hub_name = "rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad"
    return {
        "model": Path(args.model_name_or_path).name
        + (", from scratch" if args.from_scratch else ""),
        "dataset": Path(file).name if file else hub_name,
        "samples": len(train_set),
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
    parser = argparse.ArgumentParser(description="Fine-tune BERT on SQuAD.", allow_abbrev=False)
    add_common_args(parser)
    add = parser.add_argument
    bert = "google-bert/bert-base-uncased"
    add("--model_name_or_path", default=bert, help="BERT's name on the Hub, or a folder")
    add("--from_scratch", action="store_true", help="the model's config with random weights")
    add("--train_file", help="JSON or JSONL of questions; None: SQuAD from the Hub")
    add("--validation_file", help="questions to evaluate on, in the same form")
    add("--version_2_with_negative", action="store_true", help="some questions have no answer")
    add("--max_train_samples", type=non_negative_int, default=10_000, help="0: all questions")
    add("--max_eval_samples", type=non_negative_int, default=500, help="0: all questions")
    add("--max_seq_length", type=positive_int, default=384, help="tokens of question and context")
    add("--doc_stride", type=non_negative_int, default=128, help="tokens that two windows share")
    add("--max_answer_length", type=positive_int, default=30, help="longest answer, in tokens")
    add("--activation_checkpointing", action="store_true", help="less memory, a third more work")
    add("--num_epochs", type=non_negative_int, default=4, help="0: only evaluate")
    add("--per_device_train_batch_size", type=positive_int, default=4, help="per micro-batch")
    add("--per_device_eval_batch_size", type=positive_int, default=32, help="per batch")
    add("--learning_rate", type=float, default=3e-5, help="peak; then falls linearly to 0")
    add("--num_warmup_steps", type=non_negative_int, default=0, help="steps of the linear warm-up")
    add("--weight_decay", type=float, default=0.0, help="for AdamW")
    add("--logging_steps", type=positive_int, default=10, help="log the loss every N steps")
    args = parser.parse_args()
    trains = args.num_epochs or args.max_train_steps
    if bool(args.train_file) != bool(args.validation_file) and (trains or args.train_file):
        abort("--train_file and --validation_file go together: give both, or neither")
    if os.path.realpath(args.output_dir or "runs") == os.path.realpath(args.model_name_or_path):
        abort("--output_dir is the model's own folder: the run would overwrite its weights")
    return args


# -------- Everything below is identical in both scripts, and a test compares them: change both.

VERSION = "0.8.0"  # CHANGELOG.md says what changed
CHECKPOINT = "step_" + "[0-9]" * 8  # other folders are not checkpoints
ORDERS_PER_SEED = 10_000  # epoch 1 of seed 0 must not have the order of epoch 0 of seed 1


def positive_int(text, lowest=1):
    """Parse a whole number for argparse. One that is too small could mean another run."""
    if not text.isdecimal() or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, {lowest} or more")
    return int(text)


non_negative_int = partial(positive_int, lowest=0)


def add_common_args(parser):
    """Add the flags of both scripts."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.error = abort  # one line, without the usage
    add = parser.add_argument
    add("--prepare_data_only", action="store_true", help="download and check data, then stop")
    add("--max_train_steps", type=positive_int, help="optimizer steps; overrides --num_epochs")
    add("--gradient_accumulation_steps", type=positive_int, help="None: 1, or DeepSpeed's setting")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=non_negative_int, default=0, help="for weights, sample order and dropout")
    add("--output_dir", type=os.path.expanduser, help="None: a new folder in runs/")
    add("--checkpointing_steps", type=positive_int, help="also save every N steps")
    add("--resume", action="store_true", help="continue from OUTPUT_DIR's newest checkpoint")
    add("--with_tracking", action="store_true", help="log to the tracker that --report_to names")
    add("--report_to", choices=utils.LoggerType.list(), default="tensorboard", help="the tracker")
    add("--profile", action="store_true", help="trace steps 13 to 17, which slows the run")


@dataclass
class Progress:
    """The progress of a run. Checkpoints store rank 0's."""

    began: str  # UTC, in ISO 8601
    step: int = 0  # optimizer steps that are done
    losses: list = field(default_factory=list)  # of the global batch, one per step
    rates: list = field(default_factory=list)  # steps per second, one for each log
    evaluations: list = field(default_factory=list)  # metrics, one entry per finished epoch
    train_seconds: float = 0.0  # excludes evaluation and saving
    eval_seconds: float = 0.0
    counts: dict = field(default_factory=dict)  # extra fields of this script's run.json
    peak_memory: float | None = None  # in MB; --resume measures it again


def connect_ranks():
    """Connect the processes that the launcher started, over gloo if they have no GPU."""
    env = os.environ
    # Stop if the launcher dies. It is a Python process; a shell may exit before the run does.
    launched = "LOCAL_RANK" in env or "ACCELERATE_MIXED_PRECISION" in env
    with contextlib.suppress(OSError):  # the parent may belong to another user
        if launched and "python" in Path(os.readlink(f"/proc/{os.getppid()}/exe")).name:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
    fsdp = utils.parse_flag_from_env("ACCELERATE_USE_FSDP")
    zero = utils.parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    # Without LOCAL_RANK, accelerate trains in one process, even if its launcher set MASTER_ADDR.
    several = env.get("WORLD_SIZE", "1") != "1" or env.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if env.get("LOCAL_RANK", "-1") == "-1" and (several or "MASTER_ADDR" in env):
        advice = "launch with ddp.yaml, or unset WORLD_SIZE, MASTER_ADDR and SLURM_STEP_NUM_TASKS"
        abort(f"each process would train alone: {advice}")
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"  # DeepSpeed's 1 counts GPUs that torch cannot use
    if torch.cuda.device_count() and not torch.cuda.is_available():
        # Each rank says so, before others wait for it.
        where = f"torch {torch.__version__} cannot use the GPU of {os.uname().nodename}"
        sys.exit(f"error: {where}: is its driver too old?")
    cores = sorted(os.sched_getaffinity(0))
    ranks = int(env.get("LOCAL_WORLD_SIZE", 1))
    if ranks > len(cores):
        say(f"warning: {ranks} ranks share {len(cores)} core(s): is OMP_PROC_BIND set?")
    with contextlib.suppress(OSError, ValueError):  # "max": there is no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        if ranks > quota / period:
            say(f"warning: {ranks} ranks share the quota of {quota / period:g} core(s) in cpu.max")
    patience = timedelta(minutes=30)  # rank 0 may download for longer than NCCL's 10 minutes
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch 2.15 would plan anew for each width
        return PartialState(timeout=patience)
    if 1 < ranks <= len(cores):  # each rank is faster on its own cores
        os.sched_setaffinity(0, cores[int(env["LOCAL_RANK"]) :: ranks])
    env.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns about a missing GPU
    if zero:
        import deepspeed.ops

        # DeepSpeed 0.19.8 would compile this op for 20 seconds, and write into the user's home.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if fsdp or zero else None
    state = PartialState(cpu=not backend, backend=backend, timeout=patience)
    if fsdp:  # accelerate 1.15 needs this on CPUs
        state.distributed_type = utils.DistributedType.MULTI_GPU
    return state


def make_accelerator(args):
    """Return the Accelerator and the name of its strategy, such as "zero2". A collective."""
    # accelerate has no DP, so dp.yaml sets a dynamo mode that torch.compile would reject.
    dp = os.environ.get("ACCELERATE_DYNAMO_MODE") == "data_parallel"
    if dp:
        del os.environ["ACCELERATE_DYNAMO_MODE"]
    if utils.parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") != "2":
        abort("fsdp_version must be 2: convert the YAML with `accelerate to-fsdp2`")
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # or ranks > 0 never train a new head
    if args.resume and not args.output_dir:
        abort("--resume needs --output_dir")
    if args.max_grad_norm is not None and not args.max_grad_norm > 0:  # or NaN
        abort("--max_grad_norm must be above 0: torch would turn the gradients around")
    name = Path(__file__).stem.removeprefix("train_")
    folder = args.output_dir or time.strftime(f"runs/{name}-%Y%m%d-%H%M%S")
    folder = args.output_dir = utils.broadcast_object_list([folder])[0]  # rank 0's
    order_seed = args.seed * ORDERS_PER_SEED  # accelerate adds the epoch
    accelerator = Accelerator(
        dataloader_config=utils.DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=order_seed, non_blocking=True
        ),
        kwargs_handlers=[utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        log_with=args.report_to if args.with_tracking else None,
        project_config=utils.ProjectConfiguration(folder, logging_dir=f"{folder}/tensorboard"),
    )
    if args.gradient_accumulation_steps:
        accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    strategy = "dp" if dp else "baseline"
    if accelerator.distributed_type == utils.DistributedType.DEEPSPEED:
        strategy = f"zero{configure_deepspeed(accelerator, args)}"
    elif accelerator.distributed_type == utils.DistributedType.FSDP:
        strategy = "hsdp" if accelerator.parallelism_config else "fsdp"
        plugin = accelerator.state.fsdp_plugin
        if plugin.activation_checkpointing and args.dropout:  # the second pass draws other masks
            abort("fsdp_activation_checkpointing needs --dropout 0; BERT's own flag does not")
        if not torch.cuda.is_available():
            plugin.cpu_offload.pin_memory = False  # pinning needs a GPU
    elif accelerator.distributed_type != utils.DistributedType.NO:
        strategy = "ddp"
    args.gradient_accumulation_steps = accelerator.gradient_accumulation_steps
    if accelerator.mixed_precision == "fp16" and not torch.cuda.is_available():
        abort("fp16 needs a GPU; without one, accelerate would compute in fp32: use bf16 or no")
    if accelerator.mixed_precision == "bf16" and strategy == "dp":
        abort("dp.yaml would compute in fp16 instead of bf16: use ddp.yaml")
    if args.with_tracking and not accelerator.log_with:
        abort(f"the tracker of --report_to {args.report_to} is not installed")
    return accelerator, strategy


def configure_deepspeed(accelerator, args):
    """Copy the flags into DeepSpeed's config. Returns the stage of ZeRO."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    zero = config["zero_optimization"]
    zero["stage3_gather_16bit_weights_on_model_save"] = True  # or the final save fails
    if config["gradient_accumulation_steps"] != "auto" and not args.gradient_accumulation_steps:
        accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
    config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps
    clipping = args.max_grad_norm or config.get("gradient_clipping", "auto")
    config["gradient_clipping"] = 0.0 if clipping == "auto" else clipping  # not accelerate's 1.0
    args.max_grad_norm = config["gradient_clipping"] or None
    if args.max_grad_norm:
        zero.pop("compute_grad_norm", None)  # clipping needs the norm
    return zero["stage"]


def describe_run(accelerator, strategy, args):
    """The first fields of run.json. Call this before the model exists: it measures the memory."""
    reset_peak_memory()
    devices = accelerator.num_processes
    if strategy == "dp":  # one process uses all visible GPUs
        devices = max(1, torch.cuda.device_count())
    cpu = re.search(r"model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text())  # missing on ARM
    device_name = f"CPU ({cpu[1] if cpu else os.uname().machine})"
    if torch.cuda.is_available():
        device_name = torch.cuda.get_device_name()
    options = {}
    if strategy.startswith("zero"):  # DeepSpeed's JSON
        options = dict(accelerator.state.deepspeed_plugin.deepspeed_config)
        options |= options.pop("zero_optimization")
    prefixes = {"fsdp": "FSDP_", "hsdp": ("FSDP_", "PARALLELISM_CONFIG_")}
    for name, value in os.environ.items():
        if name.startswith(prefixes.get(strategy, ())):
            options[re.sub("FSDP_|PARALLELISM_CONFIG_", "", name).lower()] = value
    elsewhere = ["gradient_accumulation_steps", "gradient_clipping", "steps_per_print"]
    elsewhere += ["train_batch_size", "train_micro_batch_size_per_gpu"]
    without_effect = ["sharding_strategy", "backward_prefetch", "forward_prefetch"]  # in FSDP2
    without_effect += ["use_orig_params", "sync_module_states"]
    for name in elsewhere + without_effect:
        options.pop(name, None)
    dynamo = accelerator.state.dynamo_plugin.backend.value.lower()
    compute = {"precision": accelerator.mixed_precision, "dynamo": dynamo}
    names = ["num_epochs", "max_train_steps", "max_grad_norm", "seed", "dropout"]
    flags = {name: getattr(args, name) for name in [*names, "learning_rate", "weight_decay"]}
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    packages = ["torch", "accelerate", "deepspeed", "transformers"]
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {
        "version": VERSION,
        "script": Path(__file__).name,
        "strategy": strategy,
        "strategy_options": options,
        "workload": compute | flags,
        **compute,
        "processes": accelerator.num_processes,
        "devices": devices,
        "device_name": device_name,
        "threads": torch.get_num_threads(),
        "per_device_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": batch * devices * accumulation,
        "activation_checkpointing": getattr(args, "activation_checkpointing", False),
        "profiled": args.profile,
        "argv": sys.argv,
        "versions": versions,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "memory_before_mb": peak_memory(),
    }


def settings(run):
    """The settings that a resumed run must share with the run that it continues."""
    values = {name: run.get(name) for name in ("version", "strategy", "global_batch_size")}
    values |= {f"option {name}": value for name, value in run.get("strategy_options", {}).items()}
    return values | run.get("workload", {})


def open_folder(accelerator, args, run):
    """Lock OUTPUT_DIR. Returns its newest checkpoint, or ends a completed run. A collective."""
    folder = Path(args.output_dir)
    locked = True
    checkpoint, status, steps = None, None, 0
    if accelerator.is_main_process:  # other nodes may see an older state
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_WRONLY, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
        except BlockingIOError:
            locked = False
        except OSError as problem:  # Lustre without -o flock, for example
            say(f"warning: cannot lock {folder} ({problem.strerror}): start only one run in it")
        checkpoint = max(map(str, folder.glob(f"checkpoints/{CHECKPOINT}")), default=None)
        if (folder / "run.json").exists():
            record = json.loads((folder / "run.json").read_bytes())
            status, steps = record["status"], record["steps"]
    locked, checkpoint, status = utils.broadcast_object_list([locked, checkpoint, status])
    if not locked:
        abort(f"another run is writing into {folder}: wait for it, or change --output_dir")
    if (checkpoint or status) and not args.resume:
        abort(f"{folder} holds another run: add --resume, or change --output_dir")
    if checkpoint or status == "completed":
        file = Path(checkpoint, "progress.json") if checkpoint else folder / "run.json"
        saved = json.loads(file.read_bytes())
        before = settings(saved.get("run", saved))
        now = settings(run)
        for name in now | before:
            if before.get(name) != now.get(name):
                abort(f"cannot resume with another {name}: {before.get(name)} -> {now.get(name)}")
    if status == "completed":
        say(f"{folder} is a completed run already: see its run.json")
        sys.exit()
    if steps and not checkpoint:
        say(f"warning: {folder} had {steps:,} steps, but has no checkpoint: starting at step 0")
    if accelerator.is_main_process:
        shutil.rmtree(folder / "checkpoints" / "partial", ignore_errors=True)  # of a killed run
    return checkpoint


def load_checkpoint(accelerator, checkpoint):
    """Load a checkpoint, if there is one. Returns the Progress of the run. A collective."""
    if not checkpoint:
        return Progress(began=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()))
    say(f"resuming from {checkpoint}")
    saved = json.loads(Path(checkpoint, "progress.json").read_bytes())
    if saved["run"]["processes"] == accelerator.num_processes:
        # Fails if it is lost. accelerate 1.15 would draw other dropout masks (accelerate#4283).
        utils.load(f"{checkpoint}/random_states_{accelerator.process_index}.pkl")
    accelerator.load_state(checkpoint)
    accelerator.step = 0  # micro-batches per step may differ now
    return Progress(**saved["progress"])


def start_profiler(accelerator, args):
    """With --profile, trace steps 13 to 17 into OUTPUT_DIR/traces, one file per rank."""
    if not args.profile:
        return SimpleNamespace(step=lambda: None, stop=lambda: None)
    file = Path(args.output_dir, "traces", f"profile_{accelerator.process_index}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=12, active=5, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(file)),
    )
    profiler.start()
    return profiler


def watch_signals():
    """Return a list that grows with each signal to stop. Under nohup, SIGHUP stays ignored."""
    signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: signals.append(True))
    return signals


def listen(accelerator, signals, losses, began, step):
    """Return whether any rank got a signal to stop, and the step at which to listen again: in 10 s,
    at the pace of the steps since `began`. A collective.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # it may be seconds behind
    steps = len(losses) / accelerator.gradient_accumulation_steps
    answers = utils.gather_object([(bool(signals), (time.perf_counter() - began) / steps)])
    slowest = max(seconds for _, seconds in answers)
    return any(stops for stops, _ in answers), step + max(1, int(10 / slowest))


def log_step(accelerator, losses, rate, norm, began, progress, steps):
    """Read the losses of the micro-batches since `began`, and log the last step. A collective."""
    means = torch.stack(losses).view(-1, accelerator.gradient_accumulation_steps).mean(1)
    means = accelerator.reduce(means, "mean").tolist()  # over all ranks; waits for the GPU
    seconds = time.perf_counter() - began
    progress.train_seconds += seconds
    progress.rates.append(len(means) / seconds)
    progress.losses += itertools.takewhile(math.isfinite, means)
    if not progress.evaluations:  # evaluation may need more than training
        progress.peak_memory = peak_memory()
    values = {"loss": means[-1], "learning_rate": rate, "steps_per_second": progress.rates[-1]}
    if norm is not None:
        values["gradient_norm"] = float(norm)
    accelerator.log(values, progress.step)
    left = timedelta(seconds=round((steps - progress.step) / progress.rates[-1]))
    speed = f"{progress.rates[-1]:.2f} steps/s, {left} left"
    say(f"step {progress.step:,}/{steps:,}: loss {means[-1]:.4f}, {speed}")


def batches_to_evaluate(accelerator, loader, run, progress, signals):
    """Yield the batches of an evaluation. A signal ends the run. A collective."""
    said = time.perf_counter()  # report the progress once a minute
    for done, batch in enumerate(loader):
        if utils.gather_object(signals):  # on any rank
            end_run(accelerator, run, progress, "preempted")
        if time.perf_counter() - said > 60:
            said = time.perf_counter()
            say(f"evaluation: {done:,} of {len(loader):,} batches done")
        yield batch


def save_checkpoint(accelerator, run, progress):
    """Save what --resume needs. The folder gets its name when it is complete. A collective."""
    folder = Path(accelerator.project_dir, "checkpoints")
    partial = folder / "partial"
    accelerator.save_state(partial, safe_serialization=False)  # safetensors files get mode 0600
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # As JSON: objects that are registered with accelerate could run code when they are loaded.
        state = {"run": run, "progress": asdict(progress) | {"peak_memory": None}}
        (partial / "progress.json").write_text(json.dumps(state))
        partial.rename(folder / f"step_{progress.step:08d}")
        for old in sorted(folder.glob(CHECKPOINT))[:-2]:
            shutil.rmtree(old, ignore_errors=True)  # NFS keeps files that are being read


def save_model(accelerator, model, folder):
    """Save the weights as fp32, gathered from all ranks. ZeRO in bf16 rounds them. A collective."""
    weights = accelerator.get_state_dict(model, unwrap=False)  # unwrapping imports DeepSpeed
    if accelerator.is_main_process:
        # torch.compile, DDP and DataParallel add these prefixes.
        names = [name.replace("_orig_mod.", "").removeprefix("module.") for name in weights]
        tensors = [weight.float().cpu().contiguous() for weight in weights.values()]
        weights = dict(zip(names, tensors, strict=True))
        os.makedirs(folder, exist_ok=True)
        write_file(f"{folder}/model.safetensors", safetensors.torch.save(weights, {"format": "pt"}))


def write_file(path, content):
    """Write a whole file. Atomic: if the process is killed, the old file is still there."""
    partial = Path(f"{path}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def peak_memory():
    """The peak memory of this process in MB, on its (first) GPU or in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    sizes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(sizes[0]) * 1024 / 1e6


def reset_peak_memory():
    """Forget the peak memory until now."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: man 5 proc


def write_record(accelerator, run, progress, status):
    """Write run.json: what was asked for, and what was measured so far. A collective."""
    started = psutil.Process().create_time() - psutil.boot_time()  # the rounding errors cancel
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started  # of this process, imports included
    run.setdefault("startup_seconds", age)
    record = run | progress.counts
    rank = {"rank": accelerator.process_index, "host": os.uname().nodename}
    rank |= {"device_name": run["device_name"], "cores": len(os.sched_getaffinity(0))}
    rank |= {"real": age, "user": os.times().user, "sys": os.times().system}
    rank["memory_before_mb"] = record.pop("memory_before_mb")
    rank["peak_memory_mb"] = progress.peak_memory
    ranks = utils.gather_object([rank])
    rate = statistics.median(progress.rates or [0])  # the median ignores the warm-up
    seconds = {"startup": record.pop("startup_seconds"), "total": age}
    seconds |= {"train": progress.train_seconds, "eval": progress.eval_seconds}
    record |= {
        "status": status,
        "began": progress.began,
        "steps": progress.step,
        "seconds": seconds,
        "loss_history": list(enumerate(progress.losses, 1)),
        "metrics": progress.evaluations[-1] if progress.evaluations else None,
        "steps_per_second": progress.rates,
        "samples_per_second": rate * run["global_batch_size"] or None,
        "ranks": ranks,
        "nodes": len({rank["host"] for rank in ranks}),
    }
    if accelerator.is_main_process:
        write_file(f"{accelerator.project_dir}/run.json", json.dumps(record, indent=1).encode())


def end_run(accelerator, run, progress, status):
    """Write the last record and close the trackers. Only a completed run returns. A collective."""
    write_record(accelerator, run, progress, status)
    accelerator.end_training()
    say(f"{status} at step {progress.step:,}: {progress.train_seconds:.1f} s of training")
    if status != "completed":
        sys.exit()


def say(line):
    """Print a line on rank 0. A closed pipe or a full disk does not end the run."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError):
            print(line, flush=True)


def abort(message):
    """End the run with one line. All ranks call it, and rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        sys.exit(f"error: {message}")
    time.sleep(2)  # when a rank has failed, the launcher ends the others, rank 0 too
    sys.exit(1)


@errors.record  # for the launcher's summary of errors
def cli():
    """Run the script as a command."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and os.environ["RANK"] != "0":
        sys.excepthook = lambda *_: None  # the launcher has the traceback
    connect_ranks()  # first, so that rank 0 prints any error
    try:
        _ = main(parse_args())
    except SystemExit as end:
        if end.code:
            raise
        _ = end
    with contextlib.suppress(OSError, ValueError):
        print(end="", flush=True)
    # `_` keeps the model alive: gloo may hang when it is freed or Python exits (pytorch#56297).
    os._exit(0)


if __name__ == "__main__":
    cli()
