"""What a flash drive is made of: its geometry, and what a drive may have beyond pages and dies, each off while it is 0.

- `buffer_nbytes`: a write buffer, protected against power loss. A write ends when its units are in the buffer, which
  takes in a new stripe once the stripe that lay there so many stripes ago has been programmed.
- `slc_percent`: so many blocks for 100 of the main area, on top of them, are programmed with one of `bits_per_cell`
  bits. They hold that much less, take `slc_program_ns` and `slc_read_ns`, and everything the host writes goes there
  first. Where a die's cache is full, its oldest block is folded into the main area, whole, before the write goes on; a
  drive that has had nothing to do for `idle_ns` folds by itself. The capacity is that of the main area, whatever the
  cache holds. Erasures of the cache count and never fail: one bit per cell lasts far longer than several.
- `suspends`: an operation of a die is overtaken by at most so many reads. One that has begun is suspended for that,
  which takes `suspend_ns`; one that waits stands back. Without it, a die serves first come, first served.
- `rated_cycles`: erasures that a block lasts; `life_spread_percent` is how much longer the luckiest block lasts (by the
  seed). `reserve_blocks` per die stand in for blocks whose erasure fails; when the last one was taken, the drive ends
  the command that took it and is read-only from then on. Without a reserve blocks wear and never fail.
- `wear_spread`: where collecting would make a block's erasures exceed those of the die's coldest block by more than
  that, the two change places: the cold units move into the worn block, and the next writes go to the fresh one.
- `retry_ppm`: so many in a million page reads need another sensing round when a block has had its rated cycles, in
  proportion to its erasures; data that is `retention_ns` old counts as much as the rated cycles. Each round may need
  another, up to `retries`. What is drawn follows from `seed` and the reads before.

With any of the first three a drive is *timed*: it is told the time and does its own queueing (flash.py).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

_MOST = 1 << 60


@dataclass(frozen=True)
class FlashGeometry:
    """Sizes in bytes, times in ns, `channel_bytes_per_s` per channel. Raises ValueError for what cannot work."""

    capacity: int
    unit_nbytes: int
    page_nbytes: int
    planes: int
    channels: int
    dies_per_channel: int
    stripes_per_block: int
    read_ns: int
    program_ns: int
    erase_ns: int
    channel_bytes_per_s: int
    spare_percent: int
    buffer_nbytes: int = 0
    slc_percent: int = 0
    bits_per_cell: int = 3
    slc_program_ns: int = 0
    slc_read_ns: int = 0
    idle_ns: int = 0
    suspends: int = 0
    suspend_ns: int = 0
    rated_cycles: int = 0
    life_spread_percent: int = 0
    reserve_blocks: int = 0
    wear_spread: int = 0
    retry_ppm: int = 0
    retries: int = 0
    retention_ns: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        always = [f.name for f in fields(self) if f.default is MISSING]
        if min(getattr(self, name) for name in always) < 1:
            raise ValueError(f"every number of a flash geometry is at least 1: {self}")
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} = {getattr(self, field.name)}: no number of a geometry is negative")
            if getattr(self, field.name) > _MOST:
                raise ValueError(f"{field.name} = {getattr(self, field.name)}; allowed: at most {_MOST}")
        if self.page_nbytes % self.unit_nbytes:
            raise ValueError(f"a page of {self.page_nbytes} B holds no whole number of {self.unit_nbytes} B units")
        if self.spare_percent * (self.stripes_per_block - 1) < 100:
            raise ValueError(
                f"spare_percent {self.spare_percent} is less than the stripe per block that collecting garbage can "
                f"lose: 100 / (stripes_per_block - 1), stripes_per_block = {self.stripes_per_block}"
            )
        stripe = self.page_nbytes * self.planes
        if 0 < self.buffer_nbytes < stripe:
            raise ValueError(f"buffer_nbytes {self.buffer_nbytes} is less than a stripe of {stripe} bytes")
        if self.slc_percent:
            self._check_cache()
        if self.suspends and not self.suspend_ns:
            raise ValueError(f"suspends = {self.suspends} needs suspend_ns, the time that suspending takes")
        if self.retry_ppm and not (self.rated_cycles and self.retries):
            raise ValueError(f"retry_ppm = {self.retry_ppm} needs rated_cycles and retries, both at least 1")
        if self.retry_ppm > 1_000_000:
            raise ValueError(f"retry_ppm = {self.retry_ppm} is more than a million of a million")
        if self.reserve_blocks and not self.rated_cycles:
            raise ValueError(f"reserve_blocks = {self.reserve_blocks} without rated_cycles: no block would ever fail")

    def _check_cache(self) -> None:
        if not 2 <= self.bits_per_cell <= 5:
            raise ValueError(f"bits_per_cell = {self.bits_per_cell}; with a cache of one bit per cell it is 2 to 5")
        if self.slc_percent > 100:
            raise ValueError(f"slc_percent = {self.slc_percent}; a cache has at most as many blocks as the main area")
        if not self.slc_program_ns or not self.slc_read_ns:
            raise ValueError(f"slc_percent = {self.slc_percent} needs slc_program_ns and slc_read_ns, both at least 1")
        if self.stripes_per_block < self.bits_per_cell:
            raise ValueError(
                f"a block of {self.stripes_per_block} stripes has none with one of {self.bits_per_cell} bits per cell"
            )

    @property
    def timed(self) -> bool:
        """Whether the drive does its own queueing and has to be told the time."""
        return bool(self.buffer_nbytes or self.slc_percent or self.suspends)

    @property
    def dies(self) -> int:
        """Dies of the whole drive."""
        return self.channels * self.dies_per_channel

    @property
    def slots(self) -> int:
        """Units in a stripe."""
        return self.page_nbytes // self.unit_nbytes * self.planes

    @property
    def units(self) -> int:
        """Units that the host sees."""
        return self.capacity // self.unit_nbytes

    @property
    def unit_ns(self) -> int:
        """How long a unit takes on its channel."""
        return -(-self.unit_nbytes * 1_000_000_000 // self.channel_bytes_per_s)

    @property
    def main_blocks(self) -> int:
        """Blocks of a die that hold the capacity, with `spare_percent` of it and two more."""
        per_block = self.dies * self.slots * self.stripes_per_block
        return -(-self.units * (100 + self.spare_percent) // (100 * per_block)) + 2

    @property
    def slc_blocks(self) -> int:
        """Blocks of a die that are programmed with one bit per cell."""
        return -(-self.main_blocks * self.slc_percent // 100)

    @property
    def slc_stripes(self) -> int:
        """Stripes in a block of the cache."""
        return self.stripes_per_block // self.bits_per_cell

    @property
    def slc_nbytes(self) -> int:
        """What the whole cache takes in."""
        return self.dies * self.slc_blocks * self.slc_stripes * self.slots * self.unit_nbytes if self.slc_percent else 0

    @property
    def blocks_per_die(self) -> int:
        """Blocks of a die: the main area, then the reserve, then the cache."""
        return self.main_blocks + self.reserve_blocks + self.slc_blocks
