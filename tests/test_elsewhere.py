"""The same run elsewhere: another CPU, host, user, path, locale and tools than the author's.

The real launcher trains for three steps there, and report.py reads the run. What needs root or a
tool that is missing is skipped.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ACCELERATE, ROOT, launch, namespaces
from test_bert import TINY

USER = 54321  # without a name
BERT = "train_bert_squad.py", *TINY, "--max_train_steps", "3", "--max_eval_samples", "8"
# A CPU's name with all that it may have, where Linux has it.
CPU = 'AMD EPYC 7763 64-Core Processor (rev. 1) @ 2.45GHz: "Milan", 2 x'
CPUINFO = f"vendor_id\t: AuthenticAMD\nmodel\t\t: 1\nmodel name\t: {CPU}\nflags\t\t: fpu\n"
HOST = "gpu-01.lab-2.example.org"  # which no name server knows


@pytest.fixture
def outside():
    """A folder for everybody; pytest's own are for their owner only."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def become_somebody():
    """The words that run what follows as another user, without input."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("to become another user needs root, and setpriv")
    wrap = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    # Python may lie in root's own HOME.
    wrap += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return [*wrap, "sh", "-c", 'exec "$@" <&-', "sh"]


def make_place(folder):
    """A checkout at a path with a space and an umlaut, on a CPU with an odd name, on a host whose
    name has dots, without a network. HOME is read-only, the locale is German in Latin-1, /tmp is
    small and runs nothing, and there are no tools: no compiler, which DeepSpeed likes to use.
    Returns the checkout, and the words that run what follows there.
    """
    root, home, tmp = (folder / name for name in ("Übung 1", "home", "tmp"))
    for name in ("accelerate_configs", "tests/data", "tools"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "train_bert_squad.py", root)
    home.mkdir(mode=0o555)
    tmp.mkdir()
    if not shutil.which("localedef"):
        pytest.skip("no localedef makes the locale")
    words = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", folder / "de_DE.ISO-8859-1"]
    subprocess.run(words, stderr=subprocess.DEVNULL)
    (folder / "cpuinfo").write_text(CPUINFO)
    setup = f"mount -t tmpfs -o size=64m,noexec,mode=1777 tmpfs {shlex.quote(str(tmp))}"
    setup += f" && mount --bind {shlex.quote(str(folder))}/cpuinfo /proc/cpuinfo"
    setup += f" && hostname {HOST} && ip link set lo up"
    env = ["env", "-i", "PATH=/nowhere", f"TMPDIR={tmp}", f"HOME={home}", "PYTHONUTF8=0"]
    env += [f"LOCPATH={folder}", "LC_ALL=de_DE.ISO-8859-1", f"HF_HOME={folder}/work/cache"]
    env += ["HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "CUDA_VISIBLE_DEVICES="]
    return root, [*namespaces(setup, "--net"), *become_somebody(), *env]


@pytest.mark.slow
def test_the_same_run(outside, tmp_path):
    """The losses of an ordinary run, cores of its own for each rank, and a report with the names of
    this machine.
    """
    root, wrap = make_place(outside)
    work, folder = outside / "work", outside / "work" / "runs" / "here"
    folder.parent.mkdir(parents=True)
    for path in (work, folder.parent):
        os.chown(path, USER, -1)

    def run_there(*command):
        done = subprocess.run([*wrap, *map(str, command)], cwd=root, capture_output=True)
        return done.returncode, *(text.decode("iso8859-1") for text in (done.stdout, done.stderr))

    words = ["--config_file", "accelerate_configs/zero3.yaml", "--main_process_port", 0, *BERT]
    code, printed, problem = run_there(*ACCELERATE, *words, "--output_dir", folder)
    assert code == 0 and "Traceback" not in printed + problem, printed + problem
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "completed" and record["device_name"] == f"CPU ({CPU})"
    assert [(rank["rank"], rank["host"]) for rank in record["ranks"]] == [(0, HOST), (1, HOST)]
    cores = sorted(os.sched_getaffinity(0))
    assert [rank["cores"] for rank in record["ranks"]] == [len(cores[0::2]), len(cores[1::2]) or 1]
    assert f"zero3 on 2 x CPU ({CPU}): {record['parameters']:,} parameters" in printed
    usual = launch("ddp", BERT[0], tmp_path, *BERT[1:])
    losses = [loss for _, loss in record["loss_history"]]
    assert losses == pytest.approx(usual.losses, rel=1e-5)
    assert record["metrics"] == pytest.approx(usual.record["metrics"], rel=1e-5)

    code, printed, problem = run_there(sys.executable, "tools/report.py", work / "runs")
    assert code == 0 and "Traceback" not in problem, printed + problem
    report = (work / "runs" / "report.md").read_text(encoding="utf-8")
    assert report in printed and report.count(f" {HOST} ") == 2
    assert f"device_name CPU ({CPU}), " in report
    code, _, problem = run_there("/usr/bin/env", "--unset=HF_HOME", sys.executable, *BERT)
    assert code == 1 and re.search("PermissionError: .*/home/", problem), problem
