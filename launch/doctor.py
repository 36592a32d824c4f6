"""Is this machine ready? Every part a run needs, whether it is there, and what to do if it is not."""

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


Finding = tuple[Status, str, str]  # A ``Check`` without its name
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


def guarded(name: str, check: Callable[[], Finding]) -> Check:
    """A broken installation raises all kinds of errors on import, and the doctor is the one who must survive them."""
    try:
        return Check(name, *check())
    except Exception as error:
        found = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        return Check(name, Status.MISSING, found, "run make setup; if it stays, delete .venv (make clean-venv)")


def ok_if(good: bool, otherwise: Status, found: str, advice: str) -> Finding:
    return (Status.OK, found, "") if good else (otherwise, found, advice)


def check_python() -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    good = sys.version_info[:2] == (3, 12)
    return ok_if(good, Status.MISSING, found, "use Python 3.12: make setup creates .venv with it")


def check_package(package: str, module: str) -> Callable[[], Finding]:
    """Imports it for real: an installed version alone says nothing about a library that does not load."""

    def check() -> Finding:
        version = importlib.metadata.version(package)
        importlib.import_module(module)
        return Status.OK, version, ""

    return check


def check_transformer_engine() -> Finding:
    try:
        return check_package("transformer-engine", "transformer_engine.pytorch")()
    except importlib.metadata.PackageNotFoundError:
        advice = "GPU training needs it: pip install transformer-engine[pytorch]; CPU runs do not"
        return Status.LIMITED, "not installed", advice


def check_harmony() -> Finding:
    """The same command as the set-up runs: finds or fetches the vocabulary file and checks its hash."""
    version = importlib.metadata.version("openai-harmony")
    command = [sys.executable, "-m", "rl_loop.harmony.o200k"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    last = (run.stdout if run.returncode == 0 else run.stderr).strip().rpartition("\n")[2]
    if run.returncode != 0:
        return (
            Status.MISSING,
            f"openai-harmony {version}, no o200k vocabulary",
            last or "run python -m rl_loop.harmony.o200k",
        )
    return Status.OK, f"openai-harmony {version} {last}".strip(), ""


def check_compiler() -> Finding:
    path = shutil.which("cc")
    return ok_if(path is not None, Status.MISSING, path or "no cc", "sudo apt-get install -y gcc libc6-dev")


def check_sandbox() -> Finding:
    if not (path := shutil.which("bwrap")):
        return Status.MISSING, "no bwrap", "sudo apt-get install -y bubblewrap"
    sandbox = importlib.import_module("rl_loop.sandbox")
    try:
        sandbox.check_isolation()
    except sandbox.SandboxUnavailable as error:
        return Status.MISSING, "isolation does not work here", str(error)
    return Status.OK, f"{path}; namespaces and the system-call filter work", ""


def check_sandbox_limits() -> Finding:
    """How a program's memory and processors are limited: by the kernel where a cgroup is delegated."""
    protection = importlib.import_module("rl_loop.sandbox.cgroup").describe_protection()
    found = f"{protection.memory}; {protection.processors}"
    return ok_if(not protection.advice, Status.LIMITED, found, protection.advice)


def check_gpus() -> Finding:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Status.LIMITED, "none", "the tiny configs run on CPUs; 20B and 120B need GPUs"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Status.OK, ", ".join(f"{device.name} {device.total_memory / 1e9:.0f} GB" for device in devices), ""


def check_disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    advice = f"{MIN_FREE_DISK} GB are advisable; delete old runs under runs/"
    return ok_if(free >= MIN_FREE_DISK, Status.LIMITED, f"{free:.0f} GB free in {Path.cwd()}", advice)


def check_memory() -> Finding:
    total = memory_bytes() / 1e9
    found = f"{total:.0f} GB, {len(os.sched_getaffinity(0))} CPU cores"
    return ok_if(total >= MIN_MEMORY, Status.LIMITED, found, f"the tiny run needs about {MIN_MEMORY} GB")


def memory_bytes() -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return physical if text == "max" else min(physical, int(text))


PACKAGES = {"torch": "torch", "megatron-core": "megatron.core", "transformers": "transformers", "ray": "ray"}
CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", check_python),
    *((package, check_package(package, module)) for package, module in PACKAGES.items()),
    ("transformer-engine", check_transformer_engine),
    ("harmony vocabulary", check_harmony),
    ("C compiler", check_compiler),
    ("sandbox", check_sandbox),
    ("sandbox limits", check_sandbox_limits),
    ("GPUs", check_gpus),
    ("disk", check_disk),
    ("memory", check_memory),
)
