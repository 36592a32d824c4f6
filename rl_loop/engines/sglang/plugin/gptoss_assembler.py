"""Which assembler Triton uses for a server's kernels.

The products of MXFP4 experts turn codes into numbers in registers, from which the tensor cores read
them while the program goes on. Until CUDA 13.3 NVIDIA's assembler, ptxas, hands such registers out
again before they have been read (triton issue 9433 and pull request 11781; release notes of CUDA
13.3). Triton 3.6 comes with that of CUDA 12.8. With it an H200 computed wrong values in up to 7 % of
the launches of a shape that servers never had, an H100 in up to all of them, and neither in any of
those that servers have, although the code of triton_kernels' has the same fault
(scripts/register_hazards.py, docs/quantization.md).

SGLang's environment has a newer assembler anyway, in the package nvidia-cuda-nvcc. Of all kernels that
servers have that of CUDA 13.5 makes code without the fault; of some others it does not.
"""

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

SOUND = (13, 3)
"""The first version of CUDA whose assembler waits."""
PACKAGE = "nvidia-cuda-nvcc"
TOOLKIT = "/usr/local/cuda"
"""Where CUDA's toolkit lies if no variable says where."""
VARIABLE = "TRITON_PTXAS_PATH"
"""With which Triton is told of another assembler than its own."""

logger = logging.getLogger(__name__)


def install() -> None:
    """Let Triton use an assembler that waits, unless somebody has chosen one; warn if there is none.

    Before the first kernel is compiled."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        warn_of_others(chosen)
        return

    for path in installed_assemblers():
        version = version_of(path)
        if version >= SOUND and version[0] == cuda_family():
            os.environ[VARIABLE] = path
            logger.info("kernels are assembled by %s", path)
            return
    logger.warning(
        "Triton's own assembler can make wrong products of MXFP4 experts: install %s >= %d.%d in this "
        "environment",
        PACKAGE,
        *SOUND,
    )


def warn_of_others(path: str) -> None:
    """Say so if an assembler that somebody has chosen does not wait."""
    if version_of(path) < SOUND:
        logger.warning(
            "%s=%s is none of CUDA %d.%d or newer, and can make wrong products of MXFP4 experts",
            VARIABLE,
            path,
            *SOUND,
        )


def installed_assemblers() -> Iterator[str]:
    """Look for assemblers in this environment and in a CUDA toolkit."""
    try:
        package = files(PACKAGE) or []
    except PackageNotFoundError:
        package = []
    for file in package:
        if file.name == "ptxas":
            yield str(file.locate())

    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT):
        if toolkit:
            yield str(Path(toolkit, "bin", "ptxas"))


def version_of(path: str) -> tuple[int, int]:
    """Ask an assembler for its version of CUDA; (0, 0) if it is not there or does not run."""
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0, 0
    version = re.search(r"release (\d+)\.(\d+)", told.stdout)
    return (int(version[1]), int(version[2])) if version else (0, 0)


def cuda_family() -> int:
    """Return the major version of CUDA that torch is for. Drivers for it run what any assembler of it makes,
    and nothing says so of others."""
    import torch

    return int((torch.version.cuda or "0").split(".")[0])
