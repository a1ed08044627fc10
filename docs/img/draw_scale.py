"""What BERT-base sends under each strategy on 2 to 4,096 devices: the table of docs/scale.md, and
its pictures.

    python docs/img/draw_scale.py [FOLDER]    # from docs/results/scale/counts.json
    python docs/img/draw_scale.py --count     # and 28 dry runs for it, half a minute each

BERT-base is in fp32, and a node has eight devices.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from picture import BLUE, GREEN, ORANGE, PINK, SKY, Picture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from common.facts import sent_share  # noqa: E402
from fit import MODELS  # noqa: E402

DATA = ROOT / "tests" / "data"
COUNTS = ROOT / "docs" / "results" / "scale" / "counts.json"
DEVICES = [2, 8, 64, 512, 4096]
PER_NODE = 8
OTHER = "zero2, other setting"  # zero2.yaml with use_multi_rank_bucket_allreduce as it is not
SETTING = "use_multi_rank_bucket_allreduce"
KEPT = json.loads(COUNTS.read_text())
COLOURS = {"ddp": "black", "fsdp": BLUE, "hsdp": GREEN}
COLOURS |= {"zero2": ORANGE, OTHER: PINK, "zero3": SKY}


def by_level(cell):
    """Calls of a step, and the bytes that a device sends for them inside a node and between nodes.
    Of DDP without its broadcast of buffers, and without single numbers.
    """
    found = dict.fromkeys(("calls", "inside", "between"), 0)
    for row in cell["collectives"]:
        if row["kind"] == "broadcast" or row["bytes"] <= 8:
            continue
        level = "between" if row["nodes"] > 1 else "inside"
        found["calls"] += row["calls"]
        found[level] += row["bytes"] * sent_share(row["kind"], row["group_size"])
    return found


def cells():
    """{(strategy, devices): what `by_level` says}. With one node HSDP is FSDP."""
    return {(cell["strategy"], cell["devices"]): by_level(cell) for cell in KEPT}


def table(found):
    """The table of the page: calls, and MB that a device sends inside and between nodes."""
    yield f"| calls; MB sent | {' | '.join(f'{n:,}' for n in DEVICES)} |"
    yield "|---" * (len(DEVICES) + 1) + "|"
    for strategy in COLOURS:
        texts = []
        for devices in DEVICES:
            cell = found.get((strategy, devices))
            sizes = cell and [f"{cell[level] / 1e6:,.0f}" for level in ("inside", "between")]
            if cell and strategy == "hsdp":
                texts.append(f"{cell['calls']:,}; {sizes[0]} and {sizes[1]}")
            else:
                texts.append(f"{cell['calls']:,}; {sizes[devices > PER_NODE]}" if cell else "")
        yield f"| {strategy} | {' | '.join(texts)} |"


# -------- dry runs


def make_inputs(folder):
    """BERT-base's config with the tests' small vocabulary, a window of text for each device, and
    the other zero2.yaml. Returns the script's words.
    """
    shutil.copytree(DATA / "tiny_bert", folder / "base")
    config = json.loads((folder / "base" / "config.json").read_text())
    config |= MODELS["bert-base"] | {"num_attention_heads": 12}
    (folder / "base" / "config.json").write_text(json.dumps(config))
    [paragraph] = json.loads((DATA / "squad_v1.json").read_text())["data"][0]["paragraphs"][:1]
    paragraph["context"] = paragraph["context"].split(". ")[0]
    answers = [{"text": paragraph["context"][:5], "answer_start": 0}]
    asked = [
        {"id": str(number), "question": "what?", "answers": answers}
        for number in range(DEVICES[-1])
    ]
    article = {"title": "", "paragraphs": [paragraph | {"qas": asked}]}
    (folder / "questions.json").write_text(json.dumps({"data": [article]}))
    settings = json.loads((ROOT / "accelerate_configs" / "zero2.json").read_text())
    settings["zero_optimization"][SETTING] = not settings["zero_optimization"][SETTING]
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
    """The dry_run.json of a strategy on a number of devices."""
    yaml = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    yaml = folder / yaml.name if strategy == OTHER else yaml
    nodes = max(1, devices // PER_NODE)
    out = folder / f"{strategy}-{devices}"
    command = [sys.executable, "tools/dry_run.py", "--nodes", nodes, devices, yaml]
    command += [*words, "--output_dir", out]
    print(f"{strategy} on {devices}", flush=True)
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found = json.loads((out / "dry_run.json").read_text())
    names = ("nodes", "parameters", "collectives", "held_bytes")
    return {"strategy": strategy, "devices": devices} | {name: found[name] for name in names}


def count_all():
    """Count all strategies on all numbers of devices, and write them down."""
    with tempfile.TemporaryDirectory() as folder:
        words = make_inputs(Path(folder))
        KEPT[:] = [
            count(strategy, devices, Path(folder), words)
            for devices in DEVICES
            for strategy in COLOURS
            if strategy != "hsdp" or devices > PER_NODE
        ]
    lines = ",\n".join(json.dumps(cell) for cell in KEPT)
    COUNTS.write_text(f"[\n{lines}\n]\n")


# -------- pictures: not as wide as the others, to leave room for the names of the lines

LEFT, RIGHT, TOP, BOTTOM = 70, 560, 40, 330
LEGEND = 585


def chart(title, series, low, high):
    """A Picture: lines over the number of devices, both axes by powers. `series`: {text: (colour,
    dash, {devices: value})}.
    """
    picture = Picture()
    picture.text(LEFT, 22, title, size=14)

    def x_of(devices):
        share = math.log(devices / DEVICES[0]) / math.log(DEVICES[-1] / DEVICES[0])
        return LEFT + share * (RIGHT - LEFT)

    def y_of(value):
        return BOTTOM - math.log(value / low) / math.log(high / low) * (BOTTOM - TOP)

    for devices in DEVICES:
        picture.text(x_of(devices), BOTTOM + 18, f"{devices:,}", "middle", 12)
    picture.text((LEFT + RIGHT) / 2, BOTTOM + 38, "devices, eight in a node", "middle", 12)
    value = low
    while value <= high:
        picture.line((LEFT, y_of(value)), (RIGHT, y_of(value)), dash="1 5")
        picture.text(LEFT - 8, y_of(value) + 4, f"{value:,}", "end", 12)
        value *= 10
    for number, (name, (colour, dash, values)) in enumerate(series.items()):
        points = [(x_of(devices), y_of(value)) for devices, value in values.items()]
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        look = f'fill="none" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"'
        y = TOP + 20 + 22 * number
        picture.lines.append(f'<path d="M{path}" {look}/>')
        picture.lines.append(f'<path d="M{LEGEND},{y} h28" {look}/>')
        picture.text(LEGEND + 36, y + 4, name, size=12)
    return picture


def draw(found, folder):
    """The two pictures."""

    def values(strategy, level):
        return {n: cell[level] for (name, n), cell in found.items() if name == strategy}

    calls = {name: (colour, "none", values(name, "calls")) for name, colour in COLOURS.items()}
    picture = chart("Calls of a step", calls, 1, 10_000)
    picture.save(folder / "scale-calls.svg", BOTTOM + 50)
    sizes = {}
    for name, colour in COLOURS.items():
        inside, between = values(name, "inside"), values(name, "between")
        megabytes = {n: (inside[n] + between[n]) / 1e6 for n in inside}
        dash = "8 8" if name == "zero2" else "none"  # over DDP's line, which stays visible
        sizes[name] = colour, dash, megabytes
        if name == "hsdp":
            megabytes = {n: size / 1e6 for n, size in between.items()}
            sizes["hsdp, between nodes alone"] = colour, "3 4", megabytes
    picture = chart("MB that a device sends in a step", sizes, 50, 5_000)
    picture.save(folder / "scale-bytes.svg", BOTTOM + 50)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--count", action="store_true", help="count anew before")
    args = parser.parse_args()
    if args.count:
        count_all()
    found = cells()
    args.folder.mkdir(parents=True, exist_ok=True)
    draw(found, args.folder)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
