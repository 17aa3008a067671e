"""NELSSA: the same bits wherever rows lie and however they are divided, migration, faults, time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decoding import SMALL, Decoded, Outputs, assert_nothing_is_left, decode, dense_of
from tests.phantom_runs import record, replay
from tests.pnm_rig import card_of
from tests.test_pnm_decode import platform_of
from tests.tiny import tiny_model, tiny_workload
from tierloop.devices.clocks import VirtualClock
from tierloop.devices.errors import ConfigurationError
from tierloop.devices.registry import open_platform
from tierloop.runtime.arrivals import Arrival, Fixed, Lengths, Mixture, Turn, Uniform, poisson
from tierloop.runtime.blocks import TierTooSmall
from tierloop.runtime.compare import PolicyRequest, find_policy, kv_shape
from tierloop.runtime.decoder import Decoder
from tierloop.runtime.drawn_selection import draw, load_selection_model
from tierloop.runtime.engine import Engine
from tierloop.runtime.locality import find_locality
from tierloop.runtime.model_shapes import find_model
from tierloop.runtime.modules import Modules
from tierloop.runtime.policies.nelssa import Nelssa
from tierloop.runtime.policy import Policy, Request, make
from tierloop.runtime.selection import ReplayedSelection
from tierloop.runtime.served import ServingResult
from tierloop.runtime.serving import ServingRules
from tierloop.runtime.serving_run import Serving, serve_model, serve_phantom

NEAR = SMALL.parent / "near.toml"
MODEL = tiny_model(num_q_heads=16, num_kv_heads=8)
PROMPTS = [tiny_workload(300).token_ids, tiny_workload(77, seed=1).token_ids, tiny_workload(501, seed=2).token_ids]
PIECES: dict[str, Any] = {"segment_tokens": 64, "update_tokens": 16, "cluster_tokens": 4, "local_tokens": 16}
TOKENS = 6


def nelssa(devices: int = 4, prompts: Any = PROMPTS, **options: Any) -> Decoded:
    """Decoded on so many near-memory processors; requests of 100 tokens and more are attended there."""
    near = [f"emu:pnm{number}" for number in range(devices)]
    options = {"threshold_tokens": 100, "near": near, **PIECES, **options}
    return decode(MODEL, prompts, "nelssa", TOKENS, options.pop("platform", NEAR), **options)


@pytest.fixture(scope="module")
def dense() -> Decoded:
    return decode(MODEL, PROMPTS, "all-gpu", TOKENS, NEAR)


@pytest.fixture(scope="module")
def sparse() -> Decoded:
    return nelssa(budget=0.3)


def same_bits(one: Decoded, other: Decoded) -> bool:
    """Whether all attention outputs and tokens are equal."""
    return one.tokens == other.tokens and one.outputs.tobytes() == other.outputs.tobytes()


@pytest.mark.parametrize("partition", ["head", "token", "request", "sequence"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_all_clusters_are_dense_attention_however_rows_are_divided(
    dense: Decoded, partition: str, devices: int
) -> None:
    decoded = nelssa(devices, budget=1.0, partition=partition)
    assert same_bits(decoded, dense)
    used = [memory for memory in decoded.placement if "pnm" in memory]
    assert len(used) == (min(devices, 2) if partition == "request" else devices), "two requests are near"
    for memory in used:
        assert decoded.devices[memory].flops > 0, "a device that has rows attended to none"


@pytest.mark.parametrize("partition", ["head", "token", "request", "sequence"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_what_is_selected_does_not_depend_on_how_rows_are_divided(
    sparse: Decoded, partition: str, devices: int
) -> None:
    decoded = nelssa(devices, budget=0.3, partition=partition)
    assert same_bits(decoded, sparse)
    assert decoded.verdict.worst_ratio <= 1
    assert decoded.verdict.attended_share < 0.7


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "fp8_e4m3"])
def test_stored_types_are_within_their_bounds_and_equal_dense_attention(dtype: str) -> None:
    prompts = PROMPTS[:2]
    reference = decode(MODEL, prompts, "all-gpu", TOKENS, SMALL, dtype)
    options = {"threshold_tokens": 100, **PIECES}
    if dtype in ("int8", "fp8_e4m3"):  # the processors of this machine have no kernels for codes; the cores do
        options["near"] = ["emu:cxl"]
    assert same_bits(decode(MODEL, prompts, "nelssa", TOKENS, SMALL, dtype, budget=1.0, **options), reference)
    some = decode(MODEL, prompts, "nelssa", TOKENS, SMALL, dtype, budget=0.3, **options)
    assert some.verdict.worst_ratio <= 1


def test_a_larger_share_of_the_clusters_never_has_a_smaller_share_of_the_rows() -> None:
    shares = [nelssa(2, budget=budget).verdict.attended_share for budget in (0.05, 0.2, 0.5, 1.0)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] == 1.0


@pytest.mark.parametrize("memory", ["emu:cxl", "emu:numa"])
def test_any_memory_that_somebody_attends_over_may_be_near(memory: str) -> None:
    reference = decode(MODEL, PROMPTS, "all-gpu", TOKENS, SMALL)
    decoded = decode(MODEL, PROMPTS, "nelssa", TOKENS, SMALL, budget=1.0, threshold_tokens=100, near=[memory], **PIECES)
    assert same_bits(decoded, reference)
    assert decoded.placement[memory] > 0


def test_the_pnm_driver_on_its_firmware_model_is_a_near_memory_like_another() -> None:
    prompts = PROMPTS[:2]
    reference = decode(MODEL, prompts, "cpu-attention", 4, platform_of(None))
    card = card_of(engines=4, capacity=64 << 20)
    options: dict[str, Any] = {"threshold_tokens": 100, "budget": 1.0, "near": ["pnm"], **PIECES}
    decoded = decode(MODEL, prompts, "nelssa", 4, platform_of(card), **options)
    assert same_bits(decoded, reference)
    assert decoded.placement["pnm"] > 0
    assert decoded.devices["pnm"].flops > 0


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.3},
        {"budget": 1.0},
        {"budget": 0.3, "partition": "token"},
        {"budget": 0.3, "without": ["overlap"]},
        {"budget": 0.3, "update_tokens": 16, "steps": 24},
    ],
)
def test_a_replayed_phantom_run_takes_exactly_as_long(options: dict[str, Any]) -> None:
    options = {"threshold_tokens": 100, **PIECES, **options}
    recorded = record("nelssa", [p[:200] for p in PROMPTS], options.pop("steps", 5), "float16", **options)
    result = replay(recorded, ReplayedSelection(recorded.selection))
    assert result.step_ns == recorded.step_ns
    assert result.devices == recorded.devices
    assert result.links == recorded.links


@pytest.mark.parametrize("without", ["near", "migration", "sparsity", "partition", "overlap"])
def test_each_mechanism_can_be_switched_off(dense: Decoded, sparse: Decoded, without: str) -> None:
    decoded = nelssa(budget=0.3, without=[without])
    used = [memory for memory in decoded.placement if "pnm" in memory]
    assert same_bits(decoded, dense if without in ("near", "sparsity") else sparse)
    assert len(used) == {"near": 0, "partition": 1}.get(without, 4)
    if without == "overlap":
        assert decoded.elapsed_ns > sparse.elapsed_ns


# -- migration --------------------------------------------------------------------------------------------------------


class _Teacher:
    """A model of one layer that is fed given tokens: rows of its cache depend on tokens and positions alone."""

    def __init__(self, **options: Any) -> None:
        self.model = tiny_model(num_layers=1, num_q_heads=16, num_kv_heads=8)
        self.options = {"near": ["emu:pnm0", "emu:pnm1"], "budget": 0.3, **PIECES, **options}
        self.policy: Policy | None = None

    def outputs(self, prompt: list[int], following: list[int]) -> tuple[list[bytes], Request]:
        """The attention output of each step."""
        with open_platform(NEAR, check_hazards=True) as platform:
            engine = Engine(platform, kv_shape(self.model, "float32", 16, 16))
            self.policy = policy = make(find_policy("nelssa"), engine, self.options)
            modules = Modules(self.model.module)
            recorder = Outputs(engine.shape, modules.scale)
            decoder = Decoder(modules, engine, policy, 1, recorder)
            request = Request("r", [*prompt, following[0]], len(prompt) + len(following), len(prompt))

            async def steps() -> None:
                await decoder.adopt(request, dense_of(self.model, tuple(prompt), 2).prefill)
                for token in following[1:]:
                    await decoder.score([request], [token])

            engine.loop.run(steps())
            assert recorder.verdict().worst_ratio <= 1
            engine.loop.run(policy.release(request))
            engine.close()
            return [each.tobytes() for each in recorder.kept], request


def test_a_request_that_moved_has_the_bits_of_one_that_was_there_from_the_beginning() -> None:
    prompt, following = tiny_workload(170).token_ids, tiny_workload(60, seed=9).token_ids
    there, _ = _Teacher(threshold_tokens=1).outputs(prompt, following)
    moved, request = _Teacher(threshold_tokens=190, migrate_tokens=64).outputs(prompt, following)
    here, _ = _Teacher(threshold_tokens=10_000).outputs(prompt, following)
    assert request.migrations == 1
    equal = [a == b for a, b in zip(there, moved, strict=True)]
    when = equal.index(True)
    assert 15 < when < 50
    assert all(equal[when:]), "after the hand-over"
    assert moved[:when] == here[:when], "before it"


def serve(
    arrivals: list[Arrival],
    clock_calls: list[tuple[int, Any]] | None = None,
    utilisation: float = 0.9,
    overrides: dict[str, Any] | None = None,
    rules: ServingRules | None = None,
    **options: Any,
) -> tuple[ServingResult, Nelssa]:
    """Served on four processors, in blocks of 16 tokens; `clock_calls` are told the platform at their time."""
    kept: list[Policy] = []
    with open_platform(NEAR, overrides=overrides or {}) as platform:
        for at_ns, call in clock_calls or []:
            assert isinstance(platform.clock, VirtualClock)
            platform.clock.call_at(at_ns, call, platform)
        how = Serving(rules or ServingRules(4, 64), "float32", 16, 16, utilisation)
        near = [f"emu:pnm{number}" for number in range(4)]
        wanted = PolicyRequest("nelssa", {"near": near, "budget": 1.0, **PIECES, **options})
        result = serve_model(MODEL, platform, wanted, arrivals, how, observer=kept.append)
    (policy,) = kept
    assert isinstance(policy, Nelssa)
    return result, policy


def arriving(*lengths: int, output: int = 24, every_ns: int = 50_000) -> list[Arrival]:
    """Requests with random prompts of these lengths."""
    prompts = [tuple(tiny_workload(length, seed=length).token_ids) for length in lengths]
    return [Arrival(f"r{i}", i * every_ns, (Turn(len(p), output),), p) for i, p in enumerate(prompts)]


def right_tokens(arrivals: list[Arrival], result: ServingResult) -> bool:
    """Whether everybody that was served got what plain generation gives."""
    wanted = [dense_of(MODEL, a.tokens or (), a.turns[0].output_tokens).tokens for a in arrivals]
    return all(s.failure or s.tokens == w[: len(s.tokens)] for s, w in zip(result.requests, wanted, strict=True))


def test_requests_that_grow_past_the_threshold_move_and_nothing_is_computed_again() -> None:
    arrivals = arriving(180, 190, 60, 400, output=40)
    result, _ = serve(arrivals, threshold_tokens=210)
    assert right_tokens(arrivals, result)
    assert [s.migrations for s in result.requests] == [1, 1, 0, 0]
    assert result.recomputed_tokens == result.preemptions == 0
    stayed, _ = serve(arrivals, threshold_tokens=210, without=["migration"])
    assert stayed.migrations == 0
    assert right_tokens(arrivals, stayed)


def test_a_gpu_that_fills_up_hands_its_longest_requests_over_however_short_they_are() -> None:
    arrivals = arriving(200, 210, output=150, every_ns=1)
    small = 4_300_000 / 50_331_648
    result, policy = serve(arrivals, threshold_tokens=100_000, utilisation=small, watermark=0.3, index_share=0.6)
    assert right_tokens(arrivals, result)
    assert policy.report()["requests"]["forced"] > 0
    assert result.migrations > 0
    assert not result.failures


def test_requests_stay_on_the_gpu_where_near_memories_are_full() -> None:
    arrivals = arriving(180, 190, output=40)
    tiny = {f"devices.pnm{number}.capacity": 4096 for number in range(4)}
    result, policy = serve(arrivals, threshold_tokens=190, overrides=tiny)
    assert right_tokens(arrivals, result)
    assert result.migrations == 0
    assert policy.report()["requests"]["stayed"] > 0
    assert not result.failures


def test_a_request_longer_than_every_tier_fails_alone_and_says_so() -> None:
    arrivals = arriving(60, 1900, 80)
    tiny = {f"devices.pnm{number}.capacity": 40_960 for number in range(4)}
    result, _ = serve(arrivals, threshold_tokens=1000, overrides=tiny, utilisation=5e6 / 50_331_648, index_share=0.6)
    failures = [s.failure for s in result.requests]
    assert failures[0] == failures[2] == ""
    assert "emu:pnm0 is too small" in failures[1]
    assert "emu:gpu is full" in failures[1]
    assert right_tokens(arrivals, result)


def test_requests_of_a_lost_device_are_computed_again_on_the_others() -> None:
    arrivals = arriving(60, 300, 70, output=60)
    result, policy = serve(
        arrivals, [(4_000_000, lambda platform: platform.memory_owner("emu:pnm2").close())], threshold_tokens=200
    )
    assert right_tokens(arrivals, result)
    assert not result.failures
    lost = [s.recomputed_tokens > 0 for s in result.requests]
    assert lost == [False, True, False]
    assert policy.report()["devices"] == ["emu:pnm0", "emu:pnm1", "emu:pnm3"]


@pytest.mark.parametrize("lost_ns", [1, 15_000_000])
def test_a_device_that_is_lost_while_nobody_uses_it_is_left_out(lost_ns: int) -> None:
    arrivals = arriving(300, 60, 310, every_ns=20_000_000, output=4)
    lost = [(lost_ns, lambda platform: platform.memory_owner("emu:pnm2").close())]
    result, policy = serve(arrivals, lost, threshold_tokens=200)
    assert right_tokens(arrivals, result)
    assert not result.failures
    assert result.recomputed_tokens == 0
    assert policy.report()["devices"] == ["emu:pnm0", "emu:pnm1", "emu:pnm3"]
    assert policy.report()["requests"]["near"] + result.migrations == 2


@pytest.mark.parametrize("lost_ns", range(100_000, 1_300_000, 300_000))
def test_a_device_that_is_lost_while_rows_are_written_to_it_changes_no_token(lost_ns: int) -> None:
    arrivals = arriving(79, 145, 256, output=6, every_ns=1)
    lost = [(lost_ns, lambda platform: platform.memory_owner("emu:pnm1").close())]
    result, policy = serve(arrivals, lost, rules=ServingRules(2, 256), threshold_tokens=30)
    assert right_tokens(arrivals, result)
    assert [len(request.tokens) for request in result.requests] == [6, 6, 6]
    assert policy.report()["devices"] == ["emu:pnm0", "emu:pnm2", "emu:pnm3"]


@pytest.mark.parametrize("scale", [0.1, 0.7, 1.3, 10.0])
def test_a_mis_set_threshold_serves_the_same_tokens(scale: float) -> None:
    arrivals = arriving(60, 120, 250, 380)
    result, _ = serve(arrivals, threshold_tokens=200, threshold_scale=scale)
    assert right_tokens(arrivals, result)
    assert not result.failures


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("megabytes", [0.45, 0.7, 1.0])
def test_little_room_on_the_gpu_changes_no_token(preemption: Any, megabytes: float) -> None:
    arrivals = arriving(60, 140, 220, 300, 380, output=30)
    result, _ = serve(
        arrivals, threshold_tokens=200, utilisation=megabytes * 1e6 / 50_331_648, rules=ServingRules(4, 64, preemption)
    )
    assert right_tokens(arrivals, result)


# -- the threshold ----------------------------------------------------------------------------------------------------


def test_the_threshold_comes_from_what_the_devices_estimate_and_every_constant_is_printed() -> None:
    _, policy = serve(arriving(60))
    report = policy.report()
    constants = report["crossover"]["constants"]
    assert {"kv_nbytes", "gpu_bytes_per_s", "pnm_bytes_per_s", "comm_ns", "selection_ratio", "num_devices"} <= set(
        constants
    )
    assert all(each["source"] for each in constants.values())
    assert report["threshold_tokens"] == report["crossover"]["tokens"] > 0
    _, scaled = serve(arriving(60), threshold_scale=1.3)
    assert scaled.report()["threshold_tokens"] == pytest.approx(1.3 * report["threshold_tokens"])


def test_a_near_memory_that_never_wins_is_not_used() -> None:
    slow = {f"devices.pnm{n}.constants.memory.pnm.channel_bytes_per_s": 50_000_000 for n in range(4)}
    arrivals = arriving(300)
    result, policy = serve(arrivals, overrides=slow)
    assert policy.report()["threshold_tokens"] is None
    assert policy.report()["crossover"]["reason"]
    assert right_tokens(arrivals, result)
    assert policy.report()["requests"]["near"] == 0


def test_the_closed_loop_moves_the_threshold_towards_what_attention_costs() -> None:
    arrivals = arriving(60, 300, 300, 310, output=60)
    _, fixed = serve(arrivals, threshold_tokens=200)
    result, adaptive = serve(arrivals, threshold_tokens=200, adaptive=True)
    assert fixed.report()["threshold_tokens"] == 200
    assert adaptive.report()["threshold_tokens"] != 200
    assert right_tokens(arrivals, result)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "above 0"),
        ({"threshold_tokens": -1}, "threshold_tokens"),
        ({"partition": "layer"}, "head, token, request, sequence"),
        ({"near": "emu:pnm0"}, "list of memories"),
        ({"near": ["emu:gpu"]}, "must be one of"),
        ({"near": ["emu:pnm0", "emu:pnm0"]}, "twice"),
        ({"cluster_tokens": 128}, "cluster_tokens, which is 128"),
        ({"adaptive": 1}, "true or false"),
        ({"without": ["gpu"]}, "without"),
        ({"index_share": 2}, "index_share"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        nelssa(1, [PROMPTS[1]], **options)


def test_more_devices_than_kv_heads_are_refused_where_each_head_has_one() -> None:
    model = tiny_model()
    near = ["emu:pnm0", "emu:pnm1", "emu:pnm2"]
    with pytest.raises(ConfigurationError, match="3 devices cannot divide 2 KV heads"):
        decode(model, [PROMPTS[1]], "nelssa", TOKENS, NEAR, near=near)
    decode(model, [PROMPTS[1]], "nelssa", TOKENS, NEAR, near=near, partition="sequence")


def test_a_platform_without_near_memories_says_what_else_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"has no pnm memory; name others in `near` \(there are none"):
        decode(MODEL, [PROMPTS[1]], "nelssa", TOKENS, platform_of(None), near=[])


def test_a_request_that_fits_nowhere_is_refused_with_both_reasons() -> None:
    tiny = {"devices.gpu.capacity": 1_200_000, **{f"devices.pnm{n}.capacity": 4096 for n in range(4)}}
    with pytest.raises(TierTooSmall, match="emu:pnm0 is too small"):
        nelssa(4, [PROMPTS[2]], overrides=tiny, index_share=0.6)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["nelssa", "paged"])
def test_prompts_that_are_prefilled_elsewhere_are_served_to_the_end(policy: str, preemption: Any) -> None:
    model = find_model("llama-3-8b-1048k")
    lengths = Mixture(
        ((0.8, Lengths(Uniform(100, 3000), Fixed(40))), (0.2, Lengths(Uniform(70_000, 200_000), Fixed(60))))
    )
    arrivals = poisson(lengths, per_s=20, requests=60, seed=3)
    locality = draw(load_selection_model(find_locality("smollm2-135m")), 2)
    with open_platform("nelssa-h100-4pnm", clock="virtual") as platform:
        how = Serving(ServingRules(64, 256, preemption, prefill_workers=64), utilisation=0.6)
        result = serve_phantom(model, platform, PolicyRequest(policy), arrivals, how, locality)
        assert_nothing_is_left(platform)
    assert not result.failures
    assert all(
        len(s.turns[0].token_ns) == a.turns[0].output_tokens for s, a in zip(result.requests, arrivals, strict=True)
    )
    if policy == "nelssa":
        assert result.preemptions == 0
    brought = sum(link.bytes_forward for name, link in result.links.items())
    assert brought > sum(a.prompt_tokens for a in arrivals) * model.kv_nbytes() * 0.9
