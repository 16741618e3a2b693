"""Output of requests that nobody watches, gathered so that many tokens travel in one event.

Pure: time is an argument.
"""

from dataclasses import dataclass, field

from tideserve.worker.v1 import worker_pb2 as pb

TOKENS_MAX = 64
"""Tokens of a request that are sent as soon as they are there."""
AGE_MAX_S = 1.0
"""The oldest token of a request waits so long at most, and the time between two looks."""


@dataclass(slots=True)
class _Held:
    event: pb.RequestEvent
    since_s: float


@dataclass(slots=True)
class TokenCoalescer:
    """The gathered requests, and their tokens that have not been sent."""

    _ids: set[str] = field(default_factory=set)
    # In the order of age.
    _held: dict[str, _Held] = field(default_factory=dict)

    def begin(self, request_id: str) -> None:
        """Gather the output of a request from now on."""
        self._ids.add(request_id)

    def drop(self, request_id: str) -> None:
        """The request is over or has another reader: what is held is not sent."""
        self._ids.discard(request_id)
        self._held.pop(request_id, None)

    def add(self, event: pb.RequestEvent, now_s: float) -> list[pb.RequestEvent]:
        """What is to be sent now that `event` came, which follows what is held: one event or none.

        `now_s` in seconds, on any clock that does not go back.
        """
        request_id = event.request_id
        if request_id not in self._ids:
            return [event]
        held = self._held.setdefault(request_id, _Held(pb.RequestEvent(), now_s))
        if held.event.request_id:
            _append(held.event, event)
        else:
            held.event = event
        if event.finish_reason or len(held.event.token_ids) >= TOKENS_MAX:
            return self.take(request_id)
        return []

    def take(self, request_id: str) -> list[pb.RequestEvent]:
        """What is held of a request, to be sent before anything else of it: one event or none."""
        held = self._held.pop(request_id, None)
        return [held.event] if held is not None else []

    def due(self, now_s: float) -> list[pb.RequestEvent]:
        """What has been held long enough."""
        old = [one for one, held in self._held.items() if held.since_s + AGE_MAX_S <= now_s]
        return [self._held.pop(request_id).event for request_id in old]


def _append(event: pb.RequestEvent, later: pb.RequestEvent) -> None:
    """Add the tokens and the ending of the event that follows `event` to it."""
    event.token_ids.extend(later.token_ids)
    event.logprobs.extend(later.logprobs)
    event.finish_reason = later.finish_reason
    if later.HasField("times"):
        event.times.CopyFrom(later.times)
