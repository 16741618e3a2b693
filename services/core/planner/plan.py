"""Decisions of a planner: sequences and token counts, before token ids are needed."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from services.core.planner.batch import Batch, IterationShape
from services.core.planner.block_table import StageTable
from services.core.planner.sequence import Phase, Sequence


class Prefill(NamedTuple):
    """`tokens` tokens of `sequence` from position `start`; `samples` if none remain then."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """One microbatch: `decodes` run one token each, `prefills` as many as stand in them.

    `decode_cost` is the cost of its sequences that decode after it has run; under `slo` of online
    ones, and `batch_decode_cost` of the others. Then it also has a time: it was planned at
    `planned_s`, costs `cost_s` by the model, and its result comes `predicted_s` later. `allowed_s`
    is the residual time that it keeps. `harvested`: batch work could join online work; `contended`: that
    lacked memory or places; `bound`: its decodes alone exceeded what deadlines leave.

    `made`: its batch since the launch, if it may be suspended. One that was suspended at
    `suspended_s` has run for `ran_s` seconds. When it goes on it has a new number, `resumes` is its
    old one, and `planned_s` the time at which it goes on.
    """

    number: int
    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    resumes: int | None = None
    made: Batch | None = None
    decode_cost: float = 0.0
    batch_decode_cost: float = 0.0
    planned_s: float = 0.0
    predicted_s: float = 0.0
    cost_s: float = 0.0
    allowed_s: float = inf
    harvested: bool = False
    contended: bool = False
    deadline_bound: bool = False
    ran_s: float = 0.0
    suspended_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def tokens(self) -> int:
        """New tokens in it."""
        return len(self.decodes) + sum([prefill.tokens for prefill in self.prefills])

    @property
    def mixed(self) -> bool:
        """Whether it has a chunk of more than one token."""
        return any(prefill.tokens > 1 for prefill in self.prefills)

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Run the next `tokens` tokens of a prefill too."""
        start = sequence.computed
        samples = start + tokens == len(sequence.token_ids)
        self.prefills.append(Prefill(sequence, start, tokens, samples))

    def drop_preempted(self) -> None:
        """Leave out sequences that have lost their blocks since they were added."""
        self.decodes = [one for one in self.decodes if one.phase is Phase.RUNNING]
        self.prefills = [one for one in self.prefills if one.sequence.phase is Phase.RUNNING]

    def batch(self, table: StageTable) -> Batch:
        """The chunks for a model runner; to be made before `launch`."""
        tables = table.tables
        chunks = [seq.next_decode(tables[seq.request.request_id]) for seq in self.decodes]
        chunks += [
            seq.next_chunk(tokens, tables[seq.request.request_id])
            for seq, _, tokens, _ in self.prefills
        ]
        return Batch(tuple(chunks))

    def shape(self) -> IterationShape:
        """The sizes for a time model; to be made before `launch`."""
        return IterationShape(
            decodes=len(self.decodes),
            decode_prefix_tokens=sum([sequence.computed for sequence in self.decodes]),
            prefills=tuple([(start, tokens) for _, start, tokens, _ in self.prefills]),
        )

    def launch(self) -> None:
        """Count the tokens of every chunk as planned."""
        for sequence in self.decodes:
            sequence.computed += 1
        for sequence, _, tokens, _ in self.prefills:
            sequence.computed += tokens

    def discard(self) -> None:
        """Count its tokens as never planned: they run again. Later plans are discarded too."""
        for sequence in self.decodes:
            _rewind(sequence, len(sequence.token_ids) - 1)
        for sequence, start, _, _ in self.prefills:
            _rewind(sequence, start)

    def sequences(self) -> list[Sequence]:
        """The sequences that run in it; not to be changed."""
        if not self.prefills:
            return self.decodes
        return self.decodes + [prefill.sequence for prefill in self.prefills]

    def includes(self, sequence: Sequence) -> bool:
        """Whether a chunk of `sequence` is in it."""
        return sequence in self.decodes or any(one.sequence is sequence for one in self.prefills)


def _rewind(sequence: Sequence, start: int) -> None:
    """A preempted sequence starts from 0 in any case: everything since is discarded, too."""
    if sequence.phase is not Phase.ENDED:
        sequence.computed = min(sequence.computed, start)
        sequence.sample_due = False
        sequence.reset_sampler()
