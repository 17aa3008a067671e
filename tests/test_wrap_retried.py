"""Retried: what failed in passing is carried out once more, seen once; what must not be repeated is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.machines import write_machine
from tests.wrapping import FAR, Layer, ended, every_command, failed, filled, reference, site, stored
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Copy, Flush, Launch, Read, Write, verb
from tierloop.devices.completion import Completion
from tierloop.devices.conformance import LEVELS, run
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.drivers.reference import open_reference
from tierloop.devices.errors import (
    Busy,
    Cancelled,
    ConfigurationError,
    DeviceError,
    Gone,
    MediaError,
    Misaligned,
    NoPermission,
    OutOfMemory,
    OutOfRange,
    ProtocolError,
    Timeout,
    Unsupported,
)
from tierloop.devices.hazards import HazardError
from tierloop.devices.kernels.contract import Dense, Gather
from tierloop.devices.platform import Platform
from tierloop.devices.regions import Segment
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes
from tierloop.devices.wrappers import (
    Around,
    Checked,
    Faulty,
    Recorded,
    Retried,
    Throttled,
    read_recording,
    wrapped,
)
from tierloop.devices.wrappers.around import Held
from tierloop.devices.wrappers.entries import Ended
from tierloop.runtime.ledger import Ledger

Errors = Sequence[type[DeviceError]]
OPTIONS = {"attempts": 3, "backoff_ns": 100}


class Failing(Around):
    """Carries every command out, and then says that it failed, with one error after the other as long as there are."""

    def __init__(self, device: Device, on: Site, errors: Errors, refusals: Errors = ()) -> None:
        super().__init__(device, on)
        self.errors = list(errors)
        self.refusals = list(refusals)
        self.carried_out: list[Command] = []

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        if self.refusals:
            raise self.refusals.pop(0)(self.info.name, verb(command), "on purpose")
        return super().submit(command, queue, after)

    def _settle(self, held: Held) -> None:
        completion = held.completion
        assert completion is not None
        self.carried_out.append(completion.command)
        if not self.errors:
            self._finish(held)
            return
        error = self.errors.pop(0)(self._name, verb(completion.command), "on purpose", 5)
        error.__cause__ = OSError(5, "worn out")
        self._queues.finish(completion, error)


def retried(on: Site, inside: Layer, duration_ns: int = 10, **options: int) -> tuple[Retried, Around]:
    """The reference device, inside something that fails, inside a Retried."""
    device = reference(on, [inside, lambda device, on: Retried(device, on, **{**OPTIONS, **options})], duration_ns)
    assert isinstance(device, Retried)
    assert isinstance(device.inner, Around)
    return device, device.inner


def failing(on: Site, errors: Errors = (), refusals: Errors = (), **options: int) -> tuple[Retried, Failing]:
    device, inner = retried(on, lambda device, inside: Failing(device, inside, [], []), **options)
    assert isinstance(inner, Failing)
    assert device.info
    inner.errors, inner.refusals = list(errors), list(refusals)
    return device, inner


def source(on: Site, device: Device, inner: Failing, nbytes: int = 64) -> Segment:
    """A filled region; what was told to fail has not yet."""
    errors, inner.errors = inner.errors, []
    refusals, inner.refusals = inner.refusals, []
    region = filled(on.clock, device, nbytes)
    inner.errors, inner.refusals, inner.carried_out = errors, refusals, []
    return region.all()


def room(nbytes: int = 64) -> NDArray[np.uint8]:
    return np.zeros(nbytes, dtype=np.uint8)


# -- seen once, and later ---------------------------------------------------------------------------------------------


def test_a_command_that_failed_twice_ends_well_once_and_the_pauses_double() -> None:
    on = site()
    device, inner = failing(on, [MediaError, MediaError])
    segment, into, begun = source(on, device, inner), room(), on.clock.now()
    seen: list[Completion] = []
    on.observers.append(seen.append)
    reading = device.submit(Read(segment, into))
    assert ended(on.clock, reading) == [begun + 10 + 100 + 10 + 200 + 10]
    assert seen == [reading]
    assert reading.started_ns == begun
    assert into.all()
    assert (reading.retries, device.retries, device.recovered) == (2, 2, 1)


def test_pauses_are_bounded() -> None:
    on = site()
    device, inner = failing(on, [MediaError] * 5, attempts=5, backoff_ns=100, max_backoff_ns=250)
    segment, begun = source(on, device, inner), on.clock.now()
    assert ended(on.clock, device.submit(Read(segment, room()))) == [begun + 6 * 10 + 100 + 200 + 3 * 250]


def test_pauses_may_be_nothing() -> None:
    on = site()
    device, inner = failing(on, [MediaError] * 100, attempts=100, backoff_ns=0)
    segment, begun = source(on, device, inner), on.clock.now()
    assert ended(on.clock, device.submit(Read(segment, room()))) == [begun + 101 * 10]


def test_what_stands_behind_it_and_what_comes_after_it_wait_and_nobody_else_does() -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    a, b = source(on, device, inner), source(on, device, inner)
    inner.errors, begun = [MediaError], on.clock.now()
    failing_once = device.submit(Copy(a, b), 0)
    behind = device.submit(Read(a, room()), 0)
    after = device.submit(Read(b, into := room()), 1, [failing_once])
    beside = device.submit(Read(a, room()), 2)
    assert ended(on.clock, failing_once, behind, after, beside) == [begun + t for t in (120, 130, 130, 10)]
    assert into.tolist() == stored(on, a.region).tolist()


def test_if_no_try_goes_through_the_last_error_stands_with_their_number_and_the_device_works_on() -> None:
    on = site()
    device, inner = failing(on, [MediaError, Timeout, Busy, MediaError], attempts=3)
    segment = source(on, device, inner)
    reading = device.submit(Read(segment, room()))
    after = device.submit(Read(segment, room()), 1, [reading])
    error = failed(on.clock, reading)
    assert isinstance(error, MediaError)
    assert str(error) == "emu:reference: read: on purpose; tried 4 times"
    assert error.errno == 5
    assert isinstance(error.__cause__, OSError)
    assert isinstance(failed(on.clock, after), Cancelled)
    assert (reading.retries, device.retries, device.recovered) == (3, 3, 0)
    assert len(inner.carried_out) == 4
    ended(on.clock, device.submit(Read(segment, room())))
    device.close()


def test_a_region_is_busy_while_its_command_waits_for_the_next_try() -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    segment = source(on, device, inner)
    reading = device.submit(Read(segment, room()))
    on.clock.wait_until(on.clock.now() + 50)
    assert not reading.done
    with pytest.raises(Busy):
        device.free(segment.region)
    ended(on.clock, reading)
    device.free(segment.region)


def test_a_device_that_is_closed_in_a_pause_begins_nothing_again() -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    segment = source(on, device, inner)
    reading = device.submit(Read(segment, into := room()))
    on.clock.wait_until(on.clock.now() + 50)
    into[:] = 0
    device.close()
    assert isinstance(reading.error, Gone)
    on.clock.wait_until(on.clock.now() + 10_000)
    assert not into.any()
    assert len(inner.carried_out) == 1


def test_the_hazard_checker_sees_a_command_until_its_last_try_has_ended() -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    segment = source(on, device, inner)
    writing = device.submit(Write(segment, room()), 0)
    on.clock.wait_until(on.clock.now() + 50)
    with pytest.raises(HazardError):
        device.submit(Read(segment, room()), 1)
    ended(on.clock, writing, device.submit(Read(segment, room()), 1, [writing]))


def test_without_failures_it_takes_no_time() -> None:
    on = site()
    device, inner = failing(on)
    segment, begun = source(on, device, inner), on.clock.now()
    reading = device.submit(Read(segment, room()))
    assert ended(on.clock, reading) == [begun + 10]
    assert reading.retries == 0


# -- what is repeated, and what is not --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MediaError, Busy, Timeout])
def test_what_passes_is_tried_again(kind: type[DeviceError]) -> None:
    on = site()
    device, inner = failing(on, [kind])
    ended(on.clock, device.submit(Read(source(on, device, inner), room())))
    assert device.recovered == 1


@pytest.mark.parametrize(
    "kind",
    [Gone, Unsupported, OutOfRange, Misaligned, ProtocolError, Cancelled, OutOfMemory, NoPermission, DeviceError],
)
def test_what_does_not_pass_is_not_tried_again(kind: type[DeviceError]) -> None:
    on = site()
    device, inner = failing(on, [kind])
    error = failed(on.clock, device.submit(Read(source(on, device, inner), room())))
    assert type(error) is kind
    assert str(error) == "emu:reference: read: on purpose"
    assert len(inner.carried_out) == 1
    assert device.retries == 0


def test_a_command_that_hangs_ends_with_its_timeout_because_the_device_is_gone() -> None:
    on = site()
    device, inner = retried(on, lambda device, inside: Faulty(device, inside, deadline_ns=5_000))
    assert isinstance(inner, Faulty)
    region = device.alloc(64)
    inner.hang()
    hanging = device.submit(Read(region.all(), room()))
    assert isinstance(failed(on.clock, hanging), Timeout)
    assert hanging.ended_ns == 5_000 + 100
    assert isinstance(failed(on.clock, device.submit(Read(region.all(), room()))), Gone)
    device.close()


def test_every_command_and_kernel_that_was_carried_out_and_failed_gives_the_same_once_more() -> None:
    told: list[object] = []
    for errors in ([], [MediaError, MediaError]):
        on = site()
        device, inner = failing(on)
        for name, command in every_command(on.clock, device).items():
            inner.errors = [] if name in ("flush", "dense") else list(errors)
            completion = device.submit(command)
            ended(on.clock, completion)
            assert (completion.retries, inner.errors) == (0 if name in ("flush", "dense") else len(errors), [])
            told.append((name, completion.flops, completion.traffic.read, completion.traffic.written))
            if isinstance(command, Launch):
                told += [read_bytes(on.clock, device, s).tobytes() for operand in command.writes for s in operand]
    assert told[: len(told) // 2] == told[len(told) // 2 :]


def test_a_flush_is_not_repeated() -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    assert isinstance(failed(on.clock, device.submit(Flush(source(on, device, inner)))), MediaError)
    assert len(inner.carried_out) == 1


def dense(segment: Segment, target: Segment, calls: list[int]) -> Launch:
    """A launch whose function counts its calls, and does not do the same twice."""

    def function(reads: list[NDArray[np.uint8]], writes: list[NDArray[np.uint8]]) -> None:
        calls.append(len(calls))
        writes[0][:] = reads[0] + len(calls)

    return Launch(Dense("counting", 1, 0, 0, function), ((segment,),), ((target,),))


def test_a_dense_launch_whose_function_was_called_is_not_repeated() -> None:
    on, calls = site(), list[int]()
    device, inner = failing(on, [MediaError])
    error = failed(on.clock, device.submit(dense(source(on, device, inner), device.alloc(64).all(), calls)))
    assert isinstance(error, MediaError)
    assert calls == [0]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_dense_launch_that_failed_before_its_function_was_called_is_repeated_and_calls_it_once(
    in_place: bool,
) -> None:
    on, calls = site(), list[int]()
    device, _ = retried(on, lambda device, inside: Faulty(device, inside, read_per_million=1_000_000))
    a = filled(on.clock, device, 64)
    b, before = a if in_place else device.alloc(64), stored(on, a).copy()
    completion = device.submit(launch := dense(a.all(), b.all(), calls))
    ended(on.clock, completion)
    assert completion.retries > 0
    assert calls == [0]
    assert completion.command is launch
    assert read_bytes(on.clock, device, b.all()).tolist() == (before + 1).tolist()


def in_place(segment: Segment) -> list[Command]:
    """Commands that read what they write."""
    region = segment.region
    return [
        Copy(region.at(0, 32), region.at(16, 32)),
        Copy(Segment(region, Spans([(0, 4), (40, 4)])), Segment(region, Spans([(43, 4), (10, 4)]))),
        Launch(Gather(), ((region.at(0, 8), region.at(8, 8)),), ((region.at(15, 16),),)),
    ]


@pytest.mark.parametrize("which", range(3))
def test_what_reads_what_it_writes_is_not_repeated(which: int) -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    segment = source(on, device, inner)
    assert isinstance(failed(on.clock, device.submit(in_place(segment)[which])), MediaError)
    assert len(inner.carried_out) == 1


@pytest.mark.parametrize("which", range(3))
def test_what_was_not_even_taken_is_handed_in_again_whatever_it_is(which: int) -> None:
    on = site()
    device, inner = failing(on, [], [Busy, Busy])
    segment, begun = source(on, device, inner), on.clock.now()
    assert ended(on.clock, device.submit(in_place(segment)[which])) == [begun + 100 + 200 + 10]
    assert len(inner.carried_out) == 1


def test_spans_of_one_region_that_lie_between_each_other_are_repeated() -> None:
    on = site()
    device, inner = failing(on, [MediaError])
    region = source(on, device, inner).region
    even, odd = (Segment(region, Spans([(i, 2) for i in range(first, 64, 4)])) for first in (0, 2))
    copying = device.submit(Copy(even, odd))
    ended(on.clock, copying)
    assert copying.retries == 1
    got = stored(on, region).reshape(-1, 2, 2)
    assert (got[:, 0] == got[:, 1]).all()


@pytest.mark.parametrize("reads", [True, False])
def test_a_host_buffer_in_the_regions_own_memory_is_not_repeated(reads: bool) -> None:
    on = Site(clock=WallClock())
    device = wrapped(
        on,
        lambda inside: open_cpu("cpu", inside, {"capacity": 1 << 20, "threads": 1}),
        [lambda device, inside: Failing(device, inside, [MediaError]), lambda device, on: Retried(device, on)],
    )
    assert isinstance(device, Retried)
    region = device.alloc(64)
    assert region.view is not None
    command = Read(region.at(0, 8), region.view[4:12]) if reads else Write(region.at(0, 8), region.view[4:12])
    assert isinstance(failed(on.clock, device.submit(command)), MediaError)
    assert device.retries == 0
    device.close()


def test_a_recording_inside_that_lost_a_line_is_not_hidden(tmp_path: Path) -> None:
    on = site()
    device, inner = retried(on, lambda device, inside: Recorded(device, inside, tmp_path / "a.jsonl"))
    assert isinstance(inner, Recorded)
    region = device.alloc(64)
    inner._lost = MediaError("emu:reference", "record", "the disk is full")
    error = failed(on.clock, device.submit(Read(region.all(), room())))
    assert isinstance(error, MediaError)
    assert "the disk is full" in str(error)
    assert device.retries == 0
    device.close()


# -- among other wrappers ---------------------------------------------------------------------------------------------


def faulty(rate: int = 200_000, seed: int = 1) -> Layer:
    return lambda device, on: Faulty(device, on, rate, rate, seed)


def test_a_recording_inside_has_every_try_and_one_outside_has_the_command_once(tmp_path: Path) -> None:
    on = site()
    layers: list[Layer] = [
        lambda device, inside: Failing(device, inside, [MediaError]),
        lambda device, inside: Recorded(device, inside, tmp_path / "inside.jsonl"),
        lambda device, inside: Retried(device, inside, attempts=2, backoff_ns=100),
        lambda device, outside: Recorded(device, outside, tmp_path / "outside.jsonl"),
    ]
    device = reference(on, layers)
    region = device.alloc(64)
    first = device.submit(Write(region.all(), room()))
    ended(on.clock, first, device.submit(Read(region.all(), room()), 1, [first]))
    device.close()
    inside, outside = (
        [(e.verb, e.status, e.after) for e in read_recording(tmp_path / name).in_order() if isinstance(e, Ended)]
        for name in ("inside.jsonl", "outside.jsonl")
    )
    assert inside == [("write", "media", ()), ("write", "ok", ()), ("read", "ok", (2,))]
    assert outside == [("write", "ok", ()), ("read", "ok", (1,))]


@pytest.mark.parametrize("around", [True, False])
def test_checked_finds_no_damage_where_writes_were_carried_out_twice(around: bool) -> None:
    on = site()
    layers: list[Layer] = [
        lambda device, inside: Checked(device, inside, 256),
        lambda device, inside: Retried(device, inside, attempts=9, backoff_ns=100),
    ]
    device = reference(on, [faulty(), *(layers[::-1] if around else layers)])
    region, expected = device.alloc(4096), np.zeros(4096, dtype=np.uint8)
    random, retries = np.random.default_rng(2), 0
    for _ in range(60):
        offset, nbytes = int(random.integers(0, 3000)), int(random.integers(1, 1000))
        data = random.integers(0, 256, nbytes, dtype=np.uint8)
        expected[offset : offset + nbytes] = data
        for command in (Write(region.at(offset, nbytes), data), Read(region.all(), into := room(4096))):
            completion = device.submit(command)
            ended(on.clock, completion)
            retries += completion.retries
        assert into.tolist() == expected.tolist()
    assert retries > 20, "what Checked reads counts as well"


def test_a_share_of_throttled_is_paid_once_outside_and_by_every_try_inside() -> None:
    ends = []
    for outside in (True, False):
        on = site()
        layers: list[Layer] = [
            lambda device, inside: Retried(device, inside, attempts=1, backoff_ns=100),
            lambda device, inside: Throttled(device, inside, 1_000_000_000),
        ]
        device = reference(
            on, [lambda device, inside: Failing(device, inside, [MediaError]), *(layers if outside else layers[::-1])]
        )
        region = device.alloc(1000)
        completion = device.submit(Read(region.all(), room(1000)))
        ends += ended(on.clock, completion)
        assert completion.retries == 1
    assert ends == [999 + 1 + 100 + 1, 1000 + 100 + 1000]


@pytest.mark.parametrize("layers", [[faulty()], [faulty(), lambda device, on: Checked(device, on, 256)]])
def test_no_command_takes_longer_than_its_estimate_says(layers: list[Layer]) -> None:
    on = site()
    device = reference(on, [*layers, lambda device, on: Retried(device, on, attempts=4, backoff_ns=100)], 10)
    region, late = device.alloc(64), 0
    for _ in range(200):
        command = Read(region.all(), room())
        told, begun = device.estimate(command), on.clock.now()
        took = ended(on.clock, device.submit(command))[0] - begun
        assert abs(took - told.duration_ns) <= told.margin_ns
        late += took > told.duration_ns
    assert 10 < late < 150


def test_the_ledger_counts_a_command_and_its_bytes_once_and_says_how_often_it_was_tried_again() -> None:
    on = site()
    device, inner = failing(on, [])
    platform = Platform("by hand", on, {"emu:reference": device}, "emu:reference")
    segment = source(on, device, inner)
    ledger = Ledger(platform)
    on.observers.append(ledger)
    inner.errors = [MediaError, MediaError]
    ended(on.clock, device.submit(Read(segment, room())))
    inner.errors = [MediaError] * 4
    assert failed(on.clock, device.submit(Read(segment, room())))
    use = ledger.snapshot()[0]["emu:reference"]
    assert (use.bytes_read, use.commands, use.retries, use.recovered) == (64, 2, 5, 1)
    assert use.busy_ns <= ledger.elapsed_ns
    ledger.reset()
    assert ledger.snapshot()[0]["emu:reference"].retries == 0


def test_the_same_seed_tells_the_same_story() -> None:
    def story(seed: int) -> list[tuple[int, int]]:
        on = site()
        device, _ = retried(on, faulty(seed=seed))
        region = device.alloc(640)
        made = [device.submit(Read(region.at(10 * i, 10), room(10)), i % 4) for i in range(64)]
        assert on.clock.run_until(lambda: all(c.done for c in made), FAR)
        return [(c.ended_ns, c.retries) for c in made]

    assert story(1) == story(1) != story(2)


# -- the conformance suite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_device_that_fails_in_one_of_five_commands_passes_the_suite(level: str) -> None:
    made: list[Retried] = []

    def again(device: Device, on: Site) -> Retried:
        made.append(Retried(device, on, attempts=12, backoff_ns=100))
        return made[-1]

    def opened(on: Site) -> Device:
        device = wrapped(
            on, lambda inside: open_reference("emu:memory", inside, {"capacity": 1 << 22}), [faulty(), again]
        )
        assert device.info  # the back door is offered when the device is first looked at
        return device

    report = run(opened, [level], virtual=True, examples=6)
    assert report.passed, str(report)
    assert level in ("identity", "faults") or sum(device.recovered for device in made) > 0, "nothing was recovered"


def test_the_cpu_that_fails_in_one_of_five_commands_passes_the_suite_on_the_wall_clock() -> None:
    made: list[Retried] = []

    def opened(on: Site) -> Device:
        def again(device: Device, on: Site) -> Retried:
            made.append(Retried(device, on, attempts=12, backoff_ns=1_000, max_backoff_ns=1_000))
            return made[-1]

        options = {"capacity": 64 << 20, "threads": 1}
        return wrapped(on, lambda inside: open_cpu("cpu", inside, options), [faulty(), again])

    report = run(opened, ["memory", "ordering", "errors"], examples=4)
    assert report.passed, str(report)
    assert sum(device.recovered for device in made) > 0


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "attempts 0; allowed: a whole number from 1 to 100"),
        ({"attempts": True}, "attempts True"),
        ({"attempts": 101}, "attempts 101"),
        ({"backoff_ns": -1}, "backoff_ns -1; allowed: a whole number from 0 to"),
        ({"max_backoff_ns": 10**11}, "max_backoff_ns 1"),
        ({"backoff_ns": 10, "max_backoff_ns": 9}, "max_backoff_ns 9 is below backoff_ns 10"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        reference(site(), [lambda device, on: Retried(device, on, **options)])


def test_the_longest_pause_that_is_allowed_needs_no_other_option() -> None:
    on = site()
    device, inner = failing(on, [MediaError, MediaError], backoff_ns=10**10)
    segment, begun = source(on, device, inner), on.clock.now()
    assert ended(on.clock, device.submit(Read(segment, room()))) == [begun + 2 * 10**10 + 30]


def machine(folder: Path, wrap: str) -> Path:
    path = write_machine(folder, ["dram"])
    text = path.read_text().partition("\n[links.pcie]")[0].replace('reaches.cxl = ["cxl"]', "")
    path.write_text(f"{text}wrap = {wrap}\n")
    return path


def test_a_platform_file_has_it_and_pauses_are_multiplied_by_the_dilation(tmp_path: Path) -> None:
    wrap = (
        '[{ kind = "faulty", read_per_million = 1_000_000 }, '
        '{ kind = "retried", attempts = 1, backoff_ns = 10_000, max_backoff_ns = 20_000 }]'
    )
    with open_platform(machine(tmp_path, wrap), clock="wall", dilation=100) as platform:
        device = platform.device("emu:dram")
        completion = device.submit(Read(device.alloc(8).all(), room(8)))
        ended(platform.clock, completion)
        assert completion.retries == 1
        assert completion.ended_ns - completion.started_ns >= 10_000 * 100
        assert any("retried (attempts 1" in note for note in platform.notes)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        ('[{ kind = "retried", attempts = 0 }]', r"wrap\[0\].attempts: 0 given; allowed: 1 to 100"),
        ('[{ kind = "retried", tries = 3 }]', r"wrap\[0\].tries: unknown key"),
        ('[{ kind = "retried", backoff_ns = 9, max_backoff_ns = 8 }]', "max_backoff_ns 8 is below"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, wrap: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_platform(machine(tmp_path, wrap))
