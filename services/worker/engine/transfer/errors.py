"""Errors in the exchange of frames (on lanes) and of KV and parameters (by the mover)."""

from services.worker.errors import WorkerError


class FrameError(WorkerError):
    """Received bytes are not a valid frame; the connection to their sender is closed."""


class ChecksumMismatch(FrameError):
    """A frame was damaged in transit."""


class VersionMismatch(FrameError):
    """The peer speaks another version of the protocol between workers."""


class LaneError(WorkerError):
    """A frame cannot be sent."""


class LaneFull(LaneError):
    """The queue for a peer is full; nothing was queued."""


class PeerUnknown(LaneError):
    """There is no connection to the peer, not even one being established."""


class LaneClosed(LaneError):
    """The lane was closed, or its thread has died."""


class TransferRefused(WorkerError):
    """A piece cannot be read from or written to its memory, which is not available (any more)."""


class MoverFull(WorkerError):
    """Too many transfers are queued; the new transfer was not queued."""


class UcxUnavailable(WorkerError):
    """UCX cannot be loaded; the worker can only serve without a pipeline group."""
