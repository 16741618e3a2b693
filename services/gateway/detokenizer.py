"""Turns token ids into text one at a time."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# An unfinished character is shown as one to three replacement characters at the end.
UNFINISHED_MAX = 3
# Beyond so many tokens the window is cut, so that endless invalid bytes cost constant time each.
WINDOW_TOKENS = 24


class Detokenizer:
    """Incremental decoding that never shows half a character.

    Keeps a window of the latest tokens and decodes it anew for each; the window starts one piece
    before the undecided tokens, because decoders treat the first token specially.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: text of token ids, invalid bytes shown as U+FFFD."""
        self._decode = decode
        self._window: list[int] = []
        # Tokens of the window, and characters of its text, that belong to complete characters.
        self._settled_tokens = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Text that this token completes, possibly none."""
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
        """Drop tokens of the window whose bytes are certainly invalid, if the text allows it."""
        for split in range(len(self._window) - 4, len(self._window) - 8, -1):
            head, tail = self._decode(self._window[:split]), self._decode(self._window[split:])
            if head + tail == text and len(head) <= self._shown:
                self._window = self._window[split:]
                self._settled_tokens = 0
                self._shown -= len(head)
                return
