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

BOUNDS = {"train_mnist_rnn.py": (680, 4_600), "train_bert_squad.py": (1_180, 7_700)}
LAYOUT = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()
LAZY = {"sklearn", "torchvision", "deepspeed", "torch", "evaluate"}  # imported where needed
# What both scripts have under one name, each in its own form. All else is one text.
OWN = """main train evaluate keep_best save_model make_loaders describe_workload parse_args
    Progress""".split()
BASES = {"Module", "LSTM", "Dataset", "TensorDataset", "Sampler", "Metric"}
PACKAGES = "torch accelerate deepspeed transformers datasets evaluate torchvision".split()
TREES = {name: ast.parse((ROOT / name).read_text()) for name in BOUNDS}


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


def count_tokens(text):
    """An f-string is one token, as it was before Python 3.12."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += kind.endswith("STRING_START")
        depth -= kind.endswith("STRING_END")
        count += depth == 0 and kind not in LAYOUT
    return count


def imports(node):
    """The packages that a part of the syntax imports."""
    names = []
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            names += [name.name for name in part.names]
        if isinstance(part, ast.ImportFrom):
            names.append(part.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_script_reads_from_top_to_bottom(name):
    text, tree = (ROOT / name).read_text(), TREES[name]
    lines = text.splitlines()
    most_lines, most_tokens = BOUNDS[name]
    tokens = count_tokens(text)
    assert len(lines) <= most_lines and tokens <= most_tokens
    assert round(tokens / sum(bool(line.strip()) for line in lines), 1) <= 7.5
    for node in ast.walk(tree):
        assert not is_golf(node), f"line {node.lineno}: {lines[node.lineno - 1]}"
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 50 or node.name == "parse_args", f"{node.name} has {length} lines"
            assert imports(node) <= LAZY, node.name
        if isinstance(node, ast.ClassDef):
            bases = {getattr(base, "attr", getattr(base, "id", "")) for base in node.bases}
            assert bases & BASES or node.name == "Progress", f"a class {node.name}"
    at_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert "evaluate" not in imports(ast.Module(at_top, []))

    # What `train` calls stands below it, but for the loss of a batch, which is with the model.
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    nodes = [*ast.walk(functions["train"])]
    of_loss = {part for node in nodes if isinstance(node, ast.With) for part in ast.walk(node)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and node not in of_loss]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    called = [call.func.id for call in calls if getattr(call.func, "id", "") in functions]
    order = ["main", "train", *dict.fromkeys(called)]
    assert list(functions)[: len(order)] == order


def parts_of(name):
    """{name: text} of the constants, functions and classes of a script."""
    text, parts = (ROOT / name).read_text(), {}
    for node in TREES[name].body:
        names = [target.id for target in getattr(node, "targets", [])]
        names += [node.name] if hasattr(node, "name") else []
        parts |= dict.fromkeys(names, ast.get_source_segment(text, node))
    return parts


def test_what_both_scripts_have_under_one_name_is_one_text():
    """Each script stands alone."""
    mnist, bert = map(parts_of, BOUNDS)
    both = mnist.keys() & bert.keys()
    assert {name for name in both if mnist[name] != bert[name]} == set(OWN) and len(both) > 25


def test_the_seven_packages_are_used_and_named():
    used = set().union(*map(imports, TREES.values()))
    yamls = "".join(path.read_text() for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    assert set(PACKAGES) <= used | set(re.findall("distributed_type: (deepspeed)", yamls.lower()))
    wanted = re.findall(r"^(\w+)[>=]=.* # .{10}", (ROOT / "requirements.txt").read_text(), re.M)
    assert set(PACKAGES) <= set(wanted)


PROGRAM = """import os, sys, {0}
{0}.main({0}.parse_args())
print("modules:", *{{name.partition(".")[0] for name in sys.modules}}, flush=True)
os._exit(0)"""
DIGITS, MNIST = ["--dataset", "digits"], ["--per_device_train_batch_size", "4"]


@pytest.mark.parametrize(
    "script, flags, unwanted",
    [
        ("train_mnist_rnn", MNIST, {"sklearn", "pandas", "transformers", "datasets", "evaluate"}),
        pytest.param("train_mnist_rnn", DIGITS, {"torchvision"}, marks=pytest.mark.slow),
        # datasets imports pandas; transformers torchvision and, before 5.23, sklearn.
        pytest.param("train_bert_squad", TINY, {"matplotlib"}, marks=pytest.mark.slow),
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
