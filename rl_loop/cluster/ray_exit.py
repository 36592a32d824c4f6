"""Ends a run with a message when a part of its local Ray dies."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from rl_loop.cluster.processes import kill_tree


@dataclass(frozen=True)
class RayProcesses:
    """Process ids of the local Ray's parts that every run needs."""

    raylet: int
    control_store: int


@contextmanager
def end_with_message_on_exit(processes: RayProcesses | None) -> Iterator[None]:
    """End this process and its Ray, with a message, if one of ``processes`` exits within the block.

    When the raylet has died, Ray's C++ code ends the driver within milliseconds. No Python handler
    runs, and the user would see only a dump of the raylet's state. Therefore another process prints
    the message (``exit_monitor``). When the control store has died, a run would continue for a
    minute, unable to start actors, and then end in the same way.

    Args:
        processes: processes to watch; None watches nothing.
    """
    if processes is None:
        yield
        return

    raylet = os.pidfd_open(processes.raylet)
    control_store = os.pidfd_open(processes.control_store)
    block_ends, end_block = os.pipe()
    notice = _start_monitor(raylet, describe_exit("node", "raylet", processes.raylet))

    def watch() -> None:
        ended, _, _ = select.select([raylet, control_store, block_ends], [], [])
        if block_ends in ended:
            return
        if raylet in ended:
            # The monitor must have printed before this process exits.
            notice.wait()
        else:
            # Its message is about the raylet, which is killed below.
            notice.kill()
            sys.stderr.write(
                describe_exit("control store", "gcs_server", processes.control_store) + "\n"
            )
            sys.stderr.flush()
            kill_tree(processes.raylet)
        # sys.exit would end this thread only.
        os._exit(1)

    watching = Thread(target=watch, name="ray's processes", daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(end_block)
        watching.join()
        # The program must see the end of its input before Ray stops.
        notice.communicate()
        for descriptor in (raylet, control_store, block_ends):
            os.close(descriptor)


def _start_monitor(process: int, message: str) -> subprocess.Popen[bytes]:
    """Start the program that writes ``message`` when a process exits.

    Args:
        process: pidfd of the process.
        message: line to write.

    Returns:
        The program. It exits silently when its standard input closes.
    """
    program = Path(__file__).with_name("exit_monitor.py")
    # -S and -E skip site packages and Python's variables, for a fast start.
    command = [sys.executable, "-S", "-E", str(program), str(process), message]
    # In a separate session, so that signals of a terminal do not reach it.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[process], start_new_session=True
    )


def describe_exit(part: str, program: str, process: int) -> str:
    """Return the last message to the user after a part of Ray has died."""
    return (
        f"gptoss: Ray's {part} on this machine ({program}, process {process}) has died, which "
        "ended the run. The kernel may have killed it because memory was short (see dmesg). "
        "Continue with --resume"
    )


def local_processes() -> RayProcesses | None:
    """Return the processes of the local Ray; None if Ray's internals do not name them."""
    import ray

    node: Any = getattr(ray._private.worker, "_global_node", None)
    parts = node.all_processes if node is not None else {}
    if not parts.get("raylet") or not parts.get("gcs_server"):
        return None
    return RayProcesses(parts["raylet"][0].process.pid, parts["gcs_server"][0].process.pid)
