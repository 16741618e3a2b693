"""The gateway of a `JoinedWorld`: it streams from leaders, and resumes lost requests elsewhere.

Real: `TokenStream`, `Journal`, `RetryState`, `resumed`, the frames. Modelled: the dispatcher, a
random choice of leader, and links, which are queues that the world drains.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from services.core.ask import Assignment
from services.core.request import FinishReason, Request
from services.gateway.cluster.journal import Journal, JournalError
from services.gateway.cluster.token_stream import Returned, StaleEpoch, TokenStream
from services.gateway.cluster.translate_worker import (
    abort_frame,
    attach_frame,
    start_frame,
    token_events,
)
from services.gateway.records.request_record import ChoiceRecord, WorkerSegment
from services.gateway.serving.retry import Failure, RetryState, resumed
from services.gateway.vocabulary.errors import GatewayError, QueueFull, WorkerLost
from services.gateway.vocabulary.message import Finish, Moved, TokenEvent, UnreadTokens
from services.worker.gateway_stream import GatewayStream
from tests.support.engine_group import Stream
from tests.support.group_store import Violated
from tests.support.joined_worker import WorkerProcess, run_now
from tideserve.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from tests.support.joined_world import JoinedWorld

ATTACH_TIMEOUT_S = 12.0
REATTACH_S = 0.2
AVOID_S = 1.0
"""How long a lost worker receives no requests."""
_REASONS = {Finish.STOP: FinishReason.STOP, Finish.LENGTH: FinishReason.LENGTH}


@dataclass(eq=False)
class GatewayLink:
    """The stream to a worker process: frames for it, and the requests on it."""

    address: str
    process: WorkerProcess
    frames: deque[pb.GenerateRequest] = field(default_factory=deque)
    requests: dict[str, "Client"] = field(default_factory=dict)


@dataclass(eq=False)
class Client:
    """A client's request. `tokens` is None while unassigned; `moved`: the owner to attach to.

    `lost`: workers lost since its last token.
    """

    stream: Stream
    attempts: RetryState
    journal: Journal
    record: ChoiceRecord = field(default_factory=ChoiceRecord)
    tokens: TokenStream | None = None
    address: str = ""
    epoch: int = 0
    moved: Moved | None = None
    attach_until_s: float = 0.0
    attach_at_s: float | None = None  # the next attempt, after a lost link
    progressed_s: float = 0.0
    lost: int = 0

    @property
    def request_id(self) -> str:
        return self.stream.request.request_id


async def _one(frame: pb.GenerateRequest) -> AsyncIterator[pb.GenerateRequest]:
    yield frame


class JoinedGateway:
    """All clients, and a link to each process with a request."""

    def __init__(self, world: "JoinedWorld", resumes: bool = True) -> None:
        self.clients: dict[str, Client] = {}
        self.resumed = 0
        self.returned = 0
        self._world = world
        self._resumes = resumes
        self._links: dict[str, GatewayLink] = {}  # by address
        self._avoided: dict[str, float] = {}  # avoided until this time

    # --- clients

    def start(self, request: Request) -> None:
        """Submit a client's request."""
        client = Client(
            Stream(request), RetryState(self._resumes), Journal(request.limits.max_tokens)
        )
        client.progressed_s = self._world.now_s
        self.clients[request.request_id] = client

    def abort(self, client: Client) -> None:
        """Abort a client's request."""
        client.stream.aborted = True
        client.moved = client.attach_at_s = None
        if client.tokens is not None:
            client.tokens = None
            self._send(client.address, abort_frame(client.request_id))
            self._drop(client)

    @property
    def open(self) -> list[Client]:
        """Clients whose requests have not ended."""
        return [client for client in self.clients.values() if not client.stream.over]

    # --- possible next steps

    def actions(self) -> list[Callable[[], bool]]:
        """Deliveries of frames in both directions, and assignments of requests."""
        actions: list[Callable[[], bool]] = []
        for link in self._links.values():
            if link.process.stands:
                continue
            if link.frames:
                actions.append(partial(self._deliver, link))
            if not link.process.link.outbox.empty():
                actions.append(partial(self._read, link))
        places = None
        for client in self.open:
            if client.tokens is None:
                places = self.places() if places is None else places
                if places:
                    actions.append(partial(self._place, client, places))
        return actions

    def pass_time(self) -> None:
        """Retry or abandon attaching."""
        now_s = self._world.now_s
        for client in self.open:
            if client.tokens is None or client.tokens.attached or client.moved is None:
                continue
            if now_s > client.attach_until_s:
                self._send(client.moved.address, abort_frame(client.request_id))
                client.tokens.fail(WorkerLost("the worker that took it over is silent"))
                self._take_news(client)
            elif client.attach_at_s is not None and now_s >= client.attach_at_s:
                client.attach_at_s = None
                self._attach(client, client.moved)

    def lose(self, process: WorkerProcess) -> None:
        """Break the link to a process, which drops the link's requests if it is alive."""
        link = self._links.get(process.name)
        if link is not None and link.process is process:
            del self._links[process.name]
            self._avoided[process.name] = self._world.now_s + AVOID_S
            self._lose_requests(link)
        if self._world.processes.get(process.name) is process:
            process.requests._open.discard(process.link)
            process.requests._abandon(process.link)
            process.link = GatewayStream()
            process.requests._open.add(process.link)

    def drain(self, process: WorkerProcess) -> None:
        """Read all frames that a process sent before it ended."""
        link = self._links.get(process.name)
        while link is not None and link.process is process and not process.link.outbox.empty():
            self._read(link)

    def _lose_requests(self, link: GatewayLink) -> None:
        for client in list(link.requests.values()):
            assert client.tokens is not None
            client.tokens.lose(WorkerLost("the worker of this request was lost"))
            client.attach_at_s = self._world.now_s + REATTACH_S
            self._take_news(client)

    def places(self) -> list[tuple[str, str, int]]:
        """Worker, group and epoch of all leaders that accept requests now."""
        now_s, registered = self._world.now_s, self._world.control.store.workers
        leaders = []
        for name, process in sorted(self._world.processes.items()):
            place = process.place
            if process.stands or place is None or not place.leads:
                continue
            if name not in registered or registered[name].incarnation != process.incarnation:
                continue
            if self._avoided.get(name, 0.0) <= now_s:
                leaders.append((name, place.group_id, place.epoch))
        return leaders

    # --- assignment

    def _place(self, client: Client, places: list[tuple[str, str, int]]) -> bool:
        name, group_id, epoch = self._world.rng.choice(places)
        journal, now_s = client.journal, self._world.now_s
        request = replace(client.stream.request, resumable=self._resumes)
        request = resumed(request, tuple(journal.token_ids))
        self.resumed += bool(request.output_ids)
        place = Assignment(request.request_id, group_id, epoch, name, name)
        client.record.segments.append(
            WorkerSegment(name, group_id, epoch, now_s, first_index=len(journal.token_ids))
        )
        client.tokens = TokenStream(journal, client.record)
        client.epoch, client.moved, client.attach_at_s = epoch, None, None
        self._carry(client, name, start_frame(request, place, now_s))
        return True

    def _carry(self, client: Client, address: str, frame: pb.GenerateRequest) -> None:
        self._drop(client)
        client.address = address
        link = self._send(address, frame)
        if link is not None:
            link.requests[client.request_id] = client
            return
        assert client.tokens is not None
        self._avoided[address] = self._world.now_s + AVOID_S
        client.tokens.lose(WorkerLost("the worker cannot be reached"))
        client.attach_at_s = self._world.now_s + REATTACH_S
        self._take_news(client)

    def _drop(self, client: Client) -> None:
        link = self._links.get(client.address)
        if link is not None:
            link.requests.pop(client.request_id, None)

    def _send(self, address: str, frame: pb.GenerateRequest) -> GatewayLink | None:
        """Queue a frame; None if no process listens there."""
        link, process = self._links.get(address), self._world.processes.get(address)
        if link is None and process is not None:
            link = self._links[address] = GatewayLink(address, process)
        if link is not None:
            link.frames.append(frame)
        return link

    def _deliver(self, link: GatewayLink) -> bool:
        frame = link.frames.popleft()
        run_now(link.process.requests._read(_one(frame), link.process.link))
        return True

    def _read(self, link: GatewayLink) -> bool:
        response = link.process.link.outbox.get_nowait()
        for event in token_events(response):
            client = link.requests.get(event.request_id)
            if client is not None:
                self._apply(client, event)
            if event.moved is not None:
                self._follow(link, event.request_id, event.moved)
        return True

    def _apply(self, client: Client, event: TokenEvent) -> None:
        assert client.tokens is not None
        try:
            client.tokens.apply(event)
        except JournalError as error:
            raise Violated(f"I8: {client.request_id} at {client.address}: {error}") from error
        client.progressed_s = self._world.now_s
        self._take_news(client)

    def _follow(self, link: GatewayLink, request_id: str, moved: Moved) -> None:
        """Follow a redirect of the worker of `link`, as `WorkerClient` does."""
        client = self.clients[request_id]
        tokens = client.tokens
        if tokens is None or tokens.over:
            self._send(moved.address, abort_frame(request_id))
            return
        newer = not tokens.attached and moved.epoch > client.epoch
        if self._links.get(client.address) is not link and not newer:
            return
        segment = WorkerSegment(moved.worker_id, moved.group_id, moved.epoch, self._world.now_s)
        client.record.segments.append(segment)
        client.epoch, client.moved = moved.epoch, moved
        client.attach_until_s = self._world.now_s + ATTACH_TIMEOUT_S
        tokens.move()
        self._attach(client, moved)

    def _attach(self, client: Client, moved: Moved) -> None:
        assert client.tokens is not None
        index = client.tokens.next_index
        self._carry(client, moved.address, attach_frame(client.request_id, moved, index))

    # --- output

    def _take_news(self, client: Client) -> None:
        """Read new tokens, as `ChoiceRunner` does."""
        tokens = client.tokens
        while tokens is not None and (tokens.over or tokens.read_index < tokens.next_index):
            try:
                fresh = run_now(tokens.next())
            except (StaleEpoch, Returned, WorkerLost, QueueFull) as failure:
                self._start_again(client, failure)
                return
            self._note(client, fresh)
            if fresh.finish is not None:
                client.stream.finish_reason = _REASONS[fresh.finish]
                client.tokens = None
                self._drop(client)
                return

    def _note(self, client: Client, fresh: UnreadTokens) -> None:
        stream = client.stream
        if fresh.prompt_logprobs and not stream.tokens:
            stream.prompt_logprobs = list(fresh.prompt_logprobs)
        stream.tokens += fresh.token_ids
        if fresh.token_ids:
            client.lost = 0
        stream.logprobs += fresh.logprobs

    def _start_again(self, client: Client, failure: Failure) -> None:
        client.tokens = client.moved = client.attach_at_s = None
        self._drop(client)
        output, limit = len(client.journal.token_ids), client.stream.request.limits.max_tokens
        self._world.note(f"{client.request_id} failed at {client.address}: {failure!r}")
        client.lost += isinstance(failure, (WorkerLost, QueueFull))
        self.returned += isinstance(failure, Returned)
        try:
            client.attempts.fail(failure, output, limit)
        except (GatewayError, QueueFull) as error:
            client.stream.refused = f"{type(error).__name__}: {error}"
