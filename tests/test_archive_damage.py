"""Archives when something goes wrong: killed at any command, torn, flipped, cut off, failing.

A run is recorded once: the drive's bytes after each command that ended, and which state its archives were in. A kill
leaves what the last `Flush` made durable, and in every sector that was written since, the old bytes, the new ones, or
rubbish.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive_rig import DRIVE, ENTRIES, Content, adopted, machine, new, order_of, run
from tests.seeded import bytes_of
from tierloop.devices.commands import Flush, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Cancelled, ConfigurationError, DeviceError, Gone, MediaError
from tierloop.runtime.archive import Archive
from tierloop.runtime.archive_catalogue import Catalogue
from tierloop.runtime.archive_check import fsck
from tierloop.runtime.engine import Engine

SIZE = ENTRIES.nbytes
SECTOR = 512
State = dict[str, Content]
"""What `adopt` must find, by name."""


async def life(engine: Engine, reached: Any, opened: list[Archive]) -> None:
    """What happens to archives in one process; `reached(state)` is called whenever a state is durable.

    Archives are put into `opened`, for who closes them if this fails.
    """
    state: State = {}

    def begin(name: str) -> Archive:
        opened.append(new(engine, name))
        return opened[-1]

    def now(name: str, content: Content | None) -> None:
        if content is None:
            del state[name]
        else:
            state[name] = content.copy()
        reached(dict(state))

    def put(archive: Archive, content: Content, seed: int, layer: int, first: int, last: int) -> None:
        order = order_of(seed, first, last)
        data = bytes_of(seed, *order.shape, SIZE)
        archive.put(layer, order, data)
        content.lay(layer, order, data)

    def note(archive: Archive, content: Content, seed: int, kind: str, layer: int, nbytes: int) -> None:
        archive.note(kind, layer, bytes_of(seed, nbytes))
        content.notes[kind, layer] = bytes_of(seed, nbytes).tobytes()

    async def commit(archive: Archive, content: Content, name: str, length: int) -> None:
        content.tokens, content.length = tuple(range(length + 1)), length
        await archive.commit(content.tokens, length)
        now(name, content)

    a, of_a = begin("a"), Content()
    put(a, of_a, 1, 0, 0, 27)
    put(a, of_a, 2, 1, 0, 27)
    note(a, of_a, 3, "labels", 0, 900)
    note(a, of_a, 4, "tail", 1, 100)
    await commit(a, of_a, "a", 54)
    put(a, of_a, 5, 1, 27, 33)
    note(a, of_a, 6, "labels", 0, 950)
    await commit(a, of_a, "a", 66)
    b, of_b = begin("b"), Content()
    put(b, of_b, 7, 0, 3, 9)
    await commit(b, of_b, "b", 12)
    note(a, of_a, 8, "labels", 0, 970)
    note(a, of_a, 9, "tail", 1, 80)
    await commit(a, of_a, "a", 70)
    a.close(keep=True)
    b.close(keep=False)
    now("b", None)
    a, of_a = begin("a"), Content()
    put(a, of_a, 10, 1, 10, 12)
    note(a, of_a, 11, "labels", 1, 40)
    await commit(a, of_a, "a", 20)
    put(a, of_a, 12, 1, 12, 14)
    await a.commit((*of_a.tokens, 99), 20)
    of_a.tokens = (*of_a.tokens, 99)
    now("a", of_a)
    a.close(keep=True)


@dataclass
class Recording:
    """The drive after each command: `moments` are (bytes, made durable, number of the newest durable state)."""

    moments: list[tuple[bytes, bool, int]] = field(default_factory=list)
    states: list[State] = field(default_factory=lambda: [{}])


def record(folder: Path, run_life: Any, before: State | None = None, drive: bytes | None = None) -> Recording:
    """What happens to a drive in an undisturbed life, `run_life(engine, reached)`."""
    made = Recording(states=[before or {}])
    folder.mkdir(exist_ok=True)
    path = folder / "drive"
    if drive is not None:
        path.write_bytes(drive)
    with machine(folder, path) as engine:

        def ended(completion: Completion) -> None:
            durable = isinstance(completion.command, Flush)
            if durable or any(r.memory == DRIVE for r, _ in write_segments(completion.command)):
                made.moments.append((path.read_bytes(), durable, len(made.states) - 1))

        made.moments.append((path.read_bytes(), True, 0))
        engine.platform.site.observers.append(ended)
        run(engine, lambda: run_life(engine, made.states.append))
    made.moments.append((path.read_bytes(), True, len(made.states) - 1))
    return made


@cache
def recording() -> Recording:
    """One undisturbed life from an empty drive on."""
    with TemporaryDirectory() as folder:
        return record(Path(folder), lambda engine, reached: life(engine, reached, []))


def whats_there(folder: Path, raw: bytes) -> State:
    """What a fresh process finds on a drive with these bytes."""
    drive = folder / "drive"
    drive.write_bytes(raw)
    with machine(folder, drive) as engine:
        found = run(engine, lambda: fsck(engine, DRIVE))
        assert all(each.intact for each in found), found
        return {each.name: run(engine, lambda n=each.name: adopted(engine, n)) for each in found}  # type: ignore[misc]


def torn(made: Recording, at: int, seed: int) -> bytes:
    """The drive after a kill at a moment: each sector that is not durable is the old one, the new one or rubbish."""
    base = max(i for i in range(at + 1) if made.moments[i][1])
    old, new_ = made.moments[base][0], made.moments[at][0]
    size = -(-max(len(old), len(new_)) // SECTOR) * SECTOR
    before, after = (np.frombuffer(each.ljust(size, b"\0"), dtype=np.uint8).reshape(-1, SECTOR) for each in (old, new_))
    rng = np.random.default_rng(seed)
    share, rubbish = rng.choice([0.1, 0.5, 0.9]), rng.choice([0.0, 0.0, 0.3])
    chance = rng.random(len(before))
    left = np.where((chance < share)[:, None], after, before)
    bad = (before != after).any(axis=1) & (rng.random(len(before)) < rubbish)
    left[bad] = rng.integers(0, 256, (int(bad.sum()), SECTOR), dtype=np.uint8)
    return left.tobytes()


def check_kill(made: Recording, at: int, seed: int) -> None:
    """After a kill there is the newest durable state, or the one that was on its way."""
    newest = made.moments[at][2]
    with TemporaryDirectory() as folder:
        found = whats_there(Path(folder), torn(made, at, seed))
    assert found in made.states[newest : newest + 2]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_a_kill_at_any_moment_leaves_what_was_committed(data: st.DataObject, seed: int) -> None:
    made = recording()
    open_ends = [at for at, (_, durable, _) in enumerate(made.moments) if not durable]
    check_kill(made, data.draw(st.sampled_from(open_ends)), seed)


@pytest.mark.parametrize("place", [0, 1])
def test_a_second_kill_is_survived_where_the_first_has_damaged_a_copy(tmp_path: Path, place: int) -> None:
    first = recording()
    raw = bytearray(first.moments[-1][0])
    with machine(tmp_path, _written(tmp_path, raw)) as engine:
        region = Catalogue.of(engine, DRIVE).listed["a", "model"]
    for at in (place * 16 * BLOCK, region.offset + place * BLOCK):
        assert raw[at : at + 3] == b"tl-"
        raw[at : at + BLOCK] = bytes(BLOCK)

    async def again(engine: Engine, reached: Any) -> None:
        state = dict(first.states[-1])
        a = await Archive.adopt(engine, DRIVE, "a", "model")
        for turn in range(2):
            a.note("labels", 0, bytes_of(turn, 60))
            await a.commit((turn,), 0)
            state["a"] = Content((turn,), 0, state["a"].entries, {**state["a"].notes, ("labels", 0): NOTE[turn]})
            reached(dict(state))
        b = new(engine, "b")
        await b.commit((), 0)
        reached({**state, "b": Content()})
        a.close(keep=True)
        b.close(keep=True)

    second = record(tmp_path / "second", again, first.states[-1], bytes(raw))
    for at, (_, durable, _) in enumerate(second.moments):
        for seed in range(0 if durable else 4):
            check_kill(second, at, seed)


BLOCK = 4096
NOTE = [bytes_of(turn, 60).tobytes() for turn in range(2)]


def _written(folder: Path, raw: bytes | bytearray) -> Path:
    (folder / "drive").write_bytes(raw)
    return folder / "drive"


def test_every_moment_of_a_life_can_be_the_last() -> None:
    made = recording()
    assert len(made.states) == 8
    seen = set()
    for raw, _, newest in made.moments:
        with TemporaryDirectory() as folder:
            found = whats_there(Path(folder), raw)
        assert found in made.states[newest : newest + 2]
        seen.add(made.states.index(found))
    assert seen == set(range(8)), "each state was there at some moment"


def _spots() -> list[int]:
    """Where the drive holds something, at the end of a life."""
    raw = np.frombuffer(recording().moments[-1][0], dtype=np.uint8)
    return np.flatnonzero(raw).tolist()


def _checked(raw: bytes) -> None:
    """Either the state is there, or every error is one line that names what is damaged."""
    state = recording().states[-1]
    with TemporaryDirectory() as folder:
        drive = Path(folder) / "drive"
        drive.write_bytes(raw)
        with machine(Path(folder), drive) as engine:
            problem, contents = "", {}
            try:
                found = run(engine, lambda: fsck(engine, DRIVE))
                problem = next((each.problem for each in found if not each.intact), "")
                contents = {each.name: run(engine, lambda n=each.name: adopted(engine, n)) for each in found}  # type: ignore[misc]
            except ConfigurationError as error:
                problem = problem or str(error)
            else:
                assert not problem, "what fsck calls damaged is not adopted"
        if problem:
            assert re.match(rf"{DRIVE}: (archive 'a' is damaged|archive 'a'|the list of archives is damaged)", problem)
            assert "\n" not in problem
        else:
            assert contents == state


@settings(max_examples=60, deadline=None)
@given(data=st.data(), bits=st.integers(1, 255))
def test_any_byte_that_changes_is_made_up_for_or_reported(data: st.DataObject, bits: int) -> None:
    raw = bytearray(recording().moments[-1][0])
    raw[data.draw(st.sampled_from(_spots()))] ^= bits
    _checked(bytes(raw))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), length=st.integers(1, 3 * 4096), seed=st.integers(0, 1 << 30))
def test_any_stretch_of_rubbish_is_made_up_for_or_reported(data: st.DataObject, length: int, seed: int) -> None:
    raw = np.frombuffer(recording().moments[-1][0], dtype=np.uint8).copy()
    at = data.draw(st.sampled_from(_spots()))
    raw[at : at + length] = bytes_of(seed, length)[: len(raw) - at]
    _checked(raw.tobytes())


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0.2, 1))
def test_a_drive_that_was_cut_off_is_reported(share: float) -> None:
    raw = recording().moments[-1][0]
    _checked(raw[: int(len(raw) * share)])


@pytest.mark.parametrize("place", [0, 1])
def test_one_damaged_copy_of_a_record_is_made_up_for(tmp_path: Path, place: int) -> None:
    raw = bytearray(recording().moments[-1][0])
    half = 16 * 4096
    raw[half * place : half * place + 64] = bytes(64)
    assert whats_there(tmp_path, bytes(raw)) == recording().states[-1]


def test_entries_are_checked_even_where_the_record_is_whole(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.write_bytes(recording().moments[-1][0])
    with machine(tmp_path, drive) as engine:
        archive = run(engine, lambda: Archive.adopt(engine, DRIVE, "a", "model"))
        at = engine.platform.memory_owner(DRIVE).offset_of(archive.region)  # type: ignore[attr-defined]
        media = archive.media(1, np.array([1]), np.array([11]))
        spot = at + int(media.spans.array[0, 0] + media.offset[0]) + SIZE - 1
        archive.close(keep=True)
    raw = bytearray(drive.read_bytes())
    raw[spot] ^= 16
    drive.write_bytes(raw)
    with machine(tmp_path, drive) as engine:
        with pytest.raises(ConfigurationError, match="archive 'a' is damaged: entries of layer 1, head 1"):
            run(engine, lambda: adopted(engine, "a"))
        (found,) = run(engine, lambda: fsck(engine, DRIVE))
        assert found.intact is False
        assert "entries of layer 1, head 1" in found.problem
        assert (found.tokens, found.length) == (22, 20)
        assert run(engine, lambda: adopted(engine, "a", verify=False)).length == 20


class Breaking:
    """A device's `submit` that raises Gone from the n-th command on."""

    def __init__(self, engine: Engine, left: int) -> None:
        device = cast(Any, engine.platform.memory_owner(DRIVE))
        self._submit = device.submit
        self.left = left
        device.submit = self

    def __call__(self, *arguments: Any, **more: Any) -> Completion:
        self.left -= 1
        if self.left < 0:
            raise Gone(DRIVE, "submit", "unplugged")
        submitted: Completion = self._submit(*arguments, **more)
        return submitted


def test_a_drive_that_fails_at_any_command_keeps_what_was_committed() -> None:
    whole = recording().states
    for left in range(200):
        states: list[State] = [{}]
        opened: list[Archive] = []
        with TemporaryDirectory() as name:
            folder, drive = Path(name), Path(name) / "drive"
            with machine(folder, drive) as engine:
                breaking, failed = Breaking(engine, left), ""
                try:
                    run(engine, lambda e=engine, s=states, o=opened: life(e, s.append, o))  # type: ignore[misc]
                except DeviceError as error:
                    failed = str(error)
                assert ("unplugged" in failed) == (breaking.left < 0)
                breaking.left = 1 << 30
                clock = engine.platform.clock
                clock.wait_until(clock.now() + 100_000_000)  # what was submitted before it broke still ends
                for archive in opened:
                    archive.close(keep=True)
            found = whats_there(folder, drive.read_bytes())
        assert found in whole[len(states) - 1 : len(states) + 1]
        if not failed:
            break
    else:
        pytest.fail("a life has less than 200 commands")
    assert left > 50


def test_a_failed_write_makes_every_later_commit_fail(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        archive, content = new(engine), Content((1,), 1)
        order = order_of(0, 0, 4)
        archive.put(0, order, bytes_of(0, *order.shape, SIZE))
        content.lay(0, order, bytes_of(0, *order.shape, SIZE))
        run(engine, lambda: archive.commit([1], 1))
        firmware: Any = engine.platform.memory_owner(DRIVE).firmware  # type: ignore[attr-defined]
        source = engine.scratch(engine.host, 2 * archive.stride(4))
        bad = engine.scratch(DRIVE, 4096)
        where = engine.platform.memory_owner(DRIVE).offset_of(bad)  # type: ignore[attr-defined]
        firmware.inject(where // 4096)
        read = engine.read(bad.all(), np.zeros(4096, dtype=np.uint8))
        archive.take(1, order_of(1, 0, 4), source.all(), [read])
        for _ in range(2):
            with pytest.raises(Cancelled, match="cannot be corrected"):
                run(engine, lambda: archive.commit([1, 2], 2))
        with pytest.raises(MediaError):
            read.result()
        archive.close(keep=True)
        assert run(engine, lambda: adopted(engine)) == content, "the commit before is as it was"


def test_a_commit_that_failed_can_be_repeated_by_a_new_archive(tmp_path: Path) -> None:
    with machine(tmp_path, tmp_path / "drive") as engine:
        archive = new(engine)
        breaking = Breaking(engine, 3)
        with pytest.raises(Gone):
            run(engine, lambda: archive.commit([1], 1))
        breaking.left = 1 << 30
        archive.close(keep=True)
        again = new(engine)
        run(engine, lambda: again.commit([1], 1))
        again.close(keep=True)
        assert run(engine, lambda: adopted(engine)) == Content((1,), 1)
