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

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--output_dir", type=os.path.expanduser)
folder = Path(parser.parse_known_args()[0].output_dir)
folder.mkdir(parents=True, exist_ok=True)
seen = dict(os.environ) | {"host": socket.gethostname(), "command": sys.argv}
rank = os.environ.get("RANK", "0")
if rank == "0":
    lock = open(folder / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: another run is writing into {folder}: wait for it")
    while (folder / "wait").exists():
        time.sleep(0.2)
(folder / f"rank_{rank}.json").write_text(json.dumps(seen))
if rank == "0":
    (folder / "run.json").write_text('{"status": "completed"}')
