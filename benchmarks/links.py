"""FSDP beside HSDP on two nodes with slow links.

    python benchmarks/links.py                    # as root, after `make slurm`; half an hour

starts the two-node Slurm cluster of sbatch/laptop.py, and sets the speed of its links with tc. At
each speed a tiny BERT trains on two processes of each node, by turns under fsdp.yaml, which shards
over all four ranks, and under hsdp.yaml, which shards inside a node. tests/spy.py reads the
counters of the network cards around ten steps. Prints the table; the records stay in --output_dir.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "sbatch")]

import laptop  # noqa: E402  in the folders above

from common.printing import markdown_table, stop  # noqa: E402

LINKS = {"1gbit": "32kb", "200mbit": "4kb"}  # rate: burst, for tc's tbf
FLAGS = """--model_name_or_path tests/data/tiny_bert --from_scratch --max_train_samples 112
    --train_file tests/data/squad_v1.json --validation_file tests/data/squad_v1.json
    --learning_rate 1e-3 --dropout 0 --per_device_train_batch_size 8 --num_epochs 12""".split()


def shape(cluster, link):
    """Set the speed of both nodes' links. What waits longer than 50 ms would be dropped."""
    limit = ["tbf", "rate", link, "burst", LINKS[link], "latency", "50ms"]
    for node in cluster.nodes:
        cluster.on(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)


def train(cluster, strategy, run):
    """Train on both nodes. A completed run stays as it is. Raises AssertionError if that fails."""
    run.parent.mkdir(parents=True, exist_ok=True)
    spy = {"SPY_SCRIPT": "train_bert_squad", "SPY_WIRE": str(run)}
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PROCESSES_PER_NODE": "2"}
    words = "--nodes=2 --gres=none --cpus-per-task=2 --time=20".split()
    words += [f"--output={run}.log", "sbatch/1node.sh", f"accelerate_configs/{strategy}.yaml"]
    words += ["tests/spy.py", *FLAGS, "--output_dir", str(run)]
    job = cluster.submit(*words, cwd=ROOT, env=env | spy)
    assert cluster.wait(job, 1200) == "COMPLETED", f"{run}.log"
    print(run, flush=True)


def measure(runs):
    """Train all `runs`, {(link, strategy): [folder, ...]}, the strategies by turns."""
    with tempfile.TemporaryDirectory() as state:
        cluster = laptop.Cluster(state)
        try:
            cluster.start()
            for link in LINKS:
                shape(cluster, link)
                for turn in zip(runs[link, "fsdp"], runs[link, "hsdp"], strict=True):
                    for strategy, run in zip(("fsdp", "hsdp"), turn, strict=True):
                        train(cluster, strategy, run)
        finally:
            cluster.stop()


def rows_of(runs):
    """The table: ms of a step, and what a node sends in it to the other one."""
    yield ["link", "strategy", "ms a step", "from to", "MB that a node sends in a step"]
    for (link, strategy), folders in runs.items():
        records = [json.loads((run / "run.json").read_text()) for run in folders]
        steps = [run["global_batch_size"] / run["samples_per_second"] * 1000 for run in records]
        files = [run / f"wire_{rank}.json" for run in folders for rank in (0, 3)]  # of each node
        counters = [json.loads(file.read_text()) for file in files]
        sent = statistics.mean(last - first for first, last in counters) / 10 / 1e6
        ends = f"{min(steps):.0f} to {max(steps):.0f}"
        yield [link, strategy, f"{statistics.median(steps):.0f}", ends, f"{sent:.2f}"]


def main():
    parser = argparse.ArgumentParser(description="FSDP beside HSDP on slow links.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/links"))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    problem = laptop.what_is_missing()
    if problem:
        stop(problem)
    folder = args.output_dir.resolve()
    runs = {
        (link, strategy): [folder / link / f"{strategy}-2x2-r{n + 1}" for n in range(args.repeats)]
        for link in LINKS
        for strategy in ("fsdp", "hsdp")
    }
    measure(runs)
    print(markdown_table(list(rows_of(runs))))


if __name__ == "__main__":
    main()
