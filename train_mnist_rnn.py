"""Train an LSTM on MNIST, on one device or many. The accelerate YAML chooses the strategy.

    accelerate launch --config_file accelerate_configs/ddp.yaml train_mnist_rnn.py
    python train_mnist_rnn.py --dataset digits    # one process; needs no download

A run writes into OUTPUT_DIR: run.json (its record), model.safetensors, best/ (the model of the
epoch with the best accuracy) and checkpoints/ (the two newest, for --resume).

A rank is one of the processes that train together. Functions marked "A collective" must be called
by every rank, or the others hang.
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
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import safetensors.torch
import torch
import torch._dynamo  # early, to keep it out of peak memory
import torch.nn.functional as F
from accelerate import Accelerator, PartialState, utils
from torch import nn
from torch.distributed.elastic.multiprocessing import errors
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main(args):
    """Run the training, from its flags to its record. Returns the model."""
    accelerator, strategy = make_accelerator(args)
    # Rank 0 goes first, as it may download. Then one rank per node reads, then the others.
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        images = read_images(args)
    if args.prepare_data_only:
        return say(f"{args.dataset} is ready: {len(images[0])} training images")
    run = describe_run(accelerator, strategy, args)
    run["workload"] |= {
        "model": f"lstm-{args.hidden_size}",
        "dataset": args.dataset,
        "samples": len(images[0]),
        "eval_samples": len(images[1]),
        "checksum": zlib.crc32(b"".join(values.numpy().tobytes() for values in images)),
        "sequence_length": images[0].shape[1],
        # Under these, bf16 is autocast's, which RowLSTM turns off. The others cast the weights.
        "compute_dtype": "no" if strategy in ("baseline", "dp", "ddp") else run["precision"],
    }
    utils.set_seed(args.seed)  # all ranks start with the same weights
    model = RowLSTM(images[0].shape[2], args.hidden_size, args.dropout)
    run["parameters"] = sum(weight.numel() for weight in model.parameters())
    train_loader, test_loader = make_loaders(accelerator, args, images, run["devices"])
    micro_batches = args.gradient_accumulation_steps
    steps_per_epoch = len(train_loader) // micro_batches
    steps = args.max_train_steps or args.num_epochs * steps_per_epoch
    epochs = math.ceil(steps / steps_per_epoch)
    save_every = args.checkpointing_steps or steps
    checkpoint = run["resumed_from"] = open_folder(accelerator, args, run)
    if strategy == "dp":  # accelerate has no DataParallel
        model = nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(
        model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    schedule = OneCycleLR(optimizer, args.learning_rate, steps, cycle_momentum=False)
    model, optimizer, schedule, train_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader
    )
    # Separately: DeepSpeed takes its batch size from the loaders prepared with the model.
    test_loader = accelerator.prepare(test_loader)
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
        losses, norm = [], None
        began = time.perf_counter()
        for rows, labels in batches:
            with accelerator.accumulate(model):
                rate = schedule.get_last_lr()[0]
                loss = F.cross_entropy(model(rows).float(), labels)
                accelerator.backward(loss)  # averages over micro-batches and ranks
                if args.max_grad_norm and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())  # .item() would synchronise with the GPU
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
                stopping, listen_at = listen(accelerator, signals, losses, began, progress.step)
                if saving or stopping:
                    save_checkpoint(accelerator, run, progress)
                if stopping:
                    end_run(accelerator, run, progress, "preempted")
                losses = []
                began = time.perf_counter()
        accuracy = validate(accelerator, model, test_loader, run, progress, signals)
        say(
            f"epoch {epoch + 1}/{epochs}: test accuracy {accuracy:.2%}, "
            f"training loss {progress.losses[-1]:.4f}, {progress.train_seconds:.1f} s of training"
        )
        if accuracy > max((metrics["accuracy"] for metrics in progress.evaluations), default=-1):
            save_model(accelerator, model, f"{args.output_dir}/best")
        progress.evaluations.append({"accuracy": accuracy})
    profiler.stop()
    save_model(accelerator, model, args.output_dir)
    end_run(accelerator, run, progress, "completed")
    return model


@torch.no_grad()
def validate(accelerator, model, loader, run, progress, signals):
    """Return the accuracy on the test images. A signal ends the run. A collective."""
    began = time.perf_counter()
    model.eval()
    right = []
    for rows, labels in batches_to_evaluate(accelerator, loader, run, progress, signals):
        right.append(accelerator.gather_for_metrics(model(rows).argmax(1) == labels))
    accuracy = torch.cat(right).double().mean().item()
    progress.eval_seconds += time.perf_counter() - began
    accelerator.log({"accuracy": accuracy}, progress.step)
    return accuracy


class LSTM(nn.LSTM):
    def flatten_parameters(self):
        """Move no weights, as torch 2.15 would on a GPU: FSDP2 would lose them."""
        warnings.filterwarnings("ignore", message="RNN module weights are not part")


class RowLSTM(nn.Module):
    """Reads an image row by row. In: float [batch, rows, columns]; out: logits [batch, 10]."""

    def __init__(self, columns, hidden_size, dropout):
        super().__init__()
        self.lstm = LSTM(columns, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, rows):
        # No autocast: on CUDA, torch 2.15 would run an LSTM in fp16 under autocast to bf16.
        with torch.autocast(rows.device.type, enabled=False):
            outputs, _ = self.lstm(rows.to(self.head.weight.dtype))
        return self.head(self.dropout(outputs[:, -1]))


def read_images(args):
    """Return the training and test images, [images, rows, columns], then their labels."""
    if args.dataset == "digits":
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        arrays = train_test_split(
            digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
        )
        return [torch.tensor(array) for array in arrays]
    from torchvision.datasets import MNIST

    train = MNIST(args.data_dir, train=True, download=True)
    test = MNIST(args.data_dir, train=False, download=True)
    return [train.data, test.data, train.targets, test.targets]


class Images(TensorDataset):
    def __getitems__(self, ids):
        """Return a whole batch: float32 [batch, rows, columns] and int64 [batch]."""
        ids = torch.tensor(ids)
        if self.tensors[0].is_cuda:  # pinned memory: an asynchronous copy
            ids = ids.pin_memory().to(self.tensors[0].device, non_blocking=True)
        return tuple(values[ids] for values in self.tensors)


def make_loaders(accelerator, args, images, devices):
    """The DataLoaders for training and testing. Each batch is split across the ranks, so the number
    of ranks does not change which samples a step takes.
    """
    train_x, test_x, train_y, test_y = [values.to(accelerator.device) for values in images]
    std, mean = torch.std_mean(train_x.float(), correction=0)
    train = Images((train_x.float() - mean) / std, train_y)
    test = Images((test_x.float() - mean) / std, test_y)
    batch = args.per_device_train_batch_size * devices
    global_batch = batch * args.gradient_accumulation_steps
    if global_batch > len(train):
        abort(f"the global batch ({global_batch}) is larger than the training set ({len(train)})")
    samples = len(train) // global_batch * global_batch  # whole global batches only
    # With a generator of their own, the loaders do not disturb the one that dropout uses. `Images`
    # returns whole batches, so there is nothing to collate.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    sampler = RandomSampler(train, num_samples=samples)
    train_loader = DataLoader(train, batch, sampler=sampler, **options)
    eval_batch = args.per_device_eval_batch_size * devices
    return train_loader, DataLoader(test, eval_batch, **options)


def parse_args():
    parser = argparse.ArgumentParser(description="Train an LSTM on MNIST.", allow_abbrev=False)
    add_common_args(parser)
    add = parser.add_argument
    add("--dataset", choices=["mnist", "digits"], default="mnist", help="digits needs no download")
    add("--data_dir", default="data", help="MNIST is downloaded to DATA_DIR/MNIST/raw if needed")
    add("--hidden_size", type=positive_int, default=64, help="size of the LSTM's state")
    add("--num_epochs", type=positive_int, default=5, help="passes over the training data")
    add("--per_device_train_batch_size", type=positive_int, default=64, help="per micro-batch")
    add("--per_device_eval_batch_size", type=positive_int, default=1000, help="per batch")
    add("--learning_rate", type=float, default=0.005, help="peak of a one-cycle schedule")
    add("--weight_decay", type=float, default=0.01, help="for AdamW")
    add("--logging_steps", type=positive_int, default=50, help="log the loss every N steps")
    return parser.parse_args()


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
