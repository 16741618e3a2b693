"""Workers of other groups that send layers to the members of a change."""

import random
from collections.abc import Callable, Iterable

import pytest

from services.core.groups import holders
from services.core.groups.holders import (
    HOLDERS_MAX,
    HOLDERS_PER_LAYER,
    holders_for,
    survivors_for,
)
from services.core.groups.records import Records, assignment_of
from services.core.groups.vocabulary import (
    ClusterListed,
    Group,
    GroupPhase,
    Member,
    StoredAssignment,
    StoredGroup,
    Worker,
)
from services.core.ids import group_id_of

LAYERS = 8


def worker(name: str, model: str = "m", digest: str = "d", build: str = "3:a") -> Worker:
    return Worker(name, f"{name}-1", model, LAYERS, 5, model_digest=digest, build=build)


def group(*stages: tuple[str, int, int], attempt: str = "", model: str = "m") -> Group:
    members = tuple(Member(name, f"{name}-1", first, end) for name, first, end in stages)
    whole = (stages[0][1], stages[-1][2]) == (0, LAYERS)
    phase = GroupPhase.STABLE if whole else GroupPhase.DEGRADED
    return Group(group_id_of(stages[0][0]), 7, phase, members, model, attempt)


def records(groups: Iterable[Group], *others: Worker) -> Records:
    known = Records()
    groups = tuple(groups)
    special = {other.worker_id: other for other in others}
    names = [member.worker_id for group in groups for member in group.members]
    assignments = [assignment_of(group, member) for group in groups for member in group.members]
    known.take(
        ClusterListed(
            0.0,
            9,
            tuple(special.get(name, worker(name)) for name in names),
            tuple(StoredGroup(group, 8) for group in groups),
            tuple(StoredAssignment(assignment, 8) for assignment in assignments),
        )
    )
    return known


def names_of(
    known: Records, source: Group, target: tuple[int, int] = (0, LAYERS), **options: object
) -> list[str]:
    """The holders for the first member of `source`, which is to run the layers of `target`."""
    after = group((source.members[0].worker_id, *target))
    holders_found = holders_for(known, [source], [after], **options)  # type: ignore[arg-type]
    return [member.worker_id for member in holders_found]


SURVIVOR = group(("a", 0, 4), attempt="t")
PAIR = (("c", 0, 4), ("d", 4, 8))


def test_a_survivor_gets_missing_layers_from_another_group() -> None:
    assert names_of(records([SURVIVOR, group(*PAIR)]), SURVIVOR) == ["d"]


def test_a_change_whose_members_hold_all_layers_has_no_holders() -> None:
    pair = group(("a", 0, 4), ("b", 4, 8), attempt="t")
    assert names_of(records([pair, group(*PAIR)]), pair) == []


def test_a_group_that_changes_sends_no_layers() -> None:
    changing = group(*PAIR, attempt="u")
    assert names_of(records([SURVIVOR, changing]), SURVIVOR) == []


def test_a_survivor_is_no_holder() -> None:
    """It may be the dead member, whose lease has not ended yet."""
    for attempt in ("", "u"):
        other = group(("d", 4, 8), attempt=attempt)
        assert names_of(records([SURVIVOR, other]), SURVIVOR) == []


def survivors_of(known: Records, *holders: Member, suspects: Iterable[str] = ()) -> list[str]:
    holders_found = survivors_for(
        known, [SURVIVOR], [group(("a", 0, LAYERS))], holders, set(suspects)
    )
    return [member.worker_id for member in holders_found]


def test_survivors_send_layers_without_a_holder() -> None:
    """Their restore, which may be in progress, drops nothing."""
    others = [group(("b", 4, 6), attempt="u"), group(("c", 6, 8))]
    assert survivors_of(records([SURVIVOR, *others])) == ["b", "c"]
    known = records([SURVIVOR, *others, group(("e", 0, 4), ("f", 4, 8))])
    holders = holders_for(known, [SURVIVOR], [group(("a", 0, LAYERS))])
    assert [holder.worker_id for holder in holders] == ["f"]
    assert survivors_of(known, *holders) == []


def test_survivors_that_may_hang_are_left_out() -> None:
    known = records([SURVIVOR, group(("b", 4, 6)), group(("c", 6, 8))])
    assert survivors_of(known, suspects=["b"]) == ["c"]


def test_workers_with_other_weights_or_code_are_left_out() -> None:
    for other in (
        worker("d", digest="other"),
        worker("d", build="4:b"),
        Worker("d", "d-1", "m", LAYERS, 5, can_drop=False, model_digest="d", build="3:a"),
    ):
        assert names_of(records([SURVIVOR, group(*PAIR)], other), SURVIVOR) == []


def test_a_worker_whose_lease_has_ended_is_left_out() -> None:
    known = records([SURVIVOR, group(*PAIR), group(("e", 0, 8))])
    del known.workers["d"]
    assert names_of(known, SURVIVOR) == ["e"]


def test_a_survivor_whose_own_lease_has_ended_has_no_sources() -> None:
    """The lease ends while the mark of its change is written."""
    known = records([SURVIVOR, group(("b", 4, 6)), group(*PAIR)])
    del known.workers["a"]
    assert names_of(known, SURVIVOR) == survivors_of(known) == []


def test_each_layer_has_a_second_holder_and_the_least_busy_come_first() -> None:
    singles = [group((name, 0, LAYERS)) for name in "cdef"]
    known = records([SURVIVOR, *singles])
    assert names_of(known, SURVIVOR) == ["c", "d"]
    assert names_of(known, SURVIVOR, busy={"c", "d"}) == ["e", "f"]


def test_holders_cover_all_available_layers() -> None:
    """Random clusters, in which some groups change: a layer without a holder has no candidate."""
    covered = 0
    for seed in range(300):
        rng = random.Random(seed)
        groups = []
        for number in range(rng.randint(1, 6)):
            cuts = sorted(rng.sample(range(1, LAYERS), rng.randint(0, 3)))
            edges = [0, *cuts, LAYERS]
            stages = [(f"g{number}.{i}", edges[i], edges[i + 1]) for i in range(len(edges) - 1)]
            groups.append(group(*stages, attempt=rng.choice(["", "", "u"])))
        first = rng.randrange(LAYERS - 1)
        survivor = group(("a", first, rng.randrange(first + 1, LAYERS)), attempt="t")
        known = records([survivor, *groups])
        holders_found = holders_for(known, [survivor], [group(("a", 0, LAYERS))])
        assert len(holders_found) <= HOLDERS_MAX
        names = {member.worker_id for member in holders_found}
        assert len(names) == len(holders_found) and "a" not in names
        idle = [group for group in groups if not group.attempt]
        assert names <= {member.worker_id for group in idle for member in group.members}
        held = survivor.members[0]
        for layer in set(range(LAYERS)) - set(range(held.first_layer, held.end_layer)):
            sending = [m for m in holders_found if m.first_layer <= layer < m.end_layer]
            assert len(sending) >= min(1, len(idle)), "a layer has candidates, and no holder"
            covered += len(sending) >= min(HOLDERS_PER_LAYER, len(idle)) > 0
    assert covered > 300


@pytest.mark.parametrize(
    ("rule", "witness"),
    [
        ("_keeps_layers", test_a_group_that_changes_sends_no_layers),
        ("_keeps_layers", test_a_survivor_is_no_holder),
        ("_keeps_layers", test_holders_cover_all_available_layers),
        ("_is_alike", test_workers_with_other_weights_or_code_are_left_out),
    ],
)
def test_each_rule_is_needed(
    rule: str, witness: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, rule, lambda *_: True)
    with pytest.raises(AssertionError):
        witness()
