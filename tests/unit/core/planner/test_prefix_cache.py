"""Cached prefixes: correct blocks are shared, and no request is worse off."""

import random
from dataclasses import replace
from typing import Any

import pytest

from services.core.planner.batch import Batch
from services.core.planner.block_ledger import Follower
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import (
    ConfigurationEnded,
    SequenceResumed,
    StagesConfigured,
)
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.state import PlannerState
from services.core.request import Limits, LogprobOptions, Request, Sampling

BLOCK_SIZE = 4
VOCABULARY = 50


def next_token(tokens: tuple[int, ...]) -> int:
    """The token after these tokens."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) + 7) % VOCABULARY


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 1, salt: str = "") -> Request:
    greedy = Sampling(temperature=0.0)
    return Request(name, prompt, greedy, Limits(max_tokens), 0.0, cache_salt=salt)


class Engine:
    """A planner, and a model whose KV records its tokens and tenant."""

    def __init__(self, num_blocks: int = 64, prefix_caching: bool = True, **changes: int) -> None:
        bounds = {"max_batch_tokens": 64, "max_running": 8, "max_waiting": 100} | changes
        self.state = PlannerState(
            IterationConfig(BLOCK_SIZE, num_blocks, **bounds, prefix_caching=prefix_caching)
        )
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ran = 0
        self._salts: dict[str, str] = {}
        self._kv: dict[tuple[int, int], int] = {}

    def ask(self, request_: Request) -> None:
        self.tokens[request_.request_id] = list(request_.prompt_ids)
        self.outputs[request_.request_id] = []
        self._salts[request_.request_id] = request_.cache_salt
        self.state.handle(RequestArrived(0.0, request_))
        self.state.check_invariants()

    def step(self, drop: bool = False) -> bool:
        """Run an iteration, or drop it half-way; False if there is none."""
        microbatch = self.state.plan(0.0)
        self.state.check_invariants()
        if microbatch is None:
            return False
        sampled = self._run(microbatch.batch)
        if drop:
            self.state.handle(IterationDropped(0.0))
        else:
            for command in self.state.handle(IterationFinished(0.0, sampled)):
                self._take(command)
        self.state.check_invariants()
        return True

    def run(self, *requests: Request) -> None:
        """Run these requests to their ends."""
        for request_ in requests:
            self.ask(request_)
        while self.step():
            pass

    def _run(self, batch: Batch) -> dict[str, int]:
        sampled = {}
        for chunk in batch.chunks:
            name, end = chunk.seq_id, chunk.start + len(chunk.token_ids)
            tokens = tuple(self.tokens[name])
            assert chunk.token_ids == tokens[chunk.start : end]
            self.ran += len(chunk.token_ids)
            for place in range(end):
                at = (chunk.block_ids[place // BLOCK_SIZE], place % BLOCK_SIZE)
                meant = hash((self._salts[name], tokens[: place + 1]))
                if place >= chunk.start:
                    self._kv[at] = meant
                assert self._kv[at] == meant, f"{name} reads KV of others at {place}"
            if chunk.sample is not None:
                sampled[name] = next_token(tokens[:end])
        return sampled

    def _take(self, command: object) -> None:
        assert isinstance(command, EmitToken)
        if command.index == 0:
            self.cached[command.request_id] = command.cached_tokens
        self.tokens[command.request_id].append(command.token_id)
        self.outputs[command.request_id].append(command.token_id)


def prompt_of(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def test_cached_blocks_are_not_recomputed() -> None:
    engine = Engine()
    engine.run(request("a", prompt_of(18), 3))
    ran = engine.ran
    engine.run(request("b", prompt_of(18), 3))
    assert engine.ran - ran == 2 + 2, "the last two tokens of the prompt, and two of the output"
    assert engine.outputs["a"] == engine.outputs["b"]
    assert engine.cached == {"a": 0, "b": 16}
    load = engine.state.load()
    assert (load.prefix_queries_total, load.prefix_hits_total) == (36, 16)
    assert load.kv_blocks_free == 64, "cached blocks are free"


def test_the_last_token_of_a_prompt_always_runs() -> None:
    engine = Engine()
    engine.run(request("a", prompt_of(16)), request("b", prompt_of(16)))
    engine.run(request("c", prompt_of(16)))
    assert engine.cached["c"] == 12
    assert engine.outputs["c"] == engine.outputs["a"]


def test_output_is_part_of_the_prefix_of_the_next_turn() -> None:
    engine = Engine()
    engine.run(request("a", prompt_of(10), 7))
    engine.run(request("b", (*engine.tokens["a"], *prompt_of(6))))
    assert engine.cached["b"] == 16, "of 17 tokens the last never ran"


def test_requests_that_run_at_once_share_blocks() -> None:
    engine = Engine(num_blocks=12)
    engine.ask(request("a", prompt_of(33), 4))
    engine.step()
    engine.ask(request("b", prompt_of(33), 4))
    engine.step()
    tables = engine.state.table.tables
    assert tables["a"][:8] == tables["b"][:8] and tables["a"][8] != tables["b"][8]
    assert engine.state.pool.taken_count == 10, "alone each needs nine"
    engine.run()
    assert engine.outputs["a"] == engine.outputs["b"]
    assert engine.state.preemptions_total == 0


def test_tenants_share_nothing() -> None:
    engine = Engine()
    engine.run(request("a", prompt_of(18), salt="ann"))
    engine.run(request("b", prompt_of(18), salt="bob"), request("c", prompt_of(18)))
    assert engine.cached == {"a": 0, "b": 0, "c": 0}
    engine.run(request("d", prompt_of(18), salt="bob"))
    assert engine.cached["d"] == 16


def test_a_prompt_with_log_probabilities_is_not_cached() -> None:
    engine = Engine()
    engine.run(request("a", prompt_of(18)))
    with_logprobs = replace(request("b", prompt_of(18)), logprobs=LogprobOptions(prompt=0))
    engine.ask(with_logprobs)
    microbatch = engine.state.plan(0.0)
    assert microbatch is not None and microbatch.batch.tokens == 18


def test_uncached_prompts_are_not_counted_as_misses() -> None:
    engine = Engine()
    engine.run(request("a", prompt_of(18)), request("b", prompt_of(18)))
    before = engine.state.load()
    with_logprobs = replace(request("c", prompt_of(18)), logprobs=LogprobOptions(prompt=0))
    engine.run(with_logprobs)
    after = engine.state.load()
    assert after.prefix_queries_total == before.prefix_queries_total == 36
    assert after.prefix_hits_total == before.prefix_hits_total
    engine.run(request("d", prompt_of(18)))
    assert engine.cached == {"a": 0, "b": 0, "c": 0, "d": 16}


class Lookups(dict[bytes, int]):
    """Blocks by name; counts the lookups."""

    count = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


@pytest.mark.parametrize("running", [True, False], ids=["in use", "idle"])
def test_waiting_cost_does_not_grow_with_the_cached_prefix(running: bool) -> None:
    counts = []
    for blocks in (20, 200):
        engine = Engine(num_blocks=2 * blocks + 20, max_batch_tokens=4000)
        prefix = prompt_of(BLOCK_SIZE * blocks)
        engine.run(request("before", prefix))
        if running:
            engine.ask(request("runs", prefix, 30))
        engine.ask(request("fills", prompt_of(BLOCK_SIZE * blocks, start=5000), 30))
        engine.step()
        for number in range(16):
            tail = prompt_of(BLOCK_SIZE * (blocks + 10), start=6000 + number)
            engine.ask(replace(request(f"w{number}", prefix + tail), returnable=True))
        engine.step()
        assert len(engine.state.waiting) == 16
        lookups = Lookups(engine.state.pool.cache._block_of)
        engine.state.pool.cache._block_of = lookups
        for _ in range(8):
            engine.step()
            assert engine.state.requeue_due_s is not None
        counts.append(lookups.count)
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize("seed", range(30))
def test_a_request_that_is_admitted_by_shared_blocks_has_room(seed: int) -> None:
    """Blocks of a prefix belong to several requests, and are acquired and released."""
    rng = random.Random(seed)
    engine = Engine(num_blocks=16, max_batch_tokens=rng.choice([8, 32]))
    table, shared = engine.state.sequence_table, 0
    for number in range(80):
        prompt = prompt_of(rng.choice([4, 8, 12, 20, 28, 36]), start=rng.choice([0, 0, 0, 20]))
        engine.ask(request(f"r{number}", prompt, rng.randint(1, 12)))
        for _ in range(rng.randint(0, 4)):
            first = table.next_to_admit(8, 8)
            if first is not None:
                missing = first.blocks_to_admit(BLOCK_SIZE) - table.ledger.free
                cache = engine.state.pool.cache
                in_use = [not cache.is_idle(block) for block in table.prefixes.find(first)]
                assert missing <= sum(in_use)
                shared += missing > 0
            engine.step(drop=rng.random() < 0.1)
    engine.run()
    assert shared > 0


def test_a_dropped_iteration_caches_no_block() -> None:
    engine = Engine()
    engine.ask(request("a", prompt_of(18)))
    engine.step(drop=True)
    engine.ask(request("b", prompt_of(18)))
    engine.step()
    assert engine.cached == {"a": 0, "b": 0}
    engine.run(request("c", prompt_of(18)))
    assert engine.cached["c"] == 16


def test_cached_blocks_are_evicted_before_running_requests_are_preempted() -> None:
    engine = Engine(num_blocks=8)
    engine.run(request("a", prompt_of(16)))
    engine.run(request("b", prompt_of(10, start=20), 20), request("c", prompt_of(2), 6))
    assert engine.state.preemptions_total == 0
    engine.run(request("d", prompt_of(16)))
    assert engine.cached["d"] == 0


def test_a_preempted_request_finds_its_own_blocks() -> None:
    engines = [Engine(num_blocks=8, prefix_caching=caching) for caching in (False, True)]
    for engine in engines:
        engine.run(request("a", prompt_of(12), 12), request("b", prompt_of(13, start=20), 12))
        assert engine.state.preemptions_total == 1
    without, cached = engines
    assert cached.outputs == without.outputs
    assert cached.ran <= without.ran - 8
    assert cached.cached == {"a": 0, "b": 0}, "recomputed prefixes are not reported as hits"


def test_a_change_of_layers_clears_the_cache() -> None:
    """Blocks that two requests share stay theirs and count for each; no prefix stays known."""
    engine = Engine()
    engine.ask(request("a", prompt_of(18), 4))
    engine.step()
    engine.ask(request("b", prompt_of(18), 4))
    engine.step()
    state = engine.state
    state.handle(ConfigurationEnded())
    assert state.table.block_count == 10 and state.pool.taken_count == 6
    state.handle(StagesConfigured((Follower(64),)))
    state.check_invariants()
    engine.ask(request("c", prompt_of(18)))
    assert not list(state.pool.cache.find(state.sequences["a"].block_hashes))
    state.handle(ConfigurationEnded())
    state.handle(StagesConfigured())
    for name in "ab":
        state.handle(SequenceResumed(name))
    engine.run()
    assert engine.cached["c"] == 0 and engine.outputs["a"] == engine.outputs["b"]
    engine.run(request("d", prompt_of(18)))
    assert engine.cached["d"] == 16
    state.check_invariants()


@pytest.mark.parametrize("seed", range(60))
def test_tokens_do_not_depend_on_what_is_cached(seed: int) -> None:
    """Preemptions, aborts and dropped iterations, with prompts that continue earlier ones."""
    rng = random.Random(seed)
    num_blocks = rng.choice([8, 12, 30])
    engine = Engine(num_blocks, max_batch_tokens=rng.choice([8, 32]))
    capacity, wanted = num_blocks * BLOCK_SIZE, {}
    for number in range(40):
        outputs = list(engine.tokens.values())
        begin = tuple(rng.choice(outputs)) if outputs and rng.random() < 0.7 else ()
        prompt = (*begin[: rng.randint(0, len(begin))], rng.randrange(VOCABULARY))
        prompt += tuple(rng.randrange(2) for _ in range(rng.randint(0, 9)))
        prompt = prompt[-capacity // 2 :]
        most = rng.randint(1, min(12, capacity - len(prompt)))
        request_ = request(f"r{number}", prompt, most, rng.choice(["", "", "tenant"]))
        wanted[request_.request_id] = request_
        engine.ask(request_)
        for _ in range(rng.randint(0, 6)):
            engine.step(drop=rng.random() < 0.1)
        if rng.random() < 0.1:
            gone = rng.choice(list(wanted))
            engine.state.handle(RequestAborted(0.0, gone))
            engine.state.check_invariants()
            del wanted[gone]
    engine.run()
    assert engine.state.pool.free_count == num_blocks
    assert engine.state.load().prefix_hits_total > 0 or num_blocks == 8
    for name, request_ in wanted.items():
        tokens = request_.prompt_ids
        for _ in range(request_.limits.max_tokens):
            tokens += (next_token(tokens),)
        assert tuple(engine.tokens[name]) == tokens


@pytest.mark.parametrize("seed", range(5))
def test_hits_are_those_of_an_independent_count(seed: int) -> None:
    """As many as the longest prefix of whole blocks that an earlier request of the tenant ran."""
    rng = random.Random(seed)
    engine = Engine(num_blocks=2000)
    ran: list[tuple[str, tuple[int, ...]]] = []
    hits = 0
    for number in range(60):
        begin = rng.choice(ran)[1] if ran and rng.random() < 0.8 else ()
        prompt = begin[: rng.randint(0, len(begin))]
        prompt += tuple(rng.randrange(3) for _ in range(rng.randint(1, 20)))
        request_ = request(f"r{number}", prompt, rng.randint(1, 6), rng.choice(["", "tenant"]))
        best = 0
        for salt, tokens in ran:
            if salt == request_.cache_salt:
                common = 0
                while (
                    common < min(len(tokens), len(prompt) - 1) and tokens[common] == prompt[common]
                ):
                    common += 1
                best = max(best, common // BLOCK_SIZE * BLOCK_SIZE)
        hits += best
        engine.run(request_)
        assert engine.cached[request_.request_id] == best
        ran.append((request_.cache_salt, tuple(engine.tokens[request_.request_id][:-1])))
    assert engine.state.load().prefix_hits_total == hits > 0
