"""Durations of simulated iterations."""

from dataclasses import dataclass
from typing import Protocol

from services.core.cost.model import CostModel
from services.core.planner.batch import IterationShape


class TimeModel(Protocol):
    """Durations in seconds; all must be positive."""

    def iteration_s(self, shape: IterationShape) -> float:
        """Return the duration of an iteration."""
        ...

    def stage_s(self, shape: IterationShape, share: float) -> float:
        """Return the duration of a microbatch at a stage with this share of the model's time."""
        ...

    def decodes_s(self, decodes: int, prefix_tokens: int, count: int) -> float:
        """Return the duration of `count` iterations that decode the same `decodes` sequences.

        `prefix_tokens` is the sum of their prefixes before the first iteration. Equals the sum of
        `iteration_s` over the iterations.
        """
        ...


@dataclass(frozen=True, slots=True)
class CostTimeModel:
    """A device's cost model, plus `overhead_s` per iteration for everything outside the model.

    The model's time is multiplied by `prefill_scale` in iterations with a chunk of more than one
    token, else by `decode_scale`: measured ratios of the workers' times to the cost model.
    """

    model: CostModel
    overhead_s: float = 0.0
    prefill_scale: float = 1.0
    decode_scale: float = 1.0

    def iteration_s(self, shape: IterationShape) -> float:
        """See `TimeModel`."""
        return self.stage_s(shape, 1.0)

    def stage_s(self, shape: IterationShape, share: float) -> float:
        """See `TimeModel`."""
        model = self.model
        seconds = model.decodes_alone_s(shape.decodes, shape.decode_prefix_tokens)
        for prefix, new in shape.prefills:
            seconds += model.chunk_s(prefix, new)
        # Each chunk's cost includes the fixed cost `lam`, which a batch pays once.
        shared = shape.decodes + len(shape.prefills) - 1
        tokens = shape.decodes + sum(new for _, new in shape.prefills)
        seconds += model.excess_s(tokens) - shared * model.lam
        scale = self.prefill_scale if shape.prefills else self.decode_scale
        return scale * share * seconds + self.overhead_s

    def decodes_s(self, decodes: int, prefix_tokens: int, count: int) -> float:
        """See `TimeModel`; each sequence grows by a token per iteration."""
        seconds = self.model.decodes_s(decodes, prefix_tokens, count)
        return self.decode_scale * seconds + count * self.overhead_s
