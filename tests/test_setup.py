"""What `make` installs, and what the requirement files name."""

import re
import shutil

import pytest
from conftest import ROOT, run
from packaging.requirements import Requirement

import train_mnist_rnn


def test_make_installs_what_was_asked_for(tmp_path):
    """And nothing once .venv is there, until a requirement changes. pip notes what it was told."""
    for name in ["Makefile", *ROOT.glob("requirements*.txt"), *ROOT.glob("constraints*.txt")]:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >>pip.log\n')
    made = "for name in pip python; do install -D $name .venv/bin/$name; done"
    (tmp_path / "python").write_text(f"#!/bin/sh\ncase $1 in -m) {made} ;; esac\n")
    new, old = (
        f"{name} torch torchvision{index}\n{name} -r requirements.txt -r requirements-report.txt\n"
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


def test_a_linked_environment_is_used_and_never_changed(tmp_path):
    """Neither if requirements are newer, nor for another Python. One GPU is none to compare on."""
    place, shared = tmp_path / "clone", tmp_path / "shared"
    (shared / "bin").mkdir(parents=True)
    place.mkdir()
    for name in ["Makefile", *ROOT.glob("requirements*.txt"), *ROOT.glob("constraints*.txt")]:
        shutil.copy(ROOT / name, place)
    (shared / "installed").write_text("constraints.txt cpu\n")
    change = f"touch {shared}/changed"
    for file, text in [
        (tmp_path / "python", f"case $1 in -m) {change} ;; esac"),
        (shared / "bin/python", "case $1 in -c) echo 1 ;; esac"),
        (shared / "bin/pip", change),
        (shared / "bin/accelerate-launch", f"echo ${{CUDA_VISIBLE_DEVICES-all}}: $* >>{place}/log"),
    ]:
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o555)
    shared.chmod(0o555)
    before = {path: path.stat().st_mtime_ns for path in [shared, *shared.rglob("*")]}
    (place / ".venv").symlink_to(shared)
    for words, code in [("setup train", 0), ("-B setup TORCH=", 0), ("-B dev", 2), ("clean", 0)]:
        done = run(["make", "-C", place, f"PYTHON={tmp_path}/python", *words.split()])
        assert (done.code, "make dev" in done.err) == (code, code == 2), done.err
        assert {path: path.stat().st_mtime_ns for path in [shared, *shared.rglob("*")]} == before
    launched = (place / "log").read_text().splitlines()
    assert [line.split()[0] for line in launched[:2]] == [":", ":"], launched
    assert "_size 64 " in launched[0] and "--num_processes 2 " in launched[1], launched
    assert not (place / ".venv").is_symlink()


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
