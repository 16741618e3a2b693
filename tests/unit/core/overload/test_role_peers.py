"""Workers that are connected for hand-overs."""

from dataclasses import replace

from services.core.groups.layer_map import ModelShape
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.role_peers import PEERS_MAX, role_peers
from services.core.overload.worker_facts import WorkerFacts
from services.core.role import Role

SHAPE = ModelShape(4, 1000, 0, 0, False, 5)


def facts(name: str, digest: str = "weights") -> WorkerFacts:
    common = WorkerFacts(name, "m", 16, 100, 9000, SHAPE, ("h",), can_drop=True)
    return replace(common, model_digest=digest, build="code")


def single_group(name: str, attempt: str = "") -> Group:
    members = (Member(name, f"{name}-1", 0, 4),)
    return Group(f"group-{name}", 1, GroupPhase.STABLE, members, "m", attempt)


def peers(
    groups: list[Group], roles: dict[str, Role], other: tuple[str, ...] = ()
) -> dict[str, list[str]]:
    known = {
        member.worker_id: facts(member.worker_id, "x" if member.worker_id in other else "weights")
        for group in groups
        for member in group.members
    }
    return {
        entry.member.worker_id: [member.worker_id for member in entry.peers]
        for entry in role_peers(groups, known, roles)
    }


ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


def test_each_prefill_worker_is_connected_to_each_decode_worker() -> None:
    groups = [single_group(name) for name in (*ROLES, "mixed")]
    assert peers(groups, ROLES) == {
        **{name: ["d0", "d1"] for name in ("p0", "p1")},
        **{name: ["p0", "p1"] for name in ("d0", "d1")},
    }


def test_no_workers_are_connected_without_roles() -> None:
    groups = [single_group(name) for name in ROLES]
    assert peers(groups, {}) == {}
    assert peers(groups, dict.fromkeys(ROLES, Role.MIXED)) == {}
    assert peers(groups, {"p0": Role.PREFILL}) == {}


def test_groups_that_change_or_are_merged_are_left_out() -> None:
    merged = Group(
        "g", 2, GroupPhase.STABLE, (Member("p1", "i", 0, 2), Member("d1", "i", 2, 4)), "m"
    )
    assert peers([single_group("p0"), single_group("d0"), merged], ROLES) == {
        "p0": ["d0"],
        "d0": ["p0"],
    }
    assert peers([single_group("p0"), single_group("d0", "attempt")], ROLES) == {}


def test_workers_with_other_weights_are_not_connected() -> None:
    groups = [single_group(name) for name in ROLES]
    connected = peers(groups, ROLES, other=("p1", "d1"))
    assert connected == {"p0": ["d0"], "d0": ["p0"], "p1": ["d1"], "d1": ["p1"]}


def test_the_connections_of_a_worker_are_bounded() -> None:
    roles = {"p": Role.PREFILL} | {f"d{number}": Role.DECODE for number in range(PEERS_MAX + 5)}
    connected = peers([single_group(name) for name in roles], roles)
    assert len(connected["p"]) == PEERS_MAX
