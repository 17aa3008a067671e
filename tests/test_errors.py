"""Errors: one file of kinds, each of which says who is to blame."""

from __future__ import annotations

import builtins
import copy
import pickle
import re

import pytest

from tierloop.devices import errors
from tierloop.devices.errors import Busy, DeviceError, MediaError, NotPresent, OutOfRange, nearest, restated

KINDS = DeviceError.__subclasses__()


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+) +(\w+)(?: +also (\w+))?", errors.__doc__)
    coded = []
    for kind in KINDS:
        also = [b.__name__ for b in kind.__bases__ if b is not DeviceError]
        coded.append((kind.__name__, kind.kind, also[0] if also else ""))
    assert drawn == coded


def test_every_kind_is_different() -> None:
    assert len({kind.kind for kind in KINDS}) == len(KINDS) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_device_operation_and_detail(kind: type[DeviceError]) -> None:
    error = kind("nvme0", "read", "[8, 17) is outside 16 bytes", errno=5)
    assert str(error) == "nvme0: read: [8, 17) is outside 16 bytes"
    assert (error.device, error.op, error.detail, error.errno) == ("nvme0", "read", "[8, 17) is outside 16 bytes", 5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_caught_as_the_builtin_that_fits(kind: type[DeviceError]) -> None:
    for base in kind.__bases__:
        assert base is DeviceError or vars(builtins)[base.__name__] is base
        with pytest.raises(base):
            raise kind("d", "op", "detail")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_an_error_survives_copy_and_pickle(kind: type[DeviceError], again: object) -> None:
    assert callable(again)
    error = again(kind("d", "op", "detail", 22))
    assert type(error) is kind
    assert (str(error), error.errno) == ("d: op: detail", 22)


def test_an_error_without_a_number_has_none() -> None:
    assert MediaError("d", "read", "checksum").errno is None
    assert NotPresent("d", "open", "no such file").filename is None


def test_the_cause_is_kept() -> None:
    cause = OSError(11, "try again")
    with pytest.raises(Busy) as caught:
        raise Busy("d", "write", "queue 0 is full", cause.errno) from cause
    assert caught.value.__cause__ is cause
    assert caught.value.errno == 11


def test_near_names_come_first_and_otherwise_all() -> None:
    assert nearest("h10", ["h100", "a100", "l20"]) == "did you mean 'h100' or 'a100'?"
    assert nearest("zzz", ["h100", "a100"]) == "known: a100, h100"
    assert nearest("zzz", []) == "known: none"


def test_a_span_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="d: read"):
        raise OutOfRange("d", "read", "outside")


class Overheated(MediaError):
    """A vendor's own error, which is made in a way of its own."""

    def __init__(self, celsius: int) -> None:
        super().__init__("pad0", "read", f"{celsius} degrees", 5)


def test_an_error_is_restated_as_the_kind_that_it_is() -> None:
    again = restated(Overheated(95), "pad0", "self-test", "read: 95 degrees")
    assert type(again) is MediaError
    assert (str(again), again.errno) == ("pad0: self-test: read: 95 degrees", 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restated_error_keeps_its_class(kind: type[DeviceError]) -> None:
    assert type(restated(kind("a", "b", "c"), "d", "e", "f")) is kind
