"""Ranks that start in 0.1 s: forked from a process that has imported all that the scripts import.

`accelerate launch` takes 8 to 15 s on two cores. It spends nearly all of that importing torch,
accelerate, transformers and DeepSpeed, in the launcher and again in each rank. A test of training
need not wait for that: see tools/watching/launching.py. tests/test_launch.py checks that both ways
give the same numbers.
"""

import fcntl
import multiprocessing
import os
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

from watching.launching import LIBRARIES, become, make_worlds, what_the_launcher_starts

# All that a script would import.
IMPORTS = ["evaluate", "setuptools", "sklearn.datasets", "sklearn.model_selection"]
IMPORTS += ["torchvision.datasets", "watching.launching", *LIBRARIES]
GRACE = 30  # seconds from SIGTERM to SIGKILL, as torchrun has it
# A run of several ranks has the machine to itself. Its ranks wait for each other in each step, so
# beside another run it may take ten times as long. All workers of one pytest lock this file.
SESSION = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
TURNS = open(Path(tempfile.gettempdir()) / f"turns-{SESSION}", "w")


def start_server():
    """The context whose processes are forked from the process that has imported everything. The
    first call starts that process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    own = {"PYTHONPATH": str(Path(__file__).parent.parent / "tools"), "DS_ACCELERATOR": "cpu"}
    with mock.patch.dict(os.environ, own):
        forkserver.ensure_running()
    return context


def all_end(ranks, timeout):
    """Wait for all ranks. If one fails, the others are told to end, and get GRACE seconds. Returns
    False if none failed, and some still run after `timeout` seconds.
    """
    deadline, failed = time.monotonic() + timeout, False
    while any(rank.is_alive() for rank in ranks):
        if not failed and any(rank.exitcode for rank in ranks):
            failed, deadline = True, time.monotonic() + GRACE
        if time.monotonic() > deadline:
            return failed
        running = [rank for rank in ranks if rank.is_alive()]
        for rank in running if failed else []:  # again: some may not have been listening yet
            rank.terminate()
        wait([rank.sentinel for rank in running], timeout=1)
    return True


def run_ranks(words, argv, environment, folder, out, err, timeout, alone=False):
    """What `accelerate launch WORDS ARGV` does, in `folder`; the ranks append to the files `out`
    and `err`. Returns 0, or 1 if a rank failed; then the others are ended as torchrun ends them. Of
    one process it returns the exit code; `alone` says that it starts ranks itself. Raises
    TimeoutError.
    """
    number, environment = what_the_launcher_starts([*words, *argv], environment)
    worlds, _store = make_worlds(number)
    context = start_server()
    fcntl.flock(TURNS, fcntl.LOCK_EX if alone or len(worlds) > 1 else fcntl.LOCK_SH)
    ranks = [
        context.Process(target=become, args=(environment | world, folder, argv, out, err))
        for world in worlds
    ]
    try:
        for rank in ranks:
            rank.start()
        if not all_end(ranks, timeout):
            printed = Path(out).read_text() + Path(err).read_text()
            raise TimeoutError(f"{argv} ran for more than {timeout} s: {printed}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        fcntl.flock(TURNS, fcntl.LOCK_UN)
    return int(any(rank.exitcode for rank in ranks)) if number else ranks[0].exitcode
