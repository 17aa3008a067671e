"""The model of a kernel on a machine with CXL memory cards: `cxl_machine`.

The cards are firmware models (firmware_models/cxl_card.py) below one host bridge, each behind a root port of its own.
The kernel reaches them as Linux does: it asks through the mailbox, and makes a region by writing the decoders of its
cards. What programs see is made from that state whenever they look: /sys (as Linux 6.12 shows it, kernel_cxl_tree.py),
/dev/cxl/memN and /dev/daxX.Y.

- A region takes bytes of one partition from each of its cards: `ram` or `pmem`. With several cards it is an interleave
  set, and its bytes lie in a file of their own, in the host's order, that the cards read and write.
- Its dax device is bound to device_dax ("devdax": mapped by programs), to kmem ("system-ram": memory of a NUMA node
  without cores), or to nothing ("unbound").
- A devdax mapping is real memory, shared with the card; pages with poison in them raise SIGBUS (kernel_cxl_mapping.py).
  The card does not see single loads and stores of a mapping.
- Mapping: length and offset are multiples of the alignment and within the device, else EINVAL. (Linux lets a mapping
  reach beyond the end and raises SIGBUS there.)

Memory calls that concern NUMA nodes (mbind, move_pages) are not answered here; `answer` adds them. What a process then
has on such a node is memory of its own, not the card's: poison and power do not reach it.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tierloop.emulators.kernel import Absent, ModelKernel, Tree, failure
from tierloop.emulators.kernel_cxl_mapping import SharedPages, runs_of
from tierloop.emulators.kernel_cxl_memdev import Mailbox, MemdevNode, Raw
from tierloop.emulators.kernel_cxl_memory import base_tree
from tierloop.emulators.kernel_cxl_tree import CxlView, DaxView, RegionView, cxl_tree
from tierloop.firmware_models.cxl_card import CxlCard, Loaded
from tierloop.firmware_models.cxl_cells import PAGE, Lent, anonymous_file
from tierloop.firmware_models.cxl_codes import Op
from tierloop.firmware_models.cxl_decoders import (
    BASE,
    COMMIT,
    COMMITTED,
    CONTROL,
    ENABLE,
    ENCODED_WAYS,
    GLOBAL,
    HDM,
    HOST_ONLY,
    LOCK,
    SIZE,
    SKIP,
    STRIDE,
)
from tierloop.firmware_models.cxl_part import GRAIN, CxlPart
from tierloop.firmware_models.hdm import GRANULES, Interleave

DaxMode = Literal["devdax", "system-ram", "unbound"]
DAX_MODES: tuple[DaxMode, ...] = ("devdax", "system-ram", "unbound")
ALIGNS = (4096, 2 << 20, 1 << 30)
_WINDOWS = {"ram": 0x10_8000_0000, "pmem": 0x80_8000_0000}
"""Where the fixed memory windows begin."""


@dataclass(frozen=True)
class RegionPlan:
    """A region to be made at the start: which cards, in the order of the interleave set, and of which partition.

    `nbytes` is the whole region's, 0 for all that the cards have left in that partition. `locked` decoders stay until a
    reset; `arithmetic` is that of the window, by which the host bridge chooses a card.
    """

    cards: tuple[int, ...]
    kind: Literal["ram", "pmem"] = "ram"
    nbytes: int = 0
    granule_nbytes: int = 256
    mode: DaxMode | None = None
    align: int = 2 << 20
    movable: bool = True
    online: bool = True
    locked: bool = False
    arithmetic: Literal["modulo", "xor"] = "modulo"


def cxl_machine(
    cards: Sequence[CxlCard | CxlPart] = (CxlPart(),),
    mode: DaxMode | Literal["memdev"] = "devdax",
    regions: Sequence[RegionPlan] | None = None,
    base: Tree | None = None,
    raw: Raw = "refused",
) -> CxlKernel:
    """A machine with these cards. Without `regions`, each card has one for each of its partitions; "memdev" makes none.

    `mode` is that of all regions whose plan has none; `base` is the tree of the rest of the machine, `raw` what the
    kernel does with raw commands to a card. Raises ValueError.
    """
    kernel = CxlKernel([card if isinstance(card, CxlCard) else CxlCard(card) for card in cards], base, raw)
    if regions is None:
        plans = []
        for number, card in enumerate(kernel.cards if mode != "memdev" else ()):
            for kind, nbytes in zip(("ram", "pmem"), card.state.partitions, strict=True):
                if nbytes:
                    plans.append(RegionPlan((number,), "pmem" if kind == "pmem" else "ram"))
        regions = sorted(plans, key=lambda plan: plan.kind != "ram")
    for plan in regions:
        kernel.create_region(plan, "unbound" if mode == "memdev" else mode)
    return kernel


class CxlRegion:
    """A committed region; `base` is its host address. `shares` are (card, decoder number, device address) by way."""

    def __init__(self, number: int, plan: RegionPlan, base: int, nbytes: int, cards: Sequence[CxlCard]) -> None:
        self.number = number
        self.plan = plan
        self.base = base
        self.nbytes = nbytes
        self.interleave = Interleave(len(plan.cards), plan.granule_nbytes, plan.arithmetic)
        self.cards = [cards[i] for i in plan.cards]
        self.shares: list[tuple[int, int, int]] = []
        self.dax_mode: DaxMode = "unbound"
        self.movable = plan.movable
        self.online = plan.online

    @property
    def name(self) -> str:
        """Of its dax device."""
        return f"dax{self.number}.0"

    def attach(self) -> None:
        """Its bytes: one card's own, or a file that all cards share. Poison is watched from here on."""
        share = self.nbytes // self.interleave.ways
        if self.interleave.ways == 1:
            self.pages = SharedPages(self.cards[0].state.cells.fd, self.shares[0][2], self.nbytes)
        else:
            fd = anonymous_file(self.nbytes)
            weakref.finalize(self, os.close, fd)
            for way, (card, (_, _, dpa)) in enumerate(zip(self.cards, self.shares, strict=True)):
                card.state.cells.lend(Lent(dpa, share, fd, self.interleave, way))
            self.pages = SharedPages(fd, 0, self.nbytes)
        for card in self.cards:
            card.state.cells.watchers.append(self.look)
        self.look(0, 0)

    def detach(self) -> None:
        """The cards have their bytes back."""
        for card, (_, _, dpa) in zip(self.cards, self.shares, strict=True):
            card.state.cells.watchers.remove(self.look)
            if self.interleave.ways > 1:
                card.state.cells.take_back(dpa)

    def give_up(self) -> None:
        """Take back what was committed."""
        for card, (_, number, _) in zip(self.cards, self.shares, strict=False):
            card.write_component(HDM + CONTROL + STRIDE * number, 0)

    def look(self, _dpa: int, _nbytes: int) -> None:
        """Which pages are lost: those with a poisoned line, or all if a card is gone."""
        if any(card.removed for card in self.cards):
            self.pages.lose(((0, self.nbytes),))
            return
        lost = set()
        for way, (card, (_, _, dpa)) in enumerate(zip(self.cards, self.shares, strict=True)):
            for line in card.state.cells.poison_in(dpa, self.nbytes // self.interleave.ways):
                lost.add(self.interleave.encode(way, line - dpa) // PAGE * PAGE)
        self.pages.lose(runs_of(lost))

    def place(self, offset: int) -> tuple[CxlCard, int]:
        """(card, device address) of an offset in the region."""
        way, inside = self.interleave.decode(offset)
        return self.cards[way], self.shares[way][2] + inside


class DaxNode(Absent):
    """/dev/daxX.Y of a region."""

    def __init__(self, region: CxlRegion) -> None:
        self._region = region

    def mmap(self, nbytes: int, offset: int) -> mmap.mmap:
        """Shared memory. EINVAL off the grid or beyond the end, ENXIO if a card is gone."""
        align = self._region.plan.align
        if nbytes < 1 or offset < 0 or nbytes % align or offset % align or offset + nbytes > self._region.nbytes:
            raise failure(errno.EINVAL)
        if any(card.removed for card in self._region.cards):
            raise failure(errno.ENXIO)
        return self._region.pages.map(nbytes, offset, align)


class CxlKernel(ModelKernel):
    """A machine with CXL cards; made by `cxl_machine`. `cards` and `regions` are the back door to what is behind it."""

    def __init__(self, cards: Sequence[CxlCard], base: Tree | None = None, raw: Raw = "refused") -> None:
        self.cards = list(cards)
        self.regions: list[CxlRegion] = []
        self._base = base or base_tree()
        self._shown: tuple[tuple[int, ...], Tree] | None = None
        self._steps = 0
        self._next_region = 0
        self._disabled: set[int] = set()
        super().__init__(self._base, model="a model of CXL type 3 cards and of the kernel in front of them")
        for number, card in enumerate(self.cards):
            self.add(f"/dev/cxl/mem{number}", MemdevNode(card, raw))

    @property
    def tree(self) -> Tree:
        """The tree as it is now, made from the state of the cards."""
        key = (self._steps, *(card.changes for card in self.cards))
        if self._shown is None or self._shown[0] != key:
            self._shown = (key, cxl_tree(self._base, self._view()))
        return self._shown[1]

    @tree.setter
    def tree(self, base: Tree) -> None:
        self._base = base
        self._shown = None

    # what an administrator does

    def create_region(self, plan: RegionPlan, mode: DaxMode = "devdax") -> CxlRegion:
        """Program the decoders of the cards, and bind the dax device. Raises ValueError, OSError (ENXIO, ENOSPC)."""
        with self.guard:
            ways = len(plan.cards)
            if plan.granule_nbytes not in GRANULES or ways not in ENCODED_WAYS.values():
                raise ValueError(f"a region of {ways} cards with granules of {plan.granule_nbytes} bytes")
            if (
                plan.align not in ALIGNS
                or len(set(plan.cards)) != ways
                or not set(plan.cards) <= set(range(len(self.cards)))
            ):
                raise ValueError(f"no such region: {plan}; cards are 0 to {len(self.cards) - 1}, aligns {ALIGNS}")
            free = [self._free(self.cards[number], plan.kind) for number in plan.cards]
            nbytes = plan.nbytes or min(left for _, left in free) // GRAIN * GRAIN * ways
            if nbytes < 1 or nbytes % (GRAIN * ways):
                raise ValueError(f"a region of {nbytes} bytes; allowed: multiples of {GRAIN * ways}")
            if nbytes // ways > min(left for _, left in free):
                raise failure(errno.ENOSPC)
            region = CxlRegion(self._next_region, plan, self._window_end(plan.kind), nbytes, self.cards)
            try:
                for number, (skip, _) in zip(plan.cards, free, strict=True):
                    region.shares.append((number, *self._commit(self.cards[number], region, skip)))
            except OSError:
                region.give_up()
                raise
            region.attach()
            self._next_region += 1
            self.regions.append(region)
            self.bind(region, plan.mode or mode)
            if plan.kind == "pmem":
                for card in region.cards:
                    Mailbox(card).ask(Op.SET_SHUTDOWN, b"\1")
            return region

    def enable_memdev(self, number: int, enabled: bool = True) -> None:
        """Bind a card to the kernel's driver, or take it off. Raises OSError: EBUSY while it is decoding."""
        with self.guard:
            if not enabled and self.cards[number].state.decoders.committed:
                raise failure(errno.EBUSY)
            (self._disabled.discard if enabled else self._disabled.add)(number)
            self._steps += 1

    def destroy_region(self, region: CxlRegion) -> None:
        """Give the decoders back; only in the reverse order. Raises OSError: EBUSY."""
        with self.guard:
            for card, (_, number, _) in zip(region.cards, region.shares, strict=True):
                if number != len(card.state.decoders.committed) - 1 or card.state.decoders.committed[number].locked:
                    raise failure(errno.EBUSY)
            self.bind(region, "unbound")
            region.detach()
            region.give_up()
            self.regions.remove(region)
            self._steps += 1

    def bind(self, region: CxlRegion, mode: DaxMode, online: bool = True, movable: bool = True) -> None:
        """What daxctl reconfigure-device does: give the dax device to another driver. Mappings of it are lost."""
        if mode not in DAX_MODES:
            raise ValueError(f"mode {mode!r}; allowed: {', '.join(DAX_MODES)}")
        with self.guard:
            path = f"/dev/{region.name}"
            if region.dax_mode == "devdax" != mode:
                self.remove(path)
                region.pages.cut()
            if mode == "devdax" != region.dax_mode:
                self.add(path, DaxNode(region))
            if mode == "system-ram" and region.dax_mode != mode:
                region.online, region.movable = online and region.plan.online, movable and region.plan.movable
            region.dax_mode = mode
            self._steps += 1

    # the back door

    def power_cycle(self) -> None:
        """Take the power away and boot again: volatile bytes are gone, regions are made again as they were.

        Mappings are lost, as the processes that had them would be.
        """
        with self.guard:
            whole = [region for region in self.regions if not any(card.removed for card in region.cards)]
            again = [replace(region.plan, nbytes=region.nbytes, mode=region.dax_mode) for region in whole]
            for region in list(self.regions):
                self.bind(region, "unbound")
                region.detach()
            self.regions.clear()
            for card in self.cards:
                card.power_off()
            self._next_region = 0
            for plan in again:
                self.create_region(plan)

    def unplug(self, number: int) -> None:
        """Pull a card out: its node and its regions' devices are gone, mapped pages raise SIGBUS."""
        with self.guard:
            self.remove(f"/dev/cxl/mem{number}")
            for region in self.regions:
                if number in region.plan.cards:
                    self.bind(region, "unbound")
            self.cards[number].remove()

    def load(self, hpa: int) -> Loaded:
        """What a core's load of the line at a host address gives, routed to its card."""
        for region in self.regions:
            if region.base <= hpa < region.base + region.nbytes:
                return region.place(hpa - region.base)[0].load(hpa)
        return Loaded(b"\xff" * 64, False)

    def store(self, hpa: int, data: bytes, first: int = 0) -> None:
        """A core's store to the line at a host address, routed to its card."""
        for region in self.regions:
            if region.base <= hpa < region.base + region.nbytes:
                region.place(hpa - region.base)[0].store(hpa, data, first)

    def target_node(self, kind: str) -> int:
        """The NUMA node that memory of a window becomes: after those of the machine, one for each window."""
        nodes = [name for name in self._base.folders.get("/sys/devices/system/node", ()) if name[4:].isdigit()]
        return len(nodes) + list(_WINDOWS).index(kind)

    # inside

    def _free(self, card: CxlCard, kind: str) -> tuple[int, int]:
        """(bytes to skip, bytes left) for the next decoder of a card in a partition."""
        if (
            card.removed
            or self.cards.index(card) in self._disabled
            or len(card.state.decoders.committed) == card.part.decoders
        ):
            raise failure(errno.ENXIO)
        volatile, persistent = card.state.partitions
        last = card.state.decoders.committed[-1:]
        used = last[0].dpa + last[0].nbytes // last[0].ways if last else 0
        if kind == "ram":
            return 0, max(0, volatile - used)
        return max(0, volatile - used), volatile + persistent - max(used, volatile)

    def _window_end(self, kind: str) -> int:
        ends = [region.base + region.nbytes for region in self.regions if region.plan.kind == kind]
        return max([_WINDOWS[kind], *ends])

    def _commit(self, card: CxlCard, region: CxlRegion, skip: int) -> tuple[int, int]:
        """Program the next decoder of a card: (its number, device address). Raises OSError: ENXIO."""
        number = len(card.state.decoders.committed)
        at = HDM + STRIDE * number
        for register, value in ((BASE, region.base), (SIZE, region.nbytes), (SKIP, skip)):
            card.write_component(at + register, value & 0xFFFFFFFF)
            card.write_component(at + register + 4, value >> 32)
        ways = next(code for code, ways in ENCODED_WAYS.items() if ways == region.interleave.ways)
        granule = GRANULES.index(region.plan.granule_nbytes)
        card.write_component(at + CONTROL, granule | ways << 4 | HOST_ONLY | LOCK * region.plan.locked | COMMIT)
        if not card.read_component(at + CONTROL) & COMMITTED:
            raise failure(errno.ENXIO)
        card.write_component(GLOBAL, ENABLE)
        return number, card.state.decoders.committed[number].dpa

    def _view(self) -> CxlView:
        kinds = tuple(_WINDOWS)
        return CxlView(
            cards=tuple(self.cards),
            windows=tuple((kind, _WINDOWS[kind], 1 << 38, self.target_node(kind)) for kind in kinds),
            regions=tuple(self._shown_region(region) for region in self.regions),
            disabled=frozenset(self._disabled),
        )

    def _shown_region(self, region: CxlRegion) -> RegionView:
        kind = region.plan.kind
        dax = DaxView(region.name, region.dax_mode, region.plan.align, self.target_node(kind), *self._state(region))
        decoders = tuple((card, number) for card, number, _ in region.shares)
        return RegionView(region.number, kind, region.base, region.nbytes, region.plan.granule_nbytes, decoders, dax)

    @staticmethod
    def _state(region: CxlRegion) -> tuple[bool, bool]:
        return region.online, region.movable
