"""sbatch/check_gpu.py, as far as it goes without a GPU."""

import re
import sys

import check_gpu
import pytest
from conftest import run

PROGRAM = [sys.executable, "sbatch/check_gpu.py", "--output_dir"]


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run([*PROGRAM, tmp_path / "report"])
    assert done.code == 0 and re.fullmatch("skipped: .*no GPU.*\n", done.out), done.err
    assert not (tmp_path / "report").exists()


def test_groups_run_alone_and_their_reports_add_up(tmp_path, monkeypatch):
    """Groups of one check each, of runs that were not started."""
    assert (
        "check_gpu.py --only fp32 link\n"
        in run(["make", "--dry-run", "test-gpu", "ONLY=fp32 link"]).out
    )
    good, bad = {"code": 0, "losses": [2, 1.00001]}, {"code": 1, "losses": [], "err": "a\nerror: b"}
    runs = {"fp32": good, "tf32": good | {"losses": [2, 1.001]}, "link": bad}
    monkeypatch.setattr(check_gpu, "STAND_IN", True)
    monkeypatch.setattr(
        check_gpu,
        "GROUPS",
        {
            name: lambda checks, name=name: checks.compare(f"of {name}", runs[name], [2, 1], 1e-4)
            for name in runs
        },
    )

    def main(*groups):
        monkeypatch.setattr(sys, "argv", ["x", "--output_dir", str(tmp_path), "--only", *groups])
        failed, text = check_gpu.main(), (tmp_path / "gpu-report.md").read_text()
        return failed, text, re.findall(r"of (\w+) .*\| (\w+) \|$", text, re.M)

    failed, text, rows = main("link")
    assert (failed, rows) == (1, [("link", "FAIL")]) and "error: b |" in text and "Not run" in text
    assert main("fp32")[::2] == (0, [("fp32", "pass"), ("link", "FAIL")])
    runs["link"] = good
    failed, text, rows = main("tf32", "link")
    assert (failed, rows) == (1, [("fp32", "pass"), ("tf32", "FAIL"), ("link", "pass")])
    assert "Not run" not in text
    monkeypatch.setattr(check_gpu.torch, "__version__", "0")
    with pytest.raises(SystemExit, match="^error: .* of other GPUs or versions"):
        main("fp32")


@pytest.mark.matrix
def test_its_checks_with_a_cpu_standing_in(tmp_path):
    """Ten minutes, in two calls: `pytest -m matrix tests/test_gpu.py` after a change of them."""
    first = {"compile", "link", "resume", "tf32"}
    for groups in (first, check_gpu.GROUPS.keys() - first):
        done = run(
            [*PROGRAM, tmp_path, "--only", *groups], env={"TEST_GPU_STAND_IN": "cpu"}, timeout=3000
        )
        assert done.code == 0, done.out + done.err
    text = (tmp_path / "gpu-report.md").read_text()
    assert text.startswith("# a CPU, standing in for a GPU\n") and "Not run yet" not in text
    assert len(re.findall(r"\| pass \|$", text, re.M)) >= 27
