"""Outer isolation: the bubblewrap command of a server, and reasons why it may fail to start."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rl_loop.sandbox.config import SandboxConfig, SandboxUnavailableError
from rl_loop.sandbox.inside.confinement import NOBODY

# Files of the server. Nothing else of the host's rl_loop is visible inside.
SERVER_FOLDER = Path(__file__).parent / "inside"
SERVER_FILES = (
    "confinement.py",
    "messages.py",
    "process_watch.py",
    "program.py",
    "progress.py",
    "server.py",
    "supervisor.py",
)
INSIDE_FOLDER = Path("/rl_loop/sandbox/inside")
SERVER_MODULE = "rl_loop.sandbox.inside.server"

DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""{device inside: device of the host}.

/dev/zero is a bind mount of /dev/full, which also reads as zeros: a program could map the real
/dev/zero and use memory that no limit counts. There are no terminals (/dev/pts), because the host
has a limited number of them.
"""
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}

NAMESPACE_SYSCTLS = {
    "user.max_user_namespaces": (0, 15000),
    "user.max_net_namespaces": (0, 15000),
    "kernel.unprivileged_userns_clone": (0, 1),
    "kernel.apparmor_restrict_unprivileged_userns": (1, 0),
}
"""{name: (value that forbids namespaces, value that allows them)}."""


def bubblewrap_command(
    config: SandboxConfig, source_descriptors: dict[str, int], info_descriptor: int
) -> list[str]:
    """Return the command line of one server.

    Descriptor 0 of the command must be the control socket.

    Args:
        config: settings of the sandbox.
        source_descriptors: file name to open descriptor, for each file of the server.
        info_descriptor: descriptor to which bubblewrap writes its process id as JSON.

    Raises:
        SandboxUnavailableError: if bubblewrap or the interpreter is missing.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        install = "apt-get install bubblewrap, dnf install bubblewrap"
        raise SandboxUnavailableError(f"bubblewrap (bwrap) is not in PATH. Install it ({install})")

    interpreter = find_interpreter(config)
    # bubblewrap processes options in order: later mounts cover earlier ones.
    return [
        bubblewrap,
        *_namespaces(),
        *("--die-with-parent", "--new-session", "--info-fd", str(info_descriptor)),
        *_system_files(),
        *interpreter.arguments,
        *_proc_and_dev_options(),
        *_server_files(source_descriptors),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"),
        *_environment(interpreter.executable),
        # -I would ignore PYTHONHASHSEED.
        *(str(interpreter.executable), "-s", "-m", SERVER_MODULE),
    ]


def _namespaces() -> list[str]:
    """Return options that separate the server from the host and run it as the user ``nobody``."""
    arguments = [
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    # Root gets no user namespace. The server itself changes to the real ``nobody`` (uid 65534) and
    # keeps three capabilities until then. Therefore a program that escapes is not root. An ordinary
    # user gets a user namespace in which it is ``nobody``.
    if os.geteuid() == 0:
        arguments += ["--cap-drop", "ALL"]
        for capability in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"):
            arguments += ["--cap-add", capability]
    else:
        arguments += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [*arguments, "--hostname", "sandbox"]


def _system_files() -> list[str]:
    """Return options that mount /usr, and the other system directories as links or mounts."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for path in (Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments


def _proc_and_dev_options() -> list[str]:
    # If root starts the server, the server mounts /proc itself (``confinement.drop_root``).
    proc = ["--dir", "/proc"] if os.geteuid() == 0 else ["--proc", "/proc"]

    arguments = [*proc, "--tmpfs", "/dev", "--dir", "/dev/shm"]
    for name, device in DEVICES.items():
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{name}"]
    for name, target in DEVICE_LINKS.items():
        arguments += ["--symlink", target, f"/dev/{name}"]
    return arguments


def _server_files(source_descriptors: dict[str, int]) -> list[str]:
    """Return options that copy the server's modules and create the mount point of /tmp."""
    arguments = ["--dir", "/tmp"]
    for folder in (Path("/rl_loop"), Path("/rl_loop/sandbox"), INSIDE_FOLDER):
        arguments += ["--dir", str(folder)]
    for name, descriptor in source_descriptors.items():
        arguments += ["--file", str(descriptor), str(INSIDE_FOLDER / name)]
    return arguments


def _environment(executable: Path) -> list[str]:
    # Hash seed 0 gives equal programs the same order of sets in every call.
    variables = {
        "PATH": f"{executable.parent}:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    libraries = executable.parent.parent / "lib"
    if libraries != Path("/usr/lib"):
        # For libpython, where it is a shared library.
        variables["LD_LIBRARY_PATH"] = str(libraries)

    # The host's variables may contain secrets.
    arguments = ["--clearenv"]
    for name, value in variables.items():
        arguments += ["--setenv", name, value]
    return arguments


@dataclass(frozen=True)
class SandboxInterpreter:
    """Python interpreter inside the sandbox."""

    executable: Path
    """Path inside the sandbox."""

    arguments: list[str]
    """Options of bubblewrap that mount it."""


def find_interpreter(config: SandboxConfig) -> SandboxInterpreter:
    """Return the configured interpreter. Default: the base installation of the running one.

    If the installation is outside /usr (pyenv, conda, uv), its executable and libraries are mounted
    under /python.

    Raises:
        SandboxUnavailableError: if the interpreter does not exist or is a virtual environment.
    """
    executable = config.interpreter
    if executable is None:
        executable = (
            Path(sys.base_prefix)
            / "bin"
            / f"python{sys.version_info.major}.{sys.version_info.minor}"
        )
    elif (executable.parent.parent / "pyvenv.cfg").exists():
        raise SandboxUnavailableError(
            f"sandbox.interpreter: {executable} is a virtual environment, which the sandbox does not "
            "mount. Name a base installation such as /usr/bin/python3"
        )
    if not executable.exists():
        raise SandboxUnavailableError(
            f"sandbox.interpreter: {executable} does not exist. Set sandbox.interpreter"
        )

    executable = executable.resolve()
    prefix = executable.parent.parent
    if prefix.is_relative_to("/usr"):
        return SandboxInterpreter(executable, arguments=[])

    # Mount only these parts. The directory of an installation is often inside a home directory,
    # which programs must not see.
    inside = Path("/python/bin") / executable.name
    # Create the parents explicitly. Those that bubblewrap creates implicitly are closed to
    # ``nobody``.
    arguments = [
        "--dir",
        "/python",
        "--dir",
        "/python/bin",
        "--ro-bind",
        str(executable),
        str(inside),
    ]
    for name in ("lib", "lib64"):
        if (prefix / name).is_dir() and not (prefix / name).is_symlink():
            arguments += ["--ro-bind", str(prefix / name), f"/python/{name}"]
    return SandboxInterpreter(inside, arguments)


def hints() -> list[str]:
    """Return possible reasons why a server does not start on this machine, with remedies."""
    forbidden = [
        f"namespaces are forbidden: {name} is {bad}. An administrator can allow them "
        f"(sysctl -w {name}={good})"
        for name, (bad, good) in NAMESPACE_SYSCTLS.items()
        if _sysctl(name) == bad
    ]
    return [
        *forbidden,
        "if this is a container: run as an ordinary user or with CAP_SYS_ADMIN. Its seccomp profile "
        "must allow unshare and mount, and its /proc must not be masked (docker run "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined)",
    ]


def _sysctl(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", *name.split(".")).read_text())
    except (OSError, ValueError):
        return None
