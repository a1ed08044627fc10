"""docs/lab.md: its commands run, in order, and print what is pasted there, but for the numbers."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
TEXT = (ROOT / "docs" / "lab.md").read_text()
SMALLER = {  # sizes of the text, and those of the test
    "hidden_size=768": "hidden_size=192",
    "intermediate_size=3072": "intermediate_size=384",
    "hidden_size=384": "hidden_size=96",
    "intermediate_size=1536": "intermediate_size=192",
    "--max_train_steps 8": "--max_train_steps 3",
    '--num_epochs 30 --dropout 0"': '--num_epochs 5 --dropout 0"',  # of LSTM=
}
# What torch.compile needs, as exercise 6 says; some systems pack Python's headers separately.
COMPILER = shutil.which(os.environ.get("CXX", "g++")) and Path(sysconfig.get_path("include"), "Python.h").exists()
SET_UP = ["make setup", "source .venv/bin/activate"]  # of README, which .ci/run types


def blocks(number):
    """Those of exercise `number`; 0 is what comes before the first."""
    return blocks_of(re.split(r"^## \d\. ", TEXT, flags=re.M)[number])


def blocks_of(text):
    r"""The (commands, pasted output or "") of a page, or of a part of it. A command that the text
    breaks with \ is one line here.
    """
    found = re.findall(r"^```(sh|text)\n(.*?)^```", text, re.M | re.S)
    for (kind, commands), after in zip(found, [*found[1:], ("", "")], strict=True):
        if kind == "sh":
            yield re.sub(r"\\\n *", "", commands), after[1] if after[0] == "text" else ""


def kind(text):
    """The lines of an output without what differs between runs and machines: the name of the CPU, which may have any
    characters, numbers, dates, the widths of tables.
    """
    text = re.sub(r"CPU \(.*\)(?=: [\d,]+ parameters|, torch \d)", "CPU", text)
    text = re.sub(r"[-+]?\d[\d,.:]*(e[-+]\d+)?|:?-{2,}:?", "N", text)
    return [re.sub(r"[\s|]+", " ", line).strip() for line in text.splitlines()]


def check_kind(pasted, printed):
    lines = set(kind(printed))
    for line in kind(pasted):
        assert line in ("", "...") or line in lines, f"the lab shows {line!r}, but this was printed:\n{printed}"


@pytest.fixture(scope="module")
def exercise(tmp_path_factory):
    """A function that runs exercise `number`, and those before it, in a folder of their own."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("accelerate_configs", "sbatch", "tests", "report.py", "train_mnist_rnn.py", "train_bert_squad.py"):
        (folder / name).symlink_to(ROOT / name)
    done, settings = set(), ["set -e"]

    def run(number):
        for now in range(number + 1):
            for commands, pasted in blocks(now) if now not in done else []:
                for long, short in SMALLER.items():
                    commands = commands.replace(long, short)
                lines = [line for line in commands.splitlines() if line not in SET_UP and "sbatch sbatch/" not in line]
                if "inductor" in commands and not COMPILER:
                    lines, pasted = [line for line in lines if "compiled" not in line], ""
                # By way of stdin, so that the pkill of the last exercise does not find this shell.
                shell = subprocess.run(["bash"], input="\n".join(settings + lines), cwd=folder, text=True, timeout=300,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)
                assert shell.returncode == 0, f"{commands}\n{shell.stdout}"
                if any(line.strip() for line in lines):
                    check_kind(pasted, shell.stdout)
                settings.extend(line for line in lines if re.match(r"(export )?[A-Z_]+=", line))
            done.add(now)
        return folder

    return run


@pytest.mark.parametrize("number", range(1, 9))
def test_exercise(exercise, number):
    """Word for word, in small."""
    exercise(number)
    if number == 6 and not COMPILER:
        pytest.skip("no C++ compiler, or no Python.h: the rest of the exercise was run without torch.compile")


def test_what_the_answers_claim(exercise):
    """Equal where the answers say equal; the numbers behind the words."""
    folder = exercise(8)

    def compare(*runs):
        words = subprocess.check_output(["python", "runs/lab/compare.py", *runs], cwd=folder, text=True)
        return float(re.search(r"at most (\S+)", words)[1])

    assert compare("baseline", "ddp") < 1e-4 and compare("baseline", "accumulated") < 1e-4
    assert compare("baseline", "dp") == 0 == compare("ddp", "killed")
    assert compare("ddp", "two-launchers") == 0
    assert compare("baseline", "ddp-64") > 1e-2 and 0 < compare("fp32", "bf16") < 0.1
    assert compare("shard-ddp", "shard-zero3") < 1e-4 and compare("shard-ddp", "shard-fsdp") < 1e-4


def test_slurm_jobs(exercise, cluster, tmp_path):
    """The lines with sbatch, on a two-node Slurm; and the losses are those of one machine."""
    [(commands, pasted)] = [block for block in blocks(7) if "sbatch sbatch/" in block[0]]
    lab = exercise(2)
    for line in commands.splitlines():
        words = shlex.split(line)[1:]
        job = cluster.submit(f"--output={tmp_path}/log", *words, cwd=lab, env={"OMP_NUM_THREADS": "1"})
        assert cluster.wait(job) == "COMPLETED", (tmp_path / "log").read_text()
    check_kind(pasted, (tmp_path / "log").read_text())
    words = subprocess.check_output(["python", "runs/lab/compare.py", "ddp", "two-nodes"], cwd=lab, text=True)
    assert float(re.search(r"at most (\S+)", words)[1]) < 1e-5
