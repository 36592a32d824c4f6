"""Checks of this machine: parts that runs need, and advice for missing parts."""

import asyncio
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
from rich.text import Text

from megatron_gptoss import host_memory
from megatron_gptoss.user_error import UserError
from rl_loop.extras import install_command


class Severity(StrEnum):
    """Meaning of a finding for runs on this machine."""

    OK = "ok"
    LIMITED = "limited"
    """CPU runs work. Something that a cluster run needs is missing."""
    MISSING = "missing"
    """Runs on this machine will fail."""


class Finding(NamedTuple):
    """Result of a check."""

    status: Severity
    detail: str
    """Version, size, or reason of the failure."""
    advice: str = ""
    """Remedy; empty if there is no problem."""


class DoctorCheck(NamedTuple):
    """One line of ``gptoss doctor``: a part of the machine and its finding."""

    name: str
    status: Severity
    detail: str
    advice: str = ""


STYLES = {Severity.OK: "green", Severity.LIMITED: "yellow", Severity.MISSING: "bold red"}
MIN_FREE_DISK = 10
"""Free disk space in GB for the environment and a tiny run with checkpoints."""
MIN_MEMORY = 6
"""Memory in GB for trainer, engine and Ray of the tiny run."""
ENGINE = Path("/opt/sglang")
"""Directory of SGLang's environment in the documentation. Configurations name other directories."""
O200K_COMMAND = "python -m rl_loop.harmony.o200k"


def run_doctor() -> list[DoctorCheck]:
    """Run all checks, in the order in which to fix problems. Takes seconds.

    The function never raises: an exception in a check becomes its finding.
    """
    with warnings.catch_warnings():
        # Libraries warn about missing GPUs on import. The table reports them once.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return [run_check(name, check) for name, check in CHECKS]
        finally:
            logging.disable(logging.NOTSET)


def run_check(name: str, check: Callable[[], Finding]) -> DoctorCheck:
    """Run one check and convert exceptions: a broken installation fails in many ways on import."""
    try:
        finding = check()
    except Exception as error:
        # An import error of a library can have dozens of lines.
        first_line = str(error).strip().splitlines()[:1]
        detail = ": ".join([type(error).__name__, *first_line])
        return DoctorCheck(
            name,
            Severity.MISSING,
            detail,
            "run make setup; if the error remains, delete .venv (make clean-venv) and repeat",
        )
    return DoctorCheck(name, finding.status, finding.detail, finding.advice)


def print_doctor() -> bool:
    """Run and print all checks, and return ``is_ready``."""
    checks = run_doctor()
    print_checks(checks, Console())

    from gptoss_kernels.sink_attention import describe  # imports torch

    # describe() also logs the choice of a backend, which is printed here anyway.
    logging.disable(logging.INFO)
    try:
        print(describe())
    finally:
        logging.disable(logging.NOTSET)
    return is_ready(checks)


def is_ready(checks: list[DoctorCheck]) -> bool:
    """Return True if runs on this machine can work, that is if nothing is missing."""
    return all(check.status is not Severity.MISSING for check in checks)


def print_checks(checks: list[DoctorCheck], console: Console) -> None:
    """Print a line per check, and a line with advice if there is any."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.name:{width}}  ")
        line.append(f"{check.status:7}", style=STYLES[check.status])
        line.append(f"  {check.detail}")
        # Not wrapped, so that commands can be copied.
        console.print(line, soft_wrap=True)
        if check.advice:
            console.print(Text(f"{'':{width}}  -> {check.advice}"), soft_wrap=True)


def check_python() -> Finding:
    """Check the version of Python."""
    detail = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] != (3, 12):
        return Finding(
            Severity.MISSING, detail, "use Python 3.12: make setup creates .venv with it"
        )
    return Finding(Severity.OK, detail)


def check_package(package: str, module: str) -> Callable[[], Finding]:
    """Return a check that imports ``module``, because an installed library may fail to load.

    Args:
        package: name of the distribution, for its version.
        module: module to import.
    """

    def check() -> Finding:
        # First, because PackageNotFoundError tells "not installed" from "does not load".
        version = importlib.metadata.version(package)
        importlib.import_module(module)
        return Finding(Severity.OK, version)

    return check


def check_transformer_engine() -> Finding:
    """Check Transformer Engine, which only GPU training needs."""
    # If it is installed but does not load, ``run_check`` reports the error.
    try:
        return check_package("transformer-engine", "transformer_engine.pytorch")()
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            Severity.LIMITED, "not installed", f"GPU training needs it: {_gpu_command()}"
        )


def check_nemo_run() -> Finding:
    """Check nemo-run, which only submitting to Slurm needs."""
    try:
        return check_package("nemo-run", "nemo_run")()
    except importlib.metadata.PackageNotFoundError:
        advice = f"`gptoss launch` on Slurm needs it: {install_command('launch')}"
        return Finding(Severity.LIMITED, "not installed", advice)


def check_sglang() -> Finding:
    """Find an environment with SGLang in ENGINE, or in this interpreter."""
    # The separate environment first, because the trainer's usually has no SGLang.
    for python in (ENGINE / "bin" / "python", Path(sys.executable)):
        if not python.exists():
            continue
        # Reads metadata only, because importing SGLang would load torch.
        program = "import importlib.metadata as m; print(m.version('sglang'))"
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 0:
            return Finding(Severity.OK, f"{done.stdout.strip()} in {python}")

    advice = f"RL on GPUs needs it: gptoss doctor --install-engine {ENGINE}"
    return Finding(Severity.LIMITED, f"none in {ENGINE}", advice)


def _gpu_command() -> str:
    """Return the command of docs/installing.md, or its equivalent for an installed wheel."""
    # Only a checkout has the pinned requirements.
    pins = Path(__file__).resolve().parents[1] / "requirements-gpu.txt"
    if pins.exists():
        return f"pip install --no-build-isolation --no-deps --require-hashes -r {pins}"
    return install_command("gpu", "--no-build-isolation ")


def check_o200k() -> Finding:
    """Run the setup command, which finds or downloads GPT-OSS's vocabulary and checks its hash.

    Tiny models of every family use a part of this vocabulary. Only the checkpoint of a dense model
    does not need it.
    """
    version = importlib.metadata.version("openai-harmony")
    # In a separate process, as a user would run it, with the same error messages.
    command = [sys.executable, *O200K_COMMAND.split()[1:]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    output = result.stdout if result.returncode == 0 else result.stderr
    last_line = output.strip().rpartition("\n")[2]

    if result.returncode != 0:
        detail = f"openai-harmony {version}, no o200k vocabulary"
        return Finding(Severity.MISSING, detail, last_line or f"run {O200K_COMMAND}")
    return Finding(Severity.OK, f"openai-harmony {version} {last_line}".strip())


def check_compiler() -> Finding:
    """Check that there is a C compiler, which builds the CPU kernels."""
    path = shutil.which("cc")
    if path is None:
        return Finding(Severity.MISSING, "no cc", "sudo apt-get install -y gcc libc6-dev")
    return Finding(Severity.OK, path)


def check_sandbox() -> Finding:
    """Check that bubblewrap is installed and can isolate programs on this machine."""
    path = shutil.which("bwrap")
    if path is None:
        return Finding(Severity.MISSING, "no bwrap", "sudo apt-get install -y bubblewrap")

    # bwrap may be installed without permission to create namespaces, as in many containers.
    sandbox = importlib.import_module("rl_loop.sandbox")
    try:
        sandbox.check_isolation()
    except sandbox.SandboxUnavailableError as error:
        return Finding(Severity.MISSING, "isolation does not work here", str(error))
    return Finding(Severity.OK, f"{path}; namespaces and the system-call filter work")


def check_sandbox_limits() -> Finding:
    """Check that the kernel can limit a program's memory and processors, which needs a cgroup."""
    protection = importlib.import_module("rl_loop.sandbox.cgroup").describe_protection()
    detail = f"{protection.memory}; {protection.processors}"
    if protection.advice:
        return Finding(Severity.LIMITED, detail, protection.advice)
    return Finding(Severity.OK, detail)


def check_shell_sandbox() -> Finding:
    """Check that a shell sandbox starts, and measure the start."""
    shell = importlib.import_module("rl_loop.sandbox.shell")
    try:
        seconds = asyncio.run(shell.check_shell_sandboxes())
    except UserError as error:
        # Runs do not need shell sandboxes.
        return Finding(Severity.LIMITED, "no shell sandboxes", str(error))
    return Finding(Severity.OK, f"a sandbox starts in {1e3 * seconds:.0f} ms")


def check_gpus() -> Finding:
    """List the GPUs of this machine."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return Finding(
            Severity.LIMITED,
            "none",
            "the tiny configs run on CPUs; 20B and 120B need GPUs",
        )
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Finding(
        Severity.OK,
        ", ".join(f"{device.name} {device.total_memory / 1e9:.0f} GB" for device in devices),
    )


def check_disk() -> Finding:
    """Check the free disk space of the default output directory."""
    # Runs are written below the working directory by default.
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    detail = f"{free:.0f} GB free in {Path.cwd()}"
    if free < MIN_FREE_DISK:
        return Finding(
            Severity.LIMITED,
            detail,
            f"{MIN_FREE_DISK} GB are recommended; delete old runs under runs/",
        )
    return Finding(Severity.OK, detail)


def check_memory() -> Finding:
    """Check the memory and count the processors."""
    total = host_memory.total_bytes() / 1e9
    # The affinity mask, because a container or Slurm may allow fewer cores than the machine has.
    detail = f"{total:.0f} GB, {len(os.sched_getaffinity(0))} CPU cores"
    # Limited and not missing: a machine with swap may still manage.
    if total < MIN_MEMORY:
        return Finding(Severity.LIMITED, detail, f"the tiny run needs about {MIN_MEMORY} GB")
    return Finding(Severity.OK, detail)


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", check_python),
    ("torch", check_package("torch", "torch")),
    ("megatron-core", check_package("megatron-core", "megatron.core")),
    ("transformers", check_package("transformers", "transformers")),
    ("ray", check_package("ray", "ray")),
    ("transformer-engine", check_transformer_engine),
    ("SGLang", check_sglang),
    ("nemo-run", check_nemo_run),
    ("o200k vocabulary", check_o200k),
    ("C compiler", check_compiler),
    ("sandbox", check_sandbox),
    ("sandbox limits", check_sandbox_limits),
    ("shell sandbox", check_shell_sandbox),
    ("GPUs", check_gpus),
    ("disk", check_disk),
    ("memory", check_memory),
)
"""Checks in the order of the table."""
