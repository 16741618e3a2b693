"""Wraps the model's tokenizer, and runs work on long texts in threads."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as Backend

from services.common.errors import ConfigError
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.token_cuts import TokenCuts
from services.gateway.text.token_text import TokenTexts
from services.gateway.vocabulary.errors import BadRequest, ContextExceeded

log = logging.getLogger(__name__)
T = TypeVar("T")

# Characters that take about a millisecond to tokenize; such work needs no thread.
INLINE_SIZE = 1024
# Texts longer than a slice are first tokenized in slices, to estimate their number of tokens.
SLICE_CHARS = 32 * 2**10
ESTIMATE_MARGIN = 1.1
SLICE_MARGIN_TOKENS = 256


def read_tokenizer(model_dir: Path) -> tuple[Path, str]:
    """Return the path and the text of tokenizer.json. Raises ConfigError."""
    path = model_dir / "tokenizer.json"
    try:
        return path, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; the model folder needs a tokenizer.json"
        ) from error


class Tokenizer:
    """The model's tokenizer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        tokens = map(backend.id_to_token, range(self.size))
        decoder = backend.decoder
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(key for key, token in self._added.items() if token.special)
        self.texts = TokenTexts(
            backend.id_to_token,
            b"{}" if decoder is None else decoder.__getstate__(),
            self._added,
        )
        # Ids from here on are refused; None if the tokenizer has none of them.
        self._vocab_size: int | None = None
        self._bytes_of: dict[int, int] = {}
        # Cached text of single tokens, by id.
        self._single_texts: dict[int, str] = {}
        if self.texts.byte_fallback:
            ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
            self._bytes_of = {
                token_id: byte for byte, token_id in enumerate(ids) if token_id is not None
            }
        self._token_bytes_max = max((len(token.encode()) for token in tokens if token), default=1)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Load the tokenizer of a model folder.

        Raises:
            ConfigError: if tokenizer.json is missing or unreadable.
        """
        path, text = read_tokenizer(model_dir)
        # Texts are encoded one at a time, so threads inside the tokenizer would only cost memory.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            return cls(Backend.from_str(text))
        # The package raises plain Exception for a malformed file.
        except Exception as error:
            raise ConfigError(
                f"{path} is not a tokenizer: {error}; fetch or convert the model again"
            ) from error

    def limit_ids(self, vocab_size: int) -> None:
        """Let `encode` refuse texts with tokens that the model lacks: ids from `vocab_size` on."""
        highest = max([self.size - 1, *self._added])
        if highest >= vocab_size:
            self._vocab_size = vocab_size
            log.warning(
                "tokenizer.json has token ids up to %d, but 'vocab_size' of config.json is %d;"
                " texts with tokens above it are refused",
                *(highest, vocab_size),
            )

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling; None if there is no such token."""
        return self._backend.token_to_id(token)

    def entry(self, token_id: int) -> str:
        """Return the vocabulary's entry for an id; empty if there is none."""
        return self._backend.id_to_token(token_id) or ""

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        tokens_max: int,
        param: str = "prompt",
        cuts: TokenCuts | None = None,
    ) -> list[int]:
        """Tokenise `text`. Slow for long texts, but releases the interpreter lock.

        `param` is the field that errors name. `cuts`: the cuts that `text` may have.

        Raises:
            BadRequest: if the text has no UTF-8 form, the tokenizer fails, or the model lacks a
                token.
            ContextExceeded: if the text certainly has more than `tokens_max` tokens; this check is
                cheap.
        """
        ids: Callable[[str, bool], list[int]] = self._ids
        try:
            size_bytes = len((cuts.join(text) if cuts else text).encode())
        except UnicodeEncodeError:
            raise BadRequest(
                f"'{param}' contains a lone surrogate; send valid Unicode",
                param=param,
            ) from None
        if size_bytes > self.bytes_max(tokens_max):
            raise too_long(f"{size_bytes} bytes", tokens_max, param)
        if cuts is not None:
            text, ids = cuts.named(text), cuts.ids
        with _panics_refused(param):
            _estimate(text, ids, tokens_max, param)
            token_ids = ids(text, add_special_tokens)
        if self._vocab_size is not None and max(token_ids, default=0) >= self._vocab_size:
            raise BadRequest(
                f"'{param}' contains the token '{self.entry(max(token_ids))}', which the model"
                " lacks; remove it, or serve the model with a tokenizer of its vocabulary",
                param=param,
            )
        return token_ids

    def token_cuts(self) -> TokenCuts:
        """Make cuts of this tokenizer's added tokens, special tokens among them."""
        return TokenCuts(self._backend)

    def bytes_max(self, tokens_max: int) -> int:
        """A number of bytes; longer texts have more than `tokens_max` tokens."""
        return self._token_bytes_max * (tokens_max + 1)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, `encode_batch_fast` releases the interpreter lock.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode token ids, which must be below the vocabulary's size.

        Slow for many ids, but releases the interpreter lock.
        """
        # Unlike `decode`, `decode_batch` releases the interpreter lock.
        texts = self._backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return str(texts[0])

    @property
    def added_tokens(self) -> dict[int, str]:
        """Tokens added to the vocabulary, special tokens among them, by id."""
        return {key: token.content for key, token in self._added.items()}

    def detokenizer(
        self, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Make an incremental decoder; special tokens in `kept` are never skipped."""
        decode, special = self._backend.decode, self._special
        if not skip_special_tokens or not kept & special:
            hidden = special if skip_special_tokens else frozenset[int]()
            return Detokenizer(
                lambda ids: decode(ids, skip_special_tokens=skip_special_tokens),
                self._bytes_of,
                self._single_decoder(hidden),
            )
        hidden = special - kept
        return Detokenizer(
            lambda ids: decode([i for i in ids if i not in hidden], skip_special_tokens=False),
            self._bytes_of,
            self._single_decoder(hidden),
        )

    def _single_decoder(self, hidden: frozenset[int]) -> Callable[[int], str] | None:
        """Return the decoder of single tokens, empty for `hidden` tokens.

        None if the text of a token depends on the tokens around it.
        """
        if not self.texts.concatenates:
            return None
        known = self._single_texts

        def decode_single(token_id: int) -> str:
            if token_id in hidden:
                return ""
            text = known.get(token_id)
            if text is None:
                text = self._backend.decode([token_id], skip_special_tokens=False)
                # Do not cache ids outside the vocabulary, which workers may send without bound.
                if token_id < self.size:
                    known[token_id] = text
            return text

        return decode_single


@contextlib.contextmanager
def _panics_refused(param: str) -> Iterator[None]:
    """Convert a panic of the package, as at the step limit of an expression, to BadRequest."""
    try:
        yield
    except BaseException as error:
        # A panic is no Exception, and the package does not export its type.
        if type(error).__name__ != "PanicException":
            raise
        raise BadRequest(
            f"the model's tokenizer cannot encode '{param}'; change the text", param=param
        ) from None


def _estimate(
    text: str, ids: Callable[[str, bool], list[int]], tokens_max: int, param: str
) -> None:
    """Refuse a text far above the limit before the whole text is encoded, by `ids`.

    The encoding of a text takes hundreds of times the text's memory.
    """
    tokens = 0
    # The limit has margins, since each boundary between slices may add a few tokens.
    for start in range(0, len(text) if len(text) > SLICE_CHARS else 0, SLICE_CHARS):
        tokens += len(ids(text[start : start + SLICE_CHARS], False))
        if tokens > ESTIMATE_MARGIN * tokens_max + SLICE_MARGIN_TOKENS:
            raise too_long(f"more than {tokens_max} tokens", tokens_max, param)


def too_long(size: str, tokens_max: int, param: str) -> ContextExceeded:
    """The error for a text of `size`, which has more than `tokens_max` tokens."""
    return ContextExceeded(
        f"this model's maximum context length is {tokens_max} tokens, but '{param}' has {size}; "
        "shorten it",
        param=param,
    )


class TextPool:
    """Thread pool for work on long texts; callers wait while all threads are busy."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._slots = asyncio.Semaphore(threads)

    async def run(self, function: Callable[[], T], size: int) -> T:
        """Run `function` and return its result; `size`: its cost in characters to tokenize.

        Small work runs at once on the event loop, other work in a thread. If the caller is
        cancelled, a function that waits for a thread does not run; one that runs continues.
        """
        # Small work takes less time than a thread: in a busy process, the switches to the thread
        # and back both wait for the interpreter lock.
        if size <= INLINE_SIZE:
            return function()
        await self._slots.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _done(self, future: "asyncio.Future[T]") -> None:
        self._slots.release()
        if not future.cancelled():
            # Retrieve the exception: asyncio logs it if the caller was cancelled.
            future.exception()

    def close(self) -> None:
        """Stop the threads and cancel work that has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)
