"""Checks whether UCX still receives, after a process of this machine was lost.

Processes of a machine write their messages into a shared queue in the receiver's memory, which UCX
reads in order. A process that dies or is stopped in the middle of such a write leaves an unfinished
entry. UCX then reads nothing behind that entry, from any sender, and reports no error.
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
"""Longer than a live process is descheduled in the middle of a write."""
POLLS_MIN = 100
"""Empty polls that are required, too: this process itself may have been paused for `WAIT_S`."""
PAUSE_S = 0.001
"""Poll interval during a check."""

log = logging.getLogger(__name__)


class ReceiveCheck:
    """Sends a message from this process to its own lane, behind all entries of the lost process.

    For the thread that drives the lane.
    """

    def __init__(
        self, transport: UcxTransport, open_sender: Callable[[], UcxTransport], name: str
    ) -> None:
        """`open_sender` creates another transport over shared memory; `name` is the lane's."""
        self._transport = transport
        self._open_sender = open_sender
        self._name = name
        self._sender: UcxTransport | None = None
        self._endpoint: Endpoint | None = None
        self._sent: dict[int, UcxRequest] = {}  # by tag, oldest first
        self._since_s = 0.0  # start of the wait for the next message
        self._polls = 0  # empty polls since then

    @property
    def under_way(self) -> bool:
        """Whether the newest check message has not arrived yet."""
        return self._sender is not None

    @property
    def has_failed(self) -> bool:
        """Whether the messages no longer arrive."""
        waited = self._polls >= POLLS_MIN and monotonic_s() - self._since_s >= WAIT_S
        return self.under_way and waited

    def begin(self) -> None:
        """Send a check message; earlier messages prove nothing about later writes."""
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
        """Stop the check."""
        if self._endpoint is not None:
            self._endpoint.abort()
        self._sender = self._endpoint = None
        self._sent.clear()

    def note_arrived(self, tag: int) -> None:
        """Note a message that belongs to no connection; it may be a check message."""
        if tag not in self._sent:
            return
        newest = next(reversed(self._sent))
        del self._sent[tag]
        self._restart_wait()
        if tag == newest:
            self.end()

    def note_idle_poll(self) -> None:
        """Note a poll of the lane that found no message."""
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
    """A factory of transports that reach only processes of this machine."""
    return lambda: UcxTransport(replace(config, transports="sm"))
