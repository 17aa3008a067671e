"""The compiler of flash kernels: as in devices/kernels/compiled.py, with a key to the cache that knows all their files.

Numba looks at the file of the function alone, and would keep a kernel that was built on an older one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import types

from tierloop.devices.kernels import compiled
from tierloop.devices.kernels.compiled import INT64, inline
from tierloop.devices.kernels.lanes import prefetch

_F = TypeVar("_F", bound=Callable[..., Any])
_SOURCES = sorted(Path(__file__).parent.glob("flash_*.py"))
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:12]


def kernel(returns: Any, *arguments: Any) -> Callable[[_F], _F]:
    """Compile a function for exactly these types; what is kept on disk counts while all these files stay the same."""

    def decorate(function: _F) -> _F:
        function.__qualname__ = f"{function.__qualname__}.{_DIGEST}"
        return compiled.kernel(returns, *arguments)(function)

    return decorate


AHEAD = 12
"""Places of the tables are asked for that many units before they are used: random accesses are up to twice as fast."""


@inline(types.void, INT64)
def ask(builder: Any, address: Any) -> None:
    """Ask for the line at an address."""
    prefetch(builder, address)
