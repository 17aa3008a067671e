"""A device that `doctor` found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """A device that a platform file can name. `reasons` says why it is not usable, or not as good as it might be.

    `guesses` are constants of an emulated one that are assumed or unknown: results that rest on them are extrapolated.
    """

    name: str
    kind: str
    provenance: str
    usable: bool
    reasons: tuple[str, ...] = ()
    driver: str = ""
    guesses: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "reasons": list(self.reasons), "guesses": list(self.guesses)}
