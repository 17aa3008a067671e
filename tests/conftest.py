"""Shared by all tests: Hypothesis profiles, and the hazard checker that is on in every test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
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


@pytest.fixture(scope="module")
def threads_for_little_work() -> Iterator[None]:
    """Launches of any size are cut and shared among as many threads as they ask for."""
    from tierloop.devices.kernels import plan, pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_CORES", 64)
        patch.setattr(pool, "_LITTLE", 0)
        patch.setattr(plan, "_FEWEST_ROWS", 1)
        yield


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a command line."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        from tierloop.tools.cli import main

        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run
