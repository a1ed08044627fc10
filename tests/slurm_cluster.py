"""A real Slurm cluster on one machine. It needs root, and Slurm, which `make slurm` installs.

A node is a process with namespaces of its own (network, host name, processes, IPC, mounts), as a
container has them. Nodes n1, n2, ... have addresses on a bridge in the controller's namespace, so
their links can be cut, and they can be powered off. The disk is shared, like a cluster's home. GPUs
are names that Slurm hands out, with nothing behind them.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

NODE = "NodeName={} NodeAddr={} CPUs=64 RealMemory=500000 TmpDisk=100000 Gres=gpu:a100:4\n"
ADDRESSES = {"ctl": "10.99.0.1", "n1": "10.99.0.11", "n2": "10.99.0.12"}
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
NAMESPACES = ["--net", "--uts", "--ipc", "--pid", "--mount"]
# slurmd runs scripts in its spool, and /tmp may be noexec.
POWER_ON = """mount -t proc proc /proc && mount -t tmpfs tmpfs /run &&
    mount -t tmpfs tmpfs /dev/shm && mount --bind {folder}/hosts /etc/hosts && hostname {name} &&
    ip link set lo up && mount --bind {folder}/spool {folder}/spool &&
    mount -o remount,bind,exec {folder}/spool && echo ready &&
    while :; do sleep 3600 & wait $!; done
"""


def what_is_missing():
    """None, or the sentence that says why there can be no cluster here. Nothing is installed."""
    if os.geteuid() != 0:
        return "a Slurm cluster of network namespaces needs root"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "ip", "bridge"))):
        return "Slurm is not installed: `make slurm` does it; SLURM_TESTS=required: a failure"
    if subprocess.run(["unshare", *NAMESPACES, "--fork", "true"]).returncode:
        return "this machine does not allow network namespaces"
    return None


class Cluster:
    """Nodes n1 and n2. `folder` holds configuration, state and logs; `stop` leaves the logs."""

    def __init__(self, folder):
        self.folder, self.nodes, self.hosts = Path(folder), ["n1", "n2"], {}
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        for i in range(4):  # a GPU has to be a device; any will do
            (self.folder / f"gpu{i}").symlink_to("/dev/null")
        conf = (Path(__file__).parent / "data" / "slurm.conf").read_text().format(folder=folder)
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
            self.tidy()
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
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        with open(self.folder / f"{name}.log", "a") as log:
            host = subprocess.Popen(words, stderr=log, start_new_session=True, **how)
        self.hosts[name] = host
        assert host.stdout.readline() == "ready\n", f"{name} did not start: {log.name}"
        host.init = int(Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text())

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
        subprocess.run([*enter, *command.split()], check=True)

    def on(self, host, *command, env=None, cwd="/", check=True, timeout=60):
        """What a command prints on a host; `check` says whether it has to succeed."""
        enter = ["nsenter", "--target", str(self.hosts[host].init), *NAMESPACES, f"--wd={cwd}"]
        words = [*enter, "--", *map(str, command)]
        env = os.environ | {"SLURM_CONF": f"{self.folder}/slurm.conf"} | (env or {})
        done = subprocess.run(words, text=True, capture_output=True, timeout=timeout, env=env)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, *words, cwd, env=None):
        """`sbatch` with these words, in a folder; returns the job's id."""
        return self.on("ctl", "sbatch", "--parsable", *words, cwd=cwd, env=env).strip()

    def state(self, job):
        """A job's state, such as PENDING, RUNNING or COMPLETED."""
        return re.search(r"JobState=(\w+)", self.on("ctl", "scontrol", "show", "job", job))[1]

    def tidy(self):
        """Power on what is off, mend the link, cancel all jobs, wait until the nodes are idle."""
        for node in set(self.nodes) - set(self.hosts):
            self.boot(node)
        self.cut_link(False)
        self.on("ctl", "scancel", "--user=root")
        self.wait_until(lambda: self.on("ctl", "sinfo", "-hNo", "%T").split() == ["idle"] * 2, 300)

    def wait(self, job, timeout=600):
        """Wait until a job is over; returns its state."""
        self.wait_until(lambda: self.state(job) in OVER, timeout)
        return self.state(job)

    @staticmethod
    def wait_until(true, timeout):
        """Ask until it is true. After `timeout` seconds, fail."""
        end = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < end, f"not so after {timeout} s"
            time.sleep(0.2)
