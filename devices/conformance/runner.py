"""Runs the suite without a test framework: every check of the levels asked for, each on a device opened afresh.

Used by `tierloop conformance DEVICE` and by whoever wants the outcomes as data. Needs neither pytest nor Hypothesis;
without Hypothesis the level `stateful` is skipped, with the reason. Levels have names and numbers: what a new driver
passes from L0 on is how far it has come.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from tierloop.devices.conformance import (
    chasing,
    codes,
    compute,
    envelope,
    errors,
    faults,
    identity,
    memory,
    operands,
    ordering,
    quantity,
)
from tierloop.devices.conformance.report import Comparison, Report, Result
from tierloop.devices.conformance.subject import Failure, Opener, Skip, Subject
from tierloop.devices.errors import DeviceError, nearest

Check = Callable[[Subject], None]
_MODULES: dict[str, tuple[ModuleType, ...]] = {
    "identity": (identity,),
    "memory": (memory, quantity),
    "ordering": (ordering,),
    "errors": (errors, operands),
    "compute": (compute, codes, chasing),
    "envelope": (envelope,),
    "stateful": (),
    "faults": (faults,),
}
LEVELS = tuple(_MODULES)
NUMBERS = {level: f"L{min(number, 6)}" for number, level in enumerate(LEVELS)}
"""The number of each level; the two that take a device for a long or rough ride are one, L6."""
MACHINE = "any_sequence_of_commands_agrees_with_a_dict"
"""The one check of the level `stateful`."""


def checks_of(level: str) -> Iterator[tuple[str, Check]]:
    """The checks of a level by name, in their order in the files; none of `stateful`, whose machine is no function."""
    for module in _MODULES.get(level, ()):
        for name, value in list(vars(module).items()):
            if name.startswith("check_"):
                yield name.removeprefix("check_"), value


def run(
    opener: Opener,
    levels: Iterable[str] = LEVELS,
    *,
    only: Iterable[str] = (),
    virtual: bool = False,
    device: str | None = None,
    seed: int = 0,
    examples: int = 50,
    shrink: bool = True,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Run the levels (names or numbers), or `only` the checks of these names, and report; `progress` gets each result.

    `opener(site)` opens the device, or returns a platform in which `device` names it. `virtual` gives it the virtual
    clock, which only emulated devices can run on. `examples` is the number of sequences that the stateful machine
    tries; with `shrink` it looks for the shortest that fails, which can take a minute. Raises ValueError for an unknown
    level or check, and what the opener raises when it is first called.
    """
    levels, only = named(levels), set(only)
    known = [MACHINE, *(name for level in _MODULES for name, _ in checks_of(level))]
    for name in sorted(only - set(known)):
        raise ValueError(f"there is no conformance check {name!r}: {nearest(name, known)}")
    first = Subject(opener, virtual, device, seed)
    info = first.info
    first.close()
    provenance = "emulated" if info.model else info.provenance
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        if progress is not None:
            progress(result)

    for level in levels:
        if level == "stateful" and MACHINE in (only or {MACHINE}):
            note(_outcome(level, MACHINE, carry_out_machine, opener, virtual, device, examples, shrink))
        for name, check in checks_of(level):
            if name in (only or {name}):
                note(_outcome(level, name, carry_out, check, opener, virtual, device, seed))
    seen: list[Comparison] = []
    if "envelope" in levels and not only:
        seen = _compare(opener, virtual, device, seed)
    return Report(info.name, info.kind, provenance, tuple(results), tuple(seen), info.model)


def named(levels: Iterable[str]) -> list[str]:
    """The names of levels, in their order; "L6" means all that have this number. Raises ValueError for others."""
    wanted: set[str] = set()
    for level in levels:
        found = [name for name, number in NUMBERS.items() if level in (name, number)]
        if not found:
            known = [*LEVELS, *dict.fromkeys(NUMBERS.values())]
            raise ValueError(f"there is no conformance level {level!r}: {nearest(level, known)}")
        wanted.update(found)
    return [level for level in LEVELS if level in wanted]


def carry_out(check: Check, opener: Opener, virtual: bool, device: str | None, seed: int) -> None:
    """One check on a device opened for it and closed behind it; raises Failure, Skip, or what the device raises."""
    subject = Subject(opener, virtual, device, seed)
    try:
        check(subject)
    except BaseException:
        subject.abandon()
        raise
    try:
        subject.close()
    except Exception as error:
        raise Failure(f"the check passed, but closing raised {type(error).__name__}: {error}") from error


def carry_out_machine(opener: Opener, virtual: bool, device: str | None, examples: int, shrink: bool = True) -> None:
    """The stateful machine; raises Failure for a sequence that goes wrong, or Skip."""
    if importlib.util.find_spec("hypothesis") is None:
        raise Skip("Hypothesis is not installed: pip install 'tierloop[conformance]'")
    from tierloop.devices.conformance import stateful

    subject = Subject(opener, virtual, device)
    try:
        subject.memory()
    finally:
        subject.abandon()
    stateful.check_any_sequence(opener, virtual, device, examples, shrink)


def _compare(opener: Opener, virtual: bool, device: str | None, seed: int) -> list[Comparison]:
    """What is declared and what is seen; nothing for a device that cannot be measured, which its checks have said."""
    subject = Subject(opener, virtual, device, seed)
    try:
        return envelope.comparisons(subject)
    except (Skip, Failure, DeviceError):
        return []
    finally:
        subject.abandon()


def _outcome(level: str, name: str, call: Callable[..., None], *args: Any) -> Result:
    try:
        call(*args)
    except Skip as skip:
        return Result(level, name, "skipped", str(skip), NUMBERS[level])
    except Failure as failure:
        return Result(level, name, "failed", _told(failure, str(failure)), NUMBERS[level])
    except Exception as error:
        return Result(level, name, "failed", _told(error, f"{type(error).__name__}: {error}"), NUMBERS[level])
    return Result(level, name, "passed", number=NUMBERS[level])


def _told(error: BaseException, text: str) -> str:
    """With the steps that Hypothesis found, where there are any."""
    return "\n".join([text, *getattr(error, "__notes__", [])])
