"""The tokens of one request, in order, each exactly once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.core.request import TokenLogprobs
from services.gateway.vocabulary.message import Finish, TokenEvent


class JournalError(Exception):
    """The worker broke the rules of the stream: a gap, too many tokens, or news after the end."""


@dataclass(slots=True)
class Journal:
    """Emitted token ids by index, what is told about each, and how the request ended.

    `logprobs` are those of the latest tokens, as far as they have not been taken: each token has
    one if `has_logprobs`. `prompt_logprobs` are those of the prompt. A journal holds at most `tokens_max`
    tokens, which bounds what a slow client can pile up.
    """

    tokens_max: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_logprobs: bool = False
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None
    message: str = ""

    def apply(self, event: TokenEvent) -> int:
        """Append what is new and return how many tokens that was; duplicates have no effect.

        Raises:
            JournalError: on an index gap, more than `tokens_max` tokens, or new tokens or another
                ending after the end, or tokens of which only some have log probabilities. The
                journal is then unchanged.
        """
        next_index = len(self.token_ids)
        if event.first_index < 0 or event.first_index > next_index:
            raise JournalError(f"token index {event.first_index} came, but {next_index} was next")
        fresh = event.token_ids[next_index - event.first_index :]
        if self.finish is not None:
            if fresh or event.finish not in (None, self.finish):
                raise JournalError("news came after the end of the request")
            return 0
        if next_index + len(fresh) > self.tokens_max:
            raise JournalError(f"more than the allowed {self.tokens_max} tokens came")
        if event.logprobs or self.has_logprobs or event.prompt_logprobs:
            self._note_logprobs(event, len(fresh))
        self.token_ids.extend(fresh)
        if event.finish is not None:
            self.finish = event.finish
            self.message = event.message
        return len(fresh)

    def reopen(self) -> None:
        """Another worker goes on after the tokens: how the request ended at one before is void."""
        self.finish, self.message = None, ""

    def take_logprobs(self) -> Sequence[TokenLogprobs]:
        """The log probabilities since the last call, which are then forgotten."""
        if not self.logprobs:
            return ()
        taken, self.logprobs = self.logprobs, []
        return taken

    def _note_logprobs(self, event: TokenEvent, fresh: int) -> None:
        has_logprobs = event.logprobs
        if has_logprobs and len(has_logprobs) != len(event.token_ids):
            raise JournalError(
                f"{len(event.token_ids)} tokens came with {len(has_logprobs)} logprobs"
            )
        if fresh and bool(has_logprobs) != self.has_logprobs and self.token_ids:
            raise JournalError("only some tokens came with log probabilities")
        if fresh and has_logprobs:
            self.has_logprobs = True
            self.logprobs.extend(has_logprobs[len(has_logprobs) - fresh :])
        if event.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
