"""Where a request with a LoRA adapter may start: at groups with the adapter or a slot for it.

An adapter is a property of a request, not of its queue. A request whose adapter no group can take
now is skipped and holds no group. If it was overtaken too often, no request with another adapter
starts at the group that can probably load it first, until a slot is idle there. A *holder* is a
group whose leader has the adapter, or gets it with a reserved request.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from statistics import median

from services.core.adapter import Adapter
from services.core.scheduler.dispatch import could_hold
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.queue import Waiting

LOAD_S = 1.0
"""Assumed time to load an adapter while no group has reported one."""


def supports(load: GroupLoad, adapter: Adapter) -> bool:
    """Whether the group's leader can load adapters of this rank."""
    return load.group.adapter_rank_max >= adapter.rank


def is_holder(load: GroupLoad, adapter: Adapter) -> bool:
    """Whether the leader has the adapter, is loading it, or will for an assigned request."""
    reported = {loaded.digest for loaded in load.adapter_use.adapters}
    return adapter.key in reported or adapter.key in load.reserved_adapters


def has_slots(load: GroupLoad) -> bool:
    """Whether the leader reports slots."""
    return bool(load.adapter_use.adapters or load.adapter_use.adapter_slots_free)


def takes(load: GroupLoad, adapter: Adapter) -> bool:
    """Whether the adapter is in use at the leader, or a slot can be given to it or stay its own."""
    if not supports(load, adapter) or not has_slots(load):
        return False
    use, reserved = load.adapter_use, load.reserved_adapters
    idle = {
        loaded.digest
        for loaded in use.adapters
        if not (loaded.loading or loaded.running or loaded.digest in reserved)
    }
    if is_holder(load, adapter) and adapter.key not in idle:
        return True
    # Reserved adapters may evict any idle one, also this one.
    arriving = reserved.difference(loaded.digest for loaded in use.adapters)
    return use.adapter_slots_free + len(idle) > len(arriving)


def load_s(load: GroupLoad, others: Iterable[GroupLoad]) -> float:
    """Predicted seconds to load an adapter: the median of this group's loads, else of `others`."""
    times = _load_times([load]) or _load_times(others)
    return median(times) if times else LOAD_S


def _load_times(loads: Iterable[GroupLoad]) -> list[float]:
    return [
        loaded.load_s for load in loads for loaded in load.adapter_use.adapters if loaded.load_s
    ]


def _fewest_running(load: GroupLoad) -> tuple[int, str]:
    """The number of requests that must end before a slot is idle, as far as reported."""
    running = (loaded.running for loaded in load.adapter_use.adapters)
    return min(running, default=0), load.group.group_id


@dataclass(slots=True)
class AdapterPlaces:
    """Groups of a model by the adapters that they take, while the next request is chosen."""

    loads: Collection[GroupLoad]
    overtaken_max: int
    # Ids of the groups that take an adapter, by digest.
    _takers: dict[str, frozenset[str]] = field(default_factory=dict)
    # By group id: digest of the adapter for which the next idle slot is kept.
    _kept: dict[str, str] = field(default_factory=dict)

    def admits(self, waiting: Waiting) -> bool:
        """Whether some group takes the adapter of a request now; call it in queue order."""
        adapter = waiting.ask.adapter
        if adapter is None or self.takers(adapter):
            return True
        if waiting.overtaken >= self.overtaken_max and adapter.digest not in self._kept.values():
            self._keep(waiting, adapter)
        return False

    def _keep(self, waiting: Waiting, adapter: Adapter) -> None:
        """Keep the next idle slot of a group for an adapter."""
        ask = waiting.ask
        able = [
            load
            for load in self.loads
            if load.group.group_id not in self._kept
            and supports(load, adapter)
            and has_slots(load)
            and could_hold(load, ask.prompt_tokens, ask.max_tokens)
        ]
        if able:
            # The group drains while others get requests, so the next choice is the same.
            group = min(able, key=_fewest_running).group
            self._kept[group.group_id] = adapter.digest
            self._takers.clear()

    def takers(self, adapter: Adapter) -> frozenset[str]:
        """Ids of the groups that take the adapter now."""
        takers = self._takers.get(adapter.digest)
        if takers is None:
            takers = self._takers[adapter.digest] = frozenset(
                load.group.group_id
                for load in self.loads
                if takes(load, adapter)
                and self._kept.get(load.group.group_id, adapter.digest) == adapter.digest
            )
        return takers

    def closed_to(self, adapter: Adapter | None) -> frozenset[str]:
        """Addresses of the groups that do not take the adapter; empty without an adapter."""
        if adapter is None:
            return frozenset()
        takers = self.takers(adapter)
        return frozenset(
            load.group.address for load in self.loads if load.group.group_id not in takers
        )

    def usable(self, waiting: Waiting) -> frozenset[str]:
        """Addresses of the groups that take the adapter of a request and could hold its KV."""
        ask = waiting.ask
        assert ask.adapter is not None
        takers = self.takers(ask.adapter)
        return frozenset(
            load.group.address
            for load in self.loads
            if load.group.group_id in takers and could_hold(load, ask.prompt_tokens, ask.max_tokens)
        )
