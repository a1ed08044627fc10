"""What the benchmarks share: a run of a script, a role in a fresh process, a row of a table."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def launcher(strategy):
    """The words of `accelerate launch` with a strategy's YAML, between python and a script."""
    return [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--main_process_port",
        "0",
        "--config_file",
        f"accelerate_configs/{strategy}.yaml",
    ]


def record(strategy, script, *flags, precision="no", dynamo="no"):
    """The run.json of a run of a script under a strategy's YAML, and what it "printed"."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *launcher(strategy),
            "--mixed_precision",
            precision,
            "--dynamo_backend",
            dynamo,
            script,
            "--output_dir",
            folder,
            *map(str, flags),
        ]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return json.loads((Path(folder) / "run.json").read_text()) | {"printed": done.stdout}


def role(file, *arguments):
    """Run `file --role ...` in a fresh process. Returns the JSON that it prints after "number:"."""
    command = [sys.executable, file, "--role", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.split("number:")[1].splitlines()[0])


def row(name, values, unit, target=""):
    """Print a line of the table: median, and from the lowest to the highest value."""
    spread = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
    print(f"| {name} | {statistics.median(values):.4g} {unit} | {spread} | {target} |", flush=True)
