"""The outer wall: the bubblewrap command around a server, and what may keep it from being built."""

import os
import shutil
import sys
from pathlib import Path

from rl_loop.sandbox.config import SandboxConfig, SandboxUnavailable
from rl_loop.sandbox.server import NOBODY

SERVER_PATH = "/server.py"


def find_interpreter(config: SandboxConfig) -> tuple[Path, list[str]]:
    """The executable of the configured interpreter inside the sandbox, and bubblewrap's arguments that bring it there.

    An installation outside /usr (pyenv, conda, uv) is seen under /python: only the executable and its libraries, and
    nothing of the directory, often a home, that it lies in. Raises SandboxUnavailable where there is no interpreter or
    it is a virtual environment."""
    executable = config.interpreter
    if executable is None:
        executable = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    elif (executable.parent.parent / "pyvenv.cfg").exists():
        advice = "which the sandbox does not expose; name a base installation such as /usr/bin/python3"
        raise SandboxUnavailable(f"interpreter {executable} is a virtual environment, {advice}")
    if not executable.exists():
        advice = "set interpreter in the sandbox's configuration"
        raise SandboxUnavailable(f"there is no Python interpreter {executable}; {advice}")
    executable = executable.resolve()
    prefix = executable.parent.parent
    if prefix.is_relative_to("/usr"):
        return executable, []
    inside = Path("/python/bin") / executable.name
    # by name, because the parents that bubblewrap makes unasked are closed to nobody
    arguments = ["--dir", "/python", "--dir", "/python/bin", "--ro-bind", str(executable), str(inside)]
    for name in ("lib", "lib64"):
        if (prefix / name).is_dir() and not (prefix / name).is_symlink():
            arguments += ["--ro-bind", str(prefix / name), f"/python/{name}"]
    return inside, arguments


def bubblewrap_command(config: SandboxConfig, server_descriptor: int, info_descriptor: int) -> list[str]:
    """The command line of one server, whose descriptor 0 must be the control socket.

    Its source is read from server_descriptor; bubblewrap writes its process id, as JSON, to info_descriptor.
    An ordinary user gets a user namespace in which it is nobody. Root gets none: the server itself becomes the real
    nobody (uid 65534), for which it keeps three capabilities until then, so that what escapes is not root."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        install = "apt-get install bubblewrap, dnf install bubblewrap"
        raise SandboxUnavailable(f"bubblewrap (bwrap) is not in PATH: install it ({install})")
    executable, interpreter = find_interpreter(config)
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
    command += interpreter
    command += ["--dir", "/proc"] if os.geteuid() == 0 else ["--proc", "/proc"]
    command += ["--dev", "/dev", "--dir", "/tmp", "--file", str(server_descriptor), SERVER_PATH]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    environment = {"PATH": f"{executable.parent}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    if (libraries := executable.parent.parent / "lib") != Path("/usr/lib"):
        environment["LD_LIBRARY_PATH"] = str(libraries)  # libpython, where it is a shared library
    for name, value in environment.items():
        command += ["--setenv", name, value]
    # not -I: it would ignore PYTHONHASHSEED
    return [*command, str(executable), "-s", SERVER_PATH]


def hints() -> list[str]:
    """What of this machine may keep a server from starting, and what to do about it."""
    found = [
        f"user namespaces are forbidden: {name} is {bad}; an administrator can allow them (sysctl -w {name}={good})"
        for name, (bad, good) in _FORBIDDING.items()
        if _sysctl(name) == bad
    ]
    return [
        *found,
        "if this is a container, run as an ordinary user or with CAP_SYS_ADMIN; its seccomp profile must allow unshare "
        "and mount, and its /proc must not be masked "
        "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined)",
    ]


# name: (the value that forbids, one that allows)
_FORBIDDING = {
    "user.max_user_namespaces": (0, 15000),
    "kernel.unprivileged_userns_clone": (0, 1),
    "kernel.apparmor_restrict_unprivileged_userns": (1, 0),
}


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", *name.split(".")).read_text())
    except (OSError, ValueError):
        return None
