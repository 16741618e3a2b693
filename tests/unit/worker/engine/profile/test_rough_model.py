"""The rough cost model of a worker that has no profile."""

from pathlib import Path

import torch

from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.profile.batches import BatchLimits
from services.worker.engine.profile.measurer import measure_rough_model, rough_batches
from tests.support.tiny_models import make_tiny_model


def test_a_sketch_predicts_that_more_tokens_cost_more(tmp_path: Path) -> None:
    runner = ModelRunner.load(
        RunnerConfig(
            model_dir=make_tiny_model(tmp_path, dtype=torch.float32),
            device="cpu",
            dtype=torch.float32,
            budget_bytes=24 << 20,
            max_batch_tokens=64,
            max_running=16,
            max_model_len=256,
            threads=1,
        )
    )
    try:
        model = measure_rough_model(runner, max_batch_tokens=64, max_running=16)
    finally:
        runner.close()
    assert 0 < model.chunk_s(0, 1) <= model.chunk_s(0, 64)


def test_a_small_kv_cache_is_measured() -> None:
    assert set(rough_batches(BatchLimits(1, 1, 8, 1, 4))) == {((0, 1),)}
