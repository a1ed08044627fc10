"""docs/lab/09-by-hand.md and 10-faults.md: their commands print what is pasted there, right
solutions pass the checkers, and each fault is named.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import warm
from conftest import ROOT, anchor, environment
from test_lab import blocks_of, check_kind

sys.path.insert(0, str(ROOT / "docs" / "lab"))
import check_ex9  # noqa: E402
import check_ex10  # noqa: E402
import watch  # noqa: E402

pytestmark = pytest.mark.slow
LAB, SOLUTIONS = ROOT / "docs" / "lab", ROOT / "tests" / "exercises"
DDP, ACCELERATED, MENDED = ((SOLUTIONS / f"{name}.py").read_text()
                            for name in ("ddp", "accelerated", "mended"))  # fmt: skip
WORDS = ["--config_file", str(watch.DDP_YAML), "--main_process_port", "0"]
MEAN = "        dist.all_reduce(total)  # all ranks call it, and each has the sum then\n"
TRAIN_ALONE = {
    "each sample is used once in an epoch",
    "a step takes 64 samples from both ranks together",
    "each epoch prints one line",
    "one rank saves the weights",
}

# What a checker says about a right solution with one fault: the fault's (old, new) text, and the
# points that are then wrong.
FAULTS_9 = {
    "no sampler": (
        [("Sampler(train_data, seed", "Sampler(train_data, num_replicas=1, rank=0, seed")],
        {"each sample is used once in an epoch"}),
    "no set_epoch": (
        [("        sampler.set_epoch(epoch)  # it shuffles with seed + epoch\n", "")],
        {"each epoch has another order"}),
    "global batch of 128": (
        [("BATCH_SIZE // world_size", "BATCH_SIZE")],
        {"a step takes 64 samples from both ranks together"}),
    "no DDP": (
        [("    model = DistributedDataParallel(model)\n", ""), ("model.module", "model")],
        {"both ranks end with the same weights"}),
    "loss of rank 0": (
        [(MEAN, ""), (" / len(train_loader) / world_size", " / len(train_loader)")],
        {"the loss is the mean over both ranks"}),
    "sum of the losses": (
        [(" / len(train_loader) / world_size", " / len(train_loader)")],
        {"the loss is the mean over both ranks"}),
    "printed by all": (
        [("if rank == 0:\n            # Without", "if True:\n            # Without")],
        {"each epoch prints one line"}),
    "saved by all": (
        [("    if rank == 0:\n        torch.save(", "    if True:\n        torch.save(")],
        {"one rank saves the weights"}),
    "saved by none": (
        [("    if rank == 0:\n        torch.save(", "    if rank == 2:\n        torch.save(")],
        {"one rank saves the weights"}),
    "the wrapper's keys": (
        [("torch.save(model.module.", "torch.save(model.")],
        {"the plain model can load the weights"}),
    "another learning rate": (
        [("lr=0.05", "lr=0.1")],
        {"the training is that of single.py"}),
    "another order": (
        [("seed=SEED", "seed=SEED + 1")],
        {"the training is that of single.py"}),
    "sum of the gradients": (
        [("            optimizer.step()\n", "            for weight in model.parameters():\n"
          "                weight.grad *= world_size\n            optimizer.step()\n")],
        {"the training is that of single.py"}),
}  # fmt: skip
FAULTS_10 = {
    "the order": (
        [("        sampler.set_epoch(epoch)  # or each epoch has the order of the first\n", "")],
        {"each epoch has another order"}),
    "the loss": (
        [(MEAN, ""), (" / len(loader) / world_size", " / len(loader)")],
        {"the loss is that of all samples"}),
    "the checkpoint": (
        [("        if rank == 0:\n            torch.save(", "        torch.save("),
         ("            say(f\"epoch {epoch}: rank", "        say(f\"epoch {epoch}: rank")],
        {"one rank saves the checkpoint"}),
}  # fmt: skip


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
        monkeypatch.setattr(sys, "argv", ["check", str(script), *flags])
        single = LAB / "single.py" if checker is check_ex9 else None
        code, printed = watch.check(checker.judge, single), capsys.readouterr().out
        return code, printed, set(re.findall(r"^WRONG  (.*?)(?::|$)", printed, re.M))

    return run


@pytest.mark.parametrize("name", FAULTS_9)
def test_exercise_9_names(name, judged):
    changes, wrong = FAULTS_9[name]
    code, printed, found = judged(check_ex9, changed(DDP, changes))
    assert (code, found) == (1, wrong), printed


@pytest.mark.parametrize("name", FAULTS_10)
def test_exercise_10_names(name, judged):
    changes, wrong = FAULTS_10[name]
    code, printed, found = judged(check_ex10, changed(MENDED, changes))
    assert (code, found) == (1, wrong), printed


def test_the_faulty_script_is_the_mended_one_with_these_faults():
    text = changed(MENDED, [change for changes, _ in FAULTS_10.values() for change in changes])
    assert text.split('"""\n', 1)[1] == (LAB / "faulty.py").read_text().split('"""\n', 1)[1]


def test_processes_that_train_alone(judged):
    """Accelerate looks for GPUs, and finds none. It makes a process group and does not use it."""
    change = ("Accelerator(cpu=not torch.cuda.is_available())", "Accelerator()")
    code, printed, found = judged(check_ex9, changed(ACCELERATED, [change]))
    assert (code, found) == (1, TRAIN_ALONE) and "cpu=True" in printed, printed


def test_errors_and_hangs(judged):
    """They end with a line that says where."""
    number = DDP[: DDP.index("dist.destroy")].count("\n") + 1
    wrong = changed(DDP, [("dist.destroy_process_group()", "model.save()")])
    code, printed, _ = judged(check_ex9, wrong)
    assert code == 1 and "runs to its end" in printed
    assert f"ended in line {number}: AttributeError" in printed, printed
    wrong = changed(DDP, [(MEAN, ""), ("        if rank == 0:\n            #",
                                       "        if rank == 0:\n            dist.all_reduce(total)\n"
                                       "            #")])  # fmt: skip
    code, printed, _ = judged(check_ex9, wrong, "--seconds", "8")  # gloo aborts, or all wait
    assert code == 1 and re.search(r"rank \d .* in line \d", printed), printed
    wrong = changed(DDP, [("dist.destroy_process_group()", "while rank == 0: pass")])
    code, printed, _ = judged(check_ex9, wrong, "--seconds", "8")
    assert code == 1 and f"rank 0 still waits in line {number} after 8 s" in printed, printed


def test_the_places_that_the_checkers_name_exist():
    for checker in (check_ex9, check_ex10):
        text = "".join(re.split(r'"\n +f?"', Path(checker.__file__).read_text()))
        for page, heading in re.findall(r"(docs/[\w./-]+\.md)(?:#([\w-]+))?", text):
            headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.M)
            assert not heading or heading in map(anchor, headings), f"{page}#{heading}"


def start(command, folder):
    """What a launcher's command prints, by forked ranks as above; (exit code, text)."""
    words = shlex.split(command)
    argv = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    log = folder / "log"
    log.write_text("")
    code = warm.run_ranks(WORDS, argv, environment({}), folder, log, log, 60)
    return code, log.read_text()


@pytest.mark.parametrize("page", ["09-by-hand", "10-faults"])
def test_page(page, tmp_path, judged):
    """All commands, in order. The files that a student changes become right ones before the blocks
    in which nothing is wrong any more. Exercise 9's last two checks start the ranks themselves.
    """
    for name in ("accelerate_configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    right = {"my_ddp.py": DDP, "my_accelerate.py": ACCELERATED, "mended.py": MENDED}
    for commands, pasted in blocks_of((LAB / f"{page}.md").read_text()):
        printed, wrong = "", "WRONG" in pasted
        if "ok  " in pasted and not wrong:
            for file in Path(tmp_path, "runs", "lab").glob("*.py"):
                file.write_text(right[file.name])
        for command in commands.splitlines():
            if re.match("accelerate launch|torchrun .* --nproc_per_node 2", command):
                code, text = start(command, tmp_path)
            elif "check_ex10" in command or "check_ex9" in command and wrong:
                checker = check_ex10 if "check_ex10" in command else check_ex9
                code, text, _ = judged(checker, (tmp_path / command.split()[-1]).read_text())
            else:
                shell = subprocess.run(["bash", "-c", command], cwd=tmp_path, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       timeout=200)
                code, text = shell.returncode, shell.stdout
            assert code == (wrong and "check_ex" in command), f"{command}\n{text}"
            printed += text
        check_kind(pasted, printed)
