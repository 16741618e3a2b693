"""Runs the servicer process of a worker: opens its port, connects to etcd, starts the engine,
serves.

A worker consists of two processes: the servicer has the gRPC services, the engine runs the model.
"""

import asyncio
import hashlib
import logging
import os
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from services.common.address import host_of
from services.common.advertise import advertised
from services.common.etcd import open_store
from services.common.grpc_server import ProcessServicer, Server
from services.common.metrics_server import metrics_exposed
from services.common.process_metrics import service_registry
from services.common.transport import transport_of
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.identity import completed_config, worker_record
from services.worker.ipc import EngineReady
from services.worker.metrics import WorkerCollector
from services.worker.serving import EngineServing

log = logging.getLogger(__name__)

SERVICES = Path(__file__).resolve().parent.parent
# Folders of the code that runs in a worker.
PARTS = ("common", "core", "worker")
# Numerical libraries, other versions of which may round differently.
LIBRARIES = ("numba", "torch", "transformers")


def code_digest(root: Path = SERVICES, parts: Iterable[str] = PARTS) -> str:
    """SHA-256 of the worker's sources below `root` and of the versions of `LIBRARIES`.

    Only workers with equal digests may form a group, since their tokens are equal.
    """
    digest = hashlib.sha256()
    for part in sorted(parts):
        for path in sorted((root / part).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    for name in LIBRARIES:
        digest.update(f"{name} {_version(name)}\n".encode())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


class ServicerProcess:
    """The servicer process of a worker."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex
        self._code_digest = code_digest()
        self._store = open_store(config)
        self._engine = EngineClient(config, self._incarnation)
        self._transport = transport_of(config)
        self._registry = service_registry("worker", config, self._store.calls)
        self._server = Server(
            config.host,
            config.port,
            ProcessServicer(config.worker_id, self._pids, self._ready),
            ["tideserve.worker.v1.WorkerService", "tideserve.worker.v1.MemberService"],
            transport=self._transport,
        )
        self._serving: EngineServing | None = None  # None until the model is loaded

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then let requests finish within the drain time."""
        config = self._config
        async with metrics_exposed(self._registry, config.host, config.metrics_port):
            # Open the port first, so that liveness probes succeed while the model loads.
            await self._server.start()
            try:
                await self._store.connect()
                address = await advertised(config, config.host, self._server.port)
                facts = await self._start_engine(host_of(address), stop)
                if facts is not None:
                    await self._serve(facts, address, stop)
            finally:
                await self._server.stop(grace_s=1.0)
                await self._engine.stop()
                await self._store.close()

    async def _start_engine(self, host: str, stop: asyncio.Event) -> EngineReady | None:
        """Start the engine, which loads the model; returns None if `stop` is set first."""
        starting = asyncio.create_task(self._engine.start(host))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None

    async def _serve(self, facts: EngineReady, address: str, stop: asyncio.Event) -> None:
        config, engine = self._config, self._engine
        record = worker_record(config, self._incarnation, self._code_digest, address, facts)
        serving = self._serving = EngineServing(
            config,
            record,
            engine,
            facts,
            self._store,
            self._server,
            self._pids,
            self._transport.dial,
        )
        self._registry.register(
            WorkerCollector(
                config.worker_id, config.model_name, engine, facts, lambda: serving.place
            )
        )
        log.info("%s serves %s on %s", config.worker_id, config.model_name, address)
        await serving.run(stop)

    def _pids(self) -> list[int]:
        return [os.getpid(), self._engine.pid]

    def _ready(self) -> bool:
        serving = self._serving
        return serving is not None and serving.place is not None and self._engine.responsive


async def serve(config: WorkerConfig, stop: asyncio.Event) -> None:
    """Run a worker until `stop` is set."""
    with completed_config(config) as completed:
        await ServicerProcess(completed).serve(stop)
