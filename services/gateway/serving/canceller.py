"""Ends requests by id, at whichever gateway they run."""

import asyncio

import grpc.aio

from services.common.grpc_client import Dial
from services.gateway.bounds.line import Line
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.records.request_record import GATEWAY_DIGITS, gateway_of
from services.gateway.serving.running import RunningRequests
from services.gateway.vocabulary.errors import QueueFull, ServiceUnavailable
from tideserve.gateway.v1 import peer_pb2, peer_pb2_grpc

FORWARD_TIMEOUT_S = 5.0
FORWARDS_MAX = 64
"""Calls to other gateways at a time for one owner; more cancels of the owner are refused."""
ALL_FORWARDS_MAX = 256
"""The same for all owners together; beyond it an owner without one still gets one cancel."""


class Canceller:
    """Cancels at the gateway that the id names; a client's own id names none: all are asked."""

    def __init__(
        self, running: RunningRequests, view: ClusterView, dial: Dial, incarnation: str
    ) -> None:
        """`incarnation`: this gateway's."""
        self._running = running
        self._view = view
        self._dial = dial
        self._incarnation = incarnation
        self._forwards = Line(FORWARDS_MAX, ALL_FORWARDS_MAX)

    async def cancel(self, owner: str, request_id: str) -> bool:
        """End the requests of an owner that have this id; returns whether there was one.

        A request that no gateway has is over, or has never been.

        Raises:
            QueueFull: if its owner cancels too many elsewhere.
            ServiceUnavailable: if none was found, and a gateway that may have one does not answer.
        """
        found = self._running.cancel(owner, request_id)
        named = gateway_of(request_id)
        if named == self._incarnation[:GATEWAY_DIGITS] or (found and named is not None):
            return found
        others = [
            record.address
            for record in self._view.instances()
            if record.name == "gateway"
            and record.incarnation != self._incarnation
            and (named is None or record.incarnation.startswith(named))
        ]
        if others and self._forwards.full(owner):
            raise QueueFull("you cancel many requests at a time; try again shortly")
        with self._forwards.entered(owner, len(others)):
            answers = await asyncio.gather(
                *(self._forward(address, owner, request_id) for address in others)
            )
        found = found or True in answers
        if not found and None in answers:
            raise ServiceUnavailable(
                "a gateway that may have the request does not answer; try again"
            )
        return found

    async def _forward(self, address: str, owner: str, request_id: str) -> bool | None:
        """Whether the gateway had the request; None if it does not answer."""
        request = peer_pb2.EndRequestRequest(owner=owner, request_id=request_id)
        async with self._dial(address, "gateway") as channel:
            stub = peer_pb2_grpc.GatewayPeerServiceStub(channel)
            try:
                return bool((await stub.EndRequest(request, timeout=FORWARD_TIMEOUT_S)).found)
            except grpc.aio.AioRpcError:
                return None
