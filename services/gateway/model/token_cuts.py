"""Keeps the text of users from becoming special tokens, such as the end of a message."""

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_USER_ROLES = ("user", "tool")


class TokenCuts:
    """Cuts tokens in the text of messages, so that the tokenizer encodes their parts as text.

    A cut is a number that clients cannot guess. The tokenizer encodes the text between cuts
    separately, so no token spans a cut.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        """`tokens`: the tokens to cut; a token of a single character stays a token."""
        self.mark = f"{secrets.randbits(64):020}"
        longer = [token for token in tokens if len(token) > 1]
        # The lookahead consumes nothing, so the next match may overlap the token.
        self._pattern = re.compile(f"(?={_any_of(longer)})(.)", re.DOTALL) if longer else None

    def cut_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return `messages` with cuts in the contents of users and tools."""
        return [
            {**message, "content": self.cut(message["content"])}
            if message["role"] in _USER_ROLES
            else dict(message)
            for message in messages
        ]

    def cut(self, text: str) -> str:
        """Insert a cut after the first character of each token in `text`."""
        if self._pattern is None:
            return text
        return self._pattern.sub(rf"\g<1>{self.mark}", text)


def _any_of(tokens: Collection[str]) -> str:
    """A pattern of the beginnings of `tokens`; branches by character, for thousands of tokens."""
    prefix = ""
    for first, last in zip(min(tokens), max(tokens), strict=False):
        if first != last:
            break
        prefix += first
    groups = defaultdict[str, set[str]](set)
    for token in tokens:
        rest = token[len(prefix) :]
        if not rest:
            # A shorter token is enough for a cut.
            return re.escape(prefix)
        groups[rest[0]].add(rest)
    return f"{re.escape(prefix)}(?:{'|'.join(map(_any_of, groups.values()))})"
