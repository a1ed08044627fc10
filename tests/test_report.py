"""report.py: what is compared with what, what stands first, pictures, what is missing, formulas.
Records are invented, and what is expected of them is computed by hand.
"""

import csv
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import numpy
import pytest
from conftest import ROOT, launch

import report
from planning import facts, links, prediction
from reporting import comparing, pictures, records, runs, sentences, splitting, tables, times

HEAD = "strategy,nodes,gpus_per_node,seconds\n"  # of times taken by hand
GPU = {"device_name": "NVIDIA H200"}
OTHER_WORK = {"dataset": "mnist", "model": "lstm-128", "samples": 640, "epochs": 5}
NO_PEAK = {"rank": 0, "host": "n", "peak_memory_mb": None, "real": 1.0, "user": 1.0, "sys": 1.0}
NUMBERS = itertools.count(100)


def run_report(*words, draw=False):
    """report.py's main() in this process, which has imported all; pictures only if they count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report.py", *map(str, words)])
        patch.setattr(report, "plot_work", report.plot_work if draw else lambda *_: {})
        report.main()


def record(strategy, devices=1, seconds=100.0, batch=32, nodes=1, **changes):
    """A run record as the scripts leave it, with what the report reads. Other devices have another
    seed, dropout and learning rate, which make no other workload.
    """
    data = {"model": "lstm-64", "dataset": "digits", "samples": 1280, "sequence_length": 8}
    length = {"epochs": 4, "steps": None, "precision": "no"}
    other = {"seed": devices, "dropout": devices / 10, "learning_rate": devices / 100}
    ranks = []
    for rank in range(devices):
        own = {"user": float(next(NUMBERS))}  # or a record is the copy of another one
        own |= {"rank": rank, "host": f"n{rank}", "peak_memory_mb": 500 + rank}
        ranks.append(own | {"real": 118.544, "sys": 3.25})
    end = {"status": "completed", "resumed_from": None, "profiled": False}
    place = {"strategy": strategy, "nodes": nodes, "devices": devices, "ranks": ranks}
    sizes = {"per_device_batch_size": batch, "gradient_accumulation_steps": 1, "parameters": 1000}
    sizes |= {"global_batch_size": batch * devices, "steps": 5120 // (batch * devices)}
    seen = {"samples_per_second": seconds and 5120 / seconds, "loss_history": [[1, 2.3], [2, 2.1]]}
    spent = {"seconds": {"train": seconds, "total": seconds + 10}, "versions": {"torch": "2.15.0"}}
    machine = {"script": "train_mnist_rnn.py", "device_name": "CPU (x86_64)", "threads": 2}
    work = {"workload": data | length | other | changes.pop("work", {})}
    return end | place | sizes | seen | spent | machine | work | changes


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


def shown_in(rows, *columns):
    """{"run cell cell"} of report.csv, with the cells of these columns."""
    return {" ".join([run, *map(row.get, columns)]).strip() for run, row in rows.items()}


def rows_in(text, column):
    """{(first cell, second one): {column: cell}} of the table that has this column, or {}."""
    for block in text.split("\n\n"):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        if column in lines[0]:
            return {
                tuple(row[:2]): dict(zip(lines[0][2:], row[2:], strict=True)) for row in lines[2:]
            }
    return {}


def first_page(text):
    """The sentences of a report's only workload: at most five."""
    shown = text.split("\n\n")[2]
    assert len(re.findall(r"[.](?= |$)", shown)) <= 5, shown
    return shown


def check(folder, latency=0.005, nodes=1, processes=2):
    """A check.json as sbatch/check.py leaves it, of 16,000 bytes/s."""
    folder.mkdir(parents=True, exist_ok=True)
    path, link = folder / "check.json", links.link_of(16000.0, latency)
    path.write_text(json.dumps(link | {"nodes": nodes, "processes": processes, "backend": "gloo"}))
    return path


def event(name, kind, start, end):
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start}


def test_medians_speedups_and_the_median_run(tmp_path):
    """Medians 100 and 60: a speedup of 100 / 60 on two devices."""
    (tmp_path / "d2.log").touch()
    runs = named("b1 baseline 1 90, b2 baseline, b3 baseline 1 130")
    runs |= named("d2 ddp 2 60, d3 ddp 2 80", nodes=2)
    runs |= named("d1 ddp 2 55", nodes=2, work={"compute_dtype": "no"})  # as without it
    rows, text = report_of(tmp_path, **runs)
    assert list(rows) == ["b2", "d2"] and "1m58.544s" in text
    shown = [*rows_in(text, "median run")["ddp", "2 x 1"].values()][2:]
    assert shown[:6] == "3 750.00 85.3 60.00 55.00-80.00 70.0".split()
    assert shown[6:] == ["501", "repeats differ by 42%", "d2", "d2.log"]
    shown = [*rows_in(text, "sure")["ddp", "2 x 1"].values()][2:]
    assert shown == "100.00 60.00 1.67 1.25-1.82 83% 1.67 faster".split()


@pytest.mark.parametrize(
    "changes, name",
    [
        *(({"work": {name: value}}, name) for name, value in OTHER_WORK.items()),
        ({"work": {"precision": "bf16"}}, "precision, compute_dtype"),
        ({"threads": 1}, "threads"),
        ({"work": {"compute_dtype": "bf16"}}, "compute_dtype"),
        ({"script": "x.py"}, "script"),
        ({"device_name": "CPU (another)"}, "device_name"),
        ({"versions": {"torch": "2.8"}}, "torch"),
        ({"work": {"epochs": None, "steps": 40}}, "epochs, steps"),
    ],
)
def test_different_work_is_never_one_speedup(tmp_path, changes, name):
    rows, text = report_of(tmp_path, base=record("baseline"), other=record("ddp", 2, 50, **changes))
    assert rows["other"]["speedup"] == "" and f"they differ in {name}.\n" in text
    assert "There is no speedup, as there is no run of accelerate_configs/baseline.yaml" in text


def test_the_two_kinds_of_scaling_are_told_apart(tmp_path):
    runs = named("base baseline, weak ddp 2 50, strong ddp 2 80 16, neither ddp 2 70 8")
    rows, text = report_of(tmp_path / "cpu", **runs)
    fixed = {"base itself 1.0", "weak batch per device 2.0", "strong global batch 1.25", "neither"}
    assert shown_in(rows, "fixed", "speedup") == fixed
    weak, strong, other = text.split("**")[2], text.split("**")[4], text.split("without a ")[1]
    for part, cell in ((weak, "50.0 s, 2.00×, 100 %"), (strong, "80.0 s, 1.25×, 62 %")):
        assert [*rows_in(part, "DDP").values()] == [{"DP": "needs two GPUs", "DDP": cell}]
    assert "baseline, 8 samples per device and step:" in other and "| 70.0 s " in other
    # 156 samples make 19 steps of 8 an epoch, but 9 of 16: 5 % less work for two devices.
    runs = named("base baseline 1 100 8, strong fsdp 2 50 4", steps=6 * 19)
    rows, _ = report_of(tmp_path / "uneven", **runs, **named("weak ddp 2 50 8", steps=6 * 9))
    assert [rows[run]["speedup"] for run in ("base", "weak", "strong")] == ["1.0", "", "2.0"]
    # With GPUs, processes have as many threads as Slurm granted.
    runs = named("base baseline", threads=4, **GPU) | named("dp dp 2 50", threads=8, **GPU)
    rows, _ = report_of(tmp_path / "gpu", **runs)
    assert rows["dp"]["speedup"] == "2.0"


def test_the_fastest_baseline_of_equal_work_counts(tmp_path):
    """Of one global batch, 4 x 8 accumulated takes 200 s and 32 x 1 100 s. The fastest cell is that
    with the shortest time, not with the largest speedup over a slow baseline; seconds and speedups
    of the first page are those of all steps.
    """
    again = {"gradient_accumulation_steps": 4, "steps": 160, "global_batch_size": 32}
    sizes = [{"dp_replicate_size": number, "dp_shard_size": 2} for number in (2, 1)]
    runs = {
        "slow": ("baseline", 1, 200, 8, again),
        "base": ("baseline", 1, 100.22, 32, {}),
        "small": ("baseline", 1, 400, 8, {}),
        "strong": ("ddp", 2, 60, 16, {"samples_per_second": 5120 / 30}),
        "weak": ("ddp", 2, 50, 32, {"samples_per_second": 5120 / 26}),
        "little": ("fsdp", 2, 75.2, 8, {}),
        "zero": ("zero1", 2, 70, 32, {}),
        "hsdp": ("hsdp", 4, 70, 32, {"strategy_options": sizes[0]}),
        "other": ("hsdp", 2, 71, 32, {"strategy_options": sizes[1]}),
    }
    records = {
        f"{name}{more}": record(strategy, devices, seconds + more / 10, batch=batch, **changes)
        for name, (strategy, devices, seconds, batch, changes) in runs.items()
        for more in (-1, 0, 1)
    }
    rows, text = report_of(tmp_path, **records)
    found = {
        run[:-1]: (row["weak_speedup"][:4], row["strong_speedup"][:4]) for run, row in rows.items()
    }
    assert found["strong"] == ("", "1.67") and found["weak"] == ("2.00", "")
    assert found["little"] == ("5.31", "") and found["slow"] == ("0.50", "0.50")
    shown = first_page(text)
    assert "The fastest is DDP on 1 x 2 (batch 32), 2.00 times" in shown
    assert "20% faster than DDP on 1 x 2 (batch 16)" in shown
    tables_of = text.split("# Details")[0].split("**Weak scaling**, ")[1:]
    weak = next(part for part in tables_of if part.startswith("32"))
    assert rows_in(weak.split("**Strong")[0], "HSDP") == {
        ("1 x 2", "64"): {"DP": "needs two GPUs", "DDP": "50.0 s, 2.00×, 100 %"}
        | {"ZeRO-1": "70.0 s, 1.43×, 72 %", "HSDP": "71.0 s, 1.41×, 71 %"},
        ("1 x 4", "128"): {"DP": "needs two GPUs", "DDP": "", "ZeRO-1": ""}
        | {"HSDP": "70.0 s, 1.43×, 36 %"},
    }
    assert "| 60.0 s, 1.67×, 84 % |" in text.split("**Strong scaling**, 32 ")[1]
    assert rows_in(text, "of steady steps")["ddp", "1 x 2"]["of steady steps"] == "3.85"
    assert "DDP on 1 x 2 (batch 32) (the start took 48%)" in text or "cells are not safe" in text


def report_by_hand(times):
    """The workload of times that were taken by hand, as {strategy: seconds}; on two devices, but
    for the baseline.
    """
    work = runs.Work("by hand")
    taken = []
    for name, of_name in times.items():
        setting = runs.Setting(name, 1, 1 if name == "baseline" else 2)
        for number, seconds in enumerate(of_name):
            figures = runs.Figures(seconds=float(seconds))
            taken.append(runs.Run(f"{name}{number}", work, setting, figures=figures))
    return comparing.find_workloads(taken)[0]


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_claims_are_false_in_five_percent_of_reports_at_most(repeats):
    """Four strategies and a baseline that are equally fast, with 3 % of noise; and of a strategy
    that takes half of the time nearly every report says so.
    """
    random, count, claims = numpy.random.default_rng(1), 400, {"equal": 0, "faster": 0}
    names = ("baseline", "ddp", "fsdp", "zero2", "zero3")
    for _ in range(count):
        for kind, ddp in (("equal", 100), ("faster", 50)):
            times = {name: random.normal(100, 3, repeats) for name in names}
            times["ddp"] *= ddp / 100
            shown = " ".join(sentences.sentences(report_by_hand(times), []))
            claimed = "gain" in shown or "slower" in shown or "fastest" in shown
            claims[kind] += claimed if kind == "equal" else "The fastest is DDP" in shown
    assert claims["equal"] / count <= 0.05 and claims["faster"] / count > 0.95, claims


def test_variants_of_a_strategy_are_no_repeats(tmp_path):
    """Recomputing is one: compared with the baseline that keeps its activations."""
    options = ("reshard_after_forward", "offload_params", "version")
    both, free = (dict.fromkeys(options, value) for value in ("true", "false"))
    plain = {"reshard_after_forward": "true", "version": "2"}
    again = named("again baseline 1 125, anew ddp 2 80", activation_checkpointing=True)
    runs = again | named("base baseline, ddp ddp 2 50")
    runs |= named("other fsdp 2 80", strategy_options=plain | {"state_dict_type": "FULL"})
    runs |= named("plain fsdp 2 80, repeat fsdp 2 80", strategy_options=plain)
    runs |= named("offload fsdp 2 80", strategy_options=both)
    runs |= named("keep fsdp 2 50", strategy_options=free)
    rows, text = report_of(tmp_path / "all", **runs)
    shown = {"base baseline 1 1.0", "again baseline 1 0.8", "ddp ddp 1 2.0", "anew ddp 1 1.25"}
    shown |= {"plain fsdp 2 1.25", "other fsdp 1 1.25", "keep fsdp_keep 1 2.0"}
    shown |= {"offload fsdp_offload 1 1.25"}
    assert shown_in(rows, "strategy", "repeats", "speedup") == shown
    assert '| fsdp #1 (state_dict_type: "FULL")' in text and "| fsdp #2 (state_dict_type: n" in text
    assert "| FSDP keep " in text and "| FSDP #2 " in text
    assert "version" not in text and "| ddp  " in text and "| ddp, recomputing  " in text
    rows, text = report_of(tmp_path / "alone", **again)
    assert rows["anew"]["speedup"] == "" and "without --activation_checkpointing." in text


def test_what_is_no_timing_is_shown_but_not_used(tmp_path):
    columns = "run,strategy,nodes,gpus_per_node,repeat,job\n"
    files = {
        "half/run.json": '{"status": "comp',
        "cut/sweep.csv": f"{columns}ddp-1x2-r1,ddp,1\nd",
        "sweep.csv": f"{columns}good,ddp,1,2,1,7\nzero3-1x2-r1,zero3,1,2,1,8\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rows, text = report_of(
        tmp_path,
        **named("base baseline, good ddp 2 50, zero ddp 2 0, nan ddp 2 NaN"),
        odd={"status": 1},
        stopped=record("ddp", 2, status="preempted"),
        failed=record("ddp", 2, status="failed"),
        resumed=record("ddp", 2, resumed_from="x"),
        traced=record("ddp", 2, profiled=True),
        died=record("zero2", 2, 0, status="running", slurm_job_id=7),
        nobody=record("ddp", ranks=[{"peak_memory_mb": 3}]),
    )
    assert list(rows) == ["base", "good"] and "good (" not in text
    for line in (
        "stopped (ddp, 1 x 2): stopped before its end",
        "failed (ddp, 1 x 2): broke down",
        "resumed (ddp, 1 x 2): resumed: not a timing",
        "traced (ddp, 1 x 2): profiled",
        "died (zero2, 1 x 2): died, or is still running: see slurm-7.out",
        *(f"skipped {name}/run.json" for name in ("half", "odd", "nan", "zero", "nobody")),
        "zero3-1x2-r1 (zero3, 1 x 2): failed or missing, job 8: see zero3-1x2-r1.log",
        "skipped cut/sweep.csv",
        "no result of ZeRO-2 on 1 x 2 and ZeRO-3 on 1 x 2",
    ):
        assert line in text


def test_a_report_lies_with_its_runs(tmp_path, monkeypatch):
    """With the page's commands, too. A compressed folder is read as it is: it lies beside it."""
    monkeypatch.chdir(tmp_path)
    check(tmp_path / "runs" / "check-ddp-1234")
    (tmp_path / "runs" / "ddp.log").touch()
    (tmp_path / "times.csv").write_text(f"{HEAD}baseline,1,1,3m6.619s\n")
    report_of(tmp_path / "runs", base=record("baseline"), ddp=record("ddp", 2, 60))
    run_report(shutil.make_archive(str(tmp_path / "packed" / "a"), "xztar", tmp_path / "runs"))
    found = [(tmp_path / name / "report.csv").read_text() for name in ("runs", "packed")]
    assert found[0] == found[1] and ",ddp.log," in found[0]
    commands = re.findall(r"^python report.py (.*)$", (ROOT / "docs/report.md").read_text(), re.M)
    for words in commands:
        written = tmp_path / ("" if "--times" in words else "runs") / "report.md"
        written.unlink(missing_ok=True)
        run_report(*words.split())
        assert written.exists() and len(commands) >= 3


def test_copies_failures_and_links_to_folders(tmp_path, capsys):
    """A copy of a run is no repeat; a single run, and a folder that is linked, are read; where
    nothing completed the report says so and exits with 1.
    """
    outside = tmp_path / "scratch"
    report_of(outside, base=record("baseline"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(outside)
    ddp = record("ddp", 2, 50, slurm_job_id=7)
    rows, text = report_of(tmp_path / "runs", ddp=ddp, copied=ddp)
    assert {run: row["repeats"] for run, row in rows.items()} == {"linked/base": "1", "copied": "1"}
    assert "skipped ddp/run.json: a copy of copied/run.json, and no repeat" in text
    (tmp_path / "runs" / "ddp.log").touch()
    rows, _ = report_of(tmp_path / "runs" / "ddp")
    assert rows["ddp"]["log"] == "../ddp.log"
    with pytest.raises(SystemExit, match="none of the runs completed"):
        report_of(tmp_path / "bad", failed=record("ddp", 2, status="failed"))
    assert "failed (ddp, 1 x 2): broke down" in capsys.readouterr().out
    long = f"{sys.executable} report.py {tmp_path}/runs --output_dir {tmp_path}/out | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", long], cwd=ROOT, capture_output=True)
    assert (done.stdout, done.stderr, done.returncode) == (b"# Report\n", b"", 0)


def paths_of(value, path=()):
    """The places of all values in a record, as tuples of keys."""
    children = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        children = enumerate(value)
    return [path, *(place for key, child in children for place in paths_of(child, (*path, key)))]


def test_a_wrong_type_in_a_record_skips_this_record(tmp_path):
    """Each value of a record, replaced by values of other types: such a record is in the tables, or
    skipped with a line that names the field.
    """
    options = {"overlap_comm": True, "dp_shard_size": 2, "reduce_bucket_size": 9}
    good = record("ddp", 2, 50, strategy_options=options, tensors=[1, 2])
    wrong = [None, "x", -1, 0.5, True, [], ["x"], {"x": 1}]
    places = paths_of(good)[1:]
    for number, (place, value) in enumerate(itertools.product(places, wrong)):
        content = json.loads(json.dumps(good))
        inner = content
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "run.json").write_text(json.dumps(content))
    rows, text = report_of(tmp_path, good=good, base=record("baseline"))
    skipped = re.findall(r"skipped (\d+)/run.json: no run record \(([\w.]+): (.*)\)", text)
    assert "base" in rows and text.count("/run.json: no run record") > 380
    number = places.index(("seconds", "train")) * len(wrong) + 1
    assert (str(number), "seconds.train", "Input should be a valid number") in skipped


def test_doubts_are_printed(tmp_path):
    """A busy machine; GPUs of two models; fewer cores for each rank than the baseline's."""
    busy = record("ddp", 2, 50)
    for rank, seconds in zip(busy["ranks"], (35.0, 45.0), strict=True):
        rank["train_cpu"] = seconds
    mixed, few = record("ddp", 2, 50, **GPU), record("fsdp", 2, 50, **GPU)
    base = record("baseline", **GPU)
    for rank, name in zip(mixed["ranks"], ("NVIDIA H200", "NVIDIA L40S"), strict=True):
        rank["device_name"] = name
    for rank in few["ranks"]:
        rank |= {"host": "n0", "cores": 8}
    more = json.loads(json.dumps(few))
    for rank in more["ranks"] + base["ranks"]:
        rank["cores"] = 16
    rows, text = report_of(tmp_path, busy=busy, mixed=mixed, few=few, more=more, gpu=base)
    assert "DDP on 1 x 2 (a rank computed 70% of the time)" in text
    assert "DDP on 1 x 2 (ranks on different devices: NVIDIA H200, NVIDIA L40S)" in text
    assert "FSDP on 1 x 2 (4 cores a rank) (4 cores a rank, the baseline 16)" in text
    assert {row["cores"] for row in rows.values()} == {"", "4.0", "8.0", "16.0"}  # no repeats


def test_times_are_read_as_people_write_them(tmp_path):
    """Decimal commas, other separators, capitals, 1.0 nodes; a bad row costs no other one."""
    for text in (
        "Strategy;Nodes;GPUs_per_node;Seconds\nSingle GPU;1.0;1;0m5,026s\nZeRO-2;1,0;2;0m2,513s\n",
        HEAD.replace(",", "\t") + "baseline\t1\t1\t5.026\nDeepSpeed stage 2\t1\t2\t2.513\n",
        HEAD + "baseline,1,1,0m5,026s\nds-zero2,1,2,0m2,513s\nfsdp,1,2,x\n",
    ):
        (tmp_path / "t.csv").write_text(text, encoding="utf-8-sig")
        run_report("--times", tmp_path / "t.csv", "--output_dir", tmp_path)
        shown = (tmp_path / "report.md").read_text()
        assert rows_in(shown, "ZeRO-2") == {("1 x 2", "2.5 s, 2.00×, 100 %"): {}}
    assert "t.csv, line 4: 'x' is no time such as 186.6 or 3m6.619s" in shown
    names = {"Fully Sharded Data Parallel": "fsdp", "Distributed Data-Parallel": "ddp"}
    names |= {"DeepSpeed ZeRO stage 3 offload": "zero3_offload", "Horovod": "horovod"}
    assert {text: times.name_strategy(text) for text in names} == names


def test_times_are_read_and_printed_as_time_does():
    for text, seconds in (("186.6", 186.6), (" 3m6.619s", 186.619), ("1h2m3.5s", 3723.5)):
        assert times.parse_seconds(text) == pytest.approx(seconds)
    for text in ("", "3 m", "-3", "0", "1:58", "nan", None, "s", "2,400"):
        with pytest.raises(ValueError, match="is no time"):
            times.parse_seconds(text)
    printed = [tables.as_time_prints(seconds) for seconds in (118.544, 59.9997)]
    assert printed == ["1m58.544s", "1m0.000s"]


@pytest.mark.parametrize(
    "words, times, message",
    [
        ("--times t.csv", "strategy,nodes,seconds\nddp,1,3\n", "no column gpus_per_node"),
        ("--times t.csv", f"{HEAD}ddp,two,1,12\n", "line 2: nodes has to be a whole number from 1"),
        ("--times t.csv", f"{HEAD}ddp,2,0,12\n", "line 2: gpus_per_node has to be a whole number"),
        ("--times t.csv", HEAD, "there are no times"),
        ("--times t.csv", "", "no column strategy, nodes, gpus_per_node, seconds"),
        (".", "", "no run.json below"),
        ("x", "", "there is no x"),
        ("", "", "a folder of runs"),
        ("t.csv", "x", "neither a folder nor a compressed one"),
        (". --predict 8", "", "--predict needs the link"),
        (". --bandwidth 1", "", "a link together"),
        (". --check t.csv", "[]", "t.csv is no check.json of several ranks"),
        (". --predict 1 --bandwidth 1 --latency 1", "", "at least 2 devices"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, words, times, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(times)
    with pytest.raises(SystemExit) as stop:
        run_report(*words.split())
    [line] = str(stop.value).splitlines()
    assert line.startswith("error: ") and message in line


def test_what_a_report_shows_is_what_its_repeats_carry(tmp_path):
    """DDP is the fastest beyond them; ZeRO-2 and FSDP overlap; ZeRO-3 is slower than a device."""
    times = {"baseline": 100, "ddp": 55, "fsdp": 71, "zero2": 72, "zero3": 111}
    steady = {
        f"{name}{more}": record(name, 1 if name == "baseline" else 2, middle + more)
        for name, middle in times.items()
        for more in (-1, 0, 1)
    }
    _, text = report_of(tmp_path, **steady, lost=record("zero3", 4, nodes=2, status="failed"))
    for words in (
        "trains in 100.00 s",
        "The fastest is DDP on 1 x 2, 1.82 times as fast",
        "29% faster than FSDP on 1 x 2.",
        "DDP on 1 x 2, FSDP on 1 x 2 and ZeRO-2 on 1 x 2 gain",
        "ZeRO-3 on 1 x 2 is slower than one device",
        "Mind: no result of ZeRO-3 on 2 x 2.",
    ):
        assert words in first_page(text)
    names = ("DP", "DDP", "FSDP", "ZeRO-2", "ZeRO-3")
    two = "needs two GPUs; 55.0 s, 1.82×, 91 %; 71.0 s, 1.41×, 70 %; 72.0 s, 1.39×, 69 %"
    two = [*two.split("; "), "111.0 s, 0.90×, 45 %"]
    four = ["one node only", "", "", "", "no result"]
    cells = {("1 x 2", "64"): dict(zip(names, two, strict=True))}
    cells |= {("2 x 2", ""): dict(zip(names, four, strict=True))}
    assert rows_in(text, "DDP") == cells
    shown = first_page(report_of(tmp_path, ddp9=record("ddp", 2, 90))[1])
    assert "DDP on 1 x 2, FSDP on 1 x 2 and ZeRO-2 on 1 x 2 are the fastest, 1.39 to 1.80" in shown
    assert "Mind: not safe to rely on: DDP on 1 x 2 (repeats differ by" in shown


def test_what_costs_the_most_and_what_is_in_doubt(tmp_path):
    check(tmp_path / "check")
    runs = named("b1 baseline", steps=24) | named("other fsdp 2 50", steps=12)
    _, text = report_of(tmp_path, **runs, **named("d1 ddp 2 80"))
    assert "Mind: each cell was measured only once" in first_page(text)
    assert "Missing: a run on one device, with the same strategy and batch per device, of" in text
    runs = named("b2 baseline 1 101", steps=24) | named("one ddp, d2 ddp 2 82")
    rows, text = report_of(tmp_path, **runs)
    shown = first_page(text)
    assert "largest cost besides computing: predicted communication for DDP on 1 x 2 (255" in shown
    assert "baseline on 1 x 1 (14 steady steps)" in shown and "measured only once: " in shown
    assert {row["steady_speedup"] for row in rows.values()} == {""}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"samples_per_second": 0.0},
        {"steps": 0, "samples_per_second": None},
        GPU | {"work": {"precision": "fp16"}},
        {"script": "x.py", "work": {"sequence_length": None}},
        {"ranks": [NO_PEAK]},
    ],
)
def test_a_report_of_what_is_hardly_known(tmp_path, changes):
    """No formula of a strategy, no rate, steps, length or peak, no link, a GPU: nothing breaks."""
    check(tmp_path / "check", processes=16)
    check(tmp_path / "old").write_text('{"nodes": 1, "processes": 1, "collectives": null}')
    runs = named("base baseline, one ddp, two ddp 2 60, dp dp 2 60, alone dp 1 99", **changes)
    runs |= named("again baseline 1 120", activation_checkpointing=True, **changes)
    _, text = report_of(tmp_path, "--predict", 4, draw=True, **runs)
    rows = rows_in(text, "unexplained")
    assert "skipped" not in text and "None" not in text
    assert bool(rows) == ("samples_per_second" not in changes)
    for row in rows.values():
        step, *parts = (float(cell or 0) for cell in row.values())
        assert sum(parts) == pytest.approx(step, abs=0.05), row


def pictures_of(folder, **runs):
    """{picture: its axes}, and what `report_of` returns."""
    figures = []
    with mock.patch.object(pictures.pyplot, "close", figures.append):
        rows, text = report_of(folder, draw=True, **runs)
    pictures.pyplot.close("all")
    names = re.findall(r"\]\((.*?)\.svg\)", text)
    return {name: figure.axes[0] for name, figure in zip(names, figures, strict=True)}, rows, text


def test_bars_start_at_zero_and_carry_their_values_and_the_ideal(tmp_path):
    """For two counts of devices, as on a laptop. The parts of DDP's step are 255 ms too large."""
    check(tmp_path / "check")
    history = [[step, step % 2] for step in range(1, 1201)]
    runs = named("ddp ddp 2 60, one ddp 1 120, zero3 zero3 2 200")
    axes, rows, text = pictures_of(tmp_path, **runs, **named("base baseline", loss_history=history))
    for name, column, form in (("time", "seconds", "{:,.2f}"), ("speedup", "speedup", "{:.2f}")):
        values = [float(row[column]) for row in rows.values()]
        assert [bar.get_width() for bar in axes[name].patches] == values
        assert [text.get_text() for text in axes[name].texts] == [*map(form.format, values)]
        names = [text.get_text() for text in axes[name].get_yticklabels()]
        assert names == ["baseline, 1 x 1", "DDP, 1 x 1", "DDP, 1 x 2", "ZeRO-3, 1 x 2"]
    marks = {marks.get_label()[:5]: marks for marks in axes["speedup"].collections}
    assert [set(tick[:, 0]) for tick in marks["ideal"].get_segments()] == [{2}] * 2
    bars = axes["step"].patches
    for place, number in enumerate(axes["step"].texts[:4]):  # above those of the measured steps
        parts = [bar for bar in bars if bar.get_y() == pytest.approx(place - 0.2)]
        ends = [0, *(bar.get_x() + bar.get_width() for bar in parts)]
        assert [bar.get_x() for bar in parts] == pytest.approx(ends[:-1])
        assert number.get_text() == f"{ends[-1]:.1f}" and all(bar.get_width() >= 0 for bar in parts)
    assert axes["step"].texts[2].get_text() == "1005.0"
    for over, name in (("samples trained on", "loss"), ("seconds of training", "loss-seconds")):
        assert list(axes[name].lines[0].get_ydata()) == [0.5] * 60  # the means of pieces
        assert [line.get_linestyle() for line in axes[name].lines] == ["-", "-", "--", "--"]
        assert axes[name].get_xlabel() == over
    for drawn in axes.values():
        assert drawn.get_xlim()[0] <= 0 and re.search("^lstm-64\n.*better", drawn.get_title())
    assert "\n\n![time](time.svg) ![speedup](speedup.svg)\n\n# Details" in text


def test_lines_tell_every_rung_apart_without_colour(tmp_path):
    """From three counts of devices on, by marker and dash; stacked parts differ in hatching."""
    _, markers, dashes = zip(*pictures.STYLES.values(), strict=True)
    rungs = {path.stem for path in ROOT.glob("accelerate_configs/*.yaml")} | {"hsdp"}
    assert set(pictures.STYLES) == rungs == set(comparing.STRATEGIES)
    assert len(set(markers)) == len(set(map(str, dashes))) == len(pictures.STYLES)
    assert len(set(pictures.SHADES)) == len(pictures.SHADES) == len(splitting.PARTS)
    keep = {"strategy_options": {"reshard_after_forward": "false"}}
    kinds = {"plain": {}, "again": {"activation_checkpointing": True}, "keep": keep}
    records = named("nodes fsdp 4 60", nodes=4)
    for name, changes in kinds.items():
        text = f"{name}1 fsdp 1 200, {name}2 fsdp 2 100, {name}4 fsdp 4 50"
        records |= named(text, **changes)
    axes, _, _ = pictures_of(tmp_path, base=record("baseline"), **records)
    lines = {
        line.get_label(): (line.get_marker(), line.get_markersize(), list(line.get_xdata()))
        for line in axes["speedup"].lines
    }
    every = [1, 2, 4]
    drawn = [("o", 5, [1]), ("^", 5, every), ("^", 5, [4]), ("^", 9, every), ("<", 5, every)]
    assert lines.pop("ideal")[2] == every and [*lines.values()] == drawn  # the third: four nodes
    assert {"baseline", "FSDP keep", "FSDP", "FSDP, recomputing"} < set(lines)
    assert len(axes["speedup"].collections) == 4  # a band of the repeats for each


def test_pictures_of_many_cells_stay_legible(tmp_path):
    """Of 120 cells, twice each: at most twelve entries, outside the axes; a line of losses for each
    cell; as SVG. No memory of which formulas know too little, and the table says why.
    """
    kinds = [("baseline", 1), *itertools.product(comparing.STRATEGIES, (1, 2, 4, 8))]
    wide = {"reshard_after_forward": "true", "state_dict_type": "FULL_STATE_DICT"}
    records = {}
    for (name, devices), batch, more in itertools.product(kinds, (8, 16, 32), (0, 1)):
        if name != "baseline" or devices == 1:
            options = wide if batch == 8 and name == "fsdp" else {}
            run = record(name, devices, 900 / devices + more, batch=batch, strategy_options=options)
            for rank in run["ranks"]:
                rank |= {"memory_before_mb": 1, "peak_memory_mb": 9}
            records[f"{name}-{devices}-{batch}-{more}"] = run
    axes, rows, text = pictures_of(tmp_path, **records)
    assert set(axes) == {"time", "speedup", "speedup-strong", "step", "loss", "loss-seconds"}
    assert len(rows) > 100 and "formulas know less than 30% of what was measured" in text
    for name, drawn in axes.items():
        figure = drawn.figure
        [legend] = figure.legends
        title = legend.get_title().get_text()
        assert len(legend.get_texts()) <= 13 and "more in the table" in title
        figure.canvas.draw()
        box = legend.get_window_extent()
        assert not box.overlaps(drawn.get_window_extent()) and box.width <= figure.bbox.width
        labels = [text.get_text() for text in drawn.get_yticklabels() + legend.get_texts()]
        assert max(len(line) for label in labels for line in label.split("\n")) <= 36, labels
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    assert len(axes["loss"].lines) == len({line.get_label() for line in axes["loss"].lines}) == 12


LOOK = """<script>addEventListener("load", () => { top.document.title = JSON.stringify([
[...document.images].map(image => image.naturalWidth > 99 && image.getBoundingClientRect().right),
document.documentElement.scrollWidth, innerWidth, document.querySelectorAll("table").length,
]); });</script></body>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_html(tmp_path, example_records, width):
    """report.html on a phone and on a screen: all pictures are drawn, and nothing is wider than the
    window, here a frame, as Chromium makes no window as narrow as a phone.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium is installed (Debian's package chromium)")
    run_report(example_records, "--predict", 8, "--output_dir", tmp_path / "made", draw=True)
    text = (tmp_path / "made" / "report.html").read_text().replace("</body>", LOOK)
    page, count = tmp_path / "page.html", text.count("<img ")
    frame = f'<iframe width="{width}" height="800" srcdoc="{html.escape(text)}"></iframe>'
    page.write_text(f"<style>iframe {{ border: 0 }}</style>{frame}")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run([browser, *words], capture_output=True, text=True)
    [seen] = re.findall(r"<title>(\[.*?\])</title>", done.stdout)
    pictures_end, content, window, tables_shown = json.loads(seen)
    assert len(pictures_end) == count > 10 and all(0 < end <= window for end in pictures_end), seen
    assert content <= window == width and tables_shown > 10, seen


def test_prediction_beside_measurement(tmp_path):
    """A batch of 32 at 51.2 samples/s is 625 ms for the baseline, 750 ms for FSDP on one device. Of
    1,000 parameters, DDP all-reduces 4,000 bytes: 5 + 250 ms; FSDP gathers and scatters 2,000 each:
    2 x (5 + 125).
    """
    alone = record("fsdp", 1, 120)
    alone["ranks"][0]["train_cpu"] = 90.0  # another program had a quarter of its core
    runs = named("base baseline, one ddp, ddp ddp 2 80, fsdp fsdp 2 90") | {"alone": alone}
    words = ["--predict", 4, "--check", check(tmp_path)]
    rows, text = report_of(tmp_path / "runs", *words, **runs)
    below, above = 1 + prediction.BELOW, 1 + prediction.ABOVE
    busy = below + 0.25 * prediction.BELOW_BUSY, above + 0.25 * prediction.ABOVE_BUSY
    shown = rows_in(text, "miss")
    ends = f"{880 / below:.2f} {880 * above:.2f}", f"{1010 / busy[0]:.2f} {1010 * busy[1]:.2f}"
    assert [*shown["ddp", "1 x 2"].values()] == f"625.00 880.00 {ends[0]} 1000.00 -12%".split()
    assert [*shown["fsdp", "1 x 2"].values()] == f"750.00 1010.00 {ends[1]} 1125.00 -10%".split()
    # At 4 devices 3 hops of 5 ms, or 2 through a tree, and 6,000 bytes; and a doubling more.
    low, high = 1010 / below**2, 1015 * above**2
    efficiencies = f"62% {625 / high:.0%}-{min(1, 625 / low):.0%}"
    shown = rows_in(text, "efficiency, predicted")["ddp", "4"].values()
    assert [*shown] == f"1015.00 {low:.2f}-{high:.2f} {efficiencies}".split()
    assert "by at most 12% (DDP on 1 x 2: too short)" in text
    found = [float(rows["ddp"][name]) for name in splitting.PREDICTED]
    assert found == pytest.approx([0.88, 0.88 / below, 0.88 * above])
    assert text.count("fitted to runs on CPUs over gloo") == 2


def test_a_prediction_keeps_to_its_link_its_variant_and_its_padding(tmp_path):
    """The median of repeated checks, but of no other sweep's; a step with longer windows from a
    longer step.
    """
    for number, latency in enumerate((0.0, 0.075, 9.0)):
        check(tmp_path / f"a/check-1x2-r{number}", latency)
    check(tmp_path / "b/check-1x2-r1", 0.5)
    check(tmp_path / "a/far-check", 0.2, nodes=2)
    text = {"tokens": 4500, "padding_share": 0.1, "steps": 80}
    longer = text | {"padding_share": 0.181818, "steps": 40}
    again = record("ddp", 2, 95, activation_checkpointing=True)
    runs = {"one": record("ddp", 1, 100, **text), "near": record("ddp", 2, 80, **longer)}
    runs |= {"far": record("ddp", 2, 90, nodes=2, **longer), "again": again}
    rows, _ = report_of(tmp_path, **{f"a/{name}": run for name, run in runs.items()})
    found = {run: row["predicted_step_seconds"] for run, row in rows.items()}
    alone = 0.625 * (4500 / (1 - 0.181818) / 40 / 2) / (4500 / 0.9 / 80)
    assert float(found["a/near"]) == pytest.approx(alone + 0.075 + 0.25)
    assert float(found["a/far"]) == pytest.approx(alone + 0.2 + 0.25) and found["a/again"] == ""


def test_the_parts_of_a_step_add_up(tmp_path):
    """80 steps of 1.25 s; 64 samples at 64 a second are 1 s when it is steady."""
    ddp = record("ddp", 2, 80, steps=80)
    ddp["seconds"] |= {"train": 100.0, "loading": 4.0}
    for rank, busy in zip(ddp["ranks"], (80.0, 64.0), strict=True):
        rank["train_cpu"] = busy
    check(tmp_path / "check")
    runs = {"base": record("baseline"), "one": record("ddp", 1, 120), "ddp": ddp}
    parts = rows_in(report_of(tmp_path, **runs)[1], "unexplained")
    # 1250 = 625 baseline + 125 bookkeeping + 255 communication + (80 - 72) / 80 waiting
    # + 50 loading + 250 start - 155
    parts_of_ddp = "1250.00 625.00 125.00 255.00 100.00 50.00 250.00 -155.00".split()
    assert [*parts["ddp", "1 x 2"].values()] == parts_of_ddp
    alone = ["625.00", "625.00", *[""] * 4, "0.00", ""]
    assert [*parts["baseline", "1 x 1"].values()] == alone
    run = records.read_record(tmp_path / "ddp" / "run.json", tmp_path)
    assert run.losses == [(1, 2.3, 21), (2, 2.1, 22)]  # the start before the first step
    traces = tmp_path / "traced" / "traces"
    traces.mkdir(parents=True)
    step = event("ProfilerStep#1", "user_annotation", 0, 100)
    for rank, communicated in ((0, 20), (1, 40)):
        events = [step, event("gloo:all_reduce", "cpu_op", 0, communicated)]
        (traces / f"profile_{rank}.json").write_text(json.dumps({"traceEvents": events}))
    (traces.parent / "run.json").write_text(json.dumps(record("ddp", 2, profiled=True)))
    parts = rows_in(report_of(tmp_path)[1], "unexplained")[("ddp", "1 x 2")]
    assert (parts["communication"], parts["waiting"]) == ("200.00", "100.00")  # 20 %, 30 - 20 %
    assert "predicted communication" not in parts


LOADER = "enumerate(DataLoader)#_Single"
CPU_TRACE = [  # of ten units: loading 1, compute 2 to 6, communication 4 to 9, two of it hidden
    ("ProfilerStep#1", "user_annotation", 0, 10),
    (LOADER, "user_annotation", 0, 1),
    ("aten::mm", "cpu_op", 2, 5),
    ("gloo:all_reduce", "user_annotation", 4, 8),
    ("aten::add", "cpu_op", 4, 6),
    ("gloo:all_reduce", "user_annotation", 7, 9),
]
GPU_TRACE = [  # the CPU is through at 8, the GPU works from 2 to 12: loading 1, compute 3 to 7 and
    # 11 to 12, communication 5 to 10
    ("ProfilerStep#1", "user_annotation", 0, 8),
    ("ProfilerStep#1", "gpu_user_annotation", 2, 12),
    (LOADER, "user_annotation", 0, 2),
    (LOADER, "gpu_user_annotation", 2, 3),
    ("aten::mm", "cpu_op", 2, 8),
    ("cudaLaunchKernel", "cuda_runtime", 2, 3),
    ("gather", "kernel", 2, 3),
    ("Memcpy HtoD", "gpu_memcpy", 3, 4),
    ("gemm", "kernel", 4, 7),
    ("nccl:all_reduce", "gpu_user_annotation", 5, 10),
    ("Memset", "gpu_memset", 11, 12),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 5, 10),
]


@pytest.mark.parametrize(
    "trace, units", [(CPU_TRACE, (2, 2, 3, 1, 2)), (GPU_TRACE, (3, 2, 3, 1, 1))]
)
def test_time_shares_by_hand(trace, units):
    shares = splitting.shares_of([event(*words) for words in trace])
    assert list(shares.values()) == pytest.approx([unit / sum(units) for unit in units])


def test_profiled_runs_show_where_time_goes(tmp_path):
    words = ["--dataset", "digits", "--profile", "--max_train_steps", 20]
    traced = launch("ddp", "train_mnist_rnn.py", tmp_path / "ddp", *words)
    for rank in (0, 1):
        events = splitting.read_events(traced.folder / "traces" / f"profile_{rank}.json")
        assert len({event["name"] for event in events if "ProfilerStep" in event["name"]}) == 5
        shares = splitting.shares_of(events)
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
        assert shares["communication"] + shares["both at once"] > 0.01 < shares["computation"]
    rows, text = report_of(tmp_path)
    assert rows == {} and "| ddp " in text and "profiled: not a timing" in text


def test_mfu_by_hand():
    """The peak of a GPU is never that of a longer or shorter name."""
    row = {"precision": "bf16", "tokens_per_second": 1e5, "devices": 2}
    row |= {"layers": 10, "hidden_size": 1000, "intermediate_size": 3000}
    for name, changes, peak in (
        ("NVIDIA A100-SXM4-80GB", {}, 312e12),
        ("NVIDIA H100 NVL", {}, 835e12),
        ("NVIDIA A100-SXM4-80GB", {"precision": "no"}, 156e12),
        ("NVIDIA H200", {}, 989e12),
        *((name, {}, None) for name in ("NVIDIA L40", "NVIDIA GeForce RTX 4090 D", "CPU")),
        ("NVIDIA H200", {"layers": None}, None),
        ("NVIDIA H200", {"precision": "fp8"}, None),
    ):
        expected = peak and pytest.approx(6 * 1e8 * 1e5 / (2 * peak))
        assert facts.flops_utilization(row | {"device_name": name} | changes) == expected
