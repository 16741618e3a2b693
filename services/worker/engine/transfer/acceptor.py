"""Accepts the connections of a lane's peers."""

import errno
import logging
import select
import socket

PAUSE_S = 1.0

log = logging.getLogger(__name__)


class Acceptor:
    """Accepts connections of the listener; pauses while this process has no free descriptor.

    A pending connection keeps the listener readable, so that a thread that goes on watching it
    would spin. All calls are made by the lane's own thread.
    """

    def __init__(self, listener: socket.socket, poll: select.epoll) -> None:
        """`poll` watches the listener except during a pause."""
        self._listener = listener
        self._poll = poll
        self._resume_s: float | None = None
        self._failing = False
        self._watch()

    def accept(self, now_s: float) -> socket.socket | None:
        """Accept a connection; None if there is none, or it cannot be accepted."""
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            # The peer may have left already. Other errors are a lack of descriptors or memory.
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                self._pause(now_s, error)
            return None
        self._failing = False
        return accepted

    def tick(self, now_s: float) -> None:
        """Watch the listener again after a pause."""
        if self._resume_s is not None and now_s >= self._resume_s:
            self._watch()

    def _watch(self) -> None:
        self._resume_s = None
        self._poll.register(self._listener.fileno(), select.EPOLLIN)

    def _pause(self, now_s: float, error: OSError) -> None:
        self._resume_s = now_s + PAUSE_S
        self._poll.unregister(self._listener.fileno())
        if not self._failing:
            self._failing = True
            log.warning(
                "cannot accept connections of peers (%s), trying every %.0f s; raise the limit of"
                " open files",
                error.strerror,
                PAUSE_S,
            )
