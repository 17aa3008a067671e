"""What an emulator promises on the wall clock, and how a run that broke the promise is known.

A command ends at the time that the model says. If the host was not ready then (its kernel was still running, or
nobody woke up in time), the command *overruns*. A run is invalid, not slow, when

- on one queue of emulated work the overruns add up to more than `LIMIT_PERCENT` of the time between the first start and
  the last end, and to more than `GRACE_NS`; or
- the emulators' own traffic was more than the host's memory leaves to them (`site.shared["host_bytes_per_s"]` divided
  by `HEADROOM`): then they, and whatever ran beside them, were slowed down by each other.

`site.invalid` holds the reasons as they stand after the last completion; a new account starts without any.
`site.lateness` counts, for each queue, the commands that ended at most 2**k ns late.
"""

from __future__ import annotations

from tierloop.devices.completion import Completion
from tierloop.devices.host_speed import HEADROOM
from tierloop.devices.site import Site

LIMIT_PERCENT = 5
GRACE_NS = 20_000_000
"""Overruns of less than 20 ms in all prove nothing: one late wake-up on a shared host may take that long."""
BUCKETS = 40
_LEAST_NS = 100_000_000
"""Traffic is judged over at least 0.1 s: caches take shorter bursts."""

Lane = tuple[str, int]


class Promises:
    """Keeps account of overruns per queue, and of the bytes that emulators move."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._since: dict[Lane, int] = {}
        self._over: dict[Lane, int] = {}
        self._reasons: dict[Lane | None, str] = {}
        self._began = -1
        self._moved = 0
        site.restarts.append(self.restart)

    def restart(self) -> None:
        """Judge from now on: an account begins, and what came before it is in no number."""
        for reason in self._reasons.values():
            self._site.invalid.remove(reason)
        self._since.clear()
        self._over.clear()
        self._reasons.clear()
        self._site.lateness.clear()
        self._site.interference = 0.0
        self._began = -1
        self._moved = 0

    def ended(self, completion: Completion, now: int) -> None:
        """A command has ended; `completion.overrun_ns` says by how much it was late."""
        lane = (completion.device, completion.queue)
        since = self._since.setdefault(lane, completion.started_ns)
        over = self._over[lane] = self._over.get(lane, 0) + completion.overrun_ns
        counts = self._site.lateness.get(lane)
        if counts is None:
            counts = self._site.lateness[lane] = [0] * BUCKETS
        counts[min(max(completion.overrun_ns - 1, 0).bit_length(), BUCKETS - 1)] += 1
        broken = over > GRACE_NS and over * 100 > LIMIT_PERCENT * (now - since)
        self._judge(
            lane,
            f"{lane[0]} queue {lane[1]}: commands overran by {over / 1e6:.1f} ms in {(now - since) / 1e6:.1f} ms, "
            f"more than {LIMIT_PERCENT} %: this host cannot emulate it at this dilation"
            if broken
            else "",
        )
        if not completion.traffic.phantom:
            self._moved += sum(completion.traffic.read.values()) + sum(completion.traffic.written.values())
        self._weigh(completion.started_ns, now)

    def _weigh(self, started_ns: int, now: int) -> None:
        """Compare the emulators' own traffic with what the host's memory can do."""
        host = self._site.shared.get("host_bytes_per_s", 0)
        if self._began < 0:
            self._began = started_ns
        spent = now - self._began
        if not host or spent <= 0:
            return
        share = self._site.interference = self._moved * 1e9 / spent / host
        reason = ""
        if share * HEADROOM > 1 and spent >= _LEAST_NS:
            reason = (
                f"the emulators moved {self._moved / spent:.1f} of the {host / 1e9:.1f} GB/s that this "
                f"host reads and writes: more than 1 / {HEADROOM}, so they slowed each other down"
            )
        self._judge(None, reason)

    def _judge(self, what: Lane | None, reason: str) -> None:
        """Put a reason in the place of the one before, if there was one; "" if there is none any more."""
        if what in self._reasons:
            self._site.invalid.remove(self._reasons.pop(what))
        if reason:
            self._reasons[what] = reason
            self._site.invalid.append(reason)
