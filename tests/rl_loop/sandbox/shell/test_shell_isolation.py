"""Start and end of shell sandboxes: nothing is left, and machines without isolation are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launch.doctor import Severity, check_shell_sandbox
from rl_loop.sandbox import SandboxError
from rl_loop.sandbox.seccomp import SyscallPolicy, seccomp_filter
from rl_loop.sandbox.shell import fork_server, sandbox
from tests.support.rl_loop.sandbox.ordinary_user import as_ordinary_user
from tests.support.rl_loop.sandbox.shell_attacks import ATTACKS, failures
from tests.support.rl_loop.sandbox.shells import Shells
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[4]

OWNER = """
import sys, time
from pathlib import Path
from tests.support.rl_loop.sandbox.shells import Shells
shells = Shells(Path(sys.argv[1]))
boxes = [shells.open() for _ in range(5)]
for box in boxes:
    box.run('trap "" TERM HUP INT; for i in 1 2 3; do setsid nohup sleep 987654 >/dev/null 2>&1 & done')
    box.run("true", persistent=True)
print(shells.pool._server.process.pid, flush=True)
time.sleep(1000)
"""


def below(root: int) -> list[psutil.Process]:
    return psutil.Process(root).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("victim", ["owner", "stopped owner", "fork server"])
def test_nothing_is_left_after_kill_9(victim: str, image_store: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(image_store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        try:
            assert owner.stdout is not None
            server = int(owner.stdout.readline())
            started = below(owner.pid)
            # The server; and process 1, three daemons and a bash of each sandbox.
            assert len(started) == 1 + 5 * 5
            if victim == "stopped owner":
                os.kill(owner.pid, signal.SIGSTOP)
            os.kill(server if victim == "fork server" else owner.pid, signal.SIGKILL)

            def left() -> list[psutil.Process]:
                return [each for each in started if is_alive(each)]

            began = time.monotonic()
            wait_until(lambda: not left(), seconds=60)
            print(f"{victim}: {len(started)} processes ended in {time.monotonic() - began:.2f} s")
        finally:
            owner.kill()


def test_nothing_of_a_sandbox_is_left_on_the_host(shells: Shells) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    files = sorted(shells.pool.store.folder.rglob("*"))
    before = len(below(os.getpid()))
    descriptors = len(os.listdir("/proc/self/fd"))
    with shells.open() as shell:
        shell.run("echo x > /x; (setsid sleep 600 >/dev/null 2>&1 &)")
        assert len(below(os.getpid())) == before + 2
    assert len(below(os.getpid())) == before
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert sorted(shells.pool.store.folder.rglob("*")) == files
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_killed_process_1_is_a_failure_and_no_result(shells: Shells) -> None:
    with shells.open() as shell:
        victim = next(each for each in below(os.getpid()) if each.name() == "sandbox")
        victim.kill()
        with pytest.raises(SandboxError, match="exited") as error:
            shell.run("echo x")
        assert error.value.failure_source == "server died"
    with shells.open() as shell:
        assert shell.output("echo next") == "next\n"


def test_lost_fork_server_is_replaced(shells: Shells) -> None:
    with shells.open() as shell:
        assert shells.pool._server is not None
        shells.pool._server.process.kill()
        shells.pool._server.process.wait()
        with pytest.raises(SandboxError) as error:
            shell.run("echo x")
        assert error.value.failure_source == "server died"
    with shells.open() as shell:
        assert shell.output("echo next") == "next\n"


def test_missing_layer_is_a_failure_of_the_start(shells: Shells) -> None:
    with pytest.raises(SandboxError, match=r"did not start: .*No such file") as error:
        shells.open(shells.image.with_layer("f" * 32))
    assert error.value.failure_source == "no sandbox"


CHECK = (
    "import asyncio, sys; from pathlib import Path; from rl_loop.sandbox.shell import *;"
    "asyncio.run(check_shell_sandboxes(ShellSandboxConfig(store=Path(sys.argv[1]))))"
)


@pytest.mark.parametrize("setting", ["max_user_namespaces", "max_net_namespaces"])
def test_forbidden_namespaces_name_the_setting(setting: str) -> None:
    # The limit is set in a new user namespace, so the limit of the machine does not change.
    script = f'echo 0 > /proc/sys/user/{setting} && exec "$0" -c "$1" "$2"'
    enter = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c"]
    command = [*as_ordinary_user(), *enter]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        output = subprocess.run(
            [*command, script, sys.executable, CHECK, f"{folder}/store"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        ).stderr
    assert f"user.{setting} is 0" in output, output
    assert f"sysctl -w user.{setting}=" in output


def test_doctor_runs_a_command(monkeypatch: pytest.MonkeyPatch, image_store: Path) -> None:
    status, found, advice = check_shell_sandbox()
    assert (status, advice) == (Severity.OK, ""), advice
    assert "starts in" in found
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    status, found, advice = check_shell_sandbox()
    assert status is Severity.LIMITED and "riscv64" in advice


# ---- the attacks find holes

HOLES = {
    "process 1 can be traced": (
        "inside/mounts.py",
        "kept = 1 << CAP_DAC_OVERRIDE | 1 << CAP_SYS_PTRACE",
        "kept = 0; libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)",
        "trace of process 1",
    ),
    "process 1 is dumpable": (
        "inside/mounts.py",
        "libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)",
        "pass",
        "descriptors of process 1",
    ),
    "network of the host": (
        "inside/server.py",
        "    | CLONE_NEWCGROUP\n",
        "    | CLONE_NEWCGROUP) & ~CLONE_NEWNET; (0\n",
        "interfaces",
    ),
    "writable /proc": (
        "inside/mounts.py",
        "MS_REMOUNT | MS_RDONLY |",
        "MS_REMOUNT |",
        "lower oom score",
    ),
    "command line shown": (
        "inside/process_one.py",
        "        hide_command_line()\n",
        "",
        "command line of process 1",
    ),
    "real /dev/zero": (
        "inside/mounts.py",
        '"zero": "full"',
        '"zero": "zero"',
        "shared memory of /dev/zero",
    ),
    "interrupts end process 1": (
        "inside/process_one.py",
        "signal.SIGINT, signal.SIG_DFL",
        "signal.SIGINT, signal.default_int_handler",
        "kill of process 1",
    ),
    "no limit of memory": (
        "inside/commands.py",
        "return self._root.watch.check() if check else None",
        "return None",
        "memory of mappings",
    ),
}


@pytest.mark.parametrize("hole", HOLES)
def test_attacks_find_planted_holes(
    hole: str, image_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, text, replacement, attack = HOLES[hole]
    copy = tmp_path / "sandbox"
    subprocess.run(["cp", "-r", str(fork_server.SANDBOX_FOLDER), str(copy)], check=True)
    source = (copy / "shell" / file).read_text()
    assert source.count(text) == 1
    (copy / "shell" / file).write_text(source.replace(text, replacement))
    monkeypatch.setattr(fork_server, "SANDBOX_FOLDER", copy)
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", 4.0)
    if hole == "network of the host":
        # The settings of the namespace belong to the host then.
        mounts = copy / "shell" / "inside" / "mounts.py"
        lines = [line for line in mounts.read_text().splitlines() if '"net/' not in line]
        mounts.write_text("\n".join(lines).replace("fcntl.ioctl(", "(lambda *_: None)("))
    shells = Shells(image_store)
    try:
        assert find_failure(shells, attack)
    finally:
        shells.close()


def find_failure(shells: Shells, name: str) -> bool:
    # A successful attack may stop process 1.
    attack = replace(ATTACKS[name], seconds=min(ATTACKS[name].seconds, 8.0))
    try:
        return bool(failures(shells, attack))
    except SandboxError:
        return True


@pytest.mark.parametrize(
    "attack", ["memfd", "bpf, keys, performance counters, io_uring", "other address families"]
)
def test_attacks_find_a_missing_filter(attack: str, image_store: Path) -> None:
    shells = Shells(image_store)
    try:
        assert not failures(shells, ATTACKS[attack])
        policy = SyscallPolicy(denied={}, missing={}, ignored={}, rules={})
        shells.pool._filter = seccomp_filter(os.uname().machine, policy).hex()
        assert failures(shells, ATTACKS[attack])
    finally:
        shells.close()


# ---- ordinary users


def run_as_ordinary_user(*selected: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        options = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            f"--basetemp={folder}/run",
        ]
        result = subprocess.run(
            [*as_ordinary_user(), sys.executable, "-m", "pytest", *options, *selected],
            capture_output=True,
            text=True,
            env=os.environ | {"HOME": folder, "TMPDIR": folder},
            cwd=ROOT,
        )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an ordinary user")
def test_sandboxes_work_for_an_ordinary_user() -> None:
    folder = "tests/rl_loop/sandbox/shell"
    run_as_ordinary_user(
        f"{folder}/test_shell_attacks.py",
        "-k",
        "trace or capabilities or oom or network or (fork and bomb) or full",
    )


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an ordinary user")
def test_all_attacks_fail_for_an_ordinary_user() -> None:
    folder = "tests/rl_loop/sandbox/shell"
    run_as_ordinary_user(
        *(f"{folder}/test_shell_{name}.py" for name in ("attacks", "commands", "images"))
    )
