"""Fine-tune BERT on SQuAD, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision bf16 \\
        train_bert_squad.py
    python train_bert_squad.py --prepare_data_only    # on a login node that has a network

The YAMLs are baseline, dp, ddp, fsdp, zero2 and zero3, and more for when memory is short
(docs/ladder.md). Without a GPU the same strategies run on CPU processes. BERT reads a question and
a text (the context), and says at which token of the text the answer starts and at which it ends. A
run leaves in OUTPUT_DIR: run.json (the record), predictions.json, model and tokenizer for
`from_pretrained`, checkpoints/ (to resume).

Read from here to the end of `main`, and `train` first: it is the training loop. All below `main` is
the same in both scripts: launching, workarounds, the record, checkpoints.
"""

import argparse
import collections
import contextlib
import datetime
import faulthandler
import inspect
import json
import logging
import math
import os
import platform
import re
import resource
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import psutil
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProfileKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from datasets.fingerprint import Hasher
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

SYNC_STEPS = 50  # so often losses leave the device, and ranks ask each other whether to stop;
SYNC_SECONDS = 10  # or about so often if steps are slow, as Slurm gives 30 s or more to stop
WARMUP_STEPS = 10  # not in samples_per_second: allocators and communicators are set up in them
PROFILE_STEPS = 5  # that --profile traces, after the warm-up
LOG_SECONDS = 10  # without a terminal, a line of progress about so often
LATE_DISK_SECONDS = 30  # after which a node has to see the folder that another made
KEEP_CHECKPOINTS = 2  # the newest, and one more in case that is damaged; the best is kept besides
OFFLINE = ("without a network, run --prepare_data_only on a node that has one first, or give files "
           "and a folder")

# -------- command line


def parse_args():
    """The flags of a run. Anything wrong with them ends the run with one line."""
    parser = make_parser(
        "Fine-tune BERT on SQuAD, to find answers in a text.", "fsdp.yaml train_bert_squad.py",
        epochs=4, batch=4, eval_batch=32, learning_rate=3e-5)
    add = parser.add_argument
    add("--model_name_or_path", default="google-bert/bert-base-uncased", help="BERT's name on the "
        "Hugging Face Hub, or a folder with config, weights and tokenizer")
    add("--from_scratch", action="store_true", help="the model's config, but random weights")
    add("--config_overrides", metavar="KEY=VALUE,...", help="with --from_scratch, change the "
        "model's config: hidden_size=768,num_hidden_layers=6")
    add("--train_file", help="questions to train on, in SQuAD's own nested JSON (without: "
        "rajpurkar/squad from the Hub)")
    add("--validation_file", help="questions to evaluate on, likewise")
    add("--version_2_with_negative", action="store_true", help="SQuAD v2.0: some questions have no "
        "answer (from the Hub: rajpurkar/squad_v2)")
    add("--max_train_samples", type=int, default=10_000, help="take the first so many training "
        "questions; 0: all")
    add("--max_eval_samples", type=int, default=500, help="likewise in evaluation")
    add("--max_seq_length", type=int, default=384, help="tokens of question and context together; "
        "longer contexts are cut into overlapping windows")
    add("--doc_stride", type=int, default=128, help="tokens by which windows overlap")
    add("--max_answer_length", type=int, default=30, help="of a predicted answer, in tokens")
    add("--activation_checkpointing", action="store_true", help="keep only each layer's input for "
        "the backward pass and compute the rest again: less memory, a third more computation")
    args = parse_checked(parser, "max_train_samples", "max_eval_samples", "doc_stride")
    if bool(args.train_file) != bool(args.validation_file):
        parser.error("--train_file and --validation_file go together: give both, or none for SQuAD "
                     "from the Hub")
    if args.config_overrides and not args.from_scratch:
        parser.error("--config_overrides needs --from_scratch: weights fit their own config only")
    if "dropout" in (args.config_overrides or ""):
        parser.error("--config_overrides does not set the dropout: use --dropout")
    return args


# -------- questions, read


def read_questions(args, split):
    """The first --max_..._samples questions of "train" or "validation": dicts of id, question,
    context and answers, a list of (text, first character in the context). Raises Fault, which names
    file, question and what is wrong there.
    """
    train = split == "train"
    path = args.train_file if train else args.validation_file
    limit = args.max_train_samples if train else args.max_eval_samples
    name, questions = path or hub_name(args), {}
    for row in read_squad(path) if path else read_hub(name, split):
        if limit and len(questions) == limit:
            break
        if row["id"] in questions:
            raise Fault(f"{name}: question {row['id']} is there twice")
        if problem := check_question(row, args.version_2_with_negative):
            raise Fault(f"{name}: question {row['id']} has {problem}")
        # An answer starts and ends with a token, not with a space.
        row["answers"] = [(text.strip(), start + len(text) - len(text.lstrip()))
                          for text, start in row["answers"]]
        questions[row["id"]] = row
    if not questions:
        raise Fault(f"{name} has no questions")
    return list(questions.values())


def check_question(row, version_2):
    """What a question has that it should not have, or None."""
    context = row["context"]
    for key in ("question", "context"):
        if not isinstance(row[key], str):
            return f"a {key} that is not text: {row[key]!r}"
        if re.search("[\ud800-\udfff]", row[key]):
            return f"half a character in its {key}: a surrogate without its other half"
    if not context.strip():
        return "an empty context"
    if not row["answers"] and not version_2:
        return "no answer: add --version_2_with_negative if this is SQuAD v2.0"
    for text, start in row["answers"]:
        if not isinstance(text, str) or not isinstance(start, int):
            return f"the answer {text!r} at {start!r}: a text and a number are wanted"
        if not text.strip() or start < 0 or context[start : start + len(text)] != text:
            there = context[max(start, 0) : start + max(len(text), 1)]
            return f"its answer {text!r} at character {start} of the context, where {there!r} is"
    return None


def read_squad(path):
    """Yield the questions of a file in SQuAD's nested JSON, v1.1 or v2.0. Raises Fault."""
    place = "the file"
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8-sig"))["data"]
        for article_number, article in enumerate(articles, 1):
            place = f"article {article_number}"
            title = article.get("title") or "without a title"
            for number, paragraph in enumerate(article["paragraphs"], 1):
                place = f"paragraph {number} of article {title}"
                for qa in paragraph["qas"]:
                    place = f"question {qa['id']}" if "id" in qa else f"a question after {place}"
                    answers = [] if qa.get("is_impossible") else qa["answers"]
                    if not isinstance(answers, list):
                        raise TypeError("answers must be a list")
                    answers = [(answer["text"], answer["answer_start"]) for answer in answers]
                    yield {"id": str(qa["id"]), "question": qa["question"],
                           "context": paragraph["context"], "answers": answers}
    except OSError as problem:
        raise Fault(f"cannot read {path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise Fault(f"{path} is not JSON: {problem}") from None
    except KeyError as key:
        raise Fault(f"{path}: {place} has no {key}") from None
    except (TypeError, AttributeError) as problem:
        raise Fault(f"{path}: {place} is not in SQuAD's form: {problem}") from None


def hub_name(args):
    """The name on the Hub of the questions that are used when no files are given."""
    return "rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad"


def read_hub(name, split):
    """Yield the questions of SQuAD from the Hugging Face Hub, or from its cache. Raises Fault."""
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as problem:  # the network, the Hub and the cache each have errors of their own
        raise Fault(f"cannot load {name}: {one_line(problem)}; {OFFLINE}") from None
    for row in rows:
        texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
        yield row | {"answers": list(zip(texts, starts, strict=True))}


# -------- questions, tokenised


def tokenize(batch, owners, tokenizer, max_seq_length, doc_stride):
    """The features of a batch of questions, for `datasets.map`. A feature is a question with a
    window of its context, [CLS] question [SEP] window [SEP]. Raises Fault.

    Columns: input_ids; begins and stops, the first and one-past-last character of each token;
    first, the window's first token; start and end, the answer's first and last token, or 0 and 0,
    [CLS], where the window has no answer; owner, which of the questions it belongs to.
    """
    asked = batch["question"]
    lone = tokenizer(asked, add_special_tokens=False)["input_ids"]
    for name, ids in zip(batch["id"], lone, strict=True):
        if (room := max_seq_length - 3 - len(ids)) <= doc_stride:  # 3: [CLS] and two [SEP]
            raise Fault(f"question {name} leaves {max(room, 0)} of --max_seq_length "
                        f"{max_seq_length} tokens for its context, which must be more than "
                        f"--doc_stride {doc_stride}")
    found = tokenizer(asked, batch["context"], truncation="only_second", max_length=max_seq_length,
                      stride=doc_stride, return_overflowing_tokens=True,
                      return_offsets_mapping=True)
    features = []
    for encoding, row in zip(found.encodings, found["overflow_to_sample_mapping"], strict=True):
        if 1 not in encoding.sequence_ids:
            raise Fault(f"question {batch['id'][row]} has a context without tokens")
        first, offsets = encoding.sequence_ids.index(1), np.array(encoding.offsets)
        start, end = find_span(offsets, first, batch["text"][row], batch["start"][row])
        features.append({
            "input_ids": encoding.ids,
            "begins": offsets[:, 0],
            "stops": offsets[:, 1],
            "first": first,
            "start": start,
            "end": end,
            "owner": owners[row],
        })
    return {name: [feature[name] for feature in features] for name in features[0]}


def find_span(offsets, first, text, start):
    """The first and last token of an answer, in a window whose context begins at token `first`;
    (0, 0) unless all of the answer is inside. `start` is -1 where there is no answer.
    """
    begins, stops = offsets[first:-1, 0], offsets[first:-1, 1]  # without the [SEP] at the end
    if not begins[0] <= start <= start + len(text) <= stops[-1]:
        return 0, 0
    # The first token that ends after the answer begins, and the last that begins before it ends: a
    # character may be several tokens, or none.
    return (first + int(np.searchsorted(stops, start, "right")),
            first + int(np.searchsorted(begins, start + len(text), "left")) - 1)


class Features(Dataset):
    """A split of the data as BERT reads it. Item `i` is a feature, as `tokenize` explains it."""

    def __init__(self, questions, table, key, max_seq_length):
        self.questions, self.table, self.key = questions, table, key  # dicts, datasets.Dataset
        columns = table.with_format("torch")[:]
        self.input_ids = list(columns["input_ids"])  # int64 [length] each
        self.first, self.start, self.end, self.owner = (
            columns[name] for name in ("first", "start", "end", "owner"))  # int64 [features] each
        self.lengths = torch.tensor([len(ids) for ids in self.input_ids])
        self.max_width = max_seq_length

    def __len__(self):
        return len(self.input_ids)

    def width(self, lengths):
        """The width of batches whose features have `lengths` [..., batch]: dynamic padding."""
        widths = lengths.amax(-1)
        if torch.cuda.is_available():
            widths = (widths + 7) // 8 * 8  # tensor cores want multiples of 8
        return widths.clamp(max=self.max_width)

    def __getitems__(self, ids):
        """A whole batch: what the model reads, [batch, width] each; what belongs to its answers."""
        input_ids = pad_sequence([self.input_ids[i] for i in ids], batch_first=True)
        ids = torch.tensor(ids)
        input_ids = F.pad(input_ids, (0, self.width(self.lengths[ids]) - input_ids.shape[1]))
        positions = torch.arange(input_ids.shape[1])
        mask = positions < self.lengths[ids, None]
        in_context = positions >= self.first[ids, None]
        inputs = {"input_ids": input_ids, "attention_mask": mask,
                  "token_type_ids": (mask & in_context).int()}
        return inputs, {"ids": ids, "start": self.start[ids], "end": self.end[ids],
                        "first": self.first[ids], "last": self.lengths[ids] - 2}


def load_features(questions, tokenizer, args):
    """The `Features` of questions; `datasets` caches them, under a key. Raises Fault."""
    rows = []
    for question in questions:
        text, start = [*question["answers"], ("", -1)][0]
        asked = question["question"].strip()  # some have hundreds of leading spaces
        rows.append({
            "id": question["id"],
            "question": asked,
            "context": question["context"],
            "text": text,
            "start": start,
        })
    table = datasets.Dataset.from_list(rows)
    tokenizer.backend_tokenizer.no_truncation()  # left by the call before, it would be in the key
    code = inspect.getsource(tokenize) + inspect.getsource(find_span)  # features of older code
    sizes = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    key = Hasher.hash([questions, code, tokenizer.backend_tokenizer.to_str(), sizes])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "squad_features"
    for again in (False, True):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            features = table.map(
                tokenize, batched=True, with_indices=True, remove_columns=table.column_names,
                fn_kwargs={"tokenizer": tokenizer} | sizes, new_fingerprint=key, desc="tokenising",
                load_from_cache_file=not again, cache_file_name=f"{folder}/{key}.arrow")
            if features[-1]["owner"] == len(questions) - 1:
                return Features(questions, features, key, args.max_seq_length)
        except (OSError, ValueError) as problem:  # a damaged file is made anew
            if again:
                raise Fault(f"cannot write to {folder}: {one_line(problem)}; set HF_HOME to a "
                            "folder with space") from None


def load_inputs(args):
    """Tokenizer, the model's config, and the `Features` of both splits. Raises Fault."""
    name = args.model_name_or_path
    folder = Path(name).is_dir()
    if not folder and (name.startswith((".", "/")) or name.count("/") > 1):  # the Hub: OWNER/NAME
        raise Fault(f"there is no model folder {name}")
    files = ("tokenizer.json", "vocab.txt")
    if folder and not any((Path(name) / file).exists() for file in files):
        raise Fault(f"the model folder {name} has no tokenizer: neither {' nor '.join(files)}")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as problem:  # of the network, the Hub, or a file in the folder
        raise Fault(f"cannot load {name}: {one_line(problem)}; {OFFLINE}") from None
    override(config, args.config_overrides)
    positions = getattr(config, "position_embedding_type", "absolute")
    if config.model_type != "bert":
        raise Fault(f"{name} is a {config.model_type} model; this script trains BERT")
    if positions != "absolute":
        raise Fault(f"{name} has {positions} positions; this script needs absolute ones")
    if not tokenizer.is_fast:
        raise Fault(f"{name} has a {type(tokenizer).__name__}, which is not fast: it cannot tell "
                    "the characters of a token; BertTokenizer with vocab.txt can")
    if len(tokenizer) > config.vocab_size:
        raise Fault(f"{name} has a tokenizer of {len(tokenizer)} tokens, but a model of "
                    f"{config.vocab_size}")
    if args.max_seq_length > config.max_position_embeddings:
        raise Fault(f"--max_seq_length {args.max_seq_length} is more than the "
                    f"{config.max_position_embeddings} positions of {name}")
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    splits = [read_questions(args, split) for split in ("train", "validation")]
    return tokenizer, config, *(load_features(questions, tokenizer, args) for questions in splits)


def override(config, changes):
    """Change a model's config by "key=value,key=value", or None. Raises Fault."""
    if not changes:
        return
    try:
        config.update_from_string(changes)
    except (ValueError, TypeError, AttributeError) as problem:  # the last: of a read-only property
        raise Fault(f"--config_overrides {changes}: {one_line(problem)}; give keys of the config, "
                    "as KEY=VALUE,KEY=VALUE") from None


class EpochSampler(Sampler):
    """Training features, each global batch of similar lengths, as padding is wasted work.

    The features are shuffled; pools of 50 global batches (fewer if there would not be 4 pools) are
    sorted by length and cut into batches; the batches are shuffled. transformers'
    LengthGroupedSampler has these numbers too. The longest feature comes first: if memory is short,
    that shows at once. The order depends on seed and epoch alone: any number of processes walks
    through the same global batches. What does not fill one is dropped.
    """

    def __init__(self, lengths, global_batch_size, seed):
        self.lengths, self.size, self.seed = lengths, global_batch_size, seed
        self.steps = len(lengths) // global_batch_size
        self.set_epoch(0)

    def set_epoch(self, epoch):
        """Order the epoch: int64 [steps, global batch]. The DataLoader's set_epoch calls this."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.steps * self.size]
        pools = order.split(self.size * max(1, min(50, self.steps // 4)))
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(pools).view(self.steps, self.size)
        batches = batches[torch.randperm(self.steps, generator=generator)]
        longest = self.lengths[batches].amax(1).argmax().item()
        self.order = torch.cat([batches[longest:], batches[:longest]])

    def __len__(self):
        return self.order.numel()

    def __iter__(self):
        return iter(self.order.flatten().tolist())


# -------- model


class SpanBert(transformers.BertForQuestionAnswering):
    """transformers' BERT with its two heads over the tokens, but a forward pass that never waits
    for the device: the original asks the GPU at every step whether the mask hides anything.
    """

    def forward(self, input_ids, attention_mask, token_type_ids):
        """In: [batch, width] each, the mask as bool. Out: the logits of an answer's start and end
        at each token, [batch, width, 2]; lowest on padding, so that its width changes nothing.
        """
        hidden = self.bert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        mask = attention_mask[:, None, None, :]  # the same for all heads, and all tokens that look
        logits = self.qa_outputs(self.bert.encoder(hidden, attention_mask=mask)[0])
        return logits.masked_fill(~attention_mask[:, :, None], torch.finfo(logits.dtype).min)


def span_losses(logits, starts, ends):
    """The mean of the start's and the end's cross-entropy: [batch], of logits [batch, width, 2]."""
    start_logits, end_logits = logits.unbind(-1)
    return (F.cross_entropy(start_logits, starts, reduction="none")
            + F.cross_entropy(end_logits, ends, reduction="none")) / 2


def load_model(args, config):
    """BERT with a new head, or the head it has, the same on all ranks; in float32, as precision is
    the launcher's. Raises Fault.
    """
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    config.num_labels, config._attn_implementation = 2, "sdpa"  # start and end; knows bool masks
    set_seed(args.seed)
    name, missing = args.model_name_or_path, []
    try:
        if args.from_scratch:
            model = SpanBert(config)
        else:
            model, loading = SpanBert.from_pretrained(
                name, config=config, attn_implementation="sdpa", output_loading_info=True)
            missing = [key for key in loading["missing_keys"] if not key.startswith("qa_outputs.")]
    except Exception as problem:  # of the network, the Hub, or a file in the folder
        advice = "" if args.from_scratch else "; to train without its weights: --from_scratch"
        raise Fault(f"cannot load the model {name}: {one_line(problem)}{advice}") from None
    if missing:
        raise Fault(f"the weights of {name} lack {len(missing)} parameters of BERT, such as "
                    f"{missing[0]}")
    model._no_split_modules = ["BertLayer"]  # FSDP's units; transformers' own list makes it fail
    if args.activation_checkpointing:  # with the same dropout masks: it restores the RNG's state
        old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.23
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    return model.float()


def count_parameters(model):
    """Of the whole model: under ZeRO-3 transformers may have sharded it while it loaded it."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())


# -------- training


def train(accelerator, model, optimizer, schedule, train_loader, eval_loader, run):
    """Train and evaluate, epoch by epoch. Returns whether all ranks agreed to stop early."""
    for epoch in range(run.epoch, run.epochs):
        train_loader.set_epoch(epoch)  # before skipping: what skip_first_batches returns ignores it
        loader = train_loader
        if run.batches_done:  # a resumed run goes on here
            loader = accelerator.skip_first_batches(train_loader, run.batches_done)
        model.train()
        run.start_clock()
        for inputs, spans in run.timed(loader):
            if run.step == run.total_steps:
                break
            with accelerator.accumulate(model):
                logits = model(**inputs).float()
                loss = span_losses(logits, spans["start"], spans["end"]).mean()
                accelerator.backward(loss)  # gradients are means over micro-batches and ranks
                if run.args.max_grad_norm and accelerator.sync_gradients:
                    run.grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), run.args.max_grad_norm)  # DeepSpeed has clipped already
                optimizer.step()
                [learning_rate] = schedule.get_last_lr()
                schedule.step()
                optimizer.zero_grad()
            run.new_losses.append(loss.detach())  # it stays on the device
            if not accelerator.sync_gradients:
                continue  # the step has more micro-batches
            if run.end_step():  # now and then the ranks meet
                stop = run.meet(accelerator, learning_rate)  # logs the losses since the last time
                if stop or run.is_saving():
                    save_checkpoint(accelerator, optimizer, run)
                if stop:
                    return True
        metrics = evaluate_epoch(accelerator, model, eval_loader, run)
        if metrics is None:
            return True
        text = "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}"
        run.add_evaluation(accelerator, metrics, -metrics["eval_loss"], text.format(**metrics))
    return False


# -------- evaluation


def best_spans(logits, first, last, max_answer_length):
    """The best-scoring span of each feature that is an answer: it starts at or before its end, has
    at most `max_answer_length` tokens, and lies between the tokens `first` and `last` [batch].
    Exact, without n-best lists.

    Returns its score (start logit + end logit), first token and last token, each [batch], of logits
    [batch, width, 2].
    """
    positions = torch.arange(logits.shape[1], device=logits.device)
    inside = (positions >= first[:, None]) & (positions <= last[:, None])
    starts, ends = logits.masked_fill(~inside[:, :, None], -torch.inf).unbind(-1)
    # Each start with the ends from there on: [batch, width, max_answer_length], a view of memory.
    ends_ahead = F.pad(ends, (0, max_answer_length - 1), value=-torch.inf)
    scores = starts[:, :, None] + ends_ahead.unfold(1, max_answer_length, 1)
    best, pair = scores.flatten(1).max(1)
    start = pair // max_answer_length
    return best, start, start + pair % max_answer_length


@torch.no_grad()
def find_answers(accelerator, model, loader, run):
    """For each feature its loss, the score of "no answer", and its best span's score, start and
    end: [features, 5] on the CPU of all ranks. Six numbers per feature travel, never the logits.
    None if all ranks agreed to stop.
    """
    model.eval()
    found = []
    for inputs, spans in loader:
        if run.told_to_stop(accelerator):
            return None
        logits = model(**inputs).float()
        losses = span_losses(logits, spans["start"], spans["end"])
        best = best_spans(logits, spans["first"], spans["last"], run.args.max_answer_length)
        rows = torch.stack([spans["ids"], losses, logits[:, 0].sum(1), *best], 1)
        found.append(accelerator.gather_for_metrics(rows))  # without those that fill the last batch
    found = torch.cat(found).cpu()
    return found[found[:, 0].argsort(), 1:]


def choose_answers(rows, features, version_2):
    """{question id: text} of the rows that `find_answers` returns: of all windows of a question,
    the best span.

    With `version_2` the answer is "" where "no answer", at [CLS], scores higher than the best span;
    as the official recipe has it, the window counts in which "no answer" scores lowest.
    """
    best, nothing, owners = {}, {}, features.owner.tolist()
    for window, (owner, row) in enumerate(zip(owners, rows.tolist(), strict=True)):
        _, null_score, score, start, end = row
        nothing[owner] = min(nothing.get(owner, null_score), null_score)
        if owner not in best or score > best[owner][0]:
            best[owner] = score, window, int(start), int(end)
    answers, begins, stops = {}, features.table.data["begins"], features.table.data["stops"]
    for owner, (score, window, start, end) in sorted(best.items()):
        question = features.questions[owner]
        text = question["context"][begins[window][start].as_py() : stops[window][end].as_py()]
        answers[question["id"]] = "" if version_2 and nothing[owner] > score else text
    return answers


def score_answers(answers, references, version_2):
    """Exact match and F1 in percent of answers [text] against the right ones [[text, ...]], by the
    rules of SQuAD's official scripts (Rajpurkar et al., 2016 and 2018). In v2.0 [] is no answer.
    """
    exact, f1 = [], []
    for answer, texts in zip(answers, references, strict=True):
        right = [answer_words(text) for text in texts]
        if version_2:  # texts of nothing but articles and punctuation are no answers
            right = [words for words in right if words] or [[]]
        words = answer_words(answer)
        exact.append(words in right)
        f1.append(max(word_f1(words, others, version_2) for others in right))
    return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}


def answer_words(text):
    """The words of an answer, in lower case, without punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def word_f1(words, others, version_2):
    """The harmonic mean of precision and recall. Without words v1.1 gives 0, and v2.0 compares."""
    if version_2 and not (words and others):
        return float(words == others)
    same = sum((collections.Counter(words) & collections.Counter(others)).values())
    return 2 * same / (len(words) + len(others)) if same else 0.0


def evaluate_epoch(accelerator, model, loader, run):
    """Exact match, F1 and loss on the validation questions; None if the ranks agreed to stop. Rank
    0 writes predictions.json.
    """
    features, version_2, metrics = loader.dataset, run.args.version_2_with_negative, None
    rows = find_answers(accelerator, model, loader, run)
    if rows is not None and accelerator.is_main_process:
        answers = choose_answers(rows, features, version_2)
        right = [[text for text, _ in question["answers"]] for question in features.questions]
        metrics = score_answers(answers.values(), right, version_2)
        metrics["eval_loss"] = rows[:, 0].double().mean().item()
        text = json.dumps(answers, indent=1, ensure_ascii=False) + "\n"
        write_atomically(run.folder / "predictions.json", text)
    return broadcast_object_list([metrics])[0]


def save_model(accelerator, model, tokenizer, folder):
    """Save the weights, gathered from all ranks if they are sharded, for `from_pretrained`. A
    collective.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:  # torch.compile puts a prefix before the names
        weights = {k.replace("_orig_mod.", ""): w.float().cpu().contiguous()
                   for k, w in weights.items()}
        whole = accelerator.unwrap_model(model, keep_torch_compile=False)
        whole.save_pretrained(folder, state_dict=weights)  # after a kill, --resume does it again
        whole.config.architectures = ["BertForQuestionAnswering"]  # not this script's or FSDP's
        whole.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def make_loaders(train_features, eval_features, run):
    """The DataLoaders of both splits, with the batches of all ranks.

    Without a generator of its own, a DataLoader draws from the one that dropout uses, and a resumed
    run would see other masks. The Dataset makes whole batches: there is nothing to collate.
    """
    options = {"collate_fn": tuple, "generator": torch.Generator(),
               "pin_memory": torch.cuda.is_available()}
    sampler = EpochSampler(train_features.lengths, run.global_batch_size, run.args.seed)
    by_length = eval_features.lengths.argsort(descending=True, stable=True).tolist()
    eval_batch_size = run.args.per_device_eval_batch_size * run.devices
    return (DataLoader(train_features, run.batch_size, sampler=sampler, **options),
            DataLoader(eval_features, eval_batch_size, sampler=by_length, **options))


def describe_tokens(features, run, ranks):
    """What the record says of the tokens that the run trained on. Padding is no token."""
    sampler, lengths = EpochSampler(features.lengths, run.global_batch_size, run.args.seed), []
    for epoch in range(run.epochs):
        sampler.set_epoch(epoch)
        lengths.append(features.lengths[sampler.order])
    done = torch.cat(lengths)[: run.step]  # [steps, global batch]
    padded = done.view(-1, run.batch_size // ranks)  # each rank pads its part of a micro-batch
    share = done.sum() / (features.width(padded).sum() * padded.shape[1])
    new, seconds = done[run.first_step :].sum().item(), run.seconds["train"]
    return {"tokens": done.sum().item(), "padding_share": round(1 - share.item(), 4),
            "tokens_per_second": round(new / seconds, 1) if new else None}


def describe_workload(args, config, train_features, eval_features):
    """What the record says of model and data; a resumed run must have the same again."""
    changes = f" ({args.config_overrides})" if args.config_overrides else ""
    return {
        "model": (Path(args.model_name_or_path).name + changes
                  + ", from scratch" * args.from_scratch),
        "dataset": Path(args.train_file).name if args.train_file else hub_name(args),
        "questions": len(train_features.questions),
        "samples": len(train_features),
        "eval_questions": len(eval_features.questions),
        "eval_samples": len(eval_features),
        "features": f"{train_features.key[:8]}, {eval_features.key[:8]}",
        "version_2": args.version_2_with_negative,
        "sequence_length": args.max_seq_length,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_answer_length": args.max_answer_length,
    }


@errors.record  # the launcher's summary then names the first error
def main():
    args = parse_args()
    explain_hangs()
    for library in (transformers, huggingface_hub):  # that the head is new, from each rank;
        library.logging.set_verbosity_error()  # that the network is tried again
    if not sys.stdout.isatty():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    accelerator, strategy = make_accelerator(args)
    tokenizer, config, train_features, eval_features = in_turn(accelerator, load_inputs, args)
    memory_before = memory_in_use()
    model = load_or_fail(True, load_model, args, config)
    if args.prepare_data_only:
        say(f"the model, {len(train_features.questions)} training questions "
            f"({len(train_features)} features) and {len(eval_features.questions)} validation "
            f"questions ({len(eval_features)} features) are ready")
        return accelerator.end_training()
    workload = describe_workload(args, config, train_features, eval_features)
    metrics = ["exact_match", "f1", "eval_loss"]
    run = Run(accelerator, strategy, args, metrics, workload)
    run.memory_before = memory_before
    train_loader, eval_loader = make_loaders(train_features, eval_features, run)

    run.record |= {"parameters": count_parameters(model),
                   "activation_checkpointing": args.activation_checkpointing}
    with explain_out_of_memory(run, model):
        model = wrap_for_dp(model, strategy, accelerator.device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, run.total_steps)
        model, optimizer, train_loader, schedule = accelerator.prepare(
            model, optimizer, train_loader, schedule)
        eval_loader = accelerator.prepare(eval_loader)  # alone: DeepSpeed reads all batch sizes
        mend_prepared(accelerator, strategy, model)
        set_seed(args.seed, device_specific=True)  # other dropout masks on each rank

        if run.start(accelerator) == "completed":
            return accelerator.end_training()
        run.catch_stop_signals()
        stopped = train(accelerator, model, optimizer, schedule, train_loader, eval_loader, run)
        if not stopped:
            save_model(accelerator, model, tokenizer, run.folder)
    run.record |= describe_tokens(train_features, run, accelerator.num_processes)
    run.finish("preempted" if stopped else "completed")
    accelerator.end_training()


# -------- launching: the same in both scripts


class Fault(Exception):
    """What is wrong with the input, in one line for the user."""


def one_line(problem):
    """A library's error in one line, without the dot at its end."""
    return (" ".join(str(problem).split()) or type(problem).__name__)[:300].rstrip(".")


def fail(message):
    """End this process with exit code 1. Rank 0 says why in one line; before the ranks can talk to
    each other, the first rank of each node does.
    """
    if os.environ.get("RANK" if torch.distributed.is_initialized() else "LOCAL_RANK", "0") == "0":
        sys.exit(f"error: {message}")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the launcher ends the others
    time.sleep(10)  # if this rank went first, the launcher would end rank 0 before it has spoken
    sys.exit(1)


def fail_if_any(problem):
    """`fail` on all ranks if any rank passes a message instead of None. A collective."""
    problems = [problem for problem in gather_object([problem]) if problem]
    if problems:
        fail(problems[0])


def load_or_fail(turn, load, *args):
    """`load(*args)` on the ranks whose `turn` it is. A Fault ends the run. A collective."""
    result = problem = None
    try:
        result = load(*args) if turn else None
    except Fault as fault:
        problem = str(fault)
    fail_if_any(problem)
    return result


def in_turn(accelerator, load, *args):
    """`load(*args)` on all ranks; a Fault ends the run. Rank 0 goes first: it downloads, and fills
    caches. Then the first rank of each node, in case its disk is another; then the others.
    """
    result = None
    for turn in (accelerator.is_main_process, accelerator.is_local_main_process, True):
        result = load_or_fail(turn and not result, load, *args) or result
    return result


def say(line):
    """Print a line once in the whole run, above the progress bar."""
    if PartialState().is_main_process:
        tqdm.write(line)
        sys.stdout.flush()


def make_parser(description, example, epochs, batch, eval_batch, learning_rate):
    """A parser with the flags that both scripts have, and their defaults."""
    parser = argparse.ArgumentParser(
        description=f"{description} Strategy, precision and number of processes are not flags of "
        "this script: they belong to `accelerate launch` and its YAML.",
        epilog=f"example: accelerate launch --config_file accelerate_configs/{example}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    # One line, and not a usage text from every process.
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    add = parser.add_argument
    add("--prepare_data_only", action="store_true", help="fetch and check all inputs, then stop: "
        "for login nodes")
    add("--output_dir", help="where results go; all nodes must see it (without: a fresh folder "
        "under runs/)")
    add("--num_epochs", type=int, default=epochs, help="passes over the training data")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=batch, help="samples per device and "
        "micro-batch")
    add("--per_device_eval_batch_size", type=int, default=eval_batch, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step; global "
        "batch = per-device batch x devices x micro-batches")
    add("--learning_rate", type=float, default=learning_rate, help="the highest of the schedule, "
        "whatever the number of devices")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm; without, "
        "they stay as they are")
    add("--dropout", type=float, default=0.1, help="share of activations that training sets to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add("--checkpointing_steps", type=int, help="save every so many steps; without, each epoch")
    add("--resume", action="store_true", help="continue from OUTPUT_DIR's newest complete "
        "checkpoint, if there is one")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace a few steps into OUTPUT_DIR/traces, for "
        "Perfetto and report.py; the run is no timing then")
    add("--collective_timeout", type=int, default=300, help="seconds after which a rank that waits "
        "for another gives up")
    return parser


def parse_checked(parser, *may_be_zero):
    """The flags. Refuses numbers that no run can have, and --resume without a folder."""
    args = parser.parse_args()
    for name, value in vars(args).items():
        may = name in ("seed", "dropout", *may_be_zero)
        if type(value) in (int, float) and not (value > 0 or value == 0 and may):
            wanted = "not be negative" if may else "be greater than 0"
            parser.error(f"--{name} must {wanted}, got {value}")
    if args.dropout >= 1:
        parser.error(f"--dropout must be less than 1, got {args.dropout}")
    if args.resume and not args.output_dir:
        parser.error("--resume needs --output_dir, the folder of the run to continue")
    return args


def explain_hangs():
    """Let each rank print where its threads stand: when it gets SIGUSR2, and when C++ ends it, as
    NCCL does after a timeout; its last collectives are in ~/.cache/torch/comm_lib_trace_rank_*.
    """
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGUSR2, sys.__stderr__)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # of collectives, for each rank
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def launched_with(name):
    """Whether the YAML switched this on: the launcher tells by the environment."""
    return os.environ.get(f"ACCELERATE_{name}") == "true"


def check_launch():
    """Stop where the processes would silently do something else than what was asked for."""
    alone, node_size = "LOCAL_RANK" not in os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus, host = torch.cuda.device_count(), socket.gethostname()
    if alone and (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        fail(f"WORLD_SIZE is {size}, but one process was started: unset it, or use a YAML that "
             "starts several")
    if alone and os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
        fail("baseline and dp are one process on one node, but this was started for several "
             "nodes: use ddp.yaml there")
    launcher = psutil.Process().parent() if launched_with("USE_DEEPSPEED") else None
    if launcher and "--dynamo_backend" in " ".join(launcher.cmdline()):
        fail("accelerate launch (up to 1.15) does not hand on --dynamo_backend to a process of "
             "DeepSpeed, so nothing would be compiled: leave it out, or use fsdp.yaml")
    if launched_with("DEBUG_MODE") and os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16":
        fail("dp does not know bf16: DataParallel's threads would compute in fp16 (torch 2.15); "
             "use ddp.yaml")
    if gpus and not torch.cuda.is_available():
        fail(f"{host} has {gpus} GPU(s) that torch {torch.__version__} cannot use; if its driver "
             "is too old: README, 'On a Slurm cluster', says what to install")
    if 0 < gpus < node_size:
        fail(f"{node_size} processes on {host}, which has {gpus} GPU(s): add --num_processes "
             f"{gpus} to accelerate launch (times the number of nodes)")
    name = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # relative to where the launcher was started
    if name in os.environ and not Path(os.environ[name]).exists():
        os.environ[name] = str(Path(__file__).resolve().parent / os.environ[name])
        if not Path(os.environ[name]).exists():
            fail(f"the YAML names {os.environ[name]}, which is not there: copy it with the YAML")


def make_accelerator(args):
    """The accelerator for the launcher's YAML, and the name of its strategy. Without a GPU, the
    same strategies run on CPU processes that talk over gloo.
    """
    check_launch()
    calm_accelerate()
    gpus, world_size = torch.cuda.device_count(), int(os.environ.get("WORLD_SIZE", 1))
    sharded = launched_with("USE_FSDP") or launched_with("USE_DEEPSPEED")
    # Gradients lie in the buckets that are all-reduced, not beside them; constants stay at home.
    handlers = [DistributedDataParallelKwargs(
        gradient_as_bucket_view=True, broadcast_buffers=False)]
    if sharded or world_size > 1:
        timeout = datetime.timedelta(seconds=args.collective_timeout)
        handlers += [InitProcessGroupKwargs(backend="nccl" if gpus else "gloo", timeout=timeout)]
    if gpus:
        torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    else:
        set_up_cpu()
    accelerator = Accelerator(
        cpu=not gpus and not sharded,
        kwargs_handlers=handlers,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # The DataLoader makes the batches of all ranks; rank r takes the r-th part of each.
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        log_with="tensorboard" if args.with_tracking else None,
        project_dir="runs",  # replaced in Run.start, when the output directory is known
    )
    if not accelerator.state.dynamo_plugin.dynamic:  # or each new width is compiled anew, and
        accelerator.state.dynamo_plugin.dynamic = None  # torch gives up after 8
    if launched_with("USE_FSDP") and not gpus:
        allow_fsdp_on_cpu(accelerator)
    if launched_with("USE_DEEPSPEED") and args.max_grad_norm:  # it clips by a setting of its own
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = args.max_grad_norm
        config["zero_optimization"].pop("compute_grad_norm", None)
    if accelerator.num_processes != world_size:
        fail(f"{world_size} processes were started, but accelerate knows of "
             f"{accelerator.num_processes}, so each would train alone: use accelerate launch with "
             "one of the YAMLs")
    return accelerator, name_strategy(accelerator.state)


def name_strategy(state):
    """baseline, dp, ddp, fsdp, zero1, zero2 or zero3: read off accelerate's state, not off a file's
    name. What else a YAML sets is in `strategy_options`.
    """
    if state.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{state.deepspeed_plugin.zero_stage}"
    if state.distributed_type == DistributedType.NO:  # the mark that dp.yaml explains
        return "dp" if launched_with("DEBUG_MODE") else "baseline"
    return "fsdp" if state.distributed_type == DistributedType.FSDP else "ddp"


def strategy_options(strategy, state):
    """What the YAML, or DeepSpeed's JSON, sets for the strategy: {option: value}."""
    if strategy.startswith("zero"):
        return dict(state.deepspeed_plugin.deepspeed_config["zero_optimization"])
    if strategy == "fsdp":  # the launcher tells by the environment
        given = [name for name in sorted(os.environ) if name.startswith("FSDP_")]
        return {name.removeprefix("FSDP_").lower(): os.environ[name] for name in given}
    return {}


# -------- workarounds: the same in both scripts
# Each says what it waits for; tests/test_workarounds.py fails when one has become needless.


def calm_accelerate():
    """accelerate, up to 1.15, does not know the new name of DDP's broadcast_buffers, and searches
    the disk for a package twice a step (0.03 ms).
    """
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    sys.modules.setdefault("lomo_optim", None)


def set_up_cpu():
    """What only a machine without a GPU needs, before there is an accelerator."""
    rank, node_size = (int(os.environ.get(f"LOCAL_{name}", 0)) for name in ("RANK", "WORLD_SIZE"))
    cores = sorted(os.sched_getaffinity(0))
    if 1 < node_size <= len(cores):  # each rank and its gloo threads on cores of its own: 10 %
        os.sched_setaffinity(0, cores[rank::node_size])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it looked for a GPU
    if launched_with("USE_DEEPSPEED"):
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from deepspeed.ops import __compatible_ops__ as deepspeed_ops

        deepspeed_ops["deepspeed_shm_comm"] = False  # or 0.19.8 compiles an all-reduce of its own


def allow_fsdp_on_cpu(accelerator):
    """accelerate, up to 1.15, takes FSDP for a matter of GPUs; torch's fully_shard does not."""
    state = accelerator.state
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)
    state.fsdp_plugin.cpu_offload.pin_memory = False  # of fsdp_offload.yaml: it needs a GPU


def wrap_for_dp(model, strategy, device):
    """accelerate has no DataParallel: one process that drives all GPUs, with a thread for each."""
    return nn.DataParallel(model.to(device)) if strategy == "dp" else model


def mend_prepared(accelerator, strategy, model):
    """What `accelerator.prepare` leaves undone."""
    if strategy.startswith("zero"):  # DeepSpeed 0.19.8 gives its groups of ranks torch's timeout
        old = getattr(distributed_c10d, "_set_pg_timeout", None)  # its name before torch 2.15
        set_timeout = getattr(distributed_c10d, "set_timeout", old)
        for group in distributed_c10d._world.pg_map:
            set_timeout(accelerator.init_handler.timeout, group)
    if strategy == "fsdp" and accelerator.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):  # torch 2.8's gloo sums for a mean: pytorch#162338
                module.set_force_sum_reduction_for_comms(True)


def leave():
    """End the process at once. On Python's own way out, gloo's threads outlive DDP, and abort one
    in a hundred processes that are done (pytorch#190489, open with torch 2.15).
    """
    sys.stdout.flush()
    os._exit(0)


# -------- a run and its record: the same in both scripts


class Run:
    """A run as it was asked for, how far it is, its stopwatch and its record."""

    STATE = ("step", "loss_history", "evaluations", "best")  # what checkpoints keep of it

    def __init__(self, accelerator, strategy, args, metrics, workload):
        self.args, self.strategy, self.metrics = args, strategy, metrics  # the metrics' names
        self.stop_signals = []  # names of those that this rank received
        gpus = max(1, torch.cuda.device_count()) if strategy == "dp" else 1  # of this process
        self.devices = accelerator.num_processes * gpus
        self.batch_size = args.per_device_train_batch_size * self.devices  # of the DataLoader
        self.global_batch_size = self.batch_size * args.gradient_accumulation_steps
        self.steps_per_epoch = workload["samples"] // self.global_batch_size
        if self.steps_per_epoch == 0:
            fail(f"the global batch of {self.global_batch_size} = "
                 f"{args.per_device_train_batch_size} a device x {self.devices} devices x "
                 f"{args.gradient_accumulation_steps} micro-batches is more than the "
                 f"{workload['samples']} samples: lower --per_device_train_batch_size")
        self.total_steps = args.max_train_steps or args.num_epochs * self.steps_per_epoch
        self.epochs = -(-self.total_steps // self.steps_per_epoch)
        if args.profile and self.total_steps < (least := WARMUP_STEPS + 2 + PROFILE_STEPS):
            fail(f"--profile needs {least} steps, and this run has {self.total_steps}")
        self.folder = make_output_dir(args, strategy)
        self.describe(accelerator, workload)
        self.step, self.loss_history = 0, []  # optimizer steps done; [step, mean of global batch]
        self.evaluations, self.best = [], []  # metrics of each epoch; [score, name] of the best
        self.new_losses, self.pace = [], 0.0  # of micro-batches since the last meeting; steps/s
        self.grad_norm = None  # of the last step, before clipping; None without --max_grad_norm
        self.seconds = dict.fromkeys(
            ("startup", "train", "loading", "eval", "total"), 0.0)
        self.train_cpu = 0.0  # seconds that this rank's threads computed in training
        self.peak_memory = {"train": None, "eval": None}  # of this rank, in MB
        self.memory_before = 0  # bytes that libraries and data held before there was a model
        self.profiling, self.profiler = contextlib.ExitStack(), None

    def describe(self, accelerator, workload):
        """Begin the record, and note the settings that a resumed run must have again."""
        args, libraries = self.args, ("torch", "accelerate", "deepspeed", "transformers")
        where = {"strategy": self.strategy,
                 "strategy_options": strategy_options(self.strategy, accelerator.state),
                 "processes": accelerator.num_processes, "devices": self.devices,
                 "global_batch_size": self.global_batch_size, "seed": args.seed}
        how = {"per_device_batch_size": args.per_device_train_batch_size,
               "gradient_accumulation_steps": args.gradient_accumulation_steps,
               "precision": accelerator.mixed_precision,
               "dynamo": accelerator.state.dynamo_plugin.backend.value.lower()}
        epochs = None if args.max_train_steps else args.num_epochs
        workload = workload | how | {"epochs": epochs, "steps": args.max_train_steps,
                                     "max_grad_norm": args.max_grad_norm}
        rates = {"dropout": args.dropout, "learning_rate": args.learning_rate}
        self.settings = where | workload | rates
        self.record = where | how | {
            "script": Path(__file__).name,
            "device_name": device_name(),
            "workload": workload,
            "versions": {"python": platform.python_version(), "cuda": torch.version.cuda} | {
                name: getattr(sys.modules.get(name), "__version__", None) for name in libraries},
            **dict.fromkeys(("tokens", "padding_share", "tokens_per_second")),  # BERT's
            "git_commit": find_git_commit(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            "argv": sys.argv,
        }

    def start(self, accelerator):
        """Resume if asked to, say what is about to run, and start to measure. Returns "completed"
        if nothing is left to do.
        """
        found = find_checkpoint(self) if self.args.resume else None
        if found == "completed":
            say(f"{self.folder} holds a completed run already: see its run.json")
            return found
        if found:
            accelerator.load_state(found[0])
            accelerator.step = 0  # micro-batches: accumulation may have changed
            vars(self).update(found[1])
            say(f"resuming from {found[0]}")
        self.record["resumed_from"] = str(found[0]) if found else None
        self.first_step = self.step
        if self.args.with_tracking:
            accelerator.project_configuration.logging_dir = str(self.folder)
            options = {"strategy_options": json.dumps(self.settings["strategy_options"])}
            accelerator.init_trackers("tensorboard", vars(self.args) | self.settings | options, {
                "tensorboard": {"purge_step": self.step + 1}})  # drop what the resumed run redoes
        where = " in one process" if self.strategy == "dp" else ""
        say(f"{self.strategy} on {self.devices} x {self.record['device_name']}{where}: "
            f"{self.record['parameters']:,} parameters, {self.total_steps:,} steps of "
            f"{self.global_batch_size} samples; results go to {self.folder}")
        self.warm_step = self.step + min(WARMUP_STEPS, (self.total_steps - self.step) // 2)
        self.warm_seconds = 0.0  # of training, up to that step
        self.next_meeting = self.step + 1
        if self.args.profile:
            steps = {"wait": WARMUP_STEPS, "warmup": 2, "active": PROFILE_STEPS, "repeat": 1}
            self.profiler = self.profiling.enter_context(accelerator.profile(ProfileKwargs(
                activities=sorted({"cpu", accelerator.device.type}), schedule_option=steps,
                output_trace_dir=str(self.folder / "traces"))))
        self.seconds["startup"], self.line_at = seconds_alive(), time.perf_counter()
        # None: a bar only in a terminal
        self.bar = tqdm(total=self.total_steps, initial=self.step, unit="step", leave=False,
                        file=sys.stdout, disable=not accelerator.is_main_process or None)

    def catch_stop_signals(self):
        """From now on SIGTERM and SIGUSR1, Slurm's warnings, and SIGINT, Ctrl-C, are only noted.
        Before, they end the process at once, as there is nothing to save.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda number, _: self.stop_signals.append(
                signal.Signals(number).name))

    @property
    def epoch(self):
        """The epoch that is under way, counted from 0. It lasts until it has been evaluated."""
        return len(self.evaluations)

    @property
    def checkpoint(self):
        """Where the checkpoint of this step is, or will be."""
        return self.folder / "checkpoints" / f"step_{self.step:08d}"

    @property
    def batches_done(self):
        """The DataLoader's batches that this epoch has trained on."""
        steps = self.step - self.epoch * self.steps_per_epoch
        return steps * self.args.gradient_accumulation_steps

    def timed(self, loader):
        """The loader's batches. How long it takes to make them is part of the training time."""
        batches = iter(loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.seconds["loading"] += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def start_clock(self):
        """Measure time and memory from here to the next meeting, or to an evaluation's end."""
        take_peak_memory()
        self.clock, self.cpu_clock = time.perf_counter(), time.process_time()

    def stop_clock(self, part):
        """Add what was measured to that of "train" or "eval". Returns the seconds."""
        seconds = time.perf_counter() - self.clock
        self.seconds[part] += seconds
        if part == "train":
            self.train_cpu += time.process_time() - self.cpu_clock
        peaks = filter(None, [self.peak_memory[part], take_peak_memory()])
        self.peak_memory[part] = max(peaks, default=None)
        return seconds

    def end_step(self):
        """Count an optimizer step. Returns whether the ranks meet now: rarely, as it takes time."""
        self.step += 1
        if self.profiler:
            self.profiler.step()
        due = self.step % SYNC_STEPS == 0 or self.step in (self.warm_step, self.next_meeting)
        return due or self.is_saving()

    def is_saving(self):
        """Whether a checkpoint is due: by --checkpointing_steps, or as an epoch ends."""
        epoch_ends = min((self.epoch + 1) * self.steps_per_epoch, self.total_steps)
        every = self.args.checkpointing_steps
        return self.step == epoch_ends or bool(every and self.step % every == 0)

    def meet(self, accelerator, learning_rate):
        """Bring home the losses since the last meeting, and show them. Returns whether any rank was
        told to stop, the same on all ranks. A collective: one small all-reduce.
        """
        means = torch.stack(self.new_losses).view(-1, self.args.gradient_accumulation_steps).mean(1)
        own = torch.cat([means, means.new_tensor([len(self.stop_signals), self.pace])])
        *losses, stop, pace = accelerator.reduce(own, "mean").tolist()
        seconds, self.new_losses = self.stop_clock("train"), []
        if self.step == self.warm_step:
            self.warm_seconds = self.seconds["train"]
        self.pace = len(losses) / seconds  # for the next mean, which is the same on all ranks
        self.next_meeting = self.step + max(1, int(pace * SYNC_SECONDS))
        for step, loss in enumerate(losses, len(self.loss_history) + 1):
            if not math.isfinite(loss):
                self.fail(f"the training loss of step {step} is {loss}")
            self.loss_history.append([step, loss])
        self.show_progress(accelerator, learning_rate)
        self.start_clock()
        return stop > 0

    def told_to_stop(self, accelerator):
        """Whether any rank was told to stop, the same on all ranks. A collective."""
        signals = torch.tensor(len(self.stop_signals), device=accelerator.device)
        return accelerator.reduce(signals, "sum").item() > 0

    def show_progress(self, accelerator, learning_rate):
        """As a bar in a terminal, as a line now and then in a log file, and to TensorBoard."""
        loss, rate = self.loss_history[-1][1], self.pace * self.global_batch_size
        values = {"loss": loss, "learning_rate": learning_rate, "samples_per_second": rate}
        text = f"loss {loss:.4f}  {rate:,.0f} samples/s"
        if self.grad_norm is not None:  # FSDP's is a DTensor, of which each rank has a part
            norm = getattr(self.grad_norm, "full_tensor", lambda: self.grad_norm)()
            values["grad_norm"] = float(norm)
            text += f"  gradient norm {values['grad_norm']:.4g}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.step - self.bar.n)
        if self.bar.disable and time.perf_counter() - self.line_at > LOG_SECONDS:
            say(f"step {self.step}/{self.total_steps}  {text}")
            self.line_at = time.perf_counter()
        accelerator.log(values, self.step)

    def add_evaluation(self, accelerator, metrics, score, text):
        """Note the metrics of the epoch that is over. The best checkpoint has the highest score."""
        self.stop_clock("eval")
        if not math.isfinite(score):
            self.fail(f"the evaluation after step {self.step} gave {metrics}")
        self.evaluations.append(metrics)
        if not self.best or score > self.best[0]:
            self.best = [score, self.checkpoint.name]
        if accelerator.is_main_process:
            link_and_prune(self)
        accelerator.log(metrics, self.step)
        say(f"epoch {self.epoch}/{self.epochs}: {text}, training loss "
            f"{self.loss_history[-1][1]:.4f}, {self.seconds['train']:.1f} s of training")

    def fail(self, reason):
        """End a run that broke down, on all ranks, with a record that says so. A collective."""
        self.finish("failed")
        fail(f"{reason}. No checkpoint has that: --resume starts from the newest one before it; if "
             "that ends here again, start afresh with a lower --learning_rate")

    def finish(self, status):
        """Write OUTPUT_DIR/run.json, and say how the run ended: "completed", "preempted" or
        "failed". What is not known is null. A collective.
        """
        self.bar.close()
        self.profiling.close()
        self.seconds["total"], ranks = seconds_alive(), gather_object([describe_rank(self)])
        if gave_up_compiling():
            self.record["dynamo"] += ", in part eager"
        samples = (self.step - self.warm_step) * self.global_batch_size
        steady = self.seconds["train"] - self.warm_seconds
        self.record |= {
            "nodes": len({rank["host"] for rank in ranks}),
            "epochs": round(self.step / self.steps_per_epoch, 3),
            "steps": self.step,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "samples_per_second": round(samples / steady, 4) if samples > 0 else None,
            "ranks": ranks,
            "metrics": self.evaluations[-1] if self.evaluations else dict.fromkeys(self.metrics),
            "status": status,
            "profiled": self.args.profile,
            "loss_history": self.loss_history,
        }
        if PartialState().is_main_process:
            write_atomically(self.folder / "run.json", json.dumps(self.record, indent=1) + "\n")
        if status == "preempted":
            reason = ", ".join(sorted(set(self.stop_signals))) or "a signal to another rank"
            say(f"stopped by {reason} after step {self.step} of {self.total_steps}; saved: add "
                f"--resume --output_dir {self.folder} to continue")
        elif status == "completed":
            say(f"completed {self.step:,} steps: {self.seconds['train']:.1f} s of training, "
                f"{self.seconds['total']:.1f} s in all; record: {self.folder}/run.json")


def make_output_dir(args, strategy):
    """The run's folder, the same on all ranks. It holds no other run, unless that is to go on."""
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"  # two may start in one second
    folder = Path(args.output_dir or f"runs/{Path(__file__).stem}-{strategy}-{now}")
    [folder] = broadcast_object_list([folder])
    checkpoints, problem = folder / "checkpoints", None
    if sys.getfilesystemencoding() != "utf-8" and not str(folder).isascii():  # Rust cannot find it
        problem = (f"in a locale that is not UTF-8, the name of {folder} is not safe: set "
                   "PYTHONUTF8=1, or rename it")
    elif PartialState().is_main_process:
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            used = (folder / "run.json").exists() or any(checkpoints.glob("step_*"))
            if used and not args.resume:
                problem = f"{folder} holds another run: add --resume, or change --output_dir"
            tempfile.TemporaryFile(dir=checkpoints).close()
        except OSError as reason:
            problem = f"cannot write to the output directory {folder}: {reason.strerror}"
    fail_if_any(problem)
    for _ in range(10 * LATE_DISK_SECONDS):
        if checkpoints.exists():
            break
        time.sleep(0.1)
    else:
        problem = (f"{socket.gethostname()} does not see {folder}: choose an --output_dir on a "
                   "file system of all nodes")
    fail_if_any(problem)
    return folder


def find_git_commit():
    """The commit that this script is from, with "-dirty" if files differ from it; or None."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always",
               "--dirty", "--abbrev=40", "--exclude=*"]
    done = shutil.which("git") and subprocess.run(command, capture_output=True, text=True)
    return done and done.stdout.strip() or None


def device_name():
    """The model of the GPU, or else of the CPU: times on different models are not compared."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models = []
    with contextlib.suppress(OSError):  # some containers hide the file, and ARM's names no model
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        models = re.findall(r"^model name\s*: (.*\S)", text, re.M)
    return f"CPU ({models[0] if models else platform.machine()})"


def gave_up_compiling():
    """Whether torch.compile met more shapes than it compiles for; it tells so only in its log."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there if nothing was compiled
    reasons = dynamo.counters["unimplemented"] if dynamo else ()
    return any(re.search("limit (exceeded|reached)", reason) for reason in reasons)


def seconds_alive():
    """Seconds since this process started, imports included."""
    return time.time() - psutil.Process().create_time()


def take_peak_memory():
    """The most MB that this process has held since the last call: what torch allocated on its
    (fullest) GPU, or without a GPU the resident set; None where the system does not tell.
    """
    if gpus := torch.cuda.device_count():
        peak = max(torch.cuda.max_memory_allocated(gpu) for gpu in range(gpus))
        for gpu in range(gpus):
            torch.cuda.reset_peak_memory_stats(gpu)
        return round(peak / 1e6, 1)
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    with contextlib.suppress(OSError):  # where that is forbidden, the peak is of the whole run
        Path("/proc/self/clear_refs").write_text("5")  # see man 5 proc
    return found and round(int(found[1]) * 1024 / 1e6, 1)


@contextlib.contextmanager
def explain_out_of_memory(run, model):
    """End a run that needs more memory than there is with one line: what holds how much on this
    rank, and what to try next. Libraries raise a RuntimeError, of which torch has a class for GPUs.
    """
    words = "out of memory|[Cc]an(no|')t allocate memory|bad_alloc|ALLOC_FAILED"
    try:
        yield
        return
    except (RuntimeError, MemoryError) as problem:
        if not isinstance(problem, MemoryError) and not re.search(words, str(problem)):
            raise
        used, needs = memory_in_use(), bytes_by_formula(run)
        held = dict(needs)
        if run.step == 0 and not run.strategy.startswith("zero"):  # the first step makes Adam's
            held["optimizer states"] = 0
        lazy = run.strategy in ("baseline", "dp", "fsdp")  # others make room for gradients first
        if lazy and all(weight.grad is None for weight in model.parameters()):
            held["gradients"] = 0
        activations = max(0, used - sum(held.values()) - run.memory_before)
        held |= {"activations and all else": activations, "libraries and data": run.memory_before}
        parts = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in held.items() if size)
        training = model.training or run.step == 0
        rungs = "; ".join(next_rungs(run, training, sum(needs.values()), activations))
    if torch.distributed.is_initialized() and PartialState().process_index:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)  # if rank 0 is out of memory as well, it speaks
    sys.exit(f"error: out of memory on rank {PartialState().process_index} in step {run.step + 1}, "
             f"with {used / 1e6:,.0f} MB in use: {parts}. Try, in this order: {rungs}. See "
             "docs/ladder.md")


def memory_in_use():
    """Bytes that torch has allocated on this process's GPU; without a GPU, the resident set."""
    gpus = torch.cuda.is_available()
    return torch.cuda.memory_allocated() if gpus else psutil.Process().memory_info().rss


def bytes_by_formula(run):
    """{part: bytes} that a step needs on a rank's device besides activations, with Adam."""
    zero, options = run.strategy.startswith("zero"), run.settings["strategy_options"]
    low = 2 if zero and run.record["precision"] == "bf16" else 4  # DeepSpeed trains a bf16 copy
    sizes = {"parameters": low, "gradients": low, "optimizer states": 12 if zero else 8}
    # How many of these parts, from the last one on, are in shards, and how many on the host.
    sharded = {"zero1": 2, "zero2": 2, "zero3": 3, "fsdp": 3}.get(run.strategy, 0)
    if options.get("reshard_after_forward") == "false":
        sharded = 2  # the parameters stay gathered
    if run.strategy == "zero1" and run.args.gradient_accumulation_steps > 1:
        sharded = 1
    hosted = 2 if "offload_optimizer" in options else 0
    if "offload_param" in options or options.get("offload_params") == "true":
        hosted = 3
    if not torch.cuda.is_available():
        hosted = 0  # a CPU has one memory
    ranks = [run.devices if 3 - place <= sharded else 1 for place in range(3)]
    return {name: 0 if 3 - place <= hosted else run.record["parameters"] * size / ranks[place]
            for place, (name, size) in enumerate(sizes.items())}


def next_rungs(run, training, needed, activations):
    """What to try next, in the order of docs/ladder.md, with what it saves at most, as texts.
    `needed` and `activations` are bytes on this rank's device.
    """
    args, copy, ranks = run.args, 4 * run.record["parameters"], max(2, run.devices)
    batch, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    rungs = []
    if not training:
        size = max(1, args.per_device_eval_batch_size // 2)
        rungs.append((f"--per_device_eval_batch_size {size}", activations / 2))
    elif batch > 1:  # the global batch stays the same
        parts = batch if batch % 2 else 2
        whole = copy if micro_batches == 1 and run.strategy in ("ddp", "fsdp", "zero1") else 0
        rungs.append((f"--per_device_train_batch_size {batch // parts} "
                      f"--gradient_accumulation_steps {micro_batches * parts}",
                      activations * (1 - 1 / parts) - whole))  # whole gradients are kept then
    if training and getattr(args, "activation_checkpointing", None) is False:
        rungs.append(("--activation_checkpointing", activations))
    shards = {"fsdp_keep": copy + 3 * copy / ranks, "fsdp": 4 * copy / ranks}
    if torch.cuda.is_available():
        shards["fsdp_offload"] = 0
    rungs += [(f"{name}.yaml on {ranks} devices", needed - left) for name, left in shards.items()]
    if run.strategy in ("fsdp", "zero3"):
        rungs.append(("twice as many devices", needed / 2))
    texts = [f"{text} (saves up to {saved / 1e6:,.0f} MB)" for text, saved in rungs if saved > 1e6]
    return texts or ["a smaller model, or a device with more memory"]


def describe_rank(run):
    """Real, user and system seconds of this process, as `time` prints them; the MB that it held
    before it had a model, and its peaks, without what start-up and saving need.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rank": PartialState().process_index,
        "host": socket.gethostname(),
        "real": round(seconds_alive(), 3),
        "user": round(usage.ru_utime, 3),
        "sys": round(usage.ru_stime, 3),
        "train_cpu": round(run.train_cpu / torch.get_num_threads(), 3),
        "memory_before_mb": round(run.memory_before / 1e6, 1),
        "peak_memory_mb": run.peak_memory["train"],
        "peak_eval_memory_mb": run.peak_memory["eval"],
    }


# -------- checkpoints: the same in both scripts


def write_atomically(path, text):
    """Write a file. A kill at any moment leaves the old one or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def all_finite(optimizer):
    """Whether this rank's part of the weights, and of what the optimizer keeps of each, has no
    infinity and no NaN.
    """
    kept = [part for weight, state in optimizer.state.items() for part in (weight, *state.values())]
    parts = [getattr(part, "_local_tensor", part) for part in kept]  # FSDP's are DTensors
    return all(part.isfinite().all() for part in parts if torch.is_tensor(part))


def save_checkpoint(accelerator, optimizer, run):
    """Save what --resume needs as checkpoints/step_N, which gets that name when it is complete on
    disk: a kill never leaves a checkpoint that only looks whole. A collective.
    """
    sound = torch.tensor(float(all_finite(optimizer)), device=accelerator.device)
    if accelerator.reduce(sound, "mean").item() < 1:
        run.fail(f"weights or gradients of step {run.step} are infinite, or not numbers")
    final, partial = run.checkpoint, run.checkpoint.with_suffix(".partial")
    if accelerator.is_main_process:
        for leftover in final.parent.glob("step_*.partial"):
            shutil.rmtree(leftover)
    accelerator.wait_for_everyone()
    accelerator.save_state(partial)
    files = gather_object(list(own_files(partial, accelerator.process_index).items()))
    if accelerator.is_main_process:
        state = {name: getattr(run, name) for name in run.STATE}
        text = json.dumps({"settings": run.settings, "state": state, "files": dict(files)})
        write_atomically(partial / "checkpoint.json", f"{text}\n{zlib.crc32(text.encode())}\n")
        partial.rename(final)
        link_and_prune(run)
    accelerator.wait_for_everyone()
    run.start_clock()


def own_files(folder, rank):
    """{name: CRC-32} of a checkpoint's files that this rank wrote, which are now safe on disk. The
    other ranks' may not be visible yet: a shared disk can be late.
    """
    checksums = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        # torch writes __RANK_0.distcp, DeepSpeed zero_pp_rank_RANK_..., accelerate ..._states_RANK.
        writer = re.search(r"(^__|rank_|states_)(\d+)", path.name)
        if int(writer[2] if writer else 0) == rank:
            checksums[str(path.relative_to(folder))] = checksum(path)
    return checksums


def checksum(path):
    """The CRC-32 of a file, which is then safe on disk; 1 GB takes about a second."""
    value = 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while piece := file.read(2**20):
            value = zlib.crc32(piece, value)
    return value


def link_and_prune(run):
    """Let the links `last` and `best` follow, and remove old checkpoints."""
    folder = run.checkpoint.parent
    for link, name in zip(("last", "best"), (run.checkpoint.name, *run.best[1:]), strict=False):
        if (folder / name).exists():
            new = folder / f".{link}"
            new.unlink(missing_ok=True)
            new.symlink_to(name)
            new.replace(folder / link)
    for old in sorted(folder.glob("step_*[0-9]"))[:-KEEP_CHECKPOINTS]:
        if old.name not in run.best:  # renamed first, so that a kill does not leave half of it
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


def find_checkpoint(run):
    """What --resume starts from, the same on all ranks: "completed", (path, state), or None. A
    collective.
    """
    found = load_or_fail(PartialState().is_main_process, find_newest, run)
    return broadcast_object_list([found])[0]


def find_newest(run):
    """What `find_checkpoint` returns. Damaged checkpoints are renamed. Raises Fault."""
    record, damaged = run.folder / "run.json", []
    if record.exists() and (old := json.loads(record.read_bytes()))["status"] == "completed":
        check_settings(old | old["workload"], run.settings)
        return "completed"
    for path in sorted((run.folder / "checkpoints").glob("step_*[0-9]"), reverse=True):
        try:
            text, value = (path / "checkpoint.json").read_bytes().splitlines()
            if zlib.crc32(text) != int(value):
                raise ValueError("checkpoint.json is not as it was saved")
            saved = json.loads(text)
            for name, value in saved["files"].items():
                if checksum(path / name) != value:
                    raise ValueError(f"{name} is not as it was saved")
        except (OSError, ValueError, KeyError, TypeError) as damage:
            say(f"warning: skipping the damaged checkpoint {path}: {damage}")
            damaged.append(path)
            continue
        check_settings(saved["settings"], run.settings)
        before, now = saved["settings"]["devices"], run.settings["devices"]
        if before != now:
            say(f"devices {before} -> {now}: the samples stay the same, the dropout masks do not")
        for broken in damaged:  # out of the way of the new checkpoints
            broken.rename(broken.with_suffix(".damaged"))
        return path, saved["state"]
    if damaged:
        raise Fault(f"no checkpoint in {run.folder}/checkpoints is whole: start afresh in another "
                    "--output_dir")
    return None


def check_settings(old, new):
    """Raises the Fault that says in which settings this run differs from the one to resume. Other
    devices may share the same global batch; only ZeRO's checkpoints are cut for their number.
    """
    zero, free = new["strategy"].startswith("zero"), {"strategy_options"}
    if not zero:
        free |= {"processes", "devices", "per_device_batch_size", "gradient_accumulation_steps"}
    if {old["strategy"], new["strategy"]} <= {"baseline", "ddp"}:  # both keep whole weights
        free.add("strategy")
    if old["strategy"] == new["strategy"]:
        options, others = new["strategy_options"], old.get("strategy_options", {})
        unset = dict.fromkeys(options | others)
        old, new = old | unset | others, new | unset | options
    changes = [f"{key} {old[key]} -> {new[key]}" for key in new
               if key not in free and old.get(key, new[key]) != new[key]]
    if zero and old["processes"] != new["processes"]:
        changes[-1] += f"; ZeRO resumes on as many processes as before, {old['processes']}"
    if changes:
        raise Fault(f"cannot resume a run with other settings: {', '.join(changes)}")


if __name__ == "__main__":
    main()
    leave()
