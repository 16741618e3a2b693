"""The interruption of an iteration (the run of a batch) before a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Interrupted(Exception):
    """An iteration was interrupted before `layer`; `hidden` is that layer's input."""

    def __init__(self, hidden: torch.Tensor, layer: int) -> None:
        super().__init__(layer)
        self.hidden = hidden
        self.layer = layer


@dataclass(frozen=True, slots=True)
class WatchedInterrupt:
    """An interrupt check that may be skipped while no message has arrived.

    After the first layer, a loop over layers needs to call `check` only if `descriptor` is readable
    or `time_dependent` returns True (the result may change without a message). A plain callable is
    called before each layer.
    """

    check: Callable[[], bool]
    descriptor: int
    time_dependent: Callable[[], bool] = lambda: False

    def __call__(self) -> bool:
        return self.check()
