"""The notebook runs, claims what it shows, and is committed as it ran. `python tests/test_notebook.py` runs it anew."""

import copy
import os
import re
import socket
import tempfile

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
NOTEBOOK = ROOT / "notebooks" / "bert_squad_walkthrough.ipynb"


def execute(notebook, folder):
    """A copy of the notebook with the outputs of a fresh kernel; what kernel and notebook write goes to `folder`."""
    fresh = copy.deepcopy(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(fresh, timeout=120, record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": NOTEBOOK.parent}})
    client.execute(env=os.environ | {"TMPDIR": str(folder), "IPYTHONDIR": str(folder)})
    return fresh


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows: its streams, and the types of its displays."""
    return [output.get("name") or sorted(output.get("data", {})) or output.output_type for output in cell.outputs]


def text(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def words(cell):
    """What a cell prints, without what depends on the machine: its name, numbers, answers, lines now and then."""
    return re.sub(r"CPU \(.*\)|^step .*|-> .*|-?[\d.,]*\d(e[-+]\d+)?", " ", text(cell), flags=re.M).split()


@pytest.fixture(scope="module")
def committed():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(committed, tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("notebook"), sorted(NOTEBOOK.parent.rglob("*"))
    notebook = execute(committed, folder)  # a failing cell, also one that asserts, is an error here
    assert sorted(NOTEBOOK.parent.rglob("*")) == before, "it leaves nothing beside itself"
    assert not [*folder.rglob("run.json")], "what it trains is gone with it"
    return notebook


def test_it_runs_and_was_committed_as_it_ran(committed, executed):
    assert len(code_cells(executed)) > 20
    for old, new in zip(code_cells(committed), code_cells(executed), strict=True):
        assert "stderr" not in kinds(new), text(new)
        assert (kinds(old), words(old)) == (kinds(new), words(new)), f"commit the outputs of:\n{new.source}"


def test_what_it_claims(executed):
    """The notebook asserts it; this holds that it still does, and says so."""
    everything = "\n".join(text(cell) for cell in code_cells(executed))
    [difference] = re.findall(r"largest relative difference of 26 losses: (\S+)", everything)
    assert 0 <= float(difference) < 1e-5
    assert "the same in all 16 windows of the batch" in everything
    assert re.search(r"ddp +: 2 x 8 = 16 samples a step, 26 steps", everything)
    assert sum("image/png" in kind for cell in code_cells(executed) for kind in kinds(cell)) == 2


def test_it_tells_nothing_of_the_machine_it_ran_on(committed):
    assert NOTEBOOK.stat().st_size < 300_000
    assert [cell.execution_count for cell in code_cells(committed)] == list(range(1, len(code_cells(committed)) + 1))
    assert set(committed.metadata) == {"kernelspec", "language_info"}
    sources = "train_bert_squad.py", "tests/data/squad_v1.json", "tests/data/tiny_bert/vocab.txt"
    written, printed = "\n".join((ROOT / source).read_text() for source in sources), ""
    for cell in committed.cells:
        assert not cell.metadata, "times of execution, or an editor's state"
        shown = [output.get("text") or output.data["text/plain"] for output in cell.get("outputs", [])]
        content = "\n".join([cell.source, *shown])
        assert not re.search(r"(?<![\w.~}/:])/\w[\w.-]*/", content), f"an absolute path in:\n{content}"
        written, printed = f"{written}\n{cell.source}", "\n".join([printed, *shown])
    # A host may be called "data" or "n": only a word that nobody wrote comes from the machine.
    words_of_the_machine = set(re.findall(r"[\w.-]+", printed)) - set(re.findall(r"[\w.-]+", written))
    assert socket.gethostname() not in words_of_the_machine


def test_it_takes_all_logic_from_the_script(committed):
    """No function or class of the script is defined in the notebook too."""
    texts = (ROOT / "train_bert_squad.py").read_text(), "\n".join(cell.source for cell in code_cells(committed))
    theirs, own = (set(re.findall(r"^ *(?:def|class) (\w+)", code, re.M)) for code in texts)
    assert own and not own & theirs


if __name__ == "__main__":
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        done = execute(notebook, scratch)
    done.metadata = notebook.metadata  # without the version of this Python
    nbformat.write(done, NOTEBOOK)
