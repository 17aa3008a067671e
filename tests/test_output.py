"""Files that a command leaves are whole or not there, and JSON is strict."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierloop.tools.comparing import prepare_files
from tierloop.tools.output import OutputError, prepare_folder, to_json, write_files


@contextmanager
def full_disk(free_nbytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond so many bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_are_written_as_they_were_given(tmp_path: Path) -> None:
    write_files({tmp_path / "a": "σ\r\n", tmp_path / "b": ""})
    assert (tmp_path / "a").read_bytes() == "σ\r\n".encode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with full_disk(1000), pytest.raises(OutputError, match=r"b: cannot be written: File too large"):
        write_files({tmp_path / "a": "after", tmp_path / "b": "x" * 10_000})
    assert (tmp_path / "a").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_interrupts_a_write_leaves_nothing_half_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_files({tmp_path / "a": "whole", tmp_path / "b": None})  # type: ignore[dict-item]  # stands for any failure
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        write_files({tmp_path / "b": "text"})
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_refused_file_keeps_the_others_from_being_written(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with pytest.raises(OutputError, match="is a folder"):
        write_files({tmp_path / "a": "text", tmp_path / "b": "text"})
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_pipe_is_refused_and_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="is a device or a pipe; name a file"):
        write_files({tmp_path / "pipe": "text"})
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_files({tmp_path / "link": "text"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_one_file_for_two_outputs_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "report.html")
    with pytest.raises(OutputError, match="is named for two outputs"):
        prepare_files(tmp_path / "report.html", None, tmp_path / "link")


def test_a_file_keeps_the_permissions_that_the_user_gives_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_files({tmp_path / "ours": ""})
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path: Path) -> None:
    assert prepare_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/tierloop-out"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / where
    with pytest.raises(OutputError) as caught:
        prepare_folder(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_that_takes_no_files_is_refused_before_the_work(tmp_path: Path) -> None:
    with full_disk(0), pytest.raises(OutputError, match="cannot be written"):
        prepare_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_json_is_strict() -> None:
    text = to_json({"nan": float("nan"), "bounds": (float("inf"), 1.5), 3: "σ"})
    assert json.loads(text) == {"nan": None, "bounds": [None, 1.5], "3": "σ"}
    assert text.endswith("}\n")


def test_json_takes_names_that_are_not_unicode() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert json.loads(to_json(name).encode("ascii")) == name


def test_what_json_cannot_hold_is_a_bug() -> None:
    with pytest.raises(TypeError):
        to_json({"path": Path("x")})
