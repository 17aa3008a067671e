"""What GPUs there are, without touching any, and if none, why: torch without CUDA, no driver, no permission.

The system is asked first (nodes below /dev, PCI devices below /sys), torch second, so that the answer is "you may not
open /dev/nvidia0" and not "no CUDA-capable device is detected". Nodes are opened for a moment, to learn whether that is
allowed; no context is made.
"""

from __future__ import annotations

import posixpath
from dataclasses import asdict, dataclass
from typing import Any

from tierloop.devices.drivers.kernel_numbers import number_of
from tierloop.devices.errors import DeviceError, NoPermission, NotPresent, Unsupported
from tierloop.devices.system import HOST, System

_PCI = "/sys/bus/pci/devices"
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY = "0x03"
"""Class codes of display and 3D controllers begin so."""
_NODES = ("nvidiactl", "nvidia0", "nvidia-uvm", "kfd")
_DRIVERS = {
    "NVIDIA": ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"),
    "AMD": ("/sys/module/amdgpu/version",),
}


@dataclass(frozen=True)
class Slot:
    """Where a GPU sits: its PCI address and the NUMA node that it is nearest to; None where the system does not say."""

    bus_address: str | None = None
    numa_node: int | None = None
    vendor: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees. `total_nbytes` is its memory."""

    device: str
    name: str
    total_nbytes: int
    compute_capability: str
    slot: Slot

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Gpus:
    """What there is. `reasons` say why there is none, or not what one would expect."""

    found: tuple[Gpu, ...]
    runtime: str
    driver: str
    reasons: tuple[str, ...]


def gpus(torch: Any = None, system: System = HOST) -> Gpus:
    """The GPUs of this machine as `torch` (imported if not given) and the system see them."""
    if torch is None:
        import torch
    slots, reasons = gpu_slots(system), []
    runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    runtime = runtime or (f"ROCm {torch.version.hip}" if getattr(torch.version, "hip", None) else "")
    if not runtime:
        reasons.append(f"torch {torch.__version__} was built without CUDA and ROCm: install a build with it")
    elif not slots:
        reasons.append(f"{_PCI} has no GPU of {' or '.join(_VENDORS.values())}")
    refusal = _refusal(slots, system)
    if refusal:
        reasons.append(refusal)
    found: list[Gpu] = []
    if runtime:
        try:
            found = [_seen(torch, number, slots) for number in range(torch.cuda.device_count())]
        except RuntimeError as error:
            reasons.append(f"torch does not start {runtime}: {error}")
        if slots and not found and not refusal:
            reasons.append(f"torch with {runtime} sees none of {len(slots)} GPUs: is CUDA_VISIBLE_DEVICES set?")
    return Gpus(tuple(found), runtime, driver_version(system), tuple(reasons))


def gpu_slots(system: System = HOST) -> tuple[Slot, ...]:
    """GPUs on the bus, of the vendors that torch computes on, by their address."""
    found = []
    for address in sorted(_listed(system, _PCI)):
        vendor = _VENDORS.get(_text(system, f"{_PCI}/{address}/vendor"))
        if vendor is not None and _text(system, f"{_PCI}/{address}/class").startswith(_DISPLAY):
            found.append(Slot(address, _node(_text(system, f"{_PCI}/{address}/numa_node")), vendor))
    return tuple(found)


def slot_at(address: str, system: System = HOST) -> Slot:
    """The slot with a PCI address; without a NUMA node where the system does not say."""
    return Slot(address, _node(_text(system, posixpath.join(_PCI, address, "numa_node"))))


def slot_of(number: int, system: System = HOST) -> Slot:
    """The slot of the GPU that torch counts as `number`; empty where torch does not know its address."""
    import torch

    return _slot_of(torch, number, system)


def driver_version(system: System = HOST) -> str:
    """The version of the kernel's driver, or ""."""
    for vendor, paths in _DRIVERS.items():
        for path in paths:
            lines = _text(system, path).splitlines()
            if lines:
                return f"{vendor} {lines[0].strip()}"
    return ""


def refuse_where_there_is_none(name: str, number: int, system: System = HOST, torch: Any = None) -> None:
    """Raises NotPresent, NoPermission or Unsupported, with the reason, unless torch sees a GPU of that number."""
    seen = gpus(torch, system)
    if number < len(seen.found):
        return
    kind: type[DeviceError] = NotPresent
    if not seen.runtime:
        kind = Unsupported
    elif any(reason.startswith("permission") for reason in seen.reasons):
        kind = NoPermission
    have = ", ".join(gpu.device for gpu in seen.found) or "none"
    raise kind(name, "open", f"cuda:{number} is not there; there is: {have}. {'; '.join(seen.reasons)}".rstrip(". "))


def _seen(torch: Any, number: int, slots: tuple[Slot, ...]) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    address = _address(properties)
    slot = next((slot for slot in slots if slot.bus_address == address), Slot(address))
    return Gpu(
        f"cuda:{number}",
        properties.name,
        int(properties.total_memory),
        f"{properties.major}.{properties.minor}",
        slot,
    )


def _slot_of(torch: Any, number: int, system: System) -> Slot:
    address = _address(torch.cuda.get_device_properties(number))
    return Slot() if address is None else slot_at(address, system)


def _address(properties: Any) -> str | None:
    """The PCI address from what torch says of a device; builds before 2.8 do not."""
    domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _refusal(slots: tuple[Slot, ...], system: System) -> str:
    """Why the nodes of the driver are of no use."""
    there = [node for node in _NODES if _exists(system, f"/dev/{node}")]
    if slots and not there:
        return f"{len(slots)} GPUs on the bus, and no node of a driver below /dev: is the kernel's driver loaded?"
    for node in there:
        try:
            system.close(system.open(f"/dev/{node}", 0o2))
        except PermissionError as error:
            return f"permission to open /dev/{node} is refused: {error}"
        except OSError:
            continue  # present and broken: torch will say how
    return ""


def _exists(system: System, path: str) -> bool:
    try:
        system.stat(path)
    except OSError:
        return False
    return True


def _node(text: str) -> int | None:
    return number_of(text)  # −1: the firmware does not say


def _text(system: System, path: str) -> str:
    try:
        return system.read_text(path)
    except (OSError, UnicodeDecodeError):
        return ""


def _listed(system: System, path: str) -> list[str]:
    try:
        return list(system.listdir(path))
    except OSError:
        return []
