"""From a request's token ids to what its client sees. Pure; one instance per choice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from services.core.request import FinishReason, TokenLogprobs
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.held_text import undecided
from services.gateway.vocabulary.delta import Delta, Said
from services.gateway.vocabulary.errors import BadRequest
from services.gateway.vocabulary.message import Finish, Fresh


class StopText:
    """Passes text on, up to the first stop string, or to its end.

    Text that may be the beginning of a stop string is held back until that is decided. The result
    does not depend on how the text is cut into pieces: the stop string that is complete first
    wins, among those that end together the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`stops`: nonempty strings; none at all is fine. `include`: the one found is shown."""
        self._include = include
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown. `hit` is the stop string found."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        if found:
            end, start = min(found)
            self.hit = buffer[start:end]
            self._held = ""
            return buffer[: end if self._include else start]
        keep = undecided(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text that is still held back; call at the end of the output."""
        held, self._held = self._held, ""
        return held


# JSON has no infinity; like other servers, every door sends this number instead.
LOGPROB_MIN = -9999.0
OUTPUT_LOGPROBS_MAX = 2**17
"""Most log probabilities in an answer that is not streamed, all choices together."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, all choices together.

    Each prompt counts once. `cached_tokens` of the prompts were in a prefix cache when their
    first choice began.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenNote:
    """A token whose log probability is told.

    `offset` is where its text begins in the choice's text, in characters. `told` is None for the
    first token of a prompt, of which nothing is known.
    """

    token_id: int
    offset: int
    told: TokenLogprobs | None


def numbers_in(*told: Sequence[TokenNote]) -> int:
    """The approximate number of log probabilities."""
    return sum(
        len(notes) * (1 if (last := notes[-1].told) is None else 1 + len(last.top))
        for notes in told
        if notes
    )


def finite(logprob: float) -> float:
    """A log probability as it is sent to clients."""
    # Also not a number, which compares as false.
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN


def with_top(notes: Sequence[TokenNote], top: int | None) -> Sequence[TokenNote]:
    """The notes with at most `top` of the likeliest tokens each; None: with all that there are.

    A worker tells of a prompt once, as many as the more demanding of two fields asks for.
    """
    if top is None or all(note.told is None or len(note.told.top) <= top for note in notes):
        return notes
    return [
        note
        if note.told is None
        else replace(note, told=replace(note.told, top=note.told.top[:top]))
        for note in notes
    ]


class OutputPiece(msgspec.Struct, frozen=True):
    """New output of a choice.

    `text` may be empty, and belongs to tokens of this piece and earlier ones. `logprobs` are those
    of `token_ids`, one for each, or none at all; `prompt_logprobs` those of the prompt, on the
    first piece only. On the last piece `finish_reason` is set, and `stop_reason` if a stop token of
    the client (its id) or a stop string ended the output.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenNote, ...] = ()
    prompt_logprobs: tuple[TokenNote, ...] = ()
    delta: Delta | None = None

    @property
    def said(self) -> Delta:
        """What the text says in a chat: its delta, or all of it is content."""
        if self.delta is not None:
            return self.delta
        return Delta(content=self.text, finish_reason=self.finish_reason)


@dataclass(slots=True)
class Output:
    """All pieces of a choice together."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenNote] = field(default_factory=list)
    prompt_logprobs: tuple[TokenNote, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    said: Said = field(default_factory=Said)

    def add(self, piece: OutputPiece) -> None:
        """Append the next piece."""
        self.texts.append(piece.text)
        self.said.add(piece.said)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class ToldCount:
    """Counts the log probabilities of a request's output that are kept for the end of its answer.

    The number of tokens is not known before, and most outputs end long before their limit. So a
    request is refused only when it has produced too many.
    """

    def __init__(self, param: str) -> None:
        """`param`: the field that asks for them."""
        self._param = param
        self._count = 0

    def add(self, notes: Sequence[TokenNote]) -> None:
        """Count further log probabilities; raises BadRequest if there are too many."""
        self._count += numbers_in(notes)
        if self._count > OUTPUT_LOGPROBS_MAX:
            raise BadRequest(
                f"the output has more than {OUTPUT_LOGPROBS_MAX} log probabilities, the most that"
                " are kept for a whole answer; ask for fewer beside each token or for fewer tokens,"
                " or stream a chat or completion, which keeps none",
                param=self._param,
            )


class Outputs:
    """The outputs of all choices, for an answer that is written when they have ended."""

    def __init__(self, choices: int) -> None:
        self.all = [Output() for _ in range(choices)]
        self._told = ToldCount("logprobs")

    def add(self, index: int, piece: OutputPiece) -> None:
        """Append the next piece of a choice; raises BadRequest if too much would be kept."""
        if piece.logprobs:
            self._told.add(piece.logprobs)
        self.all[index].add(piece)


class OutputText:
    """Decodes tokens, one by one so that the result never depends on how they were grouped."""

    def __init__(
        self, choice: PreparedChoice, detokenizer: Detokenizer, prompt: Detokenizer | None = None
    ) -> None:
        """`prompt`: for the offsets of an echoed prompt's tokens; a detokenizer like the other."""
        self._choice = choice
        self._detokenizer = detokenizer
        self._prompt = prompt
        self._stop = StopText(choice.stop, choice.include_stop)
        self._min_tokens = choice.request.limits.min_tokens
        self._tokens = 0
        self._begun = False
        # Characters of complete tokens, kept up only where offsets are told.
        self._noted = choice.request.logprobs.output is not None
        self._chars = len(choice.echo)

    def push(self, fresh: Fresh) -> OutputPiece:
        """The text of new tokens. The piece has a finish reason when the output ends here.

        `finish` STOP means that the last token is a stop token, which is counted but not shown
        unless the client wants to see what stopped the output.
        """
        if self._choice.prompt_only:
            return self._opened(fresh, OutputPiece("", (), FinishReason.LENGTH))
        piece = self._output(fresh)
        if self._begun:
            return piece
        self._begun = True
        return self._opened(fresh, piece)

    def _output(self, fresh: Fresh) -> OutputPiece:
        token_ids, finish = fresh.token_ids, fresh.finish
        hidden = finish is Finish.STOP and not self._choice.include_stop
        shown = token_ids[:-1] if hidden else token_ids
        text, offsets = "", []
        for count, token_id in enumerate(shown, start=1):
            self._tokens += 1
            piece = self._detokenizer.push(token_id)
            if self._noted:
                offsets.append(self._chars)
                self._chars += len(piece)
            # Stop strings, like stop tokens, count only once min_tokens are out.
            text += self._stop.push(piece) if self._tokens > self._min_tokens else piece
            if self._stop.hit is not None:
                return self._piece(fresh, text, offsets, count, FinishReason.STOP, self._stop.hit)
        if self._noted and hidden:
            offsets.append(self._chars)
        count = len(token_ids)
        if finish is None:
            return self._piece(fresh, text, offsets, count)
        text += self._stop.push(self._detokenizer.flush())
        if self._stop.hit is not None:
            return self._piece(fresh, text, offsets, count, FinishReason.STOP, self._stop.hit)
        text += self._stop.flush()
        if finish is not Finish.STOP:
            return self._piece(fresh, text, offsets, count, FinishReason.LENGTH)
        stopped_by = next((i for i in token_ids[-1:] if i not in self._choice.eos_ids), None)
        return self._piece(fresh, text, offsets, count, FinishReason.STOP, stopped_by)

    def _piece(
        self,
        fresh: Fresh,
        text: str,
        offsets: Sequence[int],
        count: int,
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> OutputPiece:
        """The piece of the first `count` tokens."""
        token_ids = tuple(fresh.token_ids[:count])
        notes: tuple[TokenNote, ...] = ()
        if self._noted:
            # A worker of an earlier version tells none.
            told = zip(token_ids, offsets, fresh.logprobs, strict=False)
            notes = tuple(TokenNote(*one) for one in told)
        return OutputPiece(text, token_ids, reason, stop_reason, logprobs=notes)

    def _opened(self, fresh: Fresh, piece: OutputPiece) -> OutputPiece:
        """The first piece, with what is told of the prompt."""
        echo, notes = self._choice.echo, self._prompt_notes(fresh.prompt_logprobs)
        if not echo and not notes:
            return piece
        return OutputPiece(
            echo + piece.text,
            piece.token_ids,
            piece.finish_reason,
            piece.stop_reason,
            logprobs=piece.logprobs,
            prompt_logprobs=notes,
        )

    def _prompt_notes(self, told: Sequence[TokenLogprobs]) -> tuple[TokenNote, ...]:
        """Notes of every prompt token, the first of which has no log probability."""
        request = self._choice.request
        if request.logprobs.prompt is None:
            return ()
        notes, chars = [], 0
        for token_id, one in zip(request.prompt_ids, (None, *told), strict=False):
            notes.append(TokenNote(token_id, min(chars, len(self._choice.echo)), one))
            if self._prompt is not None:
                chars += len(self._prompt.push(token_id))
        return tuple(notes)
