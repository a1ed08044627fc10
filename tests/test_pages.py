"""The commands of the pages run, in order, and print what is pasted there, but for measurements.

Each page is typed into one shell, in a folder of its own: all its `sh` blocks. A `text` block right
behind one is what it prints. A command may fail only where the page says so. Models and numbers of
steps are smaller here.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import draw_traces
import pytest
import warm
from conftest import QUICK_CHECK, ROOT, launch, rows_of, run
from crossover import COMMAND, Row, conclude, describe, find_disturbances
from test_bert import TINY

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
SMALLER = {  # sizes of the text, and those of the test
    "--layers 6 --hidden_size 384": "--layers 2 --hidden_size 128",
    "--max_train_steps 8": "--max_train_steps 3",
    "--max_train_steps 30": "--max_train_steps 4",
    "for batch in 1 2 4 8 16": "for batch in 8",
    '--num_epochs 30 --dropout 0"': '--num_epochs 2 --dropout 0"',  # of LSTM=
}
QUICKER = {  # which changes measured times alone
    "going.py --part 2": "going.py --part 2 --seconds 20",
    "lab/crossover.py": "lab/crossover.py --turns 3 --seconds 0.02",
}
# Until the first rank of exercise 10 hangs, and then some time for the second one.
QUICKER["sleep 20"] = (
    "for i in $(seq 60); do py-spy dump --pid $(pgrep -P $! | head -n 1) 2>&1 | "
    "grep -qE 'evaluate|ermission' && break; sleep 2; done; sleep 10"
)
# .ci/run types them, or a test below.
LEFT_OUT = r"(make setup|source |.*sbatch sbatch/).*"
# What a student makes of a file of exercises 9 and 10, and the solution.
SOLUTIONS = {"my_ddp": "by_hand", "my_accelerate": "accelerated", "my_flat": "flat"}
SOLUTIONS |= {"my_overlap": "overlap", "my_sharded": "sharded", "mended": "mended"}
SOLUTIONS |= {"going": "going"}
# All that they show is the same everywhere.
EXACT = ["docs/lab/13-report.md", "docs/scale.md"]
# Other pages have their commands.
AGAIN = ["docs/es/lab.md", "docs/lab/report-template.md"]
TYPED = [name for name, text in PAGES.items() if "```sh" in text and name not in AGAIN]
TYPED.sort(key=lambda name: len(PAGES[name]), reverse=True)  # the longest first
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?")
MEASURED = [  # what differs from run to run, or from machine to machine
    r"CPU \(.*\)(?=: [\d,]+ parameters|, torch \d)",
    r"-?[\d,.]+(?= (s|ms|µs|GB/s|times)\b|×)|[\d.]+ \(from [\d.]+ to [\d.]+\)",
    r'"(startup|train|eval|total|samples_per_second|\w+_mb)": [\d.]+',
    r"(?<![\d.])\d+ ?%",  # a share of time; accuracies have decimals
    r"(?<=\| )\d+\.\d\d(?= +\|)|(?<=\| )single[a-z, ]*",  # seconds, speedup, and what to mind
    r"(?<=\d\.\d{6}  \| )\d+ *$",  # MB of training alone, behind the last loss
    r"(?<=libraries and data) +[\d,]+|(?<=^total) +[\d,]+",
    r"[1-9](\.\d)?e-(0[3-9]|1[0-9])",  # differences by rounding
    r"(?<=process )\d+|(?<=^step_)\d+|(?<=killed/checkpoints/step_)\d+",
    r":?-{2,}:?|^[.#]{4,}$",  # as wide as their tables
]
MEASURED = re.compile("|".join(MEASURED))
FORKS = """#!/bin/bash -e
case "${{0##*/}} $1" in
    "accelerate "*) shift ;;
    "python tools/dry_run.py" | "python tools/verify.py" | "python docs/lab/single.py" | \\
    "python docs/lab/check_ex"*)
        set -- --config_file accelerate_configs/baseline.yaml "$@" ;;
    "python "*) exec "{1}" "$@" ;;
esac
own=$(mktemp -d "{0}/XXXXXX")
mkfifo "$own/code"
printf '%s\\n' "$own" "$PWD" "$@" >"{0}/asked"
read -r code <"$own/code"
cat "$own/log"
exit "$code"
"""


def blocks_of(text):
    r"""The (commands, pasted output or "", the text up to the next commands) of a page; without \
    at line ends.
    """
    _, *parts = re.split(r"^```(\w*)\n(.*?)^```\n", text, flags=re.M | re.S)
    blocks = [*zip(parts[::3], parts[1::3], parts[2::3], strict=True), ("", "", "")]
    for number, (kind, body, words) in enumerate(blocks):
        if kind == "sh":
            kind, pasted, more = blocks[number + 1]
            pasted, more = (pasted, more) if kind == "text" else ("", "")
            yield re.sub(r"\\\n *", "", body), pasted, words + more


def parts(line):
    """The words of a line with an N for each number that is the same everywhere, and an M for what
    was measured; and these numbers.
    """
    # Which messages and batches other programs disturb, if any, is chance.
    line = re.sub(", disturbed: .*", "", line).replace("| ? |", "| 0.00 ms |")
    words = re.sub(r"[\s|]+", " ", MEASURED.sub("M", line)).strip()
    return NUMBER.sub("N", words), NUMBER.findall(words)


def near(pasted, printed):
    """The same number; a fraction may differ by a thousandth, or by one of its last digit."""
    mine, other = (float(number.replace(",", "")) for number in (pasted, printed))
    decimals = len(pasted.partition(".")[2])
    tolerance = max(1e-3 * other, 1.01 * 10**-decimals) if decimals else 0
    return abs(mine - other) <= tolerance


def check_pasted(pasted, printed, exact=False, smaller=False):
    """A page shows what was printed. After smaller sizes the numbers are others."""
    lines = [parts(line) for line in printed.splitlines()]
    for line in pasted.splitlines():
        words, numbers = parts(line)
        found = line in printed or words == "..."
        if not exact:
            same_words = [others for text, others in lines if text == words]
            found |= any(smaller or all(map(near, numbers, others)) for others in same_words)
        assert found, f"the page shows {line!r}, but this was printed:\n{printed}"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A folder for PATH and PYTHONPATH. Its launchers, also those that Python starts with -m, ask
    this process for ranks, which are forked (see warm.py), and so does `python` for what imports
    torch. A checker asks for ranks while others wait for the checker.
    """
    folder = tmp_path_factory.mktemp("tools")
    os.mkfifo(folder / "asked")
    (folder / "sitecustomize.py").write_text(f"""import os, sys
if {{"torch.distributed.run", "accelerate.commands.launch"}} & {{*sys.orig_argv[1:3]}}:
    os.execv("{folder}/torchrun", ["torchrun", *sys.orig_argv[3:]])
""")
    for name in ("accelerate", "accelerate-launch", "torchrun", "python"):
        (folder / name).write_text(FORKS.format(folder, sys.executable))
        (folder / name).chmod(0o755)

    def answer(own, place, *words):
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        log = Path(own, "log")
        log.touch()
        launcher = [*words[:script], "--main_process_port", "0"]
        if "--nproc_per_node" in launcher:  # torchrun's
            number = launcher[launcher.index("--nproc_per_node") + 1]
            yaml = str(ROOT / "accelerate_configs" / "ddp.yaml")
            launcher = ["--config_file", yaml, "--num_processes", number, *launcher[-2:]]
        config = launcher.index("--config_file") + 1
        launcher[config] = os.path.join(place, launcher[config])
        env = os.environ | {"PYTHONPATH": str(folder)}
        code = warm.run_ranks(launcher, words[script:], env, place, log, log, 200)
        Path(own, "code").write_text(f"{code}\n")

    def listen():
        while True:
            request = (folder / "asked").read_text().splitlines()
            threading.Thread(target=answer, args=request, daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    return folder


@pytest.fixture
def place(tmp_path):
    """A folder with the project's files, and records as a sweep leaves them."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "docs", "tools"):
            (tmp_path / path.name).symlink_to(path)
    for name in ("docs", "tools"):  # A student changes files in docs.
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tools" / "check.py").write_text(QUICK_CHECK)
    records, archive = tmp_path / "records", "docs/results/report-cpu/records.tar.xz"
    shutil.unpack_archive(ROOT / archive, records, filter="data")
    for name in ("baseline-1x1-r1", "ddp-1x1-r1", "ddp-1x2-r1"):
        shutil.copytree(records / name, tmp_path / "runs/report/bert" / name)
    return tmp_path


def script_of(name, tools):
    """The shell's script of a page. What is about launchers is launched really: what the shell does
    not wait for. A sweep lists its jobs.
    """
    text = PAGES[name]
    lines = ["trap 'echo \"failed: $BASH_COMMAND\"' ERR", "NORMAL=$PATH"]
    for commands, pasted, _ in blocks_of(text):
        if "ok  " in pasted and "WRONG" not in pasted:
            for file, solution in SOLUTIONS.items():
                copy = f"cp docs/lab/solutions/{solution}.py runs/lab/{file}.py"
                lines.append(f"[ ! -e runs/lab/{file}.py ] || {copy}")
        place = shlex.quote(str(tools))
        lines.append(f"PATH={place}:$NORMAL; export PYTHONPATH={place}")
        for long, short in (SMALLER | QUICKER).items() if name not in EXACT else ():
            commands = commands.replace(long, short)
        really = r"\1PYTHONPATH= PATH=$NORMAL \2"
        commands = re.sub("^( *)((?:accelerate|torchrun) .*&)$", really, commands, flags=re.M)
        commands = commands.replace("make sweep", "make --dry-run sweep")
        commands = re.sub("^diff .*", r"\g<0> || [ $? = 1 ]", commands, flags=re.M)  # they differ
        commands = re.sub(r"sweep\.sh (?!--dry_run|--local)", "sweep.sh --dry_run ", commands)
        lines += [line for line in commands.splitlines() if not re.match(LEFT_OUT, line)]
        lines.append("echo '== next block'")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TYPED)
def test_commands_run_and_print_what_the_page_shows(name, tools, place):
    text, streams = PAGES[name], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    script = script_of(name, tools)
    done = subprocess.run(["bash"], input=script, cwd=place, text=True, timeout=1100, **streams)
    outputs = done.stdout.split("== next block\n")
    smaller = False
    for (commands, pasted, words), printed in zip(blocks_of(text), outputs, strict=False):
        if "py-spy" in commands and "ermission" in printed:
            continue  # as the page says, root alone may use it on some systems
        fails = any(sign in pasted + words for sign in ("error:", "RuntimeError", "WRONG"))
        assert ("\nfailed: " in f"\n{printed}") == fails, f"{commands}\n{printed}"
        assert "error:" not in words or re.search("^error: ", printed, re.M), printed
        smaller |= name not in EXACT and any(long in commands for long in SMALLER)
        check_pasted(pasted, printed, name in EXACT, smaller)
    assert len(outputs) == 1 + len([*blocks_of(text)]), done.stdout
    if name.endswith("profile.md"):
        check_traces(place / "runs" / "lab" / "traces")
    if name.endswith("ladder.md"):
        check_ladder(text, place / "runs" / "ladder")


def check_ladder(text, folder):
    """Each rung holds what the formula says, and less than a third more: see the page."""
    rungs = re.findall(r"^\| `(\d-\w+)` .*\| ([\d +]+) \| [\d to]+ \|$", text, re.M)
    for name, formula in rungs:
        ranks = json.loads((folder / name / "run.json").read_text())["ranks"]
        held = max(rank["peak_memory_mb"] - rank["memory_before_mb"] for rank in ranks)
        assert 1 < held / sum(map(int, formula.split("+"))) < 1.33, name
    assert len(rungs) == 4


def check_traces(folder):
    """--profile records five steps, in which ranks compute and talk."""
    for trace in ("ddp/traces/profile_0.json", "fsdp/traces/profile_1.json"):
        events = draw_traces.read_events(folder / trace)
        assert len({event["name"] for event in events if "ProfilerStep" in event["name"]}) == 5
        shares = draw_traces.shares_of(events)
        assert sum(shares.values()) == pytest.approx(1) and shares["communication"] > 0


# -------- commands that stand alone, in plain blocks


def plain_blocks(*names):
    text = re.sub(r"\\\n *", "", "".join(PAGES[name] for name in names))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    return [body for kind, body in blocks if not kind]


def lines_that_start_with(words):
    return sorted(set(re.findall(f"^{words}[^#\n]*", "".join(plain_blocks(*PAGES)), re.M)))


@pytest.mark.slow
def test_sbatch_commands_work(cluster, tmp_path, monkeypatch):
    """Word for word and all at once. In place of the scripts, ranks note what they get, and the
    scripts take it; test_sbatch.py trains on these nodes.
    """
    for name in ("sbatch", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for script in ("train_mnist_rnn.py", "train_bert_squad.py"):
        shutil.copy(ROOT / "tests" / "probe.py", tmp_path / script)
    jobs, commands = {}, lines_that_start_with("sbatch ")
    for i, command in enumerate(line for line in commands if "check.sh" not in line):
        folder = tmp_path / str(i)
        words = [f"--output={folder}.log", *shlex.split(command)[1:], "--output_dir", folder]
        jobs[folder] = cluster.submit(*words, cwd=tmp_path), "simple.sh" not in command
    for folder, (job, resumes) in jobs.items():
        assert cluster.wait(job, 600) == "COMPLETED", folder.with_suffix(".log").read_text()
        script, *flags = json.loads((folder / "rank_0.json").read_text())["command"]
        monkeypatch.setattr(sys, "argv", [script, *flags])
        args = importlib.import_module(Path(script).stem).parse_args()
        assert args.resume == resumes and args.output_dir == str(folder)
    assert len(jobs) > 3


@pytest.mark.slow
def test_launch_commands_work(tmp_path):
    """Word for word, but in small; test_launch.py has real launches."""
    commands = lines_that_start_with(r"accelerate launch .* train_\w+\.py")
    for number, command in enumerate(commands):
        strategy, script, flags = re.search(r"(\w+)\.yaml (\S+) ?(.*)", command).groups()
        folder = tmp_path / str(number)
        bert = script == "train_bert_squad.py"
        small = [*TINY, "--max_eval_samples", 8] if bert else ["--dataset", "digits"]
        words = [*flags.split(), *small, "--max_train_steps", 3, "--output_dir", folder]
        result = launch(strategy, script, folder, *words)
        assert (result.record["status"], result.record["strategy"]) == ("completed", strategy)
    assert len(commands) > 2


@pytest.mark.slow
def test_readme_pastes_what_its_commands_print(tools, place):
    """`make train`, `make train-bert` and `make sweep`, their ranks forked, and the last two in
    small; a report on all; and what fit.py answers.
    """
    make = ["make", "-C", place, "-o", "setup", f"BIN={tools}"]
    trained = run([*make, "train"])
    assert trained.code == 0, trained.err
    [pasted] = [block for block in plain_blocks("README.md") if "baseline and ddp:" in block]
    check_pasted(pasted, trained.out)
    path = f"{tools}:{os.environ['PATH']}"
    small = ["SWEEP=--repeats 1 --strategies baseline", "FLAGS=--max_train_steps 3"]
    swept = run([*make, "train-bert", "sweep", *small], env={"PATH": path})
    assert swept.code == 0, swept.out + swept.err
    assert all(f"{name}/baseline-1x1-r1 |" in swept.out for name in ("mnist", "bert")), swept.out
    reported = run(["env", "-C", place, sys.executable, "tools/report.py", "runs/"])
    assert "short: 3 steps are too few" in reported.out and "| bert_squad-20" in reported.out
    fits = run([sys.executable, "tools/fit.py", "6GB", "--model", "bert-large"]).out
    said = {row[0]: row[-4] for row in rows_of(fits)}
    assert (said["ddp"], said["zero2"], said["fsdp"]) == ("no", "tight", "yes")
    batches = {row[0]: row[-2] for row in rows_of(fits)}
    answer = "largest micro-batch: DDP {ddp}, ZeRO-2 {zero2}, FSDP {fsdp}."
    assert answer.format(**batches) in PAGES["README.md"]


def test_crossover_adds_up_and_names_disturbed_batches():
    quiet = [
        Row(16, 0.92, 0.92, 3.36, [0.27]),
        Row(1024, 10.75, 7.41, 9.48, [0.79, 1.5]),
        Row(4096, 39.43, 21.86, 24.51, [1.57, 1.64]),
    ]
    assert conclude(quiet).splitlines()[1:] == [
        "Here a second device pays off from 1,024 images up. Why?",
        "The turns disagree at 1,024 images: some gained, some lost.",
    ]
    assert conclude(quiet[::2]).endswith("pays off from 4,096 images up. Why?"), "they agree"
    assert conclude(quiet[:1] * 2).endswith("does not pay off up to 16 images. Why?")
    assert conclude(quiet, quota=1.5).startswith("This container may use 1.5 core(s) (/sys/fs/")
    assert conclude(quiet, quota=2) == conclude(quiet)
    assert conclude(quiet[:1]) == "With a batch of 16, two devices are 0.27 times as fast as one."
    assert find_disturbances(quiet) == find_disturbances(quiet[:1]) == []
    for number, changes, said in (
        (0, {"one": 9.0}, "4,096: two devices gained less than with 16"),
        (1, {"half": 11, "two": 13}, "1,024: half of the batch took nearly as long as all of it"),
        (1, {"two": 15.5}, "1,024: the message took over 3 times as long as the others"),
        (1, {"two": 7.0}, "1,024: a step was faster with a message than without"),
    ):
        rows = [*quiet]
        rows[number] = rows[number]._replace(**changes)
        assert find_disturbances(rows) == [said]
        warning, verdict = conclude(rows).split("\nSo try again:\n")
        assert warning == f"Other programs disturbed this:\n- {said}"
        assert f"{COMMAND}\nWith a batch of 16, two devices are" in verdict
        for row in rows:
            half, message, two = re.findall(r"-?[\d.]+(?= ms)|\?", describe(row))[1:]
            sums = message != "?" and float(half) + float(message) == pytest.approx(float(two))
            assert sums == (row.two >= row.half), describe(row)
            assert ("from" in describe(row)) == (row.batch > 16), "a range of one turn"
