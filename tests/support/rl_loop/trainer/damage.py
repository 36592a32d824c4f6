"""Damage to files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def damage(path: Path) -> Path:
    data = next(path.glob("*.distcp"))
    content = np.fromfile(data, np.uint8)
    content[len(content) // 2] ^= 1
    content.tofile(data)
    return data
