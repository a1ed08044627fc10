"""Is the cluster ready? Shows hosts and devices, and measures how fast the ranks exchange data.

    sbatch sbatch/check.sh                                            # two nodes of a cluster
    accelerate launch --config_file accelerate_configs/ddp.yaml tools/check.py    # one machine

It writes OUTPUT_DIR/check.json: latency and bandwidth of each collective. The ranks use NCCL, or
gloo without GPUs.
"""

import json
import math
import os
import platform
import socket
import time
from datetime import timedelta
from pathlib import Path

from common.facts import sent_share
from common.printing import OneLineParser, stop

# isort: split
import numpy
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object

SIZES = [2**power for power in range(7, 26, 2)]  # bytes of the whole tensor, 128 B to 32 MiB
WORK_SECONDS = 0.005  # of computing before each collective, about as long as a layer takes
REPEATS, SECONDS = 20, 0.25  # for each size: 20 repeats, or fewer if they take more than 0.25 s
TOO_SLOW = 1.0  # seconds: after a slower call, a collective is not measured with more bytes
FEWEST = 3  # sizes that a fitted line needs, as two points always lie on one
# A message is "disturbed" if it took over 1.5 times as long as one 100 times as large. A factor of
# 1 would also find undisturbed ones by chance, because small messages take about equally long.
DISTURBED = 1.5

# The arguments: a whole tensor, this rank's part of it, and the rank that alone sends or receives.
COLLECTIVES = {
    "all_reduce": lambda whole, part, root: dist.all_reduce(whole),
    "all_gather": lambda whole, part, root: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part, root: dist.reduce_scatter_tensor(part, whole),
    "broadcast": lambda whole, part, root: dist.broadcast(whole, root),
    "reduce": lambda whole, part, root: dist.reduce(whole, root),
}


def make_work(device):
    """Return a function that computes for WORK_SECONDS, as training does between collectives."""
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
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # the same work on all ranks
    times = max(1, round(WORK_SECONDS / seconds.item()))
    return lambda: work(times)


def time_in_turns(state, functions, repeats):
    """Time the functions one after the other. Returns seconds on the slowest rank, a row for each
    repeat. A function takes the root of its broadcast or reduce, which changes with each repeat.
    """
    times = []
    for repeat in range(repeats):
        for function in functions:
            state.wait_for_everyone()
            start = time.perf_counter()
            function(repeat % state.num_processes)
            times.append(time.perf_counter() - start)
    times = torch.tensor(times, device=state.device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.view(repeats, len(functions))


def measure(state, name, size, work):
    """Return (bytes, seconds) of a collective of about `size` bytes of fp32. The seconds are what
    it adds to the work before it, as the median of the repeats.
    """
    ranks = state.num_processes
    part = torch.zeros(max(1, size // 4 // ranks), device=state.device)
    whole = torch.zeros(len(part) * ranks, device=state.device)

    def once(root):
        COLLECTIVES[name](whole, part, root)
        if state.device.type == "cuda":
            torch.cuda.synchronize()

    def after_work(root):
        work()
        once(root)

    functions = [lambda root: work(), after_work, once]
    first = time_in_turns(state, functions, 3).sum(1).median().item()
    repeats = min(REPEATS, max(5, int(SECONDS / first)))
    alone, both, call = time_in_turns(state, functions, repeats).unbind(1)
    # The difference is noisy, so a call without work before it is a lower bound.
    return whole.numel() * 4, max((both - alone).median().item(), call.median().item())


def fit_line(points):
    """Fit seconds = latency + bytes / bandwidth to points (bytes on the bus, seconds). Returns
    {"latency_seconds", "bandwidth_bytes_per_second", "residual"}.

    The fit minimises the squares of relative errors. They are relative to the time plus `noise`,
    the median of the smaller half, because small times are less certain. The residual is their
    root mean square.
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


def line_of(name, times, ranks):
    """Return what check.json says of a collective with these times, [bytes, seconds]: its line, or
    None for each value, and the disturbed sizes, which the line leaves out.
    """
    disturbed = [
        size
        for size, seconds in times
        if any(other >= 100 * size and DISTURBED * less < seconds for other, less in times)
    ]
    share = sent_share(name, ranks)
    if name in ("broadcast", "reduce"):
        # The busiest rank sends the whole tensor. NCCL's tests count it in the same way:
        # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        share = 1
    points = [(size * share, seconds) for size, seconds in times if size not in disturbed]
    names = ("latency_seconds", "bandwidth_bytes_per_second", "residual")
    line = fit_line(points) if len(points) >= FEWEST else dict.fromkeys(names)
    return line | {"disturbed": disturbed, "times": times}


def words_of(line):
    """Return the printed form of what `line_of` returns."""
    if line["residual"] is None:
        words = "too few times for a line"
    else:
        words = (
            f"{line['latency_seconds'] * 1e6:6,.0f} µs + bytes / "
            f"{line['bandwidth_bytes_per_second'] / 1e9:.3f} GB/s, errors {line['residual']:.0%}"
        )
    sizes = ", ".join(f"{size:,}" for size in line["disturbed"])
    return words + (f", disturbed: repeat it (bytes: {sizes})" if sizes else "")


def measure_all(state, say):
    """Measure all collectives. Returns {collective: what `line_of` returns}."""
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
            if name in too_slow:
                line += f"{'':15}"
                continue
            times.append(measure(state, name, size, work))
            line += f"{times[-1][1] * 1000:15.3f}"
            if times[-1][1] > TOO_SLOW:  # the same on all ranks
                too_slow.add(name)
        say(line)
    say("as a line, latency + bytes on the bus / bandwidth:")
    found = {name: line_of(name, times, state.num_processes) for name, times in found.items()}
    for name, line in found.items():
        say(f"{name:>15}: {words_of(line)}")
    twice, once = (sent_share(name, state.num_processes) for name in ("all_reduce", "all_gather"))
    say(
        "Bytes on the bus are the bytes that the busiest rank sends. Here they are the tensor's "
        f"bytes times\n{twice:.2f} for an all-reduce, {once:.2f} for an all-gather or "
        "reduce-scatter, and 1 for a broadcast or reduce.\n"
        "Errors are the typical distance of a time from the line, in percent of the time."
    )
    if any(line["disturbed"] for line in found.values()):
        say(
            f"Disturbed messages took over {DISTURBED:g} times as long as one 100 times as large: "
            "something else kept\nthe ranks or the link busy. The line leaves them out."
        )
    return found


def parse_args():
    parser = OneLineParser(description="Check a cluster: its devices, and the speed between ranks.")
    add = parser.add_argument
    add("--output_dir", default="runs/check", help="where check.json goes (default: %(default)s)")
    add("--resume", action="store_true", help="has no effect; the jobs of sbatch/ pass it")
    return parser.parse_args()


def main():
    args = parse_args()
    gpu, host = torch.cuda.is_available(), socket.gethostname()
    if not gpu and torch.cuda.device_count():
        stop(
            f"{host} has a GPU that torch {torch.__version__} cannot use: is the driver too old? "
            "See README, 'On a Slurm cluster'"
        )
    state = PartialState(cpu=not gpu, timeout=timedelta(seconds=120))
    world = state.num_processes
    device = torch.cuda.get_device_name(state.device) if gpu else f"CPU ({platform.machine()})"
    rank = {
        "rank": state.process_index,
        "host": host,
        "device": device,
        "torch_sees": torch.cuda.device_count(),
        "cores": len(os.sched_getaffinity(0)),
    }
    ranks = gather_object([rank])
    say = print if state.is_main_process else lambda line: None  # state.print would once per node
    line = "rank {rank}  {host}  {device}  ({torch_sees} GPUs visible, {cores} cores)"
    for rank in ranks:
        say(line.format(**rank))
    backend = dist.get_backend() if world > 1 else None
    say(f"backend {backend}")
    if world == 1:
        say("one process cannot measure a collective: ask for two nodes, or two GPUs")
    record = {
        "status": "completed",
        "nodes": len({rank["host"] for rank in ranks}),
        "processes": world,
        "backend": backend,
        "collectives": measure_all(state, say) if world > 1 else None,
        "ranks": ranks,
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }
    if state.is_main_process:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "check.json").write_text(json.dumps(record, indent=1) + "\n")
        say(f"ready: {record['nodes']} node(s), {world} process(es); record: {folder}/check.json")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
