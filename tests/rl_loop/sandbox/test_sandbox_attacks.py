"""Hostile programs: each is contained and leaves nothing, and the next call succeeds."""

from __future__ import annotations

import platform
import re
import resource
import socket
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_loop.sandbox.seccomp import DENIED_SYSCALLS
from tests.support.rl_loop.sandbox.hostile_programs import CHANNELS, MEMORY, Attack
from tests.support.rl_loop.sandbox.under_test import SandboxUnderTest

TIMEOUT = 3.0
# Timeout of programs that must first reach the limit which kills them, on a busy machine.
PATIENT_TIMEOUT = 60.0
OUTPUT_LIMIT = 64 * 1024
SECRET = "correct-horse-battery-staple"


def refused(statement: str, kind: str = "PermissionError") -> str:
    """Return a program that prints whether a statement was rejected."""
    return (
        f"try:\n    {statement}\n    print('DONE')\nexcept {kind} as error:\n    print('REFUSED')\n"
    )


def system_call(name: str) -> str:
    number = DENIED_SYSCALLS[name][0 if platform.machine() == "x86_64" else 1]
    return (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"result = libc.syscall({number}, 0, 0, 0, 0, 0, 0)\n"
        "print(result, errno.errorcode[ctypes.get_errno()])\n"
    )


CLONE, CLONE3 = (56, 435) if platform.machine() == "x86_64" else (220, 435)

# MEMORY and CHANNELS were found later by attacks. See hostile_programs.
ATTACKS = (
    MEMORY
    | CHANNELS
    | {
        # processor, memory, processes
        "fork bomb": Attack(
            r"""
            import os
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        """,
            exit_code=-9,
            timed_out=True,
            error="longer than",
        ),
        "thread bomb": Attack(
            r"""
            import threading, time
            n = 0
            try:
                while n < 1000:
                    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                    n += 1
            except RuntimeError:
                print('REFUSED', n < 64)
        """,
            "REFUSED True\n",
        ),
        "zombie flood": Attack(
            r"""
            import os
            n = 0
            try:
                while True:
                    if os.fork() == 0:
                        os._exit(0)
                    n += 1
            except BlockingIOError:
                print('REFUSED', n <= 64)
        """,
            "REFUSED True\n",
        ),
        "memory of one process": Attack(
            r"""
            blocks = []
            while True:
                blocks.append(bytearray(50 << 20))
        """,
            "(?s).*MemoryError\n",
            exit_code=1,
        ),
        "memory of many processes": Attack(
            r"""
            import os, time
            for _ in range(8):
                if os.fork() == 0:
                    block = bytearray(b'x') * (80 << 20)
                    time.sleep(60)
            time.sleep(60)
        """,
            exit_code=-9,
            error="memory",
        ),
        "busy loop that ignores signals": Attack(
            r"""
            import signal
            for number in signal.valid_signals():
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            print('begun')
            while True:
                pass
        """,
            "begun\n",
            exit_code=-9,
            timed_out=True,
            error="longer than",
        ),
        "sleep past the limit in a new group": Attack(
            r"""
            import os, time
            if os.fork() == 0:
                os.setpgid(0, 0)
                if os.fork() == 0:
                    time.sleep(60)
            time.sleep(60)
        """,
            exit_code=-9,
            timed_out=True,
            error="longer than",
        ),
        "daemon that outlives the call": Attack(
            r"""
            import os, time
            if os.fork() == 0:
                os.setpgid(0, 0)
                if os.fork() == 0:
                    time.sleep(60)
                os._exit(0)
            print('parent done')
        """,
            "parent done\n",
        ),
        "raised limits": Attack(
            r"""
            import resource
            for name in ('AS', 'NPROC', 'CPU', 'FSIZE', 'NOFILE', 'CORE'):
                try:
                    resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (1 << 40, 1 << 40))
                except ValueError:
                    print('REFUSED')
        """,
            "(REFUSED\n){6}",
        ),
        "less processor time than allowed": Attack(
            r"""
            import resource
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
            while True:
                pass
        """,
            exit_code=-9,
            error="SIGKILL",
        ),
        "kill in the kernel's name": Attack(
            r"""
            import ctypes, os, platform, signal, struct
            info = ctypes.create_string_buffer(128)
            struct.pack_into('iii', info, 0, signal.SIGKILL, 0, 0x80)
            number = 129 if platform.machine() == 'x86_64' else 138
            ctypes.CDLL(None).syscall(number, os.getpid(), signal.SIGKILL, info)
        """,
            exit_code=-9,
            error="SIGKILL",
        ),
        "exception that never ends": Attack(
            r"""
            class Endless(Exception):
                def __str__(self):
                    while True:
                        pass
            raise Endless
        """,
            exit_code=-9,
            timed_out=True,
            error="longer than",
        ),
        "deep recursion": Attack(
            r"""
            def f():
                f()
            f()
        """,
            "(?s)Traceback.*RecursionError.*",
            exit_code=1,
        ),
        "deep expression": Attack("(" * 100000, "(?s).*(SyntaxError|MemoryError).*", exit_code=1),
        "segmentation fault": Attack(
            r"""
            import ctypes
            ctypes.string_at(0)
        """,
            exit_code=-11,
            error="SIGSEGV",
        ),
        "exit behind the interpreter's back": Attack(
            r"""
            import os
            print('out')
            os._exit(7)
        """,
            "out\n",
            exit_code=7,
        ),
        "huge arguments": Attack(
            refused("import os; os.execv('/usr/bin/true', ['x' * (1 << 22)])", "OSError"),
            "REFUSED\n",
        ),
        "huge environment": Attack(
            refused(
                "import os; os.execve('/usr/bin/true', ['x'], {'A': 'x' * (1 << 22)})", "OSError"
            ),
            "REFUSED\n",
        ),
        # output and the protocol
        "output flood": Attack(
            r"""
            while True:
                print('a' * 10000)
        """,
            r"(?s).*\n\[output truncated at 65536 bytes\]",
            exit_code=-9,
            truncated=True,
            error="printed more",
        ),
        "standard input": Attack("input()", "(?s).*EOFError.*", exit_code=1),
        "forged answers on every descriptor": Attack(
            r"""
            import os, struct, sys
            body = b'{"exit_code": 0, "killed_for": null, "truncated": false, "seconds": 0}\nFORGED'
            frame = b'R' + struct.pack('!I', len(body)) + body
            written = []
            for descriptor in range(3, 4096):
                try:
                    os.write(descriptor, frame)
                    written.append(descriptor)
                except OSError:
                    pass
            print(written)
            os.write(2, frame)
            sys.exit(5)
        """,
            r"(?s)\[\]\nR.*FORGED",
            exit_code=5,
        ),
        "closed descriptors": Attack(
            r"""
            import os
            print('before', flush=True)
            os.closerange(0, 4096)
            x = 1
        """,
            "before\n",
        ),
        "closed descriptors and a busy loop": Attack(
            r"""
            import os
            os.closerange(0, 4096)
            while True:
                pass
        """,
            exit_code=-9,
            timed_out=True,
            error="longer than",
        ),
        "patched interpreter": Attack(
            r"""
            import builtins, os, sys, json
            builtins.print = None
            os._exit = os.fork = json.dumps = lambda *a: None
            sys.stdout = sys.stderr = None
            sys.modules.clear()
        """,
            exit_code=-1000,  # the test does not check the exit code of this attack
        ),
        # network
        "internet socket": Attack(
            refused("import socket; socket.create_connection(('127.0.0.1', 22), 1)"), "REFUSED\n"
        ),
        "netlink socket": Attack(
            refused("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
            "REFUSED\n",
        ),
        "virtual machine socket": Attack(
            refused("import socket; socket.socket(40, socket.SOCK_STREAM, 0)"), "REFUSED\n"
        ),
        "unix socket of the host": Attack(
            r"""
            import socket
            for address in ('@SOCKET@', '\0@ABSTRACT@'):
                try:
                    socket.socket(socket.AF_UNIX).connect(address)
                    print('DONE')
                except OSError as error:
                    print(type(error).__name__)
        """,
            "FileNotFoundError\nConnectionRefusedError\n",
        ),
        # other processes
        "ptrace": Attack(system_call("ptrace"), "-1 EPERM\n"),
        "kill everything": Attack(
            r"""
            import os
            for target in (-1, 0, -os.getpgrp(), os.getppid()):
                try:
                    os.kill(target, 9)
                except ProcessLookupError:
                    pass
            print('alive')
        """,
            "alive\n",
        ),
        "kill every process id": Attack(
            r"""
            import os
            hit = []
            for target in range(2, 70000):
                try:
                    os.kill(target, 9)
                    hit.append(target)
                except ProcessLookupError:
                    pass
            print(hit)
        """,
            r"\[\]\n",
        ),
        "walk through /proc": Attack(
            r"""
            import os
            pids = [p for p in os.listdir('/proc') if p.isdigit()]
            print(pids, os.getpid(), os.getppid())
            print(os.listdir('/proc/1/root/tmp'), os.readlink('/proc/1/cwd'), sorted(os.listdir('/proc/1/fd')))
            print(open('/proc/1/environ').read(), os.environ)
        """,
            r"(?s)\['1'\] 1 0\n\[\] /tmp \['0', '1', '2', '3'\]\n.*",
        ),
        # files
        "read a file of the host": Attack(
            r"""
            import os
            for path in (
                '@SECRET@', '/etc/shadow', '/etc/passwd', '@HOME@', '@VENV@', '@REPOSITORY@',
                '/proc/1/root@SECRET@', '/proc/1/cwd/..@SECRET@', '/tmp/..@SECRET@', '/sys/class', '/run', '/var',
            ):
                print(os.path.exists(path), end=' ')
        """,
            "(False ){12}",
        ),
        "write outside": Attack(
            r"""
            import os
            for path in (
                '/usr/x', '/x', '/etc/x', '/dev/x', '/rl_loop/sandbox/inside/server.py',
                '/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '@FOLDER@/x', os.__file__,
            ):
                try:
                    open(path, 'a').close()
                    print('DONE', path)
                except OSError:
                    print('REFUSED')
        """,
            "(REFUSED\n){9}",
        ),
        "symbolic link to a file of the host": Attack(
            r"""
            import os
            os.symlink('@SECRET@', '/tmp/link')
            os.symlink('/proc/1/root/../../@SECRET@', '/tmp/second')
            for path in ('/tmp/link', '/tmp/second'):
                try:
                    print(open(path).read())
                except FileNotFoundError:
                    print('REFUSED')
        """,
            "(REFUSED\n){2}",
        ),
        "memory devices": Attack(
            r"""
            import os
            for path in ('/dev/mem', '/dev/kmem', '/dev/sda', '/dev/vda', '/dev/kvm', '/dev/fuse', '/proc/kcore'):
                try:
                    open(path, 'rb')
                    print('DONE', path)
                except OSError:
                    print('REFUSED')
        """,
            "(REFUSED\n){7}",
        ),
        "make a device": Attack(
            refused("import os; os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))"), "REFUSED\n"
        ),
        "terminal input": Attack(
            refused("import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')", "OSError"),
            "REFUSED\n",
        ),
        "fill the disk": Attack(
            r"""
            import errno
            kinds = set()
            for n in range(10):
                try:
                    with open(f'/tmp/{n}', 'wb') as file:
                        for _ in range(32):
                            file.write(bytes(1 << 20))
                except OSError as error:
                    kinds.add(errno.errorcode[error.errno])
            print(sorted(kinds))
        """,
            r"\['EFBIG', 'ENOSPC'\]\n",
        ),
        "fill the shared memory": Attack(
            r"""
            import errno
            try:
                for n in range(10):
                    open(f'/dev/shm/{n}', 'wb').write(bytes(15 << 20))
            except OSError as error:
                print(errno.errorcode[error.errno])
        """,
            "ENOSPC\n",
        ),
        "flood of empty files": Attack(
            r"""
            n = 0
            try:
                while True:
                    open(f'/tmp/{n}', 'w').close()
                    n += 1
            except OSError:
                print(n < 5000)
        """,
            "True\n",
        ),
        "open file flood": Attack(
            r"""
            files = []
            try:
                while True:
                    files.append(open('/dev/null'))
            except OSError:
                print(len(files) < 64)
        """,
            "True\n",
        ),
        "files for the next call": Attack(
            r"""
            import os
            for folder in ('/tmp', '/dev/shm'):
                open(folder + '/left', 'w').write('x')
            os.makedirs('/tmp/json')
            open('/tmp/math.py', 'w').write('raise SystemExit')
            print(len(os.listdir('/tmp')))
        """,
            "3\n",
        ),
        # privileges
        "become root": Attack(
            r"""
            import os
            for call in (os.setuid, os.setgid, os.setreuid):
                try:
                    call(*([0] * (2 if call is os.setreuid else 1)))
                    print('DONE')
                except OSError:
                    print('REFUSED')
            print(os.getuid(), os.getgid())
        """,
            "(REFUSED\n){3}65534 65534\n",
        ),
        "set-user-id programs": Attack(
            r"""
            import subprocess
            for command in (['su', '-c', 'id -u'], ['mount', '--bind', '/tmp', '/usr'], ['umount', '/usr']):
                try:
                    subprocess.run(command, capture_output=True, input=b'', timeout=1, check=True)
                    print('DONE')
                except (OSError, subprocess.SubprocessError):
                    print('REFUSED')
        """,
            "(REFUSED\n){3}",
        ),
        "capabilities": Attack(
            r"""
            lines = open('/proc/self/status').read().splitlines()
            print([l.split()[1] for l in lines if l.startswith(('CapPrm', 'CapEff', 'CapInh', 'CapAmb', 'NoNewPrivs'))])
        """,
            r"\['0{16}', '0{16}', '0{16}', '0{16}', '1'\]\n",
        ),
        "clone into a user namespace": Attack(
            "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            f"print(libc.syscall({CLONE}, 0x10000000 | 17, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])\n"
            f"print(libc.syscall({CLONE3}, 0, 0), errno.errorcode[ctypes.get_errno()])",
            "-1 EPERM\n-1 ENOSYS\n",
        ),
    }
    | {
        f"system call {name}": Attack(system_call(name), "-1 EPERM\n")
        for name in (
            *(
                "bpf",
                "keyctl",
                "userfaultfd",
                "io_uring_setup",
                "perf_event_open",
                "unshare",
                "setns",
                "mount",
            ),
            *(
                "pivot_root",
                "process_vm_readv",
                "memfd_create",
                "shmget",
                "pidfd_getfd",
                "open_by_handle_at",
            ),
        )
    }
)


@pytest.fixture(scope="module")
def sandboxes(make_sandbox: Callable) -> dict[str, SandboxUnderTest]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_HOST", SECRET)
        limits = {"address_space_gb": 0.27, "total_memory_gb": 0.54}
        return {
            "short": make_sandbox(timeout_seconds=TIMEOUT, **limits),
            "patient": make_sandbox(timeout_seconds=PATIENT_TIMEOUT, cpu_seconds=60, **limits),
        }


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Files and sockets on the host that the programs attack."""
    folder = tmp_path_factory.mktemp("host")
    folder.chmod(0o777)
    secret = folder / "secret"
    secret.write_text(SECRET)
    abstract = f"sandbox-test-{folder}"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as unnamed:
        named.bind(str(folder / "socket"))
        named.listen()
        unnamed.bind("\0" + abstract)
        unnamed.listen()
        yield {
            "@SECRET@": str(secret),
            "@FOLDER@": str(folder),
            "@SOCKET@": str(folder / "socket"),
            "@ABSTRACT@": abstract,
            "@HOME@": str(Path.home()),
            "@VENV@": str(Path(pytest.__file__).parents[3]),
            "@REPOSITORY@": str(Path(__file__).parents[3]),
        }
    assert secret.read_text() == SECRET
    assert sorted(path.name for path in folder.iterdir()) == ["secret", "socket"]


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_contained_and_the_next_call_succeeds(
    name: str, sandboxes: dict[str, SandboxUnderTest], host: dict[str, str]
) -> None:
    attack = ATTACKS[name]
    is_patient = attack.error in ("memory", "locks", "SIGKILL")
    attacked = sandboxes["patient" if is_patient else "short"]
    code = textwrap.dedent(attack.code)
    for placeholder, value in host.items():
        code = code.replace(placeholder, value)
    result = attacked.run(code)

    assert SECRET not in result.output
    if name != "patched interpreter":  # this program breaks its own process, so any exit is right
        assert re.fullmatch(attack.output, result.output), result
        assert result.exit_code == attack.exit_code, result
        assert (result.timed_out, result.truncated) == (attack.timed_out, attack.truncated), result
        assert (
            (result.error is None)
            if attack.error is None
            else (attack.error in (result.error or ""))
        ), result
    assert len(result.output) <= OUTPUT_LIMIT + 100
    # A loaded machine needs time to kill 60 busy processes.
    assert result.seconds < (PATIENT_TIMEOUT if is_patient else TIMEOUT) + 20

    honest = attacked.run(
        "import json, math, os\nprint(sum(range(1000)), math.sqrt(4), os.listdir('/tmp'), os.listdir('/dev/shm'))\n"
        "print([p for p in os.listdir('/proc') if p.isdigit()])"
    )
    assert (honest.output, honest.exit_code, honest.error) == ("499500 2.0 [] []\n['1']\n", 0, None)
    assert attacked.processes_left() == 0


def test_program_cannot_read_memory_of_an_earlier_call(
    sandboxes: dict[str, SandboxUnderTest],
) -> None:
    attacked = sandboxes["short"]
    assert attacked.run(f"token = '{SECRET}'\nprint(token)").output == f"{SECRET}\n"
    # The patterns do not match their own text. The second pattern matches this program, which
    # proves that the search works.
    search = """
        import re
        patterns = [re.compile(rb"correct-horse-[b]attery-[s]taple"), re.compile(rb"zygomorphic [x]ylophones")]
        counts = [0, 0]  # zygomorphic xylophones
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for line in open("/proc/self/maps").readlines():
                area, rights = line.split()[:2]
                start, end = (int(address, 16) for address in area.split("-"))
                if rights.startswith("rw"):
                    memory.seek(start)
                    block = memory.read(end - start)
                    counts = [count + len(pattern.findall(block)) for count, pattern in zip(counts, patterns)]
        print(counts[0], counts[1] > 0)
    """
    assert attacked.run(textwrap.dedent(search)).output == "0 True\n"


def test_memory_limit_counts_links_between_forked_mappings(make_sandbox: Callable) -> None:
    """The kernel links a mapping of a forked process to the mappings of all ancestors."""
    smallest = 0.14
    sandbox = make_sandbox(
        address_space_gb=smallest, total_memory_gb=smallest, timeout_seconds=PATIENT_TIMEOUT
    )
    code = """
        import ctypes, os, time
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        for n in range(800):
            page = ctypes.c_void_p(0x200000000000 + 8192 * n)
            ctypes.memset(libc.mmap(page, ctypes.c_size_t(4096), 3, 0x100022, -1, 0), 1, 1)
        for _ in range(60):
            if os.fork() != 0:
                time.sleep(60)
        time.sleep(60)
    """
    result = sandbox.run(textwrap.dedent(code))
    assert "memory" in (result.error or ""), result


@pytest.mark.parametrize(
    ("opening", "times"), [("os.open('/proc/stat', os.O_RDONLY)", 3900), ("os.pipe()", 1950)]
)
def test_memory_limit_counts_buffers_of_descriptors(
    opening: str, times: int, make_sandbox: Callable
) -> None:
    """An open file of /proc has a kernel buffer, and a pipe keeps the written data."""
    files = 4000
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < files:
        pytest.skip(f"no process may open more than {most} files here")
    sandbox = make_sandbox(open_files=files, total_memory_gb=0.14, timeout_seconds=PATIENT_TIMEOUT)
    code = f"import os, time\nfor _ in range({times}): {opening}\ntime.sleep(60)"
    result = sandbox.run(code)
    assert "memory" in (result.error or ""), result


def test_cpu_time_is_limited_for_each_process(make_sandbox: Callable) -> None:
    result = make_sandbox(cpu_seconds=1, timeout_seconds=20).run("while True:\n    pass")
    assert (result.exit_code, result.timed_out) == (-9, False)
    assert "SIGKILL" in (result.error or "")


def test_output_beyond_the_limit_is_truncated_and_marked(
    make_sandbox: Callable,
) -> None:
    sandbox = make_sandbox(output_bytes=1000)
    whole = sandbox.run("print('x' * 999)")
    assert (whole.output, whole.truncated, whole.error) == ("x" * 999 + "\n", False, None)
    cut = sandbox.run("print('x' * 1000)")
    assert cut.truncated
    assert cut.output == "x" * 1000 + "\n[output truncated at 1000 bytes]"
