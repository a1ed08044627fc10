"""sbatch/ on a real Slurm cluster of two nodes: tests submit jobs, and look at what happened."""

import csv
import fcntl
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
import torch
from conftest import ROOT, RUNGS, STRATEGIES, launch
from test_bert import TINY

pytestmark = pytest.mark.slow
TORCH_IS_IN = os.path.dirname(os.path.dirname(torch.__file__))
BERT = [*TINY, "--max_train_steps", "12", "--per_device_train_batch_size", "8", "--dropout", "0"]
DIGITS = "train_mnist_rnn.py --dataset digits --per_device_train_batch_size 64 --num_epochs".split()


@pytest.fixture
def start(cluster, tmp_path):
    """A function that submits a job. It returns one that waits for its end, and returns its log."""

    def submit(*words, cwd=ROOT, env=None, state="COMPLETED"):
        def finish():
            ended, log = cluster.wait(finish.job, 300), (tmp_path / f"{finish.job}.log").read_text()
            assert ended == state, log
            return log

        finish.job = cluster.submit(f"--output={tmp_path}/%j.log", *words, cwd=cwd, env=env)
        return finish

    return submit


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project's cluster files under a name with a space, and with a site file of their own."""
    folder = tmp_path_factory.mktemp("a project")
    for name in ("sbatch", "accelerate_configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "tests" / "probe.py", folder)
    configs = folder / "accelerate_configs"
    sizes = "parallelism_config:\n  parallelism_config_dp_shard_size: 2\n"
    (configs / "hybrid.yaml").write_text((configs / "fsdp.yaml").read_text() + sizes)
    with open(folder / "sbatch" / "site.sh", "a") as site:
        site.write("export FROM_THE_SITE_FILE='read it'\n")
    return folder


def read(file):
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    return launch("ddp", "train_bert_squad.py", tmp_path_factory.mktemp("bert") / "run", *BERT)


@pytest.mark.parametrize(
    "name", [*STRATEGIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in RUNGS)]
)
def test_two_nodes_train_as_one_machine_and_send_as_many_bytes_as_the_formula_says(
    name, start, one_machine, tmp_path
):
    """The bytes are those of ten steps that the nodes' network cards count. DDP needs no YAML. The
    variants make the calls of dry runs, so after a change of them: `pytest -m matrix -k two_nodes`.
    """
    yaml = [f"accelerate_configs/{name}.yaml"] * (name != "ddp")
    spying = {"SPY_SCRIPT": "train_bert_squad", "SPY_WIRE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = start(
        "sbatch/2node.sh",
        *yaml,
        "tests/spy.py",
        *BERT,
        "--output_dir",
        tmp_path / "run",
        env=spying,
    )
    log, record = job(), read(tmp_path / "run" / "run.json")
    assert (record["status"], record["nodes"]) == ("completed", 2)
    assert record["strategy"] == name.split("_")[0] and record["slurm_job_id"] == job.job
    assert [(rank["rank"], rank["host"]) for rank in record["ranks"]] == [(0, "n1"), (1, "n2")]
    for line in ("n1: 1 GPU(s), 4 core(s)", "n2: 1 GPU(s)", "torch 2.", "--num_processes 2"):
        assert line in log
    losses = [[loss for _, loss in run["loss_history"]] for run in (record, one_machine.record)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 12
    # Copies of the parameters that two ranks send over gloo, which has no reduce-scatter.
    copies = {"ddp": 1, "zero1": 1.25, "zero2": 1.25, "fsdp_keep": 1.5, "fsdp": 2, "zero3": 1.5}
    formula = copies[name.removesuffix("_offload")] * 4 * record["parameters"]
    assert bytes_between_nodes(tmp_path, (0, 1)) == pytest.approx(formula, rel=0.05)


def bytes_between_nodes(folder, ranks):
    """What a node sends in a step, by the spies of one rank on each node."""
    counted = [read(folder / f"wire_{rank}.json") for rank in ranks]
    return sum(last - first for first, last in counted) / 10 / len(ranks)


def test_hsdp_shards_inside_the_nodes_that_slurm_granted(start, one_machine, tmp_path):
    """Two nodes with two processes each. Only gradients leave a node: of a shard from each rank, by
    an all-reduce of two, which sends its bytes once. FSDP's parameters would leave it, too.
    """
    words = ["sbatch/2node.sh", "accelerate_configs/hsdp.yaml", "tests/spy.py", *BERT]
    words += ["--per_device_train_batch_size", "4", "--output_dir", tmp_path / "run"]
    spying = {"SPY_SCRIPT": "train_bert_squad", "SPY_WIRE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    start("--gres=none", *words, env=spying | {"PROCESSES_PER_NODE": "2"})()
    record = read(tmp_path / "run" / "run.json")
    assert (record["strategy"], record["nodes"], record["devices"]) == ("hsdp", 2, 4)
    sizes = record["strategy_options"]
    assert (sizes["dp_replicate_size"], sizes["dp_shard_size"]) == ("2", "2")
    losses = [[loss for _, loss in run["loss_history"]] for run in (record, one_machine.record)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 12
    gradients = 4 * record["parameters"]
    assert bytes_between_nodes(tmp_path, (0, 3)) == pytest.approx(gradients, rel=0.05)


def test_what_ranks_find_on_the_nodes(cluster, start, project, tmp_path):
    """GPUs from Slurm, arguments as they were typed, ports that neighbours do not share."""
    odd = ["it's", 'a "b"  c', "$HOME", "*", "", "--output_dir", str(tmp_path / "gp us")]
    words = "--exclusive --gres=gpu:a100:3 sbatch/2node.sh accelerate_configs/hybrid.yaml"
    gpus = start(*words.split(), "--mixed_precision", "bf16", "probe.py", *odd, cwd=project)
    cpus = start(
        "--gres=none",
        "sbatch/2node.sh",
        "probe.py",
        "--output_dir",
        tmp_path / "cpus",
        cwd=project,
        env={"PROCESSES_PER_NODE": "2", "TORCH_FR_BUFFER_SIZE": "0"},
    )
    array = start("--array=0-1", "sbatch/1node.sh", "probe.py", cwd=project).job
    tasks = [project / f"runs/probe-ddp-{array}_{task}" for task in (0, 1)]
    assert "warning: 4 core(s) for 3 GPU(s)" in gpus()
    cpus()
    cluster.wait_until(lambda: [len([*task.glob("r*.json")]) for task in tasks] == [3, 3], 60)

    seen = [read(tmp_path / "gp us" / f"rank_{rank}.json") for rank in range(6)]
    assert [rank["host"] for rank in seen] == ["n1"] * 3 + ["n2"] * 3
    for rank in seen:
        assert len(rank["CUDA_VISIBLE_DEVICES"].split(",")) == 3, "of the four of the node"
        assert (
            rank.items()
            >= {
                "argv": ["--resume", *odd],
                "WORLD_SIZE": "6",
                "LOCAL_WORLD_SIZE": "3",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3",
                "MASTER_ADDR": "n1",
                "OMP_NUM_THREADS": "1",
                "FROM_THE_SITE_FILE": "read it",
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "PYTHONFAULTHANDLER": "1",
                "TORCH_FR_BUFFER_SIZE": "2000",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            }.items()
        )
    last = read(tmp_path / "cpus" / "rank_3.json")
    assert (last["host"], last["WORLD_SIZE"], last["TORCH_FR_BUFFER_SIZE"]) == ("n2", "4", "0")
    others = [read(task / "rank_0.json") for task in tasks]
    ports = {rank["MASTER_PORT"] for rank in (seen[0], last, *others)}
    assert len(ports) == 4, "of jobs that may share a node"


BARE = "/usr/bin:/bin:/usr/sbin:/sbin"
REFUSED = {  # what sbatch gets, and what the job says
    "sbatch/2node.sh accelerate_configs/hsdp.yaml probe.py": "hsdp.yaml shards the model inside a",
    "sbatch/2node.sh accelerate_configs/dp.yaml probe.py": "dp.yaml is one process on one node",
    "sbatch/2node.sh accelerate_configs/ddq.yaml": "no YAML accelerate_configs/ddq.yaml; there are",
    "sbatch/1node.sh train.py --num_epochs 2": "no script train.py in ",
    "sbatch/1node.sh ddp": "'ddp' is neither a YAML, nor a script (.py), nor a flag",
    "sbatch/1node.sh accelerate_configs/ddp.yaml --num-processes 8 probe.py": "num-processes comes",
    "sbatch/1node.sh accelerate_configs/zero2.yaml --dynamo_backend=eager probe.py": "drops --dyn",
    "--array=1 sbatch/1node.sh probe.py --output_dir runs/x": "tasks of an array would share",
    "--gres=none sbatch/1node.sh probe.py": "must be a number from 1 on, got 'two'",
    "--gpus-per-node=4 sbatch/1node.sh probe.py": "type --gres=gpu:4 instead",
    "sbatch/1node.sh probe.py --output_dir runs/taken": "another run is writing into runs/taken: ",
    "--gres=none --gpus=3 sbatch/2node.sh probe.py": "ask for the same on each, with --gres=gpu:N",
}


def test_what_cannot_run_ends_with_one_line(start, project, tmp_path):
    env, bare = {"PROCESSES_PER_NODE": "two"}, {"PATH": BARE}
    (project / "runs" / "taken").mkdir(parents=True)
    lock = open(project / "runs" / "taken" / ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    jobs = {
        start(*words.split(), cwd=project, env=env, state="FAILED"): line
        for words, line in REFUSED.items()
    }
    jobs[start("sbatch/1node.sh", "probe.py", cwd=project, env=bare, state="FAILED")] = (
        "no accelerate on the PATH"
    )
    jobs[start(ROOT / "sbatch/2node.sh", cwd=tmp_path, state="FAILED")] = "no sbatch/launch.sh in "
    for job, line in jobs.items():
        log = job()
        assert re.search(f"error: .*{re.escape(line)}", log) and log.count("error: ") == 1, log
        assert not re.search("main_process_port|Traceback", log), "something was started"
    done = subprocess.run(["bash", "sbatch/2node.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "error: this runs inside a Slurm job: sbatch sbatch/2node.sh\n"


def test_a_run_that_diverges_or_cannot_begin_is_not_queued_again(start, tmp_path):
    """A rank of the second node meets a NaN in the second epoch, after a checkpoint."""
    env, run = {"SPY_SCRIPT": "train_mnist_rnn", "SPY_NAN": "1 15"}, tmp_path / "run"
    diverges = start(
        "sbatch/2node.sh",
        "tests/spy.py",
        *DIGITS[1:],
        3,
        "--output_dir",
        run,
        env=env,
        state="FAILED",
    )
    wrong = start("sbatch/2node.sh", *DIGITS, -1, "--output_dir", tmp_path / "x", state="FAILED")
    for job, line, reason in [
        (diverges, "error: the training loss of step 16 is nan", "the run broke down"),
        (wrong, "error: --num_epochs must be greater than 0, got -1", "a new checkpoint"),
    ]:
        log = job()
        assert line in log and f"{reason}, so not queued again" in log
        assert len(re.findall("^job ", log, re.M)) == 1, "started again"
    assert read(run / "run.json")["status"] == "failed"
    assert (run / "checkpoints" / "step_00000011").exists()


def test_check_measures_the_link(start, tmp_path):
    """And with --full, it says where there is no GPU."""
    full = start("--nodes=1", "sbatch/check.sh", "--full", "--only", "link")
    log = start("sbatch/check.sh", "--output_dir", tmp_path / "check")()
    record = read(tmp_path / "check" / "check.json")
    assert (record["nodes"], record["processes"], record["backend"]) == (2, 2, "gloo")
    assert [rank["host"] for rank in record["ranks"]] == ["n1", "n2"]
    assert log.count("backend gloo") == log.count("33,554,432") == log.count("fit: ") == 1
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"):
        line = record["collectives"][name]
        sizes, seconds = zip(*line["times"], strict=True)
        assert sizes == tuple(2**power for power in range(7, 26, 2)) and min(seconds) > 0
        assert line["latency_seconds"] >= 0 and line["bandwidth_bytes_per_second"] > 0
        assert log.count(f" {name}: ") == 1 and 0 <= line["residual"] < 1
    assert "skipped: torch sees no GPU" in full()


def test_check_refuses_gpus_that_torch_cannot_use(monkeypatch):
    """As with a driver that is too old: the GPUs are counted without it."""
    monkeypatch.setattr(sys, "argv", ["check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="^error: .* has a GPU that torch .* is the driver too"):
        runpy.run_path(str(ROOT / "sbatch" / "check.py"))["main"]()


def test_two_jobs_never_write_into_one_folder(cluster, start, project, tmp_path):
    """Of two that start at once, one ends. One that is queued again waits for ranks that save."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "wait").touch()
    words = ["probe.py", "--output_dir", run]
    hold = [f"--output={tmp_path}/%j.log", "--hold", "sbatch/1node.sh", *words]
    jobs = [cluster.submit(*hold, cwd=project) for _ in range(2)]
    cluster.on("ctl", "scontrol", "release", *jobs)
    cluster.wait_until(lambda: "FAILED" in map(cluster.state, jobs), 200)
    (run / "wait").unlink()
    ended = {cluster.wait(job): (tmp_path / f"{job}.log").read_text() for job in jobs}
    assert set(ended) == {"COMPLETED", "FAILED"}
    assert f"error: another run is writing into {run}: wait" in ended["FAILED"], ended["FAILED"]
    assert "not completed" not in ended["FAILED"] and ended["FAILED"].count("\njob ") < 2

    with open(run / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = start("sbatch/1node.sh", "accelerate_configs/baseline.yaml", *words, cwd=project)
        log = tmp_path / f"{job.job}.log"
        cluster.wait_until(lambda: log.exists() and "warning: " in log.read_text(), 60)
    assert "baseline.yaml uses one of 2 GPUs" in job()


def test_the_environment_goes_to_each_nodes_disk_as_one_file(cluster, start, project, tmp_path):
    """A venv that finds this one's packages is packed once. The node's memory stands for a disk."""
    home = tmp_path / "home"
    venv.create(home)
    [packages] = home.glob("lib/python3*/site-packages")
    (packages / "all.pth").write_text(f"import site; site.addsitedir({TORCH_IS_IN!r})\n")
    shutil.copy(shutil.which("true"), home / "bin" / "accelerate-launch")
    env = {"NODE_DISK": "/dev/shm", "PATH": f"{home}/bin:{BARE}"}
    words = ["sbatch/2node.sh", "probe.py", "--output_dir"]
    jobs = [start(*words, tmp_path / name, cwd=project, env=env) for name in ("one", "two")]
    logs = [job() for job in jobs]  # Both are over: a running job has an environment of its own.
    for job, log, name in zip(jobs, logs, ("one", "two"), strict=True):
        assert " on each node" in log
        for rank, node in enumerate(("n1", "n2")):
            seen = read(tmp_path / name / f"rank_{rank}.json")
            assert (seen["host"], seen["prefix"]) == (node, f"/dev/shm/environment-{job.job}")
            assert cluster.on(node, "ls", "/dev/shm") == ""
    assert (tmp_path / "home.tar").stat().st_mtime < (tmp_path / "one" / "run.json").stat().st_mtime


def test_sweep_submits_the_matrix_and_reports_what_is_missing(cluster, tmp_path):
    """Slurm refuses 1x9, and a file lies where 2x2 would put its results: the rest is measured."""
    (tmp_path / "ddp-2x2-r1").touch()
    words = [
        "--strategies",
        "baseline dp ddp",
        "--shapes",
        "2x1 1x9 2x2",
        "--repeats",
        1,
        "--minutes",
        5,
        "--global_batch_size",
        36,
        "--output_dir",
        tmp_path,
        "train_mnist_rnn.py",
        "--dataset",
        "digits",
        "--num_epochs",
        2,
    ]
    out = cluster.on("ctl", "sbatch/sweep.sh", *words, cwd=ROOT, check=False, timeout=200)
    assert "3 jobs, then the report" in out, out
    with open(tmp_path / "sweep.csv") as file:
        plan = {row["run"]: row["job"] for row in csv.DictReader(file)}
    assert " ".join(plan) == "baseline-1x1-r1 dp-1x9-r1 ddp-2x1-r1 ddp-1x9-r1 ddp-2x2-r1"
    assert plan["dp-1x9-r1"] == plan["ddp-1x9-r1"] == "refused"
    log = tmp_path / "report.log"
    cluster.wait_until(lambda: log.exists() and "written: " in log.read_text(), 300)
    report = (tmp_path / "report.md").read_text()
    assert "ddp-1x9-r1 (ddp, 1 x 9): failed or missing, job refused" in report
    assert f"ddp-2x2-r1 (ddp, 2 x 2): failed or missing, job {plan['ddp-2x2-r1']}" in report
    with open(tmp_path / "report.csv") as file:
        rows = {row["strategy"]: (row["nodes"], row["speedup"]) for row in csv.DictReader(file)}
    assert (tmp_path / "ddp-2x1-r1" / "model.safetensors").exists()
    for dropped in ("checkpoints", "best"):
        assert not (tmp_path / "ddp-2x1-r1" / dropped).exists()
    assert set(rows) == {"baseline", "ddp"} and rows["ddp"][0] == "2" and float(rows["ddp"][1]) > 0


def sweep(*words, env=None, stdin=subprocess.DEVNULL, cwd=ROOT):
    return subprocess.run(
        ["sbatch/sweep.sh", *map(str, words)],
        cwd=cwd,
        stdin=stdin,
        text=True,
        env=os.environ | (env or {}),
        capture_output=True,
    )


def test_sweep_says_what_it_may_cost_and_asks(tmp_path):
    """Without Slurm: `sbatch` is a function that leaves a line for each job."""
    out = sweep("--dry_run", "--minutes", 30).stdout
    # 2 x (baseline 1 + dp 2 + hsdp 4 + 4 strategies x (1 + 2 + 2 + 4)) GPUs x 1/2 hour; 109 million
    # weights of 4 bytes: of 19 runs of the first repeat, and in a run's two copies and three
    # checkpoints with two states of each
    much = "39 jobs, at most {} GPU-hours and 13.1 GB of disk".format
    assert f"38 runs of train_bert_squad.py \n{much(43.0)}" in out
    assert len(re.findall(r"^\S+-r[12]: \d node.s. x \d GPU.s., at most", out, re.M)) == 38
    jobs, (keys, terminal) = tmp_path / "jobs", os.openpty()
    told = f"() {{ echo \"${{DROP_WHEN_COMPLETED:-}} $@\" >>'{jobs}'; echo 7; }}"
    env = {"BASH_FUNC_sbatch%%": told}
    assert f"error: {much(86.0)}: add --yes, or lower --repeats" in sweep(env=env).stderr
    os.write(keys, b"n\ny\n")
    assert sweep(env=env, stdin=terminal).stderr.endswith("error: nothing was submitted\n")
    for done in (
        sweep("--output_dir", tmp_path / "asked", env=env, stdin=terminal),
        sweep("--output_dir", tmp_path / "yes", "--yes", env=env),
    ):
        assert much(86.0) in done.stdout and "38 jobs, then the report" in done.stdout, done.stderr
    cpus = sweep("--output_dir", tmp_path / "cpus", env=env | {"SWEEP_GRES": "none"})
    assert "36 jobs, then the report" in cpus.stdout  # without GPUs there is no DP
    assert jobs.read_text().count("\n") == 39 + 39 + 37
    assert jobs.read_text().count("--dependency=afterany:7 ") == 38 + 38 + 36, "not in turns"
    keeps = {line.startswith("checkpoints best --") for line in open(jobs) if "-r1 " in line}
    drops = {line.startswith("checkpoints best model.saf") for line in open(jobs) if "-r2 " in line}
    assert keeps == drops == {True}


def test_sweep_refuses_with_one_line():
    for words, line in {
        "train.py": "no script or option train.py",
        "--minutes": "--minutes needs a value",
        "--strategies fspd": "no strategy fspd",
        "--shapes 2": "a shape is NODESxGPUS",
        "--strategies dp --shapes 2x1": "none of the strategies 'dp' runs on the shapes '2x1'",
        "--repeats 0": "--repeats must be a number",
        "--local --shapes 2x1": "--local is one",
        "--global_batch_size 9 --shapes 1x2": "--global_batch_size 9 does not divide",
    }.items():
        done = sweep("--dry_run", *words.split())
        assert done.returncode == 1 and re.fullmatch(f"error: {line}.*\n", done.stderr), done.stderr


def test_a_local_sweep_does_what_the_machine_can(tmp_path, project):
    """Its `python` says how many GPUs there are, its `accelerate-launch` which ones it may see, and
    it fails where there are three.
    """
    fails = 'echo "$CUDA_VISIBLE_DEVICES" >>seen; [ $GPUS != 3 ]'
    for name, does in (("python", 'echo "$GPUS"'), ("accelerate-launch", fails)):
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}; {does}\n")
        (tmp_path / name).chmod(0o755)
    words = ["--local", "--repeats", 1, "--strategies", "dp ddp", "--output_dir"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    runs = {}
    for gpus, seen, shapes in ((2, "", "1x2"), (3, "3,5,6", "1x2"), (1, "0", "1x1 1x2")):
        more = {"CUDA_VISIBLE_DEVICES": seen, "GPUS": str(gpus)}
        runs[gpus] = sweep(*words, tmp_path / seen / "x", "--shapes", shapes, env=env | more)
    assert (tmp_path / "seen").read_text() == "0,1\n\n3,5\n3,5,6\n0\n"
    assert [runs[gpus].returncode for gpus in (1, 2, 3)] == [0, 0, 1]
    assert runs[3].stdout.count(" failed: ") == 2 and runs[3].stdout.endswith("\n3\n"), "no report"
    assert "leaving out 1x2: this machine has 1 GPU(s)" in runs[1].stdout

    none = sweep("--local", "probe.py", cwd=project, env={"PATH": BARE})
    assert none.returncode == 1 and re.fullmatch("error: no accelerate on .*\n", none.stderr)


def test_the_site_file_takes_venv_unless_accelerate_is_there(tmp_path):
    """Also where conda's base is active, or modules have set PYTHONPATH, and check.sh reads it."""
    shutil.copytree(ROOT / "sbatch", tmp_path / "sbatch")
    for folder in (tmp_path / "own", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
        shutil.copy("/bin/true", folder / "accelerate-launch")
    activate = f"export VIRTUAL_ENV=here PATH={tmp_path}/.venv/bin:$PATH"
    (tmp_path / ".venv" / "bin" / "activate").write_text(activate)
    ask = 'source sbatch/site.sh; echo "$(command -v accelerate-launch) $PYTHONPATH"'
    for path, found in {BARE: ".venv/bin", f"{tmp_path}/own:{BARE}": "own"}.items():
        env = {"PATH": path, "CONDA_PREFIX": "/opt/conda", "PYTHONPATH": "/modules"}
        own = " /modules" if found == "own" else " "
        done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, env=env, capture_output=True)
        assert done.stdout.decode() == f"{tmp_path / found}/accelerate-launch{own}\n"
    with open(tmp_path / "sbatch" / "site.sh", "a") as site:
        site.write('echo "words: $*"; false\n')
    words = ["bash", "sbatch/check.sh", "--full"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "words: \n", "conda would take these for its own"
    assert done.stderr == "error: sbatch/site.sh ended with an error\n"


def test_make_installs_into_venv_whatever_lies_there_and_reports_what_failed(tmp_path):
    """With wheels of three empty packages. .venv is a link, with another Python's remains in it,
    and PYTHONPATH has what is to be installed.
    """
    for name in ("torch", "torchvision", "accelerate"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
            wheel.extractall(tmp_path / "modules")
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    (work / "sbatch").mkdir(parents=True)
    (scratch / "bin").mkdir(parents=True)
    (scratch / "bin" / "python").write_text("#!/bin/sh\necho Python 2.7\n")
    (scratch / "bin" / "python").chmod(0o755)
    (work / ".venv").symlink_to(scratch)
    shutil.copy(ROOT / "Makefile", work)
    (work / "requirements.txt").write_text("accelerate\n")
    (work / "constraints.txt").touch()
    (work / "report.py").write_text("print('a report')")
    (work / "sbatch" / "sweep.sh").write_text('#!/bin/sh\necho "$@" | grep -v mnist\n')
    (work / "sbatch" / "sweep.sh").chmod(0o755)
    env = {
        "PYTHONPATH": f"{tmp_path}/modules",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{tmp_path}",
    }
    words = ["make", f"PYTHON={sys.executable}", "CONSTRAINTS=constraints.txt", "sweep"]
    done = subprocess.run(words, cwd=work, env=os.environ | env, capture_output=True, text=True)
    [installed] = scratch.glob("lib/python3*/site-packages/accelerate.py")
    assert (scratch / "installed").exists() and installed.parent.joinpath("torch.py").exists()
    assert done.returncode == 2 and "/bert train_bert" in done.stdout, done.stderr
    assert done.stdout.endswith("\na report\n")


def test_a_failing_step_of_the_check_leaves_nothing_running(tmp_path):
    """What still ran would hold the pipe of the output open."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(
        "%:\n\t@case $@ in lint) exit 1;; setup) ;; *) sleep 90; esac"
    )
    done = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "lint" in done.stderr
