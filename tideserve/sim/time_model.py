"""How long simulated work takes; replaceable."""

from dataclasses import dataclass
from typing import Protocol

from services.core.cost.model import CostModel
from services.core.planner.batch import IterationShape


class TimeModel(Protocol):
    """Durations in seconds; none may be 0 or less."""

    def iteration_s(self, shape: IterationShape) -> float:
        """One iteration."""
        ...

    def stage_s(self, shape: IterationShape, share: float) -> float:
        """A stage's part in a microbatch; `share` is its part in the time of the model."""
        ...

    def decodes_s(self, decodes: int, prefix_tokens: int, count: int) -> float:
        """`count` iterations of the same `decodes` requests; `prefix_tokens` is their sum now.

        Equals the sum of `iteration_s` over them.
        """
        ...


@dataclass(frozen=True, slots=True)
class CostTimeModel:
    """A device's cost model, and `overhead_s` in each iteration for all that is not the model.

    The model's time is multiplied by `prefill_scale` in iterations with a chunk of more than one
    token, by `decode_scale` in others: as workers measured beside it.
    """

    model: CostModel
    overhead_s: float = 0.0
    prefill_scale: float = 1.0
    decode_scale: float = 1.0

    def iteration_s(self, shape: IterationShape) -> float:
        """One iteration."""
        return self.stage_s(shape, 1.0)

    def stage_s(self, shape: IterationShape, share: float) -> float:
        """A stage's part in a microbatch."""
        model = self.model
        seconds = model.decodes_alone_s(shape.decodes, shape.decode_prefix_tokens)
        for prefix, new in shape.prefills:
            seconds += model.chunk_s(prefix, new)
        shared = shape.decodes + len(shape.prefills) - 1
        tokens = shape.decodes + sum(new for _, new in shape.prefills)
        seconds += model.excess_s(tokens) - shared * model.lam
        scale = self.prefill_scale if shape.prefills else self.decode_scale
        return scale * share * seconds + self.overhead_s

    def decodes_s(self, decodes: int, prefix_tokens: int, count: int) -> float:
        """`count` iterations of the same decodes, each of which gains a token in each."""
        seconds = self.model.decodes_s(decodes, prefix_tokens, count)
        return self.decode_scale * seconds + count * self.overhead_s
