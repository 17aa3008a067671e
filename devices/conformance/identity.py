"""Identity: what the device says of itself is complete, consistent and true."""

from __future__ import annotations

from typing import get_args

from tierloop.devices.commands import Read
from tierloop.devices.conformance.subject import Skip, Subject, expect
from tierloop.devices.info import Coherence, Provenance
from tierloop.devices.kernels.contract import DTYPES, KERNELS

_VERBS = {"read", "write", "copy", "flush"}
_KINDS = {"gpu", "cpu", "cxl", "nvme", "pnm", "null", "reference"}


def check_it_has_a_name_a_kind_and_a_provenance(subject: Subject) -> None:
    """The words that reports and schedulers sort by are the ones that they know."""
    info = subject.info
    expect(info.name and info.name.strip() == info.name, f"the name {info.name!r} is empty or padded")
    expect(info.kind in _KINDS, f"kind {info.kind!r} is not one of {sorted(_KINDS)}")
    expect(info.provenance in get_args(Provenance), f"provenance {info.provenance!r} is not real or emulated")
    expect(info.memories or info.executors, "it has neither a memory nor an executor")


def check_an_emulated_device_says_so_in_its_name(subject: Subject) -> None:
    """`emu:` stands before the name of an emulated device and of no other."""
    info = subject.info
    emulated = info.provenance == "emulated"
    expect(info.name.startswith("emu:") == emulated, f"a device that is {info.provenance} is called {info.name!r}")


def check_a_real_device_is_not_dilated(subject: Subject) -> None:
    """Only emulated time can be stretched."""
    info = subject.info
    expect(info.dilation >= 1, f"dilation {info.dilation} is below 1")
    expect(info.provenance == "emulated" or info.dilation == 1, f"a real device has a dilation of {info.dilation}")


def check_memories_have_names_sizes_and_a_grid(subject: Subject) -> None:
    """A memory is called like the device, or `device/name` where there are several; its numbers make sense."""
    info = subject.info
    names = [m.name for m in info.memories]
    if not names:
        raise Skip("the device has no memory")
    expect(len(set(names)) == len(names), f"memory names repeat: {names}")
    for memory in info.memories:
        called = memory.name == info.name if len(names) == 1 else memory.name.startswith(f"{info.name}/")
        expect(called, f"memory {memory.name!r} of {info.name!r}: one is called like the device, several 'device/name'")
        expect(memory.capacity > 0, f"{memory.name} has a capacity of {memory.capacity} bytes")
        expect(memory.alignment >= 1, f"{memory.name} has an alignment of {memory.alignment}")
        expect(
            not memory.byte_addressable or memory.alignment <= 4096,
            f"{memory.name} is byte-addressable on a grid of {memory.alignment} bytes",
        )


def check_memory_names_are_unique_in_the_platform(subject: Subject) -> None:
    """Commands name memories, so no two may share a name."""
    names = [memory.name for _, memory in subject.platform.memories()]
    repeated = sorted({n for n in names if names.count(n) > 1})
    expect(not repeated, f"several memories of the platform are called {repeated}")


def check_queues_are_numbered_from_zero_and_belong_to_one_executor(subject: Subject) -> None:
    """Queues are numbered over the whole device."""
    info = subject.info
    if not info.executors:
        raise Skip("the device has no executor")
    names = [e.name for e in info.executors]
    expect(len(set(names)) == len(names), f"executor names repeat: {names}")
    queues = sorted(q for e in info.executors for q in e.queues)
    expect(queues == list(range(len(queues))), f"the queues of all executors are {queues}, not 0, 1, 2, … once each")
    for executor in info.executors:
        expect(executor.queues, f"executor {executor.name} has no queue")
        expect(executor.depth >= 1, f"the queues of {executor.name} hold {executor.depth} commands")
        expect(executor.largest_transfer >= 0, f"{executor.name}: largest transfer {executor.largest_transfer}")
        for queue in executor.queues:
            expect(info.executor_of(queue) is executor, f"queue {queue} is not found as one of {executor.name}")


def check_executors_offer_what_the_contract_knows(subject: Subject) -> None:
    """Verbs, kernels and dtypes are words of the contract, and an executor offers something."""
    info = subject.info
    if not info.executors:
        raise Skip("the device has no executor")
    for executor in info.executors:
        for what, offered, known in (
            ("verbs", executor.verbs, _VERBS),
            ("kernels", executor.kernels, KERNELS),
            ("dtypes", executor.dtypes, DTYPES),
        ):
            expect(offered <= known, f"{executor.name} has unknown {what}: {sorted(offered - known)}")
        expect(executor.verbs or executor.kernels, f"{executor.name} offers neither a verb nor a kernel")
        typed = executor.kernels & {"attend", "logits", "combine", "append"}
        expect(not typed or executor.dtypes, f"{executor.name} offers {sorted(typed)} for no dtype")


def check_paths_lead_to_memories_that_exist(subject: Subject) -> None:
    """An executor reaches something; each path names a memory of the platform, once, with rates that make sense."""
    info = subject.info
    if not info.executors:
        raise Skip("the device has no executor")
    known = {memory.name for _, memory in subject.platform.memories()}
    for executor in info.executors:
        reached = [p.memory for p in executor.paths]
        expect(reached, f"{executor.name} reaches no memory")
        expect(len(set(reached)) == len(reached), f"{executor.name} has several paths to one memory: {reached}")
        expect(set(reached) <= known, f"{executor.name} has paths to {sorted(set(reached) - known)}, which nobody has")
        for path in executor.paths:
            expect(path.latency_ns >= 0, f"{executor.name} → {path.memory}: latency {path.latency_ns} ns")
            rates = (path.read_bytes_per_s, path.write_bytes_per_s)
            expect(min(rates) >= 0, f"{executor.name} → {path.memory}: rates {rates}")
            expect(path.mlp >= 1, f"{executor.name} → {path.memory}: {path.mlp} accesses under way")
            expect(path.coherence in get_args(Coherence), f"{executor.name} → {path.memory}: {path.coherence!r}")


def check_whoever_computes_states_its_arithmetic(subject: Subject) -> None:
    """Error bounds are computed from it."""
    kernels = {k for e in subject.info.executors for k in e.kernels}
    numeric = kernels & {"attend", "logits", "combine", "merge", "score"}
    if not numeric:
        raise Skip("the device offers no kernel that rounds")
    arithmetic = subject.info.arithmetic
    if arithmetic is None:
        expect(False, f"it offers {sorted(numeric)} and does not say in which arithmetic")
        return
    expect(arithmetic.microkernel, "its microkernel has no name")
    expect(arithmetic.accumulator in ("float16", "float32", "float64"), f"accumulator {arithmetic.accumulator!r}")
    expect(arithmetic.exp in ("float16", "float32", "float64"), f"exp {arithmetic.exp!r}")
    expect(arithmetic.wire in ("float16", "float32"), f"wire {arithmetic.wire!r}")


def check_info_stays_the_same(subject: Subject) -> None:
    """`info` never changes while the device is open, whatever it does."""
    before = subject.device.info
    subject.works()
    expect(subject.device.info == before, "info changed after some commands")


def check_an_estimate_has_no_effect(subject: Subject) -> None:
    """`estimate` answers with a duration, a margin and how it knows; no time passes and nothing is carried out."""
    memory = subject.memory()
    lane = subject.lane(memory.name)
    region = subject.alloc(subject.room(memory), memory)
    subject.write(region.all(), subject.bytes(region.nbytes))
    buffer = subject.bytes(region.nbytes)
    kept, now = buffer.copy(), subject.clock.now()
    estimate = lane.device.estimate(Read(region.all(), buffer), lane.queue)
    expect(estimate.duration_ns >= 0, f"it estimates {estimate.duration_ns} ns")
    expect(estimate.margin_ns >= 0, f"its margin is {estimate.margin_ns} ns")
    expect(estimate.source, "it does not say how it knows")
    if subject.clock.virtual:
        expect(subject.clock.now() == now, "time passed while it estimated")
    subject.pass_time()
    expect((buffer == kept).all(), "the command was carried out")


def check_polling_is_harmless(subject: Subject) -> None:
    """`poll` may be called at any time, and never blocks."""
    now = subject.clock.now()
    for _ in range(3):
        subject.device.poll()
    if subject.clock.virtual:
        expect(subject.clock.now() == now, "time passed while polling")
    subject.works()
