"""A GGUF file, read without trusting it.

Who calls this: `runtime.models`, to convert a file once. Every count, length, offset and type that the file states is
checked against the bytes that are there before it is used, so a truncated or forged file is a `GgufError` that says
where it stops making sense; it is never a crash, an endless loop or an allocation that the file's own size does not
cover. What a file may be: little-endian GGUF, version 2 or 3, one part.

Own code where the `gguf` package has a reader, because that one follows whatever offsets a file names and takes 3.3 s
for a vocabulary of 49,152 tokens, against 0.2 s here. The block formats themselves are unpacked by the package.
"""

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

type_of_scalar = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


class GgufError(ValueError):
    """The file is not a GGUF file that can be read; the message says where and why."""


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies: `shape` in row-major order, `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a file states about itself; the weights stay on disk until `read_tensor`."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read and check the metadata and the tensor table of the file at `path`."""
    with path.open("rb") as file:
        head = _Head(file, os.fstat(file.fileno()).st_size)
        magic = head.take(4, "the magic bytes")
        if magic != b"GGUF":
            raise GgufError(f"starts with {magic!r}, a GGUF file starts with b'GGUF'")
        version = head.number("I", "the version")
        if version not in (2, 3):
            raise GgufError(f"says GGUF version {version}; versions 2 and 3, little-endian, can be read")
        num_tensors = head.count("Q", 32, "tensors")  # name length, number of dims, a dim, type, offset
        num_keys = head.count("Q", 13, "metadata keys")  # key length, type, a value of one byte
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = head.string("a metadata key")
            if key in metadata:
                raise GgufError(f"states the metadata key {key!r} twice")
            metadata[key] = head.value(head.number("I", key), key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise GgufError(f"states an alignment of {alignment!r}, it must be a positive multiple of 8")
        stated = [head.tensor() for _ in range(num_tensors)]
        data_start = -(-head.offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in stated:
            if name in tensors:
                raise GgufError(f"lists the tensor {name!r} twice")
            tensors[name] = _placed(name, shape, kind, offset, alignment, data_start, head.nbytes)
        return GgufFile(path, metadata, tensors)


def read_tensor(gguf: GgufFile, name: str) -> np.ndarray:
    """The tensor `name` as float32; refuses a kind that cannot be unpacked and values that are not finite."""
    tensor = gguf.tensors[name]
    stored = np.fromfile(gguf.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    if stored.nbytes != tensor.nbytes:
        raise GgufError(f"shrank while it was read: tensor {name!r} has {stored.nbytes} of {tensor.nbytes} bytes")
    row_shape = (*tensor.shape[:-1], tensor.nbytes // prod(tensor.shape[:-1]))
    try:
        values = dequantize(stored.reshape(row_shape), tensor.kind)
    except NotImplementedError:
        raise GgufError(f"stores tensor {name!r} as {tensor.kind.name}, which cannot be unpacked to floats") from None
    if not np.isfinite(values).all():
        raise GgufError(f"has values in tensor {name!r} that are not finite")
    return values.reshape(tensor.shape)


@dataclass
class _Head:
    """A cursor over the head of the file that never goes past the end of it."""

    file: BinaryIO
    nbytes: int
    offset: int = 0

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.nbytes - self.offset:
            raise GgufError(
                f"is truncated or corrupt: {what} would take {nbytes} bytes at offset {self.offset}, "
                f"the file has {self.nbytes} bytes"
            )
        taken = self.file.read(nbytes)
        if len(taken) != nbytes:
            raise GgufError(f"shrank while it was read: {what} has {len(taken)} of {nbytes} bytes")
        self.offset += nbytes
        return taken

    def number(self, format: str, what: str) -> int:
        number: int = struct.unpack("<" + format, self.take(struct.calcsize("<" + format), what))[0]
        return number

    def count(self, format: str, item_nbytes: int, what: str) -> int:
        """A number of items of at least `item_nbytes` each, which the rest of the file could hold."""
        count = self.number(format, f"the number of {what}")
        if count * item_nbytes > self.nbytes - self.offset:
            raise GgufError(
                f"is truncated or corrupt: it states {count} {what}, more than its {self.nbytes} bytes can hold"
            )
        return count

    def string(self, what: str) -> str:
        taken = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return taken.decode()
        except UnicodeDecodeError:
            raise GgufError(f"is corrupt: {what} before offset {self.offset} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Value:
        if kind == STRING:
            return self.string(what)
        if kind != ARRAY:
            return self.scalars(kind, 1, what)[0]
        kind = self.number("I", f"the type of {what}")
        if kind == STRING:
            return [self.string(what) for _ in range(self.count("Q", 8, f"strings in {what}"))]
        return self.scalars(kind, self.count("Q", 1, f"values in {what}"), what)

    def scalars(self, kind: int, count: int, what: str) -> list[Scalar]:
        if kind not in type_of_scalar:
            raise GgufError(f"is corrupt: {what} has the unknown or nested type {kind} at offset {self.offset}")
        format = f"<{count}{type_of_scalar[kind]}"
        return list(struct.unpack(format, self.take(struct.calcsize(format), what)))

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string("a tensor name")
        num_dims = self.number("I", f"the number of dims of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise GgufError(f"is corrupt: tensor {name!r} states {num_dims} dims, 1 to {MAX_DIMS} are allowed")
        # GGUF lists the fastest-moving dimension first
        shape = tuple(reversed([self.number("Q", f"a dim of {name!r}") for _ in range(num_dims)]))
        number = self.number("I", f"the type of {name!r}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise GgufError(f"is corrupt or too new: tensor {name!r} has the unknown type {number}") from None
        return name, shape, kind, self.number("Q", f"the offset of {name!r}")


def _placed(
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    offset: int,
    alignment: int,
    data_start: int,
    file_nbytes: int,
) -> GgufTensor:
    block, block_nbytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise GgufError(f"is corrupt: tensor {name!r} has the shape {shape}, {kind.name} rows are multiples of {block}")
    nbytes = prod(shape) // block * block_nbytes
    start = data_start + offset
    if offset % alignment or start + nbytes > file_nbytes:
        raise GgufError(
            f"is truncated or corrupt: tensor {name!r} lies at [{start}, {start + nbytes}), "
            f"the file has {file_nbytes} bytes and an alignment of {alignment}"
        )
    return GgufTensor(name, shape, kind, start, nbytes)
