"""Two engine processes merge over UCX, serve as a pipeline and split: tokens as undisturbed."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from services.core.iteration.bubble import StageTime
from services.core.request import Limits, Request, Sampling
from services.worker.config import WorkerConfig
from services.worker.engine.runner import ModelRunner, RunnerConfig
from services.worker.engine_client import EngineClient
from services.worker.ipc import (
    ApplyConfiguration,
    EngineReady,
    GroupPlan,
    Lane,
    MemberPlan,
    Prepare,
    Progress,
)
from tests.support.generation import generate_tokens
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually

LAYERS = 4
NAMES = ("w0", "w1")
OUTPUT_TOKENS = 120
PREPARE_TIMEOUT_S = 60.0


@dataclass
class Worker:
    """An engine process and what it told."""

    client: EngineClient
    facts: EngineReady
    told: list[Progress] = field(default_factory=list)

    def moved(self) -> list[str]:
        return [moved.request_id for progress in self.told for moved in progress.moved]

    def tokens(self) -> dict[str, dict[int, int]]:
        """Request → output index → token, of all that it emitted."""
        found: dict[str, dict[int, int]] = {}
        for progress in self.told:
            for token in progress.tokens:
                indices = found.setdefault(token.request_id, {})
                assert token.index not in indices, "a token comes twice"
                indices[token.index] = token.token_id
        return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("merge") / "model", layers=LAYERS)


@pytest.fixture
async def workers(model_dir: Path, tmp_path: Path) -> AsyncIterator[dict[str, Worker]]:
    made: dict[str, Worker] = {}
    running = []
    try:
        for name in NAMES:
            config = WorkerConfig(
                worker_id=name,
                etcd_url="",
                model_name="m",
                model_dir=model_dir,
                run_dir=tmp_path / name,
                memory_bytes=64 << 20,
                dtype="float64",
                profile_when_idle=False,
            )
            told: list[Progress] = []
            client = EngineClient(config, f"{name}-1", told.append)
            made[name] = Worker(client, await client.start(), told)
            if not made[name].facts.bulk_address:
                pytest.skip("UCX cannot be loaded on this machine")
            running.append(asyncio.create_task(client.run()))
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for worker in made.values():
            await worker.client.stop()


def plan(workers: dict[str, Worker], epoch: int, *groups: dict[str, range]) -> list[GroupPlan]:
    """Groups given as worker → layers, in stage order."""
    return [
        GroupPlan(
            f"group-{next(iter(group))}",
            epoch,
            [
                MemberPlan(
                    name,
                    f"{name}-1",
                    layers.start,
                    layers.stop,
                    Lane(workers[name].facts.activation_address, f"activations of {name}: a nonce"),
                    Lane(workers[name].facts.bulk_address, f"bulk of {name}: another nonce"),
                    f"address of {name}",
                )
                for name, layers in group.items()
            ],
        )
        for group in groups
    ]


async def reconfigure(workers: dict[str, Worker], attempt: str, groups: list[GroupPlan]) -> None:
    answers = await asyncio.gather(
        *(
            worker.client.prepare(Prepare(attempt, groups), PREPARE_TIMEOUT_S)
            for worker in workers.values()
        )
    )
    assert [answer.error for answer in answers] == ["", ""]
    for worker in workers.values():
        await worker.client.apply(ApplyConfiguration(groups))


async def test_processes_merge_and_split_without_a_trace(
    workers: dict[str, Worker], model_dir: Path
) -> None:
    rng = random.Random(5)
    requests = [
        Request(
            f"r{number}",
            tuple(rng.randrange(3, 300) for _ in range(rng.randint(5, 200))),
            Sampling(0.0) if number % 2 else Sampling(0.8, 0.95, 0, number),
            Limits(OUTPUT_TOKENS),
            0.0,
        )
        for number in range(8)
    ]
    for name in NAMES:
        alone = plan(workers, 1, {name: range(LAYERS)})
        await workers[name].client.apply(ApplyConfiguration(alone))
    for number, request in enumerate(requests):
        await workers[NAMES[number % 2]].client.start_request(request)

    def emitted(request_id: str) -> int:
        return sum(len(worker.tokens().get(request_id, ())) for worker in workers.values())

    await eventually(lambda: all(emitted(one.request_id) > 5 for one in requests))
    half = LAYERS // 2
    merged = plan(workers, 2, {"w0": range(half), "w1": range(half, LAYERS)})
    await reconfigure(workers, "merge", merged)
    await eventually(lambda: len(workers["w1"].moved()) == 4)
    await eventually(lambda: all(emitted(one.request_id) > 40 for one in requests))
    for worker in workers.values():
        assert worker.told[-1].parameter_bytes < worker.facts.parameter_bytes
        assert next(one for one in worker.told if one.tokens).pipeline == StageTime()
        stage_time = worker.told[-1].pipeline
        assert stage_time.busy_s > 0 and stage_time.bubble_s > 0
    apart = plan(workers, 3, {"w0": range(LAYERS)}, {"w1": range(LAYERS)})
    await reconfigure(workers, "split", apart)
    await eventually(lambda: len(workers["w0"].moved()) > 0)
    await eventually(lambda: all(emitted(one.request_id) == OUTPUT_TOKENS for one in requests))

    config = RunnerConfig(model_dir, "cpu", torch.float64, budget_bytes=64 << 20)
    runner = ModelRunner.load(config)
    try:
        expected = generate_tokens(
            runner,
            [request.prompt_ids for request in requests],
            max_tokens=OUTPUT_TOKENS,
            seed=0,
            samplings=[request.sampling for request in requests],
        )
    finally:
        runner.close()
    for request, tokens in zip(requests, expected, strict=True):
        joined: dict[int, int] = {}
        for worker in workers.values():
            mine = worker.tokens().get(request.request_id, {})
            assert not joined.keys() & mine.keys(), "two workers emitted the same token"
            joined |= mine
        assert [joined[index] for index in range(OUTPUT_TOKENS)] == tokens
    for worker in workers.values():
        load = worker.told[-1].load
        assert worker.told[-1].parameter_bytes == worker.facts.parameter_bytes
        assert (load.running, load.waiting) == (0, 0)
        await eventually(
            lambda worker=worker: (
                worker.told[-1].load.kv_blocks_free == worker.facts.kv_blocks_total
            )
        )
