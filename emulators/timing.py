"""The timing transition: flows over shared resources, in exact integers.

A *resource* serves so many units per second: a memory medium or one direction of a link bytes, an engine ns of its
time. A *flow* is a piece of work that occupies several resources at once, each in proportion to its progress. Whoever
uses a resource shares it fairly: the rates are max-min fair (weighted, if a route says so), which is what round robin
over ever smaller quanta tends to. So a later arrival takes its share from that moment on, moves earlier provisional
finishes back, and a small flow never waits for the whole of a large one.

The transition is `arrive(now, …)` and `advance(now)`: from the state and the event to a new state and the provisional
finish of every flow. It reads no clock, and whatever it returns depends on its arguments alone. It changes the state in
place because that is cheap; who wants to look ahead does it on a `copy`. `Flows` is the state.

- Rates and what is left of a flow are exact fractions of integers, so shares add up to the capacity, no more and no
  less, and progress over whole ns loses nothing; only the finish is rounded, up to the next ns.
- A flow that shares nothing has a finish that never moves: it costs no further event and is forgotten when the next
  one comes to one of its resources. Flows that share are settled at each arrival and departure, and only those that are
  connected to it by shared resources are looked at.
- What a memory with loaded-latency curves has to share out depends on the mix of reads and writes of those who share
  it now, each counted by its weight. Flows of accesses that wait for each other have a *window*: their rate is at most
  window / latency, where the latency is that of the total rate which comes out (a fixed point, found by halving).
- Departures are handled at the time at which they happened, however late `advance` is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any

from tierloop.emulators.loaded import LoadedMedium, fraction_of

NS = 1_000_000_000
FAR = 1 << 62
"""A time that does not come, and a rate that nothing reaches."""
_FINEST = 1 << 64
"""Denominators beyond this are rounded to it, what is left upwards, so that they stay small for ever."""
WINDOW = 1000
"""Windows are in thousandths of a unit of work: a processor has some 9.6 lines under way, on average."""
_HALVINGS = 20
"""The rate at which a loaded latency is taken is known to 1 / 2**20 of the cap."""

ARBITRATION = "round robin in the limit of small quanta: max-min fair, weighted where a route says so"


class Route:
    """What one unit of work occupies: `demands` holds (resource, units of that resource), each resource once.

    When nobody else is there, `alone` units of work pass in `alone_s` seconds. The share of a route in what it competes
    for grows with its `weight`. `legs` is the owner's.

    `mixes` names the resources that are memories with curves, and how many bytes one unit of work reads and writes
    there. A `window` above 0, in thousandths of a unit of work, says that no more than that is under way at a time, and
    that each access takes `away_ns` and the loaded latencies of `waits`, resources in `mixes`.
    """

    __slots__ = ("alone", "alone_s", "away_ns", "demands", "legs", "mixes", "resources", "waits", "weight", "window")

    def __init__(
        self,
        demands: Iterable[tuple[int, int]],
        capacity: list[int],
        weight: int = 1,
        legs: tuple[Any, ...] = (),
        mixes: tuple[Mix, ...] = (),
        window: int = 0,
        away_ns: int = 0,
        waits: tuple[int, ...] = (),
    ) -> None:
        together: dict[int, int] = {}
        for resource, units in demands:
            together[resource] = together.get(resource, 0) + units
        self.demands = tuple(sorted(together.items()))
        self.resources = tuple(resource for resource, _ in self.demands)
        self.mixes = mixes
        mixed = {resource: medium.shared(read, written) for resource, medium, read, written in mixes}
        self.alone, self.alone_s = FAR, 1
        for resource, units in self.demands:
            limit = mixed.get(resource, capacity[resource])
            if limit * self.alone_s < self.alone * units:
                self.alone, self.alone_s = limit, units
        self.weight = weight
        self.legs = legs
        self.window = window
        self.away_ns = away_ns
        self.waits = waits
        if window:
            flow = Flow(self, 1, 1, FAR, 0)
            dependent_rates([flow], capacity)
            self.alone, self.alone_s = flow.rate, flow.rate_per

    def ns(self, work: int, cap: int = FAR) -> int:
        """How long `work` units take when nobody else is there, at most `cap` of them per second."""
        if cap * self.alone_s < self.alone:
            return -(-work * NS // cap)
        return -(-work * NS * self.alone_s // self.alone)


Mix = tuple[int, LoadedMedium, int, int]
"""A resource, the memory that it stands for, and the bytes that a unit of work reads and writes there."""


class Flow:
    """Work under way. `finish` is provisional: what it will be if nothing else arrives and nobody leaves.

    `left` / `left_per` units · 10⁻⁹ are left at `since`, and `rate` / `rate_per` units pass per second from then on.
    `latency_ns` is the owner's: what passes after the finish. `most` is what it may have at any time, `cap` / `cap_per`
    what its window leaves of that.
    """

    __slots__ = (
        "cap",
        "cap_per",
        "finish",
        "latency_ns",
        "left",
        "left_per",
        "most",
        "owner",
        "rate",
        "rate_per",
        "route",
        "since",
        "start",
        "work",
    )

    def __init__(
        self, route: Route, work: int, left: int, cap: int, now: int, latency_ns: int = 0, owner: Any = None
    ) -> None:
        self.route = route
        self.work = work
        self.left = left
        self.left_per = self.rate_per = self.cap_per = 1
        self.rate = 0
        self.cap = self.most = cap
        self.start = self.since = self.finish = now
        self.latency_ns = latency_ns
        self.owner = owner

    def settle(self, now: int) -> None:
        """Count what has passed since the rate was last set."""
        left = self.left * self.rate_per - self.rate * (now - self.since) * self.left_per
        self.since = now
        if left <= 0:
            self.left, self.left_per = 0, 1
            return
        per = self.left_per * self.rate_per
        if per > 1:
            common = gcd(left, per)
            left, per = left // common, per // common
            if per > _FINEST:
                left, per = -(-left * _FINEST // per), _FINEST
        self.left, self.left_per = left, per

    def run_alone(self) -> None:
        """Set the rate that the route allows when nobody else is there."""
        route = self.route
        if self.cap * route.alone_s < route.alone * self.cap_per:
            self.rate, self.rate_per = self.cap, self.cap_per
        else:
            self.rate, self.rate_per = route.alone, route.alone_s

    def end(self) -> int:
        """When it will finish at its present rate."""
        return self.since - (-self.left * self.rate_per // (self.rate * self.left_per))


class Flows:
    """The state: which flows use which resource, and at what rate.

    `capacity[r]` is in units/s. All durations are `dilation` times as long as the rates say. `moved` collects flows
    whose finish has changed since the caller last cleared it.
    """

    __slots__ = ("_scale", "capacity", "moved", "shared", "users")

    def __init__(self, dilation: int = 1) -> None:
        self.capacity: list[int] = []
        self.users: list[list[Flow]] = []
        self.shared: dict[Flow, None] = {}
        self.moved: list[Flow] = []
        self._scale = NS * dilation

    def add(self, capacity: int) -> int:
        """A new resource of that many units/s; returns its number."""
        self.capacity.append(capacity)
        self.users.append([])
        return len(self.capacity) - 1

    def arrive(self, now: int, work: int, route: Route, cap: int = FAR, latency_ns: int = 0, owner: Any = None) -> Flow:
        """A flow of `work` units begins at `now`, at most `cap` units/s whatever its share.

        `advance(now)` must have been called if anything is shared.
        """
        flow = Flow(route, work, work * self._scale, cap, now, latency_ns, owner)
        if not work:
            return flow
        alone = True
        users = self.users
        for resource in route.resources:
            line = users[resource]
            if len(line) == 1 and line[0].finish <= now:
                line[0] = flow
                continue
            if line:
                line[:] = [other for other in line if other.finish > now]
                alone = alone and not line
            line.append(flow)
        if not alone:
            self._share(flow, now)
        elif cap == FAR:  # the same as below, without the calls: most commands come here
            flow.rate, flow.rate_per = route.alone, route.alone_s
            flow.finish = now - (-flow.left * route.alone_s // route.alone)
        else:
            flow.run_alone()
            flow.finish = flow.end()
        return flow

    def advance(self, now: int) -> None:
        """Let the flows that end by `now` leave, each at its own time."""
        while self.shared:
            first = min(self.shared, key=_finish)
            if first.finish > now:
                return
            self.leave(first, first.finish)

    def leave(self, flow: Flow, now: int) -> None:
        """A flow ends (or is given up) at `now`; those it shared with have more from then on."""
        neighbours: dict[Flow, None] = {}
        for resource in flow.route.resources:
            line = self.users[resource]
            if flow in line:
                line.remove(flow)
                neighbours.update(dict.fromkeys(other for other in line if other in self.shared))
        self.shared.pop(flow, None)
        flow.finish = min(flow.finish, now)
        while neighbours:
            seed = next(iter(neighbours))
            for done in self._share(seed, now):
                neighbours.pop(done, None)

    def next_departure(self) -> int:
        """When the first flow that shares a resource will leave; FAR if none does. Only then do finishes move early."""
        return min((flow.finish for flow in self.shared), default=FAR)

    def free(self, route: Route, now: int) -> bool:
        """Whether nobody uses any resource of a route."""
        return all(other.finish <= now for resource in route.resources for other in self.users[resource])

    def copy(self) -> Flows:
        """An independent state with the same flows, to look ahead on."""
        twin = Flows()
        twin.capacity = self.capacity
        twin._scale = self._scale
        clones: dict[Flow, Flow] = {}
        for line in self.users:
            for flow in line:
                if flow not in clones:
                    clone = Flow(flow.route, flow.work, flow.left, flow.most, flow.start)
                    clone.cap, clone.cap_per = flow.cap, flow.cap_per
                    clone.left_per, clone.rate, clone.rate_per = flow.left_per, flow.rate, flow.rate_per
                    clone.since, clone.finish = flow.since, flow.finish
                    clones[flow] = clone
        twin.users = [[clones[flow] for flow in line] for line in self.users]
        twin.shared = {clones[flow]: None for flow in self.shared}
        return twin

    def _share(self, seed: Flow, now: int) -> dict[Flow, None]:
        """Settle and re-rate everything that is connected to `seed`; returns those flows."""
        together: dict[Flow, None] = {}
        stack = [seed]
        while stack:
            flow = stack.pop()
            if flow in together:
                continue
            together[flow] = None
            for resource in flow.route.resources:
                stack.extend(other for other in self.users[resource] if other not in together)
        for flow in together:
            flow.settle(now)
        if len(together) > 1:
            flows = list(together)
            if any(flow.route.window for flow in flows):
                dependent_rates(flows, self.capacity)
            else:
                fair_rates(flows, self.capacity)
        else:
            seed.cap, seed.cap_per = seed.most, 1
            seed.run_alone()
        for flow in together:
            finish = flow.end()
            if finish != flow.finish:
                flow.finish = finish
                self.moved.append(flow)
        if len(together) > 1:
            self.shared.update(together)
        else:
            self.shared.pop(next(iter(together)), None)
        return together


def fair_rates(flows: list[Flow], capacity: list[int]) -> None:
    """Set the max-min fair rate of each flow, by progressive filling.

    All rates rise together, in proportion to the weights, until a resource is full or a flow's cap is reached; the
    flows concerned stay there, the others rise on. The result does not depend on the order of the flows. `room` is what
    is left of each resource, in parts of 1 / `per`; `load` is how fast it fills.
    """
    room: dict[int, int] = {}
    load: dict[int, int] = {}
    mixes: dict[int, tuple[LoadedMedium, int, int]] = {}
    for flow in flows:
        weight = flow.route.weight
        for resource, units in flow.route.demands:
            room[resource] = capacity[resource]
            load[resource] = load.get(resource, 0) + units * weight
        if flow.route.mixes:
            _mix(mixes, flow.route)
    for resource, (medium, read, written) in mixes.items():
        room[resource] = medium.shared(read, written)
    per = 1
    rising = flows
    while rising:
        level, level_per = FAR * per, 1  # rates are level / (level_per · per) for a weight of 1
        for resource, filling in load.items():
            if filling and room[resource] * level_per < level * filling:
                level, level_per = room[resource], filling
        for flow in rising:
            if flow.cap * per * level_per < level * flow.route.weight * flow.cap_per:
                level, level_per = flow.cap * per, flow.route.weight * flow.cap_per
        stay: list[Flow] = []
        rise: list[Flow] = []
        for flow in rising:
            full = flow.cap * per * level_per <= level * flow.route.weight * flow.cap_per
            for resource in flow.route.resources:
                if room[resource] * level_per == level * load[resource]:
                    full = True
                    break
            (stay if full else rise).append(flow)
        per *= level_per
        for resource in room:
            room[resource] *= level_per
        for flow in stay:
            weight = flow.route.weight
            flow.rate, flow.rate_per = level * weight, per
            for resource, units in flow.route.demands:
                room[resource] -= units * level * weight
                load[resource] -= units * weight
        rising = rise


def dependent_rates(flows: list[Flow], capacity: list[int]) -> None:
    """The same where some of the flows have windows: set their caps to what their latency allows, and all rates.

    Latency rises with the total rate of a memory, and the total falls as latency rises, so there is one rate at which
    both agree; it is found by halving for all memories at once, and approached from the side of the longer latency.
    """
    mixes: dict[int, tuple[LoadedMedium, int, int]] = {}
    for flow in flows:
        _mix(mixes, flow.route)
    fractions = {r: fraction_of(read, written) for r, (_, read, written) in mixes.items() if read or written}
    low = dict.fromkeys(fractions, 0)
    high = {resource: mixes[resource][0].curves.cap(fraction) for resource, fraction in fractions.items()}

    def latencies(at: dict[int, int]) -> dict[int, int]:
        return {r: mixes[r][0].curves.latency_ns(at[r], fraction) for r, fraction in fractions.items()}

    def settle(latency: dict[int, int]) -> None:
        for flow in flows:
            route = flow.route
            if route.window:
                away_ns = route.away_ns + sum([latency[r] for r in route.waits])
                flow.cap, flow.cap_per = route.window * NS, WINDOW * max(away_ns, 1)
                if flow.most * flow.cap_per <= flow.cap:
                    flow.cap, flow.cap_per = flow.most, 1
        fair_rates(flows, capacity)

    for _ in range(_HALVINGS):
        if latencies(low) == latencies(high):  # to the ns: nothing that is left to find would change a rate
            break
        at = {r: (low[r] + high[r]) // 2 for r in fractions}
        settle(latencies(at))
        for resource in fractions:
            moved, per = 0, 1
            for flow in flows:
                for r, _, read, written in flow.route.mixes:
                    if r == resource:
                        moved = moved * flow.rate_per + flow.rate * (read + written) * per
                        per *= flow.rate_per
            if moved > at[resource] * per:
                low[resource] = at[resource]
            else:
                high[resource] = at[resource]
    settle(latencies(high))


def _mix(mixes: dict[int, tuple[LoadedMedium, int, int]], route: Route) -> None:
    """Add what a route reads and writes, by its weight, to the mixes by resource."""
    for resource, medium, read, written in route.mixes:
        _, reads, writes = mixes.get(resource, (medium, 0, 0))
        mixes[resource] = (medium, reads + read * route.weight, writes + written * route.weight)


def _finish(flow: Flow) -> int:
    return flow.finish
