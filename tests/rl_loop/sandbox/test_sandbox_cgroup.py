"""Cgroups of the servers: in a hierarchy of plain files, and in the kernel's if available."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.doctor import Severity, check_sandbox_limits
from rl_loop.sandbox import cgroup

BASE = cgroup.find_base()


def make_cgroup(
    path: Path, *, controllers: str = "cpu memory pids", enabled: str = "", processes: str = ""
) -> Path:
    path.mkdir(parents=True)
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.subtree_control").write_text(enabled)
    (path / "cgroup.procs").write_text(processes)
    (path / "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n")
    return path


def make_proc(folder: Path, mount: Path, own: str) -> Path:
    folder.mkdir()
    (folder / "mountinfo").write_text(
        f"22 1 8:1 / / rw - ext4 /dev/sda rw\n30 22 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw\n"
    )
    (folder / "cgroup").write_text(f"1:name=systemd:/elsewhere\n0::{own}\n")
    return folder


def test_own_cgroup_is_below_the_mount(tmp_path: Path) -> None:
    mount = make_cgroup(tmp_path / "cgroup")
    own = make_cgroup(mount / "user.slice" / "run.scope")
    proc = make_proc(tmp_path / "proc", mount, "/user.slice/run.scope")
    assert cgroup.own_cgroup(proc) == (mount, own)


def test_no_base_is_found_with_a_cgroup_v1_memory_controller(
    tmp_path: Path,
) -> None:
    mount = make_cgroup(tmp_path / "cgroup", controllers="hugetlb")
    assert cgroup.own_cgroup(make_proc(tmp_path / "proc", mount, "/")) is None


def test_nearest_writable_cgroup_is_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = make_cgroup(tmp_path / "cgroup", enabled="cpu memory")
    scope = make_cgroup(mount / "scope", enabled="cpu memory")
    main = make_cgroup(scope / cgroup.MAIN)
    monkeypatch.setattr(cgroup, "own_cgroup", lambda: (mount, main))
    assert cgroup.find_base() == scope
    monkeypatch.setattr(cgroup, "_is_writable", lambda path: False)
    assert cgroup.find_base() is None


def test_processes_of_a_busy_base_move_into_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = make_cgroup(tmp_path / "scope", processes="11\n12\n")
    moved: list[str] = []
    enabled: list[str] = []

    def write(file: Path, text: str) -> None:
        """Write like the kernel, which enables nothing for children of a cgroup with processes."""
        if file == scope / cgroup.MAIN / "cgroup.procs":
            moved.append(text)
            left = [line for line in (scope / "cgroup.procs").read_text().split() if line != text]
            (scope / "cgroup.procs").write_text("\n".join(left))
        elif (scope / "cgroup.procs").read_text().strip():
            raise OSError(16, "Device or resource busy")
        else:
            enabled.append(text)

    monkeypatch.setattr(cgroup, "_write", write)
    assert cgroup._enable_controllers(scope)
    assert moved == ["11", "12"]
    assert enabled == ["+memory", "+cpu", "+pids"]


def test_server_joins_its_cgroup_before_bubblewrap_starts(tmp_path: Path) -> None:
    base = make_cgroup(tmp_path / "base")
    path = base / f"gptoss-sandbox-{os.getpid()}-{10**9}"
    make_cgroup(path)
    made = cgroup.ServerCgroup.__new__(cgroup.ServerCgroup)
    made.path = path
    assert (
        os.system(" ".join(f"'{word}'" for word in made.joining(["/bin/sh", "-c", "exit 7"]))) >> 8
        == 7
    )
    assert (path / "cgroup.procs").read_text().strip().isdigit()


def test_memory_limit_of_a_call_adds_to_the_servers_memory(tmp_path: Path) -> None:
    made = cgroup.ServerCgroup.__new__(cgroup.ServerCgroup)
    made.path = make_cgroup(tmp_path / "server")
    (made.path / "memory.current").write_text("1000\n")
    (made.path / "memory.swap.max").write_text("max\n")
    made.limit_calls(5000)
    assert (made.path / "memory.max").read_text() == "6000"
    assert (made.path / "memory.swap.max").read_text() == "0"


def test_shell_sandbox_is_limited_before_it_joins(tmp_path: Path) -> None:
    made = cgroup.SandboxCgroup.__new__(cgroup.SandboxCgroup)
    made.path = make_cgroup(tmp_path / "sandbox")
    made.memory_events = os.open(made.path / "memory.events", os.O_RDONLY)
    for name in ("memory.swap.max", "pids.max"):
        (made.path / name).write_text("max\n")
    made.admit(process=77, memory_bytes=1 << 30, processes=64)
    assert (made.path / "memory.max").read_text() == str((1 << 30) + (64 << 20))
    assert (made.path / "memory.swap.max").read_text() == "0"
    assert (made.path / "pids.max").read_text() == "80"
    assert (made.path / "cgroup.procs").read_text() == "77"

    assert not made.killed_by_limit()
    (made.path / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 1\noom_kill 2\n")
    # Each kill counts once.
    assert [made.killed_by_limit(), made.killed_by_limit()] == [True, False]
    os.close(made.memory_events)


def test_only_cgroups_of_dead_owners_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / f"gptoss-sandbox-{2**22 + 5}-0"
    alive = tmp_path / f"gptoss-sandbox-{os.getpid()}-0"
    for path in (dead, alive, tmp_path / "other"):
        path.mkdir()
    cgroup.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "other"])


def test_doctor_names_the_protection_and_how_to_improve_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "find_base", lambda: None)
    status, found, advice = check_sandbox_limits()
    assert (status, "checked" in found, "niceness" in found) == (Severity.LIMITED, True, True)
    assert "systemd-run --user --scope -p Delegate=yes" in advice
    monkeypatch.setattr(cgroup, "find_base", lambda: Path("/sys/fs/cgroup/run"))
    monkeypatch.setattr(cgroup, "_enabled", lambda base: ["memory", "cpu"])
    assert check_sandbox_limits() == (
        Severity.OK,
        "memory limited by cgroup v2 (/sys/fs/cgroup/run); CPU shared by cgroup weights",
        "",
    )


@pytest.mark.skipif(
    BASE is None, reason="no cgroup v2 with the memory controller is delegated here"
)
def test_kernel_kills_a_call_beyond_its_memory_limit(make_sandbox: Callable) -> None:
    sandbox = make_sandbox(timeout_seconds=20, address_space_gb=0.54, total_memory_gb=0.27)
    code = """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                block = bytearray(b'x') * (90 << 20)
                time.sleep(60)
        time.sleep(60)
    """
    result = sandbox.run(textwrap.dedent(code))
    assert "memory" in (result.error or ""), result
    assert sandbox.run("print(1)").output == "1\n"
