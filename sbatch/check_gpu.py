"""Prove the whole collection on this machine's GPUs, and write a report about it.

    make test-gpu                             # all groups of checks
    make test-gpu ONLY="fp32 link"            # these groups

fp32     both scripts under every YAML have the baseline's losses, without TF32; memory by formula
tf32     the same losses with TF32, which the scripts turn on
bf16     the same losses and memory in bf16, and the saved models
ladder   clipping, recomputed activations, and what a run says that is out of memory
resume   a run that a signal stopped continues as if nothing had happened
compile  torch.compile, with batches of several widths
steps    nothing in a step waits for the GPU; the time of steps
link     how fast two GPUs talk

A check is one line of a table: what was checked, what was found, whether it holds. The table goes
to OUTPUT_DIR/gpu-report.md, and to gpu-report.json: send both with a bug report. They add up: a
group adds its lines to those that are there, and replaces its own. No group needs another one.
BERT has the size of BERT-base, and random weights. With two or more GPUs, two processes run too.
Without a GPU, nothing runs.
"""

import argparse
import itertools
import json
import os
import re
import shutil
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
from planning import memory  # noqa: E402

# A CPU can stand in, to try this file: with a tiny model, few YAMLs, and no claim of a GPU.
STAND_IN = os.environ.get("TEST_GPU_STAND_IN") == "cpu"
YAMLS = ["baseline", "fsdp"] if STAND_IN else ["baseline", "dp", "ddp", "fsdp", "zero2", "zero3"]
LADDER = ["zero1", "fsdp_keep", "fsdp_offload", "zero2_offload", "zero3_offload"]  # for BERT
RUNGS = ["fsdp_keep"] if STAND_IN else LADDER
AGAIN = "--activation_checkpointing"
GPUS = 2 if STAND_IN else torch.cuda.device_count()
MNIST, BERT = "train_mnist_rnn.py", "train_bert_squad.py"
NAMES = {MNIST: "LSTM", BERT: "BERT"}
BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
BERT_BASE |= {"intermediate_size": 3072, "vocab_size": 30522}  # 110 million parameters
STEPS = 20  # over which losses are compared
SHORT = f"--max_train_steps {STEPS} --dropout 0 --learning_rate 1e-4".split()
SHORT += ["--per_device_train_batch_size", "8"]
# How far a loss may be from the baseline's in fp32, relative to it. In fp32 only the order of sums
# differs. TF32 rounds the operands of matrix products to 11 significant bits and adds up in fp32;
# bf16 has 8 bits. So TF32 may differ by an eighth of what bf16 may.
SAME = {"fp32": 1e-4, "tf32": 0.05 / 8, "bf16": 0.05}


def launch(*words, env):
    """`accelerate launch` these words."""
    launcher = "-m accelerate.commands.accelerate_cli launch --main_process_port 0".split()
    command = [sys.executable, *launcher, *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, cwd=ROOT, env=env, timeout=300, capture_output=True, text=True)


class Checks:
    """The rows of a group's table, and how its runs are started."""

    def __init__(self, folder):
        self.folder, self.rows, self.numbers, self.baselines = folder, [], itertools.count(), {}
        model, squad = folder / "model", "tests/data/squad_v1.json"
        shutil.copytree(ROOT / "tests" / "data" / "tiny_bert", model)  # for its tokenizer
        config = json.loads((model / "config.json").read_text())
        config |= {} if STAND_IN else BERT_BASE
        (model / "config.json").write_text(json.dumps(config))
        bert = ["--model_name_or_path", model, "--from_scratch", "--max_eval_samples", 16]
        bert += ["--train_file", squad, "--validation_file", squad]
        self.flags = {MNIST: ["--dataset", "digits"], BERT: bert}

    def run(self, script, yaml, *flags, precision="fp32", processes=1, words=(), name="", **env):
        """The run.json of a run, with its exit code, errors and folder besides."""
        folder = self.folder / (name or f"run-{next(self.numbers)}")
        mixed = precision if precision in ("bf16", "fp16") else "no"
        if precision == "fp32":  # the scripts turn TF32 on, with which equal losses cannot be told
            env["NVIDIA_TF32_OVERRIDE"] = "0"
        program = "tests/spy.py" if "SPY_SCRIPT" in env else script
        command = ["--config_file", f"accelerate_configs/{yaml}.yaml", "--num_processes", processes]
        command += ["--mixed_precision", mixed, *words, program, *self.flags[script]]
        done = launch(*command, "--output_dir", folder, *flags, env=env)
        file = folder / "run.json"
        record = json.loads(file.read_text()) if file.exists() else {"loss_history": []}
        return record | {
            "code": done.returncode,
            "err": done.stderr + done.stdout,
            "at": folder,
            "losses": [loss for _, loss in record["loss_history"]],
        }

    def baseline(self, script):
        """The losses with which others are compared: of one process, in fp32 without TF32."""
        if script not in self.baselines:
            self.baselines[script] = self.run(script, "baseline", *SHORT)
        run = self.baselines[script]
        if run["code"]:
            raise RuntimeError(f"the baseline of {script} failed: {run['err'][-200:]}")
        return run["losses"]

    def add(self, check, figure, ok):
        """A row of the table; `ok` is None where a check was left out."""
        verdict = {True: "pass", False: "FAIL", None: "left out"}[ok if ok is None else bool(ok)]
        figure = " ".join(figure.split())  # in one line
        self.rows.append({"check": check, "figure": figure, "verdict": verdict})
        print(f"{verdict:8}  {check}: {figure}", flush=True)

    def compare(self, check, run, losses, tolerance):
        """Add a row that compares a run's losses with others."""
        if run["code"] or len(run["losses"]) != len(losses):
            errors = *re.findall("^error:.*", run["err"], re.M), run["err"][-200:]
            steps = f"{len(run['losses'])} of {len(losses)} steps"
            return self.add(check, f"exit code {run['code']}, {steps}: {errors[0]}", False)
        worst = max(abs(a / b - 1) for a, b in zip(run["losses"], losses, strict=True))
        figure = f"losses differ by {worst:.1e}, allowed {tolerance:.0e}"
        return self.add(check, figure, worst <= tolerance)


def check_yamls(checks, precision="fp32"):
    """The losses of each script and YAML, of the same samples. {(script, YAML, processes): run}"""
    cases = [
        (script, yaml, processes)
        for processes in (1, 2)[:GPUS]
        for script in (MNIST, BERT)
        for yaml in YAMLS + RUNGS * (script == BERT)
        if (yaml, precision) != ("dp", "bf16")
        and (processes == 1 or yaml not in ("baseline", "dp"))
    ]

    def run(case):
        script, yaml, processes = case
        devices, env = processes, {}
        if yaml == "dp" and GPUS > 1:  # one process, which uses all GPUs that it sees
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
            devices, env = 2, {"CUDA_VISIBLE_DEVICES": ",".join(seen[:2])}
        flags = [*SHORT, "--per_device_train_batch_size", 8 // devices]
        return checks.run(script, yaml, *flags, precision=precision, processes=processes, **env)

    with ThreadPoolExecutor(3) as pool:  # most of each is Python importing
        runs = dict(zip(cases, pool.map(run, cases), strict=True))
    for (script, yaml, processes), run in runs.items():
        name = f"{NAMES[script]} {yaml} {precision}{', 2 processes' * (processes - 1)}"
        checks.compare(name, run, checks.baseline(script), SAME[precision])
    if precision != "tf32":
        check_memory(checks, runs, precision)
    return runs


def check_tf32(checks):
    """It was on if the first loss is another one than without. GPUs have TF32 since the A100."""
    runs = check_yamls(checks, "tf32")
    has_it = not STAND_IN and torch.cuda.get_device_capability() >= (8, 0)
    for script in (MNIST, BERT):
        first, without = runs[script, "baseline", 1]["losses"][:1], checks.baseline(script)[:1]
        figure = f"first loss {first}, without it {without}"
        ok = first != without if has_it else None
        checks.add(f"{NAMES[script]}: TF32 is on", figure, ok)


def check_bf16(checks):
    """Besides, the saved models have the same names and dtypes; and fp16."""
    runs = check_yamls(checks, "bf16")
    for script in (MNIST, BERT):
        saved = {
            yaml: load_file(run["at"] / "model.safetensors")
            for (name, yaml, processes), run in runs.items()
            if (name, processes) == (script, 1) and not run["code"]
        }
        kinds = [{name: weight.dtype for name, weight in of.items()} for of in saved.values()]
        figure = f"names and dtypes of {', '.join(saved)}"
        alike = all(kind == kinds[0] for kind in kinds)
        checks.add(f"saved {NAMES[script]} of bf16 runs", figure, alike)
    if not STAND_IN:
        run = checks.run(BERT, "baseline", *SHORT, precision="fp16")
        checks.compare("BERT baseline fp16", run, checks.baseline(BERT), SAME["bf16"])


def check_memory(checks, runs, precision):
    """BERT's peak of training, beside what the formulas of fit.py say of a step."""
    sizes = fit.read_model(str(checks.folder / "model"))
    again = checks.run(BERT, "baseline", *SHORT, AGAIN, precision=precision)
    for (script, yaml, processes), run in [*runs.items(), ((BERT, "baseline", 1), again)]:
        if script != BERT or run["code"]:
            continue
        batch = run["per_device_batch_size"], run["workload"]["sequence_length"]
        dtype = precision.replace("fp32", "no")
        formula = memory.memory_of(yaml, sizes, *batch, processes, dtype, run is again)
        said = formula["total"] / 1e6
        peak = max(rank["peak_memory_mb"] for rank in run["ranks"])
        name = f"{yaml} {precision}{', 2 processes' * (processes - 1)}"
        checks.add(
            f"peak memory, {name}{', recomputing' * (run is again)}",
            f"{peak:,.0f} MB, by formula {said:,.0f}",
            None if STAND_IN else 0.85 < peak / said < 1.15,
        )


def check_ladder(checks):
    """Clipping is the same everywhere; recomputing changes no loss; out of memory is one line."""
    clipped = [name for name in YAMLS + RUNGS if name != "dp"]
    recomputed = [name for name in clipped if name != "baseline"][:: 1 if STAND_IN else 3]
    cases = {("clipped", yaml): ["--max_grad_norm", 1] for yaml in clipped}
    cases |= {("kept", yaml): ["--dropout", 0.1] for yaml in recomputed}
    cases |= {("again", yaml): ["--dropout", 0.1, AGAIN] for yaml in recomputed}
    with ThreadPoolExecutor(3) as pool:
        done = pool.map(lambda case: checks.run(BERT, case[1], *SHORT, *cases[case]), cases)
        runs = dict(zip(cases, done, strict=True))
    expected, free = runs["clipped", "baseline"]["losses"], checks.baseline(BERT)
    checks.add(
        "clipping changes the losses",
        f"step {STEPS}: {expected[-1:]}, without {free[-1:]}",
        expected != free,
    )
    for yaml in clipped[1:]:
        checks.compare(f"clipped under {yaml}", runs["clipped", yaml], expected, 1e-4)
    for yaml in recomputed:
        kept = runs["kept", yaml]["losses"]
        checks.compare(f"recomputed under {yaml}, with dropout", runs["again", yaml], kept, 1e-4)
    spy = {"SPY_SCRIPT": Path(BERT).stem, "SPY_LIMIT": "50" if STAND_IN else "1500"}
    failed = checks.run(BERT, "baseline", *SHORT, **spy)
    lines = re.findall("^error: .*memory.*", failed["err"], re.M)
    checks.add("out of memory", "; ".join(lines) or failed["err"][-200:], len(lines) == 1)
    told = list(fit.explain_run(failed))  # as fit.py prints it
    checks.add("what held how much", f"fit.py has {len(told)} lines", "gradients" in str(told))


def check_resume(checks):
    """SIGUSR1 in mid-epoch leaves no process behind; --resume ends as a run left alone."""
    for yaml in YAMLS[1:] if STAND_IN else ("ddp", "fsdp", "zero3"):
        flags = "--max_train_steps 30 --per_device_train_batch_size 8 --dropout 0.1".split()
        flags += ["--checkpointing_steps", 7]  # at which the ranks look at their signals, too
        calm = checks.run(BERT, yaml, *flags)
        spy = {"SPY_SCRIPT": Path(BERT).stem, "SPY_SIGNAL": "SIGUSR1 0 20"}
        spy["SPY_DIR"] = str(checks.folder)
        stopped = checks.run(BERT, yaml, *flags, name=f"stopped-{yaml}", **spy)
        seen = stopped.get("status"), stopped.get("steps")
        left = subprocess.run(["pgrep", "-f", str(stopped["at"])], capture_output=True).stdout
        checks.add(
            f"SIGUSR1 under {yaml}",
            "{} after step {}, {} processes left".format(*seen, len(left.split())),
            seen == ("preempted", 21) and not left,
        )
        resumed = checks.run(BERT, yaml, *flags, "--resume", name=f"stopped-{yaml}")
        checks.compare(f"resumed in mid-epoch under {yaml}", resumed, calm["losses"], 1e-4)


def check_compile(checks):
    """Widths differ, and torch gives up after 8 compilations if each width needs one."""
    backend = "eager" if STAND_IN else "inductor"
    words = ["--dynamo_backend", backend]
    run = checks.run(BERT, "baseline", *SHORT, words=words, TORCH_LOGS="recompiles")
    checks.compare(f"compiled by {backend}", run, checks.baseline(BERT), 1e-3)
    again = run["err"].count("Recompiling function")
    checks.add("compiled again for other shapes", f"{again} times", again <= 8)


def check_steps(checks):
    """No step waits for the GPU, but where ranks meet; 50 steps more take as long as 50 steps."""
    for script in (MNIST, BERT):
        run = checks.run(script, "baseline", *SHORT, SPY_SCRIPT=Path(script).stem, SPY_SYNC="1")
        checks.add(
            f"{NAMES[script]}: no wait in a step",
            f"exit code {run['code']}",
            None if STAND_IN else run["code"] == 0,
        )
    less, more = (checks.run(BERT, "baseline", *SHORT, "--max_train_steps", n) for n in (50, 100))
    seconds = more["seconds"]["train"] - less["seconds"]["train"]
    ratio = seconds / (50 * 8 / more["samples_per_second"])
    checks.add(
        "time of 50 steps",
        f"{seconds:.2f} s more for 100 steps than for 50, {ratio:.2f} of 50 steady steps",
        STAND_IN or 0.9 < ratio < 1.1,
    )


def check_link(checks):
    """How fast two GPUs talk."""
    if GPUS < 2:
        return checks.add("bandwidth between GPUs", "needs two GPUs", None)
    words = "--config_file accelerate_configs/ddp.yaml --num_processes 2 sbatch/check.py".split()
    done = launch(*words, "--output_dir", checks.folder / "check", env={})
    if done.returncode:
        return checks.add("bandwidth between GPUs", done.stderr[-200:], False)
    file = checks.folder / "check" / "check.json"
    line = json.loads(file.read_text())["collectives"]["all_reduce"]
    rate, latency = line["bandwidth_bytes_per_second"] / 1e9, line["latency_seconds"] * 1e6
    figure = f"{rate:.1f} GB/s of all-reduce, latency {latency:.0f} us"
    return checks.add("bandwidth between GPUs", figure, rate > 0)


GROUPS = {
    "fp32": check_yamls,
    "tf32": check_tf32,
    "bf16": check_bf16,
    "ladder": check_ladder,
    "resume": check_resume,
    "compile": check_compile,
    "steps": check_steps,
    "link": check_link,
}


def read_report(folder):
    """What groups that ran before have left in a folder, or an empty report."""
    device = "a CPU, standing in for a GPU"
    if not STAND_IN:
        device = f"{GPUS} x {torch.cuda.get_device_name()}"
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "cuda": torch.version.cuda,
    }
    report, file = {"device": device, "versions": versions}, folder / "gpu-report.json"
    found = json.loads(file.read_text()) if file.exists() else report | {"groups": {}}
    if not report.items() <= found.items():
        sys.exit(f"error: {file} is of other GPUs or versions: move it, or set --output_dir")
    return found


def write_report(report, folder):
    """gpu-report.md and gpu-report.json."""
    groups = {name: report["groups"][name] for name in GROUPS if name in report["groups"]}
    rows = [(name, *row.values()) for name in groups for row in groups[name]["checks"]]
    missing = ", ".join(name for name in GROUPS if name not in groups)
    lines = [
        f"# {report['device']}",
        "",
        ", ".join(f"{name} {of}" for name, of in report["versions"].items()),
        "",
        *([f"Not run yet: {missing}.", ""] if missing else []),
        "| group | check | figure | verdict |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-report.md").write_text("\n".join(lines) + "\n")
    (folder / "gpu-report.json").write_text(json.dumps(report | {"groups": groups}, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = {"nargs": "+", "choices": GROUPS, "default": [*GROUPS], "metavar": "GROUP"}
    parser.add_argument("--only", **chosen, help="run these groups of checks (default: all)")
    where = "where the report is, or goes (default: %(default)s)"
    parser.add_argument("--output_dir", type=Path, default=Path("runs/gpu"), help=where)
    args = parser.parse_args()
    if not torch.cuda.is_available() and not STAND_IN:
        print("skipped: torch sees no GPU here, so nothing was proven on one")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    report, verdicts = read_report(args.output_dir), []
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(Path(folder))
        for name in args.only:
            checks.rows, begun = [], time.monotonic()
            try:
                GROUPS[name](checks)
            except Exception as problem:  # a run that failed has no figures; the others go on
                checks.add(name, f"{type(problem).__name__}: {problem}", False)
            seconds = round(time.monotonic() - begun, 1)
            report["groups"][name] = {"seconds": seconds, "checks": checks.rows}
            write_report(report, args.output_dir)
            verdicts += [row["verdict"] for row in checks.rows]
    failed = verdicts.count("FAIL")
    print(f"{len(verdicts)} checks, {failed} failed: {args.output_dir}/gpu-report.md")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
