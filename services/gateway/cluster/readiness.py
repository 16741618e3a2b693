"""Computes whether this gateway and the workers behind it can serve requests, for /ready.

A *group* is a set of workers that runs a copy of the model together. A group is *stable* while its
members and layers do not change.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.common.clock import monotonic_s
from services.gateway.bounds.drain import Drain
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.cluster_view import ModelView
from services.gateway.vocabulary.message import WaitingBuckets

POLL_INTERVAL_S = 1.0
NO_GROUP = "no group of the model is stable"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Counts of workers and groups, and a sentence for each unmet condition.

    `without_drops`: why workers cannot drop layers, by worker id; these serve but never merge.
    """

    workers_expected: int | None
    workers_registered: int
    groups_serving: int
    missing: tuple[str, ...]
    without_drops: Mapping[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether a request can be scheduled now and start-up is over."""
        return not self.missing


class ReadinessProbe:
    """Computes the readiness of a model from local state, without calls to other services.

    Start-up ends when `workers_expected` workers serve. It also ends `wait_s` seconds after a
    request could first be scheduled, since a worker may never start. Without `workers_expected`
    there is no start-up phase.
    """

    def __init__(
        self,
        view: ModelView,
        admission: AdmissionClient,
        drain: Drain,
        workers_expected: int | None,
        wait_s: float,
        clock: Callable[[], float] = monotonic_s,
    ) -> None:
        self._view = view
        self._admission = admission
        self._drain = drain
        self._expected = workers_expected
        self._wait_s = wait_s
        self._clock = clock
        self._awaits_workers = workers_expected is not None  # True during start-up
        self._first_serving_s: float | None = None

    async def run(self) -> None:
        """Poll until start-up is over, so that `wait_s` starts without a request for /ready."""
        while self._awaits_workers:
            self.evaluate()
            await asyncio.sleep(POLL_INTERVAL_S)

    def evaluate(self) -> Readiness:
        """Compute the readiness and update the start-up state."""
        heartbeat = self._admission.heartbeat
        stable_groups = self._view.serving_groups()
        # Older schedulers report the number of groups of all models.
        counted = heartbeat.of(self._view.model).groups_serving if heartbeat is not None else 0
        serving = min(counted, stable_groups)
        registered, in_groups = self._view.registered_workers(), self._view.serving_workers()
        missing = []
        if self._drain.leaving:
            missing.append("this gateway is shutting down")
        self._end_startup_after_wait(serving)
        if self._awaits_workers:
            missing += self._missing_workers(registered, in_groups)
        groups = max(1, stable_groups) if self._awaits_workers else 1
        if heartbeat is None:
            missing.append("the scheduler does not answer")
        elif not stable_groups:
            missing.append(NO_GROUP)
        elif serving < groups:
            missing.append(f"the scheduler sees {serving} of {groups} groups serving")
        # End start-up for good: a worker that is lost later must not make the gateway unready.
        self._awaits_workers = self._awaits_workers and bool(missing)
        without_drops = self._view.without_drops()
        return Readiness(self._expected, registered, serving, tuple(missing), without_drops)

    def _end_startup_after_wait(self, serving: int) -> None:
        """End start-up if `wait_s` seconds have passed since a group first served."""
        if not serving:
            return
        now_s = self._clock()
        if self._first_serving_s is None:
            self._first_serving_s = now_s
        if now_s - self._first_serving_s >= self._wait_s:
            self._awaits_workers = False

    def _missing_workers(self, registered: int, in_groups: int) -> list[str]:
        """The unmet start-up condition: first registrations, then membership in groups."""
        expected = self._expected or 0
        if registered < expected:
            return [f"{registered} of {expected} workers have registered"]
        if in_groups < expected:
            return [f"{in_groups} of {expected} workers are in a stable group"]
        return []

    def ready(self) -> bool:
        """Whether a request can be scheduled now; see `Readiness.ready`."""
        return self.evaluate().ready

    def healthy(self) -> bool:
        """Whether a group serves and this gateway is not shutting down."""
        return self.evaluate().groups_serving > 0 and not self._drain.leaving


class GatewayReadiness:
    """The readiness of a gateway with several models; with a single model, that of the model."""

    def __init__(
        self, probes: Mapping[str, ReadinessProbe], admission: AdmissionClient, *, needs_all: bool
    ) -> None:
        """`probes`: by model. `needs_all`: whether all models must be ready, or any model."""
        self._probes = dict(probes)
        self._admission = admission
        self._needs_all = needs_all

    async def run(self) -> None:
        """Poll until the start-up of all models is over."""
        async with asyncio.TaskGroup() as tasks:
            for probe in self._probes.values():
                tasks.create_task(probe.run())

    def evaluate(self) -> Readiness:
        """The readiness of all models together."""
        states = self.by_model().values()
        ready = (all if self._needs_all else any)(state.ready for state in states)
        expected = [s.workers_expected for s in states if s.workers_expected is not None]
        # Leave out the names of models: clients without a key may read this.
        missing = dict.fromkeys(text for state in states for text in state.missing)
        return Readiness(
            sum(expected) if expected else None,
            sum(state.workers_registered for state in states),
            sum(state.groups_serving for state in states),
            () if ready else tuple(missing),
            {worker: why for state in states for worker, why in state.without_drops.items()},
        )

    def by_model(self) -> dict[str, Readiness]:
        """The readiness of each model."""
        return {name: probe.evaluate() for name, probe in self._probes.items()}

    def of(self, model: str) -> Readiness | None:
        """The readiness of a model; None if the gateway does not serve it."""
        probe = self._probes.get(model)
        return None if probe is None else probe.evaluate()

    def model_ready(self, model: str) -> bool:
        """Whether requests for a model can be scheduled."""
        state = self.of(model)
        return state is not None and state.ready

    def groups_serving(self, model: str) -> int:
        """Number of groups that serve a model."""
        return self._probes[model].evaluate().groups_serving

    def ready(self) -> bool:
        """Whether /ready succeeds."""
        return self.evaluate().ready

    def healthy(self) -> bool:
        """Whether a group of any model serves and this gateway is not shutting down."""
        return any(probe.healthy() for probe in self._probes.values())

    def queued(self, model: str | None = None) -> int | None:
        """Queued requests of a model, or of all; None while no scheduler responds."""
        heartbeat = self._admission.heartbeat
        if heartbeat is None:
            return None
        return heartbeat.queued if model is None else heartbeat.of(model).queued

    def buckets(self, model: str) -> WaitingBuckets | None:
        """Waiting requests of a model by length; None if the scheduler does not order by length."""
        heartbeat = self._admission.heartbeat
        return heartbeat.buckets.get(model) if heartbeat is not None else None
