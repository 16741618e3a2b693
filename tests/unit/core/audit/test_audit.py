"""Each invariant is reported for a log that violates it, and no other is."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest

from services.core.audit.audit import Audit
from services.core.audit.facts import (
    EngineStarted,
    EngineSwitched,
    LineEnded,
    LinesClaimed,
    MemoryHeld,
    SegmentRead,
    StreamEnded,
    StreamOpened,
    TokensForwarded,
)
from services.core.audit.record import BATCH, COMMAND, EVENT, FACT, VIOLATIONS_MAX, Findings
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import Activations, StageChunk
from services.core.changeover.vocabulary import (
    NoteAborted,
    NoteAdopted,
    NoteMoved,
    PeersLost,
    RunStage,
)
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import (
    ClusterListed,
    Group,
    GroupPhase,
    Member,
    MemberAnswered,
    PrepareMembers,
    Source,
    StoredGroup,
    Transact,
    TransactionFinished,
)
from services.core.planner.batch import Batch, Microbatch
from services.core.planner.events import (
    DrainContinued,
    EmitToken,
    IterationFinished,
    Planned,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.refusal import returned_by_drain
from services.core.planner.sequence import SequenceState
from services.core.report import OtherRoom
from services.core.request import FinishReason, Limits, Request, Sampling

LAYERS = 4
END_S = 100.0


class Line(NamedTuple):
    kind: str
    value: Any


def member(name: str, first: int = 0, end: int = LAYERS) -> Member:
    return Member(name, f"{name}-1", first, end)


def group(name: str, epoch: int, *members: Member, phase: GroupPhase = GroupPhase.STABLE) -> Group:
    return Group(f"group-{name}", epoch, phase, members, "m")


ALONE = {name: group(name, 1, member(name)) for name in ("a", "b")}
MERGED = group("a", 2, member("a", 0, 2), member("b", 2, 4))
GONE = group("b", 2, phase=GroupPhase.DISSOLVED)
SPLIT = {name: group(name, 3, member(name)) for name in ("a", "b")}


def stages(group: Group) -> tuple[Stage, ...]:
    return tuple(Stage(m.worker_id, m.first_layer, m.end_layer) for m in group.members)


def switched(now_s: float, group: Group) -> EngineSwitched:
    return EngineSwitched(now_s, group.group_id, group.epoch, stages(group))


def held(now_s: float, epoch: int, first: int = 0, end: int = LAYERS) -> MemoryHeld:
    layers = tuple(range(first, end))
    return MemoryHeld(now_s, epoch, first, end, layers, 40, 50, 10, 8, 0, 0, 0, settled=True)


def request(name: str) -> Request:
    return Request(name, (5, 6), Sampling(), Limits(3), 0.0)


def iteration(
    number: int, now_s: float, name: str, index: int, token: int, last: bool = False
) -> list[Line]:
    reason = FinishReason.LENGTH if last else None
    return [
        Line(BATCH, Planned(now_s, Microbatch(number, Batch(()), ()))),
        Line(EVENT, IterationFinished(now_s, {name: token}, number)),
        Line(COMMAND, EmitToken(name, index, token, reason)),
    ]


def attempt(now_s: float, number: int, before: list[Group], after: list[Group]) -> list[Line]:
    """A change that succeeds: marked, prepared by everybody, committed."""
    name, revision = f"7-{number}", 10 * number
    marked = tuple(Source(replace(group, attempt=name), revision) for group in before)
    targets = tuple(group for group in after if group.members)
    mark = Transact(2 * number, 7, tuple(source.group for source in marked))
    revisions = {source.group.group_id: revision for source in marked}
    commit = Transact(2 * number + 1, 7, tuple(after), group_revisions=revisions)
    answers = [
        Line(EVENT, MemberAnswered(now_s, name, m.worker_id, m.incarnation, True))
        for target in targets
        for m in target.members
    ]
    return [
        Line(COMMAND, mark),
        Line(EVENT, TransactionFinished(now_s, mark.transaction_id, revision)),
        Line(COMMAND, PrepareMembers(name, 7, marked, targets, 60.0)),
        *answers,
        Line(COMMAND, commit),
        Line(EVENT, TransactionFinished(now_s, commit.transaction_id, revision + 5)),
    ]


FOLLOWED = Activations(1, (), (StageChunk("r", 0, 1, 1, None),))


@dataclass
class Run:
    """Two workers merge and split while two requests run: r (leader a) and s (b, then a)."""

    a: list[Line] = field(default_factory=list)
    b: list[Line] = field(default_factory=list)
    memmgr: list[Line] = field(default_factory=list)
    gateway: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        adopted = SequenceState(request("s"), (20,), 2, 1, 0.0, 1)
        self.a = [
            *self._start("a"),
            Line(EVENT, RequestArrived(1.0, request("r"))),
            *iteration(1, 2.0, "r", 0, 10),
            Line(FACT, switched(11.0, MERGED)),
            Line(FACT, held(11.0, 2, 0, 2)),
            Line(COMMAND, NoteAdopted(adopted)),
            *iteration(2, 12.0, "r", 1, 11),
            *iteration(3, 13.0, "s", 1, 21),
            Line(FACT, switched(21.0, SPLIT["a"])),
            *iteration(4, 22.0, "r", 2, 12, last=True),
            *iteration(5, 23.0, "s", 2, 22, last=True),
            Line(FACT, held(24.0, 3)),
            Line(FACT, held(END_S, 3)),
        ]
        self.b = [
            *self._start("b"),
            Line(EVENT, RequestArrived(1.0, request("s"))),
            *iteration(1, 2.0, "s", 0, 20),
            Line(FACT, switched(11.5, MERGED)),
            Line(FACT, held(11.5, 2, 2, 4)),
            Line(COMMAND, NoteMoved("s", "a", GroupStages("g", 2, ()), 1)),
            Line(COMMAND, RunStage(FOLLOWED)),
            Line(FACT, switched(21.0, SPLIT["b"])),
            Line(FACT, held(22.0, 3)),
        ]
        listed = tuple(StoredGroup(group, 3) for group in ALONE.values())
        self.memmgr = [
            Line(EVENT, ClusterListed(0.0, 3, (), listed)),
            *attempt(10.0, 1, list(ALONE.values()), [MERGED, GONE]),
            *attempt(20.0, 2, [MERGED], list(SPLIT.values())),
        ]
        self.gateway = [
            Line(FACT, StreamOpened(0.0, "r", 3)),
            Line(FACT, StreamOpened(0.0, "s", 3)),
            Line(FACT, TokensForwarded("r", 0, (10,))),
            Line(FACT, TokensForwarded("s", 0, (20, 21))),
            Line(FACT, TokensForwarded("r", 1, (11, 12))),
            Line(FACT, SegmentRead("r", 0, "a", moved=False)),
            Line(FACT, StreamEnded(30.0, "r", "length")),
            Line(FACT, TokensForwarded("s", 2, (22,))),
            Line(FACT, SegmentRead("s", 0, "b", moved=False)),
            Line(FACT, SegmentRead("s", 1, "a", moved=True)),
            Line(FACT, StreamEnded(31.0, "s", "length")),
            Line(FACT, LinesClaimed(7, "batch", (1, 2))),
            Line(FACT, LineEnded(7, "batch", 1, 200)),
            Line(FACT, LinesClaimed(8, "batch", (2,))),
            Line(FACT, LineEnded(8, "batch", 2, 200)),
        ]

    def _start(self, name: str) -> list[Line]:
        return [
            Line(FACT, EngineStarted(0.0, name, f"{name}-1", "digest", LAYERS, 100, exact=True)),
            Line(FACT, held(0.0, 0)),
            Line(FACT, switched(0.5, ALONE[name])),
        ]

    def audit(self, **stopped_until_s: float) -> Findings:
        return Audit(stopped_until_s=stopped_until_s).run(
            [self.a, self.b], [self.memmgr], [self.gateway]
        )


def find(lines: list[Line], kind: type, number: int = 0) -> int:
    """The position of the `number`-th entry of a type."""
    return [i for i, line in enumerate(lines) if isinstance(line.value, kind)][number]


def change(lines: list[Line], kind: type, number: int = 0, **values: Any) -> None:
    """Replace fields of the `number`-th entry of a type."""
    place = find(lines, kind, number)
    line = lines[place]
    lines[place] = Line(line.kind, replace(line.value, **values))


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_sound_run_passes_and_every_invariant_was_checked() -> None:
    findings = Run().audit()
    assert findings.violations == []
    assert set(findings.checks) == {f"I{number}" for number in [*range(1, 11), 14]}


def ran_missing_layers(run: Run) -> None:
    change(run.b, MemoryHeld, 1, resident=(3,))
    change(run.a, MemoryHeld, 1, resident=(0, 1, 2))


def ran_other_layers(run: Run) -> None:
    split = (Stage("a", 0, 1), Stage("b", 1, 4))
    change(run.b, EngineSwitched, 1, stages=split)


def planned_as_follower(run: Run) -> None:
    place = find(run.b, NoteMoved)
    run.b.insert(place, Line(BATCH, Planned(11.6, Microbatch(2, Batch(()), ()))))


def followed_as_leader(run: Run) -> None:
    run.a.append(Line(COMMAND, RunStage(FOLLOWED)))


def dropped_the_last_copy(run: Run) -> None:
    change(run.b, MemoryHeld, 1, first_layer=3, resident=(3,))


def lowered_epoch(run: Run) -> None:
    rewrite_commit(run, 3, [replace(SPLIT["a"], epoch=1), SPLIT["b"]])


def two_configurations(run: Run) -> None:
    listed = StoredGroup(replace(MERGED, members=(member("a"),)), 90)
    run.memmgr.append(Line(EVENT, ClusterListed(50.0, 90, (), (listed,))))


def in_two_groups(run: Run) -> None:
    rewrite_commit(run, 1, [MERGED])


def rewrite_commit(run: Run, number: int, groups: list[Group]) -> None:
    """Make a transaction write other groups than it should."""
    change(run.memmgr, Transact, number, groups=tuple(groups))


def switched_uncommitted(run: Run) -> None:
    place = find(run.b, EngineSwitched, 2)
    run.b.insert(place + 1, Line(FACT, switched(40.0, group("b", 4, member("b")))))
    change(run.b, MemoryHeld, 2, epoch=4)


def switched_back(run: Run) -> None:
    run.b.append(Line(FACT, switched(40.0, SPLIT["b"])))


def without_consent(run: Run) -> None:
    del run.memmgr[find(run.memmgr, MemberAnswered, 1)]


def consent_of_another_process(run: Run) -> None:
    change(run.memmgr, MemberAnswered, 1, incarnation="b-0")


def committed_undone(run: Run) -> None:
    run.b.insert(4, Line(COMMAND, NoteAborted("7-1")))


def deposed_leader(run: Run) -> None:
    change(run.memmgr, Transact, 2, token=6)


def formed_unprepared(run: Run) -> None:
    del run.memmgr[find(run.memmgr, PrepareMembers)]


def emitted_twice(run: Run) -> None:
    run.b[5:5] = iteration(2, 3.0, "r", 0, 10)


def planned_in_another_epoch(run: Run) -> None:
    place = find(run.a, EngineSwitched, 1)
    moved = run.a.pop(find(run.a, Planned, 1))
    run.a.insert(place, moved)


def forwarded_another_token(run: Run) -> None:
    change(run.gateway, TokensForwarded, 0, token_ids=(99,))


def read_from_another_worker(run: Run) -> None:
    change(run.gateway, SegmentRead, 0, worker_id="b")


def read_from_no_worker(run: Run) -> None:
    run.gateway.pop(find(run.gateway, SegmentRead, 0))


def began_late(run: Run) -> None:
    change(run.gateway, SegmentRead, 0, first_index=1)


def resume(run: Run, again: int = 31, emitted: int = 31) -> None:
    """A third request: b emits tokens 0 and 1, of which the second is lost; a resumes it."""
    run.b += [
        Line(EVENT, RequestArrived(40.0, request("t"))),
        *iteration(7, 41.0, "t", 0, 30),
        *iteration(8, 42.0, "t", 1, emitted),
        Line(EVENT, RequestAborted(43.0, "t")),
    ]
    run.a += [
        Line(EVENT, RequestArrived(44.0, replace(request("t"), output_ids=(30,)))),
        *iteration(7, 45.0, "t", 1, again),
        *iteration(8, 46.0, "t", 2, 32, last=True),
    ]
    run.gateway += [
        Line(FACT, StreamOpened(40.0, "t", 3)),
        Line(FACT, TokensForwarded("t", 0, (30,))),
        Line(FACT, TokensForwarded("t", 1, (31, 32))),
        Line(FACT, SegmentRead("t", 0, "b", moved=False)),
        Line(FACT, SegmentRead("t", 1, "a", moved=False)),
        Line(FACT, StreamEnded(47.0, "t", "length")),
    ]


def resumed_too_late(run: Run) -> None:
    resume(run)
    del run.gateway[find(run.gateway, TokensForwarded, 5)]
    change(run.gateway, SegmentRead, 4, first_index=2)


def resumed_with_another_token(run: Run) -> None:
    resume(run, emitted=99)


def forwarded_a_token_of_no_segment(run: Run) -> None:
    resume(run, again=32)


def return_request(run: Run, at_s: float = 43.0) -> None:
    """As `resume`, but b shuts down and returns the request."""
    resume(run)
    place = find(run.b, RequestAborted)
    run.b[place : place + 1] = [
        Line(EVENT, DrainContinued(at_s, OtherRoom())),
        Line(COMMAND, returned_by_drain("t")),
    ]
    change(run.gateway, SegmentRead, 3, returned=True)


def returned_too_late(run: Run) -> None:
    return_request(run, at_s=44.5)


def ran_after_its_return(run: Run) -> None:
    return_request(run)
    run.b += iteration(9, 46.0, "t", 2, 32)


def other_parameters(run: Run) -> None:
    change(run.b, EngineStarted, model_digest="other")
    # Each model has a whole copy of its own, so that only the mixture is wrong.
    change(run.a, MemoryHeld, 1, resident=(0, 1, 2, 3))
    change(run.b, MemoryHeld, 1, resident=(0, 1, 2, 3))


def kept_a_block(run: Run) -> None:
    change(run.b, MemoryHeld, 2, blocks_taken=1, owners=1)


def lost_an_owner(run: Run) -> None:
    change(run.b, MemoryHeld, 1, blocks_taken=1)


def over_budget(run: Run) -> None:
    change(run.a, MemoryHeld, 1, kv_bytes=51)


def left_a_gap(run: Run) -> None:
    change(run.gateway, TokensForwarded, 2, first_index=2, token_ids=(12,))


def forwarded_after_the_end(run: Run) -> None:
    run.gateway.append(Line(FACT, TokensForwarded("s", 3, (23,))))


def settled_late(run: Run) -> None:
    change(run.a, MemoryHeld, 2, settled=False)


def stayed_marked(run: Run) -> None:
    mark = Transact(9, 7, (replace(SPLIT["a"], attempt="7-3"),))
    run.memmgr += [Line(COMMAND, mark), Line(EVENT, TransactionFinished(60.0, 9, 60))]


def stayed_degraded(run: Run) -> None:
    degraded = Transact(9, 7, (group("a", 4, member("a", 0, 2), phase=GroupPhase.DEGRADED),))
    run.memmgr += [Line(COMMAND, degraded), Line(EVENT, TransactionFinished(60.0, 9, 60))]
    run.a += [Line(FACT, held(61.0, 4))]


def never_ended(run: Run) -> None:
    del run.gateway[find(run.gateway, StreamEnded, 1)]


def ended_twice(run: Run) -> None:
    run.gateway.append(Line(FACT, StreamEnded(32.0, "s", "abandoned")))


def admitted_twice(run: Run) -> None:
    run.gateway.insert(2, Line(FACT, StreamOpened(0.0, "r", 3)))


def line_ended_twice(run: Run) -> None:
    run.gateway.append(Line(FACT, LineEnded(8, "batch", 1, 200)))


def line_ended_by_a_former_leader(run: Run) -> None:
    change(run.gateway, LineEnded, 1, token=7)


def kept_in_an_engine(run: Run) -> None:
    run.b.append(Line(EVENT, RequestArrived(40.0, request("t"))))


BREAKS: list[tuple[str, Callable[[Run], None], str]] = [
    ("I1", ran_missing_layers, "b runs layers 2 to 3 in epoch 2, but does not hold [2]"),
    ("I1", ran_other_layers, "but the record says"),
    ("I1", planned_as_follower, "b planned microbatch 2 in epoch 2, which another worker leads"),
    ("I1", followed_as_leader, "a ran a stage of another leader in epoch 3"),
    ("I2", dropped_the_last_copy, "no engine holds layers [2] since b changed in epoch 2"),
    ("I3", lowered_epoch, "group-a went back from epoch 2 to 1"),
    ("I3", two_configurations, "group-a has two configurations at epoch 2"),
    ("I3", in_two_groups, "b are in two groups at revision 15"),
    ("I4", switched_uncommitted, "b switched to group-b at epoch 4, which was never committed"),
    ("I4", switched_back, "b switched to epoch 3, though it was already at 3"),
    ("I4", without_consent, "the commit of attempt 7-1 was sent without the consent of b"),
    ("I4", consent_of_another_process, "without the consent of b"),
    ("I4", committed_undone, "attempt 7-1 was committed, though b had aborted it"),
    ("I4", deposed_leader, "a transaction of leadership 6 was committed at revision 20"),
    ("I4", formed_unprepared, "group-a was formed at epoch 2 without a preparation"),
    ("I5", emitted_twice, "token 0 of r came from b in epoch 1 and from a in epoch 1"),
    ("I5", planned_in_another_epoch, "in epoch 2, which was planned in epoch 1"),
    ("I5", forwarded_another_token, "r received 99 as token 0, but a emitted 10"),
    ("I5", read_from_another_worker, "r received 10 as token 0, but b emitted none"),
    ("I5", read_from_no_worker, "r received tokens without a worker"),
    ("I5", began_late, "r: the segment of a starts at token 1; the previous starts at 0"),
    (
        "I5",
        resumed_too_late,
        "t: the segment of a starts at token 2; the previous starts at 0, and the client",
    ),
    ("I5", resumed_with_another_token, "token 1 of t was emitted as 31, 99"),
    ("I5", forwarded_a_token_of_no_segment, "t received 31 as token 1, but a emitted 32"),
    ("I5", other_parameters, "group-a at epoch 2 has members of different models"),
    ("I6", kept_a_block, "b has 1 blocks in use, though all requests are over"),
    ("I6", lost_an_owner, "b has 1 of 8 blocks in use in epoch 2, of 0 requests"),
    ("I7", over_budget, "a uses 101 bytes in epoch 2, but its budget is 100"),
    ("I8", left_a_gap, "r received token 2, but 1 was next"),
    ("I8", forwarded_after_the_end, "s received token 3 after its end"),
    ("I9", settled_late, "a had not settled in group-a at epoch 3 30 s after the commit"),
    ("I9", stayed_marked, "group-a has not been stable for 40.0 s"),
    ("I9", stayed_degraded, "group-a has not been stable for 40.0 s"),
    ("I10", never_ended, "s was admitted and never ended"),
    ("I10", ended_twice, "s ended twice"),
    ("I10", admitted_twice, "two requests were admitted as r"),
    ("I10", kept_in_an_engine, "b keeps t at the end"),
    ("I14", line_ended_twice, "line 1 of batch ended twice"),
    (
        "I14",
        line_ended_by_a_former_leader,
        "line 2 of batch ended with a result of leader 7, but leader 8 claimed it",
    ),
    ("I15", returned_too_late, "t began at a while it ran at b"),
    ("I15", ran_after_its_return, "b emitted token 2 of t, which it had returned"),
]


@pytest.mark.parametrize(
    ("invariant", "break_it", "sentence"), BREAKS, ids=[case[1].__name__ for case in BREAKS]
)
def test_a_violated_invariant_is_described(
    run: Run, invariant: str, break_it: Callable[[Run], None], sentence: str
) -> None:
    break_it(run)
    violations = run.audit().violations
    assert any(
        violation.startswith(f"{invariant}: ") and sentence in violation for violation in violations
    ), violations


def test_a_stopped_worker_must_settle_in_time_after_it_resumes(run: Run) -> None:
    settled_late(run)
    assert not run.audit(a=END_S - 30.0).violations, "it has settled by the end"
    assert run.audit(b=END_S - 30.0).violations, "another one has no such excuse"
    (broken,) = run.audit(a=END_S - 31.0).violations
    assert "a had not settled in group-a at epoch 3" in broken


def test_a_request_resumed_after_a_loss_is_valid(run: Run) -> None:
    resume(run)
    assert not run.audit().violations
    # Where rounding may decide, the token that was lost need not come again.
    inexact = Run()
    resume(inexact, emitted=99)
    change(inexact.a, EngineStarted, exact=False)
    assert not inexact.audit().violations


def test_only_a_lost_worker_may_run_a_request_beside_another(run: Run) -> None:
    return_request(run)
    findings = run.audit()
    assert not findings.violations and findings.checks["I15"]
    lost = Run()
    resume(lost)
    change(lost.b, RequestAborted, now_s=44.5)
    assert not lost.audit().violations
    change(lost.gateway, SegmentRead, 3, returned=True)
    assert lost.audit().violations == ["I15: t began at a while it ran at b"]


def test_a_request_may_come_back_to_a_worker_that_has_adopted_it(run: Run) -> None:
    """Its gateway lost the other worker and does not know of the adoption."""
    adopted = SequenceState(request("s#b-1.1"), (20,), 2, 1, 0.0, 1)
    change(run.a, NoteAdopted, sequence=adopted)
    again = Request("s#a-1.2", (5, 6), Sampling(), Limits(3), 0.0, output_ids=(20,))
    run.a.insert(find(run.a, NoteAdopted) + 1, Line(EVENT, RequestArrived(11.9, again)))
    tokens = EmitToken("s#a-1.2", 1, 21, None), EmitToken("s#a-1.2", 2, 22, FinishReason.LENGTH)
    for number, token in zip((2, 4), tokens, strict=True):
        run.a[find(run.a, EmitToken, number)] = Line(COMMAND, token)
    change(run.gateway, SegmentRead, 2, moved=False)
    assert run.audit().violations == []


def test_two_engines_may_continue_a_request_handed_over_during_a_split(
    run: Run,
) -> None:
    """The new leader has the request; the old one does not learn it and takes it back."""
    run.b += iteration(7, 22.5, "s", 1, 21)
    (broken,) = run.audit().violations
    assert broken.startswith("I5: token 1 of s came from")
    run.b.append(Line(EVENT, PeersLost(22.6, frozenset({"a"}))))
    assert run.audit().violations == []
    run.b += iteration(8, 22.7, "s", 2, 99)
    (broken,) = run.audit().violations
    assert broken.startswith("I5: token 2 of s was emitted as")


def test_an_adopted_token_belongs_to_the_new_worker(run: Run) -> None:
    change(run.gateway, SegmentRead, 2, first_index=0)
    assert not run.audit().violations
    change(run.gateway, SegmentRead, 2, moved=False)
    assert run.audit().violations == ["I5: s received 20 as token 0, but a emitted none"]


def test_tokens_lost_in_transit_are_detected(run: Run) -> None:
    change(run.gateway, TokensForwarded, 2, token_ids=(11,))
    assert run.audit().violations == ["I8: r ended (length) with 2 of 3 tokens"]


def test_aborted_refused_and_dead_engine_requests_have_ended(run: Run) -> None:
    run.b += [
        Line(EVENT, RequestArrived(40.0, request("t"))),
        Line(EVENT, RequestAborted(41.0, "t")),
        Line(EVENT, RequestArrived(42.0, request("u"))),
        Line(COMMAND, RefuseRequest("u", "full")),
    ]
    assert run.audit().violations == []
    dead = [
        Line(FACT, EngineStarted(0.0, "c", "c-1", "digest", LAYERS, 100)),
        Line(EVENT, RequestArrived(1.0, request("v"))),
    ]
    assert Audit().run([run.a, run.b, dead], [run.memmgr], [run.gateway]).violations == []


def test_a_second_attempt_after_an_aborted_one_needs_its_own_consent_only(run: Run) -> None:
    aborted = attempt(5.0, 1, list(ALONE.values()), [MERGED, GONE])[:3]
    aborted[2] = Line(COMMAND, replace(aborted[2].value, attempt="7-0"))
    removal = Transact(90, 7, tuple(ALONE.values()), group_revisions={"group-a": 4, "group-b": 4})
    sources = tuple(replace(source, mod_revision=4) for source in aborted[2].value.sources)
    aborted[2] = Line(COMMAND, replace(aborted[2].value, sources=sources))
    aborted[0] = Line(COMMAND, replace(aborted[0].value, transaction_id=89))
    aborted[1] = Line(EVENT, TransactionFinished(5.0, 89, 4))
    run.memmgr[1:1] = [
        *aborted,
        Line(COMMAND, removal),
        Line(EVENT, TransactionFinished(6.0, 90, 5)),
    ]
    assert run.audit().violations == []


def test_violations_are_listed_up_to_100_times() -> None:
    findings = Findings()
    for number in range(VIOLATIONS_MAX + 50):
        findings.check("I8", False, "number {}", number)
    assert len(findings.violations) == VIOLATIONS_MAX
    assert findings.broken == findings.checks["I8"] == VIOLATIONS_MAX + 50


def test_requests_of_a_gateway_that_was_killed_need_not_end(run: Run) -> None:
    del run.gateway[find(run.gateway, StreamEnded, 1)]
    assert run.audit().violations == ["I10: s was admitted and never ended"]
    killed = Audit().run([run.a, run.b], [run.memmgr], [], [run.gateway])
    assert not killed.violations and killed.checks["I8"]
    change(run.gateway, TokensForwarded, 1, token_ids=(20, 99))
    killed = Audit().run([run.a, run.b], [run.memmgr], [], [run.gateway])
    assert killed.violations == ["I5: s received 99 as token 1, but a or b emitted 21"]


def test_tokens_of_a_killed_gateway_are_checked_without_its_assignments(
    run: Run,
) -> None:
    """A gateway logs the workers at the end of a request, which is missing here."""
    del run.gateway[find(run.gateway, SegmentRead, 1) :]
    killed = Audit().run([run.a, run.b], [run.memmgr], [], [run.gateway])
    assert not killed.violations
    change(run.gateway, TokensForwarded, 1, token_ids=(20, 99))
    killed = Audit().run([run.a, run.b], [run.memmgr], [], [run.gateway])
    assert killed.violations == ["I5: s received 99 as token 1, but the workers emitted 21"]
    ended = Audit().run([run.a, run.b], [run.memmgr], [run.gateway])
    assert "I5: s received tokens without a worker" in ended.violations, (
        "a living worker has reported them"
    )
