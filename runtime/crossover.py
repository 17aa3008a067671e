"""NELSSA's crossover: from which length on sparse attention near memory is faster than dense attention on the GPU.

NELSSA (MICRO 2026, §4.1) decides where a request's KV cache lies by its length. With L tokens of M_kv bytes each over
all layers, for one decode step of one request:

    Eq. 1  T_GPU(L)    = L · M_kv / BW_GPU
    Eq. 2  T_PNM(L, N) = T_search(L) + L · S · M_kv / (N · BW_eff) + T_comm(L)
           T_search(L) = (L / C) · M_centroid / BW_GPU
           T_comm(L)   = T_fixed + L · T_per_token
    Eq. 3  T_GPU(L_x) = T_PNM(L_x, N), so  L_x = T_fixed / gain,
           gain        = M_kv / BW_GPU − M_centroid / (C · BW_GPU) − S · M_kv / (N · BW_eff) − T_per_token

The GPU reads one centroid for every C tokens (only keys have centroids: half of M_kv where their elements have the
bytes of the cache's), each of N devices the selected share S of its part of the cache, and queries and states go to and
fro. The paper has T_comm(N) without L: T_per_token is 0. It is not where the communication of a step grows with the
context, as that of cluster numbers does when each is sent: S / C of them for each token.

`gain` is what one more token of context costs the GPU more than the PNM. Where it is not above 0 the PNM never wins,
whatever the length; `crossover` then says with how many devices, or at what bandwidth, it would. All N devices have
equal shares: the KV heads are divided evenly. Rates are bytes/s, times ns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from tierloop.devices.errors import ConfigurationError
from tierloop.runtime.model_shapes import KnownShape

NS = 1_000_000_000

_UNITS = {
    "kv_nbytes": "B/token",
    "element_nbytes": "B",
    "centroid_element_nbytes": "B",
    "cluster_tokens": "tokens",
    "selection_ratio": "",
    "gpu_bytes_per_s": "B/s",
    "pnm_bytes_per_s": "B/s",
    "comm_ns": "ns/step",
    "comm_ns_per_token": "ns/token",
    "num_devices": "",
}
"""The constants, by the names of their fields, and what each is counted in."""

SELECTION_RATIO, SELECTION_RATIO_SOURCE = 0.04, "NELSSA §8.2: the least with stable accuracy on its two tasks"
CLUSTER_TOKENS, CLUSTER_TOKENS_SOURCE = 16, "assumed: NELSSA's published code; the paper gives no number"


@dataclass(frozen=True)
class Constants:
    """What the equations are made of, and where each number is from. Raises ConfigurationError.

    kv_nbytes               M_kv: K and V of one token over all layers
    element_nbytes          of an element of K and V
    centroid_element_nbytes of an element of a centroid
    cluster_tokens          C: tokens per centroid, at least 1
    selection_ratio         S: the share of the cache that a step attends, above 0 and at most 1
    gpu_bytes_per_s         BW_GPU
    pnm_bytes_per_s         BW_eff of one device, in the pattern of a sparse step
    comm_ns                 T_fixed: communication of one step, whatever the context
    comm_ns_per_token       T_per_token: communication that each token of context adds
    num_devices             N

    `sources` says for each of them where its number is from; whatever it leaves out is "given".
    """

    kv_nbytes: int
    gpu_bytes_per_s: float
    pnm_bytes_per_s: float
    comm_ns: float
    selection_ratio: float
    cluster_tokens: float
    num_devices: int = 1
    element_nbytes: int = 2
    centroid_element_nbytes: int = 2
    comm_ns_per_token: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("kv_nbytes", "element_nbytes", "centroid_element_nbytes", "num_devices"):
            _whole(name, getattr(self, name))
        for name in ("gpu_bytes_per_s", "pnm_bytes_per_s"):
            _number(name, getattr(self, name), "at least 1", lambda x: x >= 1)
        for name in ("comm_ns", "comm_ns_per_token"):
            _number(name, getattr(self, name), "at least 0", lambda x: x >= 0)
        _number("selection_ratio", self.selection_ratio, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _number("cluster_tokens", self.cluster_tokens, "at least 1", lambda x: x >= 1)
        unknown = sorted(set(self.sources) - set(_UNITS))
        if unknown:
            raise ConfigurationError(f"crossover: sources of {', '.join(unknown)}; constants are {', '.join(_UNITS)}")

    @classmethod
    def of(
        cls,
        model: KnownShape,
        *,
        gpu_bytes_per_s: float,
        pnm_bytes_per_s: float,
        comm_ns: float,
        num_devices: int = 1,
        selection_ratio: float | None = None,
        cluster_tokens: float | None = None,
        element_nbytes: int = 2,
        centroid_element_nbytes: int = 2,
        comm_ns_per_token: float = 0.0,
        sources: Mapping[str, str] | None = None,
    ) -> Constants:
        """Of a model whose K and V elements have `element_nbytes`, and numbers of a platform.

        Selection ratio and tokens per centroid are NELSSA's where none are given. Raises ConfigurationError.
        """
        _whole("element_nbytes", element_nbytes)
        elements = f"2 · {model.num_layers} layers · {model.num_kv_heads} KV heads · {model.head_dim}"
        known = {"kv_nbytes": f"{model.name}: {elements} elements of {element_nbytes} B"}
        if selection_ratio is None:
            selection_ratio, known["selection_ratio"] = SELECTION_RATIO, SELECTION_RATIO_SOURCE
        if cluster_tokens is None:
            cluster_tokens, known["cluster_tokens"] = CLUSTER_TOKENS, CLUSTER_TOKENS_SOURCE
        return cls(
            kv_nbytes=model.kv_nbytes(element_nbytes),
            gpu_bytes_per_s=gpu_bytes_per_s,
            pnm_bytes_per_s=pnm_bytes_per_s,
            comm_ns=comm_ns,
            selection_ratio=selection_ratio,
            cluster_tokens=cluster_tokens,
            num_devices=num_devices,
            element_nbytes=element_nbytes,
            centroid_element_nbytes=centroid_element_nbytes,
            comm_ns_per_token=comm_ns_per_token,
            sources=known | dict(sources or {}),
        )

    def on(self, num_devices: int) -> Constants:
        """The same with another number of devices. Raises ConfigurationError."""
        return replace(self, num_devices=num_devices)

    @property
    def centroid_nbytes(self) -> float:
        """M_centroid: the keys of one centroid over all layers."""
        return self.kv_nbytes / 2 * self.centroid_element_nbytes / self.element_nbytes

    @property
    def gpu_ns_per_token(self) -> float:
        """What the GPU takes for each token of context: M_kv / BW_GPU."""
        return self.kv_nbytes * NS / self.gpu_bytes_per_s

    @property
    def search_ns_per_token(self) -> float:
        """What the GPU takes to search, for each token: M_centroid / (C · BW_GPU)."""
        return self.centroid_nbytes * NS / (self.cluster_tokens * self.gpu_bytes_per_s)

    @property
    def attention_ns_per_token(self) -> float:
        """What the devices take for each token: S · M_kv / (N · BW_eff)."""
        return self.selection_ratio * self.kv_nbytes * NS / (self.num_devices * self.pnm_bytes_per_s)

    @property
    def gain_ns_per_token(self) -> float:
        """What one more token costs the GPU more than the PNM."""
        return float(_left(self) - _attention(self, self.num_devices))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every constant: its value, its unit and its source."""
        return {
            name: {"value": getattr(self, name), "unit": unit, "source": self.sources.get(name, "given")}
            for name, unit in _UNITS.items()
        }

    def table(self) -> str:
        """The same as lines of text."""
        rows = [
            (name, f"{one['value']:,.15g} {one['unit']}".rstrip(), one["source"])
            for name, one in self.as_dict().items()
        ]
        names, values = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{name:<{names}}  {value:>{values}}  {source}" for name, value, source in rows)


@dataclass(frozen=True)
class PnmTime:
    """The parts of T_PNM, in ns."""

    search_ns: float
    attention_ns: float
    comm_ns: float

    @property
    def total_ns(self) -> float:
        """T_PNM."""
        return self.search_ns + self.attention_ns + self.comm_ns


def gpu_ns(constants: Constants, tokens: float) -> float:
    """Eq. 1: T_GPU(L). Raises ConfigurationError."""
    return _tokens(tokens) * constants.gpu_ns_per_token


def search_ns(constants: Constants, tokens: float) -> float:
    """T_search(L): the GPU reads all centroids. Raises ConfigurationError."""
    return _tokens(tokens) * constants.search_ns_per_token


def pnm_time(constants: Constants, tokens: float) -> PnmTime:
    """Eq. 2: T_PNM(L, N) by its parts. Raises ConfigurationError."""
    return PnmTime(
        search_ns(constants, tokens),
        tokens * constants.attention_ns_per_token,
        constants.comm_ns + tokens * constants.comm_ns_per_token,
    )


@dataclass(frozen=True)
class Crossover:
    """Eq. 3: the PNM is faster for contexts of more than `tokens`; None where it never is, and then `reason` says why.

    `least_devices` is the least number of devices with which it wins at the bandwidth that was given, and
    `bytes_per_s_above` what one device's bandwidth has to exceed at the number that was given;
    None where nothing helps.
    """

    tokens: float | None
    least_devices: int | None
    bytes_per_s_above: float | None
    reason: str = ""


def crossover(constants: Constants) -> Crossover:
    """L_crossover(N) in closed form: T_fixed / gain."""
    c = constants
    left, attention = _left(c), _attention(c, c.num_devices)
    overheads_ns = c.search_ns_per_token + c.comm_ns_per_token
    if left <= 0:
        reason = (
            f"each token costs the GPU {c.gpu_ns_per_token:.3g} ns, search and communication alone cost "
            f"{overheads_ns:.3g} ns: no number of devices and no bandwidth helps"
        )
        return Crossover(None, None, None, reason)
    least = math.floor(_attention(c, 1) / left) + 1
    above = float(attention * Fraction(c.pnm_bytes_per_s) / left)
    if attention < left:
        return Crossover(float(Fraction(c.comm_ns) / (left - attention)), least, above)
    reason = (
        f"each token costs the GPU {c.gpu_ns_per_token:.3g} ns; near memory, {c.selection_ratio:.3g} of it at "
        f"{c.num_devices} × {c.pnm_bytes_per_s:.4g} B/s, search and communication cost "
        f"{c.attention_ns_per_token + overheads_ns:.3g} ns; {least} devices would do, or more than {above:.4g} B/s "
        "of each"
    )
    return Crossover(None, least, above, reason)


def _left(constants: Constants) -> Fraction:
    """What the GPU's time for a token leaves to attention near memory, in ns: exact, so that no sign is in doubt."""
    c = constants
    centroid = Fraction(c.kv_nbytes * c.centroid_element_nbytes, 2 * c.element_nbytes)
    nbytes = c.kv_nbytes - centroid / Fraction(c.cluster_tokens)
    return nbytes * NS / Fraction(c.gpu_bytes_per_s) - Fraction(c.comm_ns_per_token)


def _attention(constants: Constants, num_devices: int) -> Fraction:
    """What that many devices take for each token, in ns."""
    c = constants
    return Fraction(c.selection_ratio) * c.kv_nbytes * NS / (num_devices * Fraction(c.pnm_bytes_per_s))


@dataclass(frozen=True)
class Pool:
    """Memory that holds KV caches: `num_devices` of `nbytes` each, of which `utilisation` may be used, for the weights
    (one copy over all devices) first. Raises ConfigurationError."""

    nbytes: int
    num_devices: int = 1
    utilisation: float = 1.0
    weight_nbytes: int = 0

    def __post_init__(self) -> None:
        for name in ("nbytes", "num_devices"):
            _whole(name, getattr(self, name))
        _number("utilisation", self.utilisation, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _whole("weight_nbytes", self.weight_nbytes, least=0)

    def tokens(self, kv_nbytes: int) -> int:
        """How many tokens of `kv_nbytes` fit; 0 where the weights leave no room. Raises ConfigurationError."""
        _whole("kv_nbytes", kv_nbytes)
        usable = math.floor(Fraction(str(self.utilisation)) * self.num_devices * self.nbytes)
        return max(usable - self.weight_nbytes, 0) // kv_nbytes


def capacities(kv_nbytes: int, pools: Mapping[str, Pool]) -> dict[str, int]:
    """How many tokens of `kv_nbytes` each pool holds. Raises ConfigurationError."""
    return {name: pool.tokens(kv_nbytes) for name, pool in pools.items()}


_MOST = 1 << 63
"""Everything lies below this, so that nothing overflows."""


def _tokens(tokens: float) -> float:
    _number("tokens", tokens, "at least 0", lambda x: x >= 0)
    return tokens


def _whole(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
        raise ConfigurationError(f"crossover: {name} is {value!r}; allowed: a whole number from {least} to 2**63 − 1")


def _number(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value < _MOST or not is_allowed(value):  # type: ignore[operator,arg-type]  # a number by now
        raise ConfigurationError(f"crossover: {name} is {value!r}; allowed: a number {allowed}, below 2**63")
