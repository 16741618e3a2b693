"""The floor of an iteration: products of all weights, and attention's share."""

from pathlib import Path

import pytest
import torch

from benchmarks.probes import iteration
from benchmarks.probes.iteration import BatchShape, measure
from benchmarks.scenarios.engine import rows
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.tiny_models import make_tiny_model

SHAPES = (BatchShape("prefill of 8", 1, 8, 0), BatchShape("decode of 2", 2, 1, 7))


def test_a_token_sees_itself_and_what_came_before() -> None:
    assert SHAPES[0].pairs == 36
    assert SHAPES[1].pairs == 2 * 8
    assert SHAPES[1].chunks == ((7, 1), (7, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_iteration_and_its_products_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(iteration, "SHAPES", SHAPES)
    monkeypatch.setattr(iteration, "READ_BYTES", 1 << 20)
    folder = make_tiny_model(tmp_path / "model", hidden=64)
    runner = ModelRunner.load(
        RunnerConfig(
            model_dir=folder,
            device="cpu",
            dtype=dtype,
            budget_bytes=64 << 20,
            max_batch_tokens=64,
            max_model_len=128,
        )
    )
    try:
        figures = measure(runner, dtype, rounds=2)
    finally:
        runner.close()
    for found in figures["shapes"]:
        floor_s = found["products_s"] + found["attention_floor_s"]
        assert found["over_floor"] == pytest.approx(found["iteration_s"] / floor_s)
        assert found["over_products"] >= found["over_floor"] > 0
    assert [label for label, _ in rows(figures)][-2:] == [shape.name for shape in SHAPES]
