"""Arrays from an .npz file that comes from outside: each of the type and number of dimensions that it must have.

No pickles; names, types, shapes and sizes are checked before anything is allocated for them.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_HEADER_NBYTES = 1 << 24


class Malformed(ValueError):
    """What is wrong with a file, without its name."""


def read_arrays(path: Path, wanted: Mapping[str, tuple[str, int]], most_nbytes: int) -> dict[str, NDArray[Any]]:
    """The arrays of a file, by name: `wanted` has the type and number of dimensions of each. Raises Malformed.

    An array named `header` may have 16 MiB, all of them together `most_nbytes`, unpacked. They are not writeable.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = Counter(info.filename for info in archive.infolist())
            if names != Counter(f"{name}.npy" for name in wanted):
                raise Malformed(f"its parts are {', '.join(sorted(names)[:8])}; it must have {', '.join(wanted)}")
            if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in archive.infolist()):
                raise Malformed("it is packed in an unknown way")
            total = sum(info.file_size for info in archive.infolist())
            if total > most_nbytes:
                raise Malformed(f"it unpacks to {total:,} bytes; at most {most_nbytes:,} are allowed")
            return {name: _read_array(archive, name, *kind) for name, kind in wanted.items()}
    except FileNotFoundError:
        raise Malformed("there is no such file") from None
    except OSError as error:
        raise Malformed(error.strerror or str(error)) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise Malformed(f"it is not a readable .npz file ({error})") from error


def _read_array(archive: zipfile.ZipFile, name: str, wanted: str, dimensions: int) -> NDArray[Any]:
    info = archive.getinfo(f"{name}.npy")
    limit = min(info.file_size, _HEADER_NBYTES) if name == "header" else info.file_size
    with archive.open(info) as member:
        data = member.read(limit + 1)
    if len(data) > limit:
        raise Malformed(f"{name} is larger than it may be")
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        if version != (1, 0):
            raise Malformed(f"{name} is an array of version {version}; it must be (1, 0)")
        with warnings.catch_warnings(action="error"):
            shape, fortran, dtype = npy.read_array_header_1_0(stream)
    except Malformed:
        raise
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, Warning) as error:
        raise Malformed(f"{name} has no readable array header") from error
    if dtype != np.dtype(wanted) or fortran or len(shape) != dimensions:
        raise Malformed(f"{name} is {dtype} of {len(shape)} dimensions; it must be {wanted} of {dimensions}")
    nbytes = math.prod(shape) * dtype.itemsize
    rest = len(data) - stream.tell()
    if nbytes != rest:
        raise Malformed(f"{name} says that it has {nbytes} bytes, but has {rest}")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape)
