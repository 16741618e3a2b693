"""Chooses tokens: a function of (raw logits, terms, output so far, output index), nothing else.

The steps for a row of logits, in this order:

1. Apply repetition, frequency and presence penalty (`penalties.py`), then add the bias.
2. Forbid tokens (`rules.py`) that the grammar does not allow, that would complete a bad word, that
   stop before `min_tokens`, or that are not among the allowed ones. Where the grammar allows only
   end tokens, the other rules are ignored.
3. Apply temperature, top-k, top-p and min-p, and draw (`draw.py`).

Log probabilities are those of the raw logits, before all steps. Rows of requests that one for
nothing else take the third step only, all together; on a GPU, where they are.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from services.core.logprobs import LogprobRows
from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import Sampling
from services.worker.engine.model.cpu_kernels.candidates import Scratch
from services.worker.engine.model.cpu_kernels.philox import uniform_numbers
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms, TokenChooser
from services.worker.engine.model.cpu_kernels.token_scores import TokenScorer
from services.worker.engine.sampling.device_draw import draw_on_device
from services.worker.engine.sampling.grammar import GrammarRefused, Grammars, Unusable
from services.worker.engine.sampling.rules import SamplingRules, has_rules, penalise
from services.worker.errors import InvalidBatch

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave the range of float32."""
_WORD_BYTES = 8


class RequestDraws:
    """How the tokens of one request are drawn."""

    __slots__ = ("key", "terms")

    def __init__(self, sampling: Sampling) -> None:
        temperature = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        self.terms = DrawTerms(temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        digest = hashlib.blake2b(str(sampling.seed).encode(), digest_size=2 * _WORD_BYTES).digest()
        self.key = tuple(
            int.from_bytes(digest[first : first + _WORD_BYTES], "little")
            for first in (0, _WORD_BYTES)
        )


def draw_tokens(
    chooser: TokenChooser,
    logits: npt.NDArray[np.floating],
    wanted: Sequence[tuple[RequestDraws, int]],
) -> tuple[list[int], list[float]]:
    """A token of each row of `logits` [rows, vocab], and the best logit of each row.

    `wanted[i]`: the request of row i, and the index of the output. A request whose temperature is
    0 gets the best token, of equal ones that with the lowest id; so does one whose row has no
    finite best logit.

    The order is temperature, top-k, top-p, min-p, draw. Top-p keeps the shortest best-first prefix
    whose mass reaches `top_p` of the mass that top-k left; min-p keeps tokens that are at least
    `min_p` times as likely as the best one. The draw of output `i` comes from Philox, keyed by the
    request's seed, at counter `i`: a preempted or moved request gets the same tokens.
    """
    return chooser(logits, [draws.terms for draws, _ in wanted], draw_numbers(wanted))


def draw_numbers(wanted: Sequence[tuple[RequestDraws, int]]) -> npt.NDArray[np.float64]:
    """For each output, which part of its distribution is drawn, in [0, 1)."""
    if not any(draws.terms.temperature for draws, _ in wanted):
        return np.zeros(len(wanted))
    keys = np.array([draws.key for draws, _ in wanted], np.uint64)
    return uniform_numbers(keys, np.array([index for _, index in wanted], np.uint64))


def logprob_rows(
    scorer: TokenScorer,
    logits: npt.NDArray[np.floating],
    rows: Sequence[int],
    token_ids: Sequence[int],
    top: int,
) -> LogprobRows:
    """How likely `token_ids[i]` was after row `rows[i]` of `logits` [any, vocab].

    Among the `top` (at most the vocabulary), the lower of two equally likely ids comes first.
    """
    ids, values = scorer(logits, rows, token_ids, top)
    return LogprobRows(top, ids.astype("<i4").tobytes(), values.astype("<f4").tobytes())


Logits = npt.NDArray[np.floating]
"""[rows, vocab], in the dtype of the model's activations."""
NOTHING_LEFT = (
    "no token is left to choose from: allowed_token_ids, bad_words, min_tokens and the grammar"
    " contradict each other; ask for fewer of them"
)


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request that the sampler knows. `refused`: its grammar cannot be used, and why."""

    terms: SampleTerms
    draws: RequestDraws
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
    """Keeps a state per request until `keep_only` forgets it; for one thread.

    `dtype` of the logits is float32 or float64; others are converted to it.
    """

    def __init__(self, vocab_size: int, grammars: Grammars, dtype: torch.dtype) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._dtype = dtype
        scratch = Scratch.of(vocab_size, str(dtype).removeprefix("torch."))
        self._chooser = TokenChooser(scratch)
        self._scorer = TokenScorer(scratch)
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
        if logits.device.type != "cpu":
            logits, wanted = self._draw_there(logits, wanted, into)
        if wanted:
            self._sample(logits, wanted, into)

    def _draw_there(
        self, logits: torch.Tensor, wanted: list[SampleRow], into: Sampled
    ) -> tuple[torch.Tensor, list[SampleRow]]:
        """Draw tokens of rows that ask for nothing else; returns what is left."""
        plain = [
            row
            for row, one in enumerate(wanted)
            if one.known.terms.top_logprobs is None and not one.known.changes(one.index)
        ]
        if plain:
            draws = [(wanted[row].known.draws, wanted[row].index) for row in plain]
            terms = [one.terms for one, _ in draws]
            tokens = draw_on_device(logits, plain, terms, draw_numbers(draws))
            names = (wanted[row].request_id for row in plain)
            into.tokens.update(zip(names, tokens, strict=True))
        if len(plain) == len(wanted):
            return logits, []
        left = sorted(set(range(len(wanted))).difference(plain))
        return logits[left], [wanted[row] for row in left]

    def _sample(self, logits: torch.Tensor, wanted: list[SampleRow], into: Sampled) -> None:
        """All three steps on the host."""
        changed = [row for row, one in enumerate(wanted) if one.known.changes(one.index)]
        scored = [row for row, one in enumerate(wanted) if one.known.terms.top_logprobs is not None]
        rows = self._rows(logits)
        if changed:
            _change(rows, sorted(set(changed).difference(scored)), wanted, into)
            for row in sorted(set(changed).intersection(scored)):
                self._change_with_logprobs(rows, row, wanted, into)
        tokens, best = self._choose(rows, wanted)
        for row in changed:
            if best[row] == -np.inf and not np.isnan(rows[row]).any():
                into.failed.setdefault(wanted[row].request_id, NOTHING_LEFT)
        if scored:
            self._add_logprobs(rows, sorted(set(scored).difference(changed)), tokens, wanted, into)
        for one, token in zip(wanted, tokens, strict=True):
            if one.request_id not in into.failed:
                into.tokens[one.request_id] = token

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], top: int) -> LogprobRows:
        """How likely `token_ids[i]`, and the `top` best tokens, were after row i of `logits`."""
        rows = range(len(token_ids))
        return logprob_rows(self._scorer, self._rows(logits), rows, token_ids, top)

    def _rows(self, logits: torch.Tensor) -> Logits:
        """Logits in host memory; the same memory if they lie there."""
        rows: Logits = logits.to("cpu", self._dtype).numpy()
        return rows

    def _choose(self, logits: Logits, wanted: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
        """Step 3: a token of each row, and the best logit of each row."""
        draws = [(one.known.draws, one.index) for one in wanted]
        return draw_tokens(self._chooser, logits, draws)

    def _change_with_logprobs(
        self, logits: Logits, row: int, wanted: Sequence[SampleRow], into: Sampled
    ) -> None:
        """Steps 1 to 3 of a row whose raw logits are needed once its token is known."""
        raw = logits[row : row + 1].copy()
        _change(logits, (row,), wanted, into)
        one = wanted[row]
        top = one.known.terms.top_logprobs
        if one.request_id not in into.failed and top is not None:
            tokens, _ = self._choose(logits[row : row + 1], (one,))
            into.logprobs[one.request_id] = logprob_rows(self._scorer, raw, (0,), tokens, top)

    def _add_logprobs(
        self,
        logits: Logits,
        rows: Sequence[int],
        tokens: Sequence[int],
        wanted: Sequence[SampleRow],
        into: Sampled,
    ) -> None:
        """Log probabilities of the tokens of unchanged rows, by groups of equal `top_logprobs`."""
        for top in {wanted[row].known.terms.top_logprobs for row in rows}:
            assert top is not None
            alike = [row for row in rows if wanted[row].known.terms.top_logprobs == top]
            of_rows = [tokens[row] for row in alike]
            found = logprob_rows(self._scorer, logits, alike, of_rows, top)
            for place, row in enumerate(alike):
                into.logprobs[wanted[row].request_id] = found.rows(place, place + 1)

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
        draws = RequestDraws(terms.sampling)
        if not has_rules(terms):
            return KnownRequest(terms, draws, None)
        try:
            rules = SamplingRules(terms, self._vocab_size, self._grammars)
        except GrammarRefused as refused:
            return KnownRequest(terms, draws, None, Unusable(str(refused)))
        return KnownRequest(terms, draws, rules)


def _change(
    logits: Logits, rows: Sequence[int], wanted: Sequence[SampleRow], into: Sampled
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
            logits[row, list(known.terms.stop_ids)] = -np.inf
        else:
            known.rules.add_bias(logits[row])
            try:
                known.rules.forbid(logits[row], index)
            except GrammarRefused as refused:
                into.failed[request_id] = str(refused)
