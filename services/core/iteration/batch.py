"""The unit of work that a planner hands to a model runner."""

from dataclasses import dataclass

from services.core.request import Sampling


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Choose one token from the logits of a chunk's last position.

    `index` is the output index of that token (0 for the first), which with `sampling.seed` fixes
    the random draw. `banned_ids` cannot be chosen (stop tokens before `min_tokens`).
    """

    sampling: Sampling
    index: int
    banned_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Chunk:
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
