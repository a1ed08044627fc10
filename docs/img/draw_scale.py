"""What BERT-base sends under each strategy on up to 4,096 devices: docs/scale.md's numbers.

    python docs/img/draw_scale.py --count    # 28 dry runs, 15 minutes alone on two cores
    python docs/img/draw_scale.py [FOLDER]   # the table, and the pictures drawn into FOLDER

Each dry run counts BERT-base with random weights, in fp32, with a micro-batch of one window of 64
tokens, on nodes of eight devices.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for planning/
DATA = ROOT / "tests" / "data"
COUNTS = ROOT / "docs" / "results" / "scale" / "counts.json"
BASE = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "vocab_size": 30522,
}
DEVICES = [2, 8, 64, 512, 4096]
PER_NODE = 8
OTHER = "zero2, multi-rank buckets"  # zero2.yaml with the other value of its JSON's setting
STRATEGIES = ["ddp", "fsdp", "hsdp", "zero2", OTHER, "zero3"]


def make_inputs(folder):
    """BERT-base's config with the tests' small vocabulary, a window of text for each of 4,096
    devices, and the other zero2.yaml. Returns the script's words.
    """
    shutil.copytree(DATA / "tiny_bert", folder / "base")
    config = json.loads((folder / "base" / "config.json").read_text())
    (folder / "base" / "config.json").write_text(json.dumps(config | BASE))
    [paragraph] = json.loads((DATA / "squad_v1.json").read_text())["data"][0]["paragraphs"][:1]
    paragraph["context"] = paragraph["context"].split(". ")[0]
    answers = [{"text": paragraph["context"][:5], "answer_start": 0}]
    asked = [
        {"id": str(number), "question": "what?", "answers": answers}
        for number in range(max(DEVICES))
    ]
    article = {"title": "", "paragraphs": [paragraph | {"qas": asked}]}
    (folder / "questions.json").write_text(json.dumps({"data": [article]}))
    settings = json.loads((ROOT / "accelerate_configs" / "zero2.json").read_text())
    name = "use_multi_rank_bucket_allreduce"
    settings["zero_optimization"][name] = not settings["zero_optimization"][name]
    (folder / "other.json").write_text(json.dumps(settings))
    text = (ROOT / "accelerate_configs" / "zero2.yaml").read_text()
    (folder / f"{OTHER}.yaml").write_text(
        text.replace("accelerate_configs/zero2.json", str(folder / "other.json"))
    )
    files = ["--train_file", folder / "questions.json", "--validation_file"]
    return [
        ROOT / "train_bert_squad.py",
        *("--model_name_or_path", folder / "base", "--from_scratch"),
        *(*files, DATA / "squad_v1.json", "--max_train_samples", 0, "--max_seq_length", 64),
        *("--doc_stride", 16, "--per_device_train_batch_size", 1),
    ]


def count(strategy, devices, folder, words):
    """The dry_run.json of a strategy on so many devices."""
    yaml = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    yaml = folder / yaml.name if strategy == OTHER else yaml
    nodes = max(1, devices // PER_NODE)
    out = folder / f"{strategy}-{devices}"
    command = [sys.executable, ROOT / "dry_run.py", "--nodes", nodes, devices, yaml]
    began = time.time()
    with open(folder / "log", "w") as log:
        words = list(map(str, [*command, *words, "--output_dir", out]))
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        _, code, usage = os.wait4(process.pid, 0)
    if code:
        sys.exit((folder / "log").read_text())
    print(
        f"{strategy} on {devices}: {time.time() - began:.0f} s, of the CPU "
        f"{usage.ru_utime + usage.ru_stime:.0f} s, {usage.ru_maxrss / 1e6:.1f} GB",
        flush=True,
    )
    found = json.loads((out / "dry_run.json").read_text())
    names = ("nodes", "parameters", "collectives", "held_bytes", "peak_bytes")
    return {"strategy": strategy, "devices": devices} | {name: found[name] for name in names}


def count_all():
    """Count all cells, and write them down."""
    with tempfile.TemporaryDirectory() as folder:
        words = make_inputs(Path(folder))
        cells = [
            count(strategy, devices, Path(folder), words)
            for devices in DEVICES
            for strategy in STRATEGIES
            if strategy != "hsdp" or devices > PER_NODE  # with one node it is FSDP
        ]
    lines = ",\n".join(json.dumps(cell) for cell in cells)
    COUNTS.write_text(f"[\n{lines}\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--count", action="store_true", help="count anew before")
    args = parser.parse_args()
    if args.count:
        count_all()


if __name__ == "__main__":
    main()
