"""Fine-tune BERT on SQuAD, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py
    python train_bert_squad.py --prepare_data_only    # on a login node that has a network

BERT reads a question and a text (the context), and says at which token of the text the answer
starts and ends. A run leaves in OUTPUT_DIR:

    run.json             what ran, the seconds of each phase, the loss of each step
    predictions.json     the answer to each validation question
    model.safetensors    the final weights; with config and tokenizer, for `from_pretrained`
    best/                the same of the epoch that scored best
    checkpoints/         what --resume goes on from: the two newest

This file, from top to bottom: `main`, `train`, `evaluate`; the model, the data, the flags. Below
them is machinery that you may leave unread. It is word for word the same in both scripts: what
stands behind `run` (its progress, clock, checkpoints and record), and how processes are launched.
"""

import argparse
import collections
import contextlib
import fcntl
import inspect
import json
import math
import os
import re
import shutil
import signal
import string
import sys
import time
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import psutil
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, PartialState, utils
from datasets.fingerprint import Hasher
from torch.distributed import distributed_c10d
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm
from transformers import BertForQuestionAnswering


def main(args):
    """One run, from its flags to its record."""
    quiet_libraries()
    accelerator, strategy = make_accelerator(args)
    config, tokenizer, train_set, eval_set = in_turn(load_inputs, args)
    if args.prepare_data_only:
        load_model(args, config)  # It has to load, too.
        say(
            f"the model, {len(train_set.questions)} training questions and "
            f"{len(eval_set.questions)} validation questions are ready"
        )
        return

    run = Run(accelerator, strategy, args, describe_workload(args, config, train_set, eval_set))
    run.clock.note_memory_without_model()
    model = load_model(args, config)
    parameters = sum(weight.numel() for weight in model.parameters())
    recomputes = args.activation_checkpointing
    if not run.open(parameters=parameters, activation_checkpointing=recomputes):
        return

    train_loader, eval_loader = make_loaders(train_set, eval_set, run)
    if strategy == "dp":  # Accelerate has no DataParallel: one process, a thread for each GPU.
        model = torch.nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, run.total_steps)
    model, optimizer, train_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, schedule
    )
    # Prepared alone, as DeepSpeed takes the smaller batch size of two loaders for that of training.
    eval_loader = accelerator.prepare(eval_loader)
    utils.set_seed(args.seed, device_specific=True)  # other dropout masks on each rank

    run.start(optimizer, schedule)
    with tracing(run):
        train(accelerator, model, optimizer, schedule, train_loader, eval_loader, tokenizer, run)
    if not run.stopped:
        save_model(accelerator, model, tokenizer, run.folder)
    run.record |= describe_tokens(train_set, run)
    run.finish("preempted" if run.stopped else "completed")


def train(accelerator, model, optimizer, schedule, train_loader, eval_loader, tokenizer, run):
    """Train and evaluate, epoch by epoch, to the last step or until all ranks agree to stop."""
    max_norm = run.args.max_grad_norm
    grad_norm = None
    for epoch in run.epochs_left():
        model.train()
        for inputs, spans in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                logits = span_logits(model, inputs)
                loss = span_losses(logits, spans["start"], spans["end"]).mean()
                accelerator.backward(loss)  # gradients: means over micro-batches and ranks
                if max_norm and accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.after_batch(loss, grad_norm)  # counts; now and then it logs, saves, or stops
        with run.clock.phase("eval"):
            metrics = evaluate(accelerator, model, eval_loader, run)
        if run.stopped:
            return
        text = "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}"
        best_so_far = run.add_evaluation(metrics, -metrics["eval_loss"], text.format(**metrics))
        if best_so_far:
            with replacing(run.folder / "best") as folder:
                save_model(accelerator, model, tokenizer, folder)


def evaluate(accelerator, model, loader, run):
    """Exact match, F1 and loss on the validation questions; None if the run is stopped. Rank 0
    writes predictions.json. A collective.
    """
    features = loader.dataset
    version_2 = run.args.version_2_with_negative
    rows = find_answers(accelerator, model, loader, run)
    metrics = None
    if accelerator.is_main_process and not run.stopped:
        answers = choose_answers(rows, features, version_2)
        metrics = score_answers(answers, features.questions, version_2)
        metrics["eval_loss"] = rows[:, 0].double().mean().item()
        text = json.dumps(answers, indent=1, ensure_ascii=False)
        write_whole(run.folder / "predictions.json", text + "\n")
    return utils.broadcast_object_list([metrics])[0]


@torch.no_grad()
def find_answers(accelerator, model, loader, run):
    """For each feature its loss, the score of "no answer", and its best span's score, start and
    end: [features, 5] on the CPU of all ranks; None if the run is stopped. A collective.
    """
    model.eval()
    found = []
    for inputs, spans in run.until_stopped(loader):
        logits = span_logits(model, inputs)
        losses = span_losses(logits, spans["start"], spans["end"])
        longest = min(run.args.max_answer_length, logits.shape[1])
        best = best_spans(logits, spans["first"], spans["last"], longest)
        rows = torch.stack([spans["ids"], losses, logits[:, 0].sum(1), *best], 1)
        # It drops the rows of features that stand in the last batch to fill it up.
        found.append(accelerator.gather_for_metrics(rows))
    if run.stopped:
        return None
    rows = torch.cat(found).cpu()
    return rows[rows[:, 0].argsort(), 1:]


def save_model(accelerator, model, tokenizer, folder):
    """Save the weights, gathered from all ranks, for `from_pretrained`. A collective."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        # accelerate 1.15 leaves torch.compile's prefix in the names.
        weights = {
            name.replace("_orig_mod.", ""): weight.float().cpu().contiguous()
            for name, weight in weights.items()
        }
        whole = accelerator.unwrap_model(model, keep_torch_compile=False)
        whole.save_pretrained(folder, state_dict=weights)
        whole.config.architectures = ["BertForQuestionAnswering"]  # FSDP2 renames the class.
        whole.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


# -------- answers and their scores


def best_spans(logits, first, last, max_answer_length):
    """The best-scoring span of each feature that is an answer: it starts at or before its end, has
    at most `max_answer_length` tokens, and lies between the tokens `first` and `last` [batch].

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


def choose_answers(rows, features, version_2):
    """{question id: text} of the rows that `find_answers` returns: of all windows of a question,
    the best span.

    With `version_2` the answer is "" where "no answer", at [CLS], scores higher than the best span;
    as in the official recipe, we take the window in which "no answer" scores lowest.
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


def score_answers(answers, questions, version_2):
    """Exact match and F1 in percent of {question id: text}, by the rules of SQuAD's official
    scripts (Rajpurkar et al., 2016 and 2018).
    """
    exact = []
    f1 = []
    for question in questions:
        right = [answer_words(text) for text in question["answers"]["text"]]
        if version_2:  # Texts of nothing but articles and punctuation are no answers.
            right = [words for words in right if words] or [[]]
        words = answer_words(answers[question["id"]])
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


# -------- model


def load_model(args, config):
    """BERT with a new head, or the one it has, in float32: precision is the launcher's."""
    name = args.model_name_or_path
    config.hidden_dropout_prob = args.dropout
    config.attention_probs_dropout_prob = args.dropout
    config.num_labels = 2  # an answer's start and its end
    config._attn_implementation = "sdpa"  # It knows bool masks.
    utils.set_seed(args.seed)  # the same new weights on all ranks
    # transformers 5.23 would draw a new head on the GPU under ZeRO-3, so with other numbers.
    transformers.integrations.unset_hf_deepspeed_config()

    missing = []
    try:
        if args.from_scratch:
            model = BertForQuestionAnswering(config)
        else:
            model, loading = BertForQuestionAnswering.from_pretrained(
                name, config=config, attn_implementation="sdpa", output_loading_info=True
            )
            missing = [key for key in loading["missing_keys"] if not key.startswith("qa_outputs.")]
    except Exception as problem:  # of the network, the Hub, or a file
        abort(f"cannot load the model {name}: {problem}; --from_scratch needs no weights")
    if missing:
        abort(f"the weights of {name} lack {len(missing)} parameters, such as {missing[0]}")
    model._no_split_modules = ["BertLayer"]  # FSDP's units; transformers' own list makes it fail
    if args.activation_checkpointing:  # with the same dropout masks: it restores the RNG's state
        old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.23
        enable = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return model.float()


def span_logits(model, inputs):
    """The logits of an answer's start and end at each token, float32 [batch, width, 2]; lowest on
    padding, so that its width changes nothing.
    """
    logits = torch.stack(model(**inputs, return_dict=False), 2).float()
    hidden = ~inputs["attention_mask"][:, 0, 0, :, None]
    return logits.masked_fill(hidden, torch.finfo(logits.dtype).min)


def span_losses(logits, starts, ends):
    """The mean of the start's and the end's cross-entropy, [batch]."""
    start_logits, end_logits = logits.unbind(-1)
    start_losses = F.cross_entropy(start_logits, starts, reduction="none")
    end_losses = F.cross_entropy(end_logits, ends, reduction="none")
    return (start_losses + end_losses) / 2


# -------- data: questions, and the features that BERT reads


def read_questions(args, split):
    """The first --max_..._samples questions of "train" or "validation": dicts of id, question,
    context and answers {text: [...], answer_start: [...]}, as on the Hub.
    """
    train = split == "train"
    path = args.train_file if train else args.validation_file
    limit = args.max_train_samples if train else args.max_eval_samples
    name = path or hub_name(args)
    questions = {}
    for row in read_squad(path) if path else read_hub(name, split):
        if limit and len(questions) == limit:
            break
        problem = check_question(row, args.version_2_with_negative, questions)
        if problem:
            abort(f"{name}: question {row['id']} {problem}")
        questions[row["id"]] = row
    if not questions:
        abort(f"{name} has no questions")
    return list(questions.values())


def check_question(row, version_2, others):
    """What is wrong with a question that a user can mend, or None."""
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
    """Yield the questions of a file in SQuAD's nested JSON, v1.1 or v2.0."""
    place = "its top"
    try:
        for article in json.loads(Path(path).read_text(encoding="utf-8-sig"))["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    place = f"question {qa.get('id')}"
                    yield squad_row(qa, paragraph["context"])
    except OSError as problem:
        abort(f"cannot read {path}: {problem.strerror}")
    except Exception as problem:  # anything but SQuAD's form
        abort(f"{path} is not in SQuAD's form, at {place}: {problem!r}")


def squad_row(qa, context):
    """A question in the form of the Hub, of one in SQuAD's JSON."""
    answers = [] if qa.get("is_impossible") else qa["answers"]
    row = {
        "id": str(qa["id"]),
        "question": qa["question"],
        "context": context,
        "answers": {
            "text": [answer["text"] for answer in answers],
            "answer_start": [int(answer["answer_start"]) for answer in answers],
        },
    }
    for text in (row["id"], row["question"], context, *row["answers"]["text"]):
        text.encode()  # An error tells of what is no text, or of half a character.
    return row


def hub_name(args):
    """The name on the Hub of the questions that are used without files."""
    return "rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad"


def read_hub(name, split):
    """The questions of SQuAD from the Hugging Face Hub, or from its cache."""
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as problem:  # of the network, the Hub, or the cache
        abort(f"cannot load {name}: {problem}; {OFFLINE}")


def tokenize(batch, owners, tokenizer, max_seq_length, doc_stride):
    """The features of a batch of questions, for `datasets.map`. A feature is a question with a
    window of its context, [CLS] question [SEP] window [SEP].

    Columns: input_ids; length, their number; begins and stops, the first and one-past-last
    character of each token; first, the window's first token; start and end, the answer's first and
    last token, or 0 and 0, [CLS], where the window has none; owner, the number of its question.
    """
    asked = [question.strip() for question in batch["question"]]
    for name, ids in zip(batch["id"], tokenizer(asked)["input_ids"], strict=True):
        room = max_seq_length - 1 - len(ids)  # 1 is the last [SEP].
        if room <= doc_stride:
            abort(
                f"question {name} leaves {max(room, 0)} of --max_seq_length {max_seq_length} "
                f"tokens for its context, which must be more than --doc_stride {doc_stride}"
            )
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
        if 1 not in encoding.sequence_ids:
            abort(f"question {batch['id'][row]} has a context without tokens")
        first = encoding.sequence_ids.index(1)
        offsets = np.array(encoding.offsets)
        start, end = find_span(offsets, first, batch["answers"][row])
        feature = {
            "input_ids": encoding.ids,
            "length": len(encoding.ids),
            "begins": offsets[:, 0],
            "stops": offsets[:, 1],
            "first": first,
            "start": start,
            "end": end,
            "owner": owners[row],
        }
        features.append(feature)
    return {name: [feature[name] for feature in features] for name in features[0]}


def find_span(offsets, first, answers):
    """The first and last token of the first answer, in a window whose context begins at token
    `first`; (0, 0) unless all of the answer is inside.
    """
    if not answers["text"]:
        return 0, 0
    begins = offsets[first:-1, 0]  # without the [SEP] at the end
    stops = offsets[first:-1, 1]
    text = answers["text"][0]
    # An answer starts and ends with a token, not with a space.
    start = answers["answer_start"][0] + len(text) - len(text.lstrip())
    stop = start + len(text.strip())
    if not begins[0] <= start <= stop <= stops[-1]:
        return 0, 0
    # The first token that ends after the answer begins, and the last that begins before it ends: a
    # character may be several tokens, or none.
    first_token = first + int(np.searchsorted(stops, start, "right"))
    last_token = first + int(np.searchsorted(begins, stop, "left")) - 1
    return first_token, last_token


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

    def width(self, lengths):
        """The width of batches whose features have `lengths` [..., batch]: dynamic padding."""
        widths = lengths.amax(-1)
        if torch.cuda.is_available():
            widths = (widths + 7) // 8 * 8  # Tensor cores want multiples of 8.
        return widths.clamp(max=self.max_width)

    def __getitems__(self, ids):
        """A whole batch: what the model reads, [batch, width] each; what belongs to its answers."""
        input_ids = pad_sequence(list(self.tokens[ids]["input_ids"]), batch_first=True)
        ids = torch.tensor(ids)
        input_ids = F.pad(input_ids, (0, self.width(self.lengths[ids]) - input_ids.shape[1]))
        positions = torch.arange(input_ids.shape[1])
        mask = positions < self.lengths[ids, None]
        in_context = positions >= self.columns["first"][ids, None]
        inputs = {
            "input_ids": input_ids,
            # transformers takes a mask [batch, heads, query, key] as it is.
            "attention_mask": mask[:, None, None, :],
            "token_type_ids": (mask & in_context).int(),
        }
        spans = {name: self.columns[name][ids] for name in ("start", "end", "first")}
        return inputs, spans | {"ids": ids, "last": self.lengths[ids] - 2}


def load_features(questions, tokenizer, args):
    """The `Features` of questions; `datasets` caches them, under a key of their content."""
    table = datasets.Dataset.from_list(questions)
    sizes = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    tokenizer.backend_tokenizer.no_truncation()  # Left by the call before, it would be in the key.
    code = inspect.getsource(tokenize) + inspect.getsource(find_span)
    words = tokenizer.backend_tokenizer.to_str()
    key = Hasher.hash([json.dumps(questions), sizes, words, code])
    file = Path(datasets.config.HF_DATASETS_CACHE) / "squad_features" / f"{key}.arrow"

    for again in (False, True):  # A damaged file is made anew.
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            found = table.map(
                tokenize,
                batched=True,
                with_indices=True,
                remove_columns=table.column_names,
                fn_kwargs={"tokenizer": tokenizer} | sizes,
                new_fingerprint=key,
                cache_file_name=str(file),
                load_from_cache_file=not again,
                desc="tokenising",
            )
            if found[-1]["owner"] == len(questions) - 1:
                break
        except (OSError, ValueError) as problem:
            if again:
                abort(f"cannot write to {file.parent}: {problem}; set HF_HOME")
    return Features(questions, found, key, args.max_seq_length)


def load_inputs(args):
    """The model's config, tokenizer, and the `Features` of both splits."""
    name = args.model_name_or_path
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as problem:  # of the network, the Hub, or a file
        abort(f"cannot load {name}: {problem}; {OFFLINE}")
    if not args.from_scratch:  # Rank 0 fetches the weights before the others look for them.
        transformers.utils.cached_file(
            name, "model.safetensors", _raise_exceptions_for_missing_entries=False
        )
    fits = 5 < len(tokenizer) <= config.vocab_size  # without vocab.txt it has 5
    if config.model_type != "bert" or not (tokenizer.is_fast and fits):
        abort(
            f"{name} is a {config.model_type} model with a {type(tokenizer).__name__} of "
            f"{len(tokenizer)} tokens: BERT, and a fast tokenizer that fits, is wanted"
        )
    if args.max_seq_length > config.max_position_embeddings:
        abort(
            f"--max_seq_length {args.max_seq_length} is more than the "
            f"{config.max_position_embeddings} positions of {name}"
        )
    tokenizer.truncation_side = "right"
    train_set = load_features(read_questions(args, "train"), tokenizer, args)
    eval_set = load_features(read_questions(args, "validation"), tokenizer, args)
    return config, tokenizer, train_set, eval_set


class EpochSampler(Sampler):
    """Training features, each global batch of similar lengths, as padding is wasted work.

    The features are shuffled; pools of 50 global batches (fewer if there would not be 4 pools) are
    sorted by length and cut into batches; the batches are shuffled. The longest feature comes
    first: if memory is short, that shows at once. The order depends on seed and epoch alone, not on
    the number of processes. What does not fill a global batch is dropped.
    """

    def __init__(self, lengths, global_batch_size, seed):
        self.lengths = lengths
        self.size = global_batch_size
        self.seed = seed
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


def make_loaders(train_set, eval_set, run):
    """The DataLoaders of both splits. A batch is that of all ranks, and each takes its part."""
    # Without a generator of its own, a loader draws from that of dropout: a resumed run would have
    # other masks. The Dataset makes batches whole, so there is nothing to collate.
    options = {
        "collate_fn": tuple,
        "generator": torch.Generator(),
        "pin_memory": torch.cuda.is_available(),
    }
    sampler = EpochSampler(train_set.lengths, run.global_batch_size, run.args.seed)
    by_length = eval_set.lengths.argsort(descending=True, stable=True).tolist()
    return (
        DataLoader(train_set, run.batch_size, sampler=sampler, **options),
        DataLoader(eval_set, run.eval_batch_size, sampler=by_length, **options),
    )


def describe_workload(args, config, train_set, eval_set):
    """The work of a run, which a resumed run must have again."""
    scratch = ", from scratch" if args.from_scratch else ""
    return {
        "model": Path(args.model_name_or_path).name + scratch,
        "dataset": Path(args.train_file).name if args.train_file else hub_name(args),
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


def describe_tokens(features, run):
    """The tokens that the run trained on. Padding is no token."""
    sampler = EpochSampler(features.lengths, run.global_batch_size, run.args.seed)
    lengths = []
    for epoch in range(run.epochs):
        sampler.set_epoch(epoch)
        lengths.append(features.lengths[sampler.order])
    done = torch.cat(lengths)[: run.progress.step]  # [steps, global batch]
    tokens = done.sum().item()
    # Each rank pads its part of a micro-batch.
    padded = done.view(-1, run.batch_size // run.accelerator.num_processes)
    padded_tokens = (features.width(padded).sum() * padded.shape[1]).item()
    steady_tokens = done[run.warm_step :].sum().item()
    steady_seconds = run.clock.seconds["train"] - run.warm_seconds
    return {
        "tokens": tokens,
        "padding_share": round(1 - tokens / padded_tokens, 4),
        "tokens_per_second": round(steady_tokens / steady_seconds, 1) if steady_tokens else None,
    }


# -------- flags

OFFLINE = "without a network, run --prepare_data_only where there is one, or give files"


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--model_name_or_path",
        default="google-bert/bert-base-uncased",
        help="BERT's name on the Hub, or a folder with config, weights and tokenizer",
    )
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
    add_shared_flags(parser)
    parser.set_defaults(
        num_epochs=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=32,
        learning_rate=3e-5,
    )
    args = parser.parse_args()
    may_be_0 = ["seed", "dropout", "doc_stride", "max_train_samples", "max_eval_samples"]
    check_flags(args, may_be_0)
    if bool(args.train_file) != bool(args.validation_file):
        abort("--train_file and --validation_file go together: give both, or none")
    if Path(args.output_dir).resolve() == Path(args.model_name_or_path).resolve():
        abort("--output_dir is the model's own folder, and its weights would be overwritten")
    return args


def quiet_libraries():
    """No warning of the new head on each rank, and no progress bars outside a terminal."""
    for library in (transformers, huggingface_hub):
        library.logging.set_verbosity_error()
    if not sys.stdout.isatty():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()


# -------- machinery: the same in both scripts, so you may leave it unread

SYNC_STEPS = 50  # After so many steps losses leave the device, and ranks agree whether to stop,
SYNC_SECONDS = 10  # or after about so many seconds, if that is sooner.
WARMUP_STEPS = 10  # These are not in samples_per_second: memory and links are set up in them.
CHECKPOINT = "step_" + "[0-9]" * 8  # A folder with another name is not ours.
CHECKPOINT_FORMAT = 3  # of checkpoint.json; another one is refused
VERSION = "0.4.0"  # of the project; CHANGELOG.md says what changed
HSDP_SIZES = ("dp_replicate_size", "dp_shard_size")  # as accelerate's YAML names them


class FlagParser(argparse.ArgumentParser):
    """A parser that ends with one line where a flag is wrong."""

    def error(self, message):
        abort(f"{message} (--help lists the flags)")


def add_shared_flags(parser: argparse.ArgumentParser):
    """The flags of both scripts. Each script sets the defaults that are its own."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("--num_epochs", type=int, help="passes over the training data")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, help="samples in a micro-batch")
    add("--per_device_eval_batch_size", type=int, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--learning_rate", type=float, help="the highest of the schedule")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add("--output_dir", type=os.path.expanduser, help="without it, a new folder in runs/")
    add("--checkpointing_steps", type=int, help="save every so many steps, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    add("--collective_timeout", type=int, default=1800, help="seconds that a rank waits for others")


def check_flags(args, may_be_0):
    """Refuse numbers that are negative, NaN, or 0 where that means nothing; name OUTPUT_DIR."""
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0 and not (value == 0 and name in may_be_0):
            abort(f"--{name} must be greater than 0, got {value}")
    if args.dropout >= 1:
        abort(f"--dropout must be less than 1, got {args.dropout}")
    if args.resume and not args.output_dir:
        abort("--resume goes on with the run in a folder: name it by --output_dir")
    name = Path(__file__).stem.removeprefix("train_")
    args.output_dir = args.output_dir or time.strftime(f"runs/{name}-%Y%m%d-%H%M%S")


# -------- the run


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds beside weights, optimizer and random states."""

    step: int = 0  # optimizer steps done
    loss_history: list = field(default_factory=list)  # [step, mean loss over the global batch]
    evaluations: list = field(default_factory=list)  # the metrics of each epoch
    best_score: float | None = None  # of the epoch whose model is in best/


class Run:
    """A run as the loop sees it: it counts steps, and logs, saves and stops when it is time.

    `main` calls open, start and finish; `train` calls epochs_left, batches, after_batch and
    add_evaluation; `evaluate` calls until_stopped. Each rank has a Run of its own. In "a
    collective" the ranks wait for each other, so all of them have to call it.
    """

    def __init__(self, accelerator: Accelerator, strategy: str, args, workload: dict):
        self.accelerator = accelerator
        self.args = args
        self.strategy = strategy
        self.workload = workload
        self.folder = Path(args.output_dir)
        self.clock = Clock()
        self.progress = Progress()

        gpus = max(1, torch.cuda.device_count()) if strategy == "dp" else 1  # of this process
        self.devices = accelerator.num_processes * gpus
        self.batch_size = args.per_device_train_batch_size * self.devices  # of all ranks
        self.global_batch_size = self.batch_size * args.gradient_accumulation_steps
        self.steps_per_epoch = workload["samples"] // self.global_batch_size
        if not self.steps_per_epoch:
            abort(
                f"the global batch of {self.global_batch_size} is more than all samples: "
                "lower --per_device_train_batch_size"
            )
        # A larger batch in the evaluation would be filled up with copies.
        share = math.ceil(workload["eval_samples"] / self.devices)
        self.eval_batch_size = min(args.per_device_eval_batch_size, share) * self.devices
        self.total_steps = args.max_train_steps or args.num_epochs * self.steps_per_epoch
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)

        self.record: dict = {}  # what run.json says
        self.settings: dict = {}  # what a resumed run must have again
        self.lock = None  # an open file of rank 0
        self.losses: list = []  # of the micro-batches since the last sync, on the device
        self.stop_signal = StopSignal()
        self.stopped = False  # All ranks agreed to stop.
        self.resumed_from = None  # the path of a checkpoint
        self.next_sync = 0  # the step after which the ranks wait for each other
        self.warm_step = 0  # the last step of the warm-up
        self.warm_seconds = 0.0  # of training, when the warm-up was over
        self.learning_rate = 0.0  # of the newest step
        self.profiler = None

    def open(self, **facts) -> bool:
        """Open the output folder and write the first record, with these facts in it. False if the
        run is completed already. A collective.
        """
        self.record = describe_run(self) | facts
        self.settings = settings_of(self.record)
        completed, self.resumed_from, progress = on_rank_0(lambda: open_folder(self))
        if completed:
            say(f"{self.folder} is a completed run already: see its run.json")
            return False
        self.progress = Progress(**progress)
        first = self.progress.step
        self.next_sync = first + 1
        self.warm_step = first + min(WARMUP_STEPS, (self.total_steps - first) // 2)
        write_record(self, "running")  # It stays so if the run is killed.
        return True

    def start(self, optimizer, schedule):
        """Resume if need be, heed signals, and say what runs. A collective."""
        self.optimizer = optimizer
        self.schedule = schedule
        # deepspeed 0.19.8 leaves memory uninitialized where ZeRO-3's shards are filled up. Remove
        # this when it clears that.
        for shard in getattr(optimizer.optimizer, "fp32_partitioned_groups_flat", ()):
            shard.data.nan_to_num_()
        if self.resumed_from:
            say(f"resuming from {self.resumed_from}")
            self.accelerator.load_state(self.resumed_from)
            self.accelerator.step = 0  # It counts micro-batches; a step may have more or fewer now.
        if self.args.with_tracking:
            options = {"tensorboard": {"purge_step": self.progress.step + 1}}
            self.accelerator.init_trackers("tensorboard", vars(self.args), options)
        self.stop_signal.heed()
        say(
            f"{self.strategy} on {self.devices} x {self.record['device_name']}: "
            f"{self.record['parameters']:,} parameters, {self.total_steps:,} steps of "
            f"{self.global_batch_size} samples; results go to {self.folder}"
        )
        self.display = Display(self.accelerator, self.total_steps, self.progress.step)
        self.clock.seconds["startup"] = age()

    def epochs_left(self):
        """The epochs, counted from 0, that have no evaluation yet."""
        return range(len(self.progress.evaluations), self.epochs)

    def batches(self, loader, epoch: int):
        """Yield an epoch's batches, without those that a resumed run has trained on. They end with
        the epoch, with the last step, or when all ranks have agreed to stop.
        """
        loader.set_epoch(epoch)  # accelerate 1.15 ignores this on what skip_first_batches returns.
        done = self.progress.step - epoch * self.steps_per_epoch
        if done:
            done *= self.args.gradient_accumulation_steps
            loader = self.accelerator.skip_first_batches(loader, done)
            loader._non_blocking = True  # accelerate 1.15 forgets it.
        batches = iter(loader)
        self.clock.start_lap()
        while not self.stopped and self.progress.step < self.total_steps:
            with self.clock.phase("loading"):
                batch = next(batches, None)
            if batch is None:
                return
            # The rate of the step that this batch belongs to.
            self.learning_rate = float(self.schedule.get_last_lr()[0])
            yield batch

    def after_batch(self, loss: torch.Tensor, grad_norm=None):
        """Count a batch, and maybe a step; if it is time, meet the other ranks in `sync`."""
        self.losses.append(loss.detach())  # To read it now would be to wait for the device.
        if not self.accelerator.sync_gradients:
            return  # The step has more micro-batches.
        self.progress.step += 1
        if self.profiler:
            self.profiler.step()
        step = self.progress.step
        every = self.args.checkpointing_steps or self.total_steps
        saving = step % every == 0 or step % self.steps_per_epoch == 0 or step == self.total_steps
        if saving or step == self.next_sync:
            self.sync(saving, grad_norm)

    def sync(self, saving: bool, grad_norm):
        """Read and log the losses, agree whether to stop, and save if it is time. A collective."""
        progress = self.progress
        losses, seconds = read_losses(self)
        self.losses = []
        self.clock.seconds["train"] += seconds
        if progress.step == self.warm_step:
            self.warm_seconds = self.clock.seconds["train"]
        for loss in losses:
            step = len(progress.loss_history) + 1
            if not math.isfinite(loss):
                self.fail(f"the training loss of step {step} is {loss}")
            progress.loss_history.append([step, loss])
        steps_per_second = len(losses) / seconds
        values = {
            "loss": losses[-1],
            "learning_rate": self.learning_rate,
            "samples_per_second": steps_per_second * self.global_batch_size,
        }
        self.display.show(progress.step, values, grad_norm)
        # Sync again when the warm-up ends, then every SYNC_STEPS, or after about SYNC_SECONDS.
        warming_up = self.warm_step - progress.step
        steps = warming_up if warming_up > 0 else SYNC_STEPS
        steps = min(steps, int(steps_per_second * SYNC_SECONDS))
        self.next_sync = progress.step + max(1, steps)
        self.stopped = self.stop_signal.agreed(self.accelerator)
        if saving or self.stopped:
            if not all_finite(self.accelerator, self.optimizer):
                self.fail(f"weights or Adam's states are not finite after step {progress.step}")
            save_checkpoint(self)
        self.clock.start_lap()

    def until_stopped(self, loader):
        """Yield the batches of an evaluation, until all ranks agree to stop. A collective."""
        for batch in loader:
            self.stopped |= self.stop_signal.agreed(self.accelerator)
            if self.stopped:
                return
            yield batch

    def add_evaluation(self, metrics: dict, score: float, text: str) -> bool:
        """Note an epoch's metrics. Return whether it scored higher than all before it."""
        progress = self.progress
        if not math.isfinite(score):
            self.fail(f"the evaluation after step {progress.step} gave {metrics}")
        progress.evaluations.append(metrics)
        self.accelerator.log(metrics, progress.step)
        say(
            f"epoch {len(progress.evaluations)}/{self.epochs}: {text}, training loss "
            f"{progress.loss_history[-1][1]:.4f}, {self.clock.seconds['train']:.1f} s of training"
        )
        best = progress.best_score is None or score > progress.best_score
        if best:
            progress.best_score = score
        return best

    def fail(self, reason: str):
        """End a run that broke down. A collective."""
        self.finish("failed")
        abort(f"{reason}: not saved; --resume, or start afresh with a lower --learning_rate")

    def finish(self, status: str):
        """Write the record of a run that is completed, preempted or failed. A collective."""
        write_record(self, status)
        self.accelerator.get_tracker("tensorboard").finish()
        self.display.bar.close()
        goes_on = "" if status == "completed" else "; --resume goes on"
        say(
            f"{status} at step {self.progress.step:,}: {self.clock.seconds['train']:.1f} s of "
            f"training, {age():.1f} s in all; record: {self.folder}/run.json{goes_on}"
        )


class StopSignal:
    """Whether this rank was told to stop: by Slurm, by Ctrl-C, or by the death of its launcher."""

    def __init__(self):
        self.received = False
        self.parent = os.getppid()

    def heed(self):
        """From now on, such a signal does not end the process."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number, frame):
        """Note the signal, and no more: it comes in the middle of anything."""
        self.received = True

    def agreed(self, accelerator: Accelerator) -> bool:
        """Whether any rank was told to stop. A collective."""
        # Without a launcher, the parent is a shell, which may end.
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ
        if self.received or launched and os.getppid() != self.parent:
            accelerator.set_trigger()
        return accelerator.check_trigger()


class Display:
    """Shows how a run goes: on a bar in a terminal, by a line now and then elsewhere, as in Slurm's
    logs, and in TensorBoard.
    """

    def __init__(self, accelerator: Accelerator, total_steps: int, step: int):
        self.accelerator = accelerator
        self.line_at = time.monotonic()
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            leave=False,
            file=sys.stdout,
            disable=not accelerator.is_main_process or None,  # None: only in a terminal
        )

    def show(self, step: int, values: dict, grad_norm):
        """Show the last loss and the pace. A collective for FSDP2's norm of the gradients."""
        if hasattr(grad_norm, "full_tensor"):  # It is a DTensor, of which each rank has a part.
            grad_norm = grad_norm.full_tensor()
        if grad_norm is not None:
            values["grad_norm"] = float(grad_norm)
        self.accelerator.log(values, step)
        text = f"loss {values['loss']:.4f}  {values['samples_per_second']:,.0f} samples/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and time.monotonic() - self.line_at > SYNC_SECONDS:
            say(f"step {step}/{self.bar.total}  {text}")
            self.line_at = time.monotonic()


def read_losses(run: Run):
    """The loss of each step since the last sync, and the seconds that these steps took. Both are
    means over all ranks, so the same on each. A collective.
    """
    means = torch.stack(run.losses).view(-1, run.args.gradient_accumulation_steps).mean(1)
    # `tolist` waits for the device, so the lap ends after it.
    own = torch.tensor([*means.tolist(), run.clock.end_lap()], device=means.device)
    *losses, seconds = run.accelerator.reduce(own, "mean").tolist()
    return losses, seconds


@contextlib.contextmanager
def tracing(run):
    """The context to train in. With --profile, it traces five steps after the warm-up."""
    if not run.args.profile:
        yield
        return
    options = utils.ProfileKwargs(
        activities=sorted({"cpu", run.accelerator.device.type}),
        schedule_option={"wait": 0, "warmup": WARMUP_STEPS + 2, "active": 5, "repeat": 1},
        output_trace_dir=str(run.folder / "traces"),
    )
    if run.total_steps - run.progress.step < WARMUP_STEPS + 7:
        say("warning: --profile traces steps 13 to 17 from the start, and the run has fewer")
    with run.accelerator.profile(options) as run.profiler:
        yield


# -------- time and memory


class Clock:
    """The seconds of a run's phases, and what this rank needs of CPU time and memory in training.

    Training is measured in laps, from sync to sync, without evaluations and saving.
    """

    def __init__(self):
        self.seconds = dict.fromkeys(("startup", "train", "loading", "eval"), 0.0)
        self.cpu_seconds = 0.0
        self.memory_before = 0.0  # in MB, without the model
        self.peak_memory = 0.0

    def note_memory_without_model(self):
        """Call it before the model is made."""
        import torch._dynamo  # noqa: F401  The first optimizer does so, which is not training.

        reset_peak_memory()
        self.memory_before = peak_memory()

    @contextlib.contextmanager
    def phase(self, name: str):
        """Add the seconds of a `with` block to a phase."""
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def start_lap(self):
        """Measure training from here on."""
        reset_peak_memory()
        self.lap_began = time.perf_counter()
        self.cpu_began = time.process_time()

    def end_lap(self) -> float:
        """The seconds of the lap; note its CPU time, and its peak of memory."""
        self.cpu_seconds += time.process_time() - self.cpu_began
        self.peak_memory = max(self.peak_memory, peak_memory())
        return time.perf_counter() - self.lap_began


def age():
    """The seconds since this process began, imports included."""
    began = psutil.Process().create_time() - psutil.boot_time()  # in seconds after the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def peak_memory():
    """The most MB that this process held on its (first) GPU, or CPU, since `reset_peak_memory`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    kilobytes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", status)  # Not all kernels know HWM.
    return int(kilobytes[0]) * 1024 / 1e6


def reset_peak_memory():
    """Forget the peak. Where the kernel forbids that, it stays that of the whole run."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # see man 5 proc


# -------- checkpoints


def open_folder(run: Run):
    """Whether the run in the folder is completed; the path of the checkpoint to go on from, or
    None; and its progress. For rank 0.
    """
    checkpoints = run.folder / "checkpoints"
    # One that is being written is named .partial, and one that was passed over .damaged.
    saved = sorted(checkpoints.glob(CHECKPOINT))
    record = read_record(run.folder)
    if (saved or record is not None) and not run.args.resume:
        abort(f"{run.folder} holds another run: add --resume, or change --output_dir")
    checkpoints.mkdir(parents=True, exist_ok=True)
    run.lock = lock(run.folder)
    if record and record["status"] == "completed":
        refuse_other_settings(settings_of(record), run.settings)
        return True, None, {}
    path, progress = newest_whole(saved, run.settings)
    if saved and not path:
        abort(f"no checkpoint in {run.folder} is whole: start afresh in another --output_dir")
    for partial in checkpoints.glob(CHECKPOINT + ".partial"):
        shutil.rmtree(partial)  # A killed run left it.
    return False, path, progress


def lock(folder: Path):
    """Have the folder alone, as long as this process lives and keeps what is returned."""
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # also over NFS
    except BlockingIOError:
        abort(f"another run is writing into {folder}: wait for it, or choose another --output_dir")
    except OSError as problem:
        say(f"warning: {folder} cannot be locked ({problem}): start no second run in it")
    return file


def refuse_other_settings(old, new):
    """Refuse to go on with a run that something else was asked for."""
    changes = [f"{key} {old.get(key)} -> {new[key]}" for key in new if old.get(key) != new[key]]
    if changes:
        abort(f"cannot resume a run with other settings: {', '.join(changes)}")


def save_checkpoint(run: Run):
    """Save what --resume needs; it gets its name when all of it is on disk. A collective."""
    rank = run.accelerator.process_index
    final = run.folder / "checkpoints" / f"step_{run.progress.step:08d}"
    partial = final.with_suffix(".partial")
    run.accelerator.save_state(partial)
    run.accelerator.wait_for_everyone()  # Several ranks may write one file, as fp16's scaler.pt.
    sums = [[str(path.relative_to(partial)), checksum(path)] for path in files_of(rank, partial)]
    sums = utils.gather_object(sums)
    if run.accelerator.is_main_process:
        contents = {
            "format": CHECKPOINT_FORMAT,
            "version": VERSION,
            "settings": run.settings,
            "progress": vars(run.progress),
            "files": dict(sums),
        }
        text = json.dumps(contents)
        write_whole(partial / "checkpoint.json", f"{text}\n{zlib.crc32(text.encode())}")
        partial.rename(final)
        for old in sorted(final.parent.glob(CHECKPOINT))[:-2]:  # Two stay, as one may get damaged.
            # Renamed first: a kill in the middle leaves no half under a complete one's name.
            shutil.rmtree(old.rename(old.with_suffix(".partial")))
    run.accelerator.wait_for_everyone()


def files_of(rank: int, folder: Path):
    """The files that a rank wrote, by their names. A disk may show it late what others wrote."""
    for path in folder.rglob("*"):
        # __0_0.distcp, zero_pp_rank_0_mp_rank_00_optim_states.pt, random_states_0.pkl
        number = re.search(r"(?:^__|rank_|states_)(\d+)", path.name)
        writer = int(number[1]) if number else 0
        if path.is_file() and writer == rank:
            yield path


@contextlib.contextmanager
def replacing(folder: Path):
    """Yield a new folder, for rank 0 to write into, which takes the place of `folder` when it is
    complete. A kill between the two renames leaves the old one under another name.
    """
    new = folder.with_suffix(".new")
    old = folder.with_suffix(".old")
    main_process = PartialState().is_main_process
    if main_process:
        shutil.rmtree(new, ignore_errors=True)  # A killed run left it.
        new.mkdir()
    yield new
    if main_process:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def newest_whole(saved, settings):
    """The path and the progress of the newest checkpoint that is as it was written, or None and {}.
    Damaged ones that are newer are renamed.
    """
    damaged = []
    for path in reversed(saved):
        try:
            contents = read_checkpoint(path)
        except (OSError, ValueError) as damage:
            say(f"warning: skipping the damaged checkpoint {path}: {damage}")
            damaged.append(path)
            continue
        refuse_other_settings(contents["settings"], settings)
        for broken in damaged:
            aside = broken.with_suffix(".damaged")
            shutil.rmtree(aside, ignore_errors=True)  # one that was damaged before
            broken.rename(aside)
        return str(path), contents["progress"]
    return None, {}


def read_checkpoint(path: Path) -> dict:
    """What checkpoint.json says; OSError or ValueError if it or another file is damaged."""
    text, _, crc = (path / "checkpoint.json").read_bytes().rpartition(b"\n")
    if zlib.crc32(text) != int(crc):
        raise ValueError("its checkpoint.json has changed")
    contents = json.loads(text)
    if not isinstance(contents, dict) or contents.get("format") != CHECKPOINT_FORMAT:
        abort(f"{path} is an earlier version's: go on with that, or change --output_dir")
    for name, value in contents["files"].items():
        if checksum(path / name) != value:
            raise ValueError("its files have changed")
    return contents


def checksum(path: Path) -> int:
    """The CRC-32 of a file, which is then safe on disk."""
    value = 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        for piece in iter(lambda: file.read(2**20), b""):
            value = zlib.crc32(piece, value)
    return value


def all_finite(accelerator: Accelerator, optimizer) -> bool:
    """Whether weights and optimizer states have no infinity and no NaN, on any rank: the last loss
    is from before the last step. A collective, and the only wait for the device.
    """
    finite = []
    for weight, state in optimizer.state.items():
        for part in filter(torch.is_tensor, (weight, *state.values())):
            part = part.to_local() if hasattr(part, "to_local") else part  # FSDP2's are DTensors.
            finite.append(part.isfinite().all().to(accelerator.device))
    bad = torch.stack(finite).logical_not().sum()
    return accelerator.reduce(bad).item() == 0


# -------- record


def describe_run(run: Run) -> dict:
    """What the record says from the start: what was asked for, and where it runs."""
    args = run.args
    strategy = run.strategy
    state = run.accelerator.state
    if strategy.startswith("zero"):
        options = dict(state.deepspeed_plugin.deepspeed_config["zero_optimization"])
    else:
        options = {
            name.removeprefix("FSDP_").lower(): value
            for name, value in os.environ.items()
            if name.startswith("FSDP_")
        }
    if strategy == "hsdp":
        options |= sizes_of_hsdp()
    compute = {
        "precision": state.mixed_precision,
        "dynamo": state.dynamo_plugin.backend.value.lower(),
    }
    asked_for = {
        "epochs": None if args.max_train_steps else args.num_epochs,
        "steps": args.max_train_steps,
        "max_grad_norm": args.max_grad_norm,
        "seed": args.seed,
        "dropout": args.dropout,
        "learning_rate": args.learning_rate,
    }
    return compute | {
        "version": VERSION,
        "script": Path(__file__).name,
        "strategy": strategy,
        "strategy_options": options,
        "workload": run.workload | compute | asked_for,
        "processes": run.accelerator.num_processes,
        "devices": run.devices,
        "device_name": device_name(),
        "threads": torch.get_num_threads(),
        "per_device_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "global_batch_size": run.global_batch_size,
        "profiled": args.profile,
        "argv": sys.argv,
        "versions": {
            name: getattr(sys.modules.get(name), "__version__", None)
            for name in ("torch", "accelerate", "deepspeed", "transformers")
        },
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def settings_of(record: dict) -> dict:
    """What a resumed run must have again. The number of devices is not in it, as long as the global
    batch is the same, and baseline may go on as ddp. But ZeRO's shards are for so many devices.
    """
    strategy = record["strategy"]
    if strategy == "baseline":
        strategy = "ddp"
    elif strategy.startswith("zero"):
        strategy = f"{strategy} on {record['devices']}"
    options = record["strategy_options"].items()
    return {
        "strategy": strategy,
        "strategy_options": {key: value for key, value in options if key not in HSDP_SIZES},
        "global_batch_size": record["global_batch_size"],
    } | record["workload"]


def read_record(folder: Path):
    """What run.json says; {} if it is damaged, as by a loss of power; None if there is none."""
    try:
        return json.loads((folder / "run.json").read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def write_record(run: Run, status: str):
    """Write run.json. A collective."""
    progress = run.progress
    clock = run.clock
    used = os.times()
    rank = {
        "rank": run.accelerator.process_index,
        "host": os.uname().nodename,
        "device_name": device_name(),
        # The launcher's, which its ranks share. A rank may be pinned to only some of them.
        "cores": len(os.sched_getaffinity(os.getppid())),
        "real": age(),
        "user": used.user,
        "sys": used.system,
        "train_cpu": clock.cpu_seconds / torch.get_num_threads(),
        "memory_before_mb": clock.memory_before,
        "peak_memory_mb": clock.peak_memory,
    }
    ranks = utils.gather_object([rank])
    samples = (progress.step - run.warm_step) * run.global_batch_size
    seconds = clock.seconds["train"] - run.warm_seconds
    run.record |= {
        "status": status,
        "resumed_from": run.resumed_from,
        "steps": progress.step,
        "loss_history": progress.loss_history,
        "metrics": progress.evaluations[-1] if progress.evaluations else None,
        "seconds": clock.seconds | {"total": age()},
        "samples_per_second": samples / seconds if samples > 0 else None,
        "ranks": ranks,
        "nodes": len({rank["host"] for rank in ranks}),
    }
    if run.accelerator.is_main_process:
        write_whole(run.folder / "run.json", json.dumps(run.record, indent=1) + "\n")


def device_name():
    """The name of the (first) GPU, or of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")  # Containers may hide it, and on ARM it names no model.
    model = re.search(r"model name\s*: (.*\S)", info.read_text() if info.is_file() else "")
    return f"CPU ({model[1] if model else os.uname().machine})"


def write_whole(path: Path, text: str):
    """Write a file, or leave the old one as it is if the process is killed meanwhile."""
    partial = path.with_name(f".{path.name}")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


# -------- launch


def make_accelerator(args):
    """The Accelerator for the launcher's YAML, and its strategy, such as "zero2". A collective."""
    strategy = read_strategy()
    refuse_wrong_launch(strategy)
    refuse_wrong_yaml(strategy, args)
    connect(strategy, timedelta(seconds=args.collective_timeout))
    # Its default names the second in which a rank began, so that of rank 0 is taken.
    args.output_dir = on_rank_0(lambda: args.output_dir)
    accelerator = Accelerator(
        # Gradients lie in the buckets of the all-reduce, and not beside them too.
        kwargs_handlers=[utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # A loader's batch is that of all ranks; rank r takes the r-th part.
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True, non_blocking=True),
        log_with="tensorboard" if args.with_tracking else None,
        project_dir=args.output_dir,
        rng_types=[],  # Each rank knows the order, so no random state has to be sent.
    )
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        abort("each process would train alone: use accelerate launch with a YAML")

    # After the Accelerator is made: what it took from the launcher, and has to be otherwise.
    state = accelerator.state
    # accelerate 1.15 says False, and torch gives up after 8 widths. Remove this when it says None.
    state.dynamo_plugin.dynamic = state.dynamo_plugin.dynamic or None
    if strategy == "fsdp" and not torch.cuda.device_count():
        state.fsdp_plugin.cpu_offload.pin_memory = False  # torch 2.15: it needs a GPU
    if strategy == "zero":
        config = state.deepspeed_plugin.deepspeed_config
        zero = config["zero_optimization"]
        strategy += str(zero["stage"])
        if strategy == "zero3":
            zero["stage3_gather_16bit_weights_on_model_save"] = True  # in any dtype
        own = {"optimizer", "scheduler", "communication_data_type", "data_types"} & set(config)
        steps = config["gradient_accumulation_steps"]
        if own or steps not in ("auto", args.gradient_accumulation_steps):
            abort(
                "leave optimizer, scheduler and data types out of DeepSpeed's JSON, and write "
                '"auto" for gradient_accumulation_steps'
            )
        # "auto" would clip by 1.0. Without --max_grad_norm, what a YAML says counts.
        clipping = config.get("gradient_clipping", "auto")
        if clipping != "auto" and not args.max_grad_norm:
            args.max_grad_norm = clipping or None
        config["gradient_clipping"] = args.max_grad_norm or 0.0
        if args.max_grad_norm:
            zero.pop("compute_grad_norm", None)
    if "ACCELERATE_USE_PARALLELISM_CONFIG" in os.environ:
        strategy = "hsdp"
    return accelerator, strategy


def read_strategy():
    """The strategy, as the launcher hands it over: in the environment. Any ZeRO is "zero", and HSDP
    is "fsdp".
    """
    env = os.environ
    marked = env.get("ACCELERATE_DYNAMO_MODE") == "data_parallel"  # by dp.yaml
    if marked:
        del env["ACCELERATE_DYNAMO_MODE"]  # It is no mode of torch.compile.
    if env.get("ACCELERATE_USE_FSDP") == "true":
        return "fsdp"
    if env.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "zero"
    if "LOCAL_RANK" in env:  # One of several processes cannot be dp.
        return "ddp"
    return "dp" if marked else "baseline"


def sizes_of_hsdp():
    """How many replicas of the model the ranks hold, and in how many shards each is divided."""
    return {name: int(os.environ[f"PARALLELISM_CONFIG_{name.upper()}"]) for name in HSDP_SIZES}


def refuse_wrong_launch(strategy):
    """Refuse processes that would silently be another run than the one asked for."""
    env = os.environ.get
    gpus = torch.cuda.device_count()
    ranks = int(env("LOCAL_WORLD_SIZE", 1))
    # The launcher sets MASTER_ADDR also where it starts one process in spite of --num_processes.
    alone = env("WORLD_SIZE", "1") == env("SLURM_STEP_NUM_TASKS", "1") == "1"
    if env("LOCAL_RANK") is None and (not alone or "MASTER_ADDR" in os.environ):
        abort(
            "WORLD_SIZE, MASTER_ADDR or Slurm tell of more processes, and each would train alone: "
            "use ddp.yaml, without --cpu; for one process, --num_processes 1, or unset these"
        )
    if gpus and not torch.cuda.is_available():
        abort("torch finds a GPU that it cannot use: is its driver too old? See nvidia-smi")
    if 0 < gpus < ranks:
        abort(f"{ranks} processes on {gpus} GPU(s): add --num_processes {gpus} (times the nodes)")


def refuse_wrong_yaml(strategy, args):
    """Refuse what a YAML or the launcher says and what would not work, or not be heeded."""
    env = os.environ.get
    steps = str(args.gradient_accumulation_steps)
    if env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps) != steps:
        abort("only the script's --gradient_accumulation_steps counts: leave out the launcher's")
    if strategy == "dp" and env("ACCELERATE_MIXED_PRECISION") == "bf16":
        abort("dp's threads would compute in fp16, not in bf16: use ddp.yaml")
    if strategy == "fsdp" and env("FSDP_VERSION") != "2":
        abort("FSDP's first version is not supported: write fsdp_version: 2 into the YAML")
    if env("FSDP_CPU_RAM_EFFICIENT_LOADING") == "true":
        abort("a new head would train on rank 0 only: fsdp_cpu_ram_efficient_loading: false")
    hsdp = env("ACCELERATE_USE_PARALLELISM_CONFIG")
    if hsdp and math.prod(sizes_of_hsdp().values()) != int(env("WORLD_SIZE", 1)):
        abort(
            "--parallelism_config_dp_replicate_size NODES times --parallelism_config_dp_shard_size "
            f"GPUS_OF_A_NODE must be the number of processes, {env('WORLD_SIZE')}"
        )
    if strategy == "zero" and re.search(r"[\[*?]", args.output_dir):
        abort("DeepSpeed resumes from no path with [, * or ? in it: change --output_dir")
    if (
        strategy == "zero"
        and b"--dynamo_backend" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    ):
        abort("accelerate 1.15 drops --dynamo_backend under DeepSpeed: use fsdp.yaml")


def connect(strategy, timeout: timedelta):
    """Connect the ranks. What has to be set before there is an Accelerator stands here."""
    # deepspeed 0.19.8 makes groups with torch's default timeout: until it takes the one given.
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    # The YAML names DeepSpeed's JSON as seen from the current folder, or else from this script's.
    config = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if config and not Path(config).exists():
        config = str(Path(__file__).parent / config)
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = config
    if torch.cuda.device_count():
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cuda.enable_cudnn_sdp(False)  # torch 2.15 plans it anew for each width.
        PartialState(timeout=timeout)
        return

    cores = sorted(os.sched_getaffinity(0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if 1 < ranks <= len(cores):  # A rank and its gloo threads on cores of their own: 10 % faster.
        share = len(cores) // ranks
        first = share * int(os.environ["LOCAL_RANK"])
        os.sched_setaffinity(0, cores[first : first + share])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or deepspeed 0.19.8 warns
    if strategy == "zero":
        from deepspeed.ops import __compatible_ops__ as deepspeed_ops

        deepspeed_ops["deepspeed_shm_comm"] = False  # or deepspeed 0.19.8 compiles an all-reduce
    sharded = strategy in ("fsdp", "zero")  # accelerate 1.15 shards on CPUs over gloo only
    state = PartialState(not sharded, backend="gloo" if sharded else None, timeout=timeout)
    if strategy == "fsdp":  # accelerate 1.15 has FSDP for several GPUs only
        state.distributed_type = utils.DistributedType.MULTI_GPU


# -------- one process among others


def say(line: str):
    """Print a line once, above the bar."""
    if PartialState().is_main_process:
        tqdm.write(line)
        sys.stdout.flush()


def on_rank_0(work):
    """What `work()` returns on rank 0; if that ends with an error, all ranks do. A collective."""
    result = problem = None
    if PartialState().is_main_process:
        try:
            result = work()
        except (SystemExit, OSError) as reason:
            problem = str(reason)
    result, problem = utils.broadcast_object_list([result, problem])
    if problem:
        abort(problem)
    return result


def in_turn(load, *args):
    """What `load(*args)` returns. Rank 0 goes first and fills caches, then one rank of each node,
    and then the others. A collective.
    """
    loaded = []  # Rank 0 keeps it, as it is too large to be sent.
    on_rank_0(lambda: loaded.append(load(*args)))
    with PartialState().local_main_process_first():
        return loaded[0] if loaded else load(*args)


def abort(message: str):
    """End the run with one line. It is rank 0's: the launcher ends the other ranks as they sleep. A
    rank that is alone with its problem prints its own line after 10 seconds.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)
    sys.exit("error: " + " ".join(str(message).split()).removeprefix("error: "))


def abort_if_known(problem: Exception, folder: str):
    """End the run with one line if memory or a disk is full, or a file is at fault."""
    text = repr(problem)
    if re.search("MemoryError|out of memory|allocate memory|bad_alloc|ALLOC_FAILED", text):
        abort(
            "out of memory: lower --per_device_train_batch_size, or shard the model by fsdp.yaml; "
            f"in the project, python fit.py {folder}/run.json tells what held how much"
        )
    if getattr(problem, "filename", None) or re.search(
        "No space left|Disk quota|Input/output error|PytorchStreamWriter|os error", text
    ):
        abort(f"{problem}: mend that, then --resume goes on from the newest checkpoint")


def cli():
    """The script as a command: a run of the flags that it was started with."""
    args = parse_args()
    try:
        main(args)
    except Exception as problem:
        abort_if_known(problem, args.output_dir)
        raise
    if not torch.cuda.is_available():
        # In an orderly end gloo may hang or abort: until pytorch#56297 and #190489 are closed.
        os._exit(0)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    cli()
