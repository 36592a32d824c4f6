"""A real Slurm on one machine: controller, accounting and four node daemons on loopback.

It runs without systemd and cgroups. It needs root and the packages of ``install.sh``. All its files
are in one directory, and it ends with ``stop``. Several clusters can run concurrently.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

HERE = Path(__file__).parent
GRACE_SECONDS = 40
"""Time from the notice of a preemption to its end, in seconds."""
NODE_SHAPE = "CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:h200:8"

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock
DbdHost={machine}
DbdAddr=127.0.0.1
DbdPort={database_port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mysql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
LogFile={root}/log/slurmdbd.log
PidFile={root}/run/slurmdbd.pid
"""

SLURM_CONF = """\
ClusterName=fake
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.sock,cred_expire=2
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1,defer_batch=0,batch_sched_delay=0
MessageTimeout=10
SlurmctldTimeout=30
SlurmdTimeout=120
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
KillWait=5
OverTimeLimit=0
CompleteWait=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={database_port}
AccountingStoragePass={root}/run/munge.sock
AccountingStorageEnforce=associations
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
PlugStackConfig={root}/etc/plugstack.conf
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=1-00:00:00 State=UP
PartitionName=batch Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_seconds}
PartitionName=high PriorityTier=10 PreemptMode=OFF
"""


def missing_parts() -> str:
    """Return the reason why this machine cannot run the cluster, or ""."""
    if os.getuid() != 0:
        return "needs root"
    absent = [
        name
        for name in ("slurmctld", "slurmd", "slurmdbd", "mariadbd", "munged")
        if shutil.which(name) is None
    ]
    return f"not installed: {', '.join(absent)} (tests/slurm/install.sh)" if absent else ""


class FakeCluster:
    """A cluster of nodes n1, n2, ... with 16 CPUs, 8 GPUs of type h200 and a loopback address each.

    Partitions: batch (default, preemptible with GRACE_SECONDS of notice), and high, which preempts
    it. Account: team.
    """

    def __init__(self, root: Path, nodes: int = 4) -> None:
        self.root = root
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self.env = {"SLURM_CONF": str(root / "etc/slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._base = _free_port_block(10 + nodes)

    def start(self) -> None:
        for name in ("etc", "run", "log", "state", "spool", "dev"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        run = self.root / "run"
        log = self.root / "log"
        key = self.root / "etc/munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self._write_configuration()
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={run}/munge.sock",
            f"--pid-file={run}/munged.pid",
            f"--log-file={log}/munged.log",
            f"--seed-file={run}/munge.seed",
        )
        self._start_accounting()
        self._daemon("slurmctld", "-D")
        for name in self.nodes:
            self.start_node(name)

        idle = str(len(self.nodes))
        self._until(lambda: self._count_idle() == idle, "nodes do not become idle")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._daemon("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> int:
        """Kill the daemon of a node and all processes on it, like a loss of power.

        Returns:
            Number of killed processes.
        """
        killed = 0
        while processes := self._processes_on(name):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed += 1
            time.sleep(0.1)
        return killed

    def _processes_on(self, name: str) -> list[psutil.Process]:
        """Return the daemon of a node, its tasks, and Slurm's daemons between them."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                environment = process.environ()
                if environment.get("SLURM_CONF") != self.env["SLURM_CONF"]:
                    continue
                if process.cmdline()[:4] == ["slurmd", "-D", "-N", name]:
                    found.append(process)
                elif environment.get("SLURMD_NODENAME") == name:
                    parents = process.parents()
                    found += [process, *(p for p in parents if p.name() == "slurmstepd")]
        return found

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    def run(self, *command: str, timeout: float = 30, check: bool = True) -> str:
        """Run a Slurm command and return its output."""
        result = subprocess.run(
            command,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and result.returncode:
            message = result.stderr.strip() or result.stdout.strip()
            raise RuntimeError(f"{' '.join(command)}: {message}")
        return result.stdout.strip()

    def skip_requeue_delay(self) -> None:
        """Start requeued jobs immediately. They would otherwise wait for 2 minutes."""
        # A node rejects a job that restarts before its old credential has expired (cred_expire,
        # 2 s).
        time.sleep(3)
        for job in self.run("squeue", "-h", "-t", "PD", "-o", "%i").split():
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def _count_idle(self) -> str:
        return self.run("sinfo", "-h", "-p", "batch", "-t", "idle", "-o", "%D", check=False)

    def _daemon(self, *command: str) -> None:
        with open(self.root / "log" / f"{command[0]}-{len(self._daemons)}.out", "wb") as output:
            daemon = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _until(self, done: Callable[[], object], failure: str, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{failure}; see {self.root / 'log'}")
            time.sleep(0.1)

    def _start_accounting(self) -> None:
        self._start_database()
        self._daemon("slurmdbd", "-D")
        self._until(
            lambda: "Cluster" in self.run("sacctmgr", "show", "cluster", check=False),
            "slurmdbd does not start",
        )
        self.run("sacctmgr", "-i", "add", "cluster", "fake")
        self.run("sacctmgr", "-i", "add", "account", "team", "cluster=fake")
        self.run("sacctmgr", "-i", "add", "user", "root", "account=team")

    def _start_database(self) -> None:
        data = self.root / "db"
        run = self.root / "run"
        install = [
            "mariadb-install-db",
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--user=root",
            f"--datadir={data}",
        ]
        subprocess.run(install, check=True, capture_output=True, timeout=60)
        self._daemon(
            "mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={data}",
            f"--socket={run}/mysql.sock",
            "--bind-address=127.0.0.1",
            f"--port={self._base + 2}",
            f"--pid-file={run}/mariadbd.pid",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=16M",
            "--innodb-lock-wait-timeout=900",
            "--performance-schema=OFF",
            "--skip-log-bin",
            "--max-connections=20",
        )

        def run_sql(statement: str) -> bool:
            client = [
                "mariadb",
                "--no-defaults",
                f"--socket={run}/mysql.sock",
                "-uroot",
                "-e",
                statement,
            ]
            return subprocess.run(client, capture_output=True, timeout=10).returncode == 0

        self._until(lambda: run_sql("select 1"), "the database does not start")
        run_sql(
            "create database slurm; "
            "create user slurm@'127.0.0.1' identified by 'slurm'; "
            "create user slurm@localhost identified by 'slurm'; "
            "grant all on slurm.* to slurm@'127.0.0.1'; "
            "grant all on slurm.* to slurm@localhost"
        )

    def _write_configuration(self) -> None:
        """Write all files that the daemons read, and build the plugin."""
        self._write_nodes_files()
        values = {
            "root": self.root,
            "machine": socket.gethostname(),
            "port": self._base,
            "database_port": self._base + 1,
            "mysql_port": self._base + 2,
            "grace_seconds": GRACE_SECONDS,
            "nodes": "\n".join(self._node_lines()),
        }
        (self.root / "etc/slurm.conf").write_text(SLURM_CONF.format(**values))

        # slurmdbd rejects a file with a password that other users can read.
        database = self.root / "etc/slurmdbd.conf"
        database.write_text(SLURMDBD_CONF.format(**values))
        database.chmod(0o600)

    def _write_nodes_files(self) -> None:
        """Create the nodes' GPU files and host names, and the plugin that assigns them."""
        etc = self.root / "etc"
        for i in range(8):
            (self.root / f"dev/nvidia{i}").touch()
        gres = [
            f"NodeName={name} Name=gpu Type=h200 File={self.root}/dev/nvidia[0-7]\n"
            for name in self.nodes
        ]
        (etc / "gres.conf").write_text("".join(gres))
        (etc / "cgroup.conf").write_text(
            "CgroupPlugin=autodetect\nConstrainCores=no\nConstrainRAMSpace=no\n",
        )

        addresses = "".join(f"127.0.0.{11 + i} {name}\n" for i, name in enumerate(self.nodes))
        (etc / "hosts").write_text(Path("/etc/hosts").read_text() + addresses)
        plugin = self.root / "fakepyxis.so"
        source = str(HERE / "fakepyxis.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(plugin), source], check=True)
        (etc / "plugstack.conf").write_text(f"required {plugin} hosts={etc}/hosts\n")

    def _node_lines(self) -> list[str]:
        """Return the lines of slurm.conf that describe the nodes, all of them on this machine."""
        machine = socket.gethostname()
        lines = []
        for i, name in enumerate(self.nodes):
            address = f"NodeHostname={machine} NodeAddr=127.0.0.1 Port={self._base + 10 + i}"
            lines.append(f"NodeName={name} {address} {NODE_SHAPE} State=UNKNOWN")
        return lines


def _free_port_block(size: int) -> int:
    """Return the first of ``size`` consecutive free ports."""
    for base in range(16_800, 30_000, 100):
        try:
            for port in range(base, base + size):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
    raise RuntimeError("no free ports for a Slurm cluster")
