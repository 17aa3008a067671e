"""A CXL card against a dictionary: any sequence of stores, loads, poison, resets and power losses."""

from __future__ import annotations

import struct

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.cxl_card_rig import CLEAR, INJECT, LINE, POISON, card, commit, told
from tierloop.firmware_models.cxl_part import GRAIN

BASE = 16 * GRAIN

lines = st.sampled_from([0, 1, 2, 3, 5, *(GRAIN // LINE + n for n in (-1, 0, 1, 2, 9)), 2 * GRAIN // LINE - 1])


class AnyUse(RuleBasedStateMachine):
    """Half of the card is volatile, half persistent; lines are numbered from its first byte on."""

    def __init__(self) -> None:
        super().__init__()
        self.card = card(volatile_nbytes=GRAIN, persistent_nbytes=GRAIN)
        self.bytes: dict[int, bytes] = {}
        self.poison: set[int] = set()
        self.decode()

    def decode(self) -> None:
        """One decoder for each partition."""
        assert commit(self.card, 0, BASE, GRAIN)
        assert commit(self.card, 1, BASE + GRAIN, GRAIN)

    @rule(line=lines, first=st.integers(0, 63), data=st.binary(min_size=1, max_size=64))
    def store(self, line: int, first: int, data: bytes) -> None:
        data = data[: LINE - first]
        self.card.store(BASE + line * LINE, data, first)
        before = self.bytes.get(line, bytes(LINE))
        self.bytes[line] = before[:first] + data + before[first + len(data) :]
        if len(data) == LINE:
            self.poison.discard(line)

    @rule(line=lines)
    def load(self, line: int) -> None:
        loaded = self.card.load(BASE + line * LINE)
        assert loaded.poisoned == (line in self.poison)
        assert loaded.data == (b"\xff" * LINE if line in self.poison else self.bytes.get(line, bytes(LINE)))

    @rule(line=lines, by_mailbox=st.booleans())
    def lose(self, line: int, by_mailbox: bool) -> None:
        if by_mailbox:
            told(self.card, INJECT, struct.pack("<Q", line * LINE))
        else:
            self.card.poison(line * LINE)
        self.poison.add(line)

    @rule(line=lines, data=st.binary(min_size=64, max_size=64))
    def clear(self, line: int, data: bytes) -> None:
        told(self.card, CLEAR, struct.pack("<Q", line * LINE) + data)
        self.bytes[line] = data
        self.poison.discard(line)

    @rule()
    def reset(self) -> None:
        self.card.reset()
        assert self.card.load(BASE).data == b"\xff" * LINE
        self.decode()

    @rule()
    def power_off(self) -> None:
        self.card.power_off()
        first = GRAIN // LINE
        self.bytes = {line: data for line, data in self.bytes.items() if line >= first}
        self.poison = {line for line in self.poison if line >= first}
        self.decode()

    @invariant()
    def the_poison_list_is_complete(self) -> None:
        answer = told(self.card, POISON, struct.pack("<QQ", 0, 2 * GRAIN // LINE))
        found = set()
        for at in range(32, len(answer), 16):
            word, count = struct.unpack_from("<QI", answer, at)
            found |= {word // LINE + n for n in range(count)}
        assert found == self.poison


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=40, stateful_step_count=25)
