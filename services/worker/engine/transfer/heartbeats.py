"""The heartbeats of a UCX lane: they tell a peer that this process lives, and find dead peers."""

from services.worker.engine.transfer.connection_table import ConnectionTable


class Heartbeats:
    """Used by the thread that drives the lane."""

    def __init__(
        self,
        connections: ConnectionTable,
        interval_s: float,
        silence_timeout_s: float,
        now_s: float,
    ) -> None:
        """A beat goes out every `interval_s`; a peer silent for `silence_timeout_s` is lost."""
        self._connections = connections
        self._interval_s = interval_s
        self._silence_timeout_s = silence_timeout_s
        self._beat_s = now_s
        self.ticked_s = now_s

    def tick(self, now_s: float) -> None:
        """Send the beats that are due, and lose every connection that is overdue."""
        if now_s - self.ticked_s >= self._silence_timeout_s / 2:
            # This process stood still: it has yet to read what peers sent meanwhile.
            for connection in self._connections.by_descriptor.values():
                connection.heard_s = now_s
        self.ticked_s = now_s
        due = now_s - self._beat_s >= self._interval_s
        if due:
            self._beat_s = now_s
        self._beat(to_all=due)
        for connection in list(self._connections.by_descriptor.values()):
            reason = connection.overdue(now_s, self._silence_timeout_s)
            if reason is not None:
                self._connections.lose(connection, reason)

    def acknowledge(self) -> None:
        """Send a beat to each peer that would have to stop sending without one."""
        self._beat(to_all=False)

    def _beat(self, *, to_all: bool) -> None:
        for connection in list(self._connections.by_descriptor.values()):
            if connection.is_open and (to_all or connection.owes_acknowledgement):
                with self._connections.losing(connection):
                    connection.beat()
