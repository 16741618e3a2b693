"""Engines in one process with host copies of KV; their copiers take turns like movers."""

from collections.abc import Callable
from typing import Any

from services.core.host.vocabulary import HostSettings, Save
from tests.support.engine_group import EngineGroup
from tests.support.engines import Engine
from tests.support.fake_model import LAYERS, SHAPE

BLOCK_BYTES = LAYERS * SHAPE.size_bytes


def host_settings(**changes: Any) -> HostSettings:
    """Settings under which nearly all KV is saved, and all is recalled."""
    defaults = {"save": Save.ALL, "save_from": 0.0, "lane_share": 1.0}
    return HostSettings(BLOCK_BYTES, 1e9, **(defaults | changes))


class HostGroup(EngineGroup):
    """Engines with prefix caching and `host_slots` slots in host memory."""

    def __init__(
        self, *given: Any, host_slots: int, settings: HostSettings | None = None, **options: Any
    ) -> None:
        self.host_slots = host_slots
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

    def counts(self, name: str) -> Any:
        """Counters of host copies at an engine."""
        host = self.engines[name].member.state.host
        assert host is not None
        return host.counts

    def _at_rest(self, engine: Engine) -> bool:
        copier = engine.copier
        copies = copier is not None and copier.is_busy and not copier.failed
        return super()._at_rest(engine) and not copies
