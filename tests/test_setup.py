"""What `make` installs, and what the requirement files name."""

import re
import shutil
import sys

import pytest
from conftest import ROOT, run
from packaging.requirements import Requirement

import train_mnist_rnn

TOOLS = [path for name in ("tools", "benchmarks", "docs/*") for path in ROOT.glob(f"{name}/*.py")]
# What a launcher starts or a student writes, and what needs no package.
ALONE = "single|faulty|hanging|unequal|allreduce|limited|make_bert|picture|versions|troubleshooting"
TOOLS = sorted(tool for tool in TOOLS if not re.fullmatch(ALONE, tool.stem))
INDEX = "--index-url https://download.pytorch.org/whl/cpu"
SCRIPTS = "-r requirements.txt -r requirements-report.txt"


@pytest.fixture
def make(tmp_path):
    """A function that calls make in a folder with a pip and a Python that only note their calls."""
    for name in ["Makefile", *ROOT.glob("requirements*.txt"), *ROOT.glob("constraints*.txt")]:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >>log\n')
    made = "echo $2 $3 >>log; install -D pip .venv/bin/pip; install -D python .venv/bin/python"
    (tmp_path / "python").write_text(f"#!/bin/sh\ncase $1 in -m) {made} ;; esac\n")
    return lambda words: run(["make", "-C", tmp_path, "PYTHON=sh python", *words.split()])


def test_make_installs_what_was_asked_for(make, tmp_path):
    """And nothing once .venv is there, until a requirement changes. Another Python's files go."""
    torch = f"constraints.txt --no-deps torch torchvision {INDEX}"
    new = ["venv --clear", torch, f"constraints.txt {SCRIPTS}", "compileall -qq"]
    old = ["venv --clear", f"constraints-cu128.txt {SCRIPTS}", "compileall -qq"]
    for words, asked, note in [
        ("setup TORCH=cpu", new, False),
        ("dev", ["constraints.txt -r requirements-dev.txt"], False),
        ("setup TORCH=", [], True),
        ("setup -W requirements.txt", ["venv .venv", *new[1:]], False),
        ("clean setup CONSTRAINTS=constraints-cu128.txt", old, False),
        ("setup TORCH=cpu", [], True),
        ("setup -W constraints.txt", ["venv .venv", *old[1:]], False),
    ]:
        (tmp_path / "log").write_text("")
        done = make(words)
        assert done.code == 0 and ("note: .venv stays" in done.err) == note, done.err
        assert re.sub(".* -c ", "", (tmp_path / "log").read_text()).splitlines() == asked, words
    (tmp_path / ".venv" / "installed").unlink()
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho Python 3.9\n")
    assert make("setup").code == 0 and "venv --clear" in (tmp_path / "log").read_text()


def test_behind_a_mirror_make_says_how_to_install_torch(make, tmp_path):
    (tmp_path / "pip").write_text("#!/bin/sh\nexit 1\n")
    done = make("setup TORCH=cpu")
    assert done.code == 2 and "Behind a mirror of PyPI, leave out TORCH=cpu\n" in done.err
    assert not (tmp_path / ".venv" / "installed").exists()


def test_a_linked_environment_is_used_and_never_changed(make, tmp_path):
    """Nor if requirements are newer. On a single GPU, `make train` compares CPU processes."""
    shared, log = tmp_path / "shared", tmp_path / "launched"
    assert make("setup").code == 0
    (tmp_path / ".venv").rename(shared)
    (tmp_path / ".venv").symlink_to(shared)
    launcher = shared / "bin" / "accelerate-launch"
    launcher.write_text(f'#!/bin/sh\necho "${{CUDA_VISIBLE_DEVICES-all}}: $*" >>{log}\n')
    launcher.chmod(0o555)
    before = {path: path.stat().st_mtime_ns for path in [shared, *shared.rglob("*")]}
    train = "train PROCESSES=1 -W requirements.txt"
    for words, code in ((train, 0), ("dev", 2), ("clean setup", 0)):
        done = make(words)
        assert (done.code, "make dev" in done.err) == (code, code == 2), done.err
        assert {path: path.stat().st_mtime_ns for path in [shared, *shared.rglob("*")]} == before
    baseline, ddp = log.read_text().splitlines()[:2]
    assert re.match(": .*size 64 ", baseline) and re.match(": .*processes 2 ", ddp), baseline + ddp
    assert (tmp_path / ".venv" / "installed").exists() and not (tmp_path / ".venv").is_symlink()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_without_the_packages_a_tool_says_how_to_get_them(tool, tmp_path):
    done = run([sys.executable, "-BES", tool, tmp_path])  # -S: without the packages of .venv
    said = re.fullmatch("error: .*`source .venv/bin/activate`.*`make setup`.*\n", done.err)
    assert done.code == 1 and said, done.out + done.err


def requirements(name):
    """The packages of a file, with what is asked of their versions."""
    lines = [line.split("#")[0] for line in (ROOT / name).read_text().splitlines()]
    parsed = [Requirement(line) for line in lines if line.strip() and line[0] != "-"]
    return {requirement.name: requirement.specifier for requirement in parsed}


@pytest.mark.parametrize("pinned", ["constraints.txt", "constraints-cu128.txt"])
def test_each_set_fits_the_requirements(pinned):
    for asked in sorted(path.name for path in ROOT.glob("requirements*.txt")):
        for name, wanted in requirements(asked).items():
            [pin] = requirements(pinned)[name]
            assert pin.operator == "==" and wanted.contains(pin.version), f"{name}{pin}, {wanted}"
            if pinned == "constraints-cu128.txt" and asked != "requirements-dev.txt":
                [floor] = wanted
                assert pin.version.startswith(floor.version), f"{name}'s floor was not tested"


def test_the_version_is_one():
    project = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert {project, changes} == {train_mnist_rnn.VERSION}
