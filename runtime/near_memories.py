"""Near memories of a policy: which there are, what requests have of them, and which have been lost.

A request is `opened` before anything of it lies there: its rows are divided over the devices, and space for its whole
life is taken, there and for its centroids where the modules run. What a step needs there, queries and states of all
requests, has to fit beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tierloop.devices.errors import ConfigurationError, DeviceError, Gone, MediaError, OutOfMemory
from tierloop.devices.kernels.contract import ITEMSIZE
from tierloop.runtime.blocks import K, TierTooSmall, V
from tierloop.runtime.centroids import Centroids
from tierloop.runtime.clusters import check_clusters
from tierloop.runtime.engine import Engine
from tierloop.runtime.near_partition import NearDevice, divide
from tierloop.runtime.near_request import NearRequest, Pieces
from tierloop.runtime.near_rows import NearRows, num_segments
from tierloop.runtime.near_writer import centroid_dtype
from tierloop.runtime.policy import Request

WORKING_SLOTS = 4
"""Times what a step needs that is left free: two layers are under way, and room for either grows by doubling."""


def near_devices(engine: Engine, policy: str, names: Sequence[str]) -> list[NearDevice]:
    """Who attends near which memory: those named, or all PNM memories. Raises ConfigurationError."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigurationError(
            f"{policy}: near is {names!r}; it must be a list of memories, for example ['emu:pnm0']"
        )
    known = [m.name for m in engine.memories() if m.name != engine.dense.memory]
    wanted = list(names) or [m.name for m in engine.memories("pnm")]
    if not wanted:
        raise ConfigurationError(
            f"{policy}: platform {engine.platform.name} has no pnm memory; name others in `near` "
            f"({', '.join(known) or 'there are none'}), or switch them off (without near)"
        )
    devices = []
    for name in wanted:
        if name not in known:
            raise ConfigurationError(f"{policy}: near {name!r}: it must be one of {', '.join(known) or 'none'}")
        lane = engine.runner("attend", name)
        if lane is None:
            raise ConfigurationError(f"{policy}: nobody attends over {engine.shape.dtype} rows on {name}")
        devices.append(NearDevice(name, lane))
    if len(set(wanted)) < len(wanted):
        raise ConfigurationError(f"{policy}: near names a memory twice: {', '.join(wanted)}")
    return devices


class NearMemories:
    """Divides requests over `devices`; there may be none. Raises ConfigurationError where they cannot be divided."""

    def __init__(self, engine: Engine, devices: list[NearDevice], partition: str, pieces: Pieces) -> None:
        self.engine = engine
        self.devices = devices
        self.pieces = pieces
        self._partition = partition
        self._open: list[NearRequest] = []
        self._unreadable: list[NearRows] = []
        """Room of requests that could not be read any more: kept until another one has found its place beside it."""
        if devices:
            check_clusters(engine)
            divide(partition, len(devices), engine.shape.num_kv_heads, 1, [0])

    def open(self, request: Request, attends: bool) -> NearRequest:
        """Take what the request needs, on devices that are not gone. Raises TierTooSmall, with nothing kept.

        Room that could not be read before is taken last: only where there is no other.
        """
        try:
            near = self._open_on_those_left(request, attends)
        except TierTooSmall:
            if not self._unreadable:
                raise
            self._give_unreadable()
            return self._open_on_those_left(request, attends)
        self._give_unreadable()
        return near

    def _give_unreadable(self) -> None:
        while self._unreadable:
            self._unreadable.pop().close()

    def _open_on_those_left(self, request: Request, attends: bool) -> NearRequest:
        while self.devices:
            try:
                return self._open_on_all(request, attends)
            except Gone as error:
                count = len(self.devices)
                self.lost(error)
                if len(self.devices) == count:  # it was none of them
                    raise
        raise TierTooSmall(f"{request.name} has no near memory to go to")

    def _open_on_all(self, request: Request, attends: bool) -> NearRequest:
        engine, pieces, most = self.engine, self.pieces, request.max_tokens
        last = max(pieces.room(most), pieces.first + 1)
        name, segments = request.name, num_segments(last, pieces.segment_tokens)
        by_room = sorted(range(len(self.devices)), key=lambda d: -engine.room(self.devices[d].memory))
        shares = divide(self._partition, len(self.devices), engine.shape.num_kv_heads, segments, by_room)
        rows = NearRows(engine, self.devices, shares, pieces.segment_tokens, pieces.first, last, name)
        try:
            needed = Counter(self._working_nbytes(rows, last))
            for other in self._open:
                needed.update(self._working_nbytes(other.rows, other.pieces.room(other.max_tokens)))
            full = [memory for memory in rows.nbytes() if engine.room(memory) < WORKING_SLOTS * needed[memory]]
            if full:
                raise TierTooSmall(f"{', '.join(full)} is too small: {name} would leave no working space there")
            width, dtype = pieces.most_clusters(most), centroid_dtype(engine.shape.dtype)
            centroids = Centroids(engine, width, pieces.first, f"centroids of {name}", dtype)
        except BaseException:
            rows.close()
            raise
        near = NearRequest(name, request.prompt_tokens, most, pieces, centroids, rows, attends)
        self._open.append(near)
        return near

    async def close(self, near: NearRequest, failure: DeviceError | None = None) -> None:
        """Wait for what is being written of the request, and give its space back: not at once if it is unreadable."""
        near.closing = True
        for piece in list(near.under_way):
            for task in piece.tasks:
                await task
        self._open.remove(near)
        near.centroids.close()
        if isinstance(failure, MediaError):
            self._unreadable.append(near.rows)
        else:
            near.rows.close()

    def index_nbytes(self, share: float) -> int:
        """Bytes of the centroids of all rows that the memories hold, and at most `share` of the modules' room."""
        engine, shape = self.engine, self.engine.shape
        row = shape.row_nbytes(K) + shape.row_nbytes(V)
        rows = sum(self.free_nbytes().values()) // row
        needed = rows // self.pieces.cluster_tokens * shape.head_dim * ITEMSIZE[centroid_dtype(shape.dtype)]
        return min(needed + needed // 8, int(share * max(engine.room(engine.dense.memory), 0)))

    def free_nbytes(self) -> dict[str, int]:
        """Bytes by memory that nobody has."""
        return {device.memory: max(self.engine.room(device.memory), 0) for device in self.devices}

    def could_hold(self) -> int:
        """Tokens of a request that would fit if nobody else were there."""
        shape, taken = self.engine.shape, self._taken()
        row = shape.num_layers * shape.num_kv_heads * (shape.row_nbytes(K) + shape.row_nbytes(V))
        room = sum(nbytes + taken[memory] for memory, nbytes in self.free_nbytes().items())
        return room // row

    def lost(self, error: DeviceError) -> None:
        """A command failed: devices that are gone are left out from now on."""
        cause = error.__cause__ if isinstance(error.__cause__, DeviceError) else error
        if isinstance(cause, Gone):
            self.look()

    def look(self) -> None:
        """Leave out devices that are gone."""
        self.devices = [device for device in self.devices if self._is_there(device)]

    def _is_there(self, device: NearDevice) -> bool:
        """Whether a memory still answers: whoever failed may have been copying from it."""
        try:
            self.engine.drop(self.engine.scratch(device.memory, 1))
        except Gone:
            return False
        except OutOfMemory:
            return True
        return True

    def _working_nbytes(self, rows: NearRows, last: int) -> dict[str, int]:
        """Bytes by memory of a request's queries and states in a step of one token, with rows up to `last`."""
        shape = self.engine.shape
        needed: dict[str, int] = {}
        for near in rows.shares:
            nodes = 2 * (last // shape.split_tokens).bit_length() + 2
            if self._partition == "token":
                nodes += len(near.share.segments)
            row = 4 * (shape.head_dim + nodes * (2 + shape.head_dim_v))
            memory = near.near.lane.memory
            needed[memory] = needed.get(memory, 0) + len(near.share.heads) * shape.group * row
        return needed

    def _taken(self) -> Counter[str]:
        """Bytes by memory that requests have."""
        taken: Counter[str] = Counter()
        for rows in (*(near.rows for near in self._open), *self._unreadable):
            taken.update(rows.nbytes())
        return taken
