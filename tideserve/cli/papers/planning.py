"""The processor's time of planning beside the modelled time of iterations, for BROS's Figure 14.

Unlike other figures of a page, it is measured, on the machine that makes the page.
"""

import time
from itertools import count, islice

from services.core.planner.events import RequestArrived
from services.core.planner.fast_forward import finish_filled
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from tideserve.cli.simulation_options import PreparedSimulation
from tideserve.sim.pipeline import shape_of
from tideserve.sim.workload import Arrival, CoServed

TOKEN = -1
WARM_UP_S = 10.0
"""Until then the running sequences become more."""


class PlannedWorker:
    """A worker's planner that gets the requests of a workload when they arrive."""

    def __init__(self, prepared: PreparedSimulation, system: str) -> None:
        spec, workload = prepared.systems[system]
        assert isinstance(workload, CoServed)
        self.state = PlannerState(spec.iteration)
        self.now_s = self.planning_s = self.iterations_s = 0.0
        self._time_model, self._execution = prepared.time_model, spec.iteration.execution
        self._online = iter(workload.online.arrivals)
        self._next: Arrival | None = next(self._online, None)
        self._batch = workload.batch.requests
        self._clients = workload.batch.concurrency
        self._numbers = count()

    def run(self, until_s: float) -> None:
        """Plan and end iterations; those after `WARM_UP_S` count."""
        while self.now_s < until_s and self._arrive():
            began_s = time.thread_time()
            microbatch = self.state.plan(self.now_s)
            planned_s = time.thread_time() - began_s
            if microbatch is None:
                return
            took_s = self._time_model.iteration_s(shape_of(microbatch, self._execution))
            self.now_s += took_s
            finish_filled(self.state, TOKEN, self.now_s)
            if self.now_s >= WARM_UP_S:
                self.planning_s += planned_s
                self.iterations_s += took_s

    def _arrive(self) -> bool:
        """Pass on what has arrived; False once no online request is left."""
        while self._next is not None and self._next.arrival_s <= self.now_s:
            self._start(self._next)
            self._next = next(self._online, None)
        # The next batch requests are sent when all of the last have ended.
        if not self.state.sequence_table.batch:
            for arrival in islice(self._batch, self._clients):
                self._start(arrival)
        return self._next is not None

    def _start(self, arrival: Arrival) -> None:
        number = next(self._numbers)
        request = Request(
            f"request-{number}",
            arrival.prompt_ids(number),
            Sampling(temperature=0.0),
            Limits(arrival.output_tokens, arrival.output_tokens),
            self.now_s,
            service=arrival.service,
        )
        self.state.handle(RequestArrived(self.now_s, request))


def planning_share(prepared: PreparedSimulation, system: str) -> float | None:
    """Planning time over iteration time; None if the simulation is too short."""
    worker = PlannedWorker(prepared, system)
    worker.run(prepared.duration_s)
    return worker.planning_s / worker.iterations_s if worker.iterations_s else None
