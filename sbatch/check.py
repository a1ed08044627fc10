"""Is the cluster fit? Hosts, devices, versions, and how fast the ranks talk: over NCCL or, without
GPUs, gloo.

    sbatch sbatch/check.sh                                            # two nodes of a cluster
    accelerate launch --config_file accelerate_configs/ddp.yaml sbatch/check.py    # one machine

leaves check.json in OUTPUT_DIR: latency and bandwidth of each collective, from which report.py
predicts step times.
"""

import argparse
import json
import math
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import accelerate
import numpy
import torch
import torch.distributed as dist
from accelerate.utils import gather_object

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from planning.links import bus_share  # noqa: E402  in the folder above

SIZES = [2**power for power in range(7, 26, 2)]  # bytes of the whole tensor, 128 B to 32 MiB
WORK_SECONDS = 0.005  # of computing before each collective, about as long as a layer takes
REPEATS, SECONDS = 40, 0.5  # each size is measured so often, or, if that takes longer, so long
TOO_SLOW = 1.0  # a collective that takes so many seconds is not measured with more bytes

# Each takes a whole tensor, a part of it for each rank, and the rank that sends or receives alone.
COLLECTIVES = {
    "all_reduce": lambda whole, part, root: dist.all_reduce(whole),
    "all_gather": lambda whole, part, root: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part, root: dist.reduce_scatter_tensor(part, whole),
    "broadcast": lambda whole, part, root: dist.broadcast(whole, root),
    "reduce": lambda whole, part, root: dist.reduce(whole, root),
}


def make_work(device):
    """A function that computes for about WORK_SECONDS, as training does between two collectives."""
    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True).to(device)
    inputs = torch.randn(8, 32, 128, device=device)

    def work(times):
        for _ in range(times):
            layer(inputs).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    work(10)
    start = time.perf_counter()
    work(10)
    seconds = torch.tensor((time.perf_counter() - start) / 10, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # all ranks do as much
    times = max(1, round(WORK_SECONDS / seconds.item()))
    return lambda: work(times)


def mean_cycle(state, work, repeats, collective=None):
    """Seconds of some work and a collective after it: the slowest rank's, the mean over repeats.
    And this rank's own, and the CPU seconds of its threads in them.
    """
    state.wait_for_everyone()
    times, computed = [], time.process_time()
    for repeat in range(repeats):
        start = time.perf_counter()
        work()
        if collective:
            collective(repeat % state.num_processes)
        times.append(time.perf_counter() - start)
    computed = (time.process_time() - computed) / repeats
    times = torch.tensor(times, device=state.device)
    own = times.mean().item()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.mean().item(), own, computed


def measure(state, name, size, work):
    """(bytes, seconds, CPU seconds, seconds in a row, core share) of one collective of about `size`
    bytes of fp32: what it adds to the work before it, and what it takes right after another one.
    The root of a broadcast or reduce changes from one to the next. The share: of its time, how long
    this rank computed when all did nothing else.

    Collectives in a row are faster: caches are warm, and no thread has to wait until the scheduler
    gives it a core.
    """
    ranks = state.num_processes
    part = torch.empty(max(1, size // 4 // ranks), device=state.device)
    whole = torch.empty(len(part) * ranks, device=state.device)

    def once(root):
        COLLECTIVES[name](whole, part, root)
        if state.device.type == "cuda":
            torch.cuda.synchronize()

    check(name, whole, part, state.process_index, ranks, once)
    for values in (whole, part):
        values.zero_()  # they are added up again and again
    first, *_ = mean_cycle(state, work, 3, once)
    repeats = min(REPEATS, max(5, int(SECONDS / first)))
    alone, own, computed_alone = mean_cycle(state, work, repeats)
    seconds, _, computed = mean_cycle(state, work, repeats, once)
    in_a_row, *_ = mean_cycle(state, lambda: None, repeats, once)
    after = max(seconds - alone, in_a_row)  # a difference of two means is noisy, and never less
    return whole.numel() * 4, after, computed - computed_alone, in_a_row, computed_alone / own


def check(name, whole, part, rank, ranks, once):
    """Raises AssertionError if a collective does not do what its name says."""
    for values in (whole, part):
        values.fill_(rank + 1)
    once(root=0)
    total = ranks * (ranks + 1) / 2
    numbers = {"reduce_scatter": part, "all_gather": whole.view(ranks, -1)[:, 0]}.get(name, whole)
    expected = torch.full_like(numbers, 1 if name == "broadcast" else total)
    if name == "all_gather":
        expected = torch.arange(1, ranks + 1).to(numbers)
    if name != "reduce" or rank == 0:
        assert torch.equal(numbers, expected), f"{name} of {whole.numel() * 4} bytes is wrong"


def fit_line(points):
    """The line seconds = latency + bytes / bandwidth through points (bytes on the bus, seconds):
    {"latency_seconds", "bandwidth_bytes_per_second", "residual"}.

    Least squares of errors relative to the time plus `noise`, the median of the smaller half: what
    is small is known less well. The residual is the root mean square of these errors.
    """
    carried, seconds = numpy.array(points, float).T
    noise = numpy.median(seconds[: max(1, len(seconds) // 2)])
    slope, latency = numpy.polyfit(carried, seconds, 1, w=1 / (seconds + noise))
    latency, slope = max(latency, 0.0), max(slope, 1e-15)  # noise can make them negative
    errors = (latency + slope * carried - seconds) / (seconds + noise)
    return {
        "latency_seconds": float(latency),
        "bandwidth_bytes_per_second": float(1 / slope),
        "residual": math.sqrt((errors**2).mean()),
    }


def measure_all(state, say):
    """{collective: its line, its line in a row, and its times as [bytes, seconds, seconds in a
    row]}. Also `busy`: for how much of the largest all-reduce's time this rank's CPU worked on it.
    And the share of a core that a rank got, at least, while all computed: below 1, other programs
    ran. On a GPU, 0 and None.
    """
    found, too_slow = {name: [] for name in COLLECTIVES}, set()
    work = make_work(state.device)
    say(
        f"time in ms over {state.num_processes} ranks after {WORK_SECONDS * 1000:.0f} ms of "
        "computing, by bytes of the whole tensor:"
    )
    say(f"{'bytes':>12}" + "".join(f"{name:>15}" for name in COLLECTIVES))
    for size in SIZES:
        line = f"{size:12,}"
        for name, times in found.items():
            if name not in too_slow:
                times.append(measure(state, name, size, work))
                line += f"{times[-1][1] * 1000:15.3f}"
                if times[-1][1] > TOO_SLOW:  # the same on all ranks
                    too_slow.add(name)
            else:
                line += f"{'':15}"
        say(line)
    _, seconds, computed, *_ = found["all_reduce"][-1]
    shares = [row[-1] for times in found.values() for row in times]
    share = torch.tensor(sorted(shares)[len(shares) // 2], device=state.device)
    dist.all_reduce(share, dist.ReduceOp.MIN)
    say("as a line, latency + bytes on the bus / bandwidth; and right after another one:")
    for name, times in found.items():
        carried = bus_share(name, state.num_processes)
        lines = [fit_line([(row[0] * carried, row[column]) for row in times]) for column in (1, 3)]
        found[name] = lines[0] | {
            "in_a_row": lines[1],
            "times": [[size, after, row] for size, after, _, row, _ in times],
        }
        say(
            f"{name:>15}: "
            + "; ".join(
                "{:6,.0f} µs + bytes / {:.3f} GB/s, errors {:.0%}".format(
                    line["latency_seconds"] * 1e6,
                    line["bandwidth_bytes_per_second"] / 1e9,
                    line["residual"],
                )
                for line in lines
            )
        )
    if state.device.type == "cuda":
        return found, 0.0, None
    say(f"while all ranks computed, the slowest got {share:.0%} of its core")
    return found, min(1.0, max(0.0, computed / seconds)), share.item()


def parse_args():
    parser = argparse.ArgumentParser(
        description="Check a cluster: who takes part, and how fast the ranks talk."
    )
    parser.add_argument(
        "--output_dir", default="runs/check", help="where check.json goes (default: %(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="taken for the wrappers' sake; a check measures anew"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    gpu, host = torch.cuda.is_available(), socket.gethostname()
    if not gpu and torch.cuda.device_count():
        sys.exit(
            f"error: {host} has a GPU that torch {torch.__version__} cannot use: is the "
            "driver too old for it? README, 'On a Slurm cluster'"
        )
    seen = sorted(os.sched_getaffinity(0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not gpu and 1 < node_size <= len(seen):  # each rank on cores of its own, as in training
        share = len(seen) // node_size
        os.sched_setaffinity(0, seen[local_rank * share :][:share])
    state = accelerate.PartialState(cpu=not gpu, timeout=timedelta(seconds=120))
    world = state.num_processes
    device = torch.cuda.get_device_name(state.device) if gpu else f"CPU ({platform.machine()})"
    ranks = gather_object(
        [
            {
                "rank": state.process_index,
                "host": host,
                "device": device,
                "torch_sees": torch.cuda.device_count(),
                "cores": len(seen),
            }
        ]
    )
    say = print if state.is_main_process else lambda line: None  # state.print says it once a node
    for rank in ranks:
        say(
            "rank {rank}  {host}  {device}  ({torch_sees} GPUs visible, {cores} cores)".format(
                **rank
            )
        )
    backend = dist.get_backend() if world > 1 else None
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    }
    say(f"backend {backend}, " + ", ".join(f"{name} {of}" for name, of in versions.items()))
    if world == 1:
        say("one process has nobody to talk to: ask for two nodes, or two GPUs")
    collectives, busy, core_share = measure_all(state, say) if world > 1 else (None, None, None)
    record = {
        "status": "completed",
        "nodes": len({rank["host"] for rank in ranks}),
        "processes": world,
        "backend": backend,
        "network": os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME"),
        "collectives": collectives,
        "busy": busy,
        "core_share": core_share,
        "ranks": ranks,
        "versions": versions,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }
    if state.is_main_process:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "check.json").write_text(json.dumps(record, indent=1) + "\n")
        say(f"fit: {record['nodes']} node(s), {world} process(es); record: {folder}/check.json")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
