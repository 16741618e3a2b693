"""How an iteration is given up between two layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Interrupted(Exception):
    """An iteration was interrupted before `layer`, whose input would be `hidden`."""

    def __init__(self, hidden: torch.Tensor, layer: int) -> None:
        super().__init__(layer)
        self.hidden = hidden
        self.layer = layer


@dataclass(frozen=True, slots=True)
class WatchedInterrupt:
    """Tells whether an iteration shall be given up; `descriptor` is readable when that may change.

    So a loop over layers calls `answer` only when `descriptor` is readable, or once `asks_again`
    tells that it may also change by time. Any other callable is called before each layer.
    """

    answer: Callable[[], bool]
    descriptor: int
    asks_again: Callable[[], bool] = lambda: False

    def __call__(self) -> bool:
        return self.answer()
