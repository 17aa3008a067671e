"""The roofline of decode attention against a link: from which hit rate on it belongs on the GPU.

Rows that attention needs lie in host memory unless a window on the GPU holds them (a hit). Either the GPU attends, and
what it misses crosses the link; or the host attends, and nothing does, but queries and states, which are left out here.
In both cases bytes move while others are computed upon, so the slowest of what is busy is the time (a roofline). Where
the figures come from: KVDrive §6.3 and its figure 11, as far as they are public; the formulas are spelled out because
the paper gives none.

Per byte of the rows that are attended, with the *operational intensity* OI in FLOP per byte:

    host: max(1 / host bytes/s, OI / host FLOP/s)
    GPU:  max((1 − hit) / link bytes/s, (1 + (1 − hit)) / GPU bytes/s, OI / GPU FLOP/s)

A miss is written to the GPU's memory before it is read there. Seen from the link, the intensity is OI / (1 − hit): each
byte that crosses it serves 1 / (1 − hit) bytes of attention. The threshold P is the intensity on that axis above which
the GPU is faster: what the host attains over what the link moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tierloop.runtime.blocks import K, KVShape, V


@dataclass(frozen=True)
class Rates:
    """What a machine attains, per second. All are above 0; FLOP/s may be infinite: then memory alone limits.

    `host_bytes_per_s` and `gpu_bytes_per_s` are of the memories that attention reads, in the pattern in which it does.
    Raises ValueError.
    """

    link_bytes_per_s: float
    host_bytes_per_s: float
    host_flops_per_s: float
    gpu_bytes_per_s: float
    gpu_flops_per_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 or (math.isinf(value) and "bytes" in field.name):
                raise ValueError(f"{field.name} is {value!r}; it must be above 0{', finite' * ('bytes' in field.name)}")


def intensity(shape: KVShape) -> float:
    """FLOP per byte of K and V rows that one decode query of each head attends.

    Each of a KV head's `group` queries takes 2 FLOP for each element of a row: with 16-bit rows that is `group`, 4 for
    Llama-3-8B. exp and the comparisons of the softmax are not counted, as is usual.
    """
    flops = 2 * shape.group * (shape.head_dim + shape.head_dim_v)
    return flops / (shape.row_nbytes(K) + shape.row_nbytes(V))


def over_link(oi: float, hit_rate: float) -> float:
    """FLOP per byte over the link: OI / (1 − hit), infinite where every row is there already.

    A hit rate of 0.8 makes it 5 times the intensity. Raises ValueError for a hit rate that is not from 0 to 1.
    """
    _check(oi, hit_rate)
    return math.inf if hit_rate == 1 else oi / (1 - hit_rate)


def host_flops_per_s(rates: Rates, oi: float) -> float:
    """What attention attains on the host, FLOP/s: min(FLOP/s, OI · host bytes/s)."""
    _check(oi)
    return min(rates.host_flops_per_s, oi * rates.host_bytes_per_s)


def gpu_flops_per_s(rates: Rates, oi: float, hit_rate: float) -> float:
    """What attention attains on the GPU, FLOP/s: min(FLOP/s, OI · GPU bytes/s / (2 − hit), OI_link · link bytes/s)."""
    by_link = over_link(oi, hit_rate) * rates.link_bytes_per_s
    return min(rates.gpu_flops_per_s, oi * rates.gpu_bytes_per_s / (2 - hit_rate), by_link)


def threshold(rates: Rates, oi: float) -> float:
    """P: FLOP per byte over the link above which the link lets the GPU be faster than the host.

    What attention attains on the host / link bytes/s. Where the host is limited by its memory that is OI times the
    ratio of the two rates of bytes.
    """
    return host_flops_per_s(rates, oi) / rates.link_bytes_per_s


def crossing(rates: Rates, oi: float) -> float | None:
    """The least hit rate with which the GPU is at least as fast as the host; None where it is not even with all hits.

    The larger of 1 − OI / P, where the link is no longer slower than the host, and 2 − GPU bytes/s · OI / host FLOP/s,
    where the GPU's memory is not.
    """
    host = host_flops_per_s(rates, oi)
    if min(rates.gpu_flops_per_s, oi * rates.gpu_bytes_per_s) < host:
        return None
    by_link = 1 - oi / threshold(rates, oi)
    by_memory = 2 - rates.gpu_bytes_per_s * oi / host
    return max(by_link, by_memory, 0.0)


def _check(oi: float, hit_rate: float = 0.0) -> None:
    if not 0 < oi < math.inf:
        raise ValueError(f"the operational intensity is {oi!r}; it must be above 0")
    if not 0 <= hit_rate <= 1:
        raise ValueError(f"the hit rate is {hit_rate!r}; it must be from 0 to 1")
