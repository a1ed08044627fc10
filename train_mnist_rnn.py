"""Train an LSTM on MNIST, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/ddp.yaml train_mnist_rnn.py
    python train_mnist_rnn.py --dataset digits    # one process; needs no download

A run leaves in OUTPUT_DIR:

    run.json             what ran, the seconds of each phase, the loss of each step
    model.safetensors    the final weights, gathered from all ranks
    best/                the weights of the epoch that scored best
    checkpoints/         what --resume goes on from: the two newest

This file, from top to bottom: `main`, `train`, `evaluate`; the model, the data, the flags. Below
them is machinery that you may leave unread. It is word for word the same in both scripts: what
stands behind `run` (its progress, clock, checkpoints and record), and how processes are launched.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
import warnings
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState, utils
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from tqdm import tqdm


def main(args):
    """One run, from its flags to its record."""
    accelerator, strategy = make_accelerator(args)
    train_x, train_y, test_x, test_y = in_turn(read_images, args)
    if args.prepare_data_only:
        say(f"{args.dataset}: {len(train_y)} training and {len(test_y)} test images are ready")
        return

    # FSDP and ZeRO lower the weights; autocast, which the others use, leaves an LSTM in fp32.
    sharded = strategy not in ("baseline", "dp", "ddp")
    workload = {
        "model": f"lstm-{args.hidden_size}",
        "dataset": args.dataset,
        "samples": len(train_y),
        "eval_samples": len(test_y),
        "sequence_length": train_x.shape[1],
        "compute_dtype": accelerator.mixed_precision if sharded else "no",
    }
    run = Run(accelerator, strategy, args, workload)
    utils.set_seed(args.seed)  # the same weights on all ranks
    run.clock.note_memory_without_model()
    model = RowLSTM(train_x.shape[2], args.hidden_size, args.dropout)
    sizes = [weight.numel() for weight in model.parameters()]
    if not run.open(parameters=sum(sizes), tensors=sizes):
        return

    train_loader, test_loader = make_loaders(train_x, train_y, test_x, test_y, run)
    if strategy == "dp":  # Accelerate has no DataParallel: one process, a thread for each GPU.
        model = nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, run.total_steps, cycle_momentum=False
    )
    model, optimizer, train_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, schedule
    )
    # Prepared alone, as DeepSpeed takes the smaller batch size of two loaders for that of training.
    test_loader = accelerator.prepare(test_loader)
    utils.set_seed(args.seed, device_specific=True)  # other dropout masks on each rank

    run.start(optimizer, schedule)
    with tracing(run):
        train(accelerator, model, optimizer, schedule, train_loader, test_loader, run)
    if not run.stopped:
        save_model(accelerator, model, run.folder)
    run.finish("preempted" if run.stopped else "completed")


def train(accelerator, model, optimizer, schedule, train_loader, test_loader, run):
    """Train and evaluate, epoch by epoch, to the last step or until all ranks agree to stop."""
    max_norm = run.args.max_grad_norm
    grad_norm = None
    for epoch in run.epochs_left():
        model.train()
        for rows, labels in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows).float(), labels)  # never in lower precision
                accelerator.backward(loss)  # gradients: means over micro-batches and ranks
                if max_norm and accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.after_batch(loss, grad_norm)  # counts; now and then it logs, saves, or stops
        with run.clock.phase("eval"):
            accuracy = evaluate(accelerator, model, test_loader, run)
        if run.stopped:
            return
        text = f"test accuracy {accuracy:.2%}"
        best_so_far = run.add_evaluation({"accuracy": accuracy}, accuracy, text)
        if best_so_far:
            with replacing(run.folder / "best") as folder:
                save_model(accelerator, model, folder)


@torch.no_grad()
def evaluate(accelerator, model, loader, run):
    """The accuracy, of each image once; None if the run is stopped. A collective."""
    model.eval()
    right = []
    for rows, labels in run.until_stopped(loader):
        right.append(accelerator.gather_for_metrics(model(rows).argmax(1) == labels))
    return None if run.stopped else torch.cat(right).double().mean().item()


def save_model(accelerator, model, folder):
    """Save the weights, gathered from all ranks if they are sharded. A collective."""
    weights = accelerator.get_state_dict(model) or {}  # ZeRO-3 gives them to rank 0 alone.
    # accelerate 1.15 leaves torch.compile's prefix in the names.
    weights = {name.replace("_orig_mod.", ""): weight.float() for name, weight in weights.items()}
    accelerator.save(weights, folder / "model.safetensors", safe_serialization=True)


# -------- model


class RowLSTM(nn.Module):
    """Reads an image row by row. In: float [batch, rows, columns]; out: logits [batch, 10]."""

    def __init__(self, columns, hidden_size, dropout):
        super().__init__()
        self.lstm = UnflattenedLSTM(columns, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, rows):
        """Without autocast: on CUDA it would run an LSTM in fp16 where bf16 is asked for."""
        with torch.autocast(rows.device.type, enabled=False):
            outputs, _ = self.lstm(rows.to(self.head.weight.dtype))
        return self.head(self.dropout(outputs[:, -1]))


class UnflattenedLSTM(nn.LSTM):
    """An LSTM whose weights stay where FSDP2 gathers them.

    On a GPU nn.LSTM (torch 2.15) moves them into one buffer. This can go when FSDP2 follows them.
    """

    def flatten_parameters(self):
        """Move nothing, and let torch not warn of that."""
        warnings.filterwarnings("ignore", message="RNN module weights are not part")


# -------- data


def read_images(args):
    """Training pixels, labels, test pixels, labels: [images, rows, columns] and int64 [images]."""
    return read_digits() if args.dataset == "digits" else read_mnist(args.data_dir)


def read_digits():
    """Scikit-learn's digits, which need no download."""
    from sklearn.datasets import load_digits  # Imported only here, as it takes a second.
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
    )
    return [torch.tensor(array) for array in (train_x, train_y, test_x, test_y)]


def read_mnist(data_dir):
    """MNIST, which torchvision downloads if need be, checks and unpacks."""
    from torchvision.datasets import MNIST  # Imported only here, as it takes a second.

    socket.setdefaulttimeout(20)  # Some networks drop packets silently.
    try:
        train = MNIST(data_dir, train=True, download=True)
        test = MNIST(data_dir, train=False, download=True)
    except Exception as problem:
        names = ", ".join(name for name, _ in MNIST.resources)
        abort(
            f"cannot read MNIST: {problem!r}; without a network, place {names} in "
            f"{data_dir}/MNIST/raw, or use --dataset digits"
        )
    return [train.data, train.targets, test.data, test.targets]


class Images(TensorDataset):
    """Pixels and labels, on the training device."""

    def __getitems__(self, ids):
        """A whole batch: float32 [batch, rows, columns] and int64 [batch]."""
        ids = torch.tensor(ids).to(self.tensors[0].device, non_blocking=True)
        return tuple(values[ids] for values in self.tensors)


class EpochSampler(RandomSampler):
    """Whole global batches in random order; what fills none is dropped.

    The order depends on seed and epoch alone, so any number of processes walks through the same
    global batches, and so does a resumed run.
    """

    def __init__(self, images, samples, seed):
        super().__init__(images, num_samples=samples, generator=torch.Generator())
        self.seed = seed

    def set_epoch(self, epoch):
        """The set_epoch of the prepared DataLoader calls this."""
        self.generator.manual_seed(self.seed + epoch)


def make_loaders(train_x, train_y, test_x, test_y, run):
    """The DataLoaders of both splits. A batch is that of all ranks, and each takes its part."""
    device = run.accelerator.device
    pixels = train_x.float()
    mean = pixels.mean()
    std = pixels.std(correction=0)
    train_images, test_images = [
        Images(((x.float() - mean) / std).to(device), y.to(device))
        for x, y in [(train_x, train_y), (test_x, test_y)]
    ]
    samples = run.steps_per_epoch * run.global_batch_size
    sampler = EpochSampler(train_images, samples, run.args.seed)
    # Without a generator of its own, a loader draws from that of dropout: a resumed run would have
    # other masks. The Dataset makes batches whole, so there is nothing to collate.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    return (
        DataLoader(train_images, run.batch_size, sampler=sampler, **options),
        DataLoader(test_images, run.eval_batch_size, **options),
    )


# -------- flags


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    parser = FlagParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--dataset",
        choices=["mnist", "digits"],
        default="mnist",
        help="mnist: 60,000 images of 28x28; digits: 1,797 of 8x8, no download",
    )
    add("--data_dir", default="data", help="MNIST's files are in, or go to, DATA_DIR/MNIST/raw")
    add("--hidden_size", type=int, default=64, help="size of the LSTM's state")
    add("--prepare_data_only", action="store_true", help="read the data, then stop")
    add_shared_flags(parser)
    parser.set_defaults(
        num_epochs=5,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=1000,
        learning_rate=0.005,
    )
    args = parser.parse_args()
    check_flags(args, may_be_0=["seed", "dropout"])
    return args


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
