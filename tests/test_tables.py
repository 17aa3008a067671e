"""Where in a TOML text a key stands."""

from __future__ import annotations

import pytest

from tierloop.devices.tables import line_of

TEXT = """kind = "x"
[memory]
# latency_ns = 3
latency_ns = { value = 1, source = "s" }
"read" . rate = 2

[[memory.curves]]
points = [
  [1, 2],
]
[[ memory.curves ]]
points = []
[executors.cores]
weights = [1]
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("kind", 1),
        ("memory", 2),
        ("memory.latency_ns", 4),
        ("memory.latency_ns.value", 4),
        ("memory.read.rate", 5),
        ("memory.curves[0]", 7),
        ("memory.curves[0].points", 8),
        ("memory.curves[1].points", 12),
        ("memory.curves[1].colour", 11),
        ("executors.cores.weights", 14),
        ("executors.cores.missing", 13),
        ("nothing.there", 0),
    ],
)
def test_a_key_or_its_nearest_table_is_found(key: str, line: int) -> None:
    assert line_of(TEXT, key) == line
