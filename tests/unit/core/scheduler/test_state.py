"""The scheduler's decisions, one rule at a time."""

import itertools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from services.core.ask import FailedAssignment, RefusalReason
from services.core.cost.model import TOKEN_COSTS, CostModel
from services.core.overtaking import OVERTAKEN_MAX
from services.core.queue_order import Scheduling
from services.core.scheduler import admission
from services.core.scheduler.admission import AWAY_RETRY_S
from services.core.scheduler.assigner import REQUEUES_MAX
from services.core.scheduler.assignments import REMEMBERED_MAX
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.dispatch import ScoreFunction, kv_share, least_loaded
from services.core.scheduler.group_load import EXCLUSIVE_S
from services.core.scheduler.group_table import MODELS_REMEMBERED_MAX, REGROUP_S
from services.core.scheduler.rate import RETRY_AFTER_MAX_S
from services.core.scheduler.state import ALONE_S, SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    Command,
    Event,
    GatewayGone,
    GroupJoined,
    GroupLeft,
    LoadLost,
    LoadReported,
    RequestPlaced,
    SendAssignment,
    SendRefusal,
    SendTicket,
    ServingGroup,
    ShortfallsReported,
    Ticked,
    Withdrawn,
)
from services.core.service import Service, ServiceClass
from tests.support.reports import load_reported

BATCH, INTERACTIVE = Service(ServiceClass.BATCH), Service(ServiceClass.INTERACTIVE)


class Scheduler:
    """A state whose invariants are checked after every event."""

    def __init__(
        self,
        queue_limit: int = 8,
        queue_deadline_s: float = 120.0,
        score: ScoreFunction = kv_share,
        **settings: Any,
    ) -> None:
        self.state = SchedulerState(queue_limit, queue_deadline_s, score, **settings)

    def __call__(self, event: Event) -> list[Command]:
        commands = self.state.handle(event)
        self.state.check_invariants()
        return commands

    def join(self, name: str = "w0", *, now_s: float = 0.0, **changes: object) -> None:
        assert self(GroupJoined(now_s, group(name, **changes))) == []

    def report(self, name: str = "w0", *, now_s: float = 0.0, **changes: object) -> list[Command]:
        return self(load(name, now_s=now_s, **changes))

    def serve(
        self, name: str = "w0", *, now_s: float = 0.0, epoch: int = 1, **load: Any
    ) -> list[Command]:
        """Join and report."""
        self.join(name, now_s=now_s, epoch=epoch)
        return self.report(name, now_s=now_s, epoch=epoch, **load)

    def lose(self, name: str = "w0", *, now_s: float = 0.0, incarnation: str = "") -> None:
        assert self(LoadLost(now_s, name, incarnation or f"{name}-a")) == []

    def ask(self, request_id: str, *, now_s: float = 0.0, **changes: object) -> list[Command]:
        return self(ask(request_id, now_s=now_s, **changes))


def joined(**settings: Any) -> Scheduler:
    scheduler = Scheduler(**settings)
    scheduler.join()
    return scheduler


def group(name: str = "w0", **changes: object) -> ServingGroup:
    fields: dict[str, object] = {
        "group_id": f"group-{name}",
        "epoch": 1,
        "worker_id": name,
        "incarnation": f"{name}-a",
        "address": f"{name}:1",
        "model": "m",
        "capacity_blocks": 100,
        "block_size": 16,
        "max_model_len": 1024,
    }
    return ServingGroup(**(fields | changes))  # type: ignore[arg-type]


_numbers = itertools.count(1)


def load(name: str = "w0", **changes: object) -> LoadReported:
    fields: dict[str, object] = {
        "number": next(_numbers),
        "now_s": 0.0,
        "worker_id": name,
        "incarnation": f"{name}-a",
        "free": 100,
    }
    return load_reported(**(fields | changes))  # type: ignore[arg-type]


def ask(request_id: str, **changes: object) -> Asked:
    fields: dict[str, object] = {
        "now_s": 0.0,
        "stream_id": 1,
        "request_id": request_id,
        "model": "m",
        "prompt_tokens": 32,
        "max_tokens": 64,
    }
    return Asked(**(fields | changes))  # type: ignore[arg-type]


def kinds(commands: list[Command]) -> list[type]:
    return [type(command) for command in commands]


def assigned(commands: list[Command]) -> list[str]:
    return [command.request_id for command in commands if isinstance(command, SendAssignment)]


def placed(commands: list[Command]) -> SendAssignment:
    (command,) = [command for command in commands if isinstance(command, SendAssignment)]
    return command


def refusal(commands: list[Command]) -> SendRefusal:
    (command,) = [command for command in commands if isinstance(command, SendRefusal)]
    return command


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.state.check_invariants()


def test_an_idle_group_takes_a_request_at_once(scheduler: Scheduler) -> None:
    scheduler.serve(epoch=3)
    assert scheduler.ask("r1", stream_id=7) == [
        SendTicket(7, "r1"),
        SendAssignment("r1", "group-w0", 3, "w0", "w0:1", stream_id=7),
    ]


def test_requests_wait_without_a_group(scheduler: Scheduler) -> None:
    assert scheduler.ask("r1") == [SendTicket(1, "r1")]
    assert assigned(scheduler.serve()) == ["r1"]


def test_requests_start_in_arrival_order(scheduler: Scheduler) -> None:
    for number in range(5):
        scheduler.ask(f"r{number}")
    scheduler.join()
    assert assigned(scheduler.report()) == [f"r{number}" for number in range(5)]


def test_a_request_that_waited_elsewhere_keeps_its_place(scheduler: Scheduler) -> None:
    scheduler.ask("young", now_s=50.0)
    scheduler.ask("old", now_s=51.0, waited_s=40.0)
    assert assigned(scheduler.serve(now_s=52.0)) == ["old", "young"]


def test_a_policy_orders_the_queue_and_deadlines_apply_to_all() -> None:
    scheduler = joined(queue_deadline_s=60.0, rules=ClassRules(Scheduling.PRIORITY))
    scheduler.ask("oldest", now_s=0.0)
    scheduler.ask("interactive", now_s=1.0, service=INTERACTIVE)
    scheduler.ask("first by rank", now_s=1.5, service=Service(rank=-1))
    assert assigned(scheduler.report(now_s=3.0, free=3)) == ["interactive"]
    assert assigned(scheduler.report(now_s=4.0, free=6)) == ["first by rank"]
    late = refusal(scheduler(Ticked(60.0)))
    assert (late.request_id, late.reason) == ("oldest", RefusalReason.EXPIRED)


@pytest.mark.parametrize(
    ("scheduling", "first"), [(Scheduling.FCFS, "batch"), (Scheduling.PRIORITY, "long")]
)
def test_batch_requests_wait_while_an_online_request_waits(
    scheduling: Scheduling, first: str
) -> None:
    scheduler = joined(rules=ClassRules(scheduling))
    scheduler.ask("long", prompt_tokens=320)
    scheduler.ask("batch", service=BATCH, prompt_tokens=1)
    started = [*assigned(scheduler.report(free=10)), *assigned(scheduler.report(free=30))]
    assert started[0] == first


def test_online_requests_start_in_the_blocks_of_batch_ones_that_yield() -> None:
    scheduler = joined(rules=ClassRules(Scheduling.PRIORITY))
    full = {"free": 4, "running": 9, "batch_running": 9, "batch_blocks": 90}
    scheduler.report(**full)
    assert assigned(scheduler.ask("online", prompt_tokens=320)) == []
    assert assigned(scheduler.report(**full, batch_yields=True)) == ["online"]


def test_a_batch_request_makes_no_request_yield() -> None:
    scheduler = joined(rules=ClassRules(Scheduling.PRIORITY))
    busy = {"running": 4, "batch_running": 4, "batch_yields": True}
    scheduler.report(**busy, free=6, batch_blocks=90)
    assert assigned(scheduler.ask("batch", service=BATCH, prompt_tokens=64)) == []
    assert assigned(scheduler.report(**busy, free=7, batch_blocks=90)) == ["batch"], "5, and growth"


def test_an_overtaking_limit_of_0_keeps_arrival_order() -> None:
    scheduler = Scheduler(overtaken_max=0)
    scheduler.serve(free=10)
    scheduler.ask("large", prompt_tokens=320)
    assert scheduler.ask("small", prompt_tokens=1) == [SendTicket(1, "small")]
    assert assigned(scheduler.report(free=30)) == ["large", "small"]


def test_short_requests_overtake_a_large_request_a_bounded_number_of_times(
    scheduler: Scheduler,
) -> None:
    scheduler.serve(free=10)
    scheduler.ask("large", prompt_tokens=320)
    for number in range(OVERTAKEN_MAX):
        assert assigned(scheduler.ask(f"small{number}", prompt_tokens=1)) == [f"small{number}"]
        scheduler.report(free=10, received=(f"small{number}",))
    assert scheduler.ask("late", prompt_tokens=1) == [SendTicket(1, "late")]
    assert assigned(scheduler.report(free=30)) == ["large", "late"]


def test_running_requests_have_room_to_grow(scheduler: Scheduler) -> None:
    scheduler.serve(free=6, running=8)
    assert assigned(scheduler.ask("needs 3")) == []
    assert assigned(scheduler.report(free=6, running=7)) == [], "half a block is a whole one"
    assert assigned(scheduler.report(free=7, running=8)) == ["needs 3"]
    scheduler.report(free=6, running=8, received=("needs 3",))
    scheduler.serve("w1", free=3)
    assert assigned(scheduler.ask("another")) == ["another"], "no request runs there"


def test_the_room_to_grow_is_a_setting() -> None:
    scheduler = Scheduler(growth_blocks=0)
    scheduler.serve(free=3, running=8)
    assert assigned(scheduler.ask("needs 3")) == ["needs 3"]


def test_models_do_not_block_each_other(scheduler: Scheduler) -> None:
    scheduler.join("w0")
    scheduler.join("w1", model="n")
    scheduler.report("w0", free=0)
    scheduler.report("w1")
    scheduler.ask("r1")
    assert assigned(scheduler.ask("r2", model="n")) == ["r2"]


class TestRoom:
    def test_reservation_covers_the_prompt_and_a_block(self, scheduler: Scheduler) -> None:
        scheduler.serve(free=2)
        scheduler.ask("r1", prompt_tokens=32)
        assert assigned(scheduler.report(free=3)) == ["r1"]

    def test_reservation_is_limited_by_the_output(self, scheduler: Scheduler) -> None:
        scheduler.join(capacity_blocks=4, max_model_len=64)
        scheduler.report(free=4)
        assert assigned(scheduler.ask("r1", prompt_tokens=63, max_tokens=1)) == ["r1"]

    def test_reservation_leaves_blocks_of_waiting_sequences(self, scheduler: Scheduler) -> None:
        scheduler.serve(free=10, wanted=8)
        assert assigned(scheduler.ask("r1")) == []

    def test_reservations_never_exceed_the_capacity(self, scheduler: Scheduler) -> None:
        scheduler.join(capacity_blocks=4, max_model_len=4096)
        scheduler.report(free=1000)
        assert assigned(scheduler.ask("r1", prompt_tokens=32, max_tokens=32)) == ["r1"]
        assert assigned(scheduler.ask("r2", prompt_tokens=32, max_tokens=32)) == []

    def test_reservations_hold_until_the_worker_has_received(self, scheduler: Scheduler) -> None:
        scheduler.serve(free=5)
        assert assigned(scheduler.ask("r1")) == ["r1"]
        assert assigned(scheduler.ask("r2")) == []
        assert assigned(scheduler.report(free=5)) == []
        report = scheduler.report(free=5, received=("r1", "unknown"))
        assert assigned(report) == ["r2"]

    def test_a_reservation_lapses(self, scheduler: Scheduler) -> None:
        scheduler.serve(free=5)
        scheduler.ask("r1")
        scheduler.ask("r2")
        assert assigned(scheduler.report(now_s=4.9, free=5)) == []
        assert assigned(scheduler(Ticked(5.0))) == ["r2"]

    def test_a_withdrawal_frees_the_reservation(self, scheduler: Scheduler) -> None:
        scheduler.serve(free=5)
        scheduler.ask("r1")
        scheduler(Withdrawn(0.0, "r1"))
        assert assigned(scheduler.ask("r2")) == ["r2"]


class TestReports:
    def test_stale_reports_are_ignored(self, scheduler: Scheduler) -> None:
        scheduler.join()
        scheduler.report(now_s=0.0)
        assert scheduler.state.snapshot(3.0).groups_serving == 1
        assert scheduler.state.snapshot(3.1).groups_serving == 0
        assert assigned(scheduler.ask("r1", now_s=3.1)) == []
        assert assigned(scheduler.report(now_s=3.5)) == ["r1"]

    def test_another_incarnation_is_ignored(self, scheduler: Scheduler) -> None:
        scheduler.serve(incarnation="w0-old")
        assert assigned(scheduler.ask("r1")) == []
        scheduler.report(free=0)
        assert assigned(scheduler.report(incarnation="w0-old")) == []

    def test_another_epoch_stops_the_group(self, scheduler: Scheduler) -> None:
        scheduler.serve(epoch=2)
        scheduler.report(epoch=0)
        assert assigned(scheduler.ask("r1")) == []
        assert assigned(scheduler.report(epoch=2)) == ["r1"]

    def test_a_worker_without_reports_gets_no_request(self, scheduler: Scheduler) -> None:
        scheduler.serve("w0")
        scheduler.serve("w1", running=9)
        scheduler.lose("w0", now_s=0.1)
        assert scheduler.state.snapshot(0.1).groups_serving == 1
        assert placed(scheduler.ask("r1", now_s=0.2)).worker_id == "w1"
        scheduler.report("w0", now_s=0.3)
        assert placed(scheduler.ask("r2", now_s=0.4)).worker_id == "w0"

    def test_the_end_of_another_incarnations_reports_is_ignored(self, scheduler: Scheduler) -> None:
        scheduler.serve()
        scheduler.lose(incarnation="w0-old")
        scheduler.lose("stranger")
        assert assigned(scheduler.ask("r1")) == ["r1"]

    def test_an_overtaken_report_only_confirms_received_requests(
        self, scheduler: Scheduler
    ) -> None:
        scheduler.serve(number=1)
        scheduler(ask("r1"))
        scheduler.report(number=3, free=5, passed_on=True)
        scheduler.report(number=2, received=("r1",))
        assert scheduler.state.snapshot(0.0).reserved_blocks == 0
        assert kinds(scheduler(ask("r2"))) == [SendTicket, SendAssignment]
        assert kinds(scheduler(ask("r3"))) == [SendTicket], "the newer report has 5 free blocks"
        assert kinds(scheduler.report(number=4)) == [SendAssignment]

    def test_a_forwarded_report_is_not_a_sign_of_life(self, scheduler: Scheduler) -> None:
        assert scheduler.serve(passed_on=True) == []
        assert kinds(scheduler(ask("r1"))) == [SendTicket], "its worker never reported"
        assert kinds(scheduler.report()) == [SendAssignment]
        scheduler.lose()
        scheduler.report(passed_on=True)
        assert kinds(scheduler(ask("r2"))) == [SendTicket], "its reports have ended"
        assert kinds(scheduler.report()) == [SendAssignment]
        scheduler.report(now_s=2.9, passed_on=True)
        assert kinds(scheduler(ask("r3", now_s=3.5))) == [SendTicket], "its last report is old"

    def test_an_overtaken_report_does_not_bring_an_old_epoch_back(
        self, scheduler: Scheduler
    ) -> None:
        scheduler.serve(number=1)
        scheduler.report(number=3, epoch=2, passed_on=True)
        scheduler.report(number=2)
        assert kinds(scheduler(ask("r1"))) == [SendTicket]

    def test_an_unknown_worker_is_ignored(self, scheduler: Scheduler) -> None:
        assert scheduler.report("stranger") == []
        assert scheduler.state.snapshot(0.0).groups_known == 0


class TestGroups:
    def test_a_new_epoch_needs_a_new_report(self, scheduler: Scheduler) -> None:
        scheduler.serve(epoch=1)
        scheduler.join(epoch=2)
        assert assigned(scheduler.ask("r1")) == []
        command = placed(scheduler.report(epoch=2))
        assert command.epoch == 2

    def test_repeated_events_have_no_effect(self, scheduler: Scheduler) -> None:
        scheduler.serve()
        scheduler.join()
        assert assigned(scheduler.ask("r1")) == ["r1"]

    def test_a_departed_group_gets_no_requests(self, scheduler: Scheduler) -> None:
        scheduler.serve()
        scheduler(GroupLeft(0.0, "group-w0"))
        scheduler(GroupLeft(0.0, "group-w0"))
        assert assigned(scheduler.ask("r1")) == []

    def test_a_group_that_changes_its_model_is_moved(self, scheduler: Scheduler) -> None:
        scheduler.join(model="m")
        scheduler.join(model="n", epoch=2)
        assert refusal(scheduler.ask("r1", now_s=REGROUP_S)).reason is RefusalReason.UNKNOWN_MODEL

    @pytest.mark.parametrize(
        "score, workers",
        [(kv_share, ["w0", "w0", "w1", "w0"]), (least_loaded, ["w1", "w1", "w0", "w1"])],
    )
    def test_the_group_with_the_best_score_gets_the_next_request(
        self, score: ScoreFunction, workers: list[str]
    ) -> None:
        """A merged group that is half empty, and a small one with fewer sequences, nearly full."""
        scheduler = Scheduler(score=score)
        scheduler.join("w0", capacity_blocks=300)
        scheduler.join("w1", capacity_blocks=100)
        scheduler.report("w0", running=3, free=100)
        scheduler.report("w1", running=1, free=31)
        asked = [scheduler.ask(f"r{number}", prompt_tokens=80)[1] for number in range(4)]
        chosen = [command for command in asked if isinstance(command, SendAssignment)]
        assert [command.worker_id for command in chosen] == workers

    def test_a_group_that_cannot_hold_a_request_is_skipped(self, scheduler: Scheduler) -> None:
        scheduler.join("w0", max_model_len=64)
        scheduler.join("w1")
        scheduler.report("w0")
        scheduler.report("w1", running=9)
        assert placed(scheduler.ask("r1", prompt_tokens=100)).worker_id == "w1"


class TestReturns:
    """Requests that a worker could not start keep their place and return a few times only."""

    def two_groups(self, **fields: object) -> Scheduler:
        scheduler = Scheduler(**fields)  # type: ignore[arg-type]
        for name in ("w0", "w1"):
            scheduler.serve(name, free=0)
        return scheduler

    def return_request(
        self, scheduler: Scheduler, place: SendAssignment, now_s: float
    ) -> list[Command]:
        return scheduler.ask(
            place.request_id,
            now_s=now_s,
            failed=FailedAssignment(place.group_id, place.epoch, returned=True),
        )

    def test_a_returned_request_keeps_its_place_in_the_line(self) -> None:
        scheduler = self.two_groups()
        scheduler.ask("old", now_s=0.0)
        place = placed(scheduler.report("w0", free=3))
        assert place.returnable
        scheduler.report("w0", free=0, received=("old",))
        scheduler.ask("young", now_s=0.1)
        assert self.return_request(scheduler, place, 0.3) == [SendTicket(1, "old")]
        assert placed(scheduler.report("w1", now_s=0.4, free=3)).request_id == "old"

    def test_a_returned_request_runs_at_another_group_with_room(
        self,
    ) -> None:
        scheduler = self.two_groups()
        scheduler.ask("r1")
        place = placed(scheduler.report("w0", free=3))
        scheduler.report("w0", free=0, received=("r1",))
        scheduler.report("w1", free=9)
        assert scheduler.state.snapshot(0.3).returned_total == 0
        assert placed(self.return_request(scheduler, place, 0.3)).worker_id == "w1"
        assert scheduler.state.snapshot(0.3).groups_serving == 2
        assert scheduler.state.snapshot(0.3).returned_total == 1

    def test_a_moved_request_is_not_returned_to_its_origin(self) -> None:
        """Without the report its first assignment would be repeated, as it has not failed."""
        for moved in (False, True):
            scheduler = self.two_groups()
            scheduler.ask("r1")
            place = placed(scheduler.report("w0", free=3))
            scheduler.report("w0", free=0, received=("r1",))
            if moved:
                scheduler(RequestPlaced(0.2, "r1", "group-w1", 1))
                scheduler(RequestPlaced(0.2, "unknown", "group-w1", 1))
            failed = FailedAssignment("group-w1", 1, returned=True)
            answer = scheduler.ask(place.request_id, now_s=0.3, failed=failed)
            assert kinds(answer) == ([SendTicket] if moved else [SendAssignment])

    def test_a_full_queue_refuses_new_but_not_returned_requests(self) -> None:
        scheduler = self.two_groups(queue_limit=1)
        scheduler.ask("r1")
        place = placed(scheduler.report("w0", free=3))
        scheduler.report("w0", free=0, received=("r1",))
        scheduler.ask("r2")
        assert kinds(self.return_request(scheduler, place, 0.3)) == [SendTicket]
        stranger = scheduler.ask("r3", failed=FailedAssignment("group-w0", 1, returned=True))
        assert refusal(stranger).reason is RefusalReason.QUEUE_FULL, "it never had a place"

    def test_a_full_queue_accepts_requests_of_a_changed_group(self) -> None:
        scheduler = self.two_groups(queue_limit=1)
        scheduler.ask("r1")
        place = placed(scheduler.report("w0", free=3))
        scheduler.report("w0", free=0, received=("r1",))
        scheduler.join("w0", epoch=2)
        scheduler.ask("r2")
        before = scheduler.state.demands(0.3)
        failed = FailedAssignment(place.group_id, place.epoch)
        assert kinds(scheduler.ask("r1", now_s=0.3, failed=failed)) == [SendTicket]
        after = scheduler.state.demands(0.3)
        assert after[0].arriving_tokens_per_s == before[0].arriving_tokens_per_s
        assert not after[0].refused

    def test_returns_are_bounded_and_need_another_group(
        self,
    ) -> None:
        scheduler = self.two_groups()
        scheduler.ask("r1")
        for number in range(REQUEUES_MAX + 1):
            place = placed(scheduler.report("w0", now_s=float(number), free=3))
            assert place.returnable == (number < REQUEUES_MAX)
            scheduler.report("w0", now_s=number + 0.1, free=0)
            scheduler.report("w1", now_s=number + 0.1, free=0)
            self.return_request(scheduler, place, number + 0.3)
        alone = Scheduler()
        alone.serve()
        assert not placed(alone.ask("r1")).returnable


class TestUnsteadyWorkers:
    """A flapping worker gets only requests without room elsewhere, until it stays."""

    def unsteady(self) -> Scheduler:
        scheduler = Scheduler()
        scheduler.join("w0")
        scheduler.join("w1")
        for number in range(3):
            scheduler.report("w0", now_s=10.0 * number)
            scheduler.lose("w0", now_s=10.0 * number + 5)
        scheduler(Ticked(30.0))
        scheduler.report("w0", now_s=30.0)
        scheduler.report("w1", now_s=30.0, free=20)
        return scheduler

    def chosen(self, scheduler: Scheduler, request_id: str, now_s: float, **fields: object) -> str:
        return placed(scheduler.ask(request_id, now_s=now_s, **fields)).worker_id

    def test_a_flapping_worker_is_chosen_last(self) -> None:
        scheduler = self.unsteady()
        assert self.chosen(scheduler, "r1", 30.0) == "w1", "though w0 is empty"
        assert self.chosen(scheduler, "large", 30.0, prompt_tokens=400) == "w0", (
            "no other worker can"
        )

    def test_a_flapping_worker_is_chosen_like_others_once_it_has_stayed(self) -> None:
        scheduler = self.unsteady()
        for second in range(31, 31 + 120):
            scheduler.report("w0", now_s=float(second))
            scheduler.report("w1", now_s=float(second), free=20)
            scheduler(Ticked(float(second)))
        assert self.chosen(scheduler, "r1", 150.0) == "w0"

    def test_a_stall_of_the_scheduler_does_not_count_as_leaving(self, scheduler: Scheduler) -> None:
        """After each stall all reports are old, and workers have closed their streams."""
        scheduler.join("w0")
        scheduler.join("w1")
        now_s = 0.0
        for _ in range(4):
            for _ in range(10):
                now_s += 1.0
                scheduler.report("w0", now_s=now_s)
                scheduler.report("w1", now_s=now_s, free=20)
                scheduler(Ticked(now_s))
            now_s += 6.0
            scheduler.lose("w0", now_s=now_s)
            for _ in range(5):
                scheduler(Ticked(now_s))
                now_s += 0.1
        scheduler.report("w0", now_s=now_s)
        scheduler.report("w1", now_s=now_s, free=20)
        scheduler.serve("w2", now_s=now_s, free=20)
        assert self.chosen(scheduler, "r1", now_s) == "w0", "it flaps no more than a new one"

    def test_silence_counts_as_leaving_across_configurations(self, scheduler: Scheduler) -> None:
        scheduler.join("w0")
        scheduler.join("w1")
        for number in range(3):
            scheduler.report("w0", now_s=10.0 * number)
            for tenth in range(50):
                scheduler(Ticked(10.0 * number + 3.5 + tenth / 10))
        scheduler.serve("w0", epoch=2, now_s=30.0)
        scheduler.report("w1", now_s=30.0, free=20)
        assert self.chosen(scheduler, "r1", 30.0) == "w1"

    def test_reports_of_another_epoch_are_signs_of_life(self, scheduler: Scheduler) -> None:
        scheduler.join("w0", epoch=2)
        scheduler.join("w1")
        for tenth in range(300):
            scheduler.report("w0", epoch=1, now_s=tenth / 10)
            scheduler(Ticked(tenth / 10))
        scheduler.report("w0", epoch=2, now_s=30.0)
        scheduler.report("w1", now_s=30.0, free=20)
        assert self.chosen(scheduler, "r1", 30.0) == "w0"


class TestRefusals:
    def test_the_queue_is_bounded(self) -> None:
        scheduler = Scheduler(queue_limit=2)
        scheduler.ask("r1")
        scheduler.ask("r2")
        refused = refusal(scheduler.ask("r3"))
        assert refused.reason is RefusalReason.QUEUE_FULL
        assert refused.retry_after_s == RETRY_AFTER_MAX_S
        assert "2 queue slots" in refused.message

    def test_a_burst_for_a_model_leaves_the_queue_of_another_free(self) -> None:
        scheduler = self.flooded(queue_limit=3)
        assert refusal(scheduler.ask("a3")).reason is RefusalReason.QUEUE_FULL
        assert assigned(scheduler.ask("b0", model="other")) == ["b0"]
        scheduler.report("w1", free=0, received=("b0",))
        for number in range(1, 4):
            assert kinds(scheduler.ask(f"b{number}", model="other")) == [SendTicket]
        refused = refusal(scheduler.ask("b4", model="other"))
        assert refused.reason is RefusalReason.QUEUE_FULL and "3 queue slots" in refused.message

    def flooded(self, queue_limit: int, **settings: Any) -> Scheduler:
        """The queue of "m", whose group is full, is full; the group of "other" is idle."""
        scheduler = Scheduler(queue_limit, **settings)
        scheduler.join()
        scheduler.report(free=0)
        scheduler.join("w1", model="other")
        scheduler.report("w1")
        for number in range(queue_limit):
            assert kinds(scheduler.ask(f"a{number}")) == [SendTicket]
        return scheduler

    def test_retry_after_of_a_full_queue_is_of_its_model(self) -> None:
        scheduler = self.flooded(queue_limit=20)
        for number in range(40):
            scheduler.ask(f"b{number}", model="other", prompt_tokens=1, max_tokens=1)
        # 40 dispatches of the other model free no slot of this one.
        assert refusal(scheduler.ask("late")).retry_after_s == RETRY_AFTER_MAX_S

    def test_a_model_displaces_no_batch_request_of_another(self) -> None:
        scheduler = self.flooded(3, rules=ClassRules(Scheduling.PRIORITY))
        scheduler.report("w1", free=0)
        for number in range(3):
            scheduler.ask(f"b{number}", model="other", service=BATCH)
        assert refusal(scheduler.ask("a3")).request_id == "a3"
        displaced = refusal(scheduler.ask("urgent", model="other"))
        assert displaced.request_id == "b2", "within a model, online requests displace batch"

    def test_the_number_of_queues_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admission, "WAITING_MODELS_MAX", 2)
        # Before the first group, requests for any model wait.
        scheduler = Scheduler()
        for name in ("m", "n", "m"):
            assert kinds(scheduler.ask(f"{name} {next(_numbers)}", model=name)) == [SendTicket]
        refused = refusal(scheduler.ask("third", model="o"))
        assert refused.reason is RefusalReason.QUEUE_FULL and "all 2 models" in refused.message

    def test_retry_after_follows_the_dispatch_rate(self) -> None:
        scheduler = Scheduler(queue_limit=20)
        scheduler.join(capacity_blocks=1000)
        for number in range(40):
            scheduler.report(now_s=10.0, free=1000, received=("x",))
            scheduler.ask(f"a{number}", now_s=10.0)
        scheduler.report(now_s=10.0, free=0)
        for number in range(20):
            scheduler.ask(f"b{number}", now_s=10.0)
        # 40 dispatches in the window of 10 s are 4 per second: 20 waiting take 5 s, and the
        # jitter adds up to a quarter.
        assert 5.0 <= refusal(scheduler.ask("late", now_s=10.0)).retry_after_s <= 6.25

    def test_retry_after_follows_the_queue_of_the_model(self) -> None:
        scheduler = Scheduler(queue_limit=100, queue_deadline_s=5.0)
        scheduler.join(capacity_blocks=1000)
        scheduler.join("w1", model="other", capacity_blocks=1000)
        scheduler.report("w1", free=1000)
        for number in range(40):
            scheduler.ask(f"a{number}", model="other")
        scheduler.report(free=0)
        scheduler.ask("slow")
        refused = refusal(scheduler(Ticked(5.0)))
        assert refused.reason is RefusalReason.EXPIRED
        assert refused.retry_after_s == RETRY_AFTER_MAX_S, (
            "nothing of this model leaves, whatever others do"
        )

    def pressed(self, queued: int, deadline_s: float) -> Scheduler:
        """4 per second start from a queue that is never empty; after 10 s `queued` wait."""
        scheduler = Scheduler(queue_limit=100, queue_deadline_s=deadline_s)
        scheduler.serve(free=0)
        scheduler.ask("a0")
        for number in range(1, 41):
            now_s = number / 4
            scheduler.ask(f"a{number}", now_s=now_s)
            scheduler.report(now_s=now_s, free=3)
            scheduler.report(now_s=now_s, free=0, received=(f"a{number - 1}",))
        for number in range(queued - 1):
            scheduler.ask(f"b{number}", now_s=10.0)
        assert scheduler.state.snapshot(10.0).queued == queued
        return scheduler

    def test_a_request_that_would_expire_is_refused_at_once_where_no_merge_helps(self) -> None:
        scheduler = self.pressed(queued=41, deadline_s=5.0)
        hopeful = scheduler.ask("hopeful", now_s=10.0)
        assert hopeful == [SendTicket(1, "hopeful")], "groups may merge"
        scheduler(ShortfallsReported(10.0, {"m": 100}))
        refused = refusal(scheduler.ask("late", now_s=10.0))
        assert refused.reason is RefusalReason.QUEUE_FULL and "42 requests wait" in refused.message
        assert 10.2 <= refused.retry_after_s <= 13.2
        again = scheduler.ask("again", now_s=10.0, failed=FailedAssignment("group-w0", 1))
        assert again == [SendTicket(1, "again")], "it had a place"
        scheduler(ShortfallsReported(10.0, {}))
        assert scheduler.ask("later", now_s=10.0) == [SendTicket(1, "later")]

    def test_a_shortfall_alone_refuses_no_request(self) -> None:
        scheduler = self.pressed(queued=40, deadline_s=5.0)
        scheduler(ShortfallsReported(10.0, {"m": 100, "other": 5}))
        assert scheduler.ask("in time", now_s=10.0) == [SendTicket(1, "in time")]
        idle = Scheduler(queue_deadline_s=5.0)
        idle.serve(free=0)
        idle(ShortfallsReported(0.0, {"m": 100}))
        for number in range(3):
            assert kinds(idle.ask(f"r{number}")) == [SendTicket], "the rate is unknown"

    def test_few_dispatches_do_not_determine_the_queue_rate(self) -> None:
        """Long requests run in waves; between two of them one small request finds room."""
        scheduler = Scheduler(queue_limit=100)
        scheduler.join(capacity_blocks=96)
        scheduler(ShortfallsReported(0.0, {"m": 100}))
        scheduler.report(free=96)
        wave = [f"a{number}" for number in range(32)]
        assert [started for name in wave for started in assigned(scheduler.ask(name))] == wave
        scheduler.report(now_s=20.0, free=1, received=tuple(wave))
        small = scheduler.ask("small", now_s=20.0, prompt_tokens=8, max_tokens=8)
        assert assigned(small) == ["small"]
        for number in range(32):
            commands = scheduler.ask(f"b{number}", now_s=20.5)
            assert kinds(commands) == [SendTicket], "the next wave has room for all"
        end = scheduler.report(now_s=60.0, free=96, received=("small",))
        assert len(assigned(end)) == 32

    def test_light_load_does_not_determine_the_queue_rate(self) -> None:
        """Recent requests found room at once, so the pace of the workers is unknown."""
        scheduler = joined(queue_limit=200)
        scheduler(ShortfallsReported(0.0, {"m": 100}))
        for second in range(0, 120, 4):
            scheduler.report(now_s=float(second), received=(f"a{second - 4}",))
            assert assigned(scheduler.ask(f"a{second}", now_s=float(second)))
        scheduler.report(now_s=118.0, free=0)
        for number in range(100):
            assert kinds(scheduler.ask(f"b{number}", now_s=118.0)) == [SendTicket]

    def test_an_oversized_request_is_refused_with_both_sizes(self, scheduler: Scheduler) -> None:
        scheduler.join()
        refused = refusal(scheduler.ask("r1", prompt_tokens=1000, max_tokens=25))
        assert refused.reason is RefusalReason.TOO_LARGE
        assert refused.retry_after_s is None
        for number in ("1000", "25", "1024"):
            assert number in refused.message
        assert kinds(scheduler.ask("r2", prompt_tokens=1000, max_tokens=24)) == [SendTicket]

    def test_a_request_larger_than_the_kv_is_refused(self, scheduler: Scheduler) -> None:
        scheduler.join(capacity_blocks=4)
        assert refusal(scheduler.ask("r1")).reason is RefusalReason.TOO_LARGE

    def test_an_oversized_request_is_refused_once_a_group_registers(
        self, scheduler: Scheduler
    ) -> None:
        scheduler.ask("large", prompt_tokens=2000)
        scheduler.ask("small")
        commands = scheduler.serve()
        assert refusal(commands).request_id == "large"
        assert assigned(commands) == ["small"]

    def test_a_request_for_an_unknown_model_is_refused(self, scheduler: Scheduler) -> None:
        scheduler.join(model="served")
        refused = refusal(scheduler.ask("r1", model="other"))
        assert refused.reason is RefusalReason.UNKNOWN_MODEL
        assert refused.retry_after_s == AWAY_RETRY_S, "its first worker may start"
        # The key of the client may not permit the other models.
        assert "served" not in refused.message

    def test_a_model_without_workers_is_refused_with_a_retry_time(
        self, scheduler: Scheduler
    ) -> None:
        scheduler.join("w0", model="m")
        scheduler.join("w1", model="n")
        scheduler(GroupLeft(0.0, "group-w0"))
        refused = refusal(scheduler.ask("r1", now_s=REGROUP_S))
        assert refused.reason is RefusalReason.UNKNOWN_MODEL
        assert refused.retry_after_s > 0
        assert "unavailable" in refused.message
        scheduler.join("w0", model="m")
        scheduler.report("w0")
        assert assigned(scheduler.ask("r1")) == ["r1"]

    def test_requests_wait_for_a_model_whose_last_group_just_left(
        self, scheduler: Scheduler
    ) -> None:
        scheduler.join("w0", model="m")
        scheduler.join("w1", model="n")
        scheduler.ask("before", now_s=0.5)
        scheduler(GroupLeft(1.0, "group-w0"))
        assert kinds(scheduler.ask("r1", now_s=2.0)) == [SendTicket]
        assert kinds(scheduler.ask("r2", now_s=REGROUP_S)) == [SendTicket]
        large = refusal(scheduler.ask("r3", now_s=2.0, prompt_tokens=10_000))
        assert large.reason is RefusalReason.TOO_LARGE
        assert scheduler(Ticked(REGROUP_S + 0.9)) == []
        in_vain = scheduler(Ticked(REGROUP_S + 1.0))
        assert [refusal.request_id for refusal in in_vain] == ["r1", "r2"]
        assert {refusal.reason for refusal in in_vain} == {RefusalReason.UNKNOWN_MODEL}
        assert all(refusal.retry_after_s for refusal in in_vain)
        scheduler.join("w0", epoch=2)
        assert assigned(scheduler.report("w0", epoch=2, now_s=12.0)) == ["before"]
        scheduler(GroupLeft(20.0, "group-w0"))
        scheduler.ask("r4", now_s=21.0)
        scheduler.join("w0", epoch=3)
        assert assigned(scheduler.report("w0", epoch=3, now_s=22.0)) == ["r4"]

    def test_a_request_that_came_before_all_groups_does_not_wait_for_its_deadline(
        self, scheduler: Scheduler
    ) -> None:
        # As after a restart of the scheduler, while the workers of "m" are away.
        assert kinds(scheduler.ask("r1", model="m")) == [SendTicket]
        assert scheduler(Ticked(REGROUP_S + 1.0)) == [], "no worker of any model is known"
        scheduler.join("w1", model="n", now_s=REGROUP_S + 1.0)
        assert kinds(scheduler.ask("r2", model="m", now_s=REGROUP_S + 1.0)) == [SendRefusal]
        refused = refusal(scheduler(Ticked(REGROUP_S + 2.0)))
        assert (refused.request_id, refused.reason) == ("r1", RefusalReason.UNKNOWN_MODEL)
        assert refused.retry_after_s == AWAY_RETRY_S

    def test_the_memory_of_models_is_bounded(self) -> None:
        state = SchedulerState(8, 120.0)
        state.handle(GroupJoined(0.0, group("w1", model="n")))
        for number in range(MODELS_REMEMBERED_MAX + 1):
            state.handle(GroupJoined(0.0, group(model=f"m{number}")))
        state.handle(GroupLeft(0.0, "group-w0"))
        recent = ask("r1", model="m0", now_s=REGROUP_S)
        assert "unavailable" in refusal(state.handle(recent)).message
        unheard = ask("r2", model=f"m{MODELS_REMEMBERED_MAX}")
        assert "no worker serves this model yet" in refusal(state.handle(unheard)).message

    def test_an_expired_request_is_refused(self) -> None:
        scheduler = Scheduler(queue_deadline_s=5.0)
        scheduler.ask("r1", now_s=1.0)
        assert scheduler(Ticked(5.9)) == []
        refused = refusal(scheduler(Ticked(6.0)))
        assert (refused.request_id, refused.reason) == ("r1", RefusalReason.EXPIRED)
        assert refused.retry_after_s >= 1
        assert refusal(scheduler.ask("r2", waited_s=5.0)).reason is RefusalReason.EXPIRED

    def test_an_expired_request_is_refused_before_dispatch(self) -> None:
        scheduler = Scheduler(queue_deadline_s=5.0)
        scheduler.ask("old", now_s=0.0)
        scheduler.ask("young", now_s=4.0)
        commands = scheduler.serve(now_s=6.0)
        assert refusal(commands).request_id == "old"
        assert assigned(commands) == ["young"]

    @pytest.mark.parametrize(
        "changes",
        [
            {"request_id": ""},
            {"request_id": "x" * 257},
            {"model": ""},
            {"model": "x" * 257},
            {"prompt_tokens": 0},
            {"prompt_tokens": -5},
            {"prompt_tokens": 2**63},
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"waited_s": -1.0},
            {"waited_s": math.nan},
            {"waited_s": math.inf},
            {"failed": FailedAssignment("g", -1)},
        ],
    )
    def test_a_malformed_ask_is_refused_alone(
        self, scheduler: Scheduler, changes: dict[str, object]
    ) -> None:
        bad = ask(**({"request_id": "bad"} | changes))  # type: ignore[arg-type]
        assert refusal(scheduler(bad)).reason is RefusalReason.INVALID
        assert kinds(scheduler.ask("good")) == [SendTicket]


class TestRepeats:
    def test_a_waiting_request_gets_its_ticket_again(self, scheduler: Scheduler) -> None:
        scheduler.ask("r1", stream_id=1)
        assert scheduler.ask("r1", stream_id=2) == [SendTicket(2, "r1")]
        (command,) = scheduler.serve()
        assert command == SendAssignment("r1", "group-w0", 1, "w0", "w0:1", stream_id=2)

    def test_an_assigned_request_gets_its_assignment_again(self, scheduler: Scheduler) -> None:
        scheduler.serve()
        placed(scheduler.ask("r1", stream_id=1))
        (again,) = scheduler.ask("r1", now_s=2.0, stream_id=2)
        assert again == SendAssignment("r1", "group-w0", 1, "w0", "w0:1", stream_id=2)
        assert scheduler.state.snapshot(2.0).assigned_total == 1

    def test_a_stale_epoch_is_dispatched_again_in_its_place(self, scheduler: Scheduler) -> None:
        scheduler.serve(epoch=1)
        scheduler.ask("r1")
        scheduler.join(epoch=2)
        scheduler.ask("r2", now_s=1.0)
        refused = FailedAssignment("group-w0", 1)
        assert kinds(scheduler.ask("r1", now_s=2.0, failed=refused)) == [SendTicket]
        assert assigned(scheduler.report(now_s=2.0, epoch=2)) == ["r1", "r2"]
        assert kinds(scheduler.ask("r1", now_s=3.0, failed=refused)) == [SendAssignment]

    @pytest.mark.parametrize("known", ["before", "after"])
    def test_an_assignment_to_a_merging_group_is_dispatched_again(
        self, scheduler: Scheduler, known: str
    ) -> None:
        for name in ("w0", "w1"):
            scheduler.serve(name)
        assert assigned(scheduler.ask("r0")) == ["r0"]
        assert placed(scheduler.ask("r1")).worker_id == "w1"

        def merge() -> None:
            # w1 is a follower from now on, and its group a tombstone.
            scheduler(GroupLeft(1.0, "group-w1"))
            scheduler.join("w0", epoch=2, now_s=1.0)

        refused = FailedAssignment("group-w1", 1)
        if known == "before":
            merge()
        scheduler.report("w1", epoch=2, now_s=1.0, received=("r1",))
        # The request is not offered to the known group after the worker refused its epoch.
        held = scheduler.ask("r1", now_s=1.0, failed=refused)
        if known == "after":
            assert assigned(held) == ["r1"], "the other group still takes requests"
            return
        assert kinds(held) == [SendTicket]
        second = placed(scheduler.report("w0", epoch=2, now_s=1.0))
        assert (second.request_id, second.group_id, second.epoch) == ("r1", "group-w0", 2)
        scheduler.report("w0", epoch=2, now_s=1.0, received=("r1",))
        assert scheduler.state.snapshot(1.0).reserved_blocks == 0

    def test_a_stale_epoch_is_not_offered_again_at_once(self, scheduler: Scheduler) -> None:
        scheduler.serve(epoch=1)
        scheduler.ask("r1")
        refused = FailedAssignment("group-w0", 1)
        assert kinds(scheduler.ask("r1", failed=refused)) == [SendTicket]

    def test_a_repeated_ask_after_a_refusal_keeps_the_new_place(self, scheduler: Scheduler) -> None:
        for name in ("w0", "w1"):
            scheduler.serve(name)
        first = placed(scheduler.ask("r1"))
        refused = FailedAssignment(first.group_id, first.epoch)
        second = placed(scheduler.ask("r1", failed=refused))
        assert (first.worker_id, second.worker_id) == ("w0", "w1")
        # Both groups are at epoch 1: the group's id identifies the failed assignment.
        assert scheduler.ask("r1", failed=refused) == [second]

    def test_an_assignment_to_a_departed_group_is_dispatched_again(
        self, scheduler: Scheduler
    ) -> None:
        scheduler.serve("w0")
        scheduler.ask("r1")
        scheduler(GroupLeft(1.0, "group-w0"))
        scheduler.serve("w1", now_s=1.0)
        assert placed(scheduler.ask("r1", now_s=1.0)).worker_id == "w1"

    def test_assignments_expire(self, scheduler: Scheduler) -> None:
        scheduler.serve()
        scheduler.ask("r1")
        scheduler(Ticked(60.0))
        assert kinds(scheduler.ask("r1", now_s=60.0)) == [SendTicket]

    def test_the_memory_of_assignments_is_bounded(self) -> None:
        state = SchedulerState(8, 120.0)
        state.handle(GroupJoined(0.0, group(capacity_blocks=10**6)))
        for number in range(REMEMBERED_MAX + 10):
            state.handle(load(free=10**6, received=(f"r{number - 1}",)))
            assert len(state.handle(ask(f"r{number}"))) == 2
        state.check_invariants()


def test_withdrawn_requests_do_not_run(scheduler: Scheduler) -> None:
    scheduler.ask("r1")
    scheduler.ask("r2")
    scheduler(Withdrawn(0.0, "r1"))
    scheduler(Withdrawn(0.0, "r1"))
    scheduler(Withdrawn(0.0, "unknown"))
    assert assigned(scheduler.serve()) == ["r2"]
    assert scheduler.state.snapshot(0.0).withdrawn_total == 1


def test_a_lost_gateways_requests_are_dropped_unless_taken_over(scheduler: Scheduler) -> None:
    scheduler.ask("r1", stream_id=1)
    scheduler.ask("r2", stream_id=1)
    scheduler.ask("r3", stream_id=2)
    scheduler.ask("r2", stream_id=3)
    scheduler(GatewayGone(1.0, 1))
    assert assigned(scheduler.serve(now_s=1.0)) == ["r2", "r3"]


def test_the_snapshot_counts(scheduler: Scheduler) -> None:
    scheduler.ask("r1", now_s=1.0)
    scheduler.ask("bad", prompt_tokens=0)
    snapshot = scheduler.state.snapshot(4.0)
    assert (snapshot.queued, snapshot.oldest_wait_s) == (1, 3.0)
    assert snapshot.refused_total[RefusalReason.INVALID] == 1
    scheduler.serve(now_s=4.0)
    snapshot = scheduler.state.snapshot(4.0)
    assert (snapshot.queued, snapshot.groups_serving, snapshot.reserved_blocks) == (0, 1, 3)
    assert snapshot.dispatch_rate_per_s > 0


def test_ten_thousand_waiting_requests_cost_no_more_each() -> None:
    """Bounded by counted work, not by time: no event may walk the whole queue."""
    state = SchedulerState(20_000, 1e9)
    for number in range(10_000):
        state.handle(ask(f"r{number}", prompt_tokens=1, max_tokens=1))
    for number in range(0, 10_000, 2):
        state.handle(Withdrawn(0.0, f"r{number}"))
    state.handle(GroupJoined(0.0, group(capacity_blocks=10**6)))
    order = assigned(state.handle(load(free=10**6)))
    assert len(order) == 5_000
    assert all(int(a[1:]) < int(b[1:]) for a, b in pairwise(order))
    state.check_invariants()


# --- requests that have run


def full(**settings: Any) -> Scheduler:
    """One group without room."""
    scheduler = Scheduler(**settings)
    scheduler.serve(free=0)
    return scheduler


def test_a_resumed_request_precedes_new_ones() -> None:
    scheduler = full()
    scheduler.ask("early", waited_s=60.0)
    scheduler.ask("resumed", resumed=True)
    scheduler.ask("later-resumed", resumed=True)
    assert assigned(scheduler.report(free=100)) == ["resumed", "later-resumed", "early"]


def test_queue_limit_and_deadline_do_not_apply_to_resumed_requests() -> None:
    scheduler = full(queue_limit=2, queue_deadline_s=5.0)
    scheduler.ask("a")
    scheduler.ask("b")
    assert kinds(scheduler.ask("new")) == [SendRefusal]
    assert kinds(scheduler.ask("resumed", resumed=True, waited_s=99.0)) == [SendTicket]
    assert {command.request_id for command in scheduler(Ticked(6.0))} == {"a", "b"}
    assert scheduler(Ticked(600.0)) == []
    assert assigned(scheduler.report(free=100, now_s=600.0)) == ["resumed"]
    assert scheduler.state.snapshot(600.0).oldest_wait_s == 0.0


def test_the_deadline_counts_from_the_loss_of_a_worker_under_a_request() -> None:
    """Time at the lost worker was not spent in the queue; the request keeps its place."""
    scheduler = full(queue_limit=2, queue_deadline_s=5.0)
    scheduler.ask("a", now_s=98.0)
    scheduler.ask("b", now_s=98.0)
    failed = FailedAssignment("group-w1", 1)
    lost: dict[str, Any] = {"now_s": 99.0, "waited_s": 99.0, "failed": failed}
    assert kinds(scheduler.ask("late", **lost)) == [SendRefusal]
    assert kinds(scheduler.ask("lost", **lost, excused_s=98.5)) == [SendTicket]
    assert scheduler(Ticked(102.9)) == []
    assert scheduler.state.snapshot(102.9).oldest_wait_s == pytest.approx(4.9)
    assert {command.request_id for command in scheduler(Ticked(103.2))} == {"a", "b"}
    assert scheduler(Ticked(103.4)) == []
    (expired,) = scheduler(Ticked(103.5))
    assert expired.request_id == "lost"
    scheduler.state.check_invariants()

    scheduler = full(queue_deadline_s=5.0)
    scheduler.ask("young", now_s=98.0)
    scheduler.ask("lost", **lost, excused_s=98.5)
    assert assigned(scheduler.report(free=100, now_s=99.0)) == ["lost", "young"]


@pytest.mark.parametrize("excused_s", [-1.0, 3.1, float("nan"), float("inf")])
def test_excused_time_is_at_most_the_waiting_time(excused_s: float) -> None:
    refused = refusal(full().ask("r", waited_s=3.0, excused_s=excused_s))
    assert refused.reason is RefusalReason.INVALID and "excused_s" in refused.message


def test_a_resumed_request_waits_for_the_workers_of_its_model(scheduler: Scheduler) -> None:
    scheduler.join()
    scheduler.join("other", model="other")
    scheduler(GroupLeft(0.0, "group-w0"))
    assert refusal(scheduler.ask("new", now_s=10.0)).reason is RefusalReason.UNKNOWN_MODEL
    assert kinds(scheduler.ask("resumed", resumed=True)) == [SendTicket]
    scheduler.join(epoch=2, incarnation="w0-b")
    assert assigned(scheduler.report(epoch=2, incarnation="w0-b")) == ["resumed"]


@pytest.mark.parametrize("returned", [True, False])
def test_an_assigned_request_waits_for_the_workers_of_its_model(
    scheduler: Scheduler, returned: bool
) -> None:
    """All survivors of a divided group load their layers: for a moment none serves."""
    scheduler.serve()
    assert assigned(scheduler.ask("r")) == ["r"]
    scheduler(GroupLeft(0.0, "group-w0"))
    failed = FailedAssignment("group-w0", 1, returned)
    assert kinds(scheduler.ask("r", failed=failed)) == [SendTicket]
    assert assigned(scheduler.serve(epoch=2)) == ["r"]
    scheduler(GroupLeft(0.0, "group-w0"))
    assert kinds(scheduler.ask("r", failed=FailedAssignment("group-w0", 2))) == [SendTicket]
    assert refusal(scheduler(Ticked(120.0))).reason is RefusalReason.EXPIRED


def test_a_lost_worker_gets_no_request_until_it_reports(scheduler: Scheduler) -> None:
    """Also if the request had moved there from the group that it was assigned to."""
    scheduler.join()
    scheduler.join("w1", capacity_blocks=50)
    scheduler.report()
    assert assigned(scheduler.ask("r")) == ["r"]
    scheduler(GroupLeft(0.0, "group-w0"))
    scheduler.report("w1", free=50)
    failed = FailedAssignment("group-w1", 1)
    assert kinds(scheduler.ask("r", resumed=True, failed=failed)) == [SendTicket]
    assert assigned(scheduler.report("w1", free=50)) == ["r"]


def test_a_worker_is_lost_even_if_its_group_has_a_new_epoch(scheduler: Scheduler) -> None:
    """Requests stay where they are in a change of groups, and their gateways know the old epoch."""
    scheduler.serve()
    assert assigned(scheduler.ask("r")) == ["r"]
    scheduler.serve(epoch=2)
    failed = FailedAssignment("group-w0", 1)
    assert kinds(scheduler.ask("r", resumed=True, failed=failed)) == [SendTicket]
    assert assigned(scheduler.report(epoch=2)) == ["r"]


def test_a_resumed_request_that_fits_nowhere_is_refused(scheduler: Scheduler) -> None:
    scheduler.serve()
    command = refusal(scheduler.ask("r", prompt_tokens=2000, resumed=True))
    assert command.reason is RefusalReason.TOO_LARGE


def test_a_resumed_request_of_a_larger_group_waits_without_blocking() -> None:
    scheduler = Scheduler(queue_limit=64)
    scheduler.serve()
    scheduler.join("w1", max_model_len=4096, capacity_blocks=400)
    scheduler.report("w1", free=400)
    long = {f"long{number}": {"prompt_tokens": 2000, "max_tokens": 100} for number in range(20)}
    first = next(iter(long))
    assert assigned(scheduler.ask(first, **long[first])) == [first]
    scheduler(GroupLeft(0.0, "group-w1"))
    failed = FailedAssignment("group-w1", 1)
    for name, fields in long.items():
        assert kinds(scheduler.ask(name, resumed=True, failed=failed, **fields)) == [SendTicket]
    assert refusal(scheduler.ask("new", prompt_tokens=2000)).reason is RefusalReason.TOO_LARGE
    for number in range(12):  # more than may overtake
        scheduler.report(free=100)
        assert assigned(scheduler.ask(f"short{number}", prompt_tokens=16, max_tokens=4)) == [
            f"short{number}"
        ]
    scheduler.join("w1", incarnation="w1-b", max_model_len=4096, capacity_blocks=400)
    commands = scheduler.report("w1", incarnation="w1-b", free=400)
    assert assigned(commands)[0] == first


def test_a_size_beyond_all_known_groups_is_refused(
    scheduler: Scheduler,
) -> None:
    scheduler.join(max_model_len=4096, capacity_blocks=400)
    scheduler(GroupLeft(0.0, "group-w0"))
    assert kinds(scheduler.ask("long", prompt_tokens=2000, resumed=True)) == [SendTicket]
    longer = scheduler.ask("longer", prompt_tokens=5000, now_s=REGROUP_S)
    assert kinds(longer) == [SendTicket]
    command = refusal(scheduler.serve("w1"))
    assert (command.request_id, command.reason) == ("longer", RefusalReason.TOO_LARGE)


# --- requests that engines may die of


def test_an_isolated_request_reserves_an_idle_group(
    scheduler: Scheduler,
) -> None:
    for name in ("w0", "w1"):
        scheduler.serve(name, running=1, free=90)
    assert kinds(scheduler.ask("alone", resumed=True, alone=True)) == [SendTicket]
    assert assigned(scheduler.ask("other")) == ["other"], "it does not hold the line"
    assert assigned(scheduler.report("w1")) == ["alone"]
    scheduler.report("w0", free=0, running=9)
    assert assigned(scheduler.ask("next")) == []
    # It has come, and is not yet through its prompt.
    assert assigned(scheduler.report("w1", running=1, prefill=32, received=("alone",))) == []
    assert assigned(scheduler.report("w1", running=1)) == ["next"]


def test_no_group_is_reserved_forever_for_an_isolated_request(scheduler: Scheduler) -> None:
    scheduler.serve()
    assert assigned(scheduler.ask("alone", alone=True)) == ["alone"]
    assert assigned(scheduler.ask("next")) == []
    scheduler.report(now_s=EXCLUSIVE_S - 0.1)
    assert assigned(scheduler(Ticked(EXCLUSIVE_S - 0.1))) == []
    assert assigned(scheduler(Ticked(EXCLUSIVE_S))) == ["next"]


def test_an_isolated_request_runs_beside_others_after_a_timeout(scheduler: Scheduler) -> None:
    scheduler.serve(running=1, free=90)
    assert kinds(scheduler.ask("alone", resumed=True, alone=True)) == [SendTicket]
    scheduler.report(running=1, free=90, now_s=ALONE_S - 0.1)
    assert assigned(scheduler(Ticked(ALONE_S - 0.1))) == []
    assert assigned(scheduler(Ticked(ALONE_S))) == ["alone"]
    assert assigned(scheduler.ask("next", now_s=ALONE_S)) == ["next"]


# --- workers that a gateway cannot reach


@pytest.mark.parametrize("ttft", [None, TOKEN_COSTS])
def test_a_worker_that_the_gateway_cannot_reach_is_avoided_for_a_while(
    ttft: CostModel | None,
) -> None:
    scheduler = Scheduler(ttft=ttft)
    for name, free in (("w0", 100), ("w1", 60)):
        scheduler.serve(name, free=free)
    assert placed(scheduler.ask("other")).worker_id == "w0"
    avoiding = {"avoided": ("w0:1",), "avoided_s": 2.0}
    assert placed(scheduler.ask("r", **avoiding)).worker_id == "w1"
    # For a while it waits for the others, if they serve.
    scheduler.report("w1", free=0)
    assert assigned(scheduler.ask("waits", **avoiding)) == []
    assert assigned(scheduler(Ticked(1.9))) == []
    assert assigned(scheduler(Ticked(2.0))) == ["waits"]


def test_the_last_workers_are_never_avoided(scheduler: Scheduler) -> None:
    for name in ("w0", "w1"):
        scheduler.join(name)
    scheduler.report("w0")
    everybody = {"avoided": ("w0:1", "w1:1"), "avoided_s": 9.0}
    assert assigned(scheduler.ask("all", **everybody)) == ["all"]
    # The other one does not report.
    assert assigned(scheduler.ask("one", avoided=("w0:1",), avoided_s=9.0)) == ["one"]


@pytest.mark.parametrize("changes", [{"avoided": ("a:1",) * 65}, {"avoided_s": math.inf}])
def test_malformed_avoided_workers_are_refused(
    scheduler: Scheduler, changes: dict[str, Any]
) -> None:
    assert refusal(scheduler.ask("r", **changes)).reason is RefusalReason.INVALID
