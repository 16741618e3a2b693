"""Delay until an iteration of batch requests is preempted, and the cost of preemption.

Two engine processes of the same model, each with a servicer in this process. One interrupts batch
work for online requests (`--preempt always`), the other does not. Each gets one batch prompt at a
time, which fills an iteration, and single online requests at random times while it runs. Then
merges are prepared at such times. The engine's event log has the times on the same clock.

Safepoints are measured with a runner of their own: a batch runs with and without them in turn, and
the processor's time counts.
"""

import asyncio
import random
import socket
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from benchmarks.engine_log import TYPES
from services.common.clock import monotonic_s
from services.common.event_log import read_entries
from services.core.audit.record import BATCH as PLANNED
from services.core.groups.layer_map import Stage
from services.core.planner.batch import Batch, Chunk
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationDropped, IterationFinished, IterationSuspended
from services.core.planner.preemption import Preempt
from services.core.planner.sequence_ids import request_id_of
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling, blocks_for
from services.core.service import Service, ServiceClass
from services.worker.config import WorkerConfig
from services.worker.engine.model.interrupt import WatchedInterrupt
from tests.perf.measuring import MIB, default_model, fast_dtype, runner_of_one_thread, show
from tests.support.engine_processes import EngineProcesses
from tideserve.sim.report import percentile

MEMORY_BYTES = 1024 * MIB
BATCH_TOKENS, ONLINE_TOKENS = 2048, 32
SMALL_TOKENS = 256
"""`max_batch_tokens` by default."""
ROUNDS, ARRIVALS, DROPS, BEHIND, PAIRS = 12, 6, 6, 4, 7
"""Batch prompts, online requests during each; merges; prompts with another behind; safepoints."""
PROMPTS = 4
ALWAYS, OFF = Preempt.ALWAYS.value, Preempt.OFF.value
BATCH, ONLINE = Service(ServiceClass.BATCH), Service(ServiceClass.INTERACTIVE, ttft_s=0.5)
TTFT_RATIO_MAX, SAFEPOINT_SHARE_MAX = 0.25, 0.01
"""P99 of first tokens over that without preemption; safepoints over an iteration."""
SLACK_S, STRETCH = 0.002, 1.2
"""A request may be noticed so long after an interval between safepoints, of which the slowest take
so many times the mean."""


class Load:
    """The load on both engines; batch requests and online requests get one token each."""

    def __init__(self, engines: EngineProcesses) -> None:
        self.sent_s: dict[str, float] = {}
        self.ttft_s: dict[str, float] = {}
        self.merges: list[tuple[float, float]] = []
        """When each merge was requested, and when both engines were prepared."""
        self.prompt_of: dict[str, int] = {}
        """The number of the prompt of each disturbed batch request."""
        facts = engines.workers[ALWAYS].facts
        assert facts.shape is not None
        self.layers = facts.shape.num_layers
        self._vocab_size = facts.vocab_size
        self._engines = engines
        self._rng = random.Random(BATCH_TOKENS)
        self._numbers = iter(range(10**9))
        self._prompts = [self._prompt(BATCH_TOKENS) for _ in range(PROMPTS)]
        self._length_s = 0.0

    async def run(self) -> None:
        alone = [
            await self._ask(ALWAYS, f"batch-0-{number}", prompt, BATCH)
            for number, prompt in enumerate(self._prompts)
        ]
        self._length_s = median(alone)
        for _ in range(ROUNDS):
            await self._disturbed(ALWAYS, "single", ARRIVALS)
            await self._disturbed(OFF, "single", 1)
        for _ in range(BEHIND):
            for engine in (ALWAYS, OFF):
                await self._disturbed(engine, "behind", 1, prompts=2)
        for _ in range(DROPS):
            await self._prepare_merge()

    def online(self, engine: str, case: str) -> list[str]:
        """The online requests of a case."""
        return [name for name in self.sent_s if name.startswith(f"online-{engine}-{case}")]

    async def _ask(
        self, engine: str, name: str, prompt: tuple[int, ...], service: Service
    ) -> float:
        """Send a request; return the seconds until its token."""
        sampling = Sampling(temperature=0)
        request = Request(name, prompt, sampling, Limits(1), monotonic_s(), service=service)
        self.sent_s[name] = monotonic_s()
        await self._engines.serve(request, engine)
        await self._engines.until(lambda: self._engines.streams[name].over)
        self.ttft_s[name] = monotonic_s() - self.sent_s[name]
        return self.ttft_s[name]

    async def _disturbed(self, engine: str, case: str, arrivals: int, prompts: int = 1) -> None:
        """Run batch prompts, and sequential online requests meanwhile."""
        running = self._batch(engine, prompts)
        for _ in range(arrivals):
            await asyncio.sleep(self._rng.uniform(0, 2 * self._length_s / (arrivals + 1)))
            if running.done():
                break
            name = f"online-{engine}-{case}-{next(self._numbers)}"
            await self._ask(engine, name, self._prompt(ONLINE_TOKENS), ONLINE)
        await running

    async def _prepare_merge(self) -> None:
        """Prepare a merge of both while a batch prompt runs, and abort it."""
        running, half = self._batch(ALWAYS, 1), self.layers // 2
        await asyncio.sleep(self._rng.uniform(0, self._length_s))
        stages, sent_s = [Stage(ALWAYS, 0, half), Stage(OFF, half, self.layers)], monotonic_s()
        await self._engines.reconfigure([stages], abandon=True)
        self.merges.append((sent_s, monotonic_s()))
        await running

    def _batch(self, engine: str, count: int) -> asyncio.Future[list[None]]:
        """Send `count` batch prompts concurrently."""

        async def ask(number: int) -> None:
            name = f"batch-{engine}-{next(self._numbers)}"
            self.prompt_of[name] = number
            ttft_s = await self._ask(engine, name, self._prompts[number], BATCH)
            if count == 1 and engine == OFF:
                self._length_s = ttft_s  # undisturbed: follows the machine's speed

        return asyncio.gather(*(ask(self._rng.randrange(PROMPTS)) for _ in range(count)))

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab_size) for _ in range(tokens))


class Part(NamedTuple):
    """An iteration, or a part of an interrupted one, on the monotonic clock."""

    begin_s: float
    end_s: float
    request_ids: frozenset[str]


def read_parts(folder: Path, engine: str) -> list[Part]:
    """The parts that an engine in a group of one ran, in order."""
    (path,) = folder.glob(f"{engine}-*.jsonl")
    parts, running = [], None
    for kind, value in read_entries(path, TYPES):
        if kind == PLANNED:
            running = (value.now_s, value.microbatch) if value.microbatch else None
        elif running and isinstance(
            value, IterationFinished | IterationSuspended | IterationDropped
        ):
            chunks = running[1].batch.chunks
            names = frozenset(request_id_of(chunk.seq_id) for chunk in chunks)
            parts.append(Part(running[0], value.now_s, names))
            running = None
    return parts


def notice(parts: list[Part], sent_s: float) -> tuple[float, float] | None:
    """Seconds until the engine was free, and those that the iteration took in all.

    None unless an iteration of batch work alone ran at that time.
    """
    index = bisect_right(parts, sent_s, key=lambda part: part.begin_s) - 1
    if index < 0 or sent_s >= (part := parts[index]).end_s:
        return None
    if not all(name.startswith("batch") for name in part.request_ids):
        return None
    own = [each.end_s - each.begin_s for each in parts if each.request_ids == part.request_ids]
    return part.end_s - sent_s, sum(own)


def safepoints(tokens: int) -> tuple[list[float], list[float]]:
    """Cost of safepoints in an iteration of a prompt, by pair, and the intervals between them."""
    costs, between_s = [], []
    with runner_of_one_thread(MEMORY_BYTES, max_batch_tokens=tokens, suspends=True) as runner:
        blocks = tuple(range(blocks_for(tokens, runner.block_size)))
        ids = tuple(7 * position % runner.geometry.vocab_size for position in range(tokens))
        batch = Batch((Chunk("safepoints", 0, ids, blocks, None),))
        silent, other = socket.socketpair()
        interrupt = WatchedInterrupt(lambda: False, silent.fileno())

        def run_s(watched: bool) -> float:
            began_s = time.thread_time()
            runner.run_stage(batch, None, interrupt if watched else None, suspends=watched)
            return time.thread_time() - began_s

        def intervals_s() -> list[float]:
            moments = [monotonic_s()]
            runner.run_stage(
                batch, None, lambda: bool(moments.append(monotonic_s())), suspends=True
            )
            return [after - before for before, after in pairwise([*moments, monotonic_s()])]

        with silent, other:
            run_s(False), run_s(True)  # the first runs warm up
            for pair in range(PAIRS):
                took_s = {
                    watched: run_s(watched) for watched in sorted((False, True), reverse=pair % 2)
                }
                costs.append(took_s[True] / took_s[False] - 1)
                between_s += intervals_s()
    return costs, between_s


@pytest.mark.timeout(600)
def test_safepoints_cost_little() -> None:
    rows = {}
    for tokens in (SMALL_TOKENS, BATCH_TOKENS):
        costs, between_s = safepoints(tokens)
        rows[f"cost, {tokens:,} tokens"] = (
            f"{median(costs):+.2%} (middle half {percentile(costs, 0.25):+.2%} to"
            f" {percentile(costs, 0.75):+.2%})"
        )
        rows[f"interval, {tokens:,} tokens"] = in_ms(between_s)
    show("safepoints", rows)
    assert median(costs) <= SAFEPOINT_SHARE_MAX


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[EngineProcesses]:
    config = WorkerConfig(
        worker_id="",
        etcd_url="",
        model_name="m",
        model_dir=default_model(),
        run_dir=tmp_path,
        event_log=tmp_path / "events",
        memory_bytes=MEMORY_BYTES,
        dtype=fast_dtype(),
        planner=IterationConfig(
            max_batch_tokens=BATCH_TOKENS,
            max_running=8,
            prefix_caching=False,
            scheduling=Scheduling.PRIORITY,
        ),
        profile_when_idle=False,
    )
    processes = EngineProcesses()
    try:
        changes = {
            name: {"planner": replace(config.planner, preempt=Preempt(name))}
            for name in (ALWAYS, OFF)
        }
        await processes.start(config, tuple(changes), changes=changes)
        yield processes
    finally:
        await processes.stop()


@pytest.mark.timeout(1800)
async def test_batch_requests_are_preempted_soon_and_lose_nothing(
    tmp_path: Path, engines: EngineProcesses
) -> None:
    load = Load(engines)
    await load.run()
    parts = {name: read_parts(tmp_path / "events", name) for name in (ALWAYS, OFF)}
    counts = engines.workers[ALWAYS].client.report.load
    interrupted, resumed = counts.preempted_iterations_total, counts.resumed_iterations_total
    ratios, rows = first_tokens(load, parts)
    late_s, noticed = notices(load, parts[ALWAYS])
    rows |= noticed | {"interrupted / resumed": f"{interrupted} / {resumed}"}
    show("interruptions of batch work", rows)
    # A prompt that ran together with others has the rounding of a larger batch.
    together = [part.request_ids for part in parts[ALWAYS] if len(part.request_ids) > 1]
    alone = {
        name: number
        for name, number in load.prompt_of.items()
        if name.startswith(f"batch-{ALWAYS}") and not any(name in names for names in together)
    }
    assert alone
    for name, number in alone.items():
        undisturbed = engines.streams[f"batch-0-{number}"]
        assert engines.streams[name].output() == undisturbed.output(), name
    assert counts.tokens.batch_recomputed_tokens_total == 0
    assert counts.discarded_tokens_total == 0
    assert resumed > 0, "no iteration was interrupted and resumed"
    assert ratios, "no online request arrived while batch work ran"
    assert max(ratios) <= TTFT_RATIO_MAX
    assert max(late_s) <= SLACK_S


def first_tokens(load: Load, parts: Mapping[str, list[Part]]) -> tuple[list[float], dict[str, str]]:
    """P99 of first tokens of online requests that met batch work, and ratios to it without."""
    ratios, rows = [], {}
    for case in ("single", "behind"):
        p99_s = {}
        for engine in (ALWAYS, OFF):
            names = load.online(engine, case)
            met = [name for name in names if notice(parts[engine], load.sent_s[name])]
            p99_s[engine] = percentile([load.ttft_s[name] for name in met], 0.99)
        if (always := p99_s[ALWAYS]) and (off := p99_s[OFF]):
            ratios.append(always / off)
            rows[f"first token, {case}"] = (
                f"P99 {always:.2f} s, without preemption {off:.2f} s: {always / off:.2f} x"
            )
    return ratios, rows


def notices(load: Load, parts: list[Part]) -> tuple[list[float], dict[str, str]]:
    """P99 of the seconds beyond the slowest interval between safepoints, and rows to print."""
    late_s = []
    rows = {"merge prepared after": in_ms(ended_s - sent_s for sent_s, ended_s in load.merges)}
    for event, sent_s in (
        ("online request", [load.sent_s[name] for name in load.online(ALWAYS, "")]),
        ("merge", [began_s for began_s, _ in load.merges]),
    ):
        seen = [noticed for at_s in sent_s if (noticed := notice(parts, at_s))]
        assert seen, f"no {event} arrived while batch work ran"
        beyond_s = [after_s - STRETCH * whole_s / load.layers for after_s, whole_s in seen]
        late_s.append(percentile(beyond_s, 0.99) or 0.0)
        p99 = percentile([after_s * load.layers / whole_s for after_s, whole_s in seen], 0.99)
        rows[f"{event} noticed after"] = (
            f"{in_ms(after_s for after_s, _ in seen)}; P99 {p99 or 0.0:.2f} intervals of its"
            " iteration"
        )
    return late_s, rows


def in_ms(seconds: Iterable[float]) -> str:
    values = [1e3 * each for each in seconds]
    if not values:
        return "–"
    p50, p99 = (percentile(values, share) or 0.0 for share in (0.5, 0.99))
    return f"P50 {p50:.1f}, P99 {p99:.1f} ms of {len(values)}"
