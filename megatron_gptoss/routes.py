"""The experts of tokens as numbers in an array: as many bytes as they need, and a number for
"not known".

Routes weigh more than everything else that is known of a token: 36 layers of 4 experts are 144
bytes of uint8, next to 4 of the token's id."""

import numpy as np

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16))
"""In which routes are held: uint8 holds 255 experts, and 255 is none of them."""


def route_dtype(num_experts: int) -> np.dtype:
    """Return the smaller dtype that holds the numbers of so many experts, and "not known"."""
    smallest, largest = ROUTE_DTYPES
    return smallest if num_experts <= unknown_route(smallest) else largest


def unknown_route(dtype: np.dtype) -> int:
    """Return the number in place of an expert where the trainer is to choose for itself."""
    return 255 if dtype == np.uint8 else -1
