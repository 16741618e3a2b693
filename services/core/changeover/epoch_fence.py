"""Fences frames by epoch: only frames of the present configuration take effect.

Members switch at different moments. A frame of a newer epoch is buffered until this member has
switched; a frame of an older epoch is dropped, because its sender does not know of the change yet.
"""

from collections import deque
from enum import Enum, auto
from typing import Generic, TypeVar

FrameT = TypeVar("FrameT")


class EpochStatus(Enum):
    """The epoch of a frame relative to its receiver's."""

    CURRENT = auto()  # takes effect
    STALE = auto()  # dropped
    FUTURE = auto()  # buffered until the receiver has switched

    @classmethod
    def of(cls, epoch: int, own: int) -> "EpochStatus":
        """The status of a frame of `epoch` at a member whose epoch is `own`."""
        if epoch == own:
            return cls.CURRENT
        return cls.FUTURE if epoch > own else cls.STALE


class EpochFence(Generic[FrameT]):
    """The fence of a member. `early`: buffered frames with their epochs, in arrival order."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.early: deque[tuple[int, FrameT]] = deque()

    def admits(self, epoch: int, frame: FrameT) -> bool:
        """Whether a frame of `epoch` takes effect now; frames of future epochs are buffered."""
        status = EpochStatus.of(epoch, self.epoch)
        if status is EpochStatus.FUTURE:
            self.early.append((epoch, frame))
        return status is EpochStatus.CURRENT

    def enter(self, epoch: int) -> list[FrameT]:
        """Move to `epoch`; returns the buffered frames of that epoch, in arrival order."""
        self.epoch = epoch
        early, self.early = self.early, deque()
        return [frame for sent, frame in early if self.admits(sent, frame)]
