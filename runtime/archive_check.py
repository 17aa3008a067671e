"""`fsck` for archives: what lies on a persistent memory, whether it is intact, and space that nobody committed."""

from __future__ import annotations

from dataclasses import dataclass

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.archive import Archive
from tierloop.runtime.archive_catalogue import Catalogue
from tierloop.runtime.engine import Engine


@dataclass(frozen=True)
class Found:
    """An archive that is listed, as of its last commit.

    `entries` are those of all layers and heads together, `nbytes` is the space that it takes. `intact` is None where
    somebody works with it; `problem` says why it is not True. Of a damaged one the counts may be 0.
    """

    name: str
    fingerprint: str
    tokens: int = 0
    length: int = 0
    entries: int = 0
    nbytes: int = 0
    intact: bool | None = True
    problem: str = ""


async def fsck(engine: Engine, memory: str) -> list[Found]:
    """Every archive of a memory, read whole and compared with its checksums, in the order of their places.

    What was never committed is given back, to the file system too where the memory is a file. Damaged archives stay
    where they are until `discard`. Raises ConfigurationError if the list of archives itself is damaged.
    """
    catalogue = Catalogue.of(engine, memory)
    found = []
    for key, listed in sorted(catalogue.listed.items(), key=lambda item: item[1].offset):
        size = listed.region.nbytes
        if key in catalogue.opened:
            found.append(Found(*key, nbytes=size, intact=None, problem="somebody works with it"))
            continue
        catalogue.open(key)
        archive: Archive | None = None
        problem = ""
        try:
            archive, appends = await Archive.read(engine, catalogue, key, listed.region)
            await archive.verify(appends)
        except ConfigurationError as error:
            problem = str(error)
        catalogue.leave(key)
        if archive is None:
            found.append(Found(*key, nbytes=size, intact=False, problem=problem))
        else:
            count = sum(map(archive.count, range(archive.geometry.layers))) * archive.geometry.heads
            found.append(Found(*key, len(archive.tokens), archive.length, count, size, not problem, problem))
    catalogue.collect()
    return found


async def discard(engine: Engine, memory: str, request_name: str, fingerprint: str) -> None:
    """Take an archive off a memory, damaged or not. Raises ConfigurationError if it is not there or in use."""
    catalogue, key = Catalogue.of(engine, memory), (request_name, fingerprint)
    if key not in catalogue.listed:
        raise ConfigurationError(f"{memory}: there is no archive {request_name!r} of {fingerprint!r}")
    catalogue.open(key)
    try:
        await catalogue.remove(key)
    finally:
        catalogue.leave(key)
