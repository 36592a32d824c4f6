"""Selection of torch's deterministic algorithms."""

import os

import torch


def select_deterministic_algorithms(enabled: bool) -> None:
    """Use deterministic algorithms in this process, or torch's defaults.

    Call it before the first operation on a GPU. An operation without a deterministic algorithm
    warns with its name.
    """
    if enabled:
        # cuBLAS reads the variable at its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Torch would also fill every new tensor, which takes time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(enabled, warn_only=True)
