"""Logits processors of a sequence: penalties, bias, bad words, allowed tokens, grammar.

Their state depends only on the sampling parameters, the prompt and the output so far (the `terms`),
so a worker that adopts a sequence from another worker rebuilds it. It takes memory in proportion to
the sequence's tokens, plus a byte per token of the vocabulary if `allowed_token_ids` are given.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.core.planner.batch import SampleTerms
from services.core.request import Sampling
from services.worker.engine.sampling.grammar import GrammarMatcher, Grammars, Mask

ROOM_MIN = 64  # minimum growth of the arrays, in tokens


Bias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Distinct token ids, and the bias of each."""


class TokenCounts:
    """How often each token that may be penalized occurs in a sequence's output.

    Tokens that occur only in the prompt have count 0; the repetition penalty applies to them, too.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self.sampling = sampling
        # Without a repetition penalty, prompt tokens have no effect and are left out.
        marked = sorted(set(prompt_ids)) if sampling.repetition_penalty != 1 else []
        self._places = {token_id: place for place, token_id in enumerate(marked)}
        self._ids = np.array(marked, np.int64)
        self._counts = np.zeros(len(marked), np.float64)
        self.output_tokens = 0
        self.last: int | None = None  # the last token of the output

    def add(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the output."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            # Double the arrays, so that adding a token takes amortized constant time.
            if place == len(self._ids):
                room = max(ROOM_MIN, place)
                self._ids = np.pad(self._ids, (0, room))
                self._counts = np.pad(self._counts, (0, room))
            self._ids[place] = token_id
            self._counts[place] += 1
            self.output_tokens += 1
            self.last = token_id

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens of the output, and of the prompt if it counts."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """The number of occurrences of each of `ids` in the output."""
        return self._counts[: len(self._places)]


def apply_penalties(
    logits: npt.NDArray[np.floating], rows: Sequence[int], counted: Sequence[TokenCounts]
) -> None:
    """Apply the penalties of `counted[i]` to row `rows[i]` of `logits` [rows, vocab], in place.

    A single vectorized pass handles all rows.
    """
    sizes = [len(tokens.ids) for tokens in counted]
    if not any(sizes):
        return

    def spread(values: Iterable[float]) -> npt.NDArray[np.floating]:
        return np.repeat(np.array(list(values), logits.dtype), sizes)

    occurrences = np.concatenate([tokens.counts for tokens in counted]).astype(logits.dtype)
    places = (
        np.repeat(np.array(rows, np.int64), sizes),
        np.concatenate([tokens.ids for tokens in counted]),
    )
    values = logits[places]
    # Repetition penalty (CTRL §4.1) as in `RepetitionPenaltyLogitsProcessor` of `transformers`:
    # divide positive logits, multiply the others.
    repetition = spread(tokens.sampling.repetition_penalty for tokens in counted)
    values = np.where(values > 0, values / repetition, values * repetition)
    # OpenAI's formula with counts of the output: logit − count · frequency − [count > 0] · presence
    values -= spread(tokens.sampling.frequency_penalty for tokens in counted) * occurrences
    values -= spread(tokens.sampling.presence_penalty for tokens in counted) * (occurrences > 0)
    logits[places] = values


class ForbiddenTokens(NamedTuple):
    """The tokens that an output token must not be: those outside `allowed`, and `ids`.

    `allowed` None allows all tokens.
    """

    allowed: Mask | None
    ids: list[int]


class SamplingRules:
    """The penalties, bias, bad words, allowed tokens and grammar of a sequence."""

    def __init__(self, terms: SampleTerms, vocab_size: int, grammars: Grammars) -> None:
        """Build the state for the output in `terms`. Raises GrammarRefused."""
        sampling = terms.sampling
        self._terms = terms
        # Prompt and output tokens; `terms` omits the prompt if no rule reads it.
        self._token_ids = list(terms.prompt_ids)
        self.counts = _counts(terms)
        self.bias = _bias(terms)
        self._banned_ids = sorted({word[0] for word in sampling.bad_words if len(word) == 1})
        # Multi-token bad words by their penultimate token, for a lookup by the last output token.
        self._bad_words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in sampling.bad_words:
            if len(word) > 1:
                self._bad_words[word[-2]].append(word)
        self._allowed: Mask | None = None
        if sampling.allowed_token_ids:
            self._allowed = np.zeros(vocab_size, np.bool_)
            self._allowed[list(sampling.allowed_token_ids)] = True
        self._grammar: GrammarMatcher | None = None
        if sampling.grammar is not None:
            self._grammar = grammars.matcher(sampling.grammar, terms.stop_ids)
        self.add(terms.output_ids)

    def add(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the output."""
        token_ids = tuple(token_ids)
        self._token_ids += token_ids
        if self.counts is not None:
            self.counts.add(token_ids)
        if self._grammar is not None:
            self._grammar.consume(token_ids)

    def add_bias(self, logits: npt.NDArray[np.floating]) -> None:
        """Add the logit bias to a row [vocab], in place."""
        if self.bias is not None:
            ids, values = self.bias
            logits[ids] += values.astype(logits.dtype)

    def forbid(self, logits: npt.NDArray[np.floating], index: int) -> None:
        """Set the logits [vocab] of tokens that output token `index` must not be to −infinity.

        Raises GrammarRefused.
        """
        allowed, ids = self.forbidden(index)
        if allowed is not None:
            np.copyto(logits, -np.inf, where=~allowed)
        if ids:
            logits[ids] = -np.inf

    def forbidden(self, index: int) -> ForbiddenTokens:
        """Return the tokens that output token `index` must not be. Raises GrammarRefused."""
        allowed = self._allowed
        if self._grammar is not None:
            grammatical = self._grammar.allowed_tokens()
            # A complete output must end, even if `min_tokens` or the allowed ids forbid it.
            if grammatical.end_only:
                return ForbiddenTokens(grammatical.mask, [])
            allowed = grammatical.mask if allowed is None else grammatical.mask & allowed
        ids = self._banned_ids + self._bad_word_ends()
        if index < self._terms.min_tokens:
            ids += self._terms.stop_ids
        return ForbiddenTokens(allowed, ids)

    def _bad_word_ends(self) -> list[int]:
        """Return the tokens that would complete a bad word."""
        token_ids = self._token_ids
        if not self._bad_words or not token_ids:
            return []
        return [
            word[-1]
            for word in self._bad_words.get(token_ids[-1], ())
            if tuple(token_ids[1 - len(word) :]) == word[:-1]
        ]


def has_rules(terms: SampleTerms) -> bool:
    """Whether a sequence needs `SamplingRules`."""
    sampling = terms.sampling
    has_lists = sampling.logit_bias or sampling.bad_words or sampling.allowed_token_ids
    return sampling.reads_output or bool(has_lists)


def _counts(terms: SampleTerms) -> TokenCounts | None:
    sampling = terms.sampling
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    if sampling.repetition_penalty == 1 and not any(penalties):
        return None
    return TokenCounts(sampling, terms.prompt_ids)


def _bias(terms: SampleTerms) -> Bias | None:
    pairs = terms.sampling.logit_bias
    if not pairs:
        return None
    biases: dict[int, float] = defaultdict(float)
    for token_id, bias in pairs:
        biases[token_id] += bias
    return np.array(list(biases), np.int64), np.array(list(biases.values()), np.float64)
