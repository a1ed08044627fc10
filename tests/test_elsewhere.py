"""The same run elsewhere: other CPUs, hosts, users, paths, locales, cores, tools than the author's.

Each place below joins conditions that can hold at once. There the real launcher trains for three
steps, and report.py reads the run. What needs root or a tool that is missing is skipped.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ACCELERATE, ROOT, launch, namespaces
from test_bert import TINY

import train_mnist_rnn

MNIST = "train_mnist_rnn.py", "--dataset", "digits", "--max_train_steps", "3"
BERT = "train_bert_squad.py", *TINY, "--max_train_steps", "3"
# A CPU's name with all that it may have, where Linux has it; and an ARM's, which has none.
CPU = 'AMD EPYC 7763 64-Core Processor (rev. 1) @ 2.45GHz: "Milan", 2 x'
AMD = f"vendor_id\t: AuthenticAMD\nmodel\t\t: 1\nmodel name\t: {CPU}\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
HOST = "gpu-01.lab-2.example.org"  # which no name server knows
COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|c89|c99|clang|clang\+\+|cpp)(-[\d.]+)?")


@dataclass
class Place:
    """How a command runs in a place, and what is to be seen there."""

    wrap: list  # the command line up to the command
    env: dict
    training: tuple = MNIST
    strategy: str = "ddp"
    root: Path = ROOT
    owner: int = -1  # of the folders to write into
    encoding: str = "utf-8"
    check: object = lambda record, printed: True

    def run(self, *command):
        """Exit code, output and errors of a command."""
        words = [*self.wrap, *map(str, command)]
        options = {"cwd": self.root, "env": os.environ | self.env, "stdin": subprocess.DEVNULL}
        done = subprocess.run(words, **options, capture_output=True, timeout=300)
        texts = (text.decode(self.encoding) for text in (done.stdout, done.stderr))
        return done.returncode, *texts


def become(user):
    """The words that run what follows as another user."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("to become another user needs root, and setpriv")
    wrap = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    if subprocess.run([*wrap, "test", "-x", os.path.realpath(sys.executable)]).returncode:
        # Python lies in root's own HOME.
        wrap += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return wrap


def make_locale(folder, language, charset):
    """The environment of a locale that need not be installed."""
    if not shutil.which("localedef"):
        pytest.skip("no localedef")
    name = f"{language}.{charset}"
    words = ["localedef", "-i", language, "-f", charset, folder / name]
    subprocess.run(words, stderr=subprocess.DEVNULL)
    return {"LOCPATH": str(folder), "LC_ALL": name}


def show_cpu(folder, text):
    """The shell's words that put this text into the place of /proc/cpuinfo."""
    (folder / "cpuinfo").write_text(text)
    return f"mount --bind {shlex.quote(str(folder))}/cpuinfo /proc/cpuinfo"


def somebody_elses_checkout(folder):
    """At a path with a space and an umlaut. The user's HOME is read-only, and the locale is German
    in Latin-1. The CPU has an odd name, and the host's name has dots.
    """
    root, home, user = folder / "Übung 1" / "clone", folder / "home", 65534
    for name in ("accelerate_configs", "tests/data", "planning", "reporting"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("report.py", "train_bert_squad.py"):
        shutil.copy(ROOT / name, root)
    home.mkdir(mode=0o555)
    (folder / "tmp").mkdir()
    os.chown(folder / "tmp", user, -1)
    env = {"PYTHONUTF8": "0", "HOME": str(home), "HF_HOME": f"{folder}/work/cache"}
    env |= make_locale(folder, "de_DE", "ISO-8859-1") | {"TMPDIR": f"{folder}/tmp"}
    wrap = [*namespaces(f"{show_cpu(folder, AMD)} && hostname {HOST}"), *become(user)]

    def check(record, printed):
        assert record["device_name"] == f"CPU ({CPU})" and record["ranks"][0]["host"] == HOST
        code, _, problem = place.run("env", "--unset=HF_HOME", sys.executable, *BERT)
        assert code == 1 and problem.count("\n") == 1, problem
        assert re.match(f"error: .*Permission denied: '{home}/.*: mend that", problem)

    words = {"root": root, "owner": user, "encoding": "iso8859-1", "check": check}
    place = Place(wrap, env, BERT, **words)
    return place


def a_service_in_a_small_container(folder):
    """No network, no HOME, no name in /etc/passwd, no input, the locale C, 5:45 ahead of Greenwich;
    one core of an ARM, no compiler, and a /tmp that is small and runs nothing. DeepSpeed likes to
    compile.
    """
    tools, tmp, user = folder / "tools", folder / "tmp", 54321
    tools.mkdir()
    tmp.mkdir()
    for place in f"{os.environ['PATH']}:/usr/bin:/bin".split(":"):
        for tool in Path(place).glob("*"):
            if not COMPILERS.fullmatch(tool.name) and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    core = min(os.sched_getaffinity(0))
    empty = ["env", "-i", f"PATH={tools}", f"TMPDIR={tmp}", "LC_ALL=C", "TZ=NPT-5:45"]
    no_input = ["sh", "-c", 'exec "$@" <&-', "sh"]
    setup = f"mount -t tmpfs -o size=64m,noexec,mode=1777 tmpfs {shlex.quote(str(tmp))}"
    setup += f" && {show_cpu(folder, ARM)} && ip link set lo up"

    def check(record, printed):
        assert record["device_name"] == f"CPU ({os.uname().machine})"

    wrap = [*namespaces(setup, "--net"), *become(user), "taskset", "--cpu-list", str(core)]
    wrap += empty + no_input
    return Place(wrap, {}, strategy="zero3", owner=user, check=check)


PLACES = [somebody_elses_checkout, a_service_in_a_small_container]


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """{script: the Result of an ordinary run}"""
    folder = tmp_path_factory.mktemp("usual")
    return {
        words[0]: launch("ddp", words[0], folder / words[0], *words[1:]) for words in (MNIST, BERT)
    }


@pytest.fixture
def outside():
    """A folder for everybody; pytest's own are for their owner only."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("make_place", PLACES, ids=lambda make_place: make_place.__name__)
def test_the_same_run(make_place, usual, outside):
    """The losses of an ordinary run, and a report with the names of this machine."""
    place, work = make_place(outside), outside / "work"
    folder = work / "runs" / "here"
    folder.parent.mkdir(parents=True)
    for path in (work, folder.parent):
        os.chown(path, place.owner, -1)
    words = ["--config_file", f"accelerate_configs/{place.strategy}.yaml", "--main_process_port", 0]
    code, printed, problem = place.run(*ACCELERATE, *words, *place.training, "--output_dir", folder)
    assert code == 0 and "Traceback" not in printed + problem, printed + problem
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "completed" and [rank["rank"] for rank in record["ranks"]] == [0, 1]
    start = f"{place.strategy} on 2 x {record['device_name']}: {record['parameters']:,} parameters"
    assert start in printed and "completed at step 3:" in printed
    place.check(record, printed)
    expected = usual[place.training[0]]
    losses = [loss for _, loss in record["loss_history"]]
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert record["metrics"] == pytest.approx(expected.record["metrics"], rel=1e-5)

    code, printed, problem = place.run(sys.executable, "report.py", work / "runs")
    assert code == 0 and "Traceback" not in problem, printed + problem
    report = (work / "runs" / "report.md").read_text(encoding="utf-8")
    assert report in printed and (work / "runs" / "time.svg").exists()
    host = record["ranks"][0]["host"]
    ranks = [line for line in report.splitlines() if "| here " in line and " 0m" in line]
    assert len(ranks) == 2 and all(f" {host} " in line for line in ranks), report
    assert f"device_name {record['device_name']}, " in report


def test_cpu_ranks_get_cores_of_their_own(monkeypatch):
    def ask(pid, cores):
        raise InterruptedError(str(cores))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", ask)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, cores in ("0", "[0, 2, 4, 6]"), ("1", "[1, 3, 5, 7]"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(InterruptedError, match=re.escape(cores)):
            train_mnist_rnn.connect_ranks()
