"""Importing this gives the tests, and all that they start, an environment of their own.

What a user's shell, a Slurm job or a launcher has set would change what the tests find, or where
they write. It is imported before the libraries that read the environment when they are imported.
"""

import os
import sys
import tempfile
from pathlib import Path

# PYTHONUNBUFFERED would write a line in pieces, between which another rank writes its own.
FOREIGN = """ACCELERATE_ FSDP_ HF_ IPYTHON JUPYTER_ LOCAL_ MAKE MASTER_ MFLAGS MPL
    PROCESSES_PER_NODE PYTHONUNBUFFERED RANK SBATCH_ SLURM_ SWEEP_ TORCH WORLD_SIZE XDG_""".split()
# A socket's path has 107 characters at most, so with a long TMPDIR all lies below /tmp.
if len(tempfile.gettempdir()) > 40:
    tempfile.tempdir = "/tmp"
# For caches and temporary files, and as HOME.
SCRATCH = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

for name in set(os.environ) - {"SLURM_TESTS"}:
    if name.startswith(tuple(FOREIGN)):
        del os.environ[name]
os.environ |= dict.fromkeys(("HOME", "HF_HOME", "TMPDIR"), SCRATCH.name)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{SCRATCH.name}/inductor"
# The tests compare numbers of CPU processes, also where there is a GPU; test_gpu.py does not.
VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A process has one thread: ranks and the workers of pytest share the cores.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# No test needs a network, and no proxy finds the servers that tests start.
os.environ |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
# Nothing is written into the checkout.
os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
# Jobs and shells run the tests' own python; Slurm's daemons and `ip` are not on everybody's PATH.
places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin:/sbin"]
os.environ["PATH"] = ":".join(places)
