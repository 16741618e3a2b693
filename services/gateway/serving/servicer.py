"""The gateway's port between services: what every service answers, and what other gateways ask."""

import os
from collections.abc import Callable

import grpc.aio

from services.common.grpc_server import ProcessServicer, Server
from services.common.transport import Transport
from services.gateway.serving.running import RunningRequests
from tideserve.gateway.v1 import peer_pb2, peer_pb2_grpc

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
