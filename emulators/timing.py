"""The timing transition: flows over shared resources, in exact integers.

A *resource* serves so many units per second: a memory medium or one direction of a link bytes, an engine ns of its
time. A *flow* is a piece of work that occupies several resources at once, each in proportion to its progress. Whoever
uses a resource shares it fairly: the rates are max-min fair (weighted, if a route says so), which is what round robin
over ever smaller quanta tends to. So a later arrival takes its share from that moment on, moves earlier provisional
finishes back, and a small flow never waits for the whole of a large one.

The transition is `arrive(now, …)` and `advance(now)`: from the state and the event to a new state and the provisional
finish of every flow. It reads no clock, and whatever it returns depends on its arguments alone. It changes the state in
place because that is cheap; who wants to look ahead does it on a `copy`. `Flows` is the state.

- Rates are whole units per second, rounded down, so the sum of the shares never exceeds a resource's capacity. What is
  left of a flow is counted in units · 10⁻⁹ (times the dilation), so progress over whole ns is exact; a duration is
  rounded up to the next ns.
- A flow that shares nothing has a finish that never moves: it costs no further event and is forgotten when the next
  one comes to one of its resources. Flows that share are settled at each arrival and departure, and only those that are
  connected to it by shared resources are looked at.
- Departures are handled at the time at which they happened, however late `advance` is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FAR = 1 << 62
"""A time that does not come."""

ARBITRATION = "round robin in the limit of small quanta: max-min fair, weighted where a route says so"


class Route:
    """What one unit of work occupies: `demands` holds (resource, units of that resource), each resource once.

    `rate` is the work per second when nobody else is there. The share of a route in what it competes for grows with
    its `weight`. `legs` is the owner's.
    """

    __slots__ = ("demands", "legs", "rate", "resources", "weight")

    def __init__(
        self, demands: Iterable[tuple[int, int]], capacity: list[int], weight: int = 1, legs: tuple[Any, ...] = ()
    ) -> None:
        together: dict[int, int] = {}
        for resource, units in demands:
            together[resource] = together.get(resource, 0) + units
        self.demands = tuple(sorted(together.items()))
        self.resources = tuple(resource for resource, _ in self.demands)
        self.rate = max(min((capacity[r] // units for r, units in self.demands), default=FAR), 1)
        self.weight = weight
        self.legs = legs


class Flow:
    """Work under way. `finish` is provisional: what it will be if nothing else arrives and nobody leaves.

    `latency_ns` is the owner's: what passes after the finish.
    """

    __slots__ = (
        "cap",
        "finish",
        "latency_ns",
        "owner",
        "rate",
        "remaining",
        "route",
        "since",
        "start",
        "work",
    )

    def __init__(
        self, route: Route, work: int, remaining: int, cap: int, now: int, latency_ns: int = 0, owner: Any = None
    ) -> None:
        self.route = route
        self.work = work
        self.remaining = remaining
        self.cap = cap
        self.rate = 0
        self.start = self.since = self.finish = now
        self.latency_ns = latency_ns
        self.owner = owner


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
        self._scale = 1_000_000_000 * dilation

    def add(self, capacity: int) -> int:
        """A new resource of that many units/s; returns its number."""
        self.capacity.append(capacity)
        self.users.append([])
        return len(self.capacity) - 1

    def arrive(self, now: int, work: int, route: Route, cap: int = FAR, latency_ns: int = 0, owner: Any = None) -> Flow:
        """A flow of `work` units begins at `now`, at most `cap` units/s whatever its share.

        `advance(now)` must have been called if anything is shared.
        """
        remaining = work * self._scale
        flow = Flow(route, work, remaining, cap, now, latency_ns, owner)
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
        if alone:
            rate = route.rate if route.rate < cap else cap
            flow.rate = rate
            flow.finish = now - (-remaining // rate)
        else:
            self._share(flow, now)
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
                    clone = Flow(flow.route, flow.work, flow.remaining, flow.cap, flow.start)
                    clone.rate, clone.since, clone.finish = flow.rate, flow.since, flow.finish
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
            flow.remaining = max(flow.remaining - flow.rate * (now - flow.since), 0)
            flow.since = now
        if len(together) > 1:
            fair_rates(list(together), self.capacity)
        else:
            flow.rate = min(flow.route.rate, flow.cap)
        for flow in together:
            finish = now - (-flow.remaining // flow.rate)
            if finish != flow.finish:
                flow.finish = finish
                self.moved.append(flow)
        if len(together) > 1:
            self.shared.update(together)
        else:
            self.shared.pop(next(iter(together)), None)
        return together


def fair_rates(flows: list[Flow], capacity: list[int]) -> None:
    """Set the max-min fair `rate` of each flow, by progressive filling.

    All rates rise together, in proportion to the weights, until a resource is full or a flow's cap is reached; the
    flows concerned stay there, the others rise on. The result does not depend on the order of the flows.
    """
    room: dict[int, int] = {}
    load: dict[int, int] = {}
    for flow in flows:
        weight = flow.route.weight
        for resource, units in flow.route.demands:
            room[resource] = capacity[resource]
            load[resource] = load.get(resource, 0) + units * weight
    rising = flows
    while rising:
        levels = {r: room[r] // total for r, total in load.items() if total}
        level = min(levels.values(), default=FAR)
        for flow in rising:
            if flow.cap < level * flow.route.weight:
                level = flow.cap // flow.route.weight
        stay: list[Flow] = []
        rise: list[Flow] = []
        for flow in rising:
            full = flow.cap // flow.route.weight <= level
            for resource in flow.route.resources:
                if levels[resource] <= level:
                    full = True
                    break
            (stay if full else rise).append(flow)
        for flow in stay:
            flow.rate = max(min(level * flow.route.weight, flow.cap), 1)
            for resource, units in flow.route.demands:
                room[resource] -= units * flow.rate
                load[resource] -= units * flow.route.weight
        rising = rise


def _finish(flow: Flow) -> int:
    return flow.finish
