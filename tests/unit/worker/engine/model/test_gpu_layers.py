"""A model with GPU kernels generates the tokens of `transformers`, with and without graphs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.compute import assembly
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.model.attention.paged import AttentionMetadata
from tests.support.device import CHUNK_BYTES, DEVICE, ON_GPU, chunks_of
from tests.support.generation import generate_tokens
from tests.support.tiny_models import make_tiny_model

pytest.importorskip("triton", reason="there is no Triton for this machine")
from services.worker.engine.model import gpu_graphs
from services.worker.engine.model.gpu_layers import GpuLayers
from tests.support.gpu_kernels import GraphCapture, Recorded

NEW_TOKENS = 6
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"norm_std": 0.3},
    "mistral": {"sliding_window": 24},
}


def load(model_dir: Path, dtype: torch.dtype = torch.float32, **options: Any) -> ModelRunner:
    return ModelRunner.load(
        RunnerConfig(
            model_dir=model_dir,
            device=DEVICE,
            dtype=dtype,
            budget_bytes=chunks_of(32 << 20),
            chunk_bytes=CHUNK_BYTES,
            max_batch_tokens=64,
            threads=2,  # otherwise the compiled kernels of a CPU compute
            **options,
        )
    )


@pytest.fixture
def on_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the layers for GPUs on every device."""
    monkeypatch.setattr(assembly, "uses_gpu_kernels", lambda _device: True)
    monkeypatch.setattr(gpu_graphs, "CudaGraphCapture", GraphCapture)


@pytest.mark.usefixtures("on_gpu_kernels")
@pytest.mark.parametrize("arch", sorted(MODELS))
def test_tokens_equal_those_of_transformers(arch: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model(
        tmp_path, arch, dtype=torch.float32, layers=2, hidden=64, **MODELS[arch]
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (1, 5, 17, 40)]
    runner = load(model_dir)
    captured = Recorded.captures
    actual = generate_tokens(runner, prompts, max_tokens=NEW_TOKENS, seed=1, batch_tokens=64)
    runner.check_invariants()
    runner.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts, actual, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        assert tokens == wanted[0, len(prompt) :].tolist()
    assert ON_GPU or Recorded.captures > captured, "nothing ran as a graph"


@pytest.mark.usefixtures("on_gpu_kernels")
def test_unsupported_shapes_fall_back_to_torch(tmp_path: Path) -> None:
    odd = make_tiny_model(tmp_path / "gelu", dtype=torch.float32, hidden_act="gelu")
    runner = load(odd)
    assert not isinstance(runner.decoder.layer_runner, GpuLayers)
    runner.close()


def test_oldest_graphs_are_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_graphs, "GRAPHS_MAX", 2)

    class Layers:
        def run_all(
            self, layers: range, rest: torch.Tensor, _turn: object, _work: object
        ) -> torch.Tensor:
            return rest + layers.start

    class Attention:
        head_dim, num_kv_heads, decode_rows = 4, 1, 16

    graphs = gpu_graphs.DecodeGraphs(Layers(), Attention(), torch.zeros(8), Recorded())  # type: ignore[arg-type]
    before = Recorded.captures
    for start, captures in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4)):
        hidden = torch.randn(3, 8)
        actual = graphs.run(hidden, (hidden[:, :4],) * 2, three_decodes(), range(start, 5))
        assert torch.equal(actual, hidden + start)
        assert Recorded.captures - before == captures


def three_decodes() -> AttentionMetadata:
    spans = torch.tensor([[row, 1, 2 * row, row, 1, 0] for row in range(3)]).numpy()
    tables = torch.tensor([4, 5, 6]).numpy()
    return AttentionMetadata(spans, tables, 16, torch.device("cpu"), torch.float32)
