"""Several frames of a long-lived stream in one message, where the peer takes that.

gRPC writes and reads a message in one turn of the event loop or more. A process with thousands of
streams turns slowly, so a queue of frames that leaves one by one grows faster than it shrinks. A
frame that goes with others holds them in its field `more`, in order. A peer of an earlier version
would not see those, so each side says in its metadata that it takes them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T", bound=Message)

TAKES_MANY = (("tideserve-frames", "many"),)
"""Metadata of a peer that takes messages with more than one frame."""
FRAMES_MAX = 256
BYTES_MAX = 4 * 2**20
"""What one message holds at most, unless a single frame is larger."""
ALONE_BYTES = 64 * 2**10
"""A frame of that size goes alone: joining it with others would copy it."""


def takes_many(metadata: Iterable[Any] | None) -> bool:
    """Whether the peer that sent this metadata takes several frames in one message."""
    return any(tuple(pair) == TAKES_MANY[0] for pair in metadata or ())


def packed(frames: Sequence[T]) -> Iterator[T]:
    """Messages that hold `frames` in order, as few as may be. Changes the frames."""
    head, count, size = None, 0, 0
    for frame in frames:
        frame_bytes = frame.ByteSize()
        if frame_bytes >= ALONE_BYTES:
            if head is not None:
                yield head
            yield frame
            head = None
            continue
        if head is not None and count < FRAMES_MAX and size + frame_bytes <= BYTES_MAX:
            head.more.append(frame)  # type: ignore[attr-defined]  # every such frame has it
            count, size = count + 1, size + frame_bytes
            continue
        if head is not None:
            yield head
        head, count, size = frame, 1, frame_bytes
    if head is not None:
        yield head


def unpacked(message: T) -> Iterator[T]:
    """The frames in a message, in order."""
    yield message
    yield from message.more  # type: ignore[attr-defined]
