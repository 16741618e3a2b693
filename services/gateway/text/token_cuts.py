"""Keeps the text of users from becoming special tokens, such as the end of a message."""

import contextlib
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import Model

from services.common.errors import ConfigError
from services.core.request import VOCAB_MAX

_USER_ROLES = ("user", "tool")
# A character that is never assigned.
_UNKNOWN = "\U0010ffff"


class TokenCuts:
    """Cuts tokens in the text of messages, and encodes prompts in which cut tokens are text.

    A cut is a number that clients cannot guess. Prompts are encoded whole, because the tokens of a
    part depend on the text around it. The encoder knows tokens only by names that clients cannot
    guess, so neither a cut token nor text that the tokenizer normalizes to a token becomes one.

    Tokens of one character, and tokens of blanks, are not cut.
    """

    def __init__(self, backend: Backend) -> None:
        """`backend`: the model's tokenizer. Raises ConfigError if a token id is too large."""
        self.mark = f"{secrets.randbits(64):020}"
        self._secret = secrets.token_hex(8)
        added = backend.get_added_tokens_decoder()
        self._tokens = {
            token.content: (token_id, token)
            for token_id, token in added.items()
            if len(token.content) > 1 and token.content.replace("▁", " ").strip()
        }
        pattern = _any_of(self._tokens) if self._tokens else "(?!)"
        self._token = re.compile(pattern)
        # The lookahead consumes nothing, so the next match may overlap the token.
        self._cut = re.compile(f"(?={pattern})(.)", re.DOTALL)
        self._encoder = _without_tokens(backend)
        self._add_unused_ids(max(backend.get_vocab().values(), default=0))
        # Ids that the encoder returns in place of others.
        self._replaced = self._add_tokens(added) | self._written_tokens(backend.model)

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
        return self._cut.sub(rf"\g<1>{self.mark}", text)

    def join(self, text: str) -> str:
        """Remove the cuts."""
        return text.replace(self.mark, "")

    def named(self, text: str) -> str:
        """Replace the uncut tokens with their names, and remove the cuts."""
        return self.join(self._token.sub(self._named_token, text))

    def ids(self, named: str, add_special_tokens: bool) -> list[int]:
        """Encode a text whose tokens are `named`; releases the interpreter lock."""
        encodings = self._encoder.encode_batch_fast([named], add_special_tokens=add_special_tokens)
        replaced = self._replaced.get
        return [i for token_id in encodings[0].ids for i in replaced(token_id, (token_id,))]

    def _add_unused_ids(self, id_max: int) -> None:
        """Keep the ids of names above `id_max`, since a tokenizer assigns ids in order."""
        if id_max >= VOCAB_MAX:
            raise ConfigError(
                f"the tokenizer has the token id {id_max}, but ids must be below {VOCAB_MAX}; fetch"
                " or convert the model again"
            )
        unused = range(self._encoder.get_vocab_size(), id_max + 1)
        self._encoder.add_tokens([f"<{self._secret}/{number}>" for number in unused])

    def _add_tokens(self, added: Mapping[int, AddedToken]) -> dict[int, tuple[int, ...]]:
        """Add the tokens to the encoder; return their ids by the encoder's ids."""
        tokens = {token_id: self._renamed(token_id, token) for token_id, token in added.items()}
        self._encoder.add_tokens(list(tokens.values()))
        ids = {self._encoder.token_to_id(token.content): key for key, token in tokens.items()}
        return {name_id: (token_id,) for name_id, token_id in ids.items() if name_id is not None}

    def _renamed(self, token_id: int, token: AddedToken) -> AddedToken:
        if token.content not in self._tokens:
            return token
        return AddedToken(
            self._name(token_id),
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            # A normalizer may change names.
            normalized=token.normalized and self._encoder.normalizer is None,
        )

    def _written_tokens(self, model: Model) -> dict[int, tuple[int, ...]]:
        """The ids of the characters of each token that the model has for the token's text."""
        unknown = _model_ids(model, _UNKNOWN)
        return {
            token_id: tuple(i for character in text for i in _model_ids(model, character))
            for text, (token_id, _) in self._tokens.items()
            if _model_ids(model, text) == [token_id] != unknown
        }

    def _named_token(self, match: re.Match[str]) -> str:
        token_id, token = self._tokens[match[0]]
        start, end = match.span()
        around = match.string[max(start - 1, 0) : start] + match.string[end : end + 1]
        if token.single_word and re.search(r"\w", around):
            return match[0]
        return self._name(token_id)

    def _name(self, token_id: int) -> str:
        return f"<{self._secret}:{token_id}>"


def _without_tokens(backend: Backend) -> Backend:
    """A tokenizer with the parts of `backend`, but without added tokens; they share the model."""
    encoder = Backend(backend.model)
    encoder.normalizer = backend.normalizer
    encoder.pre_tokenizer = backend.pre_tokenizer
    encoder.post_processor = backend.post_processor
    return encoder


def _model_ids(model: Model, text: str) -> list[int]:
    """The ids of a text that is not normalized; empty if the model has none."""
    # The package raises plain Exception if there is no token for unknown text.
    with contextlib.suppress(Exception):
        return [token.id for token in model.tokenize(text)]
    return []


def _any_of(tokens: Collection[str]) -> str:
    """A pattern of `tokens`, longest first; branches by character, for thousands of tokens."""
    prefix = ""
    for first, last in zip(min(tokens), max(tokens), strict=False):
        if first != last:
            break
        prefix += first
    groups = defaultdict[str, set[str]](set)
    for token in tokens:
        if rest := token[len(prefix) :]:
            groups[rest[0]].add(rest)
    if not groups:
        return re.escape(prefix)
    optional = "?" if prefix in tokens else ""
    return f"{re.escape(prefix)}(?:{'|'.join(map(_any_of, groups.values()))}){optional}"
