"""GPUs of this machine as nvidia-smi reports them."""

import shutil
import subprocess

TIMEOUT_SECONDS = 60
NO_GPU = "No devices were found"


class NvidiaSmiMissing(OSError):
    """The machine has no nvidia-smi, and therefore no NVIDIA driver."""


class NvidiaSmiFailed(OSError):
    """nvidia-smi fails, or its output does not have the fields that were asked for."""


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """Return the named fields of every GPU, in nvidia-smi's order.

    Args:
        fields: names of ``nvidia-smi --help-query-gpu``. Only the first may have values with a
            comma, such as a name.

    Raises:
        NvidiaSmiMissing: if there is no such program.
        NvidiaSmiFailed: if the program fails or its lines do not have these fields.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NvidiaSmiMissing("nvidia-smi is not installed, or not in PATH")
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NvidiaSmiFailed(f"nvidia-smi does not work: {error}") from error

    gpus = []
    for line in answer.stdout.splitlines():
        if line.strip() == NO_GPU:
            return []
        values = [value.strip() for value in line.rsplit(",", len(fields) - 1)]
        if len(values) != len(fields):
            raise NvidiaSmiFailed(f"nvidia-smi does not report {', '.join(fields)}, but {line!r}")
        gpus.append(dict(zip(fields, values, strict=True)))
    return gpus


def memory_bytes(value: str) -> int | None:
    """Return bytes of a memory field, which is in MiB; None for "[N/A]" and the like."""
    return int(value) << 20 if value.isdecimal() else None
