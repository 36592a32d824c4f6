"""Number format of routes: the experts of each token as an integer array.

Routes are the largest data of a token: 144 bytes of uint8 for 36 layers with 4 experts each,
compared with 4 bytes for its id. Therefore the format is the smallest possible.
"""

import numpy as np

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16))
"""Data types of routes. uint8 can represent 255 experts and the value 255 for "unknown"."""


def route_dtype(num_experts: int) -> np.dtype:
    """Return the smallest dtype for routes of a model with this number of experts."""
    smallest, largest = ROUTE_DTYPES
    return smallest if num_experts <= unknown_route(smallest) else largest


def unknown_route(dtype: np.dtype) -> int:
    """Return the value that means "unknown": the trainer's router selects the experts."""
    return 255 if dtype == np.uint8 else -1
