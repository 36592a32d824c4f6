"""Kinds of faults, and the required reaction of a run to each."""

import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
import pyarrow.parquet as parquet

from megatron_gptoss.checkpoint.checksums import compare_checksums
from rl_loop.tracking.episode_files import read_row_groups
from rl_loop.tracking.run_directory import RunDirectoryError
from tests.faults.observed_run import Attempt, ObservedRun, small_file_system
from tests.faults.options import Options

PROCESSES = {
    "trainer": "ray::TrainerProcess",
    "worker": "ray::RolloutWorker",
    "checker": "rl_loop.rewards.comparison_pool",
    "sandbox": "rl_loop.sandbox.inside.server",
    "node": "raylet/raylet",
    "control store": "gcs_server",
    "server": "sglang.launch_server",
}
"""Part of the command line of each process. The driver is known by its id."""


class NotPossibleYetError(Exception):
    """A requirement of the fault is missing at this moment."""


@dataclass
class Moment:
    """The run and the options of one injection."""

    run: ObservedRun
    attempt: Attempt
    random: random.Random
    options: Options
    deadline: float = math.inf
    """Monotonic time of the end of the test. No wait exceeds it."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Actions to undo after the fault has recovered or the run has ended."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    inject: Callable[[Moment], str]
    """Injects the fault and returns a description of the affected object.

    Raises NotPossibleYetError, or AssertionError if the product has not noticed the fault.
    """
    must_end: bool = False
    """The run must end. If it continues, it has not noticed the fault."""
    must_recover: bool = False
    """The run must continue, because it has everything that it needs."""
    named_by: str = ""
    """Regular expression that matches the last error of a run that ends because of the fault."""
    kills_driver: bool = False
    """The fault kills the driver, so the run cannot report a reason."""
    ends_at_once: bool = False
    """The run ends within a moment."""
    is_order: bool = False
    """The engine executes the fault. Its process may die together with the effect."""
    comes_back: str = ""
    """Key of PROCESSES. A run has recovered only if all of these processes exist again."""
    is_possible: Callable[[], bool] = lambda: True
    """Returns True if this user can inject the fault on this machine."""


def victim(moment: Moment, name: str) -> psutil.Process:
    """Choose one of the run's processes. Raises NotPossibleYetError if no process has this name."""
    if name == "driver":
        return psutil.Process(moment.attempt.driver.pid)
    found = sorted(moment.attempt.processes(PROCESSES[name]), key=lambda process: process.pid)
    if not found:
        raise NotPossibleYetError(f"no {name} is running")
    return moment.random.choice(found)


# -- killed, stopped, starved, cut, filled --------------------------------------------------------


def kill(name: str) -> Callable[[Moment], str]:
    """Return a function that sends SIGKILL to a process of this name."""

    def inject(moment: Moment) -> str:
        process = victim(moment, name)
        process.kill()
        return f"{name} {process.pid}"

    return inject


def kill_run(moment: Moment) -> str:
    return f"{moment.attempt.kill_everything()} processes"


def stop(moment: Moment) -> str:
    """Send SIGSTOP to a process, and SIGCONT later."""
    name = moment.random.choice(["trainer", "worker", "checker", "sandbox", "driver"])
    return f"{name}, {_stop(victim(moment, name), moment)}"


def _stop(process: psutil.Process, moment: Moment) -> str:
    process.suspend()
    time.sleep(moment.options.stopped_seconds)
    with suppress(psutil.NoSuchProcess):
        process.resume()
    return f"{moment.options.stopped_seconds:g} s"


def starve(moment: Moment) -> str:
    """Run two busy loops for each core."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    time.sleep(moment.options.starved_seconds)
    for loop in loops:
        loop.kill()
        loop.wait()
    return f"{len(loops)} loops, {moment.options.starved_seconds:g} s"


def cut(moment: Moment) -> str:
    """Close all TCP connections of a process from outside."""
    names = ["worker", "trainer", "driver", *["server"] * (moment.run.servers > 0)]
    name = moment.random.choice(names)
    process = victim(moment, name)
    connections = [
        c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED and c.raddr
    ]
    if not connections:
        raise NotPossibleYetError(f"the {name} has no connections")

    for connection in connections:
        close_connection(connection.laddr.port, connection.raddr.port)
    return f"{len(connections)} connections of the {name}"


def close_connection(here: int, there: int) -> None:
    """Close a TCP connection of this machine, known by its two ports."""
    # With both ports given, no other connection is closed.
    ports = f"sport = :{here} and dport = :{there}".split()
    subprocess.run(["ss", "-K", "-tn", *ports], capture_output=True, check=False)


@cache
def can_close_connections() -> bool:
    """Return True if ``ss`` can close connections, which needs root and kernel support."""
    if shutil.which("ss") is None:
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        with client, connection:
            close_connection(client.getsockname()[1], server.getsockname()[1])
            client.settimeout(0.1)
            try:
                client.recv(1)
            except TimeoutError:  # the connection is still open
                return False
            except OSError:
                pass
            return True


def fill(moment: Moment) -> str:
    """Fill the file system of the run."""
    if not os.path.ismount(moment.run.directory):
        raise NotPossibleYetError("the run is on no file system of its own")
    ballast = moment.run.directory / "ballast"
    moment.undo.callback(ballast.unlink, missing_ok=True)
    written = 0
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                written += file.write(b"\0" * 4096)
    except OSError:
        pass
    return f"{written >> 20} MiB"


@cache
def can_mount() -> bool:
    """Return whether this user may mount a file system."""
    with tempfile.TemporaryDirectory() as directory, small_file_system(Path(directory)) as mounted:
        return mounted


# -- servers -------------------------------------------------------------------------------------

SYNC_PATHS = {
    "/pause_generation": 1,
    "/update_weights_from_distributed": 4,
    "/flush_cache": 1,
    "/update_weight_version": 1,
    "/continue_generation": 1,
}
"""Calls of a weight sync, and the number of calls of each path at which a server may exit."""


def server(moment: Moment) -> psutil.Process:
    """Choose a server. Raises NotPossibleYetError while a server is missing.

    Otherwise the effect of an earlier fault would count as an effect of this one.
    """
    running = moment.attempt.processes(PROCESSES["server"])
    if len(running) < moment.run.servers:
        raise NotPossibleYetError(f"{len(running)} of {moment.run.servers} servers are running")
    return victim(moment, "server")


def kill_server(moment: Moment) -> str:
    """Send SIGKILL to a server."""
    process = server(moment)
    process.kill()
    return f"server {process.pid}"


def stop_server(moment: Moment) -> str:
    """Send SIGSTOP to a server, and SIGCONT later."""
    process = server(moment)
    return f"server {process.pid}, {_stop(process, moment)}"


def kill_server_in_sync(moment: Moment) -> str:
    """Make a server exit at one of the calls of a weight sync, without an answer."""
    server(moment)
    path = moment.random.choice(list(SYNC_PATHS))
    number = moment.random.randint(1, SYNC_PATHS[path])
    order("fault", f"die {path}:{number}")(moment)
    return f"at call {number} of {path}"


# -- corrupted ------------------------------------------------------------------------------------


def flip_a_bit(path: Path, chance: random.Random, place: int | None = None) -> str:
    """Flip one bit of a file, and return its place. ``place`` is a byte offset; random if None."""
    content = bytearray(path.read_bytes())
    if place is None:
        place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content[place : place + 1])
    return f"byte {place} of {path.parent.name}/{path.name}"


def corrupt_checkpoint(moment: Moment) -> str:
    """Damage the newest checkpoint and end the run. The resumed run must detect the damage."""
    root = moment.run.files.checkpoints
    if _intact_checkpoints(root) < 2:
        raise NotPossibleYetError("there are no two intact checkpoints")
    moment.attempt.driver.kill()
    moment.attempt.driver.wait()
    # The ranks may still be writing another checkpoint.
    moment.attempt.leftovers(moment.options.limit())
    if _intact_checkpoints(root) < 2:
        raise NotPossibleYetError("the driver was killed while its second checkpoint was written")

    newest = root / (root / "latest").read_text().strip()
    names = sorted(file for file in newest.iterdir() if file.name != "checksums.json")
    return flip_a_bit(moment.random.choice(names), moment.random)


def _intact_checkpoints(root: Path) -> int:
    return sum(compare_checksums(path) is None for path in root.glob("step_??????"))


def corrupt_episodes(moment: Moment) -> str:
    """Damage a column of recorded episodes, check that the reader names it, and restore it.

    Parquet has checksums for the contents of pages, but not for page headers and the footer.
    """
    files = sorted(moment.run.files.episodes.glob("*-*.parquet"))
    if not files:
        raise NotPossibleYetError("no file of episodes is complete")
    path = moment.random.choice(files)
    pristine = path.read_bytes()
    row_group = parquet.read_metadata(path).row_group(0)
    column = row_group.column(moment.random.randrange(row_group.num_columns))
    start = column.dictionary_page_offset or column.data_page_offset
    place = flip_a_bit(path, moment.random, start + column.total_compressed_size - 1)
    try:
        for _ in read_row_groups(path):
            pass
    except RunDirectoryError as error:
        return f"{place}: {error}"
    finally:
        # A resumed run may have deleted the file.
        if path.exists():
            path.write_bytes(pristine)
    raise AssertionError(f"{place}: it was read as if nothing had happened")


# -- false answers --------------------------------------------------------------------------------


def order(name: str, content: str = "") -> Callable[[Moment], str]:
    """Return a function that makes an engine (engine.py) or a server execute an order."""

    def inject(moment: Moment) -> str:
        path = moment.run.orders / name
        path.write_text(content)
        deadline = min(time.monotonic() + moment.options.limit(), moment.deadline)
        while path.exists():
            if moment.attempt.has_ended or time.monotonic() > deadline:
                withdraw(path)
            else:
                time.sleep(0.1)
        return name

    return inject


def withdraw(path: Path) -> None:
    """Delete an unexecuted order. Raises NotPossibleYetError unless it has just been executed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    raise NotPossibleYetError("nobody has carried out the order")


KINDS: dict[str, Kind] = {
    "kill_trainer": Kind(kill("trainer"), must_end=True, named_by="trainer rank 0"),
    "kill_worker": Kind(kill("worker"), must_recover=True),
    "kill_checker": Kind(kill("checker"), must_recover=True),
    "kill_sandbox": Kind(kill("sandbox"), must_recover=True),
    "kill_driver": Kind(kill("driver"), must_end=True, kills_driver=True, ends_at_once=True),
    "kill_node": Kind(kill("node"), must_end=True, named_by="node", ends_at_once=True),
    "kill_control_store": Kind(
        kill("control store"), must_end=True, named_by="control store", ends_at_once=True
    ),
    "kill_run": Kind(kill_run, must_end=True, kills_driver=True, ends_at_once=True),
    "stop": Kind(stop),
    "starve": Kind(starve, must_recover=True),
    "cut": Kind(cut, is_possible=can_close_connections),
    "fill": Kind(fill, is_possible=can_mount, named_by="[Nn]o space|disk|space"),
    "corrupt_checkpoint": Kind(
        corrupt_checkpoint, must_end=True, kills_driver=True, ends_at_once=True
    ),
    "corrupt_episodes": Kind(corrupt_episodes, must_recover=True),
    "corrupt_bucket": Kind(
        order("bucket"),
        is_order=True,
        must_end=True,
        named_by="canary prompt|but its content differs in",
    ),
    "answer_nan": Kind(order("nan"), is_order=True, must_recover=True),
    "answer_version": Kind(
        order("version"),
        is_order=True,
        must_end=True,
        named_by=r"engine reports weight version \d+",
    ),
    "answer_twice": Kind(order("twice"), is_order=True, must_recover=True),
}
"""Kinds for every run, with any engine."""

SERVER_KINDS: dict[str, Kind] = {
    "kill_server": Kind(kill_server, must_recover=True, comes_back="server"),
    "kill_server_in_sync": Kind(kill_server_in_sync, must_recover=True, comes_back="server"),
    "stop_server": Kind(stop_server, must_recover=True, comes_back="server"),
    "cut_server": Kind(order("cut"), is_order=True, must_recover=True),
    "keep_bucket": Kind(
        order("keep"), is_order=True, must_end=True, named_by="but its content differs in"
    ),
    "answer_old": Kind(order("old"), is_order=True, must_recover=True),
    "answer_routes": Kind(
        order("routes"), is_order=True, must_end=True, named_by="routed experts of layer"
    ),
}
"""Kinds for runs with servers."""


def possible_kinds(names: tuple[str, ...] = (), servers: bool = False) -> list[str]:
    """Return the kinds, or those of ``names``, that this user can inject on this machine.

    ``servers`` adds the kinds for runs with servers.
    """
    kinds = KINDS | SERVER_KINDS if servers else KINDS
    return [name for name in names or tuple(kinds) if kinds[name].is_possible()]
