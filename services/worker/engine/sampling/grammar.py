"""What a grammar allows next: masks of llguidance over the model's own tokenizer.

A matcher's state is a function of the grammar and the tokens that it has consumed, so it is built
again from a request's output wherever the request goes on.

Bounds. `PARSER_LIMITS` count the work of building and of each mask, so that a grammar is taken or
refused alike on every machine; measured on one core of a shared machine, the worst of 64 KiB took
0.2 s to build and 0.02 s for a mask, ordinary ones 1 ms and 0.01 ms. A compiled grammar's lexer
states are shared by all its requests; `COMPILED_MAX` are kept, the least recently used goes first.
The tokenizer takes 60 MiB with 49,152 tokens.
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
    """A grammar cannot be used, or not any longer; one sentence of cause and remedy."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a matcher says of the next token: `mask`, or that only the `end` may follow."""

    mask: Mask
    end: bool


class Grammars:
    """Compiles grammars for one model; safe for several threads.

    `load` is slow and holds the interpreter; it is done once, by whoever comes first.
    """

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        """`vocab_size`: rows of logits, which may be more than the tokenizer has tokens."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._loading = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._unusable = ""
        # Pristine matchers, or why there is none; the last was used last.
        self._compiled: OrderedDict[Grammar, LLMatcher | str] = OrderedDict()
        # Those that are being compiled ahead.
        self._begun: dict[Grammar, Future[LLMatcher | str]] = {}
        self._ahead = ThreadPoolExecutor(1, "grammar-ahead")

    def load(self) -> LLTokenizer:
        """The tokenizer. Raises GrammarRefused if the model has none that can be used."""
        with self._loading:
            if self._tokenizer is None and not self._unusable:
                try:
                    self._tokenizer = _load_tokenizer(self._model_dir)
                except (OSError, ValueError) as error:
                    self._unusable = f"this model's tokenizer allows no grammars: {error}"
            if self._tokenizer is None:
                raise GrammarRefused(self._unusable)
            return self._tokenizer

    def verdict(self, grammar: Grammar) -> str | None:
        """What `refusal` says if it has been compiled lately, else None; takes no time."""
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            return None
        return known if isinstance(known, str) else ""

    def refusal(self, grammar: Grammar) -> str:
        """Why it cannot be used, "" if it can; it is compiled for that."""
        try:
            self.compile(grammar)
        except GrammarRefused as refused:
            return str(refused)
        return ""

    def begin(self, grammar: Grammar) -> None:
        """Have another thread compile a grammar that is needed soon; `compile` waits for that."""
        with self._lock:
            if grammar not in self._compiled and grammar not in self._begun:
                self._begun[grammar] = self._ahead.submit(self._build, grammar)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning, for the caller. Raises GrammarRefused."""
        with self._lock:
            known, begun = self._compiled.get(grammar), self._begun.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            known = self._build(grammar) if begun is None else begun.result()
        if isinstance(known, str):
            raise GrammarRefused(known)
        return known.deep_copy()

    def renew(self, grammar: Grammar) -> LLMatcher:
        """As `compile`, and compiled anew: what other requests did to the lexer is forgotten."""
        with self._lock:
            self._compiled.pop(grammar, None)
        return self.compile(grammar)

    def matcher(self, grammar: Grammar, stop_ids: Collection[int]) -> "GrammarMatcher":
        """A request's matcher, before any output. Raises GrammarRefused."""
        return GrammarMatcher(self, grammar, stop_ids, self.load(), self._vocab_size)

    def _build(self, grammar: Grammar) -> LLMatcher | str:
        built: LLMatcher | str
        try:
            built = _built(self.load(), grammar)
        except GrammarRefused as refused:
            built = str(refused)
        with self._lock:
            self._begun.pop(grammar, None)
            self._compiled[grammar] = built
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return built


class GrammarMatcher:
    """Where one request's output is in its grammar.

    Stop tokens may be chosen where the output so far is a whole one, and nowhere else.
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
        # Without stop tokens the model's own end is chosen where nothing else can follow.
        self._stop_ids = _within(stop_ids, vocab_size)
        self._matcher = grammars.compile(grammar)
        self._consumed: list[int] = []

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on by some tokens of the output; whether they match shows in `choice`."""
        self._consumed += token_ids
        self._advance(token_ids)

    def choice(self) -> Choice:
        """What may follow what was consumed.

        A lexer that other requests have filled up is built anew. Raises GrammarRefused.
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
                return  # by an error, or at the end, after which only ends are chosen
            self._matcher.consume_token(token_id)

    def _bits(self) -> Mask | None:
        """What llguidance allows, a value for each of its tokens; None after an error."""
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
    """What ends a text, as the model's own files say; [] where they do not."""
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
    """What llguidance says, as one line."""
    line = " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())
    return f"grammar: {line[:MESSAGE_CHARS_MAX] or 'it cannot be used'}"
