"""Admin commands that answer at once: identify, log pages and features. What changes queues is in the controller."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from tierloop.firmware_models.nvme_features import Feature, Features
from tierloop.firmware_models.nvme_health import ERROR_LOG, HEALTH_LOG, Events, Health
from tierloop.firmware_models.nvme_identify import (
    IDENTIFY_NBYTES,
    NvmeFigures,
    command_set_page,
    controller_page,
    descriptors_page,
    effects_page,
    firmware_page,
    independent_page,
    namespace_page,
    namespaces_page,
)
from tierloop.firmware_models.nvme_namespace import Namespace
from tierloop.firmware_models.nvme_transfers import HostMemory, scatter, walk
from tierloop.firmware_models.nvme_wire import ALL_NAMESPACES, Entry, Refused, Status

_NVM = 0
"""The command set that namespaces here have."""


class AdminCommands:
    """Identify, Get Log Page, and Get and Set Features of one controller."""

    def __init__(
        self,
        figures: NvmeFigures,
        namespaces: Sequence[Namespace],
        memory: HostMemory,
        features: Features,
        health: Health,
        events: Events,
    ) -> None:
        self._figures, self._namespaces, self._memory = figures, namespaces, memory
        self._features, self._health, self._events = features, health, events
        self._logs: dict[int, Callable[[], bytes]] = {
            0x00: self._supported,
            ERROR_LOG: lambda: health.errors(figures.error_entries),
            HEALTH_LOG: lambda: health.page(self.warnings()),
            0x03: lambda: firmware_page(figures),
            0x05: effects_page,
            0x12: features.page,
        }

    def warnings(self) -> int:
        """The critical warning bits, by the thresholds that are set."""
        over = self._features.value(Feature.TEMPERATURE_THRESHOLD, 0)
        return self._health.warnings(over, self._features.value(Feature.TEMPERATURE_THRESHOLD, 1 << 4))

    def identify(self, entry: Entry, page: int) -> int:
        """One of the structures. Raises Refused."""
        answer = self._structure(entry)
        pieces = walk(self._memory, entry, IDENTIFY_NBYTES, page, to_host=True, sgl=False)
        scatter(self._memory, pieces, answer)
        return 0

    def _structure(self, entry: Entry) -> bytes:
        cns, last = entry.cdw[0] & 0xFF, len(self._namespaces)
        if cns == 1:
            return controller_page(self._figures, self._namespaces)
        if cns == 2:
            if entry.nsid >= ALL_NAMESPACES - 1:
                raise Refused(Status.INVALID_NAMESPACE, byte=4)
            return namespaces_page(entry.nsid, self._namespaces)
        if cns not in (0, 3, 5, 6, 8):
            raise Refused(Status.INVALID_FIELD, byte=40)
        if cns in (5, 6) and entry.cdw[1] >> 24 != _NVM:
            raise Refused(Status.INVALID_FIELD, byte=47)
        if cns == 6:
            return command_set_page()
        if not 1 <= entry.nsid <= last:
            raise Refused(Status.INVALID_NAMESPACE, byte=4)
        namespace = self._namespaces[entry.nsid - 1]
        if cns == 5:
            return command_set_page()
        if cns == 8:
            return independent_page(namespace)
        made = namespace_page if cns == 0 else descriptors_page
        return made(self._figures, entry.nsid, namespace)

    def log(self, entry: Entry, page: int) -> int:
        """Part of a log page. Raises Refused."""
        identifier, keep_event = entry.cdw[0] & 0xFF, entry.cdw[0] >> 15 & 1
        nbytes = 4 * ((entry.cdw[0] >> 16 | (entry.cdw[1] & 0xFFFF) << 16) + 1)
        offset = entry.cdw[2] | entry.cdw[3] << 32
        if identifier not in self._logs:
            raise Refused(Status.LOG_PAGE_INVALID, byte=40)
        if entry.nsid not in (0, ALL_NAMESPACES):
            raise Refused(Status.INVALID_FIELD, byte=4)
        if entry.cdw[4] >> 23 & 1:
            raise Refused(Status.INVALID_FIELD, byte=58)
        answer = self._logs[identifier]()
        if offset & 3 or offset >= len(answer):
            raise Refused(Status.INVALID_FIELD, byte=48)
        if nbytes > (self._figures.largest_transfer or 1 << 30):
            raise Refused(Status.INVALID_FIELD, byte=42)
        pieces = walk(self._memory, entry, nbytes, page, to_host=True, sgl=False)
        scatter(self._memory, pieces, answer[offset : offset + nbytes].ljust(nbytes, b"\0"))
        if not keep_event:
            self._events.read(identifier)
        return 0

    def set_features(self, entry: Entry, created: bool) -> int:
        """Set Features. Raises Refused; a write cache that is switched off is emptied."""
        cached = self._features.value(Feature.WRITE_CACHE)
        result = self._features.set(entry, self._figures.io_queues, created)
        if cached and not self._features.value(Feature.WRITE_CACHE):
            for namespace in self._namespaces:
                namespace.flush()
        return result

    def _supported(self) -> bytes:
        page = bytearray(1024)
        for identifier in self._logs:
            struct.pack_into("<I", page, 4 * identifier, 1)
        return bytes(page)
