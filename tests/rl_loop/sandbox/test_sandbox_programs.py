"""Programs in the sandbox: printed expressions, tracebacks, exit codes, the interpreter."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from rl_loop.sandbox import SandboxConfig

SYSTEM_PYTHON = Path("/usr/bin/python3")
INTERPRETERS = [None, SYSTEM_PYTHON] if SYSTEM_PYTHON.exists() else [None]


@pytest.fixture(scope="module")
def python(make_sandbox: Callable):
    return make_sandbox()


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("x = 'text'\nx", "'text'\n"),
        ("print(3)", "3\n"),
        ("None", ""),
        ("x = 4", ""),
        ("for i in range(2):\n    i", ""),
        ("", ""),
        ("'é' * 2", "'éé'\n"),
    ],
)
def test_repr_of_a_last_expression_is_printed(code: str, output: str, python) -> None:
    result = python.run(code)
    assert (result.output, result.exit_code, result.error) == (output, 0, None)


def test_traceback_has_only_the_programs_frames(python) -> None:
    result = python.run(
        "import json\nprint('before')\ndef f(text):\n    return json.loads(text)\nf('{')\n"
    )
    lines = result.output.splitlines()
    assert lines[:3] == [
        "before",
        "Traceback (most recent call last):",
        '  File "<sandbox>", line 5, in <module>',
    ]
    assert "    return json.loads(text)" in lines
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert all('"<sandbox>"' in line for line in lines if line.startswith("  File"))
    assert (result.exit_code, result.error) == (1, None)


def test_syntax_error_is_shown_with_its_line(python) -> None:
    result = python.run("x = 1\ny = = 2\n")
    assert result.output.splitlines()[:2] == ['  File "<sandbox>", line 2', "    y = = 2"]
    assert result.output.endswith("SyntaxError: invalid syntax\n")
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "output"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit('reason')", 1, "reason\n"),
        (
            "import subprocess; subprocess.run(['sh', '-c', 'echo shell; exit 4']).returncode",
            0,
            "shell\n4\n",
        ),
    ],
)
def test_exit_code_is_that_of_the_program(code: str, exit_code: int, output: str, python) -> None:
    result = python.run(code)
    assert (result.exit_code, result.output) == (exit_code, output)


def test_state_is_not_shared_between_calls(python) -> None:
    assert python.run("import math\nmath.pi = 3\nleft = 1\nmath.pi").output == "3\n"
    assert (
        python.run("import math\nprint(math.pi > 3.1, 'left' in globals())").output
        == "True False\n"
    )


def run_in_session(python, code: str, history: list[str]):
    return python._runner.run(python.sandbox.run(code, history))


def test_history_runs_in_the_same_interpreter_without_output(python) -> None:
    history = [
        "import os\nx = 40\nprint('no')",
        "x += 1\nos.system('echo no')",
        "x += 1\n1 / 0\nx = 0",
        "x",
    ]
    result = run_in_session(python, "print(x)", history)
    assert (result.output, result.exit_code, result.error, result.interpreter_ended) == (
        "42\n",
        0,
        None,
        False,
    )


def test_limits_apply_to_one_program_of_a_session(
    make_sandbox: Callable,
) -> None:
    python = make_sandbox(timeout_seconds=8, output_bytes=1000, cpu_seconds=1)
    # The history exceeds the limits of one program for time, processor time and output.
    history = ["import time\nprint('x' * 900)\ntime.sleep(3)\nend = time.process_time() + 0.4\n"
               "while time.process_time() < end: pass"] * 3  # fmt: skip
    result = run_in_session(python, "print('new')", history)
    assert (result.output, result.error, result.truncated) == ("new\n", None, False)
    assert result.seconds < 6


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "-1e300"])
def test_program_with_forged_progress_gets_no_more_time(
    seconds: str, make_sandbox: Callable
) -> None:
    forge = f"""
import ctypes, struct
for line in open('/proc/self/maps'):
    if 'rw-s' in line:
        address = int(line.partition('-')[0], 16)
        ctypes.memmove(address, struct.pack('=IId', 2, 1, float('{seconds}')), 16)
        print('forged')
while True:
    pass
"""
    result = make_sandbox(timeout_seconds=2).run(forge)
    assert (result.output, result.timed_out, result.interpreter_ended) == ("forged\n", True, True)
    assert 0 <= result.seconds < 30


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("print(1)", False), ("1 / 0", False), ("x = = 1", False), ("raise KeyboardInterrupt", False),
        ("exit()", True), ("import sys; sys.exit(1)", True), ("import os; os._exit(0)", True),
        ("import ctypes; ctypes.string_at(0)", True),
    ],
)  # fmt: skip
def test_result_reports_if_the_interpreter_ended(code: str, ended: bool, python) -> None:
    assert python.run(code).interpreter_ended == ended


def test_threads_processes_and_files_work(python) -> None:
    code = (
        "import multiprocessing, threading, tempfile\n"
        "threading.Thread(target=lambda: print('thread')).start()\n"
        "with tempfile.TemporaryFile() as file:\n    file.write(b'x')\n"
        "if __name__ == '__main__':\n    with multiprocessing.Pool(2) as pool:\n        print(pool.map(abs, [-1, 2]))\n"
    )
    result = python.run(code)
    assert sorted(result.output.splitlines()) == ["[1, 2]", "thread"], result


def test_hashes_are_equal_in_all_servers_but_not_random_numbers(python) -> None:
    codes = ["hash('text')"] * 3
    assert len({python.run(code).output for code in codes}) == 1
    assert python.run("import sys; sys.flags.hash_randomization").output == "0\n"
    assert len({python.run("import random; random.random()").output for _ in range(3)}) == 3


def test_invalid_utf8_in_output_or_code_gives_a_result(python) -> None:
    assert python.run("import os; os.write(1, b'a\\xffb') and None").output == "a\ufffdb"
    assert python.run("print(1)\0").exit_code == 1
    assert (
        python.run("print('\ud800' == '?')").output == "True\n"
    )  # a lone surrogate is not valid UTF-8 and is sent as "?"


def test_program_over_the_size_limit_is_not_run(make_sandbox: Callable) -> None:
    result = make_sandbox(code_bytes=100).run("print(1)" + " " * 100)
    assert (result.output, result.exit_code) == ("", 1)
    assert "108 bytes" in (result.error or "")


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_interpreter_is_a_base_installation_and_shows_no_home(
    interpreter: Path | None, make_sandbox: Callable
) -> None:
    result = make_sandbox(interpreter=interpreter).run(
        "import os, sys, sqlite3, ssl, ctypes, decimal\n"
        "print(sys.prefix == sys.base_prefix, sys.version_info[:2], os.getuid(), os.getgid(), os.getgroups())\n"
        f"print(os.path.exists({str(Path.home())!r}), os.path.exists({sys.prefix!r}) and {sys.prefix!r} != sys.prefix)"
    )
    first, second = result.output.splitlines()
    assert first.startswith("True (3, ")
    assert "65534 65534" in first
    assert second == "False False"
    if interpreter is None:
        assert str(sys.version_info[:2]) in first


def test_misspelled_setting_is_rejected_by_name() -> None:
    with pytest.raises(ValidationError, match="timeout_second"):
        SandboxConfig.model_validate({"timeout_second": 3})


LEGITIMATE = {
    "asyncio": (
        """
        import asyncio, selectors
        async def count(n):
            await asyncio.sleep(0.01)
            return n
        async def serve(reader, writer):
            writer.write((await reader.readline()).upper())
            await writer.drain()
            writer.close()
        async def main():
            print(sum(await asyncio.gather(*(count(n) for n in range(20)))))
            server = await asyncio.start_unix_server(serve, '/tmp/socket')
            reader, writer = await asyncio.open_unix_connection('/tmp/socket')
            writer.write(b'echo\\n')
            print(await reader.read())
            process = await asyncio.create_subprocess_exec('echo', 'child', stdout=-1)
            print((await process.communicate())[0], process.returncode)
            print(await asyncio.to_thread(pow, 2, 5))
            server.close()
        asyncio.run(main())
        """,
        "190\nb'ECHO\\n'\nb'child\\n' 0\n32\n",
    ),
    "selectors": (
        """
        import os, selectors
        reading, writing = os.pipe()
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ, 'pipe')
            print(selector.select(0))
            os.write(writing, b'x')
            print([(key.data, events) for key, events in selector.select(1)])
        """,
        "[]\n[('pipe', 1)]\n",
    ),
    "multiprocessing": (
        """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(2) as pool:
            print(list(pool.map(abs, [-1, -2, 3])))
        queue = multiprocessing.Queue()
        process = multiprocessing.Process(target=queue.put, args=('sent',))
        process.start()
        print(queue.get(timeout=20))
        process.join()
        """,
        "[1, 2, 3]\nsent\n",
    ),
    "subprocess": (
        """
        import subprocess, sys
        done = subprocess.run([sys.executable, '-c', 'import asyncio; asyncio.run(asyncio.sleep(0)); print(input())'],
                              input='through', capture_output=True, text=True, timeout=20)
        print(done.stdout, done.stderr, done.returncode)
        """,
        "through\n  0\n",
    ),
    "threading": (
        """
        import queue, threading
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            print(sum(pool.map(lambda n: n * n, range(10))))
        box, event = queue.Queue(), threading.Event()
        threading.Thread(target=lambda: (event.wait(), box.put('woken'))).start()
        event.set()
        print(box.get(timeout=20))
        """,
        "285\nwoken\n",
    ),
    "sqlite3": (
        """
        import sqlite3
        with sqlite3.connect('/tmp/data.db') as base:
            base.execute('create table t (n)')
            base.executemany('insert into t values (?)', [(n,) for n in range(5)])
            print(base.execute('select sum(n) from t').fetchone())
        """,
        "(10,)\n",
    ),
    "tempfile": (
        """
        import os, tempfile
        with tempfile.TemporaryDirectory() as folder:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                file.write(b'x' * 1000)
                file.flush()
                print(os.path.getsize(file.name))
        """,
        "1000\n",
    ),
}


@pytest.mark.parametrize("preload", [(), ("asyncio", "multiprocessing", "subprocess")])
@pytest.mark.parametrize("name", LEGITIMATE)
def test_library_works_in_the_sandbox(
    name: str, preload: tuple[str, ...], make_sandbox: Callable
) -> None:
    code, output = LEGITIMATE[name]
    settings = {"preload_modules": preload} if preload else {}
    result = make_sandbox(timeout_seconds=60, **settings).run(textwrap.dedent(code))
    assert (result.output, result.exit_code, result.error) == (output, 0, None)
