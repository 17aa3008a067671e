"""The blocks of a namespace, its write cache and what a power failure leaves, against two dictionaries."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.passthrough import Passthrough

BLOCKS, LBA = 12, 512
RANGES = st.integers(0, BLOCKS - 1).flatmap(lambda lba: st.tuples(st.just(lba), st.integers(1, BLOCKS - lba)))


class Blocks(RuleBasedStateMachine):
    """`seen` is what a reader finds in each block that holds data, `safe` what is left after a power failure."""

    def __init__(self) -> None:
        super().__init__()
        self.namespace = Namespace(BLOCKS * LBA, Passthrough(1, 1), LBA)
        self.seen: dict[int, int] = {}
        self.safe: dict[int, int] = {}
        self.bad: set[int] = set()
        self.bad_beneath: set[int] = set()

    def change(self, blocks: tuple[int, int], value: int | None, durable: bool) -> None:
        for block in range(blocks[0], sum(blocks)):
            for state in (self.seen, self.safe) if durable else (self.seen,):
                state.pop(block, None)
                if value is not None:
                    state[block] = value
            self.bad.discard(block)
            if durable:
                self.bad_beneath.discard(block)

    @rule(blocks=RANGES, value=st.integers(1, 255), durable=st.booleans())
    def put(self, blocks: tuple[int, int], value: int, durable: bool) -> None:
        self.namespace.put(blocks[0], bytes([value]) * blocks[1] * LBA, durable)
        self.change(blocks, value, durable)

    @rule(blocks=RANGES, durable=st.booleans())
    def zero(self, blocks: tuple[int, int], durable: bool) -> None:
        self.namespace.zero(*blocks, durable)
        self.change(blocks, 0, durable)

    @rule(blocks=RANGES, durable=st.booleans())
    def deallocate(self, blocks: tuple[int, int], durable: bool) -> None:
        self.namespace.deallocate(*blocks, durable)
        self.change(blocks, None, durable)

    @rule(blocks=RANGES)
    def spoil(self, blocks: tuple[int, int]) -> None:
        self.namespace.spoil(*blocks)
        self.commit(blocks)
        for bad in (self.bad, self.bad_beneath):
            bad.update(range(blocks[0], sum(blocks)))

    @rule(blocks=RANGES)
    def commit(self, blocks: tuple[int, int]) -> None:
        self.namespace.commit(*blocks)
        for block in range(blocks[0], sum(blocks)):
            self.safe.pop(block, None)
            if block in self.seen:
                self.safe[block] = self.seen[block]
            (self.bad_beneath.add if block in self.bad else self.bad_beneath.discard)(block)

    @rule()
    def flush(self) -> None:
        self.namespace.flush()
        self.safe, self.bad_beneath = dict(self.seen), set(self.bad)

    @rule()
    def lose_power(self) -> None:
        self.namespace.lose_power()
        self.seen, self.bad = dict(self.safe), set(self.bad_beneath)

    @invariant()
    def a_reader_finds_what_was_left(self) -> None:
        namespace = self.namespace
        assert namespace.used_blocks == len(self.seen)
        for block in range(BLOCKS):
            assert namespace.load(block, 1) == bytes([self.seen.get(block, 0)]) * LBA
            assert (namespace.hole(block, 1) is None) == (block in self.seen)
            assert (namespace.bad_block(block, 1, write=False) is not None) == (block in self.bad)

    @invariant()
    def a_clean_cache_has_nothing_to_lose(self) -> None:
        if not self.namespace.dirty_blocks:
            assert (self.seen, self.bad) == (self.safe, self.bad_beneath)


TestBlocks = Blocks.TestCase
