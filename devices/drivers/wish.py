"""What the owner of a medium asks for when it is opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """What the owner asks of a medium: `capacity` in bytes (None: all of it), waits of at most deadline_s."""

    path: str
    capacity: int | None = None
    create: bool = False
    direct: bool = True
    deadline_s: float = 30.0
    retries: int = 64
