"""Drives the scheduler's state machine: applies events, and queues its commands for gateways."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.common.timeouts import timeout
from services.core.audit.record import COMMAND, EVENT
from services.core.demand import ModelDemand
from services.core.report import OtherRoom
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Command,
    Event,
    GatewayGone,
    LateRefusals,
    LoadReported,
    Snapshot,
    Ticked,
)

TICK_S = 0.1
SNAPSHOT_TICKS = 5
"""Ticks between snapshots for metrics."""

log = logging.getLogger(__name__)


class GatewayOutbox:
    """Queue of commands for a gateway stream; an overflow closes it permanently."""

    def __init__(self, stream_id: int, limit: int) -> None:
        self.stream_id = stream_id
        self.overflowed = False
        self.closed = False
        self._heartbeat_requested = False
        self._limit = limit
        self._commands: deque[Command] = deque()
        self._changed = asyncio.Event()

    def put(self, command: Command) -> None:
        """Add a command; a closed outbox discards it, as the gateway repeats its asks elsewhere."""
        if self.closed:
            return
        if len(self._commands) >= self._limit:
            self.overflowed = True
            self.close()
            return
        self._commands.append(command)
        self._changed.set()

    def close(self) -> None:
        """Accept no more commands; queued ones can still be taken."""
        self.closed = True
        self._changed.set()

    def request_heartbeat(self) -> None:
        """Make the writer send a heartbeat now, because its content has changed."""
        self._heartbeat_requested = True
        self._changed.set()

    def take_heartbeat_request(self) -> bool:
        """Whether a heartbeat was requested since the last call; clears the request."""
        requested, self._heartbeat_requested = self._heartbeat_requested, False
        return requested

    async def take(self, timeout_s: float) -> list[Command]:
        """Remove and return all queued commands.

        Waits up to `timeout_s` for a command, a heartbeat request or the end of the stream.
        """
        try:
            async with timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return []
        # Keep the event set when closed, so that the reader never waits again.
        if not self.closed:
            self._changed.clear()
        commands = list(self._commands)
        self._commands.clear()
        return commands


class SchedulerDriver:
    """Owns the scheduler's state. All methods run on the event loop's thread."""

    def __init__(
        self,
        state: SchedulerState,
        outbox_limit: int,
        gateway_grace_s: float,
        event_log: EventLog | None = None,
    ) -> None:
        self._state = state
        self._event_log = event_log
        self._outbox_limit = outbox_limit
        self._gateway_grace_s = gateway_grace_s
        self._outboxes: dict[int, GatewayOutbox] = {}
        # Ended streams with the end of their grace time, earliest first.
        self._ended_streams: deque[tuple[float, int]] = deque()
        self._next_stream_id = 1
        self._draining = False
        # Set when the demand may have changed; the demand reporter clears it.
        self.changed = asyncio.Event()
        self._groups_serving = 0
        self.snapshot: Snapshot = state.snapshot(monotonic_s())

    async def run(self) -> None:
        """Tick the state machine until cancelled."""
        for tick in count(1):
            await asyncio.sleep(TICK_S)
            now_s = monotonic_s()
            while self._ended_streams and self._ended_streams[0][0] <= now_s:
                _, stream_id = self._ended_streams.popleft()
                self.apply(GatewayGone(now_s, stream_id))
            self.apply(Ticked(now_s))
            self._note_serving(now_s)
            if tick % SNAPSHOT_TICKS == 0:
                self.snapshot = self._state.snapshot(now_s)

    def apply(self, event: Event) -> None:
        """Apply an event, and queue its commands; those for ended streams are discarded."""
        commands = self._state.handle(event)
        # Ticks and load reports change the demand only if they start or end requests.
        if commands or not isinstance(event, Ticked | LoadReported):
            self.changed.set()
        if self._event_log is not None:
            self._event_log.append(EVENT, [event])
            self._event_log.append(COMMAND, commands)
        for command in commands:
            outbox = self._outboxes.get(command.stream_id)
            if outbox is not None:
                outbox.put(command)

    def _note_serving(self, now_s: float) -> None:
        """Send heartbeats at once if more groups serve, because gateways derive readiness from it.

        A decrease may be transient, so it is sent with the next regular heartbeat.
        """
        before, self._groups_serving = self._groups_serving, self._state.groups_serving(now_s)
        if self._groups_serving > before:
            for outbox in self._outboxes.values():
                outbox.request_heartbeat()

    def current_snapshot(self) -> Snapshot:
        """A snapshot of now; the attribute `snapshot` is an older copy for other threads."""
        return self._state.snapshot(monotonic_s())

    def room(self, model: str, worker_id: str, outage: bool) -> OtherRoom:
        """Room for the requests of a worker that shuts down or has an outage."""
        return self._state.room(model, worker_id, outage, monotonic_s())

    def demands(self) -> tuple[ModelDemand, ...]:
        """The current demand per model."""
        return self._state.demands(monotonic_s())

    def late_refusals(self) -> list[LateRefusals]:
        """The latest refusals for lateness, by model and class."""
        return self._state.late_refusals(monotonic_s())

    @contextmanager
    def gateway_stream(self) -> Iterator[GatewayOutbox]:
        """Open the outbox of a new gateway stream; its requests outlive it by the grace time."""
        outbox = GatewayOutbox(self._next_stream_id, self._outbox_limit)
        self._next_stream_id += 1
        self._outboxes[outbox.stream_id] = outbox
        if self._draining:
            outbox.close()
        try:
            yield outbox
        finally:
            outbox.close()
            del self._outboxes[outbox.stream_id]
            # The gateway may reconnect and repeat its asks under the same ids.
            self._ended_streams.append((monotonic_s() + self._gateway_grace_s, outbox.stream_id))

    def drain(self) -> None:
        """End all gateway streams; gateways repeat their asks at another instance."""
        self._draining = True
        for outbox in self._outboxes.values():
            outbox.close()
