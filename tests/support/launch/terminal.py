"""A program in a pseudo-terminal, started like from a user's shell."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

MARK = "GPTOSS_TEST_TERMINAL"


def _take_terminal() -> None:
    """Make standard input the controlling terminal of this new session, like a shell."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # The tests may run under nohup, whose children ignore SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """Runs a command in the foreground of a new terminal. The context ends all its processes."""

    def __init__(self, command: list[str], directory: Path, **environment: str) -> None:
        self.said = ""
        self._mark = uuid.uuid4().hex
        self._open = True
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **environment, MARK: self._mark, "TERM": "xterm", "COLUMNS": "200"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)

    def wait_for(self, pattern: str, seconds: float) -> None:
        """Read until the program has printed ``pattern``."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.said):
            assert time.monotonic() < deadline, (
                f"{pattern!r} was not said within {seconds} s, but: {self.said[-3000:]}"
            )
            assert self._read(), (
                f"the program ended before it said {pattern!r}: {self.said[-3000:]}"
            )

    def press_ctrl_c(self) -> None:
        """Send SIGINT to every process in the terminal's foreground, like the terminal driver."""
        os.write(self._master, b"\x03")

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def hang_up(self) -> None:
        """Close the terminal, like a closed window or a lost connection. Later writes fail."""
        os.close(self._master)
        self._open = False

    def wait(self, seconds: float) -> int:
        """Wait for the program and return its exit status."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, (
                f"still running after {seconds} s: {self.said[-3000:]}"
            )
            if self._open:
                self._read()
            else:
                time.sleep(0.1)
        while self._open and self._read():
            pass
        return self.process.returncode

    def processes_left(self, seconds: float = 10) -> list[str]:
        """Return the command lines of started processes that still exist after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := self._descendants()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return list(left.values())

    def _read(self) -> bool:
        """Read output for up to 0.5 s. Return False after the program has closed its side."""
        if not select.select([self._master], [], [], 0.5)[0]:
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # EIO: no process has the terminal open
            return False
        self.said += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return bool(data)

    def _descendants(self) -> dict[int, str]:
        """Return the command line of each process with the mark in its environment, by process id.

        Zombies are left out.
        """
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
        return {pid: line for pid, line in found.items() if line}

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for pid in self._descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self._open:
            self.hang_up()
