"""Is the cluster fit? Hosts, devices, versions, and how fast the ranks all-reduce, over NCCL or, without GPUs, gloo.

    sbatch sbatch/check.sh

leaves check.json in OUTPUT_DIR: latency and bandwidth of the link, which report.py takes to predict step times.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import accelerate
import torch
from accelerate.utils import gather_object

SIZES = [4, 2**16, 2**20, 2**24, 2**26]  # bytes
SECONDS = 2  # about as long as each size is measured


def measure(state, size):
    """Seconds of one all-reduce of `size` bytes of float32: the median over repeats of the slowest rank's time."""
    numbers = torch.full((size // 4,), float(state.process_index + 1), device=state.device)
    torch.distributed.all_reduce(numbers)
    expected = state.num_processes * (state.num_processes + 1) / 2
    assert numbers.min() == numbers.max() == expected, f"all-reduce of {size} bytes is wrong"
    times = []
    for repeat in range(3 + 200):  # the first three warm up
        state.wait_for_everyone()
        if state.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.distributed.all_reduce(numbers)
        if state.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        spent = torch.tensor([sum(times), times[-1]], device=state.device, dtype=torch.float64)
        torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
        total, times[-1] = spent.tolist()
        if repeat >= 5 and total > SECONDS:
            break
    return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description="Check a cluster: who takes part, and all-reduce times between them.")
    parser.add_argument("--output_dir", default="runs/check", help="where check.json goes (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="taken for the wrappers' sake; a check measures anew")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and torch.cuda.device_count():
        sys.exit(f"error: {socket.gethostname()} has a GPU that torch {torch.__version__} cannot use: is the driver "
                 "too old for it? README, 'On a Slurm cluster'")
    state = accelerate.PartialState(cpu=not gpu, timeout=timedelta(seconds=60))
    world = state.num_processes
    device = torch.cuda.get_device_name(state.device) if gpu else f"CPU ({platform.machine()})"
    ranks = gather_object([{"rank": state.process_index, "host": socket.gethostname(), "device": device,
                            "torch_sees": torch.cuda.device_count(), "cores": len(os.sched_getaffinity(0))}])
    say = print if state.is_main_process else lambda line: None  # state.print says it once a node
    for rank in ranks:
        say("rank {rank}  {host}  {device}  ({torch_sees} GPUs visible, {cores} cores)".format(**rank))
    backend = torch.distributed.get_backend() if world > 1 else None
    versions = {"python": platform.python_version(), "torch": torch.__version__, "accelerate": accelerate.__version__,
                "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None}
    say(f"backend {backend}, " + ", ".join(f"{name} {version}" for name, version in versions.items()))

    rows = []
    if world == 1:
        say("one process has nobody to talk to: ask for two nodes, or two GPUs")
    else:
        say(f"all-reduce over {world} ranks:\n{'bytes':>12} {'time in ms':>12} {'GB/s':>8}")
    for size in SIZES if world > 1 else []:
        seconds = measure(state, size)
        # Bus bandwidth, what the slowest link carries: each rank sends and receives 2 (n - 1) / n of the bytes.
        # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        bandwidth = size * 2 * (world - 1) / world / seconds
        rows.append({"bytes": size, "seconds": seconds, "bytes_per_second": bandwidth})
        say(f"{size:12,} {seconds * 1000:12.3f} {bandwidth / 1e9:8.3f}")
    record = {
        "status": "completed",
        "nodes": len({rank["host"] for rank in ranks}),
        "processes": world,
        "backend": backend,
        "latency_seconds": rows[0]["seconds"] if rows else None,  # of the smallest all-reduce
        "bandwidth_bytes_per_second": rows[-1]["bytes_per_second"] if rows else None,  # of the largest
        "all_reduce": rows,
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
