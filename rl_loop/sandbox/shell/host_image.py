"""Images made of programs of this machine, for tasks that need no other software.

They have bash, the usual command-line tools, and the libraries that they need, and optionally
Python with its standard library. They need no network and no tool for images.
"""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import IO

PROGRAMS = (
    "bash", "sh", "awk", "base64", "basename", "cat", "chmod", "cmp", "comm", "cp", "cut", "date", "dd", "df",
    "diff", "dirname", "du", "echo", "env", "expr", "false", "find", "fold", "grep", "gzip", "head", "id", "join",
    "kill", "ln", "ls", "md5sum", "mkdir", "mkfifo", "mktemp", "mv", "nl", "nohup", "nproc", "od", "paste", "printf",
    "ps", "pwd", "readlink", "realpath", "rm", "rmdir", "sed", "seq", "setsid", "sha256sum", "shuf", "sleep", "sort",
    "split", "stat", "tac", "tail", "tar", "tee", "test", "timeout", "touch", "tr", "true", "truncate", "uname",
    "uniq", "wc", "which", "xargs", "yes",
)  # fmt: skip
"""Programs that are copied if the machine has them. bash and sh are required."""
FOLDERS = (
    "usr/bin",
    "usr/lib",
    "etc",
    "home",
    "root",
    "tmp",
    "var/tmp",
    "run",
    "dev",
    "proc",
    "mnt",
    "opt",
    "srv",
)
LINKS = {
    "bin": "usr/bin",
    "sbin": "usr/bin",
    "usr/sbin": "bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
}
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")
PYTHON_PREFIX = "usr/local"
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "ensurepip",
}
"""Folders of Python's library that are left out."""


def write_host_archive(target: IO[bytes], python: bool = False) -> None:
    """Write a root file system with programs of this machine as a tar archive.

    Args:
        target: file to write.
        python: True to add the interpreter of this process and its standard library.

    Raises:
        FileNotFoundError: if there is no bash.
    """
    files: dict[str, Path] = {}
    links = dict(LINKS)
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is None:
            if name in ("bash", "sh"):
                raise FileNotFoundError(f"no {name} in /usr/bin")
            continue
        program = Path(found).resolve()
        files[f"usr/bin/{program.name}"] = program
        if program.name != name:
            links[f"usr/bin/{name}"] = program.name
    if python:
        files |= _python_files()
        links[f"{PYTHON_PREFIX}/bin/python3"] = links[f"{PYTHON_PREFIX}/bin/python"] = (
            _python_name()
        )
    for library in _libraries(path for path in files.values() if _may_have_libraries(path)):
        files[_library_place(library)] = library.resolve()
    _write(target, files, links)


def _write(target: IO[bytes], files: dict[str, Path], links: dict[str, str]) -> None:
    with tarfile.open(fileobj=target, mode="w") as archive:
        for folder in (*FOLDERS, *sorted({str(Path(name).parent) for name in files})):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if "tmp" in folder else 0o755
            archive.addfile(member)
        for name, destination in sorted(links.items()):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, destination
            archive.addfile(member)
        for name, text in FILES.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o644
            archive.addfile(member, BytesIO(text.encode()))
        for name, path in sorted(files.items()):
            with path.open("rb") as file:
                info = path.stat()
                member = tarfile.TarInfo(name)
                # Compiled modules are valid only for the time of their source.
                member.size, member.mode, member.mtime = info.st_size, 0o755, int(info.st_mtime)
                archive.addfile(member, file)


def _python_name() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _python_files() -> dict[str, Path]:
    """Return the files of the base installation of this Python, by their place in the image."""
    name, prefix = _python_name(), Path(sys.base_prefix)
    library = prefix / "lib" / name
    files = {f"{PYTHON_PREFIX}/bin/{name}": (prefix / "bin" / name).resolve()}
    for folder, folders, names in library.walk():
        folders[:] = [each for each in folders if each not in SKIPPED_FOLDERS]
        if folder.name.startswith("config-"):  # for compiling Python itself
            continue
        for each in names:
            if each.endswith((".py", ".so", f"{sys.implementation.cache_tag}.pyc")):
                place = folder.relative_to(prefix) / each
                files[f"{PYTHON_PREFIX}/{place}"] = folder / each
    return files


def _may_have_libraries(path: Path) -> bool:
    return path.suffix not in (".py", ".pyc")


def _library_place(library: Path) -> str:
    """Return the place of a library in the image."""
    text = str(library).lstrip("/")
    if text.startswith(("usr/lib", "lib")):
        return text if text.startswith("usr/") else f"usr/{text}"
    # The dynamic loader looks there.
    return f"usr/lib/{library.name}"


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """Return the shared libraries of programs, with the paths where they are looked for."""
    found: set[Path] = set()
    # ldd runs the dynamic loader of trusted programs of this machine. It fails for scripts.
    listing = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, check=False, env={}
    ).stdout
    for line in listing.splitlines():
        match = LIBRARY.search(line)
        if match is not None:
            found.add(Path(match[1]))
    return found
