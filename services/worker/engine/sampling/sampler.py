"""Chooses tokens: a function of (raw logits, terms, output so far, output index), nothing else.

What is done to a row of logits, in this order:

1. repetition, frequency and presence penalty (`penalties.py`), then the bias is added;
2. what cannot be chosen is forbidden (`rules.py`): what the grammar does not allow, tokens that
   would complete a bad word, stop tokens before `min_tokens`, tokens that are not among the allowed
   ones; where the grammar lets only the end follow, nothing but the grammar counts;
3. temperature, top-k, top-p, min-p, and the draw (`draw.py`).

Log probabilities are those of the raw logits, before all of it. Rows of requests that ask for
nothing else take the third step only, all together.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from services.core.logprobs import LogprobRows
from services.core.planner.batch import SampleSpec, SampleTerms
from services.worker.engine.sampling.draw import draw_token, uniform
from services.worker.engine.sampling.grammar import GrammarRefused, Grammars
from services.worker.engine.sampling.logprobs import logprob_rows
from services.worker.engine.sampling.penalties import penalise
from services.worker.engine.sampling.rules import Rules, has_rules
from services.worker.errors import InvalidBatch

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave the range of float32."""
NOTHING_LEFT = (
    "no token is left to choose from: what allowed_token_ids, bad_words, min_tokens and the grammar"
    " say contradicts each other; ask for less of it"
)


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a request. `refused`: why its grammar cannot be used."""

    terms: SampleTerms
    rules: Rules | None
    refused: str = ""

    def changes(self, index: int) -> bool:
        """Whether logits are changed before output `index` is drawn from them."""
        if self.rules is not None or self.refused:
            return True
        return index < self.terms.min_tokens and bool(self.terms.stop_ids)


class Ask(NamedTuple):
    """What is wanted of a row: output `index` of a request."""

    request_id: str
    index: int  # type: ignore[assignment]  # instead of tuple.index, which nobody needs here
    told: Told


@dataclass(slots=True)
class Sampled:
    """What came of some rows, by request: a token for each, or why it `failed`.

    `logprobs` has a row for each that asked.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Sampler:
    """Keeps what it was told of each request, until `keep_only`; not for several threads."""

    def __init__(self, vocab_size: int, grammars: Grammars) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._told: dict[str, Told] = {}

    def __len__(self) -> int:
        """Requests that it knows."""
        return len(self._told)

    def keep_only(self, known: Collection[str]) -> None:
        """Forget requests that are not in `known`, once there are more than in it."""
        if len(self._told) > len(known):
            for request_id in [name for name in self._told if name not in known]:
                del self._told[request_id]

    def expect(self, specs: Iterable[SampleSpec | None]) -> None:
        """Have grammars that nobody has compiled here compiled before `sample` needs them."""
        for spec in specs:
            if spec is None or spec.terms is None:
                continue
            if (grammar := spec.terms.sampling.grammar) is not None:
                self._grammars.begin(grammar)

    def sample(
        self, logits: torch.Tensor, specs: Sequence[tuple[str, SampleSpec]], into: Sampled
    ) -> None:
        """Choose a token from each row of `logits` [rows, vocab], which is overwritten.

        `specs[i]`, with its request's id, belongs to row i. Among equal logits the lower token id
        comes first. A row that is not finite, from a model that overflows, is taken greedily.
        Raises InvalidBatch if something is asked of a request that was never told.
        """
        asks = [Ask(name, spec.index, self._take(name, spec)) for name, spec in specs]
        changed = [row for row, ask in enumerate(asks) if ask.told.changes(ask.index)]
        loud = [row for row, ask in enumerate(asks) if ask.told.terms.top_logprobs is not None]
        if changed:
            _change(logits, sorted(set(changed).difference(loud)), asks, into)
            for row in sorted(set(changed).intersection(loud)):
                _change_and_tell(logits, row, asks, into)
        tokens, best = _choose(logits, asks)
        for row in changed:
            if best[row] == -math.inf:
                into.failed.setdefault(asks[row].request_id, NOTHING_LEFT)
        if loud:
            _tell(logits, sorted(set(loud).difference(changed)), tokens, asks, into)
        for ask, token in zip(asks, tokens, strict=True):
            if ask.request_id not in into.failed:
                into.tokens[ask.request_id] = token

    def _take(self, request_id: str, spec: SampleSpec) -> Told:
        """What is known of the request, with what `spec` adds to it."""
        if spec.terms is not None:
            told = self._told[request_id] = self._begin(spec.terms)
            return told
        known = self._told.get(request_id)
        if known is None:
            raise InvalidBatch(f"the sampler was never told the terms of {request_id}")
        if known.rules is not None:
            known.rules.add(spec.output_ids)
        return known

    def _begin(self, terms: SampleTerms) -> Told:
        if not has_rules(terms):
            return Told(terms, None)
        try:
            return Told(terms, Rules(terms, self._vocab_size, self._grammars))
        except GrammarRefused as refused:
            return Told(terms, None, str(refused))


def _change(logits: torch.Tensor, rows: Sequence[int], asks: Sequence[Ask], into: Sampled) -> None:
    """Steps 1 and 2 of these rows, in place."""
    counted = [(row, rules.counts) for row in rows if (rules := asks[row].told.rules) is not None]
    penalised = [(row, counts) for row, counts in counted if counts is not None]
    penalise(logits, [row for row, _ in penalised], [counts for _, counts in penalised])
    for row in rows:
        request_id, index, told = asks[row]
        if told.refused:
            into.failed[request_id] = told.refused
        elif told.rules is None:
            logits[row, list(told.terms.stop_ids)] = -torch.inf
        else:
            told.rules.add_bias(logits[row])
            try:
                told.rules.forbid(logits[row], index)
            except GrammarRefused as refused:
                into.failed[request_id] = str(refused)


def _change_and_tell(logits: torch.Tensor, row: int, asks: Sequence[Ask], into: Sampled) -> None:
    """The same for a row whose raw logits are needed once its token is known."""
    raw = logits[row : row + 1].clone()
    _change(logits, (row,), asks, into)
    ask = asks[row]
    top = ask.told.terms.top_logprobs
    if ask.request_id not in into.failed and top is not None:
        tokens, _ = _choose(logits[row : row + 1], (ask,))
        into.logprobs[ask.request_id] = logprob_rows(raw, (0,), tokens, top)


def _choose(logits: torch.Tensor, asks: Sequence[Ask]) -> tuple[list[int], list[float]]:
    """Step 3: a token of each row, and the best logit of each row."""
    peaks = torch.max(logits, dim=-1)
    best: list[float] = peaks.values.tolist()
    tokens: list[int] = peaks.indices.tolist()
    for row, (_, index, told) in enumerate(asks):
        sampling = told.terms.sampling
        if sampling.temperature >= GREEDY_BELOW and math.isfinite(best[row]):
            draw = uniform(sampling.seed, index)
            tokens[row] = draw_token(logits[row], sampling, draw)
    return tokens, best


def _tell(
    logits: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    asks: Sequence[Ask],
    into: Sampled,
) -> None:
    """Log probabilities of the tokens of unchanged rows, by how many others are told beside."""
    for top in {asks[row].told.terms.top_logprobs for row in rows}:
        assert top is not None
        alike = [row for row in rows if asks[row].told.terms.top_logprobs == top]
        found = logprob_rows(logits, alike, [tokens[row] for row in alike], top)
        for place, row in enumerate(alike):
            into.logprobs[asks[row].request_id] = found.rows(place, place + 1)
