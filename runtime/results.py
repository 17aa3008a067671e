"""What a run reports: frozen values with the fields of the JSON contract, and how they become JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tierloop.runtime.tier_writes import TierUse, unreached


@dataclass(frozen=True)
class DeviceUse:
    """What one device did: bytes that left and entered its memories, busy and stall in ns, commands on its queues.

    Busy is the union of the times in which a command ran on its executors or touched its memories; stall is the time in
    which a command stood at the head of a queue waiting for another device while the device was not busy.
    `media_bytes` is what was asked of the media and moved (a block device moves whole blocks), at least read + written;
    `cached_bytes` of these came from the operating system's page cache instead, as far as is known; `flops` is what its
    kernels computed. `retries` is how often commands were begun again after a failure (0 unless the device is wrapped
    so), `recovered` how many of those ended well.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    busy_ns: int = 0
    stall_ns: int = 0
    commands: int = 0
    media_bytes: int = 0
    cached_bytes: int = 0
    flops: int = 0
    retries: int = 0
    recovered: int = 0


@dataclass(frozen=True)
class LinkUse:
    """What one link carried: bytes per direction, and ns in which it carried any."""

    bytes_forward: int = 0
    bytes_back: int = 0
    busy_ns: int = 0


@dataclass(frozen=True)
class PolicyResult:
    """One policy on one workload.

    `max_error` is the largest |output − float64 oracle| over all layers, steps and heads, on the rows that were
    attended; `error_bound` is the analytic bound at that element, so max_error ≤ error_bound has to hold;
    `error_vs_dense` is against attention over all rows. `refused` says why a policy did not run; then the other
    fields are empty. Time is that of the platform's clock, scaled back by `dilation`.
    """

    policy: str
    platform: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    equal_to_dense: bool = False
    max_error: float = 0.0
    error_bound: float = 0.0
    error_vs_dense: float = 0.0
    worst_ratio: float = 0.0
    """The largest ratio of error to bound over all outputs; above 1 a bound is broken."""
    checked: int = 0
    """Output vectors that the oracle has checked."""
    mass_recall: float = 1.0
    """Mean share of dense attention's probability that lies on the rows that were attended."""
    topk_recall: float = 1.0
    """Mean share of the rows of largest probability that were attended."""
    attended_share: float = 1.0
    """Mean share of the visible rows that were attended."""
    clipped_keys: int = 0
    """Elements of keys that were beyond the range of 8-bit codes and were stored as the largest one."""
    tokens_per_s: float = 0.0
    step_ns: tuple[int, ...] = ()
    elapsed_ns: int = 0
    """How long the decode lasted on the platform's clock, scaled back: what busy and stall are parts of."""
    provenance: str = ""
    dilation: int = 1
    exact: bool = True
    answered: bool = False
    devices: dict[str, DeviceUse] = field(default_factory=dict)
    links: dict[str, LinkUse] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    """Busy ns of the decode by stage, scaled back: sums of commands, so stages that overlap count both."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the policy itself reports (`Policy.report`)."""
    tiers: dict[str, TierUse] = field(default_factory=dict)
    """Blocks placed on each memory, and what was written to it, the placing of the prompt included."""
    placement: dict[str, int] = field(default_factory=dict)
    """Bytes of the KV cache on each memory at the end of prefill."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """On which NUMA nodes the pages of memories were wanted, and found at the end of decode (`Placements.report`)."""
    guesses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()
    lateness: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """On the wall clock, by device and queue: how many emulated commands ended at most 2**k ns late."""
    interference: float = 0.0
    """On the wall clock: what the emulators' own traffic took of the bandwidth of the host's memory, from 0 to 1."""
    wall_s: float = 0.0
    refused: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Several policies on one workload and platform; `dense_*` is plain transformers `generate` in float32.

    `kv_dtype` is the type that KV was stored in; exact policies reproduce the dense tokens where it is float32.
    """

    platform: str
    clock: str
    model: str
    prompt_tokens: int
    policies: tuple[PolicyResult, ...]
    kv_dtype: str = "float32"
    dense_text: str = ""
    dense_tokens: tuple[int, ...] = ()
    question: str = ""
    answer: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return asdict(self)

    def differs(self, result: PolicyResult) -> bool:
        """Whether tokens differ that must not: those of an exact policy, from float32 rows."""
        return result.exact and self.kv_dtype == "float32" and not result.equal_to_dense

    @property
    def failures(self) -> list[str]:
        """Checks that failed: an exact policy whose tokens differ (from float32 rows), an error beyond its bound, or
        a memory that has blocks and was never written to.
        """
        failed = []
        for result in self.policies:
            if result.refused is not None:
                continue
            failed += [f"{result.policy}: {each}" for each in unreached(result.tiers)]
            if self.differs(result):
                failed.append(f"{result.policy}: the tokens differ from dense")
            if not result.max_error <= result.error_bound:  # also where either is NaN
                failed.append(
                    f"{result.policy}: error {result.max_error:.3g} is above its bound {result.error_bound:.3g}"
                )
            elif not result.worst_ratio <= 1:
                failed.append(f"{result.policy}: an error is {result.worst_ratio:.3g} times its bound")
        return failed
