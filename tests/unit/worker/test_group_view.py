"""A worker reads its place from the group records."""

import pytest

from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.worker.group_view import Place, place_of


def group(group_id: str, epoch: int, *worker_ids: str, dissolved: bool = False) -> Group:
    phase = GroupPhase.DISSOLVED if dissolved else GroupPhase.STABLE
    members = tuple(Member(worker_id, f"{worker_id}-a") for worker_id in worker_ids)
    return Group(group_id, epoch, phase, members, "m")


@pytest.mark.parametrize(
    ("worker_id", "place"),
    [
        ("w0", Place("group-w0", 3, leads=True, shared=True)),
        ("w1", Place("group-w0", 3, leads=False, shared=True)),
        ("w2", None),
    ],
)
def test_the_first_member_of_a_merged_group_leads(worker_id: str, place: Place | None) -> None:
    groups = [
        group("group-w1", 2, "w1"),
        group("group-w0", 3, "w0", "w1"),
        group("group-w1", 3, dissolved=True),
        group("group-w2", 1),
    ]
    assert place_of(groups, worker_id, f"{worker_id}-a") == place


def test_an_unstable_group_does_not_serve() -> None:
    assert place_of([group("group-w0", 3, "w0", dissolved=True)], "w0", "w0-a") is None


def test_a_former_incarnation_is_not_a_member() -> None:
    assert place_of([group("group-w0", 3, "w0")], "w0", "w0-b") is None
