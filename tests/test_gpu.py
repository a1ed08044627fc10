"""sbatch/check_gpu.py, as far as it goes without a GPU: its runs, checks and report with a CPU standing in."""

import json
import re
import subprocess
import sys

import gpu
import pytest
from conftest import ROOT, environment


def prove(folder, **env):
    command = [sys.executable, "sbatch/check_gpu.py", "--output_dir", folder]
    return subprocess.run(command, cwd=ROOT, env=environment(env), capture_output=True, text=True)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = prove(tmp_path / "report")
    assert done.returncode == 0 and re.fullmatch("skipped: .*no GPU.*\n", done.stdout), done.stderr
    assert not (tmp_path / "report").exists()


def test_a_difference_is_a_failed_check(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STAND_IN", True)
    checks = gpu.Checks(tmp_path)
    good = {"code": 0, "losses": [2.0, 1.0], "err": ""}
    checks.compare("same", good, [2.0, 1.00001], 1e-4)
    checks.compare("other", good, [2.0, 1.001], 1e-4)
    checks.compare("short", good, [2.0, 1.0, 0.5], 1e-4)
    checks.compare("broken", good | {"code": 1, "err": "warning: a\nerror: no memory\n"}, [2.0, 1.0], 1)
    checks.add("left out", "needs two GPUs", None)
    assert [row["verdict"] for row in checks.rows] == ["pass", "FAIL", "FAIL", "FAIL", "left out"]
    assert "error: no memory" in checks.rows[3]["figure"]
    assert gpu.write_report(checks, tmp_path / "report", 1.0) == 3
    assert json.loads((tmp_path / "report" / "gpu-report.json").read_text())["failed"] == 3


@pytest.mark.matrix
def test_its_checks_with_a_cpu_standing_in(tmp_path):
    """Three minutes: `pytest -m matrix tests/test_gpu.py` after a change of sbatch/check_gpu.py. The report never says that
    it saw a GPU."""
    done = prove(tmp_path, TEST_GPU_STAND_IN="cpu")
    record = json.loads((tmp_path / "gpu-report.json").read_text())
    assert done.returncode == 0 and record["failed"] == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu-report.md").read_text()
    assert text.startswith("# a CPU, standing in for a GPU\n")
    rows = {row["check"]: row for row in record["checks"]}
    for name in ("LSTM fsdp fp32", "BERT fsdp bf16", "BERT fsdp fp32, 2 processes", "dp refuses bf16",
                 "SIGUSR1 under fsdp", "resumed in mid-epoch under fsdp", "saved BERT of bf16 runs",
                 "compiled by eager", "bandwidth between GPUs", "clipping changes the losses",
                 "clipped under fsdp_keep", "recomputed under fsdp, with dropout", "out of memory",
                 "what held how much"):
        assert rows[name]["verdict"] == "pass" and f"| {name} " in text, name
