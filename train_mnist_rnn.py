"""Train an LSTM on MNIST, on one device or many. The strategy is the accelerate YAML.

    accelerate launch --config_file accelerate_configs/ddp.yaml train_mnist_rnn.py
    python train_mnist_rnn.py --dataset digits    # one process; needs no download

A run leaves run.json (the record), model.safetensors and checkpoints/ in OUTPUT_DIR.

Read to the end of `main`, and `train` first. All below it is the same in both scripts.
"""

import argparse
import contextlib
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
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState, utils
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchvision.datasets import MNIST
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


def parse_args():
    """The flags of a run. Anything wrong with them ends it with one line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
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
    add("--num_epochs", type=int, default=5, help="passes over the data")
    add("--max_train_steps", type=int, help="optimizer steps; overrides --num_epochs")
    add("--per_device_train_batch_size", type=int, default=64, help="samples in a micro-batch")
    add("--per_device_eval_batch_size", type=int, default=1000, help="samples per device")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
    add("--learning_rate", type=float, default=0.005, help="the highest of the schedule")
    add("--max_grad_norm", type=float, help="clip each step's gradients to this norm")
    add("--dropout", type=float, default=0.1, help="share of activations set to 0")
    add("--seed", type=int, default=0, help="of new weights, sample order and dropout")
    add(
        "--output_dir",
        default=time.strftime("runs/mnist_rnn-%Y%m%d-%H%M%S"),
        help="where results go; all nodes must see it",
    )
    add("--checkpointing_steps", type=int, help="save every so many steps, besides each epoch")
    add("--resume", action="store_true", help="go on from OUTPUT_DIR's newest checkpoint, if any")
    add("--with_tracking", action="store_true", help="write TensorBoard logs into OUTPUT_DIR")
    add("--profile", action="store_true", help="trace steps 13 to 17; not for timings")
    add("--collective_timeout", type=int, default=1800, help="seconds that a rank waits for others")
    args = parser.parse_args()
    may_be_0 = "seed", "dropout"
    for name, value in vars(args).items():
        if type(value) in (int, float) and not (value > 0 or value == 0 and name in may_be_0):
            fail(f"--{name} must be greater than 0, got {value}")
    if args.dropout >= 1:
        fail(f"--dropout must be less than 1, got {args.dropout}")
    return args


# -------- data


class Images(TensorDataset):
    """Pixels and labels, on the training device."""

    def __getitems__(self, ids):
        """A whole batch: float32 [batch, rows, columns] and int64 [batch]."""
        ids = torch.tensor(ids).to(self.tensors[0].device, non_blocking=True)
        return tuple(values[ids] for values in self.tensors)


def read_images(args):
    """[training pixels, labels, test pixels, labels], downloaded if need be."""
    if args.dataset == "digits":
        digits = load_digits()
        train_x, test_x, train_y, test_y = train_test_split(
            digits.images, digits.target, test_size=360, random_state=0, stratify=digits.target
        )
        arrays = train_x.astype("uint8"), train_y, test_x.astype("uint8"), test_y
        return [torch.tensor(array) for array in arrays]
    socket.setdefaulttimeout(20)  # some networks drop packets silently
    try:
        train, test = (MNIST(args.data_dir, train, download=True) for train in (True, False))
        return [train.data, train.targets, test.data, test.targets]
    except Exception as problem:
        names = ", ".join(name for name, _ in MNIST.resources)
        fail(
            f"cannot read MNIST: {problem!r}; without a network, place {names} in "
            f"{args.data_dir}/MNIST/raw, or use --dataset digits"
        )


def make_loaders(train_x, train_y, test_x, test_y, run):
    """The DataLoaders of both splits; a batch is that of all ranks. The Dataset makes it whole."""
    device, pixels = run.accelerator.device, train_x.float()
    mean, std = pixels.mean().item(), pixels.std(correction=0).item()
    train_images, test_images = (
        Images(((x.float() - mean) / std).to(device), y.to(device))
        for x, y in ((train_x, train_y), (test_x, test_y))
    )
    # Any number of processes walks through the same global batches. What fills none is dropped.
    sampler = RandomSampler(
        train_images,
        generator=torch.Generator(),
        num_samples=run.steps_per_epoch * run.global_batch_size,
    )
    sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(run.args.seed + epoch)
    # Without a generator of its own, a loader draws from dropout's: other masks on resume.
    options = {"collate_fn": tuple, "generator": torch.Generator()}
    test_batch = run.args.per_device_eval_batch_size * run.devices
    return (
        DataLoader(train_images, run.batch_size, sampler=sampler, **options),
        DataLoader(test_images, test_batch, **options),
    )


# -------- model


class RowLSTM(nn.Module):
    """Reads an image row by row. In: float [batch, rows, columns]; out: logits [batch, 10]."""

    def __init__(self, columns, hidden_size, dropout):
        super().__init__()
        self.lstm = nn.LSTM(columns, hidden_size, batch_first=True)
        # On a GPU an LSTM moves its weights into one buffer, away from what FSDP2 gathers.
        self.lstm.flatten_parameters = lambda: None
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, 10)

    def forward(self, rows):
        """In the weights' dtype: autocast on CUDA would run an LSTM in fp16, not in bf16."""
        with torch.autocast(rows.device.type, enabled=False):
            outputs, _ = self.lstm(rows.to(self.head.weight.dtype))
        return self.head(self.dropout(outputs[:, -1]))


# -------- training


def train(accelerator, model, optimizer, schedule, train_loader, test_loader, run):
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
        for rows, labels in loader:
            if run.step == run.total_steps:
                break
            run.seconds["loading"] += time.perf_counter() - waiting
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows).float(), labels)  # never in lower precision
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
            if accelerator.sync_gradients and run.end_step():
                stop = run.sync(learning_rate)  # reads the losses
                if stop or run.saving:
                    save_checkpoint(accelerator, optimizer, run)
                if stop:
                    return True
            waiting = time.perf_counter()
        accuracy = evaluate(accelerator, model, test_loader)
        if accuracy is None:
            return True
        run.add_evaluation({"accuracy": accuracy}, accuracy, f"test accuracy {accuracy:.2%}")
    return False


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """The accuracy, of each image once; None if all ranks agreed to stop."""
    model.eval()
    right = []
    for rows, labels in loader:
        if accelerator.check_trigger():
            return None
        right.append(accelerator.gather_for_metrics(model(rows).argmax(1) == labels))
    return torch.cat(right).double().mean().item()


def save_model(accelerator, model, folder):
    """Save the weights, gathered from all ranks if they are sharded. A collective."""
    weights = accelerator.get_state_dict(model) or {}  # of ZeRO-3, on rank 0 alone
    weights = {
        name.replace("_orig_mod.", ""): part.float()  # torch.compile's prefix
        for name, part in weights.items()
    }
    accelerator.save(weights, folder / "model.safetensors", safe_serialization=True)


def main():
    """One run, from its flags to its record."""
    args = parse_args()
    accelerator, strategy = make_accelerator(args)
    data = train_x, train_y, test_x, test_y = in_turn(read_images, args)
    if args.prepare_data_only:
        say(f"{args.dataset}: {len(train_y)} training and {len(test_y)} test images are ready")
        return

    peak_memory()
    memory_before = peak_memory()
    utils.set_seed(args.seed)  # the same weights on all ranks
    model = RowLSTM(train_x.shape[2], args.hidden_size, args.dropout)
    sizes = [weight.numel() for weight in model.parameters()]
    sharded = strategy not in ("baseline", "dp", "ddp")  # autocast leaves an LSTM in fp32
    run = Run(
        accelerator,
        strategy,
        args,
        memory_before,
        {
            "model": f"lstm-{args.hidden_size}",
            "dataset": args.dataset,
            "samples": len(train_y),
            "eval_samples": len(test_y),
            "sequence_length": train_x.shape[1],
            "compute_dtype": accelerator.mixed_precision if sharded else "no",
        },
        {"parameters": sum(sizes), "tensors": sizes},
    )
    if run.found == "completed":
        return

    train_loader, test_loader = make_loaders(*data, run)
    if strategy == "dp":  # accelerate has no DataParallel: a thread for each GPU
        model = nn.DataParallel(model.to(accelerator.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, run.total_steps, cycle_momentum=False
    )
    model, optimizer, train_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, schedule
    )
    test_loader = accelerator.prepare(test_loader)  # alone: DeepSpeed reads all batch sizes
    utils.set_seed(args.seed, device_specific=True)  # other dropout masks on each rank

    with run.start(optimizer) as run.profiler:
        stopped = train(accelerator, model, optimizer, schedule, train_loader, test_loader, run)
    if not stopped:
        save_model(accelerator, model, run.folder)
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
