"""What the scheduler reports about its state: metrics, demand for memory, and latest refusals."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from services.core.demand import ModelDemand
from services.core.scheduler.admission import Admission
from services.core.scheduler.class_rules import ALL
from services.core.scheduler.group_table import GroupTable
from services.core.scheduler.queue import WaitQueue
from services.core.scheduler.vocabulary import LateRefusals, Snapshot
from services.core.service import ServiceClass


@dataclass(frozen=True, slots=True)
class StateReports:
    """Reads the parts of a `SchedulerState` and changes none of them."""

    groups: GroupTable
    queue: WaitQueue
    admission: Admission

    def groups_serving(self, now_s: float) -> int:
        """Number of groups whose leader's load report is fresh, so that requests can start."""
        return sum(load.is_fresh(now_s) for load in self.groups.loads)

    def snapshot(self, now_s: float) -> Snapshot:
        """Counters and gauges for metrics and heartbeats."""
        loads, totals = list(self.groups.loads), self.admission.totals
        models = sorted({*self.groups.models, *self.queue.models()})
        serving = Counter(load.group.model for load in loads if load.is_fresh(now_s))
        # Metrics need an entry for every model and class, so that absent series read as 0.
        return Snapshot(
            queued=len(self.queue),
            oldest_wait_s=self._oldest_wait_s(ALL, now_s),
            groups_known=len(loads),
            groups_serving=self.groups_serving(now_s),
            reserved_blocks=sum(load.reserved_blocks for load in loads),
            dispatch_rate_per_s=self.admission.rates.overall.per_s(now_s),
            assigned_total=totals.assigned,
            withdrawn_total=totals.withdrawn,
            returned_total=totals.returned,
            refused_total=dict(totals.refused),
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            queue_deadline_s=self.admission.queue_deadline_s,
            wants_prefixes=self.groups.ttft is not None,
            queued_by_model={model: self.queue.demand(model)[0] for model in models},
            serving_by_model={model: serving[model] for model in models},
            queued_by_class={cls: self.queue.count((cls,)) for cls in ALL},
            oldest_wait_s_by_class={cls: self._oldest_wait_s((cls,), now_s) for cls in ALL},
            refused_total_by_class=dict(totals.refused_of_class),
            refused_late_total=dict(totals.refused_late),
            retries_broken_total=totals.retries_broken,
            buckets=tuple(
                stats
                for model in self.queue.models()
                if (stats := self.queue.bucket_stats(model, now_s)) is not None
            ),
            **self.admission.lateness.predictions(now_s),
        )

    def _oldest_wait_s(self, classes: Collection[ServiceClass], now_s: float) -> float:
        oldest_s = self.queue.oldest_deadline_start_s(classes)
        return max(0.0, now_s - oldest_s) if oldest_s is not None else 0.0

    def demands(self, now_s: float) -> tuple[ModelDemand, ...]:
        """Demand per model: waiting requests, recent refusals and the arrival rate."""
        demands = []
        for name in self.groups.models:
            model = self.groups.of_model(name)
            assert model is not None
            # Groups merge and drop layers for online demand alone: report batch demand separately.
            classes = self.admission.rules.demand_classes
            queued, queued_tokens = self.queue.demand(name, classes)
            total, total_tokens = self.queue.demand(name)
            refused, refused_tokens = model.meter.refused.at(now_s)
            rate = model.meter.arrived_tokens_per_s(now_s)
            demand = ModelDemand(
                name,
                queued,
                queued_tokens,
                refused,
                refused_tokens,
                rate,
                total - queued,
                total_tokens - queued_tokens,
                # The queue has online requests first.
                self.queue.first_tokens(name) if queued else 0,
                *model.meter.mix.rates(now_s),
                model.meter.mix.tpot_s(now_s),
            )
            if demand != ModelDemand(name):
                demands.append(demand)
        return tuple(demands)

    def late_refusals(self, now_s: float) -> list[LateRefusals]:
        """The latest refusals for lateness, by model and class."""
        refusals = list[LateRefusals]()
        for name in sorted(self.groups.models):
            model = self.groups.of_model(name)
            assert model is not None
            refusals += model.meter.late.by_class(name, now_s)
        return refusals
