"""Assembles the output of a request from the events of a server's stream. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.worker.openai_engine.errors import UpstreamFailed, UpstreamLost, UpstreamRefused
from services.worker.vllm_engine.outputs import Completion, Logprob, RequestMoments


@dataclass(slots=True)
class StreamedLogprob:
    """Log probability of a token; `rank` from 1, at most one more than the alternatives."""

    logprob: float
    rank: int | None = None


LogprobMap = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What an event of the stream adds to the output.

    `finish`: the server's finish reason, if the output ends; `stop_token`: the stop token that
    ended it, if the server names it. `logprobs`, if requested, has an entry per token. `counted`:
    the tokens are those that the server counts, not derived from its text. `cached_tokens`: prompt
    tokens that it found in its prefix cache, None if the event does not say.
    """

    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    stop_token: int | None = None
    logprobs: tuple[LogprobMap, ...] | None = None
    counted: bool = True
    cached_tokens: int | None = None


StreamReader = Callable[[Mapping[str, Any]], StreamPiece]
"""Returns what an event of a stream adds to the output; raises its error."""


def read_event(read: StreamReader, event: Mapping[str, Any], vocab_size: int) -> StreamPiece:
    """What `read` finds in an event; the token ids are those of a vocabulary of `vocab_size`.

    Raises:
        UpstreamLost, UpstreamRefused, UpstreamFailed: as `read` does.
        UpstreamFailed: if the event is malformed, or has other token ids.
    """
    try:
        piece = read(event)
    except UpstreamRefused:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UpstreamFailed("the upstream server sent a malformed event") from error
    # Further services take token ids as they are; bool is a subclass of int.
    if not all(
        type(token_id) is int and 0 <= token_id < vocab_size for token_id in piece.token_ids
    ):
        raise UpstreamFailed(
            f"the upstream server sent token ids outside the model's vocabulary of {vocab_size}"
        )
    return piece


@dataclass(slots=True)
class StreamedCompletion:
    """As vLLM's `CompletionOutput`."""

    token_ids: Sequence[int]
    finish_reason: str | None = None
    logprobs: Sequence[LogprobMap] | None = None


@dataclass(slots=True)
class StreamedMoments:
    """Times of a request in monotonic seconds; a server does not say when it schedules it."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    def note_tokens(self, now_s: float) -> None:
        """Tokens have arrived."""
        self.first_token_ts = self.first_token_ts or now_s
        self.last_token_ts = now_s


@dataclass(slots=True)
class StreamedOutput:
    """As vLLM's `RequestOutput` with a single completion."""

    outputs: Sequence[Completion]
    finished: bool
    prompt_logprobs: Sequence[LogprobMap | None] | None
    metrics: RequestMoments | None
    num_cached_tokens: int | None = 0


class OutputAssembler:
    """Collects the output tokens of a request; ends it at a stop token or at `max_tokens`.

    Servers differ in where they report the end: with the last token, or in an event without
    tokens; and some do not return the stop token. The finish reason must come with a token. So of
    tokens that the server does not count, the last is held back until the next event.
    """

    def __init__(
        self,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        eos_ids: Sequence[int] = (),
        prompt_tokens: int = 0,
    ) -> None:
        """`eos_ids`: end-of-sequence tokens of the model, whether or not they end the request."""
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._eos_ids = eos_ids
        self._held: list[int] = []
        self._whole = True  # the stream began with the request
        self.token_ids: list[int] = []
        self.finished = False
        self.cached_tokens = 0  # prompt tokens from the server's prefix cache

    def begin(self) -> None:
        """Another stream continues after `token_ids`."""
        self._held, self._whole = [], not self.token_ids

    def note_cached(self, piece: StreamPiece) -> None:
        """Keep the number of cached prompt tokens, if the event has it."""
        # The prompt of a stream that continues includes output.
        if piece.cached_tokens is not None and self._whole:
            self.cached_tokens = min(piece.cached_tokens, self._prompt_tokens)

    def push(self, piece: StreamPiece) -> StreamedCompletion | None:
        """The tokens that an event adds, with the finish reason; None if it adds none.

        Raises:
            UpstreamLost: if the server aborted the request.
            UpstreamFailed: if it ended the request for another reason than the request's limits.
        """
        token_ids, self._held = [*self._held, *piece.token_ids], []
        for count, token_id in enumerate(token_ids, start=1):
            reason = self._reason(token_id, len(self.token_ids) + count)
            if reason is not None:
                return self._completion(token_ids[:count], piece, reason)
        match piece.finish:
            case None:
                if not piece.counted:
                    self._held = [token_ids.pop()] if token_ids else []
                return self._completion(token_ids, piece, None) if token_ids else None
            case "stop":
                return self._completion([*token_ids, self._stop_token(piece)], piece, "stop")
            case "length" if token_ids and not piece.counted:
                return self._completion(token_ids, piece, "length")
            case "length":
                raise UpstreamFailed(
                    f"the upstream server ended the output after"
                    f" {len(self.token_ids) + len(token_ids)} of {self._max_tokens} tokens; its"
                    " context is shorter than configured"
                )
        raise UpstreamLost(f"the upstream server ended the request ({piece.finish})")

    def streamed(
        self,
        completion: StreamedCompletion,
        prompt_logprobs: Sequence[LogprobMap | None] | None,
        moments: StreamedMoments,
    ) -> StreamedOutput:
        """A completion that `push` returned as vLLM's `RequestOutput`."""
        return StreamedOutput(
            [completion], self.finished, prompt_logprobs, moments, self.cached_tokens
        )

    def _reason(self, token_id: int, count: int) -> str | None:
        """The finish reason if the token, the `count`-th of the output, is the last."""
        if token_id in self._stop_token_ids:
            return "stop"
        return "length" if count == self._max_tokens else None

    def _stop_token(self, piece: StreamPiece) -> int:
        """The stop token that a server left out: the one it names, else an end of sequence."""
        named = () if piece.stop_token is None else (piece.stop_token,)
        for token_id in (*named, *self._eos_ids, *sorted(self._stop_token_ids)):
            if token_id in self._stop_token_ids:
                return token_id
        raise UpstreamFailed("the upstream server ended the output at no stop token of the request")

    def _completion(
        self, token_ids: list[int], piece: StreamPiece, reason: str | None
    ) -> StreamedCompletion:
        self.token_ids += token_ids
        self.finished = reason is not None
        logprobs = piece.logprobs
        # A stop token that the server left out has no log probability.
        if logprobs is not None and len(logprobs) < len(token_ids):
            logprobs = None
        return StreamedCompletion(token_ids, reason, logprobs)
