"""The doctor reports every part and survives all faults."""

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from launch.doctor import (
    CHECKS,
    DoctorCheck,
    Severity,
    check_compiler,
    check_package,
    check_sandbox,
    check_transformer_engine,
    is_ready,
    print_checks,
    run_check,
    run_doctor,
)

ROOT = Path(__file__).parents[2]


def test_doctor_checks_every_part_and_finds_python_packages() -> None:
    checks = {check.name: check for check in run_doctor()}
    assert list(checks) == [name for name, _ in CHECKS]
    for name in ("python", "torch", "megatron-core", "transformers", "ray", "C compiler"):
        assert checks[name].status is Severity.OK, checks[name]
    assert all(check.advice for check in checks.values() if check.status is not Severity.OK)


def test_doctor_names_command_for_missing_bubblewrap_or_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_sandbox() == (Severity.MISSING, "no bwrap", "sudo apt-get install -y bubblewrap")
    assert check_compiler() == (Severity.MISSING, "no cc", "sudo apt-get install -y gcc libc6-dev")


def test_documented_transformer_engine_command_is_correct() -> None:
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("it is installed")
    finding = check_transformer_engine()
    command = finding.advice.removeprefix("GPU training needs it: ")
    page = (ROOT / "docs/installing.md").read_text()
    assert command.replace(f"{ROOT}/", "") in page.splitlines()


def test_a_library_that_does_not_load_is_reported_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_library.py").write_text(
        "raise OSError('libcudart.so.13: cannot open\\nsecond line')",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    check = run_check("broken", check_package("torch", "broken_library"))
    assert check.status is Severity.MISSING
    assert check.detail == "OSError: libcudart.so.13: cannot open"
    assert check.advice


def test_machine_is_ready_if_limited_but_not_if_part_is_missing() -> None:
    limited = DoctorCheck("GPUs", Severity.LIMITED, "none", "")
    assert is_ready([limited])
    assert not is_ready([limited, DoctorCheck("sandbox", Severity.MISSING, "", "")])


def test_doctor_prints_findings_and_advice_literally() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_checks(
        [DoctorCheck("engine", Severity.LIMITED, "[none]", "pip install engine[torch]")], console
    )
    output = console.file.getvalue()
    for part in ("engine", "limited", "[none]", "pip install engine[torch]"):
        assert part in output


@pytest.mark.parametrize("terminal", [True, False])
def test_doctor_breaks_no_command(terminal: bool) -> None:
    """Users copy these commands, which does not work if a path contains a line break."""
    command = "pip install -r " + "/a/long/path" * 9 + "/requirements-gpu.txt"
    console = Console(file=io.StringIO(), width=60, force_terminal=terminal)
    print_checks([DoctorCheck("engine", Severity.LIMITED, "none", f"do: {command}")], console)
    assert command in console.file.getvalue()
