"""docs/lab/13-report.md: its commands run (jobs are listed, none is submitted) and print what it
shows; its tables are those of the reports; its template names what exists.
"""

import csv
import json
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, table_of
from test_lab import blocks_of

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
    """Of the times taken by hand; of bookkeeping and communication; of real, user and sys."""
    report = (outputs[1] / "runs/report/by-hand/report.md").read_text()
    assert table_of(TEXT, "nodes x devices") == table_of(report, "nodes x devices")
    works = (MEASURED / "report.md").read_text().split("# Details")[1].split("\n## ")[1:3]
    parts = [table_of(work, "strategy   | nodes x devices   | step   |")[1:] for work in works]
    costs = {(row[0], row[1]): row[4:6] for row in parts[0]}
    for name, alone, sent in table_of(TEXT, "strategy | bookkeeping")[1:]:
        assert (costs[name, "1 x 1"][0], costs[name, "1 x 2"][1]) == (alone, sent)
    times = [[cell[2:-1] for cell in row[3:6]] for work in works for row in table_of(work, "run  ")]
    for _, real, user, sys, share in table_of(TEXT, "rank | real")[1:]:
        assert [real, user, sys] in times
        assert share == f"{100 * (float(user) + float(sys)) / float(real):.0f} %"
    assert sum(int(points) for _, points, _ in table_of(TEXT, "part | points")[1:]) == 100


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
