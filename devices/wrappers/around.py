"""What all wrappers share: a device around another device, with completions of its own.

The device inside stands on a private site (`Site.inside`): same clock, links and shared parts, but without observers
and without the hazard checker. So the ledger, the trace and the checker see each command once, as the completion of
the outermost wrapper; the completions inside are the wrappers' own business. `wrapped` builds such a stack.

What must hold for every wrapper:

- `submit` hands the command on at once, held by a *gate* that the wrapper opens when the command's turn has come. So
  the device inside refuses what it always refuses, in `submit`, and counts a command that waits as one that uses its
  regions. Order of a queue, `after`, cancellation and unread errors are those of `QueueSet`, once more.
- Every command of every kind takes this one way; there is no other member that carries anything out.
- An error of the device inside is the wrapper's error: same kind, cause and errno, same name of the device.
- Regions are the inner device's own and stay valid for whatever reaches them. A command that another device carries
  out on them passes through the wrappers of *that* device, not through those of the memory's owner.
- `close` closes the device inside first, so that nothing is under way when it returns.

A subclass says what happens when a command's turn has come (`_begin`, which ends by `_release`), when the device inside
has ended it (`_settle`, which ends by `_finish`), and when it is over for whatever reason (`_ended`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tierloop.devices.commands import Command, Traffic, verb
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device, Estimate
from tierloop.devices.errors import Cancelled, ConfigurationError, DeviceError, Gone
from tierloop.devices.info import DeviceInfo
from tierloop.devices.queues import QueueSet
from tierloop.devices.regions import Region
from tierloop.devices.site import Site


class Gate(Completion):
    """What a command that has been handed on comes after, until it is opened. `after` is what it stands for."""

    __slots__ = ()

    def open(self, now: int, error: DeviceError | None = None) -> None:
        """Let the command through, or with an error cancel it."""
        self.started_ns = self.ended_ns = now
        self.error = error
        self.done = True
        self.after = ()
        followers, self._followers = self._followers, []
        for call in followers:
            call(self)


class Held:
    """A command between a wrapper and the device inside.

    `completion` is the wrapper's own, None before it exists and once it is over; `inner` that of the device inside.
    `due` is when it may end (ns), `number` a count of the wrapper's own.
    """

    __slots__ = ("completion", "due", "gate", "inner", "note", "number", "owner", "traffic")

    def __init__(self, owner: Around, traffic: Traffic) -> None:
        self.owner = owner
        self.traffic = traffic
        self.completion: Completion | None = None
        self.inner: Completion | None = None
        self.gate: Gate | None = None
        self.due = 0
        self.number = -1
        self.note: Any = None


class Around:
    """A device that hands everything on to the device inside; the base of all wrappers.

    `device` was opened on `site.inside()`, `site` is where the wrapper stands: the platform's, or for a wrapper that
    stands inside another one `site.inside()` as well. `what` says what the wrapper does, for notes and reports.
    """

    what = "handed on"

    def __init__(self, device: Device, site: Site) -> None:
        self.inner = device
        self._site = site
        self._clock = site.clock
        self._info: DeviceInfo | None = None
        self._closed = False

    @property
    def info(self) -> DeviceInfo:
        """What the device inside is, with what the wrapper changes. Raises ConfigurationError."""
        if self._info is None:
            inner = self.inner.info
            if not inner.executors:
                raise ConfigurationError(
                    f"{inner.name}: a wrapper sees the commands that a device is given, and this one is memory only: "
                    "wrap the devices whose executors reach it"
                )
            self._name = inner.name
            self._gates = QueueSet(inner.name, 0, 0, self._site.inside(), lambda _: None)
            num_queues = 1 + max(queue for executor in inner.executors for queue in executor.queues)
            depth = max(executor.depth for executor in inner.executors)
            self._queues = QueueSet(inner.name, num_queues, depth, self._site, self._start)
            self._info = self._describe(inner)
        return self._info

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        """Allocate on the device inside, which raises what it raises."""
        return self.inner.alloc(nbytes, memory, phantom)

    def free(self, region: Region) -> None:
        """Free on the device inside, which raises what it raises."""
        self.inner.free(region)

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        """Queue a command. Raises what the device inside raises, or Gone."""
        info = self._info or self.info
        if self._closed:
            raise Gone(info.name, verb(command), "the device is closed")
        held = self._accept(command, queue, after)
        try:
            completion = self._queues.submit(command, queue, after, held.traffic)
        except BaseException:
            self._drop(held)
            raise
        completion.held = held
        held.completion = completion
        if completion.done:
            self._over(completion)
            return completion
        completion.on_done(self._over)
        if completion.started_ns >= 0:
            try:
                self._begin(held)
            except DeviceError as error:
                self._queues.finish(completion, error)
        return completion

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        """What the device inside would need."""
        return self.inner.estimate(command, queue)

    def poll(self) -> None:
        """Collect what the hardware inside has finished."""
        self.inner.poll()

    def close(self) -> None:
        """Close the device inside, then end what has not ended; raises the first error."""
        if self._closed:
            return
        self._closed = True
        try:
            self.inner.close()
        finally:
            if self._info is not None:
                self._queues.close()

    # -- what a subclass says -----------------------------------------------------------------------------------

    def _describe(self, inner: DeviceInfo) -> DeviceInfo:
        """The wrapper's info, made from that of the device inside."""
        before = inner.notes.get("wrappers")
        return replace(inner, notes=inner.notes | {"wrappers": f"{before}; {self.what}" if before else self.what})

    def _begin(self, held: Held) -> None:
        """The command's turn has come: everything that it comes after has ended."""
        self._release(held)

    def _settle(self, held: Held) -> None:
        """The device inside has ended the command."""
        self._finish(held)

    def _ended(self, held: Held, completion: Completion) -> None:
        """The command has ended, carried out or not."""

    # -- the way of a command -----------------------------------------------------------------------------------

    def _accept(self, command: Command, queue: int, after: Sequence[Completion]) -> Held:
        """Hand the command on behind a gate; raises what the device inside has against it."""
        gate = Gate(self._gates, self._name, command, queue, self._clock.now(), _NOTHING, self._below(after))
        inner = self.inner.submit(command, queue, (gate,))
        if self._site.outside is None and getattr(inner._owner, "_site", None) is self._site:
            gate.open(self._clock.now(), Cancelled(self._name, verb(command), "it was taken back"))
            look(inner)
            raise ConfigurationError(
                f"{self._name}: the device inside stands on the platform's own site, so every command would count "
                "twice: open it on site.inside(), or let `wrapped` do it"
            )
        held = Held(self, inner.traffic)
        held.inner = inner
        held.gate = gate
        inner.on_done(partial(self._returned, held))
        return held

    def _below(self, after: Sequence[Completion]) -> tuple[Completion, ...]:
        """What `after` means to the device inside: its own completions for commands of this wrapper."""
        below = []
        for completion in named(after):
            held = completion.held
            mine = held is not None and held.owner is self and held.inner is not None
            below.append(held.inner if mine else completion)
        return tuple(below)

    def _start(self, completion: Completion) -> None:
        if completion.held is not None:  # else `submit` is still at it, and goes on from there
            self._begin(completion.held)

    def _release(self, held: Held) -> None:
        """Let the command through to the device inside, unless it is over."""
        if held.completion is not None and held.gate is not None:
            held.gate.open(self._clock.now())

    def _returned(self, held: Held, inner: Completion) -> None:
        look(inner)
        if held.completion is not None and not self._closed:
            self._settle(held)

    def _finish(self, held: Held) -> None:
        """End the command as the device inside has ended it, unless it is over."""
        completion, inner = held.completion, held.inner
        if completion is None or inner is None:
            return
        tell(completion, inner)
        completion.retries = inner.retries
        if held.due > inner.ended_ns:
            completion.overrun_ns = self._clock.now() - held.due
        self._queues.finish(completion, inner.error)

    def _over(self, completion: Completion) -> None:
        held: Held = completion.held
        held.completion = None
        self._drop(held)
        self._ended(held, completion)

    def _drop(self, held: Held) -> None:
        """Take a command back that was handed on and not let through."""
        if held.gate is not None and not held.gate.done:
            held.gate.open(self._clock.now(), Cancelled(self._name, verb(held.gate.command), "it was taken back"))


_NOTHING = Traffic()


def named(after: Sequence[Completion]) -> Iterator[Completion]:
    """What `after` names in truth: for the gate of a wrapper further out, what that stands for."""
    for completion in after:
        if isinstance(completion, Gate):
            yield from named(completion.after)
        else:
            yield completion


def tell(completion: Completion, inner: Completion) -> None:
    """What the device inside has truly computed and moved is what the command has."""
    completion.flops = inner.flops
    completion.media_nbytes, completion.cached_nbytes = inner.media_nbytes, inner.cached_nbytes
    completion.overrun_ns = inner.overrun_ns


def look(completion: Completion) -> None:
    """Take note of how a command inside has ended: its error is the wrapper's, not one that nobody looked at."""
    try:
        completion.result()
    except DeviceError:
        return


def wrapped(
    site: Site, open_device: Callable[[Site], Device], layers: Sequence[Callable[[Device, Site], Around]]
) -> Device:
    """Open a device and put wrappers around it, the innermost first; if one fails, everything is closed again."""
    device = open_device(site.inside() if layers else site)
    try:
        for layer in layers[:-1]:
            device = layer(device, site.inside())
        return layers[-1](device, site) if layers else device
    except BaseException:
        device.close()
        raise
