"""Text to token ids off the event loop, token ids to text on it."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer as Backend

from services.common.errors import ConfigError
from services.gateway.detokenizer import Detokenizer
from services.gateway.errors import ContextExceeded, InvalidRequest

T = TypeVar("T")


class _TokenizerFile(msgspec.Struct):
    """The form of tokenizer.json, as far as it is looked at."""

    model: msgspec.Raw


class Tokenizer:
    """The model's tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        tokens = map(backend.id_to_token, range(self.size))
        self._token_chars_max = max((len(token) for token in tokens if token), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """The tokenizer of a model folder.

        Raises:
            ConfigError: if tokenizer.json is missing or unreadable.
        """
        path = model_dir / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read {path}: {error}; the model folder needs a tokenizer.json"
            ) from error
        # One text at a time: threads inside the tokenizer would only cost memory.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # The package raises plain Exception for a malformed file, so look at its form first.
        try:
            msgspec.json.decode(text, type=_TokenizerFile)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path} is no tokenizer: {error}; fetch or convert the model again"
            ) from error
        return cls(Backend.from_str(text))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool, tokens_max: int) -> list[int]:
        """Token ids of `text`. Slow for long texts, but other threads go on meanwhile.

        Raises:
            InvalidRequest: if the text has no UTF-8 form or a NUL.
            ContextExceeded: if it certainly has more than `tokens_max` tokens; this is cheap.
        """
        try:
            size_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the prompt holds a lone surrogate, which is no character; send valid Unicode",
                param="prompt",
            ) from None
        if "\0" in text:
            raise InvalidRequest("the prompt holds a NUL character; remove it", param="prompt")
        # Added tokens may swallow blanks beside them, and text may be normalized: be generous.
        if size_bytes > 4 * self._token_chars_max * (tokens_max + 1):
            raise ContextExceeded(
                f"the prompt of {size_bytes} bytes is far longer than the model's context of "
                f"{tokens_max} tokens; shorten it",
                param="prompt",
            )
        # `encode` would hold the interpreter lock; this one does not.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding[0].ids)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder that leaves special tokens out."""
        return Detokenizer(lambda ids: self._backend.decode(ids, skip_special_tokens=True))


class TextPool:
    """Threads for work on long texts. Callers beyond the threads wait in line."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._slots = asyncio.Semaphore(threads)

    async def run(self, function: Callable[[], T]) -> T:
        """The result of `function`, run in a thread.

        Cancelling the caller while it is in line costs nothing; a function that runs already
        finishes unseen and keeps its place until then.
        """
        await self._slots.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _done(self, future: "asyncio.Future[T]") -> None:
        self._slots.release()
        if not future.cancelled():
            # Nobody may be left to hear of a failure; asyncio would complain about that.
            future.exception()

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
