"""The conformance suite: what every device must do, as checks that a vendor runs on its own device.

`Suite` for pytest, `run` for everything else; docs/conformance.md shows both. Levels: identity (what the device says of
itself), memory, ordering (and asynchrony), errors, compute (against float64), envelope (declared against measured),
stateful (any sequence against a dict), faults (hardware that fails).
"""

from tierloop.devices.conformance.report import Comparison, Report, Result
from tierloop.devices.conformance.runner import LEVELS, NUMBERS, named, run
from tierloop.devices.conformance.subject import Failure, Opener, Skip
from tierloop.devices.conformance.suite import Suite
from tierloop.devices.faulty_host import FaultyHost, offer

__all__ = [
    "LEVELS",
    "NUMBERS",
    "Comparison",
    "Failure",
    "FaultyHost",
    "Opener",
    "Report",
    "Result",
    "Skip",
    "Suite",
    "named",
    "offer",
    "run",
]
