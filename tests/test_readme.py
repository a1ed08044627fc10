"""What README.md, the docs and the requirement files promise."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, anchor, launch, run
from packaging.requirements import Requirement
from test_lab import check_kind

TOPS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES = [*(ROOT / name for name in TOPS), *(ROOT / "docs").rglob("*.md")]
NAMES = ["README.md", "docs/cluster.md", "docs/scripts.md", "docs/reference/developing.md"]
TEXTS = "".join((ROOT / name).read_text() for name in NAMES)
BLOCKS = re.sub(r"\\\n *", "", "".join(re.findall(r"```\n(.*?)```", TEXTS, re.S)))
COMMANDS = {
    line.split("#")[0].strip()
    for line in BLOCKS.splitlines()
    if re.match(r"accelerate|make|python|source|sbatch", line)
}
CI = [
    "make train",
    "make train-bert",
    "make setup",
    "make sweep",
    "make test",
    "python report.py runs/",
    "source .venv/bin/activate",
]  # .ci/run runs these
ELSEWHERE = [  # and these: the tests of make and fit.py below, test_bert_data, test_sbatch
    "make train TORCH=cpu",
    "make clean setup CONSTRAINTS=constraints-cu128.txt",
    "python train_bert_squad.py --prepare_data_only",
    "python fit.py 6GB --model bert-large",
    "sbatch/sweep.sh --dry_run",
    "sbatch/sweep.sh",
    "sbatch sbatch/2node.sh",
    "sbatch sbatch/check.sh",
]
HERE = sorted(COMMANDS - {*CI, *ELSEWHERE})
LAUNCHES, JOBS = (
    [command for command in HERE if command.startswith(start)]
    for start in ("accelerate launch --config_file ", "sbatch ")
)


def small(command, folder):
    """Flags that come last: small data, a few steps."""
    data = (
        "--dataset digits"
        if "train_mnist_rnn.py" in command
        else "--model_name_or_path tests/data/tiny_bert --from_scratch --version_2_with_negative"
        " --train_file tests/data/squad_v2.json --validation_file tests/data/squad_v2.json"
    )
    return [*data.split(), "--max_train_steps", "3", "--output_dir", str(folder)]


def test_no_command_is_left_to_rot():
    assert {*CI, *ELSEWHERE} <= COMMANDS and HERE == LAUNCHES + JOBS, "a command needs a test"
    words = set((ROOT / ".ci" / "run").read_text().split())
    assert all(words >= set(command.split()) for command in CI)


@pytest.mark.slow
def test_sbatch_commands_work(cluster, tmp_path):
    """Word for word and all at once, but in small."""
    jobs = {}
    for i, command in enumerate(JOBS):
        folder = tmp_path / str(i)
        words = [f"--output={folder}.log", *shlex.split(command)[1:], *small(command, folder)]
        jobs[folder] = cluster.submit(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"})
    for folder, job in jobs.items():
        assert cluster.wait(job, 240) == "COMPLETED", folder.with_suffix(".log").read_text()


def test_launch_commands_work(tmp_path):
    """Word for word, but in small; test_launch.py has real launches."""
    for command in LAUNCHES:
        strategy, script, flags = re.search(r"(\w+)\.yaml (\S+) ?(.*)", command).groups()
        folder = tmp_path / f"{LAUNCHES.index(command)}"
        result = launch(strategy, script, folder, *flags.split(), *small(command, folder))
        assert (result.record["status"], result.record["strategy"]) == ("completed", strategy)


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


def test_make_installs_what_was_asked_for(tmp_path):
    """And nothing once .venv is there, until a requirement changes. pip notes what it was told."""
    for name in ["Makefile", *ROOT.glob("requirements*.txt"), *ROOT.glob("constraints*.txt")]:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >>pip.log\n')
    made = "for name in pip python; do install -D $name .venv/bin/$name; done"
    (tmp_path / "python").write_text(f"#!/bin/sh\ncase $1 in -m) {made} ;; esac\n")
    new, old = (
        f"{name} torch torchvision{index}\n{name} -r requirements.txt\n"
        for name, index in [
            ("constraints.txt", " --no-deps --index-url https://download.pytorch.org/whl/cpu"),
            ("constraints-cu128.txt", ""),
        ]
    )
    for words, asked, notes in [
        ("setup TORCH=cpu", new, 0),
        ("dev", "constraints.txt -r requirements-dev.txt\n", 0),
        ("setup TORCH=", "", 1),
        ("setup -W requirements.txt", new, 0),
        ("clean setup CONSTRAINTS=constraints-cu128.txt", old, 0),
        ("setup TORCH=cpu", "", 1),
    ]:
        (tmp_path / "pip.log").write_text("")
        done = run(["make", "-C", tmp_path, "PYTHON=sh python", *words.split()])
        assert done.code == 0 and done.err.count("note: .venv stays") == notes, done.err
        assert re.sub(".* -c ", "", (tmp_path / "pip.log").read_text()) == asked


@pytest.mark.slow
def test_readme_pastes_what_its_commands_print(tmp_path):
    """make train in a folder with the project's files, by this Python; and fit.py, to the digit."""
    text = (ROOT / "README.md").read_text()
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs"):
            (tmp_path / path.name).symlink_to(path)
    make = ["make", "-C", tmp_path, "-o", "setup", "train", f"BIN={Path(sys.executable).parent}"]
    trained, fits = run(make), run([sys.executable, "fit.py", "6GB", "--model", "bert-large"])
    fit = "```\npython fit.py 6GB --model bert-large\n```"
    for result, before in ((trained, "it ends like this:"), (fits, fit)):
        assert result.code == 0, result.err
        pasted = text.split(before)[1].split("```\n")[1]
        check_kind(pasted, result.out)
    assert set(pasted.splitlines()) - {"..."} <= set(fits.out.splitlines())


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
    for name, flag in {"bert": "--gpu", "claims": "--reports", "mnist": "--data_dir"}.items():
        assert flag in run([sys.executable, f"benchmarks/{name}.py", "--help"]).out
