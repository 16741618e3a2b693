"""A member's fence: only frames of its present configuration take effect.

Each configuration has an epoch, a number that increases with every change of the group. Members
switch to a new configuration at different moments, so a frame of a higher epoch is buffered until
the receiver has switched. A frame of a lower epoch is discarded: its sender has yet to switch.
"""

from collections import deque
from enum import Enum, auto
from typing import Generic, TypeVar

FrameT = TypeVar("FrameT")


class EpochStatus(Enum):
    """The epoch of a frame compared with that of its receiver."""

    CURRENT = auto()  # takes effect
    STALE = auto()  # discarded
    FUTURE = auto()  # buffered until the receiver has switched

    @classmethod
    def of(cls, epoch: int, own: int) -> "EpochStatus":
        """The status of a frame of `epoch` at a member whose present epoch is `own`."""
        if epoch == own:
            return cls.CURRENT
        return cls.FUTURE if epoch > own else cls.STALE


class EpochFence(Generic[FrameT]):
    """The fence of a member."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch  # of the present configuration
        # Buffered frames of higher epochs, with these, in arrival order.
        self.early: deque[tuple[int, FrameT]] = deque()

    def admits(self, epoch: int, frame: FrameT) -> bool:
        """Return whether a frame of `epoch` takes effect now; buffer it if its epoch is higher."""
        status = EpochStatus.of(epoch, self.epoch)
        if status is EpochStatus.FUTURE:
            self.early.append((epoch, frame))
        return status is EpochStatus.CURRENT

    def enter(self, epoch: int) -> list[FrameT]:
        """Move to `epoch`; returns the buffered frames of that epoch, in arrival order."""
        self.epoch = epoch
        early, self.early = self.early, deque()
        return [frame for sent, frame in early if self.admits(sent, frame)]
