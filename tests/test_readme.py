"""What README.md, the docs and the requirement files promise."""

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ACCELERATE, ROOT, anchor, run
from packaging.requirements import Requirement

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
NAMES = ["README.md", "docs/cluster.md", "docs/scripts.md"]
TEXTS = "".join((ROOT / name).read_text() for name in NAMES)
LINES = [line for block in re.findall(r"```\n(.*?)```", TEXTS, re.S)
         for line in re.sub(r"\\\n *", "", block).splitlines()]
COMMANDS = {line.split("#")[0].strip() for line in LINES
            if re.match(r"accelerate|make|python|source|sbatch", line)}
# What runs the commands that are not run here.
CI = ["make train", "make train-bert", "make setup", "make sweep", "make test",
      "python report.py runs/", "source .venv/bin/activate"]
ELSEWHERE = {
    "make clean setup CONSTRAINTS=constraints-cu128.txt": "test_each_set_fits_the_requirements",
    "python train_bert_squad.py --prepare_data_only": "test_bert_data.py",
    "python fit.py 40GB": "test_ladder.py",
    "sbatch/sweep.sh --dry_run": "test_sbatch.py",
    "sbatch/sweep.sh": "test_sbatch.py",
    "sbatch sbatch/2node.sh": "test_sbatch.py",
    "sbatch sbatch/check.sh": "test_sbatch.py",
    "sbatch --nodes=1 --gres=gpu:2 --time=20 sbatch/check.sh --full": "test_sbatch.py",
}
HERE = sorted(COMMANDS - {*CI, *ELSEWHERE})
LAUNCHES, JOBS = ([command for command in HERE if command.startswith(start)]
                  for start in ("accelerate launch --config_file ", "sbatch "))
SMALL = {
    "train_mnist_rnn.py": "--dataset digits",
    "train_bert_squad.py": "--model_name_or_path tests/data/tiny_bert --from_scratch"
    " --train_file tests/data/squad_v2.json --validation_file tests/data/squad_v2.json"
    " --version_2_with_negative",
}


def small(words, folder):
    """Flags that come last: small data, a few steps."""
    script = "train_mnist_rnn.py" if "train_mnist_rnn.py" in words else "train_bert_squad.py"
    return [*SMALL[script].split(), "--max_train_steps", "3", "--output_dir", str(folder)]


def test_no_command_is_left_to_rot():
    assert {*CI, *ELSEWHERE} <= COMMANDS and HERE == LAUNCHES + JOBS, "a command needs a test"
    script = (ROOT / ".ci" / "run").read_text()
    assert all(command in script for command in CI)


@pytest.mark.slow
def test_sbatch_commands_work(cluster, tmp_path):
    """Word for word and all at once, but in small."""
    jobs = {}
    for i, command in enumerate(JOBS):
        words, folder = shlex.split(command)[1:], tmp_path / str(i)
        words = [f"--output={folder}.log", *words, *small(words, folder)]
        jobs[folder] = cluster.submit(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"})
    for folder, job in jobs.items():
        assert cluster.wait(job, 240) == "COMPLETED", folder.with_suffix(".log").read_text()


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """command -> its Result: word for word, but in small, and two at once on free ports."""
    folders = {command: tmp_path_factory.mktemp("launch") for command in LAUNCHES}

    def start(command):
        words, folder = shlex.split(command)[2:], folders[command]
        command = [*ACCELERATE, "--main_process_port", "0", *words, *small(words, folder)]
        return run(command, folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(LAUNCHES, pool.map(start, LAUNCHES), strict=True))


@pytest.mark.parametrize("command", LAUNCHES)
def test_launch_commands_work(command, launches):
    result = launches[command]
    assert result.code == 0 and result.record["status"] == "completed", result.err
    assert result.record["strategy"] in shlex.split(command)[3]


def test_links_lead_somewhere():
    """So do the names of tests."""
    for page in PAGES:
        text = page.read_text()
        for file, place in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {file}"
            there = target.read_text() if place else ""
            places = {anchor(heading) for heading in re.findall(r"^#+ (.*)", there, re.M)}
            places.update(re.findall(r'<a id="(.*?)"', there))
            assert not place or place in places, f"{page}: {file}#{place}"
        for file, name in re.findall(r"`tests/(\w+\.py)::(\w+)`", text):
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{page}: {name}"


def requirements(name):
    """The packages of a file, with what is asked of their versions."""
    lines = [line.split("#")[0] for line in (ROOT / name).read_text().splitlines()]
    parsed = [Requirement(line) for line in lines if line.strip() and line[0] != "-"]
    return {requirement.name: requirement.specifier for requirement in parsed}


@pytest.mark.parametrize("pinned", ["constraints.txt", "constraints-cu128.txt"])
def test_each_set_fits_the_requirements(pinned):
    for asked in ("requirements.txt", "requirements-dev.txt"):
        for name, wanted in requirements(asked).items():
            [pin] = requirements(pinned)[name]
            assert pin.operator == "==" and wanted.contains(pin.version), f"{name}{pin}, {wanted}"
            if (pinned, asked) == ("constraints-cu128.txt", "requirements.txt"):
                [floor] = wanted
                assert pin.version.startswith(floor.version), f"{name}'s floor was not tested"


@pytest.mark.slow
def test_benchmarks_start():
    assert "--train_file" in run([sys.executable, "benchmarks/bert.py", "--help"]).out
    words = ["--main_process_port", "0", "--config_file", "accelerate_configs/ddp.yaml"]
    assert "number: " in run([*ACCELERATE, *words, "benchmarks/mnist.py", "--role", "sync"]).out
