"""sbatch/ on a real Slurm cluster of two nodes: tests submit jobs, and look at what happened."""

import csv
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, launch
from test_bert import TINY

from planning import links

pytestmark = pytest.mark.slow
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
    with open(folder / "sbatch" / "site.sh", "a") as site:
        site.write("export FROM_THE_SITE_FILE='read it'\n")
    return folder


def read(file):
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory):
    return launch("ddp", "train_bert_squad.py", tmp_path_factory.mktemp("bert") / "run", *BERT)


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "fsdp",
        "fsdp_keep",
        "fsdp_offload",
        "zero1",
        "zero2",
        "zero2_offload",
        "zero3",
        "zero3_offload",
    ],
)
def test_two_nodes_train_as_one_machine_and_send_as_many_bytes_as_the_formula_says(
    name, start, one_machine, tmp_path
):
    """The bytes are those of ten steps that the nodes' network cards count. DDP needs no YAML."""
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
    sent = [read(tmp_path / f"wire_{rank}.json") for rank in (0, 1)]
    seen = sum(last - first for first, last in sent) / 2 / 10
    formula = links.bytes_sent(name, record["parameters"], 2, gloo=True)
    assert seen == pytest.approx(formula, rel=0.05)


def test_what_ranks_find_on_the_nodes(cluster, start, project, tmp_path):
    """GPUs from Slurm, arguments as they were typed, ports that neighbours do not share."""
    odd = ["it's", 'a "b"  c', "$HOME", "*", "", "--output_dir", str(tmp_path / "gp us")]
    gpus = start(
        "--gres=gpu:a100:2",
        "sbatch/2node.sh",
        "accelerate_configs/fsdp.yaml",
        "--mixed_precision",
        "bf16",
        "probe.py",
        *odd,
        cwd=project,
    )
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
    gpus(), cpus()
    cluster.wait_until(lambda: [len([*task.glob("r*.json")]) for task in tasks] == [3, 3], 60)

    seen = [read(tmp_path / "gp us" / f"rank_{rank}.json") for rank in range(4)]
    assert [rank["host"] for rank in seen] == ["n1", "n1", "n2", "n2"]
    for rank in seen:
        assert len(rank["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        assert (
            rank.items()
            >= {
                "argv": ["--resume", *odd],
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "n1",
                "OMP_NUM_THREADS": "2",
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


REFUSED = {  # what sbatch gets, and what the job says
    "sbatch/2node.sh accelerate_configs/dp.yaml probe.py": "dp.yaml is one process on one node",
    "sbatch/2node.sh accelerate_configs/ddq.yaml": "no YAML accelerate_configs/ddq.yaml; there are",
    "sbatch/1node.sh train.py --num_epochs 2": "no script train.py in ",
    "sbatch/1node.sh ddp": "'ddp' is neither a YAML, nor a script (.py), nor a flag",
    "sbatch/1node.sh accelerate_configs/ddp.yaml --num-processes 8 probe.py": "num-processes comes",
    "sbatch/1node.sh accelerate_configs/zero2.yaml --dynamo_backend=eager probe.py": "drops --dyn",
    "--array=1 sbatch/1node.sh probe.py --output_dir runs/x": "tasks of an array would share",
    "--gres=none sbatch/1node.sh probe.py": "must be a number from 1 on, got 'two'",
    "--gres=none --gpus=3 sbatch/2node.sh probe.py": "ask for the same on each, with --gres=gpu:N",
}


def test_what_cannot_run_ends_with_one_line(start, project, tmp_path):
    env, bare = {"PROCESSES_PER_NODE": "two"}, {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
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
    env, run = {"SPY_SCRIPT": "train_mnist_rnn", "SPY_NAN": "loss 1 15"}, tmp_path / "run"
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
        sizes, *columns = zip(*line["times"], strict=True)
        assert sizes == tuple(2**power for power in range(7, 26, 2)) and min(map(min, columns)) > 0
        assert line["latency_seconds"] >= 0 and line["bandwidth_bytes_per_second"] > 0
        assert log.count(f" {name}: ") == 1 and 0 <= line["residual"] < 1
    assert 0 <= record["busy"] <= 1
    assert "skipped: torch sees no GPU" in full()


def test_check_refuses_gpus_that_torch_cannot_use(monkeypatch):
    """As with a driver that is too old: the GPUs are counted without it."""
    monkeypatch.setattr(sys, "argv", ["check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="^error: .* has a GPU that torch .* is the driver too"):
        runpy.run_path(str(ROOT / "sbatch" / "check.py"))["main"]()


def test_two_jobs_never_write_into_one_folder(cluster, start, project, tmp_path):
    """The second finds the name of the first, which Slurm still knows: here, one that waits."""
    waiting = start("--hold", "sbatch/1node.sh", "probe.py", cwd=project).job
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".job").write_text(waiting)
    words = ["sbatch/1node.sh", "probe.py", "--output_dir", tmp_path / "run"]
    log = start(*words, cwd=project, state="FAILED")()
    assert f"error: job {waiting} writes into {tmp_path / 'run'}" in log
    cluster.on("ctl", "scancel", waiting)
    start(*words, cwd=project)()


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
    cluster.wait_until(lambda: log.exists() and "written: " in log.read_text(), 90)
    report = (tmp_path / "report.md").read_text()
    assert "ddp-1x9-r1 (ddp, 1 x 9): failed or missing, job refused" in report
    assert f"ddp-2x2-r1 (ddp, 2 x 2): failed or missing, job {plan['ddp-2x2-r1']}" in report
    with open(tmp_path / "report.csv") as file:
        rows = {row["strategy"]: (row["nodes"], row["speedup"]) for row in csv.DictReader(file)}
    assert set(rows) == {"baseline", "ddp"} and rows["ddp"][0] == "2" and float(rows["ddp"][1]) > 0


def sweep(*words, env=None, stdin=subprocess.DEVNULL):
    return subprocess.run(
        ["sbatch/sweep.sh", *map(str, words)],
        cwd=ROOT,
        stdin=stdin,
        text=True,
        env=os.environ | (env or {}),
        capture_output=True,
    )


def test_sweep_says_what_it_may_cost_and_asks(tmp_path):
    """Without Slurm: `sbatch` is a function that leaves a line for each job."""
    out = sweep("--dry_run", "--minutes", 30).stdout
    # 2 x (baseline 1 + dp 2 + 4 strategies x (1 + 2 + 2 + 4)) GPUs x 1/2 hour, and 2 x (2 + 2 + 4)
    # GPUs x 1/12 hour for checks
    assert "36 runs of train_bert_squad.py" in out and "\n43 jobs, at most 40.3 GPU-hours" in out
    assert len(re.findall(r"^\S+-r[12]: \d node.s. x \d GPU.s., at most", out, re.M)) == 42
    jobs, (keys, terminal) = tmp_path / "jobs", os.openpty()
    env = {"BASH_FUNC_sbatch%%": f"() {{ echo >>'{jobs}'; echo 7; }}"}
    much = "43 jobs, at most 79.3 GPU-hours"
    assert f"error: {much}: add --yes, or lower --repeats" in sweep(env=env).stderr
    os.write(keys, b"n\ny\n")
    assert sweep(env=env, stdin=terminal).stderr.endswith("error: nothing was submitted\n")
    for done in (
        sweep("--output_dir", tmp_path / "asked", env=env, stdin=terminal),
        sweep("--output_dir", tmp_path / "yes", "--yes", env=env),
    ):
        assert much in done.stdout and "42 jobs, then the report" in done.stdout, done.stderr
    cpus = sweep("--output_dir", tmp_path / "cpus", env=env | {"SWEEP_GRES": "none"})
    assert "40 jobs, then the report" in cpus.stdout  # without GPUs there is no DP
    assert jobs.read_text().count("\n") == 43 + 43 + 41


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


def test_a_local_sweep_gives_dp_the_gpus_of_its_shape(tmp_path):
    """Its `python` says that there are enough GPUs, its `accelerate` which ones it may see."""
    for name, does in (("python", "exit"), ("accelerate", 'echo "$CUDA_VISIBLE_DEVICES" >>seen')):
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}; {does}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CONDA_PREFIX": "so that site.sh takes no .venv"}
    for seen in ("", "3,5,6"):
        sweep(
            "--local",
            "--repeats",
            1,
            "--strategies",
            "dp ddp",
            "--shapes",
            "1x2",
            "--output_dir",
            tmp_path / f"of {seen}",
            env=env | {"CUDA_VISIBLE_DEVICES": seen},
        )
    assert (tmp_path / "seen").read_text() == "0,1\n\n3,5\n3,5,6\n"
