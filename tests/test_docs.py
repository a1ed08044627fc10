"""What docs/strategies.md says: its formulas and numbers are report.py's and predict.py's, its
programs run, its diagrams are drawn by a rule.
"""

import csv
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
from conftest import ROOT, STRATEGIES, run, table_of
from test_predict import BASE
from transformers import BertConfig, BertForQuestionAnswering

from reporting import links, memory, prediction

TEXT = (ROOT / "docs" / "strategies.md").read_text()
WORDS = " ".join(TEXT.split())  # however the lines are broken
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.S)
[PRINTED] = [text for kind, text in BLOCKS if text.startswith("epoch 0")]


def table(first_cell):
    return table_of(TEXT, first_cell)


def program(name):
    [text] = [text for kind, text in BLOCKS if text.startswith(f"# {name}\n")]
    return text


def count_parameters():
    with torch.device("meta"):
        model = BertForQuestionAnswering(BertConfig())
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_worked_example_is_what_report_py_says():
    parameters, config = count_parameters(), BertConfig()
    assert f"{parameters:,} parameters" in WORDS
    header, *rows = table("strategy | held, 1")
    assert [row[0] for row in rows] == ["baseline", "dp", "ddp", "zero2", "zero3", "fsdp"]
    for strategy, *cells in rows:
        for title, cell in zip(header[1:], cells, strict=True):
            kind, devices = title.split(", ")
            function = memory.bytes_held if kind == "held" else links.bytes_sent
            value = function(strategy, parameters, int(devices))
            nothing = value is None or strategy == "baseline" and devices != "1"
            assert cell == ("" if nothing else f"{value / 1e6:.0f}"), f"{strategy}, {title}"
    activations = memory.bytes_of_activations(
        4 * 384, config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    assert f"keeps {activations / 1e6:.0f} MB of activations" in WORDS
    for strategy in ("ddp", "fsdp"):
        whole = (memory.bytes_held(strategy, parameters, 8) + activations) / 1e6
        assert f"{whole:.0f} MB under {strategy.upper()}" in WORDS
    assert f"× {4 * parameters / 1e6:.0f} MB" in WORDS


def test_what_berts_last_bucket_holds():
    """And how many collectives a step has."""
    parts = prediction.parts_of(BASE | {"parameters": count_parameters()})
    tensors, mib = prediction.backward_tensors(parts), 2**20
    buckets = prediction.fill_buckets([4 * size for size, _ in tensors], 25 * mib, first=mib)
    embeddings, layer = sum(parts.words + parts.others), sum(parts.layers[0])
    last = [tensors[index] for index in buckets[-1]]
    in_layer = sum(size for size, _ in last) - embeddings
    assert {stage for _, stage in last} == {11, 12}  # layer 0 and the embeddings
    whole, of_all = (4 * sum(size for size, _ in some) / mib for some in (last, tensors))
    assert 0.24 < whole / of_all < 0.27 and in_layer / layer == pytest.approx(2 / 3, abs=0.01)
    assert (f"it holds {whole:.0f} MiB of {of_all:.0f} MiB of gradients, about a quarter. "
            f"{4 * embeddings / mib:.0f} MiB are the gradients of the embeddings. "
            f"The other {4 * in_layer / mib:.0f} MiB are two thirds of layer 0.") in WORDS
    calls = {name: len(prediction.calls_of(prediction.steps_of(name, parts, 4)))
             for name in ("ddp", "fsdp")}
    cells = {row[0].lower(): int(row[1]) for row in table("strategy | collectives")[1:3]}
    assert cells == calls and f"an all-reduce of each of {len(buckets)} buckets" in WORDS
    units = [call.bytes for call in prediction.calls_of(prediction.steps_of("fsdp", parts, 4))
             if call.name == "reduce_scatter"]
    assert f"With accelerate 1.15, BERT-base has {len(units)} units" in WORDS
    assert f"reduce-scatters of {len(units)} units" in WORDS


def test_the_steps_on_a_slow_link_are_those_that_were_measured():
    with open(ROOT / "docs" / "results" / "links-cpu" / "links.csv") as file:
        cells = [row for row in csv.DictReader(file) if row["script"] == "train_bert_squad.py"
                 and row["link"] == "200mbit" and row["gradient_accumulation_steps"] == "1"]
    took = {row["strategy"]: 1000 * float(row["step_seconds"]) for row in cells}
    assert (f"At 200 Mbit/s a step took {took['ddp']:.0f} ms under DDP, {took['zero2']:.0f} ms "
            f"under ZeRO-2 and {took['fsdp']:.0f} ms under FSDP") in WORDS


@pytest.mark.parametrize("parameters", [4e6, 43e6, 7e9])
def test_the_formulas_are_those_of_report_py(parameters):
    for strategy, *cells in table("strategy | `bytes_held`")[1:]:
        for n in (2, 8):
            names = {"P": parameters, "n": n, "g": max(1, 2 - 30e6 / parameters)}
            expected = [function(strategy, parameters, n, **settings) for function, settings in (
                (memory.bytes_held, {}), (links.bytes_sent, {}),
                (links.bytes_sent, {"gloo": True}))]
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

    defaults = {field.alias or name: field.default
                for name, field in DeepSpeedZeroConfig.model_fields.items()}
    defaults["check_grad_overflow"] = DeepSpeedBF16Config().check_grad_overflow
    defaults |= {"gradient_clipping": GRADIENT_CLIPPING_DEFAULT, "timers": True,
                 "overlap_comm": False}
    settings = {}
    for stage in (2, 3):
        config = json.loads((ROOT / "accelerate_configs" / f"zero{stage}.json").read_text())
        settings |= config.pop("zero_optimization") | config.pop("bf16") | config
        settings["timers"] = config["timers"]["throughput"]["enabled"]
    settings = {name: value for name, value in settings.items()
                if value != "auto" and name not in ("stage", "enabled")}

    def number(cell):
        cell = cell.split(" in ")[0].replace(",", "").replace(" million", "000000")
        return json.loads(cell)

    _, *rows = table("setting | DeepSpeed's default")
    rows = {re.search("`(.*?)`", row[0])[1]: row[1:3] for row in rows}
    assert {name: number(here) for name, (_, here) in rows.items()} == settings
    for name, (default, _) in rows.items():
        assert number(default) == defaults[name], name


def test_all_strategies_have_a_diagram_and_a_word_on_when_to_choose_them():
    sections = re.split(r"^## ", TEXT.split("## Memory")[0], flags=re.M)[1:]
    assert len(sections) == 5
    for section in sections:
        assert section.count("](img/") == 1 and "**Choose it**" in section, section[:40]
    for strategy in STRATEGIES:
        titles = [section.split("\n")[0].lower().replace("-", "") for section in sections]
        assert any(strategy in title for title in titles), strategy


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """{name: text} of the diagrams, drawn anew."""
    folder = tmp_path_factory.mktemp("drawn")
    result = run([sys.executable, "docs/img/draw.py", str(folder)])
    assert result.code == 0, result.err
    return {path.stem: path.read_text() for path in folder.iterdir()}


def test_diagrams_are_those_that_the_script_draws(drawn):
    images = ROOT / "docs" / "img"
    assert drawn == {name: (images / f"{name}.svg").read_text() for name in drawn}
    shown = {page.stem: set(re.findall(r"\(img/(\w+)\.svg\)", page.read_text()))
             for page in (ROOT / "docs").glob("*.md")}
    assert shown["strategies"] == set(drawn)
    assert set.union(*shown.values()) == {path.stem for path in images.glob("*.svg")}


def boxes(text):
    """(text in it, width) of the boxes of an SVG, in order; a short text stands beside its box."""
    return [(match[2], float(match[1])) for match in re.finditer(
        r'<rect .*? width="([\d.]+)" height="24.0".*\n(?:<rect.*width="11.0".*\n)?'
        r"<text .*?>(.*?)</text>", text)]


def test_boxes_of_the_diagrams_follow_one_rule(drawn):
    """Of the page's table; all widths are compared with F1's in the same diagram."""
    rows = dict(table("what | units")[1:])
    n, layers = 4, 3
    for name in ("baseline", "dp", "ddp", "zero2", "fsdp", "slow"):
        link, found = (8 if name == "slow" else 2), boxes(drawn[name])
        unit = dict(found)["F1"] / 2
        ring, batch = (n - 1) / n * link, (n - 1) * link / 8
        rule = {"F": 2, "B": 4, "AG": ring, "RS": ring, "AR": 2 * ring, "O": 2,
                "AG, all layers": layers * ring, "Y": batch, "dY": batch,
                "parameters, inputs": layers * link + batch, "gradients": layers * link}
        if name in ("zero2", "fsdp"):
            rule["O"] = 2 / n
        for label, width in found:
            if name == "slow" and label == "O":
                continue
            assert width == pytest.approx(rule[label.strip("123'")] * unit, abs=0.2), (name, label)
        if name == "slow":  # DDP's, and two of a quarter
            assert [width / unit for label, width in found if label == "O"] == pytest.approx(
                [2, 2 / n, 2 / n], abs=0.02)
        else:
            assert len(found) > 6
    numbers = [cell.split("; ") for cell in rows.values()]
    assert numbers == [["2"], ["4"], ["2", "0.5"], ["2"], ["1.5"], ["3"], ["6"], ["0.75"]]


def test_the_lengths_of_the_drawn_steps(drawn):
    """Those of the page's table are those in the diagrams; DP's on a slow link is not drawn."""
    rows = {row[0]: row[1:] for row in table("strategy | step on the fast link")[1:]}
    slow = dict(re.findall(r">(\S+) on a slow link, time to the right: ([\d.]+) units<",
                           drawn["slow"]))
    slow = {name.lower().replace("-", ""): units for name, units in slow.items()}
    for name, (fast, on_slow) in rows.items():
        assert f"time to the right: {fast} units<" in drawn[name]
        if name in slow:
            assert on_slow == slow.pop(name)
    assert not slow
    units = {name: tuple(map(float, cells)) for name, cells in rows.items()}
    assert units["fsdp"][0] == units["ddp"][0] < units["zero2"][0]
    assert units["fsdp"][1] > units["ddp"][1]
    assert units["baseline"][1] == 20 and units["dp"][1] == 77


def test_texts_of_the_diagrams_fit(drawn):
    """Into their boxes and the picture, in DejaVu Sans, which is wider than Helvetica."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    for name, text in drawn.items():
        width = float(re.search(r'width="(\d+)"', text)[1])
        for rect, line in re.findall(r"(<rect.*)?\n(<text.*)", text):
            x, anchor, size, weight, says = re.fullmatch(
                r'<text x="(.*?)" .*?anchor="(.*?)" font-size="(.*?)" .*weight="(.*?)">(.*)</text>',
                line).groups()
            font = FontProperties(family="DejaVu Sans", weight=weight)
            path = TextPath((0, 0), says, size=float(size), prop=font)
            long, x = path.get_extents().width, float(x)
            left = x - {"start": 0, "middle": long / 2, "end": long}[anchor]
            assert left > 0 and left + long < width, (name, says)
            if rect and anchor == "middle":
                [room] = re.findall(r' width="([\d.]+)"', rect)
                assert long < float(room), (name, says)


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
        configs = f"{shlex.quote(str(ROOT))}/accelerate_configs"
        command = command.replace("accelerate_configs", configs)
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
def test_one_task_per_gpu_trains_the_same(cluster, folder):
    """The job of the text on two nodes, with one task on each."""
    [job] = [text for kind, text in BLOCKS if kind == "sh"]
    (folder / "job.sh").write_text(job)
    words = ["--ntasks-per-node=1", "--gres=none", "--output=job.log", "job.sh"]
    number = cluster.submit(*words, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    state, log = cluster.wait(number), (folder / "job.log").read_text()
    assert state == "COMPLETED", log
    losses = [line for line in log.splitlines() if line.startswith("epoch")]
    assert losses == PRINTED.splitlines(), log


def test_the_calls_in_the_table_exist():
    _, *rows = table("| torch | Accelerate")
    columns = list(zip(*rows, strict=True))
    torch_calls, accelerate_calls = (
        re.findall(r"(\w+)\.(\w+)", " ".join(columns[i])) for i in (1, 2))
    assert "torch.cuda.set_device(...)" in " ".join(columns[1]) and torch.cuda.set_device
    assert {name for owner, name in torch_calls if owner == "dist"} > {
        "init_process_group", "destroy_process_group"}
    assert all(hasattr(dist, name) for owner, name in torch_calls if owner == "dist")
    names = {name for owner, name in accelerate_calls if owner == "accelerator"}
    assert len(names) > 10 and all(hasattr(Accelerator, name) for name in names), names
