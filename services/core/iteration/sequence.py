"""A request inside a worker: what it has produced and what of it is in the KV cache."""

from dataclasses import dataclass, field
from enum import Enum, auto

from services.core.iteration.batch import Chunk, SampleSpec
from services.core.request import Request, admission_blocks


class Phase(Enum):
    """Where a sequence is in its life inside the worker."""

    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


# What is not listed cannot happen. A preempted sequence waits again.
TRANSITIONS = {
    (Phase.WAITING, Phase.RUNNING),
    (Phase.RUNNING, Phase.WAITING),
    (Phase.RUNNING, Phase.ENDED),
    (Phase.WAITING, Phase.ENDED),
}

_NOTHING: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt plus output; K/V of the first `computed` of them is in `block_ids`.

    It never exceeds `tokens_max` tokens. The block table is a tuple, since every chunk shares it
    and it grows only once in `block_size` iterations.
    """

    request: Request
    ordinal: int
    token_ids: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    computed: int = 0
    block_ids: tuple[int, ...] = ()
    prompt_tokens: int = field(init=False)
    tokens_max: int = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        self.prompt_tokens = len(self.token_ids)
        self.tokens_max = self.prompt_tokens + self.request.limits.max_tokens

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def remaining(self) -> int:
        """Tokens that have to run before the next one can be sampled."""
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

    def blocks_to_admit(self, block_size: int) -> int:
        """Free blocks that it needs before it may run (again)."""
        return admission_blocks(len(self.token_ids), self.tokens_max, block_size)

    def next_chunk(self, tokens: int) -> Chunk:
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
        return Chunk(self.request.request_id, start, token_ids, self.block_ids, sample)
