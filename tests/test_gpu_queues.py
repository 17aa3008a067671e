"""Queues of a device that orders commands by itself: begun before what they come after has ended; ends in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.commands import Read, Traffic
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Cancelled, DeviceError, MediaError
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site


class Ordered:
    """Hands over what `hands_over` says, as soon as it is begun; ends only what it is told to."""

    def __init__(self, site: Site, name: str = "d", hands_over: bool = True) -> None:
        self.queues = QueueSet(name, 3, 16, site, self._start)
        self.region = Region(name, name, 1, 64)
        self.hands_over = hands_over
        self.begun: list[Completion] = []

    def submit(self, queue: int = 0, *after: Completion) -> Completion:
        command = Read(self.region.all(), np.zeros(64, dtype=np.uint8))
        return self.queues.submit(command, queue, after, Traffic(command))

    def end(self, completion: Completion, error: DeviceError | None = None) -> None:
        self.queues.finish(completion, error)

    def _start(self, completion: Completion) -> None:
        self.begun.append(completion)
        if self.hands_over:
            self.queues.handed(completion)


def test_what_comes_after_a_command_that_was_handed_over_is_begun_on_the_same_device_only() -> None:
    site = Site()
    one, other = Ordered(site), Ordered(site, "e")
    first = one.submit(0)
    second, third, far = one.submit(0), one.submit(1, first), other.submit(0, first)
    assert one.begun == [first, second, third]
    assert other.begun == []
    one.end(first)
    assert other.begun == [far]
    assert not second.done


def test_what_is_not_handed_over_holds_its_followers() -> None:
    device = Ordered(Site(), hands_over=False)
    first = device.submit(0)
    second, third = device.submit(0), device.submit(1, first)
    assert device.begun == [first]
    device.queues.handed(first)
    assert device.begun == [first, third, second]


def test_a_command_behind_one_that_is_not_handed_over_waits_for_its_turn() -> None:
    device = Ordered(Site())
    first = device.submit(0)
    device.hands_over = False
    second, third = device.submit(0), device.submit(0)
    assert device.begun == [first, second]
    device.end(first)
    assert device.begun == [first, second]
    device.end(second)
    assert device.begun == [first, second, third]


def test_what_is_to_be_cancelled_is_cancelled_in_its_turn() -> None:
    site = Site()
    device, other = Ordered(site), Ordered(site, "e", hands_over=False)
    failing = other.submit(0)
    first, doomed = device.submit(0), device.submit(0, failing)
    last = device.submit(0)
    other.end(failing, MediaError("e", "read", "worn out"))
    assert not doomed.done, "ends are in order"
    assert device.begun == [first]
    device.end(first)
    assert isinstance(doomed.error, Cancelled)
    assert device.begun == [first, last]


@given(st.data())
def test_whatever_is_handed_over_everything_is_begun_once_in_order_and_ends(data: st.DataObject) -> None:
    site = Site()
    device = Ordered(site)
    made: list[Completion] = []
    for _ in range(data.draw(st.integers(1, 12))):
        hands_over: bool = data.draw(st.booleans())
        device.hands_over = hands_over
        ends_one: bool = data.draw(st.booleans())
        if ends_one:
            open_heads = [c for c in device.begun if not c.done and _is_head(made, c)]
            if open_heads:
                device.end(data.draw(st.sampled_from(open_heads)))
        after: list[Completion] = data.draw(st.lists(st.sampled_from(made), max_size=2)) if made else []
        made.append(device.submit(data.draw(st.integers(0, 2)), *after))
    at_last: bool = data.draw(st.booleans())
    device.hands_over = at_last
    while not all(c.done for c in made):
        device.end(next(c for c in device.begun if not c.done and _is_head(made, c)))
    assert sorted(map(id, device.begun)) == sorted(map(id, made)), "each is begun once"
    for queue in range(3):
        assert [c for c in device.begun if c.queue == queue] == [c for c in made if c.queue == queue]


def _is_head(made: list[Completion], completion: Completion) -> bool:
    """Nothing before it in its queue is still open."""
    return next(c for c in made if c.queue == completion.queue and not c.done) is completion
