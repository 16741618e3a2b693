"""A request to prepare as core and the participant read it, and malformed requests."""

from collections.abc import Callable

import pytest

from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.worker.member.servicer import (
    InvalidPrepare,
    to_abort_call,
    to_preparation,
    to_prepare_call,
)
from tideserve.common.v1 import record_pb2
from tideserve.worker.v1 import worker_pb2 as pb


def record(group_id: str, *layers: tuple[int, int]) -> record_pb2.GroupRecord:
    """A group of workers w0, w1, … with these layers."""
    members = [
        record_pb2.GroupMember(
            worker_id=f"w{number}", incarnation="a", first_layer=first, end_layer=end
        )
        for number, (first, end) in enumerate(layers)
    ]
    return record_pb2.GroupRecord(
        group_id=group_id, epoch=2, phase=record_pb2.GROUP_PHASE_STABLE, members=members
    )


def request() -> pb.PrepareRequest:
    peer = pb.Peer(
        worker_id="w1",
        incarnation="a",
        address="h:1",
        activation_address="h:2",
        bulk_address="h:3",
        activation_nonce=b"n",
        bulk_nonce=b"m",
        draining=True,
    )
    return pb.PrepareRequest(
        token=7,
        attempt="7-1",
        incarnation="a",
        group_id="w0",
        epoch=1,
        mod_revision=9,
        target=record("w0", (0, 2), (2, 4)),
        others=[record("w2", (0, 4))],
        peers=[peer],
    )


def test_a_request_is_split_between_the_fence_and_the_participant() -> None:
    asked = to_prepare_call(request())
    target = Group(
        "w0", 2, GroupPhase.STABLE, (Member("w0", "a", 0, 2), Member("w1", "a", 2, 4)), "", "", ""
    )
    assert asked.target == target
    assert (asked.token, asked.attempt, asked.incarnation) == (7, "7-1", "a")
    assert (asked.group_id, asked.epoch, asked.mod_revision) == ("w0", 1, 9)
    change = to_preparation(asked, request())
    assert (change.attempt, change.group_id, change.epoch) == ("7-1", "w0", 1)
    assert change.target == target and [other.group_id for other in change.others] == ["w2"]
    (peer,) = change.peers
    assert (peer.worker_id, peer.address, peer.draining) == ("w1", "h:1", True)
    assert (peer.activation_nonce, peer.bulk_nonce) == (b"n", b"m")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda r: r.ClearField("attempt"), "must be set"),
        (lambda r: r.ClearField("incarnation"), "must be set"),
        (lambda r: r.ClearField("target"), "must be set"),
        (lambda r: r.target.ClearField("members"), "must be set"),
        (lambda r: setattr(r.target, "phase", 0), "must be set"),
        (
            lambda r: setattr(r.target.members[0], "first_layer", 3),
            "first layer must be at least 0",
        ),
    ],
)
def test_a_malformed_request_is_refused(
    spoil: Callable[[pb.PrepareRequest], None], reason: str
) -> None:
    spoilt = request()
    spoil(spoilt)
    with pytest.raises(InvalidPrepare, match=reason):
        to_prepare_call(spoilt)


def test_another_target_without_an_epoch_is_refused() -> None:
    spoilt = request()
    spoilt.others[0].epoch = 0
    with pytest.raises(InvalidPrepare, match="every other group"):
        to_preparation(to_prepare_call(spoilt), spoilt)


def test_an_abort_names_attempt_process_and_leadership() -> None:
    asked = to_abort_call(pb.AbortRequest(token=7, attempt="7-1", incarnation="a"))
    assert (asked.token, asked.attempt, asked.incarnation) == (7, "7-1", "a")
