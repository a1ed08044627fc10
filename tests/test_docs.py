"""What the pages name exists: flags, files, links. Their formulas and pictures are those of the
programs, and the translated pages have the commands of the English ones.
"""

import itertools
import json
import re
import shutil
import sys
from xml.etree import ElementTree

import draw_scale
import pytest
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, anchor, rows_of, run
from test_setup import requirements

import fit
from benchmarks import versions
from memory import formulas

TOPS = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
IMG = ROOT / "docs" / "img"
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
    patterns = "*.py", "tools/*.py", "sbatch/*.*", "benchmarks/*.py", "docs/**/*.py", "Makefile"
    programs = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    known = {name for action in launch_command_parser()._actions for name in action.option_strings}
    known.update(OTHERS, re.findall(r"--[a-z][\w-]+", programs))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", code)) <= known
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", code, re.M)) <= set(targets)
    folders = "accelerate_configs|benchmarks|docs|notebooks|sbatch|tests|tools"
    for name in re.findall(rf"`((?:{folders})/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name
    for file, place in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / file if file else page
        assert target.exists(), file
        there = target.read_text() if place else ""
        places = {anchor(heading) for heading in re.findall(r"^#+ (.*)", there, re.M)}
        places.update(re.findall(r'<a id="(.*?)"', there))
        assert not place or place in places, f"{file}#{place}"


def rows_below(head):
    """The rows of docs/strategies.md's table with this head."""
    page = PAGES[ROOT / "docs" / "strategies.md"]
    return rows_of(page[page.index(head) :].partition("\n\n")[0])[1:]


def value_of(cell, **names):
    """The number that a formula of a table gives, such as "4 Ψ + 16 Ψ/n"."""
    formula = cell.split(", on")[0].replace("×", "*").replace("−", "-")
    return eval(re.sub(r"(?<=\d) ?Ψ", "*Ψ", formula).replace("Ψ (", "Ψ*("), names)


def test_formulas_and_numbers_are_those_of_fit_and_of_dry_runs():
    """Bytes held, and those that BERT-base sends on eight devices; then both worked out."""
    psi, counted = formulas.count_parameters(fit.MODELS["bert-base"])[0], draw_scale.cells()
    names = {"Ψ": psi, "g": max(1, 2 - 30e6 / psi)}
    for strategies, held, sent in rows_below("| strategy | held | sent |"):
        for strategy, n in itertools.product(strategies.split(", "), (2, 8)):
            expected = sum(formulas.bytes_of_parts(strategy, psi, n).values())
            assert value_of(held, n=n, **names) == pytest.approx(expected), strategy
            if (strategy, n) in counted:
                expected = counted[strategy, n]["inside"]
                assert value_of(sent, n=n, **names) == pytest.approx(expected, rel=0.01), strategy
    for strategy, *numbers in rows_below("| strategy | held, 2 |"):
        sizes = [sum(formulas.bytes_of_parts(strategy, psi, n).values()) for n in (2, 8)]
        sizes += [counted[strategy, n]["inside"] for n in (2, 8)]
        assert numbers == [f"{size / 1e6:.0f}" for size in sizes], strategy


@pytest.mark.parametrize("script", ["img/draw", "img/draw_scale", "lab/draw_traces"])
def test_pictures_of_data_are_those_that_their_programs_draw(script, tmp_path):
    words, kept = [tmp_path], IMG
    if script == "lab/draw_traces":
        words, kept = ["--to", tmp_path], IMG / "traces"
        shutil.copy(kept / "traces.json", tmp_path)
    done = run([sys.executable, f"docs/{script}.py", *map(str, words)])
    assert done.code == 0, done.err
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) >= 2
    assert all(picture.read_text() == (kept / picture.name).read_text() for picture in drawn)
    assert script != "img/draw_scale" or done.out.strip() in PAGES[ROOT / "docs" / "scale.md"]


def test_a_page_shows_each_picture_and_says_what_it_is():
    """Most are edited by hand: each is whole XML."""
    shown = re.findall(r"\[[^\]]+\]\([./]*(?:docs/)?img/([\w/-]+\.svg)\)", "".join(PAGES.values()))
    for picture in IMG.rglob("*.svg"):
        assert str(picture.relative_to(IMG)) in shown
        ElementTree.parse(picture)


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
