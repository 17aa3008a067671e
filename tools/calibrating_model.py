"""The timing model under the benchmark: what a profile with given constants would measure, on the virtual clock.

The fit asks this and nothing else, so what it leaves over is the error of the emulator's model, not of a formula that
was written down beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tierloop.devices.device import Device
from tierloop.devices.errors import Unsupported
from tierloop.devices.registry import ClockKind, open_platform
from tierloop.tools.calibrating_profile import Curve, Shape, profile_text
from tierloop.tools.measuring import Point, Reading, Rig, Subject
from tierloop.tools.measuring_passes import ROUNDS
from tierloop.tools.measuring_plan import POOLS, VIRTUAL_WINDOW_NS, whole
from tierloop.tools.measuring_subjects import of_platform

MODEL_POOL_NBYTES = 32 << 20
"""Nothing lies in the pools of the model, so they only have to hold one command."""
DEVICE, HOST = "calibrated", "host"

_HOST_PROFILE = """kind = "cpu"
summary = "Memory beside a calibrated device: fast enough to be no limit"
[memory]
capacity = {{ value = {capacity}, source = "defined: room for host buffers" }}
read_bytes_per_s = {{ value = {rate}, source = "defined: no limit of its own" }}
write_bytes_per_s = {{ value = {rate}, source = "defined: no limit of its own" }}
latency_ns = {{ value = 0, source = "defined: it belongs to what was measured" }}
"""


def write_platform(folder: Path, profile: str, apart: bool, rate: int) -> Path:
    """A platform of one device in a folder; returns its file.

    The device is its own host memory, as this machine's is, unless it was measured `apart` from that, as drives are:
    then there is a memory beside it, at the end of a link. Both are faster than `rate`, in bytes/s, and have no
    latency, since what was measured holds all of that.
    """
    (folder / f"{DEVICE}.toml").write_text(profile, encoding="utf-8")
    text = f'description = "one calibrated device"\nclock = "wall"\nhost = "{HOST if apart else DEVICE}"\n'
    text += f'[devices.{DEVICE}]\ndriver = "emulated"\nprofile = "{DEVICE}.toml"\n'
    if apart:
        fast = min(10 * rate, 10**15)
        (folder / f"{HOST}.toml").write_text(_HOST_PROFILE.format(capacity=4 << 30, rate=fast), encoding="utf-8")
        text += f'reaches.{HOST} = ["bus"]\n[devices.{HOST}]\ndriver = "emulated"\nprofile = "{HOST}.toml"\n'
        text += f'[links.bus]\nends = ["{HOST}", "{DEVICE}"]\nbytes_per_s = {fast}\nlatency_ns = 0\n'
        text += 'source = "defined: it belongs to what was measured"\n'
    path = folder / "verification.toml"
    path.write_text(text, encoding="utf-8")
    return path


@dataclass
class Emulation:
    """An open platform of one calibrated device, and the device as a subject."""

    subject: Subject
    devices: list[Device]
    closing: ExitStack

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.closing.close()


def emulate(profile: str, apart: bool, rate: int, clock: ClockKind, dilation: int | None = None) -> Emulation:
    """Open a profile's text as the only device of a platform. Raises ConfigurationError."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="tierloop-")))
        path = write_platform(folder, profile, apart, rate)
        platform = undo.enter_context(open_platform(path, clock=clock, dilation=dilation))
        return Emulation(of_platform(platform, DEVICE), list(platform.devices.values()), undo.pop_all())
    raise AssertionError("an exit stack swallows nothing")


def predict(
    profile: str, points: Sequence[Point], apart: bool, rate: int, host_ns: Sequence[int] = ()
) -> list[Reading | None]:
    """What the benchmark would say of a profile: one reading for each point, None where the device refuses it."""
    with emulate(profile, apart, rate, "virtual") as emulation:
        rig = Rig(emulation.subject, model_pool(points, emulation.subject.memory.capacity))
        takes = host_ns or [0] * len(points)
        readings = [_reading(rig, point, take) for point, take in zip(points, takes, strict=True)]
        rig.close()
        return readings


def model_pool(points: Sequence[Point], capacity: int) -> int:
    """Bytes of a pool in which every point has room, and no more than a memory of `capacity` bytes has room for."""
    return max([min(MODEL_POOL_NBYTES, whole(capacity // POOLS)), *(point.nbytes for point in points)])


def _reading(rig: Rig, point: Point, host_ns: int) -> Reading | None:
    try:
        return rig.measure(point, VIRTUAL_WINDOW_NS, ROUNDS, host_ns)
    except Unsupported:
        return None


class Model:
    """What a device of a known shape would measure at given points, for any constants."""

    def __init__(self, shape: Shape, points: Sequence[Point], host_ns: Sequence[int] = ()) -> None:
        self.shape = shape
        self.host_ns = host_ns
        self.points = tuple(points)
        self.evaluations = 0

    def __call__(self, constants: Mapping[str, float | None], curves: Sequence[Curve] = ()) -> list[Reading | None]:
        self.evaluations += 1
        rates = [constants.get("read_bytes_per_s"), constants.get("write_bytes_per_s")]
        rate = round(max(rate for rate in rates if rate))
        text = profile_text(self.shape, constants, curves)
        return predict(text, self.points, self.shape.apart, rate, self.host_ns)
