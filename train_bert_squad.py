"""Fine-tune BERT on SQuAD, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/fsdp.yaml train_bert_squad.py
    python train_bert_squad.py --prepare_data_only    # on a login node that has a network

BERT reads a question and a text (the context), and says at which token of the text the answer
starts and ends. A run leaves run.json (the record), predictions.json, model and
tokenizer for `from_pretrained`, and checkpoints/ (for --resume) in OUTPUT_DIR.

Read to the end of `main`, and `train` first. All below it is the same in both scripts.
"""

import argparse
import collections
import contextlib
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
from datetime import timedelta
from pathlib import Path

import datasets
import evaluate
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

BORN = (
    psutil.Process().create_time()
    - psutil.boot_time()  # in whole seconds
    + time.time()
    - time.clock_gettime(time.CLOCK_BOOTTIME)
)
CORES = sorted(os.sched_getaffinity(0))
SYNC_STEPS = 50  # so often losses leave the device, and ranks agree whether to stop,
SYNC_SECONDS = 10  # or about so often, as lines in a log
WARMUP_STEPS = 10  # not in samples_per_second: memory and links are set up
CHECKPOINT = "step_" + "[0-9]" * 8  # other names are not ours
OFFLINE = "without a network, run --prepare_data_only where there is one, or give files"


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    add = parser.add_argument
    add(
        "--model_name_or_path",
        default="google-bert/bert-base-uncased",
        help="BERT's name on the Hub, or a folder with config, weights and tokenizer",
    )
    add("--from_scratch", action="store_true", help="the model's config, but random weights")
    add("--train_file", help="SQuAD's nested JSON to train on (without: SQuAD from the Hub)")
    add("--validation_file", help="questions to evaluate on, likewise")
    add(
        "--version_2_with_negative",
        action="store_true",
        help="SQuAD v2.0: some questions have no answer",
    )
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
    add(
        "--output_dir",
        default=time.strftime("runs/bert_squad-%Y%m%d-%H%M%S"),
        help="where results go; all nodes must see it",
    )
    add("--checkpointing_steps", type=int, help="save every so many steps, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    add("--collective_timeout", type=int, default=1800, help="seconds that a rank waits for others")
    args = parser.parse_args()
    may_be_0 = "seed", "dropout", "doc_stride", "max_train_samples", "max_eval_samples"
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_0):
            fail(f"--{name} must be greater than 0, got {value}")
    if args.dropout >= 1:
        fail(f"--dropout must be less than 1, got {args.dropout}")
    if bool(args.train_file) != bool(args.validation_file):
        fail("--train_file and --validation_file go together: give both, or none")
    return args


# -------- questions, read


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
        if problem := check_question(row, args.version_2_with_negative, questions):
            fail(f"{name}: question {row['id']} {problem}")
        questions[row["id"]] = row
    return list(questions.values()) or fail(f"{name} has no questions")


def check_question(row, version_2, others):
    """What is wrong with a question that a user can mend, or None."""
    texts, starts = row["answers"].values()
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
                    answers = [] if qa.get("is_impossible") else qa["answers"]
                    yield {
                        "id": str(qa["id"]),
                        "question": qa["question"],
                        "context": paragraph["context"],
                        "answers": {
                            "text": [answer["text"] for answer in answers],
                            "answer_start": [int(a["answer_start"]) for a in answers],
                        },
                    }
    except OSError as problem:
        fail(f"cannot read {path}: {problem.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        fail(f"{path} is not in SQuAD's form, at {place}: {problem!r}")


def hub_name(args):
    """The name on the Hub of the questions that are used without files."""
    return "rajpurkar/squad_v2" if args.version_2_with_negative else "rajpurkar/squad"


def read_hub(name, split):
    """The questions of SQuAD from the Hugging Face Hub, or from its cache."""
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as problem:  # of the network, the Hub, or the cache
        return fail(f"cannot load {name}: {problem}; {OFFLINE}")


# -------- questions, tokenised


def tokenize(batch, owners, tokenizer, max_seq_length, doc_stride):
    """The features of a batch of questions, for `datasets.map`. A feature is a question with a
    window of its context, [CLS] question [SEP] window [SEP].

    Columns: input_ids; length, their number; begins and stops, the first and one-past-last
    character of each token; first, the window's first token;
    start and end, the answer's first and last token, or 0 and 0, [CLS], where the window has none;
    owner, the number of its question.
    """
    asked = [question.strip() for question in batch["question"]]
    for name, ids in zip(batch["id"], tokenizer(asked)["input_ids"], strict=True):
        if (room := max_seq_length - 1 - len(ids)) <= doc_stride:  # 1: the last [SEP]
            fail(
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
            fail(f"question {batch['id'][row]} has a context without tokens")
        first, offsets = encoding.sequence_ids.index(1), np.array(encoding.offsets)
        start, end = find_span(offsets, first, batch["answers"][row])
        features.append(
            {
                "input_ids": encoding.ids,
                "length": len(encoding.ids),
                "begins": offsets[:, 0],
                "stops": offsets[:, 1],
                "first": first,
                "start": start,
                "end": end,
                "owner": owners[row],
            }
        )
    return {name: [feature[name] for feature in features] for name in features[0]}


def find_span(offsets, first, answers):
    """The first and last token of the first answer, in a window whose context begins at token
    `first`; (0, 0) unless all of the answer is inside.
    """
    begins, stops = offsets[first:-1, 0], offsets[first:-1, 1]  # without the [SEP] at the end
    text = answers["text"][0] if answers["text"] else ""
    start = answers["answer_start"][0] + len(text) - len(text.lstrip()) if text else -1
    stop = start + len(text.strip())  # an answer starts and ends with a token, not with a space
    if not begins[0] <= start <= stop <= stops[-1]:
        return 0, 0
    # The first token that ends after the answer begins, and the last that begins before it ends: a
    # character may be several tokens, or none.
    return (
        first + int(np.searchsorted(stops, start, "right")),
        first + int(np.searchsorted(begins, stop, "left")) - 1,
    )


class Features(Dataset):
    """A split of the data as BERT reads it. Item `i` is a feature, as `tokenize` explains it."""

    def __init__(self, questions, table, key, max_seq_length):
        self.questions, self.table, self.key = questions, table, key  # dicts, datasets.Dataset
        self.tokens = table.with_format("torch", columns=["input_ids"])  # they stay on the disk
        names = ["length", "first", "start", "end", "owner"]
        columns = table.with_format("torch", columns=names)[:]  # int64 [features] each
        self.lengths, self.first, self.start, self.end, self.owner = map(columns.get, names)
        self.max_width = max_seq_length

    def __len__(self):
        return len(self.table)

    def width(self, lengths):
        """The width of batches whose features have `lengths` [..., batch]: dynamic padding."""
        widths = lengths.amax(-1)
        if torch.cuda.is_available():
            widths = (widths + 7) // 8 * 8  # tensor cores want multiples of 8
        return widths.clamp(max=self.max_width)

    def __getitems__(self, ids):
        """A whole batch: what the model reads, [batch, width] each; what belongs to its answers."""
        input_ids = pad_sequence(list(self.tokens[ids]["input_ids"]), batch_first=True)
        ids = torch.tensor(ids)
        input_ids = F.pad(input_ids, (0, self.width(self.lengths[ids]) - input_ids.shape[1]))
        positions = torch.arange(input_ids.shape[1])
        mask = positions < self.lengths[ids, None]
        in_context = positions >= self.first[ids, None]
        # transformers takes a mask [batch, heads, query, key] as it is
        inputs = {
            "input_ids": input_ids,
            "attention_mask": mask[:, None, None, :],
            "token_type_ids": (mask & in_context).int(),
        }
        return inputs, {
            "ids": ids,
            "start": self.start[ids],
            "end": self.end[ids],
            "first": self.first[ids],
            "last": self.lengths[ids] - 2,
        }


def load_features(questions, tokenizer, args):
    """The `Features` of questions; `datasets` caches them, under a key of their content."""
    table = datasets.Dataset.from_list(questions)
    sizes = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    tokenizer.backend_tokenizer.no_truncation()  # left by the call before, it would be in the key
    key = Hasher.hash(
        [
            json.dumps(questions),
            sizes,
            tokenizer.backend_tokenizer.to_str(),
            inspect.getsource(tokenize),
            inspect.getsource(find_span),
        ]
    )
    file = Path(datasets.config.HF_DATASETS_CACHE) / "squad_features" / f"{key}.arrow"

    for again in (False, True):  # a damaged file is made anew
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
                fail(f"cannot write to {file.parent}: {problem}; set HF_HOME")
    return Features(questions, found, key, args.max_seq_length)


def load_inputs(args):
    """The model's config, tokenizer, and the `Features` of both splits."""
    name = args.model_name_or_path
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as problem:  # of the network, the Hub, or a file
        fail(f"cannot load {name}: {problem}; {OFFLINE}")
    if not args.from_scratch:  # rank 0 fetches the weights first
        transformers.utils.cached_file(
            name, "model.safetensors", _raise_exceptions_for_missing_entries=False
        )
    fits = 5 < len(tokenizer) <= config.vocab_size  # without vocab.txt it has 5
    if config.model_type != "bert" or not (tokenizer.is_fast and fits):
        fail(
            f"{name} is a {config.model_type} model with a {type(tokenizer).__name__} of "
            f"{len(tokenizer)} tokens: BERT, and a fast tokenizer that fits, is wanted"
        )
    if args.max_seq_length > config.max_position_embeddings:
        fail(
            f"--max_seq_length {args.max_seq_length} is more than the "
            f"{config.max_position_embeddings} positions of {name}"
        )
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return (
        config,
        tokenizer,
        *(
            load_features(read_questions(args, split), tokenizer, args)
            for split in ("train", "validation")
        ),
    )


class EpochSampler(Sampler):
    """Training features, each global batch of similar lengths, as padding is wasted work.

    The features are shuffled; pools of 50 global batches (fewer if there would not be 4 pools) are
    sorted by length and cut into batches; the batches are shuffled. The longest feature comes
    first: if memory is short, that shows at once. The order depends on seed and epoch alone, not on
    the number of processes. What does not fill a global batch is dropped.
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


def load_model(args, config):
    """BERT with a new head, or the one it has, in float32: precision is the launcher's."""
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = args.dropout
    utils.set_seed(args.seed)
    name, kind, missing = args.model_name_or_path, transformers.BertForQuestionAnswering, []
    transformers.integrations.unset_hf_deepspeed_config()  # or ZeRO-3 draws the head on a GPU
    config.num_labels, config._attn_implementation = 2, "sdpa"  # start and end; knows bool masks

    try:
        if args.from_scratch:
            model = kind(config)
        else:
            model, loading = kind.from_pretrained(
                name, config=config, attn_implementation="sdpa", output_loading_info=True
            )
            missing = [key for key in loading["missing_keys"] if not key.startswith("qa_outputs.")]
    except Exception as problem:  # as above
        fail(f"cannot load the model {name}: {problem}; --from_scratch needs no weights")
    if missing:
        fail(f"the weights of {name} lack {len(missing)} parameters, such as {missing[0]}")
    model._no_split_modules = ["BertLayer"]  # FSDP's units; transformers' own list makes it fail
    if args.activation_checkpointing:  # with the same dropout masks: it restores the RNG's state
        old = getattr(model, "gradient_checkpointing_enable", None)  # before transformers 5.23
        getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
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
    return (
        F.cross_entropy(start_logits, starts, reduction="none")
        + F.cross_entropy(end_logits, ends, reduction="none")
    ) / 2


def make_loaders(train_set, eval_set, run):
    """The DataLoaders of both splits; a batch is that of all ranks. The Dataset makes it whole."""
    # Without a generator of its own, a loader draws from dropout's: other masks on resume.
    options = {
        "collate_fn": tuple,
        "generator": torch.Generator(),
        "pin_memory": torch.cuda.is_available(),
    }
    sampler = EpochSampler(train_set.lengths, run.global_batch_size, run.args.seed)
    by_length = eval_set.lengths.argsort(descending=True, stable=True).tolist()
    eval_batch = run.args.per_device_eval_batch_size * run.devices
    return (
        DataLoader(train_set, run.batch_size, sampler=sampler, **options),
        DataLoader(eval_set, eval_batch, sampler=by_length, **options),
    )


# -------- training


def train(accelerator, model, optimizer, schedule, train_loader, eval_loader, run):
    """Train and evaluate, epoch by epoch. Returns whether all ranks agreed to stop early."""
    args = run.args
    for epoch in range(len(run.evaluations), run.epochs):
        train_loader.set_epoch(epoch)  # before skipping: what skip_first_batches returns ignores it
        loader, done = train_loader, run.step - epoch * run.steps_per_epoch
        if done:  # a resumed run goes on here
            done *= args.gradient_accumulation_steps
            loader = accelerator.skip_first_batches(loader, done)
        model.train()
        run.start_clock()
        waiting = time.perf_counter()
        for inputs, spans in loader:
            if run.step == run.total_steps:
                break
            run.seconds["loading"] += time.perf_counter() - waiting
            with accelerator.accumulate(model):
                logits = span_logits(model, inputs)
                loss = span_losses(logits, spans["start"], spans["end"]).mean()
                accelerator.backward(loss)  # gradients are means over micro-batches and ranks
                if args.max_grad_norm and accelerator.sync_gradients:
                    run.grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), args.max_grad_norm
                    )
                optimizer.step()
                [learning_rate] = schedule.get_last_lr()
                schedule.step()
                optimizer.zero_grad()
            run.losses.append(loss.detach())  # it stays on the device
            if accelerator.sync_gradients and run.end_step():  # now and then
                stop = run.sync(learning_rate)  # reads the losses
                if stop or run.saving:
                    save_checkpoint(accelerator, optimizer, run)
                if stop:
                    return True
            waiting = time.perf_counter()
        metrics = evaluate_epoch(accelerator, model, eval_loader, run)
        if metrics is None:
            return True
        text = "EM {exact_match:.2f}, F1 {f1:.2f}, validation loss {eval_loss:.4f}"
        run.add_evaluation(metrics, -metrics["eval_loss"], text.format(**metrics))
    return False


# -------- evaluation


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


@torch.no_grad()
def find_answers(accelerator, model, loader, run):
    """For each feature its loss, the score of "no answer", and its best span's score, start and
    end: [features, 5] on the CPU of all ranks; None if all ranks agreed to stop.
    """
    model.eval()
    found = []
    for inputs, spans in loader:
        if accelerator.check_trigger():
            return None
        logits = span_logits(model, inputs)
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


class SquadMetric(evaluate.Metric):
    """Exact match and F1 in percent, by the rules of SQuAD's official scripts (Rajpurkar et al.,
    2016 and 2018). As evaluate's "squad", or "squad_v2" by `config_name`, without a network.
    """

    def _info(self):
        text = datasets.Value("string")
        answers = datasets.Sequence({"text": text, "answer_start": datasets.Value("int32")})
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=datasets.Features(
                {
                    "predictions": {"id": text, "prediction_text": text},
                    "references": {"id": text, "answers": answers},
                }
            ),
        )

    def _compute(self, predictions, references):
        exact, f1, version_2 = [], [], self.config_name == "squad_v2"
        given = {row["id"]: row["prediction_text"] for row in predictions}
        for reference in references:
            right = [answer_words(text) for text in reference["answers"]["text"]]
            if version_2:  # texts of nothing but articles and punctuation are no answers
                right = [words for words in right if words] or [[]]
            words = answer_words(given[reference["id"]])
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
        metric = SquadMetric(
            "squad_v2" if version_2 else "squad",
            keep_in_memory=True,
            cache_dir=f"{run.folder}/.evaluate",
        )  # it makes a folder
        metrics = metric.compute(
            predictions=[{"id": name, "prediction_text": text} for name, text in answers.items()],
            references=[
                {key: question[key] for key in ("id", "answers")} for question in features.questions
            ],
        )
        metrics["eval_loss"] = rows[:, 0].double().mean().item()
        partial = run.folder / ".predictions.json"
        text = json.dumps(answers, indent=1, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(run.folder / "predictions.json")
    return utils.broadcast_object_list([metrics])[0]


def save_model(accelerator, model, tokenizer, folder):
    """Save the weights, gathered from all ranks, for `from_pretrained`. A collective."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:  # torch.compile puts a prefix before the names
        weights = {
            k.replace("_orig_mod.", ""): w.float().cpu().contiguous() for k, w in weights.items()
        }
        whole = accelerator.unwrap_model(model, keep_torch_compile=False)
        whole.save_pretrained(folder, state_dict=weights)  # after a kill, --resume does it again
        whole.config.architectures = ["BertForQuestionAnswering"]  # not FSDP's
        whole.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def describe_tokens(features, run, first_step):
    """The tokens that the run trained on, for the record. Padding is no token."""
    sampler, lengths = EpochSampler(features.lengths, run.global_batch_size, run.args.seed), []
    for epoch in range(run.epochs):
        sampler.set_epoch(epoch)
        lengths.append(features.lengths[sampler.order])
    done = torch.cat(lengths)[: run.step]  # [steps, global batch]
    ranks = run.accelerator.num_processes
    padded = done.view(-1, run.batch_size // ranks)  # each rank pads its part of a micro-batch
    share = done.sum() / (features.width(padded).sum() * padded.shape[1])
    new, seconds = done[first_step:].sum().item(), run.seconds["train"]
    return {
        "tokens": done.sum().item(),
        "padding_share": round(1 - share.item(), 4),
        "tokens_per_second": round(new / seconds, 1) if new else None,
    }


def describe_workload(args, config, train_set, eval_set):
    """What the record says of model and data; a resumed run must have it again."""
    return {
        "model": Path(args.model_name_or_path).name + ", from scratch" * args.from_scratch,
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


def main():
    """One run, from its flags to its record."""
    args = parse_args()
    for library in (transformers, huggingface_hub):  # each rank would warn of the new head
        library.logging.set_verbosity_error()
    if not sys.stdout.isatty():
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    accelerator, strategy = make_accelerator(args)
    config, tokenizer, train_set, eval_set = in_turn(load_inputs, args)

    peak_memory()
    memory_before = peak_memory()
    model = load_model(args, config)
    if args.prepare_data_only:
        say(
            f"the model, {len(train_set.questions)} training questions and "
            f"{len(eval_set.questions)} validation questions are ready"
        )
        return

    workload = describe_workload(args, config, train_set, eval_set)
    run = Run(
        accelerator,
        strategy,
        args,
        memory_before,
        workload,
        {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "activation_checkpointing": args.activation_checkpointing,
        },
    )
    if run.found == "completed":
        return

    train_loader, eval_loader = make_loaders(train_set, eval_set, run)
    if strategy == "dp":  # accelerate has no DataParallel: a thread for each GPU
        model = torch.nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=0.0, fused=True
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, run.total_steps)
    model, optimizer, train_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, schedule
    )
    eval_loader = accelerator.prepare(eval_loader)  # alone: DeepSpeed reads all batch sizes
    utils.set_seed(args.seed, device_specific=True)  # other dropout masks on each rank
    first_step = run.step  # of this process
    with run.start(optimizer) as run.profiler:
        stopped = train(accelerator, model, optimizer, schedule, train_loader, eval_loader, run)
    if not stopped:
        save_model(accelerator, model, tokenizer, run.folder)
    run.record |= describe_tokens(train_set, run, first_step)
    run.write("preempted" if stopped else "completed")
    accelerator.get_tracker("tensorboard").finish()


# -------- launch, record, checkpoints: the same in both scripts


def fail(message):
    """End the run with one line: rank 0's, and the launcher ends the others as they sleep."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0 if os.environ.get("RANK", "0") == "0" else 10)  # alone, a rank speaks
    sys.exit("error: " + " ".join(str(message).split()).removeprefix("error: "))


def on_rank_0(work):
    """What `work()` returns on rank 0. If it gives up, all do."""
    result = problem = None
    if PartialState().is_main_process:
        try:
            result = work()
        except (SystemExit, OSError) as reason:
            problem = str(reason)
    result, problem = utils.broadcast_object_list([result, problem])
    return fail(problem) if problem else result


def in_turn(load, *args):
    """What `load(*args)` returns. Rank 0 goes first and fills caches, then one rank per node."""
    loaded = []  # too large to be sent
    on_rank_0(lambda: loaded.append(load(*args)))
    with PartialState().local_main_process_first():
        return loaded[0] if loaded else load(*args)


def say(line):
    """Print a line once, above the bar."""
    if PartialState().is_main_process:
        tqdm.write(line)
        sys.stdout.flush()


def prepare_launch(zero, dp):
    """Refuse what would silently be another run; set up a CPU."""
    env, gpus = os.environ.get, torch.cuda.device_count()
    rank, ranks = int(env("LOCAL_RANK", -1)), int(env("LOCAL_WORLD_SIZE", 1))
    if rank < 0 and {env("WORLD_SIZE", "1"), env("SLURM_STEP_NUM_TASKS", "1")} != {"1"}:
        fail("WORLD_SIZE or Slurm tell of more processes: each would train alone; use ddp.yaml")
    if 0 < gpus < ranks:
        fail(f"{ranks} processes on {gpus} GPU(s): add --num_processes {gpus} (times the nodes)")
    if dp and env("ACCELERATE_MIXED_PRECISION") == "bf16":
        fail("dp's threads would compute in fp16, not in bf16: use ddp.yaml")
    name = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # as seen from the current folder, or this script's
    if not Path(env(name, ".")).exists():
        os.environ[name] = str(Path(__file__).parent / env(name))

    if gpus:
        return torch.set_float32_matmul_precision("high")  # TF32
    if 1 < ranks <= len(CORES):  # each rank and its gloo threads on cores of their own: 10 %
        share = len(CORES) // ranks
        os.sched_setaffinity(0, CORES[rank * share :][:share])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns
    if zero:
        from deepspeed.ops import __compatible_ops__ as deepspeed_ops

        deepspeed_ops["deepspeed_shm_comm"] = False  # or 0.19.8 compiles an all-reduce of its own


def make_accelerator(args):
    """The accelerator for the launcher's YAML, and the name of its strategy."""
    fsdp, zero = (os.environ.get(f"ACCELERATE_USE_{n}") == "true" for n in ("FSDP", "DEEPSPEED"))
    several, cpu = "LOCAL_RANK" in os.environ, not torch.cuda.device_count()
    dp = os.environ.get("ACCELERATE_DYNAMO_MODE") == "data_parallel"
    if dp:  # the mark of dp.yaml, and no mode of torch.compile
        del os.environ["ACCELERATE_DYNAMO_MODE"]
    prepare_launch(zero, dp and not several)
    strategy = "fsdp" if fsdp else "ddp" if several else "dp" if dp else "baseline"

    timeout = timedelta(seconds=args.collective_timeout)  # and below, of DeepSpeed's groups
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    backend = "gloo" if cpu and (fsdp or zero) else None  # cpu=True would not shard
    state = PartialState(cpu and not backend, backend=backend, timeout=timeout)
    if cpu and fsdp:  # accelerate (1.15) wants GPUs for FSDP
        state.distributed_type = utils.DistributedType.MULTI_GPU
    accelerator = Accelerator(
        # Gradients lie in the buckets of the all-reduce.
        kwargs_handlers=[utils.DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # A loader's batch is that of all ranks; rank r takes the r-th part.
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True, non_blocking=True),
        log_with="tensorboard" if args.with_tracking else None,
        project_dir=args.output_dir,
        rng_types=[],
    )  # each rank knows the order
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        fail("each process would train alone: use accelerate launch with a YAML")

    state = accelerator.state
    # With False, the launcher's word, each width is compiled anew, and after 8 none is.
    state.dynamo_plugin.dynamic = state.dynamo_plugin.dynamic or None
    if cpu and fsdp:
        state.fsdp_plugin.cpu_offload.pin_memory = False  # needs a GPU
    if zero:
        config = state.deepspeed_plugin.deepspeed_config
        if args.max_grad_norm:  # DeepSpeed clips by a setting of its own
            config["gradient_clipping"] = args.max_grad_norm
            config["zero_optimization"].pop("compute_grad_norm", None)
        strategy = f"zero{config['zero_optimization']['stage']}"
    return accelerator, strategy


class Run:
    """How far a run is, its clock, its record."""

    def __init__(self, accelerator, strategy, args, memory_before, workload, record):
        self.accelerator, self.args, self.memory_before = accelerator, args, memory_before
        gpus = max(1, torch.cuda.device_count()) if strategy == "dp" else 1  # of this process
        self.devices = accelerator.num_processes * gpus
        self.batch_size = args.per_device_train_batch_size * self.devices  # of all ranks
        self.global_batch_size = self.batch_size * args.gradient_accumulation_steps
        self.steps_per_epoch = workload["samples"] // self.global_batch_size
        if not self.steps_per_epoch:
            fail(
                f"the global batch of {self.global_batch_size} is more than all samples: "
                "lower --per_device_train_batch_size"
            )
        self.total_steps = args.max_train_steps or args.num_epochs * self.steps_per_epoch
        self.epochs = math.ceil(self.total_steps / self.steps_per_epoch)
        self.step, self.loss_history = 0, []  # optimizer steps done; [step, mean loss]
        self.evaluations, self.best = [], []  # metrics of each epoch; [score, checkpoint]
        self.losses, self.grad_norm = [], None  # of micro-batches since a sync
        self.seconds = dict.fromkeys(("startup", "train", "loading", "eval"), 0.0)
        self.cpu_seconds = self.memory = 0  # of this rank in training; its peak in MB

        self.describe(strategy, workload, record)
        Run.folder, self.found, state = on_rank_0(lambda: open_folder(self))
        vars(self).update(state)
        self.warm_step = self.step + min(WARMUP_STEPS, (self.total_steps - self.step) // 2)
        self.warm_seconds, self.next_sync = 0, self.step + 1
        if self.found == "completed":
            return say(f"{self.folder} is a completed run already: see its run.json")
        self.write("running")  # for a run that dies

    def describe(self, strategy, workload, record):
        """Begin the record, and note what a resumed run must have again."""
        args, state, options = self.args, self.accelerator.state, {}
        if zero := strategy.startswith("zero"):
            options = dict(state.deepspeed_plugin.deepspeed_config["zero_optimization"])
        elif strategy == "fsdp":
            options = {k[5:].lower(): v for k, v in os.environ.items() if k.startswith("FSDP_")}
        info = Path("/proc/cpuinfo")  # containers may hide it; ARM's has no model
        cpu = re.search(r"model name\s*: (.*\S)", info.read_text() if info.is_file() else "")
        workload |= {
            "precision": state.mixed_precision,
            "dynamo": state.dynamo_plugin.backend.value.lower(),
            "epochs": None if args.max_train_steps else args.num_epochs,
            "steps": args.max_train_steps,
            "max_grad_norm": args.max_grad_norm,
            "seed": args.seed,
            "dropout": args.dropout,
            "learning_rate": args.learning_rate,
        }
        # Another number of devices may have the same global batch, but not ZeRO's shards.
        kind = "ddp" if strategy == "baseline" else strategy + f" on {self.devices}" * zero
        same = {"strategy_options": options, "global_batch_size": self.global_batch_size}
        self.settings = {"strategy": kind} | same | workload
        self.record = (
            record
            | same
            | {
                "script": Path(__file__).name,
                "strategy": strategy,
                "workload": workload,
                "processes": self.accelerator.num_processes,
                "devices": self.devices,
                "device_name": torch.cuda.get_device_name()
                if torch.cuda.is_available()
                else f"CPU ({cpu[1] if cpu else os.uname().machine})",
                "threads": torch.get_num_threads(),
                "per_device_batch_size": args.per_device_train_batch_size,
                "gradient_accumulation_steps": args.gradient_accumulation_steps,
                "profiled": args.profile,
                "argv": sys.argv,
                "precision": state.mixed_precision,
                "versions": {
                    name: getattr(sys.modules.get(name), "__version__", None)
                    for name in ("torch", "accelerate", "deepspeed", "transformers")
                },
                "dynamo": workload["dynamo"],
                "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            }
        )

    def start(self, optimizer):
        """Resume if need be, say what runs. Returns the context to train in."""
        accelerator = self.accelerator
        for shard in getattr(optimizer.optimizer, "fp32_partitioned_groups_flat", ()):
            shard.data.nan_to_num_()  # ZeRO-3 pads with uninitialized memory
        if self.found:
            say(f"resuming from {self.found}")
            accelerator.load_state(self.found)
            accelerator.step = 0  # accumulation may have changed
        if self.args.with_tracking:
            accelerator.init_trackers(
                "tensorboard", vars(self.args), {"tensorboard": {"purge_step": self.step + 1}}
            )
        say(
            "{strategy} on {devices} x {device_name}: {parameters:,} parameters, {:,} steps of "
            "{global_batch_size} samples; results go to {}".format(
                self.total_steps, self.folder, **self.record
            )
        )
        told = torch.tensor(1, device=accelerator.device)  # no new one under torch.compile
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # heeded at a sync
            signal.signal(number, lambda *_: setattr(accelerator, "flag_tensor", told))
        self.seconds["startup"], self.line_at = time.time() - BORN, time.time()
        # None: only in a terminal
        self.bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            unit="step",
            leave=False,
            file=sys.stdout,
            disable=not accelerator.is_main_process or None,
        )
        if not self.args.profile:
            return contextlib.nullcontext()
        return accelerator.profile(
            utils.ProfileKwargs(
                activities=sorted({"cpu", accelerator.device.type}),
                schedule_option={"wait": 0, "warmup": WARMUP_STEPS + 2, "active": 5, "repeat": 1},
                output_trace_dir=str(self.folder / "traces"),
            )
        )

    def start_clock(self):
        """Measure training from here to the next sync."""
        peak_memory()  # forget what start-up, evaluation or saving needed
        self.clock, self.cpu_clock = time.perf_counter(), time.process_time()

    def end_step(self):
        """Count an optimizer step. Returns whether it is time for a sync."""
        self.step += 1
        if self.profiler:
            self.profiler.step()
        self.saving = 0 in (
            self.step % (self.args.checkpointing_steps or self.total_steps),
            self.step % self.steps_per_epoch,
            self.step - self.total_steps,
        )
        return self.saving or self.step == self.next_sync

    def sync(self, learning_rate):
        """Read and show the losses. Returns whether any rank was told to stop."""
        losses = torch.stack(self.losses).view(-1, self.args.gradient_accumulation_steps)
        losses, self.losses = losses.mean(1).tolist(), []  # waits for the device
        own = losses + [time.perf_counter() - self.clock]
        own = torch.tensor(own, device=self.accelerator.device)
        *losses, seconds = self.accelerator.reduce(own, "mean").tolist()  # the same on all ranks
        self.seconds["train"] += seconds
        self.cpu_seconds += time.process_time() - self.cpu_clock
        self.memory = max(self.memory, peak_memory())
        if self.step == self.warm_step:
            self.warm_seconds = self.seconds["train"]
        for step, loss in enumerate(losses, len(self.loss_history) + 1):
            if not math.isfinite(loss):
                self.fail(f"the training loss of step {step} is {loss}")
            self.loss_history.append([step, loss])

        pace, left = len(losses) / seconds, self.warm_step - self.step
        often = min(int(pace * SYNC_SECONDS), left if left > 0 else SYNC_STEPS)
        self.next_sync = self.step + max(1, often)
        rate = pace * self.global_batch_size
        values = {"loss": loss, "learning_rate": learning_rate, "samples_per_second": rate}
        if (norm := self.grad_norm) is not None:  # FSDP's is in parts
            values["grad_norm"] = float(getattr(norm, "full_tensor", lambda: norm)())
        self.accelerator.log(values, self.step)
        text = f"loss {loss:.4f}  {rate:,.0f} samples/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.step - self.bar.n)
        if self.bar.disable and time.time() - self.line_at > SYNC_SECONDS:
            say(f"step {self.step}/{self.total_steps}  {text}")
            self.line_at = time.time()
        stop = self.accelerator.check_trigger()
        self.start_clock()
        return stop

    def add_evaluation(self, metrics, score, text):
        """Note the metrics of an epoch. The best checkpoint scores highest."""
        self.seconds["eval"] += time.perf_counter() - self.clock
        if not math.isfinite(score):
            self.fail(f"the evaluation after step {self.step} gave {metrics}")
        self.evaluations.append(metrics)
        if not self.best or score > self.best[0]:
            self.best = [score, f"step_{self.step:08d}"]
            if self.accelerator.is_main_process:
                (link := self.folder / "checkpoints/best").unlink(missing_ok=True)
                link.symlink_to(self.best[1])
        self.accelerator.log(metrics, self.step)
        say(
            f"epoch {len(self.evaluations)}/{self.epochs}: {text}, training loss "
            f"{self.loss_history[-1][1]:.4f}, {self.seconds['train']:.1f} s of training"
        )

    def fail(self, reason):
        """End a run that broke down. A collective."""
        self.write("failed")
        fail(f"{reason}: not saved; --resume, or start afresh with a lower --learning_rate")

    def write(self, status):
        """Write run.json, and say how the run ended. A collective."""
        used, alive = os.times(), time.time() - BORN
        ranks = utils.gather_object(
            [
                {
                    "rank": self.accelerator.process_index,
                    "host": os.uname().nodename,
                    "real": alive,
                    "user": used.user,
                    "sys": used.system,
                    "train_cpu": self.cpu_seconds / torch.get_num_threads(),
                    "memory_before_mb": self.memory_before,
                    "peak_memory_mb": self.memory,
                }
            ]
        )
        samples = (self.step - self.warm_step) * self.global_batch_size
        steady = self.seconds["train"] - self.warm_seconds
        self.record |= {
            "status": status,
            "resumed_from": self.found,
            "steps": self.step,
            "ranks": ranks,
            "nodes": len({rank["host"] for rank in ranks}),
            "loss_history": self.loss_history,
            "seconds": self.seconds | {"total": alive},
            "samples_per_second": samples / steady if samples > 0 else None,
            "metrics": self.evaluations[-1] if self.evaluations else None,
        }
        if self.accelerator.is_main_process:
            partial = self.folder / ".run.json"  # a kill leaves one whole
            partial.write_text(json.dumps(self.record, indent=1) + "\n")
            partial.replace(self.folder / "run.json")
        if status != "running":
            self.bar.close()
            say(
                f"{status} at step {self.step:,}: {self.seconds['train']:.1f} s of training, "
                f"{alive:.1f} s in all; record: {self.folder}/run.json"
                + "; --resume goes on"
                * (status != "completed")
            )


def peak_memory():
    """The most MB that this process held on its (first) GPU, or CPU, since the last call."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 1e6
    [peak, *_] = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", Path("/proc/self/status").read_text())
    with contextlib.suppress(OSError):  # if forbidden, the whole run's peak
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
    return int(peak) * 1024 / 1e6


def save_checkpoint(accelerator, optimizer, run):
    """Save what --resume needs as checkpoints/step_N, a name for complete ones only."""
    bad = torch.tensor(0, device=accelerator.device)  # the loss was of before the step
    for weight, state in optimizer.state.items():
        for part in filter(torch.is_tensor, (weight, *state.values())):
            bad += not getattr(part, "_local_tensor", part).isfinite().all()  # FSDP's: DTensors
    if accelerator.reduce(bad).item():
        run.fail(f"weights or Adam's states are not finite after step {run.step}")

    final = run.folder / "checkpoints" / f"step_{run.step:08d}"
    partial = final.with_suffix(".partial")
    on_rank_0(lambda: [shutil.rmtree(p, True) for p in final.parent.glob(CHECKPOINT + ".partial")])
    accelerator.save_state(partial)
    accelerator.wait_for_everyone()  # all may write one file, as fp16's scaler.pt
    sums = []  # of this rank's files, by name: a disk may show others' late
    for path in filter(Path.is_file, partial.rglob("*")):
        rank = re.search(r"(?:^__|rank_|states_)(\d+)|$", path.name)[1]
        if int(rank or 0) == accelerator.process_index:
            sums.append([str(path.relative_to(partial)), checksum(path)])
    sums = dict(utils.gather_object(sums))
    if accelerator.is_main_process:
        names = "step", "loss_history", "evaluations", "best"
        text = json.dumps([run.settings, {name: getattr(run, name) for name in names}, sums])
        (partial / "checkpoint.json").write_text(f"{text}\n{zlib.crc32(text.encode())}")
        partial.rename(final)
        for old in sorted(final.parent.glob(CHECKPOINT))[:-2]:  # one more, if that is damaged
            if old.name not in run.best:  # renamed first: a kill leaves no half
                shutil.rmtree(old.rename(old.with_suffix(".partial")))
    accelerator.wait_for_everyone()
    run.start_clock()


def checksum(path):
    """The CRC-32 of a file, which is then safe on disk."""
    value = 0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        while piece := file.read(2**20):
            value = zlib.crc32(piece, value)
    return value


def open_folder(run):
    """The run's folder; its checkpoint to go on from, "completed" or None; the state of that."""
    folder, damaged = Path(run.args.output_dir), []
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    record, saved = folder / "run.json", sorted((folder / "checkpoints").glob(CHECKPOINT))
    if (record.exists() or saved) and not run.args.resume:
        fail(f"{folder} holds another run: add --resume, or change --output_dir")
    done = record.exists() and b'"status": "completed"' in record.read_bytes()

    for path in reversed(saved):
        try:
            text, value = (path / "checkpoint.json").read_bytes().splitlines()
            if text[:1] == b"{":
                fail(f"{path} is an earlier version's: go on with that, or change --output_dir")
            old, state, sums = json.loads(text)
            if zlib.crc32(text) != int(value) or sums != {
                name: checksum(path / name) for name in sums
            }:
                raise ValueError("its files have changed")
        except (OSError, ValueError) as damage:
            say(f"warning: skipping the damaged checkpoint {path}: {damage}")
            damaged.append(path)
            continue
        if changes := [
            f"{name} {old.get(name)} -> {value}"
            for name, value in run.settings.items()
            if old.get(name) != value
        ]:
            fail(f"cannot resume a run with other settings: {', '.join(changes)}")
        for broken in damaged:
            broken.rename(broken.with_suffix(".damaged"))
        return folder, "completed" if done else str(path), state
    if damaged and not done:
        fail(f"no checkpoint in {folder} is whole: start afresh in another --output_dir")
    return folder, "completed" if done else None, {}


if __name__ == "__main__":
    try:
        main()
    except (RuntimeError, MemoryError) as problem:
        if not re.search("MemoryError|out of memory|allocate memory|bad_alloc", repr(problem)):
            raise
        fail(f"out of memory: python fit.py {Run.folder}/run.json tells what held how much")
    if not torch.cuda.is_available():
        os._exit(0)  # gloo may hang or abort (pytorch#56297, #190489)
    PartialState().destroy_process_group()
