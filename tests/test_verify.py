"""verify.py: what it says of right scripts, of one mistake each, of public ones, and of bad input.

The scripts are in tests/data/verify/, four of them in docs/lab/. Each is a right one with one
mistake that people make.
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
# The first line that the tool prints of each mistake, or a part of it, and the YAML that shows it.
MISTAKES = {
    "loader_not_prepared": "step 1: all ranks read the same 8 samples: was the loader given to",
    "unequal_1": "step 1: 14 of 16 samples differ from those on one process",
    "shuffled_by_rank": "step 1: 8 of 16 samples differ from those on one process: is the loader",
    "unequal_2": "step 2: learning rate 0.00925 instead of 0.009625, it changes 2 times as fast",
    "schedule_not_prepared": "step 2: learning rate 0.0098125 instead of 0.009625: the schedule",
    "rate_times_ranks": "step 1: learning rate 0.02 instead of 0.01, 2 times as large: is it",
    "seed_by_rank fsdp": "(2.bias, 2.weight, 0.bias and 1 more): set the seed on all ranks",
    "loss_sum": "0.5 times, with the same outputs: a sum over samples?",
    "unequal_3": "with the same outputs: is it a mean over a count that differs between",
    "loss_of_pairs": "or does it compare the samples of a batch?",
    "batchnorm": "from the same inputs: the model has BatchNorm (1), which normalizes over",
    "unwrapped": "step 1: 4 gradients are not the same on all ranks (2.bias, 2.weight, 0.bias",
    "reduced_twice": "step 1: gradients of 4 of 4 tensors (2.bias, 2.weight, 0.bias and 1 more) "
    "are 2 times as large: is a sum over ranks",
    "clipped_by_torch zero2": "clip_grad_norm_ clipped nothing: under DeepSpeed only",
    "average_on_main": "step 2: 4 weights are not the same on all ranks",
    "unequal_4": "evaluation after step 24: 80 rows gathered instead of 75",
    "metric_of_rank_0": "evaluation after step 24: rank 0 read 40 of 75 samples, and nothing was",
    "metric_mean_of_means": "evaluation after step 24: 10 rows gathered instead of 5",
    "gathered_on_main": "s: rank 0 is in gathered_on_main.py:39, rank 1 is in gathered_on_main.py:",
    "unused_weight": "fails: rank 0: RuntimeError: Expected to have finished reduction",
}
RESUMES = {
    "skips_nothing": "step 8: the samples are those of step 1 of the undisturbed run",
    "without_schedule": "step 9: learning rate 0.00901094 instead of 0.009: does the checkpoint",
    "without_optimizer": "weights differ (2.bias, 2.weight, 0.bias and 1 more): does the",
    "draws_again": "step 8: the same inputs, but different outputs (dropout, a buffer): does the",
    "seeds_again": "step 8: the same inputs, but different outputs (dropout, a buffer): does the",
}
QUICK = ["loader_not_prepared", "unequal_2", "unequal_3", "batchnorm"]
QUICK += ["average_on_main", "unequal_4"]
RIGHT = {"right": "ddp fsdp zero2 zero3", "right_accumulation": "ddp fsdp zero2 zero3"}
RIGHT |= {"right_iterable": "ddp fsdp zero2 zero3", "right_trainer": "ddp fsdp zero2 zero3"}
RIGHT |= {"right_two_optimizers": "ddp fsdp"}  # DeepSpeed trains one model.
RIGHT |= {"right_habits": "ddp fsdp zero2"}


def verify(tmp_path, *words, code=0):
    """The Result of the tool, which has to end with this exit code. It imports nothing."""
    words = [str(ROOT / "verify.py"), *map(str, words)]
    launcher = ["--config_file", str(ROOT / BASELINE[1])]
    result = run_forked(launcher, words, tmp_path / "runs" / "verify", root=tmp_path, alone=True)
    assert result.code == code, result.out + result.err
    return result


def columns(folder):
    """What verify.json says of each YAML."""
    return json.loads((folder / "verify.json").read_text())["yamls"]


def yamls(names):
    """Words for these YAMLs."""
    return [word for name in names.split() for word in ("--yaml", name)]


def slow_but(quick, names):
    """Parameters, of which all but a few are slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", slow_but(["right"], RIGHT))
def test_right_scripts_are_the_same_everywhere(name, tmp_path):
    result = verify(tmp_path, *yamls(RIGHT[name]), *BATCH, f"{ZOO}/{name}.py")
    found = columns(result.folder)
    assert {column["verdict"] for column in found.values()} == {"the same"}
    assert list(found) == RIGHT[name].split()
    for column in found.values():
        cells = column["cells"]
        assert cells["samples"] == cells["learning rate"] == "same"
        for row in ("loss", "gradients", "weights after the last step"):
            assert float(cells[row].removeprefix("same, ")) < 2e-5, row
    if name == "right":
        assert cells["evaluated samples"] == "same, 150" and cells["printed numbers"] == "same, 4"


@pytest.mark.parametrize("name", slow_but(QUICK, MISTAKES))
def test_the_first_line_names_the_mistake(name, tmp_path):
    script, _, yaml = name.partition(" ")
    folder = LAB if script.startswith("unequal") else ZOO
    words = [*yamls(yaml or "ddp"), *BATCH, "--patience", 8, folder / f"{script}.py"]
    result = verify(tmp_path, *words, code=1)
    [column] = columns(result.folder).values()
    assert MISTAKES[name] in column["lines"][0], column["lines"]
    assert column["verdict"] == "differs" and column["lines"][0] in result.out


@pytest.mark.slow
def test_the_answers_of_exercise_15_mend_its_scripts(tmp_path):
    page = (LAB / "15-verify.md").read_text()
    mends = re.findall(r"```diff\n-(.*)\n\+(.*)\n```", page)
    assert len(mends) == 4
    for number, (wrong, right) in enumerate(mends, 1):
        text = (LAB / f"unequal_{number}.py").read_text()
        assert text.count(wrong) == 1
        (tmp_path / "mended.py").write_text(text.replace(wrong, right))
        verify(tmp_path, *yamls("ddp"), *BATCH, "mended.py")


def test_the_page_of_results_names_every_mistake():
    page = (ROOT / "docs" / "results" / "verify.md").read_text()
    files = [*ZOO.glob("*.py"), *LAB.glob("unequal_*.py")]
    mistakes = [file.stem for file in files if not file.stem.startswith("right")]
    assert len(mistakes) >= 16 and all(f"`{name}`" in page for name in mistakes)
    tested = {name.partition(" ")[0] for name in MISTAKES} | {f"resume_{name}" for name in RESUMES}
    assert set(mistakes) == tested | {"augmentation", "not_seeded", "fails_on_rank_1"}


@pytest.mark.slow
def test_what_is_harmless_elsewhere_is_the_same_there(tmp_path):
    """DDP gives all ranks the weights of rank 0, and torch clips what DDP and FSDP reduced."""
    result = verify(tmp_path, *yamls("ddp"), *BATCH, f"{ZOO}/seed_by_rank.py")
    assert "note: the ranks make different first weights (2.bias, 2.weight" in result.out
    verify(tmp_path, *yamls("ddp fsdp"), *BATCH, f"{ZOO}/clipped_by_torch.py")


@pytest.mark.parametrize("name", slow_but([], RESUMES))
def test_a_wrong_resume_is_named(name, tmp_path):
    words = ["--resume=--resume", "--kill_after", 10, *yamls("ddp")]
    out = ["--output_dir", tmp_path / "runs"]
    result = verify(tmp_path, *words, f"{ZOO}/resume_{name}.py", *out, code=1)
    for column in columns(result.folder).values():  # of one process, and of two
        assert RESUMES[name] in column["lines"][0], column["lines"]


@pytest.mark.slow
def test_right_resumes_are_equal_to_the_last_bit(tmp_path):
    """The zoo's, with dropout, and both of this project's."""
    end = ["--output_dir", tmp_path / "runs"]
    every = yamls("ddp fsdp zero2 zero3")
    zoo = ["--kill_after", 10, *every, f"{ZOO}/right_resume.py"]
    mnist = ["--kill_after", 12, *every, *DIGITS, "--max_train_steps", 20]
    bert = ["--kill_after", 8, *yamls("fsdp"), *BERT, "--per_device_train_batch_size", 8]
    for words in (zoo, [*mnist, "--checkpointing_steps", 10], [*bert, "--checkpointing_steps", 6]):
        found = columns(verify(tmp_path, "--resume=--resume", *words, *end).folder)
        for column in found.values():
            rows = {row for row in column["cells"].values() if row != "same"}
            assert rows == {"same, 0e+00"}, column


@pytest.mark.slow
@pytest.mark.parametrize("script", [DIGITS, BERT], ids=["mnist", "bert"])
def test_this_projects_scripts_train_the_same(script, tmp_path):
    """With accumulation and clipping, the LSTM under all YAMLs; under HSDP; and in bf16."""
    end = ["--output_dir", tmp_path / "runs"]
    names = " ".join([*STRATEGIES, *(["dp", *RUNGS] if script == DIGITS else [])])
    clip = ["--gradient_accumulation_steps", 3, "--max_grad_norm", 0.5]
    found = columns(verify(tmp_path, *yamls(names), *OURS, *script, *clip, *end).folder)
    assert list(found) == names.split()
    assert all(float(one["cells"]["loss"].removeprefix("same, ")) < 1e-6 for one in found.values())
    verify(tmp_path, "--yaml", "hsdp", "--ranks", 4, *OURS, *script, *end)
    halves = []
    for name in ("ddp", "fsdp"):
        text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
        halves += ["--yaml", tmp_path / f"{name}_bf16.yaml"]
        halves[-1].write_text(text.replace("mixed_precision: 'no'", "mixed_precision: bf16"))
        assert "bf16" in halves[-1].read_text()
    verify(tmp_path, *halves, *OURS, *script, *end)


ERRORS = {
    "there is no script nowhere.py": ["nowhere.py"],
    "SIZE has to be a multiple of 2": ["--batch_flag", "batch_size=15", "{}/right.py"],
    "there is no accelerate_configs/other.yaml": ["--yaml", "other", "{}/right.py"],
    "right.py on one process: rank 0: right.py: error: unrecognized arguments: --rows 16": [
        "--batch_flag", "rows=16", "{}/right.py"
    ],
    "call accelerate.utils.set_seed before anything is drawn": ["{}/not_seeded.py"],
    "plain.py on one process: it has no model that Accelerator.prepare returned": ["plain.py"],
    "once.py on one process: 1 training steps were seen, and 2 are needed": ["once.py"],
}  # fmt: skip


def test_what_it_cannot_tell_is_one_line(tmp_path):
    (tmp_path / "plain.py").write_text("import torch\n\nprint(torch.ones(1))\n")
    right = (ZOO / "right.py").read_text()
    once = right.replace("            optimizer.zero_grad()\n", "            return\n")
    (tmp_path / "once.py").write_text(once)
    for problem, words in ERRORS.items():
        words = [word.format(ZOO) for word in words]
        result = verify(tmp_path, *words, code=2)
        assert problem in result.error_line(), result.err
        assert "Traceback" not in result.err
    assert {path.name for path in tmp_path.iterdir()} == {"once.py", "plain.py", "runs"}


@pytest.mark.slow
def test_a_rank_that_fails_shows_its_traceback_and_draws_cannot_be_told(tmp_path):
    result = verify(tmp_path, *yamls("ddp"), *BATCH, f"{ZOO}/fails_on_rank_1.py", code=1)
    first = "fails: rank 1: FileNotFoundError: [Errno 2] No such file or directory"
    assert first in result.out and "Traceback" in result.out
    assert "(fails_on_rank_1.py:31)" in result.out and "planning" not in result.out
    result = verify(tmp_path, *yamls("ddp"), *BATCH, f"{ZOO}/augmentation.py", code=2)
    assert "ddp: cannot tell" in result.out
    assert "random numbers are drawn in this step" in result.out


@pytest.mark.slow
def test_the_batch_has_to_be_divided(tmp_path):
    """Without it, the tool says so; --split divides one that is written into the script."""
    result = verify(tmp_path, *yamls("ddp"), f"{ZOO}/right.py", code=2)
    assert "32 samples in step 1 on all ranks, 16 on one process: divide the batch" in result.out
    verify(tmp_path, *yamls("ddp zero2"), "--split", f"{ZOO}/right.py")


@pytest.mark.slow
def test_a_launch_by_hand_says_the_same(tmp_path):
    """The command as users type it, from another folder, in a new process."""
    words = [sys.executable, ROOT / "verify.py", *OURS, *DIGITS]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(": the same")]
    assert len(columns(tmp_path / "runs" / "verify")) == 4


@pytest.mark.slow
def test_ranks_end_with_the_tool(tmp_path):
    """Also if it is killed, while they wait for each other."""
    words = [sys.executable, ROOT / "verify.py", *yamls("ddp"), *BATCH]
    words += ["--patience", "100", ZOO / "gathered_on_main.py"]
    folder = tmp_path / "runs" / "verify" / "ddp"
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as tool:
        for _ in range(600):
            if len(list(folder.glob("*.alive"))) == 2:
                break
            time.sleep(0.1)
        ranks = psutil.Process(tool.pid).children()
        tool.kill()
    assert len(ranks) == 2 and not psutil.wait_procs(ranks, timeout=20)[1]
