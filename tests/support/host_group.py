"""Engines in one process with host copies of KV; their copiers take turns like movers."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from services.core.host.vocabulary import HostSettings, Save
from services.core.planner.configuration_events import BlocksRelocated, PoolGrown, PoolLimited
from services.core.planner.events import EmitToken, MoveBlocks
from services.worker.engine.host.store import HostStore
from services.worker.ipc import AdoptedRequest
from tests.support.engine_group import EngineGroup
from tests.support.engines import Engine
from tests.support.fake_model import LAYERS, SHAPE

BLOCK_BYTES = LAYERS * SHAPE.size_bytes


def host_settings(**changes: Any) -> HostSettings:
    """Settings under which nearly all KV is saved, and all is recalled."""
    defaults = {"save": Save.ALL, "save_from": 0.0, "lane_share": 1.0}
    return HostSettings(BLOCK_BYTES, 1e9, **(defaults | changes))


def swap_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two copies change places in every store."""
    seal = HostStore.seal

    def swap(store: HostStore, slot: int) -> None:
        seal(store, slot)
        if slot % 2:
            store._blocks[[slot - 1, slot]] = store._blocks[[slot, slot - 1]]

    monkeypatch.setattr(HostStore, "seal", swap)


class HostGroup(EngineGroup):
    """Engines with prefix caching and `host_slots` slots in host memory.

    `seen` counts what the copiers of all engines have met, as `SteppedCopier.seen`, the blocks that
    they have "saved", the tokens "recalled", and the "failures".
    """

    def __init__(
        self, *given: Any, host_slots: int, settings: HostSettings | None = None, **options: Any
    ) -> None:
        self.host_slots = host_slots
        self._lost: Counter[str] = Counter()  # counts of the engines that were lost
        # Request → tokens of its prompt that were cached, and the requests before its first token.
        self._hits: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._adopted: set[str] = set()
        options["prefix_caching"] = True
        planner = {"host": settings or host_settings(), **(options.pop("planner", None) or {})}
        super().__init__(*given, planner=planner, **options)
        for engine in self.engines.values():
            assert engine.copier is not None
            engine.copier.grow()

    def more_actions(self) -> list[Callable[[], bool | None]]:
        return [lambda engine=engine: self._step_copier(engine) for engine in self.engines.values()]

    def _step_copier(self, engine: Engine) -> bool:
        copier = engine.copier
        assert copier is not None
        before = copier.is_busy
        copier.step(0.0)
        return before

    def fail_copier(self, rng: Random) -> None:
        """The copier of some engine fails, in the middle of a job if it has any."""
        copier = self.engines[rng.choice(sorted(self.engines))].copier
        assert copier is not None
        copier.fail()

    def relocate(self, rng: Random) -> None:
        """An engine that leads no one else moves its blocks; its copier goes on meanwhile.

        As in a preparation, but that one has no requests beside it. Event logs miss it.
        """
        alone = [stages[0].worker_id for stages in self.groups if len(stages) == 1]
        engines = [self.engines[name] for name in sorted(alone)]
        settled = [
            engine
            for engine in engines
            if engine.member.settled and not engine.member.state.in_flight
        ]
        if not settled:
            return
        engine = rng.choice(settled)
        member, state = engine.member, engine.member.state
        total = state.pool.num_blocks
        limit = rng.randint(total // 2, total)
        state.handle(PoolLimited(limit))
        for _ in range(rng.randint(0, 4)):
            for command in state.handle(BlocksRelocated(limit, rng.randint(1, 6))):
                assert isinstance(command, MoveBlocks)
                member._move_blocks(command)
            self._step_copier(engine)
        state.handle(PoolGrown(total))

    def lose(self, worker_id: str) -> None:
        self._lost += self._seen_at(worker_id)
        super().lose(worker_id)

    def note_token(self, worker_id: str, token: EmitToken) -> None:
        super().note_token(worker_id, token)
        if not token.index:
            self._hits[token.request_id] = token.cached_tokens, tuple(self.streams)

    def take_over(self, worker_id: str, adopted: AdoptedRequest) -> None:
        self._adopted.add(adopted.request_id)
        super().take_over(worker_id, adopted)

    def check_owners(self) -> None:
        """The hits of each request are common with an earlier one of the same salt."""
        # A request that has begun twice may find its own blocks.
        for name in self._hits.keys() - self._adopted - self.gateway.again:
            request, (hits, earlier) = self.streams[name].request, self._hits[name]
            others = [self.streams[other].request for other in earlier if other != name]
            shared = [
                _common(request.prompt_ids, other.prompt_ids)
                for other in others
                if other.cache_salt == request.cache_salt
            ]
            assert hits <= max(shared, default=0), f"{name} has hits of another owner"

    @property
    def seen(self) -> Counter[str]:
        return sum(map(self._seen_at, self.engines), self._lost)

    def _seen_at(self, name: str) -> Counter[str]:
        counts, copier = self.counts(name), self.engines[name].copier
        assert copier is not None
        copied = {
            "saved": counts.saved_blocks_total,
            "recalled": counts.recalled_tokens_total,
            "failures": counts.failures_total,
        }
        return copier.seen + Counter(copied)

    def counts(self, name: str) -> Any:
        """Counters of host copies at an engine."""
        host = self.engines[name].member.state.host
        assert host is not None
        return host.counts

    def _at_rest(self, engine: Engine) -> bool:
        copier = engine.copier
        copies = copier is not None and copier.is_busy and copier.is_alive
        return super()._at_rest(engine) and not copies


def _common(first: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(other)))
