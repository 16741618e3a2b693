from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.core.planner.batch import Batch, Chunk, SampleSpec, SampleTerms
from services.worker.engine.compute.assembly import products_text
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.cpu_kernels import panel_gemm
from services.worker.errors import InvalidBatch
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
        name,
        0,
        (1,) * tokens,
        tuple(range(10)),
        SampleSpec(SampleTerms(GREEDY), 0) if sample else None,
    )


@pytest.mark.parametrize(
    ("address", "vector_floats", "storage", "wanted"),
    [
        (1, 16, torch.bfloat16, "bfloat16 panels (avx512_bf16)"),
        (0, 16, torch.float32, "float32 panels (avx512f)"),
        (0, 8, torch.bfloat16, "bfloat16 panels (avx2)"),
    ],
)
def test_a_log_names_the_products_with_panels(
    address: int,
    vector_floats: int,
    storage: torch.dtype,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = {"+avx512f", "+avx512bw", "+avx512dq", "+avx512vl", "+avx512bf16"}
    monkeypatch.setattr(panel_gemm, "processor_features", lambda: features)
    monkeypatch.setattr(panel_gemm, "panel_calls", lambda _dtype: np.full(2, address))
    monkeypatch.setattr(panel_gemm, "VECTOR_FLOATS", vector_floats)
    assert products_text(storage, torch.float32, compiled=True, panels=True) == wanted


def test_a_log_names_other_products() -> None:
    wanted = "row-major weights in bfloat16, float32 products"
    products = (torch.bfloat16, torch.float32)
    assert products_text(*products, compiled=True, panels=False) == wanted
    text = products_text(*products, compiled=False, panels=False)
    assert text.startswith(f"{wanted}, by torch alone (")


def test_only_sampling_chunks_return_a_token(runner: ModelRunner) -> None:
    assert runner.run(Batch((chunk("a", 3), chunk("b", 5, sample=False)))).keys() == {"a"}


def test_the_head_runs_for_positions_that_sample_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, rows = runner.decoder.logits, []

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(runner.decoder, "logits", noted)
    runner.run(Batch((chunk("a", 30), chunk("b", 20, sample=False), chunk("c", 1))))
    runner.run(Batch((chunk("b", 20, sample=False),)))
    assert rows == [2]


@pytest.mark.parametrize("chunks", [(), (chunk("a", 65),), (chunk("a", 64), chunk("b", 1))])
def test_batches_are_bounded(runner: ModelRunner, chunks: tuple[Chunk, ...]) -> None:
    with pytest.raises(InvalidBatch):
        runner.run(Batch(chunks))


def test_memory_stays_within_the_budget(runner: ModelRunner) -> None:
    plan = runner.stage_memory.plan
    kv_bytes = runner.num_blocks * runner.block_size * runner.kv_bytes_per_token
    assert runner.parameter_bytes + kv_bytes + runner.staging_bytes <= 24 << 20
    assert plan.total_chunks * plan.chunk_bytes + plan.staging_bytes <= 24 << 20


def test_recycled_memory_does_not_leak_into_output(runner: ModelRunner) -> None:
    expected = generate_tokens(runner, PROMPTS, max_tokens=8, seed=0)
    for kv_range in runner.stage_memory.kv_ranges:
        kv_range.blocks().fill_(torch.nan)
    assert generate_tokens(runner, PROMPTS, max_tokens=8, seed=1) == expected
