"""Small emulated machines with round numbers, written as platform and profile files and opened by the registry.

`open_machine` writes the profiles below and a platform file into a folder. Rates: dram 10 bytes/ns, cxl reads 4 and
writes 2 bytes/ns, gpu 20 bytes/ns, pcie 5 bytes/ns per direction, cxl link 8 bytes/ns, half wire 5 bytes/ns shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tierloop.devices.commands import Command
from tierloop.devices.completion import Completion
from tierloop.devices.device import Device
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform

DEFINED = 'source = "defined: for tests"'
KERNELS = (
    '["attend", "logits", "combine", "merge", "score", "topk", "gather", "append", "quantize", "dequantize", "dense", '
    '"chase"]'
)
DTYPES = '["float32", "float16", "bfloat16", "int8", "fp8_e4m3"]'
FAR = 1 << 60
"""A deadline that no test reaches, in ns."""


def number(name: str, value: int) -> str:
    """A constant of a profile."""
    return f"{name} = {{ value = {value}, {DEFINED} }}\n"


def memory(capacity: int, read: int, write: int, latency_ns: int) -> str:
    """A memory table; rates in bytes/s."""
    return (
        "[memory]\n"
        + number("capacity", capacity)
        + number("read_bytes_per_s", read)
        + number("write_bytes_per_s", write)
        + number("latency_ns", latency_ns)
    )


def executor(name: str, kind: str, queues: int, overhead_ns: int, flops: int = 0, more: str = "") -> str:
    """An executor table; with a flop rate it has all kernels."""
    text = f'[executors.{name}]\nkind = "{kind}"\nqueues = {queues}\nverbs = ["read", "write", "copy", "flush"]\n'
    text += number("overhead_ns", overhead_ns) + more
    if flops:
        text += f"kernels = {KERNELS}\ndtypes = {DTYPES}\n" + number("flops_per_s", flops)
    return text


PROFILES = {
    "dram": 'kind = "cpu"\nsummary = "memory with cores"\n'
    + memory(1 << 24, 10_000_000_000, 10_000_000_000, 100)
    + executor("cores", "cores", 4, 1_000, 1_000_000_000),
    "cxl": 'kind = "cxl"\nsummary = "memory only"\n' + memory(1 << 24, 4_000_000_000, 2_000_000_000, 300),
    "gpu": 'kind = "gpu"\nsummary = "memory, kernels and two copy engines"\n'
    + memory(1 << 22, 20_000_000_000, 20_000_000_000, 200)
    + executor("gpu", "gpu", 2, 5_000, 4_000_000_000)
    + executor("h2d", "dma", 2, 0)
    + executor("d2h", "dma", 1, 0),
    "nvme": """kind = "nvme"
summary = "flash"
[memory]
firmware = "flash"
alignment = 4096
byte_addressable = false
persistent = true
"""
    + number("capacity", 1 << 24)
    + number("latency_ns", 1_000)
    + "[memory.flash]\n"
    + number("channels", 4)
    + number("dies_per_channel", 2)
    + number("planes", 2)
    + number("page_nbytes", 16_384)
    + number("stripes_per_block", 16)
    + number("spare_percent", 10)
    + number("read_ns", 50_000)
    + number("program_ns", 400_000)
    + number("erase_ns", 2_000_000)
    + number("channel_bytes_per_s", 800_000_000)
    + executor("dma", "dma", 4, 2_000),
    "pnm": 'kind = "pnm"\nsummary = "banks and engines"\n[memory]\nfirmware = "pnm"\n'
    + number("capacity", 1 << 24)
    + number("latency_ns", 100)
    + "[memory.pnm]\n"
    + number("channels", 4)
    + number("channel_bytes_per_s", 2_000_000_000)
    + number("banks", 16)
    + number("row_nbytes", 4_096)
    + number("granule_nbytes", 256)
    + number("burst_nbytes", 64)
    + number("row_cycle_ns", 50)
    + number("engines", 8)
    + number("engine_bytes_per_s", 2_000_000_000)
    + number("request_ns", 10)
    + number("tile_nbytes", 4_096)
    + executor("pnm", "pnm", 2, 3_000, 100_000_000_000).replace(', "dense"', "")
    + executor("copy", "dma", 1, 1_000),
}

PLATFORM = """description = "for tests"
clock = "virtual"
host = "dram"
"""

DEVICES = {
    "dram": '[devices.dram]\ndriver = "emulated"\nprofile = "dram.toml"\nreaches.cxl = ["cxl"]\n',
    "cxl": '[devices.cxl]\ndriver = "emulated"\nprofile = "cxl.toml"\n',
    "gpu": '[devices.gpu]\ndriver = "emulated"\nprofile = "gpu.toml"\n'
    'reaches.dram = ["pcie"]\nreaches.cxl = ["pcie", "cxl"]\n',
    "nvme": '[devices.nvme]\ndriver = "emulated"\nprofile = "nvme.toml"\nreaches.dram = ["half"]\n',
    "pnm": '[devices.pnm]\ndriver = "emulated"\nprofile = "pnm.toml"\nreaches.dram = ["half2"]\n',
}

LINKS = """
[links.pcie]
ends = ["dram", "gpu"]
bytes_per_s = 5e9
latency_ns = 500
source = "defined: for tests"
[links.cxl]
ends = ["dram", "cxl"]
bytes_per_s = 8e9
latency_ns = 40
source = "defined: for tests"
[links.half]
ends = ["dram", "nvme"]
bytes_per_s = 5e9
latency_ns = 70
duplex = "half"
source = "defined: for tests"
[links.half2]
ends = ["dram", "pnm"]
bytes_per_s = 5e9
latency_ns = 70
duplex = "half"
source = "defined: for tests"
"""


def write_machine(folder: Path, order: Sequence[str] = tuple(DEVICES), profiles: dict[str, str] | None = None) -> Path:
    """Write the platform file, devices in the given order, and its profiles; returns the platform's path."""
    for name, text in (PROFILES | (profiles or {})).items():
        (folder / f"{name}.toml").write_text(text)
    path = folder / "machine.toml"
    path.write_text(PLATFORM + "".join(DEVICES[name] for name in order) + LINKS)
    return path


def open_machine(
    folder: Path, order: Sequence[str] = tuple(DEVICES), profiles: dict[str, str] | None = None, **options: Any
) -> Platform:
    """The machine, opened with the hazard checker on."""
    return open_platform(write_machine(folder, order, profiles), check_hazards=True, **options)


def finish(platform: Platform, *completions: Completion) -> list[int]:
    """Let time pass until all have ended; returns when each did, in ns."""
    assert platform.clock.run_until(lambda: all(c.done for c in completions), FAR)
    return [c.result().ended_ns for c in completions]


def duration(platform: Platform, device: Device, command: Command, queue: int = 0) -> int:
    """How long a command takes on its own, in ns."""
    start = platform.clock.now()
    (end,) = finish(platform, device.submit(command, queue))
    return end - start
