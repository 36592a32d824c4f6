"""Number format of routes: the experts of each token as an integer array.

Routes are the largest data of a token: 144 bytes of uint8 for 36 layers with 4 experts each,
compared with 4 bytes for its id. Therefore the format is the smallest possible.
"""

import numpy as np

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16))
"""Data types of routes. uint8 can represent 255 experts and the value 255 for "unknown"."""
DIGEST_BLOCK = 4096
"""Number of tokens whose digests are computed together."""


def route_dtype(num_experts: int) -> np.dtype:
    """Return the smallest dtype for routes of a model with this number of experts."""
    smallest, largest = ROUTE_DTYPES
    return smallest if num_experts <= unknown_route(smallest) else largest


def unknown_route(dtype: np.dtype) -> int:
    """Return the value that means "unknown": the trainer's router selects the experts."""
    return 255 if dtype == np.uint8 else -1


def route_digests(routes: np.ndarray) -> np.ndarray:
    """Return a number for the experts of each token. It does not depend on their order.

    Tokens with other experts in any layer have other numbers, but for one of 2^64 pairs.

    Args:
        routes: uint8 or int16 [tokens, layers, top_k].

    Returns:
        uint64 [tokens].
    """
    tokens, layers, top_k = routes.shape
    # The sum of random numbers, one for each expert and layer. The seed is fixed, because digests
    # of several calls are compared.
    numbers = np.random.default_rng(layers).integers(
        0, 2**64, (layers, 1 << (8 * routes.dtype.itemsize)), dtype=np.uint64
    )
    digests = np.zeros(tokens, np.uint64)
    # Blocks that fit into a processor's cache, with the experts of one layer in a row.
    for start in range(0, tokens, DIGEST_BLOCK):
        block = routes[start : start + DIGEST_BLOCK].reshape(-1, layers * top_k).T
        total = digests[start : start + DIGEST_BLOCK]
        for i, experts in enumerate(np.ascontiguousarray(block)):
            total += numbers[i // top_k].take(experts)
    return digests
