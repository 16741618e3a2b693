"""How long changes of groups took, from the logs of a run."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core.audit.audit import Audit
from services.core.audit.facts import ChangePlanned, EngineStarted, MemoryHeld
from services.core.audit.record import FACT
from services.core.audit.settled_changes import SettledChange, settled_changes
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group, GroupPhase, Member, Transact, TransactionFinished
from tests.unit.core.audit.test_audit import Line

LAYERS = 4
MERGED = (Stage("a", 0, 2), Stage("b", 2, 4))
ALONE = ((Stage("a", 0, 4),), (Stage("b", 0, 4),))


def group(epoch: int, stages: Sequence[Stage]) -> Group:
    members = tuple(
        Member(stage.worker_id, f"{stage.worker_id}-1", stage.first_layer, stage.end_layer)
        for stage in stages
    )
    return Group(f"group-{stages[0].worker_id}", epoch, GroupPhase.STABLE, members, "m")


def committed(number: int, now_s: float, *groups: Group) -> list[Line]:
    return [
        Line("command", Transact(number, 7, groups)),
        Line("event", TransactionFinished(now_s, number, 10 * number)),
    ]


def engine(name: str, *settled: tuple[float, int, bool]) -> list[Line]:
    """An engine that logged its memory at these times and epochs."""
    return [
        Line(FACT, EngineStarted(0.0, name, f"{name}-1", "digest", LAYERS, 100)),
        *(
            Line(FACT, MemoryHeld(now_s, epoch, 0, 4, (0, 1, 2, 3), 1, 1, 1, 8, 0, 0, 0, done))
            for now_s, epoch, done in settled
        ),
    ]


def changes(memmgr: list[Line], *engines: list[Line]) -> list[SettledChange]:
    audit = Audit()
    audit.run(engines, [memmgr], [])
    return settled_changes(audit)


def test_a_merge_and_a_split_take_until_their_last_member_has_settled() -> None:
    memmgr = [
        Line(FACT, ChangePlanned(10.0, ("group-a", "group-b"), (MERGED,), "merge")),
        *committed(1, 10.5, group(2, MERGED)),
        Line(FACT, ChangePlanned(40.0, ("group-a",), ALONE, "split")),
        *committed(2, 41.0, group(3, ALONE[0]), group(3, ALONE[1])),
    ]
    a = engine("a", (1.0, 1, True), (11.0, 2, False), (12.0, 2, True), (42.0, 3, True))
    b = engine("b", (1.0, 1, True), (11.0, 2, False), (14.0, 2, True), (41.5, 3, True))
    merge, split = changes(memmgr, a, b)
    assert merge == SettledChange(True, 2, pytest.approx(0.5), pytest.approx(4.0))
    assert split == SettledChange(False, 2, pytest.approx(1.0), pytest.approx(2.0))


def test_abandoned_changes_are_skipped_and_unsettled_ones_have_no_end() -> None:
    given_up = ChangePlanned(10.0, ("group-a", "group-b"), (MERGED,), "merge")
    assert changes([Line(FACT, given_up)], engine("a"), engine("b")) == []
    memmgr = [Line(FACT, replace(given_up, now_s=20.0)), *committed(1, 21.0, group(2, MERGED))]
    a, b = engine("a", (22.0, 2, True)), engine("b", (22.0, 2, False))
    assert [change.settled_s for change in changes(memmgr, a, b)] == [None]
