"""The unit of work that a planner hands to a model runner.

Chunks are named tuples, since a planner makes hundreds in each iteration: they are made three
times as fast as frozen dataclasses, and where it makes most of them by `new_tuple`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.logprobs import LogprobRows
from services.core.prefix.news import PrefixNews
from services.core.request import Sampling

new_tuple = tuple.__new__
"""`new_tuple(Chunk, fields)`: all of them, in less than half the time of `Chunk(*fields)`."""


@dataclass(frozen=True, slots=True)
class SampleTerms:
    """What a sampler is told of a request once, and keeps as long as the request has blocks there.

    `prompt_ids` and `output_ids` are all tokens so far. They are empty unless `sampling` reads
    them. The `stop_ids` cannot be chosen before output `min_tokens`. `top_logprobs`: see
    `LogprobOptions`.
    """

    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    top_logprobs: int | None = None


class SampleSpec(NamedTuple):
    """Choose one token from the logits of a chunk's last position.

    `index` is the output index of that token (0 for the first). With `terms`, the sampler forgets
    what it knew of the request. Without `terms`, the sampler knows the request, and `output_ids`
    are the output tokens since the last spec, if the sampling reads them. So the specs of a
    request, in order, always contain its whole output, and a sampler that starts anew chooses the
    same.
    """

    terms: SampleTerms | None
    index: int  # type: ignore[assignment]  # instead of tuple.index, which is not needed here
    output_ids: tuple[int, ...] = ()


class PromptScore(NamedTuple):
    """Tell how likely tokens of the prompt were: `token_ids` follow the chunk's rows from `row` on.

    `top` most likely tokens are told beside each.
    """

    row: int
    token_ids: tuple[int, ...]
    top: int


class PromptRows(NamedTuple):
    """How likely consecutive tokens of a prompt were, from the one at position `start` on."""

    start: int
    rows: LogprobRows


@dataclass(frozen=True, slots=True)
class SampleNotes:
    """Results of a microbatch beside its tokens, by request; nearly always there are none.

    `logprobs` has one row, of the token that was chosen. `failed` says why none could be chosen,
    in a sentence for the client.
    """

    logprobs: Mapping[str, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, PromptRows] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.prompt_logprobs or self.failed)


class Chunk(NamedTuple):
    """Consecutive tokens of one request that run in one iteration.

    `token_ids` sit at positions `start .. start + len(token_ids) - 1`; K/V of positions below
    `start` is already in the blocks. `block_ids[j]` holds positions `j * block_size` onwards and
    the table covers the chunk's last token. `sample` is None while the prompt is incomplete,
    `score` unless log probabilities of the prompt were asked for.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: SampleSpec | None
    score: PromptScore | None = None


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
    `released` (requests that ended or were preempted since the last microbatch; one may run again
    in this one) and covers `len(block_ids)` blocks for each chunk: the ids are the leader's own. An
    empty batch only carries `released`. Unknown names in `released` are ignored: after microbatches
    were discarded, some come a second time. `prefixes` is what the stages of a larger group have to
    change in their caches; None: nothing.

    `preemptible`: it may be interrupted between layers for an online request. One that `resumes`
    an interrupted microbatch has its batch, and runs the layers that are left of it.
    """

    number: int
    batch: Batch
    released: tuple[str, ...] = ()
    prefixes: PrefixNews | None = None
    preemptible: bool = False
    resumes: int | None = None


@dataclass(frozen=True, slots=True)
class IterationShape:
    """The sizes that the duration of a batch depends on: a time model needs no token ids.

    `decodes` requests run one token each after `decode_prefix_tokens` tokens together;
    `prefills` holds (prefix tokens, new tokens) of each other chunk.
    """

    decodes: int
    decode_prefix_tokens: int
    prefills: tuple[tuple[int, int], ...]
