"""docs/lab/11-profile.md: its commands run in small, and leave what the page says to look for; its
pictures are those of the script. docs/lab/13-report.md: its commands run (jobs are listed, none is
submitted) and print what it shows; its tables are those of the reports; its template names what
exists.
"""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import draw_traces
import pytest
from conftest import ROOT, run, table_of
from test_lab import blocks_of, check_kind, shell  # noqa: F401  a fixture

from reporting import comparing, times

pytestmark = pytest.mark.slow
LAB, MEASURED = ROOT / "docs" / "lab", ROOT / "docs" / "results" / "report-cpu"
PAGES = ("11-profile.md", "13-report.md", "report-template.md")
PROFILE, TEXT, TEMPLATE = ((LAB / name).read_text() for name in PAGES)
KEPT = ROOT / "docs" / "img" / "traces"
SMALLER = {"--layers 6 --hidden_size 384": "--layers 2 --hidden_size 128"}


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


def test_traces_have_what_to_search_for_and_shares(folder):
    for strategy in ("ddp", "fsdp"):
        for rank in (0, 1):
            trace = folder / strategy / "traces" / f"profile_{rank}.json"
            names = {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}
            for searched, meaning in table_of(PROFILE, "search for")[1:]:
                found = any(name.startswith(searched.strip("`")) for name in names)
                assert found == (strategy == "fsdp" or "FSDP only" not in meaning), searched
            events = draw_traces.read_events(trace)
            steps = {event["name"] for event in events if "ProfilerStep" in event["name"]}
            shares = draw_traces.shares_of(events)
            assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
            assert len(steps) == 5 and shares["communication"] > 0


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
    """And they have the shares of the table, but for what is too short to be seen."""
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
            computing = draw_traces.length(
                [*rank["forward"], *rank["backward"], *rank["optimizer"]]
            )
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
    for name in ("baseline-1x1-r1", "ddp-1x1-r1", "ddp-1x2-r1"):
        shutil.copytree(example_records / name, folder / "runs/report/bert" / name)
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
    assert (LAB / "simulated-times.csv").read_text().startswith(example)


def test_tables_are_those_of_the_reports(outputs):
    """Of the times taken by hand; of steps on one process and on two."""
    report = (outputs[1] / "runs/report/simulated/report.md").read_text()
    assert table_of(TEXT, "nodes x devices") == table_of(report, "nodes x devices")
    with open(MEASURED / "report.csv") as file:
        steps = {
            (row["strategy"], row["devices"]): f"{1000 * float(row['step_seconds']):.2f}"
            for row in csv.DictReader(file)
        }
    for name, *cells in table_of(TEXT, "strategy | on one process")[1:]:
        strategy = name.lower().replace("-", "")
        assert cells == [steps[strategy, "1"], steps[strategy, "2"]]
    assert sum(int(points) for _, points, _ in table_of(TEXT, "part | points")[1:]) == 100


def test_riddle_4_has_the_figures_of_tukeys_test():
    [workload] = comparing.find_workloads(times.read_times(LAB / "simulated-times.csv")[0])
    cells = {(cell.setting.strategy, cell.setting.shape): cell for cell in workload.cells}
    pair = cells["zero2", "2 x 2"], cells["fsdp", "2 x 2"]
    low, high = (100 * math.expm1(end) for end in workload.intervals[pair])
    difference = 100 * math.expm1(sum(workload.intervals[pair]) / 2)
    text = " ".join(TEXT.split())
    assert f"its interval goes from {low:.1f} to {high:.1f} %" in text
    assert f"differ by {workload.margin(*pair):.1%}" in text.replace(" %", "%")
    assert f"they differ by {difference:.1f} %" in text


def test_the_template_names_what_exists(example_records):
    line = {"latency_seconds": 1.0, "bandwidth_bytes_per_second": 1.0}
    collectives = {"all_reduce": line, "all_gather": line}
    files = {"check.json": {"backend": "gloo", "collectives": collectives}}  # See test_sbatch.py.
    files["run.json"] = json.loads((example_records / "ddp-1x2-r1" / "run.json").read_text())
    with open(MEASURED / "report.csv") as file:
        files["report.csv"] = next(csv.DictReader(file))
    made = [path.name for folder in (MEASURED, example_records) for path in folder.rglob("*")]
    written = {*made, "report.html", "check.json"}
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
