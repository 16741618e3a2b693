"""A planned microbatch as sequences and token counts, from which its batch is created."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from services.core.cost.padded import Execution
from services.core.planner.batch import Batch, IterationShape
from services.core.planner.block_table import StageTable
from services.core.planner.sequence import Phase, Sequence


class Prefill(NamedTuple):
    """A chunk: `tokens` tokens of `sequence` from position `start`; `samples` if its last."""

    sequence: Sequence
    start: int
    tokens: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """A microbatch of a planner: each of `decodes` runs a token, `prefills` run chunks.

    A batch-only microbatch may be *suspended* between layers and resume later, with a new `number`
    and `planned_s`. Planners with deadlines set the costs and flags. Model seconds are seconds
    predicted by the cost model, before corrections. *Residual time* is the time that a deadline
    leaves for an iteration.
    """

    number: int
    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    resumes: int | None = None  # number of the suspended microbatch that this plan resumes
    kept_batch: Batch | None = None  # its batch, set at the launch if it may be suspended
    decode_cost: float = 0.0  # cost of its sequences' next decodes; under `slo` only online ones
    batch_decode_cost: float = 0.0  # under `slo`: the same for its batch sequences
    planned_s: float = 0.0  # time of the launch, or of the resumption
    predicted_s: float = 0.0  # predicted time from launch to result, model seconds
    cost_s: float = 0.0  # predicted cost at a stage, model seconds
    allowed_s: float = inf  # least residual time, if it was planned to end within it
    harvested: bool = False  # batch work was allowed beside online work: adapt the harvest share
    contended: bool = False  # online work lacked blocks or slots: lower the harvest share
    deadline_bound: bool = False  # not all online decodes fitted: lower the adaptive slots
    ran_s: float = 0.0  # run time before the latest suspension
    suspended_s: float = 0.0  # time of the latest suspension

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def tokens(self) -> int:
        """Number of tokens that the microbatch computes."""
        return len(self.decodes) + sum([prefill.tokens for prefill in self.prefills])

    @property
    def mixed(self) -> bool:
        """Whether any chunk has more than one token."""
        return any(prefill.tokens > 1 for prefill in self.prefills)

    def add(self, sequence: Sequence, tokens: int) -> None:
        """Add a chunk of the next `tokens` tokens of a sequence."""
        start = sequence.computed
        samples = start + tokens == len(sequence.token_ids)
        self.prefills.append(Prefill(sequence, start, tokens, samples))

    def drop_preempted(self) -> list[tuple[int, int]]:
        """Remove sequences that were preempted since they were added.

        Returns the prefix and the tokens of each chunk that is removed.
        """
        # A preempted decode has no cached tokens any more; before, only its last one was missing.
        lost = [
            (len(decode.token_ids) - 1, 1)
            for decode in self.decodes
            if decode.phase is not Phase.RUNNING
        ]
        lost += [
            (start, tokens)
            for sequence, start, tokens, _ in self.prefills
            if sequence.phase is not Phase.RUNNING
        ]
        self.decodes = [decode for decode in self.decodes if decode.phase is Phase.RUNNING]
        self.prefills = [chunk for chunk in self.prefills if chunk.sequence.phase is Phase.RUNNING]
        return lost

    def batch(self, table: StageTable) -> Batch:
        """Create the batch for the model runner; call before `launch`."""
        tables = table.tables
        chunks = [seq.next_decode(tables[seq.request.request_id]) for seq in self.decodes]
        chunks += [
            seq.next_chunk(tokens, tables[seq.request.request_id])
            for seq, _, tokens, _ in self.prefills
        ]
        return Batch(tuple(chunks))

    def shape(self, execution: Execution = Execution.RAGGED) -> IterationShape:
        """The sizes that determine its duration; call before `launch`."""
        return IterationShape.of(
            [sequence.computed for sequence in self.decodes],
            [(start, tokens) for _, start, tokens, _ in self.prefills],
            execution,
        )

    def launch(self) -> None:
        """Count the tokens of every chunk as planned."""
        for sequence in self.decodes:
            sequence.computed += 1
        for sequence, _, tokens, _ in self.prefills:
            sequence.computed += tokens

    def discard(self) -> None:
        """Undo `launch`, so that the tokens run again. Later plans must be discarded before."""
        for sequence in self.decodes:
            _rewind(sequence, len(sequence.token_ids) - 1)
        for sequence, start, _, _ in self.prefills:
            _rewind(sequence, start)

    def sequences(self) -> list[Sequence]:
        """The sequences of the microbatch; read-only."""
        if not self.prefills:
            return self.decodes
        return self.decodes + [prefill.sequence for prefill in self.prefills]

    def includes(self, sequence: Sequence) -> bool:
        """Whether the microbatch has a chunk of `sequence`."""
        return sequence in self.decodes or any(
            chunk.sequence is sequence for chunk in self.prefills
        )


def _rewind(sequence: Sequence, start: int) -> None:
    """Rewind a sequence to position `start`."""
    if sequence.phase is not Phase.ENDED:
        # A sequence that was preempted since has `computed` 0 already.
        sequence.computed = min(sequence.computed, start)
        sequence.sample_due = False
        sequence.reset_sampler()
