"""What `accelerate launch` would start, and how to start it as forks of a process that has imported
what a script imports. A fork takes 0.1 s a rank; a launch takes 8 to 15 s on two cores.

As in a launch, accelerate parses the command line and the YAML and makes the environment, and
torch's store connects the ranks.
"""

import collections
import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import psutil
import torch.distributed.run  # noqa: F401  replaced below
import tqdm
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import TCPStore

TOOLS = Path(__file__).resolve().parents[1]
# What scripts import, so that forks of a process that has imported it need not.
LIBRARIES = ["accelerate.utils.deepspeed", "deepspeed.module_inject.auto_ep_layer"]
LIBRARIES += ["deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.zero.muon.muon_optimizer"]
LIBRARIES += ["deepspeed.runtime.superoffload.superoffload_stage3", "torch._dynamo"]
LIBRARIES += ["torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"]
LIBRARIES += ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
LIBRARIES += ["torch.distributed.optim", "torch.utils.tensorboard"]
LIBRARIES += ["transformers.models.auto.tokenization_auto"]
LIBRARIES += ["transformers.models.bert.modeling_bert"]
GRACE = 5  # seconds that the other ranks get when one has failed
LARGE = 1000  # Folders with as many entries have data, and a link to them has to do.

tqdm.tqdm.get_lock()  # one for all ranks, or each would leave one behind


def import_libraries(text):
    """Import those of LIBRARIES that are installed, if they are of torch, or if a text (scripts and
    YAMLs) imports or configures them.
    """
    for name in LIBRARIES:
        package = name.partition(".")[0]
        used = rf"^(?:import {package}|from {package}|{package}_config)"
        if package == "torch" or re.search(used, text, re.MULTILINE):
            with contextlib.suppress(Exception):  # A script that needs it tells what is wrong.
                importlib.import_module(name)


def leave_room_for(script):
    """Let the script import modules of its own, also those with the name of a folder in tools/."""
    folders = {path.name for path in TOOLS.iterdir()}
    for name in list(sys.modules):
        if name.partition(".")[0] in folders:
            del sys.modules[name]
    others = [path for path in sys.path if Path(path).resolve() != TOOLS]
    sys.path[:] = [str(Path(script).resolve().parent), *others]


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


def make_worlds(number):
    """The environment variables of each of `number` ranks, and the store that connects them. The
    caller keeps the store while they run. Without a number there is one process, and no store.
    """
    if not number:
        return [{}], None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sizes, ranks = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), []
    common = dict.fromkeys(sizes, str(number)) | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    common |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    for rank in range(number):
        ranks.append(common | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)))
    return ranks, store


def make_place(folder, script):
    """A working directory for a run, and the script in it: both are in `folder`, where links lead
    to all files that relative paths can reach. What the script writes is apart from other runs.
    """
    root = Path(folder)
    script = Path(script).absolute()
    for top in dict.fromkeys((Path.cwd(), script.parent)):
        parts = top.parts[1:]
        for depth in range(len(parts)):
            above = list_folder(Path(top.anchor, *parts[:depth]))
            link(above if len(above) < LARGE else [], Path(root, *parts[:depth]))
        folders, left = collections.deque([top]), 5 * LARGE
        while folders:  # the upper ones first, as most scripts write there
            path = folders.popleft()
            entries = list_folder(path)
            foreign = any(one.name == "pyvenv.cfg" for one in entries)
            foreign |= path.name == ".git" or path.name.endswith(("_cache", "__pycache__"))
            apart = len(entries) < min(LARGE, left) and not foreign and path not in root.parents
            if path == top or apart:
                link(entries, Path(root, *path.parts[1:]))
                left -= len(entries)
                folders += [Path(one) for one in entries if one.is_dir(follow_symlinks=False)]
    own = Path(root, *script.parts[1:])
    own.unlink()
    shutil.copyfile(script, own)  # Its resolved path is in `folder`, too.
    return Path(root, *Path.cwd().parts[1:]), own


def list_folder(path):
    """What is in a folder: nothing, if this user may not read it."""
    with contextlib.suppress(OSError):
        return list(os.scandir(path))
    return []


def link(entries, target):
    """Make a folder with links to these entries of other folders, but those that it has."""
    if target.is_symlink():
        target.unlink()
    target.mkdir(parents=True, exist_ok=True)
    here = {*os.listdir(target)}
    for one in entries:
        if one.name not in here:
            os.symlink(one.path, target / one.name)


def remove_links(folder):
    """Leave only what the script wrote: other programs, such as pytest, would follow the links."""
    for where, folders, files in os.walk(folder, topdown=False):
        for path in (os.path.join(where, name) for name in (*folders, *files)):
            target = os.readlink(path) if os.path.islink(path) else ""
            if os.path.isabs(target) and not Path(target).is_relative_to(folder):
                os.unlink(path)  # The script has made the others.
        with contextlib.suppress(OSError):  # It is not empty.
            os.rmdir(where)


def become(environment, folder, argv, out, err, run=None, gate=None):
    """In a forked process: be the rank that runs the script `argv[0]`, or calls `run(argv[0])`."""
    if gate:
        gate.wait()
    gc.freeze()  # or each full collection goes through all that was imported
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for name, number, file in (("stdout", 1, out), ("stderr", 2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
        setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8", closefd=False))
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    if run:
        run(argv[0])
    else:
        runpy.run_path(argv[0], run_name="__main__")


def run_ranks(words, argv, place, folder, target, patience, gpus):
    """Run the script `argv[0]` in a working directory `place`, as `accelerate launch WORDS ARGV`
    would, or if `words` is a number, as torchrun would with that many ranks. They call
    `target(argv[0])`. Their output goes to N.out and N.err in `folder`, and they touch N.alive when
    they make progress. Returns the number of ranks, and those that hang: there was no progress for
    `patience` seconds, and faulthandler wrote where they are. Ranks that use GPUs are not forked.
    """
    number, env = words, dict(os.environ)
    if not isinstance(words, int):
        number, env = what_the_launcher_starts([*words, *argv], env)
    worlds, _store = make_worlds(number)
    context = multiprocessing.get_context("spawn" if gpus else "fork")
    # The store's thread, which greets the first rank, may hold a lock of the C library, and a
    # process forked at this moment would wait for it forever. So all begin when all are forked.
    ranks, gate = [], context.Event()
    try:
        for rank, world in enumerate(worlds):
            output = folder / f"{rank}.out", folder / f"{rank}.err"
            what = (env | world, place, argv, *output, target, gate)
            ranks.append(context.Process(target=become, args=what))
            ranks[-1].start()
        gate.set()
        hung = wait_for(ranks, folder, patience, gpus)
        for rank in hung:
            os.kill(ranks[rank].pid, signal.SIGUSR2)
        if hung:
            time.sleep(0.5)  # while faulthandler writes
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    return len(ranks), hung


def wait_for(ranks, folder, patience, gpus):
    """Wait until all end. Returns those that still run, but make no progress."""
    before, since, failed = None, time.monotonic(), None
    while True:
        running = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        if not running:
            return []
        wait([ranks[number].sentinel for number in running], timeout=0.5)
        now = time.monotonic()
        if any(rank.exitcode for rank in ranks):
            failed = failed or now
            if now - failed > GRACE:
                return []
        life = [file.stat().st_mtime_ns for file in folder.glob("*.alive")]
        for number in [] if gpus else running:  # On a GPU, waiting takes CPU time, too.
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(ranks[number].pid).cpu_times()
                life.append((used.user + used.system) // 2)
        if life != before:
            before, since = life, now
        elif now - since > patience:
            return running
