"""What README.md, the docs and the requirement files promise."""

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ACCELERATE, ROOT, anchor, run
from packaging.requirements import Requirement

README = (ROOT / "README.md").read_text()
TEXTS = README + "".join((ROOT / "docs" / name).read_text() for name in ("cluster.md", "scripts.md"))
LINES = [line for block in re.findall(r"```\n(.*?)```", TEXTS, re.S) for line in block.splitlines()]
COMMANDS = [line.split("#")[0].strip() for line in LINES if re.match(r"accelerate|make|python|source|sbatch", line)]
# What runs the commands that are not `accelerate launch`: .ci/run, or the tests named here.
RUN_ELSEWHERE = {
    "make train": ".ci/run",
    "make train-bert": ".ci/run",
    "python train_bert_squad.py --prepare_data_only": "test_bert_data.py",
    "make test": ".ci/run",  # as part of make test-all
    "make setup": ".ci/run",
    "make sweep": ".ci/run",
    "sbatch/sweep.sh --dry_run": "test_sbatch.py",
    "sbatch/sweep.sh": "test_sbatch.py",
    "python report.py runs/": ".ci/run",
    "python fit.py 40GB": "test_ladder.py",
    "source .venv/bin/activate": ".ci/run",
    "make clean setup CONSTRAINTS=constraints-cu128.txt": "test_each_set_fits_the_requirements",
}


SMALL = {
    "train_mnist_rnn.py": "--dataset digits",
    "train_bert_squad.py": "--model_name_or_path tests/data/tiny_bert --from_scratch"
    " --train_file tests/data/squad_v2.json --validation_file tests/data/squad_v2.json --version_2_with_negative",
}


@pytest.mark.slow
def test_sbatch_commands_work(cluster, tmp_path):
    """Word for word and all at once, but on small data and for a few steps."""
    jobs = {}
    for command in sorted({command for command in COMMANDS if command.startswith("sbatch ")}):
        words, folder = shlex.split(command)[1:], tmp_path / str(len(jobs))
        script = "train_mnist_rnn.py" if "train_mnist_rnn.py" in words else "train_bert_squad.py"
        small = [] if "sbatch/check.sh" in words else [*SMALL[script].split(), "--max_train_steps", "3"]
        words = [f"--output={folder}.log", *words, *small, "--output_dir", folder]
        jobs[command] = cluster.submit(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"})
    for i, (command, job) in enumerate(jobs.items()):
        assert cluster.wait(job, 240) == "COMPLETED", command + (tmp_path / f"{i}.log").read_text()


LAUNCHES = sorted({command for command in COMMANDS if command.startswith("accelerate")})


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """command -> its Result: word for word, but on small data, for a few steps, and two at once on free ports."""

    def start(command):
        words, folder = shlex.split(command), tmp_path_factory.mktemp("launch")
        assert words[:3] == ["accelerate", "launch", "--config_file"]
        [script] = set(words) & set(SMALL)
        full = [*ACCELERATE, "--main_process_port", "0", *words[2:], *SMALL[script].split()]
        return run([*full, "--max_train_steps", "3", "--output_dir", str(folder)], folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(LAUNCHES, pool.map(start, LAUNCHES), strict=True))


@pytest.mark.parametrize("command", LAUNCHES)
def test_launch_commands_work(command, launches):
    result = launches[command]
    assert result.code == 0, result.err
    assert result.record["status"] == "completed" and result.record["strategy"] in shlex.split(command)[3]


def test_no_command_is_left_to_rot():
    others = {command for command in COMMANDS if not command.startswith(("accelerate", "sbatch "))}
    assert others == set(RUN_ELSEWHERE), "a new command in README needs a test, or a place in RUN_ELSEWHERE"
    script = (ROOT / ".ci" / "run").read_text()
    for command, place in RUN_ELSEWHERE.items():
        if place.endswith(".py"):
            assert command.split("--")[-1] in (ROOT / "tests" / place).read_text(), command
        else:
            assert command in script if place == ".ci/run" else place in globals(), command


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for file, place in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {file}"
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.M) if place else []
            assert not place or place in map(anchor, headings), f"{page}: {file}#{place}"


def requirements(name):
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and line[0] not in "#-"]
    for line in lines:
        requirement = Requirement(line.split("#")[0].strip())
        yield requirement.name, requirement, line


@pytest.mark.parametrize("pinned", ["constraints.txt", "constraints-cu128.txt"])
def test_each_set_fits_the_requirements(pinned):
    pins = {name: requirement for name, requirement, _ in requirements(pinned)}
    for asked in ("requirements.txt", "requirements-dev.txt"):
        for name, requirement, line in requirements(asked):
            [pin] = pins[name].specifier
            assert pin.operator == "==" and requirement.specifier.contains(pin.version), f"{pins[name]}, {requirement}"
            assert "# " in line, f"{name}: why?"
            if pinned == "constraints-cu128.txt" and asked == "requirements.txt":
                [floor] = requirement.specifier
                assert pin.version.startswith(floor.version), f"the floor of {name} is not the version that was tested"


@pytest.mark.slow
def test_benchmarks_start(tmp_path):
    assert "--data_dir" in run([sys.executable, "benchmarks/mnist.py", "--help"]).out
    assert "--train_file" in run([sys.executable, "benchmarks/bert.py", "--help"]).out
    command = [*ACCELERATE, "--main_process_port", "0"]
    command += ["--config_file", "accelerate_configs/ddp.yaml", "benchmarks/mnist.py", "--role", "sync"]
    assert "number: " in run(command).out
