"""Chooses tokens: a function of (raw logits, terms, output so far, output index), nothing else.

The steps for a row of logits, in this order:

1. Apply repetition, frequency and presence penalty (`penalties.py`), then add the bias.
2. Forbid tokens (`rules.py`) that the grammar does not allow, that would complete a bad word, that
   stop before `min_tokens`, or that are not among the allowed ones. Where the grammar allows only
   end tokens, the other rules are ignored.
3. Apply temperature, top-k, top-p and min-p, and draw (`draw.py`).

Log probabilities are those of the raw logits, before all steps. Rows of requests that one for
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
from services.worker.engine.sampling.grammar import GrammarRefused, Grammars, Unusable
from services.worker.engine.sampling.logprobs import logprob_rows
from services.worker.engine.sampling.penalties import penalise
from services.worker.engine.sampling.rules import SamplingRules, has_rules
from services.worker.errors import InvalidBatch

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave the range of float32."""
NOTHING_LEFT = (
    "no token is left to choose from: allowed_token_ids, bad_words, min_tokens and the grammar"
    " contradict each other; ask for fewer of them"
)


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request that the sampler knows. `refused`: its grammar cannot be used, and why."""

    terms: SampleTerms
    rules: SamplingRules | None
    refused: Unusable | None = None

    def changes(self, index: int) -> bool:
        """Whether logits are changed before output `index` is drawn from them."""
        if self.rules is not None or self.refused is not None:
            return True
        return index < self.terms.min_tokens and bool(self.terms.stop_ids)


class SampleRow(NamedTuple):
    """The output that a row of logits is for: number `index` of a request."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    known: KnownRequest


@dataclass(slots=True)
class Sampled:
    """The results of some rows by request: its token, or why it `failed`.

    `logprobs` has a row for each request that asked for log probabilities.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Sampler:
    """Keeps a state per request until `keep_only` forgets it; for one thread."""

    def __init__(self, vocab_size: int, grammars: Grammars) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._known: dict[str, KnownRequest] = {}

    def __len__(self) -> int:
        """Number of known requests."""
        return len(self._known)

    def keep_only(self, known: Collection[str]) -> None:
        """Forget requests that are not in `known`, once the sampler has more than that."""
        if len(self._known) > len(known):
            for request_id in [name for name in self._known if name not in known]:
                del self._known[request_id]

    def expect(self, specs: Iterable[SampleSpec | None]) -> None:
        """Begin to compile grammars that `sample` will need and that are not compiled here yet."""
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
        Raises InvalidBatch on a request whose terms never came.
        """
        wanted = [SampleRow(name, spec.index, self._take(name, spec)) for name, spec in specs]
        changed = [row for row, one in enumerate(wanted) if one.known.changes(one.index)]
        scored = [row for row, one in enumerate(wanted) if one.known.terms.top_logprobs is not None]
        if changed:
            _change(logits, sorted(set(changed).difference(scored)), wanted, into)
            for row in sorted(set(changed).intersection(scored)):
                _change_with_logprobs(logits, row, wanted, into)
        tokens, best = _choose(logits, wanted)
        for row in changed:
            if best[row] == -math.inf:
                into.failed.setdefault(wanted[row].request_id, NOTHING_LEFT)
        if scored:
            _add_logprobs(logits, sorted(set(scored).difference(changed)), tokens, wanted, into)
        for one, token in zip(wanted, tokens, strict=True):
            if one.request_id not in into.failed:
                into.tokens[one.request_id] = token

    def _take(self, request_id: str, spec: SampleSpec) -> KnownRequest:
        """The state of the request, brought up to date by `spec`."""
        if spec.terms is not None:
            begun = self._known[request_id] = self._begin(spec.terms)
            return begun
        known = self._known.get(request_id)
        if known is None:
            raise InvalidBatch(f"the sampler never got the terms of {request_id}")
        if known.rules is not None:
            known.rules.add(spec.output_ids)
        return known

    def _begin(self, terms: SampleTerms) -> KnownRequest:
        if not has_rules(terms):
            return KnownRequest(terms, None)
        try:
            return KnownRequest(terms, SamplingRules(terms, self._vocab_size, self._grammars))
        except GrammarRefused as refused:
            return KnownRequest(terms, None, Unusable(str(refused)))


def _change(
    logits: torch.Tensor, rows: Sequence[int], wanted: Sequence[SampleRow], into: Sampled
) -> None:
    """Steps 1 and 2 of these rows, in place."""
    counted = [
        (row, rules.counts) for row in rows if (rules := wanted[row].known.rules) is not None
    ]
    penalised = [(row, counts) for row, counts in counted if counts is not None]
    penalise(logits, [row for row, _ in penalised], [counts for _, counts in penalised])
    for row in rows:
        request_id, index, known = wanted[row]
        if known.refused is not None:
            into.failed[request_id] = known.refused.reason
        elif known.rules is None:
            logits[row, list(known.terms.stop_ids)] = -torch.inf
        else:
            known.rules.add_bias(logits[row])
            try:
                known.rules.forbid(logits[row], index)
            except GrammarRefused as refused:
                into.failed[request_id] = str(refused)


def _change_with_logprobs(
    logits: torch.Tensor, row: int, wanted: Sequence[SampleRow], into: Sampled
) -> None:
    """Steps 1 to 3 of a row whose raw logits are needed once its token is known."""
    raw = logits[row : row + 1].clone()
    _change(logits, (row,), wanted, into)
    one = wanted[row]
    top = one.known.terms.top_logprobs
    if one.request_id not in into.failed and top is not None:
        tokens, _ = _choose(logits[row : row + 1], (one,))
        into.logprobs[one.request_id] = logprob_rows(raw, (0,), tokens, top)


def _choose(logits: torch.Tensor, wanted: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
    """Step 3: a token of each row, and the best logit of each row."""
    peaks = torch.max(logits, dim=-1)
    best: list[float] = peaks.values.tolist()
    tokens: list[int] = peaks.indices.tolist()
    for row, (_, index, known) in enumerate(wanted):
        sampling = known.terms.sampling
        if sampling.temperature >= GREEDY_BELOW and math.isfinite(best[row]):
            draw = uniform(sampling.seed, index)
            tokens[row] = draw_token(logits[row], sampling, draw)
    return tokens, best


def _add_logprobs(
    logits: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    wanted: Sequence[SampleRow],
    into: Sampled,
) -> None:
    """Log probabilities of the tokens of unchanged rows, in groups with equal `top_logprobs`."""
    for top in {wanted[row].known.terms.top_logprobs for row in rows}:
        assert top is not None
        alike = [row for row in rows if wanted[row].known.terms.top_logprobs == top]
        found = logprob_rows(logits, alike, [tokens[row] for row in alike], top)
        for place, row in enumerate(alike):
            into.logprobs[wanted[row].request_id] = found.rows(place, place + 1)
