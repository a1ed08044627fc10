"""sbatch/ on a real Slurm cluster of two nodes: every test submits jobs, and asserts on what happened on the nodes."""

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

pytestmark = pytest.mark.slow
CHECK = runpy.run_path(str(ROOT / "sbatch" / "check.py"))
HANGS = "PYTHONFAULTHANDLER", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"
BERT = [*TINY, "--max_train_steps", "8", "--per_device_train_batch_size", "8"]
DIGITS = ["train_mnist_rnn.py", "--dataset", "digits", "--num_epochs", "2", "--per_device_train_batch_size", "64"]


def submit(cluster, folder, *words, env=None, cwd=ROOT):
    """The job's id; its log is `folder`/JOB.log."""
    return cluster.submit(f"--output={folder}/%j.log", *words, cwd=cwd, env=env)


def finish(cluster, folder, job, state="COMPLETED"):
    """Wait until the job is over, and return its log."""
    ended = cluster.wait(job, 300)
    log = (folder / f"{job}.log").read_text()
    assert ended == state, log
    return log


def ranks(folder):
    """What tests/probe.py left, by rank."""
    return [json.loads((folder / f"rank_{i}.json").read_text()) for i in range(len(list(folder.glob("rank_*"))))]


def test_strategies_on_two_nodes_train_as_on_one_machine(cluster, tmp_path):
    """All at once, so that they share the nodes. The first line is the one of README, without a YAML or a script."""
    words = {"ddp": BERT} | {name: [f"accelerate_configs/{name}.yaml", *DIGITS] for name in ("fsdp", "zero3")}
    jobs = {name: submit(cluster, tmp_path, "sbatch/2node.sh", *map(str, more), "--output_dir", tmp_path / name)
            for name, more in words.items()}
    logs = {name: finish(cluster, tmp_path, job) for name, job in jobs.items()}
    records = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in jobs}
    for name, record in records.items():
        assert (record["status"], record["strategy"], record["nodes"]) == ("completed", name, 2)
        assert [(rank["rank"], rank["host"]) for rank in record["ranks"]] == [(0, "n1"), (1, "n2")]
        assert record["slurm_job_id"] == jobs[name]
        for line in ("n1: 1 GPU(s), 4 core(s)", "n2: 1 GPU(s)", "torch 2.", "--num_processes 2", "end: "):
            assert line in logs[name]
    assert records["ddp"]["script"] == "train_bert_squad.py"
    assert len({re.search(r"--main_process_port (\d+)", log)[1] for log in logs.values()}) == 3

    alone = {"ddp": launch("ddp", "train_bert_squad.py", tmp_path / "bert", *BERT)}
    alone["fsdp"] = alone["zero3"] = launch("ddp", DIGITS[0], tmp_path / "digits", *DIGITS[1:])
    for name, record in records.items():
        assert [loss for _, loss in record["loss_history"]] == pytest.approx(alone[name].losses, rel=1e-5)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project's cluster files under a name with a space, with a site file of its own."""
    folder = tmp_path_factory.mktemp("a project")
    for name in ("sbatch", "accelerate_configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "tests" / "probe.py", folder)
    with open(folder / "sbatch" / "site.sh", "a") as site:
        site.write("export FROM_THE_SITE_FILE='read it'\n")
    return folder


def test_what_ranks_find_on_the_nodes(cluster, project, tmp_path):
    """GPUs from Slurm, a total over the nodes, arguments as they were typed, ports that neighbours do not share."""
    odd = ["it's", 'a "b"  c', "$HOME", "*", ""]
    gpus = submit(cluster, tmp_path, "--gres=gpu:a100:2", "sbatch/2node.sh", "accelerate_configs/fsdp.yaml",
                  "--mixed_precision", "bf16", "probe.py", *odd, "--output_dir", tmp_path / "gp us", cwd=project)
    cpus = submit(cluster, tmp_path, "--gres=none", "sbatch/2node.sh", "probe.py", "--output_dir", tmp_path / "cpus",
                  cwd=project, env={"PROCESSES_PER_NODE": "2", "TORCH_FR_BUFFER_SIZE": "0"})
    array = submit(cluster, tmp_path, "--array=0-1", "sbatch/1node.sh", "probe.py", cwd=project)
    finish(cluster, tmp_path, gpus)
    finish(cluster, tmp_path, cpus)
    cluster.wait_until(lambda: len(list(project.glob(f"runs/probe-ddp-{array}_*/run.json"))) == 2, 60)

    seen = ranks(tmp_path / "gp us")
    assert [(rank["RANK"], rank["host"]) for rank in seen] == [("0", "n1"), ("1", "n1"), ("2", "n2"), ("3", "n2")]
    for rank in seen:
        assert rank["argv"] == ["--resume", *odd, "--output_dir", str(tmp_path / "gp us")]
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["OMP_NUM_THREADS"]) == ("4", "2", "2")
        assert len(rank["CUDA_VISIBLE_DEVICES"].split(",")) == 2 and rank["MASTER_ADDR"] == "n1"
        assert rank["FROM_THE_SITE_FILE"] == "read it" and rank["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert [rank[name] for name in HANGS] == ["1", "2000", "1"]
    assert [rank["host"] for rank in ranks(tmp_path / "cpus")] == ["n1", "n1", "n2", "n2"]
    assert [ranks(tmp_path / "cpus")[3][name] for name in HANGS] == ["1", "0", "1"]
    tasks = [ranks(project / "runs" / f"probe-ddp-{array}_{task}") for task in (0, 1)]
    assert [len(task) for task in tasks] == [2, 2]
    ports = {rank["MASTER_PORT"] for rank in (seen[0], ranks(tmp_path / "cpus")[0], tasks[0][0], tasks[1][0])}
    assert len(ports) == 4, "of jobs that may share a node"


@pytest.mark.parametrize("words, env, message", [
    (["sbatch/2node.sh", "accelerate_configs/dp.yaml", "probe.py"], {}, "dp.yaml is one process on one node"),
    (["sbatch/2node.sh", "accelerate_configs/baseline.yaml", "probe.py"], {}, "baseline.yaml is one process on one"),
    (["sbatch/2node.sh", "accelerate_configs/ddq.yaml"], {}, "no YAML accelerate_configs/ddq.yaml; there are: "),
    (["sbatch/1node.sh", "train.py", "--num_epochs", "2"], {}, "no script train.py in "),
    (["sbatch/1node.sh", "ddp"], {}, "'ddp' is neither a YAML, nor a script (.py), nor a flag"),
    (["sbatch/1node.sh", "accelerate_configs/ddp.yaml", "--num_processes", "8", "probe.py"], {}, "num_processes comes"),
    (["sbatch/1node.sh", "accelerate_configs/ddp.yaml", "--num-machines=2", "probe.py"], {}, "--num-machines comes"),
    (["sbatch/1node.sh", "accelerate_configs/zero2.yaml", "--dynamo_backend=inductor", "probe.py"], {}, "drops --dyn"),
    (["--array=1", "sbatch/1node.sh", "probe.py", "--output_dir", "runs/x"], {}, "tasks of an array would share"),
    (["--gres=none", "sbatch/1node.sh", "probe.py"], {"PROCESSES_PER_NODE": "two"}, "must be a number from 1 on, got"),
    (["--gres=none", "--gpus=3", "sbatch/2node.sh", "probe.py"], {}, "ask for the same on each, with --gres=gpu:N"),
    (["sbatch/1node.sh", "probe.py"], {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, "no accelerate on the PATH"),
])
def test_what_cannot_run_ends_with_one_line(cluster, project, tmp_path, words, env, message):
    log = finish(cluster, tmp_path, submit(cluster, tmp_path, *words, cwd=project, env=env), "FAILED")
    assert message in next(line for line in log.splitlines() if "error: " in line), log
    assert log.count("error: ") == 1, log
    assert not re.search("main_process_port|Traceback", log), "something was started"


def test_wrappers_say_where_to_start_them(cluster, tmp_path):
    done = subprocess.run(["bash", "sbatch/2node.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: this runs inside a Slurm job: sbatch sbatch/2node.sh\n"
    job = submit(cluster, tmp_path, ROOT / "sbatch" / "2node.sh", cwd=tmp_path)
    assert "error: no sbatch/launch.sh in " in finish(cluster, tmp_path, job, "FAILED")


def test_a_run_that_fails_is_not_queued_again(cluster, tmp_path):
    words = ["sbatch/2node.sh", DIGITS[0], "--num_epochs", "-1", "--output_dir", tmp_path / "run"]
    log = finish(cluster, tmp_path, submit(cluster, tmp_path, *words), "FAILED")
    assert "error: --num_epochs must be greater than 0, got -1" in log and "so not queued again" in log
    assert log.count("\njob ") + log.startswith("job ") == 1


def test_a_run_that_diverges_is_not_queued_again_though_it_had_saved(cluster, tmp_path):
    """A rank of the second node meets a NaN in the second epoch."""
    words = ["sbatch/2node.sh", "tests/spy.py", *DIGITS[1:], "--num_epochs", "3", "--output_dir", tmp_path / "run"]
    env = {"SPY_SCRIPT": "train_mnist_rnn", "SPY_NAN": "loss 1 15"}
    log = finish(cluster, tmp_path, submit(cluster, tmp_path, *words, env=env), "FAILED")
    assert "error: the training loss of step 16 is nan" in log
    assert "the run broke down, so not queued again" in log and "(restart" not in log
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert (tmp_path / "run" / "checkpoints" / "step_00000011").exists()


def test_check_measures_the_link(cluster, tmp_path):
    log = finish(cluster, tmp_path, submit(cluster, tmp_path, "sbatch/check.sh", "--output_dir", tmp_path / "check"))
    record = json.loads((tmp_path / "check" / "check.json").read_text())
    assert (record["nodes"], record["processes"], record["backend"]) == (2, 2, "gloo")
    assert [rank["host"] for rank in record["ranks"]] == ["n1", "n2"] and "rank 1  n2  CPU" in log
    assert log.count("backend gloo") == log.count("33,554,432") == log.count("fit: ") == 1, "said once, not once a node"
    assert list(record["collectives"]) == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
    for name, line in record["collectives"].items():
        sizes, *columns = zip(*line["times"], strict=True)
        assert sizes == tuple(2**power for power in range(7, 26, 2)) and min(map(min, columns)) > 0
        share = CHECK["bus_share"](name, 2)
        for seconds, fitted in zip(columns, (line, line["in_a_row"]), strict=True):
            points = zip([size * share for size in sizes], seconds, strict=True)
            again = CHECK["fit_line"](list(points))
            assert again == {key: pytest.approx(fitted[key]) for key in again}
        assert line["latency_seconds"] >= 0 and line["bandwidth_bytes_per_second"] > 0  # noise can fit any line
        assert log.count(f" {name}: ") == 1 and 0 <= line["residual"] < 1
    assert 0 <= record["busy"] <= 1


def test_check_refuses_gpus_that_torch_cannot_use(monkeypatch):
    """As with a driver that is too old: the GPUs are counted without it."""
    monkeypatch.setattr(sys, "argv", ["check.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="^error: .* has a GPU that torch .* is the driver too old"):
        runpy.run_path(str(ROOT / "sbatch" / "check.py"), run_name="__main__")


def test_a_full_check_says_where_there_is_no_gpu(cluster, tmp_path):
    words = ["--nodes=1", "sbatch/check.sh", "--full", "--output_dir", tmp_path / "gpu"]
    assert "skipped: torch sees no GPU" in finish(cluster, tmp_path, submit(cluster, tmp_path, *words))


def test_two_jobs_never_write_into_one_folder(cluster, project, tmp_path):
    """The second finds the name of the first, which Slurm still knows: here, one that waits to be started."""
    waiting = submit(cluster, tmp_path, "--hold", "sbatch/1node.sh", "probe.py", cwd=project)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".job").write_text(waiting)
    words = ["sbatch/1node.sh", "probe.py", "--output_dir", tmp_path / "run"]
    log = finish(cluster, tmp_path, submit(cluster, tmp_path, *words, cwd=project), "FAILED")
    assert f"error: job {waiting} writes into {tmp_path / 'run'}" in log
    cluster.on("ctl", "scancel", waiting)
    finish(cluster, tmp_path, submit(cluster, tmp_path, *words, cwd=project))


def test_sweep_submits_the_matrix_and_reports_what_is_missing(cluster, tmp_path):
    """Slurm refuses 1x9, and a file lies where 2x2 would put its results: the rest is measured, the report says so."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "ddp-2x2-r1").touch()
    words = ["--strategies", "baseline dp ddp", "--shapes", "2x1 1x9 2x2", "--repeats", "1", "--minutes", "5",
             "--global_batch_size", "36", "--output_dir", folder, *DIGITS[:-2]]
    out = cluster.on("ctl", "sbatch/sweep.sh", *words, cwd=ROOT, check=False, timeout=200)
    assert "3 jobs, then the report" in out, out
    plan = {row["run"]: row["job"] for row in csv.DictReader((folder / "sweep.csv").read_text().splitlines())}
    assert list(plan) == ["baseline-1x1-r1", "dp-1x9-r1", "ddp-2x1-r1", "ddp-1x9-r1", "ddp-2x2-r1"]
    assert plan["dp-1x9-r1"] == plan["ddp-1x9-r1"] == "refused"
    log = folder / "report.log"
    cluster.wait_until(lambda: log.exists() and "written: " in log.read_text(), 90)
    report = (folder / "report.md").read_text()
    assert "ddp-1x9-r1 (ddp, 1 x 9): failed or missing, job refused" in report
    assert f"ddp-2x2-r1 (ddp, 2 x 2): failed or missing, job {plan['ddp-2x2-r1']}" in report
    assert "not found" not in log.read_text()
    rows = {row["strategy"]: row for row in csv.DictReader((folder / "report.csv").read_text().splitlines())}
    assert set(rows) == {"baseline", "ddp"} and (rows["ddp"]["nodes"], rows["ddp"]["basis"]) == ("2", "steady steps")
    base, ddp = (json.loads((folder / run / "run.json").read_text())["samples_per_second"]
                 for run in ("baseline-1x1-r1", "ddp-2x1-r1"))
    assert float(rows["ddp"]["speedup"]) == pytest.approx(ddp / base)
    assert float(rows["ddp"]["efficiency"]) == pytest.approx(ddp / base / 2)


def test_sweep_says_what_it_may_cost_and_asks(tmp_path):
    """Without Slurm: `sbatch` is a function that leaves a line for each job."""
    jobs, (keys, terminal) = tmp_path / "jobs", os.openpty()
    def sweep(*words, gres="gpu", stdin=subprocess.DEVNULL):
        env = os.environ | {"BASH_FUNC_sbatch%%": f"() {{ echo >>'{jobs}'; echo 7; }}", "SWEEP_GRES": gres}
        return subprocess.run(["sbatch/sweep.sh", *words, "--output_dir", tmp_path / f"sweep-{gres}{len(words)}"],
                              cwd=ROOT, env=env, stdin=stdin, capture_output=True, text=True)
    out = sweep("--dry_run", "--minutes", "30").stdout
    # 2 x (baseline 1 + dp 2 + 4 strategies x (1 + 2 + 2 + 4)) GPUs x 1/2 hour, and 2 x (2 + 2 + 4) GPUs x 1/12 hour
    assert "36 runs of train_bert_squad.py" in out and "\n43 jobs, at most 40.3 GPU-hours" in out
    assert len(re.findall(r"^\S+-r[12]: ", out, re.M)) == 42 and not re.search("^(dp-1x1|dp-2x|check-1x1)", out, re.M)
    assert "ddp-2x2-r2: 2 node(s) x 2 GPU(s), at most 30" in out and "check-2x1-r2: 2 node(s) x 1 GPU" in out
    much, refused = "43 jobs, at most 79.3 GPU-hours", sweep()
    assert refused.returncode == 1 and refused.stdout == f"{much}, if every job took all its time\n"
    assert refused.stderr == f"error: {much}: add --yes, or lower --repeats, --minutes or --shapes\n"
    os.write(keys, b"n\ny\n")
    assert sweep(stdin=terminal).stderr == "submit them? [y/N] error: nothing was submitted\n"
    assert not list(tmp_path.iterdir())
    for done in (sweep(stdin=terminal), sweep("--yes")):
        assert much in done.stdout and "42 jobs, then the report" in done.stdout, done.stderr
    assert "40 jobs, then the report" in sweep(gres="none").stdout  # without GPUs there is no DP
    assert jobs.read_text().count("\n") == 43 + 43 + 41


@pytest.mark.parametrize("words, message", [
    (["train.py"], "no script or option train.py"), (["--strategies", "ddp fspd"], "no strategy fspd"),
    (["--shapes", "2"], "a shape is NODESxGPUS"), (["--minutes"], "--minutes needs a value"),
    (["--strategies", "dp", "--shapes", "2x1"], "none of the strategies 'dp' runs on the shapes '2x1'"),
    (["--repeats", "0"], "--repeats must be a number from 1"), (["--local", "--shapes", "2x1"], "--local is one node"),
    (["--global_batch_size", "9", "--shapes", "1x2"], "--global_batch_size 9 does not divide by the 2 devices of 1x2"),
])
def test_sweep_refuses_with_one_line(words, message):
    done = subprocess.run(["sbatch/sweep.sh", "--dry_run", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_local_sweep_outlives_a_run_that_fails(tmp_path):
    """Without Slurm. A per-device batch of 1000 is too large for two devices, not for one."""
    words = ["--local", "--repeats", "1", "--strategies", "baseline ddp", "--output_dir", tmp_path / "s", *DIGITS[:3]]
    done = subprocess.run(["sbatch/sweep.sh", *words, "--num_epochs", "1", "--per_device_train_batch_size", "1000"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ddp-1x2-r1 failed: error: the global batch of 2000" in done.stdout
    report = (tmp_path / "s" / "report.md").read_text()
    assert "ddp-1x2-r1 (ddp, 1 x 2): failed or missing: see ddp-1x2-r1.log" in report and "baseline" in report


@pytest.mark.parametrize("seen, used", [(None, "0,1"), ("3,5,6", "3,5"), ("7", "7")])
def test_a_local_sweep_gives_dp_the_gpus_of_its_shape(tmp_path, seen, used):
    """There is no GPU here: `python` says that there are four, and `accelerate` writes down which it may see."""
    for name, does in (("python", "exit 0"), ("accelerate", f'echo "$CUDA_VISIBLE_DEVICES" >>{tmp_path}/seen')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CONDA_PREFIX": "set, so that site.sh takes no .venv"}
    env |= {"CUDA_VISIBLE_DEVICES": seen} if seen else {}
    subprocess.run(["sbatch/sweep.sh", "--local", "--repeats", "1", "--strategies", "dp ddp", "--shapes", "1x2",
                    "--output_dir", tmp_path / "sweep", *DIGITS[:3]], cwd=ROOT, env=env)
    assert (tmp_path / "seen").read_text() == f"{used}\n{seen or ''}\n"
