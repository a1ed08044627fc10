"""Train an LSTM on MNIST, on one device or many. The strategy is the accelerate YAML; the script never changes.

    accelerate launch --config_file accelerate_configs/ddp.yaml train_mnist_rnn.py
    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 4 train_mnist_rnn.py --num_epochs 10
    accelerate launch --config_file accelerate_configs/baseline.yaml train_mnist_rnn.py --dataset digits  # no download

The YAMLs are baseline, dp, ddp, fsdp, zero2 and zero3. Without a GPU the same strategies run on CPU processes, over
gloo. An image is read as a sequence of its rows, top to bottom; the LSTM's last output says which digit it is. A run
leaves in OUTPUT_DIR: run.json (the record), model.safetensors (the full final weights), checkpoints/ (to resume).
Read this file from top to bottom; the training loop is `train_epoch`.
"""

import argparse
import contextlib
import datetime
import gzip
import json
import logging
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
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
from safetensors.torch import save_file
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
        description="Train an LSTM on MNIST, one image row a time step. Strategy, precision and number of processes "
        "are not flags of this script: they belong to `accelerate launch` and its YAML.",
        epilog="example: accelerate launch --config_file accelerate_configs/ddp.yaml train_mnist_rnn.py --num_epochs 3",
    )
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")  # not a usage text from every process
    add = parser.add_argument
    add("--dataset", choices=["mnist", "digits"], default="mnist", help="mnist: 60,000 images of 28x28, downloaded once"
        " (default); digits: 1,797 images of 8x8 that come with scikit-learn, no network needed")
    add("--data_dir", default="data", help="MNIST's files are in, or go to, DATA_DIR/MNIST/raw (default: %(default)s)")
    add("--prepare_data_only", action="store_true", help="fetch and check the data, then stop: for login nodes")
    add("--output_dir", help="where results go; all nodes must see it (default: a fresh folder under runs/)")
    add("--num_epochs", type=int, default=5, help="passes over the training images (default: %(default)s)")
    add("--max_train_steps", type=int, help="number of optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=64, help="images a device and micro-batch (%(default)s)")
    add("--per_device_eval_batch_size", type=int, default=1000, help="images a device, in evaluation (%(default)s)")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches a step (default: %(default)s); "
        "global batch = per-device batch x devices x micro-batches")
    add("--learning_rate", type=float, default=0.005, help="peak of the one-cycle schedule (%(default)s), whatever the "
        "number of devices")
    add("--hidden_size", type=int, default=64, help="size of the LSTM's state (default: %(default)s)")
    add("--dropout", type=float, default=0.1, help="on the LSTM's last output (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, sample order and dropout (default: %(default)s)")
    add("--checkpointing_steps", type=int, help="save every so many optimizer steps, besides after every epoch")
    add("--resume", action="store_true", help="continue from OUTPUT_DIR's newest complete checkpoint, if there is one")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace a few steps into OUTPUT_DIR/traces, for Perfetto and report.py;"
        " the run is not a timing then")
    add("--collective_timeout", type=int, default=300, help="seconds after which a rank that waits for another gives up"
        " (default: %(default)s)")
    args = parser.parse_args()
    check_args(parser, args, may_be_zero=("seed", "dropout"))
    return args


# -------------------------------------------------------------------------------------------------------------- data


@dataclass
class Images:
    """A split of the data, on the training device: MNIST is only 47 MB, so a batch is an index select."""

    pixels: torch.Tensor  # uint8 [samples, rows, columns]
    labels: torch.Tensor  # int64 [samples]
    mean: float  # of the training pixels
    std: float

    @torch.profiler.record_function("load data")  # its name in a trace
    def batch(self, ids):
        """Normalised images, float32 [batch, rows, columns], and labels, int64 [batch], of the samples `ids`."""
        return (self.pixels[ids].float() - self.mean) / self.std, self.labels[ids]


def fetch_mnist(data_dir):
    """Put MNIST's four files into DATA_DIR/MNIST/raw, unless they are there by MD5. Returns what went wrong or None."""
    from torchvision.datasets import MNIST
    from torchvision.datasets.utils import check_integrity, download_url

    raw = Path(data_dir) / "MNIST" / "raw"
    socket.setdefaulttimeout(20)  # a node without a network may drop packets silently
    for name, md5 in MNIST.resources:
        fault = "is corrupt (its MD5 is wrong)" if (raw / name).exists() else "is missing"
        for mirror in MNIST.mirrors:
            try:
                if not check_integrity(raw / name, md5):
                    download_url(mirror + name, raw, md5=md5)
                break
            except (OSError, RuntimeError, HTTPException) as problem:
                reason = problem
        else:
            files = ", ".join(name for name, _ in MNIST.resources)
            return (f"{raw / name} {fault} and the download failed ({reason}): without a network, place {files} in "
                    f"{raw}, or use --dataset digits, which needs none")


def load_images(accelerator, args):
    """The training and the test split, on this process's device."""
    if args.dataset == "digits":
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        train_x, test_x, train_y, test_y = train_test_split(
            digits.images.astype(np.uint8), digits.target, test_size=360, random_state=0, stratify=digits.target)
    else:
        # Global rank 0 fetches first; then nodes whose disk is another find nothing there, and fetch theirs.
        fail_if_any(fetch_mnist(args.data_dir) if accelerator.is_main_process else None)
        fail_if_any(fetch_mnist(args.data_dir) if accelerator.is_local_main_process else None)

        def read(name, header_bytes, shape):  # of the IDX format: a header, then one byte a pixel or label
            with gzip.open(Path(args.data_dir) / "MNIST" / "raw" / name) as file:
                return np.frombuffer(file.read(), np.uint8, offset=header_bytes).reshape(shape)

        train_x, test_x = (read(f"{split}-images-idx3-ubyte.gz", 16, (-1, 28, 28)) for split in ("train", "t10k"))
        train_y, test_y = (read(f"{split}-labels-idx1-ubyte.gz", 8, -1) for split in ("train", "t10k"))
    mean, std = float(train_x.mean()), float(train_x.std())
    return [Images(torch.tensor(x, device=accelerator.device),
                   torch.tensor(y, device=accelerator.device, dtype=torch.long), mean, std)
            for x, y in ((train_x, train_y), (test_x, test_y))]


def epoch_order(num_samples, seed, epoch, global_batch_size):
    """The sample ids of each step of an epoch, int64 [steps, global batch]; the last incomplete batch is dropped.

    It depends on seed and epoch alone: any number of processes walks through the same global batches, and a resumed
    run finds its place by counting steps.
    """
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))
    steps = num_samples // global_batch_size
    return order[: steps * global_batch_size].view(steps, global_batch_size)


# ------------------------------------------------------------------------------------------------------------- model


class RowLSTM(nn.Module):
    """Reads an image row by row. In: float [batch, rows, columns]; out: logits [batch, 10]."""

    def __init__(self, columns, hidden_size, dropout):
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden_size, batch_first=True)
        # On a GPU an LSTM moves its weights into one buffer. That would cut them off from the parameters that FSDP2
        # gathers at every step, so that they never train, and would make checkpoints drop all weights but the first.
        self.lstm.flatten_parameters = lambda: None
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, rows):
        outputs, _ = self.lstm(rows.to(self.head.weight.dtype))  # DeepSpeed's bf16 does not cast the inputs
        return self.head(self.dropout(outputs[:, -1]))  # no BatchNorm: each rank would have its own statistics


# ---------------------------------------------------------------------------------------------------------- training


def train_epoch(accelerator, model, optimizer, schedule, images, run):
    """Train to the end of the epoch, or to a step at which all ranks agree to stop; returns whether to stop."""
    args, epoch = run.args, len(run.progress.evaluations)
    order = epoch_order(len(images.labels), args.seed, epoch, run.global_batch_size)
    # Of each global batch, rank r takes the r-th slice, in micro-batches: int64 [steps, accumulation, batch].
    slices = order.view(len(order), accelerator.num_processes, args.gradient_accumulation_steps, -1)
    my_ids = slices[:, accelerator.process_index].to(accelerator.device)

    model.train()
    for micro_batches in my_ids[run.start_epoch()]:
        losses = []
        for ids in micro_batches:
            rows, labels = images.batch(ids)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows).float(), labels)  # never in lower precision
                accelerator.backward(loss)  # divides by the micro-batches of a step; gradients are means over ranks
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        learning_rate = optimizer.param_groups[0]["lr"]
        schedule.step()
        if run.end_step(accelerator, losses, learning_rate):
            return True
    return False


@torch.no_grad()
def evaluate(accelerator, model, images, batch_size):
    """Accuracy over all images, each counted once, whatever the number of processes.

    All ranks run the same number of batches, as sharded models communicate in the forward pass: places beyond the
    last image are filled with it, and not counted.
    """
    model.eval()
    total = len(images.labels)
    counts = torch.zeros(2, device=accelerator.device)  # correct, seen; exact up to 16 million in float32
    for start in range(0, total, batch_size * accelerator.num_processes):
        ids = start + accelerator.process_index * batch_size + torch.arange(batch_size, device=accelerator.device)
        rows, labels = images.batch(ids.clamp(max=total - 1))
        correct = model(rows).argmax(1) == labels
        counts += torch.stack([(correct & (ids < total)).sum(), (ids < total).sum()])
    correct, seen = accelerator.reduce(counts, "sum").tolist()
    assert seen == total, f"evaluation counted {seen:.0f} of {total} images"
    return correct / total


def main():
    args = parse_args()
    stop_signals = catch_stop_signals()
    accelerator, strategy = make_accelerator(args)
    train_images, test_images = load_images(accelerator, args)
    if args.prepare_data_only:
        say(f"{args.dataset}: {len(train_images.labels)} training and {len(test_images.labels)} test images are ready")
        return accelerator.end_training()
    run = Run(accelerator, strategy, args, stop_signals, {
        "model": f"lstm-{args.hidden_size}",
        "dataset": args.dataset,
        "samples": len(train_images.labels),
        "eval_samples": len(test_images.labels),
        "sequence_length": train_images.pixels.shape[1],
    })

    warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
    set_seed(args.seed)  # the same weights on all ranks
    model = RowLSTM(train_images.pixels.shape[2], args.hidden_size, args.dropout)
    run.record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    model, optimizer = prepare(accelerator, strategy, model, optimizer)
    # The schedule is not prepared: accelerate would step it once for every process.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, run.total_steps, cycle_momentum=False)
    accelerator.register_for_checkpointing(schedule)
    set_seed(args.seed, device_specific=True)  # other dropout masks on each rank

    if run.start(accelerator) == "completed":
        return accelerator.end_training()
    stopped = False
    while len(run.progress.evaluations) < run.epochs and not stopped:
        stopped = train_epoch(accelerator, model, optimizer, schedule, train_images, run)
        if not stopped:
            clock = time.perf_counter()
            accuracy = evaluate(accelerator, model, test_images, args.per_device_eval_batch_size * run.gpus_a_process)
            run.add_evaluation(accelerator, {"accuracy": accuracy}, accuracy, time.perf_counter() - clock)
            say(f"epoch {len(run.progress.evaluations)}/{run.epochs}: test accuracy {accuracy:.2%}, training loss "
                f"{run.progress.loss_history[-1][1]:.4f}, {run.seconds['train']:.1f} s of training")
        save_checkpoint(accelerator, run)

    if not stopped:
        weights = accelerator.get_state_dict(model)  # gathered from all ranks where they are sharded
        if accelerator.is_main_process:
            # torch.compile puts a prefix before the names.
            weights = {name.replace("_orig_mod.", ""): weight.cpu().clone() for name, weight in weights.items()}
            save_file(weights, run.folder / ".model")
            (run.folder / ".model").replace(run.folder / "model.safetensors")
    accuracy = run.progress.evaluations[-1]["accuracy"] if run.progress.evaluations else None
    run.finish(stopped, {"accuracy": accuracy})
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
