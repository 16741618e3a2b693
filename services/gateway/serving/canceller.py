"""Cancels requests of a client, on this gateway or, by a call, on other gateways.

Terms: owner = the tenant, to whom the API key belongs; incarnation = random id of a gateway
process, whose first digits are part of each response id.
"""

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
"""Concurrent calls to other gateways per owner; further cancellations of the owner are refused."""
ALL_FORWARDS_MAX = 256
"""Concurrent calls for all owners; at this limit, only an owner without a running call may call."""


class Canceller:
    """Cancels a response id on the gateway whose digits it has, a client's id on all gateways."""

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
        digits = gateway_of(request_id)
        # A response id (with gateway digits) is unique: do not ask other gateways after a match.
        # A client may use its own id for requests at several gateways.
        if digits == self._incarnation[:GATEWAY_DIGITS] or (cancelled and digits is not None):
            return cancelled
        others = [
            record.address
            for record in self._view.instances()
            if record.name == "gateway"
            and record.incarnation != self._incarnation
            and (digits is None or record.incarnation.startswith(digits))
        ]
        if others and self._forwards.full(owner):
            raise QueueFull("too many concurrent cancellations; retry shortly")
        with self._forwards.entered(owner, len(others)):
            results = await asyncio.gather(
                *(self._forward(address, owner, request_id) for address in others)
            )
        cancelled = cancelled or True in results
        if not cancelled and None in results:
            raise ServiceUnavailable("a gateway that may run the request did not respond; retry")
        return cancelled

    async def _forward(self, address: str, owner: str, request_id: str) -> bool | None:
        """Cancel at the gateway at `address`.

        Returns whether the request ran there, None if the gateway did not respond.
        """
        request = peer_pb2.EndRequestRequest(owner=owner, request_id=request_id)
        async with self._dial(address, "gateway") as channel:
            stub = peer_pb2_grpc.GatewayPeerServiceStub(channel)
            try:
                return bool((await stub.EndRequest(request, timeout=FORWARD_TIMEOUT_S)).found)
            except grpc.aio.AioRpcError:
                return None
