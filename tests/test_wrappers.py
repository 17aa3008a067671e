"""What holds for every wrapper and every stack of them: seen once, in any order, by hand and from a platform file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.decoding import decode
from tests.machines import write_machine
from tests.test_docs import ROOT, run_blocks
from tests.tiny import tiny_model, tiny_workload
from tests.wrapping import Layer, all_kinds, ended, every_command, failed, filled, reference, site
from tierloop.devices.clocks import WallClock
from tierloop.devices.commands import Command, Copy, Launch, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance import LEVELS, run
from tierloop.devices.conformance.gate import Gate
from tierloop.devices.device import Device
from tierloop.devices.drivers.cpu import open_cpu
from tierloop.devices.errors import (
    Busy,
    Cancelled,
    ConfigurationError,
    DeviceError,
    Gone,
    MediaError,
    Misaligned,
    OutOfRange,
)
from tierloop.devices.hazards import HazardError
from tierloop.devices.kernels.contract import Gather
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.devices.site import Site
from tierloop.devices.spans import Spans
from tierloop.devices.waiting import read_bytes
from tierloop.devices.wrappers import Around, Delayed, Latency, Throttled, read_recording, wrapped
from tierloop.emulators.device import open_emulated
from tierloop.runtime.ledger import Ledger


def _put(name: str, at: int, order: list[str]) -> list[str]:
    return [*order[:at], name, *order[at:]]


ORDERS = [
    _put("retried", at % 6, _put("faulty", at % 5, list(order)))
    for at, order in enumerate(permutations(["throttled", "delayed", "recorded", "checked"]))
]
"""Every order of four, the fifth and the sixth at each place in turn."""


def cpu(on: Site, layers: list[Layer]) -> Device:
    return wrapped(on, lambda inside: open_cpu("cpu", inside, {"capacity": 1 << 20, "threads": 1}), layers)


def dram(on: Site, folder: Path, layers: list[Layer]) -> Device:
    options = {"profile": "dram.toml", "folder": str(folder)}
    return wrapped(on, lambda inside: open_emulated("emu:dram", inside, options), layers)


@pytest.fixture(params=["throttled", "delayed", "recorded", "checked", "faulty", "retried"])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> Layer:
    """Each of the wrappers."""
    return all_kinds(tmp_path)[request.param]


# -- in any order -------------------------------------------------------------------------------------------------


def story(on: Site, device: Device) -> list[object]:
    """Commands of every kind, good and bad ones; what came of them: bytes, and errors by kind and message."""
    clock = on.clock
    told: list[object] = []
    a, b = filled(clock, device, 5000, 1), device.alloc(5000)
    gate = Gate(on)
    write = device.submit(Write(a.at(100, 300), np.full(300, 9, dtype=np.uint8)), 0, [gate.completion])
    copy = device.submit(Copy(a.at(0, 3000), b.at(1000, 3000)), 1, [write])
    gather = device.submit(Launch(Gather(), ((a.at(3000, 77),),), ((b.at(13, 77),),)), 1, [copy])
    gate.open()
    ended(clock, write, copy, gather)
    told.append(read_bytes(clock, device, b.all()).tobytes())
    told.append(read_bytes(clock, device, a.at(99, 4000)).tobytes())
    bad: list[Callable[[], object]] = [
        lambda: device.submit(Read(a.at(4999, 2), np.empty(2, dtype=np.uint8))),
        lambda: device.submit(Read(a.all(), np.empty(3, dtype=np.uint8))),
        lambda: device.submit(Read(a.at(0, 1), np.empty(1, dtype=np.uint8)), 99),
        lambda: device.alloc(1 << 50),
        lambda: device.free(copied),
    ]
    copied = device.alloc(8)
    device.free(copied)
    for call in bad:
        with pytest.raises(DeviceError) as caught:
            call()
        told += [type(caught.value), str(caught.value)]
    gate = Gate(on)
    held = device.submit(Read(a.at(0, 1), np.empty(1, dtype=np.uint8)), 0, [gate.completion])
    with pytest.raises(Busy) as busy:
        device.free(a)
    told.append(type(busy.value))
    gate.open(MediaError("gate", "flush", "on purpose"))
    error = failed(clock, held)
    assert error is not None
    told += [type(error), str(error), repr(error.__cause__)]
    told.append(read_bytes(clock, device, b.all()).tobytes())
    return told


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_gives_the_bytes_and_errors_of_the_bare_device_on_the_virtual_clock(
    tmp_path: Path, order: list[str]
) -> None:
    write_machine(tmp_path)
    on, plain = site(), site()
    device, bare = dram(on, tmp_path, [all_kinds(tmp_path)[name] for name in order]), dram(plain, tmp_path, [])
    assert story(on, device) == story(plain, bare)
    assert (tmp_path / "all.jsonl").stat().st_size > 1000
    assert len(device.info.slowed) == 2
    device.close()


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_gives_the_bytes_and_errors_of_the_bare_device_on_the_wall_clock(
    tmp_path: Path, order: list[str]
) -> None:
    on, plain = Site(clock=WallClock()), Site(clock=WallClock())
    device, bare = cpu(on, [all_kinds(tmp_path)[name] for name in order]), cpu(plain, [])
    assert story(on, device) == story(plain, bare)
    assert (tmp_path / "all.jsonl").stat().st_size > 1000
    device.close()
    bare.close()


def test_all_kinds_together_carry_out_every_command_and_kernel(tmp_path: Path) -> None:
    results = []
    for layers in ([], list(all_kinds(tmp_path).values())):
        on = site()
        device = reference(on, layers)
        told: list[object] = []
        for name, command in every_command(on.clock, device).items():
            completion = device.submit(command)
            ended(on.clock, completion)
            told.append((name, completion.flops, completion.traffic.read, completion.traffic.written))
            if isinstance(command, Launch):
                told += [read_bytes(on.clock, device, s).tobytes() for operand in command.writes for s in operand]
        results.append(told)
    assert results[0] == results[1]


@pytest.mark.parametrize("outside", [False, True])
def test_delay_and_share_add_up_whichever_is_outside(outside: bool) -> None:
    on = site()
    layers: list[Layer] = [
        lambda device, inside: Throttled(device, inside, 10**9),
        lambda device, inside: Delayed(device, inside, Latency(500), Latency(500)),
    ]
    device = reference(on, layers if outside else layers[::-1])
    region = device.alloc(1000)
    commands: list[Command] = [
        Write(region.all(), np.ones(1000, dtype=np.uint8)),
        Read(region.all(), np.empty(1000, dtype=np.uint8)),
    ]
    times = []
    for command in (*commands, *commands):
        estimate = device.estimate(command).duration_ns
        begun = on.clock.now()
        times += [end - begun for end in ended(on.clock, device.submit(command))]
        assert times[-1] == estimate
    assert times == [1500 if outside else 1000] * 4, "inside, the delay passes while the share does"
    queued = [device.submit(command) for command in (*commands, *commands)]
    begun = on.clock.now()
    assert [end - begun for end in ended(on.clock, *queued)] == [times[0] * (i + 1) for i in range(4)]


# -- seen once ----------------------------------------------------------------------------------------------------


def test_ledger_and_observers_see_each_command_once(tmp_path: Path) -> None:
    on = site()
    device = reference(on, list(all_kinds(tmp_path).values()))
    platform = Platform("by hand", on, {"emu:reference": device}, "emu:reference")
    seen: list[Completion] = []
    on.observers.append(seen.append)
    ledger = Ledger(platform)
    on.observers.append(ledger)
    region = device.alloc(1000)
    made = [device.submit(Write(region.at(3, 900), np.ones(900, dtype=np.uint8)))]
    made.append(device.submit(Read(region.all(), np.empty(1000, dtype=np.uint8)), 0))
    ended(on.clock, *made)
    assert seen == made
    use = ledger.snapshot()[0]["emu:reference"]
    assert (use.bytes_written, use.bytes_read, use.commands) == (900, 1000, 2)


def test_the_hazard_checker_sees_the_outermost_commands_and_the_device_works_on(layer: Layer) -> None:
    on = site()
    device = reference(on, [layer])
    region = device.alloc(64)
    first = device.submit(Write(region.all(), np.ones(64, dtype=np.uint8)), 0)
    with pytest.raises(HazardError):
        device.submit(Read(region.all(), np.empty(64, dtype=np.uint8)), 1)
    ended(on.clock, first, device.submit(Read(region.all(), np.empty(64, dtype=np.uint8)), 1, [first]))
    device.free(region)
    device.close()


# -- queues -------------------------------------------------------------------------------------------------------


def test_dependencies_hold_across_devices(layer: Layer) -> None:
    on = site()
    device, other = reference(on, [layer], 50), reference(on, [], 70, "emu:other")
    a, b = filled(on.clock, device, 64), other.alloc(64)
    gate = Gate(on)
    first = device.submit(Write(a.all(), np.full(64, 7, dtype=np.uint8)), 0, [gate.completion])
    second = other.submit(Copy(a.all(), b.all()), 0, [first])
    third = device.submit(Copy(b.all(), a.all()), 1, [second])
    on.clock.wait_until(on.clock.now() + 1000)
    assert not first.done
    gate.open()
    ended(on.clock, first, second, third)
    assert first.ended_ns <= second.started_ns < second.ended_ns <= third.started_ns
    assert read_bytes(on.clock, device, a.all()).tolist() == [7] * 64


def test_an_error_that_nobody_looked_at_is_raised_at_close_and_once_only(layer: Layer) -> None:
    on = site()
    device = reference(on, [layer])
    region, gate = device.alloc(64), Gate(on)
    device.submit(Read(region.all(), np.empty(64, dtype=np.uint8)), 0, [gate.completion])
    gate.open(MediaError("gate", "flush", "on purpose"))
    with pytest.raises(Cancelled, match="on purpose"):
        device.close()
    device.close()
    with pytest.raises(Gone):
        device.alloc(1)


def test_an_error_that_was_seen_is_not_raised_at_close(layer: Layer) -> None:
    on = site()
    device = reference(on, [layer])
    region, gate = device.alloc(64), Gate(on)
    held = device.submit(Read(region.all(), np.empty(64, dtype=np.uint8)), 0, [gate.completion])
    gate.open(MediaError("gate", "flush", "on purpose"))
    assert isinstance(failed(on.clock, held), Cancelled)
    device.close()


def test_a_full_queue_is_busy_and_a_refused_command_is_not_queued(layer: Layer) -> None:
    on = Site()
    device = reference(on, [layer])
    depth = device.info.executors[0].depth
    region, gate = device.alloc(1), Gate(on)
    read = Read(region.all(), np.empty(1, dtype=np.uint8))
    made = [device.submit(read, 0, [gate.completion]) for _ in range(depth)]
    for _ in range(3):
        with pytest.raises(Busy):
            device.submit(read, 0)
    made.append(device.submit(read, 1))
    gate.open()
    ended(on.clock, *made)
    ended(on.clock, device.submit(read, 0))


def test_a_chain_of_any_length_is_cancelled_without_deep_recursion(tmp_path: Path) -> None:
    on = Site()
    device = reference(on, list(all_kinds(tmp_path).values()))
    region, gate = device.alloc(1), Gate(on)
    chain = [gate.completion]
    for i in range(4000):
        chain.append(device.submit(Read(region.all(), np.empty(1, dtype=np.uint8)), i % 4, [chain[-1]]))
    gate.open(MediaError("gate", "flush", "on purpose"))
    assert all(isinstance(failed(on.clock, c), Cancelled) for c in chain[1:])


def test_a_chain_of_any_length_that_ends_well_needs_no_deep_recursion(layer: Layer) -> None:
    on = Site()
    device = reference(on, [layer])
    region, gate = device.alloc(1), Gate(on)
    chain = [gate.completion]
    for i in range(4000):
        chain.append(device.submit(Read(region.all(), np.empty(1, dtype=np.uint8)), i % 4, [chain[-1]]))
    gate.open()
    ended(on.clock, *chain[1:])


def test_a_region_that_a_held_command_of_another_device_names_is_busy(tmp_path: Path) -> None:
    path = write_machine(tmp_path)
    wrap = 'profile = "gpu.toml"\nwrap = [{ kind = "throttled", bytes_per_s = 1e9 }]\n'
    path.write_text(path.read_text().replace('profile = "gpu.toml"\n', wrap))
    with open_platform(path) as platform:
        gpu, host = platform.device("emu:gpu"), platform.device("emu:dram")
        region, there, gate = host.alloc(64), gpu.alloc(64), Gate(platform.site)
        held = gpu.submit(Copy(region.all(), there.all()), 2, [gate.completion])
        with pytest.raises(Busy):
            host.free(region)
        gate.open()
        ended(platform.clock, held)
        host.free(region)


# -- the conformance suite ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_an_emulated_device_in_all_kinds_passes_the_suite(tmp_path: Path, level: str) -> None:
    write_machine(tmp_path)
    layers = list(all_kinds(tmp_path).values())
    report = run(lambda on: dram(on, tmp_path, layers), [level], virtual=True, examples=6)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_cpu_in_all_kinds_passes_the_suite(tmp_path: Path, level: str) -> None:
    layers = list(all_kinds(tmp_path).values())

    def opened(on: Site) -> Device:
        return wrapped(on, lambda inside: open_cpu("cpu", inside, {"capacity": 64 << 20, "threads": 2}), layers)

    report = run(opened, [level], examples=6)
    assert report.passed, str(report)


@pytest.mark.parametrize("level", ["memory", "ordering", "errors"])
def test_each_wrapper_alone_passes_the_suite(layer: Layer, level: str) -> None:
    report = run(lambda on: reference(on, [layer]), [level], virtual=True)
    assert report.passed, str(report)


# -- platform files -----------------------------------------------------------------------------------------------


def machine(folder: Path, wrap: str, device: str = "dram") -> Path:
    path = write_machine(folder)
    profile = f'profile = "{device}.toml"\n'
    path.write_text(path.read_text().replace(profile, f"{profile}wrap = {wrap}\n"))
    return path


def test_a_platform_file_wraps_a_device_innermost_first(tmp_path: Path) -> None:
    path = machine(
        tmp_path,
        '[{ kind = "throttled", read_bytes_per_s = 1e9, write_bytes_per_s = 5e8 }, '
        '{ kind = "delayed", read_ns = 100, read_p99_ns = 900, write_ns = 50, seed = 4 }, '
        '{ kind = "recorded", file = "dram.jsonl" }, { kind = "checked", block_nbytes = 512 }]',
    )
    with open_platform(path) as platform:
        device = platform.device("emu:dram")
        names = []
        inside: Any = device
        while isinstance(inside, Around):
            names.append(type(inside).__name__)
            inside = inside.inner
        assert names == ["Checked", "Recorded", "Delayed", "Throttled"]
        notes = [note for note in platform.notes if note.startswith("emu:dram: ")]
        assert [note.split()[1] for note in notes] == ["throttled", "delayed", "recorded", "checked"]
        assert "read_bytes_per_s 1000000000" in notes[0]
        assert device.info.notes["wrappers"].count(";") == 3
        assert (tmp_path / "dram.jsonl").exists()
    with pytest.raises(ConfigurationError, match=r"devices.dram: recorded: .*dram.jsonl is there already"):
        open_platform(path)


def test_the_guess_of_a_dilation_does_not_open_recordings(tmp_path: Path) -> None:
    path = machine(tmp_path, '[{ kind = "recorded", file = "dram.jsonl" }]')
    text = path.read_text()
    path.write_text(text[: text.index("[devices.cxl]")].replace('reaches.cxl = ["cxl"]\n', ""))
    with open_platform(path, clock="wall") as platform:
        assert platform.device("emu:dram").info.dilation == platform.dilation


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        ("3", r"devices.dram.wrap: 3 given; allowed: a list of tables"),
        ('["throttled"]', r"wrap: \['throttled'\] given; allowed: a list of tables"),
        ("[{}]", r"wrap\[0\].kind: missing"),
        ('[{ kind = "throtled" }]', r"wrap\[0\].kind: unknown value 'throtled'; did you mean 'throttled'"),
        ('[{ kind = "throttled" }]', r"wrap\[0\].read_bytes_per_s: missing"),
        ('[{ kind = "throttled", bytes_per_s = 0 }]', r"bytes_per_s: 0 given; allowed: 1000 to"),
        ('[{ kind = "throttled", bytes_per_s = 1e9, read_bytes_per_s = 1e9 }]', "read_bytes_per_s: unknown key"),
        ('[{ kind = "checked" }, { kind = "checked", block = 1 }]', r"wrap\[1\].block: unknown key"),
        ('[{ kind = "checked", block_nbytes = 3 }]', "block_nbytes: 3 given; allowed: 64 to"),
        ('[{ kind = "delayed", read_ns = 1 }]', "write_ns: missing"),
        (
            '[{ kind = "delayed", read_ns = 9, read_p99_ns = 8, write_ns = 1 }]',
            "read_p99_ns: latency: p99_ns 8 is below",
        ),
        ('[{ kind = "delayed", read_ns = nan, write_ns = 1 }]', "read_ns: nan given"),
        ('[{ kind = "recorded" }]', "file: missing"),
        ('[{ kind = "recorded", file = "x", replace = 1 }]', "replace: 1 given; allowed: true or false"),
        ('[{ kind = "recorded", file = "no/x" }]', "devices.dram: recorded: .*No such file"),
    ],
)
def test_a_wrong_table_is_refused_with_file_and_key(tmp_path: Path, wrap: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_platform(machine(tmp_path, wrap))
    assert "machine.toml" in str(caught.value)


def test_a_memory_that_only_others_reach_is_not_wrapped_for_nothing(tmp_path: Path) -> None:
    path = machine(tmp_path, '[{ kind = "recorded", file = "cxl.jsonl" }]', "cxl")
    with pytest.raises(ConfigurationError, match=r"devices.cxl: emu:cxl: a wrapper sees .* memory only"):
        open_platform(path)
    assert not (tmp_path / "cxl.jsonl").exists()


def real(folder: Path, wrap: str) -> Path:
    path = folder / "real.toml"
    path.write_text(
        'clock = "wall"\nhost = "cpu"\n[devices.cpu]\ndriver = "cpu"\ncapacity = 1_048_576\n'
        f"threads = 1\nwrap = {wrap}\n"
    )
    return path


@pytest.mark.parametrize(
    ("wrap", "provenance"),
    [
        ("[]", "measured"),
        ('[{ kind = "recorded", file = "a.jsonl" }, { kind = "checked" }]', "measured"),
        ('[{ kind = "throttled", bytes_per_s = 1e9 }, { kind = "checked" }]', "emulated"),
        ('[{ kind = "delayed", read_ns = 1, write_ns = 1 }]', "emulated"),
    ],
)
def test_a_real_device_that_is_slowed_down_is_not_measured(tmp_path: Path, wrap: str, provenance: str) -> None:
    with open_platform(real(tmp_path, wrap)) as platform:
        assert platform.provenance == provenance
        assert platform.device("cpu").info.provenance == "real"


# -- by hand ------------------------------------------------------------------------------------------------------


def test_a_wrapper_that_cannot_be_made_closes_the_device_inside() -> None:
    on = site()
    opened: list[Device] = []

    def open_device(inside: Site) -> Device:
        opened.append(reference(inside, []))
        return opened[0]

    with pytest.raises(ConfigurationError):
        wrapped(on, open_device, [lambda device, inside: Throttled(device, inside, 0)])
    with pytest.raises(Gone):
        opened[0].alloc(1)


def test_a_device_on_the_platforms_own_site_is_refused_before_anything_counts_twice() -> None:
    on = site()
    device = Throttled(reference(on, []), on, 10**9)
    region = device.alloc(8)
    with pytest.raises(ConfigurationError, match=r"open it on site\.inside"):
        device.submit(Read(region.all(), np.empty(8, dtype=np.uint8)))
    device.close()


def test_what_the_device_inside_refuses_is_refused_by_submit_and_nothing_was_queued(tmp_path: Path) -> None:
    write_machine(tmp_path)
    text = (tmp_path / "machine.toml").read_text()
    wrap = "wrap = [{ kind = 'checked' }, { kind = 'delayed', read_ns = 1, write_ns = 1 }]\n"
    (tmp_path / "machine.toml").write_text(text.replace('profile = "nvme.toml"\n', f'profile = "nvme.toml"\n{wrap}'))
    with open_platform(tmp_path / "machine.toml") as platform:
        nvme = platform.device("emu:nvme")
        region = nvme.alloc(8192)
        with pytest.raises(Misaligned):
            nvme.submit(Read(region.at(0, 100), np.empty(100, dtype=np.uint8)))
        ended(platform.clock, nvme.submit(Read(region.all(), np.empty(8192, dtype=np.uint8))))
        nvme.free(region)
        with pytest.raises(OutOfRange):
            nvme.submit(Read(region.all(), np.empty(8192, dtype=np.uint8)))


def test_a_delay_that_is_under_way_at_close_ends_as_gone_and_touches_nothing() -> None:
    on = site()
    device = reference(on, [lambda device, inside: Delayed(device, inside, Latency(1000), Latency(1000))])
    region, into = filled(on.clock, device, 64), np.zeros(64, dtype=np.uint8)
    read = device.submit(Read(region.all(), into))
    on.clock.wait_until(on.clock.now() + 10)
    device.close()
    assert isinstance(read.error, Gone)
    on.clock.wait_until(on.clock.now() + 5000)
    assert not into.any()


def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(ROOT / "docs" / "wrappers.md")
    assert "checksum" in capsys.readouterr().out


def test_spans_of_a_wrapped_command_are_the_callers_own(layer: Layer) -> None:
    on = site()
    device = reference(on, [layer])
    region = device.alloc(64)
    spans = Spans([(1, 2), (40, 3)])
    completion = device.submit(Read(region.all().__class__(region, spans), np.empty(5, dtype=np.uint8)))
    ended(on.clock, completion)
    assert isinstance(completion.command, Read)
    assert completion.command.source.spans is spans


# -- under the runtime --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["split-all", "topk-blocks"])
def test_a_policy_decodes_the_same_bits_on_wrapped_devices_and_moves_the_same_bytes(
    tmp_path: Path, policy: str
) -> None:
    model, prompt = tiny_model(), tiny_workload(120).token_ids
    wrap = {
        f"devices.{name}.wrap": [
            {"kind": "throttled", "bytes_per_s": 10**8},
            {"kind": "delayed", "read_ns": 100, "read_p99_ns": 9_000, "write_ns": 200},
            {"kind": "recorded", "file": str(tmp_path / f"{name}.jsonl")},
            {"kind": "checked"},
        ]
        for name in ("gpu", "dram", "nvme", "pnm")
    }
    bare, inside = decode(model, [prompt], policy), decode(model, [prompt], policy, overrides=wrap)
    assert inside.tokens == bare.tokens
    assert inside.outputs.tobytes() == bare.outputs.tobytes()
    assert inside.elapsed_ns > 5 * bare.elapsed_ns
    for name, use in bare.devices.items():
        other = inside.devices[name]
        assert (other.bytes_read, other.bytes_written, other.commands) == (
            use.bytes_read,
            use.bytes_written,
            use.commands,
        ), name
    assert len(read_recording(tmp_path / "gpu.jsonl").entries) > inside.devices["emu:gpu"].commands
