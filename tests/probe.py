"""What a script finds where the wrappers launch it: each rank writes its world, arguments and
environment. Rank 0 holds the lock of the scripts, and waits in a folder with a file `wait`.
"""

import argparse
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

NAMES = """RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
    CUDA_VISIBLE_DEVICES ACCELERATE_MIXED_PRECISION PARALLELISM_CONFIG_DP_REPLICATE_SIZE
    PARALLELISM_CONFIG_DP_SHARD_SIZE FROM_THE_SITE_FILE FROM_SRUN PYTHONFAULTHANDLER
    TORCH_FR_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT""".split()
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--output_dir", type=os.path.expanduser)
folder = Path(parser.parse_known_args()[0].output_dir)
folder.mkdir(parents=True, exist_ok=True)
seen = {name: os.environ.get(name) for name in NAMES}
seen |= {"host": socket.gethostname(), "command": sys.argv}
first = seen["RANK"] in (None, "0")
if first:
    lock = open(folder / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(
            f"error: another run is writing into {folder}: wait for it, or choose another "
            "--output_dir"
        )
while first and (folder / "wait").exists():
    time.sleep(0.2)
(folder / f"rank_{seen['RANK'] or 0}.json").write_text(json.dumps(seen))
if first:
    (folder / "run.json").write_text('{"status": "completed"}')
