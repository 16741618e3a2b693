"""What saves to host memory cost the iterations beside them.

Two engine processes of the same model, one of which copies KV to host memory, get the same batch
requests in turn. These fill most of the KV cache, so that the first engine saves each block of
theirs. The host store is soon full: each save evicts another copy.
"""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from statistics import median

import psutil
import pytest

from services.common.clock import monotonic_s
from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.config import WorkerConfig
from services.worker.host_config import HostConfig
from tests.perf.measuring import MIB, default_model, fast_dtype, show
from tests.support.engine_processes import EngineProcesses
from tideserve.sim.report import percentile

SAVING, PLAIN = "saving", "plain"
MEMORY_BYTES, HOST_BYTES = 400 * MIB, 128 * MIB
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 384, 64
PAIRS, WARM_UPS = 12, 2
USED_MIN, SAVED_MIN = 0.6, 0.9
"""Share of the KV cache in use; saved blocks, as a share of those that were filled."""
COST_MAX = 1.02
"""Maximum time of a turn with saves, as a multiple of that without, in the median."""


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[EngineProcesses]:
    config = WorkerConfig(
        worker_id="",
        etcd_url="",
        model_name="m",
        model_dir=default_model(),
        run_dir=tmp_path,
        memory_bytes=MEMORY_BYTES,
        dtype=fast_dtype(),
        threads=1,
        planner=IterationConfig(max_running=REQUESTS, scheduling=Scheduling.SLO),
        profile_when_idle=False,
    )
    processes = EngineProcesses()
    try:
        host = {"host_copies": HostConfig(host_memory=HOST_BYTES)}
        await processes.start(config, (SAVING, PLAIN), changes={SAVING: host})
        yield processes
    finally:
        await processes.stop()


class Turns:
    """Turns of the engines; prompts of different turns share nothing."""

    def __init__(self, engines: EngineProcesses) -> None:
        self._engines = engines
        self._vocab_size = engines.workers[PLAIN].facts.vocab_size
        self._processes = {
            name: psutil.Process(worker.client.pid) for name, worker in engines.workers.items()
        }

    async def run(self, engine: str, number: int) -> tuple[float, float]:
        """Serve the requests of a turn; returns wall seconds and those of the processor."""
        rng, sampling = Random(f"turn {number}"), Sampling(temperature=0)
        names = [f"{engine}-{number}-{request}" for request in range(REQUESTS)]
        began_s, used_s = monotonic_s(), self._processor_s(engine)
        for name in names:
            prompt = tuple(rng.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS))
            limits, service = Limits(OUTPUT_TOKENS), Service(ServiceClass.BATCH)
            request = Request(name, prompt, sampling, limits, monotonic_s(), service=service)
            await self._engines.serve(request, engine)
        streams = [self._engines.streams[name] for name in names]
        await self._engines.until(lambda: all(stream.over for stream in streams))
        return monotonic_s() - began_s, self._processor_s(engine) - used_s

    def _processor_s(self, engine: str) -> float:
        times = self._processes[engine].cpu_times()
        return float(times.user + times.system)


def ratios(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]], kind: int) -> str:
    """The median and the middle half of the ratios of saving to plain."""
    values = [saving[kind] / plain[kind] for saving, plain in pairs]
    low, high = percentile(values, 0.25) or 0.0, percentile(values, 0.75) or 0.0
    return f"{median(values):.3f} x (middle half {low:.3f} to {high:.3f})"


@pytest.mark.timeout(900)
async def test_saves_cost_iterations_little(engines: EngineProcesses) -> None:
    turns, pairs = Turns(engines), []
    capacity = engines.workers[SAVING].facts.kv_blocks_total
    block_tokens = IterationConfig().block_size
    filled = REQUESTS * ((PROMPT_TOKENS + OUTPUT_TOKENS - 1) // block_tokens)
    assert USED_MIN <= filled / capacity <= 1, f"{filled} of {capacity} blocks are used"
    saved_before = 0
    for number in range(WARM_UPS + PAIRS):
        took = {
            name: await turns.run(name, number)
            for name in sorted((SAVING, PLAIN), reverse=bool(number % 2))
        }
        if number < WARM_UPS:
            saved_before = engines.workers[SAVING].client.report.host.saved_blocks_total
        else:
            pairs.append((took[SAVING], took[PLAIN]))
    report = engines.workers[SAVING].client.report.host
    saved = (report.saved_blocks_total - saved_before) / (PAIRS * filled)
    show(
        "saves to host memory",
        {
            "time of a turn": ratios(pairs, 0),
            "processor's time": ratios(pairs, 1),
            "a turn without": f"{median(plain[0] for _, plain in pairs):.2f} s",
            "saved blocks": f"{saved:.1%} of {filled} per turn, {filled / capacity:.0%} of the KV",
        },
    )
    assert report.host_failures_total == 0
    assert saved >= SAVED_MIN
    assert median(saving[0] / plain[0] for saving, plain in pairs) <= COST_MAX
