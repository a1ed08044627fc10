"""The checkers of exercises 9 and 10 name each fault. test_pages.py has the right solutions."""

import json
import re
import sys
from unittest import mock

import check_ex9
import check_ex10
import compare
import pytest
import warm
import watch
from conftest import ROOT, anchor, environment

pytestmark = pytest.mark.slow
LAB = ROOT / "docs" / "lab"
BY_HAND, FLAT, OVERLAP, SHARDED, MENDED, GOING = (
    (LAB / "solutions" / f"{name}.py").read_text()
    for name in ("by_hand", "flat", "overlap", "sharded", "mended", "going")
)
WORDS = ["--config_file", str(watch.DDP_YAML), "--main_process_port", "0"]
MEAN = "        dist.all_reduce(total)  # all ranks call it, and each has the sum then\n"

# A point that a checker looks at -> the (old, new) text that makes it wrong in a right solution.
FAULTS_9 = {
    "each sample is used once in an epoch": [
        ("Sampler(train_data, seed", "Sampler(train_data, num_replicas=1, rank=0, seed")
    ],
    "a step takes 64 samples from both ranks together": [
        ("BATCH_SIZE // world_size", "BATCH_SIZE")
    ],
    "both ranks end with the same weights": [("dist.all_reduce(weight.grad)", "pass")],
    "the loss is the mean over both ranks": [
        (MEAN, ""),
        (" / len(train_loader) / world_size", " / len(train_loader)"),
    ],
    "one rank saves the weights": [
        ("if rank == 0:\n        torch.save(", "if rank == 2:\n        torch.save(")
    ],
    "the plain model can load the weights": [
        ("model.state_dict()", "nn.Sequential(model).state_dict()")
    ],
    "the training is that of single.py": [("lr=0.05", "lr=0.1")],
}
FAULTS_FLAT = {
    "a step sends all gradients in one message": [
        ("average_gradients(model, world_size)\n", "average_gradients(model[0], world_size)\n"),
        (
            "optimizer.step()\n",
            "average_gradients(model[2], world_size)\n            optimizer.step()\n",
        ),
    ],
}
FAULTS_OVERLAP = {
    "all gradients are sent during the backward pass": [
        ("    for weight in bucket:\n        weight.register_post", "    hook.register_post"),
        ("hook.register_post_accumulate_grad_hook(hook)", "hook(None)"),
        (
            "            loss.backward()\n",
            "            loss.backward()\n            for layer in (model[2], model[0]):\n"
            "                start_in_backward(list(layer.parameters()), started)\n",
        ),
    ],
    "the step waits for each all-reduce": [("call.wait()", "pass")],
}
FAULTS_SHARDED = {
    "a rank updates its half of the weights": [
        ("weights.chunk(world_size)[rank].clone()", "weights.clone()"),
        ("(own.grad, gradients)", "(own.grad.chunk(world_size)[rank], gradients)"),
        ("(weights, own)", "(weights, own.chunk(world_size)[rank])"),
    ],
    "a step sends gradients once, and weights once": [
        ("own.grad = torch", "dist.all_reduce(gradients.clone())\n            own.grad = torch")
    ],
}
FAULTS_10 = {
    "each epoch has another order": [
        ("        sampler.set_epoch(epoch)  # or each epoch has the order of the first\n", "")
    ],
    "the loss is that of all samples": [
        (MEAN, ""),
        (" / len(loader) / world_size", " / len(loader)"),
    ],
    "one rank saves the checkpoint": [
        ("        if rank == 0:\n            torch.save(", "        torch.save("),
        ('            say(f"epoch {epoch}: rank', '        say(f"epoch {epoch}: rank'),
    ],
}


FAULTS_HANG = {
    "one rank prints the accuracy of all test samples": [("    dist.all_reduce(right)\n", "")]
}


def changed(text, changes):
    for old, new in changes:
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
        warm.run_ranks(WORDS, argv, environment({}), ROOT, log, log, seconds + 30)
        return mock.Mock()

    def run(checker, text, *flags):
        script = tmp_path / "mine.py"
        script.write_text(text)
        monkeypatch.setattr(watch, "launch", launch)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as watch.check has it, for this test alone
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
            (check_ex10, MENDED, FAULTS_10, "1"),
            (check_ex10, GOING, FAULTS_HANG, "2"),
        )
        for point in faults
    ],
)
def test_each_fault_is_named(checker, right, faults, part, point, judged):
    flags = ["--part", part] if part != "1" else []
    code, printed, wrong = judged(checker, changed(right, faults[point]), *flags)
    assert code == 1 and point in wrong, printed
    assert wrong == [point] or part == "2b", printed


def test_a_hang_is_told_with_its_lines(judged):
    """And that the two scripts differ in nothing else. A hang ends by the time that it gets."""
    alone = "        accuracy = evaluate(model, test_data, rank, world_size)  # all ranks call it\n"
    call = "            accuracy = evaluate(model, test_data, rank, world_size)\n"
    text = changed(
        GOING, [(alone, ""), ("        if rank == 0:\n", f"        if rank == 0:\n{call}")]
    )
    assert text.split('"""\n', 1)[1] == (LAB / "hanging.py").read_text().split('"""\n', 1)[1]
    code, printed, _ = judged(check_ex10, text, "--part", "2", "--seconds", "10")
    assert code == 1 and re.search("rank 0 still waits in line 3", printed), printed


def test_an_unchanged_script_has_nothing_right(judged):
    code, printed, wrong = judged(check_ex9, (LAB / "single.py").read_text())
    assert (code, wrong) == (1, ["two ranks know of each other"]) and "ok " not in printed, printed


def test_no_training_and_an_endless_loop_are_named(judged):
    """Rank 1 waits for rank 0, which computes."""
    with pytest.raises(SystemExit, match="mine.py is empty"):
        judged(check_ex9, "\n")
    code, printed, _ = judged(check_ex9, BY_HAND.replace("    main()", "    pass"))
    assert code == 1 and "no optimizer made a step" in printed, printed
    place = "        sampler.set_epoch(epoch)"
    text = changed(BY_HAND, [(place, f"        while rank == 0: pass\n{place}")])
    number = text[: text.index("while rank")].count("\n") + 1
    code, printed, _ = judged(check_ex9, text, "--seconds", "5")
    assert code == 1 and "65 at most" in printed, printed
    assert f"rank 0 still computes in line {number} after 5 s" in printed, printed
    assert "rank 1 still waits in line" in printed, printed


def test_an_error_is_told_with_its_line(judged):
    place = "    torch.manual_seed(SEED)"
    number = BY_HAND[: BY_HAND.index(place)].count("\n") + 1
    code, printed, _ = judged(
        check_ex9, changed(BY_HAND, [(place, f"    sampler.save()\n{place}")])
    )
    assert code == 1 and "runs to its end" in printed, printed
    assert re.search(f"rank [01] ended in line {number}: AttributeError", printed), printed


def test_compare_says_what_can_explain_other_losses(tmp_path, monkeypatch, capsys):
    """Another division of the work cannot, unless masks or few digits depend on it."""
    work = {"dropout": 0.0, "precision": "no", "eval_samples": 3}
    one = {"loss_history": [[1, 2.0], [2, 1.0]], "seconds": {"train": 1.0}, "strategy": "baseline"}
    one |= {"processes": 1, "workload": work, "versions": {"torch": "2.15", "deepspeed": None}}
    ddp = {"strategy": "ddp", "processes": 2, "loss_history": [[1, 2.0], [2, 1.1]]}

    def said(**changes):
        for name, record in (("one", one), ("two", one | changes)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "run.json").write_text(json.dumps(record))
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "one"), str(tmp_path / "two")])
        compare.main()
        return capsys.readouterr().out

    for changes, can in (
        ({"versions": {"torch": "2.15", "deepspeed": "0.19"}, "resumed_from": "x"}, False),
        ({"workload": work | {"eval_samples": 4}}, False),
        ({"workload": work | {"precision": "bf16"}}, True),
        ({"workload": work | {"dropout": 0.1}}, True),
        ({"global_batch_size": 128}, True),
    ):
        printed = said(**ddp, **changes)
        assert "\nStep 2 is the first whose losses differ" in printed, printed
        assert ("Nothing in the records explains this" not in printed) == can, printed
        assert ("  processes: 1 and 2 (" in printed) == ("workload" in changes and can), printed
    assert "the rest is rounding" in said(strategy="fsdp")
    with pytest.raises(SystemExit, match="two/run.json is no record of a run: TypeError"):
        said(loss_history=None)
