"""The commands of a CXL memory card, as functions from (card's state, input payload) to the output payload.

Every input length is checked against what CXL 3.x says; a command that is refused changed nothing. The table `COMMANDS`
says for each opcode how long its input is, what it does to the card (the effects of the command effects log), and
whether it needs a medium that is not being erased.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import NamedTuple

from tierloop.firmware_models.cxl_codes import Code, Op, Refused
from tierloop.firmware_models.cxl_events import GENERAL_MEDIA, INFORMATIONAL, Event, general_media
from tierloop.firmware_models.cxl_part import GRAIN, LINE
from tierloop.firmware_models.cxl_state import CxlState

EFFECTS_LOG = uuid.UUID("0da9c0b5-bf41-4b78-8f79-96b1623b3f17")
CONFIGURATION_AFTER_RESET, CONFIGURATION, DATA, POLICY, LOG, SECURITY, BACKGROUND = (1 << bit for bit in range(7))
MORE, OVERFLOW = 1, 2
INJECTED = 3
_INJECTION = 4
"""The transaction of a media event: poison that a host put there."""


class Command(NamedTuple):
    """What is known of a command before it runs; `lengths` are the input lengths allowed, (at least, at most)."""

    run: Callable[[CxlState, bytes], bytes]
    lengths: tuple[int, int]
    effects: int = 0
    medium: bool = False


def _get_events(state: CxlState, payload: bytes) -> bytes:
    return state.events.records(payload[0], state.part.payload_nbytes)


def _clear_events(state: CxlState, payload: bytes) -> bytes:
    log, flags, count = payload[:3]
    if len(payload) != 6 + 2 * count:
        raise Refused(Code.INVALID_LENGTH)
    state.events.clear(log, bool(flags & 1), struct.unpack_from(f"<{count}H", payload, 6))
    return b""


def _get_event_interrupts(state: CxlState, payload: bytes) -> bytes:
    return state.event_interrupts


def _set_event_interrupts(state: CxlState, payload: bytes) -> bytes:
    if any(setting & 3 == 3 for setting in payload):
        raise Refused(Code.INVALID_INPUT)
    state.event_interrupts = bytes(setting & 3 for setting in payload)
    return b""


def _get_firmware(state: CxlState, payload: bytes) -> bytes:
    return bytes([1, 1, 0]) + bytes(13) + state.part.firmware.encode().ljust(64, b"\0")


def _get_timestamp(state: CxlState, payload: bytes) -> bytes:
    return struct.pack("<Q", state.timestamp)


def _set_timestamp(state: CxlState, payload: bytes) -> bytes:
    state.set_timestamp(struct.unpack("<Q", payload)[0])
    return b""


def _get_supported_logs(state: CxlState, payload: bytes) -> bytes:
    return struct.pack("<H6x", 1) + EFFECTS_LOG.bytes + struct.pack("<I", len(effects_log(state)))


def _get_log(state: CxlState, payload: bytes) -> bytes:
    offset, length = struct.unpack_from("<II", payload, 16)
    if payload[:16] != EFFECTS_LOG.bytes:
        raise Refused(Code.INVALID_LOG)
    log = effects_log(state)
    if length > state.part.payload_nbytes or offset + length > len(log):
        raise Refused(Code.INVALID_INPUT)
    return log[offset : offset + length]


def effects_log(state: CxlState) -> bytes:
    """Opcode and effects of every command that this card has."""
    return b"".join(struct.pack("<HH", op, command.effects) for op, command in supported(state).items())


def _identify(state: CxlState, payload: bytes) -> bytes:
    part = state.part
    sizes = (part.capacity, part.volatile_nbytes, part.persistent_nbytes, GRAIN if part.partitionable_nbytes else 0)
    return (
        part.firmware.encode().ljust(16, b"\0")
        + struct.pack("<4Q", *(size // GRAIN for size in sizes))
        + struct.pack("<4HI", *(part.event_records,) * 4, part.lsa_nbytes)
        + part.poison_limit.to_bytes(3, "little")
        + struct.pack("<HBB", part.poison_limit, 0, 3)
    )


def _get_partitions(state: CxlState, payload: bytes) -> bytes:
    then = (0, 0)
    if state.next_volatile is not None:
        then = (state.next_volatile, state.part.capacity - state.next_volatile)
    return struct.pack("<4Q", *(size // GRAIN for size in (*state.partitions, *then)))


def _set_partitions(state: CxlState, payload: bytes) -> bytes:
    part = state.part
    volatile, flags = struct.unpack_from("<QB", payload)
    least = part.volatile_nbytes
    if not least <= volatile * GRAIN <= least + part.partitionable_nbytes:
        raise Refused(Code.INVALID_INPUT)
    if flags & 1:
        if state.decoders.committed:
            raise Refused(Code.INVALID_INPUT)
        state.partition(volatile * GRAIN)
    else:
        state.next_volatile = volatile * GRAIN
    return b""


def _get_lsa(state: CxlState, payload: bytes) -> bytes:
    offset, length = struct.unpack("<II", payload)
    if length > state.part.payload_nbytes or offset + length > len(state.labels):
        raise Refused(Code.INVALID_INPUT)
    return bytes(state.labels[offset : offset + length])


def _set_lsa(state: CxlState, payload: bytes) -> bytes:
    offset, data = struct.unpack_from("<I", payload)[0], payload[8:]
    if offset + len(data) > len(state.labels):
        raise Refused(Code.INVALID_INPUT)
    state.labels[offset : offset + len(data)] = data
    return b""


def _get_health(state: CxlState, payload: bytes) -> bytes:
    return state.health.packed(state.alerts)


def _get_alerts(state: CxlState, payload: bytes) -> bytes:
    return state.alerts.packed()


def _set_alerts(state: CxlState, payload: bytes) -> bytes:
    state.alerts = state.alerts.changed(payload)
    return b""


def _get_shutdown(state: CxlState, payload: bytes) -> bytes:
    return bytes([state.dirty])


def _set_shutdown(state: CxlState, payload: bytes) -> bytes:
    state.dirty = bool(payload[0] & 1)
    return b""


def _get_poison(state: CxlState, payload: bytes) -> bytes:
    start, length = _poison_range(state, payload)
    most = min(256, (state.part.payload_nbytes - 32) // 16)
    key = (start, length)
    first = state.poison_seen[1] if state.poison_seen[0] == key else start
    runs: list[list[int]] = []
    for line in state.cells.poison_in(first, start + length - first):
        source = state.cells.poisoned[line]
        if runs and runs[-1][0] + runs[-1][1] * LINE == line and runs[-1][2] == source:
            runs[-1][1] += 1
        else:
            runs.append([line, 1, source])
    given, more = runs[:most], len(runs) > most
    state.poison_seen = (key, given[-1][0] + given[-1][1] * LINE) if more else ((-1, -1), 0)
    flags = MORE * more | OVERFLOW * (state.poison_overflow_ns is not None)
    header = struct.pack("<BxQH20x", flags, state.poison_overflow_ns or 0, len(given))
    return header + b"".join(struct.pack("<QII", line | source, lines, 0) for line, lines, source in given)


def _inject_poison(state: CxlState, payload: bytes) -> bytes:
    dpa = _line(state, payload)
    injected = sum(source == INJECTED for source in state.cells.poisoned.values())
    if dpa not in state.cells.poisoned:
        if injected >= state.part.poison_limit:
            raise Refused(Code.POISON_LIMIT)
        state.cells.poison(dpa, INJECTED)
        created = general_media(state.event_address(dpa), descriptor=0, transaction=_INJECTION)
        state.events.add(INFORMATIONAL, Event(GENERAL_MEDIA, state.timestamp, created))
    return b""


def _clear_poison(state: CxlState, payload: bytes) -> bytes:
    dpa = _line(state, payload)
    state.cells.heal(dpa, payload[8:])
    if len(state.cells.poisoned) <= state.part.poison_limit:
        state.poison_overflow_ns = None
    return b""


def _get_scan_capabilities(state: CxlState, payload: bytes) -> bytes:
    _, length = _poison_range(state, payload)
    return struct.pack("<I", max(1, length // GRAIN))


def _sanitize(state: CxlState, payload: bytes) -> bytes:
    if state.decoders.committed:
        raise Refused(Code.INVALID_INPUT)
    state.start(Op.SANITIZE, state.part.sanitize_ns)
    return b""


def _get_dynamic(state: CxlState, payload: bytes) -> bytes:
    count, first = payload
    fitting = (state.part.payload_nbytes - 24) // 40
    regions = state.dynamic[first : first + min(count, fitting)]
    if first >= len(state.dynamic):
        raise Refused(Code.INVALID_INPUT)
    answer = struct.pack("<BB6x", len(state.dynamic), len(regions))
    for handle, (base, length) in enumerate(regions, len(state.ranges) - len(state.dynamic) + first):
        answer += struct.pack("<QQQQIB3x", base, length // GRAIN, length, 2 << 20, handle, 0)
    return answer + struct.pack("<4I", 0, 0, 0, 0)


def _line(state: CxlState, payload: bytes) -> int:
    dpa: int = struct.unpack_from("<Q", payload)[0]
    if dpa % LINE or dpa >= state.part.capacity:
        raise Refused(Code.INVALID_ADDRESS)
    return dpa


def _poison_range(state: CxlState, payload: bytes) -> tuple[int, int]:
    start, lines = struct.unpack("<QQ", payload)
    if start % LINE or start + lines * LINE > state.part.capacity:
        raise Refused(Code.INVALID_ADDRESS)
    if not lines:
        raise Refused(Code.INVALID_INPUT)
    return start, lines * LINE


COMMANDS = {
    Op.GET_EVENTS: Command(_get_events, (1, 1)),
    Op.CLEAR_EVENTS: Command(_clear_events, (6, 516), LOG),
    Op.GET_EVENT_INTERRUPTS: Command(_get_event_interrupts, (0, 0)),
    Op.SET_EVENT_INTERRUPTS: Command(_set_event_interrupts, (4, 4), POLICY),
    Op.GET_FIRMWARE: Command(_get_firmware, (0, 0)),
    Op.GET_TIMESTAMP: Command(_get_timestamp, (0, 0)),
    Op.SET_TIMESTAMP: Command(_set_timestamp, (8, 8), POLICY),
    Op.GET_SUPPORTED_LOGS: Command(_get_supported_logs, (0, 0)),
    Op.GET_LOG: Command(_get_log, (24, 24)),
    Op.IDENTIFY: Command(_identify, (0, 0)),
    Op.GET_PARTITIONS: Command(_get_partitions, (0, 0)),
    Op.SET_PARTITIONS: Command(_set_partitions, (9, 10), CONFIGURATION_AFTER_RESET | CONFIGURATION | DATA),
    Op.GET_LSA: Command(_get_lsa, (8, 8), 0, True),
    Op.SET_LSA: Command(_set_lsa, (8, 1 << 20), CONFIGURATION | DATA, True),
    Op.GET_HEALTH: Command(_get_health, (0, 0)),
    Op.GET_ALERTS: Command(_get_alerts, (0, 0)),
    Op.SET_ALERTS: Command(_set_alerts, (12, 12), POLICY),
    Op.GET_SHUTDOWN: Command(_get_shutdown, (0, 0)),
    Op.SET_SHUTDOWN: Command(_set_shutdown, (1, 1), POLICY),
    Op.GET_POISON: Command(_get_poison, (16, 16), 0, True),
    Op.INJECT_POISON: Command(_inject_poison, (8, 8), DATA, True),
    Op.CLEAR_POISON: Command(_clear_poison, (72, 72), DATA, True),
    Op.GET_SCAN_CAPABILITIES: Command(_get_scan_capabilities, (16, 16)),
    Op.SANITIZE: Command(_sanitize, (0, 0), DATA | SECURITY | BACKGROUND, True),
    Op.GET_DYNAMIC: Command(_get_dynamic, (2, 2)),
}


def supported(state: CxlState) -> dict[Op, Command]:
    """What this card has: partitions only where there is something to divide, and so on."""
    part = state.part
    missing = set()
    if not part.partitionable_nbytes:
        missing.add(Op.SET_PARTITIONS)
    if not part.lsa_nbytes:
        missing |= {Op.GET_LSA, Op.SET_LSA}
    if not part.persistent_nbytes and not part.partitionable_nbytes:
        missing |= {Op.GET_SHUTDOWN, Op.SET_SHUTDOWN}
    if not part.dynamic_nbytes:
        missing.add(Op.GET_DYNAMIC)
    return {op: command for op, command in COMMANDS.items() if op not in missing}


def carried_out(state: CxlState, opcode: int, payload: bytes) -> tuple[Code, bytes]:
    """Carry a command out: its return code and its output payload."""
    command = supported(state).get(opcode)  # type: ignore[call-overload]  # any number may be asked for
    if command is None:
        return Code.UNSUPPORTED, b""
    if not command.lengths[0] <= len(payload) <= command.lengths[1]:
        return Code.INVALID_LENGTH, b""
    if command.effects & BACKGROUND and state.background is not None:
        return Code.BUSY, b""
    if command.medium and state.erasing:
        return Code.MEDIA_DISABLED, b""
    try:
        answer = command.run(state, payload)
    except Refused as refused:
        return refused.code, b""
    return (Code.BACKGROUND if command.effects & BACKGROUND else Code.SUCCESS), answer
