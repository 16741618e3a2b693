"""Translates the messages of MemberService; protobuf stops here."""

from services.common.records import to_group
from services.core.groups.fence import AbortAsked, PrepareAsked
from services.worker.member.participant import ProposedChange, SourceMember
from tideserve.worker.v1 import worker_pb2 as pb


class InvalidPrepare(ValueError):
    """A malformed request to prepare; the message is one sentence."""


def to_prepare_asked(request: pb.PrepareRequest) -> PrepareAsked:
    """What the fence judges.

    Raises:
        InvalidPrepare: if a field is missing or a layer cannot be.
    """
    target = to_group(request.target)
    if not request.attempt or not request.incarnation or target is None or not target.members:
        raise InvalidPrepare("attempt, incarnation and target with its phase must be set")
    if any(not 0 <= one.first_layer <= one.end_layer for one in target.members):
        raise InvalidPrepare("a member's layers must begin at 0 or above and not end before that")
    return PrepareAsked(
        request.token,
        request.attempt,
        request.incarnation,
        request.group_id,
        request.epoch,
        request.mod_revision,
        target,
    )


def to_preparation(asked: PrepareAsked, request: pb.PrepareRequest) -> ProposedChange:
    """What the engine side prepares. Raises InvalidPrepare."""
    others = tuple(one for record in request.others if (one := to_group(record)) is not None)
    if len(others) < len(request.others):
        raise InvalidPrepare("every other group must have an id, an epoch and a phase")
    return ProposedChange(
        asked.attempt,
        asked.group_id,
        asked.epoch,
        asked.target,
        tuple(
            SourceMember(
                peer.worker_id,
                peer.incarnation,
                peer.address,
                peer.activation_address,
                peer.bulk_address,
                peer.activation_nonce,
                peer.bulk_nonce,
                peer.draining,
            )
            for peer in request.peers
        ),
        others,
    )


def to_abort_asked(request: pb.AbortRequest) -> AbortAsked:
    """What the fence judges."""
    return AbortAsked(request.token, request.attempt, request.incarnation)
