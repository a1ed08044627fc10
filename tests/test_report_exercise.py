"""docs/lab/13-report.md: its commands run (jobs are listed, none is submitted), and its numbers
follow from its times, from formulas, and from what was measured.
"""

import csv
import json
import math
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, launch, table_of
from scipy import stats
from test_lab import blocks_of

from reporting import links, records

pytestmark = pytest.mark.slow
LAB = ROOT / "docs" / "lab"
TEXT = (LAB / "13-report.md").read_text()
WORDS = " ".join(TEXT.split())
TEMPLATE = (LAB / "report-template.md").read_text()
MEASURED = ROOT / "docs" / "results" / "report-cpu"
BERT = 108_893_186  # parameters of BERT-base


def table(header, text=TEXT):
    """The rows below a table's header, as lists of cells."""
    return table_of(text, header)[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, example_records):
    """The project's root, with some records in place of those of the sweeps."""
    folder = tmp_path_factory.mktemp("exercise")
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs"):
            (folder / path.name).symlink_to(path)
    for name in ("baseline-1x1-r1", "ddp-1x1-r1", "ddp-1x2-r1", "check-1x2-r1"):
        shutil.copytree(example_records / "bert" / name, folder / "runs/report/bert" / name)
    return folder


@pytest.fixture(scope="module")
def outputs(folder):
    """{commands of a block: (what they print, what the page shows below them)}, all in order."""
    found = {}
    for commands, shown in blocks_of(TEXT):
        runs = re.sub(r"sbatch/sweep\.sh (?!--dry_run)", "sbatch/sweep.sh --dry_run ", commands)
        runs = runs.replace("make sweep", "make --dry-run sweep")
        done = subprocess.run(["bash", "-c", runs], cwd=folder, text=True, env=os.environ,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        assert (done.returncode != 0) == shown.startswith("error:"), done.stdout
        found[commands] = done.stdout, shown
    return found


def test_commands_print_what_the_page_shows(outputs):
    assert len(outputs) == 12
    for commands, (printed, shown) in outputs.items():
        lines = [line.strip() for line in printed.splitlines()]
        for line in shown.splitlines():
            whole = line.strip() in lines or line.startswith("The baseline, ") and line in printed
            assert line == "..." or whole, f"{commands}\nprints no {line!r}:\n{printed}"
    [made] = [printed for commands, (printed, _) in outputs.items() if "make" in commands]
    assert "--repeats 3" in made
    example = TEXT.split("```text\n")[1].split("```")[0]
    assert (LAB / "times-by-hand.csv").read_text().startswith(example)


def test_jobs_and_gpu_hours(outputs):
    [bert] = [printed for commands, (printed, _) in outputs.items()
              if "--dry_run" in commands and "runs/report/bert" in commands]
    jobs = re.findall(r"^(\w+)-.*-r(\d): (\d) node\(s\) x (\d) GPU", bert, re.M)
    checks = [job for job in jobs if job[0] == "check"]
    shown = re.search(r"These are (\d+) jobs: (\d+) runs, (\d+) checks", WORDS)
    assert [int(n) for n in shown.groups()] == [len(jobs) + 1, len(jobs) - len(checks), len(checks)]
    turn = sum(int(n) * int(g) for name, r, n, g in jobs if r == "1" and name != "check")
    assert f"One turn of runs takes {turn} GPUs" in WORDS and turn == 1 + 2 + 4 * 9
    hours = 5 * turn, sum(int(n) * int(g) for _, _, n, g in checks) * 5 / 60
    assert f"are {hours[0]} GPU-hours" in WORDS and f"= {hours[1]:.1f} GPU-hours" in WORDS
    assert f"The {sum(hours):.1f} GPU-hours follow" in WORDS
    # The real lines are those of the dry runs.
    dry = {commands.replace("--dry_run", "--yes") for commands in outputs}
    [real] = [commands for commands in outputs if commands.startswith("sbatch/sweep.sh --yes")]
    assert all(line in dry for line in real.splitlines(keepends=True))


def test_the_flags_are_the_scripts_defaults():
    bert, rnn = ((ROOT / f"train_{name}.py").read_text() for name in ("bert_squad", "mnist_rnn"))
    for name, value, text in (
            ("num_epochs", "4", bert), ("per_device_train_batch_size", "4", bert),
            ("learning_rate", "3e-5", bert), ("max_train_samples", "10_000", bert),
            ("max_eval_samples", "500", bert), ("per_device_train_batch_size", "64", rnn),
            ("learning_rate", "0.005", rnn)):
        assert re.search(rf'"--{name}", .*default={value},', text), name


def test_the_table_is_what_the_times_give(folder, outputs):
    report = (folder / "runs/report/by-hand/report.md").read_text()
    rows = table("nodes x devices", report.split("# Details")[0])
    assert table("nodes x devices") == rows and len(rows) == 3
    for text in ("782.4 s", "187.9 s", "784.8 s"):  # of DP
        assert f"{float(text[:-2]):.0f} " in WORDS
    times = records.read_times(LAB / "times-by-hand.csv")
    for strategy in ("ddp", "fsdp"):  # of the interval, in the order of the turns
        turns = [row["seconds"] for row in times
                 if (row["strategy"], row["nodes"], row["gpus_per_node"]) == (strategy, 2, 2)]
        assert f"{strategy} = {turns}" in TEXT


def test_signal_or_noise():
    for repeats, chance in table("repeats of each strategy"):
        found = 200 / math.comb(2 * int(repeats), int(repeats))
        assert chance == f"{found:.1f} %".replace(".0 %", " %").replace("33.3", "33"), repeats
    for turns in (3, 5, 10):
        t = stats.t.ppf(0.975, turns - 1)
        assert f"{t:.3f} for {turns} turns" in WORDS
    assert f"differ by {2.92 / 2.72 - 1:.0%}".replace("%", " %") in WORDS
    sent = [links.bytes_sent(name, BERT, 4) for name in ("fsdp", "ddp")]
    assert sent[0] == 1.5 * sent[1]


def test_amdahl_gustafson_and_bytes():
    """From a speedup of 2.72 on four devices to 64."""
    s, g, more = (4 / 2.72 - 1) / 3, (4 - 2.72) / 3, 4 / 2.72 - 1
    amdahl = 1 / (s + (1 - s) / 64)
    bandwidth, latency = more * (63 / 64) / (3 / 4), more * 63 / 3
    for words in (
        f"(4 / 2.72 - 1) / 3 = {100 * s:.1f} %", f"1 / ({s:.3f} + {1 - s:.3f} / 64) = {amdahl:.1f}",
        f"efficiency of {100 * amdahl / 64:.0f} %. No", f"more than 1 / s = {1 / s:.1f}",
        f"2.72 / 4 = {100 * 2.72 / 4:.0f} %", f"of four GPUs, {4 - 2.72:.2f} bring nothing",
        f"(4 - 2.72) / 3 = {100 * g:.1f} %", f"64 - {g:.3f} × 63 = {64 - 63 * g:.1f}",
        f"4 / 2.72 = {4 / 2.72:.2f} times", f"additional {more:.2f}",
        f"(63/64) / (3/4) = {63 / 64 / (3 / 4):.2f}, to {bandwidth:.2f}",
        f"1 / {1 + bandwidth:.2f} = {100 / (1 + bandwidth):.0f} %",
        f"speedup of {64 / (1 + bandwidth):.1f}", f"63 / 3 = 21, to {latency:.2f}",
        f"64 / {1 + latency:.2f} = {64 / (1 + latency):.1f}",
        f"from {amdahl:.1f} to {64 / (1 + bandwidth):.1f}",
    ):  # fmt: skip
        assert words in WORDS, words


def test_bytes_and_links():
    gradients = links.bytes_sent("ddp", BERT, 2)
    pcie = 8 * 16 * 128 / 130 / 8
    assert f"{BERT:,} parameters of 4 bytes: {gradients / 1e6:.0f} MB" in WORDS
    assert f"= {pcie:.2f} GB/s" in WORDS and f"So {2 * gradients / 1e6:.0f} MB go" in WORDS
    assert f"{pcie:.2f} GB/s = {10_000 * 2 * gradients / 1e9 / pcie:.0f} s" in WORDS
    for name, speed, takes in table("link | at most"):
        gigabits = re.search(r"(\d+) Gbit", name)
        expected = int(gigabits[1]) / 8 if gigabits else pcie
        assert speed == f"{expected:.4g} GB/s"
        seconds = gradients / 1e9 / expected
        assert takes == (f"{seconds:.1f} s" if seconds > 1 else f"{1000 * seconds:.0f} ms"), name
    assert gradients == links.bytes_sent("zero2", BERT, 2)
    guide = (ROOT / "docs" / "cluster.md").read_text()
    assert re.search(r"all_gather:.*; +911 µs", guide) and f"= {125 * 0.911:.0f} ms" in WORDS


def test_what_was_measured(example_records):
    bert, rnn = (MEASURED / "report.md").read_text().split("# Details")[1].split("\n## ")[1:3]
    for strategy, alone, sent in table("strategy | bookkeeping, on one"):
        rows = {row[1]: row for row in table("strategy   | nodes x devices   | step   |", bert)
                if row[0] == strategy}
        assert (rows["1 x 1"][4], rows["1 x 2"][5]) == (alone, sent)
    [zero3] = [row for row in table("strategy   | nodes x devices   | step   |", rnn)
               if row[:2] == ["zero3", "1 x 1"]]
    assert f"{zero3[4]} ms, on top of {zero3[3]} ms" in WORDS
    rows = table("strategy   | nodes x devices   | global", bert)
    timed = {(row[0], row[1]): row for row in rows}
    assert f"takes {timed['baseline', '1 x 1'][4]} ms per step" in WORDS
    assert timed["ddp", "1 x 2"][15] == "repeats differ by 13%" and "differ by 13 %" in WORDS
    for strategy in ("ddp", "zero2", "fsdp", "zero3"):
        assert timed[strategy, "1 x 1"][13] in WORDS
    one = json.loads((example_records / "bert/baseline-1x1-r1/run.json").read_text())["seconds"]
    assert f"{one['total']:.1f} s in all: {one['startup']:.1f} s of start-up" in WORDS
    assert f"{one['train']:.1f} s of training and {one['eval']:.1f} s of evaluation" in WORDS
    ranks = {(row[0], row[1]): [float(cell[2:-1]) for cell in row[3:6]]
             for part in (bert, rnn) for row in table("run  ", part)}
    runs = ("bert/baseline-1x1-r2", "bert/ddp-1x2-r3", "mnist/zero3-1x2-r3")
    for run, (_, *times, share) in zip(runs, table("rank | real"), strict=True):
        assert [float(time) for time in times] == ranks[run, "0"]
        assert share == f"{100 * (float(times[1]) + float(times[2])) / float(times[0]):.0f} %"
    both = [ranks["bert/ddp-1x2-r3", rank][1] for rank in "01"]
    assert f"{both[0]:.3f} + {both[1]:.3f} = {sum(both):.1f} s" in WORDS
    for run, words in (("baseline-1x1-r3", "its baseline has"), ("zero3-1x2-r3", "zero3 has")):
        assert f"{words} {ranks[f'mnist/{run}', '0'][2]:.1f} s" in WORDS
    real, user = (records.parse_seconds(time) for time in ("3m6.619s", "3m41.020s"))
    assert f"user is {user / real:.2f} times real" in WORDS
    links = (ROOT / "docs/results/links-cpu/README.md").read_text()
    for script, fast, slow, more in (("mnist_rnn", "6.7", "7.5", 12),
                                     ("bert_squad", "37.0", "55.4", 50)):
        for link, step in (("10gbit", fast), ("1gbit", slow)):
            assert re.search(rf"\| {script} \| {link} \| 1 \| ddp \| \S+ \| {step} \|", links)
        assert f"from {fast} to {slow} ms" in WORDS and f"by {more} %" in WORDS
        assert float(slow) / float(fast) - 1 == pytest.approx(more / 100, abs=0.01)
    compared = (ROOT / "benchmarks/README.md").read_text()
    for time in ("1.59", "0.94"):
        assert f"| {time} (" in compared and f"{time} times as long" in WORDS


def test_rubric_adds_up():
    assert sum(int(points) for _, points, _ in table("part | points")) == 100


def has(value, path):
    """Whether a field such as ranks[].host is in a record."""
    for name in path.split("."):
        if name.removesuffix("[]") not in value:
            return False
        value = value[name.removesuffix("[]")]
        value = value[0] if name.endswith("[]") else value
    return True


def test_the_template_names_what_exists(tmp_path, example_records):
    flags = ["--model_name_or_path", "tests/data/tiny_bert", "--from_scratch", "--train_file",
             "tests/data/squad_v1.json", "--validation_file", "tests/data/squad_v1.json"]
    run = launch("baseline", "train_bert_squad.py", tmp_path, *flags, "--max_train_steps", 2)
    records = {
        "run.json": run.record,
        "check.json": json.loads((example_records / "bert/check-1x2-r1/check.json").read_text()),
    }
    with open(MEASURED / "report.csv") as file:
        records["report.csv"] = next(csv.DictReader(file))
    written = {re.sub(r"-\d\.png", ".png", path.name)
               for folder in (MEASURED, example_records) for path in folder.rglob("*")}
    commands = {"nvidia-smi topo -m", "git rev-parse HEAD", "--profile", "[]", "-1", "-2",
                "report.py"}
    found = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEMPLATE, flags=re.S))
    for name in found:
        file, _, field = name.partition(": ")
        if field:
            assert has(records[file], field), name
        else:
            assert name in commands | written | {"train", "seconds"}, name
    assert {name for name in found if name.endswith(".png")} == {
        name for name in written if name.endswith(".png")}
    text = (MEASURED / "report.md").read_text()
    for part in ("Where the time of a step went", "What the formulas say of a rank"):
        assert f'"{part}"' in TEMPLATE and part in text
    parts = re.findall(r"^## \d\. (.*)", TEMPLATE, re.M)
    assert parts == ["Title, names, date", "Question", "Hardware and software", "Method", "Results",
                     "Figures", "Explanation of the costs", "Limits", "Conclusion"]
    assert "(13-report.md)" in TEMPLATE
