"""The outer wall: the bubblewrap command around a server, and why it can not be built here."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rl_loop.sandbox.config import SandboxConfig
from rl_loop.sandbox.seccomp import UnsupportedArchitecture, seccomp_filter
from rl_loop.sandbox.server import NOBODY

SERVER_PATH = "/server.py"
_INTERPRETER_PREFIX = Path("/python")
_CAP_SYS_ADMIN = 21


class SandboxUnavailable(RuntimeError):
    """Untrusted code can not be isolated on this machine; the message names each reason and what to do."""


@dataclass(frozen=True)
class Interpreter:
    """A Python installation: what to execute inside the sandbox and what to bind there, read-only."""

    executable: Path
    lib_directory: Path
    binds: tuple[tuple[Path, Path], ...]


def find_interpreter(config: SandboxConfig) -> Interpreter:
    """The configured interpreter. Raises SandboxUnavailable where it does not exist or is a virtual environment.

    An installation outside /usr (pyenv, conda, uv) is seen under /python: only the executable and its libraries, and
    nothing of the directory, often a home, that it lies in.
    """
    if config.interpreter is None:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        executable = Path(sys.base_prefix) / "bin" / name
    else:
        if (config.interpreter.parent.parent / "pyvenv.cfg").exists():
            raise SandboxUnavailable(
                f"interpreter {config.interpreter} is a virtual environment, which the sandbox does not expose; "
                "name a base installation such as /usr/bin/python3"
            )
        executable = config.interpreter
    if not executable.exists():
        raise SandboxUnavailable(
            f"there is no Python interpreter {executable}; set interpreter in the sandbox's configuration"
        )
    executable = executable.resolve()
    prefix = executable.parent.parent
    if prefix.is_relative_to("/usr"):
        return Interpreter(executable, prefix / "lib", ())
    inside = _INTERPRETER_PREFIX / "bin" / executable.name
    binds = [(executable, inside)]
    for name in ("lib", "lib64"):
        if (prefix / name).is_dir() and not (prefix / name).is_symlink():
            binds.append((prefix / name, _INTERPRETER_PREFIX / name))
    return Interpreter(inside, _INTERPRETER_PREFIX / "lib", tuple(binds))


def bubblewrap_command(config: SandboxConfig, server_descriptor: int, info_descriptor: int) -> list[str]:
    """The command line of one server, whose descriptor 0 must be the control socket.

    Its source is read from server_descriptor; bubblewrap writes its process id, as JSON, to info_descriptor.
    An ordinary user gets a user namespace in which it is nobody. Root gets none: the server itself becomes the real
    nobody (uid 65534), for which it keeps three capabilities until then, so that what escapes is not root.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise SandboxUnavailable(_BUBBLEWRAP_MISSING)
    interpreter = find_interpreter(config)
    command = [bubblewrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        command += ["--cap-drop", "ALL"]
        for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--info-fd", str(info_descriptor)]
    command += ["--ro-bind", "/usr", "/usr"]
    for path in (Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    if interpreter.binds:
        # by name, because the parents that bubblewrap makes unasked are closed to nobody
        command += ["--dir", str(_INTERPRETER_PREFIX), "--dir", str(_INTERPRETER_PREFIX / "bin")]
    for source, target in interpreter.binds:
        command += ["--ro-bind", str(source), str(target)]
    command += ["--dir", "/proc"] if os.geteuid() == 0 else ["--proc", "/proc"]
    command += ["--dev", "/dev", "--dir", "/tmp", "--file", str(server_descriptor), SERVER_PATH]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    environment = {
        "PATH": f"{interpreter.executable.parent}:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if interpreter.lib_directory != Path("/usr/lib"):
        environment["LD_LIBRARY_PATH"] = str(interpreter.lib_directory)  # libpython, where it is a shared library
    for name, value in environment.items():
        command += ["--setenv", name, value]
    # not -I: it would ignore PYTHONHASHSEED
    return [*command, str(interpreter.executable), "-s", SERVER_PATH]


def missing_requirements(config: SandboxConfig) -> list[str]:
    """What can be known to be missing without starting anything."""
    reasons = []
    if sys.platform != "linux":
        return [f"the sandbox needs Linux namespaces, and this is {sys.platform}"]
    if shutil.which("bwrap") is None:
        reasons.append(_BUBBLEWRAP_MISSING)
    try:
        seccomp_filter(platform.machine())
    except UnsupportedArchitecture as error:
        reasons.append(str(error))
    try:
        find_interpreter(config)
    except SandboxUnavailable as error:
        reasons.append(str(error))
    for name, bad in (("user.max_user_namespaces", 0), ("kernel.unprivileged_userns_clone", 0)):
        if _sysctl(name) == bad:
            reasons.append(
                f"user namespaces are forbidden: {name} is {bad}; "
                f"an administrator can allow them (sysctl -w {name}={_GOOD[name]})"
            )
    if os.geteuid() == 0 and not _have_capability(_CAP_SYS_ADMIN):
        reasons.append(
            "this is root without CAP_SYS_ADMIN (a container?): run as an ordinary user, or grant the capability"
        )
    return reasons


def restrictions() -> list[str]:
    """What may be why a server did not start although nothing is missing."""
    hints = [
        "if this is a container, its seccomp profile must allow unshare and mount, and its /proc must not be masked "
        "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
    ]
    name = "kernel.apparmor_restrict_unprivileged_userns"
    if _sysctl(name) == 1:
        hints.append(f"{name} is 1: AppArmor refuses user namespaces to unprivileged programs (sysctl -w {name}=0)")
    return hints


_BUBBLEWRAP_MISSING = (
    "bubblewrap (bwrap) is not in PATH: install it (apt-get install bubblewrap, dnf install bubblewrap)"
)
_GOOD = {"user.max_user_namespaces": 15000, "kernel.unprivileged_userns_clone": 1}


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", *name.split(".")).read_text())
    except (OSError, ValueError):
        return None


def _have_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
