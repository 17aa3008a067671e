"""Serving on devices that are lost, on this host's own cores, and in dilated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.decoding import SMALL, assert_nothing_is_left
from tests.serving_rig import MODEL, MS, alone, assert_everybody_is_served, crowd, open_real
from tierloop.devices.completion import Completion
from tierloop.devices.errors import Gone, Timeout
from tierloop.devices.platform import Platform
from tierloop.devices.registry import open_platform
from tierloop.runtime.arrivals import Arrival
from tierloop.runtime.compare import PolicyRequest, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.engine import Engine
from tierloop.runtime.modules import Modules
from tierloop.runtime.policies.paged import Paged
from tierloop.runtime.policy import Batch, Request
from tierloop.runtime.served import UNFINISHED, Served
from tierloop.runtime.serving import Server, ServingRules
from tierloop.runtime.serving_run import Serving, random_prompts, serve_model

# -- devices that are lost -------------------------------------------------------------------------------------------


@dataclass
class Loses:
    """A paged policy that loses the rows of one request, as if they lay on a device of their own, so many times."""

    times: int
    after: int = 12
    name: str = "r1"
    calls: int = field(default=0, init=False)

    def __call__(self, engine: Engine) -> Paged:
        loses = self

        class Losing(Paged):
            async def attend(self, layer: int, batch: Batch) -> list[Completion]:
                done = await super().attend(layer, batch)
                loses.lose(batch.requests)
                return done

        return Losing(engine)

    def lose(self, requests: Sequence[Request]) -> None:
        for each in requests:
            self.calls += each.name == self.name
            if each.name == self.name and self.times and self.calls >= self.after:
                self.times, self.calls = self.times - 1, 0
                each.fail(Gone("emu:pnm", "launch", "unplugged"))


@dataclass
class Bench:
    """A server of the tiny model on a platform of one's own, for what `serve_model` does not show."""

    platform: Platform
    policy: Callable[[Engine], Paged] = Paged
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.platform, kv_shape(MODEL, "float32", 16, 16))
        rules = ServingRules(max_batch=8, step_tokens=64)
        made = self.policy(self.engine)
        decoder = Decoder(Modules(MODEL.module), self.engine, made, rules.step_tokens)
        self.server = Server(decoder, self.engine, made, rules, random_prompts(MODEL.shape.vocab, 0))

    def serve(self, arrivals: Sequence[Arrival], deadline_ns: int = 1 << 60) -> tuple[Served, ...]:
        self.engine.loop.run(self.server.serve(arrivals), deadline_ns)
        self.engine.close()
        assert_nothing_is_left(self.platform)
        return self.server.log.served()


def test_a_request_whose_device_is_lost_is_recomputed_once() -> None:
    arrivals = crowd()
    with open_platform(SMALL, check_hazards=True) as platform:
        served = Bench(platform, Loses(1)).serve(arrivals)
    assert [each.tokens for each in served] == [alone(each) for each in arrivals]
    assert [each.preemptions for each in served] == [0, 1, 0, 0, 0, 0]
    assert served[1].recomputed_tokens > 0


def test_a_request_whose_device_is_lost_again_fails_alone() -> None:
    arrivals = crowd()
    with open_platform(SMALL, check_hazards=True) as platform:
        served = Bench(platform, Loses(2)).serve(arrivals)
    assert [each.name for each in served if each.failure] == ["r1"]
    assert "emu:pnm" in served[1].failure
    assert "unplugged" in served[1].failure
    assert [each.tokens for each in served if not each.failure] == [alone(a) for a in arrivals if a.name != "r1"]


@pytest.mark.parametrize("left", [0, 5, 60])
def test_a_device_that_everybody_needs_ends_the_run_with_its_error(left: int) -> None:
    with open_platform(SMALL, check_hazards=True) as platform:
        gpu: Any = platform.devices["emu:gpu"]
        submit, count = gpu.submit, iter(range(10**6))

        def failing(*arguments: Any, **options: Any) -> Any:
            if next(count) >= left:
                raise Gone("emu:gpu", "submit", "unplugged")
            return submit(*arguments, **options)

        gpu.submit = failing
        with pytest.raises(Gone, match="unplugged"):
            serve_model(MODEL, platform, PolicyRequest("paged"), crowd(), Serving(ServingRules(step_tokens=256)))
        gpu.submit = submit
        platform.close()


def test_a_run_that_is_cut_off_says_who_was_not_finished() -> None:
    arrivals = crowd(3, output_tokens=200)
    with open_platform(SMALL, check_hazards=True) as platform:
        bench = Bench(platform)
        with pytest.raises(Timeout):
            bench.serve(arrivals, deadline_ns=3 * MS)
        assert platform.clock.now() == 3 * MS
        served = bench.server.log.served()
    assert {each.failure for each in served} == {UNFINISHED}
    for each, arrival in zip(served, arrivals, strict=True):
        assert 0 < len(each.tokens) < 200
        assert each.tokens == alone(arrival)[: len(each.tokens)]


# -- real devices ----------------------------------------------------------------------------------------------------


def test_this_hosts_cores_serve_and_their_times_are_measured(tmp_path: Path) -> None:
    arrivals = crowd(4, output_tokens=5, apart_us=2_000)
    with open_real(tmp_path) as platform:
        how = Serving(ServingRules(max_batch=8, step_tokens=64), "float32", 16, 16)
        result = serve_model(MODEL, platform, PolicyRequest("cpu-attention"), arrivals, how)
    assert_everybody_is_served(result, arrivals)
    assert (result.provenance, result.clock, result.dilation) == ("measured", "wall", 1)
    for each, arrival in zip(result.requests, arrivals, strict=True):
        assert each.arrived_ns == arrival.at_ns
        assert np.all(np.diff(each.turns[0].token_ns) > 0)


def test_a_dilated_machine_serves_the_same_tokens_in_times_that_are_scaled_back() -> None:
    arrivals = crowd(3, output_tokens=4, apart_us=2_000)
    with open_platform(SMALL, clock="wall", dilation=400) as platform:
        how = Serving(ServingRules(max_batch=8, step_tokens=64), "float32", 16, 16)
        result = serve_model(MODEL, platform, PolicyRequest("paged"), arrivals, how)
    assert_everybody_is_served(result, arrivals)
    assert result.dilation == 400
    assert [each.arrived_ns for each in result.requests] == [each.at_ns for each in arrivals]
