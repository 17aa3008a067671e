"""Archives across restarts: what was committed is there, what was not is not, and who asks for another is told."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.archive_rig import (
    DRIVE,
    ENTRIES,
    NOTES,
    SHAPE,
    Content,
    adopted,
    content_of,
    machine,
    new,
    order_of,
    run,
)
from tests.machines import write_machine
from tests.seeded import bytes_of
from tierloop.devices.clocks import WallClock
from tierloop.devices.conformance import run as conformance
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.nvme import open_nvme
from tierloop.devices.errors import Busy, ConfigurationError, OutOfRange, Unsupported
from tierloop.devices.hazards import HazardChecker
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.runtime.archive import Archive
from tierloop.runtime.archive_catalogue import Catalogue
from tierloop.runtime.archive_check import discard, fsck
from tierloop.runtime.blocks import KVShape, TierTooSmall
from tierloop.runtime.engine import Engine

SIZE = ENTRIES.nbytes


async def write_some(engine: Engine, name: str, seed: int = 0) -> Content:
    """An archive with two appends, notes and a commit; stays."""
    archive, content = new(engine, name), Content((3, 1, 4, 1, 5), 4)
    for layer in range(2):
        for first, last in ((0, 27), (27, 31)):
            order = order_of(seed + layer, first, last)
            data = bytes_of(seed + layer + first, *order.shape, SIZE)
            archive.put(layer, order, data)
            content.lay(layer, order, data)
        note = bytes_of(seed + 50 + layer, 333)
        archive.note("labels", layer, note)
        content.notes["labels", layer] = note.tobytes()
    await archive.commit(content.tokens, content.length)
    archive.close(keep=True)
    return content


def test_what_was_committed_is_there_after_a_restart(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert run(engine, lambda: adopted(engine)) == content


def test_without_a_file_nothing_outlives_the_platform(tmp_path: Path) -> None:
    with machine(tmp_path) as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
        again = Engine(engine.platform, SHAPE)
        assert run(again, lambda: adopted(again)) == content, "another engine of the same platform finds it"
        again.close()
    with machine(tmp_path) as engine, pytest.raises(ConfigurationError, match="there is none of that name"):
        run(engine, lambda: adopted(engine))
    assert not (tmp_path / "drive").exists()


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))

        async def more() -> None:
            archive = await Archive.adopt(engine, DRIVE, "r0", "model")
            order = order_of(9, 31, 40)
            archive.put(0, order, bytes_of(9, *order.shape, SIZE))
            archive.note("labels", 0, bytes_of(4, 10))
            archive.close(keep=True)

        run(engine, more)
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert run(engine, lambda: adopted(engine)) == content


def test_an_adopted_archive_goes_on(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
    for turn in range(3):
        with machine(tmp_path, tmp_path / "drive") as engine:
            order = order_of(turn, 31 + 3 * turn, 34 + 3 * turn)
            data = bytes_of(70 + turn, *order.shape, SIZE)
            content.lay(1, order, data)
            content.notes["labels", 0] = bytes_of(turn, 99).tobytes()
            content.tokens = (*content.tokens, turn)

            async def more(turn: int = turn, order: Any = order, data: Any = data, engine: Engine = engine) -> None:
                archive = await Archive.adopt(engine, DRIVE, "r0", "model")
                archive.put(1, order, data)
                archive.note("labels", 0, bytes_of(turn, 99))
                await archive.commit(content.tokens, content.length)
                archive.close(keep=True)

            run(engine, more)
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert run(engine, lambda: adopted(engine)) == content


def test_several_archives_lie_on_one_drive(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        contents = {n: run(engine, lambda n=n, i=i: write_some(engine, n, 10 * i)) for i, n in enumerate("abc")}  # type: ignore[misc]
    with machine(tmp_path, tmp_path / "drive") as engine:
        run(engine, lambda: discard(engine, DRIVE, "b", "model"))
        for name in "ac":
            assert run(engine, lambda n=name: adopted(engine, n)) == contents[name]  # type: ignore[misc]
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert [f.name for f in run(engine, lambda: fsck(engine, DRIVE))] == ["a", "c"]


def test_space_that_is_allocated_later_is_never_that_of_an_archive(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
    with machine(tmp_path, tmp_path / "drive") as engine:
        second = new(engine, "r1")
        order = order_of(0, 0, 40)
        second.put(0, order, np.full((2, 40, SIZE), 255, dtype=np.uint8))
        run(engine, lambda: second.commit([1], 1))
        second.close(keep=True)
        assert run(engine, lambda: adopted(engine)) == content


def test_a_new_archive_replaces_the_old_one_when_it_is_committed(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        old = run(engine, lambda: write_some(engine, "r0"))
        size = engine.platform.memory_owner(DRIVE)._store.used  # type: ignore[attr-defined]
        archive = new(engine, "r0")
        archive.close(keep=True)
        assert run(engine, lambda: adopted(engine)) == old, "it was not committed"
        changed = run(engine, lambda: write_some(engine, "r0", 30))
        assert run(engine, lambda: adopted(engine)) == changed
        assert engine.platform.memory_owner(DRIVE)._store.used == size  # type: ignore[attr-defined]
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert run(engine, lambda: adopted(engine)) == changed != old


def test_an_archive_that_is_not_kept_is_gone(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        run(engine, lambda: write_some(engine, "r0"))

        async def drop() -> None:
            (await Archive.adopt(engine, DRIVE, "r0", "model")).close(keep=False)

        run(engine, drop)
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert run(engine, lambda: fsck(engine, DRIVE)) == []


@pytest.mark.parametrize(
    ("name", "fingerprint", "shape", "problem"),
    [
        ("r1", "model", SHAPE, "archive 'r1' cannot be adopted: there is none of that name"),
        ("r0", "other", SHAPE, "it is of 'model', not of 'other'"),
        ("r0", "model", KVShape(2, 2, 2, 12, 8), "is of another model: head_dim is 8, not 12"),
        ("r0", "model", KVShape(2, 2, 2, 8, 12, "float16"), "is of another model: dtype is float32, not float16"),
    ],
)
def test_what_is_not_there_or_of_another_model_is_refused(
    tmp_path: Path, name: str, fingerprint: str, shape: KVShape, problem: str
) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
    with machine(tmp_path, tmp_path / "drive", shape=shape) as engine:
        with pytest.raises(ConfigurationError, match=problem) as refused:
            run(engine, lambda: Archive.adopt(engine, DRIVE, name, fingerprint))
        assert "\n" not in str(refused.value)
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert run(engine, lambda: adopted(engine)) == content


def test_fsck_says_what_is_there(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
        open_one = new(engine, "r1")
        run(engine, lambda: open_one.commit([1], 0))
        first, second = run(engine, lambda: fsck(engine, DRIVE))
        open_one.close(keep=True)
    assert (first.name, first.fingerprint, first.tokens, first.length) == ("r0", "model", 5, 4)
    assert (first.entries, first.intact, first.problem) == (len(content.entries), True, "")
    assert (second.name, second.intact, second.problem) == ("r1", None, "somebody works with it")


def test_fsck_gives_back_what_nobody_committed(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    with machine(tmp_path, drive) as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
        before = drive.stat().st_size
        lost = new(engine, "lost")  # never committed, never closed: as if the process had been killed
        lost.put(0, order_of(0, 0, 40), bytes_of(1, 2, 40, SIZE))
    assert drive.stat().st_size > before
    with machine(tmp_path, drive) as engine:
        assert [f.name for f in run(engine, lambda: fsck(engine, DRIVE))] == ["r0"]
        assert drive.stat().st_size == before
        assert run(engine, lambda: adopted(engine)) == content


def test_a_medium_that_begins_with_something_else_is_refused(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.write_bytes(b"precious" * 50_000)
    with machine(tmp_path, drive) as engine, pytest.raises(ConfigurationError, match="no list of archives") as refused:
        new(engine)
    assert "\n" not in str(refused.value)
    assert drive.read_bytes()[:400_000] == b"precious" * 50_000


def test_archives_come_before_anything_else_on_a_medium(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        engine.scratch(DRIVE, 4096)
        with pytest.raises(ConfigurationError, match="open archives before anything else"):
            new(engine)


def test_a_full_list_of_archives_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
        store = engine.platform.memory_owner(DRIVE)._store  # type: ignore[attr-defined]
        used = store.used
        twin = Catalogue.of(engine, DRIVE)._twin
        twin._place_nbytes //= 32  # less than a page: the sixteen blocks of a place hold hundreds of archives
        archive = new(engine, "r1")
        with pytest.raises(TierTooSmall, match="does not fit"):
            run(engine, lambda: archive.commit([1], 1))
        archive.close(keep=True)
        assert store.used == used
        twin._place_nbytes *= 32
        assert run(engine, lambda: adopted(engine)) == content


# -- the file of an emulated memory ---------------------------------------------------------------------------------


def test_one_device_at_a_time_keeps_its_bytes_in_a_file(tmp_path: Path) -> None:
    with (
        machine(tmp_path, tmp_path / "drive"),
        pytest.raises(Busy, match="one device at a time"),
        machine(tmp_path, tmp_path / "drive"),
    ):
        pass


def test_a_new_region_of_a_kept_file_is_zeroed(tmp_path: Path) -> None:
    (tmp_path / "drive").write_bytes(b"x" * 10_000)
    with machine(tmp_path, tmp_path / "drive") as engine:
        region = engine.scratch(DRIVE, 8192)
        into = np.ones(8192, dtype=np.uint8)

        async def read() -> None:
            await engine.read(region.all(), into)

        run(engine, read)
        assert not into.any()
    assert (tmp_path / "drive").stat().st_size >= 10_000


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"devices.dram.keep": "drive"}, "keep: profile dram has no persistent memory"),
        ({"devices.nvme.keep": "drive", "devices.nvme.backing": "."}, "keep: given with `backing`"),
        ({"devices.nvme.keep": 3}, "keep: 3 given; allowed: a string"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        open_platform(write_machine(tmp_path), overrides=overrides, only=("dram", "nvme"))


@pytest.mark.parametrize("level", ["memory", "ordering", "errors", "stateful"])
def test_a_drive_that_keeps_its_bytes_is_a_device_like_others(tmp_path: Path, level: str) -> None:
    def opened(_: Site) -> Platform:
        return open_platform("demo", overrides={"devices.nvme.keep": str(tmp_path / "drive")})

    report = conformance(opened, [level], virtual=True, device=DRIVE, examples=8)
    assert not report.failed, str(report)


def test_a_memory_that_keeps_nothing_adopts_nothing(tmp_path: Path) -> None:
    with machine(tmp_path) as engine, pytest.raises(Unsupported, match="no file was named"):
        engine.platform.memory_owner(DRIVE).adopt(0, 4096)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("offset", "nbytes"), [(-4096, 4096), (1, 4096), (0, 0), (0, 1 << 40)])
def test_only_what_lies_on_the_medium_can_be_adopted(tmp_path: Path, offset: int, nbytes: int) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine, pytest.raises(OutOfRange, match="starts on a multiple of"):
        engine.platform.memory_owner(DRIVE).adopt(offset, nbytes)  # type: ignore[attr-defined]


def test_what_is_adopted_is_taken(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        device: Any = engine.platform.memory_owner(DRIVE)
        region = device.adopt(8192, 4096)
        assert device.offset_of(region) == 8192
        with pytest.raises(Busy, match="belongs to another region"):
            device.adopt(4096, 8192)
        assert device.offset_of(device.alloc(12_000)) == 12_288, "the hole before it is too small"
        device.free(region)
        assert device.offset_of(device.adopt(4096, 8192)) == 4096


def test_a_drive_in_wrappers_keeps_its_archives(tmp_path: Path) -> None:
    layers = '[{ kind = "throttled", bytes_per_s = 1e9 }, { kind = "checked", block_nbytes = 4096 }]'
    path = write_machine(tmp_path)
    path.write_text(path.read_text().replace('profile = "nvme.toml"\n', f'profile = "nvme.toml"\nwrap = {layers}\n'))
    made: list[Content] = []
    for turn in range(2):
        overrides = {"devices.nvme.keep": "drive"}
        with open_platform(path, overrides=overrides, only=("dram", "nvme"), check_hazards=True) as platform:
            engine = Engine(platform, SHAPE)
            if not turn:
                made.append(run(engine, lambda e=engine: write_some(e, "r0")))  # type: ignore[misc]
            made.append(run(engine, lambda e=engine: adopted(e)))  # type: ignore[misc]
            engine.close()
    assert made[0] == made[1] == made[2]


# -- a real file -----------------------------------------------------------------------------------------------------


@contextmanager
def real(folder: Path) -> Iterator[Platform]:
    """This host's memory, and a file as its drive."""
    site = Site(clock=WallClock(), checker=HazardChecker())
    devices: dict[str, Device] = {"dram": open_cpu("dram", site, {"capacity": 1 << 26})}
    drive = {"path": str(folder / "medium"), "capacity": 1 << 23, "create": True, "reaches": ["dram"]}
    devices["nvme0"] = open_nvme("nvme0", site, drive)
    with Platform("real", site, devices, "dram") as platform:
        yield platform


def test_archives_outlive_a_process_on_the_real_driver(tmp_path: Path) -> None:
    content = Content((1, 2, 3), 3)
    with real(tmp_path) as platform:
        engine = Engine(platform, SHAPE)

        async def write() -> None:
            archive = Archive(engine, "nvme0", "r0", "model", ENTRIES, 40, NOTES, 6)
            order = order_of(0, 0, 30)
            data = bytes_of(0, *order.shape, SIZE)
            archive.put(0, order, data)
            content.lay(0, order, data)
            order = order_of(1, 30, 35)
            data = bytes_of(1, *order.shape, SIZE)
            padded = np.zeros((2, archive.stride(5)), dtype=np.uint8)
            padded[:, : 5 * SIZE] = data.reshape(2, -1)
            source = engine.scratch("dram", padded.size)
            there = engine.write(source.all(), padded.reshape(-1))
            archive.take(0, order, source.all(), [there])
            content.lay(0, order, data)
            archive.note("labels", 1, bytes_of(5, 5000)[:2500])
            content.notes["labels", 1] = bytes_of(5, 5000)[:2500].tobytes()
            await archive.commit(content.tokens, content.length)
            archive.close(keep=True)

        engine.loop.run(write())
        engine.close()
    for keep in (True, False):
        with real(tmp_path) as platform:
            engine = Engine(platform, SHAPE)

            async def read(engine: Engine = engine, keep: bool = keep) -> Content:
                (found,) = await fsck(engine, "nvme0")
                assert found.intact, found.problem
                archive = await Archive.adopt(engine, "nvme0", "r0", "model")
                made = await content_of(engine, archive)
                archive.close(keep)
                return made

            assert engine.loop.run(read()) == content
            engine.close()
    with real(tmp_path) as platform:
        engine = Engine(platform, SHAPE)
        assert engine.loop.run(fsck(engine, "nvme0")) == []
        engine.close()


# -- more than one thing at a time -----------------------------------------------------------------------------------


def test_archives_that_are_committed_at_the_same_time_are_all_listed(tmp_path: Path) -> None:
    names = [f"r{i}" for i in range(5)]
    with machine(tmp_path, tmp_path / "drive") as engine:

        async def both() -> None:
            tasks = [engine.loop.spawn(write_some(engine, name, 7 * i)) for i, name in enumerate(names)]
            contents.update({name: await task for name, task in zip(names, tasks, strict=True)})

        contents: dict[str, Content] = {}
        run(engine, both)
    with machine(tmp_path, tmp_path / "drive") as engine:
        for name in names:
            assert run(engine, lambda n=name: adopted(engine, n)) == contents[name]  # type: ignore[misc]


def test_what_is_put_while_a_commit_is_under_way_belongs_to_the_next_one(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    first, second = Content((1,), 1), Content((1, 2), 2)
    with machine(tmp_path, drive) as engine:

        async def overlap() -> None:
            archive = new(engine)
            for content, seed in ((first, 0), (second, 1)):
                order = order_of(seed, 5 * seed, 5 * seed + 5)
                data = bytes_of(seed, *order.shape, SIZE)
                archive.put(0, order, data)
                archive.note("labels", 0, bytes_of(seed, 77))
                second.lay(0, order, data)
                second.notes["labels", 0] = bytes_of(seed, 77).tobytes()
                if content is first:
                    first.lay(0, order, data)
                    first.notes.update(second.notes)
                    task = engine.loop.spawn(archive.commit((1,), 1))
                    await archive.note("other", 1, bytes_of(9, 10))  # by now the commit has begun
                    second.notes["other", 1] = bytes_of(9, 10).tobytes()
            await task
            shutil.copy(drive, tmp_path / "between")
            await archive.commit((1, 2), 2)
            archive.close(keep=True)

        run(engine, overlap)
    with machine(tmp_path, tmp_path / "between") as engine:
        found = run(engine, lambda: adopted(engine))
        found.notes.pop(("other", 1), None)  # it was written before the commit had looked
        assert found == first
    with machine(tmp_path, drive) as engine:
        assert run(engine, lambda: adopted(engine)) == second


KILLED = """
import os, signal
from pathlib import Path
from tests.seeded import bytes_of
from tests.archive_rig import machine, new, order_of, run
from tests.test_archive_restart import write_some
folder = Path({folder!r})
with machine(folder, folder / "drive") as engine:
    run(engine, lambda: write_some(engine, "r0"))
    lost = new(engine, "lost")
    lost.put(0, order_of(0, 0, 40), bytes_of(1, 2, 40, 160))
    async def die():
        await lost.note("labels", 0, bytes_of(0, 50))
        os.kill(os.getpid(), signal.SIGKILL)
    run(engine, die)
"""


def test_a_process_that_is_killed_leaves_what_it_has_committed(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], cwd=root, timeout=300)
    assert done.returncode == -signal.SIGKILL
    with machine(tmp_path / "same", tmp_path / "same" / "drive") as engine:
        content = run(engine, lambda: write_some(engine, "r0"))
    with machine(tmp_path, tmp_path / "drive") as engine:
        assert [f.name for f in run(engine, lambda: fsck(engine, DRIVE))] == ["r0"]
        assert run(engine, lambda: adopted(engine)) == content
