"""Random bytes that are the same every time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bytes_of(seed: int, *shape: int) -> NDArray[np.uint8]:
    """Seeded random bytes, uint8 of this shape."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
