"""Selection of the assembler (ptxas) for Triton's kernels in a server.

GEMMs of MXFP4 experts decode values into registers. The tensor cores read these registers while the
program continues. NVIDIA's ptxas before CUDA 13.3 reuses such registers before they have been read
(triton issue 9433, triton pull request 11781, release notes of CUDA 13.3). Triton 3.6 contains the
ptxas of CUDA 12.8.

With that ptxas, one tested shape computed wrong values in up to 7% of the launches on an H200, and
in up to all launches on an H100. Servers do not use this shape. No shape that servers use computed
wrong values, although the code of triton_kernels has the same fault (scripts/register_hazards.py,
docs/quantization.md).

SGLang's environment contains a newer ptxas in the package nvidia-cuda-nvcc. ptxas of CUDA 13.5
compiles all kernels that servers use without the fault, but not all other kernels.
"""

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

MIN_PTXAS_VERSION = (13, 3)
"""First version of CUDA whose ptxas waits until the registers have been read."""
PACKAGE = "nvidia-cuda-nvcc"
TOOLKIT = "/usr/local/cuda"
"""Default directory of CUDA's toolkit."""
VARIABLE = "TRITON_PTXAS_PATH"
"""Variable that replaces Triton's ptxas."""

logger = logging.getLogger(__name__)


def install() -> None:
    """Let Triton use a ptxas without the fault, unless the user has chosen one.

    Warns if there is none. Must run before the first kernel is compiled.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        warn_if_faulty(chosen)
        return

    # The same major version as torch, because the driver need not run the output of another one.
    for path in installed_assemblers():
        version = read_version(path)
        if version >= MIN_PTXAS_VERSION and version[0] == cuda_family():
            os.environ[VARIABLE] = path
            logger.info("Triton assembles kernels with %s", path)
            return
    logger.warning(
        "Triton's own ptxas can miscompile the GEMMs of MXFP4 experts. Install %s >= %d.%d in "
        "this environment",
        PACKAGE,
        *MIN_PTXAS_VERSION,
    )


def warn_if_faulty(path: str) -> None:
    """Warn if the ptxas that the user has chosen has the fault."""
    if read_version(path) < MIN_PTXAS_VERSION:
        logger.warning(
            "%s=%s is older than CUDA %d.%d, and can miscompile the GEMMs of MXFP4 experts",
            VARIABLE,
            path,
            *MIN_PTXAS_VERSION,
        )


def installed_assemblers() -> Iterator[str]:
    """Yield paths of ptxas in this environment and in CUDA toolkits. They may not exist."""
    try:
        package = files(PACKAGE) or []
    except PackageNotFoundError:
        package = []
    # The environment's package comes first, because it may be newer than the machine's toolkit.
    for file in package:
        if file.name == "ptxas":
            yield str(file.locate())

    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), TOOLKIT):
        if toolkit:
            yield str(Path(toolkit, "bin", "ptxas"))


def read_version(path: str) -> tuple[int, int]:
    """Return the CUDA version of a ptxas. (0, 0) if it does not exist or does not run."""
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        # Older than every version, so that the next candidate is tried.
        return 0, 0
    # The output has a line such as "Cuda compilation tools, release 13.3, V13.3.33".
    version = re.search(r"release (\d+)\.(\d+)", completed.stdout)
    return (int(version[1]), int(version[2])) if version else (0, 0)


def cuda_family() -> int:
    """Return the major version of CUDA that torch was built for.

    A driver for this major version runs the output of every ptxas of this major version. For other
    major versions there is no such guarantee.
    """
    import torch

    return int((torch.version.cuda or "0").split(".")[0])
