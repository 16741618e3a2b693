"""The gRPC server of every service, with health, reflection and ProcessService.

The port opens when the process starts, so that a probe can distinguish a process that loads its
model from a dead process. Servicers may be added later; until then their calls are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.address import join_address
from services.common.errors import ConfigError
from services.common.grpc_client import MESSAGE_BYTES_MAX
from services.common.health import HealthServicer
from services.common.transport import Transport
from tideserve.common.v1 import process_pb2, process_pb2_grpc

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Accept the keepalive pings of `grpc_client` channels, which the defaults treat as abuse.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A second process on the same port must fail instead of sharing its calls.
    ("grpc.so_reuseport", 0),
)


async def accept_stream(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Answer a call whose only message comes at its end; call it before reading requests.

    Until it has an answer, the client's gRPC keeps all requests for a retry, up to 256 KiB of
    messages: about 500 bytes for a report of 100.
    """
    await context.send_initial_metadata(())


class ProcessServicer(process_pb2_grpc.ProcessServiceServicer):
    """Reports pids, memory and readiness of this process."""

    def __init__(
        self, name: str, pids: Callable[[], Sequence[int]], ready: Callable[[], bool]
    ) -> None:
        self._name = name
        self._pids = pids
        self._ready = ready

    @property
    def ready(self) -> bool:
        """Whether this instance accepts work now."""
        return self._ready()

    async def GetProcess(
        self,
        request: process_pb2.GetProcessRequest,
        context: grpc.aio.ServicerContext[
            process_pb2.GetProcessRequest, process_pb2.GetProcessResponse
        ],
    ) -> process_pb2.GetProcessResponse:
        return self.describe()

    def describe(self) -> process_pb2.GetProcessResponse:
        """The answer to GetProcess."""
        pids = list(self._pids())
        return process_pb2.GetProcessResponse(
            name=self._name,
            pids=pids,
            rss_bytes=sum(map(resident_bytes, pids)),
            ready=self.ready,
        )


def resident_bytes(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class LateServices(grpc.GenericRpcHandler):
    """Services that may be added to a running server.

    Generated `add_…Servicer_to_server` functions accept it as a server. Calls of a service in
    `expected` fail with UNAVAILABLE until it is added.
    """

    def __init__(self, expected: Sequence[str]) -> None:
        self._expected = frozenset(expected)
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Do nothing, as generated code also registers the same handlers by method."""

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Any]) -> None:
        """Serve the methods of the service `name`."""
        self._handlers |= {f"/{name}/{method}": handler for method, handler in handlers.items()}

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call; None for an unknown method."""
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        name = method.removeprefix("/").partition("/")[0]
        if name in self._expected and not any(
            known.startswith(f"/{name}/") for known in self._handlers
        ):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return None


async def _refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the service is starting; retry shortly")


class Server:
    """A gRPC server on `host` at `port` (0: any free port).

    `services` are the full names of its services; their servicers are added to the attribute
    `services`, before or after `start`. The health service reports the process's readiness for each
    of them, and for `health_names`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        process: ProcessServicer,
        services: Sequence[str] = (),
        health_names: Sequence[str] = (),
        transport: Transport | None = None,
    ) -> None:
        """`transport`: mutual TLS or plain text; None: plain text."""
        self._transport = transport or Transport()
        self._host = host
        self._port = port
        self._names = tuple(services)
        self._health = HealthServicer((*services, *health_names), lambda: process.ready)
        self._grpc = grpc.aio.server(
            interceptors=self._transport.interceptors, options=SERVER_OPTIONS
        )
        late = LateServices(services)
        self._grpc.add_generic_rpc_handlers((late,))
        # Generated code adds its handlers to this object as if it were the server.
        self.services: Any = late
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        process_pb2_grpc.add_ProcessServiceServicer_to_server(process, self._grpc)
        self.port = 0
        self.address = ""

    async def start(self) -> None:
        """Bind and serve; afterwards `port` is the bound port, and `address` its host:port.

        Raises:
            ConfigError: if the port cannot be bound.
        """
        names = (*self._names, "tideserve.common.v1.ProcessService", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        wanted = join_address(self._host, self._port)
        try:
            self.port = self._transport.add_port(self._grpc, wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {wanted}; if it is in use, choose another port"
            ) from error
        await self._grpc.start()
        self.address = join_address(self._host, self.port)

    def drain(self) -> None:
        """Make health checks fail, so that no new work arrives; calls are still served."""
        self._health.drain()

    async def stop(self, grace_s: float) -> None:
        """Stop the server; running calls may take `grace_s`."""
        self._health.close()
        await self._grpc.stop(grace_s)
