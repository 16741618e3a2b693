"""The servicer's client of a real engine process: heartbeats and preparations."""

import asyncio
import os
import signal
import time
from dataclasses import replace
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


def config_in(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        worker_id="w0",
        etcd_url="",
        model_name="m",
        model_dir=make_tiny_model(folder / "model"),
        run_dir=folder / "run",
        memory_bytes=64 << 20,
        dtype="float64",
        etcd_user="worker",
        etcd_password="of-the-servicer-alone",
        profile_when_idle=False,
    )


async def test_each_hang_of_an_engine_is_detected(tmp_path: Path) -> None:
    config = replace(config_in(tmp_path), engine_unready_s=4.0)
    hung: list[float] = []
    engine = EngineClient(config, "incarnation")
    try:
        await engine.start()
        running = asyncio.create_task(
            engine.run(lambda _: None, lambda: hung.append(engine.heartbeat_age_s))
        )
        for _ in range(2):
            hung.clear()
            os.kill(engine.pid, signal.SIGSTOP)
            await eventually(lambda: bool(hung))
            assert engine.hung and hung[0] > 2.0
            os.kill(engine.pid, signal.SIGCONT)
            await eventually(lambda: not engine.hung)
        running.cancel()
        await asyncio.wait([running])
    finally:
        await engine.stop()


async def test_a_suspended_servicer_reports_no_hang(tmp_path: Path) -> None:
    """As when a whole machine pauses: no heartbeat was sent, and none was read yet."""
    engine = EngineClient(replace(config_in(tmp_path), engine_unready_s=4.0), "incarnation")
    try:
        await engine.start()
        running = asyncio.create_task(engine.run(lambda _: None, lambda: None))
        await eventually(lambda: 0 < engine.heartbeat_age_s < 0.4)
        os.kill(engine.pid, signal.SIGSTOP)
        time.sleep(3.0)  # noqa: ASYNC251 - the whole process stands still
        assert engine.heartbeat_age_s > 2.0
        for _ in range(3):
            assert not engine.hung
            await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGCONT)
        running.cancel()
        await asyncio.wait([running])
    finally:
        await engine.stop()


async def test_an_engine_in_a_long_iteration_is_not_hung(tmp_path: Path) -> None:
    config = replace(config_in(tmp_path), engine_unready_s=5.0, paced="A100-14B:400")
    received: list[Progress] = []
    hung: list[float] = []
    engine = EngineClient(config, "incarnation")
    try:
        await engine.start()
        running = asyncio.create_task(
            engine.run(received.append, lambda: hung.append(engine.heartbeat_age_s))
        )
        request = Request("r", (1, 2, 3), Sampling(temperature=0), Limits(max_tokens=1), 0.0)
        await engine.start_request(request)
        silent_s = 0.0

        def answered() -> bool:
            nonlocal silent_s
            silent_s = max(silent_s, engine.silent_s)
            return any(progress.tokens for progress in received)

        await eventually(answered)
        assert silent_s > config.engine_unready_s, "the iteration took so long"
        assert not hung and engine.responsive
        running.cancel()
        await asyncio.wait([running])
    finally:
        await engine.stop()


async def test_a_preparation_is_answered_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDESERVE__ETCD_PASSWORD", "of-the-servicer-alone")
    received: list[Progress] = []
    engine = EngineClient(config_in(tmp_path), "incarnation")
    member = MemberPlan("w0", "a", 0, 2, Lane("h:1", "n"), Lane("h:2", "n"), "h:3")
    try:
        await engine.start()
        assert b"of-the-servicer-alone" not in environment_of(engine.pid)
        running = asyncio.create_task(engine.run(received.append, lambda: None))
        request = Request("r", (1, 2, 3), Sampling(temperature=0), Limits(max_tokens=32), 0.0)
        await engine.start_request(request)
        for attempt in ("first", "second"):
            prepared = await engine.prepare(
                Prepare(attempt, [GroupPlan("g", 2, [member])]), timeout_s=60
            )
            assert prepared.attempt == attempt
            await engine.abort_preparation(attempt)

        def tokens() -> list[int]:
            return [token.index for progress in received for token in progress.tokens]

        await eventually(lambda: len(tokens()) == 32)
        assert tokens() == list(range(32))
        running.cancel()
        await asyncio.wait([running])
    finally:
        await engine.stop()
