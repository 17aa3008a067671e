"""The phantom decode step: what it runs, that it obeys bounds, and what it refuses."""

from __future__ import annotations

from collections import Counter

import pytest

from tierloop.devices.commands import verb
from tierloop.devices.completion import Completion
from tierloop.devices.errors import ConfigurationError, OutOfMemory
from tierloop.devices.spans import Spans
from tierloop.emulators.store import Store
from tierloop.tools.phantom_decode import DecodeShape, open_phantom

SMALL = DecodeShape(num_layers=2, batch=3, context=8192)


def test_every_layer_attends_on_every_pnm_and_nothing_is_left_out_of_order() -> None:
    counts: Counter[tuple[str, str]] = Counter()

    def count(completion: Completion) -> None:
        counts[completion.device, verb(completion.command)] += 1

    with open_phantom(SMALL, check_hazards=True) as scenario:
        scenario.platform.site.observers.append(count)
        _, commands = scenario.run()
    assert commands == sum(counts.values()) == 2 * (3 + 3 * 4) + 1
    assert all(counts[f"emu:pnm{i}", "attend"] == 2 for i in range(4))
    assert counts["emu:gpu", "merge"] == 2
    assert counts["emu:gpu", "dense"] == 2 * 2 + 1


def test_all_rows_of_all_heads_are_read_once() -> None:
    read: Counter[str] = Counter()

    def count(completion: Completion) -> None:
        if verb(completion.command) == "attend":
            read.update(completion.traffic.read)

    with open_phantom(SMALL) as scenario:
        scenario.platform.site.observers.append(count)
        scenario.run()
    queries = SMALL.num_layers * SMALL.batch * SMALL.num_q_heads * SMALL.head_dim * 4
    rows = SMALL.num_layers * SMALL.batch * SMALL.num_kv_heads * SMALL.context * 2 * SMALL.head_dim * 2
    assert sum(read.values()) == rows + queries
    assert len(set(read.values())) == 1


def test_no_step_is_faster_than_its_bytes_and_steps_do_not_drift() -> None:
    with open_phantom(SMALL) as scenario:
        steps = [scenario.run()[0] for _ in range(3)]
        weights = 2 * SMALL.num_layers * (SMALL.qkv_weights + SMALL.finish_weights)
        pnm = 2 * SMALL.num_layers * SMALL.batch * 2 * SMALL.context * SMALL.head_dim * 2
    least_ns = weights * 10**9 // 3_350_000_000_000 + pnm * 10**9 // 204_800_000_000
    assert len(set(steps)) == 1
    assert least_ns < steps[0] < 3 * least_ns


def test_heads_that_do_not_divide_by_the_devices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="6 KV heads do not divide by 4"):
        open_phantom(DecodeShape(num_kv_heads=6, num_q_heads=12))


def test_a_cache_that_the_devices_cannot_hold_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="emu:pnm0"):
        open_phantom(DecodeShape(context=1 << 22))


def test_spans_that_are_named_again_lie_where_their_region_lies() -> None:
    store = Store("emu:m", 1 << 20, 1, addressed=True)
    first, second = store.alloc(4096, phantom=True), store.alloc(4096, phantom=True)
    spans, others = Spans([(0, 64), (100, 3)]), [Spans.one(i, 1) for i in range(20)]
    for region, address in ((first, 0), (second, 4096), (first, 0), (second, 4096)):
        assert store.ranges(region, spans).tolist() == [[address, 64], [address + 100, 3]]
        for number, other in enumerate(others):
            assert store.ranges(region, other).tolist() == [[address + number, 1]]
    store.free(first)
    again = store.alloc(8192, phantom=True)
    assert store.ranges(again, spans).tolist()[0] == [store.address(again), 64]
    with pytest.raises(KeyError):
        store.ranges(first, spans)
