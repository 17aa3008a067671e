"""The ledger: which device and link did how much, and for how long, on one platform.

Made by whoever runs a workload and put among the observers of the platform's site: `site.observers.append(ledger)`.
`reset` begins a new account (between prefill and decode), `snapshot` reads it. What is counted:

- Bytes are counted in the memory where they lie, on the device that owns it. A host buffer lies in no memory that
  commands can name, so its side of a `Read` or `Write` is not counted. A command that failed counts no bytes, since how
  many it moved is unknown; one that never ran (cancelled, or its device was closed) is not counted as a command either.
- A command that was begun again after a failure (devices/wrappers/retried.py) is one command, and its bytes count once;
  `retries` says how often that was, `recovered` how many of these commands ended well.
- Busy is the union of the times [started, ended] of commands on the device's executors or on its memories.
- Stall is the union of the times in which a command stood at the head of one of its queues (it was submitted, and the
  command before it had ended) and waited for its `after`, minus the times in which the device was busy.
- A command that was under way at `reset` counts its bytes where it ends, and its time from the reset on.

So busy + stall ≤ elapsed holds for every device. Times of a dilated platform are scaled back: they are divided by σ,
rounded up. An observation stores one tuple (0.4 µs); unions are computed 8,192 commands at a time (1.3 µs a command).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierloop.devices.commands import Traffic
from tierloop.devices.completion import Completion
from tierloop.devices.errors import DeviceError
from tierloop.devices.platform import Platform
from tierloop.devices.site import LinkMeter
from tierloop.runtime.results import DeviceUse, LinkUse

_FOLD = 8192
"""Observations that are kept before they are folded into unions: 1 MiB of tuples."""

_Entry = tuple[str, int, int, int, int, Traffic, DeviceError | None, int, int, int, int]


class Intervals:
    """A growing set of times, kept as a sorted list of disjoint stretches [start, end) in ns.

    `new` is a flat list start, end, start, end, … of what was added since the last look; the ledger appends to it
    directly, since a call per stretch would cost as much as all the rest.
    """

    def __init__(self) -> None:
        self._merged: NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)
        self.new: list[int] = []

    def add(self, start_ns: int, end_ns: int) -> None:
        """Add one stretch; an empty or negative one adds nothing."""
        self.new += (start_ns, end_ns)

    def total_ns(self) -> int:
        """The length of the union."""
        merged = self.merged()
        return int((merged[:, 1] - merged[:, 0]).sum())

    def merged(self) -> NDArray[np.int64]:
        """The union as int64 (n, 2), sorted, with gaps between the rows."""
        if self.new:
            new = np.array(self.new, dtype=np.int64).reshape(-1, 2)
            self.new.clear()
            self._merged = _union(np.concatenate([self._merged, new[new[:, 1] > new[:, 0]]]))
        return self._merged

    def total_with_ns(self, other: Intervals) -> int:
        """The length of the union of both."""
        merged = _union(np.concatenate([self.merged(), other.merged()]))
        return int((merged[:, 1] - merged[:, 0]).sum())


def _union(stretches: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(stretches):
        return stretches
    order = np.argsort(stretches[:, 0], kind="stable")
    start, reach = stretches[order, 0], np.maximum.accumulate(stretches[order, 1])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([start[first], reach[last]], axis=1)


class _Account:
    """What one device has done since the reset."""

    __slots__ = (
        "busy",
        "bytes_read",
        "bytes_written",
        "cached",
        "commands",
        "flops",
        "media_more",
        "recovered",
        "retries",
        "waits",
    )

    def __init__(self) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self.media_more = 0
        self.cached = 0
        self.commands = 0
        self.flops = 0
        self.retries = 0
        self.recovered = 0
        self.busy = Intervals()
        self.waits = Intervals()


class Ledger:
    """An observer of completions; see the top of the file."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._site = platform.site
        self._log: list[_Entry] = []
        self._queue_free: dict[tuple[str, int], int] = {}
        self._begin()

    def __call__(self, completion: Completion) -> None:
        """One command has ended."""
        self._log.append(
            (
                completion.device,
                completion.queue,
                completion.submitted_ns,
                completion.started_ns,
                completion.ended_ns,
                completion.traffic,
                completion.error,
                completion.flops,
                completion.media_nbytes,
                completion.cached_nbytes,
                completion.retries,
            )
        )
        if len(self._log) >= _FOLD:
            self._fold()

    def reset(self) -> None:
        """Begin a new account at the present time of the clock; what emulators promise is judged anew, too."""
        self._fold()
        self._begin()
        for restart in self._site.restarts:
            restart()

    def _begin(self) -> None:
        self._since = self._site.clock.now()
        self._accounts = {device.info.name: _Account() for device in self._platform.devices.values()}
        self._of_memory = {m.name: self._accounts[device.info.name] for device, m in self._platform.memories()}
        self._links_before = {name: _link_use(link) for name, link in self._site.links.items()}

    @property
    def elapsed_ns(self) -> int:
        """How long the present account has been open."""
        return _scaled(self._site.clock.now() - self._since, self._platform.dilation)

    def snapshot(self) -> tuple[dict[str, DeviceUse], dict[str, LinkUse]]:
        """The account so far, in the platform's order. Commands that have not ended are not in it."""
        self._fold()
        sigma = self._platform.dilation
        devices = {}
        for name, account in self._accounts.items():
            busy_ns = account.busy.total_ns()
            devices[name] = DeviceUse(
                bytes_read=account.bytes_read,
                bytes_written=account.bytes_written,
                busy_ns=_scaled(busy_ns, sigma),
                stall_ns=_scaled(account.busy.total_with_ns(account.waits), sigma) - _scaled(busy_ns, sigma),
                commands=account.commands,
                media_bytes=account.bytes_read + account.bytes_written + account.media_more,
                cached_bytes=account.cached,
                flops=account.flops,
                retries=account.retries,
                recovered=account.recovered,
            )
        links = {}
        for name, link in self._site.links.items():
            now, before = _link_use(link), self._links_before.get(name, (0, 0, 0))
            forward, back, busy_ns = (n - b for n, b in zip(now, before, strict=True))
            links[name] = LinkUse(forward, back, _scaled(busy_ns, sigma))
        return devices, links

    def _fold(self) -> None:
        log, self._log = self._log, []
        since, of_memory, accounts, queue_free = self._since, self._of_memory, self._accounts, self._queue_free
        for (
            device,
            queue,
            submitted,
            started,
            ended,
            traffic,
            error,
            flops,
            media_nbytes,
            cached_nbytes,
            retries,
        ) in log:
            account = accounts[device]
            lane = (device, queue)
            head = queue_free.get(lane, since)
            queue_free[lane] = ended
            if started > submitted and started > head:
                account.waits.new += (max(head, submitted, since), started)
            if retries:
                account.retries += retries
                account.recovered += error is None
            if error is not None:
                if ended > started:
                    account.commands += 1
                    account.busy.add(max(started, since), ended)
                    for memory in (*traffic.read, *traffic.written):
                        of_memory[memory].busy.add(max(started, since), ended)
                continue
            if started < since:
                started = since
            account.commands += 1
            account.flops += flops
            account.cached += cached_nbytes
            account.busy.new += (started, ended)
            for memory, nbytes in traffic.read.items():
                owner = of_memory[memory]
                owner.bytes_read += nbytes
                if owner is not account:
                    owner.busy.new += (started, ended)
            for memory, nbytes in traffic.written.items():
                owner = of_memory[memory]
                owner.bytes_written += nbytes
                if owner is not account:
                    owner.busy.new += (started, ended)
            if media_nbytes:
                own = [
                    n for side in (traffic.read, traffic.written) for m, n in side.items() if of_memory[m] is account
                ]
                account.media_more += media_nbytes - sum(own) if own else 0
        for account in accounts.values():
            account.busy.merged()
            account.waits.merged()


def _link_use(link: LinkMeter) -> tuple[int, int, int]:
    return link.bytes_forward, link.bytes_back, link.busy_ns


def _scaled(time_ns: int, sigma: int) -> int:
    return -(-time_ns // sigma)
