"""Whether this gateway, and the cluster behind it, can take requests."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.common.clock import monotonic_s
from services.gateway.bounds.drain import Drain
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.cluster_view import ClusterView

POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """What there is, and sentences about what is missing."""

    workers_expected: int | None
    workers_registered: int
    groups_serving: int
    missing: tuple[str, ...]

    @property
    def ready(self) -> bool:
        """A request can be placed now, and the expected workers are not waited for any more."""
        return not self.missing


class ReadinessProbe:
    """Decides from what is known now, without calls to other services.

    The workers that are expected are waited for until they are all there, and for `wait_s` seconds
    at most from when a request could be placed first: one of them may be lost for good.
    """

    def __init__(
        self,
        view: ClusterView,
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
        self._awaits_workers = workers_expected is not None
        self._serving_since_s: float | None = None

    async def run(self) -> None:
        """Notice what there is whether or not anybody asks, until no worker is waited for."""
        while self._awaits_workers:
            self.look()
            await asyncio.sleep(POLL_INTERVAL_S)

    def look(self) -> Readiness:
        """The state of this moment."""
        heartbeat = self._admission.heartbeat
        # The scheduler counts the groups of all models, the view those of this gateway's.
        stable = self._view.serving_groups()
        serving = min(heartbeat.groups_serving, stable) if heartbeat is not None else 0
        registered, in_groups = self._view.registered_workers(), self._view.serving_workers()
        missing = []
        if self._drain.leaving:
            missing.append("this gateway is shutting down")
        self._note_serving(serving)
        if self._awaits_workers:
            missing += self._awaited(registered, in_groups)
        groups = max(1, stable) if self._awaits_workers else 1
        if heartbeat is None:
            missing.append("the scheduler does not answer")
        elif not stable:
            missing.append("no group of the model is stable")
        elif serving < groups:
            missing.append(f"the scheduler sees {serving} of {groups} groups serving")
        # A worker that is lost later takes no gateway away from its clients.
        self._awaits_workers = self._awaits_workers and bool(missing)
        return Readiness(self._expected, registered, serving, tuple(missing))

    def _note_serving(self, serving: int) -> None:
        """Wait for no worker any more if requests could be placed for long enough."""
        if not serving:
            return
        now_s = self._clock()
        if self._serving_since_s is None:
            self._serving_since_s = now_s
        if now_s - self._serving_since_s >= self._wait_s:
            self._awaits_workers = False

    def _awaited(self, registered: int, in_groups: int) -> list[str]:
        """What a cluster that starts still waits for."""
        expected = self._expected or 0
        if registered < expected:
            return [f"{registered} of {expected} workers have registered"]
        if in_groups < expected:
            return [f"{in_groups} of {expected} workers are in a stable group"]
        return []

    def ready(self) -> bool:
        """Whether requests are accepted: see `Readiness.ready`."""
        return self.look().ready

    def healthy(self) -> bool:
        """At least one group serves, and this gateway is not leaving."""
        return self.look().groups_serving > 0 and not self._drain.leaving

    def queued(self) -> int | None:
        """Requests in the scheduler's queue; None while no scheduler answers."""
        heartbeat = self._admission.heartbeat
        return heartbeat.queued if heartbeat is not None else None
