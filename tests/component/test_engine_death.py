"""A worker reports whether the engine died with its requests."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import GROUPS, WORKERS
from services.common.records import read_record
from services.worker.app import serve
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineStopped
from tests.support.control_plane import LEASE_TTL_S, group_record, put
from tests.support.ports import free_port
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import process_pb2, process_pb2_grpc, record_pb2
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

KEY = f"{WORKERS}w0"
OUTPUT_TOKENS = 4000


def start(epoch: int) -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(
        start=worker_pb2.Start(
            request_id="r",
            group_id="group-w0",
            epoch=epoch,
            prompt_ids=[5, 6],
            sampling=worker_pb2.Sampling(top_p=1),
            limits=worker_pb2.Limits(max_tokens=OUTPUT_TOKENS),
        )
    )


@pytest.mark.parametrize("killed", [True, False])
async def test_requests_report_whether_the_engine_died(
    store: Store, tmp_path: Path, killed: bool
) -> None:
    config = WorkerConfig(
        worker_id="w0",
        etcd_url=store.url,
        model_name="m",
        model_dir=make_tiny_model(tmp_path / "model"),
        memory_bytes=64 << 20,
        dtype="float32",
        profile_when_idle=False,
        port=free_port(),
        lease_ttl_s=LEASE_TTL_S,
        drain_timeout_s=0.0,
    )
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(config, stop))

    async def record() -> record_pb2.WorkerRecord | None:
        entry = (await store.list_prefix(KEY)).get(KEY)
        return read_record(record_pb2.WorkerRecord, KEY, entry.value) if entry else None

    group = group_record(await eventually(record))
    group.members[0].end_layer = (await eventually(record)).shape.num_layers
    await put(store, f"{GROUPS}group-w0", group)
    async with open_channel(f"127.0.0.1:{config.port}") as channel:

        async def ready() -> bool:
            answer = await process_pb2_grpc.ProcessServiceStub(channel).GetProcess(
                process_pb2.GetProcessRequest(), timeout=60
            )
            return answer.ready

        await eventually(ready)
        answer = await process_pb2_grpc.ProcessServiceStub(channel).GetProcess(
            process_pb2.GetProcessRequest(), timeout=60
        )
        (engine,) = set(answer.pids) - {os.getpid()}
        call = worker_pb2_grpc.WorkerServiceStub(channel).Generate()
        await call.write(start(group.epoch))
        first = await call.read()
        assert first.events[0].first_index == 0
        if killed:
            os.kill(engine, signal.SIGKILL)
        else:
            stop.set()
        reason = worker_pb2.FINISH_REASON_UNSPECIFIED
        while not reason:
            reason = (await call.read()).events[-1].finish_reason
    ended = worker_pb2.FINISH_REASON_ENGINE_DIED if killed else worker_pb2.FINISH_REASON_ERROR
    assert reason == ended
    async with asyncio.timeout(DEADLINE_S):
        if killed:
            with pytest.raises(ExceptionGroup, match="TaskGroup") as raised:
                await serving
            assert raised.group_contains(EngineStopped)
        else:
            await serving
