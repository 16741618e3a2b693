"""The audit detects planners that take an expensive step before a cheap one."""

import random
from typing import Any, NamedTuple

import pytest

from services.core.audit.escalation_order import EscalationOrder
from services.core.audit.facts import MemoryDecided
from services.core.audit.group_history import GroupHistory
from services.core.audit.record import BATCH, COMMAND, EVENT, FACT, Findings
from services.core.changeover.state import Changeover, MemberConfig
from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    HostGrown,
    HostLooked,
    HostSettings,
    RecallBlocks,
    Save,
    SaveBlocks,
)
from services.core.overload.events import Action, Cause, Decision, DecisionReason, ModelLoad
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, Planned, RequestArrived
from services.core.planner.sequence_table import SequenceTable
from services.core.planner.victims import PRECEDENCES, Precedence, batch_first, newest
from services.core.queue_order import QUEUE_ORDERS, Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tideserve.sim.replay import replay

BATCH_WORK = Service(ServiceClass.BATCH)


class Line(NamedTuple):
    kind: str
    value: Any


def config(scheduling: Scheduling, blocks: int = 24, **changes: Any) -> MemberConfig:
    bounds = (4, blocks, 32, 6, 1000)
    planner = IterationConfig(*bounds, scheduling=scheduling, prefix_caching=True, **changes)
    return MemberConfig("w0", 4, False, planner)


def flood(made_with: MemberConfig, seed: int = 1, arrivals: int = 120) -> list[Line]:
    """The log of a worker with batch work, and with more online requests than it has room for."""
    rng, member, log = random.Random(seed), Changeover.of(made_with), list[Line]()

    def handle(event: Any) -> None:
        log.append(Line(EVENT, event))
        commands = member.handle(event)
        log.extend(Line(COMMAND, command) for command in commands)
        for command in commands:
            if isinstance(command, SaveBlocks | RecallBlocks):
                kind = BlocksSaved if isinstance(command, SaveBlocks) else BlocksRecalled
                handle(kind(now_s, command.job, (True,) * len(command.blocks)))

    left, now_s = arrivals, 0.0
    if made_with.planner.host is not None:
        handle(HostGrown(now_s, 1000))
    while left or member.planner.sequences:
        now_s += 0.01
        if left and rng.random() < 0.5:
            left -= 1
            prompt = tuple(rng.randrange(50) for _ in range(rng.randint(1, 24)))
            service = BATCH_WORK if rng.random() < 0.5 else DEFAULT_SERVICE
            limits = Limits(rng.randint(1, 30))
            request = Request(f"r{left}", prompt, Sampling(0.0), limits, now_s, service=service)
            handle(RequestArrived(now_s, request))
        if member.host_due_s <= now_s:
            handle(HostLooked(now_s, now_s))
        microbatch = member.plan(now_s)
        log.append(Line(BATCH, Planned(now_s, microbatch)))
        if microbatch is not None:
            chunks = microbatch.batch.chunks
            tokens = {chunk.seq_id: rng.randrange(50) for chunk in chunks if chunk.sample}
            handle(IterationFinished(now_s, tokens, microbatch.number))
    return log


def audited(made_with: MemberConfig, log: list[Line]) -> Findings:
    findings = Findings()
    replayed = replay(Changeover.of(made_with), log, EscalationOrder(findings, "w0"))
    assert not replayed.difference
    assert findings.checks["I11"] > 100
    return findings


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scheduling", Scheduling)
def test_planners_take_the_cheapest_step(scheduling: Scheduling, seed: int) -> None:
    made_with = config(scheduling)
    member = Changeover.of(made_with)
    log = flood(made_with, seed)
    replay(member, log)
    assert member.planner.preemptions_total > 10, "nothing was scarce"
    assert audited(made_with, log).violations == []


SAVING = HostSettings(1000, 1e8, save=Save.ALL, save_from=0.0, lane_share=1.0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scheduling", Scheduling)
def test_planners_preempt_requests_with_host_copies_first(
    scheduling: Scheduling, seed: int
) -> None:
    made_with = config(scheduling, host=SAVING)
    member = Changeover.of(made_with)
    log = flood(made_with, seed)
    replay(member, log)
    host = member.planner.host
    assert host is not None and host.counts.recalled_tokens_total > 100
    assert audited(made_with, log).violations == []


def test_recomputation_before_a_possible_swap_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_age = Precedence(
        QUEUE_ORDERS[Scheduling.FCFS], lambda running, *_: running[-1], batch_yields=False
    )
    monkeypatch.setitem(PRECEDENCES, Scheduling.FCFS, by_age)
    made_with = config(Scheduling.FCFS, host=SAVING)
    violations = audited(made_with, flood(made_with)).violations
    assert violations
    assert all("(RECOMPUTE), though others have copies" in text for text in violations)


@pytest.mark.parametrize(
    ("precedence", "sentence"),
    [
        (
            Precedence(QUEUE_ORDERS[Scheduling.PRIORITY], newest, batch_yields=True),
            "(RECOMPUTE), though batch work had blocks (YIELD)",
        ),
        (
            Precedence(QUEUE_ORDERS[Scheduling.FCFS], batch_first, batch_yields=True),
            "waited (HOLD_BACK)",
        ),
    ],
)
def test_a_planner_that_breaks_the_order_is_detected(
    monkeypatch: pytest.MonkeyPatch, precedence: Precedence, sentence: str
) -> None:
    """It takes the KV of the newest sequence of any class, or starts requests in arrival order."""
    monkeypatch.setitem(PRECEDENCES, Scheduling.PRIORITY, precedence)
    made_with = config(Scheduling.PRIORITY)
    violations = audited(made_with, flood(made_with)).violations
    assert violations and all(violation.startswith("I11: w0 ") for violation in violations)
    assert any(sentence in violation for violation in violations)


def test_a_planner_that_takes_kv_with_free_blocks_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grow = SequenceTable.grow

    def hasty(self: SequenceTable, sequence: Any) -> bool:
        """Preempt a running sequence, whether or not there are free blocks."""
        others = [other for other in self.running if other is not sequence]
        if others:
            self.preempt(others[-1])
        return grow(self, sequence) or bool(others)

    monkeypatch.setattr(SequenceTable, "grow", hasty)
    made_with = config(Scheduling.FCFS, blocks=200)
    violations = audited(made_with, flood(made_with, arrivals=30)).violations
    assert violations and all(
        "blocks were free for" in violation and "(CACHED)" in violation for violation in violations
    )


def merge(demand: int, waiting: int = 3, cause: Cause = Cause.OVERLOAD) -> list[Line]:
    load = ModelLoad(demand, 10, 1000, 1000, demand, 0, 0, 0, waiting)
    decision = Decision(1.0, "m", Action.MERGE, DecisionReason(cause, 1000, 1.0, 1.0, load), 50)
    return [Line(FACT, MemoryDecided(1.0, decision))]


def merge_of_full(moves_help: bool, group_ids: tuple[str, ...] = ("g0",)) -> list[Line]:
    load = ModelLoad(900, 0, 1000, 1000, 900, 0, 0, 0, 3, stuck_tokens=100)
    reason = DecisionReason(Cause.OVERLOAD, 1000, 1.0, 1.0, load, moves_help)
    decision = Decision(1.0, "m", Action.MERGE, reason, 100, group_ids)
    return [Line(FACT, MemoryDecided(1.0, decision))]


@pytest.mark.parametrize(
    ("entries", "sound"),
    [(merge_of_full(False), True), (merge_of_full(True), False), (merge_of_full(True, ()), True)],
)
def test_full_groups_merge_only_where_moves_do_not_help(entries: list[Line], sound: bool) -> None:
    history = GroupHistory(Findings())
    history.read(entries)
    assert (history.findings.violations == []) is sound
    for violation in history.findings.violations:
        assert violation.startswith(
            "I11: a merge of full groups (DROP) was decided for m, though moves"
        )


@pytest.mark.parametrize(
    ("entries", "sound"),
    [
        (merge(1200), True),
        (merge(900), False),
        (merge(1200, waiting=0), False),
        (merge(900, cause=Cause.MANUAL), True),
    ],
)
def test_a_merge_needs_online_demand_that_does_not_fit(entries: list[Line], sound: bool) -> None:
    history = GroupHistory(Findings())
    history.read(entries)
    assert (history.findings.violations == []) is sound
    for violation in history.findings.violations:
        assert violation.startswith("I11: a merge (DROP) was decided for m, whose demand of ")
