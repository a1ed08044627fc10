"""Predictions: the collectives of a step, by formula and counted; lines and steps by hand; and
whether what docs/results predicts holds.
"""

import csv
import json
import re
import runpy
import statistics
import sys
from collections import Counter

import pytest
import torch
import transformers
from conftest import ROOT, run

from planning import facts, links, prediction, traffic
from reporting import splitting

fit_line = runpy.run_path(str(ROOT / "sbatch" / "check.py"))["fit_line"]
BASE = {"layers": 12, "hidden_size": 768, "intermediate_size": 3072}
BASE |= {"positions": 512, "tensors": None}
OPTIONS = {"reduce_bucket_size": 10e6, "stage3_prefetch_bucket_size": 10e6}
OPTIONS |= {"stage3_max_live_parameters": 30e6, "stage3_param_persistence_threshold": 1e4}
EXAMPLE = ROOT / "docs" / "results" / "report-cpu"


def count(*words, **options):
    return Counter(call[:2] for call in traffic.calls_of(traffic.steps_of(*words, **options)))


def test_the_collectives_of_bert_base():
    """DDP's buckets are torch's own. FSDP has 14 units, of which 13 are gathered twice. ZeRO-3's
    gathers are those of DeepSpeed's own algorithm, replayed by another program; and one for each of
    125 small tensors.
    """
    with torch.device("meta"):
        model = transformers.BertForQuestionAnswering(transformers.BertConfig())
    weights = list(model.parameters())
    parts = traffic.parts_of(BASE | {"parameters": sum(weight.numel() for weight in weights)})
    tensors = parts.words + parts.others + sum(parts.layers, []) + parts.head
    assert tensors == [(len(weight), weight[0].numel()) for weight in weights]
    flat = [weight.numel() for weight in weights]
    assign = torch.distributed._compute_bucket_assignment_by_size
    buckets, _ = assign(weights[::-1], [2**20, 25 * 2**20])
    sizes = [4 * sum(flat[::-1][i] for i in bucket) for bucket in buckets]
    reduced = Counter(("all_reduce", size) for size in sizes)
    assert len(sizes) == 13 and count("ddp", parts, 8) == reduced
    names = Counter(name for name, _ in count("fsdp", parts, 4).elements())
    assert names == {"all_gather": 27, "reduce_scatter": 14}
    large = [size for size, _ in reversed(traffic.backward_tensors(parts)) if size > 1e4]
    forward, backward = traffic.gathers_of_zero3(large, 10e6, 30e6)
    assert (len(forward), len(backward)) == (36, 32)
    gathered = [sum(map(sum, found)) / 1e6 for found in (forward, backward)]
    assert gathered == pytest.approx([111.1, 78.1], abs=0.1)
    kept = traffic.steps_of("zero3", parts, 4, options=OPTIONS)[0].end
    assert [call.name for call in kept] == ["all_gather"] * 125 + ["all_reduce"]


def test_zero_pieces_by_hand():
    """1,000 parameters in tensors of 400, 300 and 300, buckets of 500, four owners of 250. From
    the end: 300 are 250 and 50, 300 are 200 and 100, 400 are 150 and 250.
    """
    parts = traffic.Parts([], traffic.vectors([400, 300, 300]), [], [])
    options = OPTIONS | {"reduce_bucket_size": 500, "stage3_param_persistence_threshold": 350}
    pieces = Counter(("reduce", 4 * size) for size in (50, 100, 150, 200, 250, 250))
    one_each = options | {"use_multi_rank_bucket_allreduce": False}
    assert count("zero2", parts, 4, options=one_each) == pieces | {("all_gather", 4000): 1}
    buckets = Counter(("all_reduce", 4 * size) for size in (300, 300, 400))
    assert count("zero2", parts, 4, options=options) == buckets | {("all_gather", 4000): 1}
    calls = {("all_gather", 1600): 1, ("all_gather", 1200): 2, ("all_reduce", 8): 1}
    calls |= {("reduce_scatter", 1600): 1, ("reduce_scatter", 1200): 2}
    assert count("zero3", parts, 4, options=options) == calls


def test_a_line_and_the_seconds_of_a_collective_by_hand():
    """100 µs and 1 GB/s, without and with noise. Then 1,000 bytes on a link of 1,000 bytes per
    second and 10 ms, or no latency in a row, which two ranks measured.
    """
    points = [(size, 1e-4 + size / 1e9) for size in (1e2, 1e3, 1e4, 1e5, 1e6, 1e7)]
    assert list(fit_line(points).values()) == pytest.approx([1e-4, 1e9, 0], 1e-6, 1e-9)
    noise = zip(points, 3 * [0.9, 1.1], strict=True)
    _, bandwidth, residual = fit_line([(x, y * factor) for (x, y), factor in noise]).values()
    assert 0.03 < residual < 0.1 and bandwidth == pytest.approx(1e9, rel=0.2)
    link = links.link_of(1000, 0.01)
    link["collectives"]["reduce"]["in_a_row"]["latency_seconds"] = 0  # that of all
    for name, ranks, tree, hops, carried in (
        ("all_reduce", 2, False, 1, 1.0),
        ("all_reduce", 8, False, 7, 1.75),
        ("all_reduce", 8, True, 3, 1.75),
        ("all_gather", 4, False, 3, 0.75),
        ("reduce_scatter", 4, False, 3, 0.75),
        ("broadcast", 8, False, 3, 1.0),
    ):
        for in_a_row, latency in ((False, 0.01), (True, 0)):
            found = links.seconds_of(traffic.Call(name, 1000), in_a_row, link, ranks, tree)
            assert found == pytest.approx(hops * latency + carried)


def test_steps_by_hand():
    """Forward 3 s, backward 6 s in two stages; calls of 1 s, or of 4 s."""

    def step(before=0, after=0, end=0):
        stages = ([], 1 / 3, []), ([call] * before, 1 / 3, [call] * after), ([], 1 / 3, [])
        return traffic.Step([traffic.Stage(*stage) for stage in stages], [call] * end)

    call = traffic.Call("all_reduce", 1)
    for steps, seconds, overlap, busy, expected in (
        ([step()], 1, False, 0, 9),
        ([step(1, 1, 1)], 1, False, 0, 12),
        ([step(after=1)], 1, True, 0, 9),  # hidden behind the last stage
        ([step(after=1)], 4, True, 0, 10),  # 3 of 4 s hidden
        ([step(after=1)], 1, True, 1, 10),  # the same cores do both
        ([step(before=1)], 1, True, 0, 9),  # fetched during the first stage
        ([step(before=1)], 4, True, 0, 10),
        ([step(end=1)], 1, True, 0, 10),
        ([step(), step(after=1)], 4, True, 0, 19),
    ):
        alone, cost = 9 * len(steps), lambda *_, seconds=seconds: seconds
        found = prediction.step_seconds(alone, steps, cost, overlap, busy)
        assert found == pytest.approx(expected)
    rows, first = [], traffic.Step([traffic.Stage([call], 0, [])], [])
    prediction.step_seconds(1, [first, step(2, 2)], lambda _, row: rows.append(row) or 0, False)
    assert rows == [True, False, True, False, True]  # in a row: nothing computed in between


def rows_of(path):
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def remade(tmp_path_factory):
    """The example report, made anew from its records."""
    folder = tmp_path_factory.mktemp("example")
    words = [EXAMPLE / "records.tar.xz", "--predict", "8", "--output_dir", folder]
    done = run([sys.executable, "report.py", *words])
    assert done.code == 0, done.err
    return folder


def test_the_example_report_is_what_its_records_give(remade):
    """And nothing was edited by hand; its page has the tables of misses, without the shapes."""
    for old, new in zip(*(rows_of(path / "report.csv") for path in (EXAMPLE, remade)), strict=True):
        for name, cell in old.items():
            assert cell == new[name] or float(cell) == pytest.approx(float(new[name])), name
    old, made = (path.read_text() for path in (EXAMPLE / "report.md", remade / "report.md"))
    assert old.split() == made.split()
    pages = (EXAMPLE / "README.md").read_text(), made
    tables = [re.findall(r"^\|(.* [-+]\d+%) *\|$", page, re.M) for page in pages]
    shown, misses = ([[cell.strip() for cell in row.split("|")] for row in rows] for rows in tables)
    assert [row[1:] for row in shown] == [[row[0], *row[2:]] for row in misses] and misses


def test_the_intervals_of_the_docs_hold(remade):
    """They have nine of ten of the measured cells that docs/results shows, and are narrow."""
    rows = rows_of(remade / "report.csv") + rows_of(ROOT / "docs/results/links-cpu/links.csv")
    names = ("step_seconds", *splitting.PREDICTED)
    predicted = [row for row in rows if row["predicted_step_seconds"]]
    cells = [[float(row[name]) for name in names] for row in predicted]
    inside = sum(low <= measured <= high for measured, _, low, high in cells)
    widths = [(high - low) / 2 / step for _, step, low, high in cells]
    assert len(cells) >= 35 and inside >= 0.9 * len(cells) and statistics.median(widths) <= 0.25


def test_a_load_widens_the_interval():
    """Whether the run on one device met it, or the check of the link."""
    link, alone = links.link_of(1e9, 1e-5), {"busy_share": 1.0}
    low, high = prediction.interval(1, 1, alone, 2, link)
    loaded = prediction.interval(1, 1, alone, 2, link | {"core_share": 0.5})
    assert loaded == prediction.interval(1, 1, {"busy_share": 0.5}, 2, link)
    assert loaded[0] < low < 1 < high < loaded[1] and loaded[1] - loaded[0] <= 1


def test_planning_does_without_reports():
    """A formula may serve a report, and never the other way round."""
    for path in (ROOT / "planning").glob("*.py"):
        assert not re.search(r"^\s*(from|import) reporting", path.read_text(), re.M), path.name


def test_links_of_two_networks_are_not_averaged(tmp_path):
    for name, network, bandwidth in (("a", "ib0", 20e9), ("b", "ib0", 22e9), ("c", "eth0", 1e9)):
        (tmp_path / name).mkdir()
        link = links.link_of(bandwidth, 1e-5) | {"network": network}
        (tmp_path / name / "check.json").write_text(json.dumps(link))
    found = [link["collectives"]["all_reduce"] for link in links.find_links(tmp_path)]
    assert [line["bandwidth_bytes_per_second"] for line in found] == [21e9, 1e9]


def test_hsdp_gathers_over_the_link_inside_a_node():
    both = [links.link_of(1e6, 0), links.link_of(1e12, 0) | {"nodes": 1}]
    row = dict.fromkeys([*facts.ARCHITECTURE, "tensors"]) | {"precision": "no", "parameters": 10**6}
    row |= {"strategy": "hsdp", "strategy_options": '{"dp_shard_size": 2}', "device_name": "CPU"}
    row |= {"nodes": 2, "devices": 4, "gradient_accumulation_steps": 1}
    across, inside = links.find_link(row, both), links.find_inside(row, both)
    assert prediction.predict(1, row, 4, across, inside=inside) == pytest.approx(3, rel=1e-3)
