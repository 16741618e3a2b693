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


@dataclass(slots=True)
class Sequence:
    """`token_ids` is prompt plus output; K/V of the first `computed` of them is in `block_ids`."""

    request: Request
    ordinal: int
    token_ids: list[int]
    phase: Phase = Phase.WAITING
    computed: int = 0
    block_ids: list[int] = field(default_factory=list)

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
        return len(self.token_ids) - len(self.request.prompt_ids)

    def move(self, phase: Phase) -> None:
        """Enter `phase`; a transition that is not in the table is a defect and raises."""
        if (self.phase, phase) not in TRANSITIONS:
            raise ValueError(f"{self.request_id}: {self.phase} -> {phase} is not a transition")
        self.phase = phase

    def blocks_to_admit(self, block_size: int) -> int:
        """Free blocks that it needs before it may run (again)."""
        tokens_max = len(self.request.prompt_ids) + self.request.limits.max_tokens
        return admission_blocks(len(self.token_ids), tokens_max, block_size)

    def next_chunk(self, tokens: int) -> Chunk:
        """The next `tokens` tokens to run; samples when they are the last that remain."""
        end = self.computed + tokens
        sample = None
        if end == len(self.token_ids):
            limits = self.request.limits
            early = self.output_count < limits.min_tokens
            banned = limits.stop_token_ids if early else frozenset()
            sample = SampleSpec(self.request.sampling, self.output_count, banned)
        return Chunk(
            request_id=self.request_id,
            start=self.computed,
            token_ids=tuple(self.token_ids[self.computed : end]),
            block_ids=tuple(self.block_ids),
            sample=sample,
        )
