"""What a request's answer has to be: all that an undisturbed run of it had. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The answer of an undisturbed run. `prompt_tokens` is what its usage said."""

    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0

    def contradiction(self, token_ids: Sequence[int], text: str) -> str:
        """What it has not, in so much of another run as has come; "" if nothing."""
        for index, (got, wanted) in enumerate(zip(token_ids, self.token_ids, strict=False)):
            if got != wanted:
                return f"token {index} is {got} and not {wanted}"
        if not self.text.startswith(text):
            return "the text is another one"
        return ""

    def wrong_end(
        self, text: str, finish_reason: str, prompt_tokens: int, output_tokens: int
    ) -> str:
        """What it has otherwise than another run that has ended with all its tokens; "" if nothing.

        The numbers of tokens are those of the other run's usage.
        """
        if output_tokens != (wanted := len(self.token_ids)):
            return f"usage has {output_tokens} completion tokens and not {wanted}"
        if prompt_tokens != self.prompt_tokens:
            return f"usage has {prompt_tokens} prompt tokens and not {self.prompt_tokens}"
        if finish_reason != self.finish_reason:
            return f"the finish reason is '{finish_reason}' and not '{self.finish_reason}'"
        return "" if text == self.text else "the text is another one"
