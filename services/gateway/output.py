"""From a request's token ids to what its client sees. Pure; one instance per choice."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.request import FinishReason, TokenLogprobs
from services.gateway.detokenizer import Detokenizer
from services.gateway.message import Finish
from services.gateway.prepared import PreparedChoice
from services.gateway.stop_text import StopText


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of a choice.

    `text` may be empty, and belongs to tokens of this piece and earlier ones. `logprobs` are those
    of `token_ids`, one for each, or none at all; `prompt_logprobs` those of the prompt but its
    first token, on the first piece only. On the last piece `finish_reason` is set, and
    `stop_reason` if a stop token of the client (its id) or a stop string ended the output.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Fresh:
    """What has come from a worker since the last time, and the ending if that is reached."""

    token_ids: Sequence[int]
    finish: Finish | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class OutputText:
    """Decodes tokens, one by one so that the result never depends on how they were grouped."""

    def __init__(self, choice: PreparedChoice, detokenizer: Detokenizer) -> None:
        self._choice = choice
        self._detokenizer = detokenizer
        self._stop = StopText(choice.stop)
        self._min_tokens = choice.request.limits.min_tokens
        self._tokens = 0

    def push(self, fresh: Fresh) -> Piece:
        """The text of new tokens. The piece has a finish reason when the output ends here.

        `finish` STOP means that the last token is a stop token, which is counted but not shown.
        """
        token_ids, finish = fresh.token_ids, fresh.finish
        shown = token_ids[:-1] if finish is Finish.STOP else token_ids
        text = ""
        for count, token_id in enumerate(shown, start=1):
            self._tokens += 1
            piece = self._detokenizer.push(token_id)
            # Stop strings, like stop tokens, count only once min_tokens are out.
            text += self._stop.push(piece) if self._tokens > self._min_tokens else piece
            if self._stop.hit is not None:
                return self._piece(fresh, text, count, FinishReason.STOP, self._stop.hit)
        if finish is None:
            return self._piece(fresh, text, len(token_ids))
        text += self._stop.push(self._detokenizer.flush())
        count = len(token_ids)
        if self._stop.hit is not None:
            return self._piece(fresh, text, count, FinishReason.STOP, self._stop.hit)
        text += self._stop.flush()
        if finish is not Finish.STOP:
            return self._piece(fresh, text, count, FinishReason.LENGTH)
        stopped_by = next((i for i in token_ids[-1:] if i not in self._choice.eos_ids), None)
        return self._piece(fresh, text, count, FinishReason.STOP, stopped_by)

    def _piece(
        self,
        fresh: Fresh,
        text: str,
        count: int,
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> Piece:
        """The piece of the first `count` tokens."""
        return Piece(
            text,
            tuple(fresh.token_ids[:count]),
            reason,
            stop_reason,
            logprobs=tuple(fresh.logprobs[:count]),
            prompt_logprobs=tuple(fresh.prompt_logprobs),
        )
