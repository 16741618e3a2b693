"""Cancels requests by id, on whichever gateway they run."""

import asyncio

import grpc.aio

from services.common.grpc_client import Dial
from services.gateway.bounds.concurrency_limit import ConcurrencyLimit
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.records.request_record import GATEWAY_DIGITS, gateway_of
from services.gateway.serving.running import RunningRequests
from services.gateway.vocabulary.errors import QueueFull, ServiceUnavailable
from tideserve.gateway.v1 import peer_pb2, peer_pb2_grpc

FORWARD_TIMEOUT_S = 5.0
FORWARDS_MAX = 64
"""Concurrent calls to other gateways per owner; further cancels of that owner are refused."""
ALL_FORWARDS_MAX = 256
"""Concurrent calls for all owners; beyond it, an owner without a call may still cancel once."""


class Canceller:
    """Cancels on the gateway encoded in a response id, or on all gateways for a client's id."""

    def __init__(
        self, running: RunningRequests, view: ClusterView, dial: Dial, incarnation: str
    ) -> None:
        """`incarnation` is this gateway's."""
        self._running = running
        self._view = view
        self._dial = dial
        self._incarnation = incarnation
        self._forwards = ConcurrencyLimit(FORWARDS_MAX, ALL_FORWARDS_MAX)

    async def cancel(self, owner: str, request_id: str) -> bool:
        """Cancel all requests of `owner` with this id; returns whether any was running.

        `request_id` is a response id or an id that the client chose.

        Raises:
            QueueFull: if the owner has too many cancels in flight to other gateways.
            ServiceUnavailable: if no request matched and a gateway that may run it is silent.
        """
        cancelled = self._running.cancel(owner, request_id)
        named = gateway_of(request_id)
        # Response ids are unique, so one match is enough; a client may reuse its own ids anywhere.
        if named == self._incarnation[:GATEWAY_DIGITS] or (cancelled and named is not None):
            return cancelled
        others = [
            record.address
            for record in self._view.instances()
            if record.name == "gateway"
            and record.incarnation != self._incarnation
            and (named is None or record.incarnation.startswith(named))
        ]
        if others and self._forwards.full(owner):
            raise QueueFull("too many concurrent cancellations; retry shortly")
        with self._forwards.entered(owner, len(others)):
            answers = await asyncio.gather(
                *(self._forward(address, owner, request_id) for address in others)
            )
        cancelled = cancelled or True in answers
        if not cancelled and None in answers:
            raise ServiceUnavailable("a gateway that may run the request did not respond; retry")
        return cancelled

    async def _forward(self, address: str, owner: str, request_id: str) -> bool | None:
        """Whether the gateway at `address` ran the request; None if it did not respond."""
        request = peer_pb2.EndRequestRequest(owner=owner, request_id=request_id)
        async with self._dial(address, "gateway") as channel:
            stub = peer_pb2_grpc.GatewayPeerServiceStub(channel)
            try:
                return bool((await stub.EndRequest(request, timeout=FORWARD_TIMEOUT_S)).found)
            except grpc.aio.AioRpcError:
                return None
