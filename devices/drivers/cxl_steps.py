"""How a region of volatile CXL memory is set up: the writes to sysfs, in the order that the kernel wants.

The `cxl` of version 76 makes persistent regions only, and that is the one of Debian 12, so these steps are what people
are told. They are data, and nothing here writes: a command line for a shell, and pairs of a file and a value for a
program. They need root, and are good for any number of memories behind one window of the platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CXL = "/sys/bus/cxl/devices"
BIND = "../drivers/cxl_region/bind"


class Step(NamedTuple):
    """One write; `path` begins below `CXL`."""

    path: str
    value: str


def create_file(window: str) -> str:
    """The file below `CXL` that says what the next region will be called, and makes it when that is written back."""
    return f"{window}/create_ram_region"


def region_steps(
    window: str, region: str, decoders: Sequence[tuple[str, int]], granule_nbytes: int = 256
) -> tuple[Step, ...]:
    """Set a region up over endpoint decoders, (name, bytes of its memory) each, in the order of the interleave set.

    `region` is what `create_file` says at that moment. What a decoder had reserved before is given back first: its mode
    does not change otherwise.
    """
    steps = [Step(create_file(window), region)]
    for name, nbytes in decoders:
        steps += [Step(f"{name}/dpa_size", "0"), Step(f"{name}/mode", "ram"), Step(f"{name}/dpa_size", hex(nbytes))]
    steps += [
        Step(f"{region}/interleave_granularity", str(granule_nbytes)),
        Step(f"{region}/interleave_ways", str(len(decoders))),
        Step(f"{region}/size", hex(sum(nbytes for _, nbytes in decoders))),
    ]
    steps += [Step(f"{region}/target{way}", name) for way, (name, _) in enumerate(decoders)]
    return (*steps, Step(f"{region}/commit", "1"), Step(BIND, region))


def region_command(window: str, decoders: Sequence[tuple[str, int]], granule_nbytes: int = 256) -> str:
    """The same as a line for a shell."""
    writes = [f"echo {value} >{path}" for path, value in region_steps(window, "$r", decoders, granule_nbytes)]
    return " && ".join([f"cd {CXL}", f"r=$(cat {create_file(window)})", *writes])
