"""Errors between the engines of a group."""

from services.worker.errors import WorkerError


class FrameError(WorkerError):
    """Bytes that are no valid frame; the connection to their sender is ended."""


class ChecksumMismatch(FrameError):
    """The frame was damaged on its way."""


class VersionMismatch(FrameError):
    """The peer speaks another version of the protocol between workers."""


class LaneError(WorkerError):
    """A frame cannot be sent."""


class LaneFull(LaneError):
    """The bound on what waits for a peer is reached; nothing was queued."""


class PeerUnknown(LaneError):
    """No connection to the peer exists or is being made."""


class LaneClosed(LaneError):
    """The lane was closed, or its thread has died."""


class TransferRefused(WorkerError):
    """Raised by the receiver's `unpack` for a piece that it has no place for."""


class MoverFull(WorkerError):
    """Too many transfers wait; nothing was begun."""


class UcxUnavailable(WorkerError):
    """UCX cannot be loaded: the worker serves on, without the capability to merge."""
