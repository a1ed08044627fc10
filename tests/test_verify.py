"""verify.py: what it says about right scripts, about one mistake each, and about bad input.

tests/data/verify/ has right scripts, and in mistakes.diff what each mistake changes in one.
docs/lab/unequal.py has four more.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import BASELINE, ROOT, RUNGS, STRATEGIES, run_forked
from test_bert import TINY

from watching.draws import generator_of

LAB = ROOT / "docs" / "lab"
ZOO = ROOT / "tests" / "data" / "verify"
BATCH = ["--batch_flag", "batch_size=16"]
DIGITS = [str(ROOT / "train_mnist_rnn.py"), "--dataset", "digits", "--max_train_steps", "12"]
HERE = [str(ROOT / word) if word.startswith("tests/") else word for word in TINY]
BERT = [str(ROOT / "train_bert_squad.py"), *HERE, "--max_train_steps", "12"]
OURS = ["--batch_flag", "per_device_train_batch_size=16"]
# DDP hides these; the YAML shows them.
HIDDEN = {"seed_by_rank": "fsdp", "clipped_by_torch": "zero2", "norm_is_none": "zero2"}
QUICK = ["loader_not_prepared", "loss_sum", "batchnorm", "average_on_main", "torchrun_no_sampler"]
RIGHT = dict.fromkeys(["right", "right_accumulation", "right_iterable"], STRATEGIES)
RIGHT |= {"right_trainer": STRATEGIES, "right_habits": ["ddp", "fsdp", "zero2"]}
RIGHT |= dict.fromkeys(["right_draws", "right_casts"], ["ddp", "zero2"])
RIGHT |= dict.fromkeys(["right_two_optimizers", "right_step_is_a_module"], ["ddp", "fsdp"])
# Those of exercise 9, and one more.
SOLUTIONS = ["by_hand", "flat", "overlap", "sharded", "accelerated", "right_by_hand_in_step"]


def read_mistakes():
    """{name: (what the tool says, [hunk])} of mistakes.diff. A hunk is a list of lines."""
    found = {}
    for section in (ZOO / "mistakes.diff").read_text().split("\n# ")[1:]:
        title, said, body = section.split("\n", 2)
        hunks = [hunk.splitlines() for hunk in body.split("@@\n")]
        found[title.partition(":")[0]] = said.removeprefix("? "), hunks
    return found


MISTAKES = read_mistakes()
TORCH = ["ddp", *(name for name in MISTAKES if name.startswith("right_torchrun"))]
RESUMES = [name for name in MISTAKES if name.startswith(("resume", "torchrun_resume"))]
# These have their own tests.
OTHERS = [*RESUMES, "mixed_up", "not_seeded", "model_not_seeded", "torchrun_own_batches"]
NAMED = [name for name in MISTAKES if name not in OTHERS and not name.startswith("right")]


def write_script(name, folder):
    """Make a script of mistakes.diff in `folder`. Each hunk has to fit exactly one place."""
    bases = {"torchrun": ZOO / "ddp.py", "by_hand": LAB / "solutions" / "by_hand.py"}
    bases |= {"overlap": LAB / "solutions" / "overlap.py", "resume": ZOO / "right_resume.py"}
    base = next((bases[part] for part in bases if part in name), ZOO / "right.py")
    text = base.read_text()
    for hunk in MISTAKES[name][1]:
        old = "".join(f"{line[1:]}\n" for line in hunk if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in hunk if line[0] in " +")
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def verify(tmp_path, *words, code=0):
    """The Result of the tool, which has to end with this exit code. It imports nothing."""
    words = [str(ROOT / "tools" / "verify.py"), *map(str, words)]
    launcher = ["--config_file", str(ROOT / BASELINE[1])]
    result = run_forked(launcher, words, tmp_path / "runs" / "verify", root=tmp_path, alone=True)
    assert result.code == code, result.out + result.err
    return result


def columns(folder):
    """What verify.json says about each YAML."""
    return json.loads((folder / "verify.json").read_text())["yamls"]


def yamls(*names):
    """Words for these YAMLs."""
    return [word for name in names for word in ("--yaml", name)]


def slow_but(quick, names):
    """Parameters, of which all but a few are slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(["right", "right_draws"], RIGHT))
def test_right_scripts_are_the_same_everywhere(name, tmp_path):
    script = write_script(name, tmp_path) if name in MISTAKES else ZOO / f"{name}.py"
    result = verify(tmp_path, *yamls(*RIGHT[name]), *BATCH, script)
    found = columns(result.folder)
    assert {column["verdict"] for column in found.values()} == {"the same"}
    assert list(found) == RIGHT[name]
    for column in found.values():
        cells = column["cells"]
        assert cells["samples"] == cells["learning rate"] == "same" and not column["lines"]
        for row in ("loss", "gradients", "weights"):
            assert float(cells[row].removeprefix("same, ")) < 1e-11, row
        if name in ("right", "right_draws"):
            assert cells["evaluated samples"] == "same, 150"
            assert cells["printed numbers"] == "same, 4"
        # Only this one has dropout, and the same seed on all ranks.
        assert ("masks of dropout" in "".join(column["remarks"])) == (name == "right_habits")
    assert not (result.folder / "again").exists()  # It repeats a run only if something differs.


@pytest.mark.parametrize("name", slow_but(QUICK, NAMED))
def test_the_first_line_names_the_mistake(name, tmp_path):
    said, script = MISTAKES[name][0], write_script(name, tmp_path)
    if name.startswith(("by_hand", "overlap")):
        (tmp_path / "docs").symlink_to(ROOT / "docs")  # from which it imports
        words = ["--steps", 6, script, "weights.pt"]
    else:
        own = [] if "torchrun" in name else yamls(HIDDEN.get(name, "ddp"))
        words = [*own, *BATCH, "--patience", 8, script]
    result = verify(tmp_path, *words, code=1)
    [column] = columns(result.folder).values()
    assert said in column["lines"][0], column["lines"]
    verdicts = {"norm_is_none": "trains the same, but prints other numbers"}
    verdicts |= dict.fromkeys(["gathered_on_main", "fails_on_rank_1", "unused_weight"], "fails")
    assert column["verdict"] == verdicts.get(name, "differs") and column["lines"][0] in result.out
    if name == "fails_on_rank_1":
        own = [
            "fails_on_rank_1.py:52: main()",
            'fails_on_rank_1.py:31: open("/nowhere/labels.txt")',
        ]
        assert own[0] in result.out and own[1] in column["frames"][1]
        assert "Traceback" in column["traceback"] and "Traceback" not in result.out


@pytest.mark.slow
def test_exercise_15_shows_one_mistake_after_the_other(tmp_path):
    """The first lines and the answers of its page, in their order."""
    text, script = (LAB / "unequal.py").read_text(), tmp_path / "mended.py"
    page = (LAB / "15-verify.md").read_text()
    answers = re.findall(r"^`(.*)`\n\n```diff\n-(.*)\n\+(.*)\n```", page, re.M)
    assert len(answers) == 4
    for said, wrong, right in answers:
        script.write_text(text)
        [column] = columns(verify(tmp_path, *yamls("ddp"), *BATCH, script, code=1).folder).values()
        assert column["lines"][0].startswith(said), column["lines"]
        assert text.count(wrong) == 1
        text = text.replace(wrong, right)
    script.write_text(text)
    verify(tmp_path, *yamls("ddp"), *BATCH, script)


@pytest.mark.slow
def test_what_is_harmless_elsewhere_is_the_same_there(tmp_path):
    """DDP gives all ranks the weights of rank 0, and torch clips what DDP and FSDP reduced."""
    for name in HIDDEN:
        verify(tmp_path, *BATCH, write_script(name, tmp_path))


@pytest.mark.parametrize("name", slow_but([], RESUMES))
def test_a_wrong_resume_is_named(name, tmp_path):
    script = write_script(name, tmp_path)
    ours = ["--resume=--resume", *yamls("ddp"), script, "--output_dir", tmp_path / "runs"]
    words = ["--resume=", *BATCH, script] if "torchrun" in name else ours
    result = verify(tmp_path, "--kill_after", 10, *words, code=1)
    for column in columns(result.folder).values():  # of one process, and of two
        assert MISTAKES[name][0] in column["lines"][0], column["lines"]


@pytest.mark.parametrize("name", slow_but(["ddp"], [*TORCH, *SOLUTIONS]))
def test_right_scripts_for_torchrun_and_gpus_are_the_same(name, tmp_path):
    """They train on CPU processes, and what they save is not in the working directory."""
    folder = LAB / "solutions" if name in SOLUTIONS else ZOO
    script = write_script(name, tmp_path) if name in MISTAKES else folder / f"{name}.py"
    if name in SOLUTIONS:
        (tmp_path / "docs").symlink_to(ROOT / "docs")  # from which it imports
        words = ["--steps", 6, script, "weights.pt"]
    else:
        start = ["--same_start"] if "meta" in name else []
        words = [*start, script, "--batch_size={16}"]
    result = verify(tmp_path, *words)
    assert ("does not import accelerate: --torchrun" in result.err) == (name != "accelerated")
    [column] = columns(result.folder).values()
    cells = column["cells"]
    assert cells["samples"] == cells["learning rate"] == "same" and not column["lines"]
    if name in ("sharded", "right_by_hand_in_step"):
        assert cells.pop("gradients") == "none"  # The optimizer has other tensors, or reduces them.
    for row in {"loss", "gradients", "weights"} & {*cells}:
        assert float(cells[row].removeprefix("same, ")) < 1e-11, row
    if name in TORCH:
        assert cells["evaluated samples"] == "same, 128"
        assert cells["printed numbers"] == "same, 4"
    assert not [*tmp_path.glob("*.pt")] and not (result.folder / "again").exists()


@pytest.mark.slow
def test_right_resumes_are_equal_to_the_last_bit(tmp_path):
    """The zoo's, with dropout, and both of this project's."""
    end = ["--output_dir", tmp_path / "runs"]
    zoo = ["--kill_after", 10, *yamls(*STRATEGIES), f"{ZOO}/right_resume.py"]
    reads = ["--kill_after", 10, write_script("right_resume_by_reading", tmp_path)]
    mnist = ["--kill_after", 12, *yamls("fsdp", "zero2"), *DIGITS, "--max_train_steps", 20]
    bert = ["--kill_after", 8, *yamls("fsdp"), *BERT, "--per_device_train_batch_size", 8]
    right = write_script("right_torchrun_resume", tmp_path)
    torchrun = ["--resume=", "--kill_after", 14, *BATCH, right]
    for words in (
        torchrun,
        zoo,
        reads,
        [*mnist, "--checkpointing_steps", 10],
        [*bert, "--checkpointing_steps", 6],
    ):
        how = words if words == torchrun else ["--resume=--resume", *words, *end]
        found = columns(verify(tmp_path, *how).folder)
        for column in found.values():
            rows = {row for row in column["cells"].values() if row != "same"}
            assert rows == {"same, 0e+00"}, column


@pytest.mark.slow
@pytest.mark.parametrize("script", [DIGITS, BERT], ids=["mnist", "bert"])
def test_this_projects_scripts_train_the_same(script, tmp_path):
    """With accumulation and clipping, the LSTM under all YAMLs; and under HSDP."""
    end = ["--output_dir", tmp_path / "runs"]
    names = [*STRATEGIES, *(["dp", *RUNGS] if script == DIGITS else [])]
    clip = ["--gradient_accumulation_steps", 3, "--max_grad_norm", 0.5]
    few = ["--steps", 6, *OURS]
    found = columns(verify(tmp_path, *yamls(*names), *few, *script, *clip, *end).folder)
    assert list(found) == names
    assert all(float(one["cells"]["loss"].removeprefix("same, ")) < 1e-14 for one in found.values())
    verify(tmp_path, "--yaml", "hsdp", "--ranks", 4, *few, *script, *end)


def test_a_function_of_torch_draws_from_the_generator_of_its_device(monkeypatch):
    """On a GPU, that of the GPU; the tool seeds it for each sample."""
    monkeypatch.setattr(torch.cuda, "default_generators", ["first", "second"])
    assert generator_of((2, 3), {}) is generator_of((torch.ones(2),), {}) is torch.default_generator
    assert generator_of((2, 3), {"device": "cuda:1"}) == "second"
    own = torch.Generator()
    assert generator_of((2, 3), {"device": "cuda:1", "generator": own}) is own


ERRORS = {
    "there is no script nowhere.py": ["nowhere.py"],
    "SIZE has to be a multiple of 2": ["--batch_flag", "batch_size=15", "right.py"],
    "there is no accelerate_configs/other.yaml": ["--yaml", "other", "right.py"],
    "right.py: one process ends with rank 0: right.py: error: unrecognized arguments: --rows 16": [
        "--batch_flag", "rows=16", "right.py"
    ],
    "two YAMLs have the same name": [*yamls("ddp"), *yamls("ddp"), "right.py"],
    "step 1 has different weights in each run: add --seed 0 here": [*BATCH, "model_not_seeded.py"],
    "divide the batch by --batch_flag batch_size=16": ["right.py"],
    "plain.py: one process made 0 training steps, and 2 are needed": ["plain.py"],
}  # fmt: skip


@pytest.mark.slow
def test_what_it_cannot_tell_is_one_line(tmp_path):
    (tmp_path / "right.py").write_text((ZOO / "right.py").read_text())
    (tmp_path / "plain.py").write_text("import torch\n\nprint(torch.ones(1))\n")
    write_script("not_seeded", tmp_path)
    write_script("model_not_seeded", tmp_path)
    before = {*tmp_path.iterdir()}
    for problem, words in ERRORS.items():
        result = verify(tmp_path, *words, code=2)
        assert problem in result.error_line(), result.err
        assert "Traceback" not in result.err
    assert {*tmp_path.iterdir()} == before | {tmp_path / "runs"}


@pytest.mark.slow
def test_the_tool_divides_seeds_and_says_what_it_cannot_tell(tmp_path):
    """--split divides a batch that is written into the script, and changes no schedule."""
    mixed = write_script("mixed_up", tmp_path)
    result = verify(tmp_path, *BATCH, mixed, code=2)
    assert "ddp: cannot tell" in result.out and MISTAKES["mixed_up"][0] in result.out
    seeded = write_script("not_seeded", tmp_path)
    assert "add --seed 0 here" in verify(tmp_path, *BATCH, seeded, code=2).error_line()
    verify(tmp_path, "--seed", 3, *BATCH, seeded)
    fixed = (LAB / "unequal.py").read_text()
    fixed = fixed.replace("DataLoader(Subset(data, own)", "DataLoader(data")
    assert fixed.count("DataLoader(data") == 1
    (tmp_path / "unequal.py").write_text(fixed)
    result = verify(tmp_path, "--split", tmp_path / "unequal.py", code=1)
    assert "it changes 2 times as fast" in result.out
    verify(tmp_path, *yamls("ddp", "zero2"), "--split", f"{ZOO}/right.py")


@pytest.mark.slow
def test_a_script_that_needs_its_own_precision_keeps_it(tmp_path):
    """Then only large differences count, and a line says why."""
    for name in ("right_iterable", "loss_sum"):
        script = write_script(name, tmp_path)
        text = script.read_text()
        check = '        assert inputs.dtype == torch.float32, "I need it"\n'
        loop = "        for inputs, labels in train:\n"
        script.write_text(text.replace(loop, f"{loop}    {check}"))
        result = verify(tmp_path, *BATCH, script, code=name == "loss_sum")
        [column] = columns(result.folder).values()
        [remark] = column["remarks"]
        assert remark.startswith("only differences above 0.03 count") and "I need it" in remark
    assert "a sum over samples?" in column["lines"][0]


@pytest.mark.slow
def test_torch_and_accelerate_are_enough(tmp_path):
    """Of the installed packages, a folder has all but those of other tools and scripts."""
    others = ("deepspeed", "transformers", "datasets", "evaluate", "tensorboard", "pydantic")
    others += ("matplotlib", "markdown", "scipy", "sklearn", "scikit", "torchvision", "pyarrow")
    folder = tmp_path / "packages"
    folder.mkdir()
    for package in Path(torch.__file__).parents[1].iterdir():
        if not package.name.lower().startswith(others):
            (folder / package.name).symlink_to(package)
    words = [sys.executable, "-S", ROOT / "tools" / "verify.py", *BATCH, ZOO / "right.py"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ddp: the same" in done.stdout, done.stderr


@pytest.mark.slow
def test_ranks_end_with_the_tool(tmp_path):
    """Even if it is killed while they wait for each other."""
    words = [sys.executable, ROOT / "tools" / "verify.py", *yamls("ddp"), *BATCH]
    words += ["--patience", "100", write_script("gathered_on_main", tmp_path)]
    folder = tmp_path / "runs" / "verify" / "ddp"
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as tool:
        for _ in range(600):
            if len(list(folder.glob("*.alive"))) == 2:
                break
            time.sleep(0.1)
        ranks = psutil.Process(tool.pid).children()
        tool.kill()
    assert len(ranks) == 2 and not psutil.wait_procs(ranks, timeout=20)[1]


# {what the tool says: what a script has, and what ddp.py has in its place}
REFUSED = {
    "it needs a GPU: rank 0: ValueError: SyncBatchNorm": ["SyncBatchNorm(16)", "Tanh()"],
    "it needs a GPU: rank 0: ModuleNotFoundError: No module named 'flash_attn'": [
        "import os, flash_attn\n", "import os\n"
    ],
    "torch.multiprocessing.spawn starts the ranks itself": [
        "    torch.multiprocessing.spawn(main)\n", "    main()\n"
    ],
    "it uses Accelerate, perhaps in another module: add --yaml ddp": [
        '__import__("accelerate").Accelerator', "dist.init_process_group"
    ],
    "it compares FSDP2 only": [
        "torch.distributed.fsdp.FullyShardedDataParallel(model)",
        "DistributedDataParallel(model.cuda(), device_ids=[gpu])",
    ],
    "it does not train: on one process, the loss is NaN from step 1": [
        "(loss * float('nan')).backward", "loss.backward"
    ],
    "it does not train: on one process, all gradients are 0 in all steps": [
        "(loss * 0).backward", "loss.backward"
    ],
    "add --seed 0 here, or call torch.manual_seed": ["torch.seed()", "torch.manual_seed(0)"],
    "divide the batch by --batch_flag batch_size=16": ["args.batch_size", "args.batch_size"],
    "divide the batch by --split": ["DataLoader(data, 8,", "DataLoader(data, args.batch_size,"],
}  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_pretended_is_one_line(tmp_path):
    script, text = tmp_path / "script.py", (ZOO / "ddp.py").read_text()
    for said, (new, old) in REFUSED.items():
        assert old in text
        script.write_text(text.replace(old, new))
        batch = [] if "divide the batch" in said else ["--batch_size={16}"]
        result = verify(tmp_path, script, *batch, code=2)
        assert said in result.error_line() and "Traceback" not in result.err, result.err
    verify(tmp_path, "--split", script)
    assert "takes no --yaml" in verify(tmp_path, "--torchrun", *yamls("ddp"), script, code=2).err
    assert "a multiple of 2" in verify(tmp_path, script, "--batch_size={15}", code=2).error_line()
    result = verify(tmp_path, *BATCH, write_script("torchrun_own_batches", tmp_path), code=2)
    said = "torchrun: cannot tell", MISTAKES["torchrun_own_batches"][0]
    assert all(text in result.out for text in said)


@pytest.mark.slow
def test_a_run_keeps_its_files_apart(tmp_path):
    """It reads those of the working directory, and loads no checkpoint that another run left."""
    home = tmp_path / "home"
    log, sibling, script = (
        home / "logs" / "of" / "log.txt",
        tmp_path / "sibling.txt",
        home / "own.py",
    )
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    sibling.write_text("sibling\n")
    habits = ["done = 0", 'open("logs/of/log.txt", "a").write(open("../sibling.txt").read())']
    habits.append('print("rows:", 640 // args.batch_size)  # before the first step')
    text = write_script("right_torchrun_resume", tmp_path).read_text()
    script.write_text(text.replace("done = 0", "\n    ".join(habits)))
    files = {*home.rglob("*")}
    result = verify(home, *BATCH, script)
    assert {path for path in home.rglob("*") if "runs" not in path.relative_to(home).parts} == files
    own = result.folder / "torchrun" / "files"
    [written], [checkpoint] = own.rglob("log.txt"), own.rglob("checkpoint.pt")
    assert written.read_text() == "before\n" + 2 * "sibling\n"
    assert not [path for path in own.rglob("*") if path.is_symlink()]
    script.write_text(text.replace("done = 0", f"done = 0\n    open({str(log)!r}, 'w')"))
    assert f"it would overwrite {log}" in verify(home, *BATCH, script, code=2).error_line()
    assert log.read_text() == "before\n"
    script.write_text(text)
    over = torch.load(checkpoint)
    for done, said in (
        (2, "does it continue a run that was over?"),
        (1, "another run of it has sav"),
    ):
        torch.save(over | {"done": done}, home / "checkpoint.pt")
        assert said in verify(home, *BATCH, script, code=2).error_line()
