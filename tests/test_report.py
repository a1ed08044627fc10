"""report.py: what is compared with what, the answer, chance, and pictures. Records are invented,
and what is expected of them is computed by hand. test_records.py has what it reads.
"""

import base64
import csv
import html
import itertools
import json
import math
import re
import shutil
import sys

import numpy
import pytest
from conftest import ROOT, rows_of, run
from scipy.stats import dunnett, tukey_hsd

import report
from reporting import grounds, pictures

VERSIONS = {"torch": "2.15.0", "accelerate": "1.15.0", "deepspeed": None, "transformers": None}
EXAMPLE = ROOT / "docs" / "results" / "report-cpu"
NUMBERS = itertools.count(100)


def run_report(*words, draw=False):
    """Runs report.py's main() in this process, with pictures only if `draw`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", *map(str, words)])
        patch.setattr(report, "draw_workload", report.draw_workload if draw else lambda *_: {})
        report.main()


def record(strategy, devices=1, seconds=100.0, batch=32, nodes=1, **changes):
    """A run record as the scripts leave it, with what the report reads. The seed and the learning
    rate follow the devices: they do not make another workload.
    """
    data = {"model": "lstm-64", "dataset": "digits", "samples": 1280, "sequence_length": 8}
    data |= {"epochs": 4, "steps": None, "precision": "no", "dynamo": "no", "dropout": 0.1}
    data |= {"seed": devices, "learning_rate": devices / 100} | changes.pop("work", {})
    ranks = []
    for rank in range(1 if strategy == "dp" else devices):
        own = {"rank": rank, "host": f"n{rank}", "real": 118.544, "sys": 3.25}
        own |= {"user": float(next(NUMBERS))}  # no record is the copy of another one
        ranks.append(own | {"peak_memory_mb": 100 * batch, "memory_before_mb": 0})
    run = {"script": "train_mnist_rnn.py", "status": "completed", "strategy": strategy}
    run |= {"nodes": nodes, "devices": devices, "device_name": "CPU (x86_64)", "threads": 2}
    run |= {"per_device_batch_size": batch, "gradient_accumulation_steps": 1, "parameters": 1000}
    run |= {"global_batch_size": batch * devices, "steps": 5120 // (batch * devices)}
    run |= {"seconds": {"train": seconds, "total": seconds + 10}, "versions": VERSIONS}
    run |= {"samples_per_second": seconds and 5120 / seconds, "argv": ["x.py"]}
    run |= {"resumed_from": None, "profiled": False, "workload": data, "ranks": ranks} | changes
    return {"loss_history": losses(run["steps"])} | run


def losses(steps, last=2.1):
    """From 2.3 to `last`."""
    return [[1, 2.3], [steps, last]]


def named(text, **changes):
    """{name: record} of each "name strategy devices seconds batch" between commas."""
    words = [part.split() for part in text.split(",")]
    return {name: record(kind, *map(json.loads, rest), **changes) for name, kind, *rest in words}


def report_of(folder, *words, draw=False, **runs):
    """Write these records beside those that the folder has, and make its report: {median run: row
    of report.csv}, and report.md.
    """
    for name, content in runs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").write_text(json.dumps(content))
    run_report(folder, *words, draw=draw)
    with open(folder / "report.csv") as file:
        return {row["run"]: row for row in csv.DictReader(file)}, (folder / "report.md").read_text()


def in_turns(folder, turns=3, together=(), more=None, **cells):
    """The report of runs in turns, a minute after each other: {name: (strategy, devices, seconds,
    changes)}, and of `more`. Repeats differ by 1 s; the second of three has these seconds. Cells
    of `together` run after all others.
    """
    order = [(name, turn) for turn in range(turns) for name in cells]
    order.sort(key=lambda place: place[0] in together)
    runs = more or {}
    for minute, (name, turn) in enumerate(order):
        kind, devices, seconds, changes = cells[name]
        values = {"began": f"2026-01-02T{3 + minute // 60:02}:{minute % 60:02}:00+00:00"}
        values |= {"seconds": seconds + turn - 1}
        values |= changes(turn) if callable(changes) else changes
        runs[f"{name}-{turn}"] = record(kind, devices, **values)
    return report_of(folder, **runs)


def first_page(text):
    """The sentences of a report's only workload: four at most."""
    shown = text.split("\n\n")[2]
    assert len(re.findall(r"[.](?= |$)", shown)) <= 4, shown
    return shown


def answers(text):
    """The rows of the tables of a report's first page, as dicts, with the strategy alone."""
    for block in text.split("# Details")[0].split("\n\n"):
        head, *rows = rows_of(block) or [[]]
        for row in rows:
            yield dict(zip(head, row, strict=True)) | {"strategy": row[0].split(" on ")[0]}


def minds(text):
    """{strategy: its codes in the column *mind*}."""
    return {row["strategy"]: row.get("mind", "") for row in answers(text)}


FIRST, SECOND = record("ddp", 2)["ranks"]
OTHERS = [
    ("checksum", {"work": {"checksum": 6317}}),  # of labels and images
    ("threads", {"threads": 1}),
    ("script", {"script": "x.py"}),
    ("parameters", {"parameters": 9}),
    ("device_name", {"ranks": [FIRST, SECOND | {"device_name": "NVIDIA L40S"}]}),
    ("torch", {"versions": VERSIONS | {"torch": "0.1"}}),
]


@pytest.mark.parametrize("name, changes", OTHERS)
def test_different_work_is_never_one_speedup(tmp_path, name, changes):
    rows, text = report_of(tmp_path, base=record("baseline"), other=record("ddp", 2, 50, **changes))
    assert rows["other"]["speedup"] == "" and f"they differ in {name}.\n" in text.replace("\\", "")
    assert "There is no speedup: this work has no run of accelerate_configs/baseline.yaml" in text


@pytest.mark.parametrize(
    "device, base, ranks, alike",
    [
        ("CPU", 2, (1, 1), True),  # two ranks divide the cores of a laptop
        ("CPU", 4, (4, 4), True),  # Slurm gives as many to each device
        ("CPU", 4, (1, 1), False),  # two of four cores are idle
        ("NVIDIA", 16, (16, 16), True),  # a workstation
        ("NVIDIA", 4, (8, 8), True),  # four for each GPU
        ("NVIDIA", 8, (4, 4), False),
        ("CPU", None, (1, 1), True),  # not known
    ],
)
def test_cores_are_alike_per_device_or_per_node(tmp_path, device, base, ranks, alike):
    """And if they are not known."""
    runs = {"base": record("baseline"), "ddp": record("ddp", 2, 50)}
    for one, cores in zip(runs.values(), ((base,), ranks), strict=True):
        for rank, number in zip(one["ranks"], cores, strict=True):
            rank |= {"cores": number, "host": "n"}
        one["device_name"] = device
    rows, text = report_of(tmp_path, **runs)
    assert rows["ddp"]["speedup"][:4] == ("1.99" if alike else "")
    assert ("they differ in cores." in text) != alike


def test_all_runs_of_a_workload_have_the_same_cores(tmp_path):
    """Ranks with one core do not repeat ranks with two, though the baseline is like both."""
    runs = {"base": record("baseline")} | named("one ddp 2 50, two ddp 2 50, three fsdp 2 50")
    for name, cores in {"base": 2, "one": 1, "two": 2, "three": 1}.items():
        for rank in runs[name]["ranks"]:
            rank |= {"cores": cores, "host": "n"}
    rows, text = report_of(tmp_path, **runs)
    assert (rows["one"]["cores"], rows["one"]["repeats"]) == ("2 per node", "1")
    assert {row["cores"] for row in rows.values()} == {"2 per node", "2 per device"}
    assert "digits, cores 2 per node\n" in text and "digits, cores 2 per device\n" in text


def test_an_unknown_version_is_like_any_other(tmp_path):
    """DDP does not import DeepSpeed. Runs with two versions of it are not repeats, and each has the
    baseline. The titles of workloads say how they differ.
    """
    runs = named("base baseline, b2 baseline 1 101, ddp ddp 2 60")
    for name, version in (("old", "0.17.6"), ("new", "0.19.8")):
        runs[name] = record("zero2", 2, 50, versions=VERSIONS | {"deepspeed": version})
    rows, text = report_of(tmp_path, **runs)
    titles = re.findall("^## (.* on .*)", text.split("# Details")[0], re.M)
    assert sorted(titles) == [f"lstm-64 on digits, deepspeed {old}" for old in ("0.17.6", "0.19.8")]
    for name in ("old", "new"):
        assert (rows[name]["speedup"][:6], rows[name]["repeats"]) == ("2.0099", "1")


def test_the_fastest_baseline_of_equal_work_counts(tmp_path):
    """Of one global batch, 2 x 16 accumulated takes 200 s and 32 x 1 100 s. The fastest cell is
    that with the shortest time, not with the largest speedup over a slow baseline. Four devices
    with 8 samples each are faster than one with 8, and slower than one with 32.
    """
    again = {"gradient_accumulation_steps": 2, "steps": 160, "global_batch_size": 32}
    rows, text = in_turns(
        tmp_path,
        slow=("baseline", 1, 200, {"batch": 16} | again),
        base=("baseline", 1, 100.22, {}),
        small=("baseline", 1, 400, {"batch": 8}),
        strong=("ddp", 2, 60, {"batch": 16}),
        weak=("ddp", 2, 50, {}),
        little=("fsdp", 2, 75.2, {"batch": 8}),
        both=("zero3", 4, 130, {"batch": 8}),
    )
    kinds = "weak_speedup", "strong_speedup"
    found = {run[:-2]: [row[kind][:4] for kind in kinds] for run, row in rows.items()}
    assert found["strong"] == ["", "1.67"] and found["weak"] == ["2.00", ""]
    assert found["little"] == ["5.31", ""] and found["slow"] == ["0.50", "0.50"]
    assert found["both"] == ["3.07", "0.77"]
    shown = first_page(text)
    assert "trains in 400.00 s (batch 8), 100.22 s (batch 32), 200.00 s (batch 16 x 2)." in shown
    assert "fastest is DDP on 1 x 2 (batch 32), 2.00 times" in shown
    assert "it is 20 % faster than DDP on 1 x 2 (batch 16) (" in shown
    verdicts = [row["verdict"] for row in answers(text) if row["strategy"] == "ZeRO-3"]
    assert verdicts == ["faster", "slower"], "than 8 samples, and than 32"


def test_a_speedup_is_that_of_a_sample(tmp_path):
    """With a fixed number of steps, two devices train on twice as many samples: in 120 s for the
    baseline's 100 they are 1.67 times as fast. The shortest time, of small batches, is not the
    fastest.
    """
    large, small = {"batch": 16, "steps": 40}, {"batch": 4, "steps": 40}
    base, weak = ("baseline", 1, 100, large), ("ddp", 2, 120, large)
    cells = {"small": ("baseline", 1, 95, small), "short": ("ddp", 2, 99, small)}
    rows, text = in_turns(tmp_path, base=base, weak=weak, **cells)
    found = {run[:-2]: float(row["speedup"]) for run, row in rows.items()}
    expected = {"base": 1, "small": 1, "weak": 2 * 100 / 120, "short": 2 * 95 / 99}
    assert found == pytest.approx(expected, rel=1e-4)
    assert "fastest is DDP on 1 x 2 (batch 16), 1.67 times" in first_page(text)
    assert "230 % faster than DDP on 1 x 2 (batch 4)" in first_page(text)


def test_variants_of_a_strategy_are_not_repeats(tmp_path):
    """Activation checkpointing is compared with the baseline that keeps its activations."""
    again = named("again baseline 1 125, anew ddp 2 80", activation_checkpointing=True)
    runs = again | named("base baseline, ddp ddp 2 50")
    runs |= named("plain fsdp 2 80, repeat fsdp 2 80", strategy_options={"x": 1})
    runs |= named("other fsdp 2 40", strategy_options={"x": 2})
    rows, _ = report_of(tmp_path / "all", **runs)
    repeats = {run: row["repeats"] for run, row in rows.items()}
    assert repeats == dict.fromkeys(runs.keys() - {"repeat"}, "1") | {"plain": "2"}
    speedups = {run: float(row["speedup"]) for run, row in rows.items()}
    expected = {"base": 1, "again": 0.8, "ddp": 2, "anew": 1.25, "plain": 1.25, "other": 2.5}
    assert speedups == pytest.approx(expected)
    rows, text = report_of(tmp_path / "alone", **again)
    assert rows["anew"]["speedup"] == "" and "without --activation_checkpointing." in text


CALM = {"base": ("baseline", 1, 100, {}), "fsdp": ("fsdp", 2, 70, {})}
CALM |= {"zero": ("zero2", 2, 74, {})}


def test_a_cell_whose_repeats_scatter_more_is_named(tmp_path):
    wide = ("ddp", 2, 60, lambda turn: {"seconds": 60 * 1.1 ** (turn - 1)})
    _, text = in_turns(tmp_path, ddp=wide, turns=5, **CALM)
    assert minds(text) == {"baseline": "", "DDP": "spread", "FSDP": "", "ZeRO-2": ""}
    assert "its repeats do not tell it apart from FSDP on 1 x 2" in first_page(text)
    # Cochran's C of 4 cells with 5 repeats, at 1 %: 0.7212 in his table.
    assert grounds.largest_share(4, 16, 4) == pytest.approx(0.7212, abs=5e-5)


AGAIN = {"again": record("baseline", 1, 99.5, began="2026-01-02T09:00:00+00:00")}


@pytest.mark.parametrize(
    "together, more, names",
    [
        (["ddp"], {}, ["DDP"]),
        (["fsdp", "zero", "ddp"], {}, ["baseline"]),
        (["ddp"], AGAIN, ["DDP", "FSDP", "ZeRO-2"]),  # then the baseline was measured again
    ],
)
def test_cells_that_were_not_measured_in_turns_are_named(tmp_path, together, more, names):
    ddp = ("ddp", 2, 60, {})
    _, text = in_turns(tmp_path, ddp=ddp, together=together, more=dict(more), **CALM)
    assert [name for name, mind in minds(text).items() if mind == "order"] == names


@pytest.mark.parametrize(
    "seconds, note",
    [((60, 63.1, 60.2, 63.3), "5% longer on n2 than on n1"), ((60, 61.5, 61, 62.2), "")],
)
def test_slow_hosts_are_named(tmp_path, seconds, note):
    """Unless the difference may be chance. Every other repeat ran on another second host."""
    ranks = [[FIRST, SECOND | {"host": host}] for host in ("n1", "n2")]

    def of_turn(turn):
        return {"ranks": ranks[turn % 2], "seconds": seconds[turn]}

    rows, text = in_turns(tmp_path, ddp=("ddp", 2, 60, of_turn), turns=4, **CALM)
    assert {row["note"] for row in rows.values() if row["strategy"] == "ddp"} == {note}
    assert minds(text)["DDP"] == ("hosts" if note else "")


def test_runs_that_are_too_short_are_named(tmp_path):
    """80 steps of 64 samples at 128 per second are 40 of the 50 s: the start took the others."""
    runs = {"start": record("fsdp", 2, 50, samples_per_second=128.0), "base": record("baseline")}
    rows, text = report_of(tmp_path, **runs, few=record("zero2", 2, 50, steps=29))
    assert minds(text) == {"baseline": "single", "FSDP": "single, slow", "ZeRO-2": "single, short"}
    assert "slow steps cost 20% of the time" in rows["start"]["note"]


@pytest.mark.parametrize(
    "loss, words",
    [
        (math.nan, "the last loss is nan"),
        (900, "it did not learn: its loss was 2.3 and became 900"),
        (2.3, "it did not learn"),
        (2.25, "a last loss is 2.25, but the baseline's is 2.1"),
        (2.19, ""),
    ],
)
def test_a_cell_that_learned_something_else_is_not_the_fastest(tmp_path, loss, words):
    """One repeat is enough. Under strong scaling, here with batches of 16 on two devices for 32 on
    one, the loss is compared with the baseline's; otherwise with the run's own first loss.
    """
    work = record("baseline")["workload"]

    def other(turn):
        history = losses(160, loss if turn == 2 else 2.1)
        return {"batch": 16, "loss_history": history, "work": work}

    cells = {"base": ("baseline", 1, 100, {}), "ddp": ("ddp", 2, 50, other)}
    cells["fsdp"] = ("fsdp", 2, 60, {"batch": 16})
    rows, text = in_turns(tmp_path / "same", **cells)
    assert f"fastest is {'FSDP' if words else 'DDP'} on" in first_page(text)
    [row] = [row for row in rows.values() if row["strategy"] == "ddp"]
    assert words in row["note"] and minds(text)["DDP"] == ("loss" if words else "")
    cells["ddp"] = "ddp", 2, 50, lambda turn: other(turn) | {"work": {"seed": 7}}
    assert (minds(in_turns(tmp_path / "seed", **cells)[1])["DDP"] == "loss") == (not loss < 2.3)
    weak = {"batch": 32, "loss_history": losses(80, loss)}
    cells = {"base": cells["base"], "ddp": ("ddp", 2, 50, weak), "fsdp": ("fsdp", 2, 60, {})}
    _, text = in_turns(tmp_path / "weak", **cells)
    assert f"fastest is {'DDP' if loss < 2.3 else 'FSDP'} on" in first_page(text)


@pytest.mark.parametrize("turns, loss", [(2, 2.3), (3, 2.25)])
def test_a_baseline_that_did_not_learn_is_named_itself(tmp_path, turns, loss):
    work = record("baseline")["workload"]
    bad = ("baseline", 1, 100, lambda turn: {"loss_history": losses(160, 2.1 if turn else loss)})
    ddp = ("ddp", 2, 50, {"batch": 16, "work": work})
    _, text = in_turns(tmp_path, turns=turns, base=bad, ddp=ddp)
    assert minds(text) == {"baseline": "loss", "DDP": ""}


def test_a_model_may_not_fit_on_one_device(tmp_path):
    """Without a baseline, too, there is a fastest."""
    sizes = {"two": (2, 258), "four": (4, 200), "eight": (8, 380)}
    cells = {name: ("fsdp", n, time, {"batch": 32 // n}) for name, (n, time) in sizes.items()}
    _, text = in_turns(tmp_path, **cells)
    assert "fastest is FSDP on 1 x 4; it is 29 % faster than FSDP on 1 x 2 (" in first_page(text)


def test_pictures_compare_equal_batches(tmp_path, monkeypatch):
    """What a strategy trades, of one batch per device. FSDP on two devices and on four, with one
    global batch, is one line.
    """
    drawn = []
    monkeypatch.setattr(pictures.pyplot, "close", drawn.append)
    runs = named("a baseline 1 100 4, b baseline 1 80 16, c ddp 2 60 4, d fsdp 2 70 4")
    runs |= named("e ddp 2 50 16, f fsdp 2 50 8, g fsdp 4 30 4")
    report_of(tmp_path, draw=True, **runs)
    titled = {figure.get_suptitle().splitlines()[1]: figure.axes[0].lines for figure in drawn}
    trade = titled["speed and memory on 1 x 2, batch 4"]
    assert [line.get_xdata().tolist() for line in trade] == [[400]] * 3
    strong = titled["efficiency, global batch fixed (more is better)"]
    assert [len(line.get_xdata()) for line in strong if line.get_marker() == ""].count(2) == 1
    assert "FSDP, global batch 16" in [line.get_label() for line in strong]
    # Under strong scaling the baseline has the same global batch.
    drawn.clear()
    runs = named("base baseline 1 20 32, c ddp 2 60 16, d fsdp 2 70 16")
    report_of(tmp_path / "strong", draw=True, **runs)
    [trade] = [figure.axes[0].lines for figure in drawn if "memory" in figure.get_suptitle()]
    labels = ["baseline on 1 x 1, batch 32", "DDP", "FSDP"]
    assert [line.get_label() for line in trade] == labels


def test_single_runs_and_equal_times_are_not_tested(tmp_path):
    """A single run may be faster than "the fastest". Equal times say nothing about chance. The
    fastest of two baselines may be fast by chance, so its interval is wider.
    """
    runs = named("base baseline 1 99, again baseline 1 101, c ddp 2 60, d ddp 2 61")
    rows, text = report_of(tmp_path / "once", **runs, once=record("fsdp", 2, 40.0))
    assert "Of the cells with repeats, the fastest is DDP on 1 x 2" in first_page(text)
    assert minds(text)["FSDP"] == "single"
    rival = named("other baseline 1 110", strategy_options={"x": 1})
    rivals, text = report_of(tmp_path / "rival", **runs, **rival)
    assert float(rivals["c"]["speedup_to"]) > float(rows["c"]["speedup_to"]) > 0
    assert "in 99.99 s, 110.00 s (x: 1)." in first_page(text)
    runs = named("base baseline, again baseline, c ddp 2 60, d ddp 2 60")
    runs |= named("e fsdp 2 60.00001, f fsdp 2 60.00001")
    text = report_of(tmp_path / "same", **runs)[1]
    best = "best is DDP on 1 x 2, 1.67 times as fast as one device (efficiency 83 %); no test"
    assert best in first_page(text) and {*minds(text).values()} == {"equal"}
    # Strategies are also compared with each other if the baseline has no repeats.
    runs = named("base baseline, c ddp 2 60, d ddp 2 61, e fsdp 2 90, f fsdp 2 91")
    shown = first_page(report_of(tmp_path / "few", **runs)[1])
    assert "No strategy that learns is shown to be faster on several devices than" in shown
    assert "the best is DDP on 1 x 2, 1.65 times" in shown and "49.6 % faster than FSDP on" in shown


def test_the_tests_are_scipys_and_share_five_percent_in_a_report(tmp_path):
    """Two workloads, each with Dunnett's test and Tukey's: 1.25 % each."""
    seconds = {"baseline": (100, 103, 99), "ddp": (91, 90, 88), "fsdp": (97, 99, 96, 98)}
    runs = {}
    for name, values in seconds.items():
        for number, value in enumerate(values):
            for script in ("a.py", "b.py"):
                run = record(name, 1 if name == "baseline" else 2, float(value), script=script)
                runs[f"{script}-{name}-{number}"] = run
    rows, text = report_of(tmp_path, **runs)
    base, *others = (numpy.log(values) for values in seconds.values())
    # scipy's test draws random numbers; ours does not.
    low, high = dunnett(*others, control=base, rng=0).confidence_interval(1 - 0.05 / 4)
    for i, strategy in enumerate(("ddp", "fsdp")):
        row = next(row for row in rows.values() if row["strategy"] == strategy)
        ends = [float(row["speedup_from"]), float(row["speedup_to"])]
        assert ends == pytest.approx([math.exp(-high[i]), math.exp(-low[i])], rel=2e-3)
        gain = math.exp(base.mean() - others[i].mean())
        assert float(row["speedup"]) == pytest.approx(gain, rel=1e-9)
        assert row["sure"] == ("faster" if strategy == "ddp" else "")
    low, high = tukey_hsd(*others).confidence_interval(1 - 0.05 / 4)
    margin = math.expm1((high[0, 1] - low[0, 1]) / 2)
    assert f"FSDP on 1 x 2 ({100 * margin:.3g} % would be enough)" in text


@pytest.mark.slow
def test_claims_are_false_in_five_percent_of_reports_at_most():
    """By simulation, with the tables of the benchmarks' page. More repeats show more."""
    printed = run([sys.executable, "benchmarks/claims.py"]).out
    assert printed.strip() in (ROOT / "benchmarks" / "README.md").read_text()
    rows = [re.findall(r"[\d.]+", line) for line in printed.split("\n\n")[0].splitlines()[2:]]
    repeats, false, power, _ = zip(*[map(float, row) for row in rows], strict=True)
    assert repeats == (2, 3, 5, 10) and max(false) <= 5
    assert list(power) == sorted(power) and power[-2] > 50 and power[-1] > 90


def test_the_answer_and_its_table(tmp_path):
    """DDP is the fastest, ZeRO-3 is slower than one device, and nothing weakens this."""
    times = {"ddp": 55, "fsdp": 71, "zero2": 72, "zero3": 111}
    cells = {name: (name, 2, seconds, {}) for name, seconds in times.items()}
    lost = {"lost": record("zero3", 4, nodes=2, status="failed")}
    rows, text = in_turns(tmp_path, more=lost, baseline=("baseline", 1, 100, {}), **cells)
    shown = first_page(text)
    lead = "The baseline, one device, trains in 100.00 s. Of the cells with repeats, the fastest is"
    best = "DDP on 1 x 2, 1.82 times as fast as one device (efficiency 91 %); it is 29.1 % faster"
    assert shown.startswith(f"{lead} {best} than FSDP on 1 x 2 (")
    assert shown.endswith("). Missing: ZeRO-3 on 2 x 2 (failed).")
    assert {row["note"] for row in rows.values()} == {""}
    base, ddp, *others = answers(text)
    names = "strategy and shape|verdict|global batch|seconds|speedup|from-to|efficiency|strategy"
    assert "|".join(ddp) == names
    assert [*ddp.values()][:5] == ["DDP on 1 x 2", "faster", "64", "54.99", "1.82"]
    assert (ddp["efficiency"], ddp["verdict"], base["verdict"]) == ("91 %", "faster", "")
    verdicts = {row["strategy"]: row["verdict"] for row in others}
    assert verdicts.pop("ZeRO-3") == "slower" and {*verdicts.values()} == {"faster"}


def test_an_efficiency_above_one_is_named(tmp_path):
    """If the whole interval is."""
    runs = named("base baseline, b2 baseline 1 101, c ddp 2 40, d ddp 2 40.1, e fsdp 2 60")
    rows, text = report_of(tmp_path, **runs)
    assert minds(text) == {"baseline": "", "DDP": "over", "FSDP": "single"}
    assert re.match("efficiency of at least 1[12]", rows["c"]["note"])


def test_the_example_report_is_what_its_records_give(tmp_path):
    """report.html is one file, pictures included."""
    shutil.unpack_archive(EXAMPLE / "records.tar.xz", tmp_path / "records", filter="data")
    run_report(tmp_path / "records", "--output_dir", tmp_path, draw=True)
    old, made = ((folder / "report.md").read_text().split() for folder in (EXAMPLE, tmp_path))
    assert old == made
    tables = [csv.reader(open(folder / "report.csv")) for folder in (EXAMPLE, tmp_path)]
    for one, other in zip(*map(itertools.chain.from_iterable, tables), strict=True):
        assert one == other or float(one) == pytest.approx(float(other))
    made = {path.name for path in tmp_path.glob("*.svg")}
    assert made == {path.name for path in EXAMPLE.glob("*.svg")} == {"efficiency.svg", "trade.svg"}
    shown = (tmp_path / "report.html").read_text()
    assert shown.count('src="data:') == shown.count("<img ") == 2
    for name in made:
        assert base64.b64encode((tmp_path / name).read_bytes()).decode() in shown


LOOK = """<script>addEventListener("load", () => {
const drawn = [...document.images].filter(image => image.naturalWidth > 99).length;
top.document.title += `${document.documentElement.scrollWidth} wide, ${drawn} pictures;`;
}); </script></body>"""


@pytest.mark.slow
def test_a_browser_shows_the_html(tmp_path):
    """On a phone and on a screen, all pictures of report.html are drawn, and nothing is wider than
    the window. Here these are frames, as Chromium makes no window as narrow as a phone.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium is installed (Debian's package chromium)")
    shutil.unpack_archive(EXAMPLE / "records.tar.xz", tmp_path / "records", filter="data")
    run_report(tmp_path / "records", "--output_dir", tmp_path, draw=True)
    text = html.escape((tmp_path / "report.html").read_text().replace("</body>", LOOK))
    frame = '<iframe width="{}" height="800" style="border: 0" srcdoc="{}"></iframe>'.format
    page = tmp_path / "page.html"
    page.write_text(frame(390, text) + frame(1400, text))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    words = [browser, *words, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = run(words)
    [seen] = re.findall("<title>(.*?);</title>", done.out)
    assert sorted(seen.split(";")) == ["1400 wide, 2 pictures", "390 wide, 2 pictures"]
