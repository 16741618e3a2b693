"""Incremental detokenizer: text of token ids, one token at a time."""

import codecs
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
# An incomplete character decodes to one to three replacement characters at the end.
UNFINISHED_MAX = 3
# Byte tokens that stay in the window after the end of their run.
BYTES_KEPT = 4
# Longest window: bounds the cost per token of endless invalid bytes.
WINDOW_TOKENS = 24


class Detokenizer:
    """Incremental decoder that never emits part of a character.

    Decodes a window of the latest tokens for each new token. The window starts before the last
    complete piece of text, because decoders treat the first token specially.

    Byte tokens, to which SentencePiece falls back, are decoded here: SentencePiece's decoders turn
    a whole run of byte tokens into U+FFFD if the run ends within a character.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        bytes_of: Mapping[int, int] | None = None,
        alone: Callable[[int], str] | None = None,
    ) -> None:
        """`decode`: text of token ids, with invalid bytes as U+FFFD; `bytes_of`: the byte of each
        byte token, by token id.

        `alone`: text of a single token; only for tokenizers whose output is the concatenation of
        the tokens' bytes. Tokens that are whole characters then need no window.
        """
        self._decode = decode
        self._alone = alone
        self._bytes_of = bytes_of or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The last byte tokens of the current run; empty after any other token.
        self._run: list[int] = []
        self._window: list[int] = []
        # Tokens of the window whose text is complete and has been emitted.
        self._settled_tokens = 0
        # Characters of the window's text that have been emitted.
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, which may be empty."""
        # Fast path: no character is incomplete and the token is whole characters.
        if self._alone is not None and self._settled_tokens == len(self._window):
            text = self._alone(token_id)
            if REPLACEMENT not in text:
                return text
        if token_id in self._bytes_of:
            return self._push_byte(token_id)
        if self._run:
            return self._end_run() + self._push(token_id)
        return self._push(token_id)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text)
        # Replacement characters at the end may become a character with the next token.
        while stable and len(text) - stable < UNFINISHED_MAX and text[stable - 1] == REPLACEMENT:
            stable -= 1
        piece = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if stable == len(text):
            self._settle()
        elif len(self._window) - self._settled_tokens > WINDOW_TOKENS:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """Return the remaining text, incomplete characters as U+FFFD; call at the end."""
        return self._end_run() if self._run else self._rest()

    def _push_byte(self, token_id: int) -> str:
        before = "" if self._run else self._rest()
        self._run = [*self._run[1 - BYTES_KEPT :], token_id]
        return before + self._utf8.decode(bytes([self._bytes_of[token_id]]))

    def _end_run(self) -> str:
        """End a run of byte tokens, which become the window, and return its remaining text."""
        rest = self._utf8.decode(b"", final=True)
        self._window, self._run = self._run, []
        self._settled_tokens, self._shown = len(self._window), len(self._decode(self._window))
        return rest

    def _rest(self) -> str:
        """Return the text of the window that has not been emitted."""
        rest = self._decode(self._window)[self._shown :]
        self._shown += len(rest)
        return rest

    def _settle(self) -> None:
        """Start the window at the last tokens that have text."""
        rest = self._window[self._settled_tokens :]
        text = self._decode(rest)
        if text:
            self._window = rest
            self._shown = len(text)
        elif len(self._window) > WINDOW_TOKENS:
            # A long run of tokens without text of their own, such as skipped special tokens.
            self._window = self._window[-WINDOW_TOKENS // 2 :]
            self._shown = len(self._decode(self._window))
        self._settled_tokens = len(self._window)

    def _cut(self, text: str) -> None:
        """Shorten the window to its last tokens such that the text still to emit is the same.

        The incomplete end has at most three bytes, so some split preserves it. If the first
        remaining token begins within a character, only text that has been emitted differs.
        """
        rest = text[self._shown :]
        for split in range(len(self._window) - 4, len(self._window) - 8, -1):
            tail = self._decode(self._window[split:])
            if tail.endswith(rest):
                self._window = self._window[split:]
                self._settled_tokens = 0
                self._shown = len(tail) - len(rest)
                return
