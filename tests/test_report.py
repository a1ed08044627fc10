"""report.py: parsing, medians, what is compared with what, what is missing, formulas."""

import csv
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
import yaml
from conftest import ROOT, launch, run
from test_bert import TINY

import report
import train_bert_squad


def run_report(*words):
    done = run([sys.executable, "report.py", *map(str, words)])
    return done.code, done.out, done.err


def record(strategy, devices=1, seconds=100.0, nodes=1, batch=32, **changes):
    """A run record as the scripts leave it, with what the report reads."""
    work = {"model": "lstm-64", "dataset": "digits", "samples": 1280, "eval_samples": 360, "sequence_length": 8,
            "epochs": 4, "steps": None, "per_device_batch_size": batch, "gradient_accumulation_steps": 1,
            "precision": "no", "dynamo": "no"} | changes.pop("work", {})
    ranks = [{"rank": rank, "host": f"n{rank}", "real": 118.544, "user": 100.0, "sys": 3.25,
              "peak_memory_mb": 500 + rank} for rank in range(devices)]
    return {"script": "train_mnist_rnn.py", "strategy": strategy, "nodes": nodes, "devices": devices, "ranks": ranks,
            "device_name": "CPU (x86_64)", "global_batch_size": batch * devices, "workload": work, "parameters": 1000,
            "seconds": {"startup": 5.0, "train": seconds, "eval": 1.0, "total": seconds + 10},
            "tokens_per_second": None, "samples_per_second": 5120 / seconds,
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
    assert cells == ["ddp", "2 x 1", "64", "3", "60.00", "55.00-80.00", "70.0", "85.3", "501", "", "batch per device",
                     "1.67", "83%", "d2", "d2.log"]
    for name in ("time", "speedup", "efficiency", "throughput", "memory", "loss"):
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
        assert path.stem in report.STYLES


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


def test_a_prediction_leaves_out_what_recomputes(tmp_path):
    again = {"activation_checkpointing": True}
    write(tmp_path / "runs", slow=record("baseline", seconds=200, batch=64, **again), base=record("baseline"),
          ddp=record("ddp", 2, 80, **again), zero1=record("zero1", 2, 80))
    code, out, _ = run_report(tmp_path / "runs", "--predict", 2, "--bandwidth", 1, "--latency", 1, "--output_dir",
                              tmp_path / "out")
    assert code == 0 and "one device's step 625.00 ms" in out
    lines = [line.split("|") for line in out.splitlines() if "62%" in line or "100%" in line]
    assert "zero1" in {line[1].strip() for line in lines}
    assert not [line for line in lines if line[1].strip() == "ddp" and len(line) == 8]


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


def test_plots_tell_every_rung_apart_without_colour(monkeypatch):
    markers, lines = zip(*((marker, str(line)) for _, marker, line in report.STYLES.values()), strict=True)
    assert len(set(markers)) == len(set(lines)) == len(report.STYLES)
    points = {"nodes": 1, "fixed": None, "seconds": 5.0, "fastest": 5.0, "slowest": 5.0}
    cells = [points | {"strategy": strategy, "shown": shown, "devices": devices, "activation_checkpointing": again}
             for devices in (2, 4) for strategy, shown, again in (
                 ("fsdp", "fsdp", False), ("fsdp_keep", "fsdp_keep", False), ("fsdp", "fsdp, recomputing", True))]
    figure, axes = report.pyplot.subplots()
    report.plot_points(axes, report.pd.DataFrame(cells), "seconds")
    drawn = {line.get_label(): (line.get_marker(), line.get_markersize(), list(line.get_xdata()))
             for line in axes.lines}
    report.pyplot.close(figure)
    assert drawn == {"fsdp": ("^", 5, [2, 4]), "fsdp_keep": ("<", 5, [2, 4]), "fsdp, recomputing": ("^", 9, [2, 4])}


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


def test_prediction_beside_measurement(tmp_path):
    """Hand-computed: 1,000 parameters; 51.2 samples/s alone and a batch of 32 is a step of 0.625 s."""
    write(tmp_path / "runs", base=record("baseline"), ddp=record("ddp", 2, 80), fsdp=record("fsdp", 2, 90))
    (tmp_path / "check.json").write_text('{"bandwidth_bytes_per_second": 16000, "latency_seconds": 0.005}')
    code, out, err = run_report(tmp_path / "runs", "--predict", 4, "--check", tmp_path / "check.json", "--output_dir",
                                tmp_path / "out")
    assert code == 0, err
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    rows = {tuple(cells[:2]): cells[2:] for cells in lines if len(cells) == 6 and cells[1].isdigit()}
    # DDP at 2: 4,000 bytes in 0.25 s; at 4: 6,000 in 0.375 s; FSDP twice as many over gloo; each + 5 ms.
    assert rows[("ddp", "2")] == ["625.00-880.00", "71%-100%", "1000.00", "62%"]
    assert rows[("ddp", "4")][:2] == ["625.00-1005.00", "62%-100%"]
    assert rows[("fsdp", "2")][0] == "625.00-1130.00" and rows[("fsdp", "4")] == ["755.00-1380.00", "45%-83%", "", ""]


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
    encoder = train_bert_squad.SpanBert(config).bert.encoder
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
    ("ddp", 2), ("fsdp", 4), ("zero1", 2.5), ("zero2", 2.5), ("zero3", 3), ("fsdp_keep", 3), ("fsdp_offload", 4),
    ("zero2_offload", 2.5), ("zero3_offload", 3)])
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
    (tmp_path / "runs" / "check-ddp-1234").mkdir()
    link = {"bandwidth_bytes_per_second": 1e9, "latency_seconds": 1e-4}
    (tmp_path / "runs" / "check-ddp-1234" / "check.json").write_text(json.dumps(link))
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
    short = launch("ddp", "train_mnist_rnn.py", tmp_path / "short", *flags, 16, ok=False)
    assert short.error_line() == "error: --profile needs 17 steps, and this run has 16"
