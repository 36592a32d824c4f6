"""Selection of the GPU for a plan: named, of this machine, or of the configuration."""

import math
import os
from dataclasses import dataclass, replace

from megatron_gptoss import host_memory
from megatron_gptoss.nvidia_smi import query_gpus, smallest_gpu
from megatron_gptoss.planning.memory_advice import Hardware
from rl_loop.config.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class GpuInfo:
    """A GPU."""

    name: str
    total_bytes: float
    """Memory available to all programs together, in bytes, including CUDA contexts."""


KNOWN_GPUS = {
    "h100": GpuInfo("H100", 79.1 * GIB),
    "h200": GpuInfo("H200", 139.8 * GIB),
    "b200": GpuInfo("B200", 178.3 * GIB),
}
"""GPUs by name for ``--gpu``. The memory is torch's total memory, rounded down.

It differs from the number in the product's name, and from nvidia-smi's total, which includes memory
reserved by the driver. The value of the H200 was measured by this project. The other values are
those that programs on such GPUs report.
"""

DEFAULT_GPU = "h200"


def gpu_named(name: str) -> GpuInfo:
    """Return a GPU of KNOWN_GPUS.

    Raises:
        ConfigError: for an unknown name.
    """
    if name.lower() not in KNOWN_GPUS:
        raise ConfigError(
            f"--gpu {name}: unknown GPU. Use one of {', '.join(KNOWN_GPUS)}, or --gpu-gb"
        )
    return KNOWN_GPUS[name.lower()]


def local_gpu() -> GpuInfo | None:
    """Return the smallest GPU of this machine; None if nvidia-smi reports none."""
    # A layout must fit on every GPU.
    smallest = smallest_gpu()
    return None if smallest is None else GpuInfo(*smallest)


def count_gpus() -> int:
    """Return the number of usable GPUs of this machine, which CUDA_VISIBLE_DEVICES may limit."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As in CUDA: -1 hides all following devices.
        named = [name.strip() for name in visible.split(",")]
        return named.index("-1") if "-1" in named else len(list(filter(None, named)))

    try:
        return len(query_gpus("uuid"))
    except OSError:
        return 0


def planned_hardware(
    gpu: str | None = None,
    gigabytes: float | None = None,
    host_gigabytes: float | None = None,
    configured_gigabytes: float | None = None,
) -> Hardware:
    """Return the hardware of a plan: as given, else this machine's, else the configuration's.

    Args:
        gpu: name in KNOWN_GPUS.
        gigabytes: memory of one GPU in GB (1e9 bytes). Overrides ``gpu``.
        host_gigabytes: memory of a node in GB; None for this machine's if its GPU is used.
        configured_gigabytes: ``gpu_gb`` of the configuration; None for an H200.

    Raises:
        ConfigError: for an unknown name, or a size that is not positive and finite.
    """
    for option, size in (("--gpu-gb", gigabytes), ("--host-gb", host_gigabytes)):
        if size is not None and not 0 < size < math.inf:
            raise ConfigError(f"{option} {size:g}: must be a finite size above 0, in GB")

    # From the most explicit source to the least.
    if gigabytes is not None:
        return Hardware(gigabytes, host_gigabytes=host_gigabytes)
    if gpu is not None:
        chosen = gpu_named(gpu)
        return Hardware(_gb(chosen), chosen.name, host_gigabytes)

    local = local_gpu()
    if local is None:
        return replace(configured_hardware(configured_gigabytes), host_gigabytes=host_gigabytes)
    # The host's memory belongs to the GPU only if both are this machine's.
    if host_gigabytes is None:
        host_gigabytes = host_memory.total_bytes() / 1e9
    return Hardware(_gb(local), f"{local.name} of this machine", host_gigabytes)


def configured_hardware(gigabytes: float | None) -> Hardware:
    """Return the GPU of a configuration (``gpu_gb`` in GB); None for an H200."""
    if gigabytes is None:
        default = KNOWN_GPUS[DEFAULT_GPU]
        return Hardware(_gb(default), default.name)
    return Hardware(gigabytes, "GPU of key gpu_gb")


def _gb(gpu: GpuInfo) -> float:
    return round(gpu.total_bytes / 1e9, 1)
