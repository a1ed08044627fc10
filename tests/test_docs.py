"""What the pages print: flags, files, calls, formulas, numbers and programs, on whatever page they
are. test_readme.py follows their links.
"""

import json
import re
import sys

import draw_scale
import pytest
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, run, table_of

import fit
from planning import memory

PAGES = {
    page: page.read_text()
    for page in [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
}
OTHERS = {"--logdir", "--pid", "--nnodes"}  # flags of TensorBoard, py-spy and torchrun


def tables(first_cell):
    """The tables of all pages whose header begins like this, as in `table_of`."""
    return [table_of(text, first_cell) for text in PAGES.values() if f"\n| {first_cell}" in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_files_and_calls_exist(page):
    code = re.findall(r"```.*?```|`[^`\n]+`", PAGES[page], re.S)
    patterns = "*.py", "sbatch/*.*", "benchmarks/*.py", "docs/**/*.py", "docs/**/*.sh", "Makefile"
    programs = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    known = {name for action in launch_command_parser()._actions for name in action.option_strings}
    known.update(OTHERS, re.findall(r"--[a-z][\w-]+", programs))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(code))) <= known
    folders = "accelerate_configs|benchmarks|docs|notebooks|planning|reporting|sbatch|tests"
    ours = rf"`((?:{folders})/[\w/.-]+)`"
    for name in re.findall(ours, PAGES[page]):
        assert (ROOT / name).exists(), name
    for name, owner in (("accelerator", Accelerator), ("dist", dist)):
        for call in re.findall(rf"\b{name}\.(\w+)\(", "\n".join(code)):
            assert hasattr(owner, call), f"{name}.{call}"


def value_of(cell, **names):
    """The number that a formula of a table gives, such as "4 Ψ + 16 Ψ/n"."""
    formula = cell.split(", on")[0].replace("×", "*").replace("−", "-")
    return eval(re.sub(r"(?<=\d) ?Ψ", "*Ψ", formula).replace("Ψ (", "Ψ*("), names)


def test_the_formulas_are_those_of_fit_and_what_dry_runs_count():
    """Of the bytes held; and of those sent by BERT-base on eight devices."""
    [table] = tables("strategy | held |")
    rows = [(name, *cells) for names, *cells in table[1:] for name in names.split(", ")]
    parameters = memory.count_parameters(fit.MODELS["bert-base"])[0]
    names = {"Ψ": parameters, "g": max(1, 2 - 30e6 / parameters)}
    counted = draw_scale.cells()
    for strategy, held, sent in rows:
        for n in (2, 8):
            expected = memory.bytes_held(strategy, parameters, n)
            assert value_of(held, n=n, **names) == pytest.approx(expected), strategy
        if (strategy, 8) in counted:
            expected = counted[strategy, 8]["sent inside"]
            assert value_of(sent, n=8, **names) == pytest.approx(expected, rel=0.07), strategy


def test_worked_examples_are_what_the_formulas_give():
    """MB of BERT-base by number of devices, and bytes of a parameter in bf16."""
    parameters = memory.count_parameters(fit.MODELS["bert-base"])[0]
    [formulas] = tables("strategy | held |")
    names = {"Ψ": parameters, "g": max(1, 2 - 30e6 / parameters)}
    columns = {
        row[0].split(", ")[0]: dict(zip(("held", "sent"), row[1:], strict=True))
        for row in formulas[1:]
    }
    for header, *rows in tables("strategy | held,"):
        for strategy, *cells in rows:
            for title, cell in zip(header[1:], cells, strict=True):
                kind, devices = title.split(", ")
                value = value_of(columns[strategy][kind], n=int(devices), **names)
                assert cell == f"{value / 1e6:.0f}", f"{strategy}, {title}"
    for _, *rows in tables("strategy | held per parameter"):
        for strategy, formula, *_ in rows:
            assert eval(formula, {"n": 8}) == memory.bytes_held(strategy, 1, 8, "bf16"), strategy


def test_a_table_of_deepspeeds_settings_is_that_of_the_jsons():
    """All that they set, but for the stage and what is "auto"."""
    settings = {}
    for stage in (2, 3):
        config = json.loads((ROOT / "accelerate_configs" / f"zero{stage}.json").read_text())
        settings |= config.pop("zero_optimization") | config.pop("bf16") | config
        settings["timers"] = config["timers"]["throughput"]["enabled"]
    settings = {
        name: value
        for name, value in settings.items()
        if value != "auto" and name not in ("stage", "enabled")
    }
    for _, *rows in tables("setting | DeepSpeed's default"):
        here = {
            re.search("`(.*?)`", row[0])[1]: row[2].split(" in ")[0].replace(",", "")
            for row in rows
        }
        assert settings == {
            name: json.loads(cell.replace(" million", "000000")) for name, cell in here.items()
        }


def test_diagrams_are_those_that_the_script_draws_and_a_page_shows(tmp_path):
    result = run([sys.executable, "docs/img/draw.py", str(tmp_path)])
    assert result.code == 0, result.err
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    images = {path.name: path.read_text() for path in (ROOT / "docs" / "img").glob("*.svg")}
    assert drawn.items() <= images.items()
    assert set(images) <= set(re.findall(r"img/([\w-]+\.svg)", "".join(PAGES.values())))


def test_the_spanish_pages_have_the_commands_and_outputs_of_the_english_ones():
    """So they age together."""
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
        assert both[0] == both[1] and len(both[0]) >= 3, spanish
