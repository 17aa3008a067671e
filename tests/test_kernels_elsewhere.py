"""Kernels that are compiled here for another processor, as for a guest: the same work is not done again there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASKED = (
    "from tierloop.devices.kernels.compiled import has_wide_registers\n"
    "from llvmlite.binding import get_host_cpu_features\n"
    "print(has_wide_registers(), bool(get_host_cpu_features().get('avx512f')))\n"
)


def asked(**environment: str) -> tuple[str, str]:
    """What the kernels are told of the processor, and what it has, in a process of its own."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", ASKED],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    told, has = done.stdout.split()
    return told, has


def test_without_a_word_it_is_this_processor_that_counts() -> None:
    told, has = asked(NUMBA_CPU_NAME="", NUMBA_CPU_FEATURES="")
    assert told == has


@pytest.mark.parametrize(("features", "wide"), [("", "False"), ("+avx2,+avx512f", "True"), ("+avx2", "False")])
def test_a_processor_that_is_named_counts_whatever_this_one_has(features: str, wide: str) -> None:
    assert asked(NUMBA_CPU_NAME="x86-64-v3", NUMBA_CPU_FEATURES=features)[0] == wide
