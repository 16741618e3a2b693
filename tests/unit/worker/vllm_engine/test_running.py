"""The load of an engine from the statistics of vLLM after each step."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest

from services.core.planner.requeue import REQUEUE_AFTER_S
from services.core.report import ClassTokens, Load
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.vllm_engine.running import STEPS_TO_START, StepStats, VllmRequests

BLOCKS, BLOCK_SIZE = 40, 16


@dataclass
class Lookups:
    queries: int = 0
    hits: int = 0


@dataclass
class Step:
    """As vLLM's `SchedulerStats`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: Lookups = field(default_factory=Lookups)


@dataclass
class Iteration:
    """As vLLM's `IterationStats`."""

    num_preempted_reqs: int


def requests() -> VllmRequests:
    return VllmRequests(BLOCKS, BLOCK_SIZE, StepStats())


def request(name: str = "r", tokens: int = 16, returnable: bool = False, batch: bool = False):
    kind = ServiceClass.BATCH if batch else ServiceClass.STANDARD
    return Request(
        name,
        (1,) * tokens,
        Sampling(),
        Limits(16),
        0.0,
        service=Service(kind),
        returnable=returnable,
    )


@pytest.fixture
def running() -> VllmRequests:
    return requests()


def test_a_submitted_request_counts_as_waiting(running: VllmRequests) -> None:
    running.add(request(), 0.0)
    assert running.load() == Load(0, 1, BLOCKS, 2, kv_blocks_total=BLOCKS, prefill_tokens=16)


def test_a_prompt_is_to_be_prefilled_until_its_first_token(running: VllmRequests) -> None:
    first, second = running.add(request("a", 16), 0.0), running.add(request("b", 48), 0.0)
    assert running.load().prefill_tokens == 64
    running.stats.running = 2
    assert running.load().prefill_tokens == 64, "both run, and neither has a token"
    running.emit(first, 1)
    assert running.load().prefill_tokens == 48
    running.remove(second)
    assert running.load().prefill_tokens == 0


def test_output_of_another_worker_is_prefilled_as_a_prompt_is(running: VllmRequests) -> None:
    entry = running.add(replace(request(), output_ids=(1,) * 15), 0.0)
    assert running.load().prefill_tokens == 31 and running.load().kv_blocks_wanted == 2
    running.emit(entry, 1)
    assert running.load().prefill_tokens == 0
    assert running.load().prompt_tokens_total == 0, "its first token came from another worker"


def test_processed_tokens_are_counted_by_class_without_cached_ones(running: VllmRequests) -> None:
    online = running.add(request("a", 16), 0.0)
    running.emit(online, 2, cached_tokens=10)
    running.emit(online, 1, cached_tokens=10)
    batch = running.add(replace(request("b", batch=True), output_ids=(1, 2)), 0.0)
    running.emit(batch, 1)
    assert running.load().tokens == ClassTokens(
        online_processed_tokens_total=6 + 3, batch_processed_tokens_total=1
    )


def test_lookups_of_all_steps_are_summed(running: VllmRequests) -> None:
    running.stats.note(Step(2, 1, 0.5, Lookups(100, 64)), Iteration(1))
    running.stats.note(Step(3, 0, 0.25, Lookups(50, 0)), None)
    running.stats.note(None, Iteration(2))
    assert running.stats == StepStats(2, 3, 0, 0.25, 3, 150, 64)
    load = running.load()
    assert (load.prefix_queries_total, load.prefix_hits_total) == (150, 64)


def test_running_state_and_blocks_come_from_vllm(running: VllmRequests) -> None:
    running.add(request("a", batch=True), 0.0)
    running.add(request("b"), 0.0)
    running.stats.running, running.stats.kv_usage = 1, 2 / BLOCKS
    load = running.load()
    assert (load.running, load.waiting, load.kv_blocks_free) == (1, 1, BLOCKS - 2)
    assert (load.batch_running, load.batch_waiting, load.kv_blocks_batch) == (1, 0, 2)


def test_blocks_of_ended_requests_are_not_counted(running: VllmRequests) -> None:
    entry = running.add(request(), 0.0)
    running.emit(entry, 3)
    running.stats.running, running.stats.kv_usage = 1, 0.5
    assert running.load().kv_blocks_free == BLOCKS - 2, "19 tokens have two blocks"
    assert running.remove(entry)
    done = ClassTokens(online_processed_tokens_total=19)
    assert running.load() == Load(0, 0, BLOCKS, 0, 0, BLOCKS, prompt_tokens_total=16, tokens=done)
    assert not running.remove(entry)


def test_a_newer_request_with_the_same_id_stays(running: VllmRequests) -> None:
    old = running.add(request(), 0.0)
    running.remove(old)
    running.add(request(), 1.0)
    assert not running.remove(old) and "r" in running


def test_a_request_without_room_for_a_whole_step_is_returned(
    running: VllmRequests,
) -> None:
    running.add(request("a", returnable=True), 0.0)
    running.add(request("b", returnable=True), 0.0)
    stats = running.stats
    late_s = REQUEUE_AFTER_S
    assert running.overdue(late_s) == [], "vLLM has reported nothing yet"
    stats.steps, stats.running, stats.waiting = STEPS_TO_START - 1, 1, 1
    assert running.overdue(late_s) == [], "the step may have begun before it came"
    stats.steps = STEPS_TO_START
    assert [item.request.request_id for item in running.overdue(late_s)] == ["b"]
    assert running.overdue(late_s / 2) == []
    stats.waiting = 0
    assert running.overdue(late_s) == []


def test_a_request_that_must_stay_is_never_returned(running: VllmRequests) -> None:
    running.add(request(), 0.0)
    running.stats.steps, running.stats.waiting = 5, 1
    assert running.overdue(100.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_load_is_consistent_for_any_vllm_statistics(seed: int) -> None:
    rng, running = Random(seed), requests()
    entries = []
    for number in range(200):
        if rng.random() < 0.5 or not entries:
            entries.append(running.add(request(f"r{number}", rng.randint(1, 99)), number))
        else:
            running.remove(entries.pop(rng.randrange(len(entries))))
        for entry in entries:
            running.emit(entry, rng.randint(0, 1))
        running.stats.running = rng.randint(0, 20)
        running.stats.kv_usage = rng.random()
        load = running.load()
        assert load.running + load.waiting == len(entries)
        assert 0 <= load.kv_blocks_free <= load.kv_blocks_total == BLOCKS
        assert load.kv_blocks_wanted >= load.waiting
        if not load.running:
            assert load.kv_blocks_free == BLOCKS


def test_batch_requests_wait_behind_later_online_requests(running: VllmRequests) -> None:
    running.by_priority = True
    batch, online = (running.add(request(name, batch=name == "b"), 0.0) for name in ("b", "o"))
    running.stats.running = 1
    assert running.waiting() == [batch]
    running.emit(batch, 1)
    assert running.waiting() == [online]
