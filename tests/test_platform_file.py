"""Platform files: includes, overrides, routes, and everything that is refused, with file, key and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.platform_file import LinkSpec, PlatformFile, read_platform
from tierloop.devices.tables import read_toml

BASE = """description = "a machine"
clock = "virtual"
host = "dram"
[devices.dram]
driver = "emulated"
profile = "demo-dram"
[devices.gpu]
driver = "emulated"
profile = "demo-gpu"
reaches.dram = ["pcie"]
[links.pcie]
ends = ["dram", "gpu"]
bytes_per_s = 12e9
latency_ns = 500
source = "defined: for tests"
"""


def nowhere(name: str) -> Path:
    raise ConfigurationError(f"unknown platform {name!r}")


def read(folder: Path, text: str = BASE, overrides: dict[str, Any] | None = None) -> PlatformFile:
    path = folder / "machine.toml"
    path.write_text(text)
    return read_platform(path, nowhere, overrides)


def test_a_file_becomes_values(tmp_path: Path) -> None:
    file = read(tmp_path)
    assert (file.name, file.clock, file.dilation, file.host) == ("machine", "virtual", "auto", "dram")
    assert file.links == {
        "pcie": LinkSpec("pcie", ("dram", "gpu"), 12 * 10**9, 12 * 10**9, 500, "full", "defined: for tests")
    }
    assert file.devices["gpu"].reaches == {"dram": (("pcie", "back"),)}
    assert file.devices["gpu"].options == {"profile": "demo-gpu"}


def test_a_route_names_its_links_from_the_executor_on(tmp_path: Path) -> None:
    more = """[devices.numa]
driver = "emulated"
reaches.gpu = ["upi", "pcie"]
[links.upi]
ends = ["numa", "dram"]
forward_bytes_per_s = 20e9
back_bytes_per_s = 10e9
latency_ns = 60
duplex = "half"
source = "defined: for tests"
"""
    file = read(tmp_path, BASE + more)
    assert file.devices["numa"].reaches == {"gpu": (("upi", "forward"), ("pcie", "forward"))}
    assert (file.links["upi"].forward_bytes_per_s, file.links["upi"].back_bytes_per_s) == (20 * 10**9, 10 * 10**9)
    assert file.links["upi"].duplex == "half"


# -- includes and overrides ---------------------------------------------------------------------------------------


def test_the_including_file_wins_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    file = read(
        tmp_path,
        """include = ["base"]
clock = "wall"
dilation = 8
[devices.gpu]
capacity = 1_000
[links.pcie]
latency_ns = 7
""",
    )
    assert (file.clock, file.dilation, file.description) == ("wall", 8, "a machine")
    assert file.devices["gpu"].options == {"profile": "demo-gpu", "capacity": 1_000}
    assert file.devices["gpu"].reaches == {"dram": (("pcie", "back"),)}
    assert (file.links["pcie"].latency_ns, file.links["pcie"].forward_bytes_per_s) == (7, 12 * 10**9)


def test_a_driver_replaces_the_device_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    file = read(tmp_path, 'include = ["base"]\n[devices.dram]\ndriver = "cpu"\n')
    assert (file.devices["dram"].driver, file.devices["dram"].options) == ("cpu", {})
    assert list(file.devices) == ["dram", "gpu"]


def test_later_includes_win_and_shared_ones_are_no_circle(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    for name, latency in (("left", 1), ("right", 2)):
        (tmp_path / f"{name}.toml").write_text(f'include = ["base.toml"]\n[links.pcie]\nlatency_ns = {latency}\n')
    assert read(tmp_path, 'include = ["left", "right"]\n').links["pcie"].latency_ns == 2


def test_a_circle_of_includes_is_shown(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('include = ["b"]\n')
    (tmp_path / "b.toml").write_text('include = ["machine"]\n')
    with pytest.raises(ConfigurationError, match=r"a circle: machine\.toml → a\.toml → b\.toml → machine\.toml"):
        read(tmp_path, 'include = ["a"]\n' + BASE)
    with pytest.raises(ConfigurationError, match=r"a circle: machine\.toml → machine\.toml"):
        read(tmp_path, 'include = ["machine"]\n' + BASE)


def test_an_include_that_is_not_there_is_blamed_on_the_file_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"machine\.toml: include: unknown platform 'base'"):
        read(tmp_path, 'include = ["base"]\n' + BASE)


def test_overrides_win_and_are_remembered(tmp_path: Path) -> None:
    changes = {"devices.gpu.capacity": 64, "devices.gpu.constants.memory.latency_ns": 9, "clock": "wall"}
    file = read(tmp_path, BASE, changes)
    assert file.clock == "wall"
    assert file.devices["gpu"].options["capacity"] == 64
    assert file.devices["gpu"].options["constants"] == {"memory": {"latency_ns": 9}}
    assert file.changed[0] == "devices.gpu.capacity = 64"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "devices.gpuu.capacity",
            1,
            r"gpuu\.capacity: there is no devices\.gpuu; did you mean 'gpu'\?",
        ),
        ("links.pci.latency_ns", 1, r"there is no links\.pci; did you mean 'pcie'\?"),
        ("device.gpu.capacity", 1, r"there is no device; did you mean 'devices'\?"),
        ("links.pcie.latencyns", 1, r"links\.pcie\.latencyns: unknown key; did you mean 'latency_ns'\?"),
        ("links.pcie.bytes_per_s", -5, r"links\.pcie\.bytes_per_s: -5 given; allowed: 1000 to"),
        ("speed", 1, r"speed: unknown key"),
        ("", 1, r"unknown key"),
    ],
)
def test_overrides_change_only_what_the_file_has(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, BASE, {key: value})


# -- what is refused ----------------------------------------------------------------------------------------------


DETOUR = '[devices.cxl]\ndriver = "emulated"\nreaches.dram = ["pcie"]\n'


def without(line: str) -> str:
    assert line in BASE
    return BASE.replace(line, "")


def instead(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (instead("host", "hosts"), r"host: missing"),
        (instead('host = "dram"', 'host = "dra"'), r"host: no device 'dra'; did you mean 'dram'\?"),
        (
            instead("[links.pcie]", "[link.pcie]"),
            r"devices\.gpu\.reaches\.dram: no link 'pcie'; known: none",
        ),
        (instead('clock = "virtual"', 'clock = "virtal"'), r"clock: unknown value 'virtal'; did you mean 'virtual'\?"),
        (without('clock = "virtual"\n'), r"clock: missing"),
        (instead('clock = "virtual"', "clock = 3"), r"clock: 3 given; allowed: 'virtual' or 'wall'"),
        ('dilation = "fast"\n' + BASE, r"dilation: 'fast' given; allowed: 'auto' or a whole number"),
        ("dilation = 0\n" + BASE, r"dilation: 0 given; allowed: 1 to"),
        ("dilation = 1.5\n" + BASE, r"dilation: 1\.5 given; allowed: a whole number"),
        ("speed = 3\n" + BASE, r"speed: unknown key"),
        ("include = 3\n" + BASE, r"include: 3 given; allowed: a list of strings"),
        (
            instead("bytes_per_s = 12e9", "bytes_per_s = -12e9"),
            r"links\.pcie\.bytes_per_s: -12000000000\.0 given; allowed: 1000 to",
        ),
        (instead("bytes_per_s = 12e9", "bytes_per_s = 0"), r"bytes_per_s: 0 given"),
        (instead("bytes_per_s = 12e9", "bytes_per_s = nan"), r"bytes_per_s: nan given"),
        (instead("bytes_per_s = 12e9", "bytes_per_s = inf"), r"bytes_per_s: inf given"),
        (instead("bytes_per_s = 12e9", "bytes_per_s = 1e20"), r"bytes_per_s: 1e\+20 given"),
        (instead("bytes_per_s = 12e9", "bytes_per_s = true"), r"bytes_per_s: True given"),
        (instead("bytes_per_s = 12e9", 'bytes_per_s = "12 GB"'), r"bytes_per_s: '12 GB' given"),
        (without("bytes_per_s = 12e9\n"), r"links\.pcie\.forward_bytes_per_s: missing"),
        (instead("latency_ns = 500", "latency_ns = 1e12"), r"latency_ns: 1000000000000\.0 given; allowed: 0 to"),
        (without('source = "defined: for tests"\n'), r"links\.pcie\.source: missing"),
        (instead('ends = ["dram", "gpu"]', 'ends = ["dram"]'), r"ends: \['dram'\] given; a link has two ends"),
        (instead('ends = ["dram", "gpu"]', 'ends = ["dram", "gpv"]'), r"ends: no device 'gpv'; did you mean 'gpu'\?"),
        (instead('ends = ["dram", "gpu"]', 'ends = ["dram", "dram"]'), r"ends: .* names something twice"),
        (BASE + 'duplex = "both"\n', r"links\.pcie\.duplex: unknown value 'both'; known: full, half"),
        (instead('["pcie"]', '["pci"]'), r"devices\.gpu\.reaches\.dram: no link 'pci'; did you mean 'pcie'\?"),
        (instead('["pcie"]', "[]"), r"reaches\.dram: the route ends at gpu, not at dram; a link is missing"),
        (instead("reaches.dram", "reaches.dran"), r"reaches\.dran: no device 'dran'; did you mean 'dram'\?"),
        (instead("reaches.dram", "reaches.gpu"), r"reaches\.gpu: a device reaches its own memory anyway"),
        (instead('reaches.dram = ["pcie"]', "reaches = 3"), r"reaches: 3 given; allowed: a table"),
        (
            BASE + '[devices.cxl]\ndriver = "emulated"\nreaches.dram = ["pcie"]\n',
            r"link pcie joins dram and gpu, but the route has come to cxl",
        ),
        (
            instead('driver = "emulated"\nprofile = "demo-gpu"', 'profile = "demo-gpu"'),
            r"devices\.gpu\.driver: missing",
        ),
        (instead("[devices.gpu]", '[devices."emu:gpu"]'), r"devices\.emu:gpu: not a name"),
        (instead("[devices.gpu]", '[devices.""]'), r"not a name"),
        ('clock = "virtual"\nhost = "x"\n', r"devices: a platform needs at least one"),
        ('clock = "virtual"\nhost = "x"\ndevices = 4\n', r"devices: 4 given; allowed: a table"),
        ("clock = \n", r"not a TOML file: Invalid value \(at line 1, column 9\)"),
        ("clock = 'a'\nclock = 'b'\n", r"not a TOML file: Cannot overwrite a value"),
    ],
)
def test_wrong_files_are_refused_with_file_key_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "machine.toml") in str(caught.value)


def test_the_file_that_holds_the_mistake_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(instead("latency_ns = 500", "latency_ns = -1"))
    with pytest.raises(ConfigurationError, match=r"base\.toml, line 14: links\.pcie\.latency_ns: -1 given"):
        read(tmp_path, 'include = ["base"]\n[links.pcie]\nbytes_per_s = 1e9\n')
    with pytest.raises(ConfigurationError, match=r"machine\.toml, line \d+: links\.pcie\.latency_ns: -2 given"):
        read(tmp_path, 'include = ["base"]\n[links.pcie]\nlatency_ns = -2\n')
    with pytest.raises(ConfigurationError, match=r"machine\.toml with the override links\.pcie\.latency_ns: links"):
        read(tmp_path, BASE, {"links.pcie.latency_ns": -3})


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is a directory"):
        read_toml(tmp_path)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_toml(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigurationError, match="not a TOML file"):
        read_toml(tmp_path / "bytes.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigurationError, match="larger than"):
        read_toml(tmp_path / "large.toml")
