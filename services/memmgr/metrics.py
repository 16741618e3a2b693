"""The memory manager's Prometheus metrics, computed from its state at each scrape."""

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.common.process_metrics import cumulative
from services.core.groups.vocabulary import Group, GroupPhase
from services.core.overload.events import Action, Cause
from services.core.report import MemoryReport
from services.memmgr.change_count import UPPER_BOUNDS_S
from services.memmgr.driver import Driver
from services.memmgr.overload_watch import OverloadWatch
from services.memmgr.worker_memory import MemoryView

MOVE_CAUSES = (Cause.FULL, Cause.LARGE, Cause.UNEVEN, Cause.DRAINING, Cause.MANUAL)
SHOWN_PHASES = (GroupPhase.STABLE, GroupPhase.DEGRADED)


class MemmgrCollector(Collector):
    """Computes metrics at each scrape.

    Only the leader exports metrics of the whole cluster, so that sums over instances are correct.
    """

    def __init__(self, driver: Driver, memory: MemoryView, watch: OverloadWatch) -> None:
        self._driver = driver
        self._memory = memory
        self._watch = watch

    def collect(self) -> Iterable[Metric]:
        """All metrics of the memory manager."""
        yield GaugeMetricFamily(
            "tideserve_memmgr_leader",
            "1 on the leader, 0 on standbys.",
            value=self._driver.leads,
        )
        yield from self._changes()
        yield from self._decisions()
        yield from self._cluster()
        yield from self._demand()

    def _changes(self) -> Iterable[Metric]:
        changes = self._driver.changes
        ended = CounterMetricFamily(
            "tideserve_memmgr_changes",
            "Finished changes of groups by result: stable or failed.",
            labels=["result"],
        )
        for phase, count in changes.ended.items():
            ended.add_metric([phase], count)
        yield ended
        duration = HistogramMetricFamily(
            "tideserve_memmgr_change_duration_seconds",
            "Time from the request of a change of groups until all members serve the new groups.",
        )
        duration.add_metric([], cumulative(UPPER_BOUNDS_S, changes.counts), changes.total_s)
        yield duration

    def _decisions(self) -> Iterable[Metric]:
        decided = CounterMetricFamily(
            "tideserve_memmgr_decisions", "Decisions of the overload monitor.", labels=["action"]
        )
        for action in Action:
            decided.add_metric([action], self._watch.decided[action])
        yield decided
        moved = CounterMetricFamily(
            "tideserve_memmgr_moved_requests",
            "Running requests that moved to another worker with their KV, by cause.",
            labels=["cause"],
        )
        for cause in MOVE_CAUSES:
            moved.add_metric([cause], self._watch.moved[cause])
        yield moved

    def _cluster(self) -> Iterable[Metric]:
        """Metrics of the cluster; a standby exports no samples."""
        leads = self._driver.leads
        groups = self._driver.groups if leads else ()
        by_phase = GaugeMetricFamily(
            "tideserve_memmgr_groups", "Groups by phase.", labels=["phase"]
        )
        merged = GaugeMetricFamily(
            "tideserve_memmgr_merged_groups", "Stable groups of more than one worker."
        )
        serving = GaugeMetricFamily(
            "tideserve_memmgr_serving_workers",
            "Workers that are members of stable groups.",
            labels=["model_name"],
        )
        usable = GaugeMetricFamily(
            "tideserve_memmgr_usable_kv_blocks",
            "Usable KV blocks: the smallest member limits each group.",
            labels=["model_name"],
        )
        if leads:
            phases = Counter(group.phase for group in groups)
            for phase in SHOWN_PHASES:
                by_phase.add_metric([phase], phases[phase])
            stable = [group for group in groups if group.phase is GroupPhase.STABLE]
            merged.add_metric([], sum(len(group.members) > 1 for group in stable))
            for model in sorted({group.model for group in groups}):
                members = sum(len(group.members) for group in stable if group.model == model)
                serving.add_metric([model], members)
            for model, blocks in usable_blocks(stable, self._memory.workers()).items():
                usable.add_metric([model], blocks)
        yield from (by_phase, merged, serving, usable)

    def _demand(self) -> Iterable[Metric]:
        """The monitor's signals for autoscalers; a standby exports no samples."""
        exhausted = GaugeMetricFamily(
            "tideserve_memmgr_relief_exhausted",
            "1 while the model is overloaded and merges cannot meet its demand: add workers.",
            labels=["model_name"],
        )
        shortfall = GaugeMetricFamily(
            "tideserve_memmgr_kv_shortfall_tokens",
            "Tokens of KV that the model lacks after all possible merges, for autoscalers.",
            labels=["model_name"],
        )
        rising = GaugeMetricFamily(
            "tideserve_memmgr_demand_rising",
            "1 while groups are merged and the model's KV demand keeps rising: add workers before"
            " merges are exhausted.",
            labels=["model_name"],
        )
        if self._driver.leads:
            for model, tokens in self._watch.shortfalls.items():
                exhausted.add_metric([model], tokens > 0)
                shortfall.add_metric([model], tokens)
            for model, is_rising in self._watch.rising.items():
                rising.add_metric([model], is_rising)
        yield from (exhausted, shortfall, rising)


def usable_blocks(groups: Sequence[Group], workers: Iterable[MemoryReport]) -> dict[str, int]:
    """Usable KV blocks by model: a request needs its blocks at every member of a group."""
    blocks = {worker.worker_id: worker.engine.load.kv_blocks_total for worker in workers}
    usable: dict[str, int] = {}
    for group in groups:
        least = min((blocks.get(member.worker_id, 0) for member in group.members), default=0)
        usable[group.model] = usable.get(group.model, 0) + least
    return usable
