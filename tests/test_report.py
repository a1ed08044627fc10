"""report.py: parsing, medians, what is compared with what, what is missing, formulas."""

import contextlib
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import transformers
import yaml
from conftest import ROOT, launch
from test_bert import TINY

import report
from reporting import comparing, links, memory, page, pictures, prediction, records, splitting


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
            "status": "completed", "resumed_from": None, "profiled": False, "threads": 2,
            "loss_history": [[1, 2.3], [2, 2.1]]} | changes


def write(folder, **runs):
    for name, content in runs.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "run.json").write_text(json.dumps(content))


def cells_of(folder, out, *words):
    """The rows of report.csv, and report.md."""
    code, _, err = run_report(folder, "--output_dir", out, *words)
    assert code == 0, err
    with open(out / "report.csv") as file:
        return list(csv.DictReader(file)), (out / "report.md").read_text()


@pytest.mark.parametrize("text, seconds", [("186.6", 186.6), ("3m6.619s", 186.619), ("1m58s", 118), (" 12s ", 12),
                                           ("1h2m3.5s", 3723.5), ("90m0s", 5400), ("3m6", 186)])
def test_times_parse(text, seconds):
    assert records.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "3 m", "-3", "0", "1:58", "nan", None, "s"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="is no time"):
        records.parse_seconds(text)


def test_times_print_as_time_does():
    assert page.as_time_prints(118.544) == "1m58.544s" and page.as_time_prints(3.25) == "0m3.250s"
    assert page.as_time_prints(59.9997) == "1m0.000s" and page.as_time_prints(3599.9) == "59m59.900s"


def test_medians_speedups_and_the_median_run(tmp_path):
    """Hand-computed: medians 100 and 60, speedup 100 / 60 on two devices."""
    write(tmp_path / "runs", b1=record("baseline", seconds=90), b2=record("baseline", seconds=100),
          b3=record("baseline", seconds=130), d2=record("ddp", 2, 60, nodes=2),
          d1=record("ddp", 2, 55, nodes=2, work={"compute_dtype": "no"}),  # as without it
          d3=record("ddp", 2, 80, nodes=2))
    (tmp_path / "runs" / "d2.log").touch()
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    by = {row["strategy"]: row for row in rows}
    assert len(rows) == 2 and by["ddp"]["repeats"] == "3"
    assert (by["ddp"]["nodes"], by["ddp"]["gpus_per_node"], by["ddp"]["fixed"]) == ("2", "1", "batch per device")
    assert (by["ddp"]["run"], by["baseline"]["run"], by["baseline"]["fixed"]) == ("d2", "b2", "itself")
    assert "1m58.544s" in text
    assert [*rows_in(text, "median run")[("ddp", "2 x 1")].values()] == [
        "64", "3", "750.00", "85.3", "60.00", "55.00-80.00", "70.0", "501", "", "batch per device",
        "steady steps", "1.67", "83%", "repeats differ by 34%", "d2", "d2.log"]
    assert float(by["ddp"]["step_seconds"]) == 0.75 and by["ddp"]["predicted_step_seconds"] == ""
    for name in ("time", "speedup", "efficiency", "memory", "loss", "loss-seconds", "step"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000


def test_the_two_kinds_of_scaling_are_told_apart(tmp_path):
    write(tmp_path / "runs", base=record("baseline"), weak=record("ddp", 2, 50), strong=record("ddp", 2, 80, batch=16),
          neither=record("ddp", 2, 70, batch=8))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    fixed = {row["run"]: (row["fixed"], row["speedup"]) for row in rows}
    assert fixed["weak"][0] == "batch per device" and float(fixed["weak"][1]) == 2
    assert fixed["strong"][0] == "global batch" and float(fixed["strong"][1]) == 1.25
    assert "| ddp, batch 32 x 1 " in text and "| ddp, batch 16 x 1 " in text
    assert ("1 x 2", "50.0 s, 2.00×, 100 %") in rows_in(text, "DDP")  # the batch per device first
    assert fixed["neither"] == ("", "") and "Blank speedups: no baseline has the same batch" in text
    gpus = {"device_name": "NVIDIA A100"}  # whose processes have as many threads as Slurm granted
    write(tmp_path / "gpus", base=record("baseline", threads=4, **gpus),
          dp=record("dp", 2, 50, threads=8, **gpus))
    rows, _ = cells_of(tmp_path / "gpus", tmp_path / "out")
    assert [row["speedup"] for row in rows] == ["1.0", "2.0"]


@pytest.mark.parametrize("changes, name", [
    ({"work": {"dataset": "mnist"}}, "dataset"), ({"work": {"model": "lstm-128"}}, "model"),
    ({"work": {"samples": 640}}, "samples"), ({"work": {"epochs": 5}}, "epochs"),
    ({"work": {"precision": "bf16"}}, "precision, compute_dtype"), ({"threads": 1}, "threads"),
    ({"work": {"compute_dtype": "bf16"}}, "compute_dtype"),
    ({"device_name": "CPU (another)"}, "device_name"), ({"script": "train_bert_squad.py"}, "script"),
    ({"versions": {"torch": "2.8.0"}}, "torch"), ({"work": {"epochs": None, "steps": 40}}, "epochs, steps")])
def test_different_work_is_never_one_speedup(tmp_path, changes, name):
    write(tmp_path / "runs", base=record("baseline"), other=record("ddp", 2, 50, **changes))
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert {row["run"]: row["speedup"] for row in rows}["other"] == ""
    assert "2 workloads" in text and f"they differ in {name}.\n" in text
    assert "No speedups: there is no 1-device run" in text


def test_a_speedup_needs_as_many_samples(tmp_path):
    """With 40 steps each, two devices with the same batch per device have trained on twice as many samples."""
    steps = {"work": {"epochs": None, "steps": 40}, "steps": 40}
    write(tmp_path / "runs", base=record("baseline", **steps), weak=record("ddp", 2, 90, **steps),
          strong=record("fsdp", 2, 50, batch=16, **steps))
    rows, _ = cells_of(tmp_path / "runs", tmp_path / "out")
    assert {row["run"]: row["speedup"] for row in rows} == {"base": "1.0", "weak": "", "strong": "2.0"}
    # 156 samples make 19 steps of 8 an epoch, but 9 of 16: 5 % less work for two devices.
    write(tmp_path / "uneven", base=record("baseline", batch=8, steps=6 * 19),
          ddp=record("ddp", 2, 50, batch=8, steps=54))
    rows, text = cells_of(tmp_path / "uneven", tmp_path / "out")
    assert [row["speedup"] for row in rows] == ["1.0", ""] and "1 % more or less" in text


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
    formulas = rows_in(text, "MB sent per step")[("fsdp_keep", "2")]
    assert [*formulas.values()][1:3] == [f"{sent:.2f}", f"{held:.2f}"]


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
    assert records.name_yaml(strategy, options) == expected


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
        assert records.name_yaml(strategy, options) == path.stem
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
    formulas = rows_in(text, "MB of activations, at most")
    for name, kept in (("ddp", 12 * layer), ("ddp, recomputing", layer + 11 * 4 * tokens * 8)):
        assert formulas[(name, "2")]["MB of activations, at most"] == f"{kept / 1e6:.2f}"
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
    formulas = rows_in(text, "MB sent per step")
    shown, tokens = {name: [*row.values()][1:4] for (name, _), row in formulas.items()}, 32 * 8
    assert shown == {"ddp": ["", "16.00", f"{tokens * 2 * (24 * 8 + 4 * 16) / 1e6:.2f}"],
                     "zero2": ["", "9.00", f"{tokens * 2 * 2 * (8 * 8 + 2 * 16) / 1e6:.2f}"]}


CELLS = {"nodes": 1, "gpus_per_node": 2, "devices": 2, "fixed": None, "speedup": 1.5, "speedup_low": 1.4,
         "speedup_high": 1.6, "efficiency": 0.75, "activation_checkpointing": False, "global_batch_size": 64,
         "losses": [[[1, 2.0, 3.0], [2, 1.5, 4.0]]]}


def frame(*changes):
    rows = [CELLS | change for change in changes]
    return comparing.pd.DataFrame([{"shown": row["strategy"]} | row for row in rows])


def test_pictures_tell_every_rung_apart_without_colour():
    """By name and value where there are bars; by marker and dash where there are lines."""
    markers, lines = zip(*((marker, str(line)) for _, marker, line in pictures.STYLES.values()), strict=True)
    assert len(set(markers)) == len(set(lines)) == len(pictures.STYLES)
    assert len(set(pictures.SHADES)) == len(pictures.SHADES) == len(splitting.PARTS)
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
    pictures.pyplot.close(figure)


def test_bars_carry_their_values_and_the_ideal():
    cells = frame({"strategy": "baseline", "devices": 1, "gpus_per_node": 1}, {"strategy": "ddp"},
                  {"strategy": "zero3", "speedup": 0.5})
    for column, form, values, ideal in (("speedup", "{:.2f}", [1.5, 1.5, 0.5], 2),
                                        ("efficiency", "{:.0%}", [0.75] * 3, 1)):
        figure = pictures.plot_bars(cells, column, None, "", form)
        [axes] = figure.axes
        assert [text.get_text() for text in axes.get_yticklabels()] == [
            "baseline, 1 x 1", "ddp, 1 x 2", "zero3, 1 x 2"]
        assert [text.get_text() for text in axes.texts] == [form.format(value) for value in values]
        assert [bar.get_width() for bar in axes.patches] == values and axes.get_xlim()[0] == 0
        [ticks] = [marks for marks in axes.collections if marks.get_label().startswith("ideal")]
        places = [set(tick[:, 0]) for tick in ticks.get_segments()]
        assert places == [{ideal}] * 2 and axes.get_xlim()[1] > ideal  # none for one device
        pictures.pyplot.close(figure)


def test_stacked_bars_start_at_zero_and_end_at_their_sum():
    """One cell was profiled, the other was not; and their legend has only what is there."""
    nan, cells = float("nan"), frame({"strategy": "ddp"}, {"strategy": "zero3"})
    parts = comparing.pd.DataFrame({
        "computing": [6.0, 7.0], "communication": [nan, 4.0], "predicted communication": [3.0, nan],
        "waiting": [nan] * 2, "loading": [0.0, -1.0], "unexplained": [1.0, -2.0]})
    for known, legend, texts, more in (
            ([nan] * 2, [], [], []), ([8.0, 9.0], ["measured"], ["8.0", "9.0"], [(0, 8), (0, 9)])):
        measured = {"measured": comparing.pd.Series(known)}
        figure = pictures.plot_parts(cells, parts, "ms", "{:.1f}", measured)
        [axes] = figure.axes
        assert [text.get_text() for text in figure.legends[0].texts] == [
            "computing", "communication", "predicted communication", "unexplained", *legend]
        assert [text.get_text() for text in axes.texts] == ["10.0", "11.0", *texts]
        bars = [(round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in axes.patches]
        assert bars == [(0, 6), (0, 7), (6, 0), (7, 4), (6, 3), (11, 0), (9, 1), (11, 0), *more]
        pictures.pyplot.close(figure)
    assert pictures.plot_parts(cells, parts.iloc[:0], "ms", "{:.1f}", measured) is None


def test_losses_over_samples_and_over_seconds():
    """Another dash for another global batch; 60 means of a long run, each of its piece."""
    history = [[step, float(step % 2), step * 2] for step in range(1, 1201)]
    cells = frame({"strategy": "ddp", "losses": [history]},
                  {"strategy": "ddp", "global_batch_size": 128}, {"strategy": "fsdp"})
    for over, start, other in (("samples trained on", 10.5 * 64, [128, 256]),
                               ("seconds of training", 10.5 * 2, [3, 4])):
        figure = pictures.plot_losses(cells, over)
        lines = figure.axes[0].lines
        assert [line.get_linestyle() for line in lines] == ["-", "--", "-"]
        assert list(lines[0].get_ydata()) == [0.5] * 60 and lines[0].get_xdata()[0] == start
        assert list(lines[1].get_xdata()) == other and figure.axes[0].get_xlabel() == over
        pictures.pyplot.close(figure)


def test_bars_for_two_counts_of_devices_and_lines_for_three():
    two = frame({"strategy": "baseline", "devices": 1}, {"strategy": "ddp"})
    three = frame(*({"strategy": "ddp", "devices": n} for n in (1, 2, 4)))
    for cells, bars in ((two, 2), (three, 0)):
        figures = dict(pictures.plot_figures(cells.assign(seconds=3.0, fastest=2.0, slowest=4.0)))
        assert list(figures) == ["time", "speedup", "efficiency"]
        assert {len(figure.axes[0].patches) for figure in figures.values()} == {bars}
    pictures.pyplot.close("all")


@pytest.mark.parametrize("strategy, nccl, gloo", [
    ("baseline", 0, 0), ("ddp", 2, 2), ("zero1", 2, 2.5), ("zero2", 2, 2.5), ("zero2_offload", 2, 2.5),
    ("fsdp_keep", 2, 3), ("fsdp", 3, 4), ("fsdp_offload", 3, 4), ("zero3", 2, 3), ("zero3_offload", 2, 3)])
def test_bytes_sent_by_hand(strategy, nccl, gloo):
    """In (n - 1) / n x 4 bytes a parameter."""
    for over_gloo, passes in ((False, nccl), (True, gloo)):
        assert links.bytes_sent(strategy, 1000, 4, over_gloo) == pytest.approx(passes * 3 / 4 * 4000)
    assert links.bytes_sent("dp", 1000, 4) is None
    # ZeRO-3 gathers again what it may not hold.
    assert links.bytes_sent("zero3", 300e6, 2) == 4 / 2 * 2.9 * 300e6


def test_what_is_no_timing_is_shown_but_not_used(tmp_path):
    folder = tmp_path / "runs"
    write(folder, base=record("baseline"), good=record("ddp", 2, 50),
          stopped=record("ddp", 2, 1, status="preempted"), broken=record("ddp", 2, 1, status="failed"),
          resumed=record("ddp", 2, 1, resumed_from="x"),
          died=record("zero2", 2, 0, status="running", slurm_job_id=7),
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
                 "died (zero2, 1 x 2): died, or is still running: see slurm-7.out",
                 "traced (ddp, 1 x 2): profiled", "skipped half/run.json", "skipped odd/run.json",
                 "skipped nan/run.json", "skipped zero/run.json",
                 "skipped nobody/run.json", "skipped cut/sweep.csv",
                 "zero3-1x2-r1 (zero3, 1 x 2): failed or missing, job 8: see zero3-1x2-r1.log"):
        assert line in text
    assert "good (" not in text and "no result of zero2 on 1 x 2 and zero3 on 1 x 2" in text


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


def test_a_report_lies_with_its_runs(tmp_path):
    """By default; a compressed folder is read as it is, and has the report beside it."""
    write(tmp_path / "runs", base=record("baseline"), ddp=record("ddp", 2, 60))
    (tmp_path / "runs" / "ddp.log").touch()
    packed = shutil.make_archive(str(tmp_path / "packed" / "a"), "xztar", tmp_path / "runs")
    assert [run_report(given)[0] for given in (tmp_path / "runs", packed)] == [0, 0]
    found = [(tmp_path / name / "report.csv").read_text() for name in ("runs", "packed")]
    assert found[0] == found[1] and ",ddp.log," in found[0]


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "a.tar.xz").write_text("x")
    for words, message in (([tmp_path], "no run.json below"), ([tmp_path / "x"], "there is no"),
                           ([tmp_path / "a.tar.xz"], "neither a folder nor a compressed one"),
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


def rows_in(text, column):
    """{(first cell, second one): {column: cell}} of the table that has this column, or {}."""
    for block in text.split("\n\n"):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        if column in lines[0]:
            return {tuple(row[:2]): dict(zip(lines[0][2:], row[2:], strict=True))
                    for row in lines[2:]}
    return {}


def test_prediction_beside_measurement(tmp_path):
    """Hand-computed: a batch of 32 at 51.2 samples/s is 625 ms for the baseline, 750 ms for FSDP on one device. Of
    1,000 parameters, DDP all-reduces 4,000 bytes: 5 + 250 ms; FSDP gathers and scatters 2,000 each: 2 x (5 + 125).
    """
    alone = record("fsdp", 1, 120)
    alone["ranks"][0]["train_cpu"] = 90.0  # another program had a quarter of its core
    write(tmp_path / "runs", base=record("baseline"), one=record("ddp", 1, 100), ddp=record("ddp", 2, 80),
          fsdp=record("fsdp", 2, 90), alone=alone)
    words = "--predict", 4, "--check", check(tmp_path)
    found, text = cells_of(tmp_path / "runs", tmp_path / "out", *words)
    below, above = 1 + prediction.BELOW, 1 + prediction.ABOVE
    busy = below + 0.25 * prediction.BELOW_BUSY, above + 0.25 * prediction.ABOVE_BUSY
    rows = rows_in(text, "miss")
    assert [*rows[("ddp", "1 x 2")].values()] == [
        "625.00", "880.00", f"{880 / below:.2f}", f"{880 * above:.2f}", "1000.00", "-12%"]
    assert [*rows[("fsdp", "1 x 2")].values()] == [
        "750.00", "1010.00", f"{1010 / busy[0]:.2f}", f"{1010 * busy[1]:.2f}", "1125.00", "-10%"]
    # At 4 devices 3 hops of 5 ms, or 2 through a tree, and 6,000 bytes; and a doubling more.
    low, high = 1010 / below**2, 1015 * above**2
    assert [*rows_in(text, "efficiency, predicted")[("ddp", "4")].values()] == [
        "1015.00", f"{low:.2f}-{high:.2f}", "62%", f"{625 / high:.0%}-{min(1, 625 / low):.0%}"]
    assert "miss the measured ones by at most 12% (ddp on 1 x 2: too short)" in text
    names = "step_seconds", *prediction.PREDICTED
    found = {row["run"]: [row[name] for name in names] for row in found}
    assert [*map(float, found["ddp"])] == pytest.approx([1.0, 0.88, 0.88 / below, 0.88 * above])
    assert found["one"][1:] == [""] * 3


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
    row = records.read_record(tmp_path / "runs" / "ddp" / "run.json", tmp_path)
    assert row["loss_history"] == [[1, 2.3, 21], [2, 2.1, 22]]  # the start before the first step
    parts = rows_in(text, "unexplained")
    # 1250 = 625 baseline + 125 bookkeeping + 255 communication + (80 - 72) / 80 waiting + 50 loading + 250 start - 155
    assert parts[("ddp", "1 x 2")] == {
        "step": "1250.00", "computing": "625.00", "bookkeeping": "125.00",
        "predicted communication": "255.00", "waiting": "100.00", "loading": "50.00",
        "start": "250.00", "unexplained": "-155.00"}
    assert [*parts[("baseline", "1 x 1")].values()] == ["625.00", "625.00", *[""] * 4, "0.00", ""]
    folder = tmp_path / "runs" / "traced" / "traces"
    folder.mkdir(parents=True)
    for rank, communicated in ((0, 20), (1, 40)):
        events = [event("ProfilerStep#1", "user_annotation", 0, 100),
                  event("gloo:all_reduce", "cpu_op", 0, communicated)]
        (folder / f"profile_{rank}.json").write_text(json.dumps({"traceEvents": events}))
    (folder.parent / "run.json").write_text(json.dumps(record("ddp", 2, 9, profiled=True)))
    _, text = cells_of(tmp_path / "runs", tmp_path / "out")
    parts = rows_in(text, "unexplained")[("ddp", "1 x 2")]
    assert (parts["communication"], parts["waiting"]) == ("200.00", "100.00")  # 20 %, 30 - 20 %
    assert "predicted communication" not in parts


def first_page(text):
    """The sentences of a report's only workload, and the blocks between them and the details."""
    _, _, shown, *blocks = text.split("\n\n# Details")[0].split("\n\n")
    assert len(re.findall(r"[.](?= |$)", shown)) <= 5, shown
    return shown, blocks


def test_the_first_page_shows_what_its_repeats_carry(tmp_path):
    """DDP is the fastest beyond the repeats; ZeRO-2 and FSDP overlap; ZeRO-3 is slower than one device."""
    times = {"baseline": 100, "ddp": 55, "fsdp": 71, "zero2": 72, "zero3": 111}
    steady = {f"{name}{more}": record(name, 1 if name == "baseline" else 2, middle + more)
              for name, middle in times.items() for more in (-1, 0, 1)}
    write(tmp_path / "runs", **steady, broken=record("zero3", 4, nodes=2, status="failed"))
    text = cells_of(tmp_path / "runs", tmp_path / "out")[1]
    shown, (small, fixed, drawn) = first_page(text)
    assert shown.startswith(
        "The baseline, one device, trains in 100.00 s, 625.00 ms a step. The fastest is ddp on "
        "1 x 2, 1.82 times as fast as one device (efficiency 91%), and 29% faster than fsdp on "
        "1 x 2: more than repeats differ. ddp on 1 x 2, fsdp on 1 x 2 and zero2 on 1 x 2 gain from "
        "more devices; zero3 on 1 x 2 is slower than one device. The largest cost ")
    assert shown.endswith("Mind: no result of zero3 on 2 x 2.")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in small.splitlines()]
    assert [cells[0], *cells[2:]] == [
        ["nodes x devices", "DDP", "FSDP", "ZeRO-2", "ZeRO-3"],
        ["1 x 2", "55.0 s, 1.82×, 91 %", "71.0 s, 1.41×, 70 %", "72.0 s, 1.39×, 69 %",
         "111.0 s, 0.90×, 45 %"], ["2 x 2", "", "", "", "no result"]]
    assert fixed.endswith("efficiency, with the batch per device of the baseline.")
    assert drawn == "![time.png](time.png) ![speedup.png](speedup.png)"
    assert "with the same strategy and batch per device, of ddp on 1 x 2, fsdp on" in text
    write(tmp_path / "runs", ddp9=record("ddp", 2, 90))
    shown, _ = first_page(cells_of(tmp_path / "runs", tmp_path / "out")[1])
    together = "ddp on 1 x 2, fsdp on 1 x 2 and zero2 on 1 x 2 are the fastest, about 1.80 times one device"
    assert f"{together}; their repeats overlap" in shown
    assert "Mind: not safe to rely on: ddp on 1 x 2 (repeats differ by" in shown


def test_what_costs_the_most_and_what_is_in_doubt(tmp_path):
    runs = {f"base{i}": record("baseline", seconds=100 + i) for i in range(2)}
    runs |= {f"one{i}": record("ddp", 1, 101 + i) for i in range(2)}
    runs |= {f"two{i}": record("ddp", 2, 80 + 2 * i) for i in range(2)}
    write(tmp_path / "runs", **runs)
    check(tmp_path / "runs" / "check")
    text = cells_of(tmp_path / "runs", tmp_path / "out")[1]
    assert ("The largest cost besides computing: predicted communication for ddp on 1 x 2 "
            "(255.0 of 1012.5 ms).") in first_page(text)[0] and "Missing: " not in text
    write(tmp_path / "few", base=record("baseline", steps=24), ddp=record("ddp", 2, 50, steps=12))
    shown, _ = first_page(cells_of(tmp_path / "few", tmp_path / "out")[1])
    assert "Mind: each cell was measured only once, so nothing says" in shown
    write(tmp_path / "few", b2=record("baseline", steps=24), d2=record("ddp", 2, 51, steps=12))
    rows, text = cells_of(tmp_path / "few", tmp_path / "out")
    assert {row["basis"] for row in rows} == {"training"}
    assert "baseline on 1 x 1 (14 steady steps)" in first_page(text)[0]


@pytest.mark.parametrize("alone, two", [((90, 110), (85, 105)), ((90, 100, 130), (95, 96))])
def test_a_gain_has_to_beat_the_repeats(tmp_path, alone, two):
    """Those of both cells, or those of the baseline."""
    write(tmp_path / "runs", **{f"b{seconds}": record("baseline", 1, seconds) for seconds in alone},
          **{f"d{seconds}": record("ddp", 2, seconds) for seconds in two})
    shown, _ = first_page(cells_of(tmp_path / "runs", tmp_path / "out")[1])
    assert "No strategy on several devices is faster than one device" in shown
    assert "gain" not in shown


@pytest.mark.parametrize("changes", [
    {}, {"samples_per_second": 0.0}, {"steps": 0, "samples_per_second": None},
    {"device_name": "NVIDIA H200"}, {"script": "x.py", "work": {"sequence_length": None}},
    {"ranks": [dict.fromkeys(("real", "user", "sys"), 1.0) | {
        "rank": 0, "host": "n", "peak_memory_mb": None}]}])
def test_a_report_of_what_is_hardly_known(tmp_path, changes):
    """No formula of a strategy, no rate, steps, length or peak, a GPU: nothing breaks."""
    write(tmp_path / "runs", base=record("baseline", **changes), one=record("ddp", 1, 100, **changes),
          two=record("ddp", 2, 60, **changes), dp=record("dp", 2, 60, **changes),
          alone=record("dp", 1, 99, **changes),
          again=record("baseline", 1, 120, activation_checkpointing=True, **changes))
    check(tmp_path / "runs" / "check", processes=16)
    (tmp_path / "runs" / "old").mkdir()
    (tmp_path / "runs" / "old" / "check.json").write_text('{"latency_seconds": 1, "bandwidth_bytes_per_second": 1}')
    _, text = cells_of(tmp_path / "runs", tmp_path / "out", "--predict", 4)
    rows = rows_in(text, "unexplained")
    assert "skipped" not in text and "None" not in text
    assert bool(rows) == ("samples_per_second" not in changes)
    for row in rows.values():
        step, *parts = (float(cell or 0) for cell in row.values())
        assert sum(parts) == pytest.approx(step, abs=0.05), row


def test_mfu_by_hand():
    row = {"device_name": "NVIDIA A100-SXM4-80GB", "precision": "bf16", "tokens_per_second": 1e5, "devices": 2,
           "layers": 10, "hidden_size": 1000, "intermediate_size": 3000}
    assert comparing.flops_utilization(row) == pytest.approx(6 * 1e8 * 1e5 / 624e12)
    assert comparing.flops_utilization(row | {"precision": "no"}) == pytest.approx(6 * 1e8 * 1e5 / 312e12)
    cpu = {"device_name": "CPU (x86_64)"}
    for unknown in (cpu, {"tokens_per_second": None}, {"layers": None}, {"precision": "fp8"}):
        assert comparing.flops_utilization(row | unknown) is None


@pytest.mark.parametrize("name, peak", [  # bf16 without sparsity, in TFLOP/s
    ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A100-SXM4-40GB", 312),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA H200 NVL", 835), ("NVIDIA L40S", 362), ("NVIDIA GeForce RTX 4090", 165),
    ("NVIDIA L40", None), ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA H100 PCIe MIG 1g.10gb", None)])
def test_the_peak_of_a_gpu_is_never_that_of_a_longer_or_shorter_name(name, peak):
    row = {"device_name": name, "precision": "bf16", "tokens_per_second": 1e5, "devices": 1,
           "layers": 10, "hidden_size": 1000, "intermediate_size": 3000}
    assert comparing.flops_utilization(row) == (peak and pytest.approx(6 * 1e8 * 1e5 / (peak * 1e12)))


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
    formula = memory.bytes_of_activations(4 * 64, 3, 128, 256)
    assert sum(kept.values()) == pytest.approx(formula, rel=0.05), outputs


def event(name, kind, start, end):
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": end - start}


def test_time_shares_by_hand(tmp_path):
    """Ten units: loading 1, compute 2 to 6, communication 4 to 9 of which two are hidden."""
    events = [event("ProfilerStep#12", "user_annotation", 0, 10),
              event("enumerate(DataLoader)#_Single", "user_annotation", 0, 1),
              event("aten::mm", "cpu_op", 2, 5), event("aten::add", "cpu_op", 4, 6),
              event("gloo:all_reduce", "user_annotation", 4, 8), event("gloo:all_reduce", "user_annotation", 7, 9)]
    (tmp_path / "cpu.json").write_text(json.dumps({"traceEvents": events}))
    shares = splitting.time_shares(tmp_path / "cpu.json")
    assert list(shares.values()) == pytest.approx([0.2, 0.2, 0.3, 0.1, 0.2])


def test_time_shares_on_a_gpu_by_hand(tmp_path):
    """As Kineto writes them on CUDA: the CPU is through with both steps at 8, the GPU works on them from 2 to 18.

    Loading 1, copies and kernels 3 to 7, 10 to 14 and 15 to 18, communication 5 to 10 of which two are hidden.
    """
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
    shares = splitting.time_shares(tmp_path / "gpu.json")
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
    formula = links.bytes_sent(name, parameters, 2, gloo=True)
    assert seen == pytest.approx(formula, rel=0.05)


def test_commands_of_the_docs_work(tmp_path):
    """Word for word, in a folder with the files that they name."""
    (tmp_path / "report.py").symlink_to(ROOT / "report.py")
    write(tmp_path / "runs", base=record("baseline"), ddp=record("ddp", 2, 60))
    check(tmp_path / "runs" / "check-ddp-1234")
    (tmp_path / "times.csv").write_text("strategy,nodes,gpus_per_node,seconds\nbaseline,1,1,3m6.619s\n")
    commands = re.findall(r"^python report.py.*$", (ROOT / "docs" / "report.md").read_text(), re.M)
    assert len(commands) >= 3
    for command in commands:
        written = tmp_path / ("" if "--times" in command else "runs") / "report.md"
        written.unlink(missing_ok=True)
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True)
        assert done.returncode == 0 and written.exists(), done.stderr


def test_profiled_runs_show_where_time_goes(tmp_path):
    flags = ["--dataset", "digits", "--profile", "--max_train_steps"]
    traced = launch("ddp", "train_mnist_rnn.py", tmp_path / "runs" / "ddp", *flags, 20)
    assert traced.record["profiled"]
    for rank in (0, 1):
        shares = splitting.time_shares(traced.folder / "traces" / f"profile_{rank}.json")
        assert sum(shares.values()) == pytest.approx(1) and shares["communication"] + shares["both at once"] > 0.01
        assert shares["computation"] > 0.01 and shares["loading data"] > 0 and min(shares.values()) >= 0
    rows, text = cells_of(tmp_path / "runs", tmp_path / "out")
    assert rows == [] and "| ddp " in text and "profiled: not a timing" in text
