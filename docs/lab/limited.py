"""Run a training script, with a limit on the memory that it needs to train.

    accelerate launch --config_file YAML docs/lab/limited.py 900MB train_bert_squad.py [FLAG ...]

Each process stands for a device with so many MB (10^6 bytes). The limit adds to them what Python
and the libraries need, and 40 MB for their threads. It ends after three steps, because saving the
model may take more. Fewer steps are not enough: under DDP with accumulation, the third holds more
than the second. Only Linux has this limit (RLIMIT_DATA).
"""

import ctypes
import importlib
import resource
import runpy
import sys
from pathlib import Path

import pyarrow
from torch.optim.optimizer import register_optimizer_step_post_hook

limit, script = (int(sys.argv[1].removesuffix("MB")) + 40) * 10**6, Path(sys.argv[2])
steps = []


def count_step(*_):
    steps.append(1)
    if len(steps) == 3:
        resource.setrlimit(resource.RLIMIT_DATA, (highest, highest))


sys.path.insert(0, str(script.parent))
importlib.import_module(script.stem)  # what it imports is there before the limit
pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # its own one would reserve 1 GB
for option in (-3, -1):  # give freed memory back at once: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(option, 65536)
used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
_, highest = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (used + limit, highest))
register_optimizer_step_post_hook(count_step)
sys.argv = sys.argv[2:]
runpy.run_path(str(script), run_name="__main__")
