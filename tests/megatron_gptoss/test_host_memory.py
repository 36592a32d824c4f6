"""Memory of the machine and of cgroups, read from files in the kernel's format."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_gptoss import host_memory

GB = 10**9
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a machine of 100 GB with 60 GB free and empty cgroup mounts."""
    monkeypatch.setattr(host_memory, "CGROUP_MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "PROCESS_CGROUP_FILE", tmp_path / "process")
    memory = SimpleNamespace(total=100 * GB, available=60 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return tmp_path


def limit(group: Path, most: str | int, used: int, cached: int = 0, version: int = 2) -> None:
    group.mkdir(parents=True, exist_ok=True)
    names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    for name, value in zip(names, (most, used), strict=True):
        (group / f"memory.{name}").write_text(f"{value}\n")
    (group / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")


def test_memory_is_the_machines_without_limits(machine: Path) -> None:
    assert (host_memory.total_bytes(), host_memory.available_bytes()) == (100 * GB, 60 * GB)


def test_memory_of_a_container_is_its_limit(machine: Path) -> None:
    (machine / "process").write_text("0::/\n")
    limit(machine / "cgroup", 30 * GB, used=20 * GB, cached=15 * GB)
    assert host_memory.total_bytes() == 30 * GB
    assert host_memory.available_bytes() == 25 * GB


def test_memory_of_a_slurm_job_is_the_limit_of_its_group(machine: Path) -> None:
    """The job's group has the limit, and the step's group below has none."""
    (machine / "process").write_text("0::/system.slice/job_7/step_0\n")
    job = machine / "cgroup/system.slice/job_7"
    limit(job / "step_0", "max", used=5 * GB)
    limit(job, 40 * GB, used=10 * GB)
    assert host_memory.total_bytes() == 40 * GB
    assert host_memory.available_bytes() == 30 * GB


@pytest.mark.parametrize("path", ["/docker/abc", "/"])
def test_memory_of_a_v1_container_is_its_limit(machine: Path, path: str) -> None:
    (machine / "process").write_text(f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n")
    limit(machine / "cgroup/memory", 20 * GB, used=8 * GB, version=1)
    assert host_memory.total_bytes() == 20 * GB
    assert host_memory.available_bytes() == 12 * GB


def test_memory_of_an_unlimited_v1_group_is_the_machines(machine: Path) -> None:
    (machine / "process").write_text("4:memory:/\n")
    limit(machine / "cgroup/memory", UNLIMITED_V1, used=8 * GB, version=1)
    assert host_memory.total_bytes() == 100 * GB


def test_memory_limits_are_at_most_the_machine_memory() -> None:
    assert 0 < host_memory.available_bytes() <= host_memory.total_bytes()
    assert host_memory.total_bytes() <= psutil.virtual_memory().total
