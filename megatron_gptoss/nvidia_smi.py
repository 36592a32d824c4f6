"""GPUs of this machine as reported by nvidia-smi."""

import shutil
import subprocess

TIMEOUT_SECONDS = 60
"""Time limit of a call."""
NO_GPU = "No devices were found"
"""Output of nvidia-smi on a machine without GPUs."""


class NvidiaSmiMissingError(OSError):
    """Missing nvidia-smi, which means that there is no NVIDIA driver."""


class NvidiaSmiError(OSError):
    """Failed call of nvidia-smi, or output without the requested fields."""


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """Return fields of every GPU, in the order of nvidia-smi.

    Args:
        fields: names from ``nvidia-smi --help-query-gpu``. Only values of the first field may
            contain a comma.

    Returns:
        Values by field, one dict per GPU.

    Raises:
        NvidiaSmiMissingError: the program is not installed.
        NvidiaSmiError: the program fails, or its output does not have these fields.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NvidiaSmiMissingError("nvidia-smi is not installed, or not in PATH")
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NvidiaSmiError(f"nvidia-smi failed: {error}") from error

    gpus = []
    for line in answer.stdout.splitlines():
        if line.strip() == NO_GPU:
            return []
        # Split from the right, because names of GPUs may contain commas.
        values = [value.strip() for value in line.rsplit(",", len(fields) - 1)]
        if len(values) != len(fields):
            raise NvidiaSmiError(f"nvidia-smi does not report {', '.join(fields)}, but {line!r}")
        gpus.append(dict(zip(fields, values, strict=True)))
    return gpus


def memory_bytes(value: str) -> int | None:
    """Return the bytes of a memory field in MiB; None for values such as "[N/A]"."""
    return int(value) << 20 if value.isdecimal() else None


def smallest_gpu() -> tuple[str, int] | None:
    """Return name and usable bytes of the smallest GPU of this machine; None without GPUs."""
    try:
        # nvidia-smi instead of torch, which takes seconds to import.
        rows = query_gpus("name", "memory.total", "memory.reserved")
    except OSError:
        return None
    gpus = []
    for row in rows:
        total, reserved = memory_bytes(row["memory.total"]), memory_bytes(row["memory.reserved"])
        # nvidia-smi reports "[N/A]" for some GPUs.
        if total is not None and reserved is not None:
            gpus.append((row["name"], total - reserved))
    return min(gpus, key=lambda gpu: gpu[1], default=None)
