"""Health checks of a worker: alive at once, ready only with a group and an engine."""

import os
import signal
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import GROUPS, WORKERS
from services.common.protocol import PROTOCOL_VERSION
from services.common.records import read_record
from services.worker.app import serve
from services.worker.config import WorkerConfig
from tests.support.control_plane import LEASE_TTL_S, group_record, put, serving
from tests.support.ports import free_port
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.common.v1 import process_pb2, process_pb2_grpc, record_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "tideserve.worker.v1.WorkerService"
KEY = f"{WORKERS}w0"
CALL_TIMEOUT_S = 5.0


async def record_of(store: Store) -> record_pb2.WorkerRecord | None:
    entry = (await store.list_prefix(KEY)).get(KEY)
    return read_record(record_pb2.WorkerRecord, KEY, entry.value) if entry is not None else None


async def test_a_worker_is_alive_while_loading_and_ready_while_its_engine_responds(
    store: Store, tmp_path: Path
) -> None:
    config = WorkerConfig(
        worker_id="w0",
        etcd_url=store.url,
        model_name="m",
        model_dir=make_tiny_model(tmp_path / "model"),
        memory_bytes=64 << 20,
        dtype="float32",
        max_model_len=512,
        profile_when_idle=False,
        port=free_port(),
        lease_ttl_s=LEASE_TTL_S,
        engine_unready_s=2.0,
        drain_timeout_s=0.0,
    )
    async with serving(serve, config), open_channel(f"127.0.0.1:{config.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> dict[str, int] | None:
            try:
                answer = await health.List(
                    health_pb2.HealthListRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
                )
            except grpc.aio.AioRpcError:
                return None
            return {name: status.status for name, status in answer.statuses.items()}

        async def becomes(status: int) -> bool:
            return (await statuses() or {}).get(NAME) == status

        # Before the model is loaded, and before there is a group.
        first = await eventually(statuses)
        assert (first[""], first[NAME]) == (SERVING, NOT_SERVING)
        record = await eventually(lambda: record_of(store))
        assert record.address == f"127.0.0.1:{config.port}"
        assert (record.max_model_len, record.context_tokens) == (512, 512)
        assert (record.protocol_version, len(record.code_digest)) == (PROTOCOL_VERSION, 64)
        assert await becomes(NOT_SERVING)
        group = group_record(record)
        group.members[0].end_layer = record.shape.num_layers
        await put(store, f"{GROUPS}group-w0", group)
        await eventually(lambda: becomes(SERVING))
        process = await process_pb2_grpc.ProcessServiceStub(channel).GetProcess(
            process_pb2.GetProcessRequest(), timeout=CALL_TIMEOUT_S
        )
        (engine,) = set(process.pids) - {os.getpid()}
        os.kill(engine, signal.SIGSTOP)
        try:
            await eventually(lambda: becomes(NOT_SERVING))
            assert (await eventually(statuses))[""] == SERVING
        finally:
            os.kill(engine, signal.SIGCONT)
        await eventually(lambda: becomes(SERVING))
