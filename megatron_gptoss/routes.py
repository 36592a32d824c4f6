"""The experts of tokens as numbers in an array: as many bytes as they need, and a number for
"not known".

Routes weigh more than everything else that is known of a token: 36 layers of 4 experts are 144
bytes of uint8, next to 4 of the token's id."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16))
"""In which routes are held: uint8 holds 255 experts, and 255 is none of them."""


def route_dtype(num_experts: int) -> np.dtype:
    """Return the smaller dtype that holds the numbers of so many experts, and "not known"."""
    smallest, largest = ROUTE_DTYPES
    return smallest if num_experts <= unknown_route(smallest) else largest


def unknown_route(dtype: np.dtype) -> int:
    """Return the number in place of an expert where the trainer is to choose for itself."""
    return 255 if dtype == np.uint8 else -1


def expert_numbers(routes: Tensor) -> Tensor:
    """Widen routes of either dtype to int64, with -1 where no expert is known."""
    wide = routes.long()
    if routes.dtype != torch.uint8:
        return wide
    return torch.where(wide == unknown_route(ROUTE_DTYPES[0]), -1, wide)


@dataclass(frozen=True)
class RecordedRoutes:
    """What the routers of one rank chose for its tokens of one micro-batch. It never leaves the
    rank."""

    layers: list[Tensor]
    """int16 [tokens of this rank, top_k] for each of the rank's layers."""
