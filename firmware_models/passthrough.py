"""The pass-through model: a medium whose only property is its rate, so that every access goes straight to it.

For memories of which nothing but bandwidth and latency is known (DRAM, CXL cards, GPU memory). It has no state.
"""

from __future__ import annotations

from tierloop.firmware_models.media import WHOLE, MediaWork, Ranges


class Passthrough:
    """Reads and writes share one medium; rates in bytes/s."""

    def __init__(self, read_bytes_per_s: int, write_bytes_per_s: int) -> None:
        self._read = read_bytes_per_s
        self._write = write_bytes_per_s

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """Bytes over rate, rounded up once over both directions."""
        read, written = int(reads[:, 1].sum()), int(writes[:, 1].sum())
        units = read * self._write + written * self._read
        return MediaWork(-(-units * 1_000_000_000 // (self._read * self._write)), WHOLE, read + written)

    def plan(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """The same as `access`."""
        return self.access(reads, writes)

    def trim(self, address: int, nbytes: int) -> None:
        """Nothing is kept, so nothing is forgotten."""

    def ceiling(self, write: bool) -> int:
        """The rate."""
        return self._write if write else self._read

    def reset(self) -> None:
        """There is no state."""
