"""Prove the whole collection on this machine's GPUs: `make test-gpu`. It takes some 15 minutes.

Both scripts run under the six YAMLs over NCCL, and BERT under the rungs of the memory ladder too.
BERT has the size of BERT-base, and random weights. A check is one line of a table: what was
checked, what was found, whether it holds. After each group of checks the table goes to
OUTPUT_DIR/gpu-report.md, and all figures to gpu-report.json: send both in with a bug report. With
two or more GPUs, two processes run too. Without a GPU nothing is run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import accelerate
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fit  # noqa: E402
from reporting import memory  # noqa: E402

# The code of this file can be tried without a GPU: a tiny model, few YAMLs, and no claim of a GPU.
STAND_IN = os.environ.get("TEST_GPU_STAND_IN") == "cpu"
YAMLS = ["baseline", "fsdp"] if STAND_IN else ["baseline", "dp", "ddp", "fsdp", "zero2", "zero3"]
RUNGS = ["fsdp_keep"] if STAND_IN else [  # of the memory ladder: for BERT
    "zero1", "fsdp_keep", "fsdp_offload", "zero2_offload", "zero3_offload"]
AGAIN = "--activation_checkpointing"
GPUS = 2 if STAND_IN else torch.cuda.device_count()
MNIST, BERT = "train_mnist_rnn.py", "train_bert_squad.py"
STEPS = 20  # over which losses are compared
SAME = {"no": 1e-4, "bf16": 0.05, "fp16": 0.05}  # relative, of each loss to the baseline's in fp32


def bert_base(folder):
    """A folder with the tests' tokenizer and the config of BERT-base: 110 million parameters."""
    tiny = ROOT / "tests" / "data" / "tiny_bert"
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if not STAND_IN:
        sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                 "intermediate_size": 3072, "vocab_size": 30522}
        config = json.loads((tiny / "config.json").read_text()) | sizes
        (folder / "config.json").write_text(json.dumps(config))
    return folder


class Checks:
    """The rows of the table, and the runs that they are about."""

    def __init__(self, folder):
        self.folder, self.rows, self.started = folder, [], 0
        self.runs = {}  # of one process, by (script, YAML, precision)
        squad = ROOT / "tests" / "data" / "squad_v1.json"
        (folder / "model").mkdir()
        model = bert_base(folder / "model")
        self.flags = {
            MNIST: ["--dataset", "digits"],
            BERT: ["--model_name_or_path", model, "--from_scratch", "--train_file", squad,
                   "--validation_file", squad, "--max_eval_samples", 16]}

    def run(self, script, yaml, *flags, precision="no", processes=1, launcher=(), env=None):
        """The run.json of a run, with its exit code, errors and folder besides."""
        self.started += 1
        folder = self.folder / f"{self.started}-{yaml}-{Path(script).stem}"
        if "--output_dir" in flags:
            folder = Path(flags[flags.index("--output_dir") + 1])
        words = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--main_process_port", "0",
                 "--num_processes", processes, "--mixed_precision", precision, *launcher]
        program = "tests/spy.py" if env and "SPY_SCRIPT" in env else script
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words,
                   program, *self.flags[script], "--output_dir", folder, *flags]
        # TF32 rounds products to 10 bits, by which strategies would differ; it is off in fp32.
        own = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"} | (env or {})
        done = subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | own,
                              capture_output=True, text=True, timeout=300)
        file = folder / "run.json"
        record = json.loads(file.read_text()) if file.exists() else {"loss_history": []}
        return record | {"code": done.returncode, "err": done.stderr + done.stdout, "at": folder,
                         "losses": [loss for _, loss in record["loss_history"]]}

    def add(self, check, figure, ok):
        """A row of the table; `ok` is None where a check was left out."""
        verdict = {True: "pass", False: "FAIL", None: "left out"}[ok if ok is None else bool(ok)]
        self.rows.append({"check": check, "figure": figure, "verdict": verdict})
        print(f"{verdict:8}  {check}: {figure}", flush=True)

    def compare(self, check, run, losses, tolerance):
        """Add a row that compares a run's losses with others."""
        if run["code"] or len(run["losses"]) != len(losses):
            last = [line for line in run["err"].splitlines() if line.strip()][-1:]
            error = [line for line in run["err"].splitlines() if line.startswith("error:")] or last
            return self.add(check, f"exit code {run['code']}, {len(run['losses'])} of "
                            f"{len(losses)} steps: {''.join(error[:1])[:200]}", False)
        worst = max(abs(a / b - 1) for a, b in zip(run["losses"], losses, strict=True))
        return self.add(check, f"losses differ by {worst:.1e}, allowed {tolerance:.0e}",
                        worst <= tolerance)


def short(script):
    return "LSTM" if script == MNIST else "BERT"


def run_strategies(checks, processes):
    """A run of each script, YAML and precision, by these three. All see the same samples."""
    cases = [(script, yaml, precision) for script in (MNIST, BERT)
             for yaml in YAMLS + RUNGS * (script == BERT) for precision in ("no", "bf16")
             if (yaml, precision) != ("dp", "bf16")
             and (processes == 1 or yaml not in ("baseline", "dp"))]
    cases += [(BERT, "baseline", "fp16")] if processes == 1 and not STAND_IN else []

    def run(case):
        script, yaml, precision = case
        devices = GPUS if yaml == "dp" else processes
        return checks.run(script, yaml, "--max_train_steps", STEPS, "--dropout", 0,
                          "--learning_rate", 1e-4, "--per_device_train_batch_size", 8 // devices,
                          precision=precision, processes=processes)

    with ThreadPoolExecutor(3) as pool:  # most of each is Python importing
        return dict(zip(cases, pool.map(run, cases), strict=True))


def check_strategies(checks):
    """One process of each, and with several GPUs two."""
    checks.runs = run_strategies(checks, 1)

    def compare(case, run, suffix=""):
        script, yaml, precision = case
        name = f"{short(script)} {yaml} {'fp32' if precision == 'no' else precision}{suffix}"
        expected = checks.runs[script, "baseline", "no"]["losses"] or [float("nan")] * STEPS
        checks.compare(name, run, expected, SAME[precision])

    for case, run in checks.runs.items():
        compare(case, run)
    for case, run in run_strategies(checks, 2).items() if GPUS > 1 else ():
        compare(case, run, ", 2 processes")
        if case[0] == BERT and case[2] == "no" and not run["code"]:
            peaks = [f"{rank['peak_memory_mb']:,.0f}" for rank in run["ranks"]]
            checks.add(f"peak memory of each rank, {case[1]}", f"{' and '.join(peaks)} MB", True)
    if GPUS < 2:
        checks.add("two processes", "needs two GPUs", None)
    refused = checks.run(BERT, "dp", "--max_train_steps", 2, precision="bf16")
    checks.add("dp refuses bf16", "in one line", "error: dp does not know bf16" in refused["err"])


def check_resume(checks):
    """SIGUSR1 in the middle of the second epoch, --resume, and the losses of a run that was left
    alone; and whether the signal leaves processes behind.
    """
    for yaml in YAMLS[1:] if STAND_IN else ("ddp", "fsdp", "zero3"):
        flags = ["--max_train_steps", 30, "--per_device_train_batch_size", 8, "--dropout", 0.1,
                 "--checkpointing_steps", 7]  # at which the ranks look at their signals, too
        calm = checks.run(BERT, yaml, *flags)
        here = ["--output_dir", checks.folder / f"stopped-{yaml}"]
        spy = {"SPY_SCRIPT": Path(BERT).stem, "SPY_SIGNAL": "SIGUSR1 0 20",
               "SPY_DIR": str(checks.folder)}
        stopped = checks.run(BERT, yaml, *flags, *here, env=spy)
        status = stopped.get("status")
        left = subprocess.run(["pgrep", "-f", str(here[1])], capture_output=True, text=True).stdout
        checks.add(f"SIGUSR1 under {yaml}", f"{status} after step {stopped.get('steps')}, "
                   f"{len(left.split())} processes left",
                   status == "preempted" and stopped["steps"] == 21 and not left)
        resumed = checks.run(BERT, yaml, *flags, *here, "--resume")
        checks.compare(f"resumed in mid-epoch under {yaml}", resumed, calm["losses"], 1e-4)


def check_weights(checks):
    """The saved models have the same names and dtypes under every strategy."""
    for script in (MNIST, BERT):
        kinds = {yaml: {name: str(weight.dtype) for name, weight in load_file(
            run["at"] / "model.safetensors").items()}
            for (name, yaml, precision), run in checks.runs.items()
            if name == script and precision == "bf16" and not run["code"]}
        same = len({json.dumps(kind, sort_keys=True) for kind in kinds.values()}) == 1
        checks.add(f"saved {short(script)} of bf16 runs", f"names and dtypes of {', '.join(kinds)}",
                   same)


def check_compile(checks):
    """Widths differ, and torch gives up after 8 compilations if each width needs one."""
    flags = ["--max_train_steps", STEPS, "--dropout", 0, "--per_device_train_batch_size", 4]
    eager = checks.run(BERT, "baseline", *flags)
    backend = "eager" if STAND_IN else "inductor"
    run = checks.run(BERT, "baseline", *flags, launcher=["--dynamo_backend", backend],
                     env={"TORCH_LOGS": "recompiles"})
    checks.compare(f"compiled by {backend}", run, eager["losses"], 1e-3)
    again = run["err"].count("Recompiling function")
    checks.add("compiled again for other shapes", f"{again} times", again <= 8)


def check_time(checks):
    """100 steps take as much longer than 50 as 50 steady steps take."""
    seconds, rates = [], []
    for steps in (50, 100):
        run = checks.run(BERT, "baseline", "--max_train_steps", steps,
                         "--per_device_train_batch_size", 8)
        seconds.append(run["seconds"]["train"])
        rates.append(run["samples_per_second"])
    ratio = (seconds[1] - seconds[0]) / (50 * 8 / rates[1])
    checks.add("time of 50 steps", f"{seconds[1] - seconds[0]:.2f} s more for 100 steps than for "
               f"50, {ratio:.2f} of 50 steady steps", STAND_IN or 0.9 < ratio < 1.1)


def check_ladder(checks):
    """Activation checkpointing changes no loss; clipping is the same under all strategies; a run
    that is out of memory says so in one line.
    """
    flags = ["--max_train_steps", STEPS, "--per_device_train_batch_size", 8, "--dropout"]
    clip, spy = [*flags, 0, "--max_grad_norm", 1], {"SPY_SCRIPT": Path(BERT).stem}
    clipped = [name for name in YAMLS + RUNGS if name != "dp"]
    recomputed = [name for name in clipped if name != "baseline"][:: 1 if STAND_IN else 3]
    cases = {("clipped", yaml): clip for yaml in clipped}
    cases |= {("kept", yaml): [*flags, 0.1] for yaml in recomputed}
    cases |= {("again", yaml): [*flags, 0.1, AGAIN] for yaml in recomputed}
    with ThreadPoolExecutor(3) as pool:
        done = pool.map(lambda case: checks.run(BERT, case[1], *cases[case]), cases)
        runs = dict(zip(cases, done, strict=True))
    expected = runs["clipped", "baseline"]["losses"]
    free = checks.runs[BERT, "baseline", "no"]["losses"]
    checks.add("clipping changes the losses", f"step {STEPS}: {expected[-1:]}, without {free[-1:]}",
               expected != free)
    for yaml in clipped[1:]:
        checks.compare(f"clipped under {yaml}", runs["clipped", yaml], expected, 1e-4)
    for yaml in recomputed:
        checks.compare(f"recomputed under {yaml}, with dropout", runs["again", yaml],
                       runs["kept", yaml]["losses"], 1e-4)
    failed = checks.run(BERT, "baseline", *flags, 0, env=spy | {
        "SPY_LIMIT": "50" if STAND_IN else "1500"})
    lines = [line for line in failed["err"].splitlines() if line.startswith("error: out of mem")]
    checks.add("out of memory", lines[0] if lines else failed["err"][-200:].replace("\n", " "),
               len(lines) == 1)
    told = subprocess.run([sys.executable, "fit.py", str(failed["at"] / "run.json")], cwd=ROOT,
                          capture_output=True, text=True)
    checks.add("what held how much", f"fit.py prints {len(told.stdout.splitlines())} lines",
               told.returncode == 0 and "gradients" in told.stdout)


def check_memory(checks):
    """The peak of training, beside what the formulas of fit.py say of a step."""
    sizes = fit.read_model(str(checks.folder / "model"))
    again = {(BERT, "baseline", precision): checks.run(
        BERT, "baseline", "--max_train_steps", STEPS, "--dropout", 0, AGAIN,
        "--per_device_train_batch_size", 8, precision=precision) for precision in ("no", "bf16")}
    for (script, yaml, precision), run in [*checks.runs.items(), *again.items()]:
        if script != BERT or precision == "fp16" or run["code"]:
            continue
        recomputes = run["activation_checkpointing"]
        windows = run["per_device_batch_size"], run["workload"]["sequence_length"]
        said = memory.memory_of(yaml, sizes, *windows, 1, precision, recomputes)["total"] / 1e6
        peak = run["ranks"][0]["peak_memory_mb"]
        name = f"{yaml} {precision}{', recomputing' * recomputes}"
        checks.add(f"peak memory, {name}", f"{peak:,.0f} MB, by formula {said:,.0f}: ratio "
                   f"{peak / said:.2f}", None if STAND_IN else 0.85 < peak / said < 1.15)


def check_syncs(checks):
    """Nothing in a step waits for the GPU, but where the ranks meet."""
    for script in (MNIST, BERT):
        spy = {"SPY_SCRIPT": Path(script).stem, "SPY_SYNC": "1"}
        run = checks.run(script, "baseline", "--max_train_steps", STEPS, env=spy)
        checks.add(f"{short(script)}: no wait in a step", f"exit code {run['code']}",
                   None if STAND_IN else run["code"] == 0)


def check_link(checks):
    """What two GPUs send each other."""
    if GPUS < 2:
        return checks.add("bandwidth between GPUs", "needs two GPUs", None)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
               "--config_file", "accelerate_configs/ddp.yaml", "--main_process_port", "0",
               "--num_processes", "2", "sbatch/check.py", "--output_dir", checks.folder / "check"]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        return checks.add("bandwidth between GPUs", done.stderr[-200:], False)
    record = json.loads((checks.folder / "check" / "check.json").read_text())
    line = record["collectives"]["all_reduce"]
    rate = line["bandwidth_bytes_per_second"] / 1e9
    return checks.add("bandwidth between GPUs", f"{rate:.1f} GB/s of all-reduce, latency "
                      f"{line['latency_seconds'] * 1e6:.0f} us", rate > 0)


def write_report(checks, folder, seconds):
    """gpu-report.md and gpu-report.json."""
    device = "a CPU, standing in for a GPU" if STAND_IN else (
        f"{GPUS} x {torch.cuda.get_device_name()}")
    versions = {"python": sys.version.split()[0], "torch": torch.__version__,
                "accelerate": accelerate.__version__, "cuda": torch.version.cuda}
    failed = sum(row["verdict"] == "FAIL" for row in checks.rows)
    about = {"device": device, "versions": versions, "seconds": round(seconds, 1), "failed": failed}
    width = max(len(row["check"]) for row in checks.rows)
    lines = [f"# {device}", "", ", ".join(f"{k} {v}" for k, v in versions.items()), "",
             f"| {'check':{width}} | figure | verdict |", f"|{'-' * (width + 2)}|---|---|"]
    lines += [f"| {row['check']:{width}} | {row['figure'].replace('|', '/')} | {row['verdict']} |"
              for row in checks.rows]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-report.md").write_text("\n".join(lines) + "\n")
    (folder / "gpu-report.json").write_text(json.dumps(about | {"checks": checks.rows}, indent=1))
    return failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    if not torch.cuda.is_available() and not STAND_IN:
        print("skipped: torch sees no GPU here, so nothing was proven on one")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(Path(folder))
        for check in (check_strategies, check_weights, check_memory, check_ladder, check_resume,
                      check_compile, check_syncs, check_time, check_link):
            try:
                check(checks)
            except Exception as problem:  # a run that failed has no figures; the others go on
                checks.add(check.__name__, f"{type(problem).__name__}: {problem}", False)
            failed = write_report(checks, args.output_dir, time.monotonic() - begun)
    print(f"{len(checks.rows)} checks, {failed} failed: {args.output_dir}/gpu-report.md")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
