"""Converts results of the engine to protobuf events for gateways."""

from itertools import pairwise
from typing import Any

from services.common.wire_enum import numbers
from services.core.logprobs import LogprobRows, joined
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.request import FinishReason
from services.worker.handovers import UnreadOutput
from services.worker.ipc import MovedRequest, RequestTimes
from tideserve.worker.v1 import worker_pb2 as pb

_REASONS: dict[Any, Any] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    **numbers(FinishReason, pb.FinishReason, "FINISH_REASON"),
}


def to_event(token: EmitToken, times: RequestTimes | None = None) -> pb.RequestEvent:
    """The event of an output token; `times` are set for the last token of a request."""
    event = pb.RequestEvent(
        request_id=token.request_id, first_index=token.index, token_ids=(token.token_id,)
    )
    if token.finish_reason is not None:
        event.finish_reason = _REASONS[token.finish_reason]
    if times is not None:
        event.times.CopyFrom(_to_times(times))
    if token.cached_tokens:
        event.cached_tokens = token.cached_tokens
    if token.logprobs is not None:
        event.logprobs.extend(_to_logprobs(token.logprobs))
    if token.prompt_logprobs is not None:
        event.prompt_logprobs.extend(_to_logprobs(token.prompt_logprobs))
    return event


def to_moved(
    moved: MovedRequest, times: RequestTimes | None = None, traceparent: str = ""
) -> pb.RequestEvent:
    """The last event of a request that moved to another worker.

    `traceparent` belongs to the group change that moved it.
    """
    return pb.RequestEvent(
        request_id=moved.request_id,
        first_index=moved.next_index,
        moved=pb.Moved(
            worker_id=moved.worker_id,
            address=moved.address,
            group_id=moved.group_id,
            epoch=moved.epoch,
            next_index=moved.next_index,
            traceparent=traceparent,
        ),
        times=None if times is None else _to_times(times),
    )


def to_replay(request_id: str, unread: UnreadOutput, from_index: int) -> list[pb.RequestEvent]:
    """The reply to an Attach: all tokens from `from_index` on, and the ending, if any."""
    events = _to_replayed(request_id, unread, from_index)
    event = events[-1]
    match unread.ending:
        case MovedRequest():
            return [*events, to_moved(unread.ending, unread.times)]
        case RefuseRequest():
            return [*events, to_refusal(unread.ending)]
        case _:
            event.finish_reason = _REASONS[unread.ending]
            if unread.times is not None:
                event.times.CopyFrom(_to_times(unread.times))
            return events


def _to_replayed(request_id: str, unread: UnreadOutput, from_index: int) -> list[pb.RequestEvent]:
    """Events with the tokens from `from_index` on: at least one, which may have no tokens."""
    known = joined(unread.logprobs) if unread.logprobs else None
    end = len(unread.token_ids)
    first_known = end - len(known) if known is not None else end
    bounds = [from_index, end]
    # Log probabilities of the oldest tokens may be missing. Send those tokens in their own event,
    # since an event has log probabilities for all of its tokens or for none.
    if from_index < first_known < end:
        bounds.insert(1, first_known)
    events = []
    for first, last in pairwise(bounds):
        event = pb.RequestEvent(
            request_id=request_id,
            first_index=first,
            token_ids=unread.token_ids[first:last],
        )
        if known is not None and first >= first_known:
            event.logprobs.extend(_to_logprobs(known.rows(first - first_known)))
        events.append(event)
    if from_index == 0 < end:
        events[0].cached_tokens = unread.cached_tokens
        if unread.prompt_logprobs is not None:
            events[0].prompt_logprobs.extend(_to_logprobs(unread.prompt_logprobs))
    return events


def to_refusal(refusal: RefuseRequest) -> pb.RequestEvent:
    """The last event of a request that the engine refuses."""
    reason = pb.FINISH_REASON_OVERLOADED if refusal.retryable else pb.FINISH_REASON_INVALID
    if refusal.returned:
        reason = pb.FINISH_REASON_RETURNED
    event = failure(refusal.request_id, reason, refusal.message)
    event.kv_lost = refusal.kv_lost
    event.leaving = refusal.leaving
    event.server_losses = refusal.server_losses
    if (go_to := refusal.go_to) is not None:
        event.go_to.worker_id, event.go_to.address = go_to.worker_id, go_to.address
        event.go_to.group_id, event.go_to.epoch = go_to.group_id, go_to.epoch
    return event


def failure(request_id: str, reason: "pb.FinishReason.ValueType", message: str) -> pb.RequestEvent:
    """The last event of a request that failed."""
    return pb.RequestEvent(request_id=request_id, finish_reason=reason, message=message)


def _to_times(times: RequestTimes) -> pb.RequestTimes:
    return pb.RequestTimes(
        wait_s=times.wait_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        preempted_s=times.preempted_s,
    )


def _to_logprobs(rows: LogprobRows) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            logprob=row.logprob,
            rank=row.rank,
            top_ids=[token_id for token_id, _ in row.top],
            top_logprobs=[logprob for _, logprob in row.top],
        )
        for row in rows.unpacked()
    ]
