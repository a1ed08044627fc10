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
"""

import argparse
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
import sys
import time
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import torch._dynamo  # torch 2.15 imports it for the first optimizer, which would count as memory.
import torch.nn.functional as F
from accelerate import Accelerator, PartialState, utils
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

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


def main(args):
    """Do one run, from its flags to its record. Returns the model."""
    accelerator, strategy = make_accelerator(args)
    # Rank 0 goes first, as it may download. Then one rank of each node reads, and then the others.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        images = read_images(args)
    if args.prepare_data_only:
        say(f"{args.dataset}: {len(images[0])} training and {len(images[1])} test images are ready")
        return
    rank = describe_rank(accelerator)
    utils.set_seed(args.seed)  # New weights are the same on all ranks.
    model = RowLSTM(images[0].shape[2], args.hidden_size, args.dropout)
    workload = describe_workload(accelerator.mixed_precision, strategy, args, images)
    record = describe_run(accelerator, strategy, args, workload, model, rank)
    train_loader, test_loader = make_loaders(accelerator, args, images, record)
    lock, status = open_folder(accelerator, record, args.resume)
    if status == "completed":
        say(f"{accelerator.project_dir} is a completed run already: see its run.json")
        return
    steps_per_epoch = len(train_loader) // args.gradient_accumulation_steps
    steps = args.max_train_steps or args.num_epochs * steps_per_epoch
    progress = Progress(steps, steps_per_epoch, epochs=math.ceil(steps / steps_per_epoch))
    if strategy == "dp":  # Accelerate has no DataParallel, which runs a thread for each GPU.
        model = nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    schedule = OneCycleLR(optimizer, args.learning_rate, steps, cycle_momentum=False)
    model, *others = accelerator.prepare(model, optimizer, schedule, train_loader)
    # DeepSpeed would take the smaller batch size of two loaders, so this one is prepared alone.
    parts = (model, *others, accelerator.prepare(test_loader))
    utils.set_seed(args.seed, device_specific=True)  # Each rank has its own dropout masks.
    signals = start(accelerator, progress, record["resumed_from"])
    accelerator.init_trackers("tensorboard", vars(args))
    write_record(accelerator, record, rank, progress, "running")  # so it stays after a kill
    with accelerator.profile() if args.profile else contextlib.nullcontext() as profiler:
        try:
            train(accelerator, args, parts, progress, signals, profiler)
            save_model(accelerator, model, accelerator.project_dir)
            status = "completed"
        except KeyboardInterrupt:  # All ranks have agreed to stop.
            status = "preempted"
        except FloatingPointError as problem:  # Every rank raises it.
            write_record(accelerator, record, rank, progress, "failed")
            abort(f"{problem}: not saved; --resume, or start afresh with a lower --learning_rate")
    write_record(accelerator, record, rank, progress, status)
    accelerator.end_training()
    return model


def train(accelerator, args, parts, progress, signals, profiler):
    """Train and evaluate, epoch by epoch. Raises KeyboardInterrupt if a signal asks to stop, and
    FloatingPointError if a loss is not finite: on all ranks.
    """
    model, optimizer, schedule, train_loader, test_loader = parts
    save_every = args.checkpointing_steps or progress.steps
    losses = []  # of the micro-batches since the last log, on the device
    for epoch in range(len(progress.evaluations), progress.epochs):
        model.train()
        last_step = min((epoch + 1) * progress.steps_per_epoch, progress.steps)
        began = time.perf_counter()
        for rows, labels in batches_left(accelerator, train_loader, epoch, progress):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows).float(), labels)  # never in lower precision
                accelerator.backward(loss)  # Gradients are means over micro-batches and ranks.
                if args.max_grad_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())  # Reading it now would wait for the device.
            if not accelerator.sync_gradients:
                continue  # The step has more micro-batches.
            progress.step += 1
            if profiler:
                profiler.step()
            saving = progress.step == last_step or progress.step % save_every == 0
            if saving or progress.step % args.logging_steps == 0:
                log_losses(accelerator, losses, began, progress)
                losses.clear()
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
def evaluate(accelerator, model, loader, progress, signals):
    """Note the accuracy, of each image once. A signal cuts it short. A collective."""
    began = time.perf_counter()
    model.eval()
    right = []
    for rows, labels in loader:
        if any_signal(accelerator, signals):
            raise KeyboardInterrupt
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
    # accelerate 1.15 leaves torch.compile's prefix in the names.
    weights = {name.replace("_orig_mod.", ""): weight.float() for name, weight in weights.items()}
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
        utils.save(weights, f"{folder}/.partial", safe_serialization=True)
        # safetensors lets nobody else read a file, so it gets the mode of another.
        shutil.copymode(f"{accelerator.project_dir}/.lock", f"{folder}/.partial")
        os.replace(f"{folder}/.partial", f"{folder}/model.safetensors")


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
    peak_memory: float | None = None  # in MB, of this rank in training; in no checkpoint

    def state_dict(self):
        return vars(self) | {"peak_memory": None}

    def load_state_dict(self, state):
        vars(self).update(state)


class RowLSTM(nn.Module):
    """Reads an image row by row. In: float [batch, rows, columns]; out: logits [batch, 10]."""

    def __init__(self, columns, hidden_size, dropout):
        super().__init__()
        self.lstm = UnflattenedLSTM(columns, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, rows):
        """Without autocast, which on CUDA would run an LSTM in fp16 where bf16 is asked for."""
        with torch.autocast(rows.device.type, enabled=False):
            outputs, _ = self.lstm(rows.to(self.head.weight.dtype))
        return self.head(self.dropout(outputs[:, -1]))


class UnflattenedLSTM(nn.LSTM):
    """An LSTM whose weights stay where FSDP2 gathers them: on a GPU torch 2.15 would move them."""

    def flatten_parameters(self):
        warnings.filterwarnings("ignore", message="RNN module weights are not part")


def read_images(args):
    """Pixels of training and test images, [images, rows, columns], and their labels, [images]."""
    if args.dataset == "digits":
        from sklearn.datasets import load_digits  # Imported only here, as it takes a second.
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        arrays = train_test_split(
            digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
        )
        return [torch.tensor(array) for array in arrays]
    from torchvision.datasets import MNIST

    try:
        train = MNIST(args.data_dir, train=True, download=True)
        test = MNIST(args.data_dir, train=False, download=True)
    except Exception as problem:  # of the network, the disk, or a file
        abort(f"no MNIST in {args.data_dir}/MNIST/raw: {problem!r}; see also --dataset digits")
    highest = max(train.targets.max(), test.targets.max())
    if train.data[0].shape != test.data[0].shape or highest > 9:
        abort(f"the files in {args.data_dir}/MNIST/raw do not belong together, or are not MNIST's")
    return [train.data, test.data, train.targets, test.targets]


class Images(TensorDataset):
    """Pixels and labels, on the training device."""

    def __getitems__(self, ids):
        """A whole batch: float32 [batch, rows, columns] and int64 [batch]."""
        ids = torch.tensor(ids, device=self.tensors[0].device)
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
    # Without a generator of its own, a loader draws from that of dropout, and a resumed run would
    # have other masks. Images makes whole batches, so there is nothing to collate.
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
        "labels": zlib.crc32(images[2].numpy()),  # They tell MNIST from others of its form.
        "sequence_length": images[0].shape[1],
        # FSDP and ZeRO lower the weights. Autocast, which the others use, leaves an LSTM in fp32.
        "compute_dtype": "no" if strategy in ("baseline", "dp", "ddp") else precision,
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
    add("--dataset", choices=["mnist", "digits"], default="mnist", help="digits: no download")
    add("--data_dir", default="data", help="MNIST's files are in, or go to, DATA_DIR/MNIST/raw")
    add("--hidden_size", type=int, default=64, help="size of the LSTM's state")
    add("--prepare_data_only", action="store_true", help="read the data, then stop")
    add("--num_epochs", type=int, default=5, help="passes over the training data")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=64, help="samples in a micro-batch")
    add("--per_device_eval_batch_size", type=int, default=1000, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--learning_rate", type=float, default=0.005, help="the highest of the schedule")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add("--output_dir", type=os.path.expanduser, help="without it, a new folder in runs/")
    add("--logging_steps", type=int, default=50, help="steps from log to log; then a run can stop")
    add("--checkpointing_steps", type=int, help="steps from save to save, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    args = parser.parse_args()
    may_be_0 = ["seed", "dropout"]
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0 and not (value == 0 and name in may_be_0):
            abort(f"--{name} must be greater than 0, got {value}")
    if args.resume and not args.output_dir:
        abort("--resume goes on with the run in a folder: name it by --output_dir")
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
