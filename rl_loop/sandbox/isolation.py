"""The outer wall: the bubblewrap command around a server, and what may keep it from being built."""

import os
import shutil
import sys
from pathlib import Path

from rl_loop.sandbox.config import SandboxConfig, SandboxUnavailable
from rl_loop.sandbox.server import NOBODY

# what runs inside, seen there as this package: nothing else of the host's rl_loop is
SERVER_FOLDER = Path(__file__).parent
SERVER_FILES = ("server.py", "process_watch.py")
SERVER_MODULE = "rl_loop.sandbox.server"
# as seen inside: the host's device. /dev/zero is /dev/full, which reads the same: mapping it would be memory that no
# counter shows. No terminals: their number is limited for the whole machine
DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


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


def bubblewrap_command(config: SandboxConfig, source_descriptors: list[int], info_descriptor: int) -> list[str]:
    """The command line of one server, whose descriptor 0 must be the control socket.

    SERVER_FILES are read from source_descriptors; bubblewrap writes its process id, as JSON, to info_descriptor.
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
    command += ["--tmpfs", "/dev", "--dir", "/dev/shm"]
    for name, device in DEVICES.items():
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{name}"]
    for name, target in DEVICE_LINKS.items():
        command += ["--symlink", target, f"/dev/{name}"]
    command += ["--dir", "/tmp", "--dir", "/rl_loop", "--dir", "/rl_loop/sandbox"]
    for descriptor, name in zip(source_descriptors, SERVER_FILES, strict=True):
        command += ["--file", str(descriptor), f"/rl_loop/sandbox/{name}"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    environment = {"PATH": f"{executable.parent}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    if (libraries := executable.parent.parent / "lib") != Path("/usr/lib"):
        environment["LD_LIBRARY_PATH"] = str(libraries)  # libpython, where it is a shared library
    for name, value in environment.items():
        command += ["--setenv", name, value]
    # not -I: it would ignore PYTHONHASHSEED
    return [*command, str(executable), "-s", "-m", SERVER_MODULE]


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
