"""The description of a guest's machine, what is wrong with one, and the command line that comes of it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.tools.guest.arguments import RELAY, Choices, Files, Wire, command_line
from tierloop.tools.guest.machine import DEFAULT, MACHINES, Machine, load, parse

SMALL = """
[[node]]
id = 0
mib = 512
cpus = 1
"""
FILES = Files(Path("/rig/layers"), Path("/rig/runs/a"), Path("/tmp/s"))


def words_of(machine: Machine, choices: Choices = Choices(), files: Files = FILES) -> list[str]:  # noqa: B008  # frozen
    return command_line(machine, files, choices)


def after(words: list[str], option: str) -> list[str]:
    """What stands behind each of these options."""
    return [words[at + 1] for at, word in enumerate(words) if word == option]


def of_kind(words: list[str], option: str, key: str, value: str) -> list[dict[str, Any]]:
    """The JSON behind these options where a key has a value."""
    told = [json.loads(word) for word in after(words, option) if word.startswith("{")]
    return [one for one in told if one.get(key) == value]


def test_every_shipped_machine_loads_and_says_what_it_is() -> None:
    shipped = [path.stem for path in MACHINES.glob("*.toml")]
    assert DEFAULT in shipped
    for name in shipped:
        assert load(name).about


def test_the_default_machine_has_what_the_drivers_need() -> None:
    machine = load(DEFAULT)
    assert [node.cpus > 0 for node in machine.nodes] == [True, True, False]
    assert [drive.hotplug for drive in machine.drives] == [False, True]
    assert machine.drives[0].mib_per_s
    assert machine.drives[1].error_sectors
    assert {memory.persistent for memory in machine.cxl} == {False, True}
    assert max(len(memories) for memories in machine.bridges.values()) == 2
    assert machine.rdma


def test_a_machine_is_found_by_its_path_and_remembers_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL)
    machine = load(str(path))
    assert machine.name == "mine"
    assert load(machine.origin) == machine


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[[distance]]\nfrom = 0\nto = 7\nvalue = 20", "to = 7 is no node; allowed: 0"),
        ("[[distance]]\nfrom = 0\nto = 0\nvalue = 20", "allowed: 11 to 254, two nodes"),
        ("[[path]]\nfrom = 0\nto = 'far'\nlatency_ns = 1\nmb_per_s = 1", "'far' is no node"),
        ("[[node]]\nid = 1\nmib = 512\n[[path]]\nfrom = 1\nto = 0\nlatency_ns = 1\nmb_per_s = 1", "has no cpus"),
        ("[[node]]\nid = 2\nmib = 512", "numbered 0, 1, 2"),
        ("[[node]]\nid = 1\nmib = 0", "mib = 0"),
        ("[[cxl]]\nserial = 1\nmib = 300", "multiples of 256"),
        ("[[cxl]]\nserial = 1\nmib = 256\n[[cxl]]\nserial = 1\nmib = 256", "1 comes twice"),
        ("[[cxl]]\nmib = 256", "serial"),
        ("[[drive]]\nserial = 'A,B'\nmib = 1", "letters, digits"),
        ("[[drive]]\nserial = 'A'\nmib = 1\nerror_sectors = [2048]", "sectors in [0, 2048)"),
        ("[[drive]]\nserial = 'A'\nmib = 1\n[[drive]]\nserial = 'A'\nmib = 1", "'A' comes twice"),
        ("[[drive]]\nserial = 'A'\nmib = 1\nspeed = 3", "'speed' is unknown"),
        ("[[tape]]\nmib = 3", "'tape' is unknown"),
    ],
)
def test_what_is_wrong_is_named(more: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        parse(SMALL + more, "mine")


@pytest.mark.parametrize("text", ["", "[[node]]\nid = 0\nmib = 512", "node = [", "[node]\nid = 0"])
def test_a_machine_without_processors_is_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="mine"):
        parse(text, "mine")


def test_an_unknown_name_is_answered_with_those_that_ship() -> None:
    with pytest.raises(ConfigurationError, match=f"{DEFAULT}, or a .toml file"):
        load("three-node")


VALUES = st.one_of(st.integers(-2, 1 << 70), st.text(max_size=5), st.booleans(), st.lists(st.integers(), max_size=2))


@given(st.sampled_from(["node", "drive", "cxl", "path", "distance"]), st.data())
def test_no_value_of_an_entry_gets_past_as_anything_but_a_configuration_error(kind: str, data: st.DataObject) -> None:
    keys = ["id", "mib", "cpus", "serial", "name", "bridge", "from", "to", "value", "latency_ns", "hotplug"]
    entry = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=5))
    lines = [f"{key} = {json.dumps(value)}" for key, value in entry.items()]
    text = f"{SMALL}\n[[{kind}]]\n" + "\n".join(lines)
    try:
        tomllib.loads(text)
        machine = parse(text, "mine")
    except (ConfigurationError, tomllib.TOMLDecodeError):
        return
    assert words_of(machine)


def test_each_node_has_its_memory_and_each_processor_its_node() -> None:
    machine = load(DEFAULT)
    words = words_of(machine)
    sizes = {one["id"]: one["size"] for one in of_kind(words, "-object", "qom-type", "memory-backend-ram")}
    assert [sizes[f"memory-{node.id}"] for node in machine.nodes] == [node.mib << 20 for node in machine.nodes]
    cpus = [word for word in after(words, "-numa") if word.startswith("cpu,")]
    assert cpus == ["cpu,node-id=0,socket-id=0", "cpu,node-id=1,socket-id=1"]


def test_a_node_without_processors_is_reached_best_by_the_path_with_the_least_latency() -> None:
    machine = load(DEFAULT)
    assert [machine.initiator(node) for node in machine.nodes] == [0, 1, 0]


def test_every_pair_of_nodes_has_a_distance_ports_of_cxl_included() -> None:
    machine = load(DEFAULT)
    count = len(machine.nodes) + len(machine.bridges)
    pairs = [word for word in after(words_of(machine), "-numa") if word.startswith("dist,")]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert "dist,src=0,dst=2,val=31" in pairs


def test_a_machine_without_paths_has_no_hmat() -> None:
    words = words_of(parse(SMALL, "mine"))
    assert "hmat=off" in after(words, "-M")[0]
    assert not any("initiator" in word for word in words)


def test_a_window_holds_all_memories_of_its_bridge() -> None:
    text = SMALL + "".join(f"[[cxl]]\nserial = {at + 1}\nmib = 4096\nbridge = 'b'\n" for at in range(2))
    assert "cxl-fmw.0.size=8192M" in after(words_of(parse(text, "mine")), "-M")[0]


def test_a_drive_that_can_be_pulled_out_sits_behind_a_port_of_its_own() -> None:
    machine = load(DEFAULT)
    drives = {one["serial"]: one["bus"] for one in of_kind(words_of(machine), "-device", "driver", "nvme")}
    assert drives == {"TIER0001": "pcie.0", "TIER0002": "port-TIER0002"}


def test_lost_sectors_and_limits_reach_the_block_layer() -> None:
    words = words_of(load(DEFAULT))
    rules = of_kind(words, "-blockdev", "driver", "blkdebug")
    assert [[rule["sector"] for rule in one["inject-error"]] for one in rules] == [[2048]]
    limits = {one["id"]: one["limits"] for one in of_kind(words, "-object", "qom-type", "throttle-group")}
    assert limits["limits-TIER0001"] == {"bps-total": 100 << 20, "iops-total": 5000}
    assert limits["limits-TIER0002"] == {"bps-total": 0, "iops-total": 0}


def test_the_hosts_files_are_shared_for_reading_only() -> None:
    words = words_of(load(DEFAULT), files=Files(FILES.layers, FILES.run, FILES.sockets, Path("/home/a,b/out")))
    shares = {word.split("id=share-")[1].split(",")[0]: word for word in after(words, "-fsdev")}
    assert [("readonly=on" in shares[name]) for name in ("host", "guest", "run", "results")] == [
        True,
        True,
        False,
        False,
    ]
    assert "path=/home/a,,b/out," in shares["results"]


def test_emulated_processors_are_the_default() -> None:
    assert "tcg,thread=multi" in words_of(load(DEFAULT))
    assert "kvm" in words_of(load(DEFAULT), Choices(accelerator="kvm"))


def test_more_words_reach_kernel_and_qemu() -> None:
    words = words_of(load(DEFAULT), Choices(kernel_words=("debug",), qemu_words=("-device", "mine,bus=pcie.0")))
    assert after(words, "-append")[0].endswith(" debug")
    assert words[-2:] == ["-device", "mine,bus=pcie.0"]


def test_a_wire_ends_where_the_other_guests_begins() -> None:
    near = Wire(Path("/tmp/w"), 0)
    ends = []
    for wire in (near, near.other):
        words = words_of(load("peer"), Choices(wire=wire))
        [told] = [word for word in after(words, "-netdev") if word.startswith("dgram,")]
        ends.append(dict(part.partition("=")[::2] for part in told.split(",")[1:]))
        [port] = of_kind(words, "-device", "netdev", "wire")
        assert port["mac"] == wire.mac
    assert ends[0]["local.path"] == ends[1]["remote.path"] != ends[0]["remote.path"] == ends[1]["local.path"]
    assert near.other.other == near
    assert len({near.address, near.other.address, near.mac, near.other.mac}) == 4


def test_ports_of_one_guest_have_different_addresses() -> None:
    words = words_of(load("peer"), Choices(wire=Wire(Path("/tmp/w"), 1)))
    macs = [port["mac"] for port in of_kind(words, "-device", "driver", "virtio-net-pci")]
    assert len(macs) == len(set(macs)) == 2
    assert len(of_kind(words_of(load("peer")), "-device", "driver", "virtio-net-pci")) == 1


def test_words_for_qemu_come_last_and_as_they_are() -> None:
    """So that a vendor's device, or one of this host by vfio, can name what stands before it."""
    vfio = ("-device", "vfio-pci,host=0000:65:00.0,bus=pcie.0")
    words = words_of(load(DEFAULT), Choices(qemu="./qemu-system-x86_64", qemu_words=vfio, kernel_words=("a=b", "c")))
    assert words[0] == "./qemu-system-x86_64"
    assert tuple(words[-2:]) == vfio
    assert after(words, "-append")[0].endswith(" a=b c")


def test_a_guests_way_out_takes_folders_with_spaces() -> None:
    """QEMU splits the command into words as a shell does."""
    words = words_of(load(DEFAULT), files=Files(Path("/rig"), Path("/rig/a"), Path("/tmp/a b")))
    [network] = [word for word in after(words, "-netdev") if word.startswith("user,")]
    assert shlex.split(network.partition("cmd:")[2])[1:] == [str(RELAY), "/tmp/a b/guest"]
