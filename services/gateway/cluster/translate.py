"""Translates scheduler and memory manager protobufs to and from the gateway's own types."""

from typing import Any

from google.protobuf.descriptor import EnumDescriptor

from services.common.adapter_messages import adapter_message
from services.common.address import host_of
from services.common.records import CAN_DROP, engine_of, paced_of, to_group
from services.common.report import unchecked_memory_report
from services.common.slo import service_message, to_class
from services.common.wire_enum import value_names
from services.core.ask import Ask, Assignment, Proceed, Refusal, RefusalReason
from services.core.destination import Destination
from services.gateway.cluster.translate_worker import to_destination
from services.gateway.vocabulary.message import (
    ClassWait,
    ClusterStatus,
    GroupStep,
    Heartbeat,
    ModelBeat,
    ProcessState,
    SchedulerMessage,
    Ticket,
    WaitingBuckets,
)
from tideserve.common.v1 import load_pb2, process_pb2, record_pb2
from tideserve.memmgr.v1 import memmgr_pb2
from tideserve.scheduler.v1 import scheduler_pb2

_REASONS = {
    number: RefusalReason(name)
    for number, name in value_names(scheduler_pb2.RefusalReason, "REFUSAL_REASON").items()
}
_STEP_PHASES = value_names(memmgr_pb2.ReconfigurationPhase, "RECONFIGURATION_PHASE")
UNKNOWN = "unknown"
"""Name for enum values of newer versions, which this version does not know."""


def ask_frame(ask: Ask, waited_s: float) -> scheduler_pb2.AdmitRequest:
    """The frame that asks the scheduler for a worker; `waited_s`: the request's age in seconds."""
    failed = ask.failed
    return scheduler_pb2.AdmitRequest(
        ask=scheduler_pb2.Ask(
            request_id=ask.request_id,
            model=ask.model,
            prompt_tokens=ask.prompt_tokens,
            max_tokens=ask.max_tokens,
            waited_s=waited_s,
            refused_epoch=failed.epoch if failed is not None else 0,
            refused_group_id=failed.group_id if failed is not None else "",
            service=service_message(ask.service),
            traceparent=ask.traceparent,
            returned=failed is not None and failed.returned,
            prefix_hashes=ask.prefix.hashes,
            prefix_stride=ask.prefix.stride,
            resumed=ask.resumed,
            alone=ask.alone,
            avoided_addresses=ask.avoided,
            avoided_s=ask.avoided_s,
            excused_s=ask.excused_s,
            estimated=ask.estimated,
            expected_tokens=ask.expected_tokens,
            fingerprint=ask.fingerprint,
            choice=ask.choice,
            affinity=ask.affinity,
            adapter=adapter_message(ask.adapter),
        )
    )


def withdraw_frame(request_id: str) -> scheduler_pb2.AdmitRequest:
    """The frame that withdraws an ask from the scheduler's queue."""
    return scheduler_pb2.AdmitRequest(withdraw=scheduler_pb2.Withdraw(request_id=request_id))


def placed_frame(request_id: str, destination: Destination) -> scheduler_pb2.AdmitRequest:
    """The frame that reports at which worker a request continues without an assignment."""
    group_id, epoch = destination.group_id, destination.epoch
    return scheduler_pb2.AdmitRequest(
        placed=scheduler_pb2.Placed(request_id=request_id, group_id=group_id, epoch=epoch)
    )


def load_frame(load: load_pb2.WorkerLoad) -> scheduler_pb2.AdmitRequest:
    """The frame that forwards a worker's load to the scheduler."""
    return scheduler_pb2.AdmitRequest(load=load)


def outcome_frame(
    request_id: str, ttft_s: float, output_tokens: int = 0, cut_off: bool = False
) -> scheduler_pb2.AdmitRequest:
    """The frame that reports the first token of a request or, with output tokens, its end."""
    return scheduler_pb2.AdmitRequest(
        outcome=scheduler_pb2.Outcome(
            request_id=request_id, ttft_s=ttft_s, output_tokens=output_tokens, cut_off=cut_off
        )
    )


def scheduler_message(frame: scheduler_pb2.AdmitResponse) -> SchedulerMessage | None:
    """The scheduler's message, or None for a kind that this version does not know."""
    match frame.WhichOneof("body"):
        case "ticket":
            return Ticket(frame.ticket.request_id)
        case "assignment":
            return _assignment(frame.assignment)
        case "refusal":
            refusal = frame.refusal
            reason = _REASONS.get(refusal.reason)
            return Refusal(
                refusal.request_id,
                reason,
                refusal.message,
                refusal.retry_after_s or None,
                refusal.booked,
                refusal.estimated,
            )
        case "proceed":
            return Proceed(frame.proceed.request_id)
        case "heartbeat":
            beat = frame.heartbeat
            waits = {
                (wait.model, to_class(wait.service_class)): ClassWait(
                    wait.optimistic_s, wait.limit_s or None
                )
                for wait in beat.class_waits
            }
            return Heartbeat(
                *(beat.groups_serving, beat.queued, beat.wants_prefixes, waits),
                beat.wants_outcomes,
                {row.model: _buckets(row) for row in beat.buckets},
                {row.model: ModelBeat(row.groups_serving, row.queued) for row in beat.models},
            )
        case _:
            return None


def _assignment(message: scheduler_pb2.Assignment) -> Assignment:
    return Assignment(
        request_id=message.request_id,
        group_id=message.group_id,
        epoch=message.epoch,
        worker_id=message.worker_id,
        address=message.address,
        returnable=message.returnable,
        hand_to=to_destination(message.hand_to) if message.HasField("hand_to") else None,
    )


def _buckets(row: scheduler_pb2.ModelBuckets) -> WaitingBuckets:
    buckets = tuple((bucket.length, bucket.requests) for bucket in row.buckets)
    return WaitingBuckets(buckets, row.padding_share)


def late_refusals(answer: scheduler_pb2.ListRefusalsResponse) -> list[dict[str, Any]]:
    """The refusals for lateness as `tideserve status --json` shows them."""
    return [
        {field.name: getattr(refusal, field.name) for field in refusal.DESCRIPTOR.fields}
        | {"service_class": to_class(refusal.service_class)}
        for refusal in answer.refusals
    ]


def process_state(answer: process_pb2.GetProcessResponse) -> ProcessState:
    """The state that a service process reported."""
    return ProcessState(answer.name, tuple(answer.pids), answer.rss_bytes, answer.ready)


def cluster_state(answer: memmgr_pb2.GetClusterResponse) -> ClusterStatus:
    """The memory manager's report of workers, groups and its decisions."""
    return ClusterStatus(
        workers=tuple(map(unchecked_memory_report, answer.workers)),
        groups=tuple(group for record in answer.groups if (group := to_group(record)) is not None),
        decisions=tuple(map(_decision, answer.decisions)),
        shortfalls={shortfall.model: shortfall.tokens for shortfall in answer.shortfalls},
        losses=tuple(
            {field.name: getattr(loss, field.name) for field in loss.DESCRIPTOR.fields}
            for loss in answer.losses
        ),
        split_obstacles=dict(answer.split_obstacles),
    )


def group_step(step: memmgr_pb2.ReconfigurationStep) -> GroupStep:
    """A progress step of a merge or split; an unknown phase counts as a failure."""
    return GroupStep(_STEP_PHASES.get(step.phase, "failed"), step.epoch, step.message)


def worker_facts(record: record_pb2.WorkerRecord | None) -> dict[str, Any]:
    """The fields of a worker's status row that come from its registration; none without it."""
    if record is None:
        return {"model": None, "paced": None, "engine": None}
    has_shape = record.HasField("shape")
    return {
        "model": record.model,
        "paced": paced_of(record),
        "engine": engine_of(record),
        "can_merge": CAN_DROP in record.capabilities,
        "no_drops": record.no_drops,
        "draining": record.draining,
        "host": host_of(record.address),
        "block_size": record.block_size,
        "arena_bytes": record.arena_bytes,
        "shape": {
            field.name: getattr(record.shape, field.name)
            for field in record.shape.DESCRIPTOR.fields
        }
        if has_shape
        else None,
    }


def _decision(message: memmgr_pb2.Decision) -> dict[str, Any]:
    """The decision as `tideserve status --json` shows it."""
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return fields | {
        "action": _short_name(memmgr_pb2.DecisionAction.DESCRIPTOR, message.action),
        "cause": _short_name(memmgr_pb2.DecisionCause.DESCRIPTOR, message.cause),
        "group_ids": list(message.group_ids),
        "parts": list(message.parts),
    }


def _short_name(enum: EnumDescriptor, number: int) -> str:
    """The last word of an enum value's name in lower case; `UNKNOWN` for unknown numbers."""
    value = enum.values_by_number.get(number)
    return value.name.rpartition("_")[2].lower() if value is not None else UNKNOWN
