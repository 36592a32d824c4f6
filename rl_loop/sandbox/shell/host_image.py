"""Image made of programs of this machine, for tasks that need no other software.

It has bash, the usual command-line tools, and the libraries that they need. It needs no network and
no tool for images.
"""

import re
import shutil
import subprocess
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
FOLDERS = ("usr/bin", "usr/lib", "etc", "home", "root", "tmp", "var/tmp", "run", "dev", "proc", "mnt", "opt", "srv")
LINKS = {"bin": "usr/bin", "sbin": "usr/bin", "usr/sbin": "bin", "lib": "usr/lib", "lib64": "usr/lib64"}
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n",
    "etc/group": "root:x:0:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def write_host_archive(target: IO[bytes], programs: Iterable[str] = PROGRAMS) -> None:
    """Write a root file system with programs of this machine as a tar archive.

    Equal machines give equal archives.

    Raises:
        FileNotFoundError: if there is no bash.
    """
    files: dict[str, Path] = {}
    links = dict(LINKS)
    for name in programs:
        found = shutil.which(name, path="/usr/bin:/bin")
        if found is None:
            if name in ("bash", "sh"):
                raise FileNotFoundError(f"no {name} in /usr/bin")
            continue
        program = Path(found).resolve()
        files[f"usr/bin/{program.name}"] = program
        if program.name != name:
            links[f"usr/bin/{name}"] = program.name
    for library in _libraries(files.values()):
        place = str(library).lstrip("/")
        files[place if place.startswith("usr/") else f"usr/{place}"] = library.resolve()

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
                member = tarfile.TarInfo(name)
                member.size, member.mode = path.stat().st_size, 0o755
                archive.addfile(member, file)


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
