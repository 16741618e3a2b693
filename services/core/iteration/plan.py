"""What a planner has decided to run: sequences and token counts, before anybody needs token ids."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.iteration.batch import Batch, IterationShape
from services.core.iteration.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """One iteration: `decodes` run one token each, `prefills` as many as stand beside them."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    def work(self) -> Iterator[tuple[Sequence, int]]:
        """Sequences and their token counts, in the order in which they run."""
        for sequence in self.decodes:
            yield sequence, 1
        yield from self.prefills

    def batch(self) -> Batch:
        """The chunks for a model runner."""
        return Batch(tuple(sequence.next_chunk(tokens) for sequence, tokens in self.work()))

    def shape(self) -> IterationShape:
        """The sizes for a time model."""
        return IterationShape(
            decodes=len(self.decodes),
            decode_prefix_tokens=sum([sequence.computed for sequence in self.decodes]),
            prefills=tuple([(sequence.computed, tokens) for sequence, tokens in self.prefills]),
        )
