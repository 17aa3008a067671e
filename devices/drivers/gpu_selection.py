"""topk, cluster, gather and chase on a GPU, in torch (what they mean is kernels/contract.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierloop.devices.drivers.gpu_codes import as_float32
from tierloop.devices.drivers.gpu_operands import Place, Upload
from tierloop.devices.drivers.gpu_tiles import lists_of
from tierloop.devices.kernels.contract import ITEMSIZE, Cluster, Gather, Topk, cut_into_segments, num_clusters
from tierloop.devices.kernels.plan import Rows

Int64 = NDArray[np.int64]
Work = Callable[[Tensor, Upload], None]
_NO_ENTRY = -(1 << 63)
_LOWEST = 0xFFFFFFFF


def gather(args: Gather, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """Scattered rows → one dense run."""
    source, target = Place(reads[0]), Place(writes[0])

    def work(slab: Tensor, upload: Upload) -> None:
        target.store(slab, source.load(slab, upload), upload)

    return work


def topk(args: Topk, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """The k best of each list. A key is the order of a score above that of its index, so that there are no ties."""
    lengths = np.ascontiguousarray(args.lengths, dtype=np.int64)
    if lengths.ndim != 1 or (lengths < 0).any() or (lengths >= _LOWEST).any():
        raise ValueError(f"lengths need shape (n,) and numbers from 0 to {_LOWEST - 1}")
    source, target = Place(reads[0]), Place(writes[0])
    longest = int(lengths.max()) if len(lengths) else 0
    best = min(args.k, longest)

    def work(slab: Tensor, upload: Upload) -> None:
        chosen = torch.full((len(lengths), args.k), -1, dtype=torch.int64, device=slab.device)
        if best and len(lengths):
            each = _reduced(source.load(slab, upload).view(torch.float32).view(-1, args.group), args.reduce)
            ends = upload(np.stack([np.cumsum(lengths) - lengths, lengths]))
            steps = torch.arange(longest, device=slab.device)
            inside = steps < ends[1][:, None]
            keys = (_ordered(each)[torch.where(inside, ends[0][:, None] + steps, 0)] << 32) | (_LOWEST - steps)
            found = torch.where(inside, keys, _NO_ENTRY).topk(best, dim=1, sorted=True).values
            chosen[:, :best] = torch.where(found == _NO_ENTRY, -1, _LOWEST - (found & _LOWEST))
        target.store(slab, chosen, upload)

    return work


def _reduced(members: Tensor, reduce: str) -> Tensor:
    """One score of each group: (entries,)."""
    if reduce == "max":
        return members.amax(dim=1)
    total = members[:, 0]
    for member in range(1, members.shape[1]):
        total = total + members[:, member]
    return total


def _ordered(scores: Tensor) -> Tensor:
    """int64 that are ordered like the float32 scores, 0 and −0 alike, NaN below all of them."""
    bits = (scores + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return torch.where(torch.isnan(scores), -0x7FFFFFFF, order)


def cluster(args: Cluster, reads: list[Int64], writes: list[Int64], room: int) -> Work:
    """Spherical k-means within segments."""
    nbytes = args.head_dim * ITEMSIZE[args.dtype]
    rows = Rows(args.runs, reads[0], nbytes, args.num_sequences, args.num_kv_heads)
    segments = [
        (n, num_clusters(n, n, args.cluster_tokens))
        for low, high in lists_of(rows)[:, 2:].tolist()
        for n in cut_into_segments(high - low, args.segment_tokens)
    ]
    keys, means, numbers = Place(reads[0]), Place(writes[0]), Place(writes[1])
    need = sum(c for _, c in segments) * args.head_dim * 4
    if means.nbytes != need:
        raise ValueError(f"cluster: centroids have {means.nbytes} bytes, {need} needed")

    def work(slab: Tensor, upload: Upload) -> None:
        every = as_float32(keys.load(slab, upload), args.dtype).view(-1, args.head_dim)
        centroids = [torch.empty((0, args.head_dim), device=slab.device)]
        labels = [torch.empty(0, dtype=torch.int64, device=slab.device)]
        low = known = 0
        for n, c in segments:
            found, nearest = _k_means(every[low : low + n], c, args.iterations)
            centroids.append(found)
            labels.append(nearest + known)
            low, known = low + n, known + c
        means.store(slab, torch.cat(centroids), upload)
        numbers.store(slab, torch.cat(labels), upload)

    return work


def _k_means(x: Tensor, c: int, iterations: int) -> tuple[Tensor, Tensor]:
    """One segment: the means (c, dim) of the rows that the last assignment gives them, and each row's label."""
    centroids = x[torch.arange(c, device=x.device) * len(x) // c]
    for _ in range(iterations):
        means, counts = _means(x, _nearest(x, centroids), c)
        centroids = torch.where(counts > 0, means, centroids)
    labels = _nearest(x, centroids)
    return _means(x, labels, c)[0], labels


def _nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """The centroid with the largest product q·c / |c|; the first of equals, NaN never, the first of all for nothing."""
    products = x @ (centroids / torch.linalg.vector_norm(centroids, dim=1, keepdim=True)).T
    known = ~torch.isnan(products)
    candidates = torch.where(known, products, -torch.inf)
    first_known = known.to(torch.uint8).argmax(dim=1)
    return torch.where(candidates.amax(dim=1) == -torch.inf, first_known, candidates.argmax(dim=1))


def _means(x: Tensor, labels: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Means (c, dim), zeros without rows, and counts (c, 1). Sums are float64: their order then hardly shows."""
    sums = torch.zeros((c, x.shape[1]), dtype=torch.float64, device=x.device).index_add_(0, labels, x.double())
    counts = torch.zeros(c, dtype=torch.float64, device=x.device)
    counts = counts.index_add_(0, labels, torch.ones_like(labels, dtype=torch.float64))[:, None]
    return torch.where(counts > 0, sums / counts, 0.0).float(), counts
