"""The form of both scripts, for readers; what they share; and what they import."""

import ast
import io
import re
import struct
import sys
import tokenize
from importlib.metadata import packages_distributions

import pytest
from conftest import ROOT, run
from test_bert import TINY

import train_mnist_rnn

MARKER = "# -------- machinery: the same in both scripts"
# The most lines above the marker, and the most tokens.
BOUNDS = {"train_mnist_rnn.py": (290, 7_100), "train_bert_squad.py": (710, 10_200)}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAZY = {"sklearn", "torchvision", "deepspeed", "torch"}  # imported where they are needed


def is_constant(node, kind):
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def is_golf(node):
    """Whether a part of the syntax is short at the cost of being clear."""
    if isinstance(node, ast.Assign):  # `a, b = 1, 2`, and `x.f = lambda: ...`
        target = node.targets[0]
        several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        return several or isinstance(target, ast.Attribute) and isinstance(node.value, ast.Lambda)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # "text" * condition
        sides = (node.left, node.right)
        text = any(isinstance(side, ast.JoinedStr) or is_constant(side, str) for side in sides)
        return text and not any(is_constant(side, int) for side in sides)
    return isinstance(node, ast.NamedExpr)


@pytest.mark.parametrize("name", BOUNDS)
def test_a_script_reads_from_top_to_bottom(name):
    text = (ROOT / name).read_text()
    lines, tree = text.splitlines(), ast.parse(text)
    most_above, most_tokens = BOUNDS[name]
    assert text[: text.index(MARKER)].count("\n") <= most_above
    assert "backward(" in "".join(lines[:179])
    stream = tokenize.generate_tokens(io.StringIO(text).readline)
    tokens = sum(token.type not in LAYOUT for token in stream) - 1  # not the end of the file
    assert tokens <= most_tokens and tokens / sum(map(bool, map(str.strip, lines))) <= 7.2
    for node in ast.walk(tree):
        assert not is_golf(node), f"line {node.lineno}: {lines[node.lineno - 1]}"
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= (30 if node.name == "train" else 50), node.name
            body = "\n".join(lines[node.lineno : node.end_lineno])
            assert set(re.findall(r"^ +(?:from|import) (\w+)", body, re.M)) <= LAZY, node.name


def test_both_scripts_share_their_machinery_word_for_word():
    """Each script stands alone. `make copies` writes what both need into the second."""
    (own, shared), (others, same) = ((ROOT / name).read_text().split(MARKER) for name in BOUNDS)
    assert shared == same and "class Run:" in shared and 'if __name__ == "__main__":' in shared
    names = [set(re.findall(r"^(?:def|class) (\w+)", text, re.M)) for text in (own, others)]
    both = "EpochSampler evaluate main make_loaders parse_args save_model train"
    assert names[0] & names[1] == set(both.split())


PROGRAM = """import os, sys, {0}
{0}.main({0}.parse_args())
print("modules:", *{{name.partition(".")[0] for name in sys.modules}}, flush=True)
os._exit(0)"""
DIGITS, MNIST = ["--dataset", "digits"], ["--per_device_train_batch_size", "4"]


@pytest.mark.parametrize(
    "script, flags, unwanted",
    [
        ("train_mnist_rnn", MNIST, {"sklearn", "pandas", "transformers", "datasets"}),
        pytest.param("train_mnist_rnn", DIGITS, {"torchvision"}, marks=pytest.mark.slow),
        # datasets imports pandas; transformers torchvision and, before 5.23, sklearn.
        pytest.param("train_bert_squad", TINY, {"evaluate", "matplotlib"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_imports_what_its_data_needs(script, flags, unwanted, tmp_path):
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 8) + bytes(8))
        pixels = struct.pack(">IIII", 2051, 8, 28, 28) + bytes(range(8)) * 784
        (raw / f"{split}-images-idx3-ubyte").write_bytes(pixels)
    words = [*flags, "--max_train_steps", "1", "--output_dir", tmp_path / "run"]
    words += ["--data_dir", tmp_path / "data"] if flags == MNIST else []
    done = run([sys.executable, "-c", PROGRAM.format(script), *map(str, words)])
    assert done.code == 0, done.err
    imported = set(done.out.rpartition("modules: ")[2].split())
    assert "accelerate" in imported and not imported & unwanted


def test_requirements_name_all_that_is_imported_and_the_version_is_one():
    project = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    citation = re.search(r"^version: (.*)", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert {project, citation, changes} == {train_mnist_rnn.VERSION}

    files = [path for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    own = {path.stem for path in files} | {path.name for path in ROOT.iterdir()}
    owners = packages_distributions()
    for kinds, users in (("requirements.txt", False), ("requirements*.txt", True)):
        text = "".join(path.read_text() for path in ROOT.glob(kinds))
        asked_for = {name.lower() for name in re.findall(r"^([\w-]+)>=", text, re.M)}
        for path in files:
            if (path.parent.name in ("tests", "benchmarks")) == users:
                names = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.M)
                for name in set(names) - own - set(sys.stdlib_module_names):
                    assert {one.lower() for one in owners[name]} & asked_for, f"{path}: {name}"
