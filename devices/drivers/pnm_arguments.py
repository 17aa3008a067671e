"""Arguments of commands on the wire: spans of regions, and launches with all that their kernels need.

A table of *segments* is their number, then each: region, number of spans, the spans as pairs (offset, bytes); all of it
int64. ADD and READ have one segment. The arguments of OP are a header (kernel, and how many scalars, arrays, read
and write operands follow), the scalars in 8 bytes each, the arrays (rows, columns, int64 numbers), and a table of
segments for each operand. What a kernel's scalars and arrays are, and in which order, is `KERNELS`; kernels that hold
host code (`dense`) have no place on a wire.

Everything is read with its sizes checked first: what is cut off, left over or out of range is a WireError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Launch, Operand
from tierloop.devices.drivers.pnm_wire import WireError
from tierloop.devices.kernels.contract import (
    Append,
    Attend,
    Chase,
    Cluster,
    Combine,
    Dequantize,
    Gather,
    KernelArgs,
    Logits,
    Merge,
    Quantize,
    Score,
    Topk,
    num_clusters,
)
from tierloop.devices.regions import Region, Segment
from tierloop.devices.spans import Spans

DTYPE_NUMBERS: tuple[str, ...] = ("float32", "float16", "bfloat16", "int8", "fp8_e4m3")
"""A dtype is its place in this list; the bit of that number in HELLO says that the device has it."""


@dataclass(frozen=True)
class Array:
    """An int64 array argument with so many columns: 0 for one dimension, −1 for any number."""

    columns: int


@dataclass(frozen=True)
class Choice:
    """A word, sent as its place in the list."""

    words: tuple[str, ...]


_DTYPE = Choice(DTYPE_NUMBERS)
_CODES = Choice(("int8", "fp8_e4m3"))
_FLOATS = Choice(("float32", "float16", "bfloat16"))
_REDUCE = Choice(("max", "sum"))
_AXIS = Choice(("row", "channel"))
_FLAG = Choice(("false", "true"))
_RUNS, _ROOTS, _TABLE, _LIST = Array(3), Array(4), Array(-1), Array(0)
_MASKS: dict[str, Any] = {"window": int, "sink_tokens": int, "softcap": float}
_HEADS: dict[str, Any] = {"num_sequences": int, "num_kv_heads": int, "group": int}
_FORMS: dict[int, tuple[type[KernelArgs], dict[str, Any]]] = {
    0: (
        Attend,
        {"dtype": _DTYPE, **_HEADS, "q_len": int, "head_dim": int, "head_dim_v": int, "scale": float}
        | {"split_tokens": int, **_MASKS, "runs": _RUNS, "q_positions": _TABLE, "roots": _ROOTS},
    ),
    1: (
        Logits,
        {"dtype": _DTYPE, **_HEADS, "q_len": int, "head_dim": int, "scale": float, **_MASKS}
        | {"runs": _RUNS, "q_positions": _TABLE},
    ),
    2: (
        Combine,
        {"dtype": _DTYPE, "group": int, "q_len": int, "head_dim_v": int, "split_tokens": int}
        | {"runs": _RUNS, "roots": _ROOTS},
    ),
    3: (Merge, {**_HEADS, "q_len": int, "head_dim_v": int, "has_sinks": _FLAG, "roots": _ROOTS}),
    4: (
        Score,
        {"dtype": _FLOATS, **_HEADS, "head_dim": int, "summary": Choice(("mean", "minmax"))}
        | {"reduce": Choice((*_REDUCE.words, "softmax")), "scale": float, "runs": _RUNS},
    ),
    5: (Topk, {"k": int, "group": int, "reduce": _REDUCE, "lengths": _LIST}),
    6: (Gather, {}),
    7: (Append, {"dtype": _DTYPE}),
    8: (Quantize, {"dtype": _CODES, "dim": int, "axis": _AXIS, "which": _LIST}),
    9: (Dequantize, {"dtype": _CODES, "dim": int, "axis": _AXIS, "which": _LIST}),
    10: (Chase, {}),
    11: (
        Cluster,
        {"dtype": _DTYPE, "num_sequences": int, "num_kv_heads": int, "head_dim": int}
        | {"segment_tokens": int, "cluster_tokens": int, "iterations": int, "runs": _RUNS},
    ),
}
KERNELS: dict[str, int] = {kind.kernel: number for number, (kind, _) in _FORMS.items()}
"""The number of each kernel on the wire; the bit of that number in HELLO says that the device offers it."""

_HEADER = struct.Struct("<HHHHH6x")
_INTEGER, _FLOAT, _PAIR = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<qq")
_INT64 = np.dtype("<i8")
_MOST_OPERANDS = 8


def bits_of(numbers: dict[str, int], names: Sequence[str] | frozenset[str]) -> int:
    """The set of bits for names that have a number."""
    return sum(1 << numbers[name] for name in names if name in numbers)


def names_of(numbers: dict[str, int], bits: int) -> frozenset[str]:
    """The names whose bits are set; bits that nobody knows are what a newer device offers besides."""
    return frozenset(name for name, number in numbers.items() if bits >> number & 1)


DTYPES: dict[str, int] = {name: number for number, name in enumerate(DTYPE_NUMBERS)}

NumberOf = Callable[[Region], int]
"""The number that a region has on the wire."""
RegionOf = Callable[[int], Region]
"""The region of a number. Raises WireError for one that does not exist."""


def pack_segment(region: int, spans: Spans) -> bytes:
    """Arguments of ADD and READ."""
    return _pack_segments([(region, spans)])


def segment_nbytes(num_spans: int) -> int:
    """Bytes of the arguments of an ADD or READ."""
    return _INTEGER.size + _PAIR.size * (1 + num_spans)


def unpack_segment(data: bytes, region_of: RegionOf) -> Segment:
    """Read the arguments of ADD or READ. Raises WireError."""
    taken = _Taken(data)
    segments = taken.segments(region_of)
    taken.finish()
    if len(segments) != 1:
        raise WireError(f"{len(segments)} segments; allowed: 1")
    return segments[0]


def pack_launch(launch: Launch, number_of: NumberOf) -> bytes:
    """Arguments of OP. Raises WireError for what has no place on the wire."""
    args = launch.args
    number = KERNELS.get(args.kernel)
    if number is None:
        raise WireError(f"kernel {args.kernel} has no number on the wire; those that have: {', '.join(KERNELS)}")
    scalars, arrays = [], []
    for name, form in _FORMS[number][1].items():
        value = getattr(args, name)
        if isinstance(form, Array):
            arrays.append(_pack_array(name, form.columns, np.asarray(value)))
        else:
            scalars.append(_pack_scalar(name, form, value))
    operands = [
        _pack_segments([(number_of(region), spans) for region, spans in operand])
        for operand in (*launch.reads, *launch.writes)
    ]
    header = _HEADER.pack(number, len(scalars), len(arrays), len(launch.reads), len(launch.writes))
    return b"".join([header, *scalars, *arrays, *operands])


def launch_nbytes(launch: Launch) -> int:
    """Bytes of the arguments of an OP, without packing them."""
    form = _FORMS[KERNELS[launch.args.kernel]][1]
    nbytes = _HEADER.size
    for name, kind in form.items():
        nbytes += _PAIR.size + 8 * np.asarray(getattr(launch.args, name)).size if isinstance(kind, Array) else 8
    for operand in (*launch.reads, *launch.writes):
        nbytes += _INTEGER.size + sum([_PAIR.size * (1 + len(spans)) for _, spans in operand])
    return nbytes


def unpack_launch(data: bytes, region_of: RegionOf) -> Launch:
    """Read the arguments of OP. Raises WireError."""
    taken = _Taken(data)
    number, num_scalars, num_arrays, num_reads, num_writes = _HEADER.unpack(taken.bytes(_HEADER.size))
    if number not in _FORMS:
        raise WireError(f"there is no kernel {number}; allowed: 0 to {max(_FORMS)}")
    kind, form = _FORMS[number]
    arrays_needed = sum(isinstance(f, Array) for f in form.values())
    if (num_scalars, num_arrays) != (len(form) - arrays_needed, arrays_needed):
        raise WireError(
            f"{kind.kernel} has {len(form) - arrays_needed} scalars and {arrays_needed} arrays, got {num_scalars} and "
            f"{num_arrays}"
        )
    if max(num_reads, num_writes) > _MOST_OPERANDS:
        raise WireError(f"{num_reads} read and {num_writes} write operands; allowed: {_MOST_OPERANDS} of each")
    values: dict[str, Any] = {n: taken.scalar(n, f) for n, f in form.items() if not isinstance(f, Array)}
    values |= {n: taken.array(n, f.columns) for n, f in form.items() if isinstance(f, Array)}
    operands: list[Operand] = [taken.segments(region_of) for _ in range(num_reads + num_writes)]
    taken.finish()
    return Launch(kind(**values), tuple(operands[:num_reads]), tuple(operands[num_reads:]))


def sram_nbytes(args: KernelArgs) -> int:
    """What an engine holds of one job of a launch: queries and results of one sequence and KV head, one row, or the
    centroids of one segment."""
    if isinstance(args, Attend):
        return 4 * args.q_len * args.group * (args.head_dim + 2 + args.head_dim_v)
    if isinstance(args, Logits):
        return 4 * args.q_len * args.group * (args.head_dim + 1)
    if isinstance(args, Combine):
        return 4 * args.q_len * args.group * (1 + 2 + args.head_dim_v)
    if isinstance(args, Merge):
        return 2 * 4 * args.q_len * args.group * (2 + args.head_dim_v)
    if isinstance(args, Score):
        return 4 * args.group * (args.head_dim + 1)
    if isinstance(args, Topk):
        return 8 * args.k + 4 * args.group
    if isinstance(args, (Quantize, Dequantize)):
        return 4 * args.dim
    if isinstance(args, Cluster):
        return 4 * args.head_dim * (1 + num_clusters(args.segment_tokens, args.segment_tokens, args.cluster_tokens))
    return 0


def _pack_scalar(name: str, form: Any, value: Any) -> bytes:
    if form is float:
        return _FLOAT.pack(value)
    if isinstance(form, Choice):
        word = str(value).lower() if form is _FLAG else value
        if word not in form.words:
            raise WireError(f"{name} is {value!r}; allowed: {', '.join(form.words)}")
        value = form.words.index(word)
    try:
        return _INTEGER.pack(value)
    except struct.error as error:
        raise WireError(f"{name} is {value!r}; allowed: an integer of 64 bits") from error


def _pack_array(name: str, columns: int, array: NDArray[Any]) -> bytes:
    if array.ndim != (1 if columns == 0 else 2) or (columns > 0 and array.shape[1] != columns):
        shape = {0: "(n,)", -1: "(n, m)"}.get(columns, f"(n, {columns})")
        raise WireError(f"{name} needs shape {shape}, got {array.shape}")
    shape_of = (len(array), 1) if columns == 0 else array.shape
    return _PAIR.pack(*shape_of) + np.ascontiguousarray(array, dtype=_INT64).tobytes()


def _pack_segments(segments: Sequence[tuple[int, Spans]]) -> bytes:
    parts = [_INTEGER.pack(len(segments))]
    for region, spans in segments:
        parts += [_PAIR.pack(region, len(spans)), np.ascontiguousarray(spans.array, dtype=_INT64).tobytes()]
    return b"".join(parts)


class _Taken:
    """Bytes that are taken off the front, never more than there are."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def bytes(self, nbytes: int) -> bytes:
        left = len(self._data) - self._at
        if not 0 <= nbytes <= left:
            raise WireError(f"{nbytes} bytes are said to follow at byte {self._at} of the arguments, {left} do")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def finish(self) -> None:
        if self._at != len(self._data):
            raise WireError(f"{len(self._data) - self._at} bytes are left over behind the arguments")

    def scalar(self, name: str, form: Any) -> Any:
        raw = self.bytes(8)
        if form is float:
            return _FLOAT.unpack(raw)[0]
        value = _INTEGER.unpack(raw)[0]
        if not isinstance(form, Choice):
            return value
        if not 0 <= value < len(form.words):
            raise WireError(f"{name} is {value}; allowed: 0 to {len(form.words) - 1}")
        return value == 1 if form is _FLAG else form.words[value]

    def array(self, name: str, columns: int) -> NDArray[np.int64]:
        rows, found = self._counts()
        if found != max(columns, 1) and (columns >= 0 or found < 1):
            raise WireError(
                f"{name} has {found} columns; allowed: {max(columns, 1)}{' or more' if columns < 0 else ''}"
            )
        numbers = np.frombuffer(self.bytes(8 * rows * found), dtype=_INT64).astype(np.int64)
        return numbers if columns == 0 else numbers.reshape(rows, found)

    def segments(self, region_of: RegionOf) -> Operand:
        count = _INTEGER.unpack(self.bytes(8))[0]
        if count < 0 or count > len(self._data):
            raise WireError(f"{count} segments in {len(self._data)} bytes")
        return tuple([self._segment(region_of) for _ in range(count)])

    def _segment(self, region_of: RegionOf) -> Segment:
        region, num_spans = self._counts()
        table = np.frombuffer(self.bytes(16 * num_spans), dtype=_INT64).reshape(-1, 2)
        try:
            spans = Spans(table)
        except ValueError as error:
            raise WireError(str(error)) from error
        return Segment(region_of(region), spans)

    def _counts(self) -> tuple[int, int]:
        first, second = _PAIR.unpack(self.bytes(16))
        if first < 0 or second < 0 or second > len(self._data):
            raise WireError(f"({first}, {second}) at byte {self._at - 16} of the arguments are no counts")
        return first, second
