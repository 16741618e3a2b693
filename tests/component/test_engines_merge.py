"""Two engine processes merge over UCX, serve as a pipeline and split; tokens do not change."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.groups.layer_map import Stage
from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.worker.config import WorkerConfig
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_processes import EngineProcesses
from tests.support.generation import generate_tokens
from tests.support.tiny_models import make_tiny_model

LAYERS = 4
NAMES = ("w0", "w1")
OUTPUT_TOKENS = 400


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("merge") / "model", layers=LAYERS)


@pytest.fixture
async def engines(model_dir: Path, tmp_path: Path) -> AsyncIterator[EngineProcesses]:
    config = WorkerConfig(
        worker_id="",
        etcd_url="",
        model_name="m",
        model_dir=model_dir,
        run_dir=tmp_path,
        memory_bytes=64 << 20,
        dtype="float64",
        profile_when_idle=False,
        learn_costs=False,
        planner=IterationConfig(scheduling=Scheduling.FCFS),  # the policy slo needs a cost model
    )
    made = EngineProcesses()
    try:
        await made.start(config, NAMES)
        if not made.workers["w0"].facts.bulk_address:
            pytest.skip("UCX cannot be loaded on this machine")
        yield made
    finally:
        await made.stop()


async def test_merges_and_splits_change_no_token(engines: EngineProcesses, model_dir: Path) -> None:
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
    for number, request in enumerate(requests):
        await engines.serve(request, NAMES[number % 2])
    streams = engines.streams.values()
    await engines.until(lambda: all(len(stream.tokens) > 5 for stream in streams))
    half = LAYERS // 2
    for worker in engines.workers.values():
        assert worker.client.report.stage == StageTime()
        assert worker.client.report.iterations == IterationTime()  # no cost model
    assert await engines.reconfigure([[Stage("w0", 0, half), Stage("w1", half, LAYERS)]])
    await engines.until(lambda: engines.moved == 4)
    await engines.until(lambda: all(len(stream.tokens) > 40 for stream in streams))
    for worker in engines.workers.values():
        assert worker.client.report.parameter_bytes < worker.facts.parameter_bytes
    times = [worker.client for worker in engines.workers.values()]
    await engines.until(lambda: all(worker.report.stage.pipeline_busy_s > 0 for worker in times))
    await engines.until(lambda: all(worker.report.stage.pipeline_bubble_s > 0 for worker in times))
    assert await engines.reconfigure([[engines.alone(name)] for name in NAMES])
    await engines.until(lambda: engines.moved > 4)
    await engines.until(lambda: all(stream.over for stream in streams))
    await engines.until(lambda: all(worker.at_rest for worker in engines.workers.values()))

    config = RunnerConfig(model_dir, "cpu", torch.float64, budget_bytes=64 << 20, threads=1)
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
    assert [stream.output() for stream in streams] == expected
