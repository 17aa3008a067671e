"""Rows on their way to near memories, between two steps: pieces that are due, migrations, hand-overs.

Who calls this: a policy, when a step begins and none is under way. What was written is published, requests that have
been copied are handed over, migrations begin, and pieces go to the writer (near_writer.py): all that is due of requests
that are attended near the memory or whose prompt is coming; of those that migrate, `migrate_tokens` tokens of all
layers per step, so that others are hardly slowed, and a run with some of a model's layers copies its share.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.near_memories import NearMemories
from tierloop.runtime.near_request import NearRequest, Piece
from tierloop.runtime.near_writer import NearWriter
from tierloop.runtime.paged_blocks import PagedBlocks
from tierloop.runtime.policy import Request

LEAD = 8
"""A migration begins when a request has this part of the threshold left to grow: an eighth."""


def near_of(request: Request) -> NearRequest | None:
    """What the request has near the memory."""
    near: NearRequest | None = request.state.get("near")
    return near


class NearMoves:
    """Moves rows of requests from `blocks` to `memories`; below a `watermark` of free blocks whoever is longest moves.

    `migrates` says whether any request moves that has been decoded.
    """

    def __init__(
        self,
        memories: NearMemories,
        blocks: PagedBlocks,
        writer: NearWriter,
        migrate_tokens: int,
        watermark: float,
        migrates: bool,
    ) -> None:
        self.memories = memories
        self.writer = writer
        self.migrated = self.forced = 0
        """Requests that were handed over, and those that began to move because there was no room."""
        self.stayed: set[str] = set()
        """Requests that were to move, and for which there was no room."""
        self._blocks = blocks
        self._engine = memories.engine
        self._migrate_tokens = migrate_tokens
        self._watermark = watermark
        self._migrates = migrates
        self._credit = 0

    async def step_begins(self, requests: Sequence[Request], threshold: float) -> None:
        """Go on with all of these, the requests of the policy; those of `threshold` tokens and more belong there."""
        for request in requests:
            near = near_of(request)
            if near is None:
                continue
            if near.error is not None:
                await self._give_up(request, near)
                continue
            self._publish(request, near)
            if not (near.attends or near.at_once or near.under_way or self.is_due(request, near)):
                self._hand_over(request, near, threshold)
        if self._migrates and self.memories.devices:
            self._begin_migrations(requests, threshold)
        migrating = []
        for request in requests:
            near = near_of(request)
            if near is not None and near.error is None:
                self.start_pieces(request, near)
                if near.attends or near.at_once:
                    for piece in near.under_way:
                        self.writer.begin(near, request.blocks, piece, len(piece.waiting))
                else:
                    migrating += [(request, near, piece) for piece in near.under_way if piece.waiting]
        self._spend(migrating)

    def is_due(self, request: Request, near: NearRequest) -> bool:
        """Whether rows of the request could be clustered that are not."""
        stored = int(request.blocks.length[0])
        return near.pieces.next(near.started, stored, near.prompt_tokens) is not None

    def start_pieces(self, request: Request, near: NearRequest) -> None:
        """Make pieces of all rows that are due."""
        stored = int(request.blocks.length[0])
        while (high := near.pieces.next(near.started, stored, near.prompt_tokens)) is not None:
            self.writer.start(near, near.started, high)

    async def write_all(self, request: Request, near: NearRequest) -> None:
        """Write what is due, and wait for it. Raises a DeviceError."""
        self.start_pieces(request, near)
        for piece in list(near.under_way):
            self.writer.begin(near, request.blocks, piece, len(piece.waiting))
            for task in piece.tasks:
                await task
        if near.error is not None:
            raise near.error

    def _spend(self, migrating: list[tuple[Request, NearRequest, Piece]]) -> None:
        """Let as many layers of migrating pieces be written as this step allows."""
        if not migrating:
            self._credit = 0
            return
        self._credit += self._migrate_tokens * self._engine.shape.num_layers
        for request, near, piece in migrating:
            while piece.waiting and self._credit >= piece.high - piece.low:
                self._credit -= piece.high - piece.low
                self.writer.begin(near, request.blocks, piece, 1)
            if piece.waiting:
                return

    def _publish(self, request: Request, near: NearRequest) -> None:
        """Pieces that were written in all layers are read from now on, and their blocks here given back."""
        for piece in list(near.under_way):
            if len(piece.labels) < self._engine.shape.num_layers:
                return
            near.publish(piece)
            if near.attends:
                self._give_blocks(request, piece.low, piece.high)

    def _give_blocks(self, request: Request, low: int, high: int) -> None:
        block_tokens = self._engine.shape.block_tokens
        self._blocks.give(request, low // block_tokens, high // block_tokens)

    async def _give_up(self, request: Request, near: NearRequest) -> None:
        """What was being written failed: a request that is there fails, one that was to move stays."""
        error = near.error
        assert error is not None, "it failed"
        self.memories.lost(error)
        if near.attends:
            request.fail(error)
            return
        del request.state["near"]
        await self.memories.close(near, error)

    # -- migration ----------------------------------------------------------------------------------------------------

    def _begin_migrations(self, requests: Sequence[Request], threshold: float) -> None:
        """Have requests copied that approach the threshold, and the longest one where blocks run out."""
        blocks = self._blocks
        here = [r for r in requests if near_of(r) is None and r.table is not None]
        for request in here:
            if int(request.blocks.length[0]) * (1 + 1 / LEAD) >= threshold:
                self._begin(request, forced=False)
        low = blocks.is_shared and blocks.free < self._watermark * blocks.pool.num_slots
        if low and not any(near is not None and not near.attends for near in map(near_of, requests)):
            here = [r for r in here if near_of(r) is None]
            for request in sorted(here, key=lambda r: -int(r.blocks.length[0])):
                if self._begin(request, forced=True):
                    break

    def _begin(self, request: Request, forced: bool) -> bool:
        """Begin to copy a request that has enough rows; False where it has not, or there is no room for it."""
        pieces, stored = self.memories.pieces, int(request.blocks.length[0])
        if pieces.next(pieces.first, stored, request.prompt_tokens) is None:
            return False
        try:
            near = self.memories.open(request, attends=False)
        except TierTooSmall:
            self.stayed.add(request.name)
            return False
        near.forced, near.is_migration = forced, True
        request.state["near"] = near
        self.forced += forced
        return True

    def _hand_over(self, request: Request, near: NearRequest, threshold: float) -> None:
        """The request has been copied as far as it goes: from the next step on it is attended there."""
        if near.is_migration and not near.forced and int(request.blocks.length[0]) < threshold:
            return
        near.attends = True
        request.migrations += near.is_migration
        self.migrated += near.is_migration
        self._give_blocks(request, near.pieces.first, near.end)
