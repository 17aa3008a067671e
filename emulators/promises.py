"""What an emulator promises on the wall clock, and how a run that broke the promise is known.

A command ends at the time that the model says. If the host was not ready then (its kernel was still running, or
nobody woke up in time), the command *overruns*. A run is invalid, not slow, when on one queue of emulated work the
overruns add up to more than `LIMIT` of the time between the first start and the last end, and to more than `GRACE_NS`.
`site.invalid` holds the reasons as they stand after the last completion; a new account starts without any.
"""

from __future__ import annotations

from tierloop.devices.completion import Completion
from tierloop.devices.site import Site

LIMIT_PERCENT = 5
GRACE_NS = 20_000_000
"""Overruns of less than 20 ms in all prove nothing: one late wake-up on a shared host may take that long."""


class Promises:
    """Keeps account of overruns per queue."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._since: dict[tuple[str, int], int] = {}
        self._over: dict[tuple[str, int], int] = {}
        self._reasons: dict[tuple[str, int], str] = {}
        site.restarts.append(self.restart)

    def restart(self) -> None:
        """Judge from now on: an account begins, and what came before it is in no number."""
        for reason in self._reasons.values():
            self._site.invalid.remove(reason)
        self._since.clear()
        self._over.clear()
        self._reasons.clear()

    def ended(self, completion: Completion, now: int) -> None:
        """A command has ended; `completion.overrun_ns` says by how much it was late."""
        lane = (completion.device, completion.queue)
        since = self._since.setdefault(lane, completion.started_ns)
        over = self._over[lane] = self._over.get(lane, 0) + completion.overrun_ns
        broken = over > GRACE_NS and over * 100 > LIMIT_PERCENT * (now - since)
        if lane in self._reasons:
            self._site.invalid.remove(self._reasons.pop(lane))
        if broken:
            reason = (
                f"{lane[0]} queue {lane[1]}: commands overran by {over / 1e6:.1f} ms in {(now - since) / 1e6:.1f} ms, "
                f"more than {LIMIT_PERCENT} %: this host cannot emulate it at this dilation"
            )
            self._reasons[lane] = reason
            self._site.invalid.append(reason)
