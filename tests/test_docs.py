"""What docs/strategies.md says: its formulas and numbers are report.py's, its programs run, its diagrams are drawn."""

import json
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from conftest import ROOT, STRATEGIES, run
from transformers import BertConfig, BertForQuestionAnswering

import report

TEXT = (ROOT / "docs" / "strategies.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S)
[PRINTED] = [text for kind, text in BLOCKS if text.startswith("epoch 0")]


def table(first_cell):
    """The rows of the table whose header begins with these cells, as lists of cells; the header is the first."""
    lines = TEXT[TEXT.index(f"| {first_cell}"):].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def program(name):
    [text] = [text for kind, text in BLOCKS if text.startswith(f"# {name}\n")]
    return text


def count_parameters():
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in BertForQuestionAnswering(BertConfig()).parameters())


def test_the_worked_example_is_what_report_py_says():
    parameters, config = count_parameters(), BertConfig()
    assert f"{parameters:,} parameters" in TEXT
    header, *rows = table("strategy | held, 1")
    assert [row[0] for row in rows] == ["baseline", "dp", "ddp", "zero2", "zero3", "fsdp"]
    for strategy, *cells in rows:
        for title, cell in zip(header[1:], cells, strict=True):
            kind, devices = title.split(", ")
            function = report.bytes_held if kind == "held" else report.bytes_sent
            value = function(strategy, parameters, int(devices))
            nothing = value is None or strategy == "baseline" and devices != "1"
            assert cell == ("" if nothing else f"{value / 1e6:.0f}"), f"{strategy}, {title}"
    activations = report.bytes_of_activations(4 * 384, config.num_hidden_layers, config.hidden_size,
                                              config.intermediate_size)
    assert f"keeps {activations / 1e6:.0f} MB of activations" in TEXT
    for strategy in ("ddp", "fsdp"):
        whole = (report.bytes_held(strategy, parameters, 8) + activations) / 1e6
        assert f"{whole:.0f} MB under {strategy.upper()}" in TEXT.replace("\n", " ")
    assert f"× {4 * parameters / 1e6:.0f} MB" in TEXT


@pytest.mark.parametrize("parameters", [4e6, 43e6, 7e9])
def test_the_formulas_are_those_of_report_py(parameters):
    for strategy, *cells in table("strategy | `bytes_held`")[1:]:
        for n in (2, 8):
            names = {"P": parameters, "n": n, "g": max(1, 2 - 30e6 / parameters)}
            expected = [report.bytes_held(strategy, parameters, n), report.bytes_sent(strategy, parameters, n),
                        report.bytes_sent(strategy, parameters, n, gloo=True)]
            for cell, value in zip(cells, expected, strict=True):
                formula = cell.split(", on")[0].replace("×", "*").replace("−", "-")
                formula = re.sub(r"(?<=\d) ?P", "*P", formula).replace("P (", "P*(")
                if value is None:
                    assert cell == "" or cell.startswith("none known")
                else:
                    assert eval(formula, names) == pytest.approx(value), f"{strategy}: {cell}"


def test_the_table_of_deepspeeds_settings_is_that_of_the_jsons():
    """All that they set, but for the stage and what is "auto"; and DeepSpeed's defaults."""
    from deepspeed.runtime.config import GRADIENT_CLIPPING_DEFAULT
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    defaults = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    defaults["check_grad_overflow"] = DeepSpeedBF16Config().check_grad_overflow
    defaults |= {"gradient_clipping": GRADIENT_CLIPPING_DEFAULT, "timers": True, "overlap_comm": False}
    settings = {}
    for stage in (2, 3):
        config = json.loads((ROOT / "accelerate_configs" / f"zero{stage}.json").read_text())
        settings |= config.pop("zero_optimization") | config.pop("bf16") | config
        settings["timers"] = config["timers"]["throughput"]["enabled"]
    settings = {name: value for name, value in settings.items() if value != "auto" and name not in ("stage", "enabled")}

    def number(cell):
        cell = cell.split(" in ")[0].replace(",", "").replace(" million", "000000")
        return json.loads(cell)

    rows = {re.search("`(.*?)`", row[0])[1]: row[1:3] for row in table("setting | default")[1:]}
    assert {name: number(here) for name, (_, here) in rows.items()} == settings
    for name, (default, _) in rows.items():
        assert number(default) == defaults[name], name


def test_all_strategies_have_a_diagram_and_a_word_on_when_to_choose_them():
    sections = re.split(r"^## ", TEXT.split("## Memory")[0], flags=re.M)[1:]
    assert len(sections) == 5
    for section in sections:
        assert section.count("](img/") == 1 and "**Choose it**" in section, section[:40]
    for strategy in STRATEGIES:
        assert any(strategy in section.split("\n")[0].lower().replace("-", "") for section in sections), strategy


def test_diagrams_are_those_that_the_script_draws(tmp_path):
    assert run([sys.executable, "docs/img/draw.py", str(tmp_path)]).code == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in (ROOT / "docs" / "img").glob("*.svg")}
    assert set(re.findall(r"\(img/(.*?)\)", TEXT)) == set(drawn)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The programs of the text, as files."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("train_ddp", "train_accelerate"):
        (folder / f"{name}.py").write_text(program(f"{name}.py"))
    return folder


@pytest.mark.slow
def test_both_programs_print_the_same(folder):
    """By the commands of the text, at once; they write into the folder that they run in."""
    [commands] = [text.splitlines() for _, text in BLOCKS if text.startswith("torchrun")]
    places = {"train_ddp.py": folder / "torch", "train_accelerate.py": folder / "accelerate"}

    def start(command):
        script = command.split()[-1]
        places[script].mkdir()
        shutil.copy(folder / script, places[script])
        command = command.replace("accelerate launch", "accelerate launch --main_process_port 0")
        command = command.replace("accelerate_configs", f"{shlex.quote(str(ROOT))}/accelerate_configs")
        return run(["bash", "-c", f"cd {shlex.quote(str(places[script]))} && {command}"])

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(start, commands))
    for command, result in zip(commands, results, strict=True):
        assert result.code == 0, result.err
        losses = [line for line in result.out.splitlines() if line.startswith("epoch")]
        assert losses == PRINTED.splitlines(), command
    one, two = (torch.load(place / "weights.pt") for place in places.values())
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_one_task_a_gpu_trains_the_same(cluster, folder):
    """The job of the text on two nodes, with one task on each."""
    [job] = [text for kind, text in BLOCKS if kind == "sh"]
    (folder / "job.sh").write_text(job)
    words = ["--ntasks-per-node=1", "--gres=none", "--output=job.log", "job.sh"]
    number = cluster.submit(*words, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    state, log = cluster.wait(number), (folder / "job.log").read_text()
    assert state == "COMPLETED", log
    assert [line for line in log.splitlines() if line.startswith("epoch")] == PRINTED.splitlines(), log


def test_the_calls_in_the_table_exist():
    _, *rows = table("| torch | Accelerate")
    columns = list(zip(*rows, strict=True))
    torch_calls, accelerate_calls = (re.findall(r"(\w+)\.(\w+)", " ".join(columns[i])) for i in (1, 2))
    assert {name for owner, name in torch_calls if owner == "dist"} > {"init_process_group", "destroy_process_group"}
    assert all(hasattr(dist, name) for owner, name in torch_calls if owner == "dist")
    names = {name for owner, name in accelerate_calls if owner == "accelerator"}
    assert len(names) > 10 and all(hasattr(Accelerator, name) for name in names), names
