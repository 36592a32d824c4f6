"""Copies from the host to a GPU that do not wait for the GPU's queued work."""

import torch
from torch import Tensor


def copy_to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the host on a device. A tensor that is there already is not copied.

    Args:
        host: tensor of any shape and dtype. It may be freed at once.
        device: device of the result.
    """
    # A copy from pageable memory would wait for all queued work of the GPU.
    if torch.device(device).type == "cuda" and not host.is_cuda and host.numel():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
