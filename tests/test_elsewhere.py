"""The same run elsewhere: other CPUs, hosts, users, paths, locales, cores, tools than the author's.

Each condition is a function below that says how a command is run under it. There the real launcher
trains for three steps and report.py reads the run; both have to say what they say in an ordinary
run. What cannot be made on a machine, as it needs root or a tool, is skipped with the reason.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import slurm_cluster
import test_lab
import test_notebook
from conftest import ACCELERATE, ROOT
from test_bert import TINY

import train_mnist_rnn

pytestmark = pytest.mark.slow

MNIST = ["train_mnist_rnn.py", "--dataset", "digits", "--max_train_steps", "3"]
BERT = ["train_bert_squad.py", *TINY, "--max_train_steps", "3"]
# With all that a name may have.
AMD = 'AMD EPYC 7763 64-Core Processor (rev. 1) @ 2.45GHz: "Milan", 2 x'
CPUS = {
    AMD: f"vendor_id\t: AuthenticAMD\nmodel\t\t: 1\nmodel name\t: {AMD}\nflags\t\t: fpu\n",
    "Intel(R) Xeon(R) Processor": "model name\t: Intel(R) Xeon(R) Processor\nstepping\t: 8\n" * 2,
    None: "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n",  # ARM
}
HOST = "gpu-01.lab-2.example.org"  # which no name server knows
COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|c89|c99|clang|clang\+\+|cpp)(-[\d.]+)?")


@dataclass
class Place:
    """How a command is run under a condition, and what is to be seen of it."""

    wrap: list = field(default_factory=list)  # the command line up to the command
    env: dict = field(default_factory=dict)
    proof: tuple = ("1", "1")  # a Python expression, and what it prints where the condition holds
    root: Path = ROOT
    owner: int = -1  # of the folders to write into
    out: str = "here"  # the name of the run's folder
    encoding: str = "utf-8"
    training: list = field(default_factory=lambda: MNIST)
    strategy: str = "ddp"
    record: dict = field(default_factory=dict)  # what the record has to say
    shown: str = ""  # in the output of the run
    error: tuple = ()  # a command, and the beginning of the one line that it ends with
    check: object = lambda: True

    def run(self, *command):
        """Exit code, output and errors of a command."""
        done = subprocess.run(
            [*self.wrap, *map(str, command)],
            cwd=self.root,
            env=os.environ | self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
        )
        texts = (
            text.decode(self.encoding).replace("\r\n", "\n") for text in (done.stdout, done.stderr)
        )
        return done.returncode, *texts


# --------------------------------------------------------------------------------------- conditions


def namespaces(setup):
    """Run what follows in mount and host-name namespaces in which the shell did `setup` first."""
    if not shutil.which("unshare"):
        pytest.skip("namespaces need unshare")
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", *user, "--mount", "--uts", "sh", "-c", f'{setup} && exec "$@"', "sh"]


def become(user):
    """Run what follows as another user."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("to become another user needs root, and setpriv")
    wrap = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    if subprocess.run([*wrap, "test", "-x", os.path.realpath(sys.executable)]).returncode:
        # Python lies in root's own HOME.
        wrap += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return wrap


def locale_made(folder, language, charset):
    """The environment of a locale that need not be installed."""
    name = f"{language}.{charset}"
    if shutil.which("localedef"):
        command = ["localedef", "-i", language, "-f", charset, folder / name]
        subprocess.run(command, stderr=subprocess.DEVNULL)
    if not (folder / name).exists():
        pytest.skip(f"no localedef that makes {name}")
    return {"LOCPATH": str(folder), "LC_ALL": name}


def ordinary(folder):
    return Place()


def ordinary_bert(folder):
    return Place(training=BERT)


def another_cpu_and_a_host_name_with_dots(folder):
    (folder / "cpuinfo").write_text(CPUS[AMD])
    return Place(
        namespaces(
            f"mount --bind {shlex.quote(str(folder))}/cpuinfo /proc/cpuinfo && hostname {HOST}"
        ),
        proof=("socket.gethostname(), 'Milan' in open('/proc/cpuinfo').read()", f"{HOST} True"),
        record={"device_name": f"CPU ({AMD})", "host": HOST},
    )


def another_user_with_a_read_only_home_and_an_odd_path(folder):
    """Somebody else's checkout, at a path with a space and an umlaut. Without HF_HOME: one line."""
    root, home = folder / "Übung 1" / "clone", folder / "home"
    for name in ("accelerate_configs", "tests/data", "reporting"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("report.py", "fit.py", "train_bert_squad.py"):
        shutil.copy(ROOT / name, root)
    home.mkdir()
    home.chmod(0o555)
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    for name in ("work", "tmp"):
        (folder / name).mkdir()
        os.chown(folder / name, user, -1)
    return Place(
        become(user) if user != os.geteuid() else [],
        {"HOME": str(home), "HF_HOME": f"{folder}/work/cache", "TMPDIR": f"{folder}/tmp"},
        proof=("os.geteuid(), os.access(os.environ['HOME'], os.W_OK)", f"{user} False"),
        root=root,
        owner=user,
        training=BERT,
        error=(
            ["env", "--unset=HF_HOME", sys.executable, *BERT],
            f"error: cannot write to {home}/",
        ),
    )


def a_user_without_a_name_an_environment_or_input(folder):
    """As cron, or a container: no HOME, nor in /etc/passwd; C locale, 5:45 ahead of Greenwich."""
    empty = ["env", "-i", f"PATH={os.defpath}", "LC_ALL=C", "TZ=NPT-5:45"]
    return Place(
        [*become(54321), *empty, "sh", "-c", 'exec "$@" <&-', "sh"],
        proof=(
            "os.geteuid(), os.environ.get('HOME'), time.localtime().tm_gmtoff, sys.stdin",
            "54321 None 20700 None",
        ),
        owner=54321,
    )


def german_in_latin_1(folder):
    env = locale_made(folder, "de_DE", "ISO-8859-1")
    return Place(
        env=env | {"PYTHONUTF8": "0"},
        proof=(
            "locale.getpreferredencoding(False), locale.localeconv()['decimal_point']",
            "ISO-8859-1 ,",
        ),
        encoding="iso8859-1",
        training=BERT,
    )


def turkish_in_a_terminal(folder):
    program = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    return Place(
        [sys.executable, "-c", program, "sh", "-c", 'stty cols 80 rows 24 && exec "$@"', "sh"],
        locale_made(folder, "tr_TR", "UTF-8") | {"TERM": "dumb"},
        proof=("sys.stdout.isatty(), locale.localeconv()['decimal_point']", "True ,"),
        out="ığüşİ",
        shown="%|",
    )


def one_core(folder):
    first = min(os.sched_getaffinity(0))
    return Place(
        ["taskset", "--cpu-list", str(first)], proof=("os.sched_getaffinity(0)", f"{{{first}}}")
    )


def eight_cores(folder):
    """So it looks; the cores that ranks ask for are noted."""
    (folder / "sitecustomize.py").write_text(f"""import os
os.cpu_count, os.sched_getaffinity = lambda: 8, lambda pid: set(range(8))
notes = {str(folder / "cores")!r}
os.sched_setaffinity = lambda pid, cores: open(notes, "a").write(f"{{[*cores]}}\\n")
""")

    def check():
        asked = sorted((folder / "cores").read_text().splitlines())
        assert asked == ["[0, 1, 2, 3]", "[4, 5, 6, 7]"], asked

    return Place(env={"PYTHONPATH": str(folder)}, proof=("os.cpu_count()", "8"), check=check)


def no_compiler_and_a_tmp_that_runs_nothing(folder):
    """/tmp is a file system of its own, small and noexec. DeepSpeed likes to compile."""
    tools, tmp = folder / "tools", folder / "tmp"
    tools.mkdir()
    tmp.mkdir()
    for place in f"{os.environ['PATH']}:/usr/bin:/bin".split(":"):
        for tool in Path(place).glob("*"):
            if not COMPILERS.fullmatch(tool.name) and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    return Place(
        namespaces(f"mount -t tmpfs -o size=64m,noexec tmpfs {shlex.quote(str(tmp))}"),
        {"PATH": str(tools), "TMPDIR": str(tmp)},
        proof=(
            "*map(shutil.which, ('c++', 'gcc')), os.path.ismount(tempfile.gettempdir())",
            "None None True",
        ),
        strategy="zero3",
    )


CONDITIONS = [
    another_cpu_and_a_host_name_with_dots,
    another_user_with_a_read_only_home_and_an_odd_path,
    a_user_without_a_name_an_environment_or_input,
    german_in_latin_1,
    turkish_in_a_terminal,
    one_core,
    eight_cores,
    no_compiler_and_a_tmp_that_runs_nothing,
]


# ------------------------------------------------------------------------------------- the same run


@pytest.fixture(scope="module")
def try_out(example_records):
    """condition -> the record of a run under it, and the sections of its report; made once."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as outside:
        Path(outside).chmod(0o755)  # pytest's own folders are for their owner only
        results = {}

        def get(condition):
            if condition not in results:
                folder = Path(outside) / condition.__name__[:20]
                folder.mkdir()
                results[condition] = train_and_report(condition(folder), folder, example_records)
            return results[condition]

        yield get


def train_and_report(place, folder, examples):
    expression, value = place.proof
    names = "locale, os, pty, shutil, socket, sys, tempfile, time"
    program = f"import {names}; locale.setlocale(locale.LC_ALL, ''); print({expression})"
    if place.wrap and not shutil.which(place.wrap[0]):
        pytest.skip(f"there is no {place.wrap[0]}")
    code, printed, problem = place.run(sys.executable, "-c", program)
    if code or printed.strip() != value:
        pytest.skip(
            f"not here: {expression} is {printed.strip()!r}, not {value!r} {problem.strip()}"
        )

    runs, output = folder / "work" / "runs", folder / "work" / "report"
    for name in (
        "bert/baseline-1x1-r1",
        "bert/ddp-1x1-r1",
        "bert/ddp-1x2-r1",
    ):  # what is to be said of these is everywhere the same
        (runs / name).mkdir(parents=True)
        shutil.copy(examples / name / "run.json", runs / name)
    os.chown(folder / "work", place.owner, -1)
    os.chown(runs, place.owner, -1)

    script, *flags = place.training
    words = [
        "--config_file",
        f"accelerate_configs/{place.strategy}.yaml",
        "--main_process_port",
        0,
        script,
        *flags,
    ]
    code, printed, problem = place.run(*ACCELERATE, *words, "--output_dir", runs / place.out)
    assert code == 0 and "Traceback" not in printed + problem, printed + problem
    record = json.loads((runs / place.out / "run.json").read_text(encoding="utf-8"))
    assert record["status"] == "completed" and [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert (
        f"{place.strategy} on 2 x {record['device_name']}: {record['parameters']:,} parameters"
        in printed
    )
    assert place.shown in printed and "completed 3 steps" in printed
    seen = record | {"host": record["ranks"][0]["host"]}
    assert {name: seen[name] for name in place.record} == place.record
    place.check()

    words = [
        runs,
        "--output_dir",
        output,
        "--predict",
        4,
        "--check",
        examples / "mnist" / "check-1x2-r1" / "check.json",
    ]
    code, printed, problem = place.run(sys.executable, "report.py", *words)
    assert code == 0 and "Traceback" not in problem, printed + problem
    report = (output / "report.md").read_text(encoding="utf-8")
    assert report in printed and len(list(output.glob("*.png"))) > 10
    # The details of each workload, without their titles, which name what differs.
    sections = [section.split("\n", 1)[1] for section in report.split("\n## ")
                if "in common: " in section]
    [own] = [text for text in sections if f"steps 3, device_name {record['device_name']}, " in text]
    ranks = [line for line in own.splitlines() if f"| {place.out} " in line and " 0m" in line]
    assert len(ranks) == 2 and all(f" {seen['host']} " in line for line in ranks), own

    if place.error:
        command, sentence = place.error
        code, printed, problem = place.run(*command)
        assert code == 1 and problem.startswith(sentence) and problem.count("\n") == 1, (
            printed + problem
        )
    return record, sections


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.__name__)
def test_the_same_run(condition, try_out, example_records):
    """The losses of an ordinary run; of the same records the same report."""
    record, sections = try_out(condition)
    usual, usual_sections = try_out(
        ordinary_bert if record["script"] == "train_bert_squad.py" else ordinary
    )
    losses = [loss for _, loss in usual["loss_history"]]
    assert [loss for _, loss in record["loss_history"]] == pytest.approx(losses, rel=1e-5)
    assert record["metrics"] == pytest.approx(usual["metrics"], rel=1e-5)
    example = json.loads((example_records / "bert" / "ddp-1x2-r1" / "run.json").read_text())
    [committed] = [text for text in sections
                   if example["device_name"] in text and "steps 3," not in text]
    assert committed in usual_sections and "Predicted from the same strategy" in committed


# --------------------------------------------------------------------------- names, without any run


@pytest.mark.parametrize("name", CPUS)
def test_any_cpu_has_a_name(name, tmp_path, monkeypatch):
    backend = SimpleNamespace(backend=SimpleNamespace(value="NO"))
    state = SimpleNamespace(mixed_precision="no", dynamo_plugin=backend)
    monkeypatch.setattr(sys, "argv", ["train_mnist_rnn.py"])
    run = SimpleNamespace(
        args=train_mnist_rnn.parse_args(), devices=1, global_batch_size=64,
        accelerator=SimpleNamespace(state=state, num_processes=1))
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(
        train_mnist_rnn, "Path", lambda path: file if path == "/proc/cpuinfo" else Path(path))

    def shown():
        train_mnist_rnn.Run.describe(run, "baseline", {}, {})
        return run.record["device_name"]

    file.write_text(CPUS[name])
    assert shown() == f"CPU ({name or os.uname().machine})"
    file.unlink()
    assert shown() == f"CPU ({os.uname().machine})", "where /proc/cpuinfo is hidden"
    file.mkdir()
    assert shown() == f"CPU ({os.uname().machine})", "where it cannot be read"


@pytest.mark.parametrize("name", [name or os.uname().machine for name in CPUS])
def test_docs_are_not_compared_by_the_name_of_a_cpu(name):
    """Lab and notebook pasted elsewhere are the same to their tests; other words are not."""
    [ours] = set(re.findall(r" x (CPU \(.*?\))(?=: )", test_lab.TEXT))
    theirs = f"CPU ({name})"
    shown = [
        pasted for number in range(1, 9) for _, pasted in test_lab.blocks(number) if ours in pasted
    ]
    assert len(shown) > 6
    for pasted in shown:
        test_lab.check_kind(pasted, pasted.replace(ours, theirs))
        for word, other in ((" samples", " images"), ("x CPU", "x GPU"), (", torch ", ", jax ")):
            if word not in pasted:
                continue
            with pytest.raises(AssertionError):
                test_lab.check_kind(pasted, pasted.replace(ours, theirs).replace(word, other))
    notebook = nbformat.read(test_notebook.NOTEBOOK, as_version=4)
    cells = [cell for cell in test_notebook.code_cells(notebook) if "CPU (" in str(cell.outputs)]
    assert cells
    for cell in cells:
        words = test_notebook.words(cell)
        for output in cell.outputs:
            output["text"] = re.sub(r"CPU \(.*\)(?=: )", theirs, output.get("text", ""))
        assert theirs in test_notebook.text(cell) and test_notebook.words(cell) == words


def test_torchrun_of_the_docs_on_a_host_that_nobody_knows(tmp_path):
    """The command of docs/strategies.md, which hangs if it looks for the host by its name."""
    (tmp_path / "hello.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        # In one piece: torchrun starts python -u, which writes each part of a print by itself.
        "print(f'rank {dist.get_rank()} of {dist.get_world_size()}\\n', end='')\n"
    )
    [command] = re.findall(r"^torchrun.*", (ROOT / "docs" / "strategies.md").read_text(), re.M)
    place = Place(namespaces(f"hostname {HOST}"), root=tmp_path)
    if place.run("hostname")[1].strip() != HOST:
        pytest.skip("there is no namespace for another host name")
    code, printed, problem = place.run(*command.replace("train_ddp.py", "hello.py").split())
    assert code == 0 and sorted(printed.splitlines()) == ["rank 0 of 2", "rank 1 of 2"], problem


# ------------------------------------------------------------------- the tests themselves elsewhere


def test_tests_in_a_slurm_job_behind_a_proxy_with_caches_of_ones_own(tmp_path):
    """What a cluster's shell has set is not what tests are about; none of it is written to."""
    chosen = """test_mnist.py::test_mnist_is_downloaded_checked_and_read
        test_mnist.py::test_bad_flags
        test_sbatch.py::test_sweep_refuses_with_one_line
        test_bert_data.py::test_no_data_no_network""".split()
    foreign = dict.fromkeys(
        "HOME HF_HOME HF_DATASETS_CACHE HF_HUB_CACHE XDG_CACHE_HOME".split(), str(tmp_path / "own")
    )
    foreign |= dict.fromkeys(
        "http_proxy https_proxy HTTP_PROXY HTTPS_PROXY".split(), "http://127.0.0.1:9"
    )
    foreign |= {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "WORLD_SIZE": "4",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in chosen]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | foreign, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and not re.search("skipped|deselected", done.stdout), (
        done.stdout + done.stderr
    )
    assert not (tmp_path / "own").exists()


def test_tests_in_a_locale_that_they_cannot_read(tmp_path):
    env = os.environ | locale_made(tmp_path, "de_DE", "ISO-8859-1") | {"PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "PYTHONUTF8=1 make test" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_nothing_is_installed_behind_the_users_back(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))  # where nothing can be run
    assert "`make slurm` does it" in slurm_cluster.what_is_missing()
    installers = re.compile(r"\b(apt-get|apt|dnf|yum|apk|conda|pip3?)\W+(install|update|add)\b")
    for path in {*ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/**/*.sh")} - {Path(__file__)}:
        assert not installers.search(path.read_text()), path
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^slurm:.*\n((?:\t.*\n)+)", makefile, re.M)
    assert "apt-get install" in recipe and not re.search(r"^test.*:.*\bslurm\b", makefile, re.M)
    assert "\nmake slurm\n" in (ROOT / ".ci" / "run").read_text()


def test_make_sweep_at_an_odd_path(tmp_path):
    """With the .venv of a checkout whose path has a space and an umlaut first on the PATH."""
    root = tmp_path / "Übung 1" / "clone"
    shutil.copytree(ROOT / "sbatch", root / "sbatch")
    shutil.copytree(ROOT / "accelerate_configs", root / "accelerate_configs")
    tools = root / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in (
        "Makefile",
        "requirements.txt",
        "constraints.txt",
        "train_mnist_rnn.py",
        "train_bert_squad.py",
    ):
        shutil.copy(ROOT / name, root)
    (root / ".venv" / "installed").write_text("constraints.txt\n")
    (tools / "activate").touch()
    for tool in ("python", "accelerate"):
        (tools / tool).write_text(
            f'#!/bin/sh\necho "{tool} $1" >>"{root}/started"\necho "written: $2"\n'
        )
        (tools / tool).chmod(0o755)
    command = ["make", "sweep", "REPEATS=1", "STRATEGIES=baseline ddp"]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PATH": os.defpath}, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    started = (root / "started").read_text().splitlines()
    assert started.count("accelerate launch") == 8 and started[-1] == "python report.py"


def test_check_runs_where_a_gpu_was_not_granted(tmp_path):
    """A node's GPU shows as /dev/nvidia0 to a job that asked for none: such a job runs on the CPU."""
    own, dev = tmp_path / "own", shlex.quote(str(tmp_path / "dev"))
    kept = "for name in null zero urandom; do touch $name && mount --bind /dev/$name $name || exit; done"
    setup = f"mkdir {dev} && cd {dev} && {kept}; touch nvidia0 && mkdir shm && mount --rbind . /dev"
    words = [*namespaces(setup), sys.executable, str(ROOT / "sbatch/check.py"), "--output_dir", str(own)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "one process has nobody to talk to" in done.stdout, done.stderr
    assert json.loads((own / "check.json").read_text())["processes"] == 1
