"""Constrained decoding: token masks from llguidance over the model's own tokenizer.

A matcher holds the position of an output in its grammar. Its state depends only on the grammar and
the consumed tokens, so a worker that adopts a sequence from another worker rebuilds the matcher
from the sequence's output.

`PARSER_LIMITS` bounds the work of compiling a grammar and of each mask. It counts steps and not
time, so that every machine accepts and refuses the same grammars. Measured on a core of a shared
machine: the worst grammar of 64 KiB took 0.2 s to build and 0.02 s per mask, ordinary grammars 1 ms
and 0.01 ms. All requests with the same grammar share its lexer states. An LRU cache holds
`COMPILED_MAX` compiled grammars. The tokenizer takes 60 MiB with 49,152 tokens.
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
"""[vocabulary]: True for allowed tokens."""


class GrammarRefused(ValueError):
    """A grammar cannot be used, or not any more; the message states cause and remedy."""


@dataclass(frozen=True, slots=True)
class Usable:
    """Verdict: the grammar compiles."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Verdict: the grammar does not compile; `reason` states cause and remedy."""

    reason: str


GrammarVerdict = Usable | Unusable


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that may follow. `end_only`: all of them end the output."""

    mask: Mask
    end_only: bool


class Grammars:
    """Compiles and caches grammars for a model; thread-safe.

    `load` is slow and holds the interpreter lock; only the first call loads the tokenizer.
    """

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """`vocab_size`: width of the logits, which may exceed the tokenizer's vocabulary."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._loading = Lock()
        self._tokenizer: LLTokenizer | None = None
        # The reason why the tokenizer does not load; a failed load is not repeated.
        self._no_tokenizer: Unusable | None = None
        # LRU cache of matchers in their initial state; the last entry was used most recently.
        self._compiled: OrderedDict[Grammar, LLMatcher | Unusable] = OrderedDict()
        # Compilations in progress that `start_compiling` has submitted.
        self._compiling: dict[Grammar, Future[LLMatcher | Unusable]] = {}
        self._executor = ThreadPoolExecutor(1, "grammar-ahead")

    def load(self) -> LLTokenizer:
        """Load and return the tokenizer. Raises GrammarRefused if it is missing or unusable."""
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

    def cached_verdict(self, grammar: Grammar) -> GrammarVerdict | None:
        """Return the cached result of `check`, else None. Does not wait for a compilation."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None or isinstance(compiled, Unusable):
            return compiled
        return Usable()

    def check(self, grammar: Grammar) -> GrammarVerdict:
        """Compile a grammar and return whether it can be used."""
        try:
            self.compile(grammar)
        except GrammarRefused as refused:
            return Unusable(str(refused))
        return Usable()

    def start_compiling(self, grammar: Grammar) -> None:
        """Compile a grammar on another thread ahead of its use; `compile` waits for the result."""
        with self._lock:
            if grammar not in self._compiled and grammar not in self._compiling:
                self._compiling[grammar] = self._executor.submit(self._build, grammar)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher in its initial state. Raises GrammarRefused."""
        with self._lock:
            compiled, compiling = self._compiled.get(grammar), self._compiling.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        # Build outside the lock, so that other threads can look up verdicts meanwhile.
        if compiled is None:
            compiled = self._build(grammar) if compiling is None else compiling.result()
        if isinstance(compiled, Unusable):
            raise GrammarRefused(compiled.reason)
        # A copy shares the lexer states and has its own position.
        return compiled.deep_copy()

    def recompile(self, grammar: Grammar) -> LLMatcher:
        """Compile as `compile` without the cache, so that the matcher has a fresh lexer."""
        with self._lock:
            self._compiled.pop(grammar, None)
        return self.compile(grammar)

    def matcher(self, grammar: Grammar, stop_ids: Collection[int]) -> "GrammarMatcher":
        """Return the matcher of an empty output. Raises GrammarRefused."""
        return GrammarMatcher(self, grammar, stop_ids, self.load(), self._vocab_size)

    def _build(self, grammar: Grammar) -> LLMatcher | Unusable:
        built: LLMatcher | Unusable
        try:
            built = _build_matcher(self.load(), grammar)
        except GrammarRefused as refused:
            built = Unusable(str(refused))
        with self._lock:
            self._compiling.pop(grammar, None)
            self._compiled[grammar] = built
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return built


class GrammarMatcher:
    """The position of a sequence's output in its grammar.

    Stop tokens are allowed only where the grammar accepts the output so far.
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
        # Without stop tokens, the model's EOS tokens end an output that the grammar cannot extend.
        self._stop_ids = _within(stop_ids, vocab_size)
        self._matcher = grammars.compile(grammar)
        self._consumed: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by output tokens; `allowed_tokens` raises if they do not match the grammar."""
        self._consumed += token_ids
        self._advance(token_ids)

    def allowed_tokens(self) -> AllowedTokens:
        """Return the tokens that may follow the consumed tokens. Raises GrammarRefused."""
        bits = self._bits()
        if bits is None:
            # Other sequences may have exhausted the limits of the shared lexer: retry with a fresh
            # lexer before failing this sequence.
            self._matcher = self._grammars.recompile(self._grammar)
            self._advance(self._consumed)
            bits = self._bits()
        if bits is None:
            raise GrammarRefused(_sentence(self._matcher.get_error()))
        mask = np.zeros(self._vocab_size, np.bool_)
        tokens = min(len(bits), self._vocab_size)
        mask[:tokens] = bits[:tokens]
        # End tokens are not part of the grammar: allow them if it accepts the output.
        mask[self._eos_ids] = False
        mask[self._stop_ids] = False
        accepting = self._matcher.is_accepting()
        end_only = accepting and (self._matcher.is_stopped() or not mask.any())
        if end_only:
            mask[:] = False
            mask[self._stop_ids if len(self._stop_ids) else self._eos_ids] = True
        elif accepting:
            mask[self._stop_ids] = True
        return AllowedTokens(mask, end_only)

    def _advance(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._matcher.is_stopped():
                return  # an error, or the end of the grammar: only end tokens can follow
            self._matcher.consume_token(token_id)

    def _bits(self) -> Mask | None:
        """Return llguidance's mask over its own vocabulary; None after an error."""
        matcher = self._matcher
        if matcher.is_error():
            return None
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return None
        return np.unpackbits(packed, bitorder="little").view(np.bool_)


def _build_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Build a matcher and verify its first mask. Raises GrammarRefused."""
    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=_SILENT, limits=PARSER_LIMITS)
    tried = matcher
    if not matcher.is_error():
        tried = matcher.deep_copy()
        mask = tried.compute_bitmask()
        # An empty first mask means that no output matches.
        if not (tried.is_error() or tried.is_accepting() or any(mask)):
            raise GrammarRefused("grammar: nothing matches it; correct it")
    if tried.is_error():
        raise GrammarRefused(_sentence(tried.get_error()))
    return matcher


def _load_tokenizer(model_dir: Path) -> LLTokenizer:
    """Load the model's tokenizer. Raises OSError, ValueError."""
    text = (model_dir / "tokenizer.json").read_text()
    eos_ids = _eos_ids(model_dir)
    return LLTokenizer(text, eos_token=eos_ids) if eos_ids else LLTokenizer(text)


def _eos_ids(model_dir: Path) -> list[int]:
    """Return the EOS tokens in the model's configuration files; [] if there are none."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.is_file():
            continue
        configured = json.loads(path.read_text()).get("eos_token_id")
        ids = configured if isinstance(configured, list) else [configured]
        if all(isinstance(token_id, int) for token_id in ids) and ids:
            return ids
    return []


def _within(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.int64]:
    return np.array(sorted(token_id for token_id in set(ids) if token_id < vocab_size), np.int64)


def _sentence(error: str) -> str:
    """Return an llguidance error as a single line."""
    line = " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())
    return f"grammar: {line[:MESSAGE_CHARS_MAX] or 'it cannot be used'}"
