"""Runs the checkers of exercises 9 and 10 on what a class handed in, and writes one CSV, with a row
for each student.

python docs/lab/grade.py HANDINS runs/grades.csv

HANDINS has a folder for each student, with the files of the exercises under their names on the
pages. This runs students' code, with your rights: use an account or a container that has nothing
else. Such code can also deceive a checker, so read what you grade.
"""

import argparse
import contextlib
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import environment  # noqa: F401  It tells who forgot to activate .venv.
import psutil

HERE = Path(__file__).resolve().parent
# {file: the checker, the part of the exercise, its points}. Exercise 10 is graded by hand.
FILES = {
    "my_ddp.py": ("check_ex9.py", "1", 40),
    "my_flat.py": ("check_ex9.py", "2", 10),
    "my_overlap.py": ("check_ex9.py", "2b", 10),
    "my_sharded.py": ("check_ex9.py", "3", 10),
    "my_accelerate.py": ("check_ex9.py", "4", 10),
    "mended.py": ("check_ex10.py", "1", 0),
    "going.py": ("check_ex10.py", "2", 0),
}
LOST = 4  # points, for each line that is not ok


def place_for(student, folder, variants):
    """Copy docs/lab into the folder, with the single.py that this student had."""
    lab = folder / "docs" / "lab"
    shutil.copytree(HERE, lab)
    for name in ("accelerate_configs", "tools"):
        (folder / name).symlink_to(HERE.parent.parent / name)
    if variants:
        text = (lab / "single.py").read_text()
        (lab / "single.py").write_text(variant_of(text, int(student.name[-3:])))
    return lab


def variant_of(text, number):
    """The variant of single.py, or of a solution, for this number, as docs/teaching.md makes it. An
    even hidden size gives part 3 two equal halves. Above 64, it differs from all other sizes.
    """
    hidden = 66 + 2 * (number % 100)
    text = re.sub(r"^SEED = \d+", f"SEED = {number}", text, flags=re.M)
    layers = rf"Linear(64, {hidden}), nn.ReLU(), nn.Linear({hidden}, 10)"
    return re.sub(r"Linear\(64, \d+\), nn.ReLU\(\), nn.Linear\(\d+, 10\)", layers, text)


def output_of(words, folder, seconds):
    """What a checker prints. If it takes longer, end it with all that it started: None."""
    with open(folder / "output", "w+") as output:
        checker = psutil.Popen(words, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            checker.wait(seconds)
        except psutil.TimeoutExpired:
            for process in [checker, *checker.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return None
        output.seek(0)
        return output.read()


def grade(file, args, folder):
    """A cell for this file of a student, its points or None, and what a teacher should know."""
    checker, part, full = FILES[file.name]
    if not file.is_file():
        return "-", 0, ""
    lab = place_for(file.parent, folder, args.variants)
    words = [sys.executable, lab / checker, file.resolve(), "--part", part]
    words += ["--seconds", args.seconds]
    limit = args.seconds + 120  # The checker ends by itself before that.
    printed = output_of(list(map(str, words)), folder, limit)
    if printed is None:
        return "?", None, f"look at it: the checker did not end in {limit} s"
    lines = re.findall(r"^(ok|WRONG|later)  +(.*)", printed, re.M)
    wrong = [text for word, text in lines if word == "WRONG"]
    right = sum(word == "ok" for word, _ in lines)
    if right == 0:  # One fault can hide all else: no end, or ranks that do not connect.
        reasons = [line for line in printed.splitlines() if not re.match(r"\(|later", line)]
        return "?", None, f"look at it: {' '.join(reasons)[:400]}"
    points = max(0, full - LOST * (len(lines) - right))
    return f"{right} of {len(lines)}", points, "; ".join(wrong)


def grade_student(student, args):
    """A row of the CSV: a cell for each file, the points of exercise 9, and notes. There are no
    points if somebody has to look at one of that exercise's files.
    """
    row, points, notes = {"student": student.name, "points": ""}, [], []
    for name, (_, _, full) in FILES.items():
        # A rank whose launcher was killed may still write there for a while.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            row[name], found, note = grade(student / name, args, Path(folder))
        print(f"{student.name}, {name}: {row[name]} {note}", file=sys.stderr, flush=True)
        notes += [f"{name}: {note}"] if note else []
        points += [found] if full else []
    if None not in points:
        row["points"] = sum(points)
    return row | {"notes": ". ".join(notes)}


def main():
    parser = argparse.ArgumentParser(description="Run the checkers on what a class handed in.")
    parser.add_argument("handins", type=Path, help="a folder with a folder for each student")
    parser.add_argument("csv", type=Path, help="the file to write")
    parser.add_argument("--seconds", type=int, default=60, help="that a script may take (60)")
    parser.add_argument("--variants", action="store_true", help="exercise 9 has the variants")
    args = parser.parse_args()
    students = sorted(path for path in args.handins.glob("*") if path.is_dir())
    if not students:
        sys.exit(f"error: there is no folder of a student in {args.handins}")
    for student in students:
        if args.variants and not re.search(r"[0-9]{3}$", student.name):
            sys.exit(f"error: --variants: the name of {student} does not end in three digits")
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with open(args.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, ["student", "points", *FILES, "notes"])
        writer.writeheader()
        for student in students:
            row = grade_student(student, args)
            writer.writerow(row)
            file.flush()
            print(*row.values(), sep=", ", flush=True)


if __name__ == "__main__":
    main()
