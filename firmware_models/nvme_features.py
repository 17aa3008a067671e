"""Features of an NVMe controller: what Set Features and Get Features speak of, with current, default and saved values.

A feature is one 32-bit word, some of them one word for each namespace, interrupt vector or temperature threshold. The
saved value is what a reset brings back; a feature that cannot be saved comes back with its default.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import NamedTuple

from tierloop.firmware_models.nvme_wire import ALL_NAMESPACES, Entry, Refused, Status


class Feature(enum.IntEnum):
    """Feature identifiers."""

    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    WRITE_CACHE = 0x06
    NUMBER_OF_QUEUES = 0x07
    INTERRUPT_COALESCING = 0x08
    INTERRUPT_VECTOR = 0x09
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENTS = 0x0B


class _Kind(NamedTuple):
    mask: int
    saveable: bool
    per_namespace: bool = False


_KINDS: dict[int, _Kind] = {
    Feature.ARBITRATION: _Kind(0xFFFFFF07, True),
    Feature.POWER_MANAGEMENT: _Kind(0xFF, True),
    Feature.TEMPERATURE_THRESHOLD: _Kind(0x3FFFFF, True),
    Feature.ERROR_RECOVERY: _Kind(0x1FFFF, True, per_namespace=True),
    Feature.WRITE_CACHE: _Kind(0x1, True),
    Feature.NUMBER_OF_QUEUES: _Kind(0xFFFFFFFF, False),
    Feature.INTERRUPT_COALESCING: _Kind(0xFFFF, True),
    Feature.INTERRUPT_VECTOR: _Kind(0x1FFFF, True),
    Feature.WRITE_ATOMICITY: _Kind(0x1, True),
    Feature.ASYNC_EVENTS: _Kind(0xFF, True),
}
_SENSORS = (0, 1)
"""Temperatures that have thresholds: the composite one and the first sensor."""
_OF_A_NAMESPACE, _OF_THE_CONTROLLER = 1 << 20, 1 << 21
_CHANGEABLE, _PER_NAMESPACE, _SAVEABLE = 4, 2, 1


class Features:
    """All words. `defaults` are those of this controller; without a write cache that feature does not exist."""

    def __init__(self, defaults: Mapping[int, int], namespaces: int, vectors: int, states: int, cache: bool) -> None:
        self._defaults = dict(defaults)
        self._namespaces, self._vectors, self._states, self._cache = namespaces, vectors, states, cache
        self._saved: dict[tuple[int, int], int] = {}
        self._current: dict[tuple[int, int], int] = {}

    def reset(self) -> None:
        """What was not saved is forgotten."""
        self._current = dict(self._saved)

    def value(self, feature: int, part: int = 0) -> int:
        """The current word; `part` is a namespace, vector or threshold."""
        return self._current.get((feature, part), self._default(feature, part))

    def get(self, entry: Entry) -> int:
        """What Get Features answers. Raises Refused."""
        feature, select = entry.cdw[0] & 0xFF, entry.cdw[0] >> 8 & 7
        kind = self._kind(feature)
        if select > 3:
            raise Refused(Status.INVALID_FIELD, byte=41)
        if select == 3:
            return _CHANGEABLE | _SAVEABLE * kind.saveable | _PER_NAMESPACE * kind.per_namespace
        if kind.per_namespace and entry.nsid == ALL_NAMESPACES:
            raise Refused(Status.INVALID_NAMESPACE, byte=4)
        parts = self._parts(feature, kind, entry.nsid, entry.cdw[1])
        if len(parts) != 1:
            raise Refused(Status.INVALID_FIELD, byte=44)
        if select == 1:
            return self._default(feature, parts[0])
        if select == 2:
            return self._saved.get((feature, parts[0]), self._default(feature, parts[0]))
        return self.value(feature, parts[0])

    def set(self, entry: Entry, queues: int, created: bool) -> int:
        """What Set Features does and answers. Raises Refused. `created`: there are queues for input and output."""
        feature, save, word = entry.cdw[0] & 0xFF, bool(entry.cdw[0] >> 31), entry.cdw[1]
        kind = self._kind(feature)
        if save and not kind.saveable:
            raise Refused(Status.FEATURE_NOT_SAVEABLE, byte=43)
        if word & ~kind.mask:
            raise Refused(Status.INVALID_FIELD, byte=44)
        if feature == Feature.NUMBER_OF_QUEUES:
            return self._grant(word, queues, created)
        if feature == Feature.POWER_MANAGEMENT and word & 31 >= self._states:
            raise Refused(Status.INVALID_FIELD, byte=44)
        if feature == Feature.TEMPERATURE_THRESHOLD:
            stored = word & 0xFFFF
        elif feature == Feature.INTERRUPT_VECTOR:
            stored = word
        else:
            stored = word & kind.mask
        for part in self._parts(feature, kind, entry.nsid, word):
            self._current[feature, part] = stored
            if save:
                self._saved[feature, part] = stored
        return 0

    def page(self) -> bytes:
        """The log page of features that are supported, and whether they are of a namespace or of the controller."""
        page = bytearray(1024)
        for feature, kind in _KINDS.items():
            if feature != Feature.WRITE_CACHE or self._cache:
                scope = _OF_A_NAMESPACE if kind.per_namespace else _OF_THE_CONTROLLER
                struct.pack_into("<I", page, 4 * feature, 1 | scope)
        return bytes(page)

    def _grant(self, word: int, queues: int, created: bool) -> int:
        if created:
            raise Refused(Status.SEQUENCE_ERROR)
        submission, completion = word & 0xFFFF, word >> 16
        if 0xFFFF in (submission, completion):
            raise Refused(Status.INVALID_FIELD, byte=44)
        granted = min(submission, queues - 1) | min(completion, queues - 1) << 16
        self._current[Feature.NUMBER_OF_QUEUES, 0] = granted
        return granted

    def _kind(self, feature: int) -> _Kind:
        if feature not in _KINDS or (feature == Feature.WRITE_CACHE and not self._cache):
            raise Refused(Status.INVALID_FIELD, byte=40)
        return _KINDS[feature]

    def _parts(self, feature: int, kind: _Kind, nsid: int, word: int) -> list[int]:
        """Which words a command speaks of."""
        if kind.per_namespace:
            if nsid == ALL_NAMESPACES:
                return list(range(1, self._namespaces + 1))
            if not 1 <= nsid <= self._namespaces:
                raise Refused(Status.INVALID_NAMESPACE, byte=4)
            return [nsid]
        if nsid not in (0, ALL_NAMESPACES):
            raise Refused(Status.FEATURE_NOT_PER_NAMESPACE if nsid <= self._namespaces else Status.INVALID_NAMESPACE)
        if feature == Feature.INTERRUPT_VECTOR:
            if word & 0xFFFF >= self._vectors:
                raise Refused(Status.INVALID_FIELD, byte=44)
            return [word & 0xFFFF]
        if feature == Feature.TEMPERATURE_THRESHOLD:
            sensor, side = word >> 16 & 15, word >> 20 & 3
            if side > 1 or sensor not in (*_SENSORS, 15):
                raise Refused(Status.INVALID_FIELD, byte=44)
            return [side << 4 | s for s in (_SENSORS if sensor == 15 else (sensor,))]
        return [0]

    def _default(self, feature: int, part: int) -> int:
        if feature == Feature.TEMPERATURE_THRESHOLD and part >> 4:
            return 0
        if feature == Feature.INTERRUPT_VECTOR:
            return part
        return self._defaults.get(feature, 0)
