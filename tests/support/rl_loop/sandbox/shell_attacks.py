"""Attacks of a shell on its sandbox. After each one the sandbox must work."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.rl_loop.sandbox.shells import Shells

LIMITS = {
    "disk_bytes": 64 << 20,
    "disk_files": 5000,
    "memory_bytes": 256 << 20,
    "processes": 64,
}
"""Limits of the sandbox of an attack."""

C = "import ctypes, os, errno; l = ctypes.CDLL(None, use_errno=True)\n"
E = "errno.errorcode.get(ctypes.get_errno())"


@dataclass(frozen=True)
class Attack:
    """A command, and what shows that it failed."""

    command: str
    expected: str | None = None
    """Pattern in the output."""
    absent: str | None = None
    """Pattern that must not be in the output."""
    killed_for: tuple[str | None, ...] = (None,)
    """Limits of which one ends the command."""
    seconds: float = 60.0
    persistent: bool = False


def python(code: str) -> str:
    return f"python3 -u - <<'__END__'\n{code}\n__END__\n"


def call(number_and_arguments: str) -> str:
    """Return a command that makes a system call of x86_64 and prints its result."""
    return python(f"{C}print(l.syscall({number_and_arguments}), {E})")


ATTACKS = {
    # ---- processes
    "fork bomb": Attack("f(){ f|f& };f; sleep 300", killed_for=("time",), seconds=3),
    "fork bomb that ignores signals": Attack(
        python(
            "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nwhile 1:\n"
            " try: os.fork(); os.setsid()\n except OSError: pass"
        ),
        killed_for=("time",),
        seconds=3,
    ),
    "thread bomb": Attack(
        python(
            "import threading, time\nn = 0\ntry:\n while n < 500:\n"
            "  threading.Thread(target=time.sleep, args=(60,), daemon=True).start();"
            " n += 1\n"
            "except RuntimeError: print('REFUSED', n < 64)\n"
            "import os; os._exit(0)"
        ),
        "REFUSED True",
    ),
    "zombies": Attack(
        python(
            "import os\nn = 0\ntry:\n while n < 500:\n  if os.fork() == 0: "
            "os._exit(0)\n  n += 1\n"
            "except OSError: print('REFUSED', n < 64)"
        ),
        "REFUSED True",
    ),
    "orphans that take all processes": Attack(
        "for i in $(seq 200); do (setsid sleep 600 >/dev/null 2>&1 &) "
        "; done 2>/dev/null; echo done",
        killed_for=("time", None),  # bash waits before it tries again
        seconds=3,
    ),
    "kill of all processes": Attack("kill -9 -1; echo survived"),
    "kill of process 1": Attack(
        "for s in 9 STOP INT TERM HUP CHLD USR1 SEGV ABRT QUIT PIPE ALRM;"
        " do kill -$s 1; done; echo sent",
        "sent",
    ),
    "endless builtin": Attack("while :; do :; done", killed_for=("time",), seconds=1),
    "stopped forever": Attack("kill -STOP $$", killed_for=("time",), seconds=1),
    "daemon keeps the output open": Attack("sleep 600 & echo quick", "quick"),
    "daemon prints without end": Attack(
        "yes & sleep 0.3; echo over", "y", killed_for=(None, "output")
    ),
    # ---- memory
    "memory of one process": Attack(
        python("b = []\nwhile 1: b.append(bytearray(b'x' * (1 << 20)))"), killed_for=("memory",)
    ),
    "memory of 20 processes": Attack(
        "for i in $(seq 20); do "
        'python3 -c \'import time; b = bytearray(b"x") * (30 << 20); '
        "time.sleep(90)' & done; wait",
        killed_for=("memory",),
    ),
    "memory of a daemon between commands": Attack(
        '(setsid python3 -c \'import time; time.sleep(0.2); b = bytearray(b"x") '
        "* (400 << 20); "
        "time.sleep(600)' >/dev/null 2>&1 &); sleep 0.1"
    ),
    "memory of mappings": Attack(
        python(
            "import ctypes, time\nlibc = ctypes.CDLL(None)\n"
            "libc.mmap.restype = ctypes.c_void_p\nimport os\n"
            "for _ in range(6):\n if os.fork() == 0:\n"
            "  for i in range(60000): libc.mmap(None, 4096, i % 2 + 1, 0x22, "
            "-1, 0)\n"
            "  time.sleep(90)\ntime.sleep(90)"
        ),
        killed_for=("memory",),
    ),
    "memory of pipes": Attack(
        python(
            "import os, time\nfor _ in range(50):\n if os.fork() == 0:\n"
            "  p = []\n  try:\n"
            "   while 1:\n    r, w = os.pipe(); os.set_blocking(w, False);"
            " p.append(w); os.write(w, b'x' * 65536)\n"
            "  except OSError: time.sleep(90)\ntime.sleep(90)"
        ),
        killed_for=("memory",),
    ),
    "memory of sockets": Attack(
        python(
            "import socket, os, time\nfor _ in range(50):\n"
            " if os.fork() == 0:\n  p = []\n  try:\n"
            "   while 1:\n    a, b = socket.socketpair(); a.setblocking(False);"
            " p += [a, b]\n"
            "    try:\n     while 1: a.send(b'x' * 4096)\n    except BlockingIOError: "
            "pass\n"
            "  except OSError: time.sleep(90)\ntime.sleep(90)"
        ),
        killed_for=("memory",),
    ),
    "shared anonymous memory": Attack(
        python(
            "import mmap\ntry: mmap.mmap(-1, 1 << 20); print('GOT')\nexcept OSError as e: print(e)"
        ),
        "not permitted",
        "GOT",
    ),
    "memfd": Attack(call("319, b'x', 0"), "-1 EPERM"),
    "shared memory of /dev/zero": Attack(
        python(
            "import mmap\nf = open('/dev/zero', 'r+b')\n"
            "try: mmap.mmap(f.fileno(), 1 << 20); print('GOT')\n"
            "except OSError as e: print('REFUSED')"
        ),
        "REFUSED",
        "GOT",
    ),
    "System V shared memory": Attack(call("29, 0, 1 << 20, 0o1600"), "-1 EPERM"),
    "huge pages": Attack(call("9, 0, 1 << 21, 3, 0x40022, -1, 0"), "-1 EPERM"),
    "larger pipe": Attack(
        python(
            "import fcntl, os\nr, w = os.pipe()\ntry: print(fcntl.fcntl(w, "
            "1031, 1 << 20))\nexcept OSError as e: print(e)"
        ),
        "not permitted",
    ),
    # ---- files
    "full disk": Attack(
        "dd if=/dev/zero of=/x bs=1M count=500; ls -l /x | wc -l; rm /x", "No space left"
    ),
    "full /tmp and /dev/shm": Attack(
        "dd if=/dev/zero of=/tmp/x bs=1M count=500; dd if=/dev/zero of=/dev/shm/x "
        "bs=1M count=500; rm /tmp/x /dev/shm/x",
        "No space left",
    ),
    "full /dev": Attack("dd if=/dev/zero of=/dev/x bs=1M count=5; rm /dev/x", "No space left"),
    "too many files": Attack(
        "mkdir /m; cd /m; seq 20000 | xargs touch 2>&1 | tail -1; ls | wc -l; rm -r /m",
        "No space left",
    ),
    "sparse file": Attack(
        "truncate -s 1T /x; ls -l /x | wc -l; rm -f /x", "too large|File size limit|XFSZ|SIGXFSZ"
    ),
    "deep directories": Attack(
        python("import os\nfor _ in range(3000):\n os.mkdir('d'); os.chdir('d')\nprint('deep')"),
        "deep",
    ),
    "endless output": Attack("yes", killed_for=("output", "time"), seconds=20),
    "output without newline": Attack("head -c 3000000 /dev/full | tr '\\0' x"),
    "binary output": Attack("head -c 100000 /dev/urandom"),
    "replaced bash": Attack(
        "cp /usr/bin/true /usr/bin/bash.new; mv /usr/bin/bash /usr/bin/b;"
        " echo gone; mv /usr/bin/b /usr/bin/bash",
        "gone",
    ),
    # ---- privileges
    "trace of process 1": Attack(
        call("101, 16, 1, 0, 0")
        + "ls /proc/1/fd /proc/1/cwd/ /proc/1/root/ 2>&1; cat /proc/1/environ "
        "/proc/1/mem 2>&1",
        "-1 EPERM",
        r"python|store",
    ),
    "descriptors of process 1": Attack(
        "ls /proc/1/fd | wc -l; ls /proc/1/task/1/fd | wc -l", "(?s)^0\n.*^0\n"
    ),
    "command line of process 1": Attack(
        "tr '\\0' ' ' < /proc/1/cmdline; echo end", "end", "python|rl_loop|/"
    ),
    "memory of process 1": Attack(
        python(
            f"{C}b = ctypes.create_string_buffer(8)\nclass V(ctypes.Structure):"
            " _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
            "v, r, one = V(ctypes.addressof(b), 8), V(0x400000, 8), ctypes.c_ulong(1)\n"
            "zero = ctypes.c_ulong(0)\n"
            "print(l.process_vm_readv(1, ctypes.byref(v), one, ctypes.byref(r), "
            f"one, zero), {E})"
        ),
        "-1 EPERM",
    ),
    "descriptor of process 1": Attack(
        python(
            f"{C}import os\nf = os.pidfd_open(1)\nprint([l.syscall(438, f, "
            "n, 0) for n in range(20)].count(-1))"
        ),
        "^20$",
    ),
    "mount": Attack(call("165, b'x', b'/mnt', b'tmpfs', 0, 0"), "-1 EPERM"),
    "unmount": Attack(call("166, b'/proc', 2"), "-1 EPERM"),
    "new mount interface": Attack(
        call("430, b'tmpfs', 0") + call("428, -100, b'/', 1"), "(?s)-1 EPERM.*-1 EPERM"
    ),
    "user namespace": Attack(call("272, 0x10000000"), "-1 EPERM"),
    "clone into a namespace": Attack(call("56, 0x10000000 | 17, 0, 0, 0, 0"), "-1 EPERM"),
    "clone3": Attack(call("435, 0, 0"), "-1 ENOSYS"),
    "namespace of process 1": Attack(
        python(
            "import os\ntry: os.setns(os.open('/proc/1/ns/mnt', 0), 0); print('GOT')\n"
            "except OSError as e: print(e)"
        ),
        "Permission denied|not permitted",
        "GOT",
    ),
    "chroot": Attack(call("161, b'/tmp'"), "-1 EPERM"),
    "other user": Attack(
        python(
            "import os\nfor f in (os.setuid, os.setgid):\n try: f(1000); print('GOT')\n"
            " except OSError as e: print(e)"
        ),
        "Invalid argument|not permitted",
        "GOT",
    ),
    "setuid program": Attack(
        "cp /usr/bin/bash /b; chmod 6755 /b; /b -p -c 'grep CapEff /proc/self/status'",
        "CapEff:\\s0000000000000000",
    ),
    "capabilities": Attack(
        "grep -E 'Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status",
        "(?s)CapPrm:\t0+\nCapEff:\t0+\nCapBnd:\t0+\nCapAmb:\t0+\nNoNewPrivs:\t1\nSeccomp:\t2",
    ),
    "lower oom score": Attack(
        "cat /proc/self/oom_score_adj; echo 0 > /proc/self/oom_score_adj;"
        " cat /proc/self/oom_score_adj",
        "(?s)1000.*1000",
    ),
    "kernel settings": Attack(
        "for f in kernel/core_pattern kernel/hostname vm/drop_caches user/max_user_names"
        "paces; do echo 1 > /proc/sys/$f && echo GOT; done; echo b > /proc/sysrq-trigger"
        " && echo GOT; echo end",
        "end",
        "GOT",
    ),
    "writable /sys": Attack("ls /sys | wc -l", "^0$|No such"),
    "device nodes": Attack(
        "mknod /d b 254 0 && echo GOT; mknod /e c 1 1 && echo GOT; ls "
        "/dev/vda /dev/kmsg /dev/mem /dev/fuse && echo GOT; cat /proc/kcore "
        "| head -c 1 && echo end",
        None,
        "GOT",
    ),
    "terminal input": Attack(
        python(
            "import pty, os, fcntl\nm, s = pty.openpty()\ntry: fcntl.ioctl(s, "
            "0x5412, b'x'); print('GOT')\nexcept OSError as e: print(e)"
        ),
        "not permitted",
        "GOT",
    ),
    "terminals without end": Attack(
        python(
            "import pty\nn = 0\ntry:\n while n < 400: pty.openpty(); n += "
            "1\nexcept OSError as e: print('REFUSED', n <= 64)"
        ),
        "REFUSED True",
    ),
    "removed devices": Attack(
        "rm -f /dev/null; chmod 000 /dev/null; echo x > /dev/null; ls /dev/null", "/dev/null"
    ),
    "bpf, keys, performance counters, io_uring": Attack(
        python(
            f"{C}for n in (321, 250, 298, 425, 323, 317, 206, 240): print(l.syscall(n, "
            f"0, 0, 0, 0, 0), {E})"
        ),
        "(?s)(-1 EPERM\\n){8}",
    ),
    "reboot and modules": Attack(
        python(
            f"{C}for n in (169, 246, 175, 313, 167, 163, 227, 103): print(l.syscall(n, "
            f"0, 0, 0, 0, 0), {E})"
        ),
        "(?s)(-1 EPERM\\n){8}",
    ),
    "x32 system calls": Attack(
        "bash -c '" + 'python3 -c "import ctypes; ctypes.CDLL(None).syscall(0x40000000 '
        "+ 39)\"'; echo status $?",
        "status (159|31)",
    ),
    "all processors": Attack(
        python(
            "import os\nos.sched_setaffinity(0, range(os.cpu_count()))\n"
            "print(len(os.sched_getaffinity(0)))"
        ),
        "^1$",
    ),
    "higher priority": Attack(
        python(
            "import os\ntry: os.nice(-5); print('GOT')\nexcept OSError: print('REFUSED')\n"
            "try: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1));"
            " print('GOT')\nexcept OSError: print('REFUSED')"
        ),
        "(?s)REFUSED.*REFUSED",
        "GOT",
    ),
    # ---- the host and other sandboxes
    "files of the host": Attack(
        "ls -a /.. /proc/1/root/.. /home /root 2>&1; cat /proc/self/root/../../etc/hostn"
        "ame /proc/1/root/etc/shadow 2>&1; ls -d /usr/local/src "
        "2>&1",
        "No such file",
        r"root:\$|pyenv",
    ),
    "paths of the host": Attack(
        "cat /proc/self/mountinfo /proc/self/maps /proc/mounts | grep "
        "-E 'store|pytest|shell-images' && echo GOT; echo end",
        "end",
        "GOT",
    ),
    "handles of files": Attack(call("304, -100, 0, 0"), "-1 EPERM"),
    "processes of the host": Attack("ls /proc | grep -c '^[0-9]'; kill -0 2000 2>&1", "^[2-9]\n"),
    "network": Attack(
        python(
            "import socket\nfor a in (('10.0.0.1', 80), ('8.8.8.8', 53), ('127.0.0.1', "
            "22)):\n"
            " try: socket.create_connection(a, 1); print('GOT')\n"
            " except OSError as e: print(e)"
        ),
        "unreachable",
        "GOT",
    ),
    "other address families": Attack(
        python(
            "import socket\nfor f in (40, 38, 17, 29, 31):\n"
            " try: socket.socket(f, 1); print('GOT')\n except OSError as e: "
            "print(e.errno)"
        ),
        "(?s)(13\\n){5}",
        "GOT",
    ),
    "interfaces": Attack(
        "cat /proc/net/dev | tail -n +3 | wc -l; cat /proc/net/route | wc -l", "^1\n1\n"
    ),
    "abstract sockets of the host": Attack("grep -c @ /proc/net/unix", "^0"),
    "locks and keys of the host": Attack(
        "cat /proc/locks /proc/keys /proc/key-users | wc -c", "^0\n"
    ),
    "messages of the kernel": Attack(
        "head -c 1 /proc/kmsg && echo GOT; head -c 1 /dev/kmsg && echo GOT; echo end", "end", "GOT"
    ),
    "open descriptors": Attack("ls /proc/self/fd | tr '\\n' ' '", "^0 1 2 3 $"),
    # ---- the persistent shell
    "open descriptors of the shell": Attack(
        "ls /proc/self/fd | tr '\\n' ' '", "^0 1 2 3 $", persistent=True
    ),
    "control socket of the shell": Attack(
        "for fd in $(seq 0 1100); do readlink /proc/$$/fd/$fd; done | grep -v pipe; echo end",
        "end",
        "socket|anon|proc|dir|upper",
        persistent=True,
    ),
    "shell exits": Attack("exit 7", persistent=True),
    "shell with an open quote": Attack("echo 'abc", persistent=True),
    "shell reads its input": Attack("cat; read x; echo done", "done", persistent=True),
    "shell is replaced": Attack("exec sleep 0.2", persistent=True),
    "shell forges its status": Attack(
        "printf '0\\0/\\0' >&9; printf '0\\0/\\0' >&10; false", persistent=True
    ),
    "shell kills itself": Attack("kill -9 $$", persistent=True),
    "shell redefines builtins": Attack(
        "alias ls=false; trap 'echo trapped' EXIT DEBUG; printf() { false;"
        " }; eval() { false; }; echo set",
        killed_for=("time", None),
        seconds=2,
        persistent=True,
    ),
    "shell closes its pipes": Attack(
        "exec 8<&- 9>&- 10>&- 11>&- 1>&- 2>&-",
        killed_for=("time", None),
        seconds=2,
        persistent=True,
    ),
    "shell steals its commands": Attack(
        "(while read -r -u 8 -d '' x; do :; done) & (cat <&10) & echo started",
        killed_for=("time", None),
        seconds=2,
        persistent=True,
    ),
    "shell with a long command": Attack(
        f"x='{'a' * 200_000}'; echo ${{#x}}", "200000", persistent=True
    ),
    "command with NUL": Attack("echo a\0b", "ab", persistent=True),
    "command with broken text": Attack("echo \ud800", r"\?"),
}


def failures(shells: Shells, attack: Attack) -> list[str]:
    """Run an attack in a new sandbox, and return what it achieved."""
    found = []
    with shells.open(**LIMITS) as shell:
        result = shell.run(attack.command, seconds=attack.seconds, persistent=attack.persistent)
        if result.killed_for not in attack.killed_for:
            found.append(f"killed for {result.killed_for}, not {attack.killed_for}")
        if attack.expected and not re.search(attack.expected, result.output, re.MULTILINE):
            found.append(f"{attack.expected!r} is missing: {result.output[-500:]!r}")
        if attack.absent and re.search(attack.absent, result.output):
            found.append(f"{attack.absent!r} was found: {result.output[-500:]!r}")
        # A full process table is the command's fault, and ends with its processes.
        shell.wait_for(shell.sandbox.end_processes())
        for persistent in (False, True):
            after = shell.run("echo ok", persistent=persistent)
            if not after.output.endswith("ok\n") or after.exit_code != 0:
                found.append(f"the sandbox does not work afterwards: {after}")
        if shell.wait_for(shell.sandbox.usage()).processes > 1:
            found.append("processes are left")
    return found
