"""Turns token ids into text one at a time."""

import codecs
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
# An unfinished character is shown as one to three replacement characters at the end.
UNFINISHED_MAX = 3
# Tokens of bytes that stay in the window when they are over.
BYTES_KEPT = 4
# Beyond so many tokens the window is cut, so that endless invalid bytes cost constant time each.
WINDOW_TOKENS = 24


class Detokenizer:
    """Incremental decoding that never shows half a character.

    Keeps a window of the latest tokens and decodes it anew for each; the window starts one piece
    before the undecided tokens, because decoders treat the first token specially.

    Tokens of single bytes, which SentencePiece falls back to, are decoded here: its decoders show
    a run of them as U+FFFD altogether if it does not end with a whole character.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        bytes_of: Mapping[int, int] | None = None,
        alone: Callable[[int], str] | None = None,
    ) -> None:
        """`decode`: text of token ids, invalid bytes shown as U+FFFD; `bytes_of`: tokens of bytes
        that are no text by themselves.

        `alone`: the text of one token, if the bytes of an output are those of its tokens one after
        the other. Most tokens are whole characters and then cost no decoding.
        """
        self._decode = decode
        self._alone = alone
        self._bytes_of = bytes_of or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # The latest tokens of bytes, while no other token has come after them.
        self._run: list[int] = []
        self._window: list[int] = []
        # Tokens of the window, and characters of its text, that belong to complete characters.
        self._settled_tokens = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Text that this token completes, possibly none."""
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
        """The rest, with unfinished characters shown as U+FFFD; call at the end of the output."""
        return self._end_run() if self._run else self._rest()

    def _push_byte(self, token_id: int) -> str:
        before = "" if self._run else self._rest()
        self._run = [*self._run[1 - BYTES_KEPT :], token_id]
        return before + self._utf8.decode(bytes([self._bytes_of[token_id]]))

    def _end_run(self) -> str:
        """The rest of the bytes; the window begins with the last ones."""
        rest = self._utf8.decode(b"", final=True)
        self._window, self._run = self._run, []
        self._settled_tokens, self._shown = len(self._window), len(self._decode(self._window))
        return rest

    def _rest(self) -> str:
        """What of the window's text is not shown."""
        rest = self._decode(self._window)[self._shown :]
        self._shown += len(rest)
        return rest

    def _settle(self) -> None:
        """Start the window at the latest piece that shows any text."""
        rest = self._window[self._settled_tokens :]
        text = self._decode(rest)
        if text:
            self._window = rest
            self._shown = len(text)
        elif len(self._window) > WINDOW_TOKENS:
            # A long run of tokens that show nothing by themselves.
            self._window = self._window[-WINDOW_TOKENS // 2 :]
            self._shown = len(self._decode(self._window))
        self._settled_tokens = len(self._window)

    def _cut(self, text: str) -> None:
        """Drop all but the latest tokens of the window if what is to be shown stays the same.

        The end that is undecided has at most three bytes, so it does; where the first token that
        stays begins within a character, the text before that differs, which is shown already.
        """
        rest = text[self._shown :]
        for split in range(len(self._window) - 4, len(self._window) - 8, -1):
            tail = self._decode(self._window[split:])
            if tail.endswith(rest):
                self._window = self._window[split:]
                self._settled_tokens = 0
                self._shown = len(tail) - len(rest)
                return
