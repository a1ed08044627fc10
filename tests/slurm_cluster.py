"""A real Slurm cluster on one machine, for the tests of sbatch/. Needs root, and Slurm, which `make slurm` installs.

A node is a process that holds network, host name, process, IPC and mount namespaces of its own, as a container would:
nodes n1, n2, ... have addresses on a bridge in the controller's namespace, so their links can be cut and they can be
powered off. The disk is shared, like a cluster's home. GPUs are names that Slurm hands out, with nothing behind them.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

CONF = """
ClusterName=test
SlurmctldHost=ctl(10.99.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# How long a requeued job is held back; the default is two minutes, the least 5 s.
AuthInfo=cred_expire=5
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Nothing that needs cgroups, systemd or a database.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# The nodes are believed to be as large as their lines below say.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# A small cluster can be quick: look for work at once, and notice a lost node after 10 s and not after 5 minutes.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdTimeout=10
MessageTimeout=5
KillWait=10
ReturnToService=2
PartitionName=main Nodes=ALL Default=YES DefaultTime=10 MaxTime=INFINITE State=UP
"""


def what_is_missing():
    """None, or the sentence that says why there can be no cluster here. Nothing is installed."""
    if os.geteuid() != 0:
        return "a Slurm cluster of network namespaces needs root"
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "ip", "bridge"))):
        return "Slurm is not installed: `make slurm` does it; SLURM_TESTS=required makes this a failure"
    if subprocess.run(["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "true"]).returncode:
        return "this machine does not allow network namespaces"
    return None


class Cluster:
    """Nodes n1 ... nN with `gpus` GPUs each. `folder` holds configuration, state and logs; `stop` leaves the logs."""

    def __init__(self, folder, nodes=2, gpus=4, cpus=64):
        self.folder, self.nodes, self.hosts = Path(folder), [f"n{i + 1}" for i in range(nodes)], {}
        self.addresses = {"ctl": "10.99.0.1"} | {node: f"10.99.0.{11 + i}" for i, node in enumerate(self.nodes)}
        for name in ("state", "spool", "gpus"):
            (self.folder / name).mkdir(parents=True)
        lines = [f"NodeName={node} NodeAddr={self.addresses[node]} CPUs={cpus} RealMemory=500000 TmpDisk=100000 "
                 f"Gres=gpu:a100:{gpus} State=UNKNOWN" for node in self.nodes]
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder) + "\n".join(lines) + "\n")
        for i in range(gpus):  # a GPU has to be a device; any will do
            (self.folder / "gpus" / f"nvidia{i}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu Type=a100 File={self.folder}/gpus/nvidia[0-{gpus - 1}]\n")
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in self.addresses.items()))

    def start(self):
        try:
            self.power_on("ctl")
            self.switch("ip", "link", "add", "br0", "type", "bridge")
            self.switch("ip", "addr", "add", f"{self.addresses['ctl']}/24", "dev", "br0")
            self.switch("ip", "link", "set", "br0", "up")
            self.on("ctl", "slurmctld")
            self.tidy()
        except BaseException:
            self.stop()
            raise

    def stop(self):
        """End everything: with a namespace's first process, the kernel ends all others in it."""
        for host in self.hosts.values():
            os.kill(host.init, signal.SIGKILL)
            host.wait()
        self.hosts = {}

    def power_on(self, name):
        """A host without a network yet: a shell as process 1 that waits, and reaps what others leave behind."""
        setup = f"""mount -t proc proc /proc && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm &&
            mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && ip link set lo up &&
            mount --bind {self.folder}/spool {self.folder}/spool && # slurmd runs scripts there, /tmp may be noexec
            mount -o remount,bind,exec {self.folder}/spool && echo ready &&
            while :; do sleep 3600 & wait $!; done"""
        own = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
        with open(self.folder / f"{name}.log", "a") as log:
            host = self.hosts[name] = subprocess.Popen([*own, "bash", "-c", setup], stdin=subprocess.DEVNULL,
                                                       stdout=subprocess.PIPE, stderr=log, text=True,
                                                       start_new_session=True)
        assert host.stdout.readline() == "ready\n", f"{name} did not start: {self.folder}/{name}.log"
        host.init = int(Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text())

    def boot(self, node):
        """Power a node on, plug its cable in, and start its slurmd."""
        self.power_on(node)
        self.switch("ip", "link", "add", f"v-{node}", "type", "veth", "peer", "name", "eth0",
                    "netns", str(self.hosts[node].init))
        self.switch("ip", "link", "set", f"v-{node}", "master", "br0", "up")
        self.on(node, "ip", "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
        self.on(node, "ip", "link", "set", "eth0", "up")
        self.on(node, "slurmd", "-N", node)

    def crash(self, node):
        """Power a node off without a word: its port first, or the kernel would close the connections."""
        self.switch("bridge", "link", "set", "dev", f"v-{node}", "state", "0")
        host = self.hosts.pop(node)
        os.kill(host.init, signal.SIGKILL)
        host.wait()
        self.switch("ip", "link", "del", f"v-{node}")

    def cut_link(self, cut=True):
        """Cut the link between the nodes, or mend it. All of them still reach the controller: Slurm sees no fault."""
        for node in self.nodes:
            self.switch("bridge", "link", "set", "dev", f"v-{node}", "isolated", "on" if cut else "off")

    def switch(self, *command):
        """Run a command in the network of the controller, where the bridge is."""
        enter = ["nsenter", "--target", str(self.hosts["ctl"].init), "--net"]
        subprocess.run([*enter, *command], check=True)

    def on(self, host, *command, env=None, cwd="/", check=True, timeout=60):
        """Run a command on a host and return what it prints; `check` says whether it has to succeed."""
        enter = ["nsenter", "--target", str(self.hosts[host].init), "--net", "--uts", "--ipc", "--pid", "--mount"]
        done = subprocess.run([*enter, f"--wd={cwd}", "--", *map(str, command)], text=True, capture_output=True,
                              timeout=timeout, env={**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf",
                                                    **(env or {})})
        assert done.returncode == 0 or not check, f"{command} on {host}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, *words, cwd, env=None):
        """`sbatch` with these words, in a folder; returns the job's id."""
        return self.on("ctl", "sbatch", "--parsable", *words, cwd=cwd, env=env).strip()

    def state(self, job):
        """A job's state, such as PENDING, RUNNING or COMPLETED."""
        fields = self.on("ctl", "scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)["JobState"]

    def tidy(self):
        """Power on what is off, mend the link, cancel all jobs, and wait until the nodes are idle."""
        for node in set(self.nodes) - set(self.hosts):
            self.boot(node)
        self.cut_link(False)
        self.on("ctl", "scancel", "--user=root")
        self.wait_until(lambda: self.on("ctl", "sinfo", "-hNo", "%T").split() == ["idle"] * len(self.nodes), 60)

    def wait(self, job, timeout=120):
        """Wait until a job is over; returns its state."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
        self.wait_until(lambda: self.state(job) in over, timeout)
        return self.state(job)

    @staticmethod
    def wait_until(true, timeout):
        """Ask until it is true, or fail after so many seconds."""
        end = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < end, f"not so after {timeout} s"
            time.sleep(0.2)
