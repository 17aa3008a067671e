"""Devices and kernels that are wrong in one way each, and the check that must notice it: for the suite's own tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from tierloop.devices.commands import Command, Copy, Launch, Operand, Read, Write
from tierloop.devices.completion import Completion
from tierloop.devices.conformance.example import Bytes, Example, Kernel
from tierloop.devices.conformance.runner import MACHINE
from tierloop.devices.device import Device, Estimate, check
from tierloop.devices.errors import OutOfRange
from tierloop.devices.info import Arithmetic, DeviceInfo, Path
from tierloop.devices.kernels import definition
from tierloop.devices.kernels.contract import (
    Append,
    Attend,
    Cluster,
    Dense,
    Dequantize,
    Gather,
    KernelArgs,
    Logits,
    Quantize,
    Score,
    Topk,
)
from tierloop.devices.kernels.definition import Given, define
from tierloop.devices.regions import Region, Segment
from tierloop.devices.site import Site
from tierloop.devices.wrappers import Faulty


class EffectsAtSubmit(Example):
    """Carries out transfers when they are handed in and only reports later."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        if isinstance(command, Read):
            command.into[:] = self._load((command.source,))
        elif isinstance(command, Write):
            self._store((command.target,), command.data)
        elif isinstance(command, Copy):
            self._store((command.target,), self._load((command.source,)))
        return completion


class EffectsAtStart(Example):
    """Moves the bytes when the command starts, not when it ends."""

    def _start(self, completion: Completion) -> None:
        command = completion.command
        if isinstance(command, Read):
            command.into[:] = self._load((command.source,))
        elif isinstance(command, Write):
            self._store((command.target,), command.data)
        super()._start(completion)


class IgnoresAfter(Example):
    """Starts at once whatever a command comes after."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return super().submit(command, queue)


class LaunchesAtSubmit(Example):
    """Runs kernels when they are handed in."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        if isinstance(command, Launch):
            self._store(command.writes[0], self._load(command.reads[0]))
        return completion


class WaitsForTheFirstOnly(Example):
    """Looks at one of several dependencies."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return super().submit(command, queue, after[:1])


class TakesBuffersAtSubmit(Example):
    """Copies what is to be written when the command is handed in."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        if isinstance(command, Write) and isinstance(command.data, np.ndarray):
            check(self.info, command, queue)
            command = Write(command.target, command.data.copy())
        return super().submit(command, queue, after)


class DoneWithinSubmit(Example):
    """Blocks until the command has ended."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        self._site.clock.run_until(lambda: completion.done, self._site.clock.now() + 10_000_000)
        return completion


class EndsInAnyOrder(Example):
    """One queue behind all: commands of queue 1 wait for those of queue 0."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        check(self.info, command, queue)
        completion = super().submit(command, 0, after)
        completion.queue = 0
        return completion


class DropsTheLastSpan(Example):
    """Stores all spans but the last one."""

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        region, spans = operand[-1]
        if len(spans) > 1:
            operand = (*operand[:-1], Segment(region, type(spans)(spans.array[:-1])))
        super()._store(operand, data)


class LosesTheOrderOfSpans(Example):
    """Sorts the spans of a read."""

    def _load(self, operand: Operand) -> Bytes:
        return super()._load(tuple(Segment(r, type(s)(s.array[np.argsort(s.array[:, 0])])) for r, s in operand))


class WritesOneByteTooMany(Example):
    """The byte behind each span is overwritten."""

    def _store(self, operand: Sequence[Segment], data: Bytes) -> None:
        super()._store(operand, data)
        for region, spans in operand:
            for offset, nbytes in spans.array.tolist():
                self._bytes[region.id][offset + nbytes : offset + nbytes + 1] ^= 1


class DirtyMemory(Example):
    """Does not zero."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        region = super().alloc(nbytes, memory, phantom)
        self._bytes[region.id][:] = 1
        return region


class NoCapacity(Example):
    """Gives out what it does not have."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        self._regions_before, self._regions = self._regions, {}
        try:
            return super().alloc(min(nbytes, 1 << 20), memory, phantom)
        finally:
            self._regions = {**self._regions_before, **self._regions}


class LeaksCapacity(Example):
    """Never gets back what is freed."""

    def free(self, region: Region) -> None:
        super().free(region)
        self._info = replace(
            self._info, memories=(replace(self._info.memories[0], capacity=self._info.memories[0].capacity - 1),)
        )


class FreesWhatIsInUse(Example):
    """Does not know which commands name a region."""

    def free(self, region: Region) -> None:
        self._in_use.clear()
        super().free(region)

    def _release(self, named: set[int]) -> None:
        return


class TakesAnyRegion(Example):
    """Looks at a region's number only."""

    def _mine(self, op: str, region: Region) -> Region:
        return self._regions.get(region.id, region) if op == "submit" else super()._mine(op, region)


class ChecksNothing(Example):
    """Leaves bounds to whoever carries the command out."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        try:
            return super().submit(command, queue, after)
        except OutOfRange:
            return super().submit(Read(Segment(next(iter(self._regions.values())), EMPTY), NOTHING), 0, after)


EMPTY = Region("", "", 0, 0).at(0, 0).spans
NOTHING = np.empty(0, dtype=np.uint8)


class OffTheGrid(Example):
    """Says that it has a grid and does not mind."""

    @property
    def info(self) -> DeviceInfo:
        memory = replace(super().info.memories[0], alignment=64, byte_addressable=False)
        return replace(super().info, memories=(memory,))


class OpenToTheHost(Example):
    """Hands out a view of emulated memory."""

    def alloc(self, nbytes: int, memory: str | None = None, phantom: bool = False) -> Region:
        region = super().alloc(nbytes, memory, phantom)
        region.view = self._bytes[region.id]
        return region


class SwallowsErrors(Example):
    """Reports every command as a success."""

    def close(self) -> None:
        try:
            super().close()
        except Exception:
            return


class RaisesSeenErrorsAgain(Example):
    """Keeps errors that were looked at."""

    def __init__(self, site: Site, **parts: Any) -> None:
        super().__init__(site, **parts)
        self._kept: list[Completion] = []

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        completion.on_done(self._kept.append)
        return completion

    def close(self) -> None:
        super().close()
        for completion in self._kept:
            if completion.error is not None:
                raise completion.error


class StaysOpen(Example):
    """Works on after close."""

    def close(self) -> None:
        return


class WritesAfterClose(Example):
    """A command that was under way at close still fills its buffer."""

    def _end(self, completion: Completion) -> None:
        if isinstance(completion.command, Read):
            completion.command.into[:] = 0
        super()._end(completion)


class LeavesCommandsOpen(Example):
    """Closing does not end what is under way."""

    def close(self) -> None:
        if self._queues.pending:
            self._closed = True
            return
        super().close()


class EndlessQueues(Example):
    """Takes more commands than it says."""

    @property
    def info(self) -> DeviceInfo:
        executor = replace(super().info.executors[0], depth=8)
        return replace(super().info, executors=(executor,))


class EstimateCarriesOut(Example):
    """Tries the command to see how long it takes."""

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        self.submit(command, queue)
        return super().estimate(command, queue)


class EstimatesHalf(Example):
    """Says that everything takes half the time, and that it is sure."""

    def estimate(self, command: Command, queue: int = 0) -> Estimate:
        return Estimate(super().estimate(command, queue).duration_ns // 2, 0, "a guess")


class CallsItselfReal(Example):
    """Is emulated and does not say so."""

    @property
    def info(self) -> DeviceInfo:
        return replace(super().info, provenance="real")


class ChangesItsMind(Example):
    """Its capacity is what is free."""

    @property
    def info(self) -> DeviceInfo:
        memory = super().info.memories[0]
        free = memory.capacity - sum(r.nbytes for r in self._regions.values()) - self._made
        return replace(super().info, memories=(replace(memory, capacity=free),))


class CountsNothing(Example):
    """Says that no bytes were moved."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        completion = super().submit(command, queue, after)
        completion.traffic.read.clear()
        completion.traffic.written.clear()
        return completion


class NeverEnds(Example):
    """Takes commands and does not carry them out."""

    def _start(self, completion: Completion) -> None:
        return


class TellsNobody(Example):
    """Hides its completions from the site's observers."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        self._site.observers.clear()
        return super().submit(command, queue, after)


def info_with(**changes: Any) -> type[Example]:
    """An example whose executor says something else of itself."""

    class Changed(Example):
        @property
        def info(self) -> DeviceInfo:
            return replace(super().info, executors=(replace(super().info.executors[0], **changes),))

    return Changed


BROKEN: list[tuple[type[Example], str]] = [
    (EffectsAtSubmit, "effects_appear_at_completion"),
    (EffectsAtSubmit, "a_held_write_is_not_seen"),
    (EffectsAtSubmit, "a_failure_cancels_what_comes_after"),
    (EffectsAtStart, "effects_appear_at_completion"),
    (EffectsAtStart, "a_missing_dependency_is_visible"),
    (IgnoresAfter, "a_held_command_has_no_effect"),
    (IgnoresAfter, "a_held_write_is_not_seen"),
    (IgnoresAfter, "after_orders_two_queues"),
    (IgnoresAfter, "a_failure_cancels_what_comes_after"),
    (IgnoresAfter, "a_long_chain_is_cancelled_whole"),
    (WaitsForTheFirstOnly, "a_command_waits_for_everything_that_it_names"),
    (LaunchesAtSubmit, "launches_are_ordered_like_transfers"),
    (IgnoresAfter, "launches_are_ordered_like_transfers"),
    (TakesBuffersAtSubmit, "a_host_buffer_passes_bytes_on"),
    (DoneWithinSubmit, "submit_takes_no_time"),
    (EndsInAnyOrder, "a_held_queue_does_not_hold_the_others"),
    (DropsTheLastSpan, "every_byte_comes_back"),
    (DropsTheLastSpan, "copies_move_the_same_bytes"),
    (LosesTheOrderOfSpans, "every_byte_comes_back"),
    (WritesOneByteTooMany, "a_write_touches_nothing_else"),
    (WritesOneByteTooMany, MACHINE),
    (DropsTheLastSpan, MACHINE),
    (IgnoresAfter, MACHINE),
    (DirtyMemory, "fresh_memory_is_zero"),
    (DirtyMemory, MACHINE),
    (NoCapacity, "capacity_is_a_limit_and_comes_back"),
    (LeaksCapacity, "capacity_is_a_limit_and_comes_back"),
    (FreesWhatIsInUse, "a_region_in_use_is_not_freed"),
    (TakesAnyRegion, "a_foreign_region_is_refused"),
    (TakesAnyRegion, "a_region_of_an_earlier_life_is_refused"),
    (ChecksNothing, "spans_outside_a_region_are_refused"),
    (ChecksNothing, "a_freed_region_is_refused"),
    (ChecksNothing, "host_buffers_of_the_wrong_kind_are_refused"),
    (ChecksNothing, "queues_that_do_not_exist_are_refused"),
    (ChecksNothing, "copies_of_different_sizes_are_refused"),
    (OffTheGrid, "spans_off_the_grid_are_refused"),
    (OpenToTheHost, "only_host_memory_has_a_view"),
    (SwallowsErrors, "an_error_that_nobody_saw_is_raised_at_close"),
    (RaisesSeenErrorsAgain, "an_error_that_was_seen_is_not_raised_again"),
    (StaysOpen, "a_closed_device_is_gone"),
    (WritesAfterClose, "closing_ends_what_is_under_way"),
    (LeavesCommandsOpen, "closing_ends_what_is_under_way"),
    (EndlessQueues, "a_full_queue_is_busy"),
    (EstimateCarriesOut, "an_estimate_has_no_effect"),
    (EstimatesHalf, "an_idle_device_takes_what_it_estimates"),
    (info_with(paths=(Path("emu:example", 0, 1 << 20, 1 << 30),)), "nothing_is_faster_than_its_path"),
    (info_with(paths=(Path("emu:example", 1 << 20, 0, 0),)), "nothing_is_shorter_than_the_latency"),
    (LeaksCapacity, "nothing_is_used_up_by_use"),
    (DirtyMemory, "nothing_is_used_up_by_use"),
    (CallsItselfReal, "an_emulated_device_says_so_in_its_name"),
    (ChangesItsMind, "info_stays_the_same"),
    (CountsNothing, "every_byte_comes_back"),
    (TellsNobody, "every_byte_comes_back"),
    (NeverEnds, "every_byte_comes_back"),
    (info_with(queues=(1, 2)), "queues_are_numbered_from_zero_and_belong_to_one_executor"),
    (info_with(verbs=frozenset({"read", "write", "fly"})), "executors_offer_what_the_contract_knows"),
    (info_with(paths=()), "paths_lead_to_memories_that_exist"),
    (info_with(kernels=frozenset({"gather"})), "gather_keeps_every_byte"),
    (info_with(kernels=frozenset({"score"})), "whoever_computes_states_its_arithmetic"),
]


class ShowsLostBytes(Faulty):
    """Reads what cannot be read, as if nothing had happened."""

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        return


class LosesMore(Faulty):
    """A page that is lost takes everything before it along."""

    def unreadable(self, region: Region, offset: int, nbytes: int) -> None:
        super().unreadable(region, 0, offset + nbytes)


class ForgetsTheFailure(Faulty):
    """Carries a command out that came after one that failed."""

    def submit(self, command: Command, queue: int = 0, after: Sequence[Completion] = ()) -> Completion:
        return super().submit(command, queue)


class WaitsForEver(Faulty):
    """Has no deadline."""

    def __init__(self, device: Device, site: Site) -> None:
        super().__init__(device, site, deadline_ns=10**12)


class WorksOnWithoutItself(Faulty):
    """Does not notice that it is no longer there."""

    def unplug(self) -> None:
        return


BROKEN_BY_FAULTS: list[tuple[type[Faulty], str]] = [
    (ShowsLostBytes, "an_unreadable_span_is_a_media_error_and_its_neighbours_are_not"),
    (LosesMore, "an_unreadable_span_is_a_media_error_and_its_neighbours_are_not"),
    (ForgetsTheFailure, "what_comes_after_a_media_error_is_cancelled_with_its_cause"),
    (WaitsForEver, "a_command_that_does_not_come_back_ends_at_its_deadline"),
    (WorksOnWithoutItself, "a_device_that_is_pulled_out_is_gone"),
]


class ClaimsEqualBits(Example):
    """Says that it computes in float32, but merges in float64 and rounds where the caller cuts."""

    @property
    def info(self) -> DeviceInfo:
        return replace(super().info, arithmetic=Arithmetic("mine"))


def states_of(args: KernelArgs, result: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert isinstance(args, Attend)
    return result.view(np.float32).reshape(len(args.roots), args.q_len, args.group, -1)


def base_two(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """m is the logarithm to base 2."""
    (result,) = define(args, reads, nbytes)
    states_of(args, result)[..., 0] *= np.float32(np.log2(np.e))
    return [result]


def nan_when_empty(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """0 · exp(−∞ − −∞)."""
    (result,) = define(args, reads, nbytes)
    states = states_of(args, result)
    states[np.isneginf(states[..., 0])] = np.nan
    return [result]


def last_row_lost(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """The last row has no value."""
    assert isinstance(args, Attend)
    if len(reads[2].bytes):
        reads[2].bytes[-args.head_dim_v * 2 :] = 0
    return define(args, reads, nbytes)


def sees_the_future(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """The causal mask is off by one."""
    assert isinstance(args, Attend | Logits)
    return define(replace(args, q_positions=args.q_positions + 1), reads, nbytes)


def half_precision(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Sums that are kept in float16."""
    (result,) = define(args, reads, nbytes)
    numbers = result.view(np.float32)
    return [numbers.astype(np.float16).astype(np.float32).view(np.uint8)]


def roots_mixed_up(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """States in the order of the rows, not of the roots."""
    (result,) = define(args, reads, nbytes)
    return [states_of(args, result)[::-1].copy().reshape(-1).view(np.uint8)]


def ties_from_the_end(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """The higher index wins a tie."""
    assert isinstance(args, Topk)
    scores = reads[0].bytes.view(np.float32)
    chosen, at = np.full((len(args.lengths), args.k), -1, dtype=np.int64), 0
    for i, n in enumerate(args.lengths.tolist()):
        order = np.argsort(scores[at : at + n], kind="stable")[::-1]
        chosen[i, : min(n, args.k)] = order[: args.k]
        at += n
    return [chosen.reshape(-1).view(np.uint8)]


def first_member_of_a_group(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """An entry has the score of its first query head."""
    assert isinstance(args, Topk)
    first = np.ascontiguousarray(reads[0].bytes.view(np.float32).reshape(-1, args.group)[:, 0])
    return define(Topk(args.k, args.lengths), [Given(first.view(np.uint8), reads[0].sizes)], nbytes)


def nan_left_out_of_a_group(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """A NaN loses against the other members of its group."""
    assert isinstance(args, Topk)
    members = reads[0].bytes.view(np.float32).reshape(-1, args.group)
    with_least = np.where(np.isnan(members), np.float32(-np.inf), members)
    return define(args, [Given(with_least.reshape(-1).view(np.uint8), reads[0].sizes)], nbytes)


def truncated(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """bfloat16 by cutting off bits."""
    assert isinstance(args, Append)
    if args.dtype != "bfloat16":
        return define(args, reads, nbytes)
    return [(reads[0].bytes.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)]


def halves_away_from_zero(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """A tie goes to the larger code."""
    assert isinstance(args, Quantize)
    if args.axis == "row":
        return define(args, reads, nbytes)
    rows = reads[0].bytes.view(np.float32)
    return define(args, [Given((rows * np.float32(1 + 2**-20)).view(np.uint8), reads[0].sizes), *reads[1:]], nbytes)


def not_saturated(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """What is too large becomes NaN, as in a conversion without saturation."""
    assert isinstance(args, Quantize)
    (result,) = define(args, reads, nbytes)
    if args.dtype == "fp8_e4m3" and args.axis == "channel":
        result[result & 0x7F == 0x7E] |= 1
    return [result]


def scale_of_row_zero(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """All rows by the first scales."""
    assert isinstance(args, Dequantize)
    return define(replace(args, which=args.which * 0), reads, nbytes)


def in_memory_order(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Spans from the last to the first."""
    assert isinstance(args, Gather)
    ends = np.cumsum(reads[0].sizes)
    pieces = [reads[0].bytes[e - n : e] for e, n in zip(ends.tolist(), reads[0].sizes.tolist(), strict=True)]
    return [np.concatenate([*pieces[::-1], np.empty(0, dtype=np.uint8)])]


def stays_at_home(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Says that it has come round, as it would on one circle."""
    return [np.zeros(8, dtype=np.uint8)]


def twice(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Runs the function once more, to be sure."""
    assert isinstance(args, Dense)
    define(args, reads, nbytes)
    return define(args, reads, nbytes)


def reduced_over_the_wrong_axis(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Every score is that of the row before."""
    (result,) = define(args, reads, nbytes)
    return [np.roll(result.view(np.float32), 1).view(np.uint8)]


def shared_out_among_the_group(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Every row has a weight of 1, which the q heads get."""
    softmax = definition.softmax
    with mock.patch.object(definition, "softmax", lambda s: softmax(s.T).T):
        return define(args, reads, nbytes)


def shared_out_unscaled(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """The scale is forgotten."""
    assert isinstance(args, Score)
    return define(replace(args, scale=1.0), reads, nbytes)


def average_of_parts(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """The output is halved."""
    (result,) = define(args, reads, nbytes)
    return [(result.view(np.float32) / 2).view(np.uint8)]


def counted_per_segment(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Labels that begin at 0 again where they should go on."""
    assert isinstance(args, Cluster)
    centroids, labels = define(args, reads, nbytes)
    return [centroids, (labels.view(np.int64) % 4).view(np.uint8)]


def directions_for_means(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Centroids as they are compared with rows, normalised."""
    assert isinstance(args, Cluster)
    centroids, labels = define(args, reads, nbytes)
    rows = centroids.view(np.float32).reshape(-1, args.head_dim)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return [(rows / np.maximum(length, 1e-30)).view(np.uint8).reshape(-1), labels]


def by_distance_to_zero(args: KernelArgs, reads: list[Given], nbytes: list[int]) -> list[Bytes]:
    """Products with centroids that are not normalised: the longest wins."""
    assert isinstance(args, Cluster)
    if args.iterations:
        return define(args, reads, nbytes)
    with mock.patch.object(definition, "nearest_of", lambda x, centroids: (x @ centroids.T).argmax(axis=1)):
        return define(args, reads, nbytes)


WRONG_KERNELS: list[tuple[str, Kernel, str]] = [
    ("attend", base_two, "attend_is_attention"),
    ("attend", nan_when_empty, "empty_parts_are_identities"),
    ("attend", last_row_lost, "attend_is_attention"),
    ("attend", sees_the_future, "attend_is_attention"),
    ("attend", half_precision, "attend_is_attention"),
    ("attend", half_precision, "one_token_gives_its_value"),
    ("attend", half_precision, "attend_survives_extreme_logits"),
    ("attend", roots_mixed_up, "attend_is_attention"),
    ("logits", sees_the_future, "logits_are_scaled_products"),
    ("logits", half_precision, "logits_are_scaled_products"),
    ("combine", half_precision, "combine_is_attention_of_given_logits"),
    ("merge", average_of_parts, "merge_is_the_softmax_over_parts"),
    ("score", reduced_over_the_wrong_axis, "score_is_what_the_summary_says"),
    ("score", shared_out_among_the_group, "score_shares_a_weight_out_among_each_list"),
    ("score", shared_out_unscaled, "score_shares_a_weight_out_among_each_list"),
    ("cluster", counted_per_segment, "cluster_gives_each_row_its_centroid"),
    ("cluster", directions_for_means, "cluster_gives_each_row_its_centroid"),
    ("cluster", by_distance_to_zero, "cluster_gives_each_row_its_centroid"),
    ("topk", ties_from_the_end, "topk_breaks_ties_by_index"),
    ("topk", first_member_of_a_group, "topk_of_groups_ranks_their_maximum_or_sum"),
    ("topk", nan_left_out_of_a_group, "topk_of_groups_ranks_their_maximum_or_sum"),
    ("append", truncated, "append_rounds_to_nearest_even"),
    ("quantize", halves_away_from_zero, "quantize_gives_the_nearest_codes"),
    ("quantize", not_saturated, "quantize_gives_the_nearest_codes"),
    ("dequantize", scale_of_row_zero, "dequantize_rounds_once"),
    ("gather", in_memory_order, "gather_keeps_every_byte"),
    ("chase", stays_at_home, "chase_follows_the_lines"),
    ("dense", twice, "dense_runs_its_function_once"),
]
