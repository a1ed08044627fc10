"""The same run elsewhere: other CPUs, hosts, users, paths, locales, cores, tools than the author's.

Each place below joins conditions that can hold at once. There the real launcher trains for three
steps, and report.py reads the run: both have to say what they say in an ordinary run. What a
machine cannot make, as it needs root or a tool, is skipped with the reason.
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
import slurm_cluster
from conftest import ACCELERATE, ROOT, launch, namespaces
from test_bert import TINY

MNIST = "train_mnist_rnn.py", "--dataset", "digits", "--max_train_steps", "3"
BERT = "train_bert_squad.py", *TINY, "--max_train_steps", "3"
# A CPU's name with all that it may have, where Linux has it; and an ARM's, which has none.
CPU = 'AMD EPYC 7763 64-Core Processor (rev. 1) @ 2.45GHz: "Milan", 2 x'
AMD = f"vendor_id\t: AuthenticAMD\nmodel\t\t: 1\nmodel name\t: {CPU}\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
HOST = "gpu-01.lab-2.example.org"  # which no name server knows
COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|c89|c99|clang|clang\+\+|cpp)(-[\d.]+)?")
NAMES = "locale, os, shutil, socket, sys, tempfile, time"  # what a proof may use


@dataclass
class Place:
    """How a command runs in a place, and what is to be seen there."""

    wrap: list  # the command line up to the command
    env: dict
    proof: dict  # Python expressions, and their values where the conditions hold
    training: tuple = MNIST
    strategy: str = "ddp"
    root: Path = ROOT
    owner: int = -1  # of the folders to write into
    out: str = "here"  # the name of the run's folder
    encoding: str = "utf-8"
    check: object = lambda record, printed: True

    def run(self, *command):
        """Exit code, output and errors of a command."""
        words = [*self.wrap, *map(str, command)]
        options = {"cwd": self.root, "env": os.environ | self.env, "stdin": subprocess.DEVNULL}
        done = subprocess.run(words, **options, capture_output=True, timeout=300)
        texts = (text.decode(self.encoding) for text in (done.stdout, done.stderr))
        return done.returncode, *(text.replace("\r\n", "\n") for text in texts)


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
    name = f"{language}.{charset}"
    if shutil.which("localedef"):
        command = ["localedef", "-i", language, "-f", charset, folder / name]
        subprocess.run(command, stderr=subprocess.DEVNULL)
    if not (folder / name).exists():
        pytest.skip(f"no localedef that makes {name}")
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
    proof = {
        "os.geteuid()": user,
        "os.access(os.environ['HOME'], os.W_OK)": False,
        "locale.getpreferredencoding(False)": "ISO-8859-1",
        "locale.localeconv()['decimal_point']": ",",
        "socket.gethostname()": HOST,
        "'Milan' in open('/proc/cpuinfo').read()": True,
    }

    def check(record, printed):
        assert record["device_name"] == f"CPU ({CPU})" and record["ranks"][0]["host"] == HOST
        code, _, problem = place.run("env", "--unset=HF_HOME", sys.executable, *BERT)
        assert code == 1 and problem.count("\n") == 1, problem
        assert re.match(f"error: .*Permission denied: '{home}/.*: mend that", problem)

    words = {"root": root, "owner": user, "encoding": "iso8859-1", "check": check}
    place = Place(wrap, env, proof, BERT, **words)
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
    proof = {
        "os.geteuid()": user,
        "os.environ.get('HOME')": None,
        "sys.stdin": None,
        "time.localtime().tm_gmtoff": 20700,
        "os.sched_getaffinity(0)": {core},
        "(shutil.which('c++'), shutil.which('gcc'))": (None, None),
        "os.path.ismount(tempfile.gettempdir())": True,
        "'asimd' in open('/proc/cpuinfo').read()": True,
        "[name for _, name in socket.if_nameindex()]": ["lo"],
    }
    wrap += empty + no_input
    return Place(wrap, {}, proof, strategy="zero3", owner=user, check=check)


def a_terminal_in_turkish(folder):
    """On eight cores: so it looks. The cores that ranks ask for are noted."""
    (folder / "sitecustomize.py").write_text(f"""import os
os.cpu_count, os.sched_getaffinity = lambda: 8, lambda pid: set(range(8))
notes = {str(folder / "cores")!r}
os.sched_setaffinity = lambda pid, cores: open(notes, "a").write(f"{{[*cores]}}\\n")
""")

    def check(record, printed):
        assert "%|" in printed, "no bar in a terminal"
        asked = sorted((folder / "cores").read_text().splitlines())
        assert asked == ["[0, 2, 4, 6]", "[1, 3, 5, 7]"], asked

    program = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    wrap = [sys.executable, "-c", program]
    wrap += ["sh", "-c", 'stty cols 80 rows 24 && exec "$@"', "sh"]
    env = make_locale(folder, "tr_TR", "UTF-8") | {"TERM": "dumb", "PYTHONPATH": str(folder)}
    proof = {"sys.stdout.isatty()": True, "locale.localeconv()['decimal_point']": ","}
    return Place(wrap, env, proof | {"os.cpu_count()": 8}, out="ığüşİ", check=check)


PLACES = [somebody_elses_checkout, a_service_in_a_small_container, a_terminal_in_turkish]


def report_of(place, folder, examples):
    """The sections of a report of the runs in a folder, to which three examples are added: what is
    to be said of these is everywhere the same. Titles are left out, as they name what differs.
    """
    for name in ("baseline-1x1-r1", "ddp-1x1-r1", "ddp-1x2-r1"):
        (folder / "runs" / "bert" / name).mkdir(parents=True)
        shutil.copy(examples / name / "run.json", folder / "runs" / "bert" / name)
    words = [folder / "runs", "--output_dir", folder / "report"]
    code, printed, problem = place.run(sys.executable, "report.py", *words)
    assert code == 0 and "Traceback" not in problem, printed + problem
    report = (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert report in printed and len(list((folder / "report").glob("*.svg"))) >= 3
    sections = [text for text in report.split("\n## ") if "in common: " in text]
    return [section.split("\n", 1)[1] for section in sections]


@pytest.fixture(scope="module")
def usual(example_records, tmp_path_factory):
    """{script: the Result of an ordinary run}, and the sections of the report of both."""
    folder = tmp_path_factory.mktemp("usual")
    runs = {}
    for script, *flags in (MNIST, BERT):
        runs[script] = launch("ddp", script, folder / "runs" / script, *flags)
    return runs, report_of(Place([], {}, {}), folder, example_records)


@pytest.fixture
def outside():
    """A folder for everybody; pytest's own are for their owner only."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("make_place", PLACES, ids=lambda make_place: make_place.__name__)
def test_the_same_run(make_place, usual, example_records, outside):
    """The losses of an ordinary run; of the same records the same report."""
    place = make_place(outside)
    for expression, value in place.proof.items():
        program = f"import {NAMES}; locale.setlocale(locale.LC_ALL, ''); print({expression})"
        code, printed, problem = place.run(sys.executable, "-c", program)
        if code or printed.strip() != str(value):
            pytest.skip(f"{expression} is {printed.strip()!r}, not {value!r} {problem.strip()}")

    script, work = place.training[0], outside / "work"
    folder = work / "runs" / place.out
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
    runs, usual_sections = usual
    losses = [loss for _, loss in record["loss_history"]]
    assert losses == pytest.approx(runs[script].losses, rel=1e-5)
    assert record["metrics"] == pytest.approx(runs[script].record["metrics"], rel=1e-5)

    sections = report_of(place, work, example_records)
    [own] = [text for text in sections if "steps 3, " in text]
    assert f"device_name {record['device_name']}, " in own
    ranks = [line for line in own.splitlines() if f"| {place.out} " in line and " 0m" in line]
    host = record["ranks"][0]["host"]
    assert len(ranks) == 2 and all(f" {host} " in line for line in ranks), own
    [examples] = [text for text in sections if text != own]
    assert examples in usual_sections and "Weak scaling" in examples


def test_a_cluster_that_is_missing_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))  # where nothing can be run
    assert "`make slurm` does it" in slurm_cluster.what_is_missing()


@pytest.mark.slow
def test_check_runs_where_a_gpu_was_not_granted(tmp_path):
    """A node's GPU is /dev/nvidia0 also to a job that asked for none: it runs on the CPU."""
    own, dev = tmp_path / "own", shlex.quote(str(tmp_path / "dev"))
    kept = "for name in null zero urandom; do touch $name; mount --bind /dev/$name $name; done"
    setup = f"mkdir {dev} && cd {dev} && {kept}; touch nvidia0; mkdir shm && mount --rbind . /dev"
    words = [sys.executable, ROOT / "sbatch" / "check.py", "--output_dir", own]
    code, printed, problem = Place(namespaces(setup), {}, {}).run(*words)
    assert code == 0 and "one process has nobody to talk to" in printed, problem
    assert json.loads((own / "check.json").read_text())["processes"] == 1
