"""MXFP4 computed from its definition (OCP Microscaling Formats 1.0), slow and without the codec."""

import torch

BLOCK = 32
"""Values that share a scale."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits of a code (table 5); the fourth bit is the sign."""
ROWS_BY_DEFINITION = 4
"""Rows of each expert matrix that are also computed without the codec."""


def defined_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the values of MXFP4 blocks and scales.

    Args:
        blocks: uint8 [rows, n, 16].
        scales: uint8 [rows, n], at most 252 (HfDirectory rejects values beyond bf16).

    Returns:
        fp32 [rows, n * 32], which represents all values exactly.
    """
    # The first of two values is in the low nibble.
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    magnitudes = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes & 7]
    signs = 1.0 - 2.0 * (codes >> 3)
    return (signs * magnitudes * _powers(scales)).float().flatten(-2)


def sampled_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return the first, the last and two other rows of a matrix [rows, ...]: [4, ...].

    The computation from the definition is too slow for all rows.
    """
    rows = torch.linspace(0, len(matrix) - 1, ROWS_BY_DEFINITION).long()
    return matrix[rows]


def nearest(values: torch.Tensor, exact: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return True if no other MXFP4 values with these scales are nearer to ``exact``.

    Args:
        values: [rows, n * 32] values of the codes.
        exact: [rows, n * 32] numbers that were quantized.
        scales: uint8 [rows, n].
    """
    unit = _powers(scales)
    # Divide by the scale of the block, so that the distances of neighboring values are constants.
    error = (values.double() - exact.double()).abs().unflatten(-1, (-1, BLOCK)) / unit
    magnitude = exact.double().abs().unflatten(-1, (-1, BLOCK)) / unit

    # The distance of neighboring values is 0.5 up to 2, 1 up to 4, and 2 up to 6.
    largest_error = torch.where(magnitude <= 2, 0.25, torch.where(magnitude <= 4, 0.5, 1.0))
    return bool((error <= largest_error).all())


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (scale - 127) as fp64 [rows, n, 1]."""
    return torch.exp2(scales.double() - 127)[..., None]
