"""The checkers of exercises 9 and 10 name each fault. test_pages.py has the right solutions."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import check_ex9
import check_ex10
import grade
import pytest
import warm
import watch
from conftest import ROOT, anchor
from torch.distributed import TCPStore

import compare

pytestmark = pytest.mark.slow
LAB = ROOT / "docs" / "lab"
PARTS = {"1": "by_hand", "2": "flat", "2b": "overlap", "3": "sharded", "4": "accelerated"}
RIGHT = {part: (LAB / "solutions" / f"{name}.py").read_text() for part, name in PARTS.items()}
GOING = (LAB / "solutions" / "going.py").read_text()
WORDS = ["--config_file", str(watch.DDP_YAML), "--main_process_port", "0"]

# What the checker says is WRONG, the part of the exercise, and {old: new} text that makes it so.
ZERO = "            optimizer.zero_grad()\n"
STEP = "            optimizer.step()\n"
GATHER = "            dist.all_gather_into_tensor(weights, own)  # all parts, into the model\n"
SENT = "all gradients are sent during the backward pass: .* 2 start .* 0 of these let it go on"
TRAINING = "the training matches single.py: epoch . printed .*"
FAULTS = [
    ("each sample is used .* 3072", "1", {"Sampler(train_data": "Sampler(train_data, 1, 0"}),
    ("a step takes 64 .* 128", "1", {"BATCH_SIZE // world_size": "BATCH_SIZE"}),
    ("both ranks end with", "1", {"dist.all_reduce(weight.grad)": "pass"}),
    ("the loss is", "1", {"dist.all_reduce(total)": "pass", "er) / world_size": "er)"}),
    ("one rank saves", "1", {"if rank == 0:\n        torch": "if rank == 2:\n        torch"}),
    ("the plain model", "1", {"model.state_dict()": "nn.Sequential(model).state_dict()"}),
    (f"{TRAINING} Is the order", "1", {"manual_seed(SEED)": "manual_seed(SEED + 1)"}),
    (f"{TRAINING}twice as large.*divided by", "1", {"weight.grad /= world_size": "pass"}),
    (f"{TRAINING}half as large", "2", {"flat /= world_size": "flat /= world_size**2"}),
    (f"{TRAINING}do not change.*zero_grad", "1", {ZERO: "", STEP: ZERO + STEP}),
    (f"{TRAINING}a step late.*all-gather", "3", {GATHER: "", STEP: GATHER + STEP}),
    (f"{TRAINING}the first step's gradients", "4", {ZERO: ""}),
    ("a step sends all", "2", {"dist.all_reduce(flat)": "[*map(dist.all_reduce, flat.chunk(2))]"}),
    (SENT, "2b", {", async_op=True": "", "call.wait()": "pass"}),
    (SENT, "2b", {"flat, bucket))": "flat, bucket))\n            started[-1][0].wait()"}),
    (
        "all gradients are sent .*: the hooks send buckets twice",
        "2b",
        {"zero_grad()": "zero_grad(set_to_none=False)"},
    ),
    ("the step waits for each .*: the second step", "2b", {"call.wait()": "pass"}),
    ("the step waits for each .*: later steps wait", "2b", {"    started.clear()\n": ""}),
    ("a step sends gradients once", "3", {STEP: "            dist.all_reduce(gradients)\n" + STEP}),
]

# It runs a script in each folder of the first argument, one after the other, in the same ranks.
RUN_ALL = """
import os, sys
from pathlib import Path
import watch
from accelerate.state import AcceleratorState

for script in sorted(Path(sys.argv[1]).glob("*/mine.py")):
    os.chdir(script.parent)
    os.environ["MASTER_PORT"] = Path("port").read_text()
    sys.path[0] = str(script.parent / "docs" / "lab")
    sys.modules.pop("single", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    watch.watch(script, script.parent / f"rank_{os.environ['RANK']}")
"""


def changed(text, changes):
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def judged(tmp_path, monkeypatch, capsys):
    """A function that runs a checker on a text, on ranks that are forked and import nothing
    (see warm.py). It returns the exit code, what is printed, and the points that are wrong.
    """

    def launch(script, folder, seconds):
        argv = [watch.__file__, *map(str, (script, folder, seconds))]
        log = folder / "launcher"
        log.touch()
        warm.run_ranks(WORDS, argv, os.environ, ROOT, log, log, seconds + 30)
        return mock.Mock()

    def run(checker, text, *flags):
        script = tmp_path / "mine.py"
        script.write_text(text)
        monkeypatch.setattr(watch, "launch", launch)
        monkeypatch.setattr(sys, "argv", ["check", str(script), *flags])
        single = LAB / "single.py" if checker is check_ex9 else None
        code, printed = watch.check(checker.judge, single, check_ex9.PARTS), capsys.readouterr().out
        for page, place in re.findall(r"See (\S+\.md)#?([\w-]*)", printed):
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.M)
            assert not place or place in map(anchor, headings), f"{page}#{place}"
        return code, printed, re.findall(r"^WRONG  (.*?)(?::|$)", printed, re.M)

    return run


@pytest.mark.parametrize("said, part, changes", FAULTS)
def test_each_fault_is_named(said, part, changes, judged):
    code, printed, wrong = judged(check_ex9, changed(RIGHT[part], changes), "--part", part)
    assert code == 1 and re.search(f"^WRONG  {said}", printed, re.M), printed
    assert len(wrong) == 1 or part == "2b", printed


@pytest.mark.parametrize(
    "checker, text, part, points",
    [
        (check_ex9, RIGHT["2"], "2b", ["all gradients are sent during the backward pass"]),
        (check_ex9, RIGHT["2"], "3", ["a rank updates its half", "a step sends gradients once"]),
        (check_ex10, GOING.replace("dist.all_reduce", "str"), "2", ["one rank prints the acc"]),
    ],
)
def test_what_a_part_still_lacks_is_named(checker, text, part, points, judged):
    """Part 1 of exercise 10 is in test_pages.py: its page shows what the checker says."""
    _, printed, wrong = judged(checker, text, "--part", part)
    assert len(wrong) == len(points) and all(map(str.startswith, wrong, points)), printed


def test_the_solutions_are_right_in_all_variants(tmp_path, monkeypatch):
    """As teaching.md and grade.py both make them: in half of them, one of the five trains for one
    epoch.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    page, single = (ROOT / "docs" / "teaching.md").read_text(), (LAB / "single.py").read_text()
    variant = "".join(re.findall("^(?:H|VARIANT)=.*\n", page, re.M))
    variant += 'sed -i "$VARIANT" docs/lab/single.py mine.py'
    cases, stores = {}, []
    for case in range(0, 101, 2):
        number, part = case + 100 * (case % 10), list(RIGHT)[case % 5]
        folder = tmp_path / f"{case:03}"
        cases[folder] = part
        (folder / "docs" / "lab").mkdir(parents=True)
        files = {folder / "docs" / "lab" / "single.py": single, folder / "mine.py": RIGHT[part]}
        for file, text in files.items():
            file.write_text(text)
        subprocess.run(["bash", "-ec", f"N={number}\n{variant}"], cwd=folder, check=True)
        for file, text in files.items():
            made = file.read_text()
            assert made == grade.variant_of(text, number) != text
            made = made.replace("66", "64") if case == 100 else made  # two layers of 64 inputs
            assert grade.variant_of(made, 1) == grade.variant_of(text, 1)
            file.write_text(made.replace("EPOCHS = 5", "EPOCHS = 1"))
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        (folder / "port").write_text(str(stores[-1].port))
    script, log = tmp_path / "run_all.py", tmp_path / "log"
    script.write_text(RUN_ALL)
    log.touch()
    env = os.environ | {"PYTHONPATH": str(LAB)}
    assert warm.run_ranks(WORDS, [str(script), str(tmp_path)], env, ROOT, log, log, 200) == 0
    for folder, part in cases.items():
        watch.watch(folder / "docs" / "lab" / "single.py", folder / "single")
        ranks = [watch.read(folder / f"rank_{rank}") for rank in range(2)]
        points = check_ex9.judge(ranks, watch.read(folder / "single"), part)
        assert not any(problem for _, problem in points), (folder, points)


@pytest.mark.parametrize(
    "line, before, said",
    [
        ("    torch.manual_seed(SEED)", "    sampler.save()\n", "[01] ended in line {}: Attrib"),
        (
            "        sampler.set_epoch(epoch)",
            "        while rank == 0: pass\n",
            "0 is still computing in line {} after 5 s.*\nrank 1 is still waiting",
        ),
        ("    train_data, test_data", "    return\n", "no optimizer made a step"),
    ],
)
def test_what_does_not_train_to_its_end_is_told_with_its_line(line, before, said, judged):
    number = RIGHT["1"][: RIGHT["1"].index(line)].count("\n") + 1
    text = changed(RIGHT["1"], {line: before + line})
    code, printed, _ = judged(check_ex9, text, "--seconds", "5")
    assert code == 1 and re.search(said.format(number), printed), printed
    assert "(mine.py runs on two processes: 20 s, at most 65)" in printed
    with pytest.raises(SystemExit, match="mine.py is empty"):
        judged(check_ex9, "\n")


RECORD = {"status": "completed", "steps": 2, "seconds": {"train": 1.0}, "strategy": "ddp"}
RECORD |= {"loss_history": [[1, 2.0], [2, 1.0]], "versions": {"deepspeed": None}}


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """A function that compares the record of a run `one` with that of a run `two`."""

    def tell(*records):
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder, record in zip(folders, records, strict=True):
            folder.mkdir(exist_ok=True)
            (folder / "run.json").write_text(json.dumps(record))
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, folders)])
        stopped = ""
        try:
            compare.main()
        except SystemExit as end:
            stopped = end.code
        return SimpleNamespace(out=capsys.readouterr().out, err=stopped, code=bool(stopped))

    return tell


def test_compare_says_what_can_explain_other_losses(compared):
    """Another division of the work cannot, unless masks or few digits depend on it."""
    work = {"dropout": 0.0, "precision": "no"}
    one = RECORD | {"processes": 1, "workload": work}
    two = one | {"strategy": "zero2", "processes": 2, "versions": {"deepspeed": "0.19"}}
    two |= {"loss_history": [[1, 2.0], [2, 1.1]]}
    for change, explained in (
        ({}, []),
        ({"workload": work | {"dropout": 0.1}}, ["dropout", "processes"]),
        ({"workload": work | {"precision": "bf16"}}, ["precision", "strategy", "processes"]),
        ({"global_batch_size": 128}, ["global batch"]),
    ):
        out = compared(one, two | change).out
        can = out.split("can explain other losses:")[-1].split("These cannot")[0]
        assert re.findall(r"^  (.*?):", can, re.M) == explained, out
        assert "\nStep 2 is the first whose losses differ" in out, out
        assert ("Nothing in the records explains this" in out) == (not explained), out


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seconds": {"train": 2}}, "one and two: 2 and 2 .* value; two trained 2.00 times as"),
        ({"seconds": {"train": 2}, "steps": 4}, "2 and 4 .*; a step of two took 1.00 times as"),
        ({"seconds": {"train": 0.0}}, "value; the records do not tell how long a step took\n"),
        ({"steps": 0}, "value; the records do not tell how long"),
        ({"status": "failed"}, "status failed: .*, and its losses end at step 2.\n.*lue\n"),
        ({"status": "running"}, "two has the status running: its time cannot be compared, and"),
        ({"resumed_from": "a", "profiled": True}, "resumed and was profiled: .*red.\n.*lue\n"),
        ({"loss_history": [[1, 0.0], [2, 1.0]]}, "differ by at most 1.0e.00 of their value;"),
        (
            {"loss_history": [[1, 2.0], [2, math.nan]]},
            "two has no finite loss at step 2: .*most 0.0e.00 of",
        ),
        ({"loss_history": [[1, math.inf]]}, "error: one and two have no finite loss of the same"),
        ({"loss_history": [[1]]}, "error: .*two/run.json is not a record of a run: ValueError"),
        ({"steps": None}, "error: .*two/run.json is not a record of a run: TypeError"),
    ],
)
def test_compare_says_what_is_no_timing_or_no_loss(change, said, compared):
    for records in (RECORD, RECORD | change), (RECORD | change, RECORD):
        done = compared(*records)
        text = done.out + done.err
        assert not re.search(r"Traceback|\b(nan|inf)\b", text), text
        assert done.code == ("error: " in said), text
        if records[0] is RECORD:
            assert re.search(said, text, re.S), text


def test_a_student_has_one_row_whose_points_are_not_negative(tmp_path, monkeypatch):
    (tmp_path / "my_ddp.py").touch()
    monkeypatch.setattr(grade, "place_for", lambda *_: tmp_path)
    args = mock.Mock(seconds=60)
    for fine, others, points in ((9, 1, 36), (1, 11, 0), (0, 10, "")):
        printed = "ok     a\n" * fine + "later  b\n" * others
        monkeypatch.setattr(grade, "output_of", lambda *_, printed=printed: printed)
        row = grade.grade_student(tmp_path, args)
        assert row["points"] == points and row["my_flat.py"] == "-"
        assert ("look at it" in row["notes"]) == (points == "")
