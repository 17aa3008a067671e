"""What tests say while they run, a line of JSON each: a plugin of pytest that is loaded in a guest.

A guest that time ran out for, or that broke down, leaves no JUnit file; these lines say which tests had failed by then
and which one it was at. The file is the one that the environment variable names; without it nothing is written. Tests
are called as JUnit calls them.
"""

from __future__ import annotations

import json
import os

import pytest

WHERE = "TIERLOOP_GUEST_REPORT"
BEGINS = "begins"
_MOST = 500


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _write(nodeid, BEGINS)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A stage of a test is over: one that did not end well, or the test itself, or what follows it."""
    if report.outcome != "passed" or report.when == "call":
        _write(report.nodeid, report.outcome, _reason(report))


def name_of(nodeid: str) -> str:
    """What JUnit calls a test."""
    address, bracket, parameters = nodeid.partition("[")
    path, _, rest = address.partition("::")
    return ".".join((path.removesuffix(".py").replace("/", "."), *rest.split("::"))) + bracket + parameters


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_MOST]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr or "")[:_MOST]


def _write(nodeid: str, outcome: str, reason: str = "") -> None:
    where = os.environ.get(WHERE)
    if where:
        with open(where, "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": name_of(nodeid), "outcome": outcome, "reason": reason}) + "\n")
