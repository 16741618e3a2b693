"""Which frames of other members count: those of the present configuration.

Members switch at different moments. So a frame of a newer epoch waits until this member has
switched, and one of an older epoch is dropped: its sender has not yet heard of the change.
"""

from collections import deque
from typing import Generic, TypeVar

FrameT = TypeVar("FrameT")


class EpochFence(Generic[FrameT]):
    """One member's. `early` are the frames that wait, with their epochs, in the order they came."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.early: deque[tuple[int, FrameT]] = deque()

    def admits(self, epoch: int, frame: FrameT) -> bool:
        """Whether a frame of `epoch` has an effect now; one that is early is kept."""
        if epoch > self.epoch:
            self.early.append((epoch, frame))
        return epoch == self.epoch

    def enter(self, epoch: int) -> list[FrameT]:
        """Admit frames of this epoch from now on; returns those that came before."""
        self.epoch = epoch
        early, self.early = self.early, deque()
        return [frame for sent, frame in early if self.admits(sent, frame)]
