"""The sizes passed to planners are those of the loaded model, and round trip."""

from pathlib import Path

import pytest
import torch

from services.core.groups.layer_map import ModelShape
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.catalog import shape_of
from services.worker.ipc import EngineReady, encode, from_engine_decoder
from tests.support.tiny_models import make_tiny_model


@pytest.mark.parametrize("tied", [False, True])
def test_the_shape_of_a_loaded_model(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_model(tmp_path, dtype=torch.float32, tie_word_embeddings=tied)
    runner = ModelRunner.load(
        RunnerConfig(folder, "cpu", torch.float32, 32 << 20, load_format="dummy")
    )
    shape = shape_of(runner.geometry, runner.slab_bytes)
    assert shape.num_layers == runner.geometry.num_layers
    assert shape.parameter_bytes(1) == runner.parameter_bytes
    assert shape.tied_embeddings is tied
    assert shape.kv_bytes * shape.num_layers == runner.kv_bytes_per_token
    assert shape.head_cost == (shape.embedding_bytes if tied else shape.head_bytes)
    ready = EngineReady(1, 2, 3, 4, 5, 6, 7, 8, runner.stage_memory.plan.arena_bytes, shape)
    decoded = from_engine_decoder.decode(encode(ready))
    assert decoded == ready and isinstance(decoded.shape, ModelShape)
