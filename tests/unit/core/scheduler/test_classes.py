"""Effects of service classes at the scheduler, one rule at a time."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.core.ask import RefusalReason
from services.core.cost.model import TOKEN_COSTS
from services.core.demand import ModelDemand
from services.core.queue_order import Scheduling, by_deadline
from services.core.scheduler.class_rules import ClassRules, Order
from services.core.scheduler.dispatch import least_loaded
from services.core.scheduler.rate import RETRY_AFTER_MAX_S
from services.core.scheduler.state_config import StateConfig
from services.core.scheduler.vocabulary import (
    Command,
    GroupLeft,
    SendAssignment,
    SendRefusal,
    SendTicket,
    ShortfallsReported,
    Ticked,
)
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tests.unit.core.scheduler.test_state import Scheduler, assigned, refusal

BATCH = Service(ServiceClass.BATCH)
URGENT = Service(ServiceClass.INTERACTIVE)
START_TOKENS = 3 * 16  # of an ask with 32 tokens, in blocks of 16


def make(queue_limit: int = 8, *, rules: dict[str, Any] | None = None, **others: Any) -> Scheduler:
    class_rules = ClassRules(Scheduling.PRIORITY, **(rules or {}))
    return Scheduler(queue_limit, rules=class_rules, **others)


def joined(queue_limit: int = 8, **others: Any) -> Scheduler:
    scheduler = make(queue_limit, **others)
    scheduler.join()
    return scheduler


def groups(commands: list[Command]) -> list[str]:
    return [command.worker_id for command in commands if isinstance(command, SendAssignment)]


# --- order


@pytest.mark.parametrize(
    ("service", "arrival_s", "key"),
    [
        (Service(), 5.0, (0.0, 15.0)),
        (Service(ttft_s=2.0), 5.0, (0.0, 7.0)),
        (Service(ServiceClass.INTERACTIVE, ttft_s=0.5, rank=-3), 5.0, (0.0, 5.5)),
        (Service(ServiceClass.BATCH, rank=2), 5.0, (1.0, 2.0, 5.0)),
    ],
)
def test_a_deadline_is_arrival_plus_target(
    service: Service, arrival_s: float, key: tuple[float, ...]
) -> None:
    assert by_deadline(service, arrival_s) == key


def test_the_earliest_deadline_is_first_across_online_classes() -> None:
    scheduler = joined(rules={"class_order": Order.DEADLINE})
    scheduler.ask("none", now_s=0.0)
    scheduler.ask("batch", now_s=0.0, service=BATCH)
    scheduler.ask("late", now_s=1.0, service=Service(ServiceClass.INTERACTIVE, ttft_s=9.5))
    scheduler.ask("soon", now_s=3.0, service=Service(ttft_s=1.0))
    started = assigned(scheduler.report(now_s=3.5)) + assigned(scheduler.report(now_s=3.6))
    assert started == ["soon", "none", "late", "batch"]


def test_classes_are_ordered_by_rank_with_batch_last() -> None:
    scheduler = joined()
    for name, service in [("b", BATCH), ("s", Service()), ("i", URGENT)]:
        scheduler.ask(name, service=service)
    scheduler.ask("first", service=Service(ServiceClass.INTERACTIVE, rank=-1))
    assert assigned(scheduler.report()) == ["first", "i", "s", "b"]


@pytest.mark.parametrize(("yields", "workers"), [(True, ["w1", "w0"]), (False, ["w0", "w1"])])
def test_prompts_that_wait_count_before_kv_in_use_where_batch_work_yields(
    yields: bool, workers: list[str]
) -> None:
    scheduler = make()
    scheduler.serve("w0", running=2, free=70, waiting=1, wanted=5, batch_yields=yields)
    scheduler.serve("w1", running=6, free=60, batch_yields=yields)
    chosen = groups(scheduler.ask("first", prompt_tokens=90, max_tokens=8))
    # Blocks for a request on its way to w1 are waited for, too: 7.
    chosen += groups(scheduler.ask("second"))
    assert chosen == workers


def test_a_batch_request_that_has_run_waits_for_online_ones() -> None:
    scheduler = joined(100)
    for number in range(20):
        scheduler.ask(f"b{number}", service=BATCH, resumed=True)
    scheduler.ask("b", service=BATCH)
    scheduler.ask("online")
    started = assigned(scheduler.report(free=1000, total=1000))
    assert started == ["online", *(f"b{number}" for number in range(20)), "b"]


def test_tenants_are_ordered_by_received_service() -> None:
    scheduler = joined(100)
    for number in range(6):
        scheduler.ask(f"a{number}", service=Service(tenant="a"), prompt_tokens=16)
    for number in range(3):
        scheduler.ask(f"b{number}", service=Service(tenant="b"), prompt_tokens=64)
    # A request of b needs five blocks, one of a two: a gets five requests for two of b.
    started = assigned(scheduler.report(free=1000, total=1000))
    assert started == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "a5", "b2"]


def test_a_late_tenant_starts_without_credit_or_debt() -> None:
    scheduler = joined(100, growth_blocks=0)
    for number in range(6):
        scheduler.ask(f"a{number}", service=Service(tenant="a"))
    assert assigned(scheduler.report(free=9)) == ["a0", "a1", "a2"]
    for number in range(3):
        scheduler.ask(f"b{number}", service=Service(tenant="b"), now_s=1.0)
    started = assigned(scheduler.report(free=1000, total=1000, received=("a0", "a1", "a2")))
    assert started == ["a3", "b0", "a4", "b1", "a5", "b2"]


# --- room and harvest


def test_batch_kv_counts_as_room_for_online_requests_only() -> None:
    scheduler = joined()
    full = {"free": 0, "running": 4, "batch_running": 4, "batch_blocks": 90, "batch_yields": True}
    scheduler.report(**full)
    assert scheduler.ask("b", service=BATCH) == [SendTicket(1, "b")]
    assert assigned(scheduler.ask("online")) == ["online"]
    scheduler.report(**full | {"batch_yields": False}, received=("online",))
    assert scheduler.ask("next") == [SendTicket(1, "next")]


def test_no_batch_request_starts_while_an_online_request_waits() -> None:
    scheduler = make(overtaken_max=8)
    scheduler.serve(free=10)
    assert scheduler.ask("large", prompt_tokens=320) == [SendTicket(1, "large")]
    assert scheduler.ask("b", service=BATCH) == [SendTicket(1, "b")]
    assert assigned(scheduler.ask("small")) == ["small"]
    assert assigned(scheduler.report(free=30, received=("small",))) == ["large", "b"]


def test_a_group_with_a_waiting_online_request_gets_no_batch_work() -> None:
    scheduler = make()
    scheduler.serve("w0", waiting=1, wanted=3)
    scheduler.serve("w1", running=9)
    assert groups(scheduler.ask("b", service=BATCH)) == ["w1"]
    scheduler.report("w1", waiting=1, wanted=3, received=("b",))
    assert groups(scheduler.ask("c", service=BATCH)) == []
    assert groups(scheduler.report("w0", waiting=1, batch_waiting=1)) == ["w0"]


def test_a_group_gets_batch_work_for_two_iterations_ahead() -> None:
    scheduler = make()
    scheduler.join(max_batch_tokens=100)
    scheduler.report()
    # 96 and 192 tokens are less than two iterations of 100 compute, 288 are not.
    started = [assigned(scheduler.ask(f"b{n}", prompt_tokens=96, service=BATCH)) for n in range(4)]
    assert started == [["b0"], ["b1"], ["b2"], []]
    assert assigned(scheduler.ask("online")) == ["online"]
    received = ("b0", "b1", "b2", "online")
    assert assigned(scheduler.report(prefill=200, received=received)) == []
    assert assigned(scheduler.report(prefill=199)) == ["b3"]


def test_batch_work_goes_to_the_group_with_the_fewest_online_sequences() -> None:
    scheduler = make()
    scheduler.serve("w0", free=90, running=2)
    scheduler.serve("w1", free=50, running=9, batch_running=8, batch_blocks=45, batch_yields=True)
    assert groups(scheduler.ask("b", service=BATCH)) == ["w1"]


@pytest.mark.parametrize("settings", [{}, {"score": least_loaded}, {"ttft": TOKEN_COSTS}])
def test_online_load_decides_before_batch_load_for_online_requests(
    settings: dict[str, Any],
) -> None:
    scheduler = make(**settings)
    scheduler.join("w0")
    scheduler.join("w1")
    scheduler.report("w0", free=80, running=4)
    busy = {"running": 20, "batch_running": 18, "batch_blocks": 85, "batch_yields": True}
    scheduler.report("w1", free=5, **busy)
    assert groups(scheduler.ask("online")) == ["w1"]


def test_ties_in_room_go_to_the_group_with_fewer_online_sequences() -> None:
    scheduler = make(growth_blocks=0)
    scheduler.join("w0")
    scheduler.join("w1")
    scheduler.report("w0", free=80, running=4)
    busy = {"running": 9, "batch_running": 8, "batch_blocks": 30, "batch_yields": True}
    scheduler.report("w1", free=50, **busy)
    assert groups(scheduler.ask("online")) == ["w1"]


def test_some_groups_may_be_for_batch_requests_only() -> None:
    scheduler = make(rules={"batch_groups": 1})
    scheduler.join("w1")
    scheduler.serve("w0")
    scheduler.report("w1", running=30)
    assert groups(scheduler.ask("online")) == ["w1"]
    assert groups(scheduler.ask("b", service=BATCH)) == ["w0"]
    scheduler.lose("w1")
    assert groups(scheduler.ask("another")) == []
    scheduler.report("w0", waiting=1, wanted=5)
    assert groups(scheduler.ask("c", service=BATCH)) == []


# --- places, deadlines and retries


def test_a_full_queue_refuses_batch_then_standard_and_the_newest_first() -> None:
    scheduler = make(3)
    scheduler.ask("b0", service=BATCH, now_s=1.0)
    scheduler.ask("s0", now_s=2.0)
    scheduler.ask("b1", service=BATCH, now_s=3.0)
    assert refusal(scheduler.ask("b2", service=BATCH, now_s=4.0)).request_id == "b2"
    assert refusal(scheduler.ask("s1", now_s=5.0)).request_id == "b1"
    assert refusal(scheduler.ask("s2", now_s=6.0)).request_id == "b0"
    assert refusal(scheduler.ask("s3", now_s=7.0)).request_id == "s3"
    for name, gone in [("i0", "s2"), ("i1", "s1"), ("i2", "s0"), ("i3", "i3")]:
        refused = refusal(scheduler.ask(name, service=URGENT, now_s=8.0))
        assert (refused.request_id, refused.reason) == (gone, RefusalReason.QUEUE_FULL)
    assert scheduler.state.snapshot(9.0).queued == 3


def of(tenant: str, service: Service = DEFAULT_SERVICE) -> Service:
    return replace(service, tenant=tenant)


def test_an_owner_displaces_others_requests_only_down_to_its_own_number() -> None:
    scheduler = make(6)
    for number in range(3):
        scheduler.ask(f"a{number}", service=of("a"), now_s=1.0 + number)
        scheduler.ask(f"b{number}", service=of("b"), now_s=1.5 + number)
    gone = [
        refusal(scheduler.ask(f"i{number}", service=of("c", URGENT), now_s=9.0)).request_id
        for number in range(6)
    ]
    assert gone == ["b2", "a2", "i2", "i3", "i4", "i5"], "two places for each of the three"
    # Its own lower class makes way for its higher one.
    assert refusal(scheduler.ask("j", service=of("a", URGENT))).request_id == "a1"


def test_an_owner_that_floods_the_queue_leaves_others_their_places() -> None:
    scheduler = make(4)
    for number in range(4):
        scheduler.ask(f"a{number}", service=of("a"), now_s=1.0 + number)
    for name, gone in [("b0", "a3"), ("b1", "a2"), ("b2", "b2")]:
        refused = refusal(scheduler.ask(name, service=of("b"), now_s=9.0))
        assert refused.request_id == gone
        assert ("owner with fewer" in refused.message) == (gone != name)
    assert refusal(scheduler.ask("a4", service=of("a"), now_s=9.0)).request_id == "a4"


def test_batch_places_are_shared_by_owners_and_yielded_to_online_requests() -> None:
    scheduler = make(4, rules={"batch_queue_limit": 3})
    for number in range(3):
        scheduler.ask(f"a{number}", service=of("a", BATCH), now_s=1.0 + number)
    assert refusal(scheduler.ask("b0", service=of("b", BATCH), now_s=5.0)).request_id == "a2"
    assert refusal(scheduler.ask("b1", service=of("b", BATCH), now_s=5.0)).request_id == "b1"
    scheduler.ask("s0", service=of("c"), now_s=6.0)
    gone = [
        refusal(scheduler.ask(f"s{number}", service=of("c"), now_s=7.0)).request_id
        for number in range(1, 5)
    ]
    assert gone == ["a1", "b0", "a0", "s4"]


def test_fcfs_has_no_places_by_owner() -> None:
    scheduler = Scheduler(2)
    scheduler.ask("a0", service=of("a"))
    scheduler.ask("a1", service=of("a"))
    assert refusal(scheduler.ask("b", service=of("b", URGENT))).request_id == "b"


def test_a_previously_assigned_request_keeps_its_place() -> None:
    scheduler = make(1)
    scheduler.ask("b", service=BATCH, resumed=True)
    assert refusal(scheduler.ask("online")).request_id == "online"


def test_batch_requests_have_places_and_a_deadline_of_their_own() -> None:
    scheduler = make(rules={"batch_queue_limit": 1, "batch_queue_deadline_s": 500.0})
    scheduler.ask("b0", service=BATCH)
    refused = refusal(scheduler.ask("b1", service=BATCH))
    assert "all 1 queue slots for batch requests" in refused.message
    scheduler.ask("online")
    scheduler.join()
    late = refusal(scheduler(Ticked(121.0)))
    assert (late.request_id, late.reason) == ("online", RefusalReason.EXPIRED)
    late = refusal(scheduler(Ticked(501.0)))
    assert late.request_id == "b0" and "within 500 s" in late.message


def test_retry_after_follows_the_progress_of_the_class() -> None:
    scheduler = make(100, growth_blocks=0, rules={"batch_queue_limit": 10})
    scheduler.serve(free=1000, total=1000)
    for number in range(20):
        assert assigned(scheduler.ask(f"s{number}"))
    scheduler.report(free=0, now_s=0.1)
    for number in range(10):
        scheduler.ask(f"b{number}", service=BATCH, now_s=0.1)
    # No batch request has started lately, though 20 online ones have.
    refused = refusal(scheduler.ask("b10", service=BATCH, now_s=0.2))
    assert refused.retry_after_s == RETRY_AFTER_MAX_S


def test_a_retry_of_a_lower_class_waits_for_those_before_it() -> None:
    scheduler = make(50, growth_blocks=0)
    scheduler.serve(free=1000, total=1000)
    for number in range(10):
        for service in (URGENT, Service(), BATCH):
            assert assigned(scheduler.ask(f"{service.service_class}{number}", service=service))
    scheduler.report(free=0, now_s=0.1)
    for number in range(50):
        scheduler.ask(f"i{number}", service=URGENT, now_s=0.1)
    for service in (Service(), BATCH):
        assert refusal(scheduler.ask("late", service=service, now_s=0.2)).retry_after_s > 15.0


@pytest.mark.parametrize(("order", "starts"), [(Order.CLASS, True), (Order.DEADLINE, False)])
def test_expiry_counts_requests_that_may_still_overtake(order: Order, starts: bool) -> None:
    scheduler = joined(500, queue_deadline_s=10.0, growth_blocks=0, rules={"class_order": order})
    scheduler(ShortfallsReported(0.0, {"m": 1}))
    for number in range(70):
        scheduler.ask(f"s{number}", now_s=0.0, resumed=number < 20)
    assert len(assigned(scheduler.report(free=60, total=100, now_s=9.0))) == 20
    # Twenty starts in nine seconds: the 50 that wait are too many for the last second of a tenth.
    asked = scheduler.ask("late", service=URGENT, now_s=9.5, waited_s=9.0)
    assert (asked == [SendTicket(1, "late")]) is starts
    assert not starts or scheduler.ask("b", service=BATCH, now_s=9.5)[0] == SendTicket(1, "b")


# --- demand and numbers


def test_batch_requests_are_no_demand() -> None:
    scheduler = joined(2)
    for number in range(3):
        scheduler.ask(f"b{number}", service=BATCH, now_s=100.0)
    waits = {"batch_queued": 2, "batch_queued_tokens": 2 * START_TOKENS}
    assert scheduler.state.demands(100.0) == (ModelDemand("m", **waits),)
    scheduler.ask("online", now_s=103.0)
    (demand,) = scheduler.state.demands(103.5)
    assert (demand.queued, demand.queued_tokens, demand.refused) == (1, START_TOKENS, 0)
    assert demand.arriving_tokens_per_s > 0 and demand.batch_queued == 1


def test_fcfs_counts_every_class_as_demand() -> None:
    scheduler = Scheduler()
    scheduler.join()
    scheduler.ask("b", service=BATCH, now_s=100.0)
    (demand,) = scheduler.state.demands(100.0)
    assert (demand.queued, demand.batch_queued) == (1, 0)


def test_numbers_are_reported_by_class() -> None:
    scheduler = make(2)
    scheduler.ask("b0", service=BATCH, now_s=1.0)
    scheduler.ask("s0", now_s=2.0)
    scheduler.ask("i0", service=URGENT, now_s=4.0)
    now = scheduler.state.snapshot(5.0)
    assert list(now.queued_by_class.values()) == [1, 1, 0]
    assert list(now.oldest_wait_s_by_class.values()) == [1.0, 3.0, 0.0]
    assert list(now.refused_total_by_class.values()) == [0, 0, 1]
    assert (now.queued, now.oldest_wait_s) == (2, 3.0)


def test_an_event_log_records_the_class_rules() -> None:
    new = StateConfig(8, 1.0, "kv_share", rules=ClassRules(Scheduling.PRIORITY, Order.DEADLINE))
    assert msgspec.json.decode(msgspec.json.encode(new), type=StateConfig) == new


# --- what batch work does not take from others


def test_a_batch_backlog_does_not_determine_the_online_rate() -> None:
    """The workers were nearly idle before, so their capacity is higher than the rate."""
    scheduler = make(1024, queue_deadline_s=120.0)
    scheduler.join(capacity_blocks=4000)
    room = {"free": 4000, "total": 4000, "prefill": 5000, "batch_yields": True}
    for number in range(200):
        scheduler.ask(f"b{number}", service=BATCH)
    for number in range(100):
        now_s = 4.0 * number
        scheduler.report(now_s=now_s, received=(f"q{number - 1}",), **room)
        assert assigned(scheduler.ask(f"q{number}", now_s=now_s, service=URGENT))
    scheduler(ShortfallsReported(400.0, {"m": 1000}))
    scheduler.report(now_s=400.0, **room | {"free": 30})
    commands = [
        scheduler.ask(f"x{number}", now_s=400.0 + number / 1000, service=URGENT)
        for number in range(300)
    ]
    assert not any(isinstance(command, SendRefusal) for answer in commands for command in answer)


def test_an_online_request_blocks_batch_work_only_at_groups_that_fit_it() -> None:
    scheduler = make(100)
    scheduler.join("small", capacity_blocks=64, max_model_len=1024)
    scheduler.join("big", capacity_blocks=1000, max_model_len=16_000)
    scheduler.report("big", free=0, running=9, batch_yields=True)
    scheduler.ask("large", prompt_tokens=9000, max_tokens=100)
    scheduler.ask("b0", service=BATCH)
    assert groups(scheduler.report("small", free=64, batch_yields=True)) == ["small"]
    scheduler.report("small", free=0, running=9, batch_yields=True, received=("b0",))
    scheduler.ask("b1", service=BATCH)
    scheduler.ask("little", prompt_tokens=500)
    assert assigned(scheduler.report("small", free=20, batch_yields=True)) == [], "it is in wait"
    assert assigned(scheduler.report("small", free=64, batch_yields=True)) == ["little", "b1"]


def test_divided_groups_do_not_wait_for_each_other() -> None:
    scheduler = make(100, rules={"batch_groups": 1})
    scheduler.join("w0")
    scheduler.serve("w1", free=0, running=20, batch_yields=True)
    scheduler.ask("online", service=URGENT)
    scheduler.ask("b", service=BATCH)
    assert assigned(scheduler.report("w0", free=90, batch_yields=True)) == ["b"]


@pytest.mark.parametrize("batch_groups", [1, 5])
def test_the_last_group_gets_all_requests(batch_groups: int) -> None:
    scheduler = make(100, rules={"batch_groups": batch_groups})
    scheduler.join("w0")
    scheduler.join("w1")
    scheduler(GroupLeft(0.0, "group-w1"))
    scheduler.ask("b", service=BATCH)
    scheduler.ask("online", service=URGENT)
    assert assigned(scheduler.report("w0", free=90, batch_yields=True)) == ["online", "b"]
