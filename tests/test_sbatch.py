"""sbatch/ on a real Slurm cluster of two nodes: tests submit jobs, and look at what happened."""

import csv
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import QUICK_CHECK, ROOT, RUNGS, launch, run
from test_bert import TINY

import check

pytestmark = pytest.mark.slow
SHORT = "--max_train_steps 12 --per_device_train_batch_size 8 --dropout 0".split()
WORK = {  # 1.5 MB of parameters, or 1.1, of a script that starts sooner
    "train_bert_squad": [*TINY, *SHORT, "--max_eval_samples", "8"],
    "train_mnist_rnn": ["--dataset", "digits", "--hidden_size", "256", *SHORT],
}
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


# It saves and ends when it is told to stop. When it runs again, it ends without a new checkpoint.
SAVES = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
checkpoint = folder / "checkpoints" / "step_00000001"
signal.signal(signal.SIGUSR1, lambda *_: checkpoint.mkdir(parents=True, exist_ok=True))
(folder / f"rank_{os.environ['RANK']}").write_text(os.environ["MASTER_PORT"])
while not checkpoint.exists():
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project's cluster files under a name with a space, and with a site file of their own."""
    folder = tmp_path_factory.mktemp("a project")
    for name in ("sbatch", "accelerate_configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "tests" / "probe.py", folder)
    configs = folder / "accelerate_configs"
    (configs / "ids.yaml").write_text((configs / "ddp.yaml").read_text() + "gpu_ids: '0,1'\n")
    (folder / "saves.py").write_text(SAVES)
    (folder / "tools").mkdir()
    (folder / "tools" / "check.py").write_text(QUICK_CHECK)
    (folder / "tools" / "common").symlink_to(ROOT / "tools" / "common")
    with open(folder / "sbatch" / "site.sh", "a") as site:
        site.write("export FROM_THE_SITE_FILE=read_it$* MASTER_ADDR=${ADDRESS:-}\n")
        site.write("SRUN_OPTIONS=(--cpu-bind=none env FROM_SRUN='two words')\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: A100\n")
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    return folder


def read(file):
    return json.loads(file.read_text())


OTHERS = [pytest.param(name, marks=pytest.mark.matrix) for name in ("fsdp", "zero2", *RUNGS)]


@pytest.mark.parametrize("name", ["ddp", "zero3", "hsdp", *OTHERS])
def test_two_nodes_train_as_one_machine_and_send_as_many_bytes_as_the_formula_says(
    name, start, tmp_path
):
    """The bytes are those of ten steps that the nodes' network cards count. HSDP has two processes
    on each node, and shards inside it, so only gradients leave a node: each rank sends those of its
    shard once. After a change of the strategies in the matrix: `pytest -m matrix -k two_nodes`.
    """
    script = "train_mnist_rnn" if name in ("ddp", "hsdp") else "train_bert_squad"
    words = ["sbatch/2node.sh", name, "tests/spy.py", *WORK[script]]
    env, hosts = {"SPY_SCRIPT": script, "SPY_WIRE": str(tmp_path)}, ["n1", "n2"]
    if name == "hsdp":
        words = ["--gres=none", *words, "--per_device_train_batch_size", "4"]
        env["PROCESSES_PER_NODE"] = "2"
        hosts = ["n1", "n1", "n2", "n2"]
    job = start(*words, "--output_dir", tmp_path / "run", env=env)
    job()
    record = read(tmp_path / "run" / "run.json")
    assert (record["status"], record["nodes"]) == ("completed", 2)
    assert record["strategy"] == name.split("_")[0] and record["slurm_job_id"] == job.job
    assert [(rank["rank"], rank["host"]) for rank in record["ranks"]] == [*enumerate(hosts)]
    alone = launch("ddp", f"{script}.py", tmp_path / "alone", *WORK[script]).record
    losses = [[loss for _, loss in run["loss_history"]] for run in (record, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 12
    # Copies of the parameters that two ranks send over gloo, which has no reduce-scatter.
    copies = {"ddp": 1, "hsdp": 1, "zero1": 1.25, "zero2": 1.25, "fsdp": 2, "zero3": 1.5}
    keeps = record["strategy_options"].get("reshard_after_forward") == "false"
    formula = (copies[record["strategy"]] - keeps / 2) * 4 * record["parameters"]
    counted = [read(tmp_path / f"wire_{rank}.json") for rank in (0, len(hosts) - 1)]
    sent = sum(last - first for first, last in counted) / 10 / 2
    assert sent == pytest.approx(formula, rel=0.05)


FAILS = """
import os, time
from pathlib import Path
import torch.distributed as dist
rank = os.environ["RANK"]
Path(f"rank_{rank}").write_text(f"{rank} of {os.environ['WORLD_SIZE']} on {os.uname().nodename}")
dist.init_process_group("gloo")  # where all ranks meet
if dist.get_rank() != 3:
    time.sleep(90)
raise SystemExit("the end of a rank")
"""


def test_the_simple_job_ends_when_a_rank_fails(start, tmp_path):
    """It needs a YAML and a script. Slurm granted it two GPUs on each node."""
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    (tmp_path / "train_mnist_rnn.py").write_text(FAILS)
    words = "--gpus-per-node=2", ROOT / "sbatch" / "simple.sh"
    log = start(*words, cwd=tmp_path, state="FAILED")()
    ranks = [file.read_text() for file in sorted(tmp_path.glob("rank_*"))]
    assert ranks == ["0 of 4 on n1", "1 of 4 on n1", "2 of 4 on n2", "3 of 4 on n2"], log
    assert log.count("the end of a rank") == 1, "n1 went on alone"


WORLD = {  # of six ranks on two nodes
    "WORLD_SIZE": "6",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3",
    "MASTER_ADDR": "10.99.0.11",
    "OMP_NUM_THREADS": "2",
    "FROM_THE_SITE_FILE": "read_it",  # without $*: conda would take them for its own arguments
    "FROM_SRUN": "two words",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def test_what_ranks_find_on_the_nodes(start, project, tmp_path, monkeypatch):
    """GPUs from Slurm, arguments as they were typed, what site.sh says, and a log of each rank. The
    last job finds a GPU that Slurm did not grant, and has the environment of another job's shell.
    """
    monkeypatch.delenv("OMP_NUM_THREADS")  # A job then has as many as the cores allow.
    odd = ["it's", 'a "b"  c', "$HOME", "*", "", "--output_dir=~/gp us"]
    words = "--exclusive --gres=gpu:a100:3 --cpus-per-task=6 sbatch/2node.sh".split()
    words += ["accelerate_configs/hsdp.yaml", "--mixed_precision", "bf16", "--tee", "3"]
    words += ["--log_dir", tmp_path / "logs", "probe.py", *odd]
    gpus = start(*words, cwd=project, env={"HOME": str(tmp_path), "ADDRESS": "10.99.0.11"})
    env = {"PATH": f"{project}/bin:{os.environ['PATH']}", "SLURM_CPU_BIND": "unknown"}
    env |= {"SLURM_MEM_PER_CPU": "9", "SLURM_MEM_PER_NODE": "9"}
    hidden = start("--gres=none", "sbatch/1node.sh", "probe.py", cwd=project, env=env)
    assert "warning: 6 core(s) for 3 GPU(s)" in gpus()
    assert "warning: n1 has 1 GPU(s), of which Slurm granted none" in hidden()
    assert len([*tmp_path.glob("logs/*/attempt_0/[012]/std*.log")]) == 12

    seen = [read(tmp_path / "gp us" / f"rank_{rank}.json") for rank in range(6)]
    assert [rank["host"] for rank in seen] == ["n1"] * 3 + ["n2"] * 3
    own = f"runs/probe-hsdp-{gpus.job}"
    for rank in seen:
        assert len(rank["CUDA_VISIBLE_DEVICES"].split(",")) == 3, "of the four of the node"
        assert rank["command"][1:] == ["--resume", "--output_dir", own, *odd]
        assert rank.items() >= WORLD.items()


def test_a_task_of_an_array_is_queued_again_alone(cluster, project, tmp_path):
    """Slurm warns the shell of one of two tasks. Their jobs may share a node, but not a port."""
    words = f"--array=0-1 --output={tmp_path}/%a.log sbatch/1node.sh saves.py"
    job = cluster.submit(*words.split(), cwd=project)
    tasks = [project / f"runs/saves-ddp-{job}_{task}" for task in (0, 1)]
    cluster.wait_until(lambda: [len([*task.glob("rank_*")]) for task in tasks] == [2, 2], 300)
    cluster.on("ctl", "scancel", "--batch", "-s", "USR1", f"{job}_1")
    assert cluster.wait(f"{job}_1") == "FAILED", "it got further in its first attempt alone"
    cluster.tidy()  # or the first task would wait for ever
    logs = [(tmp_path / f"{task}.log").read_text() for task in (0, 1)]
    assert [len(re.findall("^job ", log, re.M)) for log in logs] == [1, 2], logs
    assert len({(task / "rank_0").read_text() for task in tasks}) == 2


BARE = "/usr/bin:/bin:/usr/sbin:/sbin"
DP = "accelerate_configs/dp.yaml"
REFUSED = {  # what sbatch gets, and what the job says
    "sbatch/2node.sh hsdp probe.py": "hsdp.yaml shards the model inside a",
    f"sbatch/2node.sh {DP} probe.py": "dp.yaml is one process on one node",
    "sbatch/2node.sh other/ddq.yaml": "no YAML other/ddq.yaml (and a script ends in .py): acc",
    "sbatch/1node.sh train.py --num_epochs 2": "no script train.py in ",
    "sbatch/2node.sh ddq probe.py": "no YAML accelerate_configs/ddq.yaml (and a script",
    "sbatch/2node.sh ddp probe": "'probe' is neither a flag nor a script (.py)",
    "sbatch/1node.sh accelerate_configs/ddp.yaml --num-processes 8 probe.py": "num-processes comes",
    f"sbatch/1node.sh {DP} --gradient_accumulation_steps 4 probe.py": "no effect before the script",
    "--array=1 sbatch/1node.sh probe.py --output_dir runs/x": "tasks of an array would share",
    "--gpus-per-node=4 sbatch/1node.sh probe.py": "ask with --gres=gpu:N, which",
    "sbatch/1node.sh probe.py --output_dir runs/taken": "another run is writing into runs/taken: ",
    "sbatch/1node.sh accelerate_configs/ids.yaml probe.py": "ids.yaml has gpu_ids",
    "sbatch/2node.sh probe.py --output_dir /dev/shm/x": "n2 does not see what the first",
}


def test_what_cannot_run_ends_with_one_line(start, project, tmp_path):
    def refused(words, **env):
        return start(*words.split(), cwd=project, env=env, state="FAILED")

    (project / "runs" / "taken").mkdir(parents=True)
    lock = open(project / "runs" / "taken" / ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    jobs = {refused(words, DISK_TIMEOUT="3"): line for words, line in REFUSED.items()}
    jobs[refused("sbatch/1node.sh probe.py", PATH=BARE)] = " finds no accelerate: make setup"
    jobs[refused("sbatch/1node.sh probe.py", NODES_TIMEOUT="0.01")] = "not every node answered"
    jobs[start(ROOT / "sbatch/2node.sh", cwd=tmp_path, state="FAILED")] = "no sbatch/launch.sh in "
    for job, line in jobs.items():
        log = job()
        [error] = re.findall("^error: .*", log, re.M)
        assert line in error, log
        assert not re.search("main_process_port|Traceback", log), "something was started"
    assert (
        run(["bash", "sbatch/2node.sh"]).err
        == "error: this runs inside a Slurm job: sbatch sbatch/2node.sh\n"
    )


def test_a_run_that_diverges_or_cannot_begin_is_not_queued_again(start, tmp_path):
    """A rank of the second node meets a NaN in the second epoch, after a checkpoint."""
    env, run = {"SPY_SCRIPT": "train_mnist_rnn", "SPY_NAN": "1 15"}, tmp_path / "run"
    words = ["sbatch/2node.sh", "tests/spy.py", *DIGITS[1:], 3, "--output_dir", run]
    diverges = start(*words, env=env, state="FAILED")
    words = [*DIGITS, 1, "--output_d", tmp_path / "x"]
    wrong = start("sbatch/1node.sh", *words, state="FAILED", env={"PROCESSES_PER_NODE": "1"})
    for job, line, reason in [
        (diverges, "error: the loss of step 16 is not finite", "the run broke down"),
        (wrong, "error: unrecognized arguments: --output_d", "a new checkpoint"),
    ]:
        log = job()
        assert line in log and f"{reason}, so not queued again" in log
        assert len(re.findall("^job ", log, re.M)) == 1, "started again"
    assert read(run / "run.json")["status"] == "failed"
    assert (run / "checkpoints" / "step_00000011").exists()


def test_check_measures_the_link(start, project, tmp_path):
    log = start("sbatch/check.sh", "--output_dir", tmp_path / "check", cwd=project)()
    record = read(tmp_path / "check" / "check.json")
    assert (record["nodes"], record["processes"], record["backend"]) == (2, 2, "gloo")
    assert [rank["host"] for rank in record["ranks"]] == ["n1", "n2"]
    assert log.count("backend gloo") == log.count("33,554,432") == log.count("ready: ") == 1
    for line in record["collectives"].values():
        assert [size for size, seconds in line["times"] if seconds > 0] == check.SIZES


def test_check_leaves_out_what_was_disturbed():
    """A message that takes longer than one 100 times as large. A line needs three others."""
    times = [[size, 1e-3 + size / 1e9] for size in check.SIZES]
    for seconds, disturbed in ((1.1e-3, []), (12e-3, [512])):
        times[1][1] = seconds
        line = check.line_of("all_reduce", times, 2)
        assert line["disturbed"] == disturbed
        assert line["latency_seconds"] == pytest.approx(1e-3, rel=0.02)
        assert line["bandwidth_bytes_per_second"] == pytest.approx(1e9, rel=0.02)
    assert check.words_of(line).endswith("disturbed: repeat it (bytes: 512)")
    line = check.line_of("reduce", [[128, 1], [512, 1], [2**17, 1e-3], [2**19, 1e-3]], 2)
    assert check.words_of(line).startswith("too few times for a line, disturbed")


def test_check_refuses_gpus_that_torch_cannot_use(monkeypatch):
    """As with a driver that is too old: the GPUs are counted without it."""
    monkeypatch.setattr(sys, "argv", ["check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="^error: .* has a GPU that torch .* is the driver too"):
        check.main()


def test_two_jobs_never_write_into_one_folder(cluster, start, project, tmp_path):
    """Of two that start at once, one ends. One that is queued again waits for ranks that save."""
    run, words = tmp_path / "run", ["probe.py", "--output_dir", tmp_path / "run"]
    run.mkdir()
    (run / "wait").touch()
    hold = [f"--output={tmp_path}/%j.log", "--hold", "sbatch/1node.sh", *words]
    jobs = [cluster.submit(*hold, cwd=project, env={"DISK_TIMEOUT": "20"}) for _ in range(2)]
    cluster.on("ctl", "scontrol", "release", *jobs)
    cluster.wait_until(lambda: "FAILED" in map(cluster.state, jobs), 200)
    (run / "wait").unlink()
    ended = {cluster.wait(job): (tmp_path / f"{job}.log").read_text() for job in jobs}
    assert set(ended) == {"COMPLETED", "FAILED"}
    assert f"error: another run is writing into {run}: wait" in ended["FAILED"], ended["FAILED"]
    assert "not completed" not in ended["FAILED"] and ended["FAILED"].count("\njob ") < 2

    with open(run / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words, env = ["accelerate_configs/baseline.yaml", *words], {"ADDRESS": "n1-ib0"}
        job = start("sbatch/1node.sh", *words, cwd=project, env=env)
        log, line = tmp_path / f"{job.job}.log", "baseline.yaml uses one of 2 GPUs"
        cluster.wait_until(lambda: log.exists() and line in log.read_text(), 300)
    job()
    assert "MASTER_ADDR" not in read(run / "rank_0.json"), "it would look like one of several"


def test_sweep_submits_the_matrix_and_reports_what_is_missing(cluster, tmp_path):
    """Slurm refuses 1x99, and a file lies where 2x2 would put its results: the rest is measured.
    The site exports nothing into jobs, and the folder's name looks like one of Slurm's patterns.
    """
    folder = tmp_path / "50%j"
    folder.mkdir()
    (folder / "ddp-2x2-r1").touch()
    words = ["--strategies", "baseline ddp", "--shapes", "1x2 1x99 2x2"]
    words += "--repeats 1 --minutes 5 --global_batch_size 396 --output_dir".split()
    words += [folder, *DIGITS[:3], "--num_epochs", 2]
    site = {"SWEEP_GRES": "none", "SBATCH_EXPORT": "NONE"}
    out = cluster.on("ctl", "sbatch/sweep.sh", *words, cwd=ROOT, env=site, check=False)
    assert "the last job writes " in out, out
    log = folder / "report.log"
    cluster.wait_until(lambda: log.exists() and "written: " in log.read_text(), 200)
    report = (folder / "report.md").read_text()
    assert "ddp-1x99-r1 (ddp, 1 x 99): failed or missing, job refused" in report
    assert re.search(r"ddp-2x2-r1 \(ddp, 2 x 2\): failed or missing, job \d", report)
    base, ddp = csv.DictReader((folder / "report.csv").read_text().splitlines())
    assert (base["run"], ddp["run"]) == ("baseline-1x1-r1", "ddp-1x2-r1")
    assert float(ddp["speedup"]) > 0
    kept = {path.name for path in (folder / "ddp-1x2-r1").iterdir()}
    assert "model.safetensors" in kept and not kept & {"checkpoints", "best"}


def sweep(*words, env=None):
    return run(["sbatch/sweep.sh", *map(str, words)], env=env)


def test_sweep_says_what_it_may_cost(tmp_path):
    """Without Slurm: `sbatch` is a function that leaves a line for each job."""
    out = sweep("--dry_run", "--minutes", 30).out
    # 2 x (baseline 1 + dp 2 + hsdp 4 + 4 strategies x (1 + 2 + 2 + 4)) GPUs x 1/2 hour
    much = "39 jobs, at most {} GPU-hours".format
    assert f"38 runs of train_bert_squad.py \n{much(43.0)}, if every job took all its time" in out
    submitted = tmp_path / "jobs"
    told = f"() {{ echo \"${{DROP_WHEN_COMPLETED:-}} $@\" >>'{submitted}'; echo 7; }}"
    env = {"BASH_FUNC_sbatch%%": told}
    assert f"error: {much(86.0)}: add --yes, or lower --repeats" in sweep(env=env).err
    assert not submitted.exists()
    assert much(86.0) in sweep("--output_dir", tmp_path / "yes", "--yes", env=env).out
    jobs = submitted.read_text()
    assert jobs.count("\n") == jobs.count(" --no-requeue ") == 39
    assert jobs.count("--dependency=afterany:7 ") == 38, "not in turns"
    assert len(re.findall("^checkpoints best --.*-r1 ", jobs, re.M)) == 19
    assert len(re.findall("^checkpoints best model.saf.*-r2 ", jobs, re.M)) == 19
    cpus = sweep("--output_dir", tmp_path / "cpus", env=env | {"SWEEP_GRES": "none"})
    assert "37 jobs, at most" in cpus.out  # without GPUs there is no DP


def test_sweep_refuses_with_one_line():
    for words, line in {
        "train.py": "no script or option train.py",
        "--strategies fspd": "no strategy fspd",
        "--shapes 2": "a shape is NODESxGPUS",
        "--global_batch_size 9 --shapes 1x2": "--global_batch_size 9 does not divide",
    }.items():
        done = sweep("--dry_run", *words.split())
        assert done.code == 1 and re.fullmatch(f"error: {line}.*\n", done.err), done.err


def test_a_local_sweep_does_what_the_machine_can(tmp_path):
    """It fails where there are three GPUs. DP needs two."""
    fails = 'echo "$CUDA_VISIBLE_DEVICES" >>seen; [ $GPUS != 3 ]'
    for name, does in (("python", 'echo "$GPUS"'), ("accelerate-launch", fails)):
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}; {does}\n")
        (tmp_path / name).chmod(0o755)
    words = ["--local", "--repeats", 1, "--strategies", "dp ddp", "--output_dir"]
    for gpus, seen, code in ((2, "", 0), (3, "3,5,6", 1), (1, "0", 0)):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": seen}
        done = sweep(*words, tmp_path / f"of {gpus}", env=env | {"GPUS": str(gpus)})
        assert done.code == code and done.out.count(" failed: ") == 3 * code
        assert done.out.endswith(f"\n{gpus}\n"), "no report"
    assert (tmp_path / "seen").read_text() == "0,1\n\n\n3,5\n3,5,6\n3,5,6\n0\n"


def test_the_site_file_takes_venv_unless_accelerate_is_there(tmp_path):
    """Also where conda's base is active, or modules have set PYTHONPATH. A job reads it."""
    for folder in (tmp_path / "own", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
        shutil.copy("/bin/true", folder / "accelerate-launch")
    activate = f"export VIRTUAL_ENV=here PATH={tmp_path}/.venv/bin:$PATH"
    (tmp_path / ".venv" / "bin" / "activate").write_text(activate)
    ask = f'source "{ROOT}/sbatch/site.sh"; echo "$(command -v accelerate-launch) $PYTHONPATH"'
    own = f"{tmp_path}/own:{BARE}"
    for path, found, modules in ((BARE, ".venv/bin", ""), (own, "own", "/modules")):
        env = {"PATH": path, "CONDA_PREFIX": "/opt/conda", "PYTHONPATH": "/modules"}
        done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, env=env, capture_output=True)
        assert done.stdout.decode() == f"{tmp_path / found}/accelerate-launch {modules}\n"


TYPED = [  # while a cluster runs, in this order, and the line that it prints
    ("off n2", "n2 is off"),
    ("on n2", "n2 is on"),
    ("cut", "the link between the nodes is cut"),
    ("mend", "the link between the nodes is whole"),
    ("true", "error: a cluster is running already: type in its shell, or end it first"),
]


def test_a_cluster_at_home(cluster, tmp_path):
    """A command submits a job, and waits, while other terminals break the cluster. The next cluster
    is killed, and one gets a signal. None leaves anything.
    """
    laptop, env = [sys.executable, "sbatch/laptop.py"], os.environ | {"TMPDIR": str(tmp_path)}

    def said(words, *before):
        done = run([*before, *laptop, *words.split()], env=env)
        return (done.out + done.err).strip(), done.code

    record, flags = tmp_path / "run" / "run.json", "--num_epochs 2 --output_dir"
    submit = f"sbatch --output={tmp_path}/log sbatch/simple.sh {flags} {record.parent}"
    words = ["bash", "-c", f"{submit}; until [ -e {tmp_path}/go ]; do sleep 1; done; exit 7"]
    at_home = subprocess.Popen([*laptop, *words], cwd=ROOT, env=env)
    cluster.wait_until(lambda: record.exists() and '"completed"' in record.read_text(), 120)
    for words, line in TYPED:
        assert said(words) == (line, line.startswith("error"))
    (tmp_path / "go").touch()
    assert at_home.wait(60) == 7
    assert [rank["host"] for rank in read(record)["ranks"]] == ["n1", "n2"]
    words = [*DIGITS[1:3], "--dropout", "0", "--per_device_train_batch_size", "32"]
    alone = launch("ddp", DIGITS[0], tmp_path / "alone", *words, "--num_epochs", "2").record
    assert read(record)["loss_history"] == alone["loss_history"]
    for number, code in {signal.SIGKILL: -9, signal.SIGTERM: 143}.items():
        at_home = subprocess.Popen([*laptop, "sleep", "600"], cwd=ROOT, env=env)
        cluster.wait_until(lambda: said("mend")[1] == 0, 60)
        at_home.send_signal(number)
        assert at_home.wait(60) == code and "no cluster is running" in said("off n1")[0]
    find = f"grep -lsF {tmp_path}/laptop /proc/[1-9]*/environ"
    assert not subprocess.run(["sh", "-c", find], capture_output=True).stdout
    assert not (tmp_path / "laptop-cluster").exists()

    assert "error: this machine forbids" in said("true", "setpriv", "--bounding-set=-sys_admin")[0]
    assert "error: Slurm is not installed" in said("true", "env", "PATH=/none")[0]
