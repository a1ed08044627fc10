"""docs/before-you-scale.md: its commands, in small, and its flowchart."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment
from test_lab import blocks_of, check_kind

TEXT = (ROOT / "docs" / "before-you-scale.md").read_text()


@pytest.mark.slow
def test_the_batch_sweep(tmp_path):
    """Its loop, with one batch and fewer steps, prints what is pasted."""
    [(commands, pasted)] = blocks_of(TEXT)
    for long, short in {"source .venv/bin/activate\n": "", "1 2 4 8": "8",
                        "_steps 30": "_steps 12"}.items():
        assert long in commands
        commands = commands.replace(long, short)
    for name in ("accelerate_configs", "tests", "train_bert_squad.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(["bash", "-e"], input=commands, cwd=tmp_path, text=True, timeout=200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment({}))
    assert done.returncode == 0, done.stdout
    check_kind(pasted, done.stdout)


def test_the_flowchart_is_drawn_and_names_every_yaml_once(tmp_path):
    subprocess.run([sys.executable, "docs/img/draw_flow.py", tmp_path], cwd=ROOT, check=True)
    drawn = (tmp_path / "choose.svg").read_text()
    assert drawn == (ROOT / "docs" / "img" / "choose.svg").read_text()
    yamls = re.findall(r"\w+\.yaml", drawn)
    known = {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set(yamls) <= known and len(yamls) == len(set(yamls)) == 9
