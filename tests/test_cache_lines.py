"""Cache lines are written back and dropped without a byte changing, and never outside their array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.drivers import cache_lines
from tierloop.devices.spans import Spans

pytestmark = pytest.mark.skipif(not cache_lines.known(), reason="no instruction is known on this processor")
NBYTES = 4096


@given(st.lists(st.tuples(st.integers(0, NBYTES), st.integers(0, 300)), max_size=8), st.booleans())
def test_no_byte_changes(pairs: list[tuple[int, int]], dropping: bool) -> None:
    array = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    before = array.copy()
    spans = Spans([(offset, min(nbytes, NBYTES - offset)) for offset, nbytes in pairs])
    (cache_lines.drop if dropping else cache_lines.write_back)(array, spans)
    assert np.array_equal(array, before)


@pytest.mark.parametrize("call", [cache_lines.write_back, cache_lines.drop])
def test_spans_outside_the_array_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="outside an array of 4096 bytes"):
        call(np.zeros(NBYTES, dtype=np.uint8), Spans([(0, 8), (NBYTES, 1)]))


def test_what_was_stored_is_read_after_it_was_dropped() -> None:
    array = np.zeros(NBYTES, dtype=np.uint8)
    for value in range(1, 50):
        array[:] = value
        cache_lines.drop(array, Spans([(0, NBYTES)]))
        assert (array == value).all()
