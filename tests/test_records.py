"""report.py: what it reads, and what it leaves out. Records that are no timings, that contradict
themselves or are hostile, and times by hand.
"""

import csv
import html
import math
import re

import pytest
from test_report import (
    FIRST,
    HEAD,
    PLAN,
    answers,
    first_page,
    losses,
    record,
    report_of,
    run_report,
)

from reporting import page, times

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
    (folder / "loop").symlink_to(folder)
    (tmp_path / "scratch" / "up").symlink_to(tmp_path)
    (folder / "sweep.csv").write_text(f"{PLAN}good,ddp,1,2,1,7\nzero3-1x2-r1,zero3,1,2,1,8\n")
    runs = {name: record("ddp", 2, **changes) for name, (changes, _) in NO_TIMINGS.items()}
    rows, text = report_of(folder, good=good, again=good, **runs)
    found = {run: (row["repeats"], row["log"]) for run, row in rows.items()}
    assert found == {"linked/base": ("1", ""), "again": ("1", "again.log")}
    ddp = [f"DDP on 1 x 2 ({why})" for why in ("no end", "failed", "resumed", "preempted")]
    missing = ", ".join([*ddp, "ZeRO-3 on 1 x 2 (failed or missing, job 8)"])
    assert f"Missing: {missing}." in first_page(text)
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


DDP = record("ddp", 2, 50)
WRONG = {  # what contradicts itself: in the report's words
    "has not each of 10{10} ranks once": DDP | {"devices": 10**10},
    "has not each of 2 ranks once, from 0 on": DDP | {"ranks": [FIRST]},
    "has not each of 2 ranks": DDP | {"ranks": [FIRST, FIRST]},
    "2 devices are not as many on each of 3 nodes": DDP | {"nodes": 3},
    "global batch is 63, not 2 x 32": DDP | {"global_batch_size": 63},
    "global batch is 64, not 2 x 128": DDP | {"gradient_accumulation_steps": 4},
    "made 80 steps, and its last loss is that of step 8": DDP | {"loss_history": losses(8)},
    "50 s, and the whole run took 49 s": DDP | {"seconds": {"train": 50, "total": 49}},
    "trained for 0 s": DDP | {"seconds": {"train": 0, "total": 9}},
    "17 s, and at its median pace .* 50 s": DDP | {"seconds": {"train": 17, "total": 60}},
    "50 s, and at its median pace .* 25 s": DDP
    | {"samples_per_second": 204.8, "steps_per_second": [3, 3.2, 4]},
    "samples per second are not those": DDP | {"steps_per_second": [3.2]},
    "sample has 6.0 tokens by .* 60.0": DDP | {"tokens": 30720, "tokens_per_second": 6144.0},
    "made 80 steps, and was asked for 40 of 64 samples": record(
        "ddp", 2, 50, work={"max_train_steps": 40}
    ),
    "and was asked for 60 of": record("ddp", 2, 50, work={"num_epochs": 3}),
}


def test_a_record_that_contradicts_itself_is_left_out(tmp_path):
    """And named. Honest records are not: DP's one process, a slow start, an interval that is fast
    as it is short, samples that are no whole number of batches, tokens.
    """
    runs = {f"bad{i}": bad for i, bad in enumerate(WRONG.values())}
    honest = {"dp": record("dp", 8, 20)}
    honest["dp"]["ranks"][0]["memory_before_mb"] = None  # not known
    honest["slow"] = record("ddp", 2, 100, samples_per_second=512, steps_per_second=[0.4, 8, 8])
    honest["fast"] = record("fsdp", 2, 65, samples_per_second=64, steps_per_second=[1, 4, 1])
    honest["rest"] = record("zero2", 2, work={"samples": 1343, "num_epochs": 4})
    honest["text"] = record("zero3", 2, tokens=307_200, tokens_per_second=3072.0)
    rows, text = report_of(tmp_path, base=record("baseline"), **runs, **honest)
    assert set(rows) == {"base", *honest}
    for i, words in enumerate(WRONG):
        assert re.search(rf"- bad{i} \(ddp.*contradicts itself: .*{words}", text), words
    assert "DDP on 1 x 2 (contradicts itself)" in text


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


def test_a_file_that_is_no_record_is_named(tmp_path):
    bad = record("ddp", 2, 50)
    runs = {
        "strategy_options: .*4,000": bad | {"strategy_options": {"x": "y" * 1_000_000}},
        "seconds.train: Input should be a finite": bad
        | {"seconds": {"train": math.nan, "total": 9}},
    }
    hostile = ["[" * 100_000, '{"a":' * 9000, "\0", '"x"', "9" * 5000, "{}", '{"status": "comp']
    for i, content in enumerate(hostile):
        (tmp_path / f"hostile{i}").mkdir()
        (tmp_path / f"hostile{i}" / "run.json").write_text(content)
    files = {f"bad{i}": run for i, run in enumerate(runs.values())}
    rows, text = report_of(tmp_path, base=record("baseline"), **files)
    assert set(rows) == {"base"} and len(text) < 9000
    for i, words in enumerate(runs):
        assert re.search(rf"skipped bad{i}/run.json: .*{words}", text), words
    assert len(re.findall(r"skipped hostile./run.json.{1,500}$", text, re.M)) == len(hostile)


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
    assert sources == {"data:image/svg+xml"}
    assert page.plain("__init__ a_b") == r"\_\_init\_\_ a_b"
    assert html.unescape(body).count(LINK[:44]) > 3 and html.escape(EVIL[:20]) in body
    drawn = "".join(path.read_text() for path in folder.glob("*.svg"))
    assert "<script" not in drawn and LINK[:24] in html.unescape(drawn)


def test_times_are_read_as_people_write_them(tmp_path):
    """Decimal commas, other separators, capitals, 1.0 nodes; a bad row costs no other one."""
    path = tmp_path / "t.csv"
    for text in (
        "Strategy;Nodes;GPUs_per_node;Seconds\nSingle GPU;1.0;1;0m5,026s\nZeRO-2;1,0;2;0m2,513s\n",
        HEAD.replace(",", "\t") + "baseline\t1\t1\t5.026\nDeepSpeed stage 2\t1\t2\t2.513\n",
        HEAD + "baseline,1,1,0m5,026s\nds-zero2,1,2,0m2,513s\nfsdp,1,2,x\nddp,1,2,1,2,3\n",
    ):
        path.write_text(text, encoding="utf-8-sig")
        run_report("--times", path, "--output_dir", tmp_path)
        shown = (tmp_path / "report.md").read_text()
        row = {"strategy": "ZeRO-2", "seconds": "2.51", "speedup": "2.00", "efficiency": "100 %"}
        assert row.items() <= [*answers(shown)][1].items()
    assert "t.csv, line 4: 'x' is no time such as 186.6 or 3m6.619s" in shown
    assert "t.csv, line 5: it has 6 columns, and the first line names 4" in shown
    # A separator in quotes is a part of the name; a number too many is never dropped.
    path.write_text('strategy,seconds,nodes,gpus_per_node\n"mine, new",4,1,2\nddp,186,6,1,2\n')
    [run], [note] = times.read_times(path)
    assert run.setting.strategy == "mine, new" and "line 3: it has 5 columns" in note
    # A point among decimal commas may mean thousands, unless other digits or minutes stand by it.
    rows = "baseline;1;1;1.234\nddp;1;2;731,5\nfsdp;1;2;812.25\nzero2;1;2;2m1.234s\n"
    path.write_text(HEAD.replace(",", ";") + rows)
    runs, [note] = times.read_times(path)
    assert [run.figures.seconds for run in runs] == [731.5, 812.25, 121.234]
    assert "line 2: '1.234' is no time: other rows have decimal" in note
    for text, message in (
        ("strategy,nodes,seconds\nddp,1,3\n", "no column gpus_per_node"),
        (HEAD.replace("\n", ",seconds\n"), "no column seconds, or two"),
        (f"{HEAD}ddp,two,1,12\n", "line 2: nodes has to be a whole number from 1"),
        (HEAD, "there are no times"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match=f"^error: .*{message}.*$"):
            run_report("--times", path)
    names = {"Fully Sharded Data Parallel": "fsdp", "Distributed Data-Parallel": "ddp"}
    names |= {"DeepSpeed ZeRO stage 3 offload": "zero3_offload", "Horovod": "horovod"}
    names |= {"DS-Stage-1": "zero1", "fsdp keep": "fsdp_keep"}
    assert {text: times.name_strategy(text) for text in names} == names
    assert times.parse_seconds("1h2m3.5s") == 3723.5
    for text in ("", "3 m", "-3", "0", "1:58", "nan", None, "2,400", "9" * 400, "1e9"):
        with pytest.raises(ValueError, match="is no time"):
            times.parse_seconds(text)
