"""Runs ``gptoss`` in forks of a process that has imported its modules once, which takes a second of processor time.

    python -m tests.support.launch.forked_command [MODULE...]

Reads a request in a line, forks, and answers in a line when the fork has ended. The output of the command is in files.
MODULE: imported before the forks, in addition to IMPORTED.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[3]
HEAVY = {"torch", "ray", "megatron"}
IMPORTED = ("launch.cli", "launch.jobs", "launch.submit", "rl_loop.run")
"""Modules that most commands import. They import none of HEAVY."""


@dataclass(frozen=True)
class Request:
    arguments: list[str]
    environment: dict[str, str]
    stdout: str
    stderr: str
    heavy: str


@dataclass(frozen=True)
class Ended:
    """Result of a command."""

    returncode: int
    seconds: float
    """Processor time in seconds, without imports of IMPORTED."""
    stdout: str
    stderr: str
    heavy: list[str]
    """Modules of HEAVY that the command imported."""


class ForkedCommand:
    """Runs commands in sequence."""

    def __init__(self, directory: Path, modules: Sequence[str] = ()) -> None:
        """Start the server.

        Args:
            directory: an empty directory for the output of commands.
            modules: modules that the server imports. ``Ended.heavy`` then contains their imports.
        """
        self._directory = directory
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.launch.forked_command", *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> Ended:
        """Run ``gptoss`` with these arguments and additional environment variables."""
        out, err, heavy = (self._directory / name for name in ("stdout", "stderr", "heavy"))
        request = Request(
            [*arguments], {**os.environ, **environment}, str(out), str(err), str(heavy)
        )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(request)) + "\n")
        self._server.stdin.flush()
        status, seconds = json.loads(self._server.stdout.readline())
        imported = heavy.read_text().split()
        return Ended(status, seconds, out.read_text(), err.read_text(), imported)

    def close(self) -> None:
        self._server.communicate()


@contextmanager
def forked_command(directory: Path, modules: Sequence[str] = ()) -> Iterator[ForkedCommand]:
    command = ForkedCommand(directory, modules)
    try:
        yield command
    finally:
        command.close()


def serve() -> None:
    gc.disable()
    for module in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(module)
    # Forks then neither search the imported objects nor copy their memory pages.
    gc.collect()
    gc.freeze()
    gc.enable()

    for line in sys.stdin:
        request = Request(**json.loads(line))
        process = os.fork()
        if process == 0:
            run_command(request)
        _, status, usage = os.wait4(process, 0)
        answer = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
        print(json.dumps(answer), flush=True)


def run_command(request: Request) -> NoReturn:
    """Run the command in a process that was just forked."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, path in ((1, request.stdout), (2, request.stderr)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = ["gptoss", *request.arguments]

    from launch.cli import main

    atexit.register(
        lambda: Path(request.heavy).write_text("\n".join(sorted(HEAVY & set(sys.modules))))
    )
    status = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
