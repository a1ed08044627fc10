"""docs/lab/11-profile.md: its commands run in small, and leave what the page says to look for; its
pictures are those of the script.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from conftest import ROOT, environment, run, run_forked
from test_lab import blocks_of, check_kind
from test_predict import BASE

from reporting import links, prediction, splitting

sys.path.insert(0, str(ROOT / "docs" / "img"))
import draw_traces  # noqa: E402

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "lab" / "11-profile.md"
TEXT = PAGE.read_text()
WORDS = " ".join(TEXT.split())  # however the lines are broken
KEPT = ROOT / "docs" / "img" / "traces"
PARAMETERS = 10_977_794
SMALLER = {"hidden_size=384": "hidden_size=96", "intermediate_size=1536": "intermediate_size=192",
           "num_hidden_layers=6": "num_hidden_layers=2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the page's commands leave. Ranks are forked: `accelerate` only notes what to launch."""
    folder, settings = tmp_path_factory.mktemp("lab"), []
    noted = folder / "launches"
    note = f'accelerate() {{ printf "%s\\n" "$@" "" >> {shlex.quote(str(noted))}; }}'
    for commands, pasted in blocks_of(TEXT):
        noted.write_text("")
        for long, short in SMALLER.items():
            commands = commands.replace(long, short)
        lines = commands.replace("runs/lab", str(folder)).splitlines()
        shell = subprocess.run(
            ["bash"], input="\n".join(["set -e", note, *settings, *lines]), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, env=environment({}))
        assert shell.returncode == 0, f"{commands}\n{shell.stdout}"
        for launch in noted.read_text().split("\n\n")[:-1]:
            launcher, *words = launch.splitlines()
            assert launcher == "launch"
            start = words.index("train_bert_squad.py")
            result = run_forked([*words[:start], "--main_process_port", "0"], words[start:],
                                folder, {}, 120)
            assert result.code == 0, f"{launch}\n{result.err}"
        check_kind(pasted, shell.stdout.replace(str(folder), "runs/lab"))
        settings += [line for line in lines if re.match("[A-Z]+=", line)]
    return folder / "traces"


def names_of(trace):
    return {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}


def test_what_to_search_for_is_in_the_traces(folder):
    rows = re.findall(r"^\| `(\S+)` \| (.*) \|$", TEXT, re.M)
    assert len(rows) == 7
    for strategy in ("ddp", "fsdp"):
        for rank in (0, 1):
            names = names_of(folder / strategy / "traces" / f"profile_{rank}.json")
            for searched, meaning in rows:
                found = any(name.startswith(searched) for name in names)
                assert found == (strategy == "fsdp" or "FSDP only" not in meaning), searched


def test_the_report_has_the_shares(folder):
    runs = sorted(path.parent.name for path in folder.glob("*/run.json"))
    assert len(runs) == 7
    text = (folder / "report.md").read_text()
    for name in runs:
        assert len(re.findall(rf"^\| {name} +\|.*%", text, re.M)) == 2, name
    for name in ("ddp", "fsdp"):
        for rank in (0, 1):
            shares = splitting.time_shares(folder / name / "traces" / f"profile_{rank}.json")
            assert sum(shares.values()) == pytest.approx(1) and shares["communication"] > 0
            row = [f"{share:.0%}" for share in shares.values()]
            assert re.search(rf"\| {name} .*\| {rank} *\| *" + r" *\| *".join(row), text), name


def test_fresh_traces_can_be_drawn(folder):
    drawn = json.loads((folder / "traces.json").read_text())
    for picture in ("ddp", "fsdp"):
        root = ET.parse(folder / f"{picture}.svg").getroot()
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {"rank 0", "rank 1", "computes", "communicates", "AR: all-reduce"} <= set(texts)
        assert ("AG: all-gather" in texts) == (picture == "fsdp")
        for rank in drawn[picture]["ranks"]:
            start, end = rank["step"]
            assert 0 <= start < end and rank["forward"] and rank["backward"] and rank["optimizer"]


def test_pictures_are_those_that_the_script_draws(tmp_path):
    shutil.copy(KEPT / "traces.json", tmp_path)
    assert run([sys.executable, "docs/img/draw_traces.py", "--to", str(tmp_path)]).code == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in KEPT.iterdir()}
    shown = re.findall(r"\(\.\./img/traces/(.*?)\)", TEXT)
    assert sorted([*shown, "traces.json"]) == sorted(drawn)


def test_the_predictions_are_those_of_predict_and_report():
    parts = prediction.parts_of(BASE | {"parameters": PARAMETERS, "layers": 6, "hidden_size": 384,
                                        "intermediate_size": 1536})
    calls = {name: [call.name for call in prediction.calls_of(prediction.steps_of(name, parts, 2))]
             for name in ("ddp", "fsdp")}
    kept = json.loads((KEPT / "traces.json").read_text())
    for strategy, expected in calls.items():
        for rank in kept[strategy]["ranks"]:
            assert len(rank["calls"]) == len(expected)
    gathers = calls["fsdp"].count("all_gather")
    assert f"It makes {len(calls['fsdp'])} calls: 8 all-gathers for the forward pass" in WORDS
    assert f"{gathers - 8} for the backward pass, and {calls['fsdp'].count('reduce_scatter')} " \
        "reduce-scatters" in WORDS
    sizes = [4 * size for size, _ in prediction.backward_tensors(parts)]
    *first, last = (sum(sizes[i] for i in bucket) / 1e6
                    for bucket in prediction.fill_buckets(sizes, 25 * 2**20, first=2**20))
    assert f"one per bucket: {first[0]:.1f}, {first[1]:.1f} and {last:.1f} MB" in WORDS
    assert f"{last:.2f} MB / 0.125 GB/s = {last / 0.125:.0f} ms" in WORDS
    sent = links.bytes_sent("fsdp", PARAMETERS, 2, gloo=True)
    assert f"sends {sent / 1e6:.0f} MB per rank and step. That is {sent / 0.125e9:.1f} s" in WORDS


def test_the_answers_are_about_the_pasted_report_and_the_pictures():
    shares = {}
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 8 and cells[0].startswith(("ddp", "fsdp")):
            shares.setdefault(cells[0], {})[cells[2]] = cells[5]
    least = {name: min(shares[name].values(), key=lambda share: int(share[:-1])) for name in shares}
    for row, name in (("4", ""), (".*`accumulated`.*", "-accumulated"), (".*`large`.*", "-large")):
        expected = rf"\| {least['ddp' + name]} \| {least['fsdp' + name]} \|"
        assert re.search(rf"^\| .*{row} {expected}$", TEXT, re.M), name
    kept = json.loads((KEPT / "traces.json").read_text())
    gaps = [draw_traces.length(draw_traces.gaps_of(rank)) for rank in kept["ddp-uneven"]["ranks"]]
    end = max(rank["step"][1] for rank in kept["ddp-uneven"]["ranks"])
    assert f"for {gaps[0]:.0f} of {end:.0f} ms" in WORDS and f"gaps are {gaps[1]:.0f} ms" in WORDS
    gaps = draw_traces.gaps_of(kept["fsdp"]["ranks"][0])
    assert f"{len(gaps)} gaps of {draw_traces.length(gaps):.0f} ms in all" in WORDS


def test_what_is_drawn_has_the_shares_of_the_report():
    """But for what is too short to be seen."""
    for step in json.loads((KEPT / "traces.json").read_text()).values():
        for rank in step["ranks"]:
            start, end = rank["step"]
            gaps = draw_traces.length(draw_traces.gaps_of(rank)) / (end - start)
            assert gaps == pytest.approx(rank["shares"]["communication"], abs=0.02)
            computing = splitting.length([*rank["forward"], *rank["backward"], *rank["optimizer"]])
            share = rank["shares"]["computation"] + rank["shares"]["both at once"]
            assert computing / (end - start) == pytest.approx(share, abs=0.06)
