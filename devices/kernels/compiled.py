"""Compiling: the three ways in which this folder makes machine code, and memory by address.

- `kernel` compiles a function with one explicit signature, without the GIL, and keeps the result on disk.
- `entry` compiles a C function whose address other kernels call: each inner loop is compiled once, not once per caller.
- `inline` turns a function that writes LLVM instructions into one that a kernel can call. It exists for what Numba has
  no words for: vectors of a fixed width, 16-bit floats, unaligned loads from an address, memmove.

All of it happens when the module that holds the kernel is imported, never at a call. The cache's key contains a digest
of every source file here, because Numba looks only at the file of the function itself and would keep an old inner loop.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_F = TypeVar("_F", bound=Callable[..., Any])

INT64 = types.int64
FLOAT = types.float32
INTS = types.Array(types.int64, 1, "C", readonly=True)
TABLE = types.Array(types.int64, 2, "C", readonly=True)
"""Arrays that kernels only read; NumPy arrays that are writeable fit as well."""
_tuple_of: Any = types.UniTuple
PAIR, TRIPLE = _tuple_of(INT64, 2), _tuple_of(INT64, 3)


@cache
def _digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


@cache
def has_wide_registers() -> bool:
    """Whether the processor that is compiled for has 32 registers of 16 float32 lanes (AVX-512).

    That is this one, unless Numba was told another (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES): kernels for a machine without
    them are compiled beforehand on one that has them.
    """
    if getattr(numba.config, "CPU_NAME", None):  # its values come from the environment: no checker knows their names
        return "+avx512f" in (getattr(numba.config, "CPU_FEATURES", None) or "")
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def _compile(function: _F, compiler: Callable[..., Any], **options: Any) -> Any:
    function.__qualname__ = f"{function.__qualname__}.{_digest()}"
    try:
        return compiler(cache=True, **options)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        return compiler(**options)(function)  # nowhere to keep the cache: a read-only installation without a home


def kernel(returns: Any, *arguments: Any) -> Callable[[_F], _F]:
    """Compile a function for exactly these types, to run without the GIL."""

    def decorate(function: _F) -> _F:
        compiled: _F = _compile(
            function, lambda **o: numba.njit(returns(*arguments), nogil=True, error_model="numpy", **o)
        )
        return compiled

    return decorate


def entry(*arguments: Any) -> Callable[[Callable[..., None]], int]:
    """Compile a C function that returns nothing, and give its address."""

    def decorate(function: Callable[..., None]) -> int:
        compiled = _compile(function, lambda **o: numba.cfunc(types.void(*arguments), **o))
        _keep.append(compiled)
        return int(compiled.address)

    return decorate


_keep: list[Any] = []
"""Compiled C functions must outlive their addresses."""


def inline(returns: Any, *arguments: Any, literals: int = 0) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel-callable function of `emit(builder, *values)`, which writes LLVM instructions.

    The first `literals` parameters are constants of the caller and reach `emit` as Python integers. If `emit` has a
    first parameter `context`, it is given Numba's target context before the builder.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        names = [n for n in inspect.signature(emit).parameters if n not in ("context", "builder")]
        with_context = "context" in inspect.signature(emit).parameters

        def typing(_: Any, *given: Any) -> Any:
            constants = [t.literal_value for t in given[:literals]]

            def generate(context: Any, builder: Any, __: Any, values: Any) -> Any:
                first = (context, builder) if with_context else (builder,)
                result = emit(*first, *constants, *values[literals:])
                return context.get_dummy_value() if result is None else result

            return returns(*given[:literals], *arguments), generate

        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kinds) for name in ("typing_context", *names)]
        typing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Numba reads
        typing.__name__ = emit.__name__
        return intrinsic(prefer_literal=literals > 0)(typing)

    return decorate


def caller(*arguments: Any) -> Any:
    """A kernel-callable function (address, *arguments) that calls an `entry`."""
    names = ["address", *(f"argument_{i}" for i in range(len(arguments)))]

    def emit(builder: Any, address: Any, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
        builder.call(builder.inttoptr(address, kind.as_pointer()), values)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("builder", *names)]
    emit.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return inline(types.void, INT64, *arguments)(emit)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load from an address that need not be aligned."""
    return builder.load(pointer(builder, address, kind), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    """Store to an address that need not be aligned."""
    builder.store(value, pointer(builder, address, value.type), align=1)


@inline(FLOAT, INT64)
def load_float(builder: Any, address: Any) -> Any:
    """The float32 at an address."""
    return load(builder, address, ir.FloatType())


@inline(INT64, INT64)
def load_int(builder: Any, address: Any) -> Any:
    """The int64 at an address."""
    return load(builder, address, ir.IntType(64))


@inline(types.void, INT64, FLOAT)
def store_float(builder: Any, address: Any, value: Any) -> None:
    """Put a float32 at an address."""
    store(builder, value, address)


@inline(types.void, INT64, INT64)
def store_int(builder: Any, address: Any, value: Any) -> None:
    """Put an int64 at an address."""
    store(builder, value, address)


@inline(types.void, INT64, INT64, INT64)
def move_bytes(builder: Any, target: Any, source: Any, nbytes: Any) -> None:
    """memmove between addresses."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, byte, ir.IntType(64), ir.IntType(1)])
    move = builder.module.declare_intrinsic("llvm.memmove", (byte, byte, ir.IntType(64)), kind)
    pair = [builder.inttoptr(address, byte) for address in (target, source)]
    builder.call(move, [*pair, nbytes, ir.Constant(ir.IntType(1), 0)])


@inline(INT64, INT64)
def take_next(builder: Any, counter: Any) -> Any:
    """Add one to the shared int64 at an address; returns what was there: how threads share out pieces."""
    place = pointer(builder, counter, ir.IntType(64))
    return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")


@kernel(INT64, types.Array(types.uint8, 1, "C", readonly=True))
def address_of(array: Any) -> int:
    """Where a uint8 array's bytes lie; ten times faster than `array.ctypes.data`."""
    address: int = array.ctypes.data
    return address
