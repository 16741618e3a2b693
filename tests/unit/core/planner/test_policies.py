"""Which sequence waits where, and which one gives its blocks up, are policies of the planner."""

from services.core.line_order import LineKey
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, RequestArrived
from services.core.planner.sequence import Phase
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from services.core.service import NO_PROMISE, Service, ServiceClass

BATCH = Service(ServiceClass.BATCH)


def batch_last(service: Service, arrival_s: float) -> LineKey:
    return (float(service.service_class is ServiceClass.BATCH), arrival_s)


def arrive(state: PlannerState, name: str, arrival_s: float, service: Service, prompt: int) -> None:
    request = Request(name, (5,) * prompt, Sampling(), Limits(8), arrival_s, service=service)
    state.handle(RequestArrived(arrival_s, request))
    state.check_invariants()


def planner(blocks: int, running: int) -> PlannerState:
    return PlannerState(IterationConfig(4, blocks, 32, running, 100))


def test_requests_start_in_the_order_of_the_line() -> None:
    state = planner(blocks=64, running=1)
    state.sequence_table.line = batch_last
    for number, service in enumerate((BATCH, NO_PROMISE, BATCH, NO_PROMISE)):
        arrive(state, f"r{number}", float(number), service, prompt=4)
    assert [one.request_id for one in state.waiting] == ["r1", "r3", "r0", "r2"]
    microbatch = state.plan(9.0)
    assert microbatch is not None
    assert [chunk.request_id for chunk in microbatch.batch.chunks] == ["r1"]


def test_a_policy_chooses_the_victim() -> None:
    state = planner(blocks=5, running=4)
    state.sequence_table.victims = lambda running, _held, _full: running[0]
    arrive(state, "old", 0.0, NO_PROMISE, prompt=7)
    arrive(state, "new", 1.0, NO_PROMISE, prompt=7)
    now_s = 2.0
    while state.preemptions_total == 0:
        microbatch = state.plan(now_s)
        assert microbatch is not None
        sampled = {chunk.request_id: 6 for chunk in microbatch.batch.chunks}
        state.handle(IterationFinished(now_s, sampled))
        state.check_invariants()
        now_s += 1.0
    assert state.sequences["old"].phase is Phase.WAITING
    assert state.sequences["new"].phase is Phase.RUNNING
