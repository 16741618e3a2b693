"""The servicer's end of a real engine process: questions about the group are answered."""

import asyncio
from pathlib import Path

import pytest

from services.core.request import Limits, Request, Sampling
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.ipc import GroupPlan, Lane, MemberPlan, Prepare, Progress
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def test_a_preparation_is_answered_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDESERVE__ETCD_PASSWORD", "of-the-servicer-alone")
    config = WorkerConfig(
        worker_id="w0",
        etcd_url="",
        model_name="m",
        model_dir=make_tiny_model(tmp_path / "model"),
        run_dir=tmp_path / "run",
        memory_bytes=64 << 20,
        dtype="float64",
        etcd_user="worker",
        etcd_password="of-the-servicer-alone",
        profile_when_idle=False,
    )
    told: list[Progress] = []
    engine = EngineClient(config, "incarnation")
    member = MemberPlan("w0", "a", 0, 2, Lane("h:1", "n"), Lane("h:2", "n"), "h:3")
    try:
        await engine.start()
        assert b"of-the-servicer-alone" not in environment_of(engine.pid)
        running = asyncio.create_task(engine.run(told.append))
        request = Request("r", (1, 2, 3), Sampling(temperature=0), Limits(max_tokens=32), 0.0)
        await engine.start_request(request)
        for attempt in ("first", "second"):
            prepared = await engine.prepare(
                Prepare(attempt, [GroupPlan("g", 2, [member])]), timeout_s=60
            )
            assert prepared.attempt == attempt
            await engine.abort_preparation(attempt)

        def tokens() -> list[int]:
            return [token.index for progress in told for token in progress.tokens]

        await eventually(lambda: len(tokens()) == 32)
        assert tokens() == list(range(32))
        running.cancel()
        await asyncio.wait([running])
    finally:
        await engine.stop()
