"""Between the worker's contract and core: protobuf stops here."""

import math

from services.core.iteration.events import EmitToken, RefuseRequest
from services.core.request import (
    EOS_IDS_MAX,
    STOP_TOKEN_IDS_MAX,
    FinishReason,
    Limits,
    Request,
    Sampling,
)
from services.worker.arrivals import Arrival
from services.worker.ipc import MovedRequest, RequestTimes
from tideserve.worker.v1 import worker_pb2 as pb

STOP_TOKENS_MAX = STOP_TOKEN_IDS_MAX + EOS_IDS_MAX

_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class InvalidRequest(ValueError):
    """A field of a start is outside its range; one sentence says which."""


def to_request(start: pb.Start, vocab_size: int, max_model_len: int, now_s: float) -> Request:
    """The request in a start frame.

    Raises:
        InvalidRequest: if any field is outside its range; the engine never sees such a value.
    """
    prompt = tuple(start.prompt_ids)
    limits, sampling = start.limits, start.sampling
    _require(0 < len(start.request_id) <= 128, "request_id must have 1 to 128 characters")
    _require(len(prompt) > 0, "prompt_ids must not be empty")
    _require(
        all(0 <= token < vocab_size for token in prompt),
        f"prompt_ids must lie in 0 to {vocab_size - 1}",
    )
    _require(limits.max_tokens >= 1, "max_tokens must be at least 1")
    _require(
        len(prompt) + limits.max_tokens <= max_model_len,
        f"prompt and max_tokens together must not exceed {max_model_len} tokens",
    )
    _require(0 <= limits.min_tokens <= limits.max_tokens, "min_tokens must lie in 0 to max_tokens")
    _require(
        len(limits.stop_token_ids) <= STOP_TOKENS_MAX
        and all(0 <= token < vocab_size for token in limits.stop_token_ids),
        f"stop_token_ids must be at most {STOP_TOKENS_MAX} token ids",
    )
    _require(
        math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 2,
        "temperature must lie in 0 to 2",
    )
    _require(0 < sampling.top_p <= 1, "top_p must be above 0 and at most 1")
    _require(0 <= sampling.top_k <= vocab_size, f"top_k must lie in 0 to {vocab_size}")
    return Request(
        request_id=start.request_id,
        prompt_ids=prompt,
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed),
        limits=Limits(limits.max_tokens, limits.min_tokens, frozenset(limits.stop_token_ids)),
        arrival_s=now_s,
    )


def to_event(token: EmitToken, times: RequestTimes | None = None) -> pb.RequestEvent:
    """News of one output token; `times` go with the last."""
    return pb.RequestEvent(
        request_id=token.request_id,
        first_index=token.index,
        token_ids=[token.token_id],
        finish_reason=_REASONS[token.finish_reason],
        times=_to_times(times),
    )


def to_moved(
    moved: MovedRequest, times: RequestTimes | None = None, traceparent: str = ""
) -> pb.RequestEvent:
    """The last event of a request that goes on at another worker.

    `traceparent` is that of the change which moved it.
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
        times=_to_times(times),
    )


def to_replay(request_id: str, arrival: Arrival, from_index: int) -> list[pb.RequestEvent]:
    """The answer to an Attach: what has come so far, and the ending if the request has one."""
    event = pb.RequestEvent(
        request_id=request_id,
        first_index=from_index,
        token_ids=arrival.token_ids[from_index:],
    )
    match arrival.ending:
        case MovedRequest():
            return [event, to_moved(arrival.ending, arrival.times)]
        case RefuseRequest():
            return [event, to_refusal(arrival.ending)]
        case _:
            event.finish_reason = _REASONS[arrival.ending]
            if (times := _to_times(arrival.times)) is not None:
                event.times.CopyFrom(times)
            return [event]


def to_refusal(refusal: RefuseRequest) -> pb.RequestEvent:
    """The last event of a request that the engine does not take."""
    reason = pb.FINISH_REASON_OVERLOADED if refusal.retryable else pb.FINISH_REASON_INVALID
    return failure(refusal.request_id, reason, refusal.message)


def failure(request_id: str, reason: "pb.FinishReason.ValueType", message: str) -> pb.RequestEvent:
    """The last event of a request that could not be served."""
    return pb.RequestEvent(request_id=request_id, finish_reason=reason, message=message)


def _to_times(times: RequestTimes | None) -> pb.RequestTimes | None:
    if times is None:
        return None
    return pb.RequestTimes(
        wait_s=times.wait_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        preempted_s=times.preempted_s,
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidRequest(message)
