"""The compiled inner loops, in one table of addresses.

Kernels are given the table as an argument: an address that is a global would be frozen into the compiled code that is
kept on disk, and would be wrong in the next process.
"""

from __future__ import annotations

import numpy as np

from tierloop.devices.kernels.lanes import NUM_TYPES
from tierloop.devices.kernels.merging import merge_address
from tierloop.devices.kernels.products import TILE, WIDTHS, dots_addresses, widen_addresses
from tierloop.devices.kernels.softmax import cap_address, rescale_addresses, softmax_addresses, weigh_addresses

_WIDTHS = len(WIDTHS)

DOTS = 0
"""At DOTS + dtype · 3 + log2 of the width."""
WIDEN = DOTS + NUM_TYPES * _WIDTHS
"""At WIDEN + dtype."""
CAP = WIDEN + NUM_TYPES
SOFTMAX = CAP + 1
"""At SOFTMAX + log2 of the width."""
RESCALE = SOFTMAX + _WIDTHS
"""At RESCALE + log2 of the width."""
WEIGH = RESCALE + _WIDTHS
"""At WEIGH + dtype · TILE + number of queries − 1."""
MERGE = WEIGH + NUM_TYPES * TILE

ENTRIES = np.array(
    [
        *dots_addresses(),
        *widen_addresses(),
        cap_address(),
        *softmax_addresses(),
        *rescale_addresses(),
        *weigh_addresses(),
        merge_address(),
    ],
    dtype=np.int64,
)
"""The table: int64 (MERGE + 1,)."""
assert len(ENTRIES) == MERGE + 1, "the table has an entry for each place"
