"""The checkers of exercises 9 and 10 name each fault. test_pages.py has the right solutions."""

import json
import math
import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import check_ex9
import check_ex10
import compare
import grade
import pytest
import warm
import watch
from conftest import ROOT, anchor

pytestmark = pytest.mark.slow
LAB = ROOT / "docs" / "lab"
BY_HAND, FLAT, OVERLAP, SHARDED, GOING = (
    (LAB / "solutions" / f"{name}.py").read_text()
    for name in ("by_hand", "flat", "overlap", "sharded", "going")
)
WORDS = ["--config_file", str(watch.DDP_YAML), "--main_process_port", "0"]

# A point that a checker looks at -> {old: new} text that makes it wrong in a right solution.
FAULTS_9 = {
    "each sample is used once in an epoch": {
        "Sampler(train_data, seed": "Sampler(train_data, num_replicas=1, rank=0, seed"
    },
    "a step takes 64 samples from both ranks together": {"BATCH_SIZE // world_size": "BATCH_SIZE"},
    "both ranks end with the same weights": {"dist.all_reduce(weight.grad)": "pass"},
    "the loss is the mean over both ranks": {
        "        dist.all_reduce(total)  # all ranks call it, and each has the sum then\n": "",
        " / len(train_loader) / world_size": " / len(train_loader)",
    },
    "one rank saves the weights": {
        "if rank == 0:\n        torch.save(": "if rank == 2:\n        torch.save("
    },
    "the plain model can load the weights": {
        "model.state_dict()": "nn.Sequential(model).state_dict()"
    },
    "the training is that of single.py": {"lr=0.05": "lr=0.1"},
}
FAULTS_FLAT = {
    "a step sends all gradients in one message": {
        "average_gradients(model, world_size)\n": "average_gradients(model[0], world_size)\n",
        "optimizer.step()\n": "average_gradients(model[2], world_size)\n"
        "            optimizer.step()\n",
    },
}
FAULTS_OVERLAP = {
    "all gradients are sent during the backward pass": {
        "    for weight in bucket:\n        weight.register_post": "    hook.register_post",
        "hook.register_post_accumulate_grad_hook(hook)": "hook(None)",
        "            loss.backward()\n": "            loss.backward()\n"
        "            for layer in (model[2], model[0]):\n"
        "                start_in_backward(list(layer.parameters()), started)\n",
    },
    "the step waits for each all-reduce": {"call.wait()": "pass"},
}
FAULTS_SHARDED = {
    "a rank updates its half of the weights": {
        "weights.chunk(world_size)[rank].clone()": "weights.clone()",
        "(own.grad, gradients)": "(own.grad.chunk(world_size)[rank], gradients)",
        "(weights, own)": "(weights, own.chunk(world_size)[rank])",
    },
    "a step sends gradients once, and weights once": {
        "own.grad = torch": "dist.all_reduce(gradients.clone())\n            own.grad = torch"
    },
}
FAULTS_HANG = {
    "one rank prints the accuracy of all test samples": {"    dist.all_reduce(right)\n": ""}
}


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


@pytest.mark.parametrize(
    "checker, right, faults, part, point",
    [
        (checker, right, faults, part, point)
        for checker, right, faults, part in (
            (check_ex9, BY_HAND, FAULTS_9, "1"),
            (check_ex9, FLAT, FAULTS_FLAT, "2"),
            (check_ex9, OVERLAP, FAULTS_OVERLAP, "2b"),
            (check_ex9, SHARDED, FAULTS_SHARDED, "3"),
            (check_ex10, GOING, FAULTS_HANG, "2"),
        )
        for point in faults
    ],
)
def test_each_fault_is_named(checker, right, faults, part, point, judged):
    """Part 1 of exercise 10 is in test_pages.py: its page shows what the checker says."""
    code, printed, wrong = judged(checker, changed(right, faults[point]), "--part", part)
    assert code == 1 and point in wrong, printed
    assert wrong == [point] or part == "2b", printed


@pytest.mark.parametrize(
    "line, before, said",
    [
        ("    torch.manual_seed(SEED)", "    sampler.save()\n", "[01] ended in line {}: Attrib"),
        (
            "        sampler.set_epoch(epoch)",
            "        while rank == 0: pass\n",
            "0 still computes in line {} after 5 s.*\nrank 1 still waits",
        ),
        ("    train_data, test_data", "    return\n", "no optimizer made a step"),
    ],
)
def test_what_does_not_train_to_its_end_is_told_with_its_line(line, before, said, judged):
    number = BY_HAND[: BY_HAND.index(line)].count("\n") + 1
    text = changed(BY_HAND, {line: before + line})
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
        ({"seconds": {"train": math.nan}}, "value; the records do not tell how long"),
        ({"steps": 0}, "value; the records do not tell how long"),
        ({"status": "failed"}, "status failed: .* timing, and its losses end at step 2.\n.*lue\n"),
        ({"status": "preempted"}, "two has the status preempted: its seconds are no timing, and"),
        ({"status": "running"}, "two has the status running: its seconds are no timing, and"),
        ({"resumed_from": "a", "profiled": True}, "was resumed and was profiled: .*ing.\n.*lue\n"),
        ({"loss_history": [[1, 0.0], [2, 1.0]]}, "differ by at most 1.0e.00 of their value;"),
        (
            {"loss_history": [[1, 2.0], [2, math.nan]]},
            "two has no finite loss at step 2: .*most 0.0e.00 of",
        ),
        ({"loss_history": [[1, math.inf]]}, "error: one and two have no finite loss of the same"),
        ({"loss_history": []}, "error: one and two have no finite loss of the same step"),
        ({"loss_history": [[1]]}, "error: .*two/run.json is no record of a run: ValueError"),
        ({"steps": None}, "error: .*two/run.json is no record of a run: TypeError"),
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


def test_points_are_not_negative_and_one_fault_does_not_take_all(tmp_path, monkeypatch):
    (tmp_path / "my_ddp.py").touch()
    monkeypatch.setattr(grade, "place_for", lambda *_: tmp_path)
    for fine, others, points in ((9, 1, 36), (1, 11, 0), (0, 10, "")):
        printed = "ok     a\n" * fine + "later  b\n" * others
        monkeypatch.setattr(grade, "output_of", lambda *_, printed=printed: printed)
        row = grade.grade(tmp_path / "my_ddp.py", mock.Mock(seconds=60), tmp_path)
        assert row["points"] == points
