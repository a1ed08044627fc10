"""docs/lab/13-report.md: its commands run (jobs are listed, none is submitted) and print what it
shows; its tables are those of the reports; its template names what exists.
"""

import csv
import json
import re
import shutil
import statistics
import subprocess

import pytest
from conftest import ROOT, table_of
from test_lab import blocks_of

import fit
from planning import links, memory, prediction

pytestmark = pytest.mark.slow
LAB, MEASURED = ROOT / "docs" / "lab", ROOT / "docs" / "results" / "report-cpu"
TEXT, TEMPLATE = ((LAB / name).read_text() for name in ("13-report.md", "report-template.md"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, example_records):
    """{commands of a block: what they print}, typed in order in the project's root, with some
    records in place of those of the sweeps. And the folder.
    """
    found, folder = {}, tmp_path_factory.mktemp("exercise")
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs"):
            (folder / path.name).symlink_to(path)
    for name in ("baseline-1x1-r1", "ddp-1x1-r1", "ddp-1x2-r1", "check-1x2-r1"):
        shutil.copytree(example_records / "bert" / name, folder / "runs/report/bert" / name)
    for commands, shown in blocks_of(TEXT):
        runs = re.sub(r"sbatch/sweep\.sh (?!--dry_run)", "sbatch/sweep.sh --dry_run ", commands)
        done = subprocess.run(
            ["bash", "-c", runs.replace("make sweep", "make --dry-run sweep")],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert (done.returncode != 0) == shown.startswith("error:"), done.stdout
        found[commands] = done.stdout
    return found, folder


def test_commands_print_what_the_page_shows(outputs):
    for commands, shown in blocks_of(TEXT):
        printed = [line.strip() for line in outputs[0][commands].splitlines()]
        for line in shown.splitlines():
            found = any(text == line.strip() or len(line) > 60 and line in text for text in printed)
            assert line == "..." or found, f"{commands}\nprints no {line!r}:\n{printed}"
        for repeats in re.findall(r"make sweep REPEATS=(\d)", commands):
            assert f'--repeats {repeats}"' in outputs[0][commands]
    example = TEXT.split("```text\n")[1].split("```")[0]
    assert (LAB / "times-by-hand.csv").read_text().startswith(example)


def test_tables_are_those_of_the_reports(outputs):
    """Of the times taken by hand; of bookkeeping and communication."""
    report = (outputs[1] / "runs/report/by-hand/report.md").read_text()
    assert table_of(TEXT, "nodes x devices") == table_of(report, "nodes x devices")
    works = (MEASURED / "report.md").read_text().split("# Details")[1].split("\n## ")[1:3]
    parts = [table_of(work, "strategy   | nodes x devices   | step   |")[1:] for work in works]
    costs = {(row[0], row[1]): row[4:6] for row in parts[0]}
    for name, alone, sent in table_of(TEXT, "strategy | bookkeeping")[1:]:
        assert (costs[name, "1 x 1"][0], costs[name, "1 x 2"][1]) == (alone, sent)
    assert sum(int(points) for _, points, _ in table_of(TEXT, "part | points")[1:]) == 100


def test_the_times_taken_by_hand_are_the_predictors():
    """By the numbers of the page. Two nodes get 0.8 % more; DP copies, and halves the computing."""
    step = float(re.search(r"10,000 steps of ([\d.]+) ms", TEXT)[1]) / 1e3
    added = re.search(r"strategies add (.*?) of their own", TEXT, re.S)[1]
    found = re.findall(r"([\d.]+)(?: ms)?\s\((.*?)\)", added)
    own = {name.lower().replace("-", ""): float(ms) / 1e3 for ms, name in found}
    link = links.link_of(35e9, 20e-6)
    model = fit.MODELS["bert-base"]
    names = ("layers", "hidden_size", "intermediate_size", "positions")
    sizes = dict(zip(names, [*(model[name] for name in memory.SIZES[:3]), 512], strict=True))
    parameters = memory.count_parameters(model)[0]
    times = {}
    for row in csv.DictReader((LAB / "times-by-hand.csv").read_text().splitlines()):
        minutes, _, seconds = row["seconds"].rstrip("s").rpartition("m")
        cell = row["strategy"], int(row["nodes"]), int(row["gpus_per_node"])
        times.setdefault(cell, []).append(60 * float(minutes or 0) + float(seconds))
    assert len(own) == 4
    for (strategy, nodes, gpus), repeats in times.items():
        n = nodes * gpus
        expected = 186.6
        if strategy == "dp" and gpus > 1:
            expected = 10_000 * (8 * parameters / 35e9 + step / 2)
        elif strategy in own:
            config = ROOT / "accelerate_configs" / f"{strategy}.json"
            options = json.loads(config.read_text())["zero_optimization"] if config.exists() else {}
            row = sizes | {"strategy": strategy, "strategy_options": options, "tensors": None}
            row |= {"parameters": parameters, "gradient_accumulation_steps": 1}
            row |= {"precision": "no", "device_name": "GPU"}
            expected = 10_000 / n * prediction.predict(step + own[strategy], row, n, link)
        assert statistics.median(repeats) == pytest.approx(expected, rel=0.012), strategy


def test_the_template_names_what_exists(example_records):
    files = {
        f"{kind}.json": json.loads((example_records / name / f"{kind}.json").read_text())
        for kind, name in (("run", "bert/ddp-1x2-r1"), ("check", "bert/check-1x2-r1"))
    }
    with open(MEASURED / "report.csv") as file:
        files["report.csv"] = next(csv.DictReader(file))
    written = {
        re.sub(r"-\d\.svg", ".svg", path.name)
        for folder in (MEASURED, example_records)
        for path in folder.rglob("*")
    }
    names = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEMPLATE, flags=re.S))
    for file, field in re.findall(r"`(\S+): (\S+)`", TEMPLATE):
        value = files[file]
        for name in field.split("."):
            assert name in value, (file, field)
            value = value[name]
    assert {name for name in written if name.endswith(".svg")} <= set(names)
    assert {name for name in names if re.search(r"\.(svg|csv|html|json|md)$", name)} <= written
    report = (MEASURED / "report.md").read_text()
    for heading in re.findall(r'"([^"|]+)" in `report.md`', TEMPLATE):
        assert heading in report
