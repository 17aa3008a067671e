"""Tables of an NVMe drive, made field by field at the offsets of the NVMe 2.0 specification."""

from __future__ import annotations


def controller_table(
    model: str = "",
    serial: str = "",
    firmware: str = "",
    mdts: int = 0,
    optional: int = 0,
    cache: bool = False,
) -> bytes:
    """Identify, controller: 4096 bytes."""
    table = bytearray(4096)
    table[4:24] = serial.ljust(20).encode()
    table[24:64] = model.ljust(40).encode()
    table[64:72] = firmware.ljust(8).encode()
    table[77] = mdts
    table[520:522] = optional.to_bytes(2, "little")
    table[525] = int(cache)
    return bytes(table)


def namespace_table(
    blocks: int = 2048,
    shift: int = 9,
    metadata: int = 0,
    layout: int = 0,
    features: int = 0,
    deallocated: int = 0,
    write_unit: int = 1,
    protected: bool = False,
) -> bytes:
    """Identify, namespace: 4096 bytes with one format."""
    table = bytearray(4096)
    table[0:8] = blocks.to_bytes(8, "little")
    table[8:16] = blocks.to_bytes(8, "little")
    table[24], table[25], table[26], table[33] = features, 0, layout, deallocated
    table[64:66] = (write_unit - 1).to_bytes(2, "little")
    table[99] = int(protected)
    table[128:130] = metadata.to_bytes(2, "little")
    table[130] = shift
    return bytes(table)


def health_log(
    warning: int = 0,
    kelvin: int = 300,
    spare: int = 100,
    threshold: int = 10,
    used: int = 0,
    read_units: int = 0,
    written_units: int = 0,
    media_errors: int = 0,
) -> bytes:
    """The SMART log: 512 bytes."""
    log = bytearray(512)
    log[0], log[3], log[4], log[5] = warning, spare, threshold, used
    log[1:3] = kelvin.to_bytes(2, "little")
    log[32:48] = read_units.to_bytes(16, "little")
    log[48:64] = written_units.to_bytes(16, "little")
    log[160:176] = media_errors.to_bytes(16, "little")
    return bytes(log)
