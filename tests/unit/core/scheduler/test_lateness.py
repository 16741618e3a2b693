"""Refusals for lateness, one rule at a time."""

from dataclasses import replace
from typing import Any

import pytest

from services.core.ask import FailedAssignment, RefusalReason
from services.core.audit.record import Findings
from services.core.audit.refusals import Refusals
from services.core.cost.model import CostModel
from services.core.queue_order import Scheduling
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.group_table import REGROUP_S
from services.core.scheduler.lateness import Lateness
from services.core.scheduler.prediction import FORGOTTEN_S, OFFSET_S, UNKNOWN, WaitPredictor
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    GroupLeft,
    LateRefusals,
    OutcomeReported,
    SendAssignment,
    SendProceed,
    SendRefusal,
    SendTicket,
    ShortfallsReported,
    Ticked,
    WaitLimit,
)
from services.core.service import Service, ServiceClass
from tests.unit.core.scheduler.test_class_properties import decide, random_events
from tests.unit.core.scheduler.test_state import Scheduler, ask, assigned, kinds

TOKEN_S = 0.0001
COST = CostModel(alpha=0.0, beta=TOKEN_S, gamma=0.0, lam=0.0)
START_TOKENS = 48  # of a prompt of 32 tokens: two blocks, and one for its output
SOON = Service(ServiceClass.STANDARD, ttft_s=2.0)


class Overloaded(Scheduler):
    """A group without room, and requests that have started at 10 per second."""

    def __init__(self, short: bool = True, start_s: float = 100.0, **settings: Any) -> None:
        settings = {"lateness": 1.0, "standard_wait_s": 10.0, "ttft": COST} | settings
        super().__init__(1024, **settings)
        self.now_s = start_s
        self.serve(now_s=self.now_s)
        if short:
            self(ShortfallsReported(self.now_s, {"m": 1}))
        self.fill()
        for number in range(105):
            self.arrive(f"first{number}", service=Service(ttft_s=100.0))
        for _ in range(100):
            self.now_s += 0.1
            self(Ticked(self.now_s))
            self.start_next()

    def fill(self, *received: str) -> None:
        """Report a group without free blocks that has `received` these requests."""
        self.report(now_s=self.now_s, free=0, running=10, received=received)

    def start_next(self) -> list[str]:
        """Report room for a request, and then its arrival; returns the started request."""
        started = assigned(self.report(now_s=self.now_s, free=3 + 5, running=10))
        self.fill(*started)
        return started

    def arrive(self, name: str, **changes: Any) -> list[Command]:
        """Ask for a request now."""
        return self(ask(name, now_s=self.now_s, **{"service": SOON} | changes))

    def flood(self, count: int = 200, **changes: Any) -> list[SendRefusal]:
        """Ask for many requests at once; returns the refusals."""
        commands = list[Command]()
        for number in range(count):
            different = {"fingerprint": 1000 + number} | changes
            commands += self.arrive(f"flood{number}", **different)
        return [command for command in commands if isinstance(command, SendRefusal)]


def waits_of(scheduler: Scheduler) -> WaitPredictor:
    model = scheduler.state._groups.of_model("m")
    assert model is not None
    return model.meter.waits


def test_a_request_that_would_be_late_is_refused_at_once() -> None:
    scheduler = Overloaded()
    refused = scheduler.flood()
    assert refused and {refusal.reason for refusal in refused} == {RefusalReason.TOO_LATE}
    late = refused[-1].late
    assert late is not None and late.wait_s > late.left_s
    assert late.by is WaitLimit.MEMORY
    # Ten start per second. Until arrivals count as overload, few are refused.
    assert 10 <= 200 - len(refused) <= 60


def test_an_early_burst_is_not_refused_before_starts_are_measured() -> None:
    warm, cold = Overloaded(), Scheduler(1024, lateness=1.0, ttft=COST)
    cold.now_s = warm.now_s
    cold.serve(now_s=cold.now_s)
    cold.report(now_s=cold.now_s, free=0, running=10)
    cold(ShortfallsReported(cold.now_s, {"m": 1}))
    cold(ask("first", now_s=cold.now_s, service=SOON))
    cold(Ticked(cold.now_s))
    warm_refusals, cold_refusals = (
        [
            command
            for number in range(200)
            for command in scheduler(
                ask(f"r{number}", now_s=warm.now_s, service=SOON, fingerprint=1000 + number)
            )
            if isinstance(command, SendRefusal)
        ]
        for scheduler in (warm, cold)
    )
    assert waits_of(warm).rate.per_s(warm.now_s) and waits_of(cold).rate.per_s(cold.now_s)
    assert warm_refusals and not cold_refusals


def test_the_choices_of_a_request_are_a_single_arrival() -> None:
    first_refused = list[int]()
    for choices in (1, 16):
        scheduler = Overloaded()
        arrived = 0
        while not any(
            isinstance(command, SendRefusal)
            for command in scheduler.arrive(
                f"r{arrived}", fingerprint=1000 + arrived, choice=arrived % choices
            )
        ):
            arrived += 1
        first_refused.append(arrived)
    single, choice = first_refused
    # Ten start per second, and arrivals are counted over a second: 16 are overload if they are
    # independent, but one request with 16 choices says nothing about the next second.
    assert single < 20 and choice >= single + 10


def test_the_last_refusal_of_each_class_is_kept_with_its_numbers() -> None:
    scheduler = Overloaded()
    assert scheduler.state.late_refusals(scheduler.now_s) == []
    interactive = Service(ServiceClass.INTERACTIVE, ttft_s=1.0)
    refused = scheduler.flood()
    scheduler.now_s += 2.0
    last = refused[-1]
    (other,) = scheduler.arrive("interactive", service=interactive)
    assert isinstance(other, SendRefusal)
    for later_s, count, more in ((2.0, len(refused), 1), (59.0, 0, 1), (100.0, 0, 0)):
        now_s = scheduler.now_s + later_s
        assert last.late and last.retry_after_s and other.late and other.retry_after_s
        standard, interactive_refusals = scheduler.state.late_refusals(now_s)
        age_s = pytest.approx(later_s + 2.0)
        assert standard == LateRefusals(
            "m", ServiceClass.STANDARD, count, age_s, last.late, last.retry_after_s
        )
        assert interactive_refusals == LateRefusals(
            *("m", ServiceClass.INTERACTIVE, more, pytest.approx(later_s)),
            *(other.late, other.retry_after_s),
        )


def test_the_refused_tokens_are_demand() -> None:
    scheduler = Overloaded()
    refused = scheduler.flood()
    (demand,) = scheduler.state.demands(scheduler.now_s)
    assert demand.refused == len(refused)
    assert demand.refused_tokens == len(refused) * START_TOKENS


def test_disabled_lateness_refuses_no_request() -> None:
    assert Overloaded(lateness=0.0).flood() == []


def test_standard_requests_without_a_target_have_a_limit() -> None:
    untargeted = Service()
    refused = Overloaded().flood(service=untargeted)
    assert 0 < len(Overloaded(standard_wait_s=30.0).flood(service=untargeted)) < len(refused)
    assert Overloaded(standard_wait_s=0.0).flood(service=untargeted) == []


def test_batch_requests_are_not_refused_as_late() -> None:
    assert Overloaded().flood(service=Service(ServiceClass.BATCH)) == []


def test_before_a_shortfall_memory_is_no_reason() -> None:
    assert Overloaded(short=False).flood() == []


def test_with_memory_but_a_backlog_the_limit_is_compute() -> None:
    scheduler = Overloaded(short=False)
    scheduler.report(now_s=scheduler.now_s, free=90, running=4, prefill=300_000)
    (refusal,) = [c for c in scheduler.arrive("r") if isinstance(c, SendRefusal)]
    assert refusal.late is not None and refusal.late.by is WaitLimit.COMPUTE


def test_an_idle_group_refuses_no_request() -> None:
    scheduler = Overloaded()
    scheduler.report(now_s=scheduler.now_s, free=100, running=0)
    assert assigned(scheduler.arrive("r", service=Service(ttft_s=1e-6))) == ["r"]


@pytest.mark.parametrize("ruled", [True, False])
def test_a_request_that_could_start_is_not_refused(
    ruled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Overloaded()
    started = assigned(scheduler.report(now_s=scheduler.now_s, free=100, running=0))
    scheduler.report(now_s=scheduler.now_s, free=100, running=5, received=started)
    asked = ask("r", now_s=scheduler.now_s, service=Service(ttft_s=0.5), waited_s=1.0)
    if not ruled:
        monkeypatch.setattr(Lateness, "could_start", lambda *_: False)
    findings = Findings()
    Refusals(findings, "s").check(scheduler.state, asked, scheduler(asked))
    assert findings.broken == (not ruled)


def test_an_unattainable_target_is_ignored() -> None:
    scheduler = Overloaded()
    admitted = 200 - len(scheduler.flood())
    hopeless = Service(ttft_s=TOKEN_S)
    assert kinds(scheduler.arrive("alone", service=hopeless)) == [SendTicket]
    scheduler.arrive("later", service=Service(ttft_s=100.0))
    started = [name for _ in range(admitted + 7) for name in scheduler.start_next()]
    assert started[-2:] == ["alone", "later"]
    # With requests for more than `standard_wait_s` ahead, it is refused like others.
    for number in range(150):
        scheduler.arrive(f"patient{number}", service=Service(ttft_s=100.0))
    assert kinds(scheduler.arrive("hopeless", service=hopeless)) == [SendRefusal]


def test_a_returned_retry_waits_for_its_own_deadline() -> None:
    """It has the rank of its first try, but the time before its booking does not count."""
    scheduler = Overloaded()
    service = Service(ttft_s=2.0)
    scheduler.flood(400, service=service)
    refused = scheduler.arrive("r", service=service, fingerprint=7)[0]
    assert isinstance(refused, SendRefusal) and refused.retry_after_s is not None
    scheduler.now_s += refused.retry_after_s
    scheduler.report(now_s=scheduler.now_s, free=5000, running=10)
    commands = scheduler.arrive("retry", service=service, fingerprint=7)
    assert SendAssignment in kinds(commands)
    scheduler.now_s += 1.0
    scheduler.fill()
    failed = FailedAssignment("group-w0", 1, returned=True)
    late = ask("retry", now_s=scheduler.now_s, service=service, waited_s=1.0, failed=failed)
    first_s = scheduler.now_s - refused.retry_after_s - 1.0
    assert kinds(scheduler(late)) == [SendTicket]
    waiting = scheduler.state._queue.get("retry")
    assert waiting is not None and waiting.booked
    assert waiting.arrival_s == pytest.approx(first_s)
    assert waiting.deadline_start_s == pytest.approx(scheduler.now_s - 1.0)


def test_failed_and_resumed_requests_are_not_refused() -> None:
    scheduler = Overloaded()
    scheduler.flood()
    failed = FailedAssignment("group-w0", 1)
    assert kinds(scheduler.arrive("failed", failed=failed)) == [SendTicket]
    assert kinds(scheduler.arrive("resumed", resumed=True)) == [SendTicket]


def test_without_knowledge_no_request_is_refused() -> None:
    scheduler = Scheduler(1024, lateness=1.0, standard_wait_s=10.0)
    scheduler.serve(free=0)
    scheduler(ShortfallsReported(0.0, {"m": 1}))
    assert all(
        kinds(scheduler(ask(f"r{number}", service=SOON))) == [SendTicket] for number in range(200)
    )


def test_a_waiting_request_that_becomes_late_is_refused_under_overload() -> None:
    scheduler = Overloaded()
    scheduler.flood()
    ends = list[Command]()
    for _ in range(30):
        scheduler.now_s += 0.1
        scheduler.fill()
        scheduler.arrive(f"more{scheduler.now_s}")
        ends += scheduler(Ticked(scheduler.now_s))
    late = [command for command in ends if isinstance(command, SendRefusal)]
    assert {refusal.reason for refusal in late} == {RefusalReason.TOO_LATE}
    assert "flood0" in {refusal.request_id for refusal in late}


def test_a_retry_at_its_booked_time_has_the_rank_of_its_first_try() -> None:
    scheduler = Overloaded()
    scheduler.flood(400, prompt_tokens=30)
    booked = scheduler.arrive("r", prompt_tokens=31)[0]
    assert isinstance(booked, SendRefusal) and booked.booked
    assert booked.retry_after_s is not None and booked.retry_after_s == int(booked.retry_after_s)
    again = scheduler.arrive("early", prompt_tokens=31)[0]
    assert isinstance(again, SendRefusal) and again.retry_after_s == booked.retry_after_s
    due_s = scheduler.now_s + booked.retry_after_s
    while scheduler.now_s < due_s - 0.05:
        scheduler.now_s += 0.1
        scheduler.start_next()
        scheduler(Ticked(scheduler.now_s))
    for number in range(10):
        scheduler.arrive(f"new{number}")
    estimated = scheduler.arrive("r2", prompt_tokens=31, estimated=True)
    assert estimated == [SendProceed(request_id="r2", stream_id=1)]
    assert kinds(scheduler.arrive("r2", prompt_tokens=31))[0] is SendTicket
    scheduler.start_next()
    waiting = [w.ask.request_id for w in scheduler.state._queue.in_order("m")]
    assert "r2" not in waiting or waiting.index("r2") == 0


def test_a_retry_at_its_booked_time_is_not_refused_again() -> None:
    scheduler = Overloaded()
    scheduler.flood(400, prompt_tokens=30)
    booked = scheduler.arrive("r", prompt_tokens=31)[0]
    assert isinstance(booked, SendRefusal) and booked.booked and booked.retry_after_s is not None
    due_s = scheduler.now_s + booked.retry_after_s
    while scheduler.now_s < due_s - 0.05:
        scheduler.now_s += 0.1
        scheduler.start_next()
        scheduler(Ticked(scheduler.now_s))
    assert kinds(scheduler.arrive("retry", prompt_tokens=31))[0] is SendTicket
    # Nothing starts any more, and many still arrive.
    began_s, refused_s, arrived = scheduler.now_s, dict[str, float](), 0
    while scheduler.now_s < began_s + 6.0:
        scheduler.now_s += 0.1
        scheduler.fill()
        commands = scheduler(Ticked(scheduler.now_s))
        for _ in range(15):
            arrived += 1
            commands += scheduler.arrive(f"new{arrived}", fingerprint=arrived)
        for command in commands:
            if isinstance(command, SendRefusal):
                refused_s[command.request_id] = scheduler.now_s - began_s
    assert SOON.ttft_s is not None
    assert SOON.ttft_s < refused_s["retry"] <= 2 * SOON.ttft_s + 0.3


def test_an_estimated_ask_is_refused_or_may_proceed() -> None:
    scheduler = Overloaded()
    assert kinds(scheduler.arrive("r", estimated=True)) == [SendProceed]
    scheduler.flood()
    assert kinds(scheduler.arrive("r", estimated=True)) == [SendRefusal]


def test_a_delayed_estimate_does_not_change_the_actual_ask() -> None:
    scheduler = Overloaded()
    assert kinds(scheduler.arrive("waits")) == [SendTicket]
    started = scheduler.start_next()
    scheduler.flood()
    before, booked = scheduler.state.snapshot(scheduler.now_s), waits_of(scheduler).calendars
    bookings = {cls: len(calendar) for cls, calendar in booked.items()}
    for name in ("waits", *started):
        # An older stream may deliver it after the new one.
        late = scheduler.arrive(name, estimated=True, stream_id=2, prompt_tokens=900)
        assert late == [SendProceed(request_id=name, stream_id=2)]
    assert scheduler.state.snapshot(scheduler.now_s) == before
    assert {cls: len(calendar) for cls, calendar in booked.items()} == bookings
    # The answers still go to the stream that asked in earnest.
    assert scheduler.state._queue.of_stream(2) == []
    assert started and isinstance(scheduler.arrive(started[0])[0], SendAssignment)


def test_the_refusal_of_an_estimated_ask_is_marked() -> None:
    scheduler = Overloaded()
    scheduler.flood()
    for estimated in (True, False):
        (refusal,) = scheduler.arrive("r", estimated=estimated)
        assert isinstance(refusal, SendRefusal) and refusal.estimated is estimated


def test_interactive_requests_do_not_wait_for_standard_ones() -> None:
    scheduler = Overloaded(rules=ClassRules(Scheduling.SLO))
    assert scheduler.flood()
    interactive = Service(ServiceClass.INTERACTIVE, ttft_s=2.0)
    assert kinds(scheduler.arrive("i", service=interactive)) == [SendTicket]
    assert scheduler.start_next() == ["i"]


@pytest.mark.parametrize("scheduling", [Scheduling.PRIORITY, Scheduling.SLO, Scheduling.FCFS])
def test_the_wait_of_a_class_follows_its_busiest_owner(scheduling: Scheduling) -> None:
    waits = list[float]()
    for owners in (("a",), ("a", "b", "c"), ("",)):
        scheduler = Overloaded(rules=ClassRules(scheduling), standard_wait_s=100.0)
        while scheduler.start_next():
            scheduler.now_s += 0.1
        for number in range(60):
            owner = owners[number] if number < len(owners) else owners[0]
            arrived = scheduler.arrive(f"r{number}", service=Service(tenant=owner))
            assert kinds(arrived) == [SendTicket]
        snapshot = scheduler.state.snapshot(scheduler.now_s)
        (wait_s,) = [
            wait.likely_s
            for wait in snapshot.class_waits
            if wait.service_class is ServiceClass.STANDARD
        ]
        waits.append(wait_s)
    # 60 requests at 10 per second, and the request itself.
    assert waits == [pytest.approx(waits[0])] * 3 and waits[0] > 3.0


def test_only_admitted_interactive_requests_pass_the_others() -> None:
    scheduler = Overloaded(rules=ClassRules(Scheduling.SLO))
    refused = scheduler.flood(service=Service(ServiceClass.INTERACTIVE, ttft_s=1.0))
    model = scheduler.state._groups.of_model("m")
    assert model is not None and refused
    assert model.meter.interactive.at(scheduler.now_s)[0] == 200
    assert model.meter.passing.at(scheduler.now_s)[0] == 200 - len(refused)


@pytest.mark.parametrize(("waited_s", "counts"), [(0.1, True), (5.0, False)])
def test_a_repeated_ask_is_not_a_new_arrival(waited_s: float, counts: bool) -> None:
    scheduler = Overloaded()
    model = scheduler.state._groups.of_model("m")
    assert model is not None
    before, _ = model.meter.arrived.at(scheduler.now_s)
    scheduler.arrive("r", waited_s=waited_s, service=Service(ttft_s=100.0))
    assert model.meter.arrived.at(scheduler.now_s)[0] == before + counts


def test_a_refusal_in_the_queue_is_a_sample_of_its_prediction() -> None:
    scheduler = Overloaded()
    scheduler.flood()
    before = sum(waits_of(scheduler).ratios[ServiceClass.STANDARD].counts)
    commands = list[Command]()
    for _ in range(30):  # no request starts
        scheduler.now_s += 0.1
        commands += scheduler.arrive(
            f"more{scheduler.now_s}", fingerprint=int(scheduler.now_s * 10)
        )
        commands += scheduler(Ticked(scheduler.now_s))
    left = [c for c in commands if isinstance(c, SendRefusal) and c.request_id.startswith("flood")]
    samples = sum(waits_of(scheduler).ratios[ServiceClass.STANDARD].counts) - before
    assert 0 < samples == len(left)


def test_outcomes_correct_the_predictions() -> None:
    scheduler = Overloaded()
    scheduler.flood()
    for number in range(40):
        scheduler.now_s += 0.1
        scheduler.arrive(f"more{number}", service=Service(ttft_s=100.0))
        for name in scheduler.start_next():
            remembered = scheduler.state._assignments.get(name)
            assert remembered is not None
            # Twice as long as predicted, with the offset.
            actual_s = 2 * remembered.raw_s + OFFSET_S
            scheduler(OutcomeReported(scheduler.now_s, name, actual_s))
    ratios = waits_of(scheduler).ratios[ServiceClass.STANDARD]
    assert sum(ratios.counts) > 20
    expected = [pytest.approx(2 * 3.0 + OFFSET_S)] * 3
    assert list(ratios.corrected(3.0, scheduler.now_s)) == expected
    later_s = scheduler.now_s + FORGOTTEN_S + 1
    assert list(ratios.corrected(3.0, later_s)) == [share * 3.0 for share in UNKNOWN]


def test_a_booking_of_an_owner_is_not_used_by_another() -> None:
    scheduler = Overloaded()
    service = Service(ttft_s=2.0, tenant="a")
    scheduler.flood(400, service=service)
    booked = scheduler.arrive("r", service=service, fingerprint=7)[0]
    assert isinstance(booked, SendRefusal) and booked.retry_after_s is not None
    calendar = waits_of(scheduler).calendars[ServiceClass.STANDARD]
    due_s = scheduler.now_s + booked.retry_after_s
    assert calendar.due_booking(due_s, "a", (7,)) is not None
    assert calendar.due_booking(due_s, "b", (7,)) is None


@pytest.mark.parametrize("away_s", [0.0, REGROUP_S - 1, REGROUP_S])
@pytest.mark.parametrize("lateness", [0.0, 1.0])
def test_bookings_outlive_the_restart_of_the_only_worker(away_s: float, lateness: float) -> None:
    scheduler = Overloaded(lateness=lateness)
    scheduler.flood(400)
    waits, rate = waits_of(scheduler), waits_of(scheduler).rate.per_s(scheduler.now_s)
    scheduler(GroupLeft(scheduler.now_s, "group-w0"))
    scheduler.state.check_invariants()
    for _ in range(int(away_s)):
        scheduler.now_s += 1.0
        scheduler(Ticked(scheduler.now_s))
        scheduler.state.check_invariants()
    scheduler.serve(now_s=scheduler.now_s, free=0, epoch=2)
    kept = lateness > 0 and away_s < REGROUP_S
    assert (waits_of(scheduler) is waits) is kept
    if kept:
        assert any(len(calendar) for calendar in waits.calendars.values())
        # The time without a worker does not count as slow.
        assert rate is not None and waits.rate.per_s(scheduler.now_s) == pytest.approx(rate, 0.1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("scheduling", [Scheduling.FCFS, Scheduling.PRIORITY, Scheduling.SLO])
def test_disabled_lateness_has_no_effect(seed: int, scheduling: Scheduling) -> None:
    events = random_events(seed, services=True)
    rules = ClassRules(scheduling)
    decided = decide(rules, events, ttft=COST)
    marked = [
        replace(event, fingerprint=number, expected_tokens=5) if isinstance(event, Asked) else event
        for number, event in enumerate(events)
    ]
    state = SchedulerState(12, 20.0, rules=rules, ttft=COST, standard_wait_s=0.001)
    for event, commands in zip(marked, decided, strict=True):
        assert state.handle(event) == commands
        for command in commands:
            outcome = OutcomeReported(event.now_s, command.request_id, 100.0, seed)
            assert state.handle(outcome) == []
        state.check_invariants()
