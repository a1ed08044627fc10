"""Which releases train right. `make canary` measures each row below that docs/results/versions.json
lacks, and writes the table of docs/results/versions.md.

A row is the pinned set with other releases of one library. uv makes an environment for it, with
hard links to what is there already, and pytest runs the tests that are marked `canary` in it. What
a row gave is kept, so that the command can be stopped and go on.

    make canary                             # the rows that have not been measured
    make canary ROWS="accelerate==1.14.0"   # this row, again; a comma stands between several

Environments are in CANARY_DIR, or else in the temporary folder. Put it on the disk of uv's cache.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from argparse import ArgumentParser, RawTextHelpFormatter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "versions.json"
PAGE = RESULTS.with_suffix(".md")
LIBRARIES = "torch torchvision accelerate deepspeed transformers datasets evaluate".split()
# Words of pip besides releases: "python==" names an interpreter, and constraints-cu128.txt stands
# in the place of constraints.txt.
ROWS = """
constraints.txt
constraints-cu128.txt
constraints-cu128.txt python==3.10
python==3.12
python==3.13
python==3.14
torch==2.11.0 torchvision==0.26.0 transformers==5.17.0
--prerelease=allow --upgrade torch torchvision accelerate deepspeed transformers datasets evaluate
torch==2.14.1 torchvision==0.29.1
torch==2.13.0 torchvision==0.28.0
torch==2.12.1 torchvision==0.27.1
torch==2.11.0 torchvision==0.26.0
torch==2.10.0 torchvision==0.25.0
accelerate==1.14.0
accelerate==1.13.0
accelerate==1.12.0
deepspeed==0.19.0
deepspeed==0.18.9
deepspeed==0.17.6
deepspeed==0.16.9
transformers==5.20.2
transformers==5.12.1
transformers==5.6.2
transformers==5.0.0
datasets==4.8.4
datasets==4.0.0
evaluate==0.4.5
""".strip().splitlines()


def make_environment(row, folder):
    """The python of a new environment for a row. Raises RuntimeError if it cannot be had."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    pins, words = "constraints.txt", []
    for word in row.split():
        if word.startswith("python=="):
            python = word.removeprefix("python==")
        elif word.endswith(".txt"):
            pins = word
        else:
            words.append(word)
    install = ["pip", "install", "--quiet", "--link-mode=hardlink", f"--python={folder}"]
    call_uv("venv", "--quiet", "--clear", f"--python={python}", folder)
    files = [f"--requirements={file}" for file in sorted(ROOT.glob("requirements*.txt"))]
    call_uv(*install, f"--constraints={pins}", *files)
    # uv leaves alone what fits the changed release already.
    if words:
        call_uv(*install, *words)
    return Path(folder, "bin", "python")


def call_uv(*words):
    """Run uv. Raises RuntimeError with its error."""
    done = subprocess.run(["uv", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(" ".join(done.stderr.partition("error: ")[2].split())[:200])


def measure(row):
    """What the tests find in the environment of a row."""
    found = {"date": date.today().isoformat(), "row": row}
    # Always the same folder, so that Python finds again what it has compiled for other rows.
    folder = Path(os.environ.get("CANARY_DIR", tempfile.gettempdir()), "canary")
    os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
    try:
        python = make_environment(row, folder / "env")
    except RuntimeError as problem:
        return found | {"installed": str(problem)}
    subprocess.run([python, "-m", "compileall", "-q", "-j0", folder / "env"], capture_output=True)
    ask = "import importlib.metadata as m, platform, sys; print(platform.python_version(), "
    ask += "*[m.version(name) for name in sys.argv[1:]])"
    versions = subprocess.check_output([python, "-c", ask, *LIBRARIES], text=True).split()
    found["versions"] = dict(zip(["python", *LIBRARIES], versions, strict=True))
    print(f"{row}: {found['versions']}", flush=True)
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    words = ["-q", "-m", "canary and not gpu", f"--junitxml={report}", "-p", "no:cacheprovider"]
    subprocess.run([python, "-m", "pytest", *words], cwd=ROOT, stdout=sys.stderr)
    return found | read_report(report)


def read_report(file):
    """Of pytest's report: how many tests passed, and the others with their messages."""
    if not file.exists():
        return {"passed": 0, "faults": {"pytest": [False, "pytest itself failed"]}}
    cases = list(xml.etree.ElementTree.parse(file).iter("testcase"))
    faults = {}
    for case in cases:
        for fault in [*case.iter("failure"), *case.iter("error")]:
            name = f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.")
            text = f"{fault.get('message')}\n{fault.text}"
            faults[name] = [is_silent(fault.get("message")), last_error(text)]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(faults) - skipped
    return {"passed": passed, "faults": faults}


def is_silent(message):
    """Whether a test failed by a comparison. Otherwise a run has failed, or a library raised."""
    return bool(re.match("AssertionError|assert|(failed on setup with .)?AssertionError", message))


def last_error(text):
    """The line of a failed test that says most, without paths, and without pydantic's details."""
    kinds = r"^(?:E +)?(?:\[rank\d\]: )?([\w.]*(?:Error|Exception|error): .*)"
    errors = re.findall(kinds, text, re.M) or [text.strip().splitlines()[0]]
    return re.sub(r" ?\(?/[^ )]+\)?| \[type=.*", "", errors[-1])[:160]


def describe(found, pinned):
    """The cells of a row of the table. Versions are those that are not in `pinned`."""
    if "installed" in found:
        return [f"`{found['row']}`", "", f"not measured: {found['installed']}", found["date"]]
    new = sorted(found["versions"].items() - pinned.items())
    names = [f"{name} {version}" for name, version in new]
    programs = {name for name in found["faults"] if name.startswith("test_workarounds")}
    tests = found["faults"].keys() - programs
    silent = sorted(name for name in tests if found["faults"][name][0])
    loud = sorted(tests - set(silent))
    count = found["passed"] + len(tests)
    parts = []
    if silent:
        parts.append(f"**silently wrong** in {len(silent)} of {count} tests: {short(silent)}")
    if loud:
        error = found["faults"][loud[0]][1].replace("|", "\\|").replace("<", "&lt;")
        parts.append(f"refused or broken in {len(loud)} of {count} tests: `{error}`")
    if not tests:
        parts.append(f"right in {count} tests")
    mended = [name for name in programs if "no longer" in found["faults"][name][1]]
    if mended:
        names_of = [name.partition("[")[2].rstrip("]") for name in sorted(mended)]
        parts.append(f"not needed here: {', '.join(names_of)}")
    return [f"`{found['row']}`", ", ".join(names), "; ".join(parts), found["date"]]


def short(names):
    """The names of tests, as FILE::TEST without test_, with the strategies of each."""
    groups = {}
    for name in sorted(names):
        test, _, values = name.partition("[")
        test = test.removeprefix("test_").replace("::test_", "::")
        groups.setdefault(test, []).append(values.rstrip("]").split("-")[0])
    texts = {test: f" ({', '.join(those)})" if any(those) else "" for test, those in groups.items()}
    return ", ".join(f"{test}{text}" for test, text in texts.items())


def table(results):
    """All rows as Markdown."""
    pinned = {}
    lines = ["| row | versions | result | measured |", "|---|---|---|---|"]
    for found in results:
        lines.append("| " + " | ".join(describe(found, pinned)) + " |")
        pinned = pinned or found.get("versions", {})
    return "\n".join(lines)


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--rows", default="", help="measure these, with a comma between them")
    asked = [row.strip() for row in parser.parse_args().rows.split(",") if row.strip()]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {found["row"]: found for found in results}
    for row in asked or [row for row in ROWS if row not in known]:
        known[row] = measure(row)
        order = [*ROWS, *known]
        results = sorted(known.values(), key=lambda found: order.index(found["row"]))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        before, _, rest = PAGE.read_text().partition("| row |")
        after = rest.partition("\n\n")[2]
        PAGE.write_text(f"{before}{table(results)}\n\n{after}")
        print(" | ".join(describe(known[row], {})), flush=True)


if __name__ == "__main__":
    main()
