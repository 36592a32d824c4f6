"""Is this machine ready? Every part a run needs, whether it is there, and what to do if it is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Status(StrEnum):
    OK = "ok"
    LIMITED = "limited"  # CPU runs work; something that a cluster run needs is not here
    MISSING = "missing"  # runs on this machine will fail


class Check(NamedTuple):
    """One line of ``gptoss doctor``."""

    name: str
    status: Status
    found: str  # what is there: a version, a size, the reason it failed
    advice: str = ""  # what to do; empty when all is well


STYLES = {Status.OK: "green", Status.LIMITED: "yellow", Status.MISSING: "bold red"}
MIN_FREE_DISK = 10  # GB: the environment and a tiny run with its checkpoints
MIN_MEMORY = 6  # GB: trainer, engine and Ray of the tiny run


def run_doctor() -> list[Check]:
    """All checks, in the order to mend them. Never raises: what breaks a check is what it reports. Takes seconds."""
    with warnings.catch_warnings():
        # Libraries comment on missing GPUs as they are imported; the table says it once and better.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return [guarded(name, check) for name, check in CHECKS]
        finally:
            logging.disable(logging.NOTSET)


def print_doctor() -> bool:
    """Run all checks and print them; returns ``is_ready``."""
    checks = run_doctor()
    Console().print(doctor_table(checks))
    from gptoss_kernels.sink_attention import describe

    print(describe())
    return is_ready(checks)


def is_ready(checks: list[Check]) -> bool:
    """Whether runs on this machine can work: nothing is missing."""
    return all(check.status is not Status.MISSING for check in checks)


def doctor_table(checks: list[Check]) -> Table:
    table = Table(title="gptoss doctor", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("part", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        style = STYLES[check.status]
        table.add_row(check.name, f"[{style}]{check.status}[/]", escape(check.found), escape(check.advice))
    return table


def guarded(name: str, check: Callable[[], tuple[Status, str, str]]) -> Check:
    """A broken installation raises all kinds of errors on import, and the doctor is the one who must survive them."""
    try:
        return Check(name, *check())
    except Exception as error:
        return Check(
            name, Status.MISSING, first_line(error), "run make setup; if it stays, delete .venv (make clean-venv)"
        )


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_python() -> tuple[Status, str, str]:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] != (3, 12):
        return Status.MISSING, found, "use Python 3.12: make setup creates .venv with it"
    return Status.OK, found, ""


def check_package(package: str, module: str) -> Callable[[], tuple[Status, str, str]]:
    """Imports it for real: an installed version alone says nothing about a library that does not load."""

    def check() -> tuple[Status, str, str]:
        importlib.import_module(module)
        return Status.OK, importlib.metadata.version(package), ""

    return check


def check_transformer_engine() -> tuple[Status, str, str]:
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return (
            Status.LIMITED,
            "not installed",
            "GPU training needs it: pip install transformer-engine[pytorch]; CPU runs do not",
        )
    importlib.import_module("transformer_engine.pytorch")
    return Status.OK, version, ""


def check_harmony() -> tuple[Status, str, str]:
    """The same command as the set-up runs: finds or fetches the vocabulary file and checks its hash."""
    version = importlib.metadata.version("openai-harmony")
    command = [sys.executable, "-m", "rl_loop.o200k"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    if run.returncode != 0:
        return Status.MISSING, f"openai-harmony {version}, no o200k vocabulary", last or "run python -m rl_loop.o200k"
    return Status.OK, f"openai-harmony {version} {last}".strip(), ""


def check_compiler() -> tuple[Status, str, str]:
    path = shutil.which("cc")
    return (Status.OK, path, "") if path else (Status.MISSING, "no cc", "sudo apt-get install -y gcc libc6-dev")


def check_sandbox() -> tuple[Status, str, str]:
    if not (path := shutil.which("bwrap")):
        return Status.MISSING, "no bwrap", "sudo apt-get install -y bubblewrap"
    sandbox = importlib.import_module("rl_loop.sandbox")
    try:
        sandbox.check_isolation()
    except sandbox.SandboxUnavailable as error:
        return Status.MISSING, "isolation does not work here", str(error)
    return Status.OK, f"{path}; namespaces work", ""


def check_gpus() -> tuple[Status, str, str]:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Status.LIMITED, "none", "the tiny configs run on CPUs; 20B and 120B need GPUs"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Status.OK, ", ".join(f"{device.name} {device.total_memory / 1e9:.0f} GB" for device in devices), ""


def check_disk() -> tuple[Status, str, str]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    enough = free >= MIN_FREE_DISK
    advice = "" if enough else f"{MIN_FREE_DISK} GB are advisable; delete old runs under runs/"
    return Status.OK if enough else Status.LIMITED, f"{free:.0f} GB free in {Path.cwd()}", advice


def check_memory() -> tuple[Status, str, str]:
    total = memory_bytes() / 1e9
    enough = total >= MIN_MEMORY
    advice = "" if enough else f"the tiny run needs about {MIN_MEMORY} GB"
    return Status.OK if enough else Status.LIMITED, f"{total:.0f} GB, {len(os.sched_getaffinity(0))} CPU cores", advice


def memory_bytes() -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return physical if text == "max" else min(physical, int(text))


CHECKS: tuple[tuple[str, Callable[[], tuple[Status, str, str]]], ...] = (
    ("python", check_python),
    ("torch", check_package("torch", "torch")),
    ("megatron-core", check_package("megatron-core", "megatron.core")),
    ("transformers", check_package("transformers", "transformers")),
    ("ray", check_package("ray", "ray")),
    ("transformer-engine", check_transformer_engine),
    ("harmony vocabulary", check_harmony),
    ("C compiler", check_compiler),
    ("sandbox", check_sandbox),
    ("GPUs", check_gpus),
    ("disk", check_disk),
    ("memory", check_memory),
)
