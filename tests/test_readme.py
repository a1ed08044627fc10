"""What README.md, the docs and the requirement files promise."""

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ACCELERATE, ROOT, anchor, run
from packaging.requirements import Requirement

README = (ROOT / "README.md").read_text()
OTHERS = ["cluster.md", "scripts.md"]
TEXTS = README + "".join((ROOT / "docs" / name).read_text() for name in OTHERS)
BLOCKS = re.findall(r"```\n(.*?)```", TEXTS, re.S)
LINES = [line for block in BLOCKS for line in re.sub(r"\\\n *", "", block).splitlines()]
COMMANDS = [line.split("#")[0].strip() for line in LINES
            if re.match(r"accelerate|make|python|source|sbatch", line)]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]
# What runs the commands that are not `accelerate launch`: .ci/run, or the tests named here.
RUN_ELSEWHERE = {
    "make train": ".ci/run",
    "make train-bert": ".ci/run",
    "python train_bert_squad.py --prepare_data_only": "test_bert_data.py",
    "make test": ".ci/run",  # as part of make test-all
    "make setup": ".ci/run",
    "make sweep": ".ci/run",
    "sbatch/sweep.sh --dry_run": "test_sbatch.py",
    "sbatch/sweep.sh": "test_sbatch.py",
    "python report.py runs/": ".ci/run",
    "python fit.py 40GB": "test_ladder.py",
    "source .venv/bin/activate": ".ci/run",
    "make clean setup CONSTRAINTS=constraints-cu128.txt": "test_each_set_fits_the_requirements",
}


SMALL = {
    "train_mnist_rnn.py": "--dataset digits",
    "train_bert_squad.py": "--model_name_or_path tests/data/tiny_bert --from_scratch"
    " --train_file tests/data/squad_v2.json --validation_file tests/data/squad_v2.json"
    " --version_2_with_negative",
}


@pytest.mark.slow
def test_sbatch_commands_work(cluster, tmp_path):
    """Word for word and all at once, but on small data and for a few steps."""
    jobs = {}
    for command in sorted({command for command in COMMANDS if command.startswith("sbatch ")}):
        words, folder = shlex.split(command)[1:], tmp_path / str(len(jobs))
        script = "train_mnist_rnn.py" if "train_mnist_rnn.py" in words else "train_bert_squad.py"
        small = [*SMALL[script].split(), "--max_train_steps", "3"]
        small = [] if "sbatch/check.sh" in words else small
        words = [f"--output={folder}.log", *words, *small, "--output_dir", folder]
        jobs[command] = cluster.submit(*words, cwd=ROOT, env={"OMP_NUM_THREADS": "1"})
    for i, (command, job) in enumerate(jobs.items()):
        assert cluster.wait(job, 240) == "COMPLETED", command + (tmp_path / f"{i}.log").read_text()


LAUNCHES = sorted({command for command in COMMANDS if command.startswith("accelerate")})


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """command -> its Result: word for word, but on small data, for a few steps, and two at once on
    free ports.
    """
    folders = {command: tmp_path_factory.mktemp("launch") for command in LAUNCHES}

    def start(command):
        words, folder = shlex.split(command), folders[command]
        assert words[:3] == ["accelerate", "launch", "--config_file"]
        [script] = set(words) & set(SMALL)
        full = [*ACCELERATE, "--main_process_port", "0", *words[2:], *SMALL[script].split()]
        return run([*full, "--max_train_steps", "3", "--output_dir", str(folder)], folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(LAUNCHES, pool.map(start, LAUNCHES), strict=True))


@pytest.mark.parametrize("command", LAUNCHES)
def test_launch_commands_work(command, launches):
    result = launches[command]
    assert result.code == 0, result.err
    assert result.record["status"] == "completed"
    assert result.record["strategy"] in shlex.split(command)[3]


def test_no_command_is_left_to_rot():
    others = {command for command in COMMANDS if not command.startswith(("accelerate", "sbatch "))}
    missing = "a new command in README needs a test, or a place in RUN_ELSEWHERE"
    assert others == set(RUN_ELSEWHERE), missing
    script = (ROOT / ".ci" / "run").read_text()
    for command, place in RUN_ELSEWHERE.items():
        if place.endswith(".py"):
            assert command.split("--")[-1] in (ROOT / "tests" / place).read_text(), command
        else:
            assert command in script if place == ".ci/run" else place in globals(), command


def test_the_sizes_of_a_script_to_copy():
    lines = (ROOT / "train_mnist_rnn.py").read_text().splitlines()
    [border] = [i for i, line in enumerate(lines) if "the same in both scripts" in line]
    for size in (len(lines), border, len(lines) - border):
        assert re.search(rf"\b{round(size, -1)}\b", README.split("**A script**")[1]), size


def test_links_lead_somewhere():
    for page in PAGES:
        for file, place in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / file if file else page
            assert target.exists(), f"{page}: {file}"
            text = target.read_text() if place else ""
            places = {anchor(heading) for heading in re.findall(r"^#+ (.*)", text, re.M)}
            places.update(re.findall(r'<a id="(.*?)"', text))
            assert not place or place in places, f"{page}: {file}#{place}"


def test_the_glossary_has_the_terms():
    """That links to it find their term, the test above holds."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = [anchor(heading) for heading in re.findall(r"^### (.*)", text, re.M)]
    assert set(terms) >= set(
        """activation-checkpointing activations all-gather all-reduce autocast bandwidth barrier
        bf16 broadcast bucket checkpoint collective device efficiency fsdp-unit global-batch gloo
        gradient-accumulation latency launcher micro-batch nccl node offload optimizer-states
        overlap parameter process-group rank reduce reduce-scatter rendezvous shard speedup
        steady-step strong-scaling weak-scaling window world-size""".split())
    listed = re.findall(r"^\[.*\]\(#(.*)\)[,.]$", text, re.M)  # from A to Z
    assert listed == sorted(terms)


def test_pictures_of_the_collectives_are_those_that_the_script_draws(tmp_path):
    assert run([sys.executable, "docs/img/draw_collectives.py", str(tmp_path)]).code == 0
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = ROOT / "docs" / "img" / "collectives"
    assert drawn == {path.name: path.read_bytes() for path in folder.iterdir()}
    text = (ROOT / "docs" / "glossary.md").read_text()
    sections = {anchor(part.split("\n")[0]): part for part in text.split("\n### ")}
    for name in drawn:
        assert f"](img/collectives/{name})" in sections[name[:-4]]


def test_lines_of_text_are_short():
    """Not tables, program output, nor what cannot be broken."""
    for page in PAGES:
        if page.name == "report.md" and "results" in page.parts:  # program output
            continue
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        for line in text.splitlines():
            free = re.match(r" *\||    ", line) or "http" in line
            assert free or len(line) <= 100, f"{page}: {line}"


def test_lines_that_users_read_in_files_are_short():
    """The scripts, the YAMLs, the wrappers, the Makefile, and what the exercises give."""
    names = ("*.py", "Makefile", "accelerate_configs/*", "sbatch/*", "docs/**/*.py",
             "tests/exercises/*", "tests/troubleshooting/*")
    for path in [path for name in names for path in ROOT.glob(name) if path.is_file()]:
        for line in path.read_text().splitlines():
            assert "http" in line or len(line) <= 100, f"{path}: {line}"


def requirements(name):
    for line in (ROOT / name).read_text().splitlines():
        if not line or line[0] in "#-":
            continue
        requirement = Requirement(line.split("#")[0].strip())
        yield requirement.name, requirement, line


@pytest.mark.parametrize("pinned", ["constraints.txt", "constraints-cu128.txt"])
def test_each_set_fits_the_requirements(pinned):
    pins = {name: requirement for name, requirement, _ in requirements(pinned)}
    for asked in ("requirements.txt", "requirements-dev.txt"):
        for name, requirement, line in requirements(asked):
            [pin] = pins[name].specifier
            fits = pin.operator == "==" and requirement.specifier.contains(pin.version)
            assert fits, f"{pins[name]}, {requirement}"
            assert "# " in line, f"{name}: why?"
            if pinned == "constraints-cu128.txt" and asked == "requirements.txt":
                [floor] = requirement.specifier
                tested = pin.version.startswith(floor.version)
                assert tested, f"the floor of {name} is not the version that was tested"


@pytest.mark.slow
def test_benchmarks_start(tmp_path):
    assert "--data_dir" in run([sys.executable, "benchmarks/mnist.py", "--help"]).out
    assert "--train_file" in run([sys.executable, "benchmarks/bert.py", "--help"]).out
    command = [*ACCELERATE, "--main_process_port", "0"]
    command += ["--config_file", "accelerate_configs/ddp.yaml"]
    command += ["benchmarks/mnist.py", "--role", "sync"]
    assert "number: " in run(command).out
