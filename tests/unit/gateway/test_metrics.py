"""What metrics say of groups."""

from services.gateway.message import ClusterState, GroupState, WorkerState
from services.gateway.metrics import usable_blocks


def test_a_group_has_the_blocks_of_its_smallest_member() -> None:
    blocks = {"a": 10, "b": 7, "c": 5}
    workers = tuple(WorkerState(name, (), 0, total, 0, 0, 0, 0) for name, total in blocks.items())
    groups = (GroupState("ab", 1, ("a", "b")), GroupState("c", 1, ("c",)))
    assert usable_blocks(ClusterState(workers, groups)) == 7 + 5
    # One that has not reported holds nothing; a group that ends has no members.
    groups = (GroupState("ad", 1, ("a", "d")), GroupState("b", 2, ()))
    assert usable_blocks(ClusterState(workers, groups)) == 0
