"""Do the tests notice a small change of the scripts? `python tests/mutate.py --count 40 --seed 0`

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
PAIRS = dict(zip(NAMES[::2], NAMES[1::2], strict=True))
PAIRS |= {other: one for one, other in PAIRS.items()}


def changed(node):
    """The node, changed, or None."""
    operator = node.ops[0] if isinstance(node, ast.Compare) else getattr(node, "op", None)
    if type(operator).__name__ in PAIRS:
        new = copy.copy(node)
        new.op = getattr(ast, PAIRS[type(operator).__name__])()
        new.ops = [new.op, *getattr(node, "ops", [])[1:]]
        return new
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        return ast.Constant(not node.value if type(node.value) is bool else node.value + 1)
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.Pass()
    return None


def places(node):
    """All nodes of a script that can be changed."""
    if getattr(node, "name", "") in FLAGS or isinstance(node, ast.JoinedStr):
        return []
    inside = [place for child in ast.iter_child_nodes(node) for place in places(child)]
    return inside + ([node] if changed(node) else [])


def change(name, choose):
    """Change one thing in a script's text: {name of a script: new text}, and what was changed."""
    texts = {script: (ROOT / script).read_text() for script in SCRIPTS}
    node = choose(places(ast.parse(texts[name])))
    lines = texts[name].splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    before = ast.get_source_segment(texts[name], node)
    after = f"({ast.unparse(changed(node))})" if isinstance(node, ast.expr) else "pass"
    texts[name] = texts[name][:start] + after + texts[name][start + len(before) :]
    if texts[name].index(MARKER) < start:
        shared = texts[name][texts[name].index(MARKER) :]
        texts = {one: text[: text.index(MARKER)] + shared for one, text in texts.items()}
    return texts, f"{name}:{node.lineno}: {' '.join(before.split())[:60]} -> {after[:60]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args, pytest = parser.parse_known_args()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *pytest]
    killed = 0
    for number in range(args.seed, args.seed + args.count):
        chance = random.Random(number)
        texts, what = change(chance.choice(SCRIPTS), chance.choice)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "copy"
            shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".venv*", "runs", ".git"))
            for script, text in texts.items():
                (place / script).write_text(text)
            done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        killed += done.returncode != 0
        print(f"{number} {what}: {found[0].split(' - ')[0] if found else 'survived'}", flush=True)
    print(f"{killed} of {args.count} were noticed")


if __name__ == "__main__":
    main()
