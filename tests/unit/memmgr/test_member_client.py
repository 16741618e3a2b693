"""The requests to members and holders of a change: which peers and which secrets they have."""

from services.core.groups.vocabulary import Group, GroupPhase, Member, PrepareMembers, Source
from services.memmgr.member_client import SharedNonces, introduce_requests, prepare_requests
from services.memmgr.translate_record import WorkerEndpoint
from tideserve.worker.v1 import worker_pb2

ENDPOINTS = {name: WorkerEndpoint(f"{name}:0", f"{name}:1", f"{name}:2") for name in "abc"}
LOWER, UPPER = Member("a", "a-1", 0, 2), Member("b", "b-1", 2, 4)


def command(attempt: str, survivor: Member, *holders: Member) -> PrepareMembers:
    source = Group(f"g-{survivor.worker_id}", 3, GroupPhase.DEGRADED, (survivor,), "m", attempt)
    whole = Member(survivor.worker_id, survivor.incarnation, 0, 4)
    target = Group(source.group_id, 4, GroupPhase.STABLE, (whole,), "m")
    return PrepareMembers(attempt, 7, (Source(source, 9),), (target,), 60.0, holders)


def nonces(peer: worker_pb2.Peer) -> tuple[bytes, bytes]:
    return peer.activation_nonce, peer.bulk_nonce


def test_a_member_and_its_holder_have_the_same_secrets() -> None:
    shared = SharedNonces()
    asked = command("7-1", LOWER, UPPER)
    prepare = prepare_requests(asked, ENDPOINTS, shared)["a"]
    introduction = introduce_requests(asked, ENDPOINTS, shared)["b"]
    assert (introduction.token, introduction.incarnation) == (7, "b-1")
    assert [*prepare.peers, *prepare.holders] == list(introduction.peers)
    (holder,) = prepare.holders
    assert (holder.worker_id, holder.first_layer, holder.end_layer) == ("b", 2, 4)
    assert (holder.activation_address, holder.bulk_address) == ("b:1", "b:2")


def test_survivors_that_are_holders_of_each_other_have_the_same_secrets() -> None:
    shared = SharedNonces()
    first = prepare_requests(command("7-1", LOWER, UPPER), ENDPOINTS, shared)["a"]
    second = prepare_requests(command("7-2", UPPER, LOWER), ENDPOINTS, shared)["b"]
    assert nonces(first.peers[0]) == nonces(second.holders[0])
    assert nonces(first.holders[0]) == nonces(second.peers[0])


def test_attempts_without_holders_have_new_secrets() -> None:
    shared = SharedNonces()
    requests = [prepare_requests(command(name, LOWER), ENDPOINTS, shared)["a"] for name in "tu"]
    assert nonces(requests[0].peers[0]) != nonces(requests[1].peers[0])
    assert not introduce_requests(command("t", LOWER), ENDPOINTS, shared)
