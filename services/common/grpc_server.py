"""The gRPC server that every service runs: health, reflection and ProcessService included."""

from collections.abc import Callable, Sequence

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.common.errors import ConfigError
from services.common.grpc_client import MESSAGE_BYTES_MAX
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

    async def GetProcess(
        self,
        request: process_pb2.GetProcessRequest,
        context: grpc.aio.ServicerContext[
            process_pb2.GetProcessRequest, process_pb2.GetProcessResponse
        ],
    ) -> process_pb2.GetProcessResponse:
        """See process.proto."""
        return self.describe()

    def describe(self) -> process_pb2.GetProcessResponse:
        """The answer to GetProcess."""
        pids = list(self._pids())
        return process_pb2.GetProcessResponse(
            name=self._name,
            pids=pids,
            rss_bytes=sum(map(resident_bytes, pids)),
            ready=self._ready(),
        )


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 if it has gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class Server:
    """A gRPC server on `host` at `port` (0: any free one)."""

    def __init__(self, host: str, port: int, process: ProcessServicer) -> None:
        self.grpc = grpc.aio.server(options=SERVER_OPTIONS)
        self._host = host
        self._port = port
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        process_pb2_grpc.add_ProcessServiceServicer_to_server(process, self.grpc)
        self.address = ""

    async def start(self, *services: str) -> None:
        """Bind and serve; `services` are the full names that reflection lists.

        Raises:
            ConfigError: if the port cannot be bound.
        """
        names = (*services, "tideserve.common.v1.ProcessService", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        try:
            port = self.grpc.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}; it may be in use: choose another port"
            ) from error
        await self.grpc.start()
        self.address = f"{self._host}:{port}"
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Tell health checks, then end calls within `grace_s`."""
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.grpc.stop(grace_s)
