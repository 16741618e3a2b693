"""Translates between the gateway's own types and the protobufs of the worker API.

A gateway starts, aborts and attaches requests by frames of the stream Generate; workers reply with
token events.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from services.common.adapter_messages import adapter_message
from services.common.slo import service_message
from services.common.wire_enum import value_names
from services.core.ask import Assignment
from services.core.destination import Destination
from services.core.request import (
    Grammar,
    GrammarKind,
    LogprobOptions,
    Request,
    Sampling,
    TokenLogprobs,
)
from services.gateway.vocabulary.message import Finish, Moved, TokenEvent, WorkerTimes
from tideserve.worker.v1 import worker_pb2

_FINISHES = {
    number: Finish[name.upper()]
    for number, name in value_names(worker_pb2.FinishReason, "FINISH_REASON").items()
}


def start_frame(
    request: Request, assignment: Assignment, now_s: float, coalesced: bool = False
) -> worker_pb2.GenerateRequest:
    """The frame that starts a request at its assigned worker, the leader of a group.

    `now_s` is on the clock of `request.arrival_s`. `coalesced`: the worker may send the tokens of
    several iterations in one event.
    """
    limits = worker_pb2.Limits(
        max_tokens=request.limits.max_tokens,
        min_tokens=request.limits.min_tokens,
        stop_token_ids=sorted(request.limits.stop_token_ids),
    )
    return worker_pb2.GenerateRequest(
        start=worker_pb2.Start(
            request_id=request.request_id,
            group_id=assignment.group_id,
            epoch=assignment.epoch,
            prompt_ids=request.prompt_ids,
            sampling=_sampling(request.sampling),
            limits=limits,
            service=service_message(request.service),
            waited_s=max(0.0, now_s - request.arrival_s),
            traceparent=request.traceparent,
            cache_salt=request.cache_salt,
            logprobs=_logprob_options(request.logprobs),
            choice=request.choice,
            returnable=assignment.returnable,
            resumable=request.resumable,
            output_ids=request.output_ids,
            server_losses=request.server_losses,
            adapter=adapter_message(request.adapter),
            delivery=_delivery(coalesced),
            hand_to=None if assignment.hand_to is None else _place(assignment.hand_to),
        )
    )


def _place(destination: Destination) -> worker_pb2.GoTo:
    return worker_pb2.GoTo(
        worker_id=destination.worker_id,
        address=destination.address,
        group_id=destination.group_id,
        epoch=destination.epoch,
    )


def _delivery(coalesced: bool) -> "worker_pb2.Delivery.ValueType":
    return worker_pb2.DELIVERY_COALESCED if coalesced else worker_pb2.DELIVERY_EACH_STEP


def _sampling(sampling: Sampling) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.repetition_penalty != 1 else None
        ),
        logit_bias=[
            worker_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in sampling.logit_bias
        ],
        bad_words=[worker_pb2.TokenSequence(token_ids=ids) for ids in sampling.bad_words],
        allowed_token_ids=sampling.allowed_token_ids,
        grammar=_grammar(sampling.grammar),
    )


def _grammar(grammar: Grammar | None) -> worker_pb2.Grammar | None:
    if grammar is None:
        return None
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return worker_pb2.Grammar(json_schema=grammar.text)
        case GrammarKind.REGEX:
            return worker_pb2.Grammar(regex=grammar.text)
        case GrammarKind.LARK:
            return worker_pb2.Grammar(lark=grammar.text)


def _logprob_options(options: LogprobOptions) -> worker_pb2.LogprobOptions | None:
    if options.output is None and options.prompt is None:
        return None
    return worker_pb2.LogprobOptions(output_top=options.output, prompt_top=options.prompt)


def abort_frame(request_id: str) -> worker_pb2.GenerateRequest:
    """The frame that aborts a request."""
    return worker_pb2.GenerateRequest(abort=worker_pb2.Abort(request_id=request_id))


def attach_frame(
    request_id: str, moved: Moved, from_index: int, coalesced: bool = False
) -> worker_pb2.GenerateRequest:
    """The frame that asks a moved request's new worker for its tokens from `from_index` on."""
    return worker_pb2.GenerateRequest(
        attach=worker_pb2.Attach(
            request_id=request_id,
            group_id=moved.group_id,
            epoch=moved.epoch,
            from_index=from_index,
            delivery=_delivery(coalesced),
        )
    )


def token_events(frame: worker_pb2.GenerateResponse) -> Iterable[TokenEvent]:
    """The events in a worker's frame; an unknown finish reason counts as an error."""
    for event in frame.events:
        finish = None
        if event.finish_reason != worker_pb2.FINISH_REASON_UNSPECIFIED:
            finish = _FINISHES.get(event.finish_reason, Finish.ERROR)
            if finish is Finish.RETURNED and event.kv_lost:
                finish = Finish.KV_LOST
            elif finish is Finish.RETURNED and event.leaving:
                finish = Finish.LEAVING
        yield TokenEvent(
            request_id=event.request_id,
            first_index=event.first_index,
            token_ids=tuple(event.token_ids),
            finish=finish,
            message=event.message,
            moved=_moved(event.moved) if event.HasField("moved") else None,
            times=_times(event.times) if event.HasField("times") else None,
            logprobs=tuple(map(_token_logprobs, event.logprobs)) if event.logprobs else (),
            prompt_logprobs=_Logprobs(event.prompt_logprobs) if event.prompt_logprobs else (),
            cached_tokens=event.cached_tokens,
            server_losses=event.server_losses,
            go_to=to_destination(event.go_to) if event.HasField("go_to") else None,
        )


class _Logprobs(Sequence[TokenLogprobs]):
    """Log probabilities of tokens, converted lazily, because a long prompt has many."""

    def __init__(self, messages: Sequence[worker_pb2.TokenLogprobs]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return _Logprobs(self._messages[index])
        return _token_logprobs(self._messages[index])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(_token_logprobs, self._messages)


def _token_logprobs(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=False))
    return TokenLogprobs(message.logprob, message.rank, top)


def to_destination(go_to: worker_pb2.GoTo) -> Destination:
    """The worker where a request continues."""
    return Destination(go_to.worker_id, go_to.address, go_to.group_id, go_to.epoch)


def _moved(moved: worker_pb2.Moved) -> Moved:
    return Moved(moved.worker_id, moved.address, moved.group_id, moved.epoch, moved.traceparent)


def _times(times: worker_pb2.RequestTimes) -> WorkerTimes | None:
    """The times that a worker reported; None if a number is negative or not finite."""
    seconds = (times.wait_s, times.prefill_s, times.decode_s, *times.preempted_s)
    if not all(0 <= number < math.inf for number in seconds):
        return None
    return WorkerTimes(times.wait_s, times.prefill_s, times.decode_s, tuple(times.preempted_s))
