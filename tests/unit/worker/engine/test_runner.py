from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.core.iteration.batch import Batch, Chunk, SampleSpec
from services.worker.engine.runner import ModelRunner, RunnerConfig
from services.worker.errors import InvalidBatch, LayerNotResident
from services.worker.model.decoder import layer_name
from services.worker.model.loader import SafetensorsSource
from tests.support.generation import GREEDY, generate_tokens
from tests.support.tiny_models import make_tiny_model

PROMPTS = [[5, 6, 7], list(range(100, 140))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=3)


@pytest.fixture
def runner(model_dir: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(
        RunnerConfig(
            model_dir=model_dir,
            device="cpu",
            dtype=torch.float64,
            budget_bytes=24 << 20,
            chunk_bytes=64 << 10,
            max_batch_tokens=64,
            max_model_len=512,
            threads=1,
        )
    )
    yield runner
    runner.check_invariants()
    runner.close()


def chunk(name: str, tokens: int, *, sample: bool = True) -> Chunk:
    return Chunk(
        name, 0, (1,) * tokens, tuple(range(10)), SampleSpec(GREEDY, 0) if sample else None
    )


def test_only_chunks_that_sample_answer(runner: ModelRunner) -> None:
    assert runner.run(Batch((chunk("a", 3), chunk("b", 5, sample=False)))).keys() == {"a"}


@pytest.mark.parametrize("chunks", [(), (chunk("a", 65),), (chunk("a", 64), chunk("b", 1))])
def test_batches_are_bounded(runner: ModelRunner, chunks: tuple[Chunk, ...]) -> None:
    with pytest.raises(InvalidBatch):
        runner.run(Batch(chunks))


def test_budget_is_kept(runner: ModelRunner) -> None:
    plan = runner.memory
    kv_bytes = runner.num_blocks * runner.block_size * runner.kv_bytes_per_token
    assert runner.parameter_bytes + kv_bytes + runner.staging_bytes <= 24 << 20
    assert runner.arena.total_chunks * plan.chunk_bytes + plan.staging_bytes <= 24 << 20


def test_a_dropped_layer_grows_kv_and_comes_back(runner: ModelRunner, model_dir: Path) -> None:
    """Old blocks keep their contents; the layer does not run until it is restored."""
    expected = generate_tokens(runner, PROMPTS, max_tokens=8, seed=0)
    blocks_before = runner.num_blocks
    slab = runner.slabs[layer_name(1)]

    handles = slab.retire()
    share = len(handles) // len(runner.kv_ranges)
    for index, kv_range in enumerate(runner.kv_ranges):
        kv_range.map_tail(handles[index * share : (index + 1) * share])
    assert runner.num_blocks > blocks_before
    with pytest.raises(LayerNotResident, match=r"model\.layers\.1 "):
        runner.run(Batch((chunk("a", 1),)))
    slab.unmap()
    runner.arena.check_invariants()

    for kv_range in runner.kv_ranges:
        kv_range.unmap_tail(share)
    slab.map()
    source = SafetensorsSource(model_dir)
    for name, view in slab.views().items():
        source.fill(name, view)
    source.close()
    assert runner.num_blocks == blocks_before
    assert generate_tokens(runner, PROMPTS, max_tokens=8, seed=1) == expected


def test_recycled_memory_does_not_leak_into_answers(runner: ModelRunner) -> None:
    expected = generate_tokens(runner, PROMPTS, max_tokens=8, seed=0)
    for kv_range in runner.kv_ranges:
        kv_range.blocks().fill_(torch.nan)
    assert generate_tokens(runner, PROMPTS, max_tokens=8, seed=1) == expected
