"""What wrappers share that carry a command out as several of the device inside: it is handed on when its turn has come.

Until then nothing of it stands in a queue of the device inside, or what comes first for it (a read that compares, the
same command once more) would have to stand behind it. What the device inside refuses is refused by `submit` all the
same: `check` and `estimate` find it. What must hold:

- Own regions that a command names are `Busy` until it has ended. The region of another device can be freed until the
  command begins, or between two tries of it: then the command ends with `OutOfRange`.
- A subclass begins a command in `_begin` with the `after` that it finds in `note`, and ends it by `_conclude`. What was
  counted is that of the last command inside (`Held.inner`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tierloop.devices.commands import Command, read_segments, verb, write_segments
from tierloop.devices.completion import Completion
from tierloop.devices.device import check, check_alignment
from tierloop.devices.errors import Busy, DeviceError, OutOfRange
from tierloop.devices.info import DeviceInfo
from tierloop.devices.regions import Region
from tierloop.devices.wrappers.around import Around, Held, named, tell


class Deferred(Around):
    """Hands nothing on before its turn; the base of such wrappers."""

    def free(self, region: Region) -> None:
        """Free on the device inside. Raises what that raises, or Busy while a command here names the region."""
        if (self._info or self.info) and self._queues.uses(region):
            raise Busy(self._name, "free", f"{region} is named by a command that has not ended")
        self.inner.free(region)

    def _describe(self, inner: DeviceInfo) -> DeviceInfo:
        self._grids = {memory.name: memory.alignment for memory in inner.memories}
        return super()._describe(inner)

    def _accept(self, command: Command, queue: int, after: Sequence[Completion]) -> Held:
        """Refuse what the device inside would refuse; the command itself waits here."""
        traffic = check(self.info, command, queue)
        for memory, grid in self._grids.items():
            check_alignment(self.info, command, memory, grid)
        for region, _ in read_segments(command) + write_segments(command):
            if region.memory in self._grids and region.device != self._name:
                raise OutOfRange(self._name, verb(command), f"{region} is not a region of this device")
        self.inner.estimate(command, queue)
        held = Held(self, traffic)
        held.note = tuple(named(after))  # now: a gate that is open names nothing any more
        return held

    def _conclude(self, held: Held, error: DeviceError | None) -> None:
        """End the command; what it has computed and moved is what its last command inside has."""
        completion, inner = held.completion, held.inner
        assert completion is not None
        if inner is not None:
            tell(completion, inner)
        self._queues.finish(completion, error)
