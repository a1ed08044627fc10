"""The notebook runs, and is committed as it ran. `python tests/test_notebook.py` runs it anew."""

import copy
import os
import re
import tempfile

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
NOTEBOOK = ROOT / "notebooks" / "bert_squad_walkthrough.ipynb"


def execute(notebook, folder):
    """A copy of the notebook with the outputs of a fresh kernel, which writes into `folder`. A cell
    that fails, also one that asserts, is an error.
    """
    fresh = copy.deepcopy(notebook)
    for cell in code_cells(fresh):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        fresh,
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": NOTEBOOK.parent}},
    )
    client.execute(env=os.environ | {"TMPDIR": str(folder), "IPYTHONDIR": str(folder)})
    return fresh


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows: its streams, and the types of its displays."""
    return [
        output.get("name") or sorted(output.get("data", {})) or output.output_type
        for output in cell.outputs
    ]


def text(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def words(cell):
    """What a cell prints, but for what depends on the machine: its name, numbers, answers, lines
    now and then.
    """
    own = r"CPU \(.*\)|^step .*|-> .*|-?[\d.,]*\d(e[-+]\d+)?"
    return re.sub(own, " ", text(cell), flags=re.M).split()


def test_it_runs_and_was_committed_as_it_ran(tmp_path):
    committed, before = nbformat.read(NOTEBOOK, as_version=4), {*NOTEBOOK.parent.rglob("*")}
    executed = execute(committed, tmp_path)
    assert {*NOTEBOOK.parent.rglob("*")} == before, "it leaves nothing beside itself"
    assert not [*tmp_path.rglob("run.json")], "what it trains is gone with it"
    assert set(committed.metadata) == {"kernelspec", "language_info"}
    cells = code_cells(committed)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for old, new in zip(cells, code_cells(executed), strict=True):
        assert "stderr" not in kinds(new), text(new)
        assert (kinds(old), words(old)) == (kinds(new), words(new)), f"commit:\n{new.source}"


if __name__ == "__main__":
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        done = execute(notebook, scratch)
    done.metadata = notebook.metadata  # without the version of this Python
    nbformat.write(done, NOTEBOOK)
