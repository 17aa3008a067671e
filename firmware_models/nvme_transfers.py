"""Where in host memory the data of an NVMe command lies: PRP lists and scatter-gather lists, walked and checked.

PRPs name pages: the first may begin inside a page, on a multiple of four; all others begin at one. The second pointer
of an entry is a page where two suffice, and the address of a list where they do not. The last place of a page of a list
leads to the next list where more are to come.

A scatter-gather list has descriptors of 16 bytes: address, length, and a type. A segment descriptor leads to more of
them and stands last in its segment; what a *last segment* descriptor leads to holds no further segments. A bit bucket
swallows bytes of a read and is nothing in a write.

Memory that cannot be reached is a Data Transfer Error. What `walk` returns are pieces in the order of the data; the
lists are read when the command begins, the data itself is moved when it ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from tierloop.firmware_models.nvme_wire import Entry, Refused, Status

_DESCRIPTOR = struct.Struct("<QI3xB")
_MOST_DESCRIPTORS = 1 << 14
"""Lists that lead round in a circle end here."""
BIT_BUCKET = -1
"""The address of a piece that swallows what is read."""


class HostMemory(Protocol):
    """The memory that a controller reaches by itself. Both raise OSError or ValueError for a bad address."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Exactly nbytes bytes from there."""

    def write(self, address: int, data: bytes) -> None:
        """Put bytes there."""


class Piece(NamedTuple):
    """Some bytes of host memory."""

    address: int
    nbytes: int


def fetch(memory: HostMemory, address: int, nbytes: int) -> bytes:
    """Bytes of host memory. Raises Refused."""
    try:
        raw = memory.read(address, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise Refused(Status.DATA_TRANSFER_ERROR, retry=True) from error
    if len(raw) != nbytes:
        raise Refused(Status.DATA_TRANSFER_ERROR, retry=True)
    return raw


def gather(memory: HostMemory, pieces: list[Piece]) -> bytes:
    """The bytes in all pieces. Raises Refused."""
    return b"".join(fetch(memory, piece.address, piece.nbytes) for piece in pieces)


def scatter(memory: HostMemory, pieces: list[Piece], data: bytes | memoryview) -> None:
    """Put bytes into the pieces. Raises Refused; what was moved before stays."""
    view, at = memoryview(data), 0
    for piece in pieces:
        part = bytes(view[at : at + piece.nbytes])
        at += piece.nbytes
        if piece.address == BIT_BUCKET:
            continue
        try:
            memory.write(piece.address, part)
        except (OSError, ValueError, OverflowError) as error:
            raise Refused(Status.DATA_TRANSFER_ERROR, retry=True) from error


def walk(memory: HostMemory, entry: Entry, nbytes: int, page: int, to_host: bool, sgl: bool) -> list[Piece]:
    """The pieces of a command's data. Raises Refused; `sgl` says whether lists of that kind may be used."""
    kind = entry.flags >> 6
    if kind == 3 or (kind and not sgl):
        raise Refused(Status.INVALID_FIELD, byte=1)
    if kind:
        return _joined(_scatter_gather(memory, entry.data, nbytes, to_host))
    return _joined(_pages(memory, entry.prp1, entry.prp2, nbytes, page))


def _joined(pieces: Iterator[Piece]) -> list[Piece]:
    """Pieces that follow each other in memory made one: a host's memory is reached in few, large steps."""
    made: list[Piece] = []
    for piece in pieces:
        if (
            made
            and BIT_BUCKET not in (piece.address, made[-1].address)
            and made[-1].address + made[-1].nbytes == piece.address
        ):
            made[-1] = Piece(made[-1].address, made[-1].nbytes + piece.nbytes)
        else:
            made.append(piece)
    return made


def _pages(memory: HostMemory, prp1: int, prp2: int, nbytes: int, page: int) -> Iterator[Piece]:
    if not nbytes:
        return
    if prp1 & 3:
        raise Refused(Status.PRP_OFFSET_INVALID, byte=24)
    first = min(nbytes, page - prp1 % page)
    yield Piece(prp1, first)
    left = nbytes - first
    if not left:
        return
    if left <= page:
        if prp2 % page:
            raise Refused(Status.PRP_OFFSET_INVALID, byte=32)
        yield Piece(prp2, left)
        return
    yield from _listed(memory, prp2, left, page)


def _listed(memory: HostMemory, at: int, left: int, page: int) -> Iterator[Piece]:
    if at & 7:
        raise Refused(Status.PRP_OFFSET_INVALID, byte=32)
    while True:
        room = (page - at % page) // 8
        needed = -(-left // page)
        count = min(room, needed)
        places = struct.unpack(f"<{count}Q", fetch(memory, at, 8 * count))
        if any(place % page for place in places):
            raise Refused(Status.PRP_OFFSET_INVALID, byte=32)
        chained = needed > room
        for place in places[:-1] if chained else places:
            yield Piece(place, min(left, page))
            left -= min(left, page)
        if not chained:
            return
        at = places[-1]


_DATA, _BUCKET, _SEGMENT, _LAST_SEGMENT = range(4)


def _scatter_gather(memory: HostMemory, first: bytes, nbytes: int, to_host: bool) -> Iterator[Piece]:
    left = nbytes
    for address, length, kind in _descriptors(memory, first):
        if kind == _BUCKET and not to_host:
            continue
        if length > left:
            raise Refused(Status.SGL_LENGTH_INVALID, byte=24)
        left -= length
        if length:
            yield Piece(BIT_BUCKET if kind == _BUCKET else address, length)
    if left:
        raise Refused(Status.SGL_LENGTH_INVALID, byte=24)


def _descriptors(memory: HostMemory, first: bytes) -> Iterator[tuple[int, int, int]]:
    segment, last, seen = first, False, 0
    while True:
        following = None
        for at in range(0, len(segment), 16):
            seen += 1
            if seen > _MOST_DESCRIPTORS:
                raise Refused(Status.SGL_COUNT_INVALID, byte=24)
            address, length, identifier = _DESCRIPTOR.unpack_from(segment, at)
            kind, subtype = identifier >> 4, identifier & 15
            if kind > _LAST_SEGMENT or subtype:
                raise Refused(Status.SGL_TYPE_INVALID, byte=24)
            if kind < _SEGMENT:
                yield address, length, kind
                continue
            if last or at + 16 != len(segment) or not length or length % 16 or length > 16 * _MOST_DESCRIPTORS:
                raise Refused(Status.SGL_SEGMENT_INVALID, byte=24)
            following = address, length, kind
        if following is None:
            if not last and segment is not first:
                raise Refused(Status.SGL_SEGMENT_INVALID, byte=24)
            return
        address, length, kind = following
        segment, last = fetch(memory, address, length), kind == _LAST_SEGMENT
