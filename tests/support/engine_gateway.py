"""The gateway of an `EngineGroup`: it resumes requests that lost their leader after their tokens.

A request is resumed under the same id at any leader, while its first sequence may still run, move,
or be adopted by a leader without a reader. As in the worker's servicer, readers follow redirects,
and requests without a reader are aborted after a while.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from services.core.planner.events import (
    EmitToken,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.request import Request
from services.gateway.serving.retry import resumed
from services.worker.ipc import AdoptedRequest, MovedRequest

if TYPE_CHECKING:
    from tests.support.engine_group import EngineGroup, Stream

EXPIRES = 0.05
"""Probability per check that a request without a reader is aborted."""

Place = tuple[str, str]
"""A worker and a request."""


@dataclass
class Unread:
    """An adopted request without a reader; `moved_to`: the worker it has moved to since."""

    adopted: AdoptedRequest
    tokens: list[EmitToken] = field(default_factory=list)
    moved_to: str = ""


class EngineGateway:
    """The gateway of an `EngineGroup`. Unless it `asks_again`, requests of a lost engine end.

    Unless it `resumes`, requests with tokens end as well. It selects a random leader, or, if it
    `balances`, the leader with the fewest streams, as the scheduler would. Counters: `asked`
    retries, `resumed` retries with tokens, `returned` requests, and `shipped`: returned requests
    that continued at the worker with their KV. `again`: ids of retried requests.
    """

    def __init__(self, group: "EngineGroup") -> None:
        self.asks_again = False
        self.resumes = False
        self.balances = False
        self.asked = 0
        self.resumed = 0
        self.returned = 0
        self.shipped = 0
        self.again: set[str] = set()
        self._group = group
        self._lost: set[str] = set()  # to be retried
        self._unread: dict[Place, Unread] = {}
        self._left: set[Place] = set()  # their worker does not yet know that the reader is gone

    def actions(self) -> list[Callable[[], bool]]:
        """Possible next steps."""
        actions: list[Callable[[], bool]] = [
            partial(self._ask, name) for name in sorted(self._lost)
        ]
        actions += [partial(self._expire, place) for place in sorted({*self._left, *self._unread})]
        return actions

    def to_ask_for(self, leaders: Collection[str]) -> list[str]:
        """Those of `leaders` whose requests it would retry, repeated per request."""
        streams, owner = self._group.streams, self._group.owner
        return [
            owner[name]
            for name, stream in streams.items()
            if owner[name] in leaders and self.would_ask(stream)
        ]

    def would_ask(self, stream: "Stream") -> bool:
        """Whether it would retry a request that lost its leader."""
        return not stream.over and (self.resumes or not stream.tokens)

    def outgoing(self, request: Request) -> Request:
        """A request as the gateway sends it to a worker."""
        return replace(request, resumable=self.resumes)

    def hang_up(self, request_id: str) -> None:
        """Break the connection to a request's leader, which learns of it later."""
        self._left.add((self._group.owner[request_id], request_id))
        self._lose(request_id)

    def lose(self, worker_id: str) -> None:
        """Drop the readers of a dead worker."""
        group = self._group
        for place in [place for place in (*self._unread, *self._left) if place[0] == worker_id]:
            self._unread.pop(place, None)
            self._left.discard(place)
        for request_id, stream in group.streams.items():
            if group.owner[request_id] != worker_id or stream.over:
                continue
            if self.would_ask(stream):
                self._lose(request_id)
            else:
                stream.aborted = True

    def abort(self, request_id: str) -> bool:
        """Abort a request; False if the caller must notify the leader."""
        self._lost.discard(request_id)
        return self._group.owner[request_id] not in self._group.engines

    def adopted(self, worker_id: str, adopted: AdoptedRequest) -> bool:
        """Note an adopted request; False if its reader attaches at once."""
        request_id = adopted.request_id
        if not self.asks_again:
            return False
        self._unread[worker_id, request_id] = Unread(adopted)
        return True

    def token(self, worker_id: str, token: EmitToken) -> bool:
        """Keep a token without a reader; False if its stream has one."""
        place = worker_id, token.request_id
        if place in self._unread:
            self._unread[place].tokens.append(token)
            return True
        return place in self._left

    def refused(self, worker_id: str, refusal: RefuseRequest) -> bool:
        """Whether a refused request has no reader or is retried."""
        request_id = refusal.request_id
        place = worker_id, request_id
        known = place in self._left or self._unread.pop(place, None) is not None
        self._left.discard(place)
        if known or not refusal.returned or self._group.owner[request_id] != worker_id:
            return known
        self.returned += 1
        self._lose(request_id)
        if refusal.go_to is not None and refusal.go_to.worker_id in self._group.engines:
            self.shipped += 1
            self._start_at(request_id, refusal.go_to.worker_id)
        return True

    def moved(self, worker_id: str, moved: MovedRequest) -> None:
        """Redirect the reader of a request to its new owner."""
        place = worker_id, moved.request_id
        if place in self._unread:
            self._unread[place].moved_to = moved.worker_id
        elif place in self._left:
            self._left.remove(place)
            self._give_up((moved.worker_id, moved.request_id))
        elif self.asks_again and self._group.owner[moved.request_id] == worker_id:
            self._send_to(moved.request_id, moved.worker_id)

    def _send_to(self, request_id: str, worker_id: str) -> None:
        """Attach a reader at the worker that adopted its request, if that still has it."""
        group, place = self._group, (worker_id, request_id)
        group.owner[request_id] = ""
        unread = self._unread.pop(place, None)
        if unread is None:
            if group.streams[request_id].tokens and not self.resumes:
                group.streams[request_id].aborted = True
            else:
                self._lose(request_id)
            return
        group.take_over(worker_id, unread.adopted)
        for token in unread.tokens:
            group.note_token(worker_id, token)
        if unread.moved_to:
            self._send_to(request_id, unread.moved_to)

    def _lose(self, request_id: str) -> None:
        self._lost.add(request_id)
        self._group.owner[request_id] = ""

    def _ask(self, request_id: str) -> bool:
        """Retry a request at a leader, with its tokens so far."""
        group = self._group
        if not group.groups:
            return False  # wait until a group serves
        self._start_at(request_id, self._leader())
        return True

    def _start_at(self, request_id: str, leader: str) -> None:
        """Start a request at a leader, with its tokens so far."""
        group = self._group
        self._lost.discard(request_id)
        place = leader, request_id
        member = group.engines[leader].member
        unread = self._unread.pop(place, None)
        # The servicer aborts an earlier sequence first, unless its adoption is not yet known.
        if place in self._left or (unread is not None and group.rng.random() < 0.5):
            self._left.discard(place)
            member.handle(RequestAborted(group.now_s, request_id))
        group.owner[request_id] = leader
        self.asked += 1
        self.again.add(request_id)
        stream = group.streams[request_id]
        self.resumed += bool(stream.tokens)
        request = resumed(self.outgoing(stream.request), tuple(stream.tokens))
        member.handle(RequestArrived(group.now_s, request))

    def _leader(self) -> str:
        group = self._group
        if not self.balances:
            return group.rng.choice(group.groups)[0].worker_id
        load = Counter(
            group.owner[name] for name, stream in group.streams.items() if not stream.over
        )
        return min((stages[0].worker_id for stages in group.groups), key=lambda name: load[name])

    def _expire(self, place: Place) -> bool:
        """A worker detects that a request has no reader."""
        if self._group.rng.random() > EXPIRES:
            return False
        self._give_up(place)
        return True

    def _give_up(self, place: Place) -> None:
        worker_id, request_id = place
        unread = self._unread.pop(place, None)
        self._left.discard(place)
        if unread is not None and unread.moved_to:
            return
        if self._group.owner[request_id] != worker_id and worker_id in self._group.engines:
            member = self._group.engines[worker_id].member
            member.handle(RequestAborted(self._group.now_s, request_id))
