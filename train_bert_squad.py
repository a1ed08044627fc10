"""Fine-tune BERT on SQuAD, on one device or many. The strategy is the accelerate YAML; the script never changes.

    accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision bf16 train_bert_squad.py
    python train_bert_squad.py --prepare_data_only    # on a login node, for compute nodes without a network

The YAMLs are baseline, dp, ddp, fsdp, zero2 and zero3. Without a GPU the same strategies run on CPU processes, over
gloo. Extractive question answering: BERT reads a question and a text (the context), and says at which token of the
text the answer starts and at which it ends. A run leaves in OUTPUT_DIR: run.json (the record), predictions.json, the
final model and tokenizer for `from_pretrained`, checkpoints/ (to resume). Read this file from top to bottom; the
training loop is `train_epoch`.
"""

import argparse
import collections
import contextlib
import datetime
import hashlib
import inspect
import json
import logging
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import datasets
import evaluate
import huggingface_hub
import numpy as np
import psutil
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProfileKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

SYNC_STEPS = 50  # every so many optimizer steps, losses leave the device and ranks ask each other whether to stop;
SYNC_SECONDS = 10  # and about as often as this where steps are slow, as Slurm gives 30 s to stop, or two minutes
PROFILE_STEPS = 5  # that --profile traces, after the warm-up
WARMUP_STEPS = 10  # not counted in samples_per_second: allocators, autotuning and communicators are set up in them
LOG_SECONDS = 10  # without a terminal, a progress line about so often
ZERO_BUCKET = 10_000_000  # parameters that ZeRO communicates, or ZeRO-3 gathers ahead, at a time: 40 MB in float32
ZERO_WHOLE = 10_000  # ZeRO-3 keeps smaller tensors, such as biases, whole: to gather them takes longer than to add them
KEEP_CHECKPOINTS = 2  # the newest, and one more in case that is damaged; the best is kept besides

# ------------------------------------------------------------------------------------------------------ command line


def parse_args():
    """The flags of a run; anything wrong with them ends the run with one line."""
    parser = argparse.ArgumentParser(
        description="Fine-tune BERT on SQuAD, to find answers in a text. Strategy, precision and number of processes "
        "are not flags of this script: they belong to `accelerate launch` and its YAML.",
        epilog="example: accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py",
    )
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")  # not a usage text from every process
    add = parser.add_argument
    add("--model_name_or_path", default="google-bert/bert-base-uncased", help="BERT's name on the Hugging Face Hub, or "
        "a folder with config, weights and tokenizer (default: %(default)s)")
    add("--from_scratch", action="store_true", help="use the model's config and tokenizer, but random weights")
    add("--train_file", help="questions to train on, in SQuAD's own nested JSON (default: the Hub's rajpurkar/squad)")
    add("--validation_file", help="questions to evaluate on, likewise")
    add("--version_2_with_negative", action="store_true", help="SQuAD v2.0: some questions have no answer "
        "(default data: rajpurkar/squad_v2)")
    add("--max_train_samples", type=int, default=10_000, help="take the first so many training questions; 0: all "
        "(default: %(default)s)")
    add("--max_eval_samples", type=int, default=500, help="likewise in evaluation (default: %(default)s)")
    add("--max_seq_length", type=int, default=384, help="tokens of question and context together; longer contexts are "
        "cut into overlapping windows (default: %(default)s)")
    add("--doc_stride", type=int, default=128, help="tokens by which windows overlap (default: %(default)s)")
    add("--max_answer_length", type=int, default=30, help="of a predicted answer, in tokens (default: %(default)s)")
    add("--prepare_data_only", action="store_true", help="fetch model and data, tokenise, then stop: for login nodes")
    add("--output_dir", help="where results go; all nodes must see it (default: a fresh folder under runs/)")
    add("--num_epochs", type=int, default=4, help="passes over the training questions (default: %(default)s)")
    add("--max_train_steps", type=int, help="number of optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=4, help="windows a device and micro-batch (%(default)s)")
    add("--per_device_eval_batch_size", type=int, default=32, help="windows a device, in evaluation (%(default)s)")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches a step (default: %(default)s); "
        "global batch = per-device batch x devices x micro-batches")
    add("--learning_rate", type=float, default=3e-5, help="at the first step; it falls linearly to 0 (%(default)s), "
        "whatever the number of devices")
    add("--dropout", type=float, default=0.1, help="in all layers and on attention (default: %(default)s)")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout (default: %(default)s)")
    add("--checkpointing_steps", type=int, help="save every so many optimizer steps, besides after every epoch")
    add("--resume", action="store_true", help="continue from OUTPUT_DIR's newest complete checkpoint, if there is one")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace a few steps into OUTPUT_DIR/traces, for Perfetto and report.py;"
        " the run is not a timing then")
    add("--collective_timeout", type=int, default=300, help="seconds after which a rank that waits for another gives up"
        " (default: %(default)s)")
    args = parser.parse_args()
    check_args(parser, args, may_be_zero=("seed", "dropout", "max_train_samples", "max_eval_samples", "doc_stride"))
    if bool(args.train_file) != bool(args.validation_file):
        parser.error("--train_file and --validation_file go together: give both, or none for SQuAD from the Hub")
    return args


# -------------------------------------------------------------------------------------------------- questions, read


class Fault(Exception):
    """What is wrong with the input, in one line for the user."""


def read_questions(args, split):
    """The first --max_..._samples questions of "train" or "validation": dicts of id, question, context and answers, a
    list of (text, first character in the context). Raises Fault, which names file, question and what is wrong there.
    """
    path = args.train_file if split == "train" else args.validation_file
    limit = args.max_train_samples if split == "train" else args.max_eval_samples
    name = path or ("rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad")
    questions = {}
    for row in read_squad(path) if path else read_hub(name, split):
        if limit and len(questions) == limit:
            break
        place = f"{name}: question {row['id']}"
        if row["id"] in questions:
            raise Fault(f"{place} is there twice")
        for key in ("question", "context"):
            if not isinstance(row[key], str):
                raise Fault(f"{place} has a {key} that is not text: {row[key]!r}")
            if re.search("[\ud800-\udfff]", row[key]):
                raise Fault(f"{place} has half a character in its {key}: a surrogate without its other half")
        if not row["context"].strip():
            raise Fault(f"{place} has an empty context")
        if not row["answers"] and not args.version_2_with_negative:
            raise Fault(f"{place} has no answer: add --version_2_with_negative if this is SQuAD v2.0")
        for text, start in row["answers"]:
            if not isinstance(text, str) or not isinstance(start, int):
                raise Fault(f"{place} has the answer {text!r} at {start!r}: a text and a number are wanted")
            if not text.strip() or start < 0 or row["context"][start : start + len(text)] != text:
                there = row["context"][max(start, 0) : start + max(len(text), 1)]
                raise Fault(f"{place} has its answer {text!r} at character {start} of the context, where {there!r} is")
        # An answer starts and ends with a token, not with a space.
        row["answers"] = [(text.strip(), start + len(text) - len(text.lstrip())) for text, start in row["answers"]]
        questions[row["id"]] = row
    if not questions:
        raise Fault(f"{name} has no questions")
    return list(questions.values())


def read_squad(path):
    """Yield the questions of a file in SQuAD's nested JSON, v1.1 or v2.0. Raises Fault."""
    place = "the file"
    try:
        for article_number, article in enumerate(json.loads(Path(path).read_text(encoding="utf-8-sig"))["data"], 1):
            place = f"article {article_number}"
            for number, paragraph in enumerate(article["paragraphs"], 1):
                place = f"paragraph {number} of article {article.get('title') or 'without a title'}"
                for qa in paragraph["qas"]:
                    place = f"a question after {place}" if "id" not in qa else f"question {qa['id']}"
                    answers = [] if qa.get("is_impossible") else qa["answers"]
                    if not isinstance(answers, list):
                        raise TypeError("answers must be a list")
                    yield {"id": str(qa["id"]), "question": qa["question"], "context": paragraph["context"],
                           "answers": [(answer["text"], answer["answer_start"]) for answer in answers]}
    except OSError as problem:
        raise Fault(f"cannot read {path}: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise Fault(f"{path} is not JSON: {problem}") from None
    except KeyError as key:
        raise Fault(f"{path}: {place} has no {key}") from None
    except (TypeError, AttributeError) as problem:
        raise Fault(f"{path}: {place} is not in SQuAD's form: {problem}") from None


def read_hub(name, split):
    """Yield the questions of SQuAD from the Hugging Face Hub, or from its cache. Raises Fault."""
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as problem:  # the network, the Hub and the cache each have errors of their own
        raise Fault(f"cannot load {name}: {one_line(problem)}; {OFFLINE}") from None
    for row in rows:
        yield row | {"answers": list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True))}


OFFLINE = "where there is no network, run --prepare_data_only on a node that has one first, or give files and a folder"


def one_line(problem):
    """The first line of a library's error, without the dot at its end."""
    return [*str(problem).strip().splitlines(), type(problem).__name__][0][:200].rstrip(".")


# ----------------------------------------------------------------------------------------------- questions, tokenised


@dataclass
class Features:
    """A split of the data as BERT reads it, on the training device. A feature is a question with a window of its
    context, [CLS] question [SEP] window [SEP]; a context longer than a window has several, which overlap.
    """

    questions: list  # dicts, as `read_questions` returns them
    key: str  # of the feature cache: a hash of all that the tensors depend on
    input_ids: torch.Tensor  # int32 [features, longest], padded
    lengths: torch.Tensor  # int64 [features], tokens without padding
    firsts: torch.Tensor  # int64 [features], the window's first token
    starts: torch.Tensor  # int64 [features], the answer's first token, or 0, [CLS], where the window has no answer
    ends: torch.Tensor  # int64 [features], the answer's last token, or 0
    owners: torch.Tensor  # int64 [features], which of the questions it belongs to
    offsets: torch.Tensor  # int32 [features, longest, 2], first and one-past-last character of each token; on the CPU

    def to(self, device):
        """The same features on another device, but for the offsets, which only the text of an answer is cut out by."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value) and name != "offsets"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    @torch.profiler.record_function("load data")  # its name in a trace
    def batch(self, ids, width):
        """What the model reads of the features `ids`, cut or padded to `width` tokens; each is [batch, width]."""
        positions = torch.arange(width, device=ids.device)
        mask = positions < self.lengths[ids, None]
        return {"input_ids": self.input_ids[:, :width][ids], "attention_mask": mask,
                "token_type_ids": (mask & (positions >= self.firsts[ids, None])).int()}

    def widths(self, lengths):
        """The width of each batch whose features have `lengths` [..., batch]: dynamic padding, here int64 [...]."""
        widths = lengths.amax(-1)
        if self.input_ids.is_cuda:
            widths = (widths + 7) // 8 * 8  # tensor cores want multiples of 8
        return widths.clamp(max=self.input_ids.shape[1])


def tokenize(questions, tokenizer, max_seq_length, doc_stride):
    """The tensors of `Features`, still on the CPU, of questions as `read_questions` returns them. Raises Fault."""
    rows = []
    bar = tqdm(total=len(questions), desc="tokenising", unit="question", leave=False, disable=not sys.stdout.isatty())
    for begin in range(0, len(questions), 1000):
        part = questions[begin : begin + 1000]
        asked = [question["question"].strip() for question in part]  # some have hundreds of leading spaces
        for question, ids in zip(part, tokenizer(asked, add_special_tokens=False)["input_ids"], strict=True):
            if (room := max_seq_length - 3 - len(ids)) <= doc_stride:  # 3: [CLS] and two [SEP]
                raise Fault(f"question {question['id']} leaves {max(room, 0)} of --max_seq_length {max_seq_length} "
                            f"tokens for its context, which must be more than --doc_stride {doc_stride}")
        batch = tokenizer(asked, [question["context"] for question in part], truncation="only_second",
                          max_length=max_seq_length, stride=doc_stride, return_overflowing_tokens=True,
                          return_offsets_mapping=True)
        for encoding, index in zip(batch.encodings, batch["overflow_to_sample_mapping"], strict=True):
            if 1 not in encoding.sequence_ids:
                raise Fault(f"question {part[index]['id']} has a context without tokens")
            first, offsets = encoding.sequence_ids.index(1), np.array(encoding.offsets, dtype=np.int32)
            answers = part[index]["answers"]
            rows.append((encoding.ids, first, *find_span(offsets, first, answers), begin + index, offsets))
        bar.update(len(part))
    bar.close()
    ids, firsts, starts, ends, owners, offsets = zip(*rows, strict=True)
    lengths = [len(row) for row in ids]
    longest = min(-(-max(lengths) // 8) * 8, max_seq_length)  # see Features.widths
    input_ids = np.full((len(ids), longest), tokenizer.pad_token_id, dtype=np.int32)
    all_offsets = np.zeros((*input_ids.shape, 2), dtype=np.int32)
    for row, length in enumerate(lengths):
        input_ids[row, :length], all_offsets[row, :length] = ids[row], offsets[row]
    scalars = {"lengths": lengths, "firsts": firsts, "starts": starts, "ends": ends, "owners": owners}
    return {"input_ids": torch.from_numpy(input_ids), "offsets": torch.from_numpy(all_offsets)} | {
        name: torch.tensor(values) for name, values in scalars.items()}


def find_span(offsets, first, answers):
    """The first and last token of the first answer in a window whose context starts at token `first`; (0, 0), [CLS],
    unless all of it is inside.
    """
    starts, ends = offsets[first:-1, 0], offsets[first:-1, 1]  # without the [SEP] at the end
    if answers:
        text, start = answers[0]
        if start >= starts[0] and start + len(text) <= ends[-1]:
            # The first token that ends after the answer begins, the last that starts before it ends: a character may
            # be several tokens, or none.
            return (first + int(np.searchsorted(ends, start, "right")),
                    first + int(np.searchsorted(starts, start + len(text), "left")) - 1)
    return 0, 0


def load_features(questions, tokenizer, args):
    """The `Features` of questions, from the cache (under HF_HOME) if they were tokenised before. Raises Fault."""
    tokenizer.backend_tokenizer.no_truncation()  # left by the call before, it would be part of the key
    code = inspect.getsource(tokenize) + inspect.getsource(find_span)  # features of older code are not these
    settings = [args.max_seq_length, args.doc_stride, code, tokenizer.backend_tokenizer.to_str(), questions]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    path = Path(datasets.config.HF_DATASETS_CACHE) / "squad_features" / f"{key[:32]}.safetensors"
    try:
        return Features(questions, key, **load_file(path))
    except (OSError, SafetensorError):  # not there, or damaged
        tensors = tokenize(questions, tokenizer, args.max_seq_length, args.doc_stride)
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial)
        partial.replace(path)
    except (OSError, SafetensorError) as problem:
        raise Fault(f"cannot write to {path.parent}: {one_line(problem)}; set HF_HOME to a folder with space") from None
    return Features(questions, key, **tensors)


def load_inputs(args):
    """Tokenizer, the model's config, and the `Features` to train and to evaluate on, on the CPU. Raises Fault."""
    name = args.model_name_or_path
    if not Path(name).is_dir() and (name.startswith((".", "/")) or name.count("/") > 1):  # the Hub has OWNER/NAME
        raise Fault(f"there is no model folder {name}")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        if Path(name).is_dir() and not any((Path(name) / file).exists() for file in ("tokenizer.json", "vocab.txt")):
            raise Fault(f"the model folder {name} has no tokenizer: neither tokenizer.json nor vocab.txt")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Fault:
        raise
    except Exception as problem:  # of the network, the Hub, or a file in the folder
        raise Fault(f"cannot load {name}: {one_line(problem)}; {OFFLINE}") from None
    if config.model_type != "bert":
        raise Fault(f"{name} is a {config.model_type} model; this script trains BERT")
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        raise Fault(f"{name} has {config.position_embedding_type} positions; this script needs absolute ones")
    if not tokenizer.is_fast:
        raise Fault(f"{name} has a {type(tokenizer).__name__}, which is not fast: only fast tokenizers know the "
                    "characters that a token stands for (tokenizer.json, or vocab.txt with BertTokenizer)")
    if len(tokenizer) > config.vocab_size:
        raise Fault(f"{name} has a tokenizer of {len(tokenizer)} tokens, but a model of {config.vocab_size}")
    if args.max_seq_length > config.max_position_embeddings:
        raise Fault(f"--max_seq_length {args.max_seq_length} is more than the {config.max_position_embeddings} "
                    f"positions of {name}")
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    splits = [read_questions(args, split) for split in ("train", "validation")]
    return tokenizer, config, *(load_features(questions, tokenizer, args) for questions in splits)


def load_in_turn(accelerator, args):
    """`load_inputs` on all ranks. Rank 0 goes first and fills the caches; then the first rank of each node, which has
    work to do if its disk is another; then the rest.
    """
    inputs = None
    for turn in (accelerator.is_main_process, accelerator.is_local_main_process, True):
        problem = None
        try:
            inputs = load_inputs(args) if turn and not inputs else inputs
        except Fault as fault:
            problem = str(fault)
        fail_if_any(problem)
    return inputs


def epoch_order(lengths, seed, epoch, global_batch_size):
    """The feature ids of each step of an epoch, int64 [steps, global batch]; the last incomplete batch is dropped.

    Padding is wasted work, so a global batch has features of similar `lengths` [features]: the features are shuffled,
    pools of 50 global batches (fewer if there would not be 4 pools) are sorted by length and cut into batches, and the
    batches are shuffled; transformers' LengthGroupedSampler has these numbers too. The batch with the longest feature
    comes first: if memory is short, that shows at once. All of it depends on seed and epoch alone: any number of
    processes walks through the same global batches, and a resumed run finds its place by counting steps.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    steps = len(lengths) // global_batch_size
    order = torch.randperm(len(lengths), generator=generator)[: steps * global_batch_size]
    pools = order.split(global_batch_size * max(1, min(50, steps // 4)))
    batches = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools]).view(steps, global_batch_size)
    batches = batches[torch.randperm(steps, generator=generator)]
    longest = lengths[batches].amax(1).argmax().item()
    return torch.cat([batches[longest:], batches[:longest]])


# ------------------------------------------------------------------------------------------------------------- model


class SpanBert(transformers.BertForQuestionAnswering):
    """transformers' BERT with its two heads over the tokens, but a forward pass that never waits for the device: the
    original asks the GPU at every step whether the mask hides anything.
    """

    def forward(self, input_ids, attention_mask, token_type_ids):
        """In: [batch, width] each, the mask as bool. Out: the logits of an answer's start and of its end at each token,
        [batch, width, 2]; lowest on padding, so that neither loss nor answer depends on how far it goes.
        """
        hidden = self.bert.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        hidden = self.bert.encoder(hidden, attention_mask=attention_mask[:, None, None, :])[0]  # all tokens see these
        logits = self.qa_outputs(hidden)
        return logits.masked_fill(~attention_mask[:, :, None], torch.finfo(logits.dtype).min)


def span_losses(logits, starts, ends):
    """The mean of the start's and the end's cross-entropy, for each feature: [batch], of logits [batch, width, 2]."""
    start_logits, end_logits = logits.unbind(-1)
    return (F.cross_entropy(start_logits, starts, reduction="none")
            + F.cross_entropy(end_logits, ends, reduction="none")) / 2


def load_model(args, config):
    """BERT with a new head, or the head it has, the same on all ranks; in float32, as precision is the launcher's."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    config.num_labels, config._attn_implementation = 2, "sdpa"  # start and end; attention that knows bool masks
    set_seed(args.seed)
    problem, name = None, args.model_name_or_path
    try:
        if args.from_scratch:
            model, missing = SpanBert(config), []
        else:
            model, loading = SpanBert.from_pretrained(
                name, config=config, attn_implementation="sdpa", output_loading_info=True)
            missing = [key for key in loading["missing_keys"] if not key.startswith("qa_outputs.")]
        if missing:
            problem = f"the weights of {name} lack {len(missing)} parameters of BERT, such as {missing[0]}"
    except Exception as reason:  # of the network, the Hub, or a file in the folder
        problem = f"cannot load the model {name}: {one_line(reason)}; to train without its weights: --from_scratch"
    fail_if_any(problem)
    model._no_split_modules = ["BertLayer"]  # FSDP shards layer by layer; transformers' own list makes it fail
    return model.float()


# ---------------------------------------------------------------------------------------------------------- training


def train_epoch(accelerator, model, optimizer, schedule, features, run):
    """Train to the end of the epoch, or to a step at which all ranks agree to stop; returns whether to stop."""
    args, epoch, rank = run.args, len(run.progress.evaluations), accelerator.process_index
    lengths = features.lengths.cpu()
    order = epoch_order(lengths, args.seed, epoch, run.global_batch_size)
    # A global batch is sorted by length: micro-batch m is its m-th slice, of which rank r takes the r-th slice. So the
    # ranks of a step wait little for each other. int64 [steps, accumulation, ranks, batch].
    slices = order.view(len(order), args.gradient_accumulation_steps, accelerator.num_processes, -1)
    widths = features.widths(lengths[slices])
    tokens, places = lengths[order].sum(1).tolist(), (widths.sum((1, 2)) * slices.shape[-1]).tolist()
    my_ids, my_widths = slices[:, :, rank].to(accelerator.device), widths[:, :, rank].tolist()

    model.train()
    for step in range(len(order))[run.start_epoch()]:
        losses = []
        for ids, width in zip(my_ids[step], my_widths[step], strict=True):
            with accelerator.accumulate(model):
                logits = model(**features.batch(ids, width)).float()
                loss = span_losses(logits, features.starts[ids], features.ends[ids]).mean()
                accelerator.backward(loss)  # divides by the micro-batches of a step; gradients are means over ranks
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        learning_rate = optimizer.param_groups[0]["lr"]
        schedule.step()
        run.progress.tokens += tokens[step]
        run.progress.places += places[step]
        if run.end_step(accelerator, losses, learning_rate):
            return True
    return False


# -------------------------------------------------------------------------------------------------------- evaluation


def best_spans(logits, first, last, max_answer_length):
    """The best-scoring span of each feature that is an answer: it starts at or before its end, has at most
    `max_answer_length` tokens, and lies between the tokens `first` and `last` [batch]. Exact, without n-best lists.

    Returns its score (start logit + end logit), first token and last token, each [batch], of logits [batch, width, 2].
    """
    positions = torch.arange(logits.shape[1], device=logits.device)
    inside = (positions >= first[:, None]) & (positions <= last[:, None])
    start_logits, end_logits = logits.masked_fill(~inside[:, :, None], -torch.inf).unbind(-1)
    # best_ahead[b, s]: the highest of the end logits from s on, over 1, 2, 4, ... and at last all tokens that an answer
    # may have, by the maximum of two shorter stretches: 5 operations for 30 tokens (max_pool1d takes 3 times as long).
    best_ahead = ahead = F.pad(end_logits, (0, max_answer_length - 1), value=-torch.inf)
    reach = 1
    while reach < max_answer_length:
        shift = min(reach, max_answer_length - reach)
        best_ahead = torch.maximum(best_ahead[:, :-shift], best_ahead[:, shift:])
        reach += shift
    scores, starts = (start_logits + best_ahead).max(1)
    answer_tokens = starts[:, None] + torch.arange(max_answer_length, device=logits.device)
    return scores, starts, starts + ahead.gather(1, answer_tokens).argmax(1)


@torch.no_grad()
def find_answers(accelerator, model, features, batch_size, max_answer_length):
    """For each feature its loss, the score of "no answer", and its best span's score, start and end, [features, 5].

    All ranks get all rows; each feature counts once, whatever the number of processes. All ranks run the same number of
    batches, as sharded models communicate in the forward pass: the last ones are filled up with the last feature.
    """
    model.eval()
    lengths, ranks = features.lengths.cpu(), accelerator.num_processes
    order = lengths.argsort(descending=True, stable=True)  # similar lengths together: little padding
    rounds = -(-len(order) // (ranks * batch_size))
    filling = order[-1:].expand(rounds * ranks * batch_size - len(order))
    mine = torch.cat([order, filling]).view(rounds, ranks, batch_size)[:, accelerator.process_index]
    found = []
    for ids, width in zip(mine.to(accelerator.device), features.widths(lengths[mine]).tolist(), strict=True):
        logits = model(**features.batch(ids, width)).float()
        losses = span_losses(logits, features.starts[ids], features.ends[ids])
        spans = best_spans(logits, features.firsts[ids], features.lengths[ids] - 2, max_answer_length)
        found.append(torch.stack([losses, logits[:, 0].sum(1), *spans], 1))
    # Five numbers a feature travel, never the logits: [ranks, rounds, batch, 5].
    found = accelerator.gather(torch.stack(found)[None]).transpose(0, 1).reshape(-1, 5)
    rows = torch.empty(len(order), 5)
    rows[order] = found[: len(order)].cpu()
    return rows


def choose_answers(rows, features, version_2):
    """{question id: text} of the rows that `find_answers` returns: of all windows of a question, the best span.

    With `version_2` the answer is "" where "no answer", at [CLS], has more than the score of the best span; as the
    official recipe has it, the window counts in which "no answer" scores lowest.
    """
    _, null_scores, scores, starts, ends = rows.T
    windows = torch.arange(len(rows))
    begins = features.offsets[windows, starts.long(), 0].tolist()
    stops = features.offsets[windows, ends.long(), 1].tolist()
    best, nothing = {}, collections.defaultdict(lambda: float("inf"))
    for owner, null_score, *span in zip(
            features.owners.tolist(), null_scores.tolist(), scores.tolist(), begins, stops, strict=True):
        nothing[owner] = min(nothing[owner], null_score)
        if owner not in best or span[0] > best[owner][0]:
            best[owner] = span
    answers = {}
    for owner, (score, begin, stop) in sorted(best.items()):
        question = features.questions[owner]
        answers[question["id"]] = "" if version_2 and nothing[owner] > score else question["context"][begin:stop]
    return answers


class SquadMetric(evaluate.Metric):
    """Exact match and F1 in percent, by the rules of SQuAD's official scripts (Rajpurkar et al., 2016 and 2018) but
    without a network: compute(predictions=[text], references=[[text, ...]], version_2=bool). v2.0: [] is no answer.
    """

    def _info(self):
        text = datasets.Value("string")
        types = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=types)

    def _compute(self, predictions, references, version_2):
        exact, f1 = [], []
        for prediction, texts in zip(predictions, references, strict=True):
            if version_2:  # texts of nothing but articles and punctuation are no answers
                texts = [text for text in texts if self.words(text)] or [""]
            exact.append(max(self.words(prediction) == self.words(text) for text in texts))
            f1.append(max(self.f1(self.words(prediction), self.words(text), version_2) for text in texts))
        return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}

    @staticmethod
    def words(text):
        """The words of an answer, in lower case, without punctuation and articles."""
        text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    @staticmethod
    def f1(prediction, reference, version_2):
        """The harmonic mean of precision and recall of the words; without words, v1.1 gives 0, and v2.0 compares."""
        if version_2 and not (prediction and reference):
            return float(prediction == reference)
        same = sum((collections.Counter(prediction) & collections.Counter(reference)).values())
        return 2 * same / (len(prediction) + len(reference)) if same else 0.0


def evaluate_epoch(accelerator, model, features, run):
    """Exact match, F1 and loss on the validation questions; rank 0 writes predictions.json."""
    args, metrics = run.args, None
    batch_size = args.per_device_eval_batch_size * run.gpus_a_process
    rows = find_answers(accelerator, model, features, batch_size, args.max_answer_length)
    if accelerator.is_main_process:
        answers = choose_answers(rows, features, args.version_2_with_negative)
        metrics = SquadMetric(keep_in_memory=True, cache_dir=tempfile.gettempdir()).compute(
            predictions=list(answers.values()),
            references=[[text for text, _ in question["answers"]] for question in features.questions],
            version_2=args.version_2_with_negative,
        ) | {"eval_loss": rows[:, 0].mean(dtype=torch.float64).item()}
        write_atomically(run.folder / "predictions.json", json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    return broadcast_object_list([metrics])[0]


def save_model(accelerator, model, tokenizer, folder):
    """Save the full weights, gathered from all ranks where they are sharded, for `from_pretrained`. A collective."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        # torch.compile puts a prefix before the names.
        weights = {name.replace("_orig_mod.", ""): weight.cpu().contiguous() for name, weight in weights.items()}
        whole = accelerator.unwrap_model(model, keep_torch_compile=False)
        whole.save_pretrained(folder, state_dict=weights)  # if a kill cuts it short, --resume does it again
        whole.config.architectures = ["BertForQuestionAnswering"]  # not the class of this script or of FSDP
        whole.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def main():
    args = parse_args()
    stop_signals = catch_stop_signals()
    for library in (transformers, huggingface_hub):
        library.logging.set_verbosity_error()  # that the head is new, from each rank; that the network is tried again
    if not sys.stdout.isatty():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    accelerator, strategy = make_accelerator(args)
    tokenizer, config, train_features, eval_features = load_in_turn(accelerator, args)
    model = load_model(args, config)
    counts = {"questions": len(train_features.questions), "samples": len(train_features.lengths),
              "eval_questions": len(eval_features.questions), "eval_samples": len(eval_features.lengths)}
    if args.prepare_data_only:
        say("the model, {questions} training questions ({samples} features) and {eval_questions} validation questions "
            "({eval_samples} features) are ready".format(**counts))
        return accelerator.end_training()
    hub = "rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad"
    run = Run(accelerator, strategy, args, stop_signals, counts | {
        "model": Path(args.model_name_or_path).name + ", from scratch" * args.from_scratch,
        "dataset": Path(args.train_file).name if args.train_file else hub,
        "features": f"{train_features.key[:8]}, {eval_features.key[:8]}",
        "version_2": args.version_2_with_negative,
        "sequence_length": args.max_seq_length,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_answer_length": args.max_answer_length,
    })
    train_features, eval_features = train_features.to(accelerator.device), eval_features.to(accelerator.device)

    # Under ZeRO-3 transformers may have sharded the weights while it loaded them: then numel() is 0.
    run.record["parameters"] = sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True)
    model, optimizer = prepare(accelerator, strategy, model, optimizer)
    # The schedule is not prepared: accelerate would step it once for every process.
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, run.total_steps)
    accelerator.register_for_checkpointing(schedule)
    set_seed(args.seed, device_specific=True)  # other dropout masks on each rank

    if run.start(accelerator) == "completed":
        return accelerator.end_training()
    stopped = False
    while len(run.progress.evaluations) < run.epochs and not stopped:
        stopped = train_epoch(accelerator, model, optimizer, schedule, train_features, run)
        if not stopped:
            clock = time.perf_counter()
            metrics = evaluate_epoch(accelerator, model, eval_features, run)
            run.add_evaluation(accelerator, metrics, -metrics["eval_loss"], time.perf_counter() - clock)
            result = "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}".format(**metrics)
            say(f"epoch {len(run.progress.evaluations)}/{run.epochs}: {result}, training loss "
                f"{run.progress.loss_history[-1][1]:.4f}, {run.seconds['train']:.1f} s of training")
        save_checkpoint(accelerator, run)

    if not stopped:
        save_model(accelerator, model, tokenizer, run.folder)
    unknown = {"exact_match": None, "f1": None, "eval_loss": None}  # stopped in the first epoch
    run.finish(stopped, run.progress.evaluations[-1] if run.progress.evaluations else unknown)
    accelerator.end_training()


# --------------------------------------------------------------------------- launching: the same in both scripts


def fail(message):
    """End this process with exit code 1; rank 0 (of each node, before the ranks can talk) says why, in one line.

    The others wait a little: if one of them went first, the launcher would end rank 0 before it has spoken.
    """
    if os.environ.get("RANK" if torch.distributed.is_initialized() else "LOCAL_RANK", "0") == "0":
        sys.exit(f"error: {message}")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends the others so
    time.sleep(10)
    sys.exit(1)


def check_args(parser, args, may_be_zero):
    """Refuse numbers that no run can have, and --resume without a folder."""
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_zero):
            wanted = "not be negative" if name in may_be_zero else "be greater than 0"
            parser.error(f"--{name} must {wanted}, got {value}")
    if args.dropout >= 1:
        parser.error(f"--dropout must be less than 1, got {args.dropout}")
    if args.resume and not args.output_dir:
        parser.error("--resume needs --output_dir, the folder of the run to continue")


def fail_if_any(problem):
    """`fail` on all ranks if any rank passes a message instead of None. A collective."""
    problems = [problem for problem in gather_object([problem]) if problem]
    if problems:
        fail(problems[0])


def say(line):
    """Print a line once in the whole run, above the progress bar."""
    if PartialState().is_main_process:
        tqdm.write(line)
        sys.stdout.flush()


def catch_stop_signals():
    """From now on SIGTERM and SIGUSR1, Slurm's warnings, do no more than add their name to the list returned."""
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
    return received


def make_accelerator(args):
    """The accelerator for the launcher's YAML, and its strategy's name. Without a GPU: the same strategy over gloo.

    Stops where the processes would silently do something else than what was asked for.
    """
    fsdp, deepspeed, debug = (os.environ.get(f"ACCELERATE_{name}") == "true"
                              for name in ("USE_FSDP", "USE_DEEPSPEED", "DEBUG_MODE"))
    world_size, node_size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    gpus, one_process, host = torch.cuda.device_count(), "LOCAL_RANK" not in os.environ, socket.gethostname()
    if one_process and world_size > 1:
        fail(f"WORLD_SIZE is {world_size}, but one process was started: unset it, or use a YAML that starts several")
    if one_process and int(os.environ.get("SLURM_STEP_NUM_NODES", 1)) > 1:
        fail("baseline and dp are one process on one node, but this was started for several nodes: use ddp.yaml there")
    if gpus and not torch.cuda.is_available():
        fail(f"{host} has {gpus} GPU(s) that torch {torch.__version__} cannot use, probably because the driver is too "
             "old: README, 'On a Slurm cluster', says what to install")
    if 0 < gpus < node_size:
        fail(f"{node_size} processes on {host}, which has {gpus} GPU(s): add --num_processes {gpus} to accelerate "
             "launch (times the number of nodes)")
    cores = sorted(os.sched_getaffinity(0))
    if not gpus and 1 < node_size <= len(cores):  # cores of its own for each process and its gloo threads: 10 % faster
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"]) :: node_size])
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # accelerate lacks the new name
    sys.modules.setdefault("lomo_optim", None)  # accelerate searches the disk for this package at every step: 0.1 ms
    sharded = fsdp or deepspeed
    if not gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it looked for a GPU
    if deepspeed and not gpus:
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from deepspeed.ops import __compatible_ops__ as deepspeed_ops

        deepspeed_ops["deepspeed_shm_comm"] = False  # or it compiles a shared-memory all-reduce, if there is a compiler
    # Gradients in the buckets that are all-reduced, not a copy of them; and no broadcast of constants at every step.
    handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)]
    if sharded or world_size > 1:
        timeout = datetime.timedelta(seconds=args.collective_timeout)
        handlers += [InitProcessGroupKwargs(backend="nccl" if gpus else "gloo", timeout=timeout)]
    accelerator = Accelerator(
        cpu=not gpus and not sharded,
        kwargs_handlers=handlers,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard" if args.with_tracking else None,
        project_dir="runs",  # replaced in Run.start, when the output directory is known
    )
    state = accelerator.state
    if fsdp and not gpus:  # accelerate takes FSDP for a GPU matter; torch's fully_shard does not
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)
    if accelerator.num_processes != world_size:
        fail(f"{world_size} processes were started, but accelerate knows of {accelerator.num_processes}, so each would "
             "train alone: use accelerate launch with one of the YAMLs")
    if gpus:
        torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    if state.distributed_type == DistributedType.DEEPSPEED:
        # It wants the batch size, as it sees no DataLoader; and unless told not to, it alone would clip gradients at 1
        # and stop the GPU at every step to time it.
        config, stage = state.deepspeed_plugin.deepspeed_config, state.deepspeed_plugin.zero_stage
        config |= {"train_micro_batch_size_per_gpu": args.per_device_train_batch_size, "gradient_clipping": 0.0,
                   "timers": {"throughput": {"enabled": False}}}
        # Its sizes are for billions of parameters: buffers of 2 GB, and ZeRO-3 would hold all of a model of less than
        # 1e9 from the forward to the backward pass. Stage 2 would all-reduce, and only after the backward pass.
        config["zero_optimization"] |= {"reduce_bucket_size": ZERO_BUCKET} | ({
            "stage3_prefetch_bucket_size": ZERO_BUCKET, "stage3_max_live_parameters": 3 * ZERO_BUCKET,
            "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": ZERO_WHOLE,
        } if stage == 3 else {
            "use_multi_rank_bucket_allreduce": False, "overlap_comm": gpus > 0, "compute_grad_norm": False})
        return accelerator, f"zero{stage}"
    if state.distributed_type == DistributedType.FSDP:
        return accelerator, "fsdp"
    if state.distributed_type == DistributedType.NO:
        return accelerator, "dp" if debug else "baseline"  # the mark that dp.yaml explains
    return accelerator, "ddp"


def prepare(accelerator, strategy, model, optimizer):
    """Wrap model and optimizer for the strategy: `accelerator.prepare`, and what it does not know of."""
    if strategy == "dp":
        model = nn.DataParallel(model.to(accelerator.device))
    model, optimizer = accelerator.prepare(model, optimizer)
    if strategy.startswith("zero"):  # DeepSpeed's groups of ranks come with torch's timeout: 10 or 30 minutes
        set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout  # torch < 2.15
        for group in distributed_c10d._world.pg_map:
            set_timeout(accelerator.init_handler.timeout, group)
    if strategy == "fsdp" and accelerator.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo cannot average: torch 2.8 lets it sum gradients instead
                module.set_force_sum_reduction_for_comms(True)
    return model, optimizer


# ----------------------------------------------------- runs, checkpoints and records: the same in both scripts


@dataclass
class Progress:
    """How far a run has come. A checkpoint holds it, as JSON, beside what accelerate saves."""

    step: int = 0  # optimizer steps done
    loss_history: list = field(default_factory=list)  # [step, mean loss of its global batch]; steps count from 1
    evaluations: list = field(default_factory=list)  # the metrics after each epoch
    best: list = field(default_factory=list)  # [score, step] of the best of them; higher is better
    tokens: int = 0  # trained on, padding not counted; 0 where samples are not texts
    places: int = 0  # the same, padding counted


def device_name():
    """The model of the GPU, or of the CPU where there is none: runs on another are not to be compared."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models = []
    with contextlib.suppress(OSError):  # some containers hide the file, and ARM names no model in it
        models = re.findall(r"^model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text(errors="replace"), re.M)
    return f"CPU ({models[0] if models else platform.machine()})"


class Run:
    """A run as it was asked for, how far it is, its stopwatch and its record. Sizes are in samples and steps."""

    def __init__(self, accelerator, strategy, args, stop_signals, workload):
        gpus = torch.cuda.device_count()
        self.args, self.strategy, self.stop_signals = args, strategy, stop_signals
        self.gpus_a_process = max(1, gpus) if strategy == "dp" else 1
        self.devices = accelerator.num_processes * self.gpus_a_process
        self.global_batch_size = args.per_device_train_batch_size * self.devices * args.gradient_accumulation_steps
        self.steps_per_epoch = workload["samples"] // self.global_batch_size
        if self.steps_per_epoch == 0:
            fail(f"the global batch of {self.global_batch_size} = {args.per_device_train_batch_size} a device x "
                 f"{self.devices} devices x {args.gradient_accumulation_steps} micro-batches is larger than the data "
                 f"set of {workload['samples']}: lower --per_device_train_batch_size")
        self.total_steps = args.max_train_steps or args.num_epochs * self.steps_per_epoch
        if args.profile and self.total_steps < WARMUP_STEPS + 2 + PROFILE_STEPS:
            fail(f"--profile needs {WARMUP_STEPS + 2 + PROFILE_STEPS} steps, and this run has {self.total_steps}")
        self.epochs = -(-self.total_steps // self.steps_per_epoch)
        self.folder = make_output_dir(args, strategy)
        workload = workload | {
            "epochs": None if args.max_train_steps else args.num_epochs,
            "steps": args.max_train_steps,
            "per_device_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "precision": accelerator.mixed_precision,
            "dynamo": accelerator.state.dynamo_plugin.backend.value.lower(),
        }
        same = {
            "strategy": strategy,
            "processes": accelerator.num_processes,
            "devices": self.devices,
            "seed": args.seed,
        }
        # What has to be the same when the run is resumed.
        self.settings = same | workload | {"learning_rate": args.learning_rate, "dropout": args.dropout}
        also = ("per_device_batch_size", "gradient_accumulation_steps", "precision", "dynamo")
        self.record = same | {name: workload[name] for name in also} | {
            "script": Path(__file__).name,
            "device_name": device_name(),
            "global_batch_size": self.global_batch_size,
            "workload": workload,
            "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
            | {name: getattr(sys.modules.get(name), "__version__", None)  # None: not in use
               for name in ("torch", "accelerate", "deepspeed", "transformers")},
            "git_commit": find_git_commit(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            "argv": sys.argv,
        }
        self.progress, self.resumed_from = Progress(), None
        self.seconds = {"startup": None, "train": 0.0, "eval": 0.0, "total": None}
        self.steady_seconds, self.steady_steps = 0.0, 0  # training without the warm-up
        self.profiling, self.profiler = contextlib.ExitStack(), None

    def start(self, accelerator):
        """Resume if asked to, say what is about to run, and start to measure. Returns "completed" if nothing is left
        to do.
        """
        found = find_checkpoint(self) if self.args.resume else None
        if found == "completed":
            say(f"{self.folder} holds a completed run already; its record is {self.folder}/run.json")
            return found
        if found:
            checkpoint, self.progress = found
            accelerator.load_state(checkpoint)
            self.resumed_from = str(checkpoint)
            say(f"resuming from {checkpoint}")
        first, self.first_tokens = self.progress.step, self.progress.tokens
        if self.args.with_tracking:
            accelerator.project_configuration.logging_dir = str(self.folder)
            accelerator.init_trackers("tensorboard", vars(self.args) | self.settings,
                                      {"tensorboard": {"purge_step": first + 1}})  # drop what the resumed run redoes
        where = f"{self.devices} x {self.record['device_name']}" + " in one process" * (self.strategy == "dp")
        say(f"{self.strategy} on {where}: {self.record['parameters']:,} parameters, {self.total_steps:,} steps of "
            f"{self.global_batch_size} samples; results go to {self.folder}")
        self.warm_step = first + min(WARMUP_STEPS, (self.total_steps - first) // 2)
        self.sync_step = first + 1
        if self.args.profile:
            steps = {"wait": WARMUP_STEPS, "warmup": 2, "active": PROFILE_STEPS, "repeat": 1}
            handler = ProfileKwargs(activities=sorted({"cpu", accelerator.device.type}), schedule_option=steps,
                                    output_trace_dir=str(self.folder / "traces"))
            self.profiler = self.profiling.enter_context(accelerator.profile(handler))
        self.seconds["startup"] = seconds_alive()
        self.line_at = time.perf_counter()
        self.bar = tqdm(total=self.total_steps, initial=first, unit="step", leave=False, file=sys.stdout,
                        disable=not (accelerator.is_main_process and sys.stdout.isatty()))

    def start_epoch(self):
        """Start the stopwatch. Returns the steps of the epoch that are left to do, as a slice."""
        self.losses, self.clock = [], time.perf_counter()
        first = len(self.progress.evaluations) * self.steps_per_epoch
        return slice(self.progress.step - first, self.total_steps - first)

    def end_step(self, accelerator, losses, learning_rate):
        """Count an optimizer step with the losses of its micro-batches; returns whether all ranks agree to stop.

        Every SYNC_STEPS steps, or SYNC_SECONDS if steps are slow, one small all-reduce brings home the losses since
        the last one and any rank's wish to stop. In between, nothing waits for the device.
        """
        self.losses += losses
        self.progress.step = step = self.progress.step + 1
        if self.profiler:
            self.profiler.step()
        saving = self.args.checkpointing_steps and step % self.args.checkpointing_steps == 0
        ending = step == self.total_steps or step % self.steps_per_epoch == 0
        if not (saving or ending or step % SYNC_STEPS == 0 or step in (self.warm_step, self.sync_step)):
            return False
        means = torch.stack(self.losses).view(-1, self.args.gradient_accumulation_steps).mean(1)
        rate = len(means) / (time.perf_counter() - self.clock)
        others = torch.tensor([len(self.stop_signals), rate], device=means.device)
        *means, stop, rate = accelerator.reduce(torch.cat([means, others]), "mean").tolist()
        self.sync_step = step + max(1, int(rate * SYNC_SECONDS))  # the same on all ranks, as the mean is
        self.show_steps(accelerator, means, learning_rate, time.perf_counter() - self.clock)
        if saving and not ending and not stop:  # at the end of an epoch, its evaluation comes first
            save_checkpoint(accelerator, self)
        self.losses, self.clock = [], time.perf_counter()
        return bool(stop)

    def show_steps(self, accelerator, losses, learning_rate, seconds):
        """Take in the losses of the steps since the last call, the last one's learning rate, and their time; show them
        as a bar in a terminal and as a line now and then in a log file.
        """
        step, rate = self.progress.step, len(losses) * self.global_batch_size / seconds
        self.progress.loss_history += [[step - len(losses) + i + 1, loss] for i, loss in enumerate(losses)]
        self.seconds["train"] += seconds
        if step > self.warm_step:
            self.steady_seconds, self.steady_steps = self.steady_seconds + seconds, self.steady_steps + len(losses)
        self.bar.set_postfix(loss=f"{losses[-1]:.4f}", samples_per_s=f"{rate:,.0f}", refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and time.perf_counter() - self.line_at > LOG_SECONDS:
            say(f"step {step}/{self.total_steps}  loss {losses[-1]:.4f}  {rate:,.0f} samples/s")
            self.line_at = time.perf_counter()
        accelerator.log({"loss": losses[-1], "learning_rate": learning_rate, "samples_per_second": rate}, step)

    def add_evaluation(self, accelerator, metrics, score, seconds):
        """Take in the metrics of the epoch that has ended; the best checkpoint is the one with the highest score."""
        self.seconds["eval"] += seconds
        self.progress.evaluations.append(metrics)
        if not self.progress.best or score > self.progress.best[0]:
            self.progress.best = [score, self.progress.step]
        accelerator.log(metrics, self.progress.step)

    def finish(self, stopped, metrics):
        """Write OUTPUT_DIR/run.json, where what is not known is null, and say how the run ended. A collective."""
        self.bar.close()
        self.profiling.close()
        self.seconds["total"] = seconds_alive()
        rate = self.steady_steps * self.global_batch_size / self.steady_seconds if self.steady_steps else None
        tokens, places, trained = self.progress.tokens, self.progress.places, self.seconds["train"]
        ranks = gather_object([describe_rank()])
        self.record |= {
            "nodes": len({rank["host"] for rank in ranks}),
            "epochs": round(self.progress.step / self.steps_per_epoch, 3),
            "steps": self.progress.step,
            "tokens": tokens or None,
            "padding_share": round(1 - tokens / places, 4) if places else None,
            "seconds": {name: seconds and round(seconds, 3) for name, seconds in self.seconds.items()},
            "samples_per_second": rate and round(rate, 1),
            "tokens_per_second": round((tokens - self.first_tokens) / trained, 1) if tokens and trained else None,
            "ranks": ranks,
            "metrics": metrics,
            "status": "preempted" if stopped else "completed",
            "resumed_from": self.resumed_from,
            "profiled": self.args.profile,
            "loss_history": self.progress.loss_history,
        }
        if PartialState().is_main_process:
            write_atomically(self.folder / "run.json", json.dumps(self.record, indent=1) + "\n")
        if stopped:
            reason = ", ".join(sorted(set(self.stop_signals))) or "a signal to another rank"
            say(f"stopped by {reason} after step {self.progress.step} of {self.total_steps}; saved: add --resume "
                f"--output_dir {self.folder} to continue")
        else:
            say(f"completed {self.progress.step:,} steps: {trained:.1f} s of training, "
                f"{self.seconds['total']:.1f} s in all; record: {self.folder}/run.json")


def find_git_commit():
    """The commit that this script is from, or None."""
    if not shutil.which("git"):
        return None
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--verify", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def make_output_dir(args, strategy):
    """The run's folder, the same on all ranks; it exists, and holds no other run unless that is to be resumed."""
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"  # two runs may start in the same second
    [folder] = broadcast_object_list([Path(args.output_dir or f"runs/{Path(__file__).stem}-{strategy}-{now}")])
    checkpoints, problem = folder / "checkpoints", None
    if sys.getfilesystemencoding() != "utf-8" and not str(folder).isascii():  # libraries in Rust would not find it
        problem = f"in a locale that is not UTF-8, the name of {folder} is not safe: set PYTHONUTF8=1, or rename it"
    elif PartialState().is_main_process:
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            if not os.access(checkpoints, os.W_OK):
                problem = f"cannot write to the output directory {folder}"
            elif not args.resume and ((folder / "run.json").exists() or any(checkpoints.glob("step_*"))):
                problem = f"{folder} holds another run: add --resume to continue it, or choose another --output_dir"
        except OSError as reason:
            problem = f"cannot write to the output directory {folder}: {reason.strerror}"
    fail_if_any(problem)
    if not checkpoints.exists():
        problem = f"{socket.gethostname()} does not see {folder}: choose an --output_dir on a file system of all nodes"
    fail_if_any(problem)
    return folder


def seconds_alive():
    """Seconds since this process started, imports included."""
    return time.time() - psutil.Process().create_time()


def describe_rank():
    """Real, user and system seconds of this process, as `time` prints them, and its peak memory in MB: what torch
    allocated on its (fullest) GPU, or without one the resident set.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    memory = [torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())]
    return {
        "rank": PartialState().process_index,
        "host": socket.gethostname(),
        "real": round(seconds_alive(), 3),
        "user": round(usage.ru_utime, 3),
        "sys": round(usage.ru_stime, 3),
        "peak_memory_mb": round((max(memory) if memory else usage.ru_maxrss * 1024) / 1e6, 1),
    }


def write_atomically(path, text):
    """Write a file so that a kill at any moment leaves the old one or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save_checkpoint(accelerator, run):
    """Save everything that --resume needs as checkpoints/step_N; the links `last` and `best` follow. A collective.

    A kill during a save never leaves a checkpoint that looks whole: it gets its name when it is complete on disk.
    """
    final = run.folder / "checkpoints" / f"step_{run.progress.step:08d}"
    partial = final.with_suffix(".partial")
    if accelerator.is_main_process:
        for leftover in final.parent.glob("step_*.partial"):
            shutil.rmtree(leftover)
    accelerator.wait_for_everyone()
    accelerator.save_state(partial)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
        for name in files:
            with open(partial / name, "rb") as file:
                os.fsync(file.fileno())
        content = {"settings": run.settings, "progress": asdict(run.progress), "files": files}
        write_atomically(partial / "checkpoint.json", json.dumps(content))
        name_checkpoint(partial, final, run.progress)
    accelerator.wait_for_everyone()


def name_checkpoint(partial, final, progress):
    """Give a complete checkpoint its name, let the links `last` and `best` follow, and remove old checkpoints."""
    if final.exists():  # saved before its evaluation: nothing was trained since, only the progress is new
        content = json.loads((final / "checkpoint.json").read_bytes()) | {"progress": asdict(progress)}
        write_atomically(final / "checkpoint.json", json.dumps(content))
        shutil.rmtree(partial)
    else:
        partial.rename(final)
    best = final.with_name(f"step_{progress.best[1]:08d}") if progress.best else None
    for link, target in (("last", final), ("best", best)):
        if target and target.exists():
            new = final.with_name(f".{link}")
            new.unlink(missing_ok=True)
            new.symlink_to(target.name)
            new.replace(final.with_name(link))
    for old in sorted(final.parent.glob("step_*[0-9]"))[:-KEEP_CHECKPOINTS]:
        if old != best:  # renamed first, so that a kill does not leave half of it either
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


def find_checkpoint(run):
    """What --resume starts from, the same on all ranks: "completed", (path, Progress), or None. A collective.

    Damaged checkpoints are skipped with a warning; settings that differ from the checkpoint's are an error.
    """
    found, problem, damaged = None, None, []
    if PartialState().is_main_process and (run.folder / "run.json").exists():
        record = json.loads((run.folder / "run.json").read_bytes())
        if record["status"] == "completed":
            kept = {key: value for key, value in {**record, **record["workload"]}.items() if key in run.settings}
            found, problem = "completed", difference(kept, run.settings)
    if PartialState().is_main_process and not found:
        for path in sorted((run.folder / "checkpoints").glob("step_*[0-9]"), reverse=True):
            try:
                content = json.loads((path / "checkpoint.json").read_bytes())
                for name, size in content["files"].items():
                    if (path / name).stat().st_size != size:
                        raise ValueError(f"{name} has {(path / name).stat().st_size} bytes of {size}")
                found, problem = (path, Progress(**content["progress"])), difference(content["settings"], run.settings)
                break
            except (OSError, ValueError, KeyError, TypeError) as damage:
                say(f"warning: skipping the damaged checkpoint {path}: {damage}")
                damaged.append(path)
        if damaged and not found:
            problem = f"no checkpoint in {run.folder}/checkpoints is whole: start afresh in another --output_dir"
        elif not problem:
            for path in damaged:  # out of the way of the new checkpoints
                path.rename(path.with_suffix(".damaged"))
    fail_if_any(problem)
    return broadcast_object_list([found])[0]


def difference(old, new):
    """None, or the sentence that says in which settings this run differs from the one to be resumed."""
    changes = [f"{key} {old[key]} -> {new.get(key)}" for key in old if old[key] != new.get(key)]
    return f"cannot resume a run with other settings: {', '.join(changes)}" if changes else None


if __name__ == "__main__":
    main()
    # Not the interpreter's own way out: gloo's threads outlive DDP, and now and then abort a process that is done.
    sys.stdout.flush()
    os._exit(0)
