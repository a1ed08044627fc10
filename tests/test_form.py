"""What both scripts share, and what they import."""

import ast
import re
import struct
import sys

import pytest
from conftest import ROOT, run
from test_bert import TINY

NAMES = ["train_mnist_rnn.py", "train_bert_squad.py"]
# What both scripts have under one name, each in its own form. All else is one text.
OWN = """main train evaluate keep_best save_model make_loaders describe_workload parse_args
    Progress""".split()
PACKAGES = "torch accelerate deepspeed transformers datasets evaluate torchvision".split()
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
    mnist, bert = map(parts_of, NAMES)
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
