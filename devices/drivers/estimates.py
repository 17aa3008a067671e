"""What a transfer will cost: a straight line, duration = latency + nbytes / rate, that learns from what was measured.

Each kind of operation has its own line, fitted by least squares over completions whose weight fades, so that a drive
that slows down (garbage collection, a neighbour) is believed after some tens of commands. Until something was measured
the line comes from options, and without those from a stated assumption whose margin is as large as the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierloop.devices.device import Estimate

_FADE = 0.97
"""Weight of the past per new completion: the last 33 carry about two thirds of the weight."""
_ASSUMED_LATENCY_NS = 100_000
_ASSUMED_BYTES_PER_S = 1_000_000_000


@dataclass
class Line:
    """Fading sums over (nbytes, duration_ns) of one kind of operation."""

    count: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def observe(self, nbytes: int, duration_ns: int) -> None:
        """Learn from one completion."""
        self.count += 1
        self.weight = self.weight * _FADE + 1
        self.x = self.x * _FADE + nbytes
        self.y = self.y * _FADE + duration_ns
        self.xx = self.xx * _FADE + nbytes * nbytes
        self.xy = self.xy * _FADE + nbytes * duration_ns
        self.yy = self.yy * _FADE + duration_ns * duration_ns

    def predict(self, nbytes: int) -> tuple[int, int]:
        """(duration, margin) in ns; the margin is the root of the mean squared error of the line on what it saw."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = max(self.xx / self.weight - mean_x**2, 0.0)
        slope = 0.0
        if spread > 1e-6 * max(self.xx / self.weight, 1.0):
            slope = (self.xy / self.weight - mean_x * mean_y) / spread
            slope = min(max(slope, 0.0), mean_y / mean_x)
        elif mean_x:
            slope = mean_y / mean_x if nbytes > mean_x else 0.0
        duration = mean_y + slope * (nbytes - mean_x)
        variance = max(self.yy / self.weight - mean_y**2 - slope**2 * spread, 0.0)
        return max(round(duration), 0), round(variance**0.5)


@dataclass
class Costs:
    """Lines per operation; `declared` maps read and write to (latency_ns, bytes/s) from options."""

    declared: dict[str, tuple[int, int]]
    lines: dict[str, Line] = field(default_factory=dict)

    def observe(self, op: str, nbytes: int, duration_ns: int) -> None:
        """Learn from a completion that ended well; empty ones teach nothing, except about `flush`."""
        if nbytes or op == "flush":
            self.lines.setdefault(op, Line()).observe(nbytes, duration_ns)

    def estimate(self, op: str, nbytes: int) -> Estimate:
        """What an operation of so many bytes would cost, and how that is known."""
        line = self.lines.get(op)
        if line is not None:
            duration, margin = line.predict(nbytes)
            return Estimate(duration, margin, f"measured: a line through {line.count} completions of {op}")
        if op in self.declared:
            latency_ns, bytes_per_s = self.declared[op]
            duration = latency_ns + -(-nbytes * 1_000_000_000 // bytes_per_s)
            return Estimate(duration, duration // 2, "options: latency_ns and the rate; nothing measured yet")
        duration = _ASSUMED_LATENCY_NS + -(-nbytes * 1_000_000_000 // _ASSUMED_BYTES_PER_S)
        return Estimate(duration, duration, "assumed: 100 µs and 1 GB/s; nothing measured yet")
