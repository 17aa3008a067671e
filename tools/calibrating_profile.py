"""A calibrated profile as text: the constants of a device, a source for each, and what was measured.

The emulator reads the constants (emulators/profile.py) and ignores the rest; `verify` reads the points.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierloop.devices.info import ExecutorInfo
from tierloop.devices.platform_file import LATENCIES, RATES
from tierloop.emulators.profile import KINDS
from tierloop.tools.measuring import Subject
from tierloop.tools.measuring_passes import VERSION, Measured

_DEFINED = "defined: for the fit"
UNKNOWN_TEXT = "unknown"


@dataclass(frozen=True)
class Shape:
    """What is not measured: the structure that a device says it has."""

    kind: str
    summary: str
    capacity: int
    alignment: int
    byte_addressable: bool
    persistent: bool
    executors: tuple[ExecutorInfo, ...]
    apart: bool = False
    """Host buffers lie in another memory: the model has one beside the device that is no limit."""

    @classmethod
    def of(cls, subject: Subject) -> Shape:
        """The shape of a subject: its memory, the executor that moves, and the one with kernels if it is another."""
        executors = [subject.mover]
        if subject.kernels is not None and subject.kernels.name != subject.mover.name:
            executors.append(subject.kernels)
        info, memory = subject.owner.info, subject.memory
        return cls(
            info.kind if info.kind in KINDS else "cpu",
            f"{info.name} ({info.kind}), as it was measured through {subject.engine.info.name}",
            memory.capacity,
            memory.alignment,
            memory.byte_addressable,
            memory.persistent,
            tuple(executors),
            subject.apart,
        )

    @property
    def mover(self) -> str:
        """The name of the executor that moves."""
        return self.executors[0].name

    @property
    def kernels(self) -> str:
        """The name of the executor with the kernels that are measured."""
        return self.executors[-1].name


@dataclass(frozen=True)
class Curve:
    """Loaded latency at one read fraction of the memory's traffic: (bytes/s, ns), both ascending; last rate = cap."""

    read_fraction: float
    points: tuple[tuple[float, float], ...]
    source: str = _DEFINED


def profile_text(
    shape: Shape,
    constants: Mapping[str, float | None],
    curves: Sequence[Curve] = (),
    sources: Mapping[str, str] | None = None,
    calibration: Mapping[str, str | int | float | Sequence[str]] | None = None,
    points: Sequence[Measured] = (),
) -> str:
    """The TOML text of a profile.

    Keys of `constants` are `latency_ns`, `read_bytes_per_s`, `write_bytes_per_s`, and NAME.KEY for executors, where
    NAME.mlp_lines.64 is a point of that table; None is spelled `unknown`, and a key that is not there is left out.
    `sources` has a text for each of them; without it this is a model to try.
    """
    write = _Writer(constants, sources)
    lines = [f"kind = {quoted(shape.kind)}", f"summary = {quoted(shape.summary)}", "", "[memory]"]
    lines += [write.given("capacity", shape.capacity), f"alignment = {shape.alignment}"]
    lines += [f"byte_addressable = {_flag(shape.byte_addressable)}", f"persistent = {_flag(shape.persistent)}"]
    if not curves:
        lines += write.constant("read_bytes_per_s", RATES)
        lines += write.constant("write_bytes_per_s", RATES)
        lines += write.constant("latency_ns", LATENCIES)
    for curve in curves:
        pairs = ", ".join(f"[{round(rate)}, {round(latency)}]" for rate, latency in curve.points)
        lines += ["", "[[memory.curves]]", f"read_fraction = {curve.read_fraction!r}"]
        lines += [f"points = [{pairs}]", f"source = {quoted(curve.source)}"]
    for executor in shape.executors:
        lines += ["", *_executor(executor, write)]
    if calibration is not None:
        lines += ["", "[calibration]", f"version = {VERSION}"]
        lines += [f"{key} = {value_text(value)}" for key, value in calibration.items()]
    for one in points:
        lines += ["", "[[calibration.points]]"]
        lines += [f"{key} = {value_text(value)}" for key, value in point_json(one).items()]
    return "\n".join(lines) + "\n"


def point_json(one: Measured) -> dict[str, Any]:
    """A measured point as plain data: what it is, its value, the interval, and the number of tries."""
    low, high = one.interval
    found = {**one.point.to_json(), one.point.unit: _digits(one.value)}
    if one.point.pattern == "loaded":
        found["load_bytes_per_s"] = _digits(one.load)
    return {
        **found,
        "ci95_low": _digits(low),
        "ci95_high": _digits(high),
        "tries": len(one.tries),
        "host_ns": one.host_ns,
    }


class _Writer:
    """Writes constants with their sources, in whole numbers within what a profile allows."""

    def __init__(self, constants: Mapping[str, float | None], sources: Mapping[str, str] | None) -> None:
        self._constants = constants
        self._sources = sources or {}

    def given(self, key: str, value: object, source: str = _DEFINED) -> str:
        return f"{key} = {{ value = {value}, source = {quoted(self._sources.get(key, source))} }}"

    def constant(self, key: str, limits: tuple[int, int], owner: str = "") -> list[str]:
        """No line if the constant is not there."""
        full = f"{owner}.{key}" if owner else key
        if full not in self._constants:
            return []
        value = self._constants[full]
        text = '"unknown"' if value is None else str(min(max(round(value), limits[0]), limits[1]))
        return [f"{key} = {{ value = {text}, source = {quoted(self._sources.get(full, _DEFINED))} }}"]

    def table(self, key: str, owner: str) -> list[str]:
        """A constant that is a table of points."""
        full = f"{owner}.{key}"
        found = [
            (int(name.rpartition(".")[2]), value)
            for name, value in self._constants.items()
            if name.startswith(f"{full}.") and value is not None
        ]
        source = quoted(self._sources.get(full, _DEFINED))
        if not found:
            return [f'{key} = {{ value = "unknown", source = {source} }}'] if full in self._constants else []
        pairs = ", ".join(f"[{span}, {max(value, 0.01):.4g}]" for span, value in sorted(found))
        return [f"{key} = {{ value = [{pairs}], source = {source} }}"]


def _executor(executor: ExecutorInfo, write: _Writer) -> list[str]:
    name = executor.name
    lines = [f"[executors.{name}]", f"kind = {quoted(executor.kind)}", f"queues = {len(executor.queues)}"]
    lines += [f"depth = {executor.depth}", f"verbs = {value_text(sorted(executor.verbs))}"]
    if executor.largest_transfer:
        lines.append(f"largest_transfer = {executor.largest_transfer}")
    lines += write.constant("overhead_ns", LATENCIES, name) or [
        write.given("overhead_ns", '"unknown"', write._sources.get(f"{name}.overhead_ns", _DEFINED))
    ]
    for key in ("span_ns", "issue_ns"):
        lines += write.constant(key, LATENCIES, name)
    for key in ("command_bytes_per_s", "bytes_per_s"):
        lines += write.constant(key, RATES, name)
    lines += write.table("mlp_lines", name)
    if executor.kernels:
        lines += [
            f"kernels = {value_text(sorted(executor.kernels))}",
            f"dtypes = {value_text(sorted(executor.dtypes))}",
        ]
        lines.append(write.given("flops_per_s", '"unknown"', "measured: not; the benchmark only moves bytes"))
    return lines


def quoted(text: str) -> str:
    """A TOML string; what cannot be printed becomes a question mark."""
    return json.dumps("".join(c if c.isprintable() else "?" for c in text), ensure_ascii=False)


def value_text(value: object) -> str:
    """A TOML value: text, flag, number, or a list of texts."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return _flag(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_text(item) for item in value)}]"
    return repr(value)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _digits(value: float) -> float:
    """Seven significant digits: more than any measurement has."""
    return float(f"{value:.7g}")
