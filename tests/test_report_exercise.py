"""docs/lab/11-profile.md: its commands run in small, and leave what the page says to look for; its
pictures are those of the script. docs/lab/13-report.md: its commands run (jobs are listed, none is
submitted) and print what it shows; its tables are those of the reports; its template names what
exists.
"""

import csv
import json
import re
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET

import draw_traces
import pytest
from conftest import ROOT, run, table_of
from test_lab import blocks_of, check_kind, shell  # noqa: F401  a fixture

import fit
from planning import links, memory, prediction
from reporting import splitting

pytestmark = pytest.mark.slow
LAB, MEASURED = ROOT / "docs" / "lab", ROOT / "docs" / "results" / "report-cpu"
PAGES = ("11-profile.md", "13-report.md", "report-template.md")
PROFILE, TEXT, TEMPLATE = ((LAB / name).read_text() for name in PAGES)
KEPT = ROOT / "docs" / "img" / "traces"
SMALLER = {"hidden_size=384": "hidden_size=96", "num_hidden_layers=6": "num_hidden_layers=2"}
SMALLER["intermediate_size=1536"] = "intermediate_size=192"


# -------- the profile


@pytest.fixture(scope="module")
def folder(shell):  # noqa: F811
    """What the page's commands leave."""
    settings = []
    for commands, pasted in blocks_of(PROFILE):
        for long, short in SMALLER.items():
            commands = commands.replace(long, short)
        lines = commands.splitlines()
        check_kind(pasted, shell([*settings, *lines], forked=True))
        settings += [line for line in lines if re.match("[A-Z]+=", line)]
    return shell.folder / "runs" / "lab" / "traces"


def test_traces_have_what_to_search_for_and_the_report_their_shares(folder):
    report = (folder / "report.md").read_text()
    for strategy in ("ddp", "fsdp"):
        for rank in (0, 1):
            trace = folder / strategy / "traces" / f"profile_{rank}.json"
            names = {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}
            for searched, meaning in table_of(PROFILE, "search for")[1:]:
                found = any(name.startswith(searched.strip("`")) for name in names)
                assert found == (strategy == "fsdp" or "FSDP only" not in meaning), searched
            shares = splitting.shares_of(splitting.read_events(trace))
            assert sum(shares.values()) == pytest.approx(1) and shares["communication"] > 0
            row = r" *\| *".join(f"{share:.0%}" for share in shares.values())
            assert re.search(rf"\| {strategy} .*\| {rank} *\| *{row}", report)


def test_fresh_traces_can_be_drawn(folder):
    drawn = json.loads((folder / "traces.json").read_text())
    for picture in ("ddp", "fsdp"):
        root = ET.parse(folder / f"{picture}.svg").getroot()
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"rank 0", "rank 1", "computes", "communicates", "AR: all-reduce"} <= texts
        assert ("AG: all-gather" in texts) == (picture == "fsdp")
        for rank in drawn[picture]["ranks"]:
            assert rank["forward"] and rank["backward"] and rank["optimizer"]


def test_pictures_are_those_that_the_script_draws(tmp_path):
    """And they have the shares of the report, but for what is too short to be seen."""
    shutil.copy(KEPT / "traces.json", tmp_path)
    assert run([sys.executable, "docs/img/draw_traces.py", "--to", str(tmp_path)]).code == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in KEPT.iterdir()}
    assert set(re.findall(r"\(\.\./img/traces/(.*?)\)", PROFILE)) <= set(drawn)
    for step in json.loads((KEPT / "traces.json").read_text()).values():
        for rank in step["ranks"]:
            shares, (start, end) = rank["shares"], rank["step"]
            gaps = draw_traces.length(draw_traces.gaps_of(rank)) / (end - start)
            assert gaps == pytest.approx(shares["communication"], abs=0.02)
            computing = splitting.length([*rank["forward"], *rank["backward"], *rank["optimizer"]])
            share = shares["computation"] + shares["both at once"]
            assert computing / (end - start) == pytest.approx(share, abs=0.06)


# -------- the report


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
        words = ["bash", "-c", runs.replace("make sweep", "make --dry-run sweep")]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, cwd=folder, text=True, **streams)
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
    made = [path.name for folder in (MEASURED, example_records) for path in folder.rglob("*")]
    written = {re.sub(r"-\d\.svg", ".svg", name) for name in made}
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
