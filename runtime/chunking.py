"""How a request's keys are cut into chunks, and how many clusters that makes: numbers alone.

A chunk is an entry (runtime/entries.py) as the index sees it: `chunk_tokens` consecutive positions. Which are grouped
together depends on the prompt's length and on `Chunking` alone: the prompt's first, then `update` at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.kernels.contract import num_clusters

CHUNKS_PER_CENTROID = 4
"""Where `centroids` is 0: 60K tokens in chunks of 4 have 4,096 centroids in KVDrive, 120K have 8,192."""
MOST_CENTROIDS = 8192
"""Where `centroids` is 0: the largest index that KVDrive tries."""


@dataclass(frozen=True)
class Chunking:
    """The parameters of the index. Raises ConfigurationError.

    `centroids` are those of each KV head for the prompt, at most; 0 stands for a quarter of the prompt's chunks, and no
    more than `MOST_CENTROIDS`. Later chunks have as many for their number.
    """

    chunk_tokens: int = 4
    sink_tokens: int = 4
    local_tokens: int = 64
    update_tokens: int = 256
    centroids: int = 0
    segment_chunks: int = 8192
    iterations: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = int(field.name in ("chunk_tokens", "update_tokens", "segment_chunks"))
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
                raise ConfigurationError(f"{field.name} is {value!r}; it must be a whole number of at least {least}")


class Cut:
    """A request of `prompt_tokens`, and up to `max_tokens` in all, cut into chunks and groups of them.

    `first` is the first chunk that is indexed, after the sinks; `chunks` of the prompt are, and `update` more at a time
    later. A cluster has `cluster_chunks` of them on average; each KV head has at most `width` clusters. Raises
    ConfigurationError where a chunk is larger than the context, or the prompt has fewer chunks than centroids.
    """

    def __init__(self, how: Chunking, request_name: str, prompt_tokens: int, max_tokens: int) -> None:
        if how.chunk_tokens > max_tokens:
            raise ConfigurationError(
                f"{request_name}: chunk_tokens is {how.chunk_tokens}, but the context has at most {max_tokens} tokens"
            )
        self.how = how
        self.first = -(-how.sink_tokens // how.chunk_tokens)
        self.chunks = max(self.last(prompt_tokens) - self.first, 0)
        if how.centroids > self.chunks:
            raise ConfigurationError(
                f"{request_name}: centroids is {how.centroids}, but a prompt of {prompt_tokens} tokens has only "
                f"{self.chunks} chunks of {how.chunk_tokens} tokens between its sinks and its local tokens"
            )
        centroids = how.centroids or min(-(-self.chunks // CHUNKS_PER_CENTROID), MOST_CENTROIDS)
        self.cluster_chunks = -(-self.chunks // centroids) if centroids else CHUNKS_PER_CENTROID
        self.segment_chunks = max(how.segment_chunks, self.cluster_chunks)
        """Chunks that are grouped with each other: enough for one cluster."""
        self.update = -(-how.update_tokens // how.chunk_tokens)
        later = max(self.last(max_tokens) - self.first - self.chunks, 0) // self.update
        self.width = self.clusters(self.chunks) + later * self.clusters(self.update)
        self.most_chunks = max_tokens // how.chunk_tokens
        """Full chunks of all tokens that there can be."""

    def last(self, length: int) -> int:
        """The chunk after the last one that is full and has `local_tokens` behind it, with `length` tokens."""
        return max(length - self.how.local_tokens, 0) // self.how.chunk_tokens

    def clusters(self, chunks: int) -> int:
        """Clusters of each KV head that so many chunks are grouped to."""
        return num_clusters(chunks, self.segment_chunks, self.cluster_chunks)
