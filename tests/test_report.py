"""report.py: what is compared with what, what stands first, chance, pictures, what is missing, and
hostile input. Records are invented, and what is expected of them is computed by hand.
"""

import base64
import csv
import html
import itertools
import json
import math
import re
import shutil
import subprocess
import sys

import numpy
import pytest
from conftest import ROOT, rows_of, run
from scipy.stats import dunnett, tukey_hsd

import report
from reporting import grounds, pictures, times

HEAD = "strategy,nodes,gpus_per_node,seconds\n"  # of times taken by hand
PLAN = "run,strategy,nodes,gpus_per_node,repeat,job\n"  # the head of a sweep.csv
VERSIONS = {"torch": "2.15.0", "accelerate": "1.15.0", "deepspeed": None, "transformers": None}
EXAMPLE = ROOT / "docs" / "results" / "report-cpu"
NUMBERS = itertools.count(100)


def run_report(*words, draw=False):
    """report.py's main() in this process, which has imported all; pictures only if they count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", *map(str, words)])
        patch.setattr(report, "draw_workload", report.draw_workload if draw else lambda *_: {})
        report.main()


def record(strategy, devices=1, seconds=100.0, batch=32, nodes=1, **changes):
    """A run record as the scripts leave it, with what the report reads. Other devices have another
    seed and learning rate, which make no other workload.
    """
    data = {"model": "lstm-64", "dataset": "digits", "samples": 1280, "sequence_length": 8}
    data |= {"epochs": 4, "steps": None, "precision": "no", "dynamo": "no", "dropout": 0.1}
    data |= {"seed": devices, "learning_rate": devices / 100} | changes.pop("work", {})
    ranks = []
    for rank in range(1 if strategy == "dp" else devices):
        own = {"rank": rank, "host": f"n{rank}", "real": 118.544, "sys": 3.25}
        own |= {"user": float(next(NUMBERS))}  # or a record is the copy of another one
        ranks.append(own | {"peak_memory_mb": 100 * batch, "memory_before_mb": 0})
    run = {"script": "train_mnist_rnn.py", "status": "completed", "strategy": strategy}
    run |= {"nodes": nodes, "devices": devices, "device_name": "CPU (x86_64)", "threads": 2}
    run |= {"per_device_batch_size": batch, "gradient_accumulation_steps": 1, "parameters": 1000}
    run |= {"global_batch_size": batch * devices, "steps": 5120 // (batch * devices)}
    run |= {"seconds": {"train": seconds, "total": seconds + 10}, "versions": VERSIONS}
    run |= {"samples_per_second": seconds and 5120 / seconds, "argv": ["x.py"]}
    run |= {"loss_history": [[1, 2.3], [2, 2.1]], "resumed_from": None, "profiled": False}
    return run | {"workload": data, "ranks": ranks} | changes


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
    changes)}, and of `more`. Repeats differ by 1 s; of three, the second one has these seconds.
    Those of `together` run after all others.
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
    """The sentences of a report's only workload: at most five."""
    shown = text.split("\n\n")[2]
    assert len(re.findall(r"[.](?= |$)", shown)) <= 5, shown
    return shown


FIRST, SECOND = record("ddp", 2)["ranks"]
OTHERS = [
    ("dataset", {"work": {"dataset": "mnist"}}),
    ("labels", {"work": {"labels": "6c31"}}),  # which the report does not know
    ("threads", {"threads": 1}),
    ("script", {"script": "x.py"}),
    ("parameters", {"parameters": 9}),
    ("device_name", {"device_name": "CPU (another)"}),
    ("device_name", {"ranks": [FIRST, SECOND | {"device_name": "NVIDIA L40S"}]}),
    ("torch", {"versions": VERSIONS | {"torch": "0.1"}}),
]


@pytest.mark.parametrize("name, changes", OTHERS)
def test_different_work_is_never_one_speedup(tmp_path, name, changes):
    rows, text = report_of(tmp_path, base=record("baseline"), other=record("ddp", 2, 50, **changes))
    assert rows["other"]["speedup"] == "" and f"they differ in {name}.\n" in text.replace("\\", "")
    assert "There is no speedup, as there is no run of accelerate_configs/baseline.yaml" in text


def test_a_version_that_is_not_known_differs_from_nothing(tmp_path):
    """DDP does not import DeepSpeed. Runs of two versions of it are no repeats, and each has the
    baseline. The title of a workload says in what it differs from others with one model.
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
    assert "and 200.00 s (batch 16 x 2)" in shown
    assert "The fastest is DDP on 1 x 2 (batch 32), 2.00 times" in shown
    assert "20% faster than DDP on 1 x 2 (batch 16) (" in shown
    same = "than one device with the same"
    words = f"is faster {same} batch per device; ZeRO-3 on 1 x 4 is slower {same} global batch."
    assert f"ZeRO-3 on 1 x 4 {words}" in shown


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
    assert "The fastest is DDP on 1 x 2 (batch 16), 1.67 times" in first_page(text)
    assert "230% faster than DDP on 1 x 2 (batch 4)" in first_page(text)
    assert text.count("They trained on unlike numbers of samples") == 2


def test_variants_of_a_strategy_are_no_repeats(tmp_path):
    """Activation checkpointing is one: compared with the baseline that keeps its activations."""
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


NO_TIMINGS = {  # name: what the record has, and how the report calls it
    "stopped": ({"status": "preempted"}, "preempted: stopped before its end"),
    "failed": ({"status": "failed"}, "failed: broke down"),
    "resumed": ({"resumed_from": "x"}, "resumed: not a timing"),
    "traced": ({"profiled": True}, "profiled: not a timing"),
    "scored": ({"steps": 0}, "evaluated: no training"),
    "died": ({"status": "running", "slurm_job_id": 7}, "no end: .* running: see slurm-7.out"),
}


def test_what_is_no_timing_is_shown_but_not_used(tmp_path):
    """And named in the answer, also where other repeats are left. A copy of a run is no repeat,
    and a folder that is linked is read.
    """
    report_of(tmp_path / "scratch", base=record("baseline"))
    folder, good = tmp_path / "runs", record("ddp", 2, 50)
    folder.mkdir()
    (folder / "again.log").touch()
    (folder / "linked").symlink_to(tmp_path / "scratch")
    (folder / "sweep.csv").write_text(f"{PLAN}good,ddp,1,2,1,7\nzero3-1x2-r1,zero3,1,2,1,8\n")
    runs = {name: record("ddp", 2, **changes) for name, (changes, _) in NO_TIMINGS.items()}
    rows, text = report_of(folder, good=good, again=good, **runs)
    found = {run: (row["repeats"], row["log"]) for run, row in rows.items()}
    assert found == {"linked/base": ("1", ""), "again": ("1", "again.log")}
    lost = "Lost: 4 x DDP on 1 x 2 (failed, no end, preempted, resumed) and ZeRO-3 on 1 x 2 (failed"
    assert f"{lost} or missing, job 8)." in first_page(text) and "| no result |" in text
    for name, (_, words) in NO_TIMINGS.items():
        assert re.search(rf"^- {name} \(ddp, 1 x 2\): {words}$", text, re.M), name
    assert "zero3-1x2-r1 (zero3, 1 x 2): failed or missing, job 8: see zero3-1x2-r1.log" in text
    assert "skipped good/run.json: a copy of again/run.json, and no repeat" in text
    with pytest.raises(SystemExit, match="none of the runs completed"):
        report_of(tmp_path / "bad", failed=runs["failed"])
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "no run.json below"), ("x", "there is no ")):
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            run_report(tmp_path / name)


def test_the_answer_names_its_own_weak_grounds(tmp_path):
    """A cell whose repeats scatter more, one that was not measured in turns, and one with a slow
    host. And what to measure again: after few steps; after a long start, as 80 steps of 64 samples
    at 128 a second are 40 of the 50 s.
    """
    calm = {"base": ("baseline", 1, 100, {}), "fsdp": ("fsdp", 2, 70, {})}
    calm["zero"], ddp = ("zero2", 2, 74, {}), ("ddp", 2, 60, {})
    wide = ("ddp", 2, 60, lambda turn: {"seconds": 60 * 1.1 ** (turn - 1)})
    rows, text = in_turns(tmp_path / "wide", ddp=wide, turns=5, **calm)
    assert "may claim too much: DDP on 1 x 2." in first_page(text)
    assert "repeats scatter more than the others'" in rows["ddp-2"]["note"]
    # Cochran's C of 4 cells with 5 repeats, at 1 %: 0.7212 in his table.
    assert grounds.largest_share(4, 16, 4) == pytest.approx(0.7212, abs=5e-5)

    # The last time, the baseline was measured again after DDP, and others were not.
    again = {"again": record("baseline", 1, 99.5, began="2026-01-02T09:00:00+00:00")}
    for late, more, names in (
        (["ddp"], {}, "DDP on 1 x 2"),
        (["fsdp", "zero", "ddp"], {}, "baseline on 1 x 1"),
        (["ddp"], again, "DDP on 1 x 2, FSDP on 1 x 2 and ZeRO-2 on 1 x 2"),
    ):
        _, text = in_turns(tmp_path / names, ddp=ddp, together=late, more=more, **calm)
        assert f"like a slower strategy: {names}." in first_page(text)

    def on_hosts(*seconds):
        """DDP with repeats of these seconds, every other one on another second host."""
        one, two = record("ddp", 2)["ranks"]
        ranks = [[one, two | {"host": host}] for host in ("n1", "n2")]
        return "ddp", 2, 60, lambda turn: {"ranks": ranks[turn % 2], "seconds": seconds[turn]}

    _, text = in_turns(tmp_path / "slow", ddp=on_hosts(60, 63.1, 60.2, 63.3), turns=4, **calm)
    assert "differ by host: DDP on 1 x 2 (5% longer on n2 than on n1)." in first_page(text)
    by_chance = on_hosts(60, 61.5, 61, 62.2)
    _, text = in_turns(tmp_path / "chance", ddp=by_chance, turns=4, **calm)
    assert "by host" not in text

    runs = {"start": record("fsdp", 2, 50, samples_per_second=128.0), "base": record("baseline")}
    _, text = report_of(tmp_path / "few", **runs, few=record("zero2", 2, 50, steps=29))
    words = "FSDP on 1 x 2 (slow steps cost 20% of the time) and ZeRO-2 on 1 x 2 (29 steps are too"
    assert f"measure again: {words} few)" in first_page(text)


@pytest.mark.parametrize(
    "loss, words", [(math.nan, "nan"), (2.9, "2.9, not 2.1"), (2.25, "2.25, not 2.1"), (2.19, "")]
)
def test_a_cell_that_learned_something_else_is_not_the_fastest(tmp_path, loss, words):
    """Under strong scaling, here with batches of 16 on two devices for 32 on one. One repeat is
    enough.
    """

    def other(turn):
        losses = [[1, 2.3], [2, loss if turn == 2 else 2.1]]
        return {"batch": 16, "loss_history": losses, "work": record("baseline")["workload"]}

    cells = {"base": ("baseline", 1, 100, {}), "ddp": ("ddp", 2, 50, other)}
    cells["fsdp"] = ("fsdp", 2, 60, {"batch": 16})
    _, text = in_turns(tmp_path / "same", **cells)
    shown = first_page(text)
    assert f"The fastest is {'FSDP' if words else 'DDP'} on" in shown
    assert bool(re.search(rf"never the fastest: DDP .* last loss is {words}\)", shown)) == bool(
        words
    )
    assert ("DDP on 1 x 2 and FSDP on 1 x 2 are faster than one" in shown) == (not words)
    cells["ddp"] = "ddp", 2, 50, lambda turn: other(turn) | {"work": {"seed": 7}}
    _, text = in_turns(tmp_path / "seed", **cells)
    assert ("never the fastest" in text) == math.isnan(loss), "another seed has other losses"


def test_more_devices_may_be_slower_and_a_model_may_not_fit_on_one(tmp_path):
    """Of one global batch: FSDP is slower on eight devices than on two. Without a baseline, too,
    there is a fastest.
    """
    sizes = {"two": (2, 258), "four": (4, 200), "eight": (8, 380)}
    cells = {name: ("fsdp", n, time, {"batch": 32 // n}) for name, (n, time) in sizes.items()}
    _, text = in_turns(tmp_path / "alone", **cells)
    assert "The fastest is FSDP on 1 x 4, 29% faster than FSDP on 1 x 2 (" in first_page(text)
    base = {"base": ("baseline", 1, 394, {})}
    _, text = in_turns(tmp_path / "all", **base, **cells)
    shown = first_page(text)
    assert "FSDP on 1 x 8 is faster than one device; FSDP on 1 x 8 is slower than on fewer" in shown
    # That is no comparison with other batches, with other options, or with a wrong loss.
    other = {"strategy_options": {"offload_params": "true", "version": "2"}}
    nan = {"loss_history": [[1, 2.3], [2, math.nan]]}
    for number, change in enumerate(({"batch": 2}, other, nan)):
        two = ("fsdp", 2, 258, {"batch": 16} | change)
        _, text = in_turns(tmp_path / str(number), **base, two=two, eight=cells["eight"])
        assert "slower than on fewer" not in first_page(text), change


def test_pictures_compare_equal_batches(tmp_path, monkeypatch):
    """What a strategy trades, of one batch per device. FSDP on two devices and on four, with one
    global batch, is one line.
    """
    drawn = []
    monkeypatch.setattr(pictures.pyplot, "close", drawn.append)
    runs = named("a baseline 1 100 4, b baseline 1 80 16, c ddp 2 60 4, d fsdp 2 70 4")
    runs |= named("e ddp 2 50 16, f fsdp 2 50 8, g fsdp 4 30 4")
    report_of(tmp_path, draw=True, **runs)
    titled = {figure.axes[0].get_title().splitlines()[1]: figure.axes[0].lines for figure in drawn}
    trade = titled["speed and memory on 1 x 2, batch 4"]
    assert [line.get_xdata().tolist() for line in trade] == [[400]] * 3
    strong = titled["efficiency, global batch fixed (more is better)"]
    assert [len(line.get_xdata()) for line in strong if line.get_linestyle() == "-."] == [2]


def test_single_runs_equal_times_and_two_baselines(tmp_path):
    """What was measured once may be faster than "the fastest". Times that are equal to the digit
    carry no test. The fastest of two baselines is fast by chance, too.
    """
    runs = named("base baseline 1 99, again baseline 1 101, c ddp 2 60, d ddp 2 61")
    rows, text = report_of(tmp_path / "once", **runs, once=record("fsdp", 2, 40.0))
    assert "Of the cells with repeats, the fastest is DDP on 1 x 2" in first_page(text)
    rival = named("other baseline 1 110", strategy_options={"x": 1})
    rivals, text = report_of(tmp_path / "rival", **runs, **rival)
    assert float(rivals["c"]["speedup_to"]) > float(rows["c"]["speedup_to"]) > 0
    assert "in 99.99 s and 110.00 s (x: 1)." in first_page(text)
    runs = named("base baseline, again baseline, c ddp 2 60, d ddp 2 60")
    runs |= named("e fsdp 2 60.00001, f fsdp 2 60.00001")
    shown = first_page(report_of(tmp_path / "same", **runs)[1])
    best = "the best is DDP on 1 x 2, 1.67 times as fast as one device. Mind: repeats are equal to"
    assert f"No test says which strategy is the fastest; {best} the digit" in shown
    # Without repeats of the baseline, too, strategies are compared.
    runs = named("base baseline, c ddp 2 60, d ddp 2 61, e fsdp 2 90, f fsdp 2 91")
    best = "faster than one; the best is DDP on 1 x 2, 1.65 times as fast as one device, and 50%"
    assert f"{best} faster than FSDP on 1 x 2 (" in report_of(tmp_path / "few", **runs)[1]


def test_the_tests_are_scipys_and_share_five_percent_in_a_report(tmp_path):
    """Two workloads, each with Dunnett's test and Tukey's: 1.25 % each. The baseline's spread is in
    the interval of a speedup, which is that of the means of logarithms.
    """
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
    assert f"FSDP on 1 x 2 ({margin:.1%} would be enough)" in text


@pytest.mark.slow
def test_claims_are_false_in_five_percent_of_reports_at_most():
    """By simulation, with the tables of the benchmarks' page. More repeats show more."""
    printed = run([sys.executable, "benchmarks/claims.py"]).out
    assert printed.strip() in (ROOT / "benchmarks" / "README.md").read_text()
    rows = [re.findall(r"[\d.]+", line) for line in printed.split("\n\n")[0].splitlines()[2:]]
    repeats, false, power, _ = zip(*[map(float, row) for row in rows], strict=True)
    assert repeats == (2, 3, 5, 10) and max(false) <= 5
    assert list(power) == sorted(power) and power[-2] > 50 and power[-1] > 90


def test_what_a_report_shows_is_what_its_repeats_carry(tmp_path):
    """DDP is the fastest beyond them; ZeRO-2 and FSDP overlap; ZeRO-3 is slower than a device.
    Where the grounds are not weak, not a word of them.
    """
    times = {"ddp": 55, "fsdp": 71, "zero1": 71.5, "zero2": 72, "mine": 73, "zero3": 111}
    cells = {name: (name, 2, seconds, {}) for name, seconds in times.items()}
    lost = {"lost": record("zero3", 4, nodes=2, status="failed")}
    rows, text = in_turns(tmp_path, more=lost, baseline=("baseline", 1, 100, {}), **cells)
    first = "DDP on 1 x 2, 1.82 times as fast as one device (efficiency 91%), and 29% faster than"
    shown = first_page(text)
    assert shown.startswith(f"The baseline, one device, trains in 100.00 s. The fastest is {first}")
    assert "DDP on 1 x 2, FSDP on 1 x 2, ZeRO-1 on 1 x 2 and 2 more are faster than one de" in shown
    assert "ZeRO-3 on 1 x 2 is slower than one device. Lost: ZeRO-3 on 2 x 2 (failed)." in shown
    assert {row["note"] for row in rows.values()} == {""}
    head, row, last = rows_of(text)[:3]
    assert head[2:] == ["DDP", "FSDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "mine"]
    assert row[:4] == ["1 x 2", "64", "55.0 s, 1.82×, 91 %", "71.0 s, 1.41×, 70 %"]
    assert last == ["2 x 2", "", "", "", "", "", "no result", ""]


@pytest.mark.parametrize("value", [None, "x", -1, 0.5, True, [], ["x"], {"x": 1}], ids=str)
def test_a_wrong_type_in_a_record_skips_this_record(tmp_path, value):
    """In the place of each value of a record: it is in the tables, or skipped with a line that
    names the field.
    """
    good = record("ddp", 2, 50)
    runs = {f"bad-{name}": good | {name: value} for name in good}
    for name in good["workload"]:
        runs[f"bad-work-{name}"] = good | {"workload": good["workload"] | {name: value}}
    rows, text = report_of(tmp_path, good=good, base=record("baseline"), **runs)
    lines = re.findall(r"skipped bad-\S+/run.json: no run record \((\w\S*): .*\)", text)
    assert "base" in rows and len(lines) > 10


EVIL = '</title><script>alert(1)</script><img src=x onerror="alert(1)">'
CODES = "\x1b[2J\x07\u202e\x00\x9b31m"
LINK = "[x](javascript:alert(1)) ![t](http://x/t.png) `a` | b $\\foo{c$ *d* _e_"


def test_no_script_link_code_or_formula_comes_out_of_a_record(tmp_path, capsys):
    """Whatever a run.json, a sweep.csv or a file of times says is shown as it is. But no control
    character reaches the terminal or a file, and no formula a spreadsheet. No file is written
    through a link.
    """
    folder, target = tmp_path / "runs", tmp_path / "target"
    folder.mkdir()
    target.write_text("mine")
    for name in ("report.md", "report.html", "report.csv", "efficiency-5.svg"):
        (folder / name).symlink_to(target)
    work = {"model": "@SUM(1)", "=HYPERLINK(1)": "+1", "dataset": "\t-2", "number": -3}
    runs = {"sums": record("ddp", 2, 50, device_name="=cmd|' /C calc'!A0", work=work)}
    runs["half"] = record("ddp", 2, 50, script="\ud800")  # of a pair: no text
    for number, text in enumerate((EVIL, LINK, CODES)):
        bad = record(text[:60], 2, 50, script=text, device_name=text)
        bad |= {"strategy_options": {text: text}}
        bad["workload"] |= {"model": text, text: text}
        bad["ranks"][0] |= {"host": text, "device_name": text}
        runs |= {f"bad{number}": bad, f"lost{number}": bad | {"status": "failed"}}
        runs[f"status{number}"] = bad | {"status": text}
    (folder / "sweep.csv").write_text(f'{PLAN}{LINK},"{EVIL}",1,2,1,"{LINK}"\n')
    (tmp_path / "t.csv").write_text(f'{HEAD}baseline,1,1,9\n"{LINK[:58]}",1,2,9\n"<b>",1,2,9\n')
    report_of(folder, "--times", tmp_path / "t.csv", draw=True, **runs)
    assert target.read_text() == "mine"
    shown = "".join([*(path.read_text() for path in folder.glob("*.*")), capsys.readouterr().out])
    assert "\\x1b" in shown and not re.search(r"(?!\n)[\x00-\x1f\x7f-\x9f\u202e]", shown)
    cells = [cell for row in csv.reader(open(folder / "report.csv")) for cell in row]
    assert "-3" in cells and {"'@SUM(1)", "'=HYPERLINK(1)", "'+1", "'-2"} <= set(cells)
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@")]
    body = (folder / "report.html").read_text().split("</head>")[1].replace("<wbr>", "")
    known = "body h1 h2 p strong em code div table thead tbody tr th td ul li img html a"
    assert set(re.findall(r"<\s*/?\s*(\w+)", body)) <= set(known.split())
    sources = set(re.findall(r'(?:src|href)="(.*?)[;"]', body))
    assert sources == {"data:image/svg+xml", "data:text/csv"}
    assert html.unescape(body).count(LINK[:44]) > 3 and html.escape(EVIL[:20]) in body
    drawn = "".join(path.read_text() for path in folder.glob("*.svg"))
    assert "<script" not in drawn and LINK[:30] in html.unescape(drawn)


def test_a_record_that_contradicts_itself_or_is_too_long_is_left_out(tmp_path):
    ddp = record("ddp", 2, 50)
    twice = [rank | {"rank": 0} for rank in ddp["ranks"]]
    runs = {
        "ranks: they are not those from 0 to 9": {"devices": 10**10},
        "ranks: they are not those from 0 to 1, each once": {"ranks": ddp["ranks"][:1]},
        "ranks: they are not those": {"ranks": twice},
        "global_batch_size: 2 x 32 are not 63": {"global_batch_size": 63},
        "global_batch_size: 2 x 128": {"gradient_accumulation_steps": 4},
        "strategy_options": {"strategy_options": {"x": "y" * 1_000_000}},
        "workload": {"workload": ddp["workload"] | {f"key{i}": i for i in range(1000)}},
        "seconds: the times of a run have to be": {"seconds": {"train": 0, "total": 9}},
        "seconds.train: Input should be a finite": {"seconds": {"train": math.nan, "total": 9}},
    }
    files = {f"bad{i}": ddp | changes for i, changes in enumerate(runs.values())}
    hostile = ["[" * 100_000, '{"a":' * 9000, "\0", '"x"', "9" * 5000, "{}", '{"status": "comp']
    for i, content in enumerate(hostile):
        (tmp_path / f"hostile{i}").mkdir()
        (tmp_path / f"hostile{i}" / "run.json").write_text(content)
    dp = record("dp", 8, 20)  # one process with eight GPUs
    dp["ranks"][0]["memory_before_mb"] = None  # not known
    rows, text = report_of(tmp_path, base=record("baseline"), good=ddp, dp=dp, **files)
    assert set(rows) == {"base", "good", "dp"} and len(text) < 9000
    for i, words in enumerate(runs):
        assert re.search(rf"skipped bad{i}/run.json: .*{words}", text), words
    assert len(re.findall(r"skipped hostile./run.json.{1,500}$", text, re.M)) == len(hostile)


def test_times_are_read_as_people_write_them(tmp_path):
    """Decimal commas, other separators, capitals, 1.0 nodes; a bad row costs no other one."""
    path = tmp_path / "t.csv"
    for text in (
        "Strategy;Nodes;GPUs_per_node;Seconds\nSingle GPU;1.0;1;0m5,026s\nZeRO-2;1,0;2;0m2,513s\n",
        HEAD.replace(",", "\t") + "baseline\t1\t1\t5.026\nDeepSpeed stage 2\t1\t2\t2.513\n",
        HEAD + "baseline,1,1,0m5,026s\nds-zero2,1,2,0m2,513s\nfsdp,1,2,x\n",
    ):
        path.write_text(text, encoding="utf-8-sig")
        run_report("--times", path, "--output_dir", tmp_path)
        shown = (tmp_path / "report.md").read_text()
        assert rows_of(shown)[1] == ["1 x 2", "2.5 s, 2.00×, 100 %"]
    assert "t.csv, line 4: 'x' is no time such as 186.6 or 3m6.619s" in shown
    # A point among decimal commas may mean thousands, unless other digits or minutes stand by it.
    rows = "baseline;1;1;1.234\nddp;1;2;731,5\nfsdp;1;2;812.25\nzero2;1;2;2m1.234s\n"
    path.write_text(HEAD.replace(",", ";") + rows)
    runs, [note] = times.read_times(path)
    assert [run.seconds for run in runs] == [731.5, 812.25, 121.234]
    assert "line 2: '1.234' is no time: other rows have decimal" in note
    for text, message in (
        ("strategy,nodes,seconds\nddp,1,3\n", "no column gpus_per_node"),
        (HEAD.replace("\n", ",seconds\n"), "the first line names seconds twice"),
        (f"{HEAD}ddp,two,1,12\n", "line 2: nodes has to be a whole number from 1"),
        (HEAD, "there are no times"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match=f"^error: .*{message}.*$"):
            run_report("--times", path)
    names = {"Fully Sharded Data Parallel": "fsdp", "Distributed Data-Parallel": "ddp"}
    names |= {"DeepSpeed ZeRO stage 3 offload": "zero3_offload", "Horovod": "horovod"}
    assert {text: times.name_strategy(text) for text in names} == names
    assert times.parse_seconds("1h2m3.5s") == 3723.5
    for text in ("", "3 m", "-3", "0", "1:58", "nan", None, "2,400", "9" * 400, "1e9"):
        with pytest.raises(ValueError, match="is no time"):
            times.parse_seconds(text)


def make_example(folder):
    shutil.unpack_archive(EXAMPLE / "records.tar.xz", folder / "records", filter="data")
    run_report(folder / "records", "--output_dir", folder, draw=True)


def test_the_example_report_is_what_its_records_give(tmp_path):
    """And nothing was edited by hand. report.html is one file, with report.csv and pictures as
    links by which a reader saves them.
    """
    make_example(tmp_path)
    old, made = ((folder / "report.md").read_text().split() for folder in (EXAMPLE, tmp_path))
    assert old == made
    tables = [csv.reader(open(folder / "report.csv")) for folder in (EXAMPLE, tmp_path)]
    for one, other in zip(*map(itertools.chain.from_iterable, tables), strict=True):
        assert one == other or float(one) == pytest.approx(float(other))
    made = {path.name for path in tmp_path.glob("*.svg")}
    assert made == {path.name for path in EXAMPLE.glob("*.svg")} == {"efficiency.svg", "trade.svg"}
    shown = (tmp_path / "report.html").read_text()
    assert shown.count('src="data:') == shown.count("<img ") == 2
    links = dict(re.findall(r'<a download="(.*?)" href="data:.*?;base64,(.*?)"', shown))
    assert {*links} == {"report.csv", *made} and shown.count("href=") == 3
    for name, data in links.items():
        assert base64.b64decode(data) == (tmp_path / name).read_bytes()


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
    make_example(tmp_path)
    text = html.escape((tmp_path / "report.html").read_text().replace("</body>", LOOK))
    frame = '<iframe width="{}" height="800" style="border: 0" srcdoc="{}"></iframe>'.format
    page = tmp_path / "page.html"
    page.write_text(frame(390, text) + frame(1400, text))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    words = [browser, *words, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True)
    [seen] = re.findall("<title>(.*?);</title>", done.stdout)
    assert sorted(seen.split(";")) == ["1400 wide, 2 pictures", "390 wide, 2 pictures"]
