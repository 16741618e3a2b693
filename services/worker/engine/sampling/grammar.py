"""What a grammar allows next: masks of llguidance over the model's own tokenizer.

The state of a matcher is a function of the grammar and of the tokens that it has consumed. A worker
that takes a request over builds the matcher again from the request's output.

Bounds. `PARSER_LIMITS` count the work of building and of each mask, so that every machine accepts
and refuses the same grammars. Measured on one core of a shared machine: the worst grammar of 64 KiB
took 0.2 s to build and 0.02 s for a mask, ordinary ones 1 ms and 0.01 ms. All requests with a
grammar share its lexer states. `COMPILED_MAX` compiled grammars are kept; the least recently used
is evicted first. The tokenizer takes 60 MiB with 49,152 tokens.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from services.common.grammar import parser_limits, source_of
from services.core.request import Grammar

COMPILED_MAX = 32
PARSER_LIMITS = parser_limits()
MESSAGE_CHARS_MAX = 300
_SILENT = 0

Mask = npt.NDArray[np.bool_]
"""[vocabulary]: what may be chosen."""


class GrammarRefused(ValueError):
    """A grammar cannot be used, or cannot be used any longer; one sentence of cause and remedy."""


@dataclass(frozen=True, slots=True)
class Usable:
    """A grammar compiles."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """A grammar does not compile; `reason` is one sentence of cause and remedy."""

    reason: str


GrammarVerdict = Usable | Unusable


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens that may come next: `mask`. With `end`, only tokens that end the output."""

    mask: Mask
    end: bool


class Grammars:
    """Compiles grammars for one model; safe for several threads.

    `load` is slow and holds the interpreter lock; the first caller does it for all.
    """

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """`vocab_size`: rows of logits, which may be more than the tokenizer has tokens."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._loading = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._no_tokenizer: Unusable | None = None
        # Matchers that have consumed nothing; the last entry is the most recently used.
        self._compiled: OrderedDict[Grammar, LLMatcher | Unusable] = OrderedDict()
        # Grammars that are being compiled ahead of their use.
        self._begun: dict[Grammar, Future[LLMatcher | Unusable]] = {}
        self._ahead = ThreadPoolExecutor(1, "grammar-ahead")

    def load(self) -> LLTokenizer:
        """The tokenizer. Raises GrammarRefused if the model has none that can be used."""
        with self._loading:
            if self._no_tokenizer is not None:
                raise GrammarRefused(self._no_tokenizer.reason)
            if self._tokenizer is None:
                try:
                    self._tokenizer = _load_tokenizer(self._model_dir)
                except (OSError, ValueError) as error:
                    reason = f"this model's tokenizer allows no grammars: {error}"
                    self._no_tokenizer = Unusable(reason)
                    raise GrammarRefused(reason) from error
            return self._tokenizer

    def known(self, grammar: Grammar) -> GrammarVerdict | None:
        """The result of `check` if it is remembered, else None; returns at once."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None or isinstance(compiled, Unusable):
            return compiled
        return Usable()

    def check(self, grammar: Grammar) -> GrammarVerdict:
        """Compile a grammar to find out whether it can be used."""
        try:
            self.compile(grammar)
        except GrammarRefused as refused:
            return Unusable(str(refused))
        return Usable()

    def begin(self, grammar: Grammar) -> None:
        """Have another thread compile a grammar that is needed soon; `compile` waits for it."""
        with self._lock:
            if grammar not in self._compiled and grammar not in self._begun:
                self._begun[grammar] = self._ahead.submit(self._build, grammar)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher for the caller that has consumed nothing. Raises GrammarRefused."""
        with self._lock:
            known, begun = self._compiled.get(grammar), self._begun.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            known = self._build(grammar) if begun is None else begun.result()
        if isinstance(known, Unusable):
            raise GrammarRefused(known.reason)
        return known.deep_copy()

    def renew(self, grammar: Grammar) -> LLMatcher:
        """As `compile`, but compile anew, with a lexer that no other request has used."""
        with self._lock:
            self._compiled.pop(grammar, None)
        return self.compile(grammar)

    def matcher(self, grammar: Grammar, stop_ids: Collection[int]) -> "GrammarMatcher":
        """A request's matcher, before any output. Raises GrammarRefused."""
        return GrammarMatcher(self, grammar, stop_ids, self.load(), self._vocab_size)

    def _build(self, grammar: Grammar) -> LLMatcher | Unusable:
        built: LLMatcher | Unusable
        try:
            built = _built(self.load(), grammar)
        except GrammarRefused as refused:
            built = Unusable(str(refused))
        with self._lock:
            self._begun.pop(grammar, None)
            self._compiled[grammar] = built
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return built


class GrammarMatcher:
    """The position of one request's output in its grammar.

    A stop token may be chosen only where the grammar accepts the output so far.
    """

    def __init__(
        self,
        grammars: Grammars,
        grammar: Grammar,
        stop_ids: Collection[int],
        tokenizer: LLTokenizer,
        vocab_size: int,
    ) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._eos_ids = _within(tokenizer.eos_tokens, vocab_size)
        # Without stop tokens the model's own end token is chosen where nothing else can follow.
        self._stop_ids = _within(stop_ids, vocab_size)
        self._matcher = grammars.compile(grammar)
        self._consumed: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens of the output; `choice` raises if they do not match."""
        self._consumed += token_ids
        self._advance(token_ids)

    def choice(self) -> Choice:
        """Which tokens may follow the consumed ones.

        Builds a lexer anew that other requests have filled up. Raises GrammarRefused.
        """
        bits = self._bits()
        if bits is None:
            self._matcher = self._grammars.renew(self._grammar)
            self._advance(self._consumed)
            bits = self._bits()
        if bits is None:
            raise GrammarRefused(_sentence(self._matcher.get_error()))
        mask = np.zeros(self._vocab_size, np.bool_)
        tokens = min(len(bits), self._vocab_size)
        mask[:tokens] = bits[:tokens]
        mask[self._eos_ids] = False
        mask[self._stop_ids] = False
        accepting = self._matcher.is_accepting()
        end = accepting and (self._matcher.is_stopped() or not mask.any())
        if end:
            mask[:] = False
            mask[self._stop_ids if len(self._stop_ids) else self._eos_ids] = True
        elif accepting:
            mask[self._stop_ids] = True
        return Choice(mask, end)

    def _advance(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._matcher.is_stopped():
                return  # An error, or the end of the grammar: only end tokens can follow.
            self._matcher.consume_token(token_id)

    def _bits(self) -> Mask | None:
        """The mask of llguidance, a value for each of its tokens; None after an error."""
        matcher = self._matcher
        if matcher.is_error():
            return None
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return None
        return np.unpackbits(packed, bitorder="little").view(np.bool_)


def _built(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher whose first mask is known to work. Raises GrammarRefused."""
    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=_SILENT, limits=PARSER_LIMITS)
    tried = matcher
    if not matcher.is_error():
        tried = matcher.deep_copy()
        mask = tried.compute_bitmask()
        if not (tried.is_error() or tried.is_accepting() or any(mask)):
            raise GrammarRefused("grammar: nothing matches it; correct it")
    if tried.is_error():
        raise GrammarRefused(_sentence(tried.get_error()))
    return matcher


def _load_tokenizer(model_dir: Path) -> LLTokenizer:
    """Raises OSError or ValueError."""
    text = (model_dir / "tokenizer.json").read_text()
    eos_ids = _eos_ids(model_dir)
    return LLTokenizer(text, eos_token=eos_ids) if eos_ids else LLTokenizer(text)


def _eos_ids(model_dir: Path) -> list[int]:
    """The end tokens that the model's own files name; [] if they name none."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.is_file():
            continue
        found = json.loads(path.read_text()).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if all(isinstance(one, int) for one in ids) and ids:
            return ids
    return []


def _within(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    return np.array(sorted(one for one in set(ids) if one < vocab_size), np.int64)


def _sentence(error: str) -> str:
    """An error of llguidance as one line."""
    line = " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())
    return f"grammar: {line[:MESSAGE_CHARS_MAX] or 'it cannot be used'}"
