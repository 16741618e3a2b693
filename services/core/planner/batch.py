"""The unit of work that a planner passes to the model runner of each pipeline stage.

Chunks are named tuples because a planner creates hundreds per iteration: creation is three times as
fast as that of frozen dataclasses; the hot paths use `new_tuple`, which is faster still.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.cost.padded import Execution
from services.core.logprobs import LogprobRows
from services.core.prefix.cache_update import PrefixCacheUpdate
from services.core.request import Sampling

new_tuple = tuple.__new__
"""`new_tuple(Chunk, fields)`, with all fields, takes less than half the time of `Chunk(...)`."""


@dataclass(frozen=True, slots=True)
class SampleTerms:
    """Per-sequence parameters that a sampler receives once and keeps while the sequence has blocks.

    `prompt_ids` and `output_ids` are all tokens so far; empty unless `sampling` needs them. The
    sampler masks `stop_ids` before output `min_tokens`. `top_logprobs`: see `LogprobOptions`.
    """

    sampling: Sampling
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    top_logprobs: int | None = None


class SampleSpec(NamedTuple):
    """Choose a token from the logits of a chunk's last position.

    `index` is the output index of that token (0 for the first). `terms` replace the sampler's state
    of the sequence. Without `terms`, the sampler keeps its state, and `output_ids` are the output
    tokens since the last spec, if the sampling needs them. So the specs of a sequence, in
    order, contain its whole output, and another sampler that gets them chooses the same tokens.
    """

    terms: SampleTerms | None
    index: int  # type: ignore[assignment]  # instead of tuple.index, which is not needed here
    output_ids: tuple[int, ...] = ()


class PromptScore(NamedTuple):
    """Request for the log probabilities of prompt tokens that a chunk's logits predict.

    Row `row` + i of the chunk predicts `token_ids[i]`. `top`: most likely alternatives per token.
    """

    row: int
    token_ids: tuple[int, ...]
    top: int


class PromptRows(NamedTuple):
    """Log probabilities of consecutive prompt tokens from position `start` on."""

    start: int
    rows: LogprobRows


@dataclass(frozen=True, slots=True)
class SampleNotes:
    """Results of a microbatch in addition to its tokens, by sequence id; empty in most cases.

    `logprobs` holds the row of the sampled token. `failed` holds an error text for the client if no
    token could be sampled.
    """

    logprobs: Mapping[str, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, PromptRows] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.prompt_logprobs or self.failed)


class Chunk(NamedTuple):
    """Consecutive tokens of a sequence that run in an iteration.

    `token_ids` sit at positions `start .. start + len(token_ids) - 1`; the blocks already
    hold the K/V of positions below `start`. `block_ids[j]` holds positions `j * block_size` onwards
    and the table covers the chunk's last token. `sample` is None while the prompt is incomplete,
    `score` is None unless prompt log probabilities were requested.
    """

    seq_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: SampleSpec | None
    score: PromptScore | None = None


class TailTurn(NamedTuple):
    """Move the K/V of the first `filled` slots of `block` to its end, in reverse order."""

    block: int
    filled: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks that run in the same iteration: at most one per sequence.

    `turned` and `shared` are decodes whose last block another sequence may use (`shared_tails.py`):
    those of `turned` fill it from the end, those of `shared` from its first slot.
    """

    chunks: tuple[Chunk, ...]
    turned: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        """New tokens in the batch."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A batch that a leader sends to every stage of its group; the iteration of a single worker.

    `number` counts the leader's microbatches from 1. Before it runs, each stage frees the blocks of
    the sequences `released` (ended or preempted since the last microbatch; this microbatch may run
    a preempted sequence again) and allocates up to `len(block_ids)` blocks per chunk; the block ids
    are local to the leader. An empty batch only carries `released`. Stages ignore unknown ids in
    `released`, since those of discarded microbatches are sent again. `prefixes` updates the stages'
    prefix caches; None: no change.

    `preemptible`: an online request may interrupt it between layers. A microbatch that `resumes` an
    interrupted one has the same batch and runs the remaining layers. `turns` precede its run.
    """

    number: int
    batch: Batch
    released: tuple[str, ...] = ()
    prefixes: PrefixCacheUpdate | None = None
    preemptible: bool = False
    resumes: int | None = None
    turns: tuple[TailTurn, ...] = ()


@dataclass(frozen=True, slots=True)
class IterationShape:
    """The sizes that determine the duration of an iteration, for the simulator's time model.

    `decodes` sequences run a token each, with `decode_prefix_tokens` cached tokens in total;
    `prefills` holds (prefix tokens, new tokens) of each other chunk.
    """

    decodes: int
    decode_prefix_tokens: int
    prefills: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, prefixes: list[int], prefills: list[tuple[int, int]], execution: Execution
    ) -> "IterationShape":
        """The shape of decodes with these `prefixes` and of `prefills`, padded by `execution`."""
        return cls(
            len(prefixes), sum(execution.prefixes(prefixes)), tuple(execution.prompts(prefills))
        )
