"""Importing this gives the tests, and all that they start, an environment of their own; nothing else does.

What a user's shell, a Slurm job or a launcher has set would change what the tests find, or where they write. It is
imported before any library that reads the environment when it is imported itself.
"""

import os
import sys
import tempfile
from pathlib import Path

FOREIGN = """ACCELERATE_ FSDP_ HF_ IPYTHON JUPYTER_ LOCAL_ MASTER_ MPL PROCESSES_PER_NODE RANK SBATCH_ SLURM_ SWEEP_
    TORCH WORLD_SIZE XDG_""".split()
SCRATCH = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # for caches and temporary files, and as HOME

for name in set(os.environ) - {"SLURM_TESTS"}:
    if name.startswith(tuple(FOREIGN)):
        del os.environ[name]
os.environ |= dict.fromkeys(("HOME", "HF_HOME", "TMPDIR"), SCRATCH.name) | {
    "CUDA_VISIBLE_DEVICES": "",  # the tests compare numbers of CPU processes, also where there is a GPU
    "HF_HUB_OFFLINE": "1",  # no test needs a network,
    "NO_PROXY": "127.0.0.1",  # and no proxy finds the servers that tests start
    "no_proxy": "127.0.0.1",
    "PYTHONDONTWRITEBYTECODE": "1",  # nothing is written into the checkout
    # Jobs and shells run the tests' own python; Slurm's daemons and `ip` are not on everybody's PATH.
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin",
}
