"""The cost of safepoints is that of pairs of the same batch."""

from pathlib import Path

import torch

from benchmarks.probes.safepoints import measure
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.tiny_models import make_tiny_model


def test_pairs_are_measured(tmp_path: Path) -> None:
    runner = ModelRunner.load(
        RunnerConfig(
            model_dir=make_tiny_model(tmp_path / "model", hidden=64),
            device="cpu",
            dtype=torch.float32,
            budget_bytes=64 << 20,
            max_batch_tokens=64,
            max_model_len=128,
            suspends=True,
        )
    )
    try:
        found = measure(runner, 64, 3)
        layers = runner.geometry.num_layers
    finally:
        runner.close()
    assert found["tokens"] == 64
    assert len(found["without_s"]) == len(found["with_s"]) == 3
    assert min(found["without_s"] + found["with_s"] + found["interval_s"]) > 0
    assert len(found["interval_s"]) == 3 * (layers + 1)
