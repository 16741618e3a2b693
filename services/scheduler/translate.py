"""Translates between protobuf messages and the scheduler's events and commands.

An ask is a gateway's request for an assignment to a group of workers; an epoch numbers the
configurations of a group.
"""

from collections.abc import Iterable, Mapping

from services.common import records
from services.common.adapter_messages import to_adapter
from services.common.report import InvalidReport, demand_message, to_load_report
from services.common.slo import service_message, to_service
from services.common.wire_enum import numbers
from services.core.ask import FailedAssignment, RefusalReason
from services.core.demand import ModelDemand
from services.core.destination import Destination
from services.core.groups.vocabulary import GroupPhase
from services.core.prefix.block_hash import THIN_STRIDE, ThinHashes
from services.core.role import Role
from services.core.scheduler.vocabulary import (
    BATCH_TOKENS,
    Asked,
    Command,
    LateRefusals,
    LoadReported,
    OutcomeReported,
    RequestPlaced,
    SendAssignment,
    SendProceed,
    SendRefusal,
    SendTicket,
    ServingGroup,
    Snapshot,
    Withdrawn,
)
from services.core.service import Service
from tideserve.common.v1 import load_pb2, record_pb2
from tideserve.memmgr.v1 import memmgr_pb2
from tideserve.scheduler.v1 import scheduler_pb2
from tideserve.worker.v1 import worker_pb2

NO_ROLES: Mapping[str, Role] = {}
TTFT_MAX_S = 1e6
"""Longest time to a first token that an outcome may report, in seconds."""
_REASONS = numbers(RefusalReason, scheduler_pb2.RefusalReason, "REFUSAL_REASON")


def to_admit_event(
    frame: scheduler_pb2.AdmitRequest, stream_id: int, now_s: float
) -> Asked | Withdrawn | RequestPlaced | LoadReported | OutcomeReported | None:
    """The event of a gateway's frame; None if this version does not know its kind.

    Raises:
        InvalidReport: if the frame contains an invalid load report or outcome.
    """
    match frame.WhichOneof("body"):
        case "ask":
            return _to_asked(frame.ask, stream_id, now_s)
        case "withdraw":
            return Withdrawn(now_s, frame.withdraw.request_id)
        case "placed":
            placed = frame.placed
            return RequestPlaced(now_s, placed.request_id, placed.group_id, placed.epoch)
        case "load":
            return to_load_event(frame.load, now_s, passed_on=True)
        case "outcome":
            outcome = frame.outcome
            if not 0 <= outcome.ttft_s <= TTFT_MAX_S or outcome.output_tokens < 0:
                raise InvalidReport(f"outcome with ttft_s {outcome.ttft_s}")
            return OutcomeReported(
                *(now_s, outcome.request_id, outcome.ttft_s),
                *(outcome.output_tokens, outcome.cut_off),
            )
        case _:
            return None


def _to_asked(ask: scheduler_pb2.Ask, stream_id: int, now_s: float) -> Asked:
    return Asked(
        request_id=ask.request_id,
        model=ask.model,
        prompt_tokens=ask.prompt_tokens,
        max_tokens=ask.max_tokens,
        failed=_to_failed(ask),
        service=to_service(ask.service),
        traceparent=ask.traceparent,
        prefix=ThinHashes(ask.prefix_stride or THIN_STRIDE, tuple(ask.prefix_hashes)),
        resumed=ask.resumed,
        alone=ask.alone,
        avoided=tuple(ask.avoided_addresses),
        avoided_s=ask.avoided_s,
        excused_s=ask.excused_s,
        estimated=ask.estimated,
        expected_tokens=max(0, ask.expected_tokens),
        fingerprint=ask.fingerprint,
        choice=ask.choice,
        affinity=ask.affinity,
        adapter=to_adapter(ask.adapter) if ask.HasField("adapter") else None,
        now_s=now_s,
        stream_id=stream_id,
        waited_s=ask.waited_s,
    )


def _to_failed(ask: scheduler_pb2.Ask) -> FailedAssignment | None:
    """The failed assignment of an ask; None if its epoch is 0 on the wire."""
    if not ask.refused_epoch:
        return None
    return FailedAssignment(ask.refused_group_id, ask.refused_epoch, ask.returned)


def to_load_event(load: load_pb2.WorkerLoad, now_s: float, passed_on: bool = False) -> LoadReported:
    """The event of a worker's load report.

    Raises:
        InvalidReport: if a number is out of range or a name is missing.
    """
    return LoadReported(now_s, to_load_report(load), passed_on)


def to_demand_report(demands: Iterable[ModelDemand]) -> memmgr_pb2.ReportDemandRequest:
    """The message that reports the queue's demand per model."""
    return memmgr_pb2.ReportDemandRequest(demands=map(demand_message, demands))


def to_shortfalls(answer: memmgr_pb2.WatchShortfallsResponse) -> dict[str, int]:
    """KV tokens that models lack, by model; without models that lack none."""
    return {entry.model: entry.tokens for entry in answer.shortfalls if entry.tokens > 0}


def to_group(
    record: record_pb2.GroupRecord,
    workers: Mapping[str, record_pb2.WorkerRecord],
    roles: Mapping[str, Role] = NO_ROLES,
) -> ServingGroup | None:
    """The group as dispatch uses it, or None if it does not serve; `roles` by worker id.

    A group serves while it is stable and all members are registered under their recorded
    incarnations, valid and not draining. Requests go to the leader, its first member; load reports
    of the other members have no effect.
    """
    group = records.to_group(record)
    if group is None or group.phase is not GroupPhase.STABLE or not group.members:
        return None
    # A stale record must not attract requests: compare with what the workers publish.
    members = []
    for member in group.members:
        worker = workers.get(member.worker_id)
        if worker is None or worker.incarnation != member.incarnation or worker.draining:
            return None
        if not records.can_serve(worker):
            return None
        members.append(worker)
    leader = members[0]
    return ServingGroup(
        group_id=group.group_id,
        epoch=group.epoch,
        worker_id=leader.worker_id,
        incarnation=leader.incarnation,
        address=leader.address,
        model=leader.model,
        capacity_blocks=leader.kv_blocks_total,
        block_size=leader.block_size,
        # A sequence has KV on every member: the smallest context limits the group.
        max_model_len=min(worker.max_model_len for worker in members),
        members=len(members),
        max_batch_tokens=max(leader.max_batch_tokens, 0) or BATCH_TOKENS,
        cost_model=records.to_cost_model(leader),
        role=roles.get(leader.worker_id, Role.MIXED) if len(members) == 1 else Role.MIXED,
        adapter_rank_max=leader.adapters.rank_max if leader.adapters.slots > 0 else 0,
    )


def to_frame(command: Command) -> scheduler_pb2.AdmitResponse:
    """The frame that carries a command to a gateway."""
    match command:
        case SendTicket():
            return scheduler_pb2.AdmitResponse(
                ticket=scheduler_pb2.Ticket(request_id=command.request_id)
            )
        case SendAssignment():
            return scheduler_pb2.AdmitResponse(
                assignment=scheduler_pb2.Assignment(
                    request_id=command.request_id,
                    group_id=command.group_id,
                    epoch=command.epoch,
                    worker_id=command.worker_id,
                    address=command.address,
                    returnable=command.returnable,
                    hand_to=_go_to(command.hand_to) if command.hand_to is not None else None,
                )
            )
        case SendRefusal():
            return scheduler_pb2.AdmitResponse(
                refusal=scheduler_pb2.Refusal(
                    request_id=command.request_id,
                    reason=_REASONS[command.reason],
                    message=command.message,
                    retry_after_s=command.retry_after_s or 0.0,
                    booked=command.booked,
                    estimated=command.estimated,
                )
            )
        case SendProceed():
            return scheduler_pb2.AdmitResponse(
                proceed=scheduler_pb2.Proceed(request_id=command.request_id)
            )


def _go_to(place: Destination) -> worker_pb2.GoTo:
    return worker_pb2.GoTo(
        worker_id=place.worker_id,
        address=place.address,
        group_id=place.group_id,
        epoch=place.epoch,
    )


def to_heartbeat(snapshot: Snapshot) -> scheduler_pb2.AdmitResponse:
    """The heartbeat frame of a snapshot."""
    return scheduler_pb2.AdmitResponse(
        heartbeat=scheduler_pb2.Heartbeat(
            groups_serving=snapshot.groups_serving,
            queued=snapshot.queued,
            wants_prefixes=snapshot.wants_prefixes,
            wants_outcomes=snapshot.predicts,
            class_waits=[
                scheduler_pb2.ClassWait(
                    model=wait.model,
                    service_class=service_message(Service(wait.service_class)).service_class,
                    optimistic_s=wait.optimistic_s,
                    likely_s=wait.likely_s,
                    limit_s=wait.limit_s,
                )
                for wait in snapshot.class_waits
            ],
            buckets=[
                scheduler_pb2.ModelBuckets(
                    model=stats.model,
                    buckets=[
                        scheduler_pb2.Bucket(length=length, requests=count)
                        for length, count in stats.buckets
                    ],
                    padding_share=stats.padding_share,
                )
                for stats in snapshot.buckets
            ],
            models=[
                scheduler_pb2.ModelState(
                    model=model,
                    groups_serving=snapshot.serving_by_model.get(model, 0),
                    queued=queued,
                )
                for model, queued in snapshot.queued_by_model.items()
            ],
        )
    )


def to_refusals(refusals: Iterable[LateRefusals]) -> scheduler_pb2.ListRefusalsResponse:
    """The answer of `ListRefusals`."""
    return scheduler_pb2.ListRefusalsResponse(
        refusals=[
            scheduler_pb2.LateRefusals(
                model=refusal.model,
                service_class=service_message(Service(refusal.service_class)).service_class,
                last_minute=refusal.last_minute,
                age_s=refusal.age_s,
                wait_s=refusal.last.wait_s,
                left_s=refusal.last.left_s,
                ahead_tokens=refusal.last.ahead_tokens,
                rate=refusal.last.rate,
                limited_by=refusal.last.by,
                retry_after_s=refusal.retry_after_s,
            )
            for refusal in refusals
        ]
    )
