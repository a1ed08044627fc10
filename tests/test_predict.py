"""Predictions: the collectives of a step, by formula and counted; lines; steps by hand; and whether
what docs/results predicts holds.
"""

import collections
import csv
import itertools
import json
import math
import re
import runpy
import statistics
import sys

import pytest
import torch
import transformers
from conftest import ROOT, launch, run
from test_bert import TINY

from reporting import links, prediction

BASE = {"layers": 12, "hidden_size": 768, "intermediate_size": 3072, "positions": 512,
        "tensors": None}
fit_line = runpy.run_path(str(ROOT / "sbatch" / "check.py"))["fit_line"]
BASE_SIZES = {"vocab_size": 30522, "num_hidden_layers": 12, "hidden_size": 768,
              "intermediate_size": 3072}
OPTIONS = {"reduce_bucket_size": 10e6, "stage3_prefetch_bucket_size": 10e6,
           "stage3_max_live_parameters": 30e6, "stage3_param_persistence_threshold": 1e4}


def bert(**sizes):
    """A BERT for questions without memory, for its shapes."""
    config = transformers.BertConfig.from_pretrained(ROOT / "tests" / "data" / "tiny_bert", **sizes)
    with torch.device("meta"):
        return transformers.BertForQuestionAnswering(config), config


@pytest.mark.parametrize("sizes", [{}, BASE_SIZES])
def test_a_model_is_taken_apart_from_its_record(sizes):
    model, config = bert(**sizes)
    real = [weight.numel() for weight in model.parameters()]
    parts = prediction.parts_of({
        "parameters": sum(real), "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "positions": config.max_position_embeddings, "tensors": None})
    flat = parts.words + parts.others + sum(parts.layers, []) + parts.head
    assert flat == real
    backward = prediction.backward_tensors(parts)
    assert [size for size, _ in backward[:2]] == [real[-1], real[-2]]
    assert sum(size for size, _ in backward) == sum(real)
    other = prediction.parts_of(dict.fromkeys(BASE) | {"parameters": 1000})
    assert other == prediction.Parts([], [1000], [], []) and prediction.parts_total(other) == 1000


def test_ddp_buckets_are_torchs_own():
    """Of BERT-base, whose last bucket holds the word embeddings and part of layer 0."""
    model, _ = bert(**BASE_SIZES)
    weights = [torch.empty(weight.shape, device="meta") for weight in model.parameters()][::-1]
    real, _ = torch.distributed._compute_bucket_assignment_by_size(weights, [2**20, 25 * 2**20])
    sizes = [4 * sum(weights[i].numel() for i in bucket) for bucket in real]
    total = sum(weight.numel() for weight in weights)
    [step] = prediction.steps_of("ddp", prediction.parts_of(BASE | {"parameters": total}), 8)
    assert [call.bytes for call in prediction.calls_of([step])] == sizes
    assert len(sizes) == 13 and sizes[-1] / 2**20 == pytest.approx(109, abs=1)


def test_fsdp_units_of_bert_base():
    """12 layers, the word embeddings and the root: 14 units, of which 13 are gathered twice."""
    parts = prediction.parts_of(BASE | {"parameters": 108_893_186})
    for name, gathers in (("fsdp", 27), ("fsdp_keep", 14)):
        calls = prediction.calls_of(prediction.steps_of(name, parts, 4))
        assert collections.Counter(call.name for call in calls) == {
            "all_gather": gathers, "reduce_scatter": 14}
    sent = sum(call.bytes for call in calls if call.name == "reduce_scatter")
    assert sent == 4 * 108_893_186


def test_zero3_gathers_bert_base_in_pieces():
    """The sizes that DeepSpeed's own algorithm gathers, module by module: 37 and 32 gathers of 111
    and 78 million parameters, replayed by another program; and 125 small tensors.
    """
    parts = prediction.parts_of(BASE | {"parameters": 108_893_186})
    large = [size for size, _ in reversed(prediction.backward_tensors(parts)) if size > 1e4]
    forward, backward = prediction.gathers_of_zero3(large, 10e6, 30e6)
    assert (len(forward), len(backward)) == (36, 32)
    assert sum(forward) / 1e6 == pytest.approx(111.1, abs=0.1)
    assert sum(backward) / 1e6 == pytest.approx(78.1, abs=0.1)
    kept = prediction.steps_of("zero3", parts, 4, options=OPTIONS)[0].end
    assert [call.name for call in kept] == ["all_gather"] * 125 + ["all_reduce"]


def test_zero_pieces_by_hand():
    """1,000 parameters in tensors of 400, 300 and 300, buckets of 500, four owners of 250. From
    the end: 300 are 250 and 50, 300 are 200 and 100, 400 are 150 and 250.
    """
    parts = prediction.Parts([], [400, 300, 300], [], [])
    options = OPTIONS | {"reduce_bucket_size": 500}
    [step] = prediction.steps_of("zero2", parts, 4, options=options)
    *reduces, gather = prediction.calls_of([step])
    assert sorted(call.bytes / 4 for call in reduces) == [50, 100, 150, 200, 250, 250]
    assert {call.name for call in reduces} == {"reduce"} and gather == ("all_gather", 4000)
    options |= {"stage3_param_persistence_threshold": 350}
    calls = prediction.calls_of(prediction.steps_of("zero3", parts, 4, options=options))
    assert collections.Counter(calls) == {
        ("all_gather", 1600): 1, ("all_gather", 1200): 2,
        ("reduce_scatter", 1200): 2, ("reduce_scatter", 1600): 1, ("all_reduce", 8): 1}


def counted(calls, steps):
    """{(collective, bytes): times in a step} of what a spy noted in `steps` steps."""
    names = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "reduce_": "reduce",
             "_reduce_scatter_base_": "reduce_scatter"}
    found = collections.Counter((names.get(name, name), size) for name, size in calls)
    return {call: times / steps for call, times in found.items()}


MNIST = ["train_mnist_rnn.py", "--dataset", "digits", "--per_device_train_batch_size", "8"]
BERT = ["train_bert_squad.py", *TINY, "--per_device_train_batch_size", "2"]
slow = pytest.mark.slow


@pytest.mark.parametrize("strategy, script, micro_batches, precision", [
    ("ddp", BERT, 2, "no"), ("fsdp", BERT, 2, "no"),
    *(pytest.param(*case, marks=slow) for case in (
        ("fsdp_keep", BERT, 2, "no"), ("zero1", BERT, 2, "no"), ("zero2", BERT, 2, "no"),
        ("zero3", BERT, 2, "no"), ("fsdp", BERT, 1, "bf16"), ("zero3", BERT, 1, "bf16"),
        ("ddp", MNIST, 1, "no"), ("fsdp", MNIST, 1, "no"), ("zero2", MNIST, 1, "no"),
        ("zero3", MNIST, 1, "no")))])  # fmt: skip
def test_collectives_by_formula_and_counted(tmp_path, strategy, script, micro_batches, precision):
    """All that goes to the process group in ten steps of two real processes, but for the meetings
    in which losses come home.
    """
    run = launch(strategy, script[0], tmp_path / "run", *script[1:], "--max_train_steps", 14,
                 "--gradient_accumulation_steps", micro_batches, env={"SPY_CALLS": str(tmp_path)},
                 launcher=["--mixed_precision", precision])
    seen = counted(json.loads((tmp_path / "calls_0.json").read_text()), 10)
    work = run.record["workload"]
    parts = prediction.parts_of(
        {name: work.get(name, run.record.get(name)) for name in [*BASE, "parameters"]})
    steps = prediction.steps_of(strategy, parts, 2, micro_batches, precision,
                             run.record["strategy_options"])
    for (name, size), times in collections.Counter(prediction.calls_of(steps)).items():
        margin = min(32, size / 4)  # what is padded
        near = [call for call in seen if call[0] == name and abs(call[1] - size) <= margin]
        assert sum(seen.pop(call) for call in near) == pytest.approx(times, abs=0.15), (
            name, size, times, seen)
    if strategy == "ddp":
        seen.pop(("broadcast_", 8192), None)  # of BERT's buffers: left out
    rest = {call: times for call, times in seen.items() if call[1] > 100 or times > 0.3}
    assert not rest, rest


def test_a_line_by_hand():
    """100 µs and 1 GB/s, without and with noise."""
    points = [(size, 1e-4 + size / 1e9) for size in (1e2, 1e3, 1e4, 1e5, 1e6, 1e7)]
    line = fit_line(points)
    assert line["latency_seconds"] == pytest.approx(1e-4)
    assert line["bandwidth_bytes_per_second"] == pytest.approx(1e9)
    assert line["residual"] == pytest.approx(0, abs=1e-9)
    noisy = fit_line([(size, seconds * (1.1 if i % 2 else 0.9))
                              for i, (size, seconds) in enumerate(points)])
    assert 0.03 < noisy["residual"] < 0.1
    assert noisy["bandwidth_bytes_per_second"] == pytest.approx(1e9, rel=0.2)
    falling = fit_line([(1, 2.0), (2, 1.0), (3, 1.0)])
    assert falling["bandwidth_bytes_per_second"] == pytest.approx(1e15)
    assert falling["latency_seconds"] > 1


@pytest.mark.parametrize("name, ranks, tree, seconds", [
    ("all_reduce", 2, False, 0.01 + 1.0), ("all_reduce", 8, False, 0.07 + 1.75),
    ("all_reduce", 8, True, 0.03 + 1.75), ("all_gather", 4, False, 0.03 + 0.75),
    ("reduce_scatter", 4, False, 0.03 + 0.75), ("broadcast", 8, False, 0.03 + 1.0)])
def test_seconds_of_a_collective_by_hand(name, ranks, tree, seconds):
    """1,000 bytes on a link of 1,000 bytes per second and 10 ms, which two ranks measured."""
    link = links.link_of(1000, 0.01)
    call = prediction.Call(name, 1000)
    assert links.seconds_of(call, False, link, ranks, tree) == pytest.approx(seconds)
    link["collectives"][name]["in_a_row"]["latency_seconds"] = 0
    rest = links.seconds_of(call, True, link, ranks, tree)
    assert 0.005 < seconds - rest < 0.08 and rest >= 0.75


def test_steps_by_hand():
    """Forward 3 s, backward 6 s in two stages; calls of 1 s, or of 4 s."""
    def step(before, after, end):
        stages = ([], 1 / 3, []), (before, 1 / 3, after), ([], 1 / 3, [])
        return prediction.Step([prediction.Stage(*stage) for stage in stages], end)

    call = prediction.Call("all_reduce", 1)
    cases = [  # (step, seconds of a call, overlap, busy): seconds of the step
        (step([], [], []), 1, False, 0, 9), (step([call], [call], [call]), 1, False, 0, 12),
        (step([], [call], []), 1, True, 0, 9),  # hidden behind the last stage
        (step([], [call], []), 4, True, 0, 10),  # 3 of 4 s hidden
        (step([], [call], []), 1, True, 1, 10),  # the same cores do both
        (step([call], [], []), 1, True, 0, 9),  # fetched during the first stage
        (step([call], [], []), 4, True, 0, 10), (step([], [], [call]), 1, True, 0, 10)]
    for steps, seconds, overlap, busy, expected in cases:
        found = prediction.step_seconds(9, [steps], lambda *_: seconds, overlap, busy)  # noqa: B023
        assert found == pytest.approx(expected)
    twice = [step([], [], []), step([], [call], [])]
    assert prediction.step_seconds(18, twice, lambda *_: 4, True) == pytest.approx(19)
    rows = []
    several = step([call], [call, call], [call, call])._replace(stages=[
        prediction.Stage([call, call], 0.5, []), prediction.Stage([call], 0.5, [call]),
        prediction.Stage([call], 0.0, [call])])
    prediction.step_seconds(1, [several], lambda _, in_a_row: rows.append(in_a_row) or 0, False)
    assert rows == [True, True, False, False, True, True, True, True]


def test_what_is_not_known_is_not_predicted():
    row = {"strategy": "dp", "model": "x", "parameters": 10, "layers": math.nan,
           "hidden_size": math.nan, "intermediate_size": math.nan, "positions": math.nan,
           "tensors": None, "precision": "no",
           "gradient_accumulation_steps": 1, "strategy_options": None, "device_name": "CPU"}
    link = links.link_of(1e9, 1e-6)
    assert prediction.predict(1.0, row, 2, link) is None
    assert prediction.predict(1.0, row | {"strategy": "pipeline"}, 2, link) is None
    assert prediction.predict(1.0, row | {"strategy": "baseline"}, 1, link) == 1.0


def test_the_intervals_of_the_docs_hold():
    """They have nine of ten of the measured cells that docs/results shows, and are narrow."""
    rows = []
    for table in ("report-cpu/report.csv", "links-cpu/links.csv"):
        with open(ROOT / "docs" / "results" / table) as file:
            rows += [row for row in csv.DictReader(file) if row["predicted_step_seconds"]]
    inside, widths = 0, []
    for row in rows:
        step, *ends = (float(row[name]) for name in prediction.PREDICTED)
        inside += ends[0] <= float(row["step_seconds"]) <= ends[1]
        widths.append((ends[1] - ends[0]) / 2 / step)
    assert len(rows) >= 35 and inside >= 0.9 * len(rows) and statistics.median(widths) <= 0.25


def test_the_page_of_the_example_report_has_its_misses():
    """The table in its README is the two tables of report.md, without the column of shapes."""
    folder = ROOT / "docs" / "results" / "report-cpu"
    shown, made = ([[cell.strip() for cell in line.strip("|").split("|")]
                    for line in (folder / name).read_text().splitlines()
                    if re.search(r" [-+]\d+% *\|$", line)] for name in ("README.md", "report.md"))
    assert [row[1:] for row in shown] == [[row[0], *row[2:]] for row in made] and len(made) == 8


def test_the_example_report_is_what_its_records_give(tmp_path):
    """And nothing was edited by hand."""
    folder = ROOT / "docs" / "results" / "report-cpu"
    done = run([sys.executable, "report.py", folder / "records.tar.xz", "--predict", "8",
                "--output_dir", tmp_path])
    assert done.code == 0, done.err
    tables = []
    for path in (folder, tmp_path):
        with open(path / "report.csv") as file:
            tables.append(list(csv.DictReader(file)))
    assert len(tables[0]) == len(tables[1]) > 17
    for old, new in zip(*tables, strict=True):
        for name in ("strategy", "seconds", "step_seconds", "speedup", "predicted_step_seconds"):
            if old[name] != new[name]:
                assert float(old[name]) == pytest.approx(float(new[name])), name
    old, new = ((path / "report.md").read_text().split() for path in (folder, tmp_path))
    assert old == new


def test_the_predicted_order_of_the_docs_is_the_measured_one():
    """On each link, wherever two strategies differ by more than 25 %."""
    with open(ROOT / "docs" / "results" / "links-cpu" / "links.csv") as file:
        rows = list(csv.DictReader(file))
    pairs = 0
    for a, b in itertools.product(rows, rows):
        names = ("script", "link", "gradient_accumulation_steps")
        alike = all(a[name] == b[name] for name in names)
        if alike and 1.25 * float(a["step_seconds"]) < float(b["step_seconds"]):
            pairs += 1
            assert float(a["predicted_step_seconds"]) < float(b["predicted_step_seconds"]), (a, b)
    assert pairs > 20
