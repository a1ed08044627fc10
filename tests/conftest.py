"""What the tests share: launches, records and weights."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import isolated  # noqa: F401  the first: it sets what libraries read when they are imported
import laptop
import pytest
import warm
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.strategies import STRATEGIES as YAMLS

ROOT = Path(__file__).resolve().parent.parent
# As `accelerate-launch`, which does not import accelerate's other commands.
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
BASELINE = ["--config_file", "accelerate_configs/baseline.yaml"]  # words of the launcher
STRATEGIES = ["ddp", "fsdp", "zero2", "zero3"]  # what quick tests train with
# The other YAMLs of two processes.
RUNGS = [name for name in YAMLS if name not in ("baseline", "dp", "hsdp", *STRATEGIES)]
# check.py measures less often in tests.
QUICK_CHECK = (ROOT / "tools" / "check.py").read_text().replace("SECONDS = 20,", "SECONDS = 3,")


class RunFailed(Exception):
    """A run that should have ended with exit code 0. Its text is all that the run printed."""


class Result:
    """A finished run of a script: exit code, output, and what lies in its output directory."""

    def __init__(self, code, out, err, folder):
        self.code, self.out, self.err, self.folder = code, out, err, folder

    @property
    def record(self):
        return json.loads((self.folder / "run.json").read_text())

    @property
    def losses(self):
        return [loss for _, loss in self.record["loss_history"]]

    @property
    def weights(self):
        return load_file(self.folder / "model.safetensors")

    @property
    def best(self):
        return load_file(self.folder / "best" / "model.safetensors")

    def events(self, name):
        """What the run has in TensorBoard under this name, in the order of a curve."""
        [folder] = self.folder.glob("tensorboard/*")
        return EventAccumulator(str(folder)).Reload().Scalars(name)

    def logged(self, name):
        """{step: value} of the same."""
        return {event.step: event.value for event in self.events(name)}

    def error_line(self):
        """The one line in which the script says what is wrong. The launcher prints the others."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"expected one error line, got {lines} in:\n{self.err}"
        assert self.code != 0
        return lines[0]


def run(command, folder=None, env=None):
    """Run a command in the project's root and return its Result."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Result(done.returncode, done.stdout, done.stderr, folder)


def rows_of(text):
    """The rows of a text's Markdown tables, headers too, as lists of cells."""
    lines = [line for line in text.splitlines() if re.match(r"\|(?!:?-)", line)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def namespaces(setup, *more):
    """The words that run a command in new namespaces of mounts and host names, and `more`, after a
    shell ran `setup` there.
    """
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("namespaces need root, and unshare")
    return ["unshare", "--mount", "--uts", *more, "sh", "-c", f'{setup} && exec "$@"', "sh"]


def run_forked(words, argv, folder=None, env=None, root=ROOT, alone=False):
    """The same as `run` of `accelerate launch WORDS ARGV`, but with forked ranks: see warm.py."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        env = os.environ | (env or {})
        code = warm.run_ranks(words, argv, env, root, out.name, err.name, 240, alone)
        return Result(code, out.read(), err.read(), folder)


def launch(strategy, script, folder, *flags, processes=None, launcher=(), env=None, ok=True):
    """`accelerate launch` a script into `folder`. `strategy` is the name of a YAML, or a path. If
    `ok`, the run has to exit with 0.

    The ranks are forked (see warm.py), so `env` cannot change what libraries read when they are
    imported. With a SPY_ variable in it, tests/spy.py runs the script.
    """
    if any(name.startswith("SPY_") for name in env or {}):
        script, env = "tests/spy.py", env | {"SPY_SCRIPT": Path(script).stem}
    yaml = strategy if isinstance(strategy, Path) else f"accelerate_configs/{strategy}.yaml"
    words = ["--config_file", str(yaml), "--main_process_port", "0"]
    words += ["--num_processes", str(processes)] if processes else []
    words += launcher
    argv = [str(script), "--output_dir", *map(str, [folder, *flags])]
    result = run_forked(words, argv, Path(folder), env)
    if ok and result.code:
        raise RunFailed(f"{' '.join([*words, *argv])}\n{result.out}\n{result.err}")
    return result


def spied(strategy, script, folder, *flags, ok=True, processes=None, **env):
    """A launch with these orders for tests/spy.py, which notes in `folder` the samples of steps."""
    env["SPY_DIR"] = str(folder)
    return launch(strategy, script, folder, *flags, ok=ok, processes=processes, env=env)


def anchor(heading):
    """The part after # in a link to a heading of a Markdown page."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A running Slurm cluster of two nodes."""
    problem = laptop.what_is_missing()
    if problem and os.environ.get("SLURM_TESTS") != "required":
        pytest.skip(problem)
    assert not problem, problem
    cluster = laptop.Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


def pytest_collection_modifyitems(items):
    """The longest first: what needs Slurm, the pages, and verify.py."""
    for item in items:
        if "cluster" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(1200))
    longest = "test_(sbatch|faults|pages|verify).py"
    items.sort(key=lambda item: not re.search(longest, item.nodeid))


@pytest.hookimpl(optionalhook=True)  # There may be no xdist.
def pytest_xdist_make_scheduler(config, log):
    """Which tests one worker runs together: those that need the Slurm cluster, because there is
    only one, and those of a file, because they share runs. Each page is a group of its own.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if "test_sbatch" in nodeid or "test_faults" in file:
                return "cluster"
            return test if "test_pages" in file else file

    config.option.loadscopereorder = False  # xdist would begin with files of many short tests
    return Groups(config, log)


SAID = set()


@pytest.fixture
def say_row(capsys):
    """A function that prints a row of a table at once, and its head before the first row."""

    def say(head, row):
        with capsys.disabled():
            print("" if head in SAID else f"\n{head}")
            print(f"| {' | '.join(map(str, row))} |", end="", flush=True)
        SAID.add(head)

    return say
