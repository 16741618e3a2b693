"""Detokenizes incrementally, a token at a time."""

import codecs
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
# An incomplete character decodes to one to three replacement characters at the end.
UNFINISHED_MAX = 3
# Byte tokens that remain in the window after a run of byte tokens.
BYTES_KEPT = 4
# Maximum window, which bounds the cost per token if an output is an endless run of invalid bytes.
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
        decode_single: Callable[[int], str] | None = None,
    ) -> None:
        """`decode`: text of token ids, with invalid bytes as U+FFFD.

        `bytes_of`: the byte of each byte token, by token id. `decode_single`: text of a single
        token, only for tokenizers whose output is the concatenation of the tokens' bytes: tokens of
        whole characters then need no window.
        """
        self._decode = decode
        self._decode_single = decode_single
        self._bytes_of = bytes_of or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The last byte tokens of the current run; empty after any other token.
        self._byte_run: list[int] = []
        self._window: list[int] = []
        # Leading tokens of the window whose text has been emitted completely.
        self._emitted_tokens = 0
        # Characters of the window's text that have been emitted.
        self._emitted_chars = 0

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, which may be empty."""
        # Fast path: no character is incomplete, and the token consists of whole characters.
        if self._decode_single is not None and self._emitted_tokens == len(self._window):
            text = self._decode_single(token_id)
            if REPLACEMENT not in text:
                return text
        if token_id in self._bytes_of:
            return self._push_byte(token_id)
        if self._byte_run:
            return self._end_run() + self._push(token_id)
        return self._push(token_id)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = len(text)
        # Replacement characters at the end may become a character with the next token.
        while stable and len(text) - stable < UNFINISHED_MAX and text[stable - 1] == REPLACEMENT:
            stable -= 1
        piece = text[self._emitted_chars : stable]
        self._emitted_chars = max(self._emitted_chars, stable)
        if stable == len(text):
            self._move_window()
        elif len(self._window) - self._emitted_tokens > WINDOW_TOKENS:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """Return the remaining text, incomplete characters as U+FFFD; call at the end."""
        return self._end_run() if self._byte_run else self._rest()

    def _push_byte(self, token_id: int) -> str:
        before = "" if self._byte_run else self._rest()
        self._byte_run = [*self._byte_run[1 - BYTES_KEPT :], token_id]
        return before + self._utf8.decode(bytes([self._bytes_of[token_id]]))

    def _end_run(self) -> str:
        """End a run of byte tokens, which become the window, and return its remaining text."""
        rest = self._utf8.decode(b"", final=True)
        self._window, self._byte_run = self._byte_run, []
        self._emitted_tokens, self._emitted_chars = (
            len(self._window),
            len(self._decode(self._window)),
        )
        return rest

    def _rest(self) -> str:
        """Return the text of the window that has not been emitted."""
        rest = self._decode(self._window)[self._emitted_chars :]
        self._emitted_chars += len(rest)
        return rest

    def _move_window(self) -> None:
        """Start the window at the last tokens that have text."""
        rest = self._window[self._emitted_tokens :]
        text = self._decode(rest)
        if text:
            self._window = rest
            self._emitted_chars = len(text)
        elif len(self._window) > WINDOW_TOKENS:
            # Shorten a long run of tokens without text, such as skipped special tokens.
            self._window = self._window[-WINDOW_TOKENS // 2 :]
            self._emitted_chars = len(self._decode(self._window))
        self._emitted_tokens = len(self._window)

    def _shorten(self, text: str) -> None:
        """Shorten the window to its last tokens without a change of the text that is not emitted.

        The incomplete end has at most three bytes, so some split preserves it. If the first
        remaining token begins within a character, only text that has been emitted differs.
        """
        rest = text[self._emitted_chars :]
        for split in range(len(self._window) - 4, len(self._window) - 8, -1):
            tail = self._decode(self._window[split:])
            if tail.endswith(rest):
                self._window = self._window[split:]
                self._emitted_tokens = 0
                self._emitted_chars = len(tail) - len(rest)
                return
