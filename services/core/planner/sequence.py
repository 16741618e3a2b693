"""A sequence: a request inside a planner, with its tokens, its KV blocks and its deadlines.

A pipeline of several workers has *stages*, each with its own blocks of the sequence; the *leader*
is the worker that plans for all stages. A sequence may move to another leader (*hand-over*), and
its KV then moves to other stages.
"""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from math import inf

from services.core.logprobs import LogprobRows, newest_rows
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
"""Size limit of the output log probabilities that move with a sequence to another leader."""


class Phase(IntEnum):
    """Life-cycle phase of a sequence. An IntEnum, because its hash is cheap."""

    WAITING = auto()  # without blocks, in the waiting queue
    RUNNING = auto()  # has blocks and is planned
    HELD = auto()  # not planned, keeps its blocks: during a hand-over or while its KV moves
    ENDED = auto()


# All valid transitions. A preempted sequence waits again.
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

_NO_STAGES: frozenset[int] = frozenset()

Age = tuple[float, int, str]
"""Arrival time, ordinal at the first leader, sequence id: a total order across workers."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """State, except the K/V, that another leader needs to continue a sequence.

    K/V of the first `computed` tokens of prompt + `output_ids` is in `blocks` blocks at every
    stage. `arrival_s` and `ordinal` order it by age. Requested log probabilities: `prompt_logprobs`
    of the prompt tokens so far, from the second on, and `logprobs` of the newest outputs, at most
    `LOGPROBS_CARRIED_BYTES`, for clients that lag behind. `cached_tokens` of the prompt were cache
    hits at its first leader. Tokens before position `reached` have run at least once.
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
    """A request inside a worker; `token_ids` is prompt plus output.

    The first `computed` tokens have been planned: their K/V is in its `blocks` blocks, or will be
    once the microbatches in flight have run. So `remaining` is 0 while its next token is being
    sampled. Targets apply to groups of `token_group` output tokens; `deadline.py` maintains
    `due_s`, `implied_due_s`, `token_s` and `group_left`.
    """

    request: Request
    ordinal: int  # of its arrival at its first leader
    arrival_s: float
    token_ids: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    computed: int = 0  # tokens planned so far
    blocks: int = 0  # KV blocks, the same number at every stage
    absent: frozenset[int] = _NO_STAGES  # stages that lack its blocks while its K/V moves
    sample_due: bool = False  # preempted while its next token is being sampled
    last_microbatch: int = 0  # number of the microbatch that ran it last
    begun: bool = field(init=False)  # it has started before, here or at another leader
    pin: str = ""  # the pin with its KV, until it starts or ends, see `pins.py`
    awaits_kv: bool = False  # it may not start yet: its KV is being shipped or recalled
    overtaken: int = 0  # later requests that started before it here, see `overtaking.py`
    sampler_outputs: int | None = None  # output tokens that the sampler has; None: no state there
    logprobs: list[LogprobRows] = field(default_factory=list)  # of its output, if requested
    prompt_logprobs: LogprobRows | None = None  # so far, if requested
    cached_tokens: int = 0  # prefix cache hits of its prompt
    block_hashes: list[bytes] = field(default_factory=list)  # of its first blocks, on demand
    registered: int = 0  # number of its first blocks that are in the prefix cache
    saved: int = 0  # its first blocks that have a host copy or a save, while it runs
    hit_blocks: int = 0  # shared blocks of which the other stages must learn before it runs
    hits_sent: bool = False  # whether `hit_blocks` were sent to the other stages
    first_unshared: int = 0  # index of the first block that was not in use at the last lookup
    due_s: float = inf  # deadline of the last token of its token group
    implied_due_s: float = inf  # sort key of its first token if it has no target
    token_s: float = inf  # time of its last token, or of its arrival
    group_left: int = 1  # tokens until the end of its token group
    reached: int = 0  # tokens that have run at least once, at any leader; never decreases
    # Copied from its service, since each iteration reads them.
    online: bool = field(init=False)
    has_targets: bool = field(init=False)
    prompt_tokens: int = field(init=False)
    tokens_max: int = field(init=False)  # prompt and `max_tokens`
    _reads_output: bool = field(init=False)  # copied from its sampling

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_ids, *self.request.output_ids]
        service = self.request.service
        self.online = service.online
        targets = (service.ttft_s, service.tpot_s)
        self.has_targets = service.online and targets != (None, None)
        self.prompt_tokens = len(self.request.prompt_ids)
        self.begun = bool(self.request.output_ids)
        self.tokens_max = self.prompt_tokens + self.request.limits.max_tokens
        self._reads_output = self.request.sampling.reads_output
        if self.request.logprobs.prompt is not None:
            self.prompt_logprobs = LogprobRows(self.request.logprobs.prompt)

    @classmethod
    def restore(cls, state: SequenceState) -> "Sequence":
        """Recreate a sequence from `state`."""
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
        """The state that another leader needs to continue the sequence."""
        return SequenceState(
            request=self.request,
            output_ids=tuple(self.token_ids[self.prompt_tokens :]),
            computed=self.computed,
            blocks=self.blocks,
            arrival_s=self.arrival_s,
            ordinal=self.ordinal,
            logprobs=newest_rows(self.logprobs, LOGPROBS_CARRIED_BYTES),
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            reached=self.reached,
        )

    @property
    def seq_id(self) -> str:
        """Id of the sequence, which its copy of the request carries (`sequence_ids.py`)."""
        return self.request.request_id

    @property
    def age(self) -> Age:
        """Sort key by age, oldest first."""
        return self.arrival_s, self.ordinal, self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens to plan before the next token can be sampled."""
        return len(self.token_ids) - self.computed

    @property
    def is_saved(self) -> bool:
        """Whether all its cached blocks have copies in host memory, complete or being filled.

        Copies may have been evicted since: see `HostUse.note_lost`. False for a sequence whose
        whole prompt must run again, since copies do not help it.
        """
        return 0 < self.registered <= self.saved and not self.request.logprobs.runs_prompt

    @property
    def has_unsent_hits(self) -> bool:
        """Whether the other stages have yet to learn with which cached blocks it starts."""
        return self.hit_blocks > 0 and not self.hits_sent

    @property
    def output_count(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def computed_before(self) -> int:
        """Number of its first tokens that have run at least once, by the results so far."""
        return max(self.reached, len(self.token_ids) - 1) if self.output_count else self.reached

    def move(self, phase: Phase) -> None:
        """Enter `phase`. Raises ValueError for an invalid transition."""
        if (self.phase, phase) not in TRANSITIONS:
            raise ValueError(f"{self.seq_id}: {self.phase} -> {phase} is not a transition")
        self.phase = phase

    def append(self, token_id: int) -> FinishReason | None:
        """Append a sampled token; returns the finish reason if it is the last token."""
        self.token_ids.append(token_id)
        self.sample_due = False
        if token_id in self.request.limits.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.tokens_max:
            return FinishReason.LENGTH
        return None

    def lacks_block(self, block_size: int) -> bool:
        """Whether its tokens exceed its KV blocks."""
        return len(self.token_ids) > self.blocks * block_size

    def blocks_to_admit(self, block_size: int) -> int:
        """Free blocks that it needs for (re-)admission."""
        return admission_blocks(len(self.token_ids), self.tokens_max, block_size)

    def next_chunk(self, tokens: int, block_ids: tuple[int, ...]) -> Chunk:
        """Chunk of the next `tokens` tokens; samples if no tokens remain after it.

        Also notes that the sampler knows all tokens so far, as it will once the chunk runs.
        """
        start, end = self.computed, self.computed + tokens
        sample = self._next_sample() if end == len(self.token_ids) else None
        score = None if self.prompt_logprobs is None else self._next_score(start, end)
        token_ids = tuple(self.token_ids[start:end])
        return Chunk(self.request.request_id, start, token_ids, block_ids, sample, score)

    def next_decode(self, block_ids: tuple[int, ...]) -> Chunk:
        """Fast path of `next_chunk` for a single remaining token (hundreds per iteration)."""
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
        """Send the full sampler state with the next chunk that samples.

        Call it whenever the sampler may have missed a token or may have been replaced.
        """
        self.sampler_outputs = None

    def take_prompt_logprobs(self, computed: PromptRows) -> None:
        """Append prompt log probabilities. Raises ValueError if rows before them are missing."""
        have = self.prompt_logprobs
        if have is None:
            return
        # Positions that ran again after a preemption have their rows already: skip them.
        known = 1 + len(have) - computed.start
        if known < 0:
            raise ValueError(f"{self.seq_id}: no log probabilities before {computed.start}")
        self.prompt_logprobs = have + computed.rows.rows(known)

    def _next_sample(self) -> SampleSpec:
        """The spec of the next output token."""
        sent, count = self.sampler_outputs, self.output_count
        self.sampler_outputs = count
        if sent is not None:
            if not self._reads_output or sent == count:
                return SampleSpec(None, count)
            return SampleSpec(None, count, tuple(self.token_ids[self.prompt_tokens + sent :]))
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
        """Request the missing prompt logprobs that positions `start` to `end` (exclusive) yield."""
        assert self.prompt_logprobs is not None
        first = max(start + 1, 1 + len(self.prompt_logprobs))
        token_ids = self.request.prompt_ids[first : end + 1]
        if not token_ids:
            return None
        return PromptScore(first - 1 - start, token_ids, self.prompt_logprobs.top)
