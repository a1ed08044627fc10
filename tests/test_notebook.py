"""The notebooks run. That on BERT is committed as it ran: `python tests/test_notebook.py` runs it
anew. The one to start with has no outputs: they would answer its questions.
"""

import copy
import os
import re
import site
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import isolated  # noqa: F401  conftest cannot be imported outside of pytest
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
START = ROOT / "notebooks" / "start_here.ipynb"
NOTEBOOK = ROOT / "notebooks" / "bert_squad_walkthrough.ipynb"
# What depends on the machine: its name, numbers, answers, lines now and then.
OWN = re.compile(r"CPU \(.*\)|^step .*|-> .*|-?[\d.,]*\d(e[-+]\d+)?", re.M)


def execute(notebook, folder, place=NOTEBOOK.parent, python=sys.executable):
    """A copy of the notebook with the outputs of a fresh kernel of this Python in the folder
    `place`, which writes into `folder`. A cell that fails, also one that asserts, is an error.
    """
    fresh = copy.deepcopy(notebook)
    options = {"timeout": 300, "record_timing": False, "coalesce_streams": True}
    resources = {"metadata": {"path": place}}
    client = NotebookClient(fresh, resources=resources, **options)
    client.create_kernel_manager().kernel_spec.argv[0] = str(python)
    client.execute(env=os.environ | {"TMPDIR": str(folder), "IPYTHONDIR": str(folder)})
    return fresh


def shown(notebook):
    """For each cell: the kinds of its outputs, and the words that it prints."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        kinds = [output.get("name") or sorted(output.get("data", {})) for output in outputs]
        text = "".join(output.get("text", "") for output in outputs)
        yield kinds, OWN.sub(" ", text).split()


@pytest.mark.slow
def test_it_runs_and_was_committed_as_it_ran(tmp_path):
    committed = nbformat.read(NOTEBOOK, as_version=4)
    executed = execute(committed, tmp_path)
    assert [*shown(executed)] == [*shown(committed)], "commit what tests/test_notebook.py makes"
    assert not [*tmp_path.rglob("run.json")], "what it trains is gone with it"


@pytest.mark.parametrize("path", [START, NOTEBOOK], ids=lambda path: path.stem)
def test_opened_alone_it_says_that_it_needs_the_project(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    cells = nbformat.read(path, as_version=4).cells
    [first, *_] = [cell.source for cell in cells if cell.cell_type == "code"]
    with pytest.raises(RuntimeError, match="^this notebook needs the project: .*`git clone`"):
        exec(TransformerManager().transform_cell(first), {})


@pytest.mark.slow
def test_the_start_gets_the_project_keeps_torch_and_trains(tmp_path, monkeypatch):
    """As on Colab: opened alone, in another environment. It has our packages, and pip no index."""
    commit = "git init && git add . && git -c user.name=a -c user.email=a@b commit -m now"
    project = str(tmp_path / "project")
    env = os.environ | {"GIT_DIR": project, "GIT_WORK_TREE": str(ROOT)}
    subprocess.run(["sh", "-c", commit], cwd=ROOT, env=env, check=True)
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    [packages] = tmp_path.glob("venv/lib/*/site-packages")
    (packages / "ours.pth").write_text("\n".join(site.getsitepackages()))
    launcher = python.with_name("accelerate")  # pip's begins with the path of its Python
    launcher.write_text(f'#!/bin/sh\nexec {python} {sys.prefix}/bin/accelerate "$@"\n')
    launcher.chmod(0o755)
    notebook = nbformat.read(START, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    for cell in notebook.cells:
        source = cell.source.replace('ADDRESS = ""', f'ADDRESS = "{project}"')
        cell.source = source.replace("TURNS = 9", "TURNS = 1").replace("epochs 10", "epochs 3")
        if "compare.py" in source:
            cell.source += f"\n{cell.source}"  # Readers run a cell again.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    text = str(execute(notebook, tmp_path, tmp_path, python).cells)
    assert "pip keeps: torch==" in text and text.count("completed at step") == 4
    assert text.count("'image/png'") == 3 and "'stderr'" not in text
    assert [*packages.iterdir()] == [packages / "ours.pth"], "pip installed something"


if __name__ == "__main__":
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        done = execute(notebook, scratch)
    done.metadata = notebook.metadata  # without the version of this Python
    nbformat.write(done, NOTEBOOK)
