"""Wrappers: devices around other devices, real ones too, that slow down, record, check or repeat commands."""

from tierloop.devices.wrappers.around import Around, wrapped
from tierloop.devices.wrappers.checked import Checked
from tierloop.devices.wrappers.delayed import Delayed, Latency
from tierloop.devices.wrappers.entries import Recording
from tierloop.devices.wrappers.faulty import Faulty
from tierloop.devices.wrappers.reading import read_recording
from tierloop.devices.wrappers.recorded import Recorded
from tierloop.devices.wrappers.retried import Retried
from tierloop.devices.wrappers.throttled import Throttled

__all__ = [
    "Around",
    "Checked",
    "Delayed",
    "Faulty",
    "Latency",
    "Recorded",
    "Recording",
    "Retried",
    "Throttled",
    "read_recording",
    "wrapped",
]
