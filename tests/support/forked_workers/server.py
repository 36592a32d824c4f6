"""Imports the modules of workers, and forks a worker per connection of ``ask_for_fork.py``.

    python server.py LISTENING_DESCRIPTOR

A fork continues as the client's program, usually Ray's worker or a process of pytest-xdist, with the client's
arguments, environment, directory and standard streams. It is killed if the client ends first, because Ray then wants
the worker to end. A byte from the client is the number of a signal for the fork.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ask_for_fork import MARKS, MARKS_BYTES

IMPORTED = (
    "aiohttp.web",
    "megatron_gptoss.checkpoint.writer",
    "megatron_gptoss.trainer",
    "converters.gathering",
    "rl_loop.algorithms.objectives",
    "rl_loop.config.rollout",
    "rl_loop.harmony.vocabulary",
    "rl_loop.process_memory",
    "rl_loop.rollout.agent",
    "rl_loop.tasks.codec",
    "rl_loop.engines.embedded.engine",
    "rl_loop.gateway.server",
    "rl_loop.agents.process",
    "rl_loop.cluster.ray_session",
    "rl_loop.rollout.group_stream",
    "rl_loop.trainer.rank_start",
    # Packages that Ray imports.
    "google.protobuf.json_format",
    "jsonschema",
    "msgpack",
    "requests",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    # Packages that the collection of tests imports.
    "agents",
    "mcp.server.mcpserver",
    "reasoning_gym",
)
"""Slow imports of trainer ranks, rollout workers, local SGLang servers and test processes.

None of them imports Ray, which would read the settings in this process's environment. Every worker
has its own settings.
"""


def main() -> None:
    # Remove the directory of this program, whose modules are not for workers.
    sys.path.remove(str(Path(__file__).parent))
    gc.disable()  # it takes a fifth of the time of imports
    with warnings.catch_warnings(action="ignore"):  # missing packages that need a GPU
        for module in IMPORTED:
            importlib.import_module(module)
    # Most workers use this encoding and a tiny vocabulary, nearly always from the same file.
    vocabulary = sys.modules["rl_loop.harmony.vocabulary"]
    vocabulary.harmony_encoding()
    vocabulary.choose_tokens("")
    # Forks then neither search the imported objects nor copy their memory pages.
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.modules["rl_loop.process_memory"].collect_rarely()
    if "ray" in sys.modules:
        sys.exit(f"one of {IMPORTED} imports Ray")
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit(f"one of {IMPORTED} has started a thread, which a fork would not have")

    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(listener: socket.socket) -> NoReturn:
    """Fork workers and report their exit status, until this process is killed."""
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ, accept)
    while True:
        for key, _ in events.select():
            key.data(events, key.fileobj)


def accept(events: selectors.BaseSelector, listener: socket.socket) -> None:
    client, _ = listener.accept()
    message, streams, _, _ = socket.recv_fds(client, 1 << 20, maxfds=3)
    while not message.endswith(b"\n"):
        more = client.recv(1 << 20)
        if not more:  # the client has been killed
            client.close()
            for stream in streams:
                os.close(stream)
            return
        message += more

    worker = os.fork()
    if worker == 0:
        run_worker(events, client, streams, json.loads(message))
    for stream in streams:
        os.close(stream)

    end_of_worker = os.pidfd_open(worker)

    def obey(events: selectors.BaseSelector, client: socket.socket) -> None:
        if client.fileno() == -1:  # the end was just reported
            return
        numbers = b""
        with suppress(ConnectionResetError):
            numbers = client.recv(16)
        for number in numbers:
            os.kill(worker, number)
        if not numbers:
            events.unregister(client)
            os.kill(worker, signal.SIGKILL)

    def report(events: selectors.BaseSelector, end_of_worker: int) -> None:
        _, status = os.waitpid(worker, 0)
        if client in events.get_map():
            events.unregister(client)
            with suppress(OSError):  # the client may end at the same moment
                client.send(b"%d" % os.waitstatus_to_exitcode(status))
        client.close()
        events.unregister(end_of_worker)
        os.close(end_of_worker)

    # The socket also becomes readable when the client ends.
    events.register(client, selectors.EVENT_READ, obey)
    events.register(end_of_worker, selectors.EVENT_READ, report)


def run_worker(
    events: selectors.BaseSelector,
    client: socket.socket,
    streams: list[int],
    request: dict[str, Any],
) -> NoReturn:
    """Become the worker, in a process that was just forked."""
    status = 1
    try:
        for key in list(events.get_map().values()):
            os.close(key.fd)
        events.close()
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)

        show_marks(request["environment"])
        become_environment(request["environment"])
        os.chdir(request["directory"])
        # Same as the interpreter's start.
        folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
        program, *_ = sys.argv = request["arguments"]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def show_marks(environment: dict[str, str]) -> None:
    """Write marks of the tests where other processes read the environment of this one.

    The kernel shows the environment at the start of the server, also for its forks. Tests find the
    processes of a command by variables that end in _RUN or _TERMINAL.
    """
    marks = [f"{k}={v}" for k, v in environment.items() if k.endswith(("_RUN", "_TERMINAL"))]
    room = len(MARKS) + 1 + MARKS_BYTES
    text = "\0".join(marks).encode()
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    value = libc.getenv(MARKS.encode())
    if len(text) > room or value is None:
        sys.exit(f"{MARKS} has no room for {marks}")
    ctypes.memmove(value - len(MARKS) - 1, text.ljust(room, b"\0"), room)


def become_environment(environment: dict[str, str]) -> None:
    """Change only variables that differ.

    Ray writes a worker's title over the memory that the kernel shows for a process, which it finds
    by the variables at the start of the process.
    """
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


if __name__ == "__main__":
    main()
