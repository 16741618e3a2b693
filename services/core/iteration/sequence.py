"""A request inside a worker: what it has produced and what of it is in the KV cache."""

from dataclasses import dataclass, field
from enum import Enum, auto

from services.core.iteration.batch import Chunk, SampleSpec
from services.core.request import FinishReason, Request, admission_blocks


class Phase(Enum):
    """Where a sequence is in its life inside the worker."""

    WAITING = auto()
    RUNNING = auto()
    HELD = auto()
    ENDED = auto()


# What is not listed cannot happen. A preempted sequence waits again.
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
    """

    request: Request
    output_ids: tuple[int, ...]
    computed: int
    blocks: int
    arrival_s: float
    ordinal: int


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt plus output; the first `computed` of them have been planned.

    K/V of these is in its `blocks` blocks, or will be once the microbatches in flight have run.
    So a sequence whose next token is being sampled has nothing that remains. It never exceeds
    `tokens_max` tokens. `absent` are the stages that have no blocks for it yet, while its K/V
    moves; `sample_due` says that it was preempted while its next token is being sampled.
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
    turn: int = 0  # the microbatch that ran it last
    prompt_tokens: int = field(init=False)
    tokens_max: int = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.prompt_tokens = len(self.token_ids)
        self.tokens_max = self.prompt_tokens + self.request.limits.max_tokens

    @classmethod
    def restore(cls, state: SequenceState) -> "Sequence":
        """The sequence as `state` describes it."""
        sequence = cls(state.request, state.ordinal, state.arrival_s)
        sequence.token_ids += state.output_ids
        sequence.computed = state.computed
        sequence.blocks = state.blocks
        return sequence

    def state(self) -> SequenceState:
        """What another leader needs."""
        return SequenceState(
            request=self.request,
            output_ids=tuple(self.token_ids[self.prompt_tokens :]),
            computed=self.computed,
            blocks=self.blocks,
            arrival_s=self.arrival_s,
            ordinal=self.ordinal,
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
    def output_count(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.prompt_tokens

    def move(self, phase: Phase) -> None:
        """Enter `phase`; a transition that is not in the table is a defect and raises."""
        if (self.phase, phase) not in TRANSITIONS:
            raise ValueError(f"{self.request_id}: {self.phase} -> {phase} is not a transition")
        self.phase = phase

    def append(self, token_id: int) -> FinishReason | None:
        """Take the token that was sampled last; returns why it is the last one, if it is."""
        limits = self.request.limits
        self.token_ids.append(token_id)
        self.sample_due = False
        if token_id in limits.stop_token_ids:
            return FinishReason.STOP
        if self.output_count >= limits.max_tokens:
            return FinishReason.LENGTH
        return None

    def blocks_to_admit(self, block_size: int) -> int:
        """Free blocks that it needs before it may run (again)."""
        return admission_blocks(len(self.token_ids), self.tokens_max, block_size)

    def next_chunk(self, tokens: int, block_ids: tuple[int, ...]) -> Chunk:
        """The next `tokens` tokens to run; samples when they are the last that remain."""
        start, end = self.computed, self.computed + tokens
        sample = None
        if end == len(self.token_ids):
            request = self.request
            limits = request.limits
            index = end - self.prompt_tokens
            banned = limits.stop_token_ids if index < limits.min_tokens else _NOTHING
            sample = SampleSpec(request.sampling, index, banned)
        token_ids = tuple(self.token_ids[start:end])
        return Chunk(self.request.request_id, start, token_ids, block_ids, sample)
