"""report.py: parsing, medians, what is compared with what, what is missing, formulas."""

import contextlib
import csv
import io
import json
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import transformers
import yaml
from conftest import ROOT, launch
from test_bert import TINY

import pictures
import report


def run_report(*words):
    """report.py's main() in this process, which has imported all: exit code, and what it prints."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          mock.patch.object(sys, "argv", ["report.py", *map(str, words)])):  # fmt: skip
        try:
            report.main()
        except SystemExit as end:  # as Python itself would take it
            code = 1 if isinstance(end.code, str) else end.code or 0
            err.write(f"{end.code}\n" if isinstance(end.code, str) else "")
    return code, out.getvalue(), err.getvalue()


def record(strategy, devices=1, seconds=100.0, nodes=1, batch=32, **changes):
    """A run record as the scripts leave it, with what the report reads. Other devices have another
    seed, dropout and learning rate, which make no other workload.
    """
    work = {"model": "lstm-64", "dataset": "digits", "samples": 1280, "eval_samples": 360, "sequence_length": 8,
            "epochs": 4, "steps": None, "seed": devices, "dropout": devices / 10,
            "learning_rate": devices / 100, "precision": "no", "dynamo": "no"} | changes.pop("work", {})
    ranks = [{"rank": rank, "host": f"n{rank}", "real": 118.544, "user": 100.0, "sys": 3.25,
              "peak_memory_mb": 500 + rank} for rank in range(devices)]
    return {"script": "train_mnist_rnn.py", "strategy": strategy, "nodes": nodes, "devices": devices, "ranks": ranks,
            "device_name": "CPU (x86_64)", "global_batch_size": batch * devices, "workload": work, "parameters": 1000,
            "per_device_batch_size": batch, "gradient_accumulation_steps": 1, "metrics": None,
            "seconds": {"startup": 5.0, "train": seconds, "eval": 1.0, "total": seconds + 10},
            "samples_per_second": seconds and 5120 / seconds,
            "steps": 5120 // (batch * devices), "versions": {"torch": "2.15.0"},
            "status": "completed", "resumed_from": None, "profiled": False,
            "loss_history": [[1, 2.3], [2, 2.1]]} | changes


def write(folder, **runs):
    for name, content in runs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").write_text(json.dumps(content))


def cells_of(folder, out):
    """The rows of report.csv, and report.md."""
    code, printed, err = run_report(folder, "--output_dir", out)
    assert code == 0, err
    with open(out / "report.csv") as file:
        return list(csv.DictReader(file)), (out / "report.md").read_text()


@pytest.mark.parametrize("text, seconds", [("186.6", 186.6), ("3m6.619s", 186.619), ("1m58s", 118), (" 12s ", 12),
                                           ("1h2m3.5s", 3723.5), ("90m0s", 5400)])
def test_times_parse(text, seconds):
    assert report.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "3 m", "-3", "0", "1:58", "nan", "3m6", None, "s"])
def test_what_is_no_time_is_refused(text):
    if text == "3m6":  # bash never prints this, and it is clear
        assert report.parse_seconds(text) == 186
    else:
        with pytest.raises(ValueError, match="is no time"):
            report.parse_seconds(text)


def test_times_print_as_time_does():
    assert report.as_time_prints(118.544) == "1m58.544s" and report.as_time_prints(3.25) == "0m3.250s"
    assert report.as_time_prints(59.9997) == "1m0.000s" and report.as_time_prints(3599.9) == "59m59.900s"


def test_medians_speedups_and_the_median_run(tmp_path):
    """Hand-computed: medians 100 and 60, speedup 100 / 60 on two devices."""
    write(tmp_path / "runs", b1=record("baseline", seconds=90), b2=record("baseline", seconds=100),
          b3=record("baseline", seconds=130), d1=record("ddp", 2, 55, nodes=2), d2=record("ddp", 2, 60, nodes=2),
          d3=record("ddp", 2, 80, nodes=2))
    (tmp_path / "runs" / "d2.log").touch()
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    by = {row["strategy"]: row for row in rows}
    assert len(rows) == 2 and by["ddp"]["repeats"] == "3"
    assert float(by["ddp"]["seconds"]) == 60 and float(by["baseline"]["seconds"]) == 100
    assert float(by["ddp"]["speedup"]) == pytest.approx(100 / 60)
    assert float(by["ddp"]["efficiency"]) == pytest.approx(100 / 60 / 2)
    assert (by["ddp"]["nodes"], by["ddp"]["gpus_per_node"], by["ddp"]["fixed"]) == ("2", "1", "batch per device")
    assert (by["ddp"]["run"], by["baseline"]["run"], by["baseline"]["fixed"]) == ("d2", "b2", "itself")
    assert "55.00-80.00" in text and "1m58.544s" in text
    [line] = [line for line in text.splitlines() if "55.00-80.00" in line]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["ddp", "2 x 1", "64", "3", "750.00", "85.3", "60.00", "55.00-80.00", "70.0", "501", "",
                     "batch per device", "steady steps", "1.67", "83%", "repeats differ by 34%", "d2", "d2.log"]
    assert float(by["ddp"]["step_seconds"]) == 0.75 and by["ddp"]["predicted_step_seconds"] == ""
    for name in ("time", "speedup", "efficiency", "throughput", "memory", "loss", "step"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000


def test_the_two_kinds_of_scaling_are_told_apart(tmp_path):
    write(tmp_path / "runs", base=record("baseline"), weak=record("ddp", 2, 50), strong=record("ddp", 2, 80, batch=16),
          neither=record("ddp", 2, 70, batch=8))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    fixed = {row["run"]: (row["fixed"], row["speedup"]) for row in rows}
    assert fixed["weak"][0] == "batch per device" and float(fixed["weak"][1]) == 2
    assert fixed["strong"][0] == "global batch" and float(fixed["strong"][1]) == 1.25
    assert fixed["neither"] == ("", "") and "Blank speedups: no baseline has the same batch" in text


@pytest.mark.parametrize("changes, name", [
    ({"work": {"dataset": "mnist"}}, "dataset"), ({"work": {"model": "lstm-128"}}, "model"),
    ({"work": {"samples": 640}}, "samples"), ({"work": {"epochs": 5}}, "epochs"),
    ({"work": {"precision": "bf16"}}, "precision"), ({"device_name": "NVIDIA A100"}, "device_name"),
    ({"script": "train_bert_squad.py"}, "script"),
    ({"versions": {"torch": "2.8.0"}}, "torch"), ({"work": {"epochs": None, "steps": 40}}, "epochs, steps")])
def test_different_work_is_never_one_speedup(tmp_path, changes, name):
    write(tmp_path / "runs", base=record("baseline"), other=record("ddp", 2, 50, **changes))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert {row["run"]: row["speedup"] for row in rows}["other"] == ""
    assert "2 workloads" in text and f"they differ in {name}" in text
    assert "No speedups: there is no 1-device run" in text


def test_fixed_steps_need_a_fixed_global_batch(tmp_path):
    """With 40 steps each, two devices with the same batch per device have trained on twice as many samples."""
    steps = {"work": {"epochs": None, "steps": 40}, "steps": 40}
    write(tmp_path / "runs", base=record("baseline", **steps), weak=record("ddp", 2, 90, **steps),
          strong=record("fsdp", 2, 50, batch=16, **steps))
    rows, _ = cells_of(tmp_path / "runs", tmp_path / "out")
    assert {row["run"]: row["speedup"] for row in rows} == {"base": "1.0", "weak": "", "strong": "2.0"}


def test_variants_of_a_strategy_are_no_repeats(tmp_path):
    both, free = ({"reshard_after_forward": value, "offload_params": value, "version": value, "cpu": "0"}
                  for value in ("true", "false"))  # fmt: skip
    plain = {"reshard_after_forward": "true", "version": "2", "cpu": "0"}
    other = plain | {"state_dict_type": "FULL_STATE_DICT"}
    write(tmp_path / "runs", base=record("baseline"), old=record("ddp", 2, 60),
          other=record("fsdp", 2, 70, strategy_options=other), plain=record("fsdp", 2, 80, strategy_options=plain),
          again=record("fsdp", 2, 90, strategy_options=plain), offload=record("fsdp", 2, 95, strategy_options=both),
          keep=record("fsdp", 2, 50, strategy_options=free))  # fmt: skip
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert sorted((row["strategy"], row["repeats"], row["seconds"]) for row in rows) == [
        ("baseline", "1", "100.0"), ("ddp", "1", "60.0"), ("fsdp", "1", "70.0"), ("fsdp", "2", "85.0"),
        ("fsdp_keep", "1", "50.0"), ("fsdp_offload", "1", "95.0")]
    assert '| fsdp (state_dict_type: "FULL_STATE_DICT")' in text and "| fsdp (state_dict_type: null)" in text
    assert "version" not in text and "cpu: " not in text and "| ddp  " in text
    held, sent = 16 * 1000 / 2 / 1e6, 3 / 2 * 4 * 1000 / 1e6  # of fsdp_keep, over gloo
    [formulas] = [line for line in text.splitlines() if line.startswith("| fsdp_keep") and "1,000" in line]
    assert [cell.strip() for cell in formulas.split("|")[4:6]] == [f"{sent:.2f}", f"{held:.2f}"]


HOST = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("strategy, options, expected", [
    ("ddp", {}, "ddp"), ("zero1", {"stage": 1}, "zero1"), ("zero1", {"offload_optimizer": HOST}, "zero1"),
    ("fsdp", {}, "fsdp"), ("fsdp", {"reshard_after_forward": "true", "offload_params": "false"}, "fsdp"),
    ("fsdp", {"reshard_after_forward": "false"}, "fsdp_keep"),
    ("fsdp", {"reshard_after_forward": "False", "offload_params": "true"}, "fsdp"),  # no YAML is both
    ("fsdp", {"reshard_after_forward": "true", "offload_params": "true"}, "fsdp_offload"),
    ("zero2", {"stage": 2, "offload_optimizer": None}, "zero2"),
    ("zero2", {"stage": 2, "offload_optimizer": {"device": "none"}}, "zero2"),
    ("zero2", {"stage": 2, "offload_optimizer": HOST}, "zero2_offload"),
    ("zero3", {"stage": 3, "offload_optimizer": HOST}, "zero3"),
    ("zero3", {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}, "zero3_offload")])
def test_a_variant_has_the_name_of_its_yaml(strategy, options, expected):
    assert report.name_yaml(strategy, options) == expected


def test_the_yamls_are_told_apart_as_they_are():
    """By what the files themselves say, as a record has it."""
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        strategy, options = path.stem, {}
        if "fsdp_config" in config:
            strategy = "fsdp"
            options = {key.removeprefix("fsdp_"): str(value).lower() for key, value in config["fsdp_config"].items()}
        if "deepspeed_config" in config:
            settings = json.loads((ROOT / config["deepspeed_config"]["deepspeed_config_file"]).read_text())
            options = settings["zero_optimization"]
            strategy = f"zero{options['stage']}"
        assert report.name_yaml(strategy, options) == path.stem
        assert path.stem in pictures.STYLES


def test_recomputing_is_a_variant_of_its_own(tmp_path):
    """Shown as such, compared with the baseline that keeps its activations, and never a repeat."""
    sizes = {"layers": 12, "hidden_size": 8, "intermediate_size": 16}
    again = {"work": sizes, "activation_checkpointing": True}
    write(tmp_path / "runs", again=record("baseline", seconds=125, **again), base=record("baseline", work=sizes),
          ddp=record("ddp", 2, 50, work=sizes), ddp_again=record("ddp", 2, 80, **again))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    found = {row["run"]: (row["strategy"], row["activation_checkpointing"], row["repeats"], row["speedup"],
                          row["fixed"]) for row in rows}
    assert found == {"base": ("baseline", "False", "1", "1.0", "itself"),
                     "again": ("baseline", "True", "1", "0.8", "batch per device"),
                     "ddp": ("ddp", "False", "1", "2.0", "batch per device"),
                     "ddp_again": ("ddp", "True", "1", "1.25", "batch per device")}
    tokens = 32 * 8
    layer = 4 * tokens * (8 * 8 + 2 * 16)
    for name, kept in (("ddp", 12 * layer), ("ddp, recomputing", layer + 11 * 4 * tokens * 8)):
        [line] = [line for line in text.splitlines() if line.startswith(f"| {name} ") and "1,000" in line]
        assert line.split("|")[6].strip() == f"{kept / 1e6:.2f}"
    write(tmp_path / "alone", again=record("baseline", **again), ddp=record("ddp", 2, 50, **again))
    rows, text = cells_of(tmp_path / "alone", tmp_path / "out")
    assert [row["speedup"] for row in rows] == ["", ""]
    assert "baseline.yaml of this work, without --activation_checkpointing." in text


def test_bf16_has_its_own_formulas_of_memory(tmp_path):
    """Under autocast 16 bytes a parameter, and 2 + 14 / n under ZeRO-2; what is sent has none."""
    sizes = {"layers": 2, "hidden_size": 8, "intermediate_size": 16, "precision": "bf16"}
    write(tmp_path / "runs", ddp=record("ddp", 2, work=sizes, parameters=10**6),
          zero2=record("zero2", 2, work=sizes, parameters=10**6))
    _, text = cells_of(tmp_path / "runs", tmp_path / "out")
    shown = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[4:7]]
             for line in text.splitlines() if "1,000,000" in line}
    tokens = 32 * 8
    assert shown == {"ddp": ["", "16.00", f"{tokens * 2 * (24 * 8 + 4 * 16) / 1e6:.2f}"],
                     "zero2": ["", "9.00", f"{tokens * 2 * 2 * (8 * 8 + 2 * 16) / 1e6:.2f}"]}


CELLS = {"nodes": 1, "gpus_per_node": 2, "devices": 2, "fixed": None, "speedup": 1.5, "speedup_low": 1.4,
         "speedup_high": 1.6, "efficiency": 0.75, "activation_checkpointing": False, "global_batch_size": 64,
         "losses": [[[1, 2.0], [2, 1.5]]]}


def frame(*changes):
    rows = [CELLS | change for change in changes]
    return report.pd.DataFrame([{"shown": row["strategy"]} | row for row in rows])


def test_pictures_tell_every_rung_apart_without_colour():
    """By name and value where there are bars; by marker and dash where there are lines."""
    markers, lines = zip(*((marker, str(line)) for _, marker, line in pictures.STYLES.values()), strict=True)
    assert len(set(markers)) == len(set(lines)) == len(pictures.STYLES)
    hatches = [hatch for _, hatch in pictures.SHADES]
    assert len(set(pictures.SHADES)) == len(pictures.SHADES) and hatches.count("") == 2  # the darkest, the lightest
    several = [{"strategy": "fsdp"}, {"strategy": "fsdp_keep"},
               {"strategy": "fsdp", "shown": "fsdp, recomputing", "activation_checkpointing": True}]
    cells = frame(*(change | {"devices": devices, "gpus_per_node": devices}
                    for devices in (1, 2, 4) for change in several))
    figure = pictures.plot_lines(cells, "speedup", ("speedup_low", "speedup_high"), "speedup", "{:.2f}")
    [axes] = figure.axes
    drawn = {line.get_label(): (line.get_marker(), line.get_markersize(), list(line.get_xdata()))
             for line in axes.lines}
    ideal = drawn.pop("ideal")
    assert drawn == {"fsdp": ("^", 5, [1, 2, 4]), "fsdp_keep": ("<", 5, [1, 2, 4]),
                     "fsdp, recomputing": ("^", 9, [1, 2, 4])} and ideal[2] == [1, 2, 4]
    assert len(axes.collections) == 3  # a band of the repeats for each
    ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    assert {2, 4} <= set(ticks) and axes.get_ylim()[0] < 1.4
    pictures.pyplot.close(figure)


def test_bars_carry_their_values():
    cells = frame({"strategy": "ddp"}, {"strategy": "zero3", "speedup": 0.5, "speedup_low": 0.4})
    figure = pictures.plot_bars(cells, "speedup", ("speedup_low", "speedup_high"), "speedup", "{:.2f}")
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["ddp, 1 x 2", "zero3, 1 x 2"]
    assert [text.get_text() for text in axes.texts] == ["1.50", "0.50"]
    assert [bar.get_width() for bar in axes.patches] == [1.5, 0.5]
    pictures.pyplot.close(figure)


def test_stacked_bars_have_only_what_is_there_in_their_legend():
    cells = frame({"strategy": "ddp"}, {"strategy": "zero3"})
    parts = report.pd.DataFrame({"step": [9.0, 9.0], "computing": [6.0, 7.0], "waiting": [float("nan")] * 2,
                                 "communication": [3.0, 4.0], "unexplained": [0.0, -2.0]})
    figure = pictures.plot_parts(cells, parts, "ms", "{:.1f}")
    [axes] = figure.axes
    assert [text.get_text() for text in figure.legends[0].texts] == ["computing", "communication", "unexplained"]
    assert [text.get_text() for text in axes.texts] == ["9.0", "9.0"]
    spans = [(round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in axes.patches]
    assert spans == [(0, 6), (0, 7), (6, 3), (7, 4), (9, 0), (0, -2)]
    pictures.pyplot.close(figure)
    measured = pictures.plot_parts(cells, parts, "MB", "{:.1f}", report.pd.Series([20.0, float("nan")]))
    assert [text.get_text() for text in measured.axes[0].texts] == ["20.0", "9.0", "9.0"]
    pictures.pyplot.close(measured)
    assert pictures.plot_parts(cells, parts.iloc[:0], "ms", "{:.1f}") is None


def test_losses_of_other_global_batches_have_another_dash():
    cells = frame({"strategy": "ddp"}, {"strategy": "ddp", "global_batch_size": 128}, {"strategy": "fsdp"})
    figure = pictures.plot_losses(cells)
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["-", "--", "-"]
    pictures.pyplot.close(figure)


def test_a_long_run_is_drawn_as_means():
    """60 of them, and each is the mean of its piece."""
    history = [[step, float(step % 2)] for step in range(1, 1201)]
    figure = pictures.plot_losses(frame({"strategy": "ddp", "losses": [history]}))
    [line] = figure.axes[0].lines
    assert list(line.get_ydata()) == [0.5] * 60 and line.get_xdata()[0] == 10.5 * 64
    assert line.get_markersize() < 8
    pictures.pyplot.close(figure)


def test_report_draws_bars_for_two_counts_and_lines_for_three(tmp_path, monkeypatch):
    drawn = []
    for name in ("plot_bars", "plot_lines"):
        original = getattr(pictures, name)
        monkeypatch.setattr(pictures, name, lambda cells, column, *rest, original=original, name=name: (
            drawn.append((name, column)), original(cells, column, *rest))[1])
    bars = frame({"strategy": "baseline", "devices": 1, "gpus_per_node": 1}, {"strategy": "ddp"})
    more = frame(*({"strategy": "ddp", "devices": n, "gpus_per_node": n} for n in (1, 2, 4)))
    empty = report.pd.DataFrame()
    for name, cells in (("bars", bars), ("more", more)):
        (tmp_path / name).mkdir()
        cells = cells.assign(**{column: None for column in (
            "samples_per_second", "training_memory_mb", "peak_memory_mb")}, seconds=3.0, fastest=2.0, slowest=4.0)
        files = pictures.plot_work(cells, empty, empty, tmp_path / name, "")
        assert files == ["time.png", "speedup.png", "efficiency.png", "loss.png"]
    assert drawn == [("plot_bars", "seconds"), ("plot_bars", "speedup"), ("plot_bars", "efficiency"),
                     ("plot_lines", "seconds"), ("plot_lines", "speedup"), ("plot_lines", "efficiency")]


@pytest.mark.parametrize("strategy, nccl, gloo", [
    ("baseline", 0, 0), ("ddp", 2, 2), ("zero1", 2, 2.5), ("zero2", 2, 2.5), ("zero2_offload", 2, 2.5),
    ("fsdp_keep", 2, 3), ("fsdp", 3, 4), ("fsdp_offload", 3, 4), ("zero3", 2, 3), ("zero3_offload", 2, 3)])
def test_bytes_sent_by_hand(strategy, nccl, gloo):
    """In (n - 1) / n x 4 bytes a parameter."""
    for over_gloo, passes in ((False, nccl), (True, gloo)):
        assert report.bytes_sent(strategy, 1000, 4, over_gloo) == pytest.approx(passes * 3 / 4 * 4000)
    assert report.bytes_sent("dp", 1000, 4) is None


def test_a_peak_that_is_not_known_is_left_blank(tmp_path):
    unknown = record("baseline")
    unknown["ranks"][0]["peak_memory_mb"] = None
    write(tmp_path / "runs", base=unknown, ddp=record("ddp", 2, 50))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert {row["strategy"]: row["peak_memory_mb"] for row in rows} == {"baseline": "", "ddp": "501.0"}
    assert "skipped" not in text and "None" not in text


def test_what_is_no_timing_is_shown_but_not_used(tmp_path):
    folder = tmp_path / "runs"
    write(folder, base=record("baseline"), good=record("ddp", 2, 50),
          stopped=record("ddp", 2, 1, status="preempted"), broken=record("ddp", 2, 1, status="failed"),
          resumed=record("ddp", 2, 1, resumed_from="x"),
          died=record("ddp", 2, 0, status="running", slurm_job_id=7),
          nan=record("ddp", 2, float("nan")),
          zero=record("ddp", 2) | {"seconds": {"train": 0, "total": 3}},
          nobody=record("ddp", 2, 50, ranks=[{"peak_memory_mb": 3}]),
          traced=record("ddp", 2, 1, profiled=True), odd={"status": 1})
    (folder / "half").mkdir()
    (folder / "half" / "run.json").write_text('{"status": "comp')
    (folder / "sweep.csv").write_text("run,strategy,nodes,gpus_per_node,repeat,job\ngood,ddp,1,2,1,7\n"
                                      "zero3-1x2-r1,zero3,1,2,1,8\n")
    (folder / "cut").mkdir()
    (folder / "cut" / "sweep.csv").write_text("run,strategy,nodes,gpus_per_node,repeat,job\nddp-1x2-r1,ddp,1\nddp-1")
    rows, text = cells_of(folder, tmp_path / "out")
    assert {row["run"]: row["seconds"] for row in rows} == {"base": "100.0", "good": "50.0"}
    for line in ("stopped (ddp, 1 x 2): stopped before its end", "broken (ddp, 1 x 2): broke down",
                 "resumed (ddp, 1 x 2): resumed: not a timing",
                 "died (ddp, 1 x 2): died, or is still running: see slurm-7.out",
                 "traced (ddp, 1 x 2): profiled", f"skipped {folder}/half/run.json", f"skipped {folder}/odd/run.json",
                 f"skipped {folder}/nan/run.json", f"skipped {folder}/zero/run.json",
                 f"skipped {folder}/nobody/run.json", f"skipped {folder}/cut/sweep.csv",
                 "zero3-1x2-r1 (zero3, 1 x 2): failed or missing, job 8: see zero3-1x2-r1.log"):
        assert line in text
    assert "good (" not in text and "Nothing to show of: zero3 1 x 2; see the end." in text


def test_hand_measured_times_alone(tmp_path):
    times = tmp_path / "times.csv"
    times.write_text("strategy,nodes,gpus_per_node,seconds\nbaseline,1,1,3m6.619s\nddp,2,1,100\nddp,2,1,1m50s\n"
                     "ddp,2,1,95.5\n")
    code, out, err = run_report("--times", times, "--output_dir", tmp_path)
    assert code == 0, err
    with open(tmp_path / "report.csv") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert float(rows["ddp"]["seconds"]) == 100 and float(rows["ddp"]["speedup"]) == pytest.approx(1.86619)
    assert float(rows["ddp"]["efficiency"]) == pytest.approx(0.933095) and (tmp_path / "speedup.png").exists()


@pytest.mark.parametrize("content, message", [
    ("strategy,nodes,seconds\nddp,1,3\n", "no column gpus_per_node"),
    ("strategy,nodes,gpus_per_node,seconds\nbaseline,1,1,12\nddp,2,1,fast\n", "line 3: 'fast' is no time"),
    ("strategy,nodes,gpus_per_node,seconds\nddp,two,1,12\n", "line 2: invalid literal"),
    ("strategy,nodes,gpus_per_node,seconds\nddp,2,0,12\n", "line 2: nodes and gpus_per_node have to be 1 or more"),
    ("strategy,nodes,gpus_per_node,seconds\n", "there are no times"), ("", "No columns to parse"),
])
def test_bad_times_are_an_error_with_their_line(tmp_path, content, message):
    (tmp_path / "times.csv").write_text(content)
    code, _, err = run_report("--times", tmp_path / "times.csv", "--output_dir", tmp_path)
    assert code == 1 and message in err and err.count("\n") == 1


def test_bad_input_is_one_line(tmp_path):
    for words, message in (([tmp_path], "no run.json below"), ([tmp_path / "x"], "there is no"),
                           ([], "a folder of runs"),
                           ([tmp_path, "--predict", "8"], "--predict needs the link"),
                           ([tmp_path, "--predict", "1", "--bandwidth", "1", "--latency", "1"], "at least 2 devices")):
        code, _, err = run_report(*words, "--output_dir", tmp_path)
        assert code == 1 and message in err and err.count("\n") == 1, err


LINE = {"latency_seconds": 0.005, "bandwidth_bytes_per_second": 16000.0, "residual": 0.1}
LINE = LINE | {"in_a_row": LINE}


def check(folder, nodes=1, processes=2, **lines):
    """A check.json as sbatch/check.py leaves it: 5 ms and 16,000 bytes/s, or other lines."""
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text(json.dumps({
        "nodes": nodes, "processes": processes, "backend": "gloo", "busy": 0.5,
        "collectives": dict.fromkeys(names, LINE) | lines}))
    return folder / "check.json"


def cells_in(text, columns):
    """The cells of all table rows of so many columns."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {tuple(cells[:2]): cells[2:] for cells in lines if len(cells) == columns}


def test_prediction_beside_measurement(tmp_path):
    """Hand-computed: a batch of 32 at 51.2 samples/s is 625 ms for the baseline, 750 ms for FSDP on one device. Of
    1,000 parameters, DDP all-reduces 4,000 bytes: 5 + 250 ms; FSDP gathers and scatters 2,000 each: 2 x (5 + 125).
    """
    write(tmp_path / "runs", base=record("baseline"), one=record("ddp", 1, 100), ddp=record("ddp", 2, 80),
          fsdp=record("fsdp", 2, 90), alone=record("fsdp", 1, 120))
    code, out, err = run_report(tmp_path / "runs", "--predict", 4, "--check", check(tmp_path), "--output_dir",
                                tmp_path / "out")
    assert code == 0, err
    rows = cells_in(out, 6)
    assert rows[("ddp", "1 x 2")] == ["625.00", "880.00", "1000.00", "-12%"]
    assert rows[("fsdp", "1 x 2")] == ["750.00", "1010.00", "1125.00", "-10%"]
    # At 4 devices 3 hops of 5 ms, or 2 through a tree, and 6,000 bytes; the interval is two misses of 12 % wide.
    assert rows[("ddp", "4")] == ["1015.00", f"{1010 / 1.12**2:.2f}-{1015 * 1.12**2:.2f}", "62%",
                                  f"{625 / 1015 / 1.12**2:.0%}-{min(1, 625 / 1010 * 1.12**2):.0%}"]
    assert "miss the measured ones by at most 12% (ddp on 1 x 2: too short)" in out
    with open(tmp_path / "out" / "report.csv") as file:
        found = {row["run"]: (row["step_seconds"], row["predicted_step_seconds"]) for row in csv.DictReader(file)}
    assert [float(value) for value in found["ddp"]] == pytest.approx([1.0, 0.88]) and found["one"][1] == ""


def test_links_are_those_of_their_shape_and_the_median_of_repeats(tmp_path):
    """Below the folder of runs; a check of one rank has no link."""
    write(tmp_path / "runs", base=record("baseline"), one=record("ddp", 1, 100), near=record("ddp", 2, 80),
          far=record("ddp", 2, 90, nodes=2))
    for number, latency in enumerate((0.0, 0.075, 9.0)):
        check(tmp_path / "runs" / f"check-1x2-r{number}", all_reduce=LINE | {"latency_seconds": latency})
    check(tmp_path / "runs" / "far-check", nodes=2, all_reduce=LINE | {"latency_seconds": 0.2})
    (tmp_path / "runs" / "alone").mkdir()
    (tmp_path / "runs" / "alone" / "check.json").write_text('{"nodes": 1, "processes": 1, "collectives": null}')
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    found = {row["run"]: row["predicted_step_seconds"] for row in rows}
    assert float(found["near"]) == pytest.approx(0.625 + 0.075 + 0.25)
    assert float(found["far"]) == pytest.approx(0.625 + 0.2 + 0.25)


def test_a_prediction_keeps_to_its_variant_and_its_padding(tmp_path):
    """Recomputing starts from recomputing; a step whose windows are a tenth longer from a longer step."""
    again = {"activation_checkpointing": True}
    text = {"tokens": 4500, "padding_share": 0.1, "steps": 80}
    longer = {"tokens": 4500, "padding_share": 0.181818, "steps": 40}
    write(tmp_path / "runs", base=record("baseline"), one=record("ddp", 1, 100, **text),
          ddp=record("ddp", 2, 80, **longer), again=record("ddp", 2, 95, **again))
    check(tmp_path / "runs" / "check")
    rows, _ = cells_of(tmp_path / "runs", tmp_path / "out")
    found = {row["run"]: row["predicted_step_seconds"] for row in rows}
    alone = 32 / 51.2 * (4500 / (1 - 0.181818) / 40 / 2) / (4500 / 0.9 / 80)
    assert float(found["ddp"]) == pytest.approx(alone + 0.255) and found["again"] == ""


def test_the_parts_of_a_step_add_up(tmp_path):
    """By hand: 80 steps of 1.25 s; 64 samples at 64 a second are 1 s when it is steady."""
    ranks = [{"rank": rank, "host": "n", "real": 1.0, "user": 1.0, "sys": 1.0, "peak_memory_mb": 5, "train_cpu": busy}
             for rank, busy in ((0, 80.0), (1, 64.0))]
    loaded = record("ddp", 2, 80, steps=80, ranks=ranks)
    loaded["seconds"] |= {"train": 100.0, "loading": 4.0}
    write(tmp_path / "runs", base=record("baseline"), one=record("ddp", 1, 120),
          ddp=loaded)
    check(tmp_path / "runs" / "check")
    _, text = cells_of(tmp_path / "runs", tmp_path / "out")
    parts = cells_in(text, 10)
    # 1250 = 625 baseline + 125 bookkeeping + 255 communication + (80 - 72) / 80 waiting + 50 loading + 250 start - 155
    assert parts[("ddp", "1 x 2")] == ["1250.00", "625.00", "125.00", "255.00", "100.00", "50.00", "250.00", "-155.00"]
    assert parts[("baseline", "1 x 1")] == ["625.00", "625.00", "", "", "", "", "0.00", ""]
    trace = {"traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 100}]}
    for rank, communicated in ((0, 20), (1, 40)):
        event = {"ph": "X", "cat": "cpu_op", "name": "gloo:all_reduce", "ts": 0, "dur": communicated}
        folder = tmp_path / "runs" / "traced" / "traces"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"profile_{rank}.json").write_text(json.dumps({"traceEvents": [*trace["traceEvents"], event]}))
    (folder.parent / "run.json").write_text(json.dumps(record("ddp", 2, 9, profiled=True)))
    _, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert cells_in(text, 10)[("ddp", "1 x 2")][3:5] == ["200.00", "100.00"]  # 20 % of a second; 30 - 20 %


def shown_by(text):
    """The sentences at the head of a report's only workload."""
    [line] = [line for line in text.splitlines() if line.startswith("**What this shows.** ")]
    return line.removeprefix("**What this shows.** ")


def test_what_a_report_shows_is_what_its_repeats_carry(tmp_path):
    """DDP is the fastest beyond the repeats; ZeRO-2 and FSDP overlap; ZeRO-3 is slower than one device."""
    steady = {f"b{i}": record("baseline", seconds=seconds) for i, seconds in enumerate((99, 100, 101))}
    steady |= {f"{name}{i}": record(name, 2, seconds) for name, times in {
        "ddp": (54, 55, 56), "fsdp": (70, 71, 72), "zero2": (71, 72, 73), "zero3": (110, 111, 112)}.items()
        for i, seconds in enumerate(times)}
    write(tmp_path / "runs", **steady)
    text = shown_by(cells_of(tmp_path / "runs", tmp_path / "out")[1])
    assert text.startswith("The fastest is ddp on 1 x 2, 1.82 times as fast as one device (efficiency 91%), and 29% "
                           "faster than fsdp on 1 x 2: more than repeats differ. ddp on 1 x 2, fsdp on 1 x 2 and zero2 "
                           "on 1 x 2 gain from more devices; zero3 on 1 x 2 is slower than one device. ")
    assert text.endswith("Missing: a run on one device, with the same strategy and batch per device, of ddp on 1 x 2, "
                         "fsdp on 1 x 2, zero2 on 1 x 2 and zero3 on 1 x 2: it would tell bookkeeping from "
                         "communication.")
    write(tmp_path / "runs", ddp9=record("ddp", 2, 90))
    text = shown_by(cells_of(tmp_path / "runs", tmp_path / "out")[1])
    together = "ddp on 1 x 2, fsdp on 1 x 2 and zero2 on 1 x 2 are the fastest, about 1.80 times one device"
    assert f"{together}; their repeats overlap" in text
    assert "Not safe to rely on: ddp on 1 x 2 (repeats differ by" in text


def test_what_costs_the_most_and_what_is_in_doubt(tmp_path):
    runs = {f"base{i}": record("baseline", seconds=100 + i) for i in range(2)}
    runs |= {f"one{i}": record("ddp", 1, 101 + i) for i in range(2)}
    runs |= {f"two{i}": record("ddp", 2, 80 + 2 * i) for i in range(2)}
    write(tmp_path / "runs", **runs)
    check(tmp_path / "runs" / "check")
    text = shown_by(cells_of(tmp_path / "runs", tmp_path / "out")[1])
    assert "The largest cost besides computing: communication for ddp on 1 x 2 (255.0 of 1012.5 ms)." in text
    assert "Missing" not in text
    write(tmp_path / "few", base=record("baseline", steps=24), ddp=record("ddp", 2, 50, steps=12))
    text = shown_by(cells_of(tmp_path / "few", tmp_path / "out")[1])
    assert text.startswith("Each cell was measured only once, so nothing says which differences are noise.")
    write(tmp_path / "few", b2=record("baseline", steps=24), d2=record("ddp", 2, 51, steps=12))
    rows, report_text = cells_of(tmp_path / "few", tmp_path / "out")
    assert {row["basis"] for row in rows} == {"training"} and "baseline on 1 x 1 (14 steady steps)" in report_text
    write(tmp_path / "level", **{f"b{i}": record("baseline", seconds=90 + 20 * i) for i in range(2)},
          **{f"d{i}": record("ddp", 2, 85 + 20 * i) for i in range(2)})
    text = shown_by(cells_of(tmp_path / "level", tmp_path / "out")[1])
    assert text.startswith("No strategy on several devices is faster than one device by more than repeats differ")
    assert "gain" not in text


def test_two_batches_of_one_shape_have_names_of_their_own(tmp_path):
    write(tmp_path / "runs", base=record("baseline"), weak=record("ddp", 2, 50), strong=record("ddp", 2, 130, batch=16),
          weak2=record("ddp", 2, 51), strong2=record("ddp", 2, 131, batch=16), base2=record("baseline", seconds=101))
    _, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert "ddp, batch 32 x 1 on 1 x 2 gains from more devices; ddp, batch 16 x 1 on 1 x 2 is slower" in shown_by(text)


def test_a_gain_has_to_beat_the_repeats_of_the_baseline_too(tmp_path):
    baselines = {f"b{i}": record("baseline", seconds=seconds) for i, seconds in enumerate((90, 100, 130))}
    write(tmp_path / "runs", **baselines,
          d1=record("ddp", 2, 95), d2=record("ddp", 2, 96))
    text = shown_by(cells_of(tmp_path / "runs", tmp_path / "out")[1])
    assert text.startswith("No strategy on several devices is faster") and "gain" not in text


@pytest.mark.parametrize("changes", [
    {"samples_per_second": None}, {"samples_per_second": 0.0}, {"steps": 0, "samples_per_second": None},
    {"device_name": "NVIDIA H200"}])
def test_a_report_of_what_is_hardly_known(tmp_path, changes):
    """Without a rate, without steps, on a GPU: the cells are there, and nothing breaks."""
    again = {"activation_checkpointing": True}
    write(tmp_path / "runs", base=record("baseline", **changes), one=record("ddp", 1, 100, **changes),
          two=record("ddp", 2, 60, **changes), dp=record("dp", 2, 60, **changes),
          again=record("baseline", seconds=120, **again, **changes))
    check(tmp_path / "runs" / "check", processes=16)
    (tmp_path / "runs" / "old").mkdir()
    (tmp_path / "runs" / "old" / "check.json").write_text('{"latency_seconds": 1, "bandwidth_bytes_per_second": 1}')
    code, out, err = run_report(tmp_path / "runs", "--predict", 4, "--output_dir", tmp_path / "out")
    assert code == 0, err
    for (strategy, _), line in cells_in(out, 10).items():
        if strategy == "strategy" or strategy.startswith(":-"):
            continue
        step, *parts = (float(cell or 0) for cell in line)
        assert sum(parts) == pytest.approx(step, abs=0.05), line


def test_uneven_epochs_are_no_speedup(tmp_path):
    """156 samples make 19 steps of 8 an epoch, but 9 of 16: 5 % less work for two devices."""
    write(tmp_path / "runs", base=record("baseline", batch=8, steps=6 * 19),
          ddp=record("ddp", 2, 50, batch=8, steps=54))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert {row["run"]: row["speedup"] for row in rows} == {"base": "1.0", "ddp": ""} and "1 % more or less" in text


def test_zero3_gathers_again_what_it_may_not_hold():
    assert report.bytes_sent("zero3", 300e6, 2) == 4 / 2 * 2.9 * 300e6


def test_mfu_by_hand():
    row = {"device_name": "NVIDIA A100-SXM4-80GB", "precision": "bf16", "tokens_per_second": 1e5, "devices": 2,
           "layers": 10, "hidden_size": 1000, "intermediate_size": 3000}
    assert report.flops_utilization(row) == pytest.approx(6 * 1e8 * 1e5 / 624e12)
    assert report.flops_utilization(row | {"precision": "no"}) == pytest.approx(6 * 1e8 * 1e5 / 312e12)
    cpu = {"device_name": "CPU (x86_64)"}
    for unknown in (cpu, {"tokens_per_second": None}, {"layers": None}, {"precision": "fp8"}):
        assert report.flops_utilization(row | unknown) is None


@pytest.mark.parametrize("name, peak", [  # bf16 without sparsity, in TFLOP/s
    ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A100-SXM4-40GB", 312),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA H200 NVL", 835), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165),
    ("NVIDIA L40", None), ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA H100 PCIe MIG 1g.10gb", None)])
def test_the_peak_of_a_gpu_is_never_that_of_a_longer_or_shorter_name(name, peak):
    row = {"device_name": name, "precision": "bf16", "tokens_per_second": 1e5, "devices": 1,
           "layers": 10, "hidden_size": 1000, "intermediate_size": 3000}
    assert report.flops_utilization(row) == (peak and pytest.approx(6 * 1e8 * 1e5 / (peak * 1e12)))


def test_activations_where_they_are_known(tmp_path):
    sizes = {"layers": 2, "hidden_size": 8, "intermediate_size": 16}
    write(tmp_path / "known", bert=record("baseline", work=sizes))
    write(tmp_path / "unknown", other=record("baseline", script="other.py", work={"sequence_length": None}))
    _, text = cells_of(tmp_path / "known", tmp_path / "out")
    assert f"| {4 * 32 * 8 * 2 * (8 * 8 + 2 * 16) / 1e6:.2f} " in text
    rows, _ = cells_of(tmp_path / "unknown", tmp_path / "out")
    assert len(rows) == 1


def test_bytes_of_activations_by_formula_and_counted():
    """What autograd really keeps of BERT's layers, each storage once, without the parameters."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.BertConfig(**shape, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    config._attn_implementation = "sdpa"
    encoder = transformers.BertForQuestionAnswering(config).bert.encoder
    parameters = {parameter.data_ptr() for parameter in encoder.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    mask = torch.ones(4, 1, 1, 64, dtype=torch.bool)
    mask[0, ..., -9:] = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = encoder(torch.randn(4, 64, 128, requires_grad=True), attention_mask=mask)  # held, as its graph is
    formula = report.bytes_of_activations(4 * 64, 3, 128, 256)
    assert sum(kept.values()) == pytest.approx(formula, rel=0.05), outputs


def test_time_shares_by_hand(tmp_path):
    """Ten units: loading 1, compute 2 to 6, communication 4 to 9 of which two are hidden."""
    def event(name, kind, start, end):
        return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start}

    events = [event("ProfilerStep#12", "user_annotation", 0, 10),
              event("enumerate(DataLoader)#_Single", "user_annotation", 0, 1),
              event("aten::mm", "cpu_op", 2, 5), event("aten::add", "cpu_op", 4, 6),
              event("gloo:all_reduce", "user_annotation", 4, 8), event("gloo:all_reduce", "user_annotation", 7, 9)]
    (tmp_path / "cpu.json").write_text(json.dumps({"traceEvents": events}))
    shares = report.time_shares(tmp_path / "cpu.json")
    assert list(shares.values()) == pytest.approx([0.2, 0.2, 0.3, 0.1, 0.2])


def test_time_shares_on_a_gpu_by_hand(tmp_path):
    """As Kineto writes them on CUDA: the CPU is through with both steps at 8, the GPU works on them from 2 to 18.

    Loading 1, copies and kernels 3 to 7, 10 to 14 and 15 to 18, communication 5 to 10 of which two are hidden.
    """
    def event(name, kind, start, end):
        return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start}

    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    cpu = [event("ProfilerStep#12", "user_annotation", 0, 4), event("ProfilerStep#13", "user_annotation", 4, 8),
           event(loader, "user_annotation", 0, 2), event("aten::mm", "cpu_op", 2, 8),
           event("cudaLaunchKernel", "cuda_runtime", 2, 3)]
    gpu = [event("ProfilerStep#12", "gpu_user_annotation", 2, 10), event(loader, "gpu_user_annotation", 2, 3),
           event("ProfilerStep#13", "gpu_user_annotation", 10, 18), event("vectorized_gather_kernel", "kernel", 2, 3),
           event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 3, 4), event("gemm", "kernel", 4, 7),
           event("nccl:all_reduce", "gpu_user_annotation", 5, 10),
           event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 5, 10),
           event("Memset (Device)", "gpu_memset", 10, 11), event("gemm", "kernel", 11, 14),
           event("gemm", "kernel", 15, 18)]
    (tmp_path / "gpu.json").write_text(json.dumps({"traceEvents": cpu + gpu}))
    shares = report.time_shares(tmp_path / "gpu.json")
    parts = {"computation": 9, "both at once": 2, "communication": 3, "loading data": 1, "neither": 1}
    assert shares == pytest.approx({name: part / 16 for name, part in parts.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name, counted", [
    ("ddp", 2), ("fsdp", 4), ("zero2", 2.5), ("zero3", 3),
    # Those of the variants by `pytest -m matrix tests/test_report.py`.
    *(pytest.param(*case, marks=pytest.mark.matrix) for case in (
        ("zero1", 2.5), ("fsdp_keep", 3), ("fsdp_offload", 4), ("zero2_offload", 2.5), ("zero3_offload", 3)))])
def test_bytes_sent_by_formula_and_counted_on_the_wire(cluster, tmp_path, name, counted):
    """What two nodes' network cards send in ten steps, in (n - 1) / n x 4 bytes x parameters."""
    folder = tmp_path / "run"
    flags = [*TINY, "--per_device_train_batch_size", "8", "--max_train_steps", 12, "--output_dir", folder]
    spying = {"SPY_SCRIPT": "train_bert_squad", "SPY_WIRE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = cluster.submit(f"--output={folder}.log", "sbatch/2node.sh", f"accelerate_configs/{name}.yaml",
                         "tests/spy.py", *flags, cwd=ROOT, env=spying)
    assert cluster.wait(job) == "COMPLETED"
    parameters = json.loads((folder / "run.json").read_text())["parameters"]
    sent = [json.loads((tmp_path / f"wire_{rank}.json").read_text()) for rank in (0, 1)]
    seen = sum(last - first for first, last in sent) / 2 / 10
    print(f"{name}: {seen / (2 * parameters):.2f} x (n - 1) / n x 4 bytes x parameters")
    assert seen == pytest.approx(counted * 2 * parameters, rel=0.05)
    formula = report.bytes_sent(name, parameters, 2, gloo=True)
    assert seen == pytest.approx(formula, rel=0.05)


def test_commands_of_the_docs_work(tmp_path):
    """Word for word, in a folder with the files that they name."""
    (tmp_path / "report.py").symlink_to(ROOT / "report.py")
    write(tmp_path / "runs", base=record("baseline"), ddp=record("ddp", 2, 60))
    check(tmp_path / "runs" / "check-ddp-1234")
    (tmp_path / "times.csv").write_text("strategy,nodes,gpus_per_node,seconds\nbaseline,1,1,3m6.619s\n")
    commands = re.findall(r"^python report.py.*$", (ROOT / "docs" / "report.md").read_text(), re.M)
    assert len(commands) == 3
    for command in commands:
        (tmp_path / "report.md").unlink(missing_ok=True)
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True)
        assert done.returncode == 0 and (tmp_path / "report.md").exists(), done.stderr


def test_profiled_runs_show_where_time_goes(tmp_path):
    flags = ["--dataset", "digits", "--profile", "--max_train_steps"]
    traced = launch("ddp", "train_mnist_rnn.py", tmp_path / "runs" / "ddp", *flags, 20)
    assert traced.record["profiled"]
    for rank in (0, 1):
        shares = report.time_shares(traced.folder / "traces" / f"profile_{rank}.json")
        assert sum(shares.values()) == pytest.approx(1) and shares["communication"] + shares["both at once"] > 0.01
        assert shares["computation"] > 0.01 and shares["loading data"] > 0 and min(shares.values()) >= 0
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert rows == [] and "| ddp " in text and "profiled: not a timing" in text
