"""KVDrive after a restart: what was committed is there, and goes on to the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError, Gone
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.compare import find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.modules import Modules
from tierloop.runtime.policy import Policy, Request, make

from .decoding import SMALL, dense_of
from .tiny import tiny_model, tiny_workload

MODEL = tiny_model(num_layers=3)
PROMPT = tiny_workload(150).token_ids
TOKENS = 30
ZONES: dict[str, Any] = {"budget": 0.2, "local_tokens": 8, "update_tokens": 8, "centroids": 10, "warm_up_queries": 16}


class Run:
    """One process: a platform whose drive is a file, an engine, a policy and a decoder."""

    def __init__(self, platform: Platform, dtype: str, **options: Any) -> None:
        self.engine = Engine(platform, kv_shape(MODEL, dtype, 16, 16))
        self.policy: Policy = make(find_policy("kvdrive"), self.engine, {**ZONES, "keep_tokens": 200, **options})
        self.decoder = Decoder(Modules(MODEL.module), self.engine, self.policy, 1)

    def begin(self, prompt: list[int] = PROMPT, max_tokens: int = 0) -> Request:
        prefill = dense_of(MODEL, tuple(prompt), TOKENS).prefill
        most = max_tokens or len(prompt) + TOKENS
        request = Request("r", [*prompt, prefill.first_token], most, len(prompt), model="tiny")
        self.engine.loop.run(self.decoder.adopt(request, prefill))
        return request

    def decode(self, request: Request, until: int) -> None:
        while len(request.tokens) < until:
            self.engine.loop.run(self.decoder.step([request]))

    def end(self, request: Request) -> None:
        self.engine.loop.run(self.policy.release(request))
        self.engine.close()


@contextmanager
def run(drive: Path, dtype: str = "float32", **options: Any) -> Iterator[Run]:
    with open_platform(SMALL, overrides={"devices.nvme.keep": str(drive)}, check_hazards=True) as platform:
        yield Run(platform, dtype, **options)


def tokens_without_a_restart(dtype: str = "float32", **options: Any) -> list[int]:
    with open_platform(SMALL) as platform:
        here = Run(platform, dtype, **options)
        request = here.begin()
        here.decode(request, len(PROMPT) + TOKENS)
        here.end(request)
        return request.tokens


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("options", [{}, {"dram_share": 0.2}, {"dram_share": 0.0, "chunk_tokens": 1}])
def test_a_request_goes_on_to_the_same_tokens(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    with run(tmp_path / "drive", dtype, **options) as first:
        request = first.begin()
        first.decode(request, len(PROMPT) + 14)
        before = list(request.tokens)
        # The process ends here: nothing is released.
    with run(tmp_path / "drive", dtype, **options, resume=True) as second:
        request = second.begin()
        assert len(PROMPT) + 1 < len(request.tokens) < len(before), "it goes on from a commit in the middle"
        assert request.tokens == before[: len(request.tokens)]
        second.decode(request, len(PROMPT) + TOKENS)
        assert request.tokens == tokens_without_a_restart(dtype, **options)
        second.end(request)


def test_a_request_that_was_released_is_kept_whole(tmp_path: Path) -> None:
    with run(tmp_path / "drive") as first:
        request = first.begin()
        first.decode(request, len(PROMPT) + 12)
        first.end(request)
        before = list(request.tokens)
    with run(tmp_path / "drive", resume=True) as second:
        request = second.begin()
        assert request.tokens == before
        second.decode(request, len(PROMPT) + TOKENS)
        assert request.tokens == tokens_without_a_restart()
        second.end(request)


def test_a_restart_right_after_the_prompt_needs_no_commit_of_a_step(tmp_path: Path) -> None:
    with run(tmp_path / "drive") as first:
        first.begin()
    with run(tmp_path / "drive", resume=True) as second:
        request = second.begin()
        assert len(request.tokens) == len(PROMPT) + 1
        second.decode(request, len(PROMPT) + TOKENS)
        assert request.tokens == tokens_without_a_restart()
        second.end(request)


def test_what_is_kept_of_another_prompt_or_model_is_refused(tmp_path: Path) -> None:
    with run(tmp_path / "drive") as first:
        request = first.begin()
        first.end(request)
    with run(tmp_path / "drive", resume=True) as second:
        with pytest.raises(ConfigurationError, match="another prompt"):
            second.begin([*PROMPT[:-1], PROMPT[-1] + 1])
        with pytest.raises(ConfigurationError, match="room for 200 tokens"):
            second.begin(max_tokens=300)
    with (
        run(tmp_path / "drive", resume=True, update_tokens=16) as other,
        pytest.raises(ConfigurationError, match="cannot be adopted"),
    ):
        other.begin()


def test_there_is_nothing_to_resume_on_an_empty_drive(tmp_path: Path) -> None:
    with run(tmp_path / "drive", resume=True) as only, pytest.raises(ConfigurationError, match="there is none"):
        only.begin()


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    with run(tmp_path / "drive", keep_tokens=0) as first:
        request = first.begin()
        first.end(request)
    with run(tmp_path / "drive", resume=True) as second, pytest.raises(ConfigurationError, match="there is none"):
        second.begin()


def test_a_budget_stays_what_it_was(tmp_path: Path) -> None:
    with run(tmp_path / "drive") as first:
        first.end(first.begin())
    with (
        run(tmp_path / "drive", resume=True, budget=0.4) as other,
        pytest.raises(ConfigurationError, match=r"budget of 0\.2, not 0\.4"),
    ):
        other.begin()


def test_a_request_that_may_become_longer_goes_on_to_the_same_tokens(tmp_path: Path) -> None:
    """K was a share of the tokens that the request could have then."""
    with run(tmp_path / "drive") as first:
        request = first.begin()
        first.decode(request, len(PROMPT) + 14)
    with run(tmp_path / "drive", resume=True) as second:
        request = second.begin(max_tokens=len(PROMPT) + TOKENS + 15)
        second.decode(request, len(PROMPT) + TOKENS)
        assert request.tokens == tokens_without_a_restart()
        second.end(request)


def test_more_tokens_than_the_request_may_have_are_refused(tmp_path: Path) -> None:
    with run(tmp_path / "drive") as first:
        request = first.begin()
        first.decode(request, len(PROMPT) + 20)
        first.end(request)
    with (
        run(tmp_path / "drive", resume=True) as second,
        pytest.raises(ConfigurationError, match="has 170 tokens already; the request may come to have 160"),
    ):
        second.begin(max_tokens=len(PROMPT) + 10)


class Unplugged:
    """Commands of a drive fail from number `left` on, until they are let through again."""

    def __init__(self, device: Any, left: int) -> None:
        self.left = left
        submit = device.submit

        def failing(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Gone("emu:nvme", "submit", "unplugged")
            return submit(*arguments, **options)

        device.submit = failing


@pytest.mark.parametrize("left", [0, 3, 7, 12, 20, 31])
def test_a_drive_that_is_lost_ends_requests_and_nothing_else(tmp_path: Path, left: int) -> None:
    """Whatever command fails first: the step ends, and everything can be given back."""
    with open_platform(SMALL, check_hazards=True, overrides={"devices.nvme.keep": str(tmp_path / "drive")}) as platform:
        here = Run(platform, "float32", dram_share=0.2, window=0.5)
        request = here.begin()
        here.decode(request, len(PROMPT) + 3)
        drive: Any = platform.memory_owner("emu:nvme")
        unplugged = Unplugged(drive, left)
        failed = False
        for _ in range(20):
            try:
                here.engine.loop.run(here.decoder.step([request]))
            except Gone:
                failed = True
                break
        assert failed
        assert isinstance(request.failure, Gone)
        unplugged.left = 1 << 30
        here.end(request)
    with run(tmp_path / "drive", dram_share=0.2, resume=True) as second:
        again = second.begin()
        second.decode(again, len(PROMPT) + TOKENS)
        assert again.tokens == tokens_without_a_restart(dram_share=0.2)
        second.end(again)


REAL = """
description = "This host's memory and a file as its drive"
clock = "wall"
host = "dram"
[devices.dram]
driver = "cpu"
capacity = 67_108_864
[devices.nvme]
driver = "nvme"
path = "{path}"
capacity = 33_554_432
create = {create}
reaches.dram = []
"""


@pytest.mark.parametrize("synchronisation", ["naive", "block-sparse", "hierarchical", "balanced"])
def test_real_devices_give_the_same_tokens_before_and_after_a_restart(tmp_path: Path, synchronisation: str) -> None:
    options: dict[str, Any] = {"dram_share": 0.1, "window": 0.5, "synchronisation": synchronisation}
    for create in (True, False):
        file = tmp_path / "real.toml"
        file.write_text(REAL.format(path=tmp_path / "medium", create=str(create).lower()))
        with open_platform(file, check_hazards=True) as platform:
            here = Run(platform, "float32", **options, resume=not create)
            request = here.begin()
            if create:
                here.decode(request, len(PROMPT) + 14)
                drive = here.engine.platform.memory_owner("nvme")
                assert drive.info.provenance == "real"
                continue  # nothing is released
            assert len(PROMPT) + 1 < len(request.tokens) < len(PROMPT) + 14
            here.decode(request, len(PROMPT) + TOKENS)
            here.end(request)
            assert request.tokens == tokens_without_a_restart(**options)
