"""Overload in the simulator: two workers, requests with targets, and goodput."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from services.common.device_profile import load_profile
from services.core.audit.record import Findings
from services.core.audit.refusals import Refusals
from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.state_config import StateConfig
from services.core.scheduler.vocabulary import Command, Event, ShortfallsReported
from services.core.service import Service, ServiceClass
from tideserve.sim.cluster import MODEL, Cluster, ClusterSpec
from tideserve.sim.report import Outcome, Record
from tideserve.sim.time_model import CostTimeModel
from tideserve.sim.workload import Arrival, ClosedLoop, Length, OpenLoop

PROFILE = load_profile("A100-14B")
PROMPT, OUTPUT = Length(256, 1.0, 1, 1024), Length(32, 1.0, 1, 128)
STANDARD = Service(ServiceClass.STANDARD, ttft_s=2.0)
INTERACTIVE = Service(ServiceClass.INTERACTIVE, ttft_s=0.5, tpot_s=0.1)


@dataclass(frozen=True, slots=True)
class Served:
    """Results of a simulation, and the findings of I16 and I17."""

    records: list[Record]
    findings: Findings
    seconds: float

    @property
    def refused(self) -> list[Record]:
        """Number of refused requests."""
        return [record for record in self.records if record.outcome is Outcome.REJECTED]

    def in_time(self, service: Service | None = None) -> list[Record]:
        """Requests (of `service`) whose first token arrived within their target."""
        return [
            record
            for record in self.records
            if record.outcome is Outcome.COMPLETED
            and (service is None or record.service == service)
            and record.first_s - record.sent_s <= (record.service.ttft_s or 0.0)
        ]

    def in_time_share(self, service: Service) -> float:
        """Share of the requests of `service` whose first token arrived within their target."""
        return len(self.in_time(service)) / sum(r.service == service for r in self.records)

    def tokens_per_s(self) -> float:
        """Tokens per second of the requests in time that ended in the later two thirds."""
        began_s = self.seconds / 3
        of = [r for r in self.in_time() if began_s <= r.end_s < self.seconds]
        return sum(r.prompt_tokens + r.output_tokens for r in of) / (self.seconds - began_s)


class _Audited(Cluster):
    """A cluster whose scheduler is audited."""

    def __init__(
        self,
        spec: ClusterSpec,
        time_model: CostTimeModel,
        workload: OpenLoop | ClosedLoop,
        findings: Findings,
    ) -> None:
        super().__init__(spec, time_model, workload)
        self._refusals = Refusals(findings, "scheduler")

    def _decide(self, event: Event) -> list[Command]:
        commands = super()._decide(event)
        self._refusals.check(self.scheduler, event, commands)
        return commands


def simulate(
    workload: OpenLoop | ClosedLoop,
    seconds: float,
    scheduling: Scheduling = Scheduling.SLO,
    blocks: int = 2000,
    short: bool = True,
    **settings: object,
) -> Served:
    """Run a workload on two workers with `blocks` of KV each.

    `short`: the memory manager has reported that merges cannot provide the missing KV.
    """
    config = StateConfig(
        ttft=PROFILE.model,
        rules=ClassRules(scheduling),
        **settings,  # type: ignore[arg-type]
    )
    iteration = IterationConfig(
        16, blocks, 2048, 256, scheduling=scheduling, cost_model=PROFILE.model
    )
    spec = ClusterSpec(2, iteration, 32_768, config, drain_s=60)
    findings = Findings()
    cluster = _Audited(spec, CostTimeModel(PROFILE.model), workload, findings)
    if short:
        cluster._apply(ShortfallsReported(0.0, {MODEL: 1}))
    outcomes = cluster.run()
    cluster.scheduler.check_invariants()
    return Served(outcomes.records, findings, seconds)


def capacity(seed: int) -> tuple[float, float]:
    """Requests and tokens per second that the workers complete in a closed loop."""
    rng, seconds = Random(seed), 60.0

    def requests() -> Iterator[Arrival]:
        while True:
            yield Arrival(0.0, PROMPT.draw(rng), OUTPUT.draw(rng))

    served = simulate(ClosedLoop(requests(), 100, seconds), seconds, lateness=0.0)
    ended = [r for r in served.records if r.outcome is Outcome.COMPLETED and 20 <= r.end_s < 60]
    tokens = sum(record.prompt_tokens + record.output_tokens for record in ended)
    return len(ended) / 40, tokens / 40


def arrivals(
    rate_per_s: float, seconds: float, seed: int, interactive_per_s: float = 0.0
) -> OpenLoop:
    """Standard requests, with `interactive_per_s` of them interactive instead."""
    rng, now_s = Random(seed), 0.0
    drawn = []
    while (now_s := now_s + rng.expovariate(rate_per_s)) < seconds:
        service = INTERACTIVE if rng.random() < interactive_per_s / rate_per_s else STANDARD
        drawn.append(Arrival(now_s, PROMPT.draw(rng), OUTPUT.draw(rng), (), service))
    return OpenLoop(drawn)
