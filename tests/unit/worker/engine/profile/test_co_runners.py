"""Co-running engines execute the measured batches and exit afterwards."""

from pathlib import Path

import psutil
import pytest

from services.worker.engine.profile.co_runners import CoRunnerLost, start_co_runners
from services.worker.engine.profile.config import ProfileConfig
from tests.support.tiny_models import make_tiny_model

BATCH = ((0, 4), (8, 1))


def config(folder: Path, co_runners: int) -> ProfileConfig:
    make_tiny_model(folder / "llama", "llama", layers=1, hidden=32, heads=2, kv_heads=1)
    return ProfileConfig(
        folder / "llama",
        folder,
        memory_bytes=64 << 20,
        dtype="float32",
        max_batch_tokens=32,
        max_running=4,
        co_runners=co_runners,
    )


def test_a_co_runner_runs_each_batch_and_exits_at_the_end(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with start_co_runners(config(tmp_path, 1)) as co_runners:
        (process,) = set(psutil.Process().children()) - before
        for _ in range(2):
            with co_runners.run(BATCH):
                pass
        process.kill()
        process.wait(10)
        with pytest.raises(CoRunnerLost, match="--workers"), co_runners.run(BATCH):
            pass
    assert not process.is_running()


def test_zero_co_runners_are_allowed(tmp_path: Path) -> None:
    with start_co_runners(config(tmp_path, 0)) as co_runners, co_runners.run(BATCH):
        pass
