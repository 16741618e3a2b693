"""Errors between the engines of a group."""

from services.worker.errors import WorkerError


class FrameError(WorkerError):
    """Invalid bytes instead of a frame; the connection to their sender is closed."""


class ChecksumMismatch(FrameError):
    """The frame was damaged in transit."""


class VersionMismatch(FrameError):
    """The peer speaks another version of the protocol between workers."""


class LaneError(WorkerError):
    """A frame cannot be sent."""


class LaneFull(LaneError):
    """The queue for a peer is full; nothing was queued."""


class PeerUnknown(LaneError):
    """No connection to the peer exists or is being established."""


class LaneClosed(LaneError):
    """The lane was closed, or its thread has died."""


class TransferRefused(WorkerError):
    """Raised by `pack` and `unpack` for a piece whose memory is not available (any more)."""


class MoverFull(WorkerError):
    """Too many transfers are queued; none was started."""


class UcxUnavailable(WorkerError):
    """UCX cannot be loaded; the worker serves alone and cannot merge."""
