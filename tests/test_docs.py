"""What the pages print: flags, files, calls, formulas, numbers and programs, on whatever page they
are. test_readme.py follows their links.
"""

import json
import os
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, namespaces, run, table_of

import fit
from planning import links, memory

PAGES = {
    page: page.read_text()
    for page in [
        ROOT / "README.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
}
[LOOPS] = [text for text in PAGES.values() if "\n# train_ddp.py\n" in text]  # same loop, two ways
BLOCKS = re.findall(r"```\w*\n(.*?)```", LOOPS, re.S)
OTHERS = {"--logdir", "--pid"}  # flags of TensorBoard and py-spy


def tables(first_cell):
    """The tables of all pages whose header begins like this, as in `table_of`."""
    return [table_of(text, first_cell) for text in PAGES.values() if f"\n| {first_cell}" in text]


def block(start):
    [text] = [text for text in BLOCKS if text.startswith(start)]
    return text


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


@pytest.mark.parametrize("parameters", [4e6, 7e9])
def test_the_formulas_are_those_of_the_report(parameters):
    """Of the bytes held, and those sent over NCCL and over gloo."""
    [table] = tables("strategy | `bytes_held`")
    rows = [(name, *cells) for names, *cells in table[1:] for name in names.split(", ")]
    for strategy, *cells in rows:
        for n in (2, 8):
            names = {"P": parameters, "n": n, "g": max(1, 2 - 30e6 / parameters)}
            expected = [
                memory.bytes_held(strategy, parameters, n),
                links.bytes_sent(strategy, parameters, n),
                links.bytes_sent(strategy, parameters, n, gloo=True),
            ]
            for cell, value in zip(cells, expected, strict=False):
                formula = cell.split(", on")[0].replace("×", "*").replace("−", "-")
                formula = re.sub(r"(?<=\d) ?P", "*P", formula).replace("P (", "P*(")
                if value is not None:  # there is a formula
                    assert eval(formula, names) == pytest.approx(value), f"{strategy}: {cell}"


def test_worked_examples_are_what_the_formulas_give():
    """MB of BERT-base by number of devices, and bytes of a parameter in bf16."""
    parameters = memory.count_parameters(fit.MODELS["bert-base"])[0]
    for header, *rows in tables("strategy | held,"):
        for strategy, *cells in rows:
            for title, cell in zip(header[1:], cells, strict=True):
                kind, devices = title.split(", ")
                function = memory.bytes_held if kind == "held" else links.bytes_sent
                value = function(strategy, parameters, int(devices))
                assert cell in ("", f"{(value or 0) / 1e6:.0f}"), f"{strategy}, {title}"
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
    assert set(images) <= set(re.findall(r"img/(\w+\.svg)", "".join(PAGES.values())))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The programs of the text, as files."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("train_ddp.py", "train_accelerate.py"):
        (folder / name).write_text(block(f"# {name}\n"))
    return folder


@pytest.mark.slow
def test_both_programs_print_the_same(folder):
    """By the commands of the text, at once; they write into the folder that they run in. No name
    server knows the host.
    """
    commands = block("torchrun").splitlines()
    places = {"train_ddp.py": folder / "torch", "train_accelerate.py": folder / "accelerate"}
    unknown = [] if os.geteuid() else namespaces("hostname gpu-01.lab-2.example.org")

    def start(command):
        script = command.split()[-1]
        places[script].mkdir()
        shutil.copy(folder / script, places[script])
        command = command.replace("accelerate launch", "accelerate launch --main_process_port 0")
        configs = f"{shlex.quote(str(ROOT))}/accelerate_configs"
        command = command.replace("accelerate_configs", configs)
        command = f"cd {shlex.quote(str(places[script]))} && {command}"
        return run([*unknown, "bash", "-c", command])

    with ThreadPoolExecutor(2) as pool:
        for command, result in zip(commands, pool.map(start, commands), strict=True):
            assert result.code == 0, result.err
            assert losses(result.out) == block("epoch 0").splitlines(), command
    one, two = (torch.load(place / "weights.pt") for place in places.values())
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)


def losses(text):
    return [line for line in text.splitlines() if line.startswith("epoch")]


@pytest.mark.slow
def test_one_task_per_gpu_trains_the_same(cluster, folder):
    """The job of the text on two nodes, with one task on each."""
    (folder / "job.sh").write_text(block("#!/bin/bash\n#SBATCH"))
    words = ["--ntasks-per-node=1", "--gres=none", "--output=job.log", "job.sh"]
    number = cluster.submit(*words, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    state, log = cluster.wait(number), (folder / "job.log").read_text()
    assert state == "COMPLETED" and losses(log) == block("epoch 0").splitlines(), log
