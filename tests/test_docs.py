"""What the pages name exists: flags, files, links. Their formulas and pictures are those of the
programs, and the translated pages have the commands of the English ones.
"""

import json
import re
import shutil
import sys

import draw_scale
import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, anchor, rows_of, run
from test_setup import requirements

import fit
from benchmarks import versions
from common.facts import sent_share
from planning import memory

TOPS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
PAGES = {
    page: page.read_text()
    for page in [*(ROOT / name for name in TOPS), *(ROOT / "docs").rglob("*.md")]
}
OTHERS = {"--logdir", "--pid", "--nnodes", "--pty"}  # of TensorBoard, py-spy, torchrun and srun


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_files_and_links_exist(page):
    """So do make's targets."""
    text = PAGES[page]
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S))
    patterns = "*.py", "sbatch/*.*", "benchmarks/*.py", "docs/**/*.py", "docs/**/*.sh", "Makefile"
    programs = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    known = {name for action in launch_command_parser()._actions for name in action.option_strings}
    known.update(OTHERS, re.findall(r"--[a-z][\w-]+", programs))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", code)) <= known
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", code, re.M)) <= set(targets)
    folders = "accelerate_configs|benchmarks|docs|notebooks|planning|reporting|sbatch|tests"
    for name in re.findall(rf"`((?:{folders})/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name
    for file, place in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / file if file else page
        assert target.exists(), file
        there = target.read_text() if place else ""
        places = {anchor(heading) for heading in re.findall(r"^#+ (.*)", there, re.M)}
        places.update(re.findall(r'<a id="(.*?)"', there))
        assert not place or place in places, f"{file}#{place}"


def value_of(cell, **names):
    """The number that a formula of a table gives, such as "4 Ψ + 16 Ψ/n"."""
    formula = cell.split(", on")[0].replace("×", "*").replace("−", "-")
    return eval(re.sub(r"(?<=\d) ?Ψ", "*Ψ", formula).replace("Ψ (", "Ψ*("), names)


def test_the_formulas_are_those_of_fit_and_what_dry_runs_count():
    """Of the bytes held; and of those sent by BERT-base on eight devices."""
    page = PAGES[ROOT / "docs" / "strategies.md"]
    _, *table = rows_of(page[page.index("| strategy | held | sent |") :].partition("\n\n")[0])
    rows = [(name, *cells) for names, *cells in table for name in names.split(", ")]
    parameters = memory.count_parameters(fit.MODELS["bert-base"])[0]
    names = {"Ψ": parameters, "g": max(1, 2 - 30e6 / parameters)}
    counted = draw_scale.cells()
    for strategy, held, sent in rows:
        for n in (2, 8):
            expected = memory.bytes_held(strategy, parameters, n)
            assert value_of(held, n=n, **names) == pytest.approx(expected), strategy
            if (strategy, n) in counted:
                expected = counted[strategy, n]["inside"]
                assert value_of(sent, n=n, **names) == pytest.approx(expected, rel=0.01), strategy


def test_the_worked_out_bytes_are_those_of_exercise_14():
    """Bytes sent are those of its table and picture; one function says them."""
    page, counted = PAGES[ROOT / "docs" / "strategies.md"], draw_scale.cells()
    _, *table = rows_of(page[page.index("| strategy | held, 2 |") :].partition("\n\n")[0])
    parameters = memory.count_parameters(fit.MODELS["bert-base"])[0]
    for strategy, *numbers in table:
        sizes = [memory.bytes_held(strategy, parameters, n) for n in (2, 8)]
        sizes += [counted[strategy, n]["inside"] for n in (2, 8)]
        assert numbers == [f"{size / 1e6:.0f}" for size in sizes], strategy
    ways = {name: sent_share(name, 8) for name in ("all_reduce", "reduce", "all_gather")}
    assert ways == {"all_reduce": 14 / 8, "reduce": 7 / 8, "all_gather": 7 / 8}


def test_pictures_are_those_that_the_scripts_draw_and_pages_show(tmp_path):
    folder, programs = ROOT / "docs" / "img", shutil.ignore_patterns("*.svg", "*.py")
    shutil.copytree(folder, tmp_path, ignore=programs, dirs_exist_ok=True)
    for script, *words in (
        ("draw", tmp_path),
        ("draw_collectives", tmp_path / "collectives"),
        ("draw_flow", tmp_path),
        ("draw_scale", tmp_path),
        ("draw_traces", "--to", tmp_path / "traces"),
    ):
        done = run([sys.executable, f"docs/img/{script}.py", *map(str, words)])
        assert done.code == 0, done.err
        if script == "draw_scale":
            assert done.out.strip() in PAGES[ROOT / "docs" / "scale.md"]
    drawn = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.svg")}
    kept = {path.relative_to(folder): path.read_text() for path in folder.rglob("*.svg")}
    assert drawn == kept
    shown = re.findall(r"img/([\w/-]+\.svg)", "".join(PAGES.values()))
    assert {str(path) for path in kept} <= set(shown)


def test_the_spanish_pages_have_the_commands_and_outputs_of_the_english_ones():
    for english, spanish, end in (
        ("README.md", "docs/es/README.md", "## The strategy is the YAML"),
        ("docs/lab.md", "docs/es/lab.md", "## 5. Weak and strong scaling"),
    ):
        translated, rest = PAGES[ROOT / english].split(f"\n{end}")
        assert rest
        both = [
            re.findall(r"^```.*?^```$", text, re.M | re.S)
            for text in (translated, PAGES[ROOT / spanish])
        ]
        assert both[0] == both[1] and len(both[0]) >= 2, spanish


def test_what_requirements_allow_was_measured_right():
    """The table of releases is what was measured, and no release with faults is allowed."""
    results = json.loads(versions.RESULTS.read_text())
    assert versions.table(results) in versions.PAGE.read_text()
    ranges = requirements("requirements.txt")
    measured = [found for found in results if "versions" in found]
    assert len(measured) >= 16
    for found in measured:
        allowed = all(ranges[name].contains(found["versions"][name]) for name in versions.LIBRARIES)
        faults = [name for name in found["faults"] if not name.startswith("test_workarounds")]
        assert not (allowed and faults), found["row"]
