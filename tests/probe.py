"""What a script finds where the wrappers launch it: each rank writes its world, arguments and
environment.
"""

import json
import os
import socket
import sys
from pathlib import Path

NAMES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ACCELERATE_MIXED_PRECISION",
    "FROM_THE_SITE_FILE",
    "PYTHONFAULTHANDLER",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
]
folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
seen = {name: os.environ.get(name) for name in NAMES}
seen |= {"host": socket.gethostname(), "argv": sys.argv[1:]}
(folder / f"rank_{seen['RANK'] or 0}.json").write_text(json.dumps(seen))
if seen["RANK"] in (None, "0"):
    (folder / "run.json").write_text('{"status": "completed"}')
