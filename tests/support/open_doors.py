"""Lists the listening sockets of a run, and attacks each as another user and from the network.

``findings`` runs this file as a program twice: as a user without permissions, and in a network
namespace from which this machine is one hop away. Neither has the run's token. Each program prints
its successes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import list_children, read_command, read_environment

ATTACKER = 65_534
"""User id of ``nobody``."""
SECONDS = 3.0
"""Time limit of one attempt, in seconds."""
PEER = "10.231.{}.{}"
"""Addresses of the machine and of the attacker in the network namespace."""

STORE_GREETING = bytes([0]) + struct.pack("=I", 0x3C85F7CE)
"""First message of a client of torch's TCPStore (``torch/csrc/distributed/c10d/TCPStoreBackend.hpp``)."""
STORE_GET, STORE_PING, STORE_LIST_KEYS = 3, 13, 17
"""Requests of that protocol."""

PATHS = (
    # Ray: dashboard, its agents, metrics
    "/api/jobs/",
    "/api/version",
    "/nodes?view=summary",
    "/api/actors",
    "/logs",
    "/metrics",
    # SGLang and OpenAI
    "/server_info",
    "/model_info",
    "/get_server_info",
    "/v1/models",
    "/v1/loads",
    # the viewer
    "/",
    "/api/runs",
)
PROGRAM_PATHS = ("/api/job_agent/jobs/", "/api/jobs/")
"""Paths at which Ray's dashboard and its agents accept the command of a job."""
POSTS = {
    "/get_or_create_runtime_env": b"",
    "/update_weights_from_disk": b'{"model_path": "/"}',
    "/release_memory_occupation": b"{}",
    "/flush_cache": b"{}",
    "/generate": b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}',
    "/v1/chat/completions": b'{"model": "x", "messages": [{"role": "user", "content": "x"}]}',
}
CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeInfoGcsService/GetClusterId",
    "InternalKVGcsService/InternalKVKeys",
    "InternalKVGcsService/GetInternalConfig",
    "JobInfoGcsService/GetAllJobInfo",
    "ActorInfoGcsService/GetAllActorInfo",
    "NodeManagerService/GetNodeStats",
    "NodeManagerService/GetSystemConfig",
    "NodeManagerService/RequestWorkerLease",
    "CoreWorkerService/GetCoreWorkerStats",
    "CoreWorkerService/PushTask",
    "ObjectManagerService/Pull",
    "ObjectManagerService/Push",
    "ReporterService/GetTraceback",
    "LogService/ListLogs",
    "RayletDriver/KVList",
)
"""Methods of Ray's services that read the state of a run or execute code."""
CLOSED = ("UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""gRPC status codes that reveal nothing. UNAVAILABLE: the port has no gRPC service."""


@dataclass(frozen=True)
class Door:
    """A listening socket of a run's process."""

    process: str
    kind: str
    """tcp, udp or unix."""
    host: str
    """Address, or path of a Unix socket. A leading null byte marks an abstract name."""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        return self.host.removeprefix("::ffff:").startswith("127.") or self.host == "::1"

    @property
    def is_everywhere(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    def __str__(self) -> str:
        return f"{self.process} {self.kind} {self.host!r} {self.port}"


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    parent = psutil.Process(pid)
    return [parent, *list_children(parent, recursive=True)]


def doors(processes: Iterable[psutil.Process]) -> list[Door]:
    """Return all listening sockets of the processes."""
    found = set()
    unix = _listening_unix_sockets()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            name = process.name()
            for connection in process.net_connections("inet"):
                is_tcp = connection.type == socket.SOCK_STREAM
                if is_tcp and connection.status != psutil.CONN_LISTEN:
                    continue
                if not is_tcp and connection.raddr:
                    continue
                kind = "tcp" if is_tcp else "udp"
                found.add(Door(name, kind, connection.laddr.ip, connection.laddr.port))
            for inode in _socket_inodes(process.pid) & unix.keys():
                found.add(Door(name, "unix", unix[inode]))
    return sorted(found, key=str)


def _listening_unix_sockets() -> dict[int, str]:
    """Return the names of this machine's listening Unix sockets by inode."""
    names = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        accepts_connections = int(fields[3], 16) & 0x10000
        if accepts_connections and len(fields) == 8:
            name = fields[7]
            names[int(fields[6])] = f"\0{name[1:]}" if name.startswith("@") else name
    return names


def _socket_inodes(pid: int) -> set[int]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return inodes


def missing_parts() -> str | None:
    """Return the reason why attacks cannot run on this machine, or None."""
    if os.getuid() != 0:
        return "another user and a network namespace need root"
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    try:
        with _network_namespace():
            return None
    except subprocess.CalledProcessError as error:
        return f"no network namespace: {error.stderr.strip()}"


def findings(found: list[Door], loot: Path) -> list[str]:
    """Return the successes of attackers, one sentence each.

    Args:
        found: sockets of a run.
        loot: directory that all users can write to. An attacker's program that the run executes
            leaves a file there.
    """
    loot.mkdir(mode=0o777, parents=True)
    loot.chmod(0o777)
    described = json.dumps([asdict(door) for door in found])
    command = [sys.executable, __file__, str(loot)]
    # Both attackers mostly wait for sockets that do not respond, so they run at the same time.
    with _network_namespace() as (inside, machine), ThreadPoolExecutor(2) as pool:
        commands = [[*command, "user"], [*inside, *command, machine]]
        attacks = pool.map(lambda attack: _run(attack, described), commands)
        results = [success for successes in attacks for success in successes]
    results += [f"a program of an attacker ran: {path.name}" for path in loot.iterdir()]
    return sorted(set(results))


def _run(command: list[str], described: str) -> list[str]:
    paths = os.pathsep.join(str(Path(__file__).parents[2] / part) for part in (".", "kernels"))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "SGLANG", "GPTOSS"))
    }
    done = subprocess.run(
        command,
        input=described,
        env={**environment, "PYTHONPATH": paths, "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [str(line) for line in json.loads(done.stdout.splitlines()[-1])]


@contextmanager
def _network_namespace() -> Iterator[tuple[list[str], str]]:
    """Create a network namespace that reaches this machine.

    Yields the command that runs a program in it, and the machine's address.
    """
    number = os.getpid() % 250 + 2
    name, outer, inner = (f"{part}{number}" for part in ("gptoss", "gpto", "gpti"))
    machine, attacker = (PEER.format(number, host) for host in (1, 2))
    inside = ["ip", "netns", "exec", name]
    commands = [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name],
        ["ip", "addr", "add", f"{machine}/30", "dev", outer],
        ["ip", "link", "set", outer, "up"],
        [*inside, "ip", "addr", "add", f"{attacker}/30", "dev", inner],
        [*inside, "ip", "link", "set", inner, "up"],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True)
        yield inside, machine
    finally:
        subprocess.run(["ip", "link", "del", outer], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def find_places(
    secret: str, tree: list[psutil.Process], folders: list[Path], beside: Path
) -> list[str]:
    """Return readable places of a secret: command lines, environments and files.

    Args:
        secret: such as a token.
        tree: processes.
        folders: searched for files.
        beside: file that may contain the secret.
    """
    places = []
    for process in tree:
        if secret in read_command(process):
            places.append(f"command line of {process.name()}")
        if secret in str(read_environment(process)):
            places.append(f"environment of {process.name()}")
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file() and file != beside and secret.encode() in file.read_bytes():
                places.append(str(file))
    return places


# -- the attacker ---------------------------------------------------------------------------------


def main() -> None:
    """Attack every socket of the list on standard input, and print the successes."""
    # Import everything before the permissions are dropped, because an attacker may be unable to
    # read the interpreter's directory.
    import grpc

    unused_port = "http://127.0.0.1:9/"
    _status(unused_port)
    _connects("127.0.0.1", 9)

    loot, place = Path(sys.argv[1]), sys.argv[2]
    os.setgroups([])
    os.setresgid(ATTACKER, ATTACKER, ATTACKER)
    os.setresuid(ATTACKER, ATTACKER, ATTACKER)

    found = [Door(**fields) for fields in json.load(sys.stdin)]
    # Most of the time is spent waiting for sockets that do not respond.
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda door: _try_door(door, place, loot, grpc), found))
    prefix = "as another user" if place == "user" else "from the network"
    print(json.dumps([f"{prefix}: {success}" for result in results for success in result]))


def _try_door(door: Door, place: str, loot: Path, grpc: Any) -> list[str]:
    """Return the successes of an attack on a socket.

    Args:
        door: socket.
        place: "user" for another user of the machine, else the machine's address as seen from the
            network.
        loot: directory in which an attacker's program leaves a file.
        grpc: the module.
    """
    is_user = place == "user"
    if door.kind == "unix":
        return _try_unix(door) if is_user else []
    if door.kind == "udp":
        return [f"{door}: UDP is open"] if is_user else []

    # From outside every port is attacked, whatever address the socket is bound to.
    host = place
    if is_user:
        host = "127.0.0.1" if door.is_everywhere else door.host.removeprefix("::ffff:")
    if not _connects(host, door.port):
        return []
    successes = []
    if not is_user and door.is_loopback:
        successes.append(f"{door}: reached from the network")
    # At the same time, because a silent socket takes the time limit of every protocol.
    with ThreadPoolExecutor(3) as pool:
        attacks = [
            pool.submit(_try_http, door, host, loot),
            pool.submit(_try_grpc, door, host, grpc),
            pool.submit(_try_store, door, host),
        ]
        return successes + [success for attack in attacks for success in attack.result()]


def _try_unix(door: Door) -> list[str]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SECONDS)
        try:
            client.connect(door.host)
        except OSError:
            return []
    return [f"{door}: another user connects"]


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except OSError:
        return False
    return True


def _try_http(door: Door, host: str, loot: Path) -> list[str]:
    origin = f"http://{host}:{door.port}"
    with ThreadPoolExecutor(2) as pool:
        if list(pool.map(_status, [f"{origin}/health", f"{origin}/"])) == [None, None]:
            return []  # no HTTP

    successes = []
    for path in PATHS:
        if _status(origin + path) == 200:
            successes.append(f"{door}: GET {path} is answered")
    for path in PROGRAM_PATHS:
        job = json.dumps({"entrypoint": f"touch {loot}/http-{door.port}"}).encode()
        if _status(origin + path, job) == 200:
            successes.append(f"{door}: POST {path} takes a program")
    for path, body in POSTS.items():
        if _status(origin + path, body) == 200:
            successes.append(f"{door}: POST {path} is answered")
    return successes


def _status(url: str, body: bytes | None = None) -> int | None:
    """Return the status of a response; None if it is not HTTP."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except Exception:
        return None


def _try_grpc(door: Door, host: str, grpc: Any) -> list[str]:
    successes = []
    with grpc.insecure_channel(f"{host}:{door.port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=2)
        except grpc.FutureTimeoutError:
            return []
        for name in CALLS:
            call = channel.unary_unary(f"/ray.rpc.{name}", lambda _: b"", lambda answer: answer)
            try:
                call(None, timeout=SECONDS)
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name
            if code not in CLOSED:
                successes.append(f"{door}: {name} is answered ({code})")
    return successes


def _try_store(door: Door, host: str) -> list[str]:
    """Try to read the store in which the processes of a group meet."""
    if not speaks_like_a_store(host, door.port):
        return []

    with socket.create_connection((host, door.port), timeout=SECONDS) as client:
        client.sendall(STORE_GREETING + bytes([STORE_LIST_KEYS]))
        keys = [_receive_string(client) for _ in range(_receive_integer(client))]
        readable = []
        for key in keys:
            client.sendall(bytes([STORE_GET]) + struct.pack("=Q", len(key)) + key)
            if _is_readable(_receive_string(client)):
                readable.append(key.decode())
    return [f"{door}: the store of a process group shows {key}" for key in readable]


def _receive_integer(client: socket.socket) -> int:
    number: int = struct.unpack("=Q", _receive(client, 8))[0]
    return number


def _receive_string(client: socket.socket) -> bytes:
    return _receive(client, _receive_integer(client))


def _receive(client: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = client.recv(size - len(received))
        if not part:
            raise ConnectionError("the store closed the connection")
        received += part
    return received


def _is_readable(value: bytes) -> bool:
    """Return True for text, and for structures such as addresses, which have zeros."""
    if value.isdigit():
        return False  # a counter
    return value.isascii() or bytes(4) in value


def speaks_like_a_store(host: str, port: int) -> bool:
    """Return True if a port answers the first messages of a client of torch's TCPStore."""
    ping = bytes([STORE_PING]) + struct.pack("=I", 0x1234)
    with suppress(OSError), socket.create_connection((host, port), timeout=SECONDS) as client:
        client.settimeout(SECONDS)
        client.sendall(STORE_GREETING + ping)
        return client.recv(64) == struct.pack("=I", 0x1234)
    return False


if __name__ == "__main__":
    main()
