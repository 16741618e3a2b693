"""Checks whether UCX still receives after a peer process on this machine was lost.

Processes of a machine write messages into a queue in shared memory of the receiver, which UCX reads
in order. A process that dies or is stopped in the middle of such a write leaves an unfinished
entry. UCX then reads no later entry of any sender, and reports no error. The lane must then replace
its UCX worker.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from services.common.clock import monotonic_s
from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_transport import (
    TAG_MAX,
    Endpoint,
    UcxRequest,
    UcxTransport,
)

WAIT_S = 0.25
"""Wait before the check fails; longer than a live process pauses in the middle of a write."""
POLLS_MIN = 100
"""Polls without a message before the check fails: this process may have paused for `WAIT_S`."""
PAUSE_S = 0.001
"""Poll interval of the lane's thread during a check."""

log = logging.getLogger(__name__)


class ReceiveCheck:
    """Sends check messages from this process to its own lane, queued after the lost peer's entries.

    If a message arrives, UCX still receives. All calls are made by the thread that drives the lane.
    """

    def __init__(
        self, transport: UcxTransport, open_sender: Callable[[], UcxTransport], name: str
    ) -> None:
        """`open_sender` creates a second transport over shared memory; `name` is the lane's."""
        self._transport = transport
        self._open_sender = open_sender
        self._name = name
        self._sender: UcxTransport | None = None
        self._endpoint: Endpoint | None = None
        self._sent: dict[int, UcxRequest] = {}  # by tag, oldest first
        self._since_s = 0.0  # start of the wait for the next message
        self._polls = 0  # polls without a message since then

    @property
    def under_way(self) -> bool:
        """Whether the newest check message has not arrived yet."""
        return self._sender is not None

    @property
    def has_failed(self) -> bool:
        """Whether a check message is overdue, so that UCX does not receive any more."""
        waited = self._polls >= POLLS_MIN and monotonic_s() - self._since_s >= WAIT_S
        return self.under_way and waited

    def begin(self) -> None:
        """Send a check message, also during a check: it is queued after the newest loss."""
        try:
            if self._sender is None:
                self._sender = self._open_sender()
                self._endpoint = self._sender.open(self._transport.address)
                self._restart_wait()
            assert self._endpoint is not None
            tag = 1 + secrets.randbelow(TAG_MAX)
            self._sent[tag] = self._endpoint.send(np.zeros(1, np.uint8), tag)
        except (UcxUnavailable, OSError, RuntimeError, MemoryError) as error:
            self._give_up(str(error))

    def end(self) -> None:
        """Stop the check. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.abort()
        self._sender = self._endpoint = None
        self._sent.clear()

    def note_arrived(self, tag: int) -> None:
        """Record a message that belongs to no connection; it may be a check message."""
        if tag not in self._sent:
            return
        newest = next(reversed(self._sent))
        del self._sent[tag]
        self._restart_wait()
        if tag == newest:
            self.end()

    def note_idle_poll(self) -> None:
        """Record a poll of the lane that returned no message."""
        if self._sender is None:
            return
        self._polls += 1
        self._sender.progress()
        for request in self._sent.values():
            if request.completed and (problem := request.error()) is not None:
                self._give_up(problem)
                return

    def _restart_wait(self) -> None:
        self._since_s = monotonic_s()
        self._polls = 0

    def _give_up(self, reason: str) -> None:
        log.warning(
            "the %s has lost a peer and cannot check whether UCX still receives (%s); restart this"
            " worker if it cannot connect to peers any more",
            self._name,
            reason,
        )
        self.end()


def memory_sender(config: UcxConfig) -> Callable[[], UcxTransport]:
    """Return a factory of transports that only reach processes on this machine."""
    return lambda: UcxTransport(replace(config, transports="sm"))
