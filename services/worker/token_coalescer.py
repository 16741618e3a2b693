"""Coalesces tokens of requests that are not streamed, so that many tokens share an event.

Pure: time is an argument.
"""

from dataclasses import dataclass, field

from tideserve.worker.v1 import worker_pb2 as pb

TOKENS_MAX = 64
"""Number of tokens at which an event is sent."""
AGE_MAX_S = 1.0
"""Maximum delay of a token; the interval between calls of `due` adds to it."""


@dataclass(slots=True)
class _PendingEvent:
    event: pb.RequestEvent
    since_s: float


@dataclass(slots=True)
class TokenCoalescer:
    """Requests whose tokens are coalesced, and their pending events."""

    _ids: set[str] = field(default_factory=set)
    _pending: dict[str, _PendingEvent] = field(default_factory=dict)  # oldest first

    def begin(self, request_id: str) -> None:
        """Coalesce the output of a request from now on."""
        self._ids.add(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended or has a new reader, with its pending event."""
        self._ids.discard(request_id)
        self._pending.pop(request_id, None)

    def add(self, event: pb.RequestEvent, now_s: float) -> list[pb.RequestEvent]:
        """Append `event` to the request's pending event; returns the event to send now, if any.

        `now_s` is in seconds on a monotonic clock.
        """
        request_id = event.request_id
        if request_id not in self._ids:
            return [event]
        pending = self._pending.setdefault(request_id, _PendingEvent(pb.RequestEvent(), now_s))
        if pending.event.request_id:
            _append(pending.event, event)
        else:
            pending.event = event
        if event.finish_reason or len(pending.event.token_ids) >= TOKENS_MAX:
            return self.take(request_id)
        return []

    def take(self, request_id: str) -> list[pb.RequestEvent]:
        """Remove and return the pending event of a request; send it before any later event."""
        pending = self._pending.pop(request_id, None)
        return [pending.event] if pending is not None else []

    def due(self, now_s: float) -> list[pb.RequestEvent]:
        """Remove and return the pending events that are at least `AGE_MAX_S` old."""
        old = [
            request_id
            for request_id, pending in self._pending.items()
            if pending.since_s + AGE_MAX_S <= now_s
        ]
        return [self._pending.pop(request_id).event for request_id in old]


def _append(event: pb.RequestEvent, later: pb.RequestEvent) -> None:
    """Append the tokens and the ending of `later` to `event`."""
    event.token_ids.extend(later.token_ids)
    event.logprobs.extend(later.logprobs)
    event.finish_reason = later.finish_reason
    event.cached_tokens = event.cached_tokens or later.cached_tokens
    if later.HasField("times"):
        event.times.CopyFrom(later.times)
