"""report.py: what it reads, and what it leaves out: runs that are not timings, records that
contradict themselves or are hostile, and times by hand.
"""

import html
import math
import re

import pytest
from test_report import FIRST, answers, first_page, losses, record, report_of, run_report

from reporting import times

HEAD = "strategy,nodes,gpus_per_node,seconds\n"  # the first line of times by hand
PLAN = "run,strategy,nodes,gpus_per_node,repeat,job\n"  # the first line of a sweep.csv
NO_TIMINGS = {  # {name: (what the record has, the report's words)}
    "stopped": ({"status": "preempted"}, "preempted: stopped before its end"),
    "failed": ({"status": "failed"}, "failed: broke down"),
    "resumed": ({"resumed_from": "x"}, "resumed: not a timing"),
    "traced": ({"profiled": True}, "profiled: not a timing"),
    "scored": ({"steps": 0}, "evaluated: no training"),
    "died": ({"status": "running", "slurm_job_id": 7}, "no end: .* running: see slurm-7.out"),
}


def test_runs_that_are_not_timings_are_listed_but_not_used(tmp_path):
    """And named in the answer, even if other repeats are left. A copy of a run is not a repeat.
    Linked folders are read.
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
    assert "skipped good/run.json: a copy of again/run.json, so not a repeat" in text
    with pytest.raises(SystemExit, match="none of the runs completed"):
        report_of(tmp_path / "bad", failed=runs["failed"])
    with pytest.raises(SystemExit, match="^error: no run.json below"):
        run_report(tmp_path / "nothing")


DDP = record("ddp", 2, 50)
FAST = {"samples_per_second": 204.8, "steps_per_second": [3, 3.2, 4]}
WRONG = [  # what contradicts itself, and the report's words
    (DDP | {"devices": 10**10}, "each rank from 0 to 9999999999"),
    (DDP | {"ranks": [FIRST, FIRST]}, "each rank from 0 to 1 once"),
    (DDP | {"nodes": 3}, "2 devices cannot be divided among 3"),
    (DDP | {"gradient_accumulation_steps": 4}, "global batch is 64, not 2 x 128"),
    (DDP | {"loss_history": losses(8)}, "80 steps, but its last loss is from step 8"),
    (DDP | {"seconds": {"train": 50, "total": 49}}, "the whole run took 49 s"),
    (DDP | {"seconds": {"train": 0, "total": 9}}, "trained for 0 s"),
    (DDP | {"seconds": {"train": 17, "total": 60}}, "17 s, but its steps take 50 s"),
    (DDP | FAST, "50 s, but its steps take 25 s"),
    (DDP | {"steps_per_second": [3.2]}, "do not match its steps per second"),
    (DDP | {"tokens": 30720, "tokens_per_second": 6144.0}, "6.0 tokens .* 60.0"),
    (record("ddp", 2, 50, work={"max_train_steps": 40}), "80 steps, but .* 40 of 64"),
    (record("ddp", 2, 50, work={"num_epochs": 3}), "80 steps, but .* 60 of 64"),
]


def test_a_record_that_contradicts_itself_is_left_out(tmp_path):
    """And named. Honest records stay: DP's one process, a slow start, a short fast interval, an
    incomplete last batch, tokens.
    """
    runs = {f"bad{i}": bad for i, (bad, _) in enumerate(WRONG)}
    honest = {"dp": record("dp", 8, 20)}
    honest["dp"]["ranks"][0]["memory_before_mb"] = None  # not known
    honest["slow"] = record("ddp", 2, 100, samples_per_second=512, steps_per_second=[0.4, 8, 8])
    honest["fast"] = record("fsdp", 2, 55, samples_per_second=64, steps_per_second=[1, 4, 1])
    honest["rest"] = record("zero2", 2, work={"samples": 1343, "num_epochs": 4})
    honest["text"] = record("zero3", 2, tokens=307_200, tokens_per_second=3072.0)
    rows, text = report_of(tmp_path, base=record("baseline"), **runs, **honest)
    assert set(rows) == {"base", *honest}
    for i, (_, words) in enumerate(WRONG):
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
    lines = re.findall(r"skipped bad-\S+/run.json: not a run record \((\w\S*): .*\)", text)
    assert "base" in rows and len(lines) > 10


def test_a_file_that_is_not_a_record_is_named(tmp_path):
    files = ["[" * 100_000, "\0", '"x"', "9" * 5000, "{}", '{"status": "comp']
    for i, content in enumerate(files):
        (tmp_path / f"bad{i}").mkdir()
        (tmp_path / f"bad{i}" / "run.json").write_text(content)
    nan = DDP | {"seconds": {"train": math.nan, "total": 9}}
    rows, text = report_of(tmp_path, base=record("baseline"), nan=nan)
    assert set(rows) == {"base"} and "(seconds.train: Input should be a finite number)" in text
    assert len(re.findall(r"skipped bad./run.json.{1,500}$", text, re.M)) == len(files)


ODD = "</b><i>x</i> [x](y) `a` | b $\\foo{c$ *d* _e_"


def test_names_are_shown_as_they_are(tmp_path, capsys):
    """Those of a run.json, a sweep.csv and a file of times, also where they look like HTML or
    Markdown. What would control a terminal is written out.
    """
    odd = record(ODD, 2, 50, script=ODD, device_name="\x1b[2J\x07", strategy_options={ODD: ODD})
    odd["workload"] |= {"model": ODD, ODD: ODD}
    (tmp_path / "sweep.csv").write_text(f'{PLAN}{ODD},"{ODD}",1,2,1,"{ODD}"\n')
    (tmp_path / "t.csv").write_text(f'{HEAD}baseline,1,1,9\n"{ODD}",1,2,9\n')
    runs = {"odd": odd, "lost": odd | {"status": "failed"}, "bad": odd | {"status": ODD}}
    report_of(tmp_path, "--times", tmp_path / "t.csv", draw=True, **runs)
    pages = [*tmp_path.glob("*.md"), *tmp_path.glob("*.html"), *tmp_path.glob("*.svg")]
    shown = "".join([*(path.read_text() for path in pages), capsys.readouterr().out])
    assert "\\x1b" in shown and not re.search(r"(?!\n)[\x00-\x1f\x7f-\x9f]", shown)
    body = (tmp_path / "report.html").read_text().split("</head>")[1].replace("<wbr>", "")
    known = "body h1 h2 p strong em code div table thead tbody tr th td ul li img html a"
    assert set(re.findall(r"<\s*/?\s*(\w+)", body)) <= set(known.split())
    assert html.unescape(body).count(ODD) > 3


def test_times_by_hand(tmp_path):
    """Names as people write them, times as `time` prints them, the separators of spreadsheets. A
    bad row costs no other one.
    """
    path = tmp_path / "t.csv"
    rows = "Baseline,1,1,5.026\nZeRO-2,1.0,2,0m2.513s\n"
    for text in (HEAD + rows, (HEAD + rows).replace(",", ";"), (HEAD + rows).replace(",", "\t")):
        path.write_text(text, encoding="utf-8-sig")
        run_report("--times", path, "--output_dir", tmp_path)
        shown = (tmp_path / "report.md").read_text()
        row = {"strategy": "ZeRO-2", "seconds": "2.51", "speedup": "2.00", "efficiency": "100 %"}
        assert row.items() <= [*answers(shown)][1].items()
    for bad, words in (
        ("ddp,1,2,x", "seconds: 'x' is not a time; write seconds (186.6) or"),
        ("ddp,1,2,186,6", "it has more columns than the first line"),
        ('ddp,1,2,"1,234"', "seconds: '1,234' is not a time"),
        ("ddp,1,2,1:58", "seconds: '1:58' is not a time"),
        ("ddp,0,2,9", "nodes: Input should be greater than"),
        (",1,2,9", "strategy: String should have at least 1 character"),
    ):
        path.write_text(f"{HEAD}{bad}\nZeRO-3 offload,1,2,3m6.5s\nHorovod,1,2,9s\n")
        runs, [note] = times.read_times(path)
        assert f"t.csv, line 2: {words}" in note
        found = [(run.setting.strategy, run.figures.seconds) for run in runs]
        assert found == [("zero3_offload", 186.5), ("horovod", 9)]
    for text, message in (
        ("strategy,nodes,seconds\nddp,1,3\n", "no column gpus_per_node"),
        (f"{HEAD}ddp,two,1,12\n", "line 2: nodes: Input should be a valid integer"),
        (HEAD, "no times below its first line"),
        ("", "no column strategy"),
    ):
        path.write_text(text)
        with pytest.raises(SystemExit, match=f"^error: .*{message}.*$"):
            run_report("--times", path)
