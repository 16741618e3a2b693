"""Requests of a group that merges and splits give the tokens of an undisturbed run."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.core.memory.layer_map import Stage
from services.core.request import Limits, Request, Sampling
from services.worker.engine.runner import ModelRunner, RunnerConfig
from tests.support.engine_group import EngineGroup
from tests.support.generation import generate_tokens
from tests.support.tiny_models import make_tiny_model

LAYERS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunnerConfig:
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_tiny_model(folder, "llama", layers=LAYERS, hidden=32, heads=2, kv_heads=1)
    return RunnerConfig(
        model_dir=folder,
        device="cpu",
        dtype=torch.float64,
        budget_bytes=6 << 20,
        block_size=4,
        chunk_bytes=4096,
        max_batch_tokens=64,
        max_running=16,
        max_model_len=512,
    )


def request_of(rng: random.Random, number: int) -> Request:
    greedy = rng.random() < 0.5
    sampling = Sampling(temperature=0.0) if greedy else Sampling(0.9, 0.95, 20, number)
    prompt = tuple(rng.randrange(3, 300) for _ in range(rng.randint(1, 60)))
    return Request(f"r{number}", prompt, sampling, Limits(rng.randint(1, 30)), 0.0)


def expected(config: RunnerConfig, request: Request) -> list[int]:
    runner = ModelRunner.load(config)
    try:
        (tokens,) = generate_tokens(
            runner,
            [request.prompt_ids],
            max_tokens=request.limits.max_tokens,
            seed=0,
            samplings=[request.sampling],
        )
        return tokens
    finally:
        runner.close()


@pytest.fixture
def group(config: RunnerConfig) -> Iterator[EngineGroup]:
    made = EngineGroup(config, 2, seed=1)
    yield made
    made.close()


def test_a_merge_and_a_split_leave_no_trace(config: RunnerConfig, group: EngineGroup) -> None:
    rng = random.Random(3)
    for number in range(8):
        group.start(request_of(rng, number))
    for _ in range(60):
        group.turn()
    half = LAYERS // 2
    group.reconfigure([[Stage("w0", 0, half), Stage("w1", half, LAYERS)]])
    for number in range(8, 12):
        group.start(request_of(rng, number))
    group.settle()
    group.check_invariants()
    for _ in range(40):
        group.turn()
    group.reconfigure([[Stage("w0", 0, LAYERS)], [Stage("w1", 0, LAYERS)]])
    group.finish()
    group.check_at_rest()
    for stream in group.streams.values():
        assert stream.tokens == expected(config, stream.request)
