"""Runs Python programs in forks of a process that has imported torch and Triton.

    python plugin_server.py

Each line of standard input is a request in JSON: arguments of the interpreter, environment, time limit in seconds,
and files for the program's output and errors. The answer is a line with the program's exit status. A new process
per program would spend 2 s of processor time on the imports.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch  # noqa: F401
import triton
import triton.language  # noqa: F401


def main() -> None:
    # Remove the directory of this program, whose modules are not for programs.
    sys.path.remove(str(Path(__file__).parent))
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # as in rl_loop.process_memory
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("an import has started a thread, which a fork would not have")

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def run(
    arguments: list[str], environment: dict[str, str], timeout: int, output: str, errors: str
) -> NoReturn:
    """Run the program and end this process."""
    status = 1
    signal.alarm(timeout)
    for number, name in ((0, os.devnull), (1, output), (2, errors)):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
        run_program(*arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_program(first: str, *rest: str) -> None:
    """Run ``-c CODE``, ``-m MODULE`` or ``FILE``, with arguments."""
    if first == "-c":
        code, *others = rest
        sys.argv = ["-c", *others]
        sys.path.insert(0, os.getcwd())
        program = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), program.__dict__)
    elif first == "-m":
        module, *_ = sys.argv = list(rest)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
