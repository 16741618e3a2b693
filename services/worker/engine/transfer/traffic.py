"""Moves the frames of a UCX lane between the connections' queues, UCX and the engine.

A UCX lane exchanges frames with the engines of other workers. The driving thread is the thread that
calls `drive` at the moment: the lane's own, or an engine thread that sends or waits. A *confirmed*
connection has received the peer's first message through UCX. A lost connection *lingers* until UCX
has released its memory.
"""

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Lock

import numpy as np

from services.worker.engine.transfer.connection import Connection
from services.worker.engine.transfer.connection_table import ConnectionTable
from services.worker.engine.transfer.frame import Frame, FrameMemory
from services.worker.engine.transfer.receive_check import ReceiveCheck
from services.worker.engine.transfer.ucx_config import UcxLaneConfig
from services.worker.engine.transfer.ucx_transport import IncomingMessage, UcxRequest, UcxTransport

STRAY_MAX = 64  # messages without a connection that are being received and discarded


class Traffic:
    """Sends and receives frames. Only `take` is thread-safe; the driving thread calls the rest.

    While frames of `received_bytes_max` wait for the engine, no more are received.
    """

    def __init__(
        self,
        transport: UcxTransport,
        connections: ConnectionTable,
        config: UcxLaneConfig,
        memory: FrameMemory,
        check: ReceiveCheck,
        notify: Callable[[], None],
    ) -> None:
        """`notify` is called when frames have arrived, or an awaited send has ended."""
        self._transport = transport
        self._connections = connections
        self._config = config
        self._memory = memory
        self._check = check
        self._notify = notify
        # Guards changes of the two attributes below; a stale read is corrected by the next call.
        self._lock = Lock()
        self._arrived: deque[tuple[Connection, Frame]] = deque()  # for the engine
        self._arrived_bytes = 0
        self._waits_for_room = False  # whether receiving stopped at the memory limit
        self._stray: deque[UcxRequest] = deque()  # receives whose messages are discarded

    def take(self, leave: Collection[str]) -> tuple[list[tuple[Connection, Frame]], bool]:
        """Return the received frames, and whether UCX may have more for which there was no room.

        Frames of the peers in `leave` are kept. Thread-safe.
        """
        if not self._arrived:
            return [], False
        with self._lock:
            taken = [entry for entry in self._arrived if entry[0].peer.worker_id not in leave]
            self._arrived = deque(
                entry for entry in self._arrived if entry[0].peer.worker_id in leave
            )
            self._arrived_bytes = sum(frame.size_bytes for _, frame in self._arrived)
        was_full = self._waits_for_room
        for connection, _ in taken:
            connection.taken += 1
        return taken, was_full

    def drive(self, until_s: float) -> bool:
        """Progress UCX, send queued frames, receive frames; returns whether it called `notify`.

        `until_s`: the deadline for UCX to send the frames that it is handed now.
        """
        self._transport.progress()
        # A list, since losing a connection removes it from the table.
        for connection in [each for each in self._connections.by_tag.values() if each.has_queued]:
            with self._connections.lose_on_error(connection):
                connection.submit(until_s)
        self._probe()
        return self.reap()

    def send_now(self, connection: Connection, until_s: float) -> None:
        """Send a peer's queued frames, and receive the frames that have arrived."""
        with self._connections.lose_on_error(connection):
            connection.submit(until_s)
            self._transport.progress()
            connection.reap_sends()
        # Receive now: UCX does not wake any thread again for messages that `progress` has received.
        self._probe()
        self.reap()

    def reap(self) -> bool:
        """Deliver received frames and finish sends; returns whether it called `notify`."""
        frames: list[tuple[Connection, Frame]] = []
        awaited = False
        every = (*self._connections.by_tag.values(), *self._connections.lingering)
        for connection in [each for each in every if each.has_completed]:
            with self._connections.lose_on_error(connection):
                awaited |= connection.reap_sends()
            with self._connections.lose_on_error(connection):
                received = connection.reap_fetches(self._config.verify)
                frames += [(connection, frame) for frame in received]
                if connection.confirmed:
                    self._connections.note_confirmed(connection)
        self._connections.forget_released()
        if frames:
            with self._lock:
                self._arrived += frames
                self._arrived_bytes += sum(frame.size_bytes for _, frame in frames)
        if frames or awaited:
            self._notify()
        return bool(frames) or awaited

    def forget_strays(self) -> None:
        """Forget discarding receives, before their UCX worker is replaced."""
        self._stray.clear()

    def _probe(self) -> None:
        """Start to receive announced messages while there is room."""
        by_tag = self._connections.by_tag
        fetching = sum(connection.fetching_bytes for connection in by_tag.values())
        while self._has_room(fetching):
            arrival = self._transport.probe()
            if arrival is None:
                self._check.note_idle_poll()
                break
            connection = by_tag.get(arrival.tag)
            if connection is None:
                self._check.note_arrived(arrival.tag)
                self._discard(arrival)
            elif arrival.size_bytes > self._config.frame_bytes_max:
                reason = f"a frame of {arrival.size_bytes} bytes is too large"
                self._connections.lose(connection, reason)
            else:
                fetching += arrival.size_bytes
                with self._connections.lose_on_error(connection):
                    memory = self._memory.take(arrival.size_bytes)
                    connection.fetch(self._transport, arrival, memory)

    def _has_room(self, fetching_bytes: int) -> bool:
        """Return whether there is room beside `fetching_bytes`, and record it for `take`."""
        most = self._config.received_bytes_max - fetching_bytes
        self._waits_for_room = self._arrived_bytes >= most
        if self._waits_for_room and self._arrived_bytes < most:
            self._waits_for_room = False  # `take` made room between the two comparisons
        return not self._waits_for_room

    def _discard(self, arrival: IncomingMessage) -> None:
        """Receive a message without a connection and discard it, so that UCX frees its memory.

        A message stays in UCX if it is too large or `STRAY_MAX` are being received.
        """
        while self._stray and self._stray[0].completed:
            self._stray.popleft()
        if arrival.size_bytes <= self._config.frame_bytes_max and len(self._stray) < STRAY_MAX:
            memory = np.empty(arrival.size_bytes, np.uint8)
            with suppress(ConnectionError):
                self._stray.append(self._transport.fetch(arrival, memory))
