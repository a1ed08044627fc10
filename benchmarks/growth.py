"""How the cost grows: with the questions, with the processes, and with the size of a checkpoint.

    python benchmarks/growth.py --train_file JSON

On CPUs, one thread per process, with random weights. Where the file has fewer questions than a row
asks for, they are there again under other ids. Some 40 minutes on two cores.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import ROOT, launcher, role

TINY = ROOT / "tests" / "data" / "tiny_bert"
SCRIPT = "train_bert_squad.py"


def run(folder, *flags, strategy=None, processes=1):
    """Run the script to its end, or resume it. Returns its run.json, seconds, and peak MB of the
    process that was started: with a strategy, of the launcher.
    """
    words = [*launcher(strategy), "--num_processes", processes] if strategy else []
    command = [sys.executable, *words, SCRIPT, "--from_scratch", "--output_dir", folder, *flags]
    began = time.time()
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    problems = process.stderr.read().decode()
    _, code, usage = os.wait4(process.pid, 0)  # of this child alone, with those it waited for
    if code:
        sys.exit(f"{' '.join(map(str, command))}\n{problems}")
    return json.loads((folder / "run.json").read_text()), time.time() - began, usage.ru_maxrss / 1e3


def first_questions(source, count, file):
    """Write the first `count` questions of a file in SQuAD's form, again and again if need be."""
    articles, left, copy = json.loads(Path(source).read_text())["data"], count, 0
    chosen = []
    while left:
        for article in articles:
            for paragraph in article["paragraphs"]:
                asked = [qa | {"id": f"{qa['id']}-{copy}"} for qa in paragraph["qas"][:left]]
                left -= len(asked)
                if asked:
                    chosen.append({"paragraphs": [paragraph | {"qas": asked}]})
        copy += 1
    file.write_text(json.dumps({"data": chosen}))
    return ["--train_file", file, "--max_train_samples", 0]


def with_the_questions(args, folder):
    """A table: start-up and peak memory of a process, at first and from the cache."""
    print(
        "| questions | windows | first start | peak memory | cached start | peak memory |\n"
        "|---|---|---|---|---|---|"
    )
    few = first_questions(args.train_file, 100, folder / "few.json")[1]
    for count in args.questions:
        os.environ["HF_HOME"] = str(folder / f"cache-{count}")
        flags = [
            *first_questions(args.train_file, count, folder / f"{count}.json"),
            "--validation_file",
            few,
            "--model_name_or_path",
            TINY,
            "--max_train_steps",
            1,
        ]
        cells = []
        for start in range(1 + args.repeats):
            record, _, peak = run(folder / f"data-{count}-{start}", *flags)
            cells.append((record["seconds"]["startup"], peak))
        first, cached = (
            cells[0],
            [statistics.median(values) for values in zip(*cells[1:], strict=True)],
        )
        print(
            f"| {count:,} | {record['workload']['samples']:,} | {first[0]:.1f} s | "
            f"{first[1]:,.0f} MB | {cached[0]:.1f} s | {cached[1]:,.0f} MB |",
            flush=True,
        )
    return flags


def time_imports():
    """Stands in for the script on a rank: it imports what that imports, and ends."""
    script = importlib.import_module(SCRIPT.removesuffix(".py"))
    print("number:", script.age(), flush=True)
    os._exit(0)  # as the script does


def with_the_processes(args, folder):
    """A table: from `accelerate launch` to the first step, from the cache."""
    print("\n| processes | the launcher | imports | the rest | in all |\n|---|---|---|---|---|")
    few = first_questions(args.train_file, 1000, folder / "1000.json")
    flags = [*few, "--validation_file", few[1], "--model_name_or_path", TINY]
    flags += "--max_eval_samples 100 --max_train_steps 1".split()
    for processes in (1, 2, 4):
        cells = []
        for repeat in range(args.repeats):
            words = [*launcher("ddp"), "--num_processes", str(processes)]
            imports = role(__file__, launcher=words)
            record, seconds, _ = run(
                folder / f"ddp-{processes}-{repeat}", *flags, strategy="ddp", processes=processes
            )
            start, outside = record["seconds"]["startup"], seconds - record["seconds"]["total"]
            cells.append((outside, imports, start - imports, outside + start))
        row = [f"{statistics.median(column):.1f} s" for column in zip(*cells, strict=True)]
        print(f"| {processes} | {' | '.join(row)} |", flush=True)


def with_the_checkpoint(args, folder):
    """A table: what it takes to save a checkpoint and to resume from it, checksums included."""
    print(
        "\n| strategy, 2 processes | checkpoint | a save | a resumption | per 100 MB: save | "
        "resume |\n|---|---|---|---|---|---|"
    )
    few = first_questions(args.train_file, 100, folder / "few.json")
    data = [*few, "--validation_file", few[1], "--max_eval_samples", 10]
    data += "--max_seq_length 128 --doc_stride 32 --per_device_train_batch_size 1".split()
    for strategy in ("ddp", "fsdp", "zero3"):
        for hidden in args.hidden_sizes:
            model = folder / f"bert-{hidden}"
            shutil.copytree(TINY, model, dirs_exist_ok=True)
            sizes = {
                "hidden_size": hidden,
                "intermediate_size": 4 * hidden,
                "num_hidden_layers": 6,
                "num_attention_heads": 8,
            }
            config = json.loads((TINY / "config.json").read_text()) | sizes
            (model / "config.json").write_text(json.dumps(config))
            name, flags = folder / f"{strategy}-{hidden}", [*data, "--model_name_or_path", model]

            def outside_of_steps(often, *more, name=name, flags=flags, strategy=strategy):
                """Seconds of the start, and of what is no start, no step and no evaluation."""
                record, _, _ = run(
                    name.with_suffix(f".{often}"),
                    *flags,
                    "--max_train_steps",
                    9,
                    "--checkpointing_steps",
                    often,
                    *more,
                    strategy=strategy,
                    processes=2,
                )
                spent = record["seconds"]
                return spent["startup"], spent["total"] - sum(
                    spent[key] for key in ("startup", "train", "eval")
                )

            kept, cells = name.with_suffix(".1"), []
            for _ in range(args.repeats):
                fresh, one_save = outside_of_steps(9)
                also_fresh, nine_saves = outside_of_steps(1)
                last = kept / "checkpoints" / "step_00000009"
                size = sum(f.stat().st_size for f in last.rglob("*")) / 1e8
                shutil.rmtree(last)  # as a kill before the last save leaves it
                record = json.loads((kept / "run.json").read_text()) | {"status": "running"}
                (kept / "run.json").write_text(json.dumps(record))
                resumed, _ = outside_of_steps(1, "--resume")
                cells.append(((nine_saves - one_save) / 8, resumed - (fresh + also_fresh) / 2))
                shutil.rmtree(kept)
                shutil.rmtree(name.with_suffix(".9"))
            save, resume = (statistics.median(column) for column in zip(*cells, strict=True))
            print(
                f"| {strategy} | {100 * size:,.0f} MB | {save:.2f} s | {resume:.2f} s | "
                f"{save / size:.2f} s | {resume / size:.2f} s |",
                flush=True,
            )


TABLES = {
    "questions": with_the_questions,
    "processes": with_the_processes,
    "checkpoint": with_the_checkpoint,
}


def main():
    if sys.argv[1:] == ["--role"]:
        return time_imports()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train_file", required=True, help="SQuAD's training questions")
    add("--questions", type=int, nargs="+", default=[1000, 10_000, 87_599], help="of the rows")
    add("--hidden_sizes", type=int, nargs="+", default=[256, 512, 768], help="of the checkpoints")
    add("--repeats", type=int, default=3, help="of each figure; the row has the middle one")
    add("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="only these")
    args = parser.parse_args()
    args.train_file = Path(args.train_file).resolve()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder  # its cache, and not the user's
        for name in args.tables:
            TABLES[name](args, Path(folder))


if __name__ == "__main__":
    main()
