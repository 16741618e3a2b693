"""A worker that shuts down returns its requests, and other planners complete them."""

import random
from dataclasses import dataclass, field, replace

import pytest

from services.core.planner.block_ledger import Follower
from services.core.planner.configuration_events import StagesConfigured
from services.core.planner.drain import (
    CREDIT_S,
    ITERATIONS_PER_S,
    MOVE_INTERVAL_S,
    RETURNS_S,
    Candidate,
    DrainPace,
)
from services.core.planner.events import (
    DrainContinued,
    EmitToken,
    IterationFinished,
    IterationSuspended,
    RefuseRequest,
    RequestArrived,
)
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.report import OtherRoom
from services.core.request import FinishReason, Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from tests.unit.core.planner.test_state import (
    STOP,
    FakeModel,
    expected,
    make_request,
    make_state,
)

AMPLE = OtherRoom(1000, (1000, 1000))
STEP_S = 0.25
BATCH = Service(ServiceClass.BATCH)


def arrive(state: PlannerState, name: str, prompt: int, **fields: object) -> None:
    request = make_request(name, prompt, 40, random.Random(name))
    fields = {"resumable": True, **fields}
    assert state.handle(RequestArrived(0.0, replace(request, **fields))) == []


def returned(state: PlannerState, room: OtherRoom = AMPLE, now_s: float = 10.0) -> list[str]:
    """Ids of the requests that are returned now, in order."""
    ids = []
    for command in state.handle(DrainContinued(now_s, room)):
        assert isinstance(command, RefuseRequest)
        assert command.returned and command.retryable and command.leaving
        ids.append(command.request_id)
    state.check_invariants()
    return ids


def running(*names: str, **fields: object) -> PlannerState:
    """A planner whose requests have a token each."""
    state = make_state(num_blocks=100, max_batch_tokens=64, scheduling=Scheduling.SLO)
    for number, name in enumerate(names):
        arrive(state, name, 8, arrival_s=float(number), **fields)
    iterate(state, FakeModel(state.config))
    return state


def iterate(state: PlannerState, model: FakeModel, now_s: float = 0.0) -> list[EmitToken]:
    microbatch = state.plan(now_s)
    if microbatch is None:
        return []
    commands = state.handle(IterationFinished(now_s, model.run(microbatch.batch)))
    state.check_invariants()
    return [command for command in commands if isinstance(command, EmitToken)]


def test_waiting_and_batch_requests_return_at_once_although_no_group_has_room() -> None:
    state = running("runs")
    arrive(state, "waits", 8)
    arrive(state, "batch", 8, service=BATCH)
    assert returned(state, OtherRoom(longest_tokens=100)) == ["waits", "batch"]
    assert list(state.sequences) == ["runs"]


def test_no_request_returns_without_another_group() -> None:
    state = running("runs")
    arrive(state, "waits", 8)
    assert returned(state, OtherRoom()) == []


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({"resumable": True}, True),
        ({"resumable": False, "returnable": True}, False),
        ({"resumable": False}, False),
    ],
)
def test_a_request_with_tokens_returns_only_if_its_gateway_resumes_it(
    fields: dict[str, bool], may: bool
) -> None:
    assert returned(running("a", **fields)) == (["a"] if may else [])


@pytest.mark.parametrize(("returnable", "may"), [(True, ["a"]), (False, [])])
def test_a_request_without_tokens_returns_if_its_gateway_starts_it_again(
    returnable: bool, may: list[str]
) -> None:
    state = make_state()
    arrive(state, "a", 8, resumable=False, returnable=returnable)
    assert returned(state) == may


def test_a_request_that_no_other_group_could_hold_stays() -> None:
    state = running("a")  # at most 48 tokens
    assert returned(state, OtherRoom(47, (1000,))) == []
    assert returned(state, OtherRoom(48, (1000,))) == ["a"]


def test_running_requests_return_newest_first_as_groups_have_room() -> None:
    state = running("a", "b", "c")
    assert returned(state, OtherRoom(100, (8,))) == [], "each has nine tokens"
    assert returned(state, OtherRoom(100, (17, 9)), now_s=11.0) == ["c", "b"]
    assert returned(state, OtherRoom(100, (8, 17)), now_s=12.0) == ["a"]


def test_a_request_that_has_just_moved_stays_for_a_while() -> None:
    state = make_state()
    moved = replace(make_request("a", 8, 40, random.Random(0)), output_ids=(1,), resumable=True)
    state.handle(RequestArrived(10.0, replace(moved, arrival_s=10.0)))
    assert returned(state, now_s=10.0 + MOVE_INTERVAL_S - 0.01) == []
    assert returned(state, now_s=10.0 + MOVE_INTERVAL_S) == ["a"]


def test_a_merged_group_returns_nothing() -> None:
    state = make_state()
    state.handle(StagesConfigured((Follower(16, 0),)))
    arrive(state, "a", 8)
    assert returned(state) == []


@pytest.mark.parametrize("batch_resumable", [True, False])
def test_a_suspended_iteration_is_discarded_only_with_its_requests(batch_resumable: bool) -> None:
    state = make_state(scheduling=Scheduling.SLO)
    arrive(state, "batch", 8, service=BATCH, resumable=batch_resumable)
    assert state.plan(0.0) is not None
    state.handle(IterationSuspended(0.1))
    arrive(state, "online", 8)
    assert returned(state) == (["batch"] if batch_resumable else []) + ["online"]
    assert (state.sequence_table.suspended is None) == batch_resumable


def candidates(count: int, tokens: int) -> list[Candidate]:
    request = Request("r", (1,) * tokens, Sampling(), Limits(1000), 0.0, resumable=True)
    return [Candidate(f"r{number}", request, tokens, True, 0.0) for number in range(count)]


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_the_pace_is_two_iterations_per_second_and_group(groups: int) -> None:
    pace, left, counts = DrainPace(100), candidates(400, 10), []
    for step in range(8):
        chosen = pace.choose(left, OtherRoom(10_000, (10_000,) * groups), step * STEP_S)
        left = [candidate for candidate in left if candidate not in chosen]
        counts.append(len(chosen))
    per_s = max(ITERATIONS_PER_S * 100 * groups, 4000 / RETURNS_S)
    assert counts[0] == per_s * CREDIT_S / 10
    if groups == 5:  # else the pace rises, so that all return in time
        assert counts[1:] == [per_s * STEP_S / 10] * 7


def test_all_requests_return_within_the_drain_time() -> None:
    pace, left, now_s = DrainPace(16), candidates(64, 600), 100.0
    while left:
        chosen = pace.choose(left, OtherRoom(10_000, (1_000_000,)), now_s)
        assert len(chosen) <= 16, "spread over the time"
        left = [candidate for candidate in left if candidate not in chosen]
        now_s += STEP_S
    assert now_s - 100.0 <= RETURNS_S + 2 * CREDIT_S


def test_time_without_room_gives_no_credit() -> None:
    pace, left = DrainPace(100), candidates(400, 10)
    for step in range(100):
        assert pace.choose(left, OtherRoom(10_000), step * STEP_S) == []
    chosen = pace.choose(left, OtherRoom(10_000, (10_000,)), 100 * STEP_S)
    assert len(chosen) * 10 <= max(200, 4000 / RETURNS_S) * CREDIT_S


# --- a fleet of planners, of which some drain, by random schedules


@dataclass
class Place:
    """A worker: its planner, and the start of its drain."""

    state: PlannerState
    model: FakeModel
    drains: bool = False


@dataclass
class Fleet:
    """Planners, a queue like the scheduler's, and the events that gateways received. Raises
    AssertionError where a client would notice a return, and if moves did not end.
    """

    rng: random.Random
    places: list[Place] = field(default_factory=list)
    queue: list[Request] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, FinishReason] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    moved_s: dict[str, float] = field(default_factory=dict)
    returns: int = 0
    now_s: float = 0.0

    def add_worker(self, blocks: int) -> None:
        config = {
            "num_blocks": blocks,
            "max_batch_tokens": self.rng.choice([8, 16, 64]),
            "prefix_caching": self.rng.random() < 0.5,
            "scheduling": self.rng.choice([Scheduling.FCFS, Scheduling.SLO, Scheduling.PRIORITY]),
        }
        state = make_state(**config)
        self.places.append(Place(state, FakeModel(state.config)))

    def ask(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.queue.append(request)

    def serving(self) -> list[Place]:
        return [place for place in self.places if not place.drains]

    def room(self) -> OtherRoom:
        loads = [(p, p.state.load(), p.state.config.block_size) for p in self.serving()]
        return OtherRoom(
            max((p.state.config.num_blocks * size for p, _, size in loads), default=0),
            tuple(
                (load.kv_blocks_free - load.kv_blocks_wanted - 1) * size
                for _, load, size in loads
                if load.kv_blocks_free - load.kv_blocks_wanted > 1
            ),
        )

    def dispatch(self) -> None:
        for request in list(self.queue):
            output = tuple(self.outputs[request.request_id])
            needed = len(request.prompt_ids) + request.limits.max_tokens
            fitting = [
                place
                for place in self.serving()
                if needed <= place.state.config.num_blocks * place.state.config.block_size
            ]
            if not fitting:
                continue
            place = max(fitting, key=lambda place: place.state.load().kv_blocks_free)
            self.queue.remove(request)
            started = replace(request, output_ids=output, arrival_s=self.now_s)
            for command in place.state.handle(RequestArrived(self.now_s, started)):
                raise AssertionError(command)

    def step(self) -> None:
        self.now_s += 0.05
        self.dispatch()
        for place in self.places:
            if place.drains and self.rng.random() < 0.3:
                self.drain(place)
            for token in iterate(place.state, place.model, self.now_s):
                tokens = self.outputs[token.request_id]
                assert token.index == len(tokens) and token.request_id not in self.ended
                tokens.append(token.token_id)
                if token.finish_reason is not None:
                    self.ended[token.request_id] = token.finish_reason
        for place in [place for place in self.places if place.drains]:
            if not place.state.sequences:
                assert place.state.pool.free_count == place.state.config.num_blocks
                self.places.remove(place)

    def drain(self, place: Place) -> None:
        room = self.room()
        for command in place.state.handle(DrainContinued(self.now_s, room)):
            assert isinstance(command, RefuseRequest)
            self.returns += 1
            request = self.requests[command.request_id]
            output = self.outputs[command.request_id]
            assert request.resumable or not output, "the gateway fails the stream"
            needed = len(request.prompt_ids) + request.limits.max_tokens
            assert needed <= room.longest_tokens, "the scheduler refuses it"
            if output:
                since_s = self.now_s - self.moved_s.get(command.request_id, float("-inf"))
                assert since_s >= MOVE_INTERVAL_S, "it moves without end"
                self.moved_s[command.request_id] = self.now_s
            self.queue.append(request)
        place.state.check_invariants()


def run_fleet(seed: int) -> Fleet:
    rng = random.Random(seed)
    fleet = Fleet(rng)
    for _ in range(rng.randint(2, 4)):
        fleet.add_worker(rng.choice([16, 30]))
    for number in range(24):
        stop = frozenset({STOP}) if rng.random() < 0.5 else frozenset()
        most = rng.randint(1, 30)
        request = make_request(
            f"r{number}", rng.randint(1, 18), most, rng, stop_token_ids=stop, min_tokens=most // 2
        )
        fleet.ask(
            replace(
                request,
                service=Service(rng.choice(list(ServiceClass))),
                resumable=rng.random() < 0.8,
                returnable=rng.random() < 0.5,
            )
        )
    for _ in range(2000):
        fleet.step()
        if rng.random() < 0.05 and len(fleet.serving()) > 1:
            rng.choice(fleet.serving()).drains = True
            if rng.random() < 0.8:
                fleet.add_worker(rng.choice([8, 8, 8, 30]))
        if fleet.queue and rng.random() < 0.05:
            fleet.add_worker(30)
        if len(fleet.ended) == len(fleet.requests) and not any(p.drains for p in fleet.places):
            break
    return fleet


@pytest.mark.parametrize("seed", range(60))
def test_requests_end_as_undisturbed_while_workers_join_and_leave(seed: int) -> None:
    fleet = run_fleet(seed)
    for name, request in fleet.requests.items():
        assert (fleet.outputs[name], fleet.ended[name]) == expected(request)


def test_the_random_fleets_move_requests() -> None:
    assert sum(run_fleet(seed).returns for seed in range(10)) > 50


@pytest.mark.parametrize("rule", ["resumable", "interval", "longest"])
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_return = Candidate.may_return

    def without_interval(candidate: Candidate, now_s: float) -> bool:
        return may_return(replace(candidate, arrived_s=float("-inf")), now_s)

    def without_resumable(candidate: Candidate, now_s: float) -> bool:
        request = replace(candidate.request, resumable=True)
        return may_return(replace(candidate, request=request), now_s)

    if rule == "longest":
        monkeypatch.setattr(Candidate, "tokens_max", property(lambda _: 0))
    else:
        without = without_interval if rule == "interval" else without_resumable
        monkeypatch.setattr(Candidate, "may_return", without)
    with pytest.raises(AssertionError):
        for seed in range(60):
            run_fleet(seed)
