"""The notebook runs, and is committed as it ran. `python tests/test_notebook.py` runs it anew."""

import copy
import os
import re
import tempfile

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "notebooks" / "bert_squad_walkthrough.ipynb"
# What depends on the machine: its name, numbers, answers, lines now and then.
OWN = re.compile(r"CPU \(.*\)|^step .*|-> .*|-?[\d.,]*\d(e[-+]\d+)?", re.M)


def execute(notebook, folder):
    """A copy of the notebook with the outputs of a fresh kernel, which writes into `folder`. A cell
    that fails, also one that asserts, is an error.
    """
    fresh = copy.deepcopy(notebook)
    place = {"metadata": {"path": NOTEBOOK.parent}}
    options = {"timeout": 300, "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(fresh, resources=place, **options)
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


if __name__ == "__main__":
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        done = execute(notebook, scratch)
    done.metadata = notebook.metadata  # without the version of this Python
    nbformat.write(done, NOTEBOOK)
