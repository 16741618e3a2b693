"""Batches several frames of a long-lived stream into one message, if the peer supports it.

A frame is a protobuf message of a gRPC stream. gRPC needs at least one turn of the event loop per
message, and turns are slow in a process with thousands of streams, so a queue of frames that are
sent separately grows faster than it drains. The first frame of a batch contains the others in its
field `more`, in order. Peers of earlier versions would ignore that field, so each side announces
support in its metadata.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T", bound=Message)

TAKES_MANY = (("tideserve-frames", "many"),)
"""Metadata of a peer that accepts several frames per message."""
FRAMES_MAX = 256
BYTES_MAX = 4 * 2**20
"""Maximum size of a message, unless a single frame is larger."""
UNBATCHED_BYTES = 64 * 2**10
"""Frames of this size are sent alone: batching would copy them."""


def takes_many(metadata: Iterable[Any] | None) -> bool:
    """Whether the peer with this metadata accepts several frames per message."""
    return any(tuple(pair) == TAKES_MANY[0] for pair in metadata or ())


def packed(frames: Sequence[T]) -> Iterator[T]:
    """Batch `frames`, in order, into as few messages as possible. Modifies the frames."""
    head, count, size = None, 0, 0
    for frame in frames:
        frame_bytes = frame.ByteSize()
        if frame_bytes >= UNBATCHED_BYTES:
            # Send the earlier frames first, to keep the order.
            if head is not None:
                yield head
            yield frame
            head = None
            continue
        if head is not None and count < FRAMES_MAX and size + frame_bytes <= BYTES_MAX:
            head.more.append(frame)  # type: ignore[attr-defined]  # batched types have it
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
