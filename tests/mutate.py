"""Do the tests notice a small change of the scripts? `python tests/mutate.py --seeds 0 40`

changes one operator, constant, condition or call at random, outside of the flags, in a copy, and
runs the quick tests, or what pytest is told behind. Below the marker both scripts change.
"""

import argparse
import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["train_mnist_rnn.py", "train_bert_squad.py"]
MARKER = "# -------- machinery"
FLAGS = {"parse_args", "add_shared_flags", "check_flags"}
NAMES = "Eq NotEq Lt GtE Gt LtE In NotIn Is IsNot And Or Add Sub Mult FloorDiv".split()
OTHER = {name: NAMES[number ^ 1] for number, name in enumerate(NAMES)}  # of each pair


def changed(node):
    """The node with another operator or constant, or `pass` for a call that is a statement."""
    operator = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
    if type(operator).__name__ in OTHER:
        new = copy.copy(node)
        new.op = getattr(ast, OTHER[type(operator).__name__])()
        new.ops = [new.op, *getattr(node, "ops", [])[1:]]
        return new
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        return ast.Constant(not node.value if type(node.value) is bool else node.value + 1)
    return ast.Pass() if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def changes(node):
    """All changes of a script: pairs of a node and what may stand in its place."""
    if getattr(node, "name", "") in FLAGS or isinstance(node, ast.JoinedStr):
        return []
    found = [pair for child in ast.iter_child_nodes(node) for pair in changes(child)]
    if hasattr(node, "test"):
        found.append((node.test, ast.UnaryOp(ast.Not(), node.test)))
    return found + ([(node, changed(node))] if changed(node) else [])


def change(name, choose):
    """Change one thing in a script's text: {name of a script: new text}, and what was changed."""
    texts = {script: (ROOT / script).read_text() for script in SCRIPTS}
    node, new = choose(changes(ast.parse(texts[name])))
    start = sum(map(len, texts[name].splitlines(keepends=True)[: node.lineno - 1]), node.col_offset)
    old = ast.get_source_segment(texts[name], node)
    new = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
    text = texts[name][:start] + new + texts[name][start + len(old) :]
    shared = text.split(MARKER)[1]
    texts = {script: own.split(MARKER)[0] + MARKER + shared for script, own in texts.items()}
    return texts | {name: text}, f"{name}:{node.lineno}: {' '.join(old.split())[:60]} -> {new[:60]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 40])
    args, pytest = parser.parse_known_args()
    killed = 0
    for seed in range(*args.seeds):
        chance = random.Random(seed)
        texts, what = change(chance.choice(SCRIPTS), chance.choice)
        with tempfile.TemporaryDirectory() as folder:
            left_out = shutil.ignore_patterns(".venv*", "runs", ".git", ".*_cache")
            shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True)
            for script, text in texts.items():
                (Path(folder) / script).write_text(text)
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *pytest]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        killed += done.returncode != 0
        print(f"{seed} {what}: {found[0].split(' - ')[0] if found else 'survived'}", flush=True)
    print(f"{killed} of {args.seeds[1] - args.seeds[0]} were noticed")
