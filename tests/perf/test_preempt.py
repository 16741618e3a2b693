"""Delay until an iteration of batch work gives way, and what that costs.

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
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from benchmarks.engine_log import TYPES
from services.common.clock import monotonic_s
from services.common.event_log import read_entries
from services.common.timeouts import timeout
from services.core.audit.record import BATCH as PLANNED
from services.core.line_order import Scheduling
from services.core.planner.batch import Batch, Chunk
from services.core.planner.events import IterationDropped, IterationFinished, IterationSuspended
from services.core.planner.preemption import Preempt
from services.core.planner.sequence_names import request_of
from services.core.request import Limits, Request, Sampling, blocks_for
from services.core.service import Service, ServiceClass
from services.worker.config import WorkerConfig
from services.worker.engine.model.interrupt import WatchedInterrupt
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
from tests.perf.measuring import MIB, default_model, fast_dtype, runner_of_one_thread, show
from tideserve.sim.report import percentile

MEMORY_BYTES = 1024 * MIB
ANSWER_TIMEOUT_S = 60.0
BATCH_TOKENS, ONLINE_TOKENS = 2048, 32
SMALL_TOKENS = 256
"""`max_batch_tokens` by default."""
ROUNDS, ARRIVALS, DROPS, BEHIND, PAIRS = 12, 6, 6, 4, 7
"""Batch prompts, online requests during each; merges; prompts with another behind; safepoints."""
PROMPTS = 4
BATCH, ONLINE = Service(ServiceClass.BATCH), Service(ServiceClass.INTERACTIVE, ttft_s=0.5)
TTFT_RATIO_MAX, SAFEPOINT_SHARE_MAX = 0.25, 0.01
"""P99 of first tokens over that without preemption; safepoints over an iteration."""


@dataclass(slots=True)
class Answer:
    """One request: when it was sent and got its first token, and its tokens."""

    sent_s: float
    first_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.first_s - self.sent_s


class Servicer:
    """The servicer's end of one engine; leaving it ends the engine."""

    def __init__(self, preempt: Preempt, folder: Path) -> None:
        self.name = preempt.value
        self.events = folder / f"{preempt}-events"
        config = WorkerConfig(
            worker_id=self.name,
            etcd_url="",
            model_name="m",
            model_dir=default_model(),
            run_dir=folder / preempt,
            event_log=self.events,
            memory_bytes=MEMORY_BYTES,
            dtype=fast_dtype(),
            max_batch_tokens=BATCH_TOKENS,
            max_running=8,
            prefix_caching=False,
            profile_when_idle=False,
            scheduling=Scheduling.PRIORITY.value,
            preempt=self.name,
        )
        self.client = EngineClient(config, f"{self.name}-1")
        self.answers: dict[str, Answer] = {}
        self.facts: EngineReady

    async def __aenter__(self) -> "Servicer":
        self.facts = await self.client.start()
        self._running = asyncio.create_task(self.client.run(self._note, lambda: None))
        await self.client.apply(ApplyConfiguration([self.group(0, self.layers, "first")]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        await self.client.stop()

    @property
    def layers(self) -> int:
        assert self.facts.shape is not None
        return self.facts.shape.num_layers

    def group(self, first_layer: int, end_layer: int, attempt: str) -> GroupPlan:
        return GroupPlan(f"group-{self.name}", 1, [self.stage(first_layer, end_layer, attempt)])

    def stage(self, first_layer: int, end_layer: int, attempt: str) -> MemberPlan:
        lanes = (
            Lane(self.facts.activation_address, f"activations-{self.name}-{attempt}"),
            Lane(self.facts.bulk_address, f"bulk-{self.name}-{attempt}"),
        )
        layers = (first_layer, end_layer)
        return MemberPlan(self.name, f"{self.name}-1", *layers, *lanes, "127.0.0.1:1")

    async def ask(self, name: str, prompt: tuple[int, ...], service: Service) -> Answer:
        """The answer to a request of one token."""
        sampling = Sampling(temperature=0)
        request = Request(name, prompt, sampling, Limits(1), monotonic_s(), service=service)
        answer = self.answers[name] = Answer(monotonic_s())
        await self.client.start_request(request)
        async with timeout(ANSWER_TIMEOUT_S):
            await answer.ended.wait()
        return answer

    def _note(self, progress: Progress) -> None:
        assert not progress.refusals
        for token in progress.tokens:
            answer = self.answers[token.request_id]
            answer.first_s = answer.first_s or monotonic_s()
            answer.tokens.append(token.token_id)
            if token.finish_reason is not None:
                answer.ended.set()


class Load:
    """The load on both engines."""

    def __init__(self, always: Servicer, off: Servicer) -> None:
        self.servicers = (always, off)
        self.merges: list[tuple[float, float]] = []
        """When each was asked for, and when both engines were prepared."""
        self.prompt_of: dict[str, int] = {}
        """The number of the prompt of each batch request."""
        self._rng = random.Random(BATCH_TOKENS)
        self._numbers = iter(range(10**9))
        self._prompts = [self._prompt(BATCH_TOKENS) for _ in range(PROMPTS)]
        self._length_s = 0.0

    async def run(self) -> None:
        always, off = self.servicers
        answers = [
            await always.ask(f"batch-0-{number}", prompt, BATCH)
            for number, prompt in enumerate(self._prompts)
        ]
        self._length_s = median(answer.ttft_s for answer in answers)
        for _ in range(ROUNDS):
            await self._disturbed(always, "single", ARRIVALS)
            await self._disturbed(off, "single", 1)
        for _ in range(BEHIND):
            await self._disturbed(always, "behind", 1, prompts=2)
            await self._disturbed(off, "behind", 1, prompts=2)
        for _ in range(DROPS):
            await self._prepare_merge()

    async def _disturbed(
        self, servicer: Servicer, case: str, arrivals: int, prompts: int = 1
    ) -> None:
        """Batch prompts, and online requests one after another while these run."""
        running = self._batch(servicer, prompts)
        for _ in range(arrivals):
            await asyncio.sleep(self._rng.uniform(0, 2 * self._length_s / (arrivals + 1)))
            if running.done():
                break
            name = f"online-{case}-{next(self._numbers)}"
            await servicer.ask(name, self._prompt(ONLINE_TOKENS), ONLINE)
        await running

    async def _prepare_merge(self) -> None:
        """Prepare a merge of both while a batch prompt runs, and give it up again."""
        always, off = self.servicers
        running = self._batch(always, 1)
        await asyncio.sleep(self._rng.uniform(0, self._length_s))
        attempt, half = f"merge-{next(self._numbers)}", always.layers // 2
        stages = [always.stage(0, half, attempt), off.stage(half, always.layers, attempt)]
        command, sent_s = Prepare(attempt, [GroupPlan("merged", 2, stages)]), monotonic_s()
        prepared = await asyncio.gather(
            *(one.client.prepare(command, ANSWER_TIMEOUT_S) for one in self.servicers)
        )
        self.merges.append((sent_s, monotonic_s()))
        assert not any(answer.error for answer in prepared)
        for servicer in self.servicers:
            await servicer.client.abort_preparation(attempt)
        await running

    def _batch(self, servicer: Servicer, count: int) -> asyncio.Task[None]:
        """Send so many batch prompts at once."""
        numbers = [self._rng.randrange(PROMPTS) for _ in range(count)]

        async def ask(number: int) -> None:
            name = f"batch-1-{next(self._numbers)}"
            self.prompt_of[name] = number
            answer = await servicer.ask(name, self._prompts[number], BATCH)
            if count == 1 and servicer is self.servicers[1]:
                self._length_s = answer.ttft_s  # undisturbed: follows the machine's speed

        async def ask_all() -> None:
            await asyncio.gather(*map(ask, numbers))

        return asyncio.create_task(ask_all())

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        vocab_size = self.servicers[0].facts.vocab_size
        return tuple(self._rng.randrange(vocab_size) for _ in range(tokens))


class Part(NamedTuple):
    """An iteration, or a part of an interrupted one, on the monotonic clock."""

    begin_s: float
    end_s: float
    request_ids: frozenset[str]


def read_parts(folder: Path) -> list[Part]:
    """The parts that an engine in a group of one ran, in order."""
    (path,) = folder.glob("*.jsonl")
    parts, running = [], None
    for kind, value in read_entries(path, TYPES):
        if kind == PLANNED:
            running = (value.now_s, value.microbatch) if value.microbatch else None
        elif running and isinstance(
            value, IterationFinished | IterationSuspended | IterationDropped
        ):
            chunks = running[1].batch.chunks
            names = frozenset(request_of(chunk.request_id) for chunk in chunks)
            parts.append(Part(running[0], value.now_s, names))
            running = None
    return parts


class Notice(NamedTuple):
    """Seconds until the engine was free for what was sent, and what that iteration took in all."""

    after_s: float
    iteration_s: float


def notice(parts: list[Part], sent_s: float) -> Notice | None:
    """None unless an iteration of batch work alone ran at that time."""
    index = bisect_right(parts, sent_s, key=lambda part: part.begin_s) - 1
    if index < 0 or sent_s >= (part := parts[index]).end_s:
        return None
    if not all(name.startswith("batch") for name in part.request_ids):
        return None
    own = [one.end_s - one.begin_s for one in parts if one.request_ids == part.request_ids]
    return Notice(part.end_s - sent_s, sum(own))


def safepoints(tokens: int) -> tuple[list[float], list[float]]:
    """What they add to an iteration of one prompt, by pair; and the intervals between them."""
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
    assert (percentile(costs, 0.25) or 0.0) <= SAFEPOINT_SHARE_MAX


@pytest.mark.timeout(900)
async def test_interrupted_batch_work_gives_way_soon_and_loses_nothing(tmp_path: Path) -> None:
    async with Servicer(Preempt.ALWAYS, tmp_path) as always, Servicer(Preempt.OFF, tmp_path) as off:
        load = Load(always, off)
        await load.run()
        counts = always.client.report.load
    parts = {servicer.name: read_parts(servicer.events) for servicer in (always, off)}
    rows = {}
    online = {
        case: {
            servicer.name: [
                answer
                for name, answer in servicer.answers.items()
                if name.startswith(f"online-{case}")
                and notice(parts[servicer.name], answer.sent_s) is not None
            ]
            for servicer in (always, off)
        }
        for case in ("single", "behind")
    }
    sent_s = {
        "online request": [one.sent_s for each in online.values() for one in each[always.name]],
        "merge": [began_s for began_s, _ in load.merges],
    }
    for what, times_s in sent_s.items():
        notices = [seen for at_s in times_s if (seen := notice(parts[always.name], at_s))]
        intervals = [seen.after_s * always.layers / seen.iteration_s for seen in notices]
        rows[f"{what} noticed after"] = in_ms(seen.after_s for seen in notices)
        if intervals:
            rows[f"{what}, in intervals"] = f"P99 {percentile(intervals, 0.99):.2f}"
    rows["merge prepared after"] = in_ms(ended_s - began_s for began_s, ended_s in load.merges)
    ratios = {}
    for case, answers in online.items():
        tails = [percentile([one.ttft_s for one in each], 0.99) for each in answers.values()]
        if all(tails):
            ratios[case] = tails[0] / tails[1]
            rows[f"first token, {case}"] = (
                f"P99 {tails[0]:.2f} s, without preemption {tails[1]:.2f} s: {ratios[case]:.2f} x"
            )
    interrupted, resumed = counts.preempted_iterations_total, counts.resumed_iterations_total
    rows["interrupted / resumed"] = f"{interrupted} / {resumed}"
    show("interruptions of batch work", rows)
    # A prompt that ran together with others has the rounding of a larger batch.
    together = {
        name
        for part in parts[always.name]
        if len(part.request_ids) > 1
        for name in part.request_ids
    }
    alone = [name for name in load.prompt_of if name in always.answers and name not in together]
    assert alone
    for name in alone:
        undisturbed = always.answers[f"batch-0-{load.prompt_of[name]}"]
        assert always.answers[name].tokens == undisturbed.tokens, name
    assert counts.tokens.batch_recomputed_tokens_total == 0
    # An iteration that waits for too long while others run is given up, as on a busy machine.
    given_up = interrupted - resumed
    assert given_up <= counts.discarded_tokens_total <= given_up * BATCH_TOKENS
    assert resumed > 0, "no iteration was interrupted and resumed"
    assert all(ratio <= TTFT_RATIO_MAX for ratio in ratios.values())


def in_ms(seconds: Iterable[float]) -> str:
    values = list(seconds)
    if not values:
        return "–"
    p50, p99 = (1e3 * (percentile(values, share) or 0.0) for share in (0.5, 0.99))
    return f"P50 {p50:.1f}, P99 {p99:.1f} ms of {len(values)}"
