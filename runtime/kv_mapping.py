"""KV mapping: which host memories the blocks of K and of V go to.

`semantic` is HybridGen's: keys, which are scanned in every step, in the host's own memory; values, of which few rows
are taken, in CXL memory. `interleave` and `weighted` deal both out in turn, block by block, as the operating system
deals out pages; `dram` keeps everything in the host's own memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.runtime.engine import Engine, Lane
from tierloop.runtime.policy import number

MAPPINGS = ("auto", "semantic", "interleave", "weighted", "dram")
LARGEST_WEIGHT = 1_000
Homes = tuple[tuple[str, ...], tuple[str, ...]]
"""For K and V: the memories that blocks go to in turn."""


def far_memory(engine: Engine, cores: Lane) -> str | None:
    """The first CXL memory that the cores reach."""
    return next((memory.name for memory in engine.memories("cxl") if cores.reaches(memory.name)), None)


def homes(policy: str, engine: Engine, cores: Lane, mapping: str, weights: Mapping[str, int] | None) -> Homes:
    """Where blocks of K and of V go in turn; `auto` is `semantic` where the cores reach CXL memory, else `dram`.

    Raises ConfigurationError, in the name of the policy, for what the platform cannot do.
    """
    host, far = engine.host, far_memory(engine, cores)
    if weights is not None and mapping != "weighted":
        raise ConfigurationError(f'{policy}: weights belong to mapping = "weighted", not to {mapping!r}')
    if mapping == "auto":
        mapping = "semantic" if far else "dram"
    if mapping == "dram":
        return (host,), (host,)
    if mapping == "weighted" and weights is not None:
        turn = turns(weights, [m.name for m in engine.memories()], f"{policy}: weights")
        return turn, turn
    if far is None:
        raise ConfigurationError(
            f"{policy}: mapping {mapping!r} puts rows into CXL memory, and {cores.device.info.name} of platform "
            f"{engine.platform.name} reaches none; "
            'mapping = "dram" keeps all of them in host memory'
        )
    if mapping == "semantic":
        return (host,), (far,)
    if mapping == "interleave":
        return (host, far), (host, far)
    turn = turns(by_rate(cores, host, far), [host, far], f"{policy}: weights")
    return turn, turn


def by_rate(cores: Lane, host: str, far: str) -> dict[str, int]:
    """Weights that let both memories end a scan at the same time: as the rates at which the cores read them."""
    rates = []
    for memory in (host, far):
        path = cores.executor.path(memory)
        assert path is not None, "the cores reach both"
        rates.append(path.read_bytes_per_s)
    smaller = min(rates)
    return {memory: max(1, round(2 * rate / smaller)) for memory, rate in zip((host, far), rates, strict=True)}


def turns(weights: Mapping[str, object], known: list[str], what: str) -> tuple[str, ...]:
    """The order in which blocks go to memories by whole weights, evenly mixed: {a: 2, b: 1} → (a, b, a).

    Raises ConfigurationError for a memory that is not `known` and for a weight that is no whole number up to 1,000.
    """
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigurationError(f"{what} are a table of memories and whole numbers, not {weights!r}")
    whole: dict[str, int] = {}
    for memory, weight in weights.items():
        if memory not in known:
            raise ConfigurationError(f"{what}: no memory {memory!r}: {nearest(memory, known)}")
        held = number(f"{what}: the weight of {memory}", weight, 0, LARGEST_WEIGHT)
        if held != int(held):
            raise ConfigurationError(f"{what}: the weight of {memory} is {weight}; it must be a whole number")
        whole[memory] = int(held)
    unit = gcd(*whole.values())
    if not unit:
        raise ConfigurationError(f"{what}: all weights are 0")
    length = sum(whole.values()) // unit
    # Weight w takes the turns at (i + 1/2) · length / w, so each memory's are as far apart as they can be.
    places = [
        ((i + 0.5) * length / (weight // unit), memory)
        for memory, weight in whole.items()
        for i in range(weight // unit)
    ]
    return tuple(memory for _, memory in sorted(places, key=lambda place: place[0]))
