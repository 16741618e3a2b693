"""The tokens of one request, in order, each exactly once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.message import Finish


class JournalError(Exception):
    """The worker broke the rules of the stream: a gap, too many tokens, or news after the end."""


@dataclass(slots=True)
class Journal:
    """Emitted token ids by index, and how the request ended.

    At most `tokens_max` tokens, so it also bounds what a slow client can pile up.
    """

    tokens_max: int
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    message: str = ""

    def apply(
        self,
        first_index: int,
        token_ids: Sequence[int],
        finish: Finish | None = None,
        message: str = "",
    ) -> int:
        """Append what is new and return how many tokens that was; duplicates have no effect.

        Raises:
            JournalError: on an index gap, more than `tokens_max` tokens, or new tokens or another
                ending after the end. The journal is then unchanged.
        """
        next_index = len(self.token_ids)
        if first_index < 0 or first_index > next_index:
            raise JournalError(f"token index {first_index} came, but {next_index} was next")
        fresh = token_ids[next_index - first_index :]
        if self.finish is not None:
            if fresh or finish not in (None, self.finish):
                raise JournalError("news came after the end of the request")
            return 0
        if next_index + len(fresh) > self.tokens_max:
            raise JournalError(f"more than the allowed {self.tokens_max} tokens came")
        self.token_ids.extend(fresh)
        if finish is not None:
            self.finish = finish
            self.message = message
        return len(fresh)
