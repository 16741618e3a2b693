"""Converts between RPC messages and the memory manager's types; for the servicer and the client.

`translate_record` converts the records in etcd.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from services.common.records import to_group_record
from services.common.report import InvalidReport, memory_message, to_model_demand
from services.core.demand import ModelDemand
from services.core.groups.coordinator import ChangePhase, ChangeStepped
from services.core.groups.fence import PrepareCall
from services.core.groups.vocabulary import AbortMember, Group, Member
from services.core.overload.events import Action, Cause
from services.core.overload.shipping_pair import ShippingPair
from services.core.report import MemoryReport
from services.memmgr.losses import GroupLoss
from services.memmgr.overload_watch import LoggedDecision
from services.memmgr.translate_record import WorkerEndpoint
from tideserve.memmgr.v1 import memmgr_pb2
from tideserve.worker.v1 import worker_pb2

# The wire keeps two older names: `RESTORE` for a split, `RELIEF` for subsided demand.
_ACTIONS = {
    Action.MERGE: memmgr_pb2.DECISION_ACTION_MERGE,
    Action.SPLIT: memmgr_pb2.DECISION_ACTION_RESTORE,
    Action.CALL_OFF: memmgr_pb2.DECISION_ACTION_CALL_OFF,
    Action.EXHAUSTED: memmgr_pb2.DECISION_ACTION_EXHAUSTED,
    Action.MOVE: memmgr_pb2.DECISION_ACTION_MOVE,
}
_CAUSES = {
    Cause.OVERLOAD: memmgr_pb2.DECISION_CAUSE_OVERLOAD,
    Cause.SUBSIDED: memmgr_pb2.DECISION_CAUSE_RELIEF,
    Cause.MANUAL: memmgr_pb2.DECISION_CAUSE_MANUAL,
    Cause.DRAINING: memmgr_pb2.DECISION_CAUSE_DRAINING,
    Cause.START: memmgr_pb2.DECISION_CAUSE_START,
    Cause.FULL: memmgr_pb2.DECISION_CAUSE_FULL,
    Cause.LARGE: memmgr_pb2.DECISION_CAUSE_LARGE,
    Cause.UNEVEN: memmgr_pb2.DECISION_CAUSE_UNEVEN,
}
MODELS_MAX = 1_000
"""Maximum number of models in a scheduler's demand report."""

_STEPS = {
    ChangePhase.PREPARING: memmgr_pb2.RECONFIGURATION_PHASE_PREPARING,
    ChangePhase.COMMITTED: memmgr_pb2.RECONFIGURATION_PHASE_COMMITTED,
    ChangePhase.STABLE: memmgr_pb2.RECONFIGURATION_PHASE_STABLE,
    ChangePhase.FAILED: memmgr_pb2.RECONFIGURATION_PHASE_FAILED,
}


def to_prepare_request(
    call: PrepareCall,
    peers: Iterable[worker_pb2.Peer],
    others: Iterable[Group],
    holders: Iterable[worker_pb2.Peer],
) -> worker_pb2.PrepareRequest:
    """The Prepare for a member; `others` are the other target groups of the change.

    `holders` are workers of other groups that it may fetch layers from.
    """
    return worker_pb2.PrepareRequest(
        token=call.token,
        attempt=call.attempt,
        incarnation=call.incarnation,
        group_id=call.group_id,
        epoch=call.epoch,
        mod_revision=call.mod_revision,
        target=to_group_record(call.target),
        peers=peers,
        others=map(to_group_record, others),
        holders=holders,
    )


def to_peer(
    member: Member, endpoint: WorkerEndpoint, nonces: tuple[bytes, bytes]
) -> worker_pb2.Peer:
    """A member of a source group, or a holder; `nonces` authenticate its two connections."""
    return worker_pb2.Peer(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        activation_address=endpoint.activation_address,
        bulk_address=endpoint.bulk_address,
        activation_nonce=nonces[0],
        bulk_nonce=nonces[1],
        first_layer=member.first_layer,
        end_layer=member.end_layer,
        address=endpoint.address,
        draining=endpoint.draining,
    )


def to_abort_request(command: AbortMember) -> worker_pb2.AbortRequest:
    """The Abort for a member."""
    return worker_pb2.AbortRequest(
        token=command.token, attempt=command.attempt, incarnation=command.incarnation
    )


def to_ship_request(
    pair: ShippingPair,
    token: int,
    order: str,
    endpoints: Mapping[str, WorkerEndpoint],
    requests_max: int,
    if_cheaper: bool,
    blocks_max: int,
) -> worker_pb2.ShipRequestsRequest:
    """The ShipRequests for the worker of `pair.source`."""
    target = pair.target.members[0]
    endpoint = endpoints.get(target.worker_id)
    return worker_pb2.ShipRequestsRequest(
        token=token,
        incarnation=pair.source.members[0].incarnation,
        group_id=pair.source.group_id,
        epoch=pair.source.epoch,
        order=order,
        target=worker_pb2.GoTo(
            worker_id=target.worker_id,
            address=endpoint.address if endpoint is not None else "",
            group_id=pair.target.group_id,
            epoch=pair.target.epoch,
        ),
        requests_max=requests_max,
        if_cheaper=if_cheaper,
        blocks_max=blocks_max,
    )


def to_step(step: ChangeStepped) -> memmgr_pb2.ReconfigurationStep:
    """A step of a change of groups, up to STABLE."""
    return memmgr_pb2.ReconfigurationStep(
        phase=_STEPS[step.phase], epoch=step.epoch or 0, message=step.message
    )


def to_demands(report: memmgr_pb2.ReportDemandRequest) -> tuple[ModelDemand, ...]:
    """The demand at a scheduler.

    Raises:
        InvalidReport: if a number is out of range, a model is missing or named twice, or there
            are more than `MODELS_MAX` models.
    """
    if len(report.demands) > MODELS_MAX:
        raise InvalidReport(f"{len(report.demands)} models; the maximum is {MODELS_MAX}")
    demands = tuple(map(to_model_demand, report.demands))
    if len({demand.model for demand in demands}) < len(demands):
        raise InvalidReport("each demand must name a different model")
    return demands


def to_list_groups(groups: Iterable[Group]) -> memmgr_pb2.ListGroupsResponse:
    """The response of ListGroups."""
    return memmgr_pb2.ListGroupsResponse(groups=map(to_group_record, groups))


def to_get_cluster(
    workers: Iterable[MemoryReport],
    groups: Iterable[Group],
    decisions: Iterable[LoggedDecision] = (),
    shortfalls: Mapping[str, int] | None = None,
    losses: Iterable[GroupLoss] = (),
    split_obstacles: Mapping[str, str] | None = None,
) -> memmgr_pb2.GetClusterResponse:
    """The response of GetCluster."""
    return memmgr_pb2.GetClusterResponse(
        workers=map(memory_message, workers),
        groups=map(to_group_record, groups),
        decisions=map(_to_decision, decisions),
        shortfalls=to_shortfalls(shortfalls or {}),
        losses=[
            memmgr_pb2.GroupLoss(
                group_id=loss.group_id,
                epoch=loss.epoch,
                lost_unix_s=loss.unix_s,
                reason=loss.reason,
            )
            for loss in losses
        ],
        split_obstacles=split_obstacles,
    )


def to_shortfalls(shortfalls: Mapping[str, int]) -> list[memmgr_pb2.Shortfall]:
    """The models with a shortfall; `shortfalls` has tokens by model."""
    return [
        memmgr_pb2.Shortfall(model=model, tokens=tokens)
        for model, tokens in shortfalls.items()
        if tokens > 0
    ]


def _to_decision(logged: LoggedDecision) -> memmgr_pb2.Decision:
    decision = logged.decision
    reason, load = decision.reason, decision.reason.load
    return memmgr_pb2.Decision(
        decided_unix_s=logged.unix_s,
        model=decision.model,
        action=_ACTIONS[decision.action],
        cause=_CAUSES[reason.cause],
        needed_tokens=decision.needed_tokens,
        group_ids=decision.group_ids,
        threshold_tokens=reason.threshold_tokens,
        held_s=reason.held_s,
        dwell_s=reason.dwell_s,
        **asdict(load),
        outcome=logged.outcome,
        parts=decision.parts,
    )
