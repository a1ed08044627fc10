"""Ranks that start in 0.1 s: forked from a process that has imported all that the scripts import.

`accelerate launch` takes 8 to 15 s on two cores, and nearly all of that is Python importing torch,
accelerate, transformers and DeepSpeed, in the launcher and again in each rank. A test that is about
training, and not about launching, need not wait for that. What the ranks find is the launcher's
own: accelerate parses the command line and the YAML and makes the environment, and torch's store
connects the ranks. tests/test_launch.py holds both ways to the same numbers.
"""

import fcntl
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch.distributed.run  # noqa: F401  replaced below
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import TCPStore

GRACE = 30  # seconds from SIGTERM to SIGKILL, as torchrun has it
# Several ranks have the machine for themselves: they wait for each other in each step, so beside
# others' ranks a run may take ten times as long. All workers of a pytest have this file.
SESSION = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
TURNS = open(Path(tempfile.gettempdir()) / f"turns-{SESSION}", "w")


def what_the_launcher_starts(words, environment):
    """What `accelerate launch WORDS` starts: the number of ranks (None: one plain process), and
    their environment.
    """
    started = []

    def popen(_, env):
        started.append((None, env))
        return mock.Mock(returncode=0)

    def torchrun(args):
        started.append((int(args.nproc_per_node), dict(os.environ)))

    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("torch.distributed.run.run", torchrun),
        mock.patch("accelerate.commands.launch.subprocess.Popen", popen),
    ):
        launch_command(launch_command_parser().parse_args(words))
    return started[0]


def start_server():
    """The context whose processes are forked from the one that has imported everything, which the
    first call starts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    here = str(Path(__file__).parent)
    own = {"PYTHONPATH": here, "DS_ACCELERATOR": "cpu"}
    with mock.patch.dict(os.environ, own):
        forkserver.ensure_running()
    return context


def become(environment, folder, argv, out, err):
    """In a forked process: be the rank that runs the script `argv[0]`."""
    gc.freeze()  # what was imported stays: else each full collection goes through all of it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name, number, file in (("stdout", 1, out), ("stderr", 2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", closefd=False))
    sys.argv, sys.path[0:0] = list(argv), [str(Path(argv[0]).resolve().parent)]
    runpy.run_path(argv[0], run_name="__main__")


def all_end(ranks, timeout):
    """Wait for all ranks. If one fails, the others are told to end, and get GRACE seconds. Returns
    False if none failed, and some still run after `timeout` seconds.
    """
    deadline, failed = time.monotonic() + timeout, False
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if any(rank.exitcode for rank in ranks):
            if not failed:
                failed, deadline = True, time.monotonic() + GRACE
            for rank in running:  # again: a rank that fails later waits to be ended
                rank.terminate()
        if time.monotonic() > deadline:
            return failed
        wait([rank.sentinel for rank in running], timeout=1)
    return True


def make_worlds(number):
    """The environment variables of each of `number` ranks, and the store at which they meet. The
    caller keeps the store as long as they run. Without a number there is one process, and no store.
    """
    if not number:
        return [{}], None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(number)) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return [common | rank for rank in ranks], store


def run_ranks(words, argv, environment, folder, out, err, timeout):
    """What `accelerate launch WORDS ARGV` does, in `folder`; the ranks append to the files `out`
    and `err`. Returns 0, or 1 if a rank failed; then the others are ended as torchrun ends them.
    Raises TimeoutError.
    """
    number, environment = what_the_launcher_starts([*words, *argv], environment)
    worlds, _store = make_worlds(number)
    context = start_server()
    fcntl.flock(TURNS, fcntl.LOCK_EX if len(worlds) > 1 else fcntl.LOCK_SH)
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
    return int(any(rank.exitcode for rank in ranks))
