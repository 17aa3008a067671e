"""Where the rig's packages come from, that they are what the index says, and that a set-up is whole or not there."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierloop.devices.errors import ConfigurationError
from tierloop.tools.guest import packages, setting_up
from tierloop.tools.guest.cpio import Entry, archive
from tierloop.tools.guest.layers import merge_usr
from tierloop.tools.guest.packages import Apt, Package, RigError, Source, intact, release, source
from tierloop.tools.guest.places import FORMAT, Layers, Places, write_note

LAYERS = Layers(FORMAT, "bookworm", "6.12", "10", 1.0, (("a.deb", "0" * 64),))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rig is made on Linux")


def apt_folder(tmp_path: Path, name: str, text: str) -> Path:
    (tmp_path / "sources.list.d").mkdir(exist_ok=True)
    place = tmp_path / name if name == "sources.list" else tmp_path / "sources.list.d" / name
    place.write_text(text)
    return tmp_path


def test_a_mirror_is_read_from_stanzas(tmp_path: Path) -> None:
    text = "Types: deb\nURIs: https://mirror.test/debian\nSuites: bookworm bookworm-updates\nSigned-By: /keys/a.gpg\n"
    folder = apt_folder(tmp_path, "debian.sources", f"# a comment\n{text}")
    assert source("bookworm", folder) == Source("https://mirror.test/debian", "/keys/a.gpg")


def test_a_mirror_is_read_from_lines(tmp_path: Path) -> None:
    folder = apt_folder(tmp_path, "sources.list", "deb [arch=amd64 signed-by=/k] https://mirror.test/d bookworm main\n")
    assert source("bookworm", folder) == Source("https://mirror.test/d", "/k")


@pytest.mark.parametrize(
    "text",
    [
        "Types: deb-src\nURIs: https://m\nSuites: bookworm\n",
        "Types: deb\nURIs: https://m\nSuites: bookworm\nEnabled: no\n",
        "Types: deb\nURIs: https://m\nSuites: trixie\n",
        "# Types: deb\n# URIs: https://m\n# Suites: bookworm\n",
    ],
)
def test_a_source_that_does_not_serve_the_release_is_no_mirror(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="no source of apt"):
        source("bookworm", apt_folder(tmp_path, "debian.sources", text))


@given(st.text(max_size=200))
def test_no_text_of_a_source_raises_anything_else(text: str) -> None:
    found = [*packages._stanzas(text), *packages._lines(text)]
    assert all(one.uri for one, _ in found)


@pytest.mark.parametrize(
    "text", ["", 'ID=ubuntu\nVERSION_CODENAME=noble\nPRETTY_NAME="Ubuntu 24.04"', "ID=debian\nVERSION_CODENAME=buster"]
)
def test_another_system_is_told_what_would_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "os-release").write_text(text)
    with pytest.raises(ConfigurationError, match="allowed: Debian bookworm, trixie"):
        release(tmp_path / "os-release")


def test_a_machine_without_apt_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="needs apt-get"):
        release(tmp_path / "os-release")


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", ""])
def test_a_host_of_another_kind_is_refused(machine: str) -> None:
    with pytest.raises(ConfigurationError, match=f"this is {machine}"):
        setting_up.check_host(machine)


def a_package(data: bytes) -> Package:
    return Package("a", "1", "a_1_amd64.deb", len(data), hashlib.sha256(data).hexdigest())


@given(st.binary(min_size=1, max_size=64), st.data())
def test_any_other_byte_or_length_is_noticed(data: bytes, draw: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, package = Path(folder) / "a.deb", a_package(data)
        path.write_bytes(data)
        assert intact(path, package)
        at = draw.draw(st.integers(0, len(data) - 1))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert not intact(path, package)
        path.write_bytes(data[:-1])
        assert not intact(path, package)


def programs(folder: Path, **texts: str) -> Path:
    """Shell scripts that stand for programs of apt."""
    folder.mkdir()
    for name, text in texts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Apt:
    """apt with a mirror that is made up, and nothing installed that could answer."""
    found = apt_folder(tmp_path, "sources.list", "deb [signed-by=/k] https://mirror.test/debian bookworm main\n")
    monkeypatch.setattr(packages, "source", lambda suite: source(suite, found))
    return Apt(Places(tmp_path / "rig"), "bookworm")


def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **texts: str) -> None:
    bins = programs(tmp_path / "bin", **texts)
    monkeypatch.setenv("PATH", f"{bins}:/usr/bin:/bin")


def test_updates_are_read_from_where_this_machine_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        "deb https://mirror.test/debian bookworm main\n"
        "deb [signed-by=/k] https://mirror.test/debian bookworm-updates main\n"
        "deb [signed-by=/s] https://safe.test/debian-security bookworm-security main\n"
    )
    found = apt_folder(tmp_path, "sources.list", told)
    monkeypatch.setattr(packages, "source", lambda suite: source(suite, found))
    monkeypatch.setattr(packages, "_KEYS", Path("/nothing"))
    Apt(Places(tmp_path / "rig"), "bookworm")
    assert (tmp_path / "rig/apt/sources.list").read_text().splitlines() == [
        "deb https://mirror.test/debian bookworm main",
        "deb https://mirror.test/debian bookworm-backports main",
        "deb [signed-by=/k] https://mirror.test/debian bookworm-updates main",
        "deb [signed-by=/s] https://safe.test/debian-security bookworm-security main",
    ]


def test_only_a_release_and_its_backports_are_read(apt: Apt, tmp_path: Path) -> None:
    assert (tmp_path / "rig/apt/sources.list").read_text() == (
        "deb [signed-by=/k] https://mirror.test/debian bookworm main\n"
        "deb [signed-by=/k] https://mirror.test/debian bookworm-backports main\n"
    )
    told = (tmp_path / "rig/apt/conf").read_text()
    assert 'Dir::Etc::sourceparts "/dev/null"' in told
    assert f'Dir::State::lists "{tmp_path}/rig/apt/lists"' in told


def test_a_mirror_that_says_nothing_is_given_up_soon(apt: Apt, tmp_path: Path) -> None:
    told = dict(line.rstrip(";").split(" ", 1) for line in (tmp_path / "rig/apt/conf").read_text().splitlines())
    tries = 1 + int(told["Acquire::Retries"].strip('"'))
    for scheme in ("http", "https"):
        assert tries * int(told[f"Acquire::{scheme}::Timeout"].strip('"')) <= 60


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="this machine has no apt")
def test_apt_takes_a_folder_with_spaces_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "source", lambda suite: Source("https://mirror.test/debian", "/k"))
    rig = Places(tmp_path / "a rig")
    made = Apt(rig, "bookworm")
    assert f'Dir::State::lists "{rig.apt}/lists";' in made._run("apt-config", "dump")


@pytest.mark.parametrize("name", ['a"b', "a\nb"])
def test_a_folder_that_apt_cannot_be_told_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(packages, "source", lambda suite: Source("https://mirror.test/debian", "/k"))
    with pytest.raises(ConfigurationError, match="apt takes no folder with quotes or line ends"):
        Apt(Places(tmp_path / name), "bookworm")


def test_what_apt_complains_of_is_passed_on(apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, tmp_path, apt_get="echo 'E: Unable to locate package nonesuch' >&2; exit 100")
    with pytest.raises(RigError, match="Unable to locate package nonesuch"):
        apt.missing(["nonesuch"])


def test_packages_are_named_with_their_version_and_sum(
    apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "'http://m/p/q_1.deb' qemu_1%3a10+ds~bpo12+1_amd64.deb 123 SHA256:" + "ab" * 32
    answering(monkeypatch, tmp_path, apt_get=f'echo "{line}"')
    (package,) = apt.described([("qemu", "1:10+ds~bpo12+1")])
    assert package == Package("qemu", "1:10+ds~bpo12+1", "qemu_1%3a10+ds~bpo12+1_amd64.deb", 123, "ab" * 32)


def test_a_source_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    folder = apt_folder(tmp_path, "secret.list", "deb https://mirror.test/d bookworm main\n")
    (folder / "sources.list.d/a.list").mkdir()
    (folder / "sources.list.d/b.sources").symlink_to("nowhere")
    assert source("bookworm", folder) == Source("https://mirror.test/d", "")


def test_a_package_without_a_sum_is_refused(apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, tmp_path, apt_get="echo \"'http://m/q.deb' q_1_amd64.deb 123 MD5Sum:00\"")
    with pytest.raises(RigError, match="SHA-256 sums of 0 of 1"):
        apt.described([("q", "1")])


def test_only_what_is_missing_or_broken_is_fetched(apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, tmp_path, apt_get='echo "$@" >> ../calls; printf new > b_1_amd64.deb')
    whole, broken = a_package(b"whole"), Package("b", "1", "b_1_amd64.deb", 3, hashlib.sha256(b"new").hexdigest())
    folder = tmp_path / "debs"
    folder.mkdir()
    (folder / whole.file).write_bytes(b"whole")
    (folder / broken.file).write_bytes(b"old")
    assert apt.fetch([whole, broken], folder) == 3
    assert (tmp_path / "calls").read_text() == "-qq download b=1\n"


def test_a_corrupt_download_is_refused(apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, tmp_path, apt_get="printf bad > a_1_amd64.deb")
    with pytest.raises(RigError, match=r"a_1_amd64.deb is not what the signed index says"):
        apt.fetch([a_package(b"god")], tmp_path / "debs")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    """A rig to be made on a host that could."""
    monkeypatch.setattr(setting_up, "release", lambda: "bookworm")
    return Places(tmp_path / "guest")


def test_a_set_up_that_fails_leaves_what_stood_there(rig: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.layers.mkdir(parents=True)
    write_note(rig.layers, LAYERS)

    def failing(places: Places, suite: str, say: setting_up.Say) -> Layers:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(setting_up, "_made", failing)
    with pytest.raises(RigError, match="No space left on device"):
        setting_up.set_up(rig, print, again=True)
    assert rig.standing() == LAYERS


def test_layers_that_stand_are_not_made_again(rig: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.layers.mkdir(parents=True)
    write_note(rig.layers, LAYERS)
    monkeypatch.setattr(setting_up, "_made", lambda *_: pytest.fail("made again"))
    assert setting_up.set_up(rig, print) == LAYERS


def test_layers_appear_whole(rig: Places, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    write_note(new, LAYERS)
    rig.layers.mkdir(parents=True)
    (rig.layers / "old").touch()
    setting_up._replace(new, rig.layers, tmp_path / "old")
    assert rig.standing() == LAYERS
    assert not (rig.layers / "old").exists()


@pytest.mark.parametrize("note", ["", "{}", '{"format": 0}', "[]", '{"packages": 3}'])
def test_half_made_layers_are_none(rig: Places, note: str) -> None:
    rig.layers.mkdir(parents=True)
    (rig.layers / "rig.json").write_text(note)
    with pytest.raises(ConfigurationError, match="tierloop guest setup"):
        rig.needed()


def test_too_little_space_is_said_before_anything_is_fetched(rig: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 10 << 20))
    with pytest.raises(ConfigurationError, match="10 MiB free"):
        setting_up.set_up(rig, print)


def test_what_was_fetched_before_needs_no_space_again(rig: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.packages.mkdir(parents=True)
    with (rig.packages / "a.deb").open("wb") as file:
        file.truncate(100 << 20)
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1100 << 20))
    monkeypatch.setattr(setting_up, "_made", lambda *_: LAYERS)
    assert setting_up.set_up(rig, print) == LAYERS
    (rig.packages / "a.deb").unlink()
    with pytest.raises(ConfigurationError, match="1100 MiB free; the rig needs 1200 MiB"):
        setting_up.set_up(rig, print)


def test_a_rig_is_neither_removed_nor_replaced_while_a_guest_runs_from_it(rig: Places) -> None:
    run = rig.runs / "run-a"
    run.mkdir(parents=True)
    (run / "owner").touch()
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(run / "owner")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        assert held.stdin is not None
        held.stdout.readline()
        with pytest.raises(ConfigurationError, match="run-a"):
            setting_up.clean(rig)
        with pytest.raises(ConfigurationError, match="run-a"):
            setting_up.set_up(rig, print, again=True)
        held.stdin.close()
    assert setting_up.clean(rig) == 0
    assert not rig.root.exists()


def test_folders_of_the_old_kind_are_merged_below_usr(tmp_path: Path) -> None:
    for name in ("bin/a", "usr/bin/b", "lib/x/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "lib/d").symlink_to("x/c")
    merge_usr(tmp_path)
    merge_usr(tmp_path)
    assert (tmp_path / "bin/b").read_text() == "usr/bin/b"
    assert (tmp_path / "usr/bin/a").read_text() == "bin/a"
    assert (tmp_path / "lib").is_symlink()
    assert (tmp_path / "usr/lib/d").read_text() == "lib/x/c"


def test_the_first_file_system_is_a_cpio_archive(tmp_path: Path) -> None:
    """Told apart by a reader that knows the format from its own description: fields of eight hexadecimal digits."""
    made = gzip.decompress(gzip.compress(archive({"bin": Entry(), "bin/a": Entry(b"hello", True), "e": Entry(b"")})))
    found, at = {}, 0
    while at < len(made):
        assert made[at : at + 6] == b"070701"
        fields = [int(made[at + 6 + 8 * one : at + 14 + 8 * one], 16) for one in range(13)]
        mode, nbytes, name_nbytes = fields[1], fields[6], fields[11]
        name = made[at + 110 : at + 110 + name_nbytes - 1].decode()
        start = (at + 110 + name_nbytes + 3) // 4 * 4
        found[name] = (stat.filemode(mode), made[start : start + nbytes])
        at = (start + nbytes + 3) // 4 * 4
    assert found.pop("TRAILER!!!")[1] == b""
    assert found == {"bin": ("drwxr-xr-x", b""), "bin/a": ("-rwxr-xr-x", b"hello"), "e": ("-rw-r--r--", b"")}
