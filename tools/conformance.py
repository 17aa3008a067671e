"""`tierloop conformance`: the suite that every device has to pass, on a driver or on all devices of a platform."""

from __future__ import annotations

from typing import Annotated

import typer

def conformance(subject: Annotated[str, typer.Argument()]) -> None:
    """x"""
