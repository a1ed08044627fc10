"""What the benchmarks share: a run of a script, a function in a fresh process, a row of a table."""

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import common  # noqa: E402, F401  It tells who forgot to activate .venv.


def record(strategy, script, *flags, precision="no", dynamo="no"):
    """The run.json of a run of a script under a strategy's YAML."""
    options = f"--main_process_port 0 --mixed_precision {precision} --dynamo_backend {dynamo}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split()]
    yaml = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        words = [*launch, "--config_file", yaml, ROOT / script, "--output_dir", folder, *flags]
        subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "run.json").read_text())


def alone(function, *arguments):
    """What a function returns in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def row(name, values, unit, target=""):
    """Print a line of the table: median, and from the lowest to the highest value."""
    spread = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else ""
    print(f"| {name} | {statistics.median(values):.4g} {unit} | {spread} | {target} |", flush=True)
