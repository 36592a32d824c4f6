"""Start of the sandbox on machines without isolation: it fails and names the reason."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from launch.doctor import Severity, check_sandbox
from rl_loop.sandbox import (
    PythonSandbox,
    SandboxConfig,
    SandboxLimits,
    SandboxUnavailableError,
    check_isolation,
)
from rl_loop.sandbox.connection import ServerProcess
from tests.support.rl_loop.sandbox.ordinary_user import as_ordinary_user

CHECK = "from rl_loop.sandbox import check_isolation; check_isolation()"


def start(config: SandboxConfig) -> None:
    asyncio.run(PythonSandbox(config).start())


def test_isolation_is_available_on_this_machine() -> None:
    check_isolation()


def test_missing_bubblewrap_names_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        start(SandboxConfig())


def test_broken_bubblewrap_is_reported_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailableError, match="setting up uid map: Permission denied"):
        start(SandboxConfig())
    status, _, advice = check_sandbox()  # the report of gptoss doctor
    assert status is Severity.MISSING
    assert "Permission denied" in advice


def test_forbidden_user_namespaces_name_the_setting() -> None:
    # The limit is set in a new user namespace, so the limit of the machine does not change.
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, CHECK]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "user.max_user_namespaces is 0" in output
    assert "sysctl -w user.max_user_namespaces=" in output


def test_unknown_processor_is_named_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailableError, match="'riscv64'"):
        start(SandboxConfig())

    # This thread continues, so the server would not die with it. The error holds the connection.
    before = psutil.Process().children(recursive=True)
    with pytest.raises(SandboxUnavailableError, match="'riscv64'") as error:
        ServerProcess(SandboxConfig(), SandboxLimits())
    left = set(psutil.Process().children(recursive=True)) - set(before)
    assert not left, error


def test_virtual_environment_is_rejected_as_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(SandboxUnavailableError, match="is a virtual environment"):
        start(SandboxConfig(interpreter=tmp_path / "bin" / "python"))


def test_missing_interpreter_is_named() -> None:
    with pytest.raises(SandboxUnavailableError, match="/nowhere/python3"):
        start(SandboxConfig(interpreter=Path("/nowhere/python3")))


def test_missing_preloaded_module_is_named() -> None:
    with pytest.raises(SandboxUnavailableError, match="No module named 'not_installed_anywhere'"):
        start(SandboxConfig(preload_modules=("not_installed_anywhere",)))


def test_sandbox_is_isolated_for_an_ordinary_user() -> None:
    if os.geteuid() != 0:
        check_isolation()  # this is an ordinary user
        return
    code = "import os; print(os.getuid()); " + CHECK
    result = subprocess.run(
        [*as_ordinary_user(), sys.executable, "-c", code], capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("1000\n", "")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the attacks already run as an ordinary user")
def test_attacks_are_contained_for_an_ordinary_user() -> None:
    attacks = Path(__file__).with_name("test_sandbox_attacks.py")
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
            str(attacks),
        ]
        result = subprocess.run(
            [*as_ordinary_user(), sys.executable, "-m", "pytest", *options],
            capture_output=True,
            text=True,
            env=os.environ | {"HOME": folder, "TMPDIR": folder},
            cwd=Path(__file__).parents[3],
        )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
