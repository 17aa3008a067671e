"""How an archive divides its region: places of commits, blocks for notes, a segment for each layer and head."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.archive_pages import block_nbytes
from tierloop.runtime.entries import EntryShape

COMMITS = 2
"""The first blocks of a region: the places of commits."""
KINDS = 8
"""Kinds of notes that each layer may have at once."""
_LINE_NBYTES = 256
"""Bytes of a line of a commit's table, at most: a note or an order with where it lies."""


def default_appends(most_entries: int) -> int:
    """How often a segment may be appended to where nobody says: entries come 64 at a time, and a few times fewer."""
    return most_entries // 64 + 8


@dataclass(frozen=True)
class Geometry:
    """Sizes of an archive of `most_entries` entries per layer and head, appended to `appends` times at most.

    `notes_nbytes` are the bytes of all notes together. Raises ConfigurationError for what is not positive, and for
    segments that are too large.
    """

    entries: EntryShape
    most_entries: int
    notes_nbytes: int
    appends: int
    grid: int

    def __post_init__(self) -> None:
        least = {"most_entries": 1, "notes_nbytes": 0, "appends": 1, "grid": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigurationError(f"an archive's {name} is at least {low}, not {getattr(self, name)}")
        if self.segment_nbytes // self.granule >= 1 << 31:
            raise ConfigurationError(
                f"{self.most_entries:,} entries of {self.entries.nbytes} bytes are more than a segment holds: "
                f"{1 << 31:,} pieces of {self.granule} bytes"
            )

    @property
    def layers(self) -> int:
        """Layers."""
        return self.entries.shape.num_layers

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.entries.shape.num_kv_heads

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return block_nbytes(self.grid)

    @property
    def granule(self) -> int:
        """Every entry begins at a multiple of this many bytes."""
        return gcd(self.entries.nbytes, self.grid)

    @property
    def most_tokens(self) -> int:
        """Tokens that a commit may hold: one entry more than the archive, and the one that is computed next."""
        return (self.most_entries + 1) * self.entries.tokens + 1

    @property
    def blocks(self) -> int:
        """Blocks of commits and notes; a note and its next version need room at the same time."""
        layers, block = self.layers, self.block
        order = 4 * self.heads * layers * (self.most_entries + self.appends) + 16 * layers * self.appends
        twice = (
            -(-8 * self.most_tokens // block)
            + -(-self.notes_nbytes // block)
            + KINDS * layers
            + -(-_LINE_NBYTES * (8 + self.appends + KINDS * layers) // block)
        )
        return COMMITS + -(-order // block) + self.appends + 2 * twice

    @property
    def data_offset(self) -> int:
        """Where the first segment begins."""
        return self.blocks * self.block

    @property
    def segment_nbytes(self) -> int:
        """Bytes of a segment: all entries, and the padding of each append."""
        return (-(-self.most_entries * self.entries.nbytes // self.grid) + self.appends) * self.grid

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.data_offset + self.layers * self.heads * self.segment_nbytes
