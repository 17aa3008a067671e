"""Shared by all tests: Hypothesis profiles, and the hazard checker that is on in every test."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# One cache of compiled kernels per worker: processes that write one at the same time corrupt it (numba 4807, 9348).
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".cache" / "numba" / _WORKER))

settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
