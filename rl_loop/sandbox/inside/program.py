"""Process of the program, process 1 of its namespace: sets itself up, drops privileges, runs code.

When it exits or is killed, the kernel kills all processes that it started.
"""

import ast
import builtins
import contextlib
import linecache
import math
import os
import resource
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import NoReturn

from rl_loop.sandbox.inside.confinement import (
    SeccompProgram,
    drop_capabilities,
    exit_with_parent,
    mount_own_files,
    set_resource_limits,
    write_file,
)
from rl_loop.sandbox.inside.messages import ProgramCall, SandboxServerSettings
from rl_loop.sandbox.inside.progress import SharedProgress

SET_UP = b"ok"
"""Message to the supervisor after the set-up."""

PROGRAM_NAME = "<sandbox>"
TRACEBACK_FRAMES = 8
LINE_CHARACTERS = 400


def run_program(
    call: ProgramCall,
    settings: SandboxServerSettings,
    seccomp: SeccompProgram,
    progress: SharedProgress,
    output_write: int,
    setup_write: int,
) -> NoReturn:
    """Set up this process for a call, run the programs, and exit.

    Args:
        call: programs to run.
        settings: limits.
        seccomp: system-call filter.
        progress: page shared with the supervisor.
        output_write: descriptor for standard output and error.
        setup_write: descriptor for SET_UP, or for an error of the set-up.
    """
    try:
        exit_with_parent()
        # Otherwise kill(0, ...) would reach the server's process group in spite of the namespaces.
        os.setsid()
        setup_write = keep_descriptors(output_write, setup_write)

        # The kernel then kills the program first, and not the server, if memory runs out.
        write_file("/proc/self/oom_score_adj", "1000")
        mount_own_files(settings)
        os.chdir("/tmp")

        # Mounting needs the capabilities, and the filter forbids the earlier steps.
        set_resource_limits(settings, call.program_count)
        drop_capabilities()
        seccomp.install()
        os.write(setup_write, SET_UP)
        os.close(setup_write)
    except BaseException as error:
        os.write(setup_write, str(error).encode())
        os._exit(1)
    os._exit(execute(call, settings, progress))


def keep_descriptors(output_write: int, setup_write: int) -> int:
    """Close all descriptors except ``setup_write``, empty standard input, output and error.

    Returns:
        The new number of ``setup_write``.
    """
    os.dup2(output_write, 1)
    os.dup2(output_write, 2)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    kept = os.dup2(setup_write, 3)
    os.closerange(4, 4096)
    return kept


def execute(call: ProgramCall, settings: SandboxServerSettings, progress: SharedProgress) -> int:
    """Run the session's programs in one ``__main__``, and return the exit code of the last one.

    The output of the earlier programs is discarded.
    """
    main = make_main_module()
    if call.history:
        with mute_output():
            for number, code in enumerate(call.history, start=1):
                progress.begin(number)
                run_code(code, main)
        limit_remaining_cpu(settings.max_cpu_seconds, call.program_count)

    progress.begin(call.program_count)
    try:
        exit_code = run_code(call.code, main)
        progress.record_end()
        # The interpreter waits for these threads at its exit, but os._exit does not.
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        exit_code = determine_exit_code(error)

    try:
        # The program may have closed or replaced both.
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        exit_code = exit_code or 1
    return exit_code


def make_main_module() -> types.ModuleType:
    """Create an empty ``__main__`` and remove the server's modules, as in a fresh interpreter."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [PROGRAM_NAME]
    # The place of a script's directory, as if the program were a file there.
    sys.path[0] = "/tmp"

    servers = [name for name in sys.modules if name.partition(".")[0] == "rl_loop"]
    for name in servers:
        del sys.modules[name]
    return main


def limit_remaining_cpu(cpu_seconds: int, programs: int) -> None:
    """Limit the last program to ``cpu_seconds`` in addition to the time of its history.

    The result is below the limit for all programs together. No process can raise it again.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = min(math.ceil(used.ru_utime + used.ru_stime) + cpu_seconds, cpu_seconds * programs)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def run_code(source: str, main: types.ModuleType) -> int:
    """Run one program in ``main``, and print a last expression's repr or an exception's traceback.

    A repr of None is not printed.

    Returns:
        0, or 1 after an exception.

    Raises:
        SystemExit: if the program ends the interpreter.
    """
    show_source_in_tracebacks(source)
    namespace = main.__dict__
    try:
        tree = ast.parse(source, PROGRAM_NAME)
        last_expression = take_last_expression(tree)
        exec(compile(tree, PROGRAM_NAME, "exec"), namespace)

        if last_expression is not None:
            value = eval(compile(last_expression, PROGRAM_NAME, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        # All exceptions are the program's, including KeyboardInterrupt and MemoryError.
        print_traceback(error)
        return 1
    return 0


def show_source_in_tracebacks(source: str) -> None:
    """Let tracebacks quote the program's lines, which are not in a file.

    An entry of linecache has size, modification time, lines and name. Without a time it is never
    compared with a file.
    """
    lines = source.splitlines(keepends=True)
    linecache.cache[PROGRAM_NAME] = (len(source), None, lines, PROGRAM_NAME)


def take_last_expression(tree: ast.Module) -> ast.Expression | None:
    """Remove a program's last statement and return it, if it is an expression.

    As in a notebook, its value is printed.
    """
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return None
    last = tree.body[-1]
    tree.body.pop()
    return ast.Expression(last.value)


@contextlib.contextmanager
def mute_output() -> Iterator[None]:
    """Discard all output within the block, including writes to descriptors."""
    null = os.open("/dev/null", os.O_WRONLY)
    outputs = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for descriptor in outputs:
        os.dup2(null, descriptor)
    os.close(null)
    # Without a finally: only the end of the interpreter passes through here, and a history that
    # ends it has no output.
    yield

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for descriptor, copy in outputs.items():
        os.dup2(copy, descriptor)
        os.close(copy)


def determine_exit_code(error: SystemExit) -> int:
    """Return the exit code of a SystemExit, 0 to 255.

    Codes that are not integers are printed and give 1.
    """
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 255
    with contextlib.suppress(BaseException):
        print(error.code, file=sys.stderr)
    return 1


def print_traceback(error: BaseException) -> None:
    """Print the traceback: the program's last TRACEBACK_FRAMES frames, with cut lines."""
    try:
        sys.stdout.flush()
        summary = traceback.TracebackException.from_exception(error)
        shown: traceback.TracebackException | None = summary
        while shown is not None:
            frames = [frame for frame in shown.stack if frame.filename == PROGRAM_NAME]
            shown.stack = traceback.StackSummary.from_list(frames[-TRACEBACK_FRAMES:])
            shown = shown.__cause__ or shown.__context__

        # Cut lines, because an error in a line of a megabyte would quote the whole line.
        lines = "".join(summary.format()).splitlines()
        text = "".join(f"{line[:LINE_CHARACTERS]}\n" for line in lines)
    except BaseException:
        # A hostile __str__, or no memory left.
        text = f"{type(error).__name__}\n"
    with contextlib.suppress(BaseException):
        print(text, end="", file=sys.stderr)
