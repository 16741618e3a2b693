"""Requests that run at this gateway and can be cancelled, and recent ids that clients chose."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import grpc.aio

from services.common.clock import monotonic_s
from services.common.grpc_server import ProcessServicer, Server
from services.common.transport import Transport
from services.gateway.bounds.interruption import Interruption
from services.gateway.records.request_record import RequestRecord
from services.gateway.vocabulary.errors import CancelledByClient, DuplicateRequest
from tideserve.gateway.v1 import peer_pb2, peer_pb2_grpc

REMEMBERED_MAX = 100_000
REMEMBER_S = 600.0

Key = tuple[str, str]
"""Owner and id: an owner can neither cancel nor block requests of other owners."""


class RunningRequests:
    """What runs, by each of its ids: its response's, the one in its body, the one in a header.

    The two that clients give differ in one thing. The field `request_id` is good once: it is
    refused for `REMEMBER_S` from its request's beginning, so that a request that is sent twice runs
    once; unless no token came of it, since then it can be sent again. The oldest of more than
    `REMEMBERED_MAX` ids are forgotten earlier. Other gateways do not know them. The header
    `x-request-id` is good for many, since proxies and agents send one id with every request that
    they make for one of their own.
    """

    def __init__(
        self, remembered_max: int = REMEMBERED_MAX, now_s: Callable[[], float] = monotonic_s
    ) -> None:
        self._remembered_max = remembered_max
        self._now_s = now_s
        self._running: dict[Key, list[Interruption]] = {}
        # When requests with chosen ids began, in that order.
        self._began_s: dict[Key, float] = {}
        self._claimed: set[Key] = set()

    @contextlib.contextmanager
    def entered(
        self, record: RequestRecord, chosen_id: str | None, interruption: Interruption
    ) -> Iterator[None]:
        """Count a request in, and out at the end; it is interrupted when it is cancelled.

        Raises:
            DuplicateRequest: if its client chose the id for another one a short time ago.
        """
        owner = record.principal.owner
        # Until its body has been read, what it is called is its header's id.
        ids = {record.response_id, record.request_id}
        if chosen_id is None:
            with self._registered([(owner, one) for one in ids], interruption):
                yield
            return
        ids.add(chosen_id)
        with (
            self._claim((owner, chosen_id), record),
            self._registered([(owner, one) for one in ids], interruption),
        ):
            yield

    def cancel(self, owner: str, request_id: str) -> bool:
        """End the requests of an owner that have this id; returns whether there was one here."""
        found = self._running.get((owner, request_id), ())
        for interruption in found:
            interruption.interrupt(
                CancelledByClient("the request was cancelled; send it again for another answer")
            )
        return bool(found)

    @contextlib.contextmanager
    def _registered(self, keys: Sequence[Key], interruption: Interruption) -> Iterator[None]:
        for key in keys:
            self._running.setdefault(key, []).append(interruption)
        try:
            yield
        finally:
            for key in keys:
                listed = self._running[key]
                listed.remove(interruption)
                if not listed:
                    del self._running[key]

    @contextlib.contextmanager
    def _claim(self, key: Key, record: RequestRecord) -> Iterator[None]:
        """Hold a chosen id while its request runs, and remember it if tokens came."""
        now_s = self._now_s()
        self._forget(now_s)
        if key in self._began_s or key in self._claimed:
            raise DuplicateRequest(
                "a request with this 'request_id' was sent less than"
                f" {REMEMBER_S / 60:g} minutes ago; choose another id for another request",
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
        """Drop ids that are too old, and the oldest ones if there are too many."""
        while self._began_s:
            key, began_s = next(iter(self._began_s.items()))
            if now_s - began_s < REMEMBER_S and len(self._began_s) < self._remembered_max:
                return
            del self._began_s[key]


HEALTH_NAME = "tideserve.gateway.v1.GatewayService"
PEER_SERVICE = "tideserve.gateway.v1.GatewayPeerService"


class PeerServicer(peer_pb2_grpc.GatewayPeerServiceServicer):
    """Ends requests for other gateways, which have authenticated the caller."""

    def __init__(self, running: RunningRequests) -> None:
        self._running = running

    async def EndRequest(
        self,
        request: peer_pb2.EndRequestRequest,
        context: grpc.aio.ServicerContext[peer_pb2.EndRequestRequest, peer_pb2.EndRequestResponse],
    ) -> peer_pb2.EndRequestResponse:
        found = self._running.cancel(request.owner, request.request_id)
        return peer_pb2.EndRequestResponse(found=found)


def internal_server(
    host: str, port: int, ready: Callable[[], bool], transport: Transport, running: RunningRequests
) -> Server:
    """A server, not started yet; `ready` tells whether the cluster accepts requests."""
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
