"""Results of a stage: of a batch that ran, runs on a GPU, or was suspended."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.core.planner.batch import Batch, SampleNotes


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The result of a stage for a batch: `hidden` for the next stage, or `sampled` at the last.

    `hidden` is [tokens, hidden_size] in the compute dtype. `sampled` maps the id of each sequence
    whose chunk samples to its token, failed sequences excepted. `notes` has log probabilities and
    failures; None if there are neither.
    """

    hidden: torch.Tensor | None = None
    sampled: dict[str, int] | None = None
    notes: SampleNotes | None = None


@dataclass(frozen=True, slots=True)
class Suspended:
    """A batch interrupted before `layer`; `hidden` [tokens, hidden_size] is that layer's input.

    The KV blocks already hold K and V of the layers before `layer`.
    """

    batch: Batch
    hidden: torch.Tensor
    layer: int


@dataclass(slots=True)
class LaunchedStage:
    """A batch whose layers were launched: its output or, while a GPU may run them, how to wait."""

    output: StageOutput | None
    sample: Callable[[], StageOutput] | None = None

    def collect(self) -> StageOutput:
        """Return the result; call it once."""
        if self.output is not None:
            return self.output
        assert self.sample is not None
        return self.sample()
