"""Helpers of the measurements: models, a cluster of one worker, and tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.client_process import run_answered
from benchmarks.systems.processor import fastest_dtype, read_processor
from benchmarks.systems.system import Deployment
from benchmarks.systems.tideserve import Tideserve
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tideserve.cli.cache import cache_root
from tideserve.cli.model_store import resolve_model
from tideserve.cli.tiny_model import DEEP, TINY_OPTIONS, write_tiny_model
from tideserve.load.client import Job
from tideserve.load.workload import PlannedRequest

MIB = 1 << 20
CONCURRENCY, ROUND_TIMEOUT_S = 16, 120.0


def show(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of two columns."""
    width = max(map(len, rows))
    print(f"\n{title}", *(f"  {name:<{width}}  {text}" for name, text in rows.items()), sep="\n")


def default_model() -> Path:
    """The folder of the default model."""
    return resolve_model(None, cache_root(), print, "auto")


def fast_dtype() -> str:
    """The dtype in which this processor serves a model fastest."""
    return fastest_dtype(read_processor().flags)


@contextmanager
def runner_of_one_thread(memory_bytes: int, **changes: Any) -> Iterator[ModelRunner]:
    """An engine's model in this process, in the fastest dtype."""
    dtype = getattr(torch, fast_dtype())
    config = RunnerConfig(default_model(), "cpu", dtype, memory_bytes, threads=1, **changes)
    runner = ModelRunner.load(config)
    try:
        yield runner
    finally:
        runner.close()


@contextmanager
def started(systems: Iterable[Tideserve]) -> Iterator[None]:
    """Run clusters during the body."""
    systems = list(systems)
    try:
        for system in systems:
            system.start(print)
        yield
    finally:
        for system in systems:
            system.stop()


def tiny_cluster(folder: Path, **options: Any) -> Tideserve:
    """A cluster, not started, of one worker of one thread; `folder` gets a model of 16 layers.

    More worker threads would contend with the load client.
    """
    model = write_tiny_model(folder, default_model(), DEEP)
    chosen = {**TINY_OPTIONS, "threads": 1, **options}
    deployment = Deployment(
        *(model, "tiny-16-layers", cache_root(), 1, 128 * MIB), dtype="float32", options=chosen
    )
    return Tideserve("tideserve", (), deployment)


def send_over_http(systems: Sequence[Tideserve], requests: Sequence[PlannedRequest]) -> None:
    urls, model = tuple(system.urls[0] for system in systems), systems[0].model
    job = Job(urls, model, tuple(requests), ROUND_TIMEOUT_S, concurrency=CONCURRENCY)
    assert len(run_answered(job)) == len(requests)
