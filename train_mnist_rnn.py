"""Train an LSTM on MNIST, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/ddp.yaml train_mnist_rnn.py
    python train_mnist_rnn.py --dataset digits    # one process; needs no download

A run leaves in OUTPUT_DIR:
    run.json             what ran, the seconds of each phase, the loss of each step
    model.safetensors    the final weights, gathered from all ranks
    best/                the weights of the epoch that scored best
    checkpoints/         the two newest checkpoints, for --resume

A rank is one of the processes that train together. A function that says "A collective" makes the
ranks wait for each other, so every rank has to call it.

The first part of this file trains the LSTM. The second part starts, saves and records a run, and is
the same text in both scripts.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

# Workaround optimizers_import_dynamo (torch 2.15): import it now. The first optimizer would, and
# its memory would be counted as training.
import torch._dynamo
import torch.nn.functional as F
from accelerate import Accelerator, PartialState, utils
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main(args):
    """Do one run, from its flags to its record. Returns the model."""
    accelerator, strategy = make_accelerator(args)
    # Rank 0 goes first, as it may download. Then one rank of each node reads, and then the others.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        images = read_images(args)
    if args.prepare_data_only:
        say(f"{args.dataset}: {len(images[0])} training and {len(images[1])} test images are ready")
        return None
    rank = describe_rank(accelerator)
    utils.set_seed(args.seed)  # New weights are the same on all ranks.
    model = RowLSTM(images[0].shape[2], args.hidden_size, args.dropout)
    workload = describe_workload(accelerator.mixed_precision, strategy, args, images)
    record = describe_run(accelerator, strategy, args, workload, model, rank)
    train_loader, test_loader = make_loaders(accelerator, args, images, record)
    status, checkpoint = open_folder(accelerator, record, args.resume)
    if status == "completed":
        say(f"{accelerator.project_dir} is a completed run already: see its run.json")
        return None
    steps_per_epoch = len(train_loader) // args.gradient_accumulation_steps
    steps = args.max_train_steps or args.num_epochs * steps_per_epoch
    progress = Progress(agreement(record), steps, steps_per_epoch)
    # Accelerate has no DataParallel. This runs a thread for each GPU.
    if strategy == "dp":
        model = nn.DataParallel(model.to(accelerator.device))
    optimizer, schedule = make_optimizer(args, model, steps)
    model, optimizer, schedule, train_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader
    )
    # Workaround deepspeed_takes_the_smallest_batch (accelerate 1.15): it looks at all loaders
    # that are prepared with the model, so the test loader is prepared separately.
    test_loader = accelerator.prepare(test_loader)
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
                test_loader,
                progress,
                signals,
                on_step,
            )
            save_model(accelerator, model, accelerator.project_dir)
    accelerator.end_training()
    return model


def train(
    accelerator, args, model, optimizer, schedule, loader, test_loader, progress, signals, on_step
):
    """Train and evaluate, epoch by epoch. Raises KeyboardInterrupt if a signal asks to stop, and
    FloatingPointError if a loss is not finite: on all ranks.
    """
    save_every = args.checkpointing_steps or progress.steps
    # The losses of the micro-batches since the last log, on the device.
    losses = []
    # The norm of the last step's gradients, if they are clipped.
    norm = None
    for epoch in range(len(progress.evaluations), progress.epochs):
        model.train()
        last_step = min((epoch + 1) * progress.steps_per_epoch, progress.steps)
        began = time.perf_counter()
        for rows, labels in batches_left(accelerator, loader, epoch, progress):
            with accelerator.accumulate(model):
                rate = schedule.get_last_lr()[0]  # of this step
                loss = F.cross_entropy(model(rows).float(), labels)  # never in lower precision
                # The gradients become means over micro-batches and ranks.
                accelerator.backward(loss)
                if args.max_grad_norm and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            # Do not read it now: that would wait for the device.
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue  # The step has more micro-batches.
            progress.step += 1
            on_step()
            saving = progress.step == last_step or progress.step % save_every == 0
            if saving or progress.step % args.logging_steps == 0:
                log_step(accelerator, losses, rate, norm, began, progress)
                losses = []
                stopping = any_signal(accelerator, signals)
                if saving or stopping:
                    save_checkpoint(accelerator, progress)
                if stopping:
                    raise KeyboardInterrupt
                began = time.perf_counter()
        evaluate(accelerator, model, test_loader, progress, signals)
        keep_best(accelerator, model, progress)


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
def evaluate(accelerator, model, loader, progress, signals):
    """Note the accuracy on all test images. A signal ends it early. A collective."""
    began = time.perf_counter()
    model.eval()
    right = []
    for rows, labels in batches_to_evaluate(accelerator, loader, signals):
        right.append(accelerator.gather_for_metrics(model(rows).argmax(1) == labels))
    metrics = {"accuracy": torch.cat(right).double().mean().item()}
    progress.evaluations.append(metrics)
    progress.eval_seconds += time.perf_counter() - began
    accelerator.log(metrics, progress.step)
    say(
        f"epoch {len(progress.evaluations)}/{progress.epochs}: "
        f"test accuracy {metrics['accuracy']:.2%}, "
        f"training loss {progress.losses[-1]:.4f}, {progress.train_seconds:.1f} s of training"
    )


def keep_best(accelerator, model, progress):
    """Save the model in best/ if the last evaluation was better than all before. A collective."""
    *before, last = [metrics["accuracy"] for metrics in progress.evaluations]
    if last > max(before, default=-1):
        save_model(accelerator, model, f"{accelerator.project_dir}/best")


def save_model(accelerator, model, folder):
    """Save the weights, gathered from all ranks. A kill leaves the old ones. A collective."""
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
    # These three are this process's own, and in no checkpoint.
    resumed_from: str | None = None  # a checkpoint
    startup_seconds: float | None = None
    peak_memory: float | None = None  # in MB, in training

    @property
    def epochs(self):
        return math.ceil(self.steps / self.steps_per_epoch)

    def counts(self):
        """What run.json says besides, in this script alone."""
        return {}


class RowLSTM(nn.Module):
    """Reads an image row by row. In: float [batch, rows, columns]; out: logits [batch, 10]."""

    def __init__(self, columns, hidden_size, dropout):
        super().__init__()
        self.lstm = UnflattenedLSTM(columns, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, rows):
        """Logits without autocast, but in the dtype of the weights."""
        # Workaround autocast_runs_an_lstm_in_fp16 (torch 2.15): on CUDA, autocast to bf16 would run
        # an LSTM in fp16.
        with torch.autocast(rows.device.type, enabled=False):
            outputs, _ = self.lstm(rows.to(self.head.weight.dtype))
        return self.head(self.dropout(outputs[:, -1]))


class UnflattenedLSTM(nn.LSTM):
    """An LSTM that does not flatten its weights."""

    # Workaround flattened_weights_leave_fsdp (torch 2.15): on a GPU, torch would move the weights
    # away from FSDP2.

    def flatten_parameters(self):
        warnings.filterwarnings("ignore", message="RNN module weights are not part")


def make_optimizer(args, model, steps):
    """AdamW, and a schedule that raises the learning rate and lowers it again, in one cycle."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    return optimizer, OneCycleLR(optimizer, args.learning_rate, steps, cycle_momentum=False)


def read_images(args):
    """Pixels of training and test images, [images, rows, columns], and their labels, [images]."""
    if args.dataset == "mnist":
        return read_mnist(args.data_dir)
    # Import them only here, as they take a second.
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as problem:
        abort(f"--dataset digits needs scikit-learn ({problem}): pip install scikit-learn")
    digits = load_digits()
    arrays = train_test_split(
        digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
    )
    return [torch.tensor(array) for array in arrays]


def read_mnist(data_dir):
    """MNIST's pixels and labels, in the same form. Downloads missing files."""
    from torchvision.datasets import MNIST

    raw = Path(data_dir, "MNIST", "raw")
    old = raw.with_name("processed")
    # Workaround torchvision_reads_old_files (torchvision 0.29): it prefers them to raw/.
    if (old / "training.pt").exists() and (old / "test.pt").exists():
        abort(f"torchvision would read {old} instead of {raw}: remove it")
    # Workaround torchvision_waits_for_ever (torchvision 0.29): it has no timeout. It tries two
    # servers, each of several addresses.
    socket.setdefaulttimeout(7)
    # Its progress bar would fill a log.
    no_bars = contextlib.redirect_stderr(io.StringIO())
    try:
        with contextlib.nullcontext() if show_progress_bars() else no_bars:
            train = MNIST(data_dir, train=True, download=True)
            test = MNIST(data_dir, train=False, download=True)
    except Exception as problem:  # of the network, the disk, or a file
        # Each of the four files begins with two zeros, and 8 for bytes.
        bad = [file.name for file in raw.glob("*-ubyte") if file.read_bytes()[:3] != b"\0\0\x08"]
        what = f"{bad[0]} is not MNIST's: remove it" if bad else repr(problem)
        abort(f"no MNIST in {raw}: {what}; see also --dataset digits")
    finally:
        socket.setdefaulttimeout(None)
    for split in (train, test):
        counts = len(split.data), len(split.targets)
        if counts[0] != counts[1] or not counts[0] or split.targets.max() > 9:
            abort(
                f"{raw} has {counts[0]} images and {counts[1]} labels that do not belong together"
            )
    if train.data[0].shape != test.data[0].shape:
        abort(f"the training and the test images in {raw} do not belong together")
    return [train.data, test.data, train.targets, test.targets]


class Images(TensorDataset):
    """Pixels and labels, on the training device."""

    def __getitems__(self, ids):
        """A whole batch: float32 [batch, rows, columns] and int64 [batch]."""
        ids = torch.tensor(ids)
        if self.tensors[0].is_cuda:  # From pinned memory, a copy does not wait for the GPU.
            ids = ids.pin_memory().to(self.tensors[0].device, non_blocking=True)
        return tuple(values[ids] for values in self.tensors)


def make_loaders(accelerator, args, images, record):
    """The DataLoaders of both splits. A batch is that of all ranks, and each takes its part."""
    train_x, test_x, train_y, test_y = [values.to(accelerator.device) for values in images]
    std, mean = torch.std_mean(train_x.float(), correction=0)
    train_images = Images((train_x.float() - mean) / std, train_y)
    test_images = Images((test_x.float() - mean) / std, test_y)
    # An epoch has whole global batches. Accelerate orders the samples by its data_seed and epoch.
    samples = len(train_y) - len(train_y) % record["global_batch_size"]
    if not samples:
        abort(f"the global batch of {record['global_batch_size']} is more than all samples")
    sampler = RandomSampler(train_images, num_samples=samples)
    micro_batch = args.per_device_train_batch_size * record["devices"]
    eval_batch = args.per_device_eval_batch_size * record["devices"]
    # Workaround loaders_draw_random_numbers (torch 2.15): give the loaders their own generator.
    # Otherwise they advance the one that dropout uses, and a resumed run has other masks.
    # Images makes whole batches, so there is nothing to collate.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    train_loader = DataLoader(train_images, micro_batch, sampler=sampler, **options)
    return train_loader, DataLoader(test_images, eval_batch, **options)


def describe_workload(precision, strategy, args, images):
    """The work of this script, which a resumed run must have again."""
    return {
        "model": f"lstm-{args.hidden_size}",
        "dataset": args.dataset,
        "samples": len(images[0]),
        "eval_samples": len(images[1]),
        # Fashion-MNIST has the same shapes, but other labels.
        "labels": zlib.crc32(images[2].numpy()),
        "sequence_length": images[0].shape[1],
        # FSDP and ZeRO cast the weights. Autocast, which the others use, leaves an LSTM in fp32.
        "compute_dtype": "no" if strategy in ("baseline", "dp", "ddp") else precision,
    }


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    description = (__doc__ or "").partition("\n")[0]  # python -OO takes docstrings away.
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    # An error is one line, without the usage.
    parser.error = abort  # type: ignore[method-assign]
    add = parser.add_argument
    add("--dataset", choices=["mnist", "digits"], default="mnist", help="digits: no download")
    add("--data_dir", default="data", help="MNIST's files are in, or go to, DATA_DIR/MNIST/raw")
    add("--hidden_size", type=int, default=64, help="size of the LSTM's state")
    add("--prepare_data_only", action="store_true", help="read the data, then stop")
    add("--num_epochs", type=int, default=5, help="passes over the training data")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=64, help="samples in a micro-batch")
    add("--per_device_eval_batch_size", type=int, default=1000, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--learning_rate", type=float, default=0.005, help="AdamW's, at the top of one cycle")
    add("--weight_decay", type=float, default=0.01, help="AdamW's")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add("--output_dir", type=os.path.expanduser, help="without it, a new folder in runs/")
    add("--logging_steps", type=int, default=50, help="steps from log to log; then a run can stop")
    add("--checkpointing_steps", type=int, help="steps from save to save, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="log to the tracker of --report_to")
    trackers = utils.LoggerType.list()
    add("--report_to", choices=trackers, default="tensorboard", help="all: each that is installed")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    args = parser.parse_args()
    check_numbers(args, may_be_0=["seed", "dropout", "weight_decay"])
    if args.resume and not args.output_dir:
        abort("--resume goes on with the run in a folder: name it by --output_dir")
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
