"""Turns the output tokens of a choice into text and log probabilities for its client.

No I/O. A piece is an increment of output: the text and the tokens since the previous piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from services.core.request import FinishReason, TokenLogprobs
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.text_buffer import partial_match_length
from services.gateway.tools.format import Thinking
from services.gateway.tools.reasoning import AnswerStart
from services.gateway.vocabulary.delta import AnswerAccumulator, Delta
from services.gateway.vocabulary.errors import BadRequest
from services.gateway.vocabulary.message import Finish, UnreadTokens


class StopText:
    """Cuts a text stream at the first stop string.

    Text that may be the beginning of a stop string is held back until further text completes or
    excludes the match. The result does not depend on how the text is split into pieces: the stop
    string that is complete first wins; of stop strings that end at the same position, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`stops`: any number of nonempty strings. `include`: keep the stop string in the text."""
        self._include = include
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Append text; returns the text to send now. `hit` is the stop string after a match."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        if matches:
            end, start = min(matches)
            self.hit = buffer[start:end]
            self._held = ""
            return buffer[: end if self._include else start]
        keep = partial_match_length(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """Return the text that is still held back; call at the end of the output."""
        held, self._held = self._held, ""
        return held


# JSON has no infinity; like other servers, all APIs send this number instead.
LOGPROB_MIN = -9999.0
OUTPUT_LOGPROBS_MAX = 2**17
"""Maximum log probabilities in a response that is not streamed, over all choices."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, summed over all choices.

    A prompt counts once, however many choices it has. `cached_tokens`: prompt tokens that were in
    a prefix cache when the first choice of their prompt started.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenWithLogprobs:
    """A token with its log probability.

    `offset` is where its text starts in the output, in characters. `logprobs` is None for the first
    token of a prompt, which has no log probability.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


def count_logprobs(*sequences: Sequence[TokenWithLogprobs]) -> int:
    """The approximate number of log probabilities in the given token sequences."""
    # All tokens of a sequence have about as many as its last token.
    return sum(
        len(tokens) * (1 if (last := tokens[-1].logprobs) is None else 1 + len(last.top))
        for tokens in sequences
        if tokens
    )


def finite(logprob: float) -> float:
    """The log probability as sent to clients, at least `LOGPROB_MIN`."""
    # NaN compares as false and so becomes LOGPROB_MIN too.
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN


def with_top(tokens: Sequence[TokenWithLogprobs], top: int | None) -> Sequence[TokenWithLogprobs]:
    """The tokens with at most `top` of the likeliest alternatives each; None keeps all.

    A worker reports a prompt's log probabilities once, for the larger of the request fields
    `logprobs` (with `echo`) and `prompt_logprobs`.
    """
    if top is None or all(t.logprobs is None or len(t.logprobs.top) <= top for t in tokens):
        return tokens
    return [
        token
        if token.logprobs is None
        else replace(token, logprobs=replace(token.logprobs, top=token.logprobs.top[:top]))
        for token in tokens
    ]


class OutputPiece(msgspec.Struct, frozen=True):
    """New output of a choice.

    `text` may be empty; it may include held-back text of earlier tokens. `logprobs` has an entry
    for each of `token_ids`, or is empty; `prompt_logprobs` is set on the first piece only. The last
    piece has a `finish_reason`. `stop_reason` is the stop string, or the id of the client's stop
    token, that ended the output. `delta` is set in chats whose text is parsed.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenWithLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenWithLogprobs, ...] = ()
    delta: Delta | None = None

    @property
    def parsed(self) -> Delta:
        """The chat delta of this piece; without a parser, all text is content."""
        if self.delta is not None:
            return self.delta
        return Delta(content=self.text, finish_reason=self.finish_reason)


@dataclass(slots=True)
class Output:
    """The accumulated pieces of a choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenWithLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenWithLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    parsed: AnswerAccumulator = field(default_factory=AnswerAccumulator)

    def add(self, piece: OutputPiece) -> None:
        """Append the next piece."""
        self.texts.append(piece.text)
        self.parsed.add(piece.parsed)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class LogprobBudget:
    """Bounds the log probabilities that a response which is not streamed keeps in memory.

    Most outputs end long before their token limit, so a request is not refused by its limit; it
    fails once it has produced too many log probabilities.
    """

    def __init__(self, param: str) -> None:
        """`param`: the request field that asks for log probabilities."""
        self._param = param
        self._count = 0

    def add(self, tokens: Sequence[TokenWithLogprobs]) -> None:
        """Count the log probabilities of further tokens.

        Raises:
            BadRequest: if there are more than `OUTPUT_LOGPROBS_MAX`.
        """
        self._count += count_logprobs(tokens)
        if self._count > OUTPUT_LOGPROBS_MAX:
            raise BadRequest(
                f"the output has more than {OUTPUT_LOGPROBS_MAX} log probabilities, the limit for a"
                " response that is not streamed; request fewer per token or fewer tokens, or stream"
                " a chat or completion",
                param=self._param,
            )


class Outputs:
    """The outputs of all choices, for a response that is written when all have ended."""

    def __init__(self, choices: int) -> None:
        self.all = [Output() for _ in range(choices)]
        self._logprob_budget = LogprobBudget("logprobs")

    def add(self, index: int, piece: OutputPiece) -> None:
        """Append the next piece of choice `index`.

        Raises:
            BadRequest: if the outputs have too many log probabilities.
        """
        if piece.logprobs:
            self._logprob_budget.add(piece.logprobs)
        self.all[index].add(piece)


class OutputText:
    """Decodes the output of a choice and applies its stop strings.

    Decodes token by token, so that the text does not depend on how the worker grouped the tokens.
    """

    def __init__(
        self, choice: PreparedChoice, detokenizer: Detokenizer, prompt: Detokenizer | None = None
    ) -> None:
        """`prompt`: a second detokenizer, for the token offsets of an echoed prompt."""
        self._choice = choice
        self._detokenizer = detokenizer
        self._prompt = prompt
        self._stop = StopText(choice.stop, choice.include_stop)
        # Stop strings end the answer, not the reasoning before it.
        chat = choice.chat
        self._answer: AnswerStart | None = None
        if choice.stop and chat is not None and chat.thinking not in (None, Thinking.OVER):
            self._answer = AnswerStart(chat.thinking is Thinking.OPENED, chat.marks)
        self._min_tokens = choice.request.limits.min_tokens
        self._tokens = 0
        self._begun = False
        self._wants_logprobs = choice.request.logprobs.output is not None
        # Offset of the next token in the text; counted only with log probabilities.
        self._chars = len(choice.echo)

    def push(self, unread: UnreadTokens) -> OutputPiece:
        """The piece for new tokens, with a finish reason if the output ends here.

        If `unread.finish` is STOP, the last token is a stop token. It counts as output, but its
        text is sent only if the client asked to include the stop string.
        """
        if self._choice.prompt_only:
            return self._with_prompt(unread, OutputPiece("", (), FinishReason.LENGTH))
        piece = self._output(unread)
        if self._begun:
            return piece
        self._begun = True
        return self._with_prompt(unread, piece)

    def _output(self, unread: UnreadTokens) -> OutputPiece:
        token_ids, finish = unread.token_ids, unread.finish
        hidden = finish is Finish.STOP and not self._choice.include_stop
        visible = token_ids[:-1] if hidden else token_ids
        text, offsets = "", []
        for count, token_id in enumerate(visible, start=1):
            self._tokens += 1
            piece = self._detokenizer.push(token_id)
            if self._wants_logprobs:
                offsets.append(self._chars)
                self._chars += len(piece)
            text += self._until_stop(piece)
            if self._stop.hit is not None:
                return self._piece(unread, text, offsets, count, FinishReason.STOP, self._stop.hit)
        # A hidden stop token has no text, but its log probability is reported.
        if self._wants_logprobs and hidden:
            offsets.append(self._chars)
        count = len(token_ids)
        if finish is None:
            return self._piece(unread, text, offsets, count)
        text += self._until_stop(self._detokenizer.flush())
        if self._answer is not None:
            text += self._stop.push(self._answer.flush())
        if self._stop.hit is not None:
            return self._piece(unread, text, offsets, count, FinishReason.STOP, self._stop.hit)
        text += self._stop.flush()
        if finish is not Finish.STOP:
            return self._piece(unread, text, offsets, count, FinishReason.LENGTH)
        # As in vLLM, the model's own end-of-sequence token is not reported as `stop_reason`.
        stop_token = next((i for i in token_ids[-1:] if i not in self._choice.eos_ids), None)
        return self._piece(unread, text, offsets, count, FinishReason.STOP, stop_token)

    def _until_stop(self, text: str) -> str:
        """The part of new text to send now; `hit` is set if a stop string ends it."""
        reasoning = ""
        if self._answer is not None:
            reasoning, text = self._answer.split(text)
        # Stop strings, like stop tokens, apply only after min_tokens.
        applies = self._tokens > self._min_tokens
        return reasoning + (self._stop.push(text) if applies else text)

    def _piece(
        self,
        unread: UnreadTokens,
        text: str,
        offsets: Sequence[int],
        count: int,
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> OutputPiece:
        """The piece of the first `count` tokens."""
        token_ids = tuple(unread.token_ids[:count])
        logprobs: tuple[TokenWithLogprobs, ...] = ()
        if self._wants_logprobs:
            # Older workers send no logprobs.
            rows = zip(token_ids, offsets, unread.logprobs, strict=False)
            logprobs = tuple(TokenWithLogprobs(*row) for row in rows)
        return OutputPiece(text, token_ids, reason, stop_reason, logprobs=logprobs)

    def _with_prompt(self, unread: UnreadTokens, piece: OutputPiece) -> OutputPiece:
        """The first piece, with the echoed prompt and the prompt's log probabilities."""
        echo, prompt_tokens = self._choice.echo, self._prompt_tokens(unread.prompt_logprobs)
        if not echo and not prompt_tokens:
            return piece
        return OutputPiece(
            echo + piece.text,
            piece.token_ids,
            piece.finish_reason,
            piece.stop_reason,
            logprobs=piece.logprobs,
            prompt_logprobs=prompt_tokens,
        )

    def _prompt_tokens(self, logprobs: Sequence[TokenLogprobs]) -> tuple[TokenWithLogprobs, ...]:
        """The prompt tokens with their log probabilities; the first token has none."""
        request = self._choice.request
        if request.logprobs.prompt is None:
            return ()
        tokens, chars = [], 0
        for token_id, row in zip(request.prompt_ids, (None, *logprobs), strict=False):
            tokens.append(TokenWithLogprobs(token_id, min(chars, len(self._choice.echo)), row))
            if self._prompt is not None:
                chars += len(self._prompt.push(token_id))
        return tuple(tokens)
