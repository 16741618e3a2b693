"""The gRPC server that every service runs: health, reflection and ProcessService included.

The port is open from the start of the process, so that a probe can tell one that loads its model
from one that is dead. Servicers may be added later; until then their calls are refused.
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
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
)


class ProcessServicer(process_pb2_grpc.ProcessServiceServicer):
    """Tells pids, memory and readiness of this service instance."""

    def __init__(
        self, name: str, pids: Callable[[], Sequence[int]], ready: Callable[[], bool]
    ) -> None:
        self._name = name
        self._pids = pids
        self._ready = ready

    @property
    def ready(self) -> bool:
        """Whether this instance takes work now."""
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
    """Resident memory of a process, 0 if it has gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class LateServices(grpc.GenericRpcHandler):
    """Services that are added to a server which may run already.

    Generated `add_…Servicer_to_server` functions take it for the server. Calls of a service in
    `expected` that has not been added yet are UNAVAILABLE.
    """

    def __init__(self, expected: Sequence[str]) -> None:
        self._expected = frozenset(expected)
        self._handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same handlers come as a mapping."""

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Any]) -> None:
        """Serve the methods of the service `name` from now on."""
        self._handlers |= {f"/{name}/{method}": handler for method, handler in handlers.items()}

    def service(self, handler_call_details: Any) -> Any:
        """The handler of the call; None for a method that no service here has."""
        method = handler_call_details.method
        if method in self._handlers:
            return self._handlers[method]
        name = method.removeprefix("/").partition("/")[0]
        if name in self._expected and not any(
            one.startswith(f"/{name}/") for one in self._handlers
        ):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return None


async def _refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the service starts; try again shortly")


class Server:
    """A gRPC server on `host` at `port` (0: any free one).

    `services`: full names of what it serves; the servicers are added to the attribute of that name,
    before or after `start`. Health tells of each of them, and of `health_names`, whether the
    process is ready.
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
        """`transport`: how others speak to it; None: in clear."""
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
        # Generated code adds its handlers to this object, as if it were the server.
        self.services: Any = late
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        process_pb2_grpc.add_ProcessServiceServicer_to_server(process, self._grpc)
        self.port = 0
        self.address = ""

    async def start(self) -> None:
        """Bind and serve; from now on `port` is the bound one, `address` host:port of it.

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
                f"cannot listen on {wanted}; it may be in use: choose another port"
            ) from error
        await self._grpc.start()
        self.address = join_address(self._host, self.port)

    def drain(self) -> None:
        """Tell health checks that no new work is taken; calls are still answered."""
        self._health.drain()

    async def stop(self, grace_s: float) -> None:
        """End calls within `grace_s`."""
        self._health.close()
        await self._grpc.stop(grace_s)
