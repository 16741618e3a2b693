"""The unit of work that a planner hands to a model runner.

Chunks are named tuples, since a planner makes hundreds in each iteration: they are made three
times as fast as frozen dataclasses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.core.request import Sampling


class SampleSpec(NamedTuple):
    """Choose one token from the logits of a chunk's last position.

    `index` is the output index of that token (0 for the first), which with `sampling.seed` fixes
    the random draw. `banned_ids` cannot be chosen (stop tokens before `min_tokens`).
    """

    sampling: Sampling
    index: int  # type: ignore[assignment]  # instead of tuple.index, which nobody needs here
    banned_ids: frozenset[int] = frozenset()


class Chunk(NamedTuple):
    """Consecutive tokens of one request that run in one iteration.

    `token_ids` sit at positions `start .. start + len(token_ids) - 1`; K/V of positions below
    `start` is already in the blocks. `block_ids[j]` holds positions `j * block_size` onwards and
    the table covers the chunk's last token. `sample` is None while the prompt is incomplete.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: SampleSpec | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs in one iteration: at most one chunk per request."""

    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        """New tokens in the batch."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A batch as every stage of a group sees it; a group of one has one in flight at a time.

    `number` counts a leader's microbatches from 1. Before it runs, each stage frees the blocks of
    `released` (whoever ended or was preempted since the last microbatch; it may run again in this
    one) and covers `len(block_ids)` blocks for each chunk: the ids are the leader's own. An empty
    batch only carries `released`. Unknown names in `released` are ignored: after microbatches
    were discarded, some come a second time.
    """

    number: int
    batch: Batch
    released: tuple[str, ...] = ()

    def block_counts(self) -> Iterator[tuple[str, int]]:
        """Each request that runs, with the blocks that its table must cover."""
        for chunk in self.batch.chunks:
            yield chunk.request_id, len(chunk.block_ids)


@dataclass(frozen=True, slots=True)
class IterationShape:
    """As much of a batch as its duration depends on: for a time model, which needs no token ids.

    `decodes` requests run one token each after `decode_prefix_tokens` tokens together;
    `prefills` holds (prefix tokens, new tokens) of each other chunk.
    """

    decodes: int
    decode_prefix_tokens: int
    prefills: tuple[tuple[int, int], ...]
