"""A real Slurm cluster of two nodes on one Linux machine, to learn on and to test with.

    sudo .venv/bin/python sbatch/laptop.py                 a shell on its login node
    sudo .venv/bin/python sbatch/laptop.py COMMAND ...     a command there, such as `sinfo`

The cluster ends with the shell or the command, and its jobs end with it: `sbatch --wait` waits for
a job. While it runs, break it and mend it from another terminal:

    sudo .venv/bin/python sbatch/laptop.py off n2          power node n2 off, without a word
    sudo .venv/bin/python sbatch/laptop.py on n2           power it on again
    sudo .venv/bin/python sbatch/laptop.py cut             cut the link between n1 and n2
    sudo .venv/bin/python sbatch/laptop.py mend            mend it

It needs root, and Debian's Slurm, which `make slurm` installs. The shell, the jobs and their files
belong to the user who typed sudo. The nodes have GPUs only in name, so the scripts train on CPU
processes. The nodes share the disk of this machine, but not its network: what a script downloads
has to be there before (`--prepare_data_only`). The cluster leaves nothing behind.
"""

# A node is a process with namespaces of its own (network, host name, processes, IPC, mounts), as a
# container has them. Nodes have addresses on a bridge in the namespace of the login node, which
# runs Slurm's controller. So their links can be cut, and the machine's own network stays as it is.

import argparse
import contextlib
import os
import pwd
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "laptop-cluster"  # of the cluster that is running
CONTROL = FOLDER / "control"  # its socket, which only root may write to
NODES = ["n1", "n2"]
NODE = "NodeName={} NodeAddr={} CPUs=64 RealMemory=500000 TmpDisk=100000 Gres=gpu:a100:4\n"
ADDRESSES = {"ctl": "10.99.0.1", "n1": "10.99.0.11", "n2": "10.99.0.12"}
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
NAMESPACES = ["--net", "--uts", "--ipc", "--pid", "--mount"]
# slurmd runs scripts in its spool, and /tmp may be noexec. Real GPUs are hidden, as both nodes
# would take the same one. A host ends when nobody holds its stdin any more.
POWER_ON = """mount -t proc proc /proc && mount -t tmpfs tmpfs /run &&
    mount -t tmpfs tmpfs /dev/shm && mount --bind {folder}/hosts /etc/hosts && hostname {name} &&
    ip link set lo up && mount --bind {folder}/spool {folder}/spool &&
    mount -o remount,bind,exec {folder}/spool &&
    for gpu in /dev/nvidia* /dev/dxg; do
        [ ! -c $gpu ] || mount --bind /dev/null $gpu || exit 1
    done && exec 3<&0 && echo ready && {{ cat <&3 & wait $!; }}
"""
GREETING = """A Slurm cluster of two nodes, n1 and n2. This is its login node; `exit` ends it. Try:
  sbatch sbatch/simple.sh
  sinfo; squeue; tail -F slurm-{job}.out
In another terminal: sudo .venv/bin/python sbatch/laptop.py off n2     (also: on n2, cut, mend)"""
# For bash; other shells show the host's name, ctl.
BASHRC = "[ ! -f ~/.bashrc ] || . ~/.bashrc\nPS1='[login node] \\w \\$ '\n"


class ClusterError(RuntimeError):
    """The cluster does not do what it was told; the text says why."""


def call(enter, command, check=True, timeout=60, env=None):
    """What a command prints on a host; `check` says whether it has to succeed."""
    words = [*enter, *map(str, command)]
    done = subprocess.run(words, text=True, capture_output=True, timeout=timeout, env=env)
    if check and done.returncode:
        raise ClusterError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def what_is_missing():
    """None, or the sentence that says why there can be no cluster here. Nothing is installed."""
    if os.geteuid() != 0:
        return "a cluster on one machine needs root: type sudo before the command"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "ip", "bridge"))):
        return "Slurm is not installed: `make slurm` does it"
    if subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True).returncode:
        return "this machine forbids namespaces, as many containers do: use a real or virtual one"
    return None


class Cluster:
    """Nodes n1 and n2, and the login node ctl. `folder` holds configuration, state and logs; `stop`
    leaves the logs. Its jobs are numbered from `first_job` on.
    """

    def __init__(self, folder, first_job=1):
        self.folder, self.nodes, self.hosts = Path(folder), NODES, {}
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        for i in range(4):  # a GPU has to be a device; any will do
            (self.folder / f"gpu{i}").symlink_to("/dev/null")
        conf = Path(__file__).with_suffix(".conf").read_text()
        conf = conf.format(folder=folder, first_job=first_job)
        conf += "".join(NODE.format(node, ADDRESSES[node]) for node in self.nodes)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=a100 File={self.folder}/gpu[0-3]\n")
        known = {"localhost": "127.0.0.1"} | ADDRESSES
        lines = [f"{address} {name}\n" for name, address in known.items()]
        (self.folder / "hosts").write_text("".join(lines))

    def start(self):
        try:
            self.power_on("ctl")
            self.switch("ip link add br0 type bridge")
            self.switch(f"ip addr add {ADDRESSES['ctl']}/24 dev br0")
            self.switch("ip link set br0 up")
            self.on("ctl", "slurmctld")
            self.tidy(60)
        except BaseException:
            self.stop()
            raise

    def stop(self):
        for name in list(self.hosts):
            self.power_off(name)

    def power_on(self, name):
        """A host without a network yet: a shell that waits, and reaps what others leave behind."""
        words = ["unshare", *NAMESPACES, "--fork", "--kill-child", "bash", "-c"]
        words.append(POWER_ON.format(folder=self.folder, name=name))
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(self.folder / f"{name}.log", "a") as log:
            host = subprocess.Popen(words, stderr=log, start_new_session=True, **how)
        if host.stdout.readline() != "ready\n":
            host.kill()
            raise ClusterError(f"{name} did not start")
        host.init = int(Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text())
        self.hosts[name] = host

    def power_off(self, name):
        """With a namespace's first process, the kernel ends all others in it."""
        host = self.hosts.pop(name)
        os.kill(host.init, signal.SIGKILL)
        host.wait()

    def boot(self, node):
        """Power a node on, plug its cable in, and start its slurmd."""
        self.power_on(node)
        self.switch(f"ip link add v-{node} type veth peer name eth0 netns {self.hosts[node].init}")
        self.switch(f"ip link set v-{node} master br0 up")
        self.on(node, "ip", "addr", "add", f"{ADDRESSES[node]}/24", "dev", "eth0")
        self.on(node, "ip", "link", "set", "eth0", "up")
        # A connection fails after 13 s of silence, and not after a quarter of an hour.
        self.on(node, "sh", "-c", "echo 5 >/proc/sys/net/ipv4/tcp_retries2")
        self.on(node, "slurmd", "-N", node)

    def crash(self, node):
        """Power a node off without a word: its port first, or connections would be closed."""
        self.switch(f"bridge link set dev v-{node} state 0")
        self.power_off(node)
        self.switch(f"ip link del v-{node}")

    def cut_link(self, cut=True):
        """Cut the link between the nodes, or mend it. Both reach the controller: no fault to it."""
        for node in self.nodes:
            self.switch(f"bridge link set dev v-{node} isolated {'on' if cut else 'off'}")

    def switch(self, command):
        """Run a command in the network of the controller, where the bridge is."""
        enter = ["nsenter", "--target", str(self.hosts["ctl"].init), "--net"]
        call(enter, command.split())

    def entrance(self, host, cwd):
        """The words that run a command on a host, in a folder."""
        return ["nsenter", "--target", str(self.hosts[host].init), *NAMESPACES, f"--wd={cwd}", "--"]

    def environment(self, changes):
        return os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | changes

    def on(self, host, *command, env=None, cwd="/", check=True, timeout=60):
        """What a command prints on a host; `check` says whether it has to succeed."""
        env = self.environment(env or {})
        return call(self.entrance(host, cwd), command, check, timeout, env)

    def submit(self, *words, cwd, env=None):
        """`sbatch` with these words, in a folder; returns the job's id."""
        return self.on("ctl", "sbatch", "--parsable", *words, cwd=cwd, env=env).strip()

    def state(self, job):
        """A job's state, such as PENDING, RUNNING or COMPLETED."""
        return re.search(r"JobState=(\w+)", self.on("ctl", "scontrol", "show", "job", job))[1]

    def tidy(self, timeout=300):
        """Power on what is off, mend the link, cancel all jobs, wait until the nodes are idle."""
        for node in set(self.nodes) - set(self.hosts):
            self.boot(node)
        self.cut_link(False)
        self.on("ctl", "scancel", "--user=root")
        self.wait_until(
            lambda: self.on("ctl", "sinfo", "-hNo", "%T").split() == ["idle"] * 2, timeout
        )

    def wait(self, job, timeout=600):
        """Wait until a job is over; returns its state."""
        self.wait_until(lambda: self.state(job) in OVER, timeout)
        return self.state(job)

    @staticmethod
    def wait_until(true, timeout):
        """Ask until it is true. After `timeout` seconds, fail."""
        end = time.monotonic() + timeout
        while not true():
            if time.monotonic() > end:
                raise ClusterError(f"waited {timeout} s in vain")
            time.sleep(0.2)


# -------- The command line


def fail(problem):
    sys.exit(f"error: {' '.join(str(problem).split())}")


def first_job():
    """A number that no job of an earlier cluster had here. Otherwise, a run would find the folder
    of another one, and go on there.
    """
    names = [path.name for names in ("slurm-*.out", "runs/*-*-*") for path in Path().glob(names)]
    found = [re.search(r"-(\d{1,5})(\.out)?$", name) for name in names]
    return max((int(number[1]) for number in found if number), default=0) + 1


def as_caller():
    """The words that run a command as the user who typed sudo, and that user's environment."""
    number = int(os.environ.get("SUDO_UID", 0))
    if number == 0:
        return [], {}
    user = pwd.getpwuid(number)
    names = {"USER": user.pw_name, "LOGNAME": user.pw_name}
    words = ["setpriv", f"--reuid={number}", f"--regid={user.pw_gid}", "--init-groups", "--"]
    return words, names | {"HOME": user.pw_dir, "SHELL": user.pw_shell}


def log_in(cluster, command):
    """Start a command, or else a shell, on the login node, in this folder and on this terminal."""
    words, changes = as_caller()
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    env = cluster.environment(threads | changes)
    if not command:
        (cluster.folder / "bashrc").write_text(BASHRC)
        command = [env.get("SHELL") or "bash"]
        if Path(command[0]).name == "bash":
            command += ["--rcfile", str(cluster.folder / "bashrc")]
    return subprocess.Popen([*cluster.entrance("ctl", os.getcwd()), *words, *command], env=env)


def obey(cluster, verb, node=""):
    """Do to the cluster what another terminal asks for; returns what to print there."""
    try:
        if node and (node in cluster.hosts) == (verb == "on"):
            return f"error: {node} is {verb} already"
        if node:
            change = cluster.boot if verb == "on" else cluster.crash
            change(node)
            return f"{node} is {verb}"
        cluster.cut_link(verb == "cut")
        return f"the link between the nodes is {'cut' if verb == 'cut' else 'whole'}"
    except (ClusterError, subprocess.SubprocessError) as problem:
        return f"error: {problem}"


def serve(cluster, server, child):
    """Obey other terminals until the command ends; returns its exit code."""
    ended = os.pidfd_open(child.pid)
    while child.poll() is None:
        ready, _, _ = select.select([ended, server], [], [])
        if server in ready:
            with server.accept()[0] as connection:
                words = connection.makefile().readline().split()
                if words:
                    answer = obey(cluster, *words).encode()
                    with contextlib.suppress(ConnectionError):  # Nobody waits for it any more.
                        connection.sendall(answer)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def ask(*words):
    """What the running cluster answers, or None if no cluster is running."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(CONTROL))
            connection.sendall(f"{' '.join(words)}\n".encode())
            return connection.makefile().read()
    except (FileNotFoundError, ConnectionError):
        return None


def claim_folder():
    """Make the folder of the cluster, and the socket in it. There is one cluster at a time."""
    if ask() is not None:
        fail("a cluster is running already: type in its shell, or end it first")
    if FOLDER.exists():  # of a cluster that was killed, or did not start
        shutil.rmtree(FOLDER)
    FOLDER.mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(CONTROL))
    server.listen()
    return server


def run(command):
    """Start the cluster, and end it with the command, whose exit code is returned."""
    server = claim_folder()
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    for number in signals:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    job, child, failed = first_job(), None, False
    cluster = Cluster(FOLDER, job)
    try:
        cluster.start()
        if not command and sys.stdin.isatty():
            print(GREETING.format(job=job), flush=True)
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the command by itself.
        child = log_in(cluster, command)
        return serve(cluster, server, child)
    except (ClusterError, subprocess.SubprocessError, OSError) as problem:
        failed = True
        fail(f"{problem}; logs: {FOLDER}/*.log")
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()
        if child:
            child.wait()
        if not failed:
            shutil.rmtree(FOLDER)


def main():
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(usage="laptop.py [COMMAND ...]", **how)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: a shell")
    command = parser.parse_args().command
    os.umask(0o022)  # Who typed sudo has to read the configuration, and not to write to the socket.
    if command[:1] not in (["off"], ["on"], ["cut"], ["mend"]):
        problem = what_is_missing()
        sys.exit(fail(problem) if problem else run(command))
    verb, *nodes = command
    if os.geteuid() != 0:
        fail(what_is_missing())
    if len(nodes) != (verb in ("off", "on")):
        fail("type off NODE, on NODE, cut or mend")
    if not set(nodes) <= set(NODES):
        fail(f"no node {nodes[0]}: there are {' and '.join(NODES)}")
    answer = ask(*command)
    if answer is None:
        fail("no cluster is running: start one in another terminal")
    sys.exit(answer) if answer.startswith("error: ") else print(answer)


if __name__ == "__main__":
    main()
