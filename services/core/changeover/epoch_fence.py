"""Which frames of other members count: those of the present configuration.

Members switch at different moments. So a frame of a newer epoch waits until this member has
switched, and one of an older epoch is dropped: its sender has not yet heard of the change.
"""

from collections import deque
from enum import Enum, auto
from typing import Generic, TypeVar

FrameT = TypeVar("FrameT")


class Standing(Enum):
    """How the epoch of a frame relates to its receiver's. Frames of a future epoch wait."""

    CURRENT = auto()
    STALE = auto()
    FUTURE = auto()

    @classmethod
    def of(cls, epoch: int, own: int) -> "Standing":
        """The standing of a frame of `epoch` at a member that is in `own`."""
        if epoch == own:
            return cls.CURRENT
        return cls.FUTURE if epoch > own else cls.STALE


class EpochFence(Generic[FrameT]):
    """The fence of one member. `early` are waiting frames with their epochs, as they came."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.early: deque[tuple[int, FrameT]] = deque()

    def admits(self, epoch: int, frame: FrameT) -> bool:
        """Whether a frame of `epoch` has an effect now; one that is early is kept."""
        standing = Standing.of(epoch, self.epoch)
        if standing is Standing.FUTURE:
            self.early.append((epoch, frame))
        return standing is Standing.CURRENT

    def enter(self, epoch: int) -> list[FrameT]:
        """Admit frames of this epoch from now on; returns those that came before."""
        self.epoch = epoch
        early, self.early = self.early, deque()
        return [frame for sent, frame in early if self.admits(sent, frame)]
