"""Whether UCX still receives, asked after a process of this machine was lost.

Processes of one machine write what they send into one queue in the receiver's memory, which UCX
reads in order. A process that dies, or is stopped, in the middle of such a write leaves an entry
without an end. UCX reads nothing behind that entry, whoever wrote it, and neither end is told.
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
"""Longer than a process that lives is off the processor in the middle of a write."""
POLLS_MIN = 100
"""How often the lane has found nothing, too: its own process may have stood still for `WAIT_S`."""
PAUSE_S = 0.001
"""How often it looks."""

log = logging.getLogger(__name__)


class ReceiveCheck:
    """A message from this process to its own lane, behind all that the lost process wrote.

    For the thread that drives the lane.
    """

    def __init__(
        self, transport: UcxTransport, open_sender: Callable[[], UcxTransport], name: str
    ) -> None:
        """`open_sender` makes another transport over shared memory; `name` is the lane's."""
        self._transport = transport
        self._open_sender = open_sender
        self._name = name
        self._sender: UcxTransport | None = None
        self._endpoint: Endpoint | None = None
        self._sent: dict[int, UcxRequest] = {}  # by tag, oldest first
        self._since_s = 0.0
        self._polls = 0

    @property
    def under_way(self) -> bool:
        """Whether a message has been sent and the newest has not come."""
        return self._sender is not None

    @property
    def has_failed(self) -> bool:
        """Whether what was sent does not come any more."""
        waited = self._polls >= POLLS_MIN and monotonic_s() - self._since_s >= WAIT_S
        return self.under_way and waited

    def begin(self) -> None:
        """Send a message; one that was sent before tells nothing about what was written since."""
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
        """Forget what is under way."""
        if self._endpoint is not None:
            self._endpoint.abort()
        self._sender = self._endpoint = None
        self._sent.clear()

    def note_arrived(self, tag: int) -> None:
        """A message that belongs to no connection has come."""
        if tag not in self._sent:
            return
        newest = next(reversed(self._sent))
        del self._sent[tag]
        self._restart_wait()
        if tag == newest:
            self.end()

    def note_idle_poll(self) -> None:
        """The lane has looked for messages and found no more."""
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
            "the %s has lost a peer and cannot check whether UCX receives on (%s); if this worker"
            " gets no connection any more, start it anew",
            self._name,
            reason,
        )
        self.end()


def memory_sender(config: UcxConfig) -> Callable[[], UcxTransport]:
    """Makes transports that reach the processes of this machine alone."""
    return lambda: UcxTransport(replace(config, transports="sm"))
