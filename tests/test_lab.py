"""docs/lab.md and docs/before-you-scale.md: their commands run, in order, and print what is pasted
there, but for the numbers.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading

import pytest
import warm
from conftest import ROOT, environment

pytestmark = pytest.mark.slow
TEXT = (ROOT / "docs" / "lab.md").read_text()
SMALLER = {  # sizes of the text, and those of the test
    "hidden_size=768": "hidden_size=192",
    "intermediate_size=3072": "intermediate_size=384",
    "hidden_size=384, num_hidden_layers=6": "hidden_size=96, num_hidden_layers=2",
    "intermediate_size=1536": "intermediate_size=192",
    "--layers 6 --hidden_size 384": "--layers 2 --hidden_size 128",  # of make_bert.py
    "--hidden_size 768": "--hidden_size 192",
    "--max_train_steps 8": "--max_train_steps 3",
    "--num_epochs 12": "--num_epochs 1",
    '--num_epochs 30 --dropout 0"': '--num_epochs 5 --dropout 0"',  # of LSTM=
}
SET_UP = ["make setup", "source .venv/bin/activate"]  # of README, which .ci/run types
FORKED = 6  # up to this exercise ranks are forked (see warm.py); the rest is about launchers
ACCELERATE = """#!/bin/bash
printf '%s\\n' {1} "$@" >"{0}/asked" && read -r code <"{0}/answered" && cat "{0}/log" || exit 1
exit "$code"
"""


def blocks(number):
    """Those of exercise `number`; 0 is what comes before the first."""
    return blocks_of(re.split(r"^## \d\. ", TEXT, flags=re.M)[number])


def blocks_of(text):
    r"""The (commands, pasted output or "") of a page, or a part of it; without \ at line ends."""
    found = re.findall(r"^```(sh|text)\n(.*?)^```", text, re.M | re.S)
    for (kind, commands), after in zip(found, [*found[1:], ("", "")], strict=True):
        if kind == "sh":
            yield re.sub(r"\\\n *", "", commands), after[1] if after[0] == "text" else ""


def kind(text):
    """Lines without what differs between runs: CPU's name, numbers, dates, widths, drawn times."""
    text = re.sub(r"CPU \(.*\)(?=: [\d,]+ parameters|, torch \d)", "CPU", text)
    text = re.sub(r"^[.#]{4,}$|[-+]?\d[\d,.:]*(e[-+]\d+)?|:?-{2,}:?", "N", text, flags=re.M)
    return [re.sub(r"[\s|]+", " ", line).strip() for line in text.splitlines()]


def check_kind(pasted, printed):
    lines = set(kind(printed))
    for line in kind(pasted):
        found = line in ("", "...") or line in lines
        assert found, f"the page shows {line!r}, but this was printed:\n{printed}"


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """A function that types commands in a folder of its own, and returns what they print. If asked,
    ranks are forked (see warm.py): `accelerate launch` and `accelerate-launch`, which sweep.sh
    types, then ask this process for them.
    """
    folder, tools = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("tools")
    for name in (
        "accelerate_configs",
        "docs",
        "dry_run.py",
        "planning",
        "sbatch",
        "tests",
        "report.py",
        "train_mnist_rnn.py",
        "train_bert_squad.py",
    ):
        (folder / name).symlink_to(ROOT / name)
    for name in ("asked", "answered"):
        os.mkfifo(tools / name)
    for name, launch in (("accelerate", ""), ("accelerate-launch", "launch")):
        (tools / name).write_text(ACCELERATE.format(tools, launch))
        (tools / name).chmod(0o755)

    def answer():
        while True:
            _, *words = (tools / "asked").read_text().splitlines()
            script = next(i for i, word in enumerate(words) if word.endswith(".py"))
            log = tools / "log"
            log.write_text("")
            launcher = [*words[:script], "--main_process_port", "0"]
            config = launcher.index("--config_file") + 1
            launcher[config] = str(folder / launcher[config])
            code = warm.run_ranks(launcher, words[script:], environment({}), folder, log, log, 200)
            (tools / "answered").write_text(f"{code}\n")

    def type_in(lines, forked):
        path = [f"export PATH={shlex.quote(str(tools))}:$PATH"] if forked else []
        # By way of stdin, so that the pkill of exercise 8 does not find this shell.
        done = subprocess.run(
            ["bash"],
            input="\n".join(["set -e", *path, *lines]),
            cwd=folder,
            text=True,
            timeout=900,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout}"
        return done.stdout

    threading.Thread(target=answer, daemon=True).start()
    type_in.folder = folder
    return type_in


@pytest.fixture(scope="module")
def exercise(shell):
    """A function that runs exercise `number`, and those before it; it returns the folder."""
    done, settings = set(), []

    def run(number):
        for now in range(number + 1):
            for commands, pasted in blocks(now) if now not in done else []:
                for long, short in SMALLER.items():
                    commands = commands.replace(long, short)
                lines = [
                    line
                    for line in commands.splitlines()
                    if line not in SET_UP and "sbatch sbatch/" not in line
                ]
                printed = shell([*settings, *lines], forked=now <= FORKED)
                if any(line.strip() for line in lines):
                    check_kind(pasted, printed)
                settings.extend(line for line in lines if re.match(r"(export )?[A-Z_]+=", line))
            done.add(now)
        return shell.folder

    return run


def compare(folder, *runs):
    """By how much the losses of two runs differ, as the lab's program says it."""
    command = ["python", "docs/lab/compare.py", *[f"runs/lab/{run}" for run in runs]]
    words = subprocess.check_output(command, cwd=folder, text=True)
    return float(re.search(r"at most (\S+)", words)[1])


@pytest.mark.parametrize("number", range(1, 9))
def test_exercise(exercise, number):
    exercise(number)


def test_what_the_answers_claim(exercise):
    """Equal where the answers say equal; the numbers behind the words."""
    folder = exercise(8)
    for runs, low, high in [
        ("baseline ddp", 0, 1e-4),
        ("baseline accumulated", 0, 1e-4),
        ("ddp killed", 0, 0),
        ("ddp two-launchers", 0, 0),
        ("baseline ddp-64", 1e-2, 10),
        ("fp32 bf16", 1e-9, 0.1),
        ("shard-ddp shard-zero3", 0, 1e-4),
        ("shard-ddp shard-fsdp", 0, 1e-4),
    ]:
        assert low <= compare(folder, *runs.split()) <= high, runs
    peaks = {}
    for name in ("ddp", "zero2", "zero3", "fsdp"):
        record = json.loads((folder / f"runs/lab/shard-{name}/run.json").read_text())
        peaks[name] = record["strategy_options"].get("stage3_max_live_parameters")
    assert peaks["zero3"] == 1_000_000, "the page's copy of the settings was not used"


def test_512_devices(shell):
    """Exercise 14 with smaller layers, but as many of them: FSDP's calls are those of the page."""
    [(commands, pasted)] = blocks_of((ROOT / "docs" / "lab" / "14-scale.md").read_text())
    for long, short in SMALLER.items():
        commands = commands.replace(long, short)
    printed = shell(commands.splitlines(), forked=False)
    check_kind(pasted, printed)
    for kind_of, calls in (("all_gather", 27), ("reduce_scatter", 14)):
        assert re.search(rf"\| {kind_of} +\| +512 \| +1 \| +{calls} \|", printed), printed


def test_the_batch_sweep_of_before_you_scale(shell):
    [(commands, pasted)] = blocks_of((ROOT / "docs" / "before-you-scale.md").read_text())
    commands = commands.replace("1 2 4 8 16", "8").replace("_steps 30", "_steps 12")
    lines = [line for line in commands.splitlines() if line not in SET_UP]
    check_kind(pasted, shell(lines, forked=True))


def test_the_flowchart_of_before_you_scale_names_every_yaml_once(tmp_path):
    subprocess.run([sys.executable, "docs/img/draw_flow.py", tmp_path], cwd=ROOT, check=True)
    drawn = (tmp_path / "choose.svg").read_text()
    assert drawn == (ROOT / "docs" / "img" / "choose.svg").read_text()
    yamls = re.findall(r"\w+\.yaml", drawn)
    known = {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set(yamls) <= known and len(yamls) == len(set(yamls)) == 9
