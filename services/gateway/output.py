"""From a request's token ids to what its client sees. Pure; one instance per request."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.request import FinishReason
from services.gateway.detokenizer import Detokenizer
from services.gateway.message import Finish, Job
from services.gateway.stop_text import StopText


@dataclass(frozen=True, slots=True)
class Piece:
    """New output: `text` may be empty; `finish_reason` is set on the last piece only."""

    text: str
    tokens: int
    finish_reason: FinishReason | None = None


class OutputText:
    """Decodes tokens, one by one so that the result never depends on how they were grouped."""

    def __init__(self, job: Job, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._stop = StopText(job.stop)
        self._min_tokens = job.limits.min_tokens
        self._tokens = 0

    def push(self, token_ids: Sequence[int], finish: Finish | None) -> Piece:
        """The text of new tokens. The piece has a finish reason when the output ends here.

        `finish` STOP means that the last token is a stop token, which is counted but not shown.
        """
        shown = token_ids[:-1] if finish is Finish.STOP else token_ids
        text = ""
        for count, token_id in enumerate(shown, start=1):
            self._tokens += 1
            piece = self._detokenizer.push(token_id)
            # Stop strings, like stop tokens, count only once min_tokens are out.
            text += self._stop.push(piece) if self._tokens > self._min_tokens else piece
            if self._stop.hit:
                return Piece(text, count, FinishReason.STOP)
        if finish is None:
            return Piece(text, len(token_ids))
        text += self._stop.push(self._detokenizer.flush())
        if self._stop.hit:
            return Piece(text, len(token_ids), FinishReason.STOP)
        reason = FinishReason.STOP if finish is Finish.STOP else FinishReason.LENGTH
        return Piece(text + self._stop.flush(), len(token_ids), reason)
