"""A leader's planner over a simulated pipeline, which only models the duration of batches."""

from collections import deque
from dataclasses import dataclass, field

from services.core.cost.bubble import BubbleMeter, Interval, StageTime
from services.core.cost.model import Coefficients, CostModel
from services.core.planner.batch import Microbatch
from services.core.planner.events import Command, EmitToken, IterationFinished, RequestArrived
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service

A100 = CostModel(
    5.2513e-09, 1.4115e-04, 1.9174e-02, 1.9154e-02, Coefficients(1.2e-07, 0.0, 1.9174e-02), 1.2e-7
)

Arrival = tuple[float, str, int, int]
"""Seconds, request id, prompt tokens, output tokens."""


def arrive(
    state: PlannerState,
    name: str,
    prompt: int,
    output: int,
    at_s: float = 0.0,
    service: Service = DEFAULT_SERVICE,
) -> None:
    """Submit a request that the planner must accept."""
    request = Request(name, (1,) * prompt, Sampling(), Limits(output), at_s, service=service)
    assert state.handle(RequestArrived(at_s, request)) == []


def finish(state: PlannerState, microbatch: Microbatch, now_s: float = 0.0) -> list[Command]:
    """Finish a microbatch; each sampled token is 7."""
    sampled = {chunk.seq_id: 7 for chunk in microbatch.batch.chunks if chunk.sample}
    return state.handle(IterationFinished(now_s, sampled, microbatch.number))


@dataclass
class ModelledPipeline:
    """Stages that run `shares` of the layers each; between any two, a message takes `hop_s`.

    `services`: targets of the service classes. `times[s]`: when stage s ran each microbatch.
    `token_times_s`: when each request received its tokens. `meters`: the stages' measurements.
    """

    state: PlannerState
    shares: tuple[float, ...] = (0.5, 0.5)
    model: CostModel = A100
    hop_s: float = 0.0
    now_s: float = 0.0
    services: dict[str, Service] = field(default_factory=dict)
    times: list[list[Interval]] = field(default_factory=list)
    token_times_s: dict[str, list[float]] = field(default_factory=dict)
    meters: list[BubbleMeter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.shares]
        self.meters = [BubbleMeter() for _ in self.shares]

    def run(self, arrivals: list[Arrival], until_s: float) -> None:
        """Serve `arrivals` until all have finished, or until `until_s`."""
        waiting = deque(sorted(arrivals))
        flying: deque[tuple[float, Microbatch]] = deque()
        while self.now_s < until_s:
            while waiting and waiting[0][0] <= self.now_s:
                at_s, name, prompt, output = waiting.popleft()
                service = self.services.get(name, DEFAULT_SERVICE)
                arrive(self.state, name, prompt, output, at_s, service)
            microbatch = self._plan()
            if microbatch is not None:
                flying.append((self._send_through(microbatch), microbatch))
                continue
            ahead = [waiting[0][0]] if waiting else []
            ahead += [flying[0][0]] if flying else []
            ahead += [self._free_s(0)] if self._free_s(0) > self.now_s else []
            if not ahead:
                return
            self.now_s = min(ahead)
            while flying and flying[0][0] <= self.now_s:
                self._take_result(flying.popleft()[1])

    @property
    def stage_times(self) -> list[StageTime]:
        """The measurements of each stage."""
        return [meter.total for meter in self.meters]

    def _free_s(self, stage: int) -> float:
        return self.times[stage][-1][1] if self.times[stage] else 0.0

    def _plan(self) -> Microbatch | None:
        if not self.state.has_slot or self._free_s(0) > self.now_s:
            return None
        return self.state.plan(self.now_s)

    def _send_through(self, microbatch: Microbatch) -> float:
        """Run a microbatch through all stages; returns when the leader has the result."""
        chunks = [(chunk.start, len(chunk.token_ids)) for chunk in microbatch.batch.chunks]
        there_s = self.now_s
        vacant_s = self.meters[0].note_launch(microbatch.number, self.now_s) if chunks else 0.0
        for stage, share in enumerate(self.shares):
            if chunks:
                start_s = max(there_s, self._free_s(stage))
                there_s = start_s + share * self.model.batch_s(chunks)
                self.times[stage].append((start_s, there_s))
                self.meters[stage].note_run(start_s, there_s, vacant_s if stage else 0.0)
            there_s += self.hop_s
        return there_s

    def _take_result(self, microbatch: Microbatch) -> None:
        self.meters[0].note_result(microbatch.number, self.now_s)
        for command in finish(self.state, microbatch, self.now_s):
            assert isinstance(command, EmitToken)
            self.token_times_s.setdefault(command.request_id, []).append(self.now_s)
