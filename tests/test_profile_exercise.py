"""docs/lab/11-profile.md: its commands run in small, and leave what the page says to look for; its
pictures are those of the script.
"""

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET

import pytest
from conftest import ROOT, run, table_of
from test_lab import blocks_of, check_kind, shell  # noqa: F401  a fixture

from reporting import splitting

sys.path.insert(0, str(ROOT / "docs" / "img"))
import draw_traces  # noqa: E402

pytestmark = pytest.mark.slow
TEXT = (ROOT / "docs" / "lab" / "11-profile.md").read_text()
KEPT = ROOT / "docs" / "img" / "traces"
SMALLER = {
    "hidden_size=384": "hidden_size=96",
    "intermediate_size=1536": "intermediate_size=192",
    "num_hidden_layers=6": "num_hidden_layers=2",
}


@pytest.fixture(scope="module")
def folder(shell):  # noqa: F811
    """What the page's commands leave."""
    settings = []
    for commands, pasted in blocks_of(TEXT):
        for long, short in SMALLER.items():
            commands = commands.replace(long, short)
        lines = commands.splitlines()
        check_kind(pasted, shell([*settings, *lines], forked=True))
        settings += [line for line in lines if re.match("[A-Z]+=", line)]
    return shell.folder / "runs" / "lab" / "traces"


def test_traces_have_what_to_search_for_and_the_report_their_shares(folder):
    report = (folder / "report.md").read_text()
    for strategy in ("ddp", "fsdp"):
        for rank in (0, 1):
            trace = folder / strategy / "traces" / f"profile_{rank}.json"
            names = {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}
            for searched, meaning in table_of(TEXT, "search for")[1:]:
                found = any(name.startswith(searched.strip("`")) for name in names)
                assert found == (strategy == "fsdp" or "FSDP only" not in meaning), searched
            shares = splitting.shares_of(splitting.read_events(trace))
            assert sum(shares.values()) == pytest.approx(1) and shares["communication"] > 0
            row = r" *\| *".join(f"{share:.0%}" for share in shares.values())
            assert re.search(rf"\| {strategy} .*\| {rank} *\| *{row}", report)


def test_fresh_traces_can_be_drawn(folder):
    drawn = json.loads((folder / "traces.json").read_text())
    for picture in ("ddp", "fsdp"):
        root = ET.parse(folder / f"{picture}.svg").getroot()
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"rank 0", "rank 1", "computes", "communicates", "AR: all-reduce"} <= texts
        assert ("AG: all-gather" in texts) == (picture == "fsdp")
        for rank in drawn[picture]["ranks"]:
            assert rank["forward"] and rank["backward"] and rank["optimizer"]


def test_pictures_are_those_that_the_script_draws(tmp_path):
    """And they have the shares of the report, but for what is too short to be seen."""
    shutil.copy(KEPT / "traces.json", tmp_path)
    assert run([sys.executable, "docs/img/draw_traces.py", "--to", str(tmp_path)]).code == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in KEPT.iterdir()}
    assert set(re.findall(r"\(\.\./img/traces/(.*?)\)", TEXT)) <= set(drawn)
    for step in json.loads((KEPT / "traces.json").read_text()).values():
        for rank in step["ranks"]:
            shares, (start, end) = rank["shares"], rank["step"]
            gaps = draw_traces.length(draw_traces.gaps_of(rank)) / (end - start)
            assert gaps == pytest.approx(shares["communication"], abs=0.02)
            computing = splitting.length([*rank["forward"], *rank["backward"], *rank["optimizer"]])
            share = shares["computation"] + shares["both at once"]
            assert computing / (end - start) == pytest.approx(share, abs=0.06)
