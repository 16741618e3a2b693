"""A request inside a worker: what it has produced and what of it is in the KV cache."""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from math import inf

from services.core.logprobs import LogprobRows, newest
from services.core.planner.batch import (
    Chunk,
    PromptRows,
    PromptScore,
    SampleSpec,
    SampleTerms,
    new_tuple,
)
from services.core.request import FinishReason, Request, admission_blocks

LOGPROBS_CARRIED_BYTES = 4 << 20
"""Log probabilities of the newest outputs that go with a sequence to another leader."""


class Phase(IntEnum):
    """Where a sequence is in its life inside the worker; numbers, whose hash costs little."""

    WAITING = auto()
    RUNNING = auto()
    HELD = auto()
    ENDED = auto()


# No other transition can happen. A preempted sequence waits again.
TRANSITIONS = {
    (Phase.WAITING, Phase.RUNNING),
    (Phase.RUNNING, Phase.WAITING),
    (Phase.RUNNING, Phase.ENDED),
    (Phase.WAITING, Phase.ENDED),
    (Phase.RUNNING, Phase.HELD),
    (Phase.WAITING, Phase.HELD),
    (Phase.HELD, Phase.RUNNING),
    (Phase.HELD, Phase.WAITING),
    (Phase.HELD, Phase.ENDED),
}

_NOTHING: frozenset[int] = frozenset()

Age = tuple[float, int, str]
"""Arrival time, ordinal at the first leader, request id: a total order across workers."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """All that another leader needs to go on with a sequence, beside its K/V.

    K/V of the first `computed` of prompt + `output_ids` is in `blocks` blocks at every stage.
    Log probabilities that were asked for: `prompt_logprobs` of the prompt tokens so far, from the
    second on, and `logprobs` of the newest outputs, at most `LOGPROBS_CARRIED_BYTES`. A client
    that lags behind by no more than that misses none. `cached_tokens` of the prompt were in the
    cache of its first leader. Chunks that ended at `reached`, or before it, have run.
    """

    request: Request
    output_ids: tuple[int, ...]
    computed: int
    blocks: int
    arrival_s: float
    ordinal: int
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0
    reached: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt plus output; the first `computed` of them have been planned.

    K/V of these is in its `blocks` blocks, or will be once the microbatches in flight have run.
    So `remaining` is 0 while its next token is being sampled. It never exceeds `tokens_max`
    tokens. `absent` are the stages that have no blocks for it yet, while its K/V
    moves; `sample_due` says that it was preempted while its next token is being sampled.

    `told` counts the output tokens that the sampler knows; None while it knows nothing of the
    sequence. Call `reset_sampler` whenever the sampler may have missed a token or may be another one.
    `logprobs` and `prompt_logprobs` are what was asked for, so far.

    `cached_tokens` of its prompt were in the cache when it started. `block_hashes` are those of its
    first blocks, as far as they were needed, and `named` of its blocks are known to the cache.
    In a larger group the other stages have to be told of its first `hit_blocks` before it runs.
    Nobody used the block `first_unshared` of its prefix when that was looked for last.

    The last of its next `group_left` tokens is due at `due_s`, which `deadline` keeps. `token_s` is
    when its last token came. While nothing is promised for the next one, its prompt is ordered as
    if that were due at `implied_due_s`.
    Chunks that ended at position `reached`, or before it, have run, wherever; it never falls.
    """

    request: Request
    ordinal: int
    arrival_s: float
    token_ids: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    computed: int = 0
    blocks: int = 0
    absent: frozenset[int] = _NOTHING
    sample_due: bool = False
    last_microbatch: int = 0  # the microbatch that ran it last
    begun: bool = field(init=False)  # it has had blocks, here or at another leader
    overtaken: int = 0  # by younger ones, while it waited at this leader
    sampler_outputs: int | None = None
    logprobs: list[LogprobRows] = field(default_factory=list)
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    registered: int = 0
    hit_blocks: int = 0
    hits_sent: bool = False
    first_unshared: int = 0
    due_s: float = inf
    implied_due_s: float = inf
    token_s: float = inf
    group_left: int = 1
    reached: int = 0
    online: bool = field(init=False)  # as its service is, which is asked for in each iteration
    prompt_tokens: int = field(init=False)
    tokens_max: int = field(init=False)
    _reads_output: bool = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_ids, *self.request.output_ids]
        self.online = self.request.service.online
        self.prompt_tokens = len(self.request.prompt_ids)
        self.begun = bool(self.request.output_ids)
        self.tokens_max = self.prompt_tokens + self.request.limits.max_tokens
        self._reads_output = self.request.sampling.reads_output
        if self.request.logprobs.prompt is not None:
            self.prompt_logprobs = LogprobRows(self.request.logprobs.prompt)

    @classmethod
    def restore(cls, state: SequenceState) -> "Sequence":
        """The sequence as `state` describes it."""
        sequence = cls(state.request, state.ordinal, state.arrival_s)
        sequence.token_ids[sequence.prompt_tokens :] = state.output_ids
        sequence.computed = state.computed
        sequence.blocks = state.blocks
        sequence.begun = bool(state.blocks or state.output_ids)
        sequence.cached_tokens = state.cached_tokens
        sequence.reached = max(state.reached, state.computed)
        if state.logprobs is not None:
            sequence.logprobs.append(state.logprobs)
        if state.prompt_logprobs is not None:
            sequence.prompt_logprobs = state.prompt_logprobs
        return sequence

    def state(self) -> SequenceState:
        """The state that another leader needs to go on with it."""
        return SequenceState(
            request=self.request,
            output_ids=tuple(self.token_ids[self.prompt_tokens :]),
            computed=self.computed,
            blocks=self.blocks,
            arrival_s=self.arrival_s,
            ordinal=self.ordinal,
            logprobs=newest(self.logprobs, LOGPROBS_CARRIED_BYTES),
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            reached=self.reached,
        )

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def age(self) -> Age:
        """Smaller is older."""
        return self.arrival_s, self.ordinal, self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens that have to be planned before the next one can be sampled."""
        return len(self.token_ids) - self.computed

    @property
    def has_unsent_hits(self) -> bool:
        """Whether it begins with blocks of which other stages have not heard."""
        return self.hit_blocks > 0 and not self.hits_sent

    @property
    def output_count(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def computed_before(self) -> int:
        """Its first tokens that have run before, as far as results came: whose KV was made once."""
        return max(self.reached, len(self.token_ids) - 1) if self.output_count else self.reached

    def move(self, phase: Phase) -> None:
        """Enter `phase`; a transition that is not in the table is a defect and raises."""
        if (self.phase, phase) not in TRANSITIONS:
            raise ValueError(f"{self.request_id}: {self.phase} -> {phase} is not a transition")
        self.phase = phase

    def append(self, token_id: int) -> FinishReason | None:
        """Take the token that was sampled last; returns why it is the last one, if it is."""
        self.token_ids.append(token_id)
        self.sample_due = False
        if token_id in self.request.limits.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.tokens_max:
            return FinishReason.LENGTH
        return None

    def blocks_to_admit(self, block_size: int) -> int:
        """Free blocks that it needs before it may run (again)."""
        return admission_blocks(len(self.token_ids), self.tokens_max, block_size)

    def next_chunk(self, tokens: int, block_ids: tuple[int, ...]) -> Chunk:
        """The next `tokens` tokens to run; samples when they are the last that remain.

        The sampler then counts as knowing them.
        """
        start, end = self.computed, self.computed + tokens
        sample = self._next_sample() if end == len(self.token_ids) else None
        score = None if self.prompt_logprobs is None else self._next_score(start, end)
        token_ids = tuple(self.token_ids[start:end])
        return Chunk(self.request.request_id, start, token_ids, block_ids, sample, score)

    def next_decode(self, block_ids: tuple[int, ...]) -> Chunk:
        """As `next_chunk` of the one token that remains, for which there are hundreds of calls."""
        start, count = self.computed, len(self.token_ids)
        unusual = (
            self.prompt_logprobs is not None or self.sampler_outputs is None or self._reads_output
        )
        if unusual or start + 1 != count:
            return self.next_chunk(1, block_ids)
        index = self.sampler_outputs = count - self.prompt_tokens
        sample = new_tuple(SampleSpec, (None, index, ()))
        last = (self.token_ids[start],)
        return new_tuple(
            Chunk, (self.request.request_id, self.computed, last, block_ids, sample, None)
        )

    def reset_sampler(self) -> None:
        """Tell the sampler everything anew with the next token that it chooses."""
        self.sampler_outputs = None

    def take_prompt_logprobs(self, found: PromptRows) -> None:
        """Keep what is new of it: positions that were preempted have run twice."""
        have = self.prompt_logprobs
        if have is None:
            return
        known = 1 + len(have) - found.start
        if known < 0:
            raise ValueError(f"{self.request_id}: log probabilities before {found.start} are lost")
        self.prompt_logprobs = have + found.rows.rows(known)

    def _next_sample(self) -> SampleSpec:
        """The spec of the next output token."""
        told, count = self.sampler_outputs, self.output_count
        self.sampler_outputs = count
        if told is not None:
            if not self._reads_output or told == count:
                return SampleSpec(None, count)
            return SampleSpec(None, count, tuple(self.token_ids[self.prompt_tokens + told :]))
        request, sampling = self.request, self.request.sampling
        terms = SampleTerms(
            sampling=sampling,
            prompt_ids=request.prompt_ids if sampling.reads_prompt else (),
            output_ids=tuple(self.token_ids[self.prompt_tokens :]) if self._reads_output else (),
            stop_ids=request.limits.stop_token_ids,
            min_tokens=request.limits.min_tokens,
            top_logprobs=request.logprobs.output,
        )
        return SampleSpec(terms, count)

    def _next_score(self, start: int, end: int) -> PromptScore | None:
        """Which prompt tokens, of those after the positions `start` to `end`, are not known yet."""
        assert self.prompt_logprobs is not None
        first = max(start + 1, 1 + len(self.prompt_logprobs))
        token_ids = self.request.prompt_ids[first : end + 1]
        if not token_ids:
            return None
        return PromptScore(first - 1 - start, token_ids, self.prompt_logprobs.top)
