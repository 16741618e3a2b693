"""Tracks running requests by id, to cancel them and to refuse duplicates."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import grpc.aio

from services.common.clock import monotonic_s
from services.common.grpc_server import ProcessServicer, Server
from services.common.transport import Transport
from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.records.request_record import RequestRecord
from services.gateway.vocabulary.errors import CancelledByClient, DuplicateRequest
from tideserve.gateway.v1 import peer_pb2, peer_pb2_grpc

REMEMBERED_MAX = 100_000
"""Maximum `request_id`s of clients that are kept."""
REMEMBER_S = 600.0
"""Seconds after the start of a request in which another request with its id is refused."""

Key = tuple[str, str]
"""Owner and id, so that an owner can neither cancel nor block requests of other owners."""


class RunningRequests:
    """Running requests by each of their ids: response id, body field and header.

    A body's `request_id` may be used once in `REMEMBER_S`, from the start of its request, so that
    a request that a client sends twice runs once. If the request ends without a token, its id may
    be used again at once. At most `REMEMBERED_MAX` ids are kept; the oldest are evicted first.
    Gateways do not share them.

    The header `x-request-id` may be reused, because proxies and agents send the id of the request
    that they serve with every request that it causes.
    """

    def __init__(
        self, remembered_max: int = REMEMBERED_MAX, now_s: Callable[[], float] = monotonic_s
    ) -> None:
        self._remembered_max = remembered_max
        self._now_s = now_s
        self._running: dict[Key, list[CancelScope]] = {}
        # Start times of requests with a `request_id` in their body, oldest first.
        self._began_s: dict[Key, float] = {}
        self._claimed: set[Key] = set()  # of these, the running requests

    @contextlib.contextmanager
    def entered(
        self, record: RequestRecord, chosen_id: str | None, cancel_scope: CancelScope
    ) -> Iterator[None]:
        """Register a request inside the `with` block; `cancel_scope` fires if it is cancelled.

        `chosen_id`: the field `request_id` of its body.

        Raises:
            DuplicateRequest: if its owner used `chosen_id` for another request recently.
        """
        owner = record.principal.owner
        # `record.client_request_id` is still the header's id; `Preparer` sets the body's id later.
        ids = {record.response_id, record.client_request_id}
        if chosen_id is None:
            with self._registered([(owner, request_id) for request_id in ids], cancel_scope):
                yield
            return
        ids.add(chosen_id)
        with (
            self._claim((owner, chosen_id), record),
            self._registered([(owner, request_id) for request_id in ids], cancel_scope),
        ):
            yield

    def cancel(self, owner: str, request_id: str) -> bool:
        """Cancel the requests of `owner` with this id; returns whether any was running here."""
        matches = self._running.get((owner, request_id), ())
        for cancel_scope in matches:
            cancel_scope.cancel(
                CancelledByClient("the request was cancelled; send it again for another answer")
            )
        return bool(matches)

    @contextlib.contextmanager
    def _registered(self, keys: Sequence[Key], cancel_scope: CancelScope) -> Iterator[None]:
        for key in keys:
            self._running.setdefault(key, []).append(cancel_scope)
        try:
            yield
        finally:
            for key in keys:
                listed = self._running[key]
                listed.remove(cancel_scope)
                if not listed:
                    del self._running[key]

    @contextlib.contextmanager
    def _claim(self, key: Key, record: RequestRecord) -> Iterator[None]:
        """Reserve a `request_id` while its request runs; keep it afterwards if there was output."""
        now_s = self._now_s()
        self._forget(now_s)
        if key in self._began_s or key in self._claimed:
            raise DuplicateRequest(
                "a request with this 'request_id' was sent less than"
                f" {REMEMBER_S / 60:g} minutes ago; use a new id for each request",
                param="request_id",
            )
        self._began_s[key] = now_s
        self._claimed.add(key)
        try:
            yield
        finally:
            self._claimed.discard(key)
            if record.first_token_s is None:
                self._began_s.pop(key, None)

    def _forget(self, now_s: float) -> None:
        """Evict expired ids, and the oldest ids beyond the limit."""
        while self._began_s:
            key, began_s = next(iter(self._began_s.items()))
            if now_s - began_s < REMEMBER_S and len(self._began_s) < self._remembered_max:
                return
            del self._began_s[key]


HEALTH_NAME = "tideserve.gateway.v1.GatewayService"
PEER_SERVICE = "tideserve.gateway.v1.GatewayPeerService"


class PeerServicer(peer_pb2_grpc.GatewayPeerServiceServicer):
    """Cancels requests on behalf of other gateways, which have authenticated the client."""

    def __init__(self, running: RunningRequests) -> None:
        self._running = running

    async def EndRequest(
        self,
        request: peer_pb2.EndRequestRequest,
        context: grpc.aio.ServicerContext[peer_pb2.EndRequestRequest, peer_pb2.EndRequestResponse],
    ) -> peer_pb2.EndRequestResponse:
        cancelled = self._running.cancel(request.owner, request.request_id)
        return peer_pb2.EndRequestResponse(found=cancelled)


def internal_server(
    host: str, port: int, ready: Callable[[], bool], transport: Transport, running: RunningRequests
) -> Server:
    """The gateway's server for other services, not started; `ready` reports its readiness."""
    process = ProcessServicer("gateway", lambda: (os.getpid(),), ready)
    server = Server(
        host,
        port,
        process,
        services=(PEER_SERVICE,),
        health_names=(HEALTH_NAME,),
        transport=transport,
    )
    peer_pb2_grpc.add_GatewayPeerServiceServicer_to_server(PeerServicer(running), server.services)
    return server
