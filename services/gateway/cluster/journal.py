"""Collects the output tokens of a request, in order and without duplicates, across workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.core.destination import Destination
from services.core.request import TokenLogprobs
from services.gateway.vocabulary.message import Finish, TokenEvent


class JournalError(Exception):
    """The worker violated the stream protocol, for example by a gap between token indices."""


@dataclass(slots=True)
class Journal:
    """The output token ids of a request by index, their log probabilities, and how it ended.

    `logprobs` belong to the latest tokens and are removed by `take_logprobs`. `has_logprobs`: each
    token has log probabilities. `message` is the worker's text for `finish`, if any. More than
    `tokens_max` tokens are an error, so the memory per request is bounded.
    """

    tokens_max: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_logprobs: bool = False
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None
    message: str = ""
    go_to: Destination | None = None  # where the request continues, if its worker returned it

    def apply(self, event: TokenEvent) -> int:
        """Append new tokens, ignore duplicates, and return the number of new tokens.

        Raises:
            JournalError: on an index gap, more than `tokens_max` tokens, new tokens or a different
                finish after the end, or if only some tokens have log probabilities. The journal is
                then unchanged.
        """
        next_index = len(self.token_ids)
        if event.first_index < 0 or event.first_index > next_index:
            raise JournalError(f"token index is {event.first_index}, but {next_index} was expected")
        # After the gateway re-attaches to a worker, events may repeat tokens: skip these.
        new_ids = event.token_ids[next_index - event.first_index :]
        if self.finish is not None:
            if new_ids or event.finish not in (None, self.finish):
                raise JournalError("an event arrived after the end of the request")
            return 0
        if next_index + len(new_ids) > self.tokens_max:
            raise JournalError(f"more than the allowed {self.tokens_max} tokens arrived")
        if event.logprobs or self.has_logprobs or event.prompt_logprobs:
            self._add_logprobs(event, len(new_ids))
        self.token_ids.extend(new_ids)
        if event.finish is not None:
            self.finish = event.finish
            self.message = event.message
            self.go_to = event.go_to
        return len(new_ids)

    def reopen(self) -> None:
        """Clear `finish`, because another worker resumes the request after these tokens."""
        self.finish, self.message, self.go_to = None, "", None

    def take_logprobs(self) -> Sequence[TokenLogprobs]:
        """Return and remove the log probabilities since the last call."""
        if not self.logprobs:
            return ()
        taken, self.logprobs = self.logprobs, []
        return taken

    def _add_logprobs(self, event: TokenEvent, new_tokens: int) -> None:
        rows = event.logprobs
        if rows and len(rows) != len(event.token_ids):
            raise JournalError(f"{len(event.token_ids)} tokens came with {len(rows)} logprobs")
        if new_tokens and bool(rows) != self.has_logprobs and self.token_ids:
            raise JournalError("only some tokens came with log probabilities")
        if new_tokens and rows:
            self.has_logprobs = True
            self.logprobs.extend(rows[len(rows) - new_tokens :])
        if event.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = event.prompt_logprobs
