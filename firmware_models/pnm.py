"""A near-memory processor: engines that take jobs, and banks behind channels that answer their requests.

Nothing here is told the bandwidth that the device is later found to have; it follows from what each request costs:

- Addresses go round the channels in granules of `granule_nbytes`. `channels · row_nbytes` consecutive bytes, a
  *stripe*, lie in one row of one bank per channel; consecutive stripes go round the banks.
- A channel moves whole bursts of `burst_nbytes` at `channel_bytes_per_s`. Opening a row keeps its bank busy for
  `row_cycle_ns`; a request to the row that its channel used last does not pay again.
- The job dispatcher may serve what a command reads in any order, and then likewise what it writes. It takes ranges in
  the order of their addresses, however the command lists them, and joins those that touch to one *request*: 16 rows of
  a cluster that lie together are one of 4 KiB. A byte that is asked for n times (a row that two lists select) is moved
  n times, since no engine keeps what another has read: what is asked for again is a request of its own, joined
  likewise. It is served while the rows of its banks are open, and opens none.
- The dispatcher cuts requests into tiles of `tile_nbytes` and deals them to `engines`. A tile costs its engine
  `request_ns`, and its bytes pass at `engine_bytes_per_s`.

An idle device takes as long as its busiest channel, bank or engine. So a few long rows are limited by the channels,
many short ones by row cycles, bursts that are used in part, and engines. What floating-point work costs is added by
the emulated device. Each engine has `sram_nbytes` for queries and states (0: unknown, not checked).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierloop.firmware_models.media import NOTHING, MediaWork, Ranges, parallel


@dataclass(frozen=True)
class PnmGeometry:
    """Sizes in bytes, times in ns, rates in bytes/s per channel or engine; `banks` per channel."""

    channels: int
    banks: int
    row_nbytes: int
    granule_nbytes: int
    burst_nbytes: int
    channel_bytes_per_s: int
    row_cycle_ns: int
    engines: int
    engine_bytes_per_s: int
    request_ns: int
    tile_nbytes: int
    sram_nbytes: int = 0

    def __post_init__(self) -> None:
        may_be_zero = ("row_cycle_ns", "request_ns", "sram_nbytes")
        for name in self.__dataclass_fields__:
            if getattr(self, name) < (0 if name in may_be_zero else 1):
                raise ValueError(f"{name} of a PNM geometry is too small: {self}")
        for name in ("channels", "banks", "row_nbytes", "granule_nbytes", "burst_nbytes", "tile_nbytes"):
            if getattr(self, name).bit_count() != 1:
                raise ValueError(f"{name} of a PNM geometry is a power of two, as address bits are: {self}")
        if not self.burst_nbytes <= self.granule_nbytes <= self.row_nbytes:
            raise ValueError(f"a row holds whole granules and a granule whole bursts: {self}")


class PnmModel:
    """Banks, channels and dispatcher; keeps no state between commands but its counters."""

    def __init__(self, geometry: PnmGeometry) -> None:
        g = self.geometry = geometry
        sizes = (g.burst_nbytes, g.granule_nbytes, g.channels * g.row_nbytes, g.tile_nbytes)
        self._sizes = (g.channels, g.banks, *(size.bit_length() - 1 for size in sizes))
        self._loops: tuple[Callable[..., tuple[int, ...]], Callable[[Ranges], tuple[Ranges, Ranges]]] | None = None
        self.reset()

    def reset(self) -> None:
        """Counters back to 0."""
        self.requests = 0
        self.activations = 0

    def access(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """Serve the requests of one command."""
        work, requests, activations = self._serve(reads, writes)
        self.requests += requests
        self.activations += activations
        return work

    def plan(self, reads: Ranges, writes: Ranges) -> MediaWork:
        """The same, not counted."""
        return self._serve(reads, writes)[0]

    def trim(self, address: int, nbytes: int) -> None:
        """Memory keeps nothing about bytes that are no longer needed."""

    def ceiling(self, write: bool) -> int:
        """All channels, or all engines, whichever is slower."""
        g = self.geometry
        return min(g.channels * g.channel_bytes_per_s, g.engines * g.engine_bytes_per_s)

    def too_large(self, queries_nbytes: int, states_nbytes: int) -> str:
        """Why a launch does not fit the engines' SRAM; "" if it does."""
        room = self.geometry.sram_nbytes * self.geometry.engines
        if not room or queries_nbytes + states_nbytes <= room:
            return ""
        return (
            f"{queries_nbytes} B of queries and {states_nbytes} B of states do not fit the engines' SRAM of {room} B; "
            "split the launch"
        )

    def _serve(self, reads: Ranges, writes: Ranges) -> tuple[MediaWork, int, int]:
        g = self.geometry
        if self._loops is None:
            from tierloop.firmware_models import pnm_requests  # compiles on import, so not before it is needed

            self._loops = pnm_requests.serve, pnm_requests.requests_of
        serve, requests_of = self._loops
        if not (reads.flags.c_contiguous and writes.flags.c_contiguous):
            reads, writes = np.ascontiguousarray(reads), np.ascontiguousarray(writes)
        found = serve(reads, writes, NOTHING, NOTHING, *self._sizes)
        if found[0] < 0:
            (reads, read_again), (writes, written_again) = requests_of(reads), requests_of(writes)
            found = serve(reads, writes, read_again, written_again, *self._sizes)
        requests, num_tiles, busiest, moved, most_opens, opens = found
        if not num_tiles:
            return MediaWork(0, 1, 0), 0, 0
        at_work = num_tiles if num_tiles < g.engines else g.engines
        bus_ns = -(-busiest * 1_000_000_000 // g.channel_bytes_per_s)
        bank_ns = most_opens * g.row_cycle_ns
        engine_ns = -(-num_tiles // g.engines) * g.request_ns
        engine_ns += -((-moved // at_work) * 1_000_000_000 // g.engine_bytes_per_s)
        alone = max(bus_ns, bank_ns, engine_ns)
        share = max(
            parallel(moved * 1_000_000_000 // g.channel_bytes_per_s, g.channels, alone),
            parallel(opens * g.row_cycle_ns, g.channels * g.banks, alone),
            parallel(engine_ns * at_work, g.engines, alone),
        )
        return MediaWork(alone, share, moved), requests, opens
