"""Checks that registered services and lanes are reachable from this machine and healthy."""

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.address import split_address
from services.common.timeouts import timeout
from services.common.transport import Transport
from tideserve.cli.doctor.finding import Check, Finding
from tideserve.cli.doctor.records import RegisteredRecords

CHECK = Check("addresses")
TIMEOUT_S = 3.0
# Bounds concurrent calls to a large cluster.
CALLS_AT_ONCE = 64
REMEDY = "start it, open the port (firewall, NetworkPolicy), or correct its option 'advertise'"
SERVICE = {
    "gateway": "tideserve.gateway.v1.GatewayService",
    "scheduler": "tideserve.scheduler.v1.SchedulerService",
    "memmgr": "tideserve.memmgr.v1.MemmgrService",
    "worker": "tideserve.worker.v1.WorkerService",
}


async def check_addresses(records: RegisteredRecords, transport: Transport) -> list[Finding]:
    """Dial all registered services and lanes."""
    slots = asyncio.Semaphore(CALLS_AT_ONCE)
    servers = [
        (f"the {service.name}", service.name, service.address) for service in records.services
    ]
    servers += [
        (f"the worker {worker.worker_id}", "worker", worker.address) for worker in records.workers
    ]
    lanes = [
        (f"the {kind} lane of the worker {worker.worker_id}", address)
        for worker in records.workers
        for kind, address in (
            ("activation", worker.activation_address),
            ("bulk", worker.bulk_address),
        )
        if address
    ]
    answers: Iterable[Finding | None] = await asyncio.gather(
        *(_ask(slots, transport, *server) for server in servers),
        *(_connect(slots, *lane) for lane in lanes),
    )
    findings = [finding for finding in answers if finding is not None]
    if findings or not servers:
        return findings
    return [CHECK.fine(f"{len(servers)} services and {len(lanes)} lanes are reachable from here")]


async def _ask(
    slots: asyncio.Semaphore, transport: Transport, name: str, role: str, address: str
) -> Finding | None:
    request = health_pb2.HealthCheckRequest(service=SERVICE[role])
    async with slots, transport.dial(address, role) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return _refused(name, address, error)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return CHECK.failure(
        f"{name} at {address} runs but does not serve; wait if it is loading or draining, else"
        " see its log"
    )


def _refused(name: str, address: str, error: grpc.aio.AioRpcError) -> Finding:
    details = error.details() or ""
    if "certificate" in details.lower() or "handshake" in details.lower() or "SSL" in details:
        return CHECK.failure(
            f"{name} at {address} and this command do not trust each other's certificates; pass"
            " --tls-ca-file, --tls-cert-file and --tls-key-file of the cluster's CA"
        )
    return CHECK.failure(f"{name} cannot be reached at {address} ({error.code().name}); {REMEDY}")


async def _connect(slots: asyncio.Semaphore, name: str, address: str) -> Finding | None:
    host, port = split_address(address)
    try:
        async with slots, timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, int(port or 0))
            writer.close()
    except (OSError, TimeoutError, OverflowError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "no answer"
        return CHECK.failure(f"{name} cannot be reached at {address} ({cause}); {REMEDY}")
    return None
