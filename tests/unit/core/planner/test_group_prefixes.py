"""Prefixes in a group of two: the second stage caches what the leader announces."""

from services.core.planner.batch import Microbatch
from services.core.planner.block_ledger import Follower
from services.core.planner.block_pool import BlockPool
from services.core.planner.block_table import StageTable
from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import (
    BlocksAdopted,
    CapacityReported,
    ConfigurationEnded,
    FlightDiscarded,
    PoolLimited,
    ReleasedTaken,
    SequenceAdopted,
    StagesConfigured,
)
from services.core.planner.events import IterationFinished, RequestArrived
from services.core.planner.sequence import SequenceState
from services.core.planner.state import PlannerState
from services.core.prefix.cache_update import PrefixCacheUpdate
from services.core.request import Limits, Request, Sampling
from tests.support.microbatches import block_counts

BLOCKS = 12
PROMPT = tuple(range(18))


class Pair:
    """A leader with blocks of four tokens, and its single follower, which has fewer blocks."""

    def __init__(self, follower_blocks: int = BLOCKS - 2) -> None:
        config = IterationConfig(4, BLOCKS, 32, 8, 100, prefix_caching=True)
        self.leader = PlannerState(config)
        self.leader.handle(StagesConfigured((Follower(follower_blocks),)))
        self.follower = StageTable(BlockPool(follower_blocks))
        self.ran: dict[str, int] = {}
        self.updates: list[PrefixCacheUpdate] = []

    def ask(self, name: str, prompt: tuple[int, ...], outputs: int = 1) -> None:
        request = Request(name, prompt, Sampling(temperature=0.0), Limits(outputs), 0.0)
        self.leader.handle(RequestArrived(0.0, request))

    def plan(self) -> Microbatch | None:
        microbatch = self.leader.plan(0.0)
        self.leader.check_invariants()
        return microbatch

    def follow(self, microbatch: Microbatch) -> None:
        news = microbatch.prefixes or PrefixCacheUpdate()
        self.updates.append(news)
        self.follower.apply(microbatch.released, block_counts(microbatch), news)
        self.follower.check_invariants()
        for chunk in microbatch.batch.chunks:
            assert len(self.follower.block_ids(chunk.seq_id)) == len(chunk.block_ids)

    def step(self) -> bool:
        microbatch = self.plan()
        if microbatch is None:
            return False
        self.follow(microbatch)
        sampled = {}
        for chunk in microbatch.batch.chunks:
            name = chunk.seq_id
            self.ran[name] = self.ran.get(name, 0) + len(chunk.token_ids)
            if chunk.sample is not None:
                sampled[name] = 7
        self.leader.handle(IterationFinished(0.0, sampled, microbatch.number))
        self.leader.check_invariants()
        return True

    def run(self, name: str, prompt: tuple[int, ...], outputs: int = 1) -> int:
        """Run a single request; returns the number of its tokens that ran."""
        self.ask(name, prompt, outputs)
        while self.step():
            pass
        return self.ran[name]


def test_every_stage_begins_with_the_prefix_that_the_leader_found() -> None:
    pair = Pair()
    assert pair.run("a", PROMPT, 2) == 19
    pair.ask("b", PROMPT)
    microbatch = pair.plan()
    assert microbatch is not None and microbatch.batch.tokens == 2
    assert microbatch.prefixes is not None and microbatch.prefixes.shared[0].seq_id == "b"
    cached = set(pair.follower.pool.cache.find(microbatch.prefixes.shared[0].hashes))
    pair.follow(microbatch)
    assert set(pair.follower.block_ids("b")[:4]) == cached and len(cached) == 4
    pair.leader.handle(IterationFinished(0.0, {"b": 7}, microbatch.number))
    assert pair.leader.load().prefix_hits_total == 16
    assert pair.leader.load().kv_blocks_free == BLOCKS - 2


def test_the_leader_announces_evictions_before_any_stage_is_full() -> None:
    pair = Pair()
    for number in range(8):
        pair.run(f"r{number}", tuple(range(number * 20, number * 20 + 18)))
        assert pair.follower.pool.cache.idle_count <= pair.leader.pool.cache.idle_count
    assert any(news.evicted for news in pair.updates)
    assert pair.leader.preemptions_total == 0
    assert pair.run("again", tuple(range(140, 158))) == 2
    assert pair.run("r0 again", PROMPT) == 18


def test_requests_that_run_share_blocks_but_count_for_each() -> None:
    pair = Pair()
    pair.ask("a", PROMPT, 9)
    pair.step()
    pair.ask("b", PROMPT[:12], 3)
    pair.step()
    assert pair.leader.sequence_table.ledger.used == [5 + 3]
    assert pair.follower.block_count == 8 and pair.follower.pool.taken_count == 6
    while pair.step():
        pass
    assert pair.leader.load().kv_blocks_free == BLOCKS - 2


def test_a_capacity_that_shrinks_ends_all_names_at_every_stage() -> None:
    pair = Pair()
    pair.run("a", PROMPT)
    pair.leader.handle(ReleasedTaken())
    pair.follower.pool.limit(8)
    assert pair.run("b", PROMPT) == 18
    assert any(news.forget for news in pair.updates)
    assert pair.run("c", PROMPT) == 2
    pair.leader.handle(PoolLimited(8))
    assert pair.run("d", PROMPT) == 18


def test_nothing_is_cached_until_a_stage_has_all_its_blocks_again() -> None:
    """A stage forgets the content of emptied blocks, and the leader cannot know which."""
    pair = Pair()
    pair.run("a", PROMPT)
    pair.ask("high", PROMPT[:9], 4)
    pair.step()
    pair.leader.handle(CapacityReported(1, 7))
    pair.leader.handle(ReleasedTaken())
    pair.follower.pool.limit(7)
    while pair.step():
        pass
    assert pair.run("b", PROMPT) == 18
    assert pair.run("c", PROMPT) == 18
    pair.leader.handle(CapacityReported(1, BLOCKS - 2))
    pair.follower.pool.limit(BLOCKS - 2)
    assert pair.run("d", PROMPT) == 18
    assert pair.run("e", PROMPT) == 2


def test_nothing_is_shared_while_kv_moves() -> None:
    pair = Pair()
    pair.run("a", PROMPT)
    moving = Request("m", PROMPT, Sampling(temperature=0.0), Limits(4), 0.0)
    state = SequenceState(moving, (), 8, 3, 0.0, 1)
    pair.leader.handle(BlocksAdopted("m", 3))
    pair.leader.handle(SequenceAdopted(state, frozenset({1})))
    assert pair.run("b", PROMPT) == 18
    assert pair.run("c", PROMPT) == 18


def test_a_request_known_only_to_the_leader_restarts() -> None:
    """Its microbatch was lost: other stages do not know with which blocks it starts."""
    pair = Pair()
    pair.run("a", PROMPT)
    pair.ask("b", PROMPT)
    assert pair.plan() is not None
    pair.leader.handle(FlightDiscarded())
    assert [sequence.seq_id for sequence in pair.leader.waiting] == ["b"]
    pair.leader.check_invariants()
    while pair.step():
        pass
    assert pair.ran["b"] == 18
    pair.leader.handle(ConfigurationEnded())
    assert pair.leader.pool.cache.idle_count == 0
