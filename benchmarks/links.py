"""Do the predicted steps hold on slow links, and which strategy pays there?

    python benchmarks/links.py                    # as root, after `make slurm`; half an hour
    python benchmarks/links.py --hsdp             # only FSDP beside HSDP, two processes a node

starts the tests' Slurm cluster of two nodes on this machine and sets the speed of their links with
tc. At each speed, sbatch/check.sh measures the link and both scripts train on both nodes under each
strategy; on one node each strategy trains alone, which is what predictions start from. The last
link is also used with gradient accumulation. Prints the tables; the records stay in --output_dir,
and `python report.py OUTPUT_DIR/LINK` makes the report of a link.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import slurm_cluster  # noqa: E402  in the folders above

from planning import links  # noqa: E402
from reporting import comparing, records, splitting, tables  # noqa: E402

LINKS = {"10gbit": "256kb", "1gbit": "32kb", "200mbit": "4kb"}  # rate: burst, for tc's tbf
STRATEGIES = ["ddp", "fsdp", "zero2", "zero3"]
DATA = "tests/data/squad_v1.json"
TINY = ["train_bert_squad.py", "--model_name_or_path", "tests/data/tiny_bert", "--from_scratch"]
TINY += ["--train_file", DATA, "--validation_file", DATA, "--max_train_samples", "112"]
TINY += "--learning_rate 1e-3 --dropout 0 --per_device_train_batch_size 8".split()
WORKS = {
    "mnist": ["train_mnist_rnn.py", "--dataset", "digits", "--num_epochs", "20"],
    "bert": [*TINY, "--num_epochs", "8"],
}
COLUMNS = [
    "script",
    "link",
    "strategy",
    "gradient_accumulation_steps",
    "repeats",
    "spread",
    "samples_per_second",
    "step_seconds",
    *splitting.PREDICTED,
]
ACCUMULATED = {
    "bert-accumulated": [*TINY, "--gradient_accumulation_steps", "4", "--num_epochs", "45"]
}


def submit(cluster, nodes, folder, *words, processes=1, **more):
    """Run a job, alone on the cluster, unless its record is there. Raises AssertionError if it
    fails.
    """
    for name in ("run.json", "check.json"):
        record = folder / name
        if record.exists() and json.loads(record.read_text())["status"] == "completed":
            return
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PROCESSES_PER_NODE": str(processes)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    job = cluster.submit(
        f"--nodes={nodes}",
        "--gres=none",
        f"--cpus-per-task={processes}",
        "--time=20",
        f"--output={folder}.log",
        *words,
        "--output_dir",
        str(folder),
        cwd=ROOT,
        env=env | more,
    )
    assert cluster.wait(job, 1200) == "COMPLETED", f"{folder}.log"


def train(cluster, nodes, folder, works, repeats, strategies):
    """Train under each strategy, the repeats in turns."""
    for repeat in range(repeats):
        for work, (script, *flags) in works.items():
            for strategy in strategies:
                run = folder / work / f"{strategy}-{nodes}x1-r{repeat + 1}"
                yaml = f"accelerate_configs/{strategy}.yaml"
                submit(cluster, nodes, run, "sbatch/1node.sh", yaml, script, *flags)
                print(run, flush=True)


def predictions(folder, link):
    """The cells of one link on two nodes, with predicted steps, as a DataFrame."""
    runs, _ = records.read_runs(folder)
    measured, rows = links.find_links(folder), []
    for workload in comparing.find_workloads(runs):
        for cell in workload.cells:
            cell.prediction = splitting.predict_cell(cell, workload.cells, measured)
            rows.append(tables.plain_row(cell))
    found = pd.DataFrame(rows).assign(link=link)
    return found[found["predicted_step_seconds"].notna()]


def order_of(cells, column):
    """The strategies from the fastest on, as text; "=" joins two neighbours within 25 %."""
    cells = cells.sort_values(column)
    text, last = "", None
    for strategy, seconds in zip(cells["strategy"], cells[column], strict=True):
        text += ("" if last is None else " = " if seconds < 1.25 * last else " < ") + strategy
        last = seconds
    return text


def wrong_orders(cells):
    """The pairs of strategies that differ by more than 25 % and are predicted in the other
    order.
    """
    rows = cells.to_dict("records")
    return [
        f"{a['strategy']} before {b['strategy']}"
        for a in rows
        for b in rows
        if 1.25 * a["step_seconds"] < b["step_seconds"]
        and a["predicted_step_seconds"] > b["predicted_step_seconds"]
    ]


def main():
    parser = argparse.ArgumentParser(description="Predicted and measured steps on slow links.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/links"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS, help="only these")
    parser.add_argument("--hsdp", action="store_true", help="FSDP beside HSDP, nothing else")
    parser.add_argument("--report_only", action="store_true", help="of the records that are there")
    args = parser.parse_args()
    folder = args.output_dir.resolve()
    if not args.report_only:
        if problem := slurm_cluster.what_is_missing():
            sys.exit(f"error: {problem}")
        if args.hsdp:
            measure_hsdp(folder, args)
        else:
            measure(folder, args.repeats, args.links)
    if args.hsdp:
        return print(hsdp_table(folder, args))
    found = pd.concat([predictions(folder / link, link) for link in args.links])
    found[COLUMNS].to_csv(folder / "links.csv", index=False)
    print(
        tables.table(
            [
                {
                    "script": row["script"],
                    "link": row["link"],
                    "micro-batches": row["gradient_accumulation_steps"],
                    "strategy": row["strategy"],
                    "runs": row["repeats"],
                    "predicted ms": f"{row['predicted_step_seconds'] * 1000:.1f}",
                    "measured ms": f"{row['step_seconds'] * 1000:.1f}",
                    "repeats differ by": f"{row['spread']:.0%}",
                    "samples/s": f"{row['samples_per_second']:,.0f}",
                    "miss": f"{row['miss']:+.0%}",
                }
                for row in found.to_dict("records")
            ]
        )
    )
    for name, cells in found.groupby(["script", "link", "gradient_accumulation_steps"], sort=False):
        print(
            *name,
            "measured:",
            order_of(cells, "step_seconds"),
            "predicted:",
            order_of(cells, "predicted_step_seconds"),
            "wrong:",
            wrong_orders(cells) or "none",
        )
    inside = (found["miss"].abs() <= 0.25).sum()
    print(f"{inside} of {len(found)} predictions are within 25 %")


def shape(cluster, link):
    """Set the speed of both nodes' links. What waits longer than 50 ms would be dropped."""
    limit = ["tbf", "rate", link, "burst", LINKS[link], "latency", "50ms"]
    for node in cluster.nodes:
        cluster.on(node, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)


def measure_hsdp(folder, args):
    """FSDP over four processes, and HSDP: shards inside a node, replicas between nodes; by turns.
    tests/spy.py reads the counters of the network cards around ten steps.
    """
    flags = ["accelerate_configs/{}.yaml", "tests/spy.py", *TINY[1:], "--num_epochs", "12"]
    with tempfile.TemporaryDirectory() as state:
        cluster = slurm_cluster.Cluster(state)
        try:
            cluster.start()
            for link in args.links:
                shape(cluster, link)
                for repeat in range(args.repeats):
                    for name in ("fsdp", "hsdp"):
                        run = folder / link / f"{name}-2x2-r{repeat + 1}"
                        spy = {"SPY_SCRIPT": Path(TINY[0]).stem, "SPY_WIRE": str(run)}
                        words = [word.format(name) for word in flags]
                        submit(cluster, 2, run, "sbatch/1node.sh", *words, processes=2, **spy)
                        print(run, flush=True)
        finally:
            cluster.stop()


def hsdp_table(folder, args):
    """Rows of link and strategy: seconds of a step, and what a node sends in it to the other."""
    rows = []
    for link in args.links:
        for name in ("fsdp", "hsdp"):
            found = [folder / link / f"{name}-2x2-r{number + 1}" for number in range(args.repeats)]
            runs = [json.loads((run / "run.json").read_text()) for run in found]
            steps = [run["global_batch_size"] / run["samples_per_second"] * 1000 for run in runs]
            counters = [
                json.loads((run / f"wire_{rank}.json").read_text())
                for run in found
                for rank in (0, runs[0]["devices"] - 1)  # one of each node
            ]
            sent = statistics.mean(last - first for first, last in counters) / 10 / 1e6
            rows.append(
                {
                    "link": link,
                    "strategy": name,
                    "ms a step": f"{statistics.median(steps):.0f}",
                    "from to": f"{min(steps):.0f} to {max(steps):.0f}",
                    "MB that a node sends in a step": f"{sent:.2f}",
                    "last loss": f"{runs[0]['loss_history'][-1][1]:.6f}",
                }
            )
    return tables.table(rows)


def measure(folder, repeats, links):
    """Measure what is not there yet of these links."""
    with tempfile.TemporaryDirectory() as state:
        cluster = slurm_cluster.Cluster(state)
        try:
            cluster.start()
            # Nothing is sent on one node, so its runs are those of every link.
            train(cluster, 1, folder / "one", WORKS, repeats, ["baseline", *STRATEGIES])
            train(cluster, 1, folder / "one", ACCUMULATED, 1, ["baseline", "ddp", "fsdp", "zero2"])
            for link in links:
                shape(cluster, link)
                shutil.copytree(
                    folder / "one",
                    folder / link,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("checkpoints", "model.safetensors"),
                )
                for repeat in range(repeats):
                    check = folder / link / f"check-2x1-r{repeat + 1}"
                    submit(cluster, 2, check, "sbatch/check.sh")
                train(cluster, 2, folder / link, WORKS, repeats, STRATEGIES)
                if link == list(LINKS)[-1]:
                    train(cluster, 2, folder / link, ACCUMULATED, 1, ["ddp", "fsdp", "zero2"])
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
