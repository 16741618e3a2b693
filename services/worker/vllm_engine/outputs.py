"""Converts the outputs of vLLM for a request to `EmitToken`s. Pure: does not import vLLM."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.core.logprobs import LogprobRows, packed
from services.core.planner.events import EmitToken
from services.core.request import FinishReason, Request, TokenLogprobs
from services.worker.ipc import RequestTimes

_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Logprob(Protocol):
    """A token's log probability; `rank` counts from 1."""

    logprob: float
    rank: int | None


class Completion(Protocol):
    """New tokens of a request's only output; `logprobs`, if requested, has an entry per token."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    finish_reason: str | None


class RequestMoments(Protocol):
    """Timestamps of a request, in seconds on the clock of vLLM's engine; 0 if not reached yet."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


class VllmOutput(Protocol):
    """vLLM's `RequestOutput` with new tokens; one of them has all prompt log probabilities.

    `num_cached_tokens`: prompt tokens that vLLM found in its prefix cache.
    """

    outputs: Sequence[Completion]
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None
    metrics: RequestMoments | None
    num_cached_tokens: int | None
    finished: bool


class RequestFailed(Exception):
    """vLLM ended a request for a reason other than a limit or a stop token."""


class OutputReader:
    """Converts the outputs of a request; numbers its tokens after `request.output_ids`.

    Those are output tokens of earlier workers, if the request is resumed.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._prompt_rows: LogprobRows | None = None
        self._cached_tokens = 0
        self._cached_reported = bool(request.output_ids)
        self.emitted = len(request.output_ids)

    def read(self, output: VllmOutput) -> list[EmitToken]:
        """The tokens of an output; the last token of a finished request has its finish reason.

        The first token of a request also has the number of cached prompt tokens, or the last if
        that comes with it only.

        Raises:
            RequestFailed: if the request ended for another reason than a limit or a stop token.
        """
        (completion,) = output.outputs
        self._cached_tokens = output.num_cached_tokens or 0
        if output.prompt_logprobs:
            self._prompt_rows = self._prompt(output.prompt_logprobs)
        reason = completion.finish_reason
        if reason is not None and (reason not in _FINISHED or not completion.token_ids):
            raise RequestFailed(f"finish reason '{reason}'")
        last = len(completion.token_ids) - 1
        return [
            self._token(completion, offset, _FINISHED.get(reason or "") if offset == last else None)
            for offset in range(last + 1)
        ]

    def _token(self, completion: Completion, offset: int, ended: FinishReason | None) -> EmitToken:
        token_id = completion.token_ids[offset]
        rows, self._prompt_rows = self._prompt_rows, None
        top = self._request.logprobs.output
        own = None
        if top is not None and completion.logprobs is not None:
            own = packed(top, [_row(token_id, completion.logprobs[offset], top)])
        index, self.emitted = self.emitted, self.emitted + 1
        cached = 0
        if not self._cached_reported and (index == 0 or ended is not None):
            cached = self._cached_tokens
            self._cached_reported = cached > 0
        return EmitToken(self._request.request_id, index, token_id, ended, own, rows, cached)

    def _prompt(self, rows: Sequence[Mapping[int, Logprob] | None]) -> LogprobRows | None:
        """A row for each prompt token except the first, for which vLLM has no log probability."""
        top, prompt = self._request.logprobs.prompt, self._request.prompt_ids
        if top is None:
            return None
        known = zip(prompt[1:], rows[1:], strict=True)
        return packed(top, [_row(token_id, row or {}, top) for token_id, row in known])


def _row(token_id: int, logprobs: Mapping[int, Logprob], top: int) -> TokenLogprobs:
    # vLLM returns the `top` likeliest tokens and the token itself, which may be among them.
    best = sorted(logprobs.items(), key=lambda item: (-item[1].logprob, item[0]))[:top]
    own = logprobs[token_id]
    pairs = tuple((other, logprob.logprob) for other, logprob in best)
    return TokenLogprobs(own.logprob, own.rank or 1, pairs)


def times_of(metrics: RequestMoments | None) -> RequestTimes | None:
    """The request's wait, prefill and decode times; vLLM does not report preemption times."""
    if metrics is None:
        return None
    return RequestTimes(
        wait_s=max(0.0, metrics.scheduled_ts - metrics.queued_ts),
        prefill_s=max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
        decode_s=max(0.0, metrics.last_token_ts - metrics.first_token_ts),
    )
