"""The conformance suite: what every device must do, as checks that a vendor runs on its own device.

`Suite` for pytest, `run` for everything else; docs/conformance.md shows both. Levels: identity (what the device says of
itself), memory, ordering (and asynchrony), errors, compute (against float64), stateful (any sequence against a dict).
"""

from tierloop.devices.conformance.report import Report, Result
from tierloop.devices.conformance.runner import LEVELS, run
from tierloop.devices.conformance.subject import Failure, Opener, Skip
from tierloop.devices.conformance.suite import Suite

__all__ = ["LEVELS", "Failure", "Opener", "Report", "Result", "Skip", "Suite", "run"]
