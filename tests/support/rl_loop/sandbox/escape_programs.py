"""Pieces of programs that try to cause an infrastructure failure.

``STEPS`` do something hostile and continue, ``ENDINGS`` end a program or run forever. Exceptions of
a step are caught, so that the next step runs.
"""

from __future__ import annotations

import platform
import textwrap

COLUMN = 0 if platform.machine() == "x86_64" else 1
FORK, EXIT, RT_SIGQUEUEINFO = (57, 60, 129) if COLUMN == 0 else (220, 93, 138)

IMPORTS = """
import atexit, builtins, ctypes, gc, os, resource, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def forge(number):
    # a signal that says it comes from the kernel, which process 1 does not ignore
    info = ctypes.create_string_buffer(128)
    struct.pack_into('iii', info, 0, number, 0, 0x80)
    libc.syscall(@RT_SIGQUEUEINFO@, os.getpid(), number, info)
def spin():
    while True:
        pass
def frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
""".replace("@RT_SIGQUEUEINFO@", str(RT_SIGQUEUEINFO))

LIMITS = (
    "AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC",
    "RSS", "RTPRIO", "RTTIME", "SIGPENDING", "STACK",
)  # fmt: skip
LIMIT_VALUES = (0, 1, 2, 4096, 1 << 20)


def set_limit(name: str, soft: int, hard: int) -> str:
    return f"resource.setrlimit(resource.RLIMIT_{name}, ({soft}, {hard}))"


STEPS = {
    "block all signals": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "ignore all signals": """
for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
""",
    "signals to everything in sight": """
for target in (0, -1, os.getpid(), os.getppid(), *range(2, 300)):
    for number in (2, 15, 10, 17, 18, 24, 25, 40, 64, 9):
        try:
            os.kill(target, number)
        except OSError:
            pass
""",
    "an alarm": "signal.setitimer(signal.ITIMER_REAL, 0.2, 0.001)\nsignal.setitimer(signal.ITIMER_PROF, 0.1)",
    "a stop that seems to come from the kernel in a while": """
threading.Thread(target=lambda: (time.sleep(0.3), forge(signal.SIGSTOP)), daemon=True).start()
""",
    "closed descriptors": "os.closerange(0, 4096)",
    "garbage on every descriptor": r"""
for descriptor in range(300):
    for garbage in (b'F', b'R{}\n', struct.pack('!i', 1 << 30), struct.pack('!i', 2) + b'Fx', bytes(range(256))):
        try:
            os.write(descriptor, garbage)
        except OSError:
            pass
""",
    "other descriptors in their place": """
null = os.open('/dev/null', os.O_RDWR)
for descriptor in range(64):
    os.dup2(null, descriptor)
""",
    "the reading end of its output": """
output = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)
os.write(1, b'x' * 100)
os.read(output, 50)
""",
    "output in flight in sockets that nobody reads": """
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [other.fileno(), 1, 2])
socket.send_fds(other, [b'x'], [one.fileno(), 1, 2])
""",
    "attributes of its process": """
for option in (*range(59), *range(60, 80)):  # 59 lets no system call through
    for value in (0, 1, 9, 1 << 40):
        libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)
""",
    "a name that confuses readers of /proc": r"libc.prctl(15, b'a) R 1 1\nVmPTE:', 0, 0, 0)",
    "namespaces": "for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000): libc.unshare(flag)",
    "tracing": "libc.ptrace(0, 0, 0, 0)\nlibc.ptrace(16, 1, 0, 0)",
    "filters of its own": "libc.prctl(22, 1, 0, 0, 0)\nlibc.syscall(317, 0, 0, 0)",
    "daemons that spin": """
for _ in range(4):
    if os.fork() == 0:
        try:
            os.setpgid(0, 0)
        finally:
            if os.fork() == 0:
                spin()
            os._exit(0)
""",
    "as many processes as it gets": """
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    pass
""",
    "zombies": """
try:
    while True:
        if os.fork() == 0:
            os._exit(9)
except OSError:
    pass
""",
    "as many threads as it gets": """
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    pass
""",
    "a thread that never ends": "threading.Thread(target=spin).start()",
    "a full disk": """
for folder in ('/tmp', '/dev/shm'):
    for number in range(20):
        try:
            with open(f'{folder}/{number}', 'wb') as file:
                file.write(bytes(8 << 20))
        except OSError:
            pass
""",
    "no inode left": """
number = 0
while number < 10000:
    os.close(os.open(f'/tmp/i{number}', os.O_CREAT))
    number += 1
""",
    "no descriptor left": "kept = []\nwhile True:\n    kept.append(os.dup(1))",
    "memory to the limit": "block = []\nwhile True:\n    block.append(bytearray(16 << 20))",
    "huge mappings": """
for size in (1 << 30, 1 << 40, 1 << 46):
    libc.mmap(None, ctypes.c_size_t(size), 3, 0x4022, -1, 0)
""",
    "holes in its address space": """
size = 3000 * 4096
address = libc.mmap(None, ctypes.c_size_t(size), 1, 0x22, -1, 0)
for n in range(0, 3000, 2):
    libc.mprotect(ctypes.c_void_p(address + 4096 * n), ctypes.c_size_t(4096), 0)
""",
    "a folder that is gone": """
os.makedirs('/tmp/gone')
os.chdir('/tmp/gone')
os.rmdir('/tmp/gone')
os.chmod('/tmp', 0)
""",
    "no library to be found": "sys.path.clear()\nsys.meta_path.clear()\nsys.path_hooks.clear()",
    "no modules": "sys.modules.clear()",
    "other builtins": "builtins.print = builtins.open = builtins.len = builtins.max = None",
    "other functions of the system": """
def nothing(*arguments, **options):
    return 0
os._exit = os.fork = os.waitpid = os.kill = os.read = os.close = os.dup2 = nothing
""",
    "other functions that raise": """
def fail(*arguments, **options):
    raise MemoryError
struct.pack_into = struct.unpack_from = threading.enumerate = time.monotonic = os.dup = fail
sys.stdout.flush = sys.stderr.flush = fail
""",
    "the supervisor's functions": """
for frame in frames():
    for name in ('send', 'supervise', 'run_call', 'CallFailedError', 'end_program', 'watch'):
        thing = frame.f_globals.get(name)
        if callable(thing):
            try:
                thing(b'F')
            except BaseException:
                pass
""",
    "the supervisor's exception": """
for frame in frames():
    if 'CallFailedError' in frame.f_globals:
        failure = frame.f_globals['CallFailedError']('out of memory')
        def fail(*arguments):
            raise failure
        threading.enumerate = fail
""",
    "progress that cannot be": r"""
for line in open('/proc/self/maps'):
    if 'rw-s' in line:
        address = int(line.partition('-')[0], 16)
        for begun, seconds in ((0, float('nan')), (7, 1e300), (0xffffffff, -1e300), (1, float('inf'))):
            ctypes.memmove(address, struct.pack('=IId', begun, 3, seconds), 16)
""",
    "text that is none": r"print('\ud800\x00\x1b[2J' * 10)" + "\nos.write(1, bytes(range(256)) * 4)",
    "no standard output": "sys.stdout = sys.stderr = None",
    "a trace function that raises": "def trace(*arguments):\n    raise ValueError\nsys.settrace(trace)",
    "functions at exit": "for _ in range(3):\n    atexit.register(spin)",
    "no more collection": "gc.disable()\ngc.freeze()\ngc.set_threshold(1)",
    "its share of the processors": """
os.nice(19)
os.sched_setaffinity(0, {0})
os.sched_setscheduler(0, 5, os.sched_param(0))
""",
    "all locks that it gets": """
import fcntl
with open('/tmp/locks', 'wb') as file:
    for start in range(0, 1800, 2):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, start)
""",
}  # fmt: skip

ENDINGS = {
    "ends": "",
    "raises": "raise OSError(12, 'Cannot allocate memory')",
    "raises what is no exception": "raise BaseException",
    "spins": "spin()",
    "sleeps": "time.sleep(60)",
    "exits": "sys.exit(-1)",
    "exits with an object": "sys.exit(object())",
    **{f"exits behind Python with {code}": f"os._exit({code})" for code in (0, 1, 9, 137, 143, 255)},
    "writes without end": "while True:\n    os.write(1, b'x' * 65536)",
    "prints lines without end": "while True:\n    print('line', flush=True)",
    "crashes": "ctypes.string_at(0)",
    "aborts": "os.abort()",
    "divides in C": "signal.raise_signal(signal.SIGFPE)\nctypes.CFUNCTYPE(None)(1)()",
    "recurses": "def f():\n    return f()\nf()",
    "recurses in C": "sys.setrecursionlimit(10**9)\na = []\nfor _ in range(10**6):\n    a = [a]\nrepr(a)",
    "kills itself in the kernel's name": "forge(signal.SIGKILL)\ntime.sleep(60)",
    "stops itself in the kernel's name": "forge(signal.SIGSTOP)\ntime.sleep(60)",
    "uses up the processor time that it left itself": "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nspin()",
    "becomes another program": "os.execv('/usr/bin/sleep', ['sleep', '60'])",
    "becomes another program without memory": """
resource.setrlimit(resource.RLIMIT_AS, (1 << 22, 1 << 22))
os.execv('/usr/bin/env', ['env'])
""",
    "ends its first thread alone": f"""
threading.Thread(target=time.sleep, args=(60,)).start()
libc.syscall({EXIT}, 0)
""",
    "makes a system call of another architecture": "libc.syscall(0x40000000, 0)",
    "takes all memory with many processes": """
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(b'x') * (60 << 20)
        time.sleep(60)
time.sleep(60)
""",
}  # fmt: skip


def program(*steps: str, ending: str = "") -> str:
    """Return a program with these pieces of code."""
    parts = [IMPORTS]
    for step in steps:
        parts.append(
            f"try:\n{textwrap.indent(step.strip(), '    ')}\nexcept BaseException:\n    pass\n"
        )
    return "".join([*parts, ending.strip() + "\n"])


PROGRAMS = (
    {f"step: {name}": program(step) for name, step in STEPS.items()}
    | {f"ending: {name}": program(ending=ending) for name, ending in ENDINGS.items()}
    | {
        f"limit: {name} {value}, then {ending}": program(
            set_limit(name, value, value), ending=ENDINGS[ending]
        )
        for name in LIMITS
        for value in LIMIT_VALUES
        for ending in ("ends", "spins", "takes all memory with many processes")
    }
)
"""Each piece alone, and each limit lowered to each value."""

OF_EACH_KIND = [
    *(name for name in PROGRAMS if not name.startswith("limit:")),
    *(f"limit: {name} {value}, then spins" for name, value in
      (("CPU", 1), ("AS", 0), ("NOFILE", 0), ("NPROC", 0), ("FSIZE", 0), ("STACK", 4096), ("DATA", 0))),
]  # fmt: skip
"""Combinations that every test run tries."""
