"""verify.py: what it says about right scripts, about one mistake each, and about bad input.

tests/data/verify/ has the right scripts, and in mistakes.diff what each mistake changes in one.
docs/lab/unequal.py has four more.
"""

import json
import re
import subprocess
import sys
import time

import psutil
import pytest
from conftest import BASELINE, ROOT, RUNGS, STRATEGIES, run_forked
from test_bert import TINY

LAB = ROOT / "docs" / "lab"
ZOO = ROOT / "tests" / "data" / "verify"
BATCH = ["--batch_flag", "batch_size=16"]
DIGITS = [str(ROOT / "train_mnist_rnn.py"), "--dataset", "digits", "--max_train_steps", "12"]
HERE = [str(ROOT / word) if word.startswith("tests/") else word for word in TINY]
BERT = [str(ROOT / "train_bert_squad.py"), *HERE, "--max_train_steps", "12"]
OURS = ["--batch_flag", "per_device_train_batch_size=16"]
HIDDEN = {"seed_by_rank": "fsdp", "clipped_by_torch": "zero2"}  # by DDP; the YAML shows it
QUICK = ["loader_not_prepared", "loss_sum", "batchnorm", "average_on_main", "metric_of_rank_0"]
RIGHT = dict.fromkeys(["right", "right_accumulation", "right_iterable"], STRATEGIES)
RIGHT |= {"right_trainer": STRATEGIES, "right_habits": ["ddp", "fsdp", "zero2"]}
RIGHT |= {"right_two_optimizers": ["ddp", "fsdp"]}  # DeepSpeed trains one model.


def read_mistakes():
    """{name: (what the tool says, [hunk])} of mistakes.diff. A hunk is a list of lines."""
    found = {}
    for section in (ZOO / "mistakes.diff").read_text().split("\n# ")[1:]:
        title, said, body = section.split("\n", 2)
        hunks = [hunk.splitlines() for hunk in body.split("@@\n")]
        found[title.partition(":")[0]] = said.removeprefix("? "), hunks
    return found


MISTAKES = read_mistakes()
RESUMES = [name for name in MISTAKES if name.startswith("resume")]
OTHERS = [*RESUMES, "augmentation", "not_seeded", "model_not_seeded"]  # which have their own tests
NAMED = [name for name in MISTAKES if name not in OTHERS]


def write_script(name, folder):
    """Make the script with this mistake in `folder`. Each hunk has to fit exactly one place."""
    text = (ZOO / ("right_resume.py" if name in RESUMES else "right.py")).read_text()
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


@pytest.mark.parametrize("name", slow_but(["right"], RIGHT))
def test_right_scripts_are_the_same_everywhere(name, tmp_path):
    result = verify(tmp_path, *yamls(*RIGHT[name]), *BATCH, f"{ZOO}/{name}.py")
    found = columns(result.folder)
    assert {column["verdict"] for column in found.values()} == {"the same"}
    assert list(found) == RIGHT[name]
    for column in found.values():
        cells = column["cells"]
        assert cells["samples"] == cells["learning rate"] == "same"
        for row in ("loss", "gradients", "weights"):
            assert float(cells[row].removeprefix("same, ")) < 2e-5, row
    if name == "right":
        assert cells["evaluated samples"] == "same, 150" and cells["printed numbers"] == "same, 4"


@pytest.mark.parametrize("name", slow_but(QUICK, NAMED))
def test_the_first_line_names_the_mistake(name, tmp_path):
    said, script = MISTAKES[name][0], write_script(name, tmp_path)
    words = [*yamls(HIDDEN.get(name, "ddp")), *BATCH, "--patience", 8, script]
    result = verify(tmp_path, *words, code=1)
    [column] = columns(result.folder).values()
    assert said in column["lines"][0], column["lines"]
    assert column["verdict"] == "differs" and column["lines"][0] in result.out
    if name == "fails_on_rank_1":
        assert "Traceback" in result.out and "watching" not in result.out


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
        verify(tmp_path, *yamls("ddp"), *BATCH, write_script(name, tmp_path))


@pytest.mark.parametrize("name", slow_but([], RESUMES))
def test_a_wrong_resume_is_named(name, tmp_path):
    words = ["--resume=--resume", "--kill_after", 10, *yamls("ddp"), write_script(name, tmp_path)]
    result = verify(tmp_path, *words, "--output_dir", tmp_path / "runs", code=1)
    for column in columns(result.folder).values():  # of one process, and of two
        assert MISTAKES[name][0] in column["lines"][0], column["lines"]


@pytest.mark.slow
def test_right_resumes_are_equal_to_the_last_bit(tmp_path):
    """The zoo's, with dropout, and both of this project's."""
    end = ["--output_dir", tmp_path / "runs"]
    zoo = ["--kill_after", 10, *yamls(*STRATEGIES), f"{ZOO}/right_resume.py"]
    mnist = ["--kill_after", 12, *yamls(*STRATEGIES), *DIGITS, "--max_train_steps", 20]
    bert = ["--kill_after", 8, *yamls("fsdp"), *BERT, "--per_device_train_batch_size", 8]
    for words in (zoo, [*mnist, "--checkpointing_steps", 10], [*bert, "--checkpointing_steps", 6]):
        found = columns(verify(tmp_path, "--resume=--resume", *words, *end).folder)
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
    found = columns(verify(tmp_path, *yamls(*names), *OURS, *script, *clip, *end).folder)
    assert list(found) == names
    assert all(float(one["cells"]["loss"].removeprefix("same, ")) < 1e-6 for one in found.values())
    verify(tmp_path, "--yaml", "hsdp", "--ranks", 4, *OURS, *script, *end)


@pytest.mark.slow
def test_runs_in_bf16_are_compared(tmp_path):
    halves = []
    for name in ("ddp", "fsdp"):
        text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
        halves.append(tmp_path / f"{name}_bf16.yaml")
        halves[-1].write_text(text.replace("mixed_precision: 'no'", "mixed_precision: bf16"))
        assert "bf16" in halves[-1].read_text()
    verify(tmp_path, *yamls(*halves), *OURS, *DIGITS)


ERRORS = {
    "there is no script nowhere.py": ["nowhere.py"],
    "SIZE has to be a multiple of 2": ["--batch_flag", "batch_size=15", "right.py"],
    "there is no accelerate_configs/other.yaml": ["--yaml", "other", "right.py"],
    "right.py on one process: rank 0: right.py: error: unrecognized arguments: --rows 16": [
        "--batch_flag", "rows=16", "right.py"
    ],
    "two YAMLs have the same name": [*yamls("ddp"), *yamls("ddp"), "right.py"],
    "call accelerate.utils.set_seed before anything is drawn": ["not_seeded.py"],
    "step 1 has different weights in each run": ["model_not_seeded.py"],
    "plain.py on one process: it made 0 training steps, and 2 are needed": ["plain.py"],
}  # fmt: skip


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
def test_it_cannot_tell_if_noise_is_drawn_or_the_batch_is_not_divided(tmp_path):
    """--split divides a batch that is written into the script."""
    noise = write_script("augmentation", tmp_path)
    result = verify(tmp_path, *yamls("ddp"), *BATCH, noise, code=2)
    assert "ddp: cannot tell" in result.out and MISTAKES["augmentation"][0] in result.out
    result = verify(tmp_path, *yamls("ddp"), f"{ZOO}/right.py", code=2)
    assert "all ranks read 32 samples in step 1, and one process reads 16" in result.out
    verify(tmp_path, *yamls("ddp", "zero2"), "--split", f"{ZOO}/right.py")


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
